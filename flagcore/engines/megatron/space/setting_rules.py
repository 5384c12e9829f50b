"""Megatron's rules about settings. Each rule is named after its setting.

Sources: megatron-core 0.16 `transformer_config.py`, `distrib_optimizer.py`; Megatron-LM core_v0.16 `arguments.py`.
"""

from collections.abc import Iterator

import numpy as np

from flagcore.domain.space import BoolArray, Columns, Rule
from flagcore.domain.spec import SettingValue, Task
from flagcore.engines.megatron.layers.split import LAYERS_PER_VIRTUAL, SPLIT, Split
from flagcore.engines.megatron.space.knobs import FULL
from flagcore.engines.megatron.space.options import Settings, numbers, precision, schedule, settings_in_force
from flagcore.engines.megatron.space.rules import (
    DIST_OPT,
    DIST_OPT_SETTINGS,
    DP,
    EP,
    GRANULARITY,
    MBS,
    PP,
    RECOMPUTE,
    SP,
    recomputes,
)
from flagcore.physics.pipelines import SCHEDULES

EXPERT_OVERLAP = "overlap_moe_expert_parallel_comm"


def setting_rules(task: Task) -> tuple[Rule, ...]:
    """Return the rules of the enabled settings, without those that flagcore assumes for production.

    Assumed settings are used only by candidates for which they are legal, so they make no candidate illegal.
    """
    return tuple(rule for rule in settings_with_rules(task) if rule.name not in task.spec.train.assumed)


def settings_with_rules(task: Task) -> tuple[Rule, ...]:
    """Return the rules of all enabled settings, including those that flagcore assumes for production."""
    settings, split = settings_in_force(task.spec), Split.from_task(task)
    sharded, depths = bool(settings.get("use_megatron_fsdp")), task.spec.model.mtp_num_layers
    offloaded = numbers(settings.get("offload_stages"))

    def no_optimizer(c: Columns) -> BoolArray:
        is_missing: BoolArray = (c[DIST_OPT] == 0) & (not sharded)
        return is_missing

    rules = (
        *(
            Rule(name=name, knobs=(DIST_OPT,), message=f"{name} needs {DIST_OPT}", broken=no_optimizer)
            for name in DIST_OPT_SETTINGS
        ),
        Rule(name="tp_comm_overlap", knobs=(SP,), message=f"tp_comm_overlap needs {SP}", broken=lambda c: c[SP] == 0),
        Rule(
            name=EXPERT_OVERLAP,
            knobs=(PP, SPLIT, EP, LAYERS_PER_VIRTUAL, RECOMPUTE, GRANULARITY),
            message=f"{EXPERT_OVERLAP} needs {EP} > 1, virtual stages where {PP} > 1, and no full recompute; with "
            f"multi-token prediction also {PP} > 1 and mtp_num_layers: 1",
            broken=lambda c: (
                (c[EP] == 1)
                | recomputes(c, FULL)
                | ((c[PP] > 1) & (split.virtual(c) == 1))
                | ((c[PP] == 1) & (depths > 0))
                | (depths > 1)
            ),
        ),
        Rule(
            name="offload_stages",
            knobs=(PP,),
            message=f"offload_stages must be below {PP}",
            broken=lambda c: c[PP] <= max(offloaded, default=-1),
        ),
        _schedule_rule(settings.get("pipeline_schedule"), split, task.spec.train.global_batch_size),
        *_requirement_rules(task, settings),
    )
    return tuple(rule for rule in rules if settings.get(rule.name))


def _requirement_rules(task: Task, settings: Settings) -> Iterator[Rule]:
    """Yield a rule that rejects every candidate, for each setting that requires another setting that is off."""
    requirements = {
        "overlap_param_gather": ("overlap_grad_reduce", settings.get("overlap_grad_reduce")),
        "moe_flex_dispatcher_backend": (
            "moe_token_dispatcher_type: flex",
            settings.get("moe_token_dispatcher_type") == "flex",
        ),
        "fp8_recipe": ("fp8_format", "fp8" in precision(task.spec.train, settings)),
        "cuda_graph_scope": ("cuda_graph_impl", settings.get("cuda_graph_impl", "none") != "none"),
    }
    for name, (requirement, is_met) in requirements.items():
        if not is_met and name in task.spec.train.settings:
            message = f"{name} needs {requirement}"
            yield Rule(name=name, knobs=(DP,), message=message, broken=lambda c: np.ones(c[DP].shape, dtype=np.bool_))


def _schedule_rule(setting: SettingValue, split: Split, batch: int) -> Rule:
    """Return the rule about the virtual stages of a schedule.

    Interleaved schedules require virtual stages, 1F1B allows any number, and all others have a fixed number. DualPipe
    and DualPipeV need two micro-batches per stage, DualPipe even numbers of stages and of micro-batches (source: its
    repository).
    """
    name = schedule(setting)
    min_virtual = 2 if name is None and str(setting or "1f1b").lower() != "1f1b" else 1
    fixed_virtual = SCHEDULES[name].parts if name else None
    is_dual = name in ("dualpipe", "dualpipev")
    virtual_stages = "virtual stages" if fixed_virtual is None else f"{fixed_virtual} virtual stages or none"
    message = f"pipeline_schedule: {setting} needs {virtual_stages}"
    if name == "dualpipev":
        message += ", and at least two micro-batches per stage"
    if name == "dualpipe":
        message += ", even numbers of stages and of micro-batches, and at least two micro-batches per stage"

    def broken(c: Columns) -> BoolArray:
        virtual = split.virtual(c)
        wrong = (virtual < min_virtual) if fixed_virtual is None else (virtual > 1) & (virtual != fixed_virtual)
        if is_dual:
            microbatches = batch // np.maximum(c[MBS] * c[DP], 1)
            wrong |= microbatches < 2 * c[PP]
            if name == "dualpipe":
                wrong |= (c[PP] % 2 != 0) | (microbatches % 2 != 0)
        result: BoolArray = (c[PP] > 1) & wrong
        return result

    knobs = (PP, SPLIT, LAYERS_PER_VIRTUAL, DP, MBS) if is_dual else (PP, SPLIT, LAYERS_PER_VIRTUAL)
    return Rule(name="pipeline_schedule", knobs=knobs, message=message, broken=broken)
