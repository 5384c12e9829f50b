"""Neighbors of a candidate: distances to other candidates, and the differences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from flagcore.api.common.context import Snapshot
from flagcore.domain.candidate import Candidate, KnobValue
from flagcore.domain.space import Axis, Columns, FloatArray, IntArray
from flagcore.domain.trial import Trial, TrialState

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
