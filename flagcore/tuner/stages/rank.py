"""rank: derive the state of the search from its trials, and choose the next candidate."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from flagcore.contracts import Choice, Problem, SearchContext, Strategy
from flagcore.domain.plan import interference
from flagcore.domain.prediction import PastMeasurements
from flagcore.domain.search_state import MIN_NOISE, SearchState
from flagcore.domain.space import Candidate, IntArray
from flagcore.domain.trial import RUN, Role, Trial, TrialState
from flagcore.i18n import N_

TIMED_STATES = (TrialState.MEASURED, TrialState.STOPPED)


def learn(trials: Sequence[Trial], fidelity: str = RUN) -> SearchState:
    """Return the state of the search after its finished trials.

    The result of a candidate is its first conclusive trial that did not fail, or its last trial if there is none.
    A trial of this run replaces a trial from another tool. Imported trials, repeats, interference trials and trials of
    another `fidelity` do not count as results. If parallel trials disturb each other, parallel trials with step times
    are marked inconclusive. The best is the fastest candidate or, if candidates that are not significantly slower ran
    again, the fastest of those, because a single run may be fast by chance. Of several that ran again and are within
    MIN_NOISE, it is the one with the fewest settings that differ from the baseline.
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
    equals = [each for each in again if speed_of(each) >= (1.0 - MIN_NOISE) * speed_of(again[0])]
    settings = {*baseline[0].candidate.items} if baseline else set()
    best = min(equals, key=lambda trial: len({*trial.candidate.items} - settings), default=None)
    return replace(search_state, best=best, fastest=next(iter(order), None))


def rank(strategy: Strategy, context: SearchContext) -> Choice:
    """Return the next candidate: an interrupted one if there is any, or else the choice of `strategy`."""
    if not context.open_rows.size:
        return Choice(row=None, because=N_("all candidates have been tried or pruned"))
    for trial in context.trials:
        if trial.state is TrialState.INTERRUPTED and (row := context.space.find(trial.candidate)) in context.open_rows:
            return Choice(row=row, because="interrupted before")
    return strategy.next(context)


def search_context(
    problem: Problem,
    search_state: SearchState,
    past: PastMeasurements,
    seconds_left: float | None = None,
    pending: Sequence[Trial] = (),
) -> SearchContext:
    """Return the input for a strategy. `pending` are the trials that still run."""
    return SearchContext(
        problem=problem,
        open_rows=untried(problem, search_state, pending),
        trials=[trial for trial in search_state.trials if not trial.inconclusive],
        past=past,
        seconds_left=seconds_left,
        probes=[probe for probe in search_state.probes if not probe.inconclusive],
        pending=pending,
    )


def untried(problem: Problem, search_state: SearchState, pending: Sequence[Trial] = ()) -> IntArray:
    """Return the rows of the candidates that were neither pruned nor tried."""
    tried = search_state.settled.union(trial.candidate for trial in pending)
    tried_rows = [row for candidate in tried if (row := problem.space.find(candidate)) is not None]
    not_pruned = problem.pruned.open_rows
    return np.asarray(np.setdiff1d(not_pruned, np.array(tried_rows, dtype=np.int64), assume_unique=True))
