"""Neighbors of a candidate, and where it spends more or less time than the best."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from flagcore.api.snapshot import Snapshot
from flagcore.domain.candidate import Candidate, KnobValue
from flagcore.domain.space import Axis, Columns, FloatArray, IntArray
from flagcore.domain.trial import Trial, TrialState
from flagcore.i18n import _
from flagcore.report.candidate_report import causes_text, figure_pairs
from flagcore.report.formats import lookup
from flagcore.tuner.problem import rows_by_time
from flagcore.tuner.strategies.learned import believed

UNSET = 0.25
"""Distance of a knob that only one of two candidates sets. It is small, because such knobs often depend on others."""
STEP = 1 / 64
"""Additional distance per factor of two in the value of a knob. It only orders candidates with equally many
differences.
"""
NEAR = 2.75
"""Maximum distance of a nearby candidate: two knobs, because the parallel sizes depend on each other."""
CHUNK = 1 << 18


def differing(
    candidate: Mapping[str, KnobValue], other: Mapping[str, KnobValue]
) -> dict[str, tuple[KnobValue, KnobValue]]:
    """Return the knobs in which two candidates differ, with the value of each."""
    knobs = dict.fromkeys([*candidate, *other])
    return {knob: (candidate.get(knob), other.get(knob)) for knob in knobs if candidate.get(knob) != other.get(knob)}


def distances(axes: Iterable[Axis], candidate: Columns, others: Columns) -> FloatArray:
    """Return the distances of the rows of `others` from the only row of `candidate`: about the number of differing
    knobs.
    """
    total = np.zeros(next(iter(others.values())).shape)
    for axis in axes:
        value, other_value = candidate[axis.knob], others[axis.knob]
        is_different = value != other_value
        unset = (axis.neutral is None) & ((value == 0) | (other_value == 0))
        ratio = (
            1.0 if axis.words or axis.is_flag else np.abs(np.log2((1.0 + np.abs(other_value)) / (1.0 + np.abs(value))))
        )
        total += is_different * (np.where(unset, UNSET, 1.0) + STEP * np.minimum(ratio, 8.0))
    return total


def allowed_rows(snapshot: Snapshot) -> IntArray:
    """Return the rows that could be the best: measured rows, and rows that no rule removed and no trial ruled out.

    All rows meet the latency limits. A rule that follows from a later trial does not remove a measured row.
    """
    space, predictions = snapshot.problem.space, snapshot.problem.predictions
    within_limits = predictions.keeps_limits(snapshot.task.spec.limits)
    failed_trials = [
        t for t in snapshot.search_state.trials if t.state.failed and t.state is not TrialState.INTERRUPTED
    ]
    excluded = [row for trial in failed_trials if (row := space.find(trial.candidate)) is not None]
    rows_by_outcome = {True: list[int](), False: list[int]()}
    for trial, row in _measured(snapshot):
        rows_by_outcome[snapshot.search_state.keeps_limits(trial.candidate)].append(row)
    excluded += rows_by_outcome[False]
    best_rows = np.array(rows_by_outcome[True], dtype=np.int64)
    rows = snapshot.pruned.open_rows
    open_rows: IntArray = np.setdiff1d(rows[within_limits[rows]], np.array(excluded, dtype=np.int64))
    return np.union1d(open_rows, best_rows)


def scaled_times(snapshot: Snapshot) -> FloatArray:
    """Return the step time of each row in seconds: as measured, else the scaled prediction, else infinity.

    The scale is the median of measured over predicted; without trials it is 1. The time of a stopped trial is a lower
    bound.
    """
    predicted_s = snapshot.problem.predictions.step_time_s
    times = np.nan_to_num(predicted_s * scale(snapshot), nan=np.inf)
    for trial in snapshot.search_state.trials:
        least, row = stopped_at(snapshot, trial.candidate), snapshot.problem.space.find(trial.candidate)
        if least is not None and row is not None:
            times[row] = max(times[row], least) if np.isfinite(times[row]) else least
    for trial, row in _measured(snapshot):
        times[row] = 1.0 / snapshot.search_state.speed_of(trial.candidate)
    return times


def stopped_at(snapshot: Snapshot, candidate: Candidate) -> float | None:
    """Return the step time of a candidate's trial that was stopped early, in seconds; None without such a trial."""
    trial = snapshot.search_state.by_candidate.get(candidate)
    if trial is None or trial.state is not TrialState.STOPPED or trial.measurement is None:
        return None
    return trial.measurement.step_time_s


def scale(snapshot: Snapshot) -> float:
    """Return the median of measured over predicted step times, 1 without a measurement."""
    predicted_s = snapshot.problem.predictions.step_time_s
    ratios = [
        trial.measurement.step_time_s / predicted_s[row]
        for trial, row in _measured(snapshot)
        if trial.measurement and np.isfinite(predicted_s[row])
    ]
    return float(np.median(ratios)) if ratios else 1.0


