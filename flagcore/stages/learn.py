"""learn: derive the state of the search from its trials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flagcore.domain.candidate import Candidate
from flagcore.domain.growth import calibrated
from flagcore.domain.interference import interference
from flagcore.domain.search_state import SearchState
from flagcore.domain.trial import RUN, Role, Trial, TrialState

TIMED_STATES = (TrialState.MEASURED, TrialState.STOPPED)


def learn(trials: Sequence[Trial], fidelity: str = RUN) -> SearchState:
    """Return the state of a search of a fidelity after its finished trials.

    Trials of another fidelity, and trials with the role IMPORTED, are not results of a candidate. A trial of this run
    replaces one from another tool. If parallel trials disturb each other, those that were timed are inconclusive.
    """
    trials = [trial for trial in calibrated(trials) if trial.role is not Role.IMPORTED]
    own_trials = [trial for trial in trials if trial.fidelity == fidelity]
    found = interference(own_trials)
    if found and not found.is_negligible:
        disturbed = {each.number for each in own_trials if each.group is not None and each.state in TIMED_STATES}
        own_trials = [replace(each, inconclusive=True) if each.number in disturbed else each for each in own_trials]
    by_candidate: dict[Candidate, Trial] = {}
    for trial in own_trials:
        if trial.role in (Role.REPEAT, Role.INTERFERENCE):
            continue
        earlier = by_candidate.get(trial.candidate)
        if earlier is None or not earlier.is_conclusive or earlier.source:
            by_candidate[trial.candidate] = trial
    measured = [trial for trial in by_candidate.values() if trial.state is TrialState.MEASURED and trial.is_conclusive]
    baseline = [trial for trial in by_candidate.values() if trial.role is Role.BASELINE]
    repeats = tuple(trial for trial in own_trials if trial.role is Role.REPEAT)
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
