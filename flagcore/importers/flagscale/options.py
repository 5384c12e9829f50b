"""Megatron's flags for precision, attention, implementation and settings."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from flagcore.engines.megatron.settings import SETTINGS
from flagcore.engines.megatron.trial_program import trial_runs
from flagcore.errors import SpecError
from flagcore.importers.flagscale.engines import TABLES
from flagcore.importers.flagscale.source import Flags
from flagcore.spec.knobs import settings_of, settings_section

_RENAMED_SETTINGS = {
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
}
_DROPOUTS = ("attention_dropout", "hidden_dropout")
_SETTING_NAMES = (*(knob.name for knob in SETTINGS), *_RENAMED_SETTINGS)
RELEVANT: Collection[str] = (*_SETTING_NAMES, "peft_type", "bf16", "fp16", "fp8", "fp8_recipe")
"""Flags of this module, which are read in every section."""
NO_INFLUENCE = frozenset(TABLES["no_influence"])


def options(flags: Flags, *, nodes: int) -> dict[str, Any]:
    """Return the keys of `train` except engine and sizes. Settings that trials cannot apply are dropped on one node.

    On one node flagcore's own trial program trains, with layers of megatron-core and without overlap. On more nodes it
    cannot start trials, and predictions use all settings.
    """
    runs = nodes == 1
    precision = _precision(flags, runs)
    given = flags.take("transformer_impl")
    implementation = given or "transformer_engine"
    fused, backend = flags.take("use_flash_attn", flags.take("use_flash_attention")), flags.take("attention_backend")
    found: dict[str, Any] = {"precision": precision}
    if backend in ("unfused", "local") or (fused is False and implementation == "local"):
        found["attention"] = "unfused"
    elif backend in ("flash", "fused") or (backend is None and fused):
        found["attention"] = "flash"
    if backend is not None and fused is not None:
        flags.note("use_flash_attn", f"dropped ({fused}): attention_backend is given", "train")
        fused = None
    for key, value in (("attention_backend", backend), ("use_flash_attn", fused)):
        if value is not None and "attention" not in found:
            flags.note(key, f"dropped ({value}): attention is fused where the devices can", "train")
    if not runs and implementation in ("local", "transformer_engine"):
        found["implementation"] = implementation
        text = "trials on several nodes need train.command; `flag estimate` predicts runs of Megatron-LM"
        flags.source.note("experiment.runner.nnodes", text, "train")
    elif implementation != "local":
        what = f"dropped ({implementation})" if given else "is transformer_engine by default"
        text = f"{what}: trials use megatron-core's own layers; train.command may use others"
        flags.note("transformer_impl", text, "train")
    if settings := _settings(flags, runs):
        found["settings"] = settings
    _note_unused(flags)
    return found


def _precision(flags: Flags, runs: bool) -> str:
    wide, given = "fp32", {name: flags.take(name) for name in ("fp16", "bf16")}
    for name, value in given.items():
        if not isinstance(value, (bool, type(None))):
            flags.source.report(flags.key(name), "must be true or false", value=value)
        wide = name if value else wide
    key = "fp8" if flags.has("fp8") else "fp8_format"
    narrow, recipe = flags.take("fp8", flags.take("fp8_format")), flags.take("fp8_recipe")
    at = "train.precision"
    if narrow and runs:
        text = f"dropped ({narrow}): flagcore's trial program uses {wide}; with train.command set fp8 here"
        flags.note(key, text, at)
    if recipe is not None and (runs or not narrow):
        flags.note("fp8_recipe", f"dropped ({recipe}): fp8 is off", at)
    if runs or not narrow:
        return wide
    if recipe not in (None, "mxfp8"):
        flags.note("fp8_recipe", f"dropped ({recipe}): all recipes but mxfp8 are predicted alike", at)
    flags.note("fp16" if wide == "fp16" else "bf16", f"{wide} is what fp8 leaves as it is", at)
    return "mxfp8" if recipe == "mxfp8" else "fp8"


def _settings(flags: Flags, runs: bool) -> dict[str, Any]:
    """Return the settings; if trials can run, only those that the trial program supports."""
    found: dict[str, Any] = {}
    for name, value in flags.given():
        if "_per_stage" in name:
            flags.take(name)
            flags.note(name, f"dropped ({value}): all stages recompute alike", "train.settings")
    if flags.take("peft_type") is not None:
        if runs:
            text = "dropped: flagcore's trial program trains all weights; set it with train.command"
            flags.note("peft_type", text, "train.settings")
        else:
            found["trainable"] = "adapters"
    for name in _SETTING_NAMES:
        if (value := flags.take(name)) is None:
            continue
        key = _RENAMED_SETTINGS.get(name, name)
        if not _valid(key, value):
            flags.note(name, f"dropped: {value!r} is invalid for train.settings.{key}", "train.settings")
        elif runs and not trial_runs(key, value):
            text = f"dropped ({value}): flagcore's trial program does not support it; set it with train.command"
            flags.note(name, text, "train.settings")
        else:
            found[key] = value
            if key in _RENAMED_SETTINGS.values():
                text = f"{value} applies to all candidates: only pipelines that it fits are tried"
                flags.note(name, text, f"train.settings.{key}")
    if runs:
        _drop_grouped_recompute(flags, found)
    else:
        found |= {name: 0.1 for name in _DROPOUTS if name not in found}  # Megatron's own
    return found


def _drop_grouped_recompute(flags: Flags, found: dict[str, Any]) -> None:
    """Remove moe_act from recompute_modules if there is no grouped GEMM, which it needs."""
    names = found.get("recompute_modules")
    names = names.replace(",", " ").split() if isinstance(names, str) else names
    if not isinstance(names, list) or "moe_act" not in names or found.get("moe_grouped_gemm"):
        return
    flags.note("recompute_modules", "moe_act is dropped: it needs moe_grouped_gemm", "train.settings.recompute_modules")
    found["recompute_modules"] = [each for each in names if each != "moe_act"]
    if not found["recompute_modules"]:
        del found["recompute_modules"]


def _valid(key: str, value: object) -> bool:
    with suppress(ValidationError, SpecError):
        settings_of(settings_section(SETTINGS).model_validate({key: value}), SETTINGS)
        return True
    return False


def _note_unused(flags: Flags) -> None:
    left = flags.take_all()
    known = [key for name, (key, _) in left.items() if name in NO_INFLUENCE or name.endswith(("_interval", "_samples"))]
    if known:
        flags.source.note(", ".join(known), "dropped: next to no influence on memory and time", "train")
    for key, value in left.values():
        if key not in known and value is not None:
            flags.source.note(key, f"dropped ({value}): unknown to flagcore", "train")