def changes(snapshot: Snapshot, columns: Columns, step_s: float | None, itself: int | None) -> dict[str, int]:
    """Return rows that are alternatives to a candidate, by kind.

    `allowed` is the nearest row that may be tried, `faster` the fastest nearby row with a scaled time below `step_s`,
    and `fastest` the fastest of all rows. `itself`, the candidate's own row, is excluded.
    """
    space, rows = snapshot.problem.space, allowed_rows(snapshot)
    rows = rows[rows != (-1 if itself is None else itself)]
    if not rows.size:
        return {}
    pieces = (rows[start : start + CHUNK] for start in range(0, rows.size, CHUNK))
    row_distances = np.concatenate([distances(space.axes, columns, space.columns(piece)) for piece in pieces])
    time, max_time = scaled_times(snapshot)[rows], np.inf if step_s is None else step_s
    rows_by_change = {"allowed": int(np.lexsort((time, row_distances))[0])}
    close_rows = np.flatnonzero((row_distances <= NEAR) & (time < max_time))
    if close_rows.size:
        rows_by_change["faster"] = int(close_rows[np.argmin(time[close_rows])])
    if time.min() < max_time:
        rows_by_change["fastest"] = int(np.lexsort((row_distances, time))[0])
    return {what: int(rows[place]) for what, place in rows_by_change.items()}


def nearest_measured(snapshot: Snapshot, columns: Columns, candidate: Candidate) -> Trial | None:
    """Return the nearest measured trial of another candidate; None without one."""
    other_trials = [
        trial
        for trial in snapshot.search_state.trials
        if trial.state is TrialState.MEASURED and trial.candidate != candidate
    ]
    axes = snapshot.problem.space.axes
    trial_distances = [distances(axes, columns, columns_of(snapshot, trial.candidate))[0] for trial in other_trials]
    return other_trials[int(np.argmin(trial_distances))] if other_trials else None


def _measured(snapshot: Snapshot) -> list[tuple[Trial, int]]:
    measured_trials = [
        trial for trial in snapshot.search_state.trials if trial.state is TrialState.MEASURED and trial.measurement
    ]
    return [
        (trial, row) for trial in measured_trials if (row := snapshot.problem.space.find(trial.candidate)) is not None
    ]


def columns_of(snapshot: Snapshot, candidate: Candidate) -> Columns:
    """Return the columns of one candidate."""
    values, axes = candidate.as_dict(), snapshot.problem.space.axes
    return {axis.knob: np.array([axis.encode(values.get(axis.knob, axis.neutral))]) for axis in axes}


def causes_of(
    snapshot: Snapshot, candidate: Candidate, predicted: Mapping[str, Any] | None, seconds: float | None
) -> str:
    """Return a paragraph that compares a candidate with the best, or the best with the baseline; empty if unknown.

    `seconds` is the step time of the candidate as measured, believed or predicted.
    """
    best, baseline = best_of(snapshot), snapshot.problem.baseline
    other, name = (best, _("the best")) if candidate != best else (baseline, _("the baseline"))
    row = None if other is None or other == candidate else snapshot.problem.space.find(other)
    if other is None or row is None or predicted is None or seconds is None:
        return ""
    other_s, other_predicted = expected_s(snapshot, row), snapshot.record(columns_of(snapshot, other))
    if other_s is None:
        return ""
    parts = figure_pairs(*(each.get("time") or {} for each in (other_predicted, predicted)))
    are_measured = all(snapshot.search_state.speed_of(each) for each in (candidate, other))
    source = _("measured") if are_measured else _("expected after trials") if snapshot.run else _("predicted")
    steps = (lookup(other_predicted, "step_time_s.value"), lookup(predicted, "step_time_s.value"))
    has_rounds = candidate == best and are_measured
    return causes_text(
        snapshot.task.spec.objective, name, (other_s, seconds), steps, parts, source, has_rounds=has_rounds
    )


def best_of(snapshot: Snapshot) -> Candidate | None:
    """Return the best of a run, or the fastest predicted candidate of a spec."""
    if snapshot.run is not None:
        return snapshot.run.best.candidate if snapshot.run.best else None
    order = rows_by_time(snapshot.problem)
    return snapshot.problem.space.candidate(int(order[0])) if order.size else None


def believed_of_row(snapshot: Snapshot, row: int | None) -> Mapping[str, Any] | None:
    """Return the prediction as corrected by trials of this and earlier runs; None for a spec, or without trials."""
    has_trials = snapshot.search_state.trials or snapshot.search_state.probes or len(snapshot.context.past.time)
    if snapshot.run is None or row is None or not has_trials:
        return None
    return believed(snapshot.context, row)


def expected_s(snapshot: Snapshot, row: int) -> float | None:
    """Return the seconds of a step as measured, else as corrected by trials, else as predicted.

    The time of a stopped trial is a lower bound.
    """
    candidate = snapshot.problem.space.candidate(row)
    speed = snapshot.search_state.speed_of(candidate)
    if speed:
        return 1.0 / speed
    trusted, least = believed_of_row(snapshot, row), stopped_at(snapshot, candidate)
    step = trusted["step_time_s"]["value"] if trusted else snapshot.problem.predictions.row(row).step_time_s
    return max((float(each) for each in (step, least) if each is not None), default=None)
