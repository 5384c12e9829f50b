"""The data of a report that is not in result.json.

It needs the predictions of the whole space. They are available at the end of a run, but not on another machine or with
other plugins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from flagcore.contracts import PipelineTimeline, Prober, Workload, memory_components
from flagcore.domain.candidate import Candidate
from flagcore.domain.chip import Chip, Fact
from flagcore.domain.effects import effects_of_row, engine_task
from flagcore.domain.prediction import MEMORY, components_of_row
from flagcore.domain.space import IntArray
from flagcore.domain.spec import Task
from flagcore.physics.cost_stack import KernelCostStack
from flagcore.problem import Problem
from flagcore.stages.predict import in_gib, record
from flagcore.stages.prune import LEARNED_MESSAGES

SCHEMA_VERSION = 1


def insight(problem: Problem, workload: Workload, best: Candidate | None) -> dict[str, Any]:
    """Return the rules, chips and environment of a run and, of `best`, its stages, pipeline and neighbours."""
    row = None if best is None else problem.space.find(best)
    used = {*problem.space.illegal, *problem.pruned.rules, *LEARNED_MESSAGES}
    data: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "messages": {name: text for name, text in problem.messages.items() if name in used},
        "chips": list(_chips(problem.platform.task)),
        "kernels_guessed": any(each.guessed for each in problem.platform.costs.groups),
        "kernel_sources": {} if row is None else _kernel_sources(problem, workload, row),
        "environment": dict(problem.platform.environment),
    }
    if row is None:
        return data
    return data | {
        "stages": _stages(problem, workload, row),
        "pipelines": _pipelines(problem, workload, row),
        "knobs": what_if(problem, row),
    }


def _stages(problem: Problem, workload: Workload, row: int) -> list[dict[str, Any]]:
    """Return the memory of the first device of each pipeline stage, by component if the workload has them."""
    platform, task = problem.platform, problem.platform.task
    columns = problem.space.columns(np.array([row]))
    task_as_set = engine_task(task, effects_of_row(task, columns))
    stages = []
    if not isinstance(workload, Prober):
        return []
    for stage, first in enumerate(workload.stage_ranks(task_as_set, columns)):
        parts = memory_components(workload, task_as_set, columns, np.array([stage]), platform.costs)
        rank = workload.rank(task_as_set, columns, first, platform.costs)
        stages.append(
            {
                "stage": stage,
                "rank": rank.rank,
                **in_gib({name: getattr(rank, name) for name in MEMORY if name != "activation_bytes"}),
                "components": {name: in_gib(part) for name, part in components_of_row(parts, 0).items()},
            }
        )
    return stages


def _kernel_sources(problem: Problem, workload: Workload, row: int) -> dict[str, list[str]]:
    """Return the sources of the times of kernels of one candidate, by kind of kernel."""
    costs = problem.platform.costs
    if not isinstance(costs.kernels, KernelCostStack):
        return {}
    kernels = costs.kernels.recording()
    workload.predict(problem.platform.task, problem.space.columns(np.array([row])), replace(costs, kernels=kernels))
    return {kind: sorted(names) for kind, names in (kernels.used_sources or {}).items()}


def _pipelines(problem: Problem, workload: Workload, row: int) -> list[dict[str, Any]]:
    if not isinstance(workload, PipelineTimeline):
        return []
    task, columns = problem.platform.task, problem.space.columns(np.array([row]))
    pipelines = workload.pipelines(engine_task(task, effects_of_row(task, columns)), columns, problem.platform.costs)
    is_one_stage = len(task.cluster.groups) < 2 and all(len(each.forward_s) < 2 for each in pipelines)
    return [] if is_one_stage else [asdict(each) for each in pipelines]


def _chips(task: Task) -> Iterator[Mapping[str, Any]]:
    for group in task.cluster.groups:
        yield {
            "name": group.chip.name,
            "title": group.title,
            "vendor": group.chip.vendor,
            "nodes": group.nodes,
            "devices_per_node": group.devices_per_node,
            "memory_budget_bytes": group.memory_bytes,
            "notes": group.chip.notes,
            "facts": [
                {"fact": name, "value": fact.value, "unit": unit, "kind": fact.source.kind, "from": fact.source.detail}
                for name, unit, fact in _facts(group.chip)
                if fact is not None
            ],
        }


def _facts(chip: Chip) -> Iterator[tuple[str, str, Fact | None]]:
    yield "memory", "bytes", chip.memory_bytes
    yield "memory bandwidth", "bytes/s", chip.memory_bandwidth_bytes_per_second
    for precision, fact in chip.dense_flops_per_second.items():
        yield f"peak of dense matrix products in {precision}", "flops/s", fact
    if chip.link:
        yield f"link {chip.link.name} ({chip.link.topology})", "bytes/s", chip.link.bytes_per_second
    yield "network of a device", "bytes/s", chip.nic_bytes_per_second


CHUNK = 1 << 16


@dataclass(slots=True)
class _Value:
    """The fastest row with a value of a knob, and the fastest of the rows that are nearest to the best."""

    count: int = 0
    fastest: tuple[float, int] = (np.inf, -1)
    nearest: tuple[int, float, int] = (1 << 30, np.inf, -1)


def what_if(problem: Problem, best: int) -> list[dict[str, Any]]:
    """Return two candidates for each value of each knob with several values, among candidates that are predicted to
    fit.

    `fastest` is the fastest predicted candidate with the value, `nearest` the fastest of the candidates that differ
    from row `best` in the fewest knobs. Candidates without a predicted time are ignored.
    """
    space, own = problem.space, {knob: int(code[0]) for knob, code in problem.space.columns(np.array([best])).items()}
    knobs: dict[str, dict[int, _Value]] = {knob: {} for knob in own}
    for rows in space.chunks(CHUNK):
        columns = space.columns(rows)
        seconds = problem.predictions.step_time_s[rows]
        usable_rows = np.flatnonzero(np.isfinite(seconds) & problem.predictions.fits[rows])
        if not usable_rows.size:
            continue
        seconds = seconds[usable_rows]
        columns = {knob: codes[usable_rows] for knob, codes in columns.items()}
        distance = np.sum([codes != own[knob] for knob, codes in columns.items()], axis=0)
        for knob, codes in columns.items():
            _update_entry(knobs[knob], codes, seconds, distance, rows.start + usable_rows)
    by_knob = []
    for axis in space.axes:
        values = knobs[axis.knob]
        if len(values) > 1:
            records = []
            for code in sorted(values):
                places = {"fastest": values[code].fastest[-1], "nearest": values[code].nearest[-1]}
                candidates = {name: _candidate(problem, row, best) for name, row in places.items()}
                records.append({"value": axis.decode(code), "candidates": values[code].count, **candidates})
            by_knob.append({"knob": axis.knob, "best": axis.decode(own[axis.knob]), "values": records})
    return by_knob


def _update_entry(values: dict[int, _Value], codes: IntArray, seconds: Any, distance: IntArray, rows: IntArray) -> None:
    for code in np.unique(codes).tolist():
        places = np.flatnonzero(codes == code)
        fastest = places[np.argmin(seconds[places])]
        nearest_row = places[np.lexsort((seconds[places], distance[places]))[0]]
        entry = values.setdefault(code, _Value())
        entry.count += int(places.size)
        entry.fastest = min(entry.fastest, (float(seconds[fastest]), int(rows[fastest])))
        entry.nearest = min(
            entry.nearest, (int(distance[nearest_row]), float(seconds[nearest_row]), int(rows[nearest_row]))
        )


def _candidate(problem: Problem, row: int, best: int) -> dict[str, Any]:
    """Return a candidate by its differences from the best, with its prediction."""
    candidate, own = problem.space.candidate(row), problem.space.candidate(best).as_dict()
    predicted: Mapping[str, Any] = record(problem.platform.task, problem.predictions.row(row))
    keys = ("step_time_s", "tokens_per_second_per_device", "objective", "time", "limit", "memory")
    return {
        "candidate": candidate.as_dict(),
        "differs": {knob: value for knob, value in candidate.items if own.get(knob) != value},
        "predicted": {name: predicted[name] for name in keys if name in predicted},
    }
