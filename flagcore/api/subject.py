"""A candidate of a spec or run with its predictions and measurements, and alternatives to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from flagcore.api.candidate_parser import broken_rules_of, parse_candidate
from flagcore.api.jobs import detailed_predictions
from flagcore.api.runs import Snapshot, all_trials, columns_of, no_best_error
from flagcore.domain.prediction import Belief, Prediction
from flagcore.domain.space import Axis, Candidate, Columns, FloatArray, IntArray, KnobValue, as_candidate
from flagcore.domain.trial import Trial, TrialState, is_disturbed
from flagcore.errors import NothingFits, UsageError
from flagcore.i18n import N_, _
from flagcore.report.explanation import causes_text
from flagcore.tuner.feasibility import nothing_fits_text
from flagcore.tuner.problem import listed_last, recommended_row, rows_by_time
from flagcore.tuner.stages.build import canonical

UNSET = 0.25
"""The distance of a knob that only one of two candidates sets: small, because such knobs often depend on others."""
STEP = 1 / 64
"""The additional distance per factor of two between the values of a knob. It only orders candidates that differ in
equally many knobs."""
NEAR = 2.75
"""The maximum distance of a nearby candidate: about two knobs, because the parallel sizes depend on each other."""
MAX_MATCHES = 5
"""The maximum number of further candidates that have the named knob values."""
CHUNK = 1 << 18


class Subject:
    """A candidate of a snapshot.

    - `requested`: the candidate as the user gave it.
    - `candidate`: the equivalent one that the engine runs.
    - `columns`: its columns with one row.
    - `row`: its row in the space, or None if it is outside.
    - `broken`: the legality rules that it breaks; if there are any, `predicted` is None.
    - `trials`: its trials.
    - `runs`: its measured runs.
    - `named`: the knobs that `name` contains.
    - `others`: if `name` does not determine a candidate of the space, the fastest matching one is used, and these are
      the rows of the next ones.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        columns: Columns,
        name: str = "",
        named: frozenset[str] = frozenset(),
        others: Sequence[int] = (),
    ) -> None:
        problem, axes = snapshot.problem, snapshot.problem.space.axes
        self.snapshot, self.name, self.named, self.others = snapshot, name, named, others
        self.broken = broken_rules_of(problem, columns)
        self.columns = columns if self.broken else canonical(columns, problem.legality.merges)
        self.requested, self.candidate = as_candidate(axes, columns), as_candidate(axes, self.columns)
        self.row = None if self.broken else problem.space.find(self.candidate)
        self.predicted = None if self.broken else snapshot.predicted(self.columns, self.row)
        self.trials = [trial for trial in all_trials(snapshot.run) if trial.candidate == self.candidate]
        stored = next((trial.predicted for trial in self.trials if trial.predicted and not trial.source), None)
        if stored and self.predicted:  # what was predicted before the trial, also if calibrations have changed since
            found = self.predicted
            self.predicted = replace(stored, components=found.components, stage_layers=found.stage_layers)
        self.predicted_s = self.predicted.step_time_s if self.predicted else None
        self.runs = snapshot.search_state.runs_of(self.candidate)

    @classmethod
    def of(cls, snapshot: Snapshot, name: str) -> Subject:
        """Return the candidate `name`, in a form that `explain_candidate` accepts. Raises UsageError."""
        columns, named, others = named_columns(snapshot, name)
        typed, kind = name.strip().casefold(), "trial" if snapshot.run else "candidate"
        typed = "recommended" if typed == "best" and snapshot.run is None else typed
        shown_name = "the candidate" if named else f"{kind} {typed}" if typed.isdecimal() else typed
        return cls(snapshot, columns, shown_name, named, others.tolist())

    @classmethod
    def of_row(cls, snapshot: Snapshot, row: int) -> Subject:
        """Return the candidate of a row of the space."""
        return cls(snapshot, snapshot.problem.space.columns(np.array([row])))

    def at_load(self, load: float) -> Prediction | None:
        """Return its prediction at a fixed load, in place of the highest one. None if it is illegal."""
        platform = self.snapshot.problem.platform
        spec = platform.task.spec
        task = replace(platform.task, spec=replace(spec, work=spec.work.at_load(load)))
        return None if self.broken else detailed_predictions(replace(platform, task=task), self.columns)[0]

    @property
    def measured_s(self) -> float | None:
        """The median step time of its runs in seconds, or None if there are no runs."""
        speed = self.snapshot.search_state.speed_of(self.candidate)
        return 1.0 / speed if speed else None

    @property
    def comparable_s(self) -> float | None:
        """`measured_s`, or None if other programs used cores in all runs: no prediction can be compared with these."""
        return None if is_disturbed(self.runs) else self.measured_s

    @cached_property
    def believed(self) -> Belief | None:
        """The prediction corrected by the trials of the run.

        It is None for a spec, or if the run has no trials.
        """
        snapshot, row = self.snapshot, self.row
        if not snapshot.has_trials or row is None:
            return None
        from flagcore.tuner.strategies.learned import believed  # only trials need SciPy

        return believed(snapshot.context, row)

    @cached_property
    def scaled_s(self) -> float | None:
        """The predicted step time in seconds, scaled by measured over predicted times of trials. None if unknown."""
        if self.row is None:
            return self.predicted_s and self.predicted_s * scale(self.snapshot)
        seconds = float(scaled_times(self.snapshot)[self.row])
        return seconds if np.isfinite(seconds) else None

    @cached_property
    def known_s(self) -> float | None:
        """The step time in seconds without other programs: as measured, else as corrected by trials, else as predicted.

        The time of a trial that was stopped early is a lower bound.
        """
        if self.row is None or self.comparable_s:
            return self.comparable_s or self.scaled_s
        lower_bound_s = _stopped_at(self.snapshot, self.candidate)
        predicted_s = self.snapshot.problem.predictions.row(self.row).step_time_s
        step = self.believed.step_time_s if self.believed else predicted_s
        return max((each for each in (step, lower_bound_s) if each is not None), default=None)

    def differing(self, other: Candidate) -> dict[str, tuple[KnobValue, KnobValue]]:
        """Return the knobs in which this and another candidate differ, each with both values."""
        mine, others = self.candidate.as_dict(), other.as_dict()
        knobs = dict.fromkeys([*mine, *others])
        return {knob: (mine.get(knob), others.get(knob)) for knob in knobs if mine.get(knob) != others.get(knob)}

    @property
    def causes(self) -> str:
        """A paragraph that compares the candidate with the best (or recommended) one, or that with the baseline.

        It is empty if the reasons for the difference are unknown.
        """
        best, baseline = best_of(self.snapshot), self.snapshot.problem.baseline
        is_best = self.candidate == best
        best_name = _("the best") if self.snapshot.run else _("the recommended candidate")
        candidate, name = (baseline, _("the baseline")) if is_best else (best, best_name)
        known = None if candidate == self.candidate else candidate
        row = None if known is None else self.snapshot.problem.space.find(known)
        if row is None or self.predicted is None or self.known_s is None:
            return ""
        other = Subject.of_row(self.snapshot, row)
        if other.known_s is None:
            return ""
        seconds, source = (other.known_s, self.known_s), expected_text((self, other))
        if other.measured_s and self.measured_s:
            seconds, source = (other.measured_s, self.measured_s), _("measured")
        has_rounds = is_best and source == _("measured")
        return self.causes_against(other, name, seconds, source, has_rounds=has_rounds)

    def causes_against(
        self, other: Subject, name: str, seconds: tuple[float, float], source: str, *, has_rounds: bool = False
    ) -> str:
        """Return a paragraph on where the candidate spends more or less time than `other`; see `causes_text`."""
        objective, predicted = self.snapshot.task.spec.objective, (other.predicted, self.predicted)
        return causes_text(objective, name, seconds, predicted, source, has_rounds=has_rounds)

    def changes(self) -> dict[str, int]:
        """Return the rows of up to three alternatives to the candidate, by the kind of alternative.

        `allowed`: the nearest row that may be tried. `faster`: the fastest nearby row, if its scaled time is below the
        candidate's. `fastest`: the fastest of all rows, if it is faster than the candidate.
        """
        space, rows = self.snapshot.problem.space, allowed_rows(self.snapshot)
        rows = rows[rows != (-1 if self.row is None else self.row)]
        if not rows.size:
            return {}
        pieces = (space.columns(rows[start : start + CHUNK]) for start in range(0, rows.size, CHUNK))
        distances = np.concatenate([_distances(space.axes, self.columns, piece) for piece in pieces])
        time, own_s = scaled_times(self.snapshot)[rows], np.inf if self.scaled_s is None else self.scaled_s
        places = {"allowed": int(np.lexsort((time, distances))[0])}
        near = np.flatnonzero((distances <= NEAR) & (time < own_s))
        if near.size:
            places["faster"] = int(near[np.argmin(time[near])])
        if time.min() < own_s:
            places["fastest"] = int(np.lexsort((distances, time))[0])
        return {kind: int(rows[place]) for kind, place in places.items()}


