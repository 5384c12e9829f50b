"""Production defaults from published recipes, for plans and for job records that omit settings.

Sources: "General Performance Tips" and "Fine-grained Recomputation" in Megatron-LM's `core/transformer/moe/README.md`;
Megatron-Bridge's recipes (`comm_overlap.py`, `mixed_precision.py`);
`best_practice/DeepSeekV3` of yanring/Megatron-MoE-ModelZoo; the report of DeepSeek-V3 (arXiv 2412.19437, 3.2.3).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from flagcore.contracts import Platform
from flagcore.domain.candidate import Candidate
from flagcore.domain.engine import EngineSupport
from flagcore.domain.spec import SettingValue, Task, TrainSpec
from flagcore.engines.megatron.knobs import BY_NAME, candidate_columns
from flagcore.engines.megatron.options import check, settings_in_force
from flagcore.engines.megatron.release_check import release_problem
from flagcore.engines.megatron.setting_rules import EXPERT_OVERLAP, settings_with_rules
from flagcore.errors import SpecError

IMPLEMENTATION = "transformer_engine"


def overlaps(
    task: Task, kind: str, settings: Mapping[str, SettingValue], *, sharded: bool, sequence_parallel: bool
) -> dict[str, SettingValue]:
    """Return the settings that overlap communication with compute, and those of the experts' matrix products.

    `sharded` means with the distributed optimizer.
    """
    precision, dense = task.spec.train.precision, task.spec.model.num_moe_experts is None
    overlap_reduce = bool(settings.get("overlap_grad_reduce", sharded))
    is_eight_bit = precision in ("fp8", "mxfp8", "nvfp4") and "accumulate_allreduce_grads_in_fp32" not in settings
    narrow_gradients = overlap_reduce and sharded and kind == IMPLEMENTATION and is_eight_bit
    flash = task.spec.train.attention == "flash" and kind == IMPLEMENTATION
    return {
        "overlap_grad_reduce": overlap_reduce,
        "overlap_param_gather": overlap_reduce and sharded,
        "grad_reduce_in_bf16": narrow_gradients,  # most such runs would not fit otherwise
        "fp8_param_gather": narrow_gradients and precision != "nvfp4",
        "moe_grouped_gemm": kind != "local",
        "tp_comm_overlap": flash and sharded and sequence_parallel and dense,
    }


def as_in_production(platform: Platform) -> Platform:
    """Return `platform` with its vendor's implementation and the settings of recipes, unless the spec names a program.

    A setting is skipped if the spec sets or compares it, if the chip or the release does not support it, or if it
    contradicts another one.
    """
    task, kind = platform.task, platform.support.implementation
    train, spec = task.spec.train, task.spec
    is_open = train.command is None and train.implementation is None
    if not kind or not is_open or _refuses(platform.support, "implementation", kind):
        return platform
    train = replace(train, implementation=kind)
    set_keys, wanted = {*train.settings, *spec.space, *(spec.baseline or {})}, _recipe(task, kind)
    for key, value in wanted.items():
        if key in set_keys or not value or _refuses(platform.support, f"settings.{key}", value):
            continue
        if train.engine_version and release_problem(BY_NAME[key], value, train.engine_version):
            continue
        with suppress(SpecError):
            train = _with(task, train, key, value)
    return replace(platform, task=replace(task, spec=replace(spec, work=train)))


def assumed(task: Task, candidate: Candidate) -> dict[str, SettingValue]:
    """Return the assumed settings of a plan that are legal with a candidate and have an effect."""
    values, settings = candidate.as_dict(), task.spec.train.assumed
    unused = {key for key in settings for need in BY_NAME[key].requires if values[need.knob] not in need.one_of}
    columns, legal = candidate_columns(values), {key: settings[key] for key in settings if key not in unused}
    for rule in settings_with_rules(task) if legal else ():
        if rule.name in legal and rule.broken(columns).any():
            del legal[rule.name]
    return legal


def _recipe(task: Task, kind: str) -> dict[str, SettingValue]:
    """Return the settings of recipes. Mixtures of experts recompute the modules that are cheap but store much."""
    model, settings = task.spec.model, task.spec.train.settings
    recipe = overlaps(task, kind, settings, sharded=True, sequence_parallel=True)
    recipe["cross_entropy_loss_fusion"] = True
    if model.num_moe_experts is None:
        return {**recipe, "moe_grouped_gemm": False}
    modules = "layernorm,moe_act" + (",mla_up_proj" if model.multi_latent_attention else "")
    if task.spec.train.precision == "fp8":
        recipe["fp8_recipe"] = "blockwise"  # delayed scaling, the default, excludes such recompute
    return {**recipe, "moe_token_dispatcher_type": "flex", EXPERT_OVERLAP: True, "recompute_modules": modules}


def _refuses(support: EngineSupport, knob: str, value: SettingValue) -> bool:
    return any(each.knob == knob and value in each.values for each in support.refused)


def _with(task: Task, train: TrainSpec, key: str, value: SettingValue) -> TrainSpec:
    """Return a job with one more assumed setting. Raises SpecError if it contradicts the others."""
    extended = replace(train, assumed={**train.assumed, key: value})
    check(task, settings_in_force(replace(task.spec, work=extended)))
    return extended
