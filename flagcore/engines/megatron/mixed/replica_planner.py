"""Plans data splits of a mixed cluster: whole replicas on each kind of chips, with shares of the batch.

A replica takes `start + x * pace` seconds for x micro-batches. The shares minimize the slowest replica: for each
combination of sizes, the time with real numbers of micro-batches is a lower bound; whole numbers near it are tried for
the combinations with the lowest bounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import combinations, product
from typing import Any

import numpy as np

from flagcore.contracts import Costs
from flagcore.domain.space import FloatArray, IntArray
from flagcore.domain.spec import Task
from flagcore.engines.megatron.mixed.meshes import (
    AFTER_REPLICAS,
    ALL_REPLICAS,
    DP,
    MBS,
    MICROBATCHES,
    PP,
    REPLICAS,
    SIZES,
    SPLIT,
    TP,
    mesh_text,
)
from flagcore.engines.megatron.mixed.options import mesh_columns, recompute_words
from flagcore.engines.megatron.predict import base_inputs
from flagcore.engines.training.memory.training import memory_in_use
from flagcore.engines.training.time.step import costs_in_run, step_time

PLANNED = 64
"""Number of data splits that become candidates."""
SOLVED = 1024
"""Maximum number of combinations of sizes for which whole numbers of micro-batches are tried."""
NEARBY = {2: 64, 3: 8}
"""How far from the real numbers of micro-batches whole ones are tried, by the number of kinds; otherwise 2."""

CP, EP = SIZES["cp"], SIZES["ep"]
Rows = Mapping[str, Any]
"""Columns of the sizes of a node group, and figures of its replicas."""


def planned_replicas(task: Task, costs: Costs) -> tuple[str, ...]:
    """Return the data splits that may be the fastest, the best first."""
    if task.spec.model.mtp_num_layers or costs.between is None:
        return ()
    names, words, batch = task.cluster.names, recompute_words(task), task.spec.train.global_batch_size
    columns = [_columns(task, number) for number in range(len(names))]
    found: dict[str, float] = {}
    for size in range(2, len(names) + 1):
        for subset in combinations(range(len(names)), size):
            rows = _crossed(task, costs, {group: columns[group] for group in subset})
            samples, start, pace = (np.stack([each[key] for each in rows], axis=1) for key in SOLVE)
            bound = _level(samples, start, pace, batch) + np.maximum.reduce([each["after"] for each in rows])
            best = np.argsort(bound)[:SOLVED]
            rows = [{name: column[best] for name, column in each.items()} for each in rows]
            counts, seconds = shares(samples[best], start[best], pace[best], batch)
            seconds = seconds + np.maximum.reduce([each["after"] for each in rows])
            for place in np.argsort(seconds, kind="stable")[:PLANNED].tolist():
                if np.isfinite(seconds[place]):
                    first = int(rows[0][MBS][place])
                    usual = first if batch % first == 0 else 0
                    meshes = zip(subset, rows, counts[place].tolist(), strict=True)
                    parts = [_text(names[group], each, place, words, usual, count) for group, each, count in meshes]
                    found[REPLICAS.join(parts)] = float(seconds[place])
    return tuple(sorted(found, key=lambda text: found[text])[:PLANNED])


def _text(name: str, rows: Rows, place: int, words: Sequence[str], usual: int, count: int) -> str:
    """Return a mesh; it has its micro-batch size unless that is the `usual` one, the candidate's."""
    sizes = {key: int(rows[knob][place]) for key, knob in SIZES.items()}
    own = "" if rows[MBS][place] == usual else f"mbs{int(rows[MBS][place])} "
    return mesh_text(name, sizes, words[int(rows["word"][place])], f"{own}x{count}")


def _columns(task: Task, group: int) -> dict[str, IntArray]:
    """Return the columns of all legal sizes of the replicas of one node group, and a number for those that replicas of
    other groups must have too.
    """
    columns = mesh_columns(task, group, has_share=True)
    columns[SPLIT] = np.zeros_like(columns[SPLIT])
    columns["shape"] = np.ravel_multi_index((columns[TP], columns[PP], columns[CP]), (1 << 20,) * 3)
    legal = (columns[EP] == 1) & ((columns[CP] == 1) | (columns[PP] == 1))
    legal &= task.spec.model.num_layers % columns[PP] == 0
    return {name: column[legal] for name, column in columns.items()}


