"""Meshes in trials: flagcore's trial program runs meshes of equal sizes on the hosts of their node groups."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from flagcore.domain.space import Candidate
from flagcore.domain.spec import AUTO, Task
from flagcore.errors import LaunchError, SpecError
from flagcore_megatron.space.knobs import BY_NAME, plain_values, program_runs_meshes
from flagcore_megatron.space.knobs import columns as row_of
from flagcore_megatron.space.meshes import (
    DP,
    MBS,
    MESHES,
    MICROBATCHES,
    PP,
    RECOMPUTE_KNOBS,
    Meshes,
    encoded,
    groups_of_row,
)

EQUAL = "mesh_equal_sizes"
"""The rule that the meshes of a trial have equal sizes.

Source: megatron-core 0.16 `parallel_state.py`, `initialize_model_parallel` accepts one TP, CP, EP and PP for all ranks,
and derives DP; `TransformerConfig` has one recompute for all stages."""


OF_DATA = "replicas_release"
"""The rule about the engines that can run a data split.

Source: FlagScale v0.3 (5c75bb7) has `--hetero-mode dp` (`megatron/megatron/arguments.py`), da4935e has no such
argument. Megatron-LM's `pretrain_gpt.py` (0.16) has one micro-batch size and number of micro-batches for all replicas
(`num_microbatches_calculator.py`)."""


def require_runnable(task: Task) -> None:
    """Raise SpecError if the spec lists meshes that trials cannot run."""
    listed = task.spec.space.get(MESHES, AUTO)
    table = Meshes.from_task(task)
    for number, text in enumerate(table.texts if not isinstance(listed, str) else (), start=1):
        if table.splits_data[number]:
            if not program_runs_meshes(task.spec):
                problem, fix = data_problem(), "remove it: flagcore's own trial program runs it, without train.command"
                raise SpecError(key=f"auto_tuner.space.{MESHES}", value=text, problem=problem, fix=fix)
            continue
        has_mesh = table.groups[number] >= 0
        sizes = [values[number][has_mesh] for knob, values in table.codes.items() if knob != PP]
        if any((size != size[0]).any() for size in sizes):
            problem = "has meshes of other sizes, which megatron-core cannot run"
            fix = f"give all meshes the same sizes and recompute except pp, or plan with `flag estimate` ({EQUAL})"
            raise SpecError(key=f"auto_tuner.space.{MESHES}", value=text, problem=problem, fix=fix)


def data_problem() -> str:
    """Return the problem of a data split: only flagcore's trial program can run it."""
    return f"splits the data, which Megatron-LM and FlagScale after 0.3 cannot run ({OF_DATA})"


def data_split_refused(meshes: object) -> LaunchError:
    """Return the error of a candidate with these `meshes`, a data split, that a user's command is to start."""
    fix = "give the number of a candidate without one, from the list of `flag estimate`"
    return LaunchError(f"{MESHES} = {meshes} {data_problem()}; {fix}")


def shares(task: Task, candidate: Candidate) -> list[dict[str, Any]]:
    """Return the replicas on each mesh of a candidate that splits the data, as the fields of `Share` in trial/job.py.

    The list is empty for other candidates.
    """
    table, row = Meshes.from_task(task), row_of(task, candidate.as_dict())
    code, replicas = int(row[MESHES][0]) if MESHES in row else 0, []
    if not table.splits_data[code]:
        return []
    number = int(table.number(row[MESHES])[0])
    for mesh_columns in table.of_replicas(row, number, task.spec.train.global_batch_size):
        values = {knob: BY_NAME[knob].axis(()).decode(int(mesh_columns[knob][0])) for knob in (MBS, *RECOMPUTE_KNOBS)}
        count, microbatches = (int(mesh_columns[knob][0]) for knob in (DP, MICROBATCHES))
        replicas.append({"replicas": count, "microbatches": microbatches, "values": values})
    return replicas


def on_groups(task: Task, candidate: Candidate) -> Task:
    """Return the task with only the node groups of a candidate, in the order of its meshes."""
    if len(task.cluster.groups) == 1:
        return task
    order = groups_of_row(task, row_of(task, candidate.as_dict()))
    return replace(task, cluster=replace(task.cluster, groups=tuple(task.cluster.groups[group] for group in order)))


def hosts_of(task: Task, candidate: Candidate) -> tuple[str, ...]:
    """Return the hosts on which a candidate runs, in the order of its meshes."""
    cluster = task.spec.cluster
    if not cluster.groups:
        return cluster.hosts[: cluster.nodes]
    return tuple(cluster.hosts[node] for node in _in_order(task, candidate, [each.nodes for each in cluster.groups]))


def devices_of(task: Task, candidate: Candidate) -> dict[int, int]:
    """Return the device of each rank. Devices are numbered over all nodes in the order of the node groups.

    The result is empty if there is only one group.
    """
    if len(task.cluster.groups) == 1:
        return {}
    return dict(enumerate(_in_order(task, candidate, [group.devices for group in task.cluster.groups])))


def _in_order(task: Task, candidate: Candidate, counts: Sequence[int]) -> list[int]:
    """Return the indices of all nodes or devices, sorted by the candidate's meshes. `counts` are the numbers of nodes
    or devices of each group."""
    ends = list(accumulate(counts))
    order = groups_of_row(task, {MESHES: encoded(task, candidate.as_dict().get(MESHES))})
    return [index for group in order for index in range(ends[group] - counts[group], ends[group])]


def as_asked(task: Task, candidate: Candidate, effective: Mapping[str, object]) -> dict[str, object]:
    """Return the `effective` values of a trial without those that follow from the candidate's meshes."""
    if candidate.as_dict().get(MESHES) is None:
        return dict(effective)
    plain = plain_values(task, candidate)
    return {name: value for name, value in effective.items() if name not in plain or value != plain[name]}
