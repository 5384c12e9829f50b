"""The order in which candidates are tried."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flagcore.domain.prediction import Predictions
from flagcore.domain.space import Space
from flagcore.domain.trial import Role, Trial, TrialState
from flagcore.stages.build import build
from flagcore.stages.predict import predict
from flagcore.strategies.by_prediction import STRATEGY
from flagcore.workloads.megatron import WORKLOAD
from tests import small


@pytest.fixture(scope="module")
def known() -> tuple[Space, Predictions]:
    task = small.task()
    space = build(WORKLOAD.axes(task), WORKLOAD.rules(task), WORKLOAD.merges(task))
    return space, predict(task, WORKLOAD, space, small.platform(task).costs)


def tried(space: Space, rows: list[int]) -> list[Trial]:
    state = TrialState.MEASURED
    return [
        Trial(number=n, candidate=space.candidate(row), role=Role.SEARCH, state=state) for n, row in enumerate(rows)
    ]


def order(space: Space, predictions: Predictions, count: int) -> list[int]:
    rows: list[int] = []
    for _ in range(count):
        left = np.setdiff1d(np.arange(len(space)), rows)
        rows.append(STRATEGY.next(left, predictions, space, tried(space, rows)))
    return rows


def test_each_knob_that_could_win_is_turned_before_the_order_is_trusted(known: tuple[Space, Predictions]) -> None:
    space, predictions = known
    rows = order(space, predictions, 12)
    turned = [
        axis.knob
        for axis in space.axes
        if any(space.candidate(row).as_dict()[axis.knob] != axis.neutral for row in rows)
    ]
    winners = predictions.low_s <= predictions.high_s.min()
    columns = space.columns()
    possible = [a.knob for a in space.axes if (columns[a.knob][winners] != a.encode(a.neutral)).any()]
    assert set(possible) <= set(turned)


def test_once_every_knob_was_turned_the_fastest_predicted_comes_first(known: tuple[Space, Predictions]) -> None:
    space, predictions = known
    rows = list(range(len(space)))
    half = rows[::2]
    left = np.setdiff1d(rows, half)
    chosen = STRATEGY.next(left, predictions, space, tried(space, half))
    assert predictions.step_time_s[chosen] == predictions.step_time_s[left].min()


def test_of_equal_times_the_one_that_needs_less_memory_goes_first(known: tuple[Space, Predictions]) -> None:
    space, predictions = known
    same = replace(predictions, step_time_s=np.ones_like(predictions.step_time_s))
    left = np.arange(len(space))
    chosen = STRATEGY.next(left, same, space, tried(space, list(left)))
    assert predictions.device_used_bytes[chosen] == predictions.device_used_bytes.min()


def test_unknown_times_are_tried_last(known: tuple[Space, Predictions]) -> None:
    space, predictions = known
    left = np.arange(len(space))
    unknown = np.full(len(space), np.nan)
    unknown[3] = 1.0
    some = replace(predictions, step_time_s=unknown, low_s=unknown, high_s=unknown)
    assert STRATEGY.next(left, some, space, tried(space, list(left))) == 3
