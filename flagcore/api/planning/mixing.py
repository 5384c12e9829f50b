"""The gain of mixing several kinds of chips: the best mixed plan, and the best plan of each kind alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from flagcore.contracts import Plugins, Problem
from flagcore.domain.effects import effects_of_row, engine_task
from flagcore.domain.prediction import Passes, idle_of
from flagcore.domain.space import IntArray
from flagcore.domain.spec import AUTO, Spec
from flagcore.errors import FlagError
from flagcore.tuner.problem import build_problem, rows_by_time
from flagcore.tuner.stages.predict import limit


def mixing_of(spec: Spec, problem: Problem, plugins: Plugins) -> dict[str, Any] | None:
    """Return the fastest plan of several kinds of chips and those of each kind alone as plain data; None if no plan of
    several kinds has a time.

    `split` is how the mixed plan divides the work over the kinds, `others` are the fastest plans that divide it in the
    other ways of the engine.
    `of_sum` is the throughput over that of all kinds alone together, `of_best_alone` over that of the fastest kind,
    `best_alone`. `idle` is the share of the pipeline's time in which the devices of a kind have no work. `limit` is
    the bottleneck of the mixed plan, `slowest` the kind with the slowest stage. `layers` are those of its stages;
    `balanced` has the layers of the derived split and its step time if the plan has another split, else it is None.
    """
    order, titles = rows_by_time(problem), problem.task.cluster.names
    ways = problem.workload.splits(problem.task, problem.space.columns(order))
    rows_of_ways = {name: order[rows] for name, rows in ways.items()} or {"": order}
    plans = [(name, rows[:1], _plan(problem, rows)) for name, rows in rows_of_ways.items()]
    found = [(plan | {"split": name}, row) for name, row, plan in plans if plan]
    if not found:
        return None
    (mixed, row), *others = sorted(found, key=lambda pair: float(pair[0]["step_time_s"]))
    alone = [plan for group in range(len(titles)) if (plan := _alone(spec, problem, group, plugins))]
    total = sum(each["tokens_per_second"] for each in alone)
    best = max(alone, key=lambda each: float(each["tokens_per_second"]), default=None)
    pipelines = _pipelines(problem, row)
    shares = {title: idle_of(pipelines, number) for number, title in enumerate(titles)}
    stages = [
        (seconds, titles[group])
        for each in pipelines
        for seconds, group in zip(np.add(each.forward_s, each.backward_s) * each.microbatches, each.groups, strict=True)
    ]
    return {
        "mixed": mixed,
        "others": [plan for plan, _ in others],
        "alone": alone,
        "of_sum": mixed["tokens_per_second"] / total if alone else None,
        "of_best_alone": mixed["tokens_per_second"] / best["tokens_per_second"] if best else None,
        "best_alone": best["chips"] if best else "",
        "idle": {title: share for title, share in shares.items() if share is not None},
        "limit": limit(problem.predictions.row(int(row[0]))),
        "slowest": max(stages, default=(0.0, ""))[1],
        "layers": [count for each in pipelines for count in each.layers],
        "balanced": _balanced(problem, row),
    }


def _balanced(problem: Problem, row: IntArray) -> dict[str, Any] | None:
    """Return the layers and the step time of a candidate with the derived split; None if it has that split."""
    columns, workload = problem.space.columns(row), problem.workload
    found = workload.with_derived_split(engine_task(problem.task, effects_of_row(problem.task, columns)), columns)
    pipelines = workload.pipelines(*found, problem.costs) if found else ()
    if found is None or len(pipelines) != 1:
        return None
    seconds = float(workload.predict(*found, problem.costs).step_time_s[0])
    return {"layers": list(pipelines[0].layers), "step_time_s": seconds}


def _alone(spec: Spec, mixed: Problem, group: int, plugins: Plugins) -> dict[str, Any] | None:
    """Return the fastest plan of one kind of chips; None if it cannot run the job, or has no time."""
    workload, fixed = mixed.workload, {name: values for name, values in spec.space.items() if values != AUTO}
    space = {**workload.values_alone(mixed.task, group), **fixed}
    space = {name: values for name, values in space.items() if name not in workload.derived_knobs}
    own = replace(spec, cluster=spec.cluster.groups[group], space=space, baseline=None)
    try:
        problem = build_problem(own, plugins, workload, plan=True)
        return _plan(problem, rows_by_time(problem))
    except FlagError:
        return None


def _plan(problem: Problem, rows: IntArray) -> dict[str, Any] | None:
    """Return the first of `rows` as a plan; None without rows, or if its time is unknown."""
    cluster, train = problem.task.cluster, problem.task.spec.train
    for row in rows[:1].tolist():
        if (seconds := problem.predictions.row(row).step_time_s) is not None:
            return {
                "chips": cluster.chips,
                "devices": cluster.devices,
                "tokens_per_second": train.global_batch_size * train.seq_length / seconds,
                "step_time_s": seconds,
                "candidate": problem.space.candidate(row).as_dict(),
                "implementation": train.implementation or "local",
            }
    return None


def _pipelines(problem: Problem, row: IntArray) -> Sequence[Passes]:
    """Return the passes of each pipeline of a candidate; empty if they are unknown."""
    task, columns = problem.task, problem.space.columns(row)
    return problem.workload.pipelines(engine_task(task, effects_of_row(task, columns)), columns, problem.costs)
