"""Replicas of a data split on several node groups: the predictions of all groups together, stages, and ranks.

The replicas of each group process their micro-batches without the others, and all reduce their gradients together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from flagcore.contracts import Costs
from flagcore.domain.prediction import MEMORY, Predictions
from flagcore.domain.space import Columns, IntArray
from flagcore.domain.spec import Task
from flagcore.engines.megatron.meshes import ALL_REPLICAS, DP, PP, SIZES, TP, by_groups, by_replicas

AFTER_REPLICAS = ("dp_comm_exposed_s", "optimizer_s")
"""Parts of a step after all replicas have finished their micro-batches."""


def together(parts: Sequence[Predictions], stages: Sequence[IntArray]) -> Predictions:
    """Return the predictions of rows whose replicas are on several node groups, from those of each group.

    All replicas wait for the slowest one, then reduce their gradients together. The stages are numbered over all
    groups; `stages` are their numbers.
    """
    rows = np.arange(parts[0].step_time_s.size)
    after = {name: np.maximum.reduce([part.time_s[name] for part in parts]) for name in AFTER_REPLICAS}
    own = [part.step_time_s - sum(part.time_s[name] for name in AFTER_REPLICAS) for part in parts]
    slowest = np.argmax(np.stack(own), axis=0)
    time_s = {name: np.stack([part.time_s[name] for part in parts])[slowest, rows] for name in parts[0].time_s} | after
    total = sum(time_s.values(), np.zeros(rows.size))
    low, high = (
        extreme.reduce([getattr(part, name) / part.step_time_s for part in parts])
        for extreme, name in ((np.minimum, "low_s"), (np.maximum, "high_s"))
    )
    capacity = [np.nan if part.capacity_bytes is None else part.capacity_bytes for part in parts]
    share = np.stack([part.device_used_bytes / size for part, size in zip(parts, capacity, strict=True)])
    fullest = np.argmax(np.where(np.isnan(share), 1.0, share), axis=0)
    before = np.cumsum([np.zeros_like(stages[0]), *stages[:-1]], axis=0)
    memory = {name: np.stack([getattr(part, name) for part in parts])[fullest, rows] for name in MEMORY}
    return replace(
        parts[0],
        step_time_s=total,
        low_s=total * low,
        high_s=total * high,
        time_s=time_s,
        **memory,
        worst_stage=np.stack([part.worst_stage for part in parts])[fullest, rows] + before[fullest, rows],
        capacity_bytes=np.stack([size * np.ones(rows.size) for size in capacity])[fullest, rows],
    )


def with_stage(
    task: Task, columns: Columns, stages: IntArray, costs: Costs
) -> Iterator[tuple[IntArray, Columns, Costs]]:
    """Group rows by node groups; rows that split the data have the mesh of the given stage of each row."""
    yield from by_groups(task, columns, costs)
    for rows, meshes in by_replicas(task, columns, costs):
        for number, (own, group_costs) in enumerate(meshes):
            here = np.flatnonzero(stages[rows] // own[PP] == number)
            yield rows[here], {name: column[here] for name, column in own.items()}, group_costs


def on_rank(task: Task, row: Columns, costs: Costs, rank: int) -> tuple[Columns, Costs, int]:
    """Return the columns and the costs of the mesh of a global rank of one row that splits the data, and the first rank
    of its stage in Megatron's order; otherwise the arguments. The ranks of a replica are consecutive.
    """
    for _, meshes in by_replicas(task, row, costs):
        before = 0
        for own, group_costs in meshes:
            stage = int(own[TP][0] * own[SIZES["cp"]][0])
            replica = stage * int(own[PP][0])
            if rank < before + replica * int(own[DP][0]):
                place = (rank - before) % replica // stage
                return own, group_costs, place * stage * int(own[ALL_REPLICAS][0])
            before += replica * int(own[DP][0])
    return row, costs, rank
