"""learn: derive the state of the search from finished trials."""

from collections.abc import Sequence
from dataclasses import replace

from flagcore.domain.space import Candidate
from flagcore.domain.trial import RUN, TIMED_STATES, Role, Trial, TrialState
from flagcore.tuner.search_state import MIN_NOISE, SearchState, interference, spread


def learn(trials: Sequence[Trial], fidelity: str = RUN) -> SearchState:
    """Return the state of the search after its finished trials.

    The result of a candidate is its first conclusive trial that did not fail, or its last trial if there is none.
    A trial of this run replaces a trial from another tool. Imported trials, repeats, interference trials and trials of
    another `fidelity` do not count as results. If parallel trials disturb each other, parallel trials with step times
    are marked inconclusive. The best is the fastest candidate or, if candidates that are not significantly slower ran
    again, the fastest of those, because a single run may be fast by chance. Of several that ran again and differ by at
    most MIN_NOISE or the spread of their runs, it is the one with the fewest settings that differ from the baseline.
    """
    trials = [trial for trial in trials if trial.role is not Role.IMPORTED]
    own_trials = [trial for trial in trials if trial.fidelity == fidelity]
    measured_interference = interference(own_trials)
    if measured_interference and not measured_interference.is_negligible:
        disturbed = {each.number for each in own_trials if each.group is not None and each.state in TIMED_STATES}
        own_trials = [replace(each, inconclusive=True) if each.number in disturbed else each for each in own_trials]
    by_candidate: dict[Candidate, Trial] = {}
    for trial in own_trials:
        if trial.role in (Role.REPEAT, Role.INTERFERENCE):
            continue
        earlier = by_candidate.get(trial.candidate)
        if earlier is None or not earlier.is_conclusive or earlier.source or earlier.state is TrialState.FAILED:
            by_candidate[trial.candidate] = trial
    baseline = [trial for trial in by_candidate.values() if trial.role is Role.BASELINE]
    repeats = tuple(trial for trial in own_trials if trial.role is Role.REPEAT)
    search_state = SearchState(
        by_candidate=by_candidate,
        repeats=repeats,
        baseline=baseline[0] if baseline else None,
        probes=tuple(trial for trial in trials if trial.fidelity != fidelity),
        interference=measured_interference,
    )
    measured = [each for each in by_candidate.values() if each.is_conclusive and search_state.runs_of(each.candidate)]

    def speed_of(trial: Trial) -> float:
        return search_state.speed_of(trial.candidate)

    order = sorted(measured, key=speed_of, reverse=True)
    kept = [trial for trial in order if search_state.keeps_limits(trial.candidate)]
    known = replace(search_state, best=next(iter(kept), None))
    rivals = {trial.candidate for trial in known.rivals}
    near = [each for each in kept if each is known.best or each.candidate in rivals]
    again = [each for each in near if search_state.repeats_of(each.candidate)] or near[:1]
    spreads = {each.candidate: spread(search_state.runs_of(each.candidate)) for each in again}
    equals = [
        each
        for each in again
        if speed_of(each)
        >= (1.0 - max(MIN_NOISE, spreads[each.candidate], spreads[again[0].candidate])) * speed_of(again[0])
    ]
    settings = {*baseline[0].candidate.items} if baseline else set()
    best = min(equals, key=lambda trial: len({*trial.candidate.items} - settings), default=None)
    return replace(search_state, best=best, fastest=next(iter(order), None))
