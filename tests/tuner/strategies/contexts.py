"""What a strategy sees, of a small task whose measurements are made up from a true ratio."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from flagcore_testing.toy import ENGINE

from flagcore.contracts import SearchContext
from flagcore.domain.features import PastMeasurements
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import FloatArray, Pruned
from flagcore.domain.trial import Trial, TrialState
from flagcore.tuner.stages.build import build
from flagcore.tuner.stages.learn import learn
from flagcore.tuner.stages.predict import predict
from flagcore.tuner.stages.rank import search_context as look
from tests import tasks

TASK = tasks.task(
    dataclasses.replace(tasks.DENSE, hidden_size=1024, ffn_hidden_size=4096, num_layers=8),
    devices=8,
    seq_length=2048,
    global_batch_size=64,
)
SPACE = build(ENGINE.axes(TASK), ENGINE.rules(TASK), ENGINE.merges(TASK))


def predictions(capacity: float | None = 80e9) -> Predictions:
    return predict(tasks.platform(TASK, costs=tasks.costs(TASK, capacity)), SPACE)


def trial_of(row: int, seconds: float | None, number: int, used: float | None = None) -> Trial:
    """A trial of `row` that was measured, or ran out of memory without `seconds`."""
    trial = tasks.trial(number, SPACE.candidate(row), seconds, duration_s=30.0)
    if trial.measurement is None:
        return dataclasses.replace(trial, state=TrialState.OUT_OF_MEMORY)
    memory = None if used is None else int(used)
    measured = dataclasses.replace(trial.measurement, step_times_s=(seconds,) * 4, device_used_bytes=memory)
    return dataclasses.replace(trial, measurement=measured)


def search_context(
    of: Predictions | None = None,
    trials: Sequence[Trial] = (),
    open_rows: Any = None,
    past: PastMeasurements | None = None,
) -> SearchContext:
    """Look at `trials`; open are `open_rows` without what ran."""
    known, size = of or predictions(), len(SPACE)
    rule = np.zeros(size, dtype=np.int16)
    if open_rows is not None:
        rule[np.setdiff1d(np.arange(size), open_rows)] = 1
    pruned = Pruned(
        rule=rule, trial=np.full(size, -1), exceeds_memory=np.zeros(size, dtype=np.bool_), rules=("elsewhere",)
    )
    problem = tasks.problem(tasks.platform(TASK), SPACE, known, pruned=pruned)
    return look(problem, learn(trials), past or PastMeasurements.empty())


def distorted(known: Predictions, seed: int = 0, spread: float = 0.05, times: float = 1.0) -> FloatArray:
    """Return true seconds of all rows: each part of the step off by a factor of its own, and each row by a little."""
    generator = np.random.default_rng(seed)
    total = sum(part * np.exp(generator.normal(0.0, 0.15)) for part in known.time_s.values())
    real: FloatArray = times * np.asarray(total) * np.exp(generator.normal(0.0, spread, len(known.step_time_s)))
    return real
