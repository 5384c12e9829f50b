"""Translates Megatron's flags for precision and attention; predictions read all other settings from the command."""

from __future__ import annotations

from typing import Any

from flagcore.engines.megatron.importing.arguments import Flags

NOT_PREDICTED = {
    "_per_stage": "all stages recompute alike",
    "schedules_method": "1F1B, interleaved with virtual stages",
    "moe_fb_overlap": "experts communicate between the products",
    "rampup_batch_size": "all steps have the full batch",
}
"""Parts of the names of flags that predictions leave out, and what they assume instead."""

_DROPOUTS = ("attention_dropout", "hidden_dropout")


def options(flags: Flags, *, on_meshes: bool = False) -> dict[str, Any]:
    """Return the keys of `train` that a spec needs in addition to the command. Meshes have the recompute of stages."""
    result: dict[str, Any] = {"precision": _precision(flags)}
    has_flash, backend = flags.get("use_flash_attn", flags.get("use_flash_attention")), flags.get("attention_backend")
    if backend in ("unfused", "local") or (has_flash is False and flags.get("transformer_impl") == "local"):
        result["attention"] = "unfused"
    elif backend in ("flash", "fused") or (backend is None and has_flash):
        result["attention"] = "flash"
    for key in ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"):
        if (layers := flags.get(key)) is not None:
            flags.note(key, f"{layers} applies to all candidates: only pipelines that it fits are tried", "train")
    for name in flags.names():
        of_mesh = on_meshes and name.endswith("_per_stage_micro_batch")
        if why := next((why for part, why in NOT_PREDICTED.items() if part in name and not of_mesh), ""):
            flags.note(name, f"not in the predictions: {why}", "train")
    settings: dict[str, Any] = {name: 0.1 for name in _DROPOUTS if not flags.has(name)}  # Megatron's default
    if flags.get("peft_type") is not None:
        settings["trainable"] = "adapters"
    if settings:
        result["settings"] = settings
    return result


def _precision(flags: Flags) -> str:
    precision = "fp32"
    for name in ("fp16", "bf16"):
        value = flags.get(name)
        if not isinstance(value, (bool, type(None))):
            flags.source.report(flags.key(name), "must be true or false", value=value)
        precision = name if value else precision
    fp8_format, recipe = flags.get("fp8", flags.get("fp8_format")), flags.get("fp8_recipe")
    if not fp8_format:
        return precision
    if recipe not in (None, "mxfp8"):
        flags.note("fp8_recipe", f"{recipe}: all recipes but mxfp8 are predicted alike", "train.precision")
    return "mxfp8" if recipe == "mxfp8" else "fp8"
