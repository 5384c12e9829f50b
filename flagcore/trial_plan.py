"""Plans a trial: its prediction, its time limit, its shortened steps, and the memory that it needs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flagcore.contracts import Workload
from flagcore.domain.candidate import Candidate
from flagcore.domain.search_state import SearchTime
from flagcore.domain.space import BoolArray
from flagcore.domain.spec import Task, TrainSpec
from flagcore.domain.trial import PROBE, Role, Shortened, TimeLimit, Trial, TrialState
from flagcore.problem import Problem
from flagcore.scale_down import SmallerTask
from flagcore.stages.limit import search_time, time_limit
from flagcore.stages.predict import GIB, predict_columns, predict_stage_layers, record
from flagcore.stages.probe import ranks_to_probe
from flagcore.stages.shorten import shorten


def predicted_trial(problem: Problem, workload: Workload, candidate: Candidate, role: Role, fidelity: str) -> Trial:
    """Return a trial of a candidate with its prediction."""
    row, platform = _row(problem, candidate), problem.platform
    layers = predict_stage_layers(platform.task, workload, problem.space.columns(np.array([row])), platform.costs)
    return Trial(
        number=0,
        candidate=candidate,
        role=role,
        state=TrialState.RUNNING,
        predicted=record(platform.task, problem.predictions.row(row), layers.get(0, ())),
        fidelity=fidelity,
    )


def plan_time_limit(
    problem: Problem, workload: Workload, trial: Trial, earlier: Sequence[Trial], ranks: int | None = None
) -> TimeLimit:
    """Return the time limit of a trial, given the `earlier` trials of the run.

    `ranks` is the number of ranks of a probe; None: as many as `ranks_to_probe` returns.
    """
    platform = problem.platform
    if trial.fidelity != PROBE:
        return time_limit(platform.task, workload, trial, earlier)
    launches = ranks or len(ranks_to_probe(platform, workload, trial.candidate))
    return time_limit(platform.task, workload, trial, (), launches)


def plan_shortened_steps(
    problem: Problem, workload: Workload, trial: Trial, runs: int = 0, most_nodes: int | None = None
) -> Shortened | None:
    """Return how the steps of a trial are shortened; None if they are whole.

    Its candidate already has `runs` runs. The trial uses at most `most_nodes` nodes if others were lost.
    """
    row, task = _row(problem, trial.candidate), problem.platform.task
    columns, sizes = problem.space.columns(np.array([row])), task.spec.trial_nodes
    nodes = min(sizes[min(runs, len(sizes) - 1)], most_nodes or task.spec.cluster.nodes)
    if task.spec.control.trial_nodes or nodes < task.spec.cluster.nodes:
        smaller = SmallerTask(task, workload, nodes)
        return smaller.shortened(columns, problem.platform.costs, problem.predictions.row(row))
    if trial.role is Role.REPEAT:
        return None

    def predict_step(task: Task) -> float:
        return float(predict_columns(task, workload, columns, problem.platform.costs).step_time_s[0])

    return shorten(task, workload, trial.candidate, _expected_step(trial), predict_step)


def can_run_on(problem: Problem, workload: Workload, nodes: int) -> BoolArray:
    """Return which rows of the space can run on `nodes` of the nodes, with fewer replicas."""
    return SmallerTask(problem.platform.task, workload, nodes).runs(problem.space.columns(), problem.platform.costs)


def candidate_to_run(problem: Problem, workload: Workload, trial: Trial) -> Candidate:
    """Return the candidate that a trial runs, which has fewer replicas on fewer nodes."""
    if not (trial.shortened and trial.shortened.nodes):
        return trial.candidate
    columns = problem.space.columns(np.array([_row(problem, trial.candidate)]))
    smaller = SmallerTask(problem.platform.task, workload, trial.shortened.nodes)
    return smaller.candidate(columns, problem.legality.axes)


def memory_needed(task: Task, trial: Trial) -> float:
    """Return the predicted memory in bytes that a trial needs on one node, 0 if unknown.

    For servers and probes, which may use fewer devices, it is the memory of one device.
    """
    used: Any = (trial.predicted.get("memory") or {}).get("device_used_gib")  # type: ignore[attr-defined]
    if not isinstance(used, float) or not math.isfinite(used):
        return 0.0
    uses_whole_node = isinstance(task.spec.work, TrainSpec) and trial.fidelity != PROBE
    return used * GIB * (task.cluster.groups[0].devices_per_node if uses_whole_node else 1)


def estimate_search_time(problem: Problem, workload: Workload) -> SearchTime:
    """Return the estimated time of a search that tries the candidates with the fastest predictions."""
    rows, max_trials = problem.pruned.open_rows, problem.platform.task.spec.control.max_trials
    if rows.size > max_trials:
        step = np.nan_to_num(problem.predictions.step_time_s[rows], nan=np.inf)
        rows = rows[np.argpartition(step, max_trials)[:max_trials]]
    return search_time(problem.platform.task, workload, problem.predictions, rows)


def _row(problem: Problem, candidate: Candidate) -> int:
    row = problem.space.find(candidate)
    assert row is not None, "every candidate that runs is in the space"
    return row


def _expected_step(trial: Trial) -> float | None:
    """Return the predicted seconds of a step, corrected by earlier trials if possible; None if unknown."""
    for prediction in (trial.believed or {}, trial.predicted):
        step: Any = prediction.get("step_time_s")
        if isinstance(step, Mapping) and math.isfinite(step["value"]):
            return float(step["value"])
    return None
