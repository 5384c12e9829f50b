"""The data of a report beside result.json. It needs the predictions of the whole space, which are available at the end
of a run, but not later, on another machine, or with other plugins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from flagcore.contracts import Pipelined, Prober, Workload, memory_components
from flagcore.domain.candidate import Candidate
from flagcore.domain.chip import Chip, Fact
from flagcore.domain.effects import effects_of_row, engine_task
from flagcore.domain.prediction import MEMORY, of_row
from flagcore.domain.spec import Task
from flagcore.physics.cost_stack import KernelCostStack
from flagcore.problem import Problem
from flagcore.report.page.what_if import what_if
from flagcore.stages.predict import in_gib
from flagcore.stages.prune import LEARNED

SCHEMA_VERSION = 1


def insight(problem: Problem, workload: Workload, best: Candidate | None) -> dict[str, Any]:
    """Return the rules, chips and environment of a run and, of `best`, its stages, pipeline and neighbours."""
    row = None if best is None else problem.space.find(best)
    data: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "says": _says(problem),
        "chips": list(_chips(problem.platform.task)),
        "kernels_guessed": any(each.guessed for each in problem.platform.costs.groups),
        "kernel_sources": {} if row is None else _kernel_sources(problem, workload, row),
        "environment": dict(problem.platform.environment),
    }
    if row is None:
        return data
    return data | {
        "stages": _stages(problem, workload, row),
        "pipeline": _pipeline(problem, workload, row),
        "knobs": what_if(problem, row),
    }


def _says(problem: Problem) -> dict[str, str]:
    legality = {rule.name: rule.message for rule in problem.legality.rules}
    messages = legality | {rule.name: rule.message for rule in problem.rules} | LEARNED
    used = {*problem.space.illegal, *problem.pruned.rules, *LEARNED}
    return {name: text for name, text in messages.items() if name in used}


def _stages(problem: Problem, workload: Workload, row: int) -> list[dict[str, Any]]:
    """Return the memory of the first device of each pipeline stage, by component if the workload has them."""
    platform, task = problem.platform, problem.platform.task
    columns = problem.space.columns(np.array([row]))
    as_set = engine_task(task, effects_of_row(task, columns))
    count = int(columns.get("pipeline_model_parallel_size", np.ones(1))[0])
    found = []
    if not isinstance(workload, Prober):
        return []
    for stage in range(count):
        parts = memory_components(workload, as_set, columns, np.array([stage]), platform.costs)
        rank = workload.rank(as_set, columns, stage * (task.cluster.devices // count), platform.costs)
        found.append(
            {
                "stage": stage,
                "rank": rank.rank,
                **in_gib({name: getattr(rank, name) for name in MEMORY if name != "activation_bytes"}),
                "components": {name: in_gib(part) for name, part in of_row(parts, 0).items()},
            }
        )
    return found


def _kernel_sources(problem: Problem, workload: Workload, row: int) -> dict[str, list[str]]:
    """Return the sources of the times of kernels of one candidate, by kind of kernel."""
    costs = problem.platform.costs
    if not isinstance(costs.kernels, KernelCostStack):
        return {}
    kernels = costs.kernels.recording()
    workload.predict(problem.platform.task, problem.space.columns(np.array([row])), replace(costs, kernels=kernels))
    return {kind: sorted(names) for kind, names in (kernels.answered or {}).items()}


def _pipeline(problem: Problem, workload: Workload, row: int) -> dict[str, Any] | None:
    if not isinstance(workload, Pipelined):
        return None
    task, columns = problem.platform.task, problem.space.columns(np.array([row]))
    passes = workload.passes(engine_task(task, effects_of_row(task, columns)), columns, problem.platform.costs)
    return None if passes is None or len(passes.forward_s) < 2 else asdict(passes)


def _chips(task: Task) -> Iterator[Mapping[str, Any]]:
    for group in task.cluster.groups:
        yield {
            "name": group.chip.name,
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
