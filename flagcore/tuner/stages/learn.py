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
        own_trials = [
            replace(each, inconclusive=True) if each.group is not None and each.state in TIMED_STATES else each
            for each in own_trials
        ]
    by_candidate = _results(own_trials)
    state = SearchState(
        by_candidate=by_candidate,
        repeats=tuple(trial for trial in own_trials if trial.role is Role.REPEAT),
        baseline=next((trial for trial in by_candidate.values() if trial.role is Role.BASELINE), None),
        probes=tuple(trial for trial in trials if trial.fidelity != fidelity),
        interference=measured_interference,
    )
    timed = [each for each in by_candidate.values() if each.is_conclusive and state.runs_of(each.candidate)]
    order = sorted(timed, key=lambda trial: state.speed_of(trial.candidate), reverse=True)
    return replace(state, best=_best(state, order), fastest=next(iter(order), None))


def _results(trials: Sequence[Trial]) -> dict[Candidate, Trial]:
    """Return the result of each candidate: its first conclusive trial that did not fail, or else its last trial."""
    found: dict[Candidate, Trial] = {}
    for trial in trials:
        if trial.role in (Role.REPEAT, Role.INTERFERENCE):
            continue
        earlier = found.get(trial.candidate)
        if earlier is None or not earlier.is_conclusive or earlier.source or earlier.state is TrialState.FAILED:
            found[trial.candidate] = trial
    return found


def _best(state: SearchState, order: Sequence[Trial]) -> Trial | None:
    """Return the best of the measured trials in `order`, the fastest first. None if all exceed a limit."""
    kept = [trial for trial in order if state.keeps_limits(trial.candidate)]
    known = replace(state, best=next(iter(kept), None))
    rivals = {trial.candidate for trial in known.rivals}
    near = [each for each in kept if each is known.best or each.candidate in rivals]
    again = [each for each in near if state.repeats_of(each.candidate)] or near[:1]
    speeds = [state.speed_of(each.candidate) for each in again]
    spreads = [spread(state.runs_of(each.candidate)) for each in again]
    equals = [
        each
        for each, speed, own in zip(again, speeds, spreads, strict=True)
        if speed >= (1.0 - max(MIN_NOISE, own, spreads[0])) * speeds[0]
    ]
    settings = {*state.baseline.candidate.items} if state.baseline else set()
    return min(equals, key=lambda trial: len({*trial.candidate.items} - settings), default=None)