def expected_text(sides: Iterable[Subject]) -> str:
    """Return how the `known_s` of subjects are known, of which at least one was not measured."""
    text = N_("expected after trials") if any(each.snapshot.has_trials for each in sides) else N_("predicted")
    is_disturbed_once = any(each.measured_s and not each.comparable_s for each in sides)
    return _("expected after trials, if no other program uses the cores") if is_disturbed_once else _(text)


def named_columns(snapshot: Snapshot, name: str) -> tuple[Columns, frozenset[str], IntArray]:
    """Return the columns (one row) of the candidate with this name, the knobs that the name contains, and the rows of
    the next candidates with these knobs.

    Knobs mean the fastest candidate that has them or, in a run, the trial that tables show with exactly these knobs.
    Raises UsageError.
    """
    candidate = _by_name(snapshot, name.strip().casefold())
    if candidate is not None:
        return columns_of(snapshot, candidate), frozenset(), np.array([], dtype=np.int64)
    columns, named = parse_candidate(name, snapshot.problem)
    whole, others = _completed(snapshot, columns, named)
    return whole, named, others


def best_of(snapshot: Snapshot) -> Candidate | None:
    """Return the best candidate of a run, or the recommended candidate of a spec.

    Returns None if there is none.
    """
    if snapshot.run is not None:
        return snapshot.run.best.candidate if snapshot.run.best else None
    row = recommended_row(snapshot.problem)
    return None if row is None else snapshot.problem.space.candidate(row)


