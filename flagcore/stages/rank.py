"""rank: which candidate is tried next."""

from __future__ import annotations

import numpy as np

from flagcore.contracts import Choice, Scene, Strategy, Workload
from flagcore.domain.experience import Features, Past
from flagcore.domain.knowledge import Lessons, Pruned
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import IntArray, Space
from flagcore.domain.spec import Task
from flagcore.domain.trial import TrialState
from flagcore.learning import features


def rank(strategy: Strategy, scene: Scene) -> Choice:
    """Return what to try next: what was interrupted, else what `strategy` wants."""
    if not scene.open_rows.size:
        return Choice(row=None, because="every candidate is settled")
    for trial in scene.trials:
        if trial.state is TrialState.INTERRUPTED and (row := scene.space.find(trial.candidate)) in scene.open_rows:
            return Choice(row=row, because="it was interrupted")
    return strategy.next(scene)


def scene(
    task: Task,
    workload: Workload,
    space: Space,
    predictions: Predictions,
    pruned: Pruned,
    lessons: Lessons,
    past: Past,
    seconds_left: float | None = None,
) -> Scene:
    """Return what a strategy sees."""

    def of_rows(rows: IntArray) -> Features:
        columns = space.columns(rows)
        return features(space.axes, columns, predictions.take(rows), workload.sizes(task, columns))

    return Scene(
        task=task,
        space=space,
        predictions=predictions,
        open_rows=untried(space, pruned, lessons),
        trials=lessons.trials,
        features=of_rows,
        past=past,
        seconds_left=seconds_left,
        probes=lessons.probes,
    )


def untried(space: Space, pruned: Pruned, lessons: Lessons) -> IntArray:
    """Return the rows that no rule removed and no trial settled."""
    settled = [row for candidate in lessons.settled if (row := space.find(candidate)) is not None]
    open_rows: IntArray = np.setdiff1d(pruned.open_rows, np.array(settled, dtype=np.int64), assume_unique=True)
    return open_rows
