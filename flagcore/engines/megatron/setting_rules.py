"""Rules of Megatron that follow from the task's settings. Each rule has the name of its setting.

Sources: megatron-core 0.16 `transformer_config.py`, `distrib_optimizer.py`; Megatron-LM core_v0.16 `arguments.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from flagcore.domain.space import BoolArray, Columns, Rule
from flagcore.domain.spec import SettingValue, Task
from flagcore.engines.megatron.knobs import FULL
from flagcore.engines.megatron.options import Settings, numbers, precision, schedule, settings_in_force
from flagcore.engines.megatron.rules import (
    DIST_OPT,
    DP,
    EP,
    GRANULARITY,
    MBS,
    NEED_DIST_OPT,
    PP,
    RECOMPUTE,
    SP,
    VIRTUAL,
)
from flagcore.engines.megatron.split import SPLIT, Split
from flagcore.physics.schedules.catalogue import SCHEDULES

STAGES = "recompute_num_layers_per_stage"
EXPERT_OVERLAP = "overlap_moe_expert_parallel_comm"


def setting_rules(task: Task) -> tuple[Rule, ...]:
    """Return the rules of those settings that are on, and not just assumed where they are legal."""
    return tuple(rule for rule in settings_with_rules(task) if rule.name not in task.spec.train.assumed)


def settings_with_rules(task: Task) -> tuple[Rule, ...]:
    """Return the rules of all settings that are on."""
    settings, split = settings_in_force(task.spec), Split.of(task)
    sharded, depths = bool(settings.get("use_megatron_fsdp")), task.spec.model.mtp_num_layers
    per_stage, offloaded = numbers(settings.get(STAGES)), numbers(settings.get("offload_stages"))

    def no_optimizer(c: Columns) -> BoolArray:
        missing: BoolArray = (c[DIST_OPT] == 0) & (not sharded)
        return missing

    rules = (
        *(
            Rule(name=name, knobs=(DIST_OPT,), message=f"{name} needs {DIST_OPT}", broken=no_optimizer)
            for name in NEED_DIST_OPT
        ),
        Rule(name="tp_comm_overlap", knobs=(SP,), message=f"tp_comm_overlap needs {SP}", broken=lambda c: c[SP] == 0),
        Rule(
            name=EXPERT_OVERLAP,
            knobs=(PP, SPLIT, EP, VIRTUAL, RECOMPUTE, GRANULARITY),
            message=f"{EXPERT_OVERLAP} needs {EP} > 1, virtual stages where {PP} > 1, and no full recompute; with "
            f"multi-token prediction also {PP} > 1 and mtp_num_layers: 1",
            broken=lambda c: (
                (c[EP] == 1)
                | _recomputes_fully(c)
                | ((c[PP] > 1) & (split.virtual(c) == 1))
                | ((c[PP] == 1) & (depths > 0))
                | (depths > 1)
            ),
        ),
        Rule(
            name=STAGES,
            knobs=(PP, RECOMPUTE, GRANULARITY),
            message=f"{STAGES} needs full recompute and a number for each of the {PP} stages",
            broken=lambda c: (c[PP] != len(per_stage)) | ~_recomputes_fully(c),
        ),
        Rule(
            name="offload_stages",
            knobs=(PP,),
            message=f"offload_stages must be below {PP}",
            broken=lambda c: c[PP] <= max(offloaded, default=-1),
        ),
        _schedule_rule(settings.get("pipeline_schedule"), split, task.spec.train.global_batch_size),
        *_dependent(task, settings),
    )
    return tuple(rule for rule in rules if settings.get(rule.name))


def _recomputes_fully(c: Columns) -> BoolArray:
    fully: BoolArray = (c[RECOMPUTE] == 1) & (c[GRANULARITY] == FULL)
    return fully


def _dependent(task: Task, settings: Settings) -> Iterator[Rule]:
    """Yield a rule that no candidate keeps for each setting that does nothing, or is refused, without another."""
    others = {
        "overlap_param_gather": ("overlap_grad_reduce", settings.get("overlap_grad_reduce")),
        "moe_flex_dispatcher_backend": (
            "moe_token_dispatcher_type: flex",
            settings.get("moe_token_dispatcher_type") == "flex",
        ),
        "fp8_recipe": ("fp8_format", "fp8" in precision(task.spec.train, settings)),
        "cuda_graph_scope": ("cuda_graph_impl", settings.get("cuda_graph_impl", "none") != "none"),
    }
    for name, (other, given) in others.items():
        if not given and name in task.spec.train.settings:
            yield Rule(name=name, knobs=(DP,), message=f"{name} needs {other}", broken=_everything)


def _everything(c: Columns) -> BoolArray:
    return np.ones(c[DP].shape, dtype=np.bool_)


def _schedule_rule(wanted: SettingValue, split: Split, batch: int) -> Rule:
    """Return how many virtual stages a schedule takes: interleaved some, 1F1B any, all others their own number.

    DualPipe and DualPipeV take two micro-batches a stage or more, DualPipe an even number of either (its repository).
    """
    name = schedule(wanted)
    least = 2 if name is None and str(wanted or "1f1b").lower() != "1f1b" else 1
    most = SCHEDULES[name].parts if name else None
    dual = name in ("dualpipe", "dualpipev")
    message = (
        f"pipeline_schedule: {wanted} needs {'virtual stages' if most is None else f'{most} virtual stages or none'}"
    )
    if name == "dualpipev":
        message += ", and two micro-batches a stage or more"
    if name == "dualpipe":
        message += ", an even number of stages and of micro-batches, and two micro-batches a stage or more"

    def broken(c: Columns) -> BoolArray:
        virtual = split.virtual(c)
        wrong = (virtual < least) if most is None else (virtual > 1) & (virtual != most)
        if dual:
            microbatches = batch // np.maximum(c[MBS] * c[DP], 1)
            wrong |= microbatches < 2 * c[PP]
            if name == "dualpipe":
                wrong |= (c[PP] % 2 != 0) | (microbatches % 2 != 0)
        result: BoolArray = (c[PP] > 1) & wrong
        return result

    knobs = (PP, SPLIT, VIRTUAL, DP, MBS) if dual else (PP, SPLIT, VIRTUAL)
    return Rule(name="pipeline_schedule", knobs=knobs, message=message, broken=broken)
