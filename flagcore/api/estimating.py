"""Predict without running: the candidates of a spec, where they went, and job records."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from flagcore import plugins
from flagcore.api.telling import loaded_plugins, tell_of_problem
from flagcore.contracts import Costs, Workload
from flagcore.domain.candidate import Candidate
from flagcore.domain.cluster import Cluster, NodeGroup
from flagcore.domain.engine import EngineSupport
from flagcore.domain.job import Job
from flagcore.domain.knowledge import Lessons
from flagcore.domain.plan import Counts, count
from flagcore.domain.spec import ClusterSpec, Spec, Task
from flagcore.errors import FlagError, NothingFits, NotModelled, RunError, SpecError
from flagcore.plugins import LoadedPlugins
from flagcore.problem import Problem, must_fit, pose
from flagcore.spec import read_job, read_spec
from flagcore.stages.build import check, refusals
from flagcore.stages.discover import costs
from flagcore.stages.predict import record
from flagcore.stages.prune import LEARNED


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The best predicted candidates of a spec, and where all others went."""

    chip: str
    devices: int
    counts: Counts
    baseline: Mapping[str, Any]
    candidates: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Where all combinations went, what each rule that can remove one says, by its name, and why a run ended.

    `nothing_fits` says, if no candidate is left before any trial, how close the closest came.
    """

    counts: Counts
    says: Mapping[str, str]
    ended_because: str | None = None
    nothing_fits: str | None = None


def estimate(
    spec_file: Path | str,
    *,
    chip: str | None = None,
    top: int = 10,
    without: Collection[str] = (),
) -> Estimate:
    """Predict all candidates of `spec_file` and return the `top` fastest. Nothing runs, no hardware is needed.

    `chip` names a chip to plan for instead of the spec's. Raises the errors of `flagcore.errors`.
    """
    problem, workload = _pose(Path(spec_file), chip, without)
    must_fit(problem)
    rows = problem.pruned.open_rows
    time = np.nan_to_num(problem.predictions.step_time_s[rows], nan=np.inf)
    order = rows[np.lexsort((problem.predictions.device_used_bytes[rows], time))[:top]]
    baseline = problem.space.find(problem.baseline)
    assert baseline is not None
    task = problem.platform.task
    return Estimate(
        chip=task.cluster.groups[0].chip.name,
        devices=task.cluster.devices,
        counts=_before_trials(problem),
        baseline=_row(problem, workload, baseline),
        candidates=tuple(_row(problem, workload, int(row)) for row in order),
    )


def explain(where: Path | str, *, chip: str | None = None, without: Collection[str] = ()) -> Explanation:
    """Tell where every combination of a spec file went, or of a run's folder with what its trials taught.

    Raises the errors of `flagcore.errors`.
    """
    path = Path(where)
    problem, workload = _pose(path / "spec.yaml" if path.is_dir() else path, chip, without)
    counts, because = _before_trials(problem), None
    if path.is_dir():
        try:
            known = json.loads((path / "result.json").read_text(encoding="utf-8"))
            counts, because = Counts(**known["counts"]), str(known["stopped_because"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(f"{path / 'result.json'} cannot be read ({error}); `flag tune` writes it") from None
    platform, task = problem.platform, problem.platform.task
    legality = (*workload.rules(task), *refusals(workload.axes(task), platform.support))
    pruning = (*workload.pruning_rules(task), *platform.pruning_rules)
    says = {rule.name: rule.says for rule in legality} | {rule.name: rule.says for rule in pruning}
    nothing_fits = None
    try:
        must_fit(problem)
    except NothingFits as error:
        nothing_fits = str(error)
    return Explanation(counts=counts, says=says | LEARNED, ended_because=because, nothing_fits=nothing_fits)


def _pose(spec_file: Path, chip: str | None, without: Collection[str]) -> tuple[Problem, Workload]:
    spec = read_spec(spec_file)
    if chip is not None:
        spec = replace(spec, cluster=replace(spec.cluster, chip=chip))
    workload = plugins.workload(spec.train.engine)
    with loaded_plugins(without) as loaded:
        problem = pose(spec, loaded, workload)
    tell_of_problem(problem)
    return problem, workload


def _before_trials(problem: Problem) -> Counts:
    nothing = Lessons(by_candidate={}, repeats=(), baseline=None, best=None)
    return count(problem.space, problem.pruned, nothing)


def estimate_jobs(lines: Iterable[Mapping[str, Any]], *, without: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """Predict job records one by one, in order. A bad record gives a status and a reason, never an exception."""
    with loaded_plugins(without) as loaded:
        estimator = _Jobs(loaded)
        for line in lines:
            name = _name(line)
            try:
                yield {"id": name, **estimator.predict(read_job(line))}
            except NotModelled as error:
                yield {"id": name, "status": "unknown", "reason": str(error)}
            except SpecError as error:
                yield {"id": name, "status": "unknown" if _serves(line) else "invalid", "reason": str(error)}
            except FlagError as error:
                yield {"id": name, "status": "unknown", "reason": str(error)}


def _serves(line: object) -> bool:
    """Return whether a record is one of serving, which is not modelled yet."""
    return isinstance(line, Mapping) and line.get("kind") == "serve"


def _name(line: object) -> str | None:
    """Return the id of a job record as text that can be printed."""
    name = line.get("id") if isinstance(line, Mapping) else None
    return name.encode("utf-8", errors="replace").decode() if isinstance(name, str) else None


class _Jobs:
    """Predicts jobs; what plugins say of a cluster is asked once."""

    def __init__(self, loaded: LoadedPlugins) -> None:
        self._loaded = loaded
        self._platform = lru_cache(maxsize=None)(self._ask)

    def predict(self, job: Job) -> dict[str, Any]:
        """Return status and figures of one job."""
        chip = self._loaded.find_chip(job.chip)
        if chip is None:
            return {"status": "unknown", "reason": f"no installed plugin knows the chip {job.chip!r}"}
        if job.devices % min(job.devices_per_node, job.devices):
            reason = f"cluster.devices = {job.devices} is no multiple of devices_per_node = {job.devices_per_node}"
            return {"status": "invalid", "reason": reason}
        workload = plugins.workload(job.train.engine)
        devices = min(job.devices_per_node, job.devices)
        group, made, support = self._platform(chip.name, job.devices // devices, devices, job.train.engine)
        spec = Spec(model=job.model, cluster=ClusterSpec(chip=chip.name), train=job.train)
        bare = Task(spec=spec, cluster=Cluster(groups=(group,)))
        task, values, noted = workload.published(bare, job.candidate, job.notes)
        rules = [rule for rule in workload.rules(task) if rule.name not in noted]
        rules += refusals(workload.axes(task), support)
        columns, broken = check(workload.columns(task, values), rules, workload.merges(task))
        if broken:
            return {"status": "invalid", "reason": "; ".join(rule.says for rule in broken)}
        figures = workload.predict(task, columns, made).row(0)
        components = workload.components(task, Candidate.of(values), made)
        return {"status": "ok", **record(task, replace(figures, components=components))}

    def _ask(self, chip: str, nodes: int, devices: int, engine: str) -> tuple[NodeGroup, Costs, EngineSupport]:
        known = self._loaded.find_chip(chip)
        assert known is not None
        group = NodeGroup(chip=known, nodes=nodes, devices_per_node=devices)
        made = costs(Cluster(groups=(group,)), self._loaded, engine)
        return group, made, self._loaded.engine_support(known, engine)


def _row(problem: Problem, workload: Workload, row: int) -> dict[str, Any]:
    """Return one candidate with its prediction and, by component, what its worst stage holds."""
    task, candidate = problem.platform.task, problem.space.candidate(row)
    components = workload.components(task, candidate, problem.platform.costs)
    prediction = replace(problem.predictions.row(row), components=components)
    return {"candidate": candidate.as_dict(), **record(task, prediction)}
