"""The strategies predicted and random."""

from dataclasses import replace

import numpy as np

from flagcore.tuner.strategies import PREDICTED, RANDOM
from tests.tuner.strategies.contexts import SPACE, search_context


def test_the_fastest_predicted_comes_first() -> None:
    seen = search_context(open_rows=np.arange(0, len(SPACE), 2))
    chosen = PREDICTED.next(seen).row
    assert chosen in seen.open_rows
    assert seen.predictions.step_time_s[chosen] == seen.predictions.step_time_s[seen.open_rows].min()


def test_ties_in_time_are_ordered_by_memory_and_unknown_times_are_tried_last() -> None:
    known, unknown = search_context().predictions, np.full(len(SPACE), np.nan)
    tied = search_context(replace(known, step_time_s=np.ones_like(known.step_time_s)))
    assert known.device_used_bytes[PREDICTED.next(tied).row] == known.device_used_bytes.min()
    unknown[3] = 1.0
    assert PREDICTED.next(search_context(replace(known, step_time_s=unknown))).row == 3


def test_random_search_draws_open_rows_reproducibly() -> None:
    seen = search_context(open_rows=np.arange(3, len(SPACE), 7))
    rows = [RANDOM.next(seen).row for _ in range(2)]
    assert rows[0] == rows[1]
    assert rows[0] in seen.open_rows
