"""The rest of Megatron's flags: precision, attention, whose layers, and settings."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from flagcore.engines.megatron.settings import SETTINGS
from flagcore.errors import SpecError
from flagcore.importers.flagscale.flat import Flat
from flagcore.spec.knobs import settings_of, settings_section

_SPELT = {
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
}
_BY_TRIALS = ("recompute_modules", "expert_tensor_parallel_size", *_SPELT.values())
_AS_TRIALS = {
    "accumulate_allreduce_grads_in_fp32": True,
    "moe_token_dispatcher_type": "alltoall",
    "cp_comm_type": "all_gather",
    "overlap_p2p_comm": True,
}
"""What flagcore's own trial program does without being told; all else that it could be told is off there."""
_DROPOUTS = ("attention_dropout", "hidden_dropout")
_NAMES = (*(knob.name for knob in SETTINGS), *_SPELT)
INFLUENCE: Collection[str] = (*_NAMES, "peft_type", "bf16", "fp16", "fp8", "fp8_recipe")
"""Flags of this module that count in whatever section they stand."""
NO_INFLUENCE = {
    "max_position_embeddings",
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "rotary_scaling_factor",
    "use_rotary_position_embeddings",
    "use_rope_scaling",
    "normalization",
    "norm_epsilon",
    "norm_init_weight",
    "init_method_std",
    "apply_layernorm_1p",
    "attention_softmax_in_fp32",
    "clip_grad",
    "weight_decay",
    "seed",
    "train_samples",
    "train_iters",
    "eval_iters",
    "eval_interval",
    "finetune",
    "no_load_optim",
    "no_load_rng",
    "make_vocab_size_divisible_by",
    "initial_loss_scale",
    "loss_scale",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_router_load_balancing_type",
    "mtp_loss_scaling_factor",
    "distributed_backend",
    "distributed_timeout_minutes",
    "no_position_embedding",
    "rotary_interleaved_patch",
    "rotary_seq_len_interpolation_factor",
    "rope_scaling_factor",
    "mrope_section",
    "min_loss_scale",
    "reset_position_ids",
    "reset_attention_mask",
    "eod_mask_loss",
    "no_rope_fusion",
    "no_masked_softmax_fusion",
    "no_gradient_accumulation_fusion",
    "calculate_per_token_loss",
    "moe_router_score_function",
    "moe_router_enable_expert_bias",
    "moe_router_bias_update_rate",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_topk_scaling_factor",
    "no_shared_fs",
    "num_workers",
    "profile",
    "profile_ranks",
    "profile_step_start",
    "profile_step_end",
    "tensorboard_dir",
    "use_mcore_models",
    "use_te",
    "no_save_optim",
    "no_save_rng",
    "deterministic_mode",
    "manual_gc",
    "moe_router_dtype",
    "moe_router_padding_for_fp8",
    "moe_permute_fusion",
}


def options(flat: Flat, *, nodes: int) -> dict[str, Any]:
    """Return the keys of `train` besides engine and sizes. Of settings only those that can run are kept, if any can.

    On one node flagcore's own trial program trains, with layers of megatron-core and without overlap. Trials on more
    nodes it cannot start: what is left is a prediction, which knows them all.
    """
    runs = nodes == 1
    precision = _precision(flat, runs)
    given = flat.take("transformer_impl")
    implementation = given or "transformer_engine"
    fused, backend = flat.take("use_flash_attn", flat.take("use_flash_attention")), flat.take("attention_backend")
    found: dict[str, Any] = {"precision": precision}
    if backend in ("unfused", "local") or (fused is False and implementation == "local"):
        found["attention"] = "unfused"
    elif backend in ("flash", "fused") or (backend is None and fused):
        found["attention"] = "flash"
    if backend is not None and fused is not None:
        flat.note("use_flash_attn", f"dropped ({fused}): attention_backend says it", "train")
        fused = None
    for key, value in (("attention_backend", backend), ("use_flash_attn", fused)):
        if value is not None and "attention" not in found:
            flat.note(key, f"dropped ({value}): attention is fused where the devices can", "train")
    if not runs and implementation in ("local", "transformer_engine"):
        found["implementation"] = implementation
        text = "trials on several nodes need a train.command; `flag estimate` predicts as Megatron-LM would run it"
        flat.source.note("experiment.runner.nnodes", text, "train")
    elif implementation != "local":
        what = f"dropped ({implementation})" if given else "is transformer_engine by itself"
        text = f"{what}: trials have megatron-core's own layers; a train.command may have others"
        flat.note("transformer_impl", text, "train")
    if settings := _settings(flat, runs, precision):
        found["settings"] = settings
    _tell_the_rest(flat)
    return found


