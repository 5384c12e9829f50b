"""Meshes in trials: flagcore's trial program runs those of equal sizes on the hosts of their groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from flagcore.domain.candidate import Candidate, KnobValue
from flagcore.domain.spec import AUTO, Spec, Task
from flagcore.engines.megatron.knobs import BY_NAME
from flagcore.engines.megatron.knobs import columns as row_of
from flagcore.engines.megatron.meshes import MESHES, OWN, PP, SPLIT, Meshes, groups_of_row
from flagcore.errors import SpecError

EQUAL = "mesh_equal_sizes"
"""The rule about the sizes of the meshes of a trial. Source: megatron-core 0.16 `parallel_state.py`,
`initialize_model_parallel` takes one TP, CP, EP and PP for all ranks, and derives DP; `TransformerConfig` has one
recompute for all stages."""


def runs_meshes(spec: Spec) -> bool:
    """Return whether trials can run meshes: the trial program starts on the hosts of each group."""
    return spec.train.command is None and spec.on_each_host


def require_runnable(task: Task) -> None:
    """Raise SpecError for listed meshes that trials cannot run."""
    listed = task.spec.space.get(MESHES, AUTO)
    table = Meshes.of(task)
    for number, text in enumerate(table.texts if not isinstance(listed, str) else (), start=1):
        there = table.groups[number] >= 0
        sizes = [values[number][there] for knob, values in table.codes.items() if knob != PP]
        if any((size != size[0]).any() for size in sizes):
            problem = "has meshes of other sizes, which megatron-core cannot run"
            fix = f"give all meshes the same sizes and recompute except pp, or plan with `flag estimate` ({EQUAL})"
            raise SpecError(key=f"auto_tuner.space.{MESHES}", value=text, problem=problem, fix=fix)


def plain_values(task: Task, candidate: Candidate) -> dict[str, KnobValue]:
    """Return the values of a candidate; in the trial program, the sizes of its equal meshes are those of all stages."""
    values = candidate.as_dict()
    if not runs_meshes(task.spec):
        return values
    text = values.pop(MESHES, None)
    if text is None:
        return values
    table = Meshes.of(task)
    number = 1 + table.texts.index(str(text))
    own = {knob: BY_NAME[knob].axis(()).decode(int(table.codes[knob][number, 0])) for knob in OWN}
    return values | own | {PP: int(table.lengths[number]), SPLIT: "balanced"}


def on_groups(task: Task, candidate: Candidate) -> Task:
    """Return the task on the node groups of a candidate, in the order of its meshes."""
    if len(task.cluster.groups) == 1:
        return task
    order = groups_of_row(task, row_of(task, candidate.as_dict()))
    return replace(task, cluster=replace(task.cluster, groups=tuple(task.cluster.groups[group] for group in order)))


def hosts_of(task: Task, candidate: Candidate) -> tuple[str, ...]:
    """Return the hosts of a candidate in the order of its meshes."""
    cluster = task.spec.cluster
    if not cluster.groups:
        return cluster.hosts[: cluster.nodes]
    ends = np.cumsum([group.nodes for group in cluster.groups])
    order = groups_of_row(task, row_of(task, candidate.as_dict()))
    return tuple(
        host for group in order for host in cluster.hosts[ends[group] - cluster.groups[group].nodes : ends[group]]
    )


def as_asked(task: Task, candidate: Candidate, effective: Mapping[str, object]) -> dict[str, object]:
    """Return the values of a trial of meshes, without those that are as the meshes say."""
    if candidate.as_dict().get(MESHES) is None:
        return dict(effective)
    plain = plain_values(task, candidate)
    return {name: value for name, value in effective.items() if name not in plain or value != plain[name]}
