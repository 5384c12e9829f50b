"""What Megatron refuses of a candidate because of the task's settings. Each rule has the name of its setting.

Sources: megatron-core 0.16 `transformer_config.py`, `distrib_optimizer.py`; Megatron-LM core_v0.16 `arguments.py`.
"""

from __future__ import annotations

from flagcore.domain.space import BoolArray, Columns, Rule
from flagcore.domain.spec import Task
from flagcore.workloads.megatron.knobs import FULL
from flagcore.workloads.megatron.options import numbers, settings_in_force
from flagcore.workloads.megatron.rules import DIST_OPT, EP, GRANULARITY, PP, RECOMPUTE, SP, VIRTUAL
from flagcore.workloads.megatron.split import Split

STAGES = "recompute_num_layers_per_stage"
EXPERT_OVERLAP = "overlap_moe_expert_parallel_comm"


def setting_rules(task: Task) -> tuple[Rule, ...]:
    """Return the rules of those settings that are on."""
    given, split = settings_in_force(task.spec.train), Split.of(task)
    sharded = bool(given.get("use_megatron_fsdp"))
    per_stage, offloaded = numbers(given.get(STAGES)), numbers(given.get("offload_stages"))

    def no_sharding(c: Columns) -> BoolArray:
        missing: BoolArray = (c[DIST_OPT] == 0) & (not sharded)
        return missing

    def recomputes_fully(c: Columns) -> BoolArray:
        fully: BoolArray = (c[RECOMPUTE] == 1) & (c[GRANULARITY] == FULL)
        return fully

    def no_chunks(c: Columns) -> BoolArray:
        one: BoolArray = (c[PP] > 1) & (split.virtual(c) == 1)
        return one

    known = (
        *(
            Rule(name=name, knobs=(DIST_OPT,), says=f"{name} needs {DIST_OPT}", broken=no_sharding)
            for name in ("overlap_param_gather", "fp8_param_gather", "use_precision_aware_optimizer")
        ),
        Rule(name="tp_comm_overlap", knobs=(SP,), says=f"tp_comm_overlap needs {SP}", broken=lambda c: c[SP] == 0),
        Rule(
            name=EXPERT_OVERLAP,
            knobs=(PP, EP, VIRTUAL, RECOMPUTE, GRANULARITY),
            says=f"{EXPERT_OVERLAP} needs {EP} > 1, virtual stages where {PP} > 1, and no full recompute",
            broken=lambda c: (c[EP] == 1) | recomputes_fully(c) | no_chunks(c),
        ),
        Rule(
            name=STAGES,
            knobs=(PP, RECOMPUTE, GRANULARITY),
            says=f"{STAGES} needs full recompute and a number for each of the {PP} stages",
            broken=lambda c: (c[PP] != len(per_stage)) | ~recomputes_fully(c),
        ),
        Rule(
            name="offload_stages",
            knobs=(PP,),
            says=f"offload_stages must be below {PP}",
            broken=lambda c: c[PP] <= max(offloaded, default=-1),
        ),
        Rule(
            name="pipeline_schedule",
            knobs=(PP, VIRTUAL),
            says="pipeline_schedule: interleaved needs virtual stages",
            broken=lambda c: no_chunks(c) & ("interleaved" in str(given.get("pipeline_schedule")).lower()),
        ),
    )
    return tuple(rule for rule in known if given.get(rule.name))
