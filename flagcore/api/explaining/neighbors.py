"""Neighbors of a candidate: distances of others, and the changes between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from flagcore.api.common.context import Snapshot
from flagcore.domain.candidate import Candidate, KnobValue
from flagcore.domain.space import Axis, Columns, FloatArray, IntArray
from flagcore.domain.trial import Trial, TrialState

UNSET = 0.25
"""A knob that one of two candidates leaves unset counts so much: it often follows from another one."""
STEP = 1 / 64
"""Twice the value of a knob is farther than once by so much: it only decides between equals."""
NEAR = 2.75
"""Candidates at this distance or less are near: two knobs, as where one size takes what another one leaves."""
CHUNK = 1 << 18


def differing(here: Mapping[str, KnobValue], there: Mapping[str, KnobValue]) -> dict[str, tuple[KnobValue, KnobValue]]:
    """Return the knobs in which two candidates differ, with the value of each."""
    knobs = dict.fromkeys([*here, *there])
    return {knob: (here.get(knob), there.get(knob)) for knob in knobs if here.get(knob) != there.get(knob)}


def distances(axes: Iterable[Axis], here: Columns, there: Columns) -> FloatArray:
    """Return how far the rows of `there` are from the one row of `here`: about how many knobs differ."""
    total = np.zeros(next(iter(there.values())).shape)
    for axis in axes:
        own, other = here[axis.knob], there[axis.knob]
        differs = own != other
        unset = (axis.neutral is None) & ((own == 0) | (other == 0))
        ratio = 1.0 if axis.words or axis.is_flag else np.abs(np.log2((1.0 + np.abs(other)) / (1.0 + np.abs(own))))
        total += differs * (np.where(unset, UNSET, 1.0) + STEP * np.minimum(ratio, 8.0))
    return total


def allowed_rows(snapshot: Snapshot) -> IntArray:
    """Return the rows that could be the best: measured, or no rule removed them, no trial of them failed, limits are
    kept. What a trial taught later takes nothing from what was measured before."""
    space, predictions = snapshot.problem.space, snapshot.problem.predictions
    keeps = predictions.keeps_limits(snapshot.task.spec.limits)
    failed = [t for t in snapshot.search_state.trials if t.state.failed and t.state is not TrialState.INTERRUPTED]
    excluded = [row for trial in failed if (row := space.find(trial.candidate)) is not None]
    ran = {True: list[int](), False: list[int]()}
    for trial, row in _measured(snapshot):
        ran[snapshot.search_state.keeps_limits(trial.candidate)].append(row)
    excluded += ran[False]
    found = np.array(ran[True], dtype=np.int64)
    rows = snapshot.pruned.open_rows
    left: IntArray = np.setdiff1d(rows[keeps[rows]], np.array(excluded, dtype=np.int64))
    return np.union1d(left, found)


def scaled_times(snapshot: Snapshot) -> FloatArray:
    """Return the seconds of a step of each row: measured where it was, else predicted, on the scale of the trials.

    That scale is the median of measured over predicted; without trials it is 1. The
    times of a stopped trial are a lower bound. Infinite where nothing is known.
    """
    predicted = snapshot.problem.predictions.step_time_s
    times = np.nan_to_num(predicted * scale(snapshot), nan=np.inf)
    for trial in snapshot.search_state.trials:
        least, row = stopped_at(snapshot, trial.candidate), snapshot.problem.space.find(trial.candidate)
        if least is not None and row is not None:
            times[row] = max(times[row], least) if np.isfinite(times[row]) else least
    for trial, row in _measured(snapshot):
        times[row] = 1.0 / snapshot.search_state.speed_of(trial.candidate)
    return times


def stopped_at(snapshot: Snapshot, candidate: Candidate) -> float | None:
    """Return the seconds of a step that a candidate's trial had when it was stopped as slower, None without such."""
    trial = snapshot.search_state.by_candidate.get(candidate)
    if trial is None or trial.state is not TrialState.STOPPED or trial.measurement is None:
        return None
    return trial.measurement.step_time_s


def scale(snapshot: Snapshot) -> float:
    """Return the median of measured over predicted step times, 1 before any is measured."""
    predicted = snapshot.problem.predictions.step_time_s
    ratios = [
        trial.measurement.step_time_s / predicted[row]
        for trial, row in _measured(snapshot)
        if trial.measurement and np.isfinite(predicted[row])
    ]
    return float(np.median(ratios)) if ratios else 1.0


def changes(snapshot: Snapshot, columns: Columns, step_s: float | None, itself: int | None) -> dict[str, int]:
    """Return rows to change a candidate to, by what that gives.

    `allowed` is the smallest change to one that may be tried, `faster` the fastest one nearby that takes less than
    `step_s` by `scaled_times`, and `fastest` that of all. `itself`, the candidate's own row, is in none.
    """
    space, rows = snapshot.problem.space, allowed_rows(snapshot)
    rows = rows[rows != (-1 if itself is None else itself)]
    if not rows.size:
        return {}
    pieces = (rows[start : start + CHUNK] for start in range(0, rows.size, CHUNK))
    far = np.concatenate([distances(space.axes, columns, space.columns(piece)) for piece in pieces])
    time, most = scaled_times(snapshot)[rows], np.inf if step_s is None else step_s
    found = {"allowed": int(np.lexsort((time, far))[0])}
    close = np.flatnonzero((far <= NEAR) & (time < most))
    if close.size:
        found["faster"] = int(close[np.argmin(time[close])])
    if time.min() < most:
        found["fastest"] = int(np.lexsort((far, time))[0])
    return {what: int(rows[place]) for what, place in found.items()}


def nearest_measured(snapshot: Snapshot, columns: Columns, candidate: Candidate) -> Trial | None:
    """Return the measured trial of another candidate that is nearest; None if none was measured."""
    others = [
        trial
        for trial in snapshot.search_state.trials
        if trial.state is TrialState.MEASURED and trial.candidate != candidate
    ]
    axes = snapshot.problem.space.axes
    far = [distances(axes, columns, columns_of(snapshot, trial.candidate))[0] for trial in others]
    return others[int(np.argmin(far))] if others else None


def _measured(snapshot: Snapshot) -> list[tuple[Trial, int]]:
    ran = [trial for trial in snapshot.search_state.trials if trial.state is TrialState.MEASURED and trial.measurement]
    return [(trial, row) for trial in ran if (row := snapshot.problem.space.find(trial.candidate)) is not None]


def columns_of(snapshot: Snapshot, candidate: Candidate) -> Columns:
    """Return the columns of one candidate."""
    values, axes = candidate.as_dict(), snapshot.problem.space.axes
    return {axis.knob: np.array([axis.encode(values.get(axis.knob, axis.neutral))]) for axis in axes}
