"""Predict without running: the candidates of a spec, where they went, and job records."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from flagcore import plugins
from flagcore.contracts import Costs
from flagcore.domain.cluster import Cluster, NodeGroup
from flagcore.domain.job import Job
from flagcore.domain.knowledge import Lessons
from flagcore.domain.plan import Counts, count
from flagcore.domain.spec import ClusterSpec, Spec, Task
from flagcore.errors import FlagError, SpecError
from flagcore.plugins import LoadedPlugins
from flagcore.problem import Problem, pose
from flagcore.spec import read_job, read_spec
from flagcore.stages.build import check
from flagcore.stages.discover import costs
from flagcore.stages.predict import record

PUBLISHED_IMPLEMENTATION = "transformer_engine"
"""What a job record means that does not say: published runs use Megatron-LM's default layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The best predicted candidates of a spec, and where all others went."""

    chip: str
    devices: int
    counts: Counts
    says: Mapping[str, str]
    baseline: Mapping[str, Any]
    candidates: tuple[Mapping[str, Any], ...]


def estimate(
    spec_file: Path | str, *, chip: str | None = None, top: int = 10, without: Collection[str] = ()
) -> Estimate:
    """Predict all candidates of `spec_file` and return the `top` fastest. Nothing runs, no hardware is needed.

    `chip` names a chip to plan for instead of the spec's. Raises the errors of `flagcore.errors`.
    """
    spec = read_spec(Path(spec_file))
    if chip is not None:
        spec = replace(spec, cluster=replace(spec.cluster, chip=chip))
    workload = plugins.workload(spec.train.engine)
    problem = pose(spec, plugins.load_plugins(without), workload)
    rows = problem.pruned.open_rows
    time = np.nan_to_num(problem.predictions.step_time_s[rows], nan=np.inf)
    order = rows[np.lexsort((problem.predictions.device_used_bytes[rows], time))[:top]]
    baseline = problem.space.find(problem.baseline)
    assert baseline is not None
    task = problem.platform.task
    return Estimate(
        chip=task.cluster.groups[0].chip.name,
        devices=task.cluster.devices,
        counts=explain(problem),
        says={rule.name: rule.says for rule in workload.rules(task)},
        baseline=_row(problem, baseline),
        candidates=tuple(_row(problem, int(row)) for row in order),
    )


def explain(problem: Problem) -> Counts:
    """Return where every combination of a problem went before any trial."""
    nothing = Lessons(by_candidate={}, repeats=(), baseline=None, best=None)
    return count(problem.space, problem.pruned, nothing)


def estimate_jobs(lines: Iterable[Mapping[str, Any]], *, without: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """Predict job records one by one, in order. A bad record gives a status and a reason, never an exception."""
    loaded = plugins.load_plugins(without)
    estimator = _Jobs(loaded)
    for line in lines:
        name = line.get("id") if isinstance(line, Mapping) else None
        try:
            yield {"id": name, **estimator.predict(read_job(line))}
        except SpecError as error:
            yield {"id": name, "status": "unknown" if error.key == "kind" else "invalid", "reason": str(error)}
        except FlagError as error:
            yield {"id": name, "status": "unknown", "reason": str(error)}


class _Jobs:
    """Predicts jobs; what plugins say of a cluster is asked once."""

    def __init__(self, loaded: LoadedPlugins) -> None:
        self.loaded = loaded
        self.costs = lru_cache(maxsize=None)(self._costs)

    def predict(self, job: Job) -> dict[str, Any]:
        """Return status and figures of one job."""
        chip = self.loaded.find_chip(job.chip)
        if chip is None:
            return {"status": "unknown", "reason": f"no installed plugin knows the chip {job.chip!r}"}
        workload = plugins.workload(job.train.engine)
        group = NodeGroup(
            chip=chip,
            nodes=max(1, -(-job.devices // job.devices_per_node)),
            devices_per_node=min(job.devices_per_node, job.devices),
        )
        train = replace(job.train, implementation=job.train.implementation or PUBLISHED_IMPLEMENTATION)
        spec = Spec(model=job.model, cluster=ClusterSpec(chip=chip.name), train=train)
        task = Task(spec=spec, cluster=Cluster(groups=(group,), present=False))
        if task.cluster.devices != job.devices:
            reason = f"cluster.devices = {job.devices} is no multiple of devices_per_node = {job.devices_per_node}"
            return {"status": "invalid", "reason": reason}
        unmodelled = workload.unmodelled(job.candidate)
        if unmodelled:
            return {"status": "unknown", "reason": unmodelled}
        columns, broken = check(workload.columns(task, job.candidate), workload.rules(task), workload.merges(task))
        if broken:
            return {"status": "invalid", "reason": "; ".join(rule.says for rule in broken)}
        figures = workload.predict(task, columns, self.costs(chip.name, group.nodes, group.devices_per_node)).row(0)
        return {"status": "ok", **record(task, figures)}

    def _costs(self, chip: str, nodes: int, devices_per_node: int) -> Costs:
        known = self.loaded.find_chip(chip)
        assert known is not None
        group = NodeGroup(chip=known, nodes=nodes, devices_per_node=devices_per_node)
        return costs(Cluster(groups=(group,)), self.loaded, "megatron")


def _row(problem: Problem, row: int) -> dict[str, Any]:
    prediction = record(problem.platform.task, problem.predictions.row(row))
    return {"candidate": problem.space.candidate(row).as_dict(), **prediction}