def _by_name(snapshot: Snapshot, name: str) -> Candidate | None:
    """Return the candidate with this name, or None if the name is a list of knobs. Raises UsageError."""
    run, where = snapshot.run, snapshot.where
    if name == "baseline":
        return snapshot.problem.baseline
    if name in ("best", "recommended"):
        if best := best_of(snapshot):
            return best
        if run is not None:
            raise no_best_error(run)
        raise NothingFits(nothing_fits_text(snapshot.problem))
    digits = name.removeprefix("trial").strip()
    if not digits.isdecimal() or len(digits) > 9:
        return None
    number = int(digits)
    if run is not None:
        trials = {trial.number: trial for trial in all_trials(run)}
        if number in trials:
            return trials[number].candidate
        known = ", ".join(map(str, trials)) or _("none")
        raise UsageError(_("{where} has no trial {number}; trials: {known}", where=where, number=number, known=known))
    order = rows_by_time(snapshot.problem)
    if not 1 <= number <= order.size:
        numbers = {"number": number, "last": order.size}
        raise UsageError(_("{where} has no candidate {number}; it has 1 to {last:,}", where=where, **numbers))
    return snapshot.problem.space.candidate(int(order[number - 1]))


def _completed(snapshot: Snapshot, columns: Columns, named: frozenset[str]) -> tuple[Columns, IntArray]:
    """Return the columns of the fastest candidate in the space with the named knobs, and the rows of the next ones.

    The columns are returned unchanged if they have a trial, or if no candidate matches.
    """
    space, rows = snapshot.problem.space, np.array([], dtype=np.int64)
    exact = as_candidate(space.axes, canonical(columns, snapshot.problem.legality.merges))
    if any(trial.candidate == exact for trial in all_trials(snapshot.run)):
        return columns, rows
    for chunk in space.chunks(CHUNK):
        values = space.columns(chunk)
        found = np.flatnonzero(np.all([values[knob] == columns[knob] for knob in named], axis=0))
        rows = np.concatenate((rows, chunk.start + found))
    if not rows.size:
        return columns, rows
    last = listed_last(snapshot.problem)[rows]
    order = rows[np.lexsort((scaled_times(snapshot)[rows], last, snapshot.pruned.rule[rows] != 0))]
    return space.columns(order[:1]), order[1 : 1 + MAX_MATCHES]


