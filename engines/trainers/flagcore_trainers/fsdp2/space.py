"""The knobs of FSDP2, and its rules for legal candidates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from flagcore_models.layers import mixer_counts, product_counts
from flagcore_models.mixers.attention import Attention
from flagcore_training.knobs import RuleTable, read_knobs

from flagcore.domain.space import BoolArray, Columns, KnobValue, Merge, Rule
from flagcore.domain.spec import Spec, Task
from flagcore.errors import SpecError
from flagcore_trainers.fully_shard import (
    AC,
    COMPILE,
    CP,
    DUALPIPEV,
    EP,
    INTERLEAVED,
    MBS,
    OFFLOAD,
    PP,
    REDUCE,
    REPLICATE,
    RESHARD,
    SCHEDULE,
    SCHEDULES,
    SELECTIVE,
    SHARD,
    STATES,
    TP,
    ZBV,
    is_plain,
    missing_parts,
    parts,
)

KNOBS = read_knobs(__package__, scope=["space"], flag="")
PIPELINE_LAYERS = "pipeline_layers"
"""The rule that all stages have as many layers."""
ADAPTERS_ALONE = "adapters_alone"
"""The rule that adapters are not divided, unless a spec lists it."""
OF_ADAPTERS: Mapping[str, Sequence[KnobValue]] = {TP: (1,), PP: (1,), AC: ("none", "full")}
"""The values of a space with adapters, unless a spec lists others."""

NAMES = {"CP": CP, "EP": EP, "PP": PP, "TP": TP, "REPLICATE": REPLICATE, "SHARD": SHARD, "MBS": MBS, "AC": AC}
NAMES |= {"COMPILE": COMPILE, "OFFLOAD": OFFLOAD, "REDUCE": REDUCE, "RESHARD": RESHARD, "STATES": STATES}
NAMES |= {"SCHEDULE": SCHEDULE}
"""The names of knobs in `rules.yaml`, by their fields."""
rule = RuleTable(__package__, NAMES)


def check_model(task: Task) -> None:
    """Raise SpecError if the model has parts that predictions do not have."""
    if missing := missing_parts(task.spec.model):
        fix = "use engine: megatron, or your own program with engine: command"
        problem = f"has parts that the engine fsdp2 does not support: {', '.join(missing)}"
        raise SpecError(key="model", value=task.spec.model.name, problem=problem, fix=fix)


def rules(task: Task) -> tuple[Rule, ...]:
    """Return the legality rules. Raises SpecError for a model that the engine does not support."""
    check_model(task)
    devices, train, model = task.cluster.devices, task.spec.train, task.spec.model
    count, batch, length, precision = model.experts, train.global_batch_size, train.seq_length, train.precision
    divided = (each for each in product_counts(model) if each.split == "outputs")
    sizes = {model.vocab_size, *(mixer.heads for mixer in mixer_counts(model))}
    sizes |= {output.units or output.width for each in divided for output in each.layers}
    shared = math.gcd(*sizes)
    return (
        rule("world_size", lambda c: c[REPLICATE] * c[SHARD] * c[TP] * c[CP] * c[PP] != devices, devices=devices),
        rule("global_batch_size", lambda c: batch % (c[MBS] * c[REPLICATE] * c[SHARD]) != 0, batch=batch),
        rule("tensor_parallel", lambda c: shared % c[TP] != 0, shared=shared),
        rule(
            "sequence_length",
            lambda c: (length % (c[TP] * c[CP]) != 0) | ((c[CP] > 1) & (length % (2 * c[CP]) != 0)),
            length=length,
        ),
        rule("sharded_replicas", lambda c: (c[REPLICATE] > 1) & (c[SHARD] * c[CP] == 1)),
        rule("all_in_fp32", lambda c: ((c[REDUCE] == 2) | (c[STATES] == 2)) & (precision == "fp32")),
        *_pipeline_rules(task),
        *([_adapter_rule()] if train.adapter and not lists_others(task.spec) else ()),
        *(_expert_rules(count) if count else ()),
        *(() if is_plain(model) else (_layer_rule(task),)),
    )


def lists_others(spec: Spec) -> bool:
    """Return whether a spec with adapters has or lists a value of a knob that `OF_ADAPTERS` does not have."""
    given = {name: values for name, values in spec.space.items() if not isinstance(values, str)}
    return any(
        value not in usual
        for name, usual in OF_ADAPTERS.items()
        for value in (*given.get(name, ()), (spec.baseline or {}).get(name, usual[0]))
    )


def _adapter_rule() -> Rule:
    """Return the rule of adapters, which programs seldom divide."""
    return rule(ADAPTERS_ALONE, lambda c: (c[TP] > 1) | (c[PP] > 1) | (c[AC] == SELECTIVE))


def _layer_rule(task: Task) -> Rule:
    """Return the rule of layers other than attention over all tokens, whose division is not predicted.

    Heads with windows are divided by tensor parallelism.
    """
    divides = all(type(each) is Attention and not each.gate for each in mixer_counts(task.spec.model))
    tensor = "" if divides else f"{TP} = 1, "
    return rule(
        "layers_alone",
        lambda c: (
            ((c[TP] > 1) & (not divides)) | (c[CP] > 1) | (c[AC] == SELECTIVE) | ((c[PP] > 1) & (c[SCHEDULE] >= ZBV))
        ),
        tensor=tensor,
    )


def _expert_rules(count: int) -> tuple[Rule, ...]:
    """Return the rules of experts."""
    return (
        rule("expert_parallel", lambda c: (count % c[EP] != 0) | (c[SHARD] * c[CP] % c[EP] != 0), count=count),
        rule("experts_alone", lambda c: (c[TP] > 1) | ((c[PP] > 1) & (c[SCHEDULE] >= ZBV))),
    )


def _pipeline_rules(task: Task) -> tuple[Rule, ...]:
    """Return the rules of pipelines. Source: torch 2.13 `distributed/pipelining/schedules.py`."""
    model, batch = task.spec.model, task.spec.train.global_batch_size

    def microbatches_broken(c: Columns) -> BoolArray:
        count, name = batch // np.maximum(c[MBS] * c[REPLICATE] * c[SHARD], 1), c[SCHEDULE]
        short = count < c[PP] * np.where(name == DUALPIPEV, 2, 1)
        uneven = (name == INTERLEAVED) & (count % np.maximum(count // c[PP], 1) != 0)
        return np.asarray((c[PP] > 1) & (short | uneven))

    return (
        rule(
            PIPELINE_LAYERS,
            lambda c: (c[PP] > 1) & (model.num_layers % (c[PP] * parts(c)) != 0),
            num_layers=model.num_layers,
            schedule=SCHEDULES[0],
        ),
        rule("pipeline_microbatches", microbatches_broken),
        rule("pipeline_weights", lambda c: (c[PP] > 1) & ((c[RESHARD] > 0) | (c[OFFLOAD] > 0))),
        rule("pipeline_head", lambda c: (c[PP] > 1) & (not model.untie_embeddings_and_output_weights)),
        rule(
            "split_backward",
            lambda c: (c[PP] > 1) & (c[SCHEDULE] >= ZBV) & ((c[COMPILE] > 0) | (c[AC] >= SELECTIVE)),
            words=" and ".join(SCHEDULES[2:]),
        ),
    )


def merges(task: Task) -> tuple[Merge, ...]:
    """Return the merges: one rank always has all weights, and without a pipeline there is no schedule."""

    def reshard(columns: Columns) -> Columns:
        alone = (columns[SHARD] * columns[CP] == 1) & (columns[PP] == 1)
        return {RESHARD: np.where(alone, 1, columns[RESHARD])}

    return (
        Merge(name="reshard_of_one", knobs=(SHARD, CP, PP, RESHARD), canonical=reshard),
        Merge(
            name="no_pipeline",
            knobs=(PP, SCHEDULE),
            canonical=lambda columns: {SCHEDULE: np.where(columns[PP] == 1, 1, columns[SCHEDULE])},
        ),
    )