def _precision(flat: Flat, runs: bool) -> str:
    wide = "bf16" if flat.take("bf16") else "fp16" if flat.take("fp16") else "fp32"
    key = "fp8" if flat.has("fp8") else "fp8_format"
    narrow, recipe = flat.take("fp8", flat.take("fp8_format")), flat.take("fp8_recipe")
    at = "train.precision"
    if narrow and runs:
        text = f"dropped ({narrow}): trials by flagcore's own program have {wide}; with a train.command give fp8 here"
        flat.note(key, text, at)
    if recipe is not None and (runs or not narrow):
        flat.note("fp8_recipe", f"dropped ({recipe}): fp8 is off", at)
    if runs or not narrow:
        return wide
    if recipe not in (None, "mxfp8"):
        flat.note("fp8_recipe", f"dropped ({recipe}): all recipes but mxfp8 are predicted alike", at)
    flat.note("fp16" if wide == "fp16" else "bf16", f"{wide} is what fp8 leaves as it is", at)
    return "mxfp8" if recipe == "mxfp8" else "fp8"


def _settings(flat: Flat, runs: bool, precision: str) -> dict[str, Any]:
    """Return the settings that are known; where trials run, only what the trial program does or can be told."""
    found: dict[str, Any] = {}
    for name, value in flat.given():
        if "_per_stage" in name:
            flat.take(name)
            flat.note(name, f"dropped ({value}): all stages recompute alike", "train.settings")
    if flat.take("peft_type") is not None:
        if runs:
            text = "dropped: flagcore's own trial program trains all weights; with a train.command yours may not"
            flat.note("peft_type", text, "train.settings")
        else:
            found["trainable"] = "adapters"
    for name in _NAMES:
        if (value := flat.take(name)) is None:
            continue
        key = _SPELT.get(name, name)
        if not _valid(key, value):
            flat.note(name, f"dropped: {value!r} is no value of train.settings.{key}", "train.settings")
        elif runs and not _trial_does(key, value, precision):
            text = f"dropped ({value}): flagcore's own trial program cannot; with a train.command give it that"
            flat.note(name, text, "train.settings")
        else:
            found[key] = value
            if key in _SPELT.values():
                text = (
                    f"{value} holds for all candidates, so only pipelines that it suits are tried, and no run without"
                )
                flat.note(name, text, f"train.settings.{key}")
    if runs:
        _without_grouped(flat, found)
    else:
        found |= {name: 0.1 for name in _DROPOUTS if name not in found}  # Megatron's own
    return found


def _without_grouped(flat: Flat, found: dict[str, Any]) -> None:
    """Take out of what is recomputed the activation of experts, which only a grouped product has, if that is gone."""
    names = found.get("recompute_modules")
    names = names.replace(",", " ").split() if isinstance(names, str) else names
    if not isinstance(names, list) or "moe_act" not in names or found.get("moe_grouped_gemm"):
        return
    flat.note("recompute_modules", "moe_act is dropped: it needs moe_grouped_gemm", "train.settings.recompute_modules")
    found["recompute_modules"] = [each for each in names if each != "moe_act"]
    if not found["recompute_modules"]:
        del found["recompute_modules"]


def _valid(key: str, value: object) -> bool:
    with suppress(ValidationError, SpecError):
        settings_of(settings_section(SETTINGS).model_validate({key: value}), SETTINGS)
        return True
    return False


def _trial_does(key: str, value: object, precision: str) -> bool:
    if key == "accumulate_allreduce_grads_in_fp32":
        return value is (precision == "bf16")
    return key in _BY_TRIALS or _AS_TRIALS.get(key) == value or value in (False, "fp32", "none")


def _tell_the_rest(flat: Flat) -> None:
    left = flat.take_all()
    known = [key for name, (key, _) in left.items() if name in NO_INFLUENCE or name.endswith(("_interval", "_samples"))]
    if known:
        flat.source.note(", ".join(known), "dropped: next to no influence on memory and time", "train")
    for key, value in left.values():
        if key not in known and value is not None:
            flat.source.note(key, f"dropped ({value}): not known to flagcore", "train")
