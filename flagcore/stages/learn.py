"""learn: what the trials so far have taught."""

from __future__ import annotations

from collections.abc import Sequence

from flagcore.domain.candidate import Candidate
from flagcore.domain.knowledge import Lessons
from flagcore.domain.trial import Role, Trial, TrialState


def learn(trials: Sequence[Trial]) -> Lessons:
    """Return what finished trials teach. A repeat refines a candidate, it is not another one."""
    first = [trial for trial in trials if trial.role is not Role.REPEAT]
    by_candidate: dict[Candidate, Trial] = {}
    for trial in first:
        known = by_candidate.get(trial.candidate)
        if known is None or known.state is TrialState.INTERRUPTED:
            by_candidate[trial.candidate] = trial
    measured = [trial for trial in by_candidate.values() if trial.state is TrialState.MEASURED]
    baseline = [trial for trial in by_candidate.values() if trial.role is Role.BASELINE]
    return Lessons(
        by_candidate=by_candidate,
        repeats=tuple(trial for trial in trials if trial.role is Role.REPEAT),
        baseline=baseline[0] if baseline else None,
        best=max(measured, key=speed, default=None),
    )


def speed(trial: Trial) -> float:
    """Return tokens per second and device, 0 for a trial without a measurement."""
    return trial.measurement.tokens_per_second_per_device if trial.measurement else 0.0
