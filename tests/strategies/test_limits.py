"""The search under limits: what is likely to break them is not tried, and it ends where nothing can keep them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from flagcore.contracts import SearchContext
from flagcore.domain.prediction import Predictions
from flagcore.domain.serving import Load, ServeSpec
from flagcore.domain.trial import Trial
from flagcore.strategies.learned import STRATEGY
from tests.strategies.contexts import SPACE, predictions, search_context, trial_of

LIMIT = {"ttft_s.p99": 1.0}
WORK = ServeSpec(engine="vllm", loads=(Load(concurrency=8),), slo=LIMIT)


def known() -> Predictions:
    """The faster, the longer the first token takes: from 2 s of the fastest down to 0.5 s."""
    predicted = predictions(capacity=None)
    place = np.argsort(np.argsort(predicted.step_time_s))
    return dataclasses.replace(predicted, figures={"ttft_s.p99": 2.0 - 1.5 * place / place.max()})


def under_limits(trials: Sequence[Trial] = ()) -> SearchContext:
    seen = search_context(known(), trials)
    return dataclasses.replace(
        seen, task=dataclasses.replace(seen.task, spec=dataclasses.replace(seen.task.spec, work=WORK))
    )


def measured(row: int, number: int, times: float) -> Trial:
    """A trial of `row` whose first token took `times` as long as predicted."""
    predicted = known()
    trial = trial_of(row, float(predicted.step_time_s[row]), number)
    assert trial.measurement is not None
    ttft = float(predicted.figures["ttft_s.p99"][row]) * times
    broken = (f"ttft_s.p99 is {ttft} s",) if ttft > LIMIT["ttft_s.p99"] else ()
    return dataclasses.replace(
        trial, measurement=dataclasses.replace(trial.measurement, figures={"ttft_s.p99": ttft}, broken=broken)
    )


def test_candidates_predicted_to_break_a_limit_are_not_tried_first() -> None:
    choice = STRATEGY.next(under_limits())
    assert choice.row is not None
    assert known().figures["ttft_s.p99"][choice.row] < 1.2


def test_a_latency_above_its_prediction_moves_the_search_to_candidates_with_lower_latency() -> None:
    first = STRATEGY.next(under_limits()).row
    assert first is not None
    later = STRATEGY.next(under_limits([measured(first, 0, times=1.5)])).row
    assert later is not None
    assert known().figures["ttft_s.p99"][later] < known().figures["ttft_s.p99"][first]


def test_the_search_ends_if_no_candidate_is_likely_to_meet_the_limits() -> None:
    rows = np.linspace(0, len(SPACE) - 1, 8).astype(int)
    choice = STRATEGY.next(under_limits([measured(int(row), n, times=20.0) for n, row in enumerate(rows)]))
    assert choice.row is None
    assert "meets the limits" in choice.because
