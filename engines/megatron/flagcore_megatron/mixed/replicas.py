"""Plans data splits of a mixed cluster: whole replicas on each kind of chip, with shares of the batch.

A replica takes `start + x * pace` seconds for x micro-batches. The shares minimize the time of the slowest replica. For
each combination of sizes, the time with real numbers of micro-batches is a lower bound. For the combinations with the
lowest bounds, whole numbers near the real ones are tried.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import combinations, product
from typing import Any

import numpy as np
from flagcore_training.memory.training import memory_in_use
from flagcore_training.time.step import costs_in_run, step_time

from flagcore.contracts import Costs
from flagcore.domain.space import FloatArray, IntArray
from flagcore.domain.spec import Task
from flagcore_megatron.mixed.options import FEW, mesh_columns, node_sets, recompute_words
from flagcore_megatron.predict import base_inputs
from flagcore_megatron.space.meshes import (
    AFTER_REPLICAS,
    ALL_REPLICAS,
    CP,
    DP,
    EP,
    MBS,
    MICROBATCHES,
    PP,
    REPLICAS,
    SIZES,
    SPLIT,
    TP,
    mesh_text,
)

Rows = Mapping[str, Any]
"""Columns of options for the replicas of a node group: sizes, and times of the replicas."""

PLANNED_REPLICAS = 64
"""Maximum number of data splits that become candidates."""
SOLVED = 1024
"""Maximum number of combinations of sizes for which whole numbers of micro-batches are tried."""
NEARBY = {2: 64, 3: 8}
"""Maximum distance between tried whole numbers of micro-batches and the real numbers, by the number of kinds (else
2)."""


def planned_replicas(task: Task, costs: Costs) -> tuple[str, ...]:
    """Return the texts of the data splits that may be the fastest, sorted by their estimated time."""
    if task.spec.model.mtp_num_layers or costs.between is None:
        return ()
    names, words, batch = task.cluster.names, recompute_words(task), task.spec.train.global_batch_size
    columns = [_replicas_columns(task, number) for number in range(len(names))]
    seconds_of_text: dict[str, float] = {}
    speed = [0.0] * len(names)
    if len(names) > FEW:
        figures = _figures_of_groups(task, costs, dict(enumerate(columns)))
        speed = [
            float((each["samples"] / each["pace"])[np.isfinite(each["start"])].max(initial=0.0)) for each in figures
        ]
    for subset in node_sets(speed):
        if len(subset) > 1:
            rows = _crossed_replicas(task, costs, {group: columns[group] for group in subset})
            samples, start, pace = (np.stack([each[key] for each in rows], axis=1) for key in SOLVE)
            bound = _level(samples, start, pace, batch) + np.maximum.reduce([each["after"] for each in rows])
            best = np.argsort(bound)[:SOLVED]
            rows = [{name: column[best] for name, column in each.items()} for each in rows]
            counts, seconds = shares(samples[best], start[best], pace[best], batch)
            seconds = seconds + np.maximum.reduce([each["after"] for each in rows])
            for place in np.argsort(seconds, kind="stable")[:PLANNED_REPLICAS].tolist():
                if np.isfinite(seconds[place]):
                    first = int(rows[0][MBS][place])
                    usual = first if batch % first == 0 else 0
                    meshes = zip(subset, rows, counts[place].tolist(), strict=True)
                    parts = [
                        _replica_text(names[group], each, place, words, usual, count) for group, each, count in meshes
                    ]
                    seconds_of_text[REPLICAS.join(parts)] = float(seconds[place])
    return tuple(sorted(seconds_of_text, key=lambda text: seconds_of_text[text])[:PLANNED_REPLICAS])


def _replica_text(name: str, rows: Rows, place: int, words: Sequence[str], usual: int, count: int) -> str:
    """Return the text of a mesh with replicas. The micro-batch size is only included if it differs from `usual`."""
    sizes = {key: int(rows[knob][place]) for key, knob in SIZES.items()}
    micro_batch = "" if rows[MBS][place] == usual else f"mbs{int(rows[MBS][place])} "
    return mesh_text(name, sizes, words[int(rows["word"][place])], f"{micro_batch}x{count}")


def _replicas_columns(task: Task, group: int) -> dict[str, IntArray]:
    """Return the columns of all legal sizes for the replicas of one node group. The column `shape` encodes the sizes
    that must be equal in the replicas of all groups."""
    columns = mesh_columns(task, group, has_share=True)
    columns[SPLIT] = np.zeros_like(columns[SPLIT])
    columns["shape"] = np.ravel_multi_index((columns[TP], columns[PP], columns[CP]), (1 << 20,) * 3)
    legal = (columns[EP] == 1) & ((columns[CP] == 1) | (columns[PP] == 1))
    legal &= task.spec.model.num_layers % columns[PP] == 0
    return {name: column[legal] for name, column in columns.items()}


SOLVE = ("samples", "start", "pace")


def _crossed_replicas(task: Task, costs: Costs, columns: Mapping[int, Mapping[str, IntArray]]) -> list[Rows]:
    """Return the combinations of sizes that fit in memory.

    Each row is an option of each group, with its replicas' times.

    For each micro-batch size of each node group, only the fastest option is used.
    """
    of_groups, chosen = _figures_of_groups(task, costs, columns), []
    most = None if len(columns) <= FEW else int(SOLVED ** (1.0 / len(columns)))
    for shape in np.unique(of_groups[0]["shape"]).tolist():
        fastest = [_fastest_replicas(each, np.flatnonzero(each["shape"] == shape), most) for each in of_groups]
        chosen += list(product(*fastest))
    table = np.array(chosen, dtype=np.int64).reshape(-1, len(of_groups))
    return [
        {name: column[rows] for name, column in each.items()} for each, rows in zip(of_groups, table.T, strict=True)
    ]


def _figures_of_groups(task: Task, costs: Costs, columns: Mapping[int, Mapping[str, IntArray]]) -> list[Rows]:
    """Return the options of each node group that the replicas of all groups in `columns` may have, with their times."""
    shapes = reduce(np.intersect1d, [each["shape"] for each in columns.values()])
    devices, of_groups = sum(task.cluster.groups[group].devices for group in columns), []
    for group, each in columns.items():
        is_shared_shape = np.isin(each["shape"], shapes)
        rows = {name: column[is_shared_shape] for name, column in each.items()}
        rows[ALL_REPLICAS] = devices // (rows[TP] * rows[PP] * rows[CP])
        of_groups.append(_replica_figures(task, replace(costs.groups[group], further={}, between=costs.between), rows))
    return of_groups


def _replica_figures(task: Task, costs: Costs, rows: Mapping[str, IntArray]) -> Rows:
    """Return the options `rows`, extended with the times of their replicas in seconds.

    `start` is the fixed time of a step (inf if the replicas do not fit), `pace` the time of each micro-batch, and
    `after` the time after all micro-batches. A micro-batch has `samples` samples over all replicas of the group.
    """
    run, samples = costs_in_run(costs), rows[MBS] * rows[DP]
    count = np.maximum(rows[PP], task.spec.train.global_batch_size // samples)
    once, twice = (step_time(*base_inputs(task, {**rows, MICROBATCHES: count * times}), run) for times in (1, 2))
    work = [sum((each[name] for name in each if name not in AFTER_REPLICAS), np.zeros(())) for each in (once, twice)]
    pace = (work[1] - work[0]) / count
    memory = memory_in_use(*base_inputs(task, {**rows, MICROBATCHES: rows[PP]}), costs)
    start = np.where(memory.used > memory.capacity, np.inf, work[0] - pace * count)
    after = sum((once[name] for name in AFTER_REPLICAS), np.zeros(()))
    return {**rows, "samples": samples, "start": start, "pace": pace, "after": after}


def _fastest_replicas(rows: Rows, places: IntArray, most: int | None) -> list[int]:
    """Return the index of the fastest option in `places` that fits in memory, for each micro-batch size.

    With `most`, only this many micro-batch sizes are returned: those with the most samples per second.
    """
    best: dict[int, int] = {}
    for place in places[np.argsort(rows["pace"][places], kind="stable")].tolist():
        if np.isfinite(rows["start"][place] + rows["pace"][place]):
            best.setdefault(int(rows[MBS][place]), place)
    if most is None:
        return list(best.values())
    return sorted(best.values(), key=lambda place: rows["pace"][place] / rows["samples"][place])[:most]


def _level(samples: FloatArray, start: FloatArray, pace: FloatArray, batch: int) -> FloatArray:
    """Return the time in which the replicas of all kinds together process the batch, in seconds. `start` and `pace` are
    seconds per step and per micro-batch. Numbers of micro-batches are not rounded."""
    rate = samples / pace
    level: FloatArray = (batch + (rate * start).sum(axis=1)) / rate.sum(axis=1)
    return level


def shares(samples: FloatArray, start: FloatArray, pace: FloatArray, batch: int) -> tuple[IntArray, FloatArray]:
    """Return the number of micro-batches per kind that minimizes the time of the slowest replica, and this time.

    The time is inf if no numbers are possible. The arguments and the numbers have the shape (rows, kinds). A
    micro-batch of all replicas of a kind has `samples` samples.
    """
    kinds = samples.shape[1]
    order = np.argsort(-samples, axis=1, kind="stable")
    size, first, each = (np.take_along_axis(values, order, axis=1) for values in (samples, start, pace))
    level = _level(size, first, each, batch)[:, None]
    places, far = range(kinds - 1), NEARBY.get(kinds, 2)
    offsets = np.array(
        [
            np.bincount(changed, by, kinds - 1)
            for changed in combinations(places, min(2, kinds - 1))
            for by in product(range(-far, far + 1), repeat=len(changed))
        ]
    )
    counts = (level - first) / each + (0.5 if kinds > FEW else 0.0)
    counts = np.maximum(np.floor(counts)[:, None, :-1] + offsets, 1.0)
    remaining = batch - (counts * size[:, None, :-1]).sum(axis=2)
    last = np.floor(remaining / size[:, -1:])
    counts = np.concatenate((counts, last[:, :, None]), axis=2)
    seconds = (first[:, None] + counts * each[:, None]).max(axis=2)
    seconds = np.where((last >= 1.0) & (last * size[:, -1:] == remaining), seconds, np.inf)
    best = np.argmin(seconds, axis=1)
    row = np.arange(len(best))
    best_counts: IntArray = np.ones(samples.shape, dtype=np.int64)
    np.put_along_axis(best_counts, order, counts[row, best].astype(np.int64), axis=1)
    return best_counts, seconds[row, best]
