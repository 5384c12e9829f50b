"""Report on one candidate: its state with the reasons, and possible changes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from flagcore.api.explaining.states import OPEN, RAN, account_of
from flagcore.api.explaining.subject import Subject
from flagcore.api.inputs import SpecLike
from flagcore.api.snapshot import Snapshot, load_snapshot
from flagcore.report.candidate_report import CandidateReport
from flagcore.report.result import trial as trial_record
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
    subject = Subject.of(snapshot, name)
    account, nearest, changes = account_of(subject), subject.nearest_measured(), subject.changes()
    if account["state"] in (OPEN, RAN):
        changes.pop("allowed", None)
    is_equivalent = subject.named & subject.differing(subject.requested).keys()
    return CandidateReport(
        **account,
        objective=snapshot.task.spec.objective,
        requested=subject.requested.as_dict() if is_equivalent else None,
        expected_s=subject.expected_s,
        trials=tuple(trial_record(trial) for trial in subject.trials),
        nearest={**trial_record(nearest), "differs": subject.differing(nearest.candidate)} if nearest else None,
        changes={kind: _change(subject, row) for kind, row in changes.items()},
        causes=subject.causes,
        matches=tuple(_change(subject, row) for row in subject.others),
        knobs=snapshot.problem.knobs,
    )


def _change(subject: Subject, row: int) -> Mapping[str, Any]:
    snapshot, other = subject.snapshot, Subject.of_row(subject.snapshot, row)
    trials = (trial.number for trial in snapshot.search_state.trials if trial.candidate == other.candidate)
    return {
        "candidate": other.candidate.as_dict(),
        "differs": subject.differing(other.candidate),
        "predicted": record(snapshot.task, snapshot.problem.predictions.row(row)),
        "expected_s": other.expected_s,
        "trial": next(trials, None),
        "measured": other.measured_s is not None,
    }