def _distances(axes: Iterable[Axis], candidate: Columns, others: Columns) -> FloatArray:
    """Return about how many knobs of each row of `others` differ from the only row of `candidate`."""
    total = np.zeros(next(iter(others.values())).shape)
    for axis in axes:
        value, other = candidate[axis.knob], others[axis.knob]
        unset = (axis.neutral is None) & ((value == 0) | (other == 0))
        is_size = not (axis.words or axis.is_flag)
        ratio = np.abs(np.log2((1.0 + np.abs(other)) / (1.0 + np.abs(value)))) if is_size else 1.0
        total += (value != other) * (np.where(unset, UNSET, 1.0) + STEP * np.minimum(ratio, 8.0))
    return total


def allowed_rows(snapshot: Snapshot) -> IntArray:
    """Return the rows that could be the best: measured rows, and rows that no rule or trial excluded.

    All of them meet the latency limits, and none is `listed_last`, except for measured rows, which also stay if a rule
    that follows from a later trial removes them.
    """
    space, state, rows = snapshot.problem.space, snapshot.search_state, snapshot.pruned.open_rows
    failed = [each for each in state.trials if each.state.failed and each.state is not TrialState.INTERRUPTED]
    excluded = [row for trial in failed if (row := space.find(trial.candidate)) is not None]
    measured = [(state.keeps_limits(trial.candidate), row) for trial, row in _measured(snapshot)]
    excluded += [row for is_kept, row in measured if not is_kept]
    open_rows: IntArray = np.setdiff1d(
        rows[listed_last(snapshot.problem)[rows] == 0], np.array(excluded, dtype=np.int64)
    )
    return np.union1d(open_rows, np.array([row for is_kept, row in measured if is_kept], dtype=np.int64))


def scaled_times(snapshot: Snapshot) -> FloatArray:
    """Return the step time of each row in seconds: as measured without other programs, else the scaled prediction, else
    infinity.

    The scale is the median of measured over predicted times, 1 without such trials. The time of a trial that was
    stopped early is a lower bound.
    """
    times = np.nan_to_num(snapshot.problem.predictions.step_time_s * scale(snapshot), nan=np.inf)
    for trial in snapshot.search_state.trials:
        lower_bound_s, row = _stopped_at(snapshot, trial.candidate), snapshot.problem.space.find(trial.candidate)
        if lower_bound_s is not None and row is not None:
            times[row] = max(times[row], lower_bound_s) if np.isfinite(times[row]) else lower_bound_s
    for trial, row in _measured(snapshot, comparable=True):
        times[row] = 1.0 / snapshot.search_state.speed_of(trial.candidate)
    return times


def scale(snapshot: Snapshot) -> float:
    """Return the median ratio of measured to predicted step times, or 1 if there are no measurements."""
    predicted_s = snapshot.problem.predictions.step_time_s
    measured = ((trial.measurement, predicted_s[row]) for trial, row in _measured(snapshot, comparable=True))
    ratios = [each.step_time_s / seconds for each, seconds in measured if each and np.isfinite(seconds)]
    return float(np.median(ratios)) if ratios else 1.0


def _stopped_at(snapshot: Snapshot, candidate: Candidate) -> float | None:
    """Return the step time in seconds of the candidate's trial that was stopped early, or None if there is none."""
    trial = snapshot.search_state.by_candidate.get(candidate)
    is_stopped = trial is not None and trial.state is TrialState.STOPPED
    return trial.measurement.step_time_s if trial and is_stopped and trial.measurement else None


def _measured(snapshot: Snapshot, *, comparable: bool = False) -> list[tuple[Trial, int]]:
    """Return the measured trials, without disturbed ones if `comparable`, of candidates in the space with their row."""
    state, find = snapshot.search_state, snapshot.problem.space.find
    trials = (each for each in state.trials if each.state is TrialState.MEASURED and each.measurement)
    known = (each for each in trials if not (comparable and is_disturbed(state.runs_of(each.candidate))))
    return [(trial, row) for trial in known if (row := find(trial.candidate)) is not None]