SOLVE = ("samples", "start", "pace")


def _crossed(task: Task, costs: Costs, columns: Mapping[int, Mapping[str, IntArray]]) -> list[Rows]:
    """Return the combinations of sizes that fit, for each micro-batch size of each node group the fastest: the rows of
    each group, with the seconds of its replicas.
    """
    shapes = reduce(np.intersect1d, [each["shape"] for each in columns.values()])
    devices = sum(task.cluster.groups[group].devices for group in columns)
    of_groups, chosen = [], []
    for group, each in columns.items():
        kept = np.isin(each["shape"], shapes)
        rows = {name: column[kept] for name, column in each.items()}
        rows[ALL_REPLICAS] = devices // (rows[TP] * rows[PP] * rows[CP])
        of_groups.append(_figures(task, replace(costs.groups[group], further={}, between=costs.between), rows))
    for shape in shapes.tolist():
        fastest = [_fastest(each, np.flatnonzero(each["shape"] == shape)) for each in of_groups]
        chosen += list(product(*fastest))
    table = np.array(chosen, dtype=np.int64).reshape(-1, len(of_groups))
    return [
        {name: column[rows] for name, column in each.items()} for each, rows in zip(of_groups, table.T, strict=True)
    ]


def _figures(task: Task, costs: Costs, rows: Mapping[str, IntArray]) -> Rows:
    """Return rows with the seconds of their replicas: `start` for a step (inf if they do not fit), `pace` for each
    micro-batch, which is of `samples` samples of all of them, and `after` them.
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


def _fastest(rows: Rows, places: IntArray) -> list[int]:
    """Return the fastest of `places` that fit for each micro-batch size."""
    best: dict[int, int] = {}
    for place in places[np.argsort(rows["pace"][places], kind="stable")].tolist():
        if np.isfinite(rows["start"][place] + rows["pace"][place]):
            best.setdefault(int(rows[MBS][place]), place)
    return list(best.values())


def _level(samples: FloatArray, start: FloatArray, pace: FloatArray, batch: int) -> FloatArray:
    """Return the seconds in which all kinds together process the batch, with real numbers of micro-batches."""
    rate = samples / pace
    level: FloatArray = (batch + (rate * start).sum(axis=1)) / rate.sum(axis=1)
    return level


def shares(samples: FloatArray, start: FloatArray, pace: FloatArray, batch: int) -> tuple[IntArray, FloatArray]:
    """Return the numbers of micro-batches that minimize the time of the slowest replica, and this time (inf if
    there are none).

    All arguments and the numbers are (rows, kinds). A micro-batch of all replicas of a kind has `samples` samples.
    """
    kinds = samples.shape[1]
    order = np.argsort(-samples, axis=1, kind="stable")
    size, first, each = (np.take_along_axis(values, order, axis=1) for values in (samples, start, pace))
    level = _level(size, first, each, batch)[:, None]
    far = NEARBY.get(kinds, 2)
    offsets = np.array(list(product(range(-far, far + 1), repeat=kinds - 1)))
    counts = np.maximum(np.floor((level - first) / each)[:, None, :-1] + offsets, 1.0)
    rest = batch - (counts * size[:, None, :-1]).sum(axis=2)
    last = np.floor(rest / size[:, -1:])
    counts = np.concatenate((counts, last[:, :, None]), axis=2)
    seconds = (first[:, None] + counts * each[:, None]).max(axis=2)
    seconds = np.where((last >= 1.0) & (last * size[:, -1:] == rest), seconds, np.inf)
    best = np.argmin(seconds, axis=1)
    row = np.arange(len(best))
    found: IntArray = np.ones(samples.shape, dtype=np.int64)
    np.put_along_axis(found, order, counts[row, best].astype(np.int64), axis=1)
    return found, seconds[row, best]
