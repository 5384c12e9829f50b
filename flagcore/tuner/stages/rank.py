"""rank: choose the next candidate."""

from collections.abc import Sequence

import numpy as np

from flagcore.contracts import Choice, Problem, SearchContext, Strategy
from flagcore.domain.features import PastMeasurements
from flagcore.domain.space import IntArray
from flagcore.domain.trial import Trial, TrialState
from flagcore.i18n import N_
from flagcore.tuner.search_state import SearchState


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
