"""rank: choose the next candidate."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flagcore.contracts import Choice, SearchContext, Strategy, Workload
from flagcore.domain.effects import engine_task
from flagcore.domain.experience import Features, PastMeasurements, features
from flagcore.domain.prediction import Predictions
from flagcore.domain.search_state import Pruned, SearchState
from flagcore.domain.space import IntArray, Space
from flagcore.domain.spec import Task
from flagcore.domain.trial import Trial, TrialState
from flagcore.i18n import N_


def rank(strategy: Strategy, context: SearchContext) -> Choice:
    """Return the next candidate: an interrupted one, or the choice of `strategy`."""
    if not context.open_rows.size:
        return Choice(row=None, because=N_("all candidates have been tried or pruned"))
    for trial in context.trials:
        if trial.state is TrialState.INTERRUPTED and (row := context.space.find(trial.candidate)) in context.open_rows:
            return Choice(row=row, because="interrupted before")
    return strategy.next(context)


def search_context(
    task: Task,
    workload: Workload,
    space: Space,
    predictions: Predictions,
    pruned: Pruned,
    search_state: SearchState,
    past: PastMeasurements,
    seconds_left: float | None = None,
    pending: Sequence[Trial] = (),
) -> SearchContext:
    """Return the input of a strategy while `pending` trials run."""

    def features_of_rows(rows: IntArray) -> Features:
        columns = space.columns(rows)
        return features(space.axes, columns, predictions.take(rows), workload.sizes(engine_task(task), columns))

    return SearchContext(
        task=task,
        space=space,
        predictions=predictions,
        open_rows=untried(space, pruned, search_state, pending),
        trials=[trial for trial in search_state.trials if not trial.inconclusive],
        features=features_of_rows,
        past=past,
        seconds_left=seconds_left,
        probes=[probe for probe in search_state.probes if not probe.inconclusive],
        pending=pending,
    )


def untried(space: Space, pruned: Pruned, search_state: SearchState, pending: Sequence[Trial] = ()) -> IntArray:
    """Return the rows that were neither pruned nor tried."""
    tried = search_state.settled.union(trial.candidate for trial in pending)
    tried_rows = [row for candidate in tried if (row := space.find(candidate)) is not None]
    open_rows: IntArray = np.setdiff1d(pruned.open_rows, np.array(tried_rows, dtype=np.int64), assume_unique=True)
    return open_rows
