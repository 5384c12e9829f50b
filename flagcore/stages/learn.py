"""learn: the state of the search after the trials so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flagcore.domain.candidate import Candidate
from flagcore.domain.growth import calibrated
from flagcore.domain.interference import interference
from flagcore.domain.search_state import SearchState
from flagcore.domain.trial import RUN, Role, Trial, TrialState

TIMED = (TrialState.MEASURED, TrialState.STOPPED)


def learn(trials: Sequence[Trial], fidelity: str = RUN) -> SearchState:
    """Return the state of a search of some fidelity after its finished trials.

    A repeat updates the measurement of its candidate. Trials of another fidelity and imported trials do not count as
    results of a candidate; a trial of the run replaces an imported one. If trials that run at once disturb each other,
    those that were timed so are inconclusive.
    """
    trials = [trial for trial in calibrated(trials) if trial.role is not Role.IMPORTED]
    own = [trial for trial in trials if trial.fidelity == fidelity]
    found = interference(own)
    if found and not found.quiet:
        disturbed = {each.number for each in own if each.group is not None and each.state in TIMED}
        own = [replace(each, inconclusive=True) if each.number in disturbed else each for each in own]
    first = [trial for trial in own if trial.role not in (Role.REPEAT, Role.INTERFERENCE)]
    by_candidate: dict[Candidate, Trial] = {}
    for trial in first:
        known = by_candidate.get(trial.candidate)
        if known is None or not known.settles or known.source:
            by_candidate[trial.candidate] = trial
    measured = [trial for trial in by_candidate.values() if trial.state is TrialState.MEASURED and trial.settles]
    baseline = [trial for trial in by_candidate.values() if trial.role is Role.BASELINE]
    repeats = tuple(trial for trial in own if trial.role is Role.REPEAT)
    search_state = SearchState(
        by_candidate=by_candidate,
        repeats=repeats,
        baseline=baseline[0] if baseline else None,
        best=None,
        probes=tuple(trial for trial in trials if trial.fidelity != fidelity),
    )
    order = sorted(measured, key=lambda trial: -search_state.speed_of(trial.candidate))
    best = next((trial for trial in order if search_state.keeps_limits(trial.candidate)), None)
    return replace(search_state, best=best, fastest=next(iter(order), None))
