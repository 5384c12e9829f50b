"""What production runs by default, from published recipes: for plans, and for job records that omit it.

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
    task: Task, kind: str, settings: Mapping[str, SettingValue], *, sharded: bool, split: bool
) -> dict[str, SettingValue]:
    """Return the settings of data and tensor parallelism and of the experts' products.

    `kind` is the implementation, `sharded` with the distributed optimizer, `split` with sequence parallelism.
    """
    precision, dense = task.spec.train.precision, task.spec.model.num_moe_experts is None
    reduces = bool(settings.get("overlap_grad_reduce", sharded))
    narrow = precision in ("fp8", "mxfp8", "nvfp4") and "accumulate_allreduce_grads_in_fp32" not in settings
    tuned = reduces and sharded and kind == IMPLEMENTATION and narrow
    fused = task.spec.train.attention == "flash" and sharded and split and dense and kind == IMPLEMENTATION
    return {
        "overlap_grad_reduce": reduces,
        "overlap_param_gather": reduces and sharded,
        "grad_reduce_in_bf16": tuned,  # most such runs would not fit otherwise
        "fp8_param_gather": tuned and precision != "nvfp4",
        "moe_grouped_gemm": kind != "local",
        "tp_comm_overlap": fused,
    }


def as_in_production(platform: Platform) -> Platform:
    """Return `platform` with the implementation of its chips' vendor and the settings of recipes, where none is named.

    A setting is left out that the spec sets or compares, that the chip or the release does not have, or that
    contradicts another one.
    """
    task, kind = platform.task, platform.support.implementation
    train, spec = task.spec.train, task.spec
    open_ = train.command is None and train.implementation is None
    if not kind or not open_ or _refuses(platform.support, "implementation", kind):
        return platform
    train = replace(train, implementation=kind)
    named, wanted = {*train.settings, *spec.space, *(spec.baseline or {})}, _recipe(task, kind)
    for key, value in wanted.items():
        if key in named or not value or _refuses(platform.support, f"settings.{key}", value):
            continue
        if train.engine_version and release_problem(BY_NAME[key], value, train.engine_version):
            continue
        with suppress(SpecError):
            train = _with(task, train, key, value)
    return replace(platform, task=replace(task, spec=replace(spec, work=train)))


def assumed(task: Task, candidate: Candidate) -> dict[str, SettingValue]:
    """Return the assumed settings of a plan that are legal with a candidate, and have an effect."""
    values, given = candidate.as_dict(), task.spec.train.assumed
    idle = {key for key in given for need in BY_NAME[key].requires if values[need.knob] not in need.one_of}
    columns, found = candidate_columns(values), {key: given[key] for key in given if key not in idle}
    for rule in settings_with_rules(task) if found else ():
        if rule.name in found and rule.broken(columns).any():
            del found[rule.name]
    return found


def _recipe(task: Task, kind: str) -> dict[str, SettingValue]:
    """Return the settings of recipes; of mixtures of experts they recompute what is cheap and stores much."""
    model, found = task.spec.model, overlaps(task, kind, task.spec.train.settings, sharded=True, split=True)
    found["cross_entropy_loss_fusion"] = True
    if model.num_moe_experts is None:
        return {**found, "moe_grouped_gemm": False}
    modules = "layernorm,moe_act" + (",mla_up_proj" if model.multi_latent_attention else "")
    if task.spec.train.precision == "fp8":
        found["fp8_recipe"] = "blockwise"  # delayed scaling, the default, excludes such recompute
    return {**found, "moe_token_dispatcher_type": "flex", EXPERT_OVERLAP: True, "recompute_modules": modules}


def _refuses(support: EngineSupport, knob: str, value: SettingValue) -> bool:
    return any(each.knob == knob and value in each.values for each in support.refused)


def _with(task: Task, train: TrainSpec, key: str, value: SettingValue) -> TrainSpec:
    """Return a job with one more assumed setting. Raises SpecError where it contradicts the others."""
    more = replace(train, assumed={**train.assumed, key: value})
    check(task, settings_in_force(replace(task.spec, work=more)))
    return more
