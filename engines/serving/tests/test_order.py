"""What follows from a trial that ran out of memory, and which candidates cannot keep the SLO."""

from typing import Any

import numpy as np
import pytest
from flagcore_serving.engine import SloImpossible
from flagcore_vllm.engine import ENGINE

from flagcore.domain.prediction import Predictions
from flagcore.domain.space import Candidate


def columns(**values: list[int]) -> dict[str, Any]:
    return {knob: np.array(codes) for knob, codes in values.items()}


@pytest.mark.parametrize(
    ("values", "failed", "expected"),
    [
        # more sequences never need less memory
        (
            {"max_num_seqs": [32, 64, 128, 128], "instances": [1, 1, 1, 2]},
            {"max_num_seqs": 64, "instances": 1},
            [False, True, True, False],
        ),
        # graphs need at least as much memory as eager mode
        ({"enforce_eager": [0, 1]}, {"enforce_eager": True}, [True, True]),
        ({"enforce_eager": [0, 1]}, {"enforce_eager": False}, [True, False]),
        # an unset knob and words have no order
        ({"max_num_seqs": [0, 64]}, {"max_num_seqs": None}, [True, False]),
        ({"max_num_seqs": [0]}, {"max_num_seqs": 8}, [False]),
        ({"kv_cache_type": [1, 2]}, {"kv_cache_type": "f16"}, [False, False]),
    ],
)
def test_candidates_that_need_at_least_as_much_memory(values: Any, failed: Any, expected: list[bool]) -> None:
    assert ENGINE.needs_at_least(columns(**values), Candidate.of(failed)).tolist() == expected


def test_a_schedulers_knobs_have_no_order_in_time() -> None:
    assert not ENGINE.takes_at_least(columns(max_num_seqs=[1, 64]), Candidate.of({"max_num_seqs": 1})).any()


@pytest.mark.parametrize(
    ("limit", "low", "pruned"),
    [
        ("ttft_s.p99", 0.9, [False, False, True, False]),
        ("ttft_s.p99", 0.5, [False] * 4),
        ("itl_s.p99", 0.9, [False] * 4),  # it is not predicted
    ],
)
def test_only_candidates_that_certainly_break_the_slo_are_pruned(limit: str, low: float, pruned: list[bool]) -> None:
    ttft = [0.5, 2.4, 2.6 if low == 0.9 else 3.9, float("nan")]
    seconds, zeros = np.ones(len(ttft)), np.zeros(len(ttft))
    predictions = Predictions(
        step_time_s=seconds,
        low_s=seconds * low,
        high_s=seconds / low,
        time_s={},
        static_bytes=zeros,
        activation_bytes=zeros,
        peak_allocated_bytes=zeros,
        reserved_bytes=zeros,
        device_used_bytes=zeros,
        worst_stage=zeros.astype(np.int64),
        capacity_bytes=None,
        model_flops=0.0,
        figures={"ttft_s.p99": np.array(ttft)},
    )
    assert SloImpossible({limit: 1.0}).prunes(columns(parallel=[1, 2, 3, 4]), predictions).tolist() == pruned
