"""What follows from a trial that ran out of memory, and which candidates cannot keep the SLO."""

from __future__ import annotations

from typing import Any

import numpy as np

from flagcore.domain.candidate import Candidate
from flagcore.domain.prediction import Predictions
from flagcore.engines.serving.engine import SloImpossible
from flagcore.engines.serving.vllm.profile import WORKLOAD


def columns(**values: list[int]) -> dict[str, Any]:
    return {knob: np.array(codes) for knob, codes in values.items()}


def predictions(ttft: list[float], low: float) -> Predictions:
    seconds, zeros = np.ones(len(ttft)), np.zeros(len(ttft))
    return Predictions(
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


def test_more_sequences_never_need_less_memory() -> None:
    failed = Candidate.of({"max_num_seqs": 64, "instances": 1})
    assert WORKLOAD.needs_at_least(
        columns(max_num_seqs=[32, 64, 128, 128], instances=[1, 1, 1, 2]), failed
    ).tolist() == [
        False,
        True,
        True,
        False,
    ]


def test_graphs_need_at_least_as_much_memory_as_eager_mode() -> None:
    assert WORKLOAD.needs_at_least(columns(enforce_eager=[0, 1]), Candidate.of({"enforce_eager": True})).all()
    assert WORKLOAD.needs_at_least(columns(enforce_eager=[0, 1]), Candidate.of({"enforce_eager": False})).tolist() == [
        True,
        False,
    ]


def test_an_unset_knob_has_no_order() -> None:
    failed = Candidate.of({"max_num_seqs": None})
    assert WORKLOAD.needs_at_least(columns(max_num_seqs=[0, 64]), failed).tolist() == [True, False]
    assert not WORKLOAD.needs_at_least(columns(max_num_seqs=[0]), Candidate.of({"max_num_seqs": 8})).any()


def test_words_have_no_order() -> None:
    assert not WORKLOAD.needs_at_least(columns(kv_cache_type=[1, 2]), Candidate.of({"kv_cache_type": "f16"})).any()


def test_a_schedulers_knobs_have_no_order_in_time() -> None:
    assert not WORKLOAD.takes_at_least(columns(max_num_seqs=[1, 64]), Candidate.of({"max_num_seqs": 1})).any()


def test_candidates_that_certainly_break_the_slo_are_pruned() -> None:
    rule = SloImpossible({"ttft_s.p99": 1.0})
    candidates = columns(parallel=[1, 2, 3, 4])
    sure = rule.prunes(candidates, predictions([0.5, 2.4, 2.6, float("nan")], low=0.9))
    assert sure.tolist() == [False, False, True, False]
    assert not rule.prunes(candidates, predictions([0.5, 2.4, 2.6, 3.9], low=0.5)).any()


def test_a_limit_on_an_unpredicted_figure_excludes_no_candidate() -> None:
    assert not SloImpossible({"itl_s.p99": 0.001}).prunes(columns(parallel=[1]), predictions([9.0], low=0.9)).any()
