"""Report on one candidate: its state with the reasons, and possible changes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from flagcore.api.candidate_parser import as_candidate, broken_rules_of, parse_candidate
from flagcore.api.explaining.elimination import OPEN, OUTSIDE, RAN, all_trials, state_of
from flagcore.api.explaining.neighbors import (
    CHUNK,
    believed_of_row,
    causes_of,
    changes,
    columns_of,
    differing,
    expected_s,
    nearest_measured,
    scale,
    scaled_times,
)
from flagcore.api.inputs import SpecLike
from flagcore.api.runs import no_best_error
from flagcore.api.snapshot import Snapshot, load_snapshot
from flagcore.domain.candidate import Candidate
from flagcore.domain.space import Columns, IntArray
from flagcore.errors import UsageError
from flagcore.i18n import _
from flagcore.report.candidate_report import CandidateReport
from flagcore.report.result import trial as trial_record
from flagcore.tuner.problem import rows_by_time
from flagcore.tuner.stages.build import canonical
from flagcore.tuner.stages.predict import record


def explain_candidate(
    where: SpecLike, candidate: str, *, chip: str | None = None, without: Collection[str] = ()
) -> CandidateReport:
    """Explain one candidate of a spec, or of a run's folder.

    `candidate` is `best`, `baseline`, a number (for a run the number of a trial, for a spec the position in the list of
    `estimate`, from 1), or knobs with values: `tp=2, pp=4, micro_batch_size=1`. Raises the errors of `flagcore.errors`.
    """
    return candidate_report(load_snapshot(where, chip, without), candidate)


def candidate_report(snapshot: Snapshot, name: str) -> CandidateReport:
    """Return the report on a candidate by its name, see `explain_candidate`. Raises UsageError."""
    columns, named = named_columns(snapshot, name)
    space = snapshot.problem.space
    columns, others = completed(snapshot, columns, named)
    rules = broken_rules_of(snapshot.problem, columns)
    canonical_columns = columns if rules else canonical(columns, snapshot.problem.legality.merges)
    equal_candidate, requested = as_candidate(space.axes, canonical_columns), as_candidate(space.axes, columns)
    row = None if rules else space.find(equal_candidate)
    prediction = None if rules else snapshot.record(canonical_columns)
    own_trials = [trial for trial in all_trials(snapshot) if trial.candidate == equal_candidate]
    state, because, learned = state_of(snapshot, equal_candidate, row, own_trials, rules, prediction)
    if state == OUTSIDE:
        because += [_("it would be removed: {rule}", rule=each) for each in snapshot.pruned_by(canonical_columns)]
    believed_of = believed_of_row(snapshot, row)
    step = None if prediction is None else _scaled(snapshot, row, prediction)
    nearest = nearest_measured(snapshot, canonical_columns, equal_candidate)
    to_change = changes(snapshot, canonical_columns, step, row)
    if state in (OPEN, RAN):
        to_change.pop("allowed", None)
    task, asked_for, kind = snapshot.task, name.strip().casefold(), "trial" if snapshot.run else "candidate"
    return CandidateReport(
        name="the candidate" if named else f"{kind} {asked_for}" if asked_for.isdecimal() else asked_for,
        where=str(snapshot.where),
        chip=task.cluster.chips,
        devices=task.cluster.devices,
        objective=task.spec.objective,
        candidate=equal_candidate.as_dict(),
        requested=requested.as_dict()
        if named & differing(requested.as_dict(), equal_candidate.as_dict()).keys()
        else None,
        state=state,
        because=tuple(because),
        rules=(*rules, *learned),
        predicted=prediction,
        believed=None if state == RAN else believed_of,
        expected_s=step if row is None else expected_s(snapshot, row),
        trials=tuple(trial_record(trial) for trial in own_trials),
        nearest=None
        if nearest is None
        else {**trial_record(nearest), "differs": differing(equal_candidate.as_dict(), nearest.candidate.as_dict())},
        changes={what: _change(snapshot, equal_candidate, other) for what, other in to_change.items()},
        causes=causes_of(snapshot, equal_candidate, prediction, step if row is None else expected_s(snapshot, row)),
        matches=tuple(_change(snapshot, equal_candidate, other) for other in others),
        knobs=snapshot.problem.knobs,
    )


MAX_MATCHES = 5
"""Maximum number of further candidates with the given knobs."""


def completed(snapshot: Snapshot, columns: Columns, named: Collection[str]) -> tuple[Columns, IntArray]:
    """Return the columns of the fastest candidate of the space with the named knobs, and the rows of the next ones.

    The columns are returned unchanged if they are a candidate of the space, or if the space has no such candidate.
    """
    space, merges = snapshot.problem.space, snapshot.problem.legality.merges
    unchanged: tuple[Columns, IntArray] = columns, np.array([], dtype=np.int64)
    if not named or space.find(as_candidate(space.axes, canonical(columns, merges))) is not None:
        return unchanged
    found = [unchanged[1]]
    for chunk in space.chunks(CHUNK):
        values = space.columns(chunk)
        found.append(chunk.start + np.flatnonzero(np.all([values[knob] == columns[knob] for knob in named], axis=0)))
    rows = np.concatenate(found)
    if not rows.size:
        return unchanged
    order = rows[np.lexsort((scaled_times(snapshot)[rows], snapshot.pruned.rule[rows] != 0))]
    return space.columns(order[:1]), order[1 : 1 + MAX_MATCHES]


def named_columns(snapshot: Snapshot, name: str) -> tuple[Columns, frozenset[str]]:
    """Return the columns (one row) of the candidate with a name, and the knobs in the name. Raises UsageError."""
    candidate = _by_name(snapshot, name.strip().casefold())
    if candidate is None:
        return parse_candidate(name, snapshot.problem)
    return columns_of(snapshot, candidate), frozenset()


def _by_name(snapshot: Snapshot, name: str) -> Candidate | None:
    """Return the candidate with a name; None if the name is a list of knobs."""
    run, order, location = snapshot.run, rows_by_time(snapshot.problem), snapshot.where
    if name == "baseline":
        return snapshot.problem.baseline
    if name == "best":
        if run is not None and run.best is None:
            raise no_best_error(run)
        if run is None and not order.size:
            raise UsageError(_("{where} has no best: {reason}", where=location, reason=_("no candidate is left")))
        return run.best.candidate if run and run.best else snapshot.problem.space.candidate(int(order[0]))
    digits = name.removeprefix("trial").strip()
    if not digits.isdecimal() or len(digits) > 9:
        return None
    number, trials = int(digits), {trial.number: trial for trial in all_trials(snapshot)}
    if run is not None and number not in trials:
        trial_numbers = ", ".join(map(str, sorted(trials))) or _("none")
        raise UsageError(
            _("{where} has no trial {number}; trials: {known}", where=location, number=number, known=trial_numbers)
        )
    if run is not None:
        return trials[number].candidate
    if not 1 <= number <= order.size:
        problem = _(
            "{where} has no candidate {number}; it has 1 to {last:,}", where=location, number=number, last=order.size
        )
        raise UsageError(problem)
    return snapshot.problem.space.candidate(int(order[number - 1]))


def _scaled(snapshot: Snapshot, row: int | None, predicted: Mapping[str, Any]) -> float | None:
    """Return the seconds of a step, scaled by measured over predicted times of the trials; None without a time."""
    if row is not None:
        time = float(scaled_times(snapshot)[row])
        return time if np.isfinite(time) else None
    step = predicted.get("step_time_s")
    return None if step is None else float(step["value"]) * scale(snapshot)


def _change(snapshot: Snapshot, candidate: Candidate, row: int) -> Mapping[str, Any]:
    other_candidate = snapshot.problem.space.candidate(row)
    trial_number = next(
        (trial.number for trial in snapshot.search_state.trials if trial.candidate == other_candidate), None
    )
    return {
        "candidate": other_candidate.as_dict(),
        "differs": differing(candidate.as_dict(), other_candidate.as_dict()),
        "predicted": record(snapshot.task, snapshot.problem.predictions.row(row)),
        "expected_s": expected_s(snapshot, row),
        "trial": trial_number,
        "measured": snapshot.search_state.speed_of(other_candidate) > 0.0,
    }
