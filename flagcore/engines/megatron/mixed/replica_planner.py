"""Plans data splits of a mixed cluster: whole replicas on each kind of chips, with shares of the batch.

A replica takes `start + x * pace` seconds for x micro-batches. The shares minimize the slowest replica. For each
combination of sizes, the time with real numbers of micro-batches is a lower bound; whole numbers near it are tried for
the combinations with the lowest bounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
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
SHAPE = (TP, PP, CP)
Options = dict[str, Any]
"""Columns of the sizes of a node group, and figures of its replicas."""


def planned_replicas(task: Task, costs: Costs) -> tuple[str, ...]:
    """Return the data splits that may be the fastest, the best first."""
    if task.spec.model.mtp_num_layers or costs.between is None:
        return ()
    names, words, batch = task.cluster.names, recompute_words(task), task.spec.train.global_batch_size
    groups = [replace(each, further={}, between=costs.between) for each in costs.groups]
    options = [_options(task, each, number) for number, each in enumerate(groups)]
    found: dict[str, float] = {}
    for size in range(2, len(names) + 1):
        for subset in combinations(range(len(names)), size):
            rows = _crossed(task, [options[group] for group in subset], [groups[group] for group in subset])
            samples, start, pace = (np.stack([each[key] for each in rows], axis=1) for key in SOLVE)
            counts, seconds = shares(samples, start, pace, batch)
            seconds = seconds + np.maximum.reduce([each["after"] for each in rows])
            for place in np.argsort(seconds)[:PLANNED].tolist():
                if np.isfinite(seconds[place]):
                    first = int(rows[0][MBS][place])
                    usual = first if batch % first == 0 else 0
                    meshes = zip(subset, rows, counts[place].tolist(), strict=True)
                    parts = [_text(names[group], each, place, words, usual, count) for group, each, count in meshes]
                    found[REPLICAS.join(parts)] = float(seconds[place])
    return tuple(sorted(found, key=lambda text: found[text])[:PLANNED])


def _text(name: str, rows: Options, place: int, words: Sequence[str], usual: int, count: int) -> str:
    """Return a mesh; it has its micro-batch size unless that is the `usual` one, the candidate's."""
    sizes = {key: int(rows[knob][place]) for key, knob in SIZES.items()}
    own = "" if rows[MBS][place] == usual else f"mbs{int(rows[MBS][place])} "
    return mesh_text(name, sizes, words[int(rows["word"][place])], f"{own}x{count}")


def _options(task: Task, costs: Costs, group: int) -> Options:
    """Return the columns of all legal sizes of one node group, with the seconds of its replicas: `start` for a step and
    `pace` for each micro-batch, which is of `samples` samples of all of them.
    """
    columns = mesh_columns(task, group, has_share=True)
    columns[SPLIT] = np.zeros_like(columns[SPLIT])
    legal = (columns[EP] == 1) & ((columns[CP] == 1) | (columns[PP] == 1))
    kept = np.flatnonzero(legal & (task.spec.model.num_layers % columns[PP] == 0))
    columns = {name: column[kept] for name, column in columns.items()}
    count = np.maximum(columns[PP], task.spec.train.global_batch_size // (columns[MBS] * columns[DP]))
    once, twice = (_work_seconds(task, columns, costs, count * times) for times in (1, 2))
    pace = (twice - once) / count
    return {**columns, "samples": columns[MBS] * columns[DP], "start": once - pace * count, "pace": pace}


SOLVE = ("samples", "start", "pace")


def _work_seconds(task: Task, columns: Mapping[str, IntArray], costs: Costs, counts: IntArray) -> FloatArray:
    """Return the seconds of a replica before the reduction of gradients."""
    rows = {**columns, MICROBATCHES: counts, ALL_REPLICAS: columns[DP] + 1}
    times = step_time(*base_inputs(task, rows), costs_in_run(costs))
    return np.asarray(sum(each for name, each in times.items() if name not in AFTER_REPLICAS))


def _crossed(task: Task, options: Sequence[Options], costs: Sequence[Costs]) -> list[Options]:
    """Return the combinations of sizes that fit with the lowest bounds of a step: the rows of each node group, with
    the seconds `after` the replicas.
    """
    keys = [np.stack([each[knob] for knob in SHAPE], axis=1) for each in options]
    shapes = set.intersection(*({tuple(key) for key in of_group.tolist()} for of_group in keys))
    places = [{shape: np.flatnonzero((of_group == shape).all(axis=1)) for shape in shapes} for of_group in keys]
    batch = task.spec.train.global_batch_size
    total = [np.zeros(each[DP].size, dtype=np.int64) for each in options]
    for shape in shapes:
        replicas = sum(int(each[DP][of_group[shape][0]]) for each, of_group in zip(options, places, strict=True))
        for own_total, of_group in zip(total, places, strict=True):
            own_total[of_group[shape]] = replicas
    complete = [_fitting(task, each, on, number) for each, on, number in zip(options, costs, total, strict=True)]
    bounds: list[FloatArray] = [np.zeros(0)]
    chosen: list[IntArray] = [np.zeros((0, len(options)), dtype=np.int64)]
    for shape in sorted(shapes):
        fastest = [_fastest(each, of_group[shape]) for each, of_group in zip(complete, places, strict=True)]
        rows = np.array(list(product(*fastest)), dtype=np.int64).reshape(-1, len(fastest))
        samples, start, pace = (
            np.stack([each[key][rows[:, number]] for number, each in enumerate(complete)], axis=1) for key in SOLVE
        )
        after = np.maximum.reduce([each["after"][rows[:, number]] for number, each in enumerate(complete)])
        bounds.append(_level(samples, start, pace, batch) + after)
        chosen.append(rows)
    bound, combined = np.concatenate(bounds), np.concatenate(chosen)
    best = combined[np.argsort(bound)[:SOLVED]]
    return [{name: column[best[:, number]] for name, column in each.items()} for number, each in enumerate(complete)]


def _fitting(task: Task, options: Options, costs: Costs, replicas: IntArray) -> Options:
    """Return the options with the seconds `after` the replicas; `start` is inf where they do not fit."""
    known = np.flatnonzero(replicas > 0)
    after, start = np.full(replicas.shape, np.inf), np.full(replicas.shape, np.inf)
    rows = {name: column[known] for name, column in options.items()}
    rows |= {ALL_REPLICAS: replicas[known], MICROBATCHES: rows[PP]}
    train, layout = base_inputs(task, rows)
    memory, times = memory_in_use(train, layout, costs), step_time(train, layout, costs_in_run(costs))
    after[known] = sum(times[name] for name in AFTER_REPLICAS)
    start[known] = np.where(memory.used > memory.capacity, np.inf, rows["start"])
    return {**options, "start": start, "after": after}


def _fastest(options: Options, rows: IntArray) -> list[int]:
    """Return the fastest of `rows` that fit for each micro-batch size."""
    best: dict[int, int] = {}
    for row in rows[np.argsort(options["pace"][rows], kind="stable")].tolist():
        if np.isfinite(options["start"][row] + options["pace"][row]):
            best.setdefault(int(options[MBS][row]), row)
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
