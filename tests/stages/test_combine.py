"""What a probe puts in the place of an estimate, and what it leaves."""

from dataclasses import replace

import pytest

from flagcore.domain.candidate import Candidate
from flagcore.domain.prediction import Prediction, RankPrediction
from flagcore.domain.probe import Probe, RankMeasurement, RankProbe
from flagcore.domain.trial import TrialState
from flagcore.physics.device_memory import PlainMemory
from flagcore.stages.combine import combine

MEMORY = PlainMemory(capacity=80e9, context_bytes=1e9, fragmentation=0.1)
PREDICTED = Prediction(
    step_time_s=4.0,
    low_s=3.0,
    high_s=6.0,
    time_s={
        "compute_s": 2.0,
        "tp_comm_s": 0.5,
        "cp_comm_s": 0.0,
        "ep_comm_s": 0.0,
        "pp_bubble_s": 1.0,
        "pp_comm_s": 0.1,
        "dp_comm_exposed_s": 0.2,
        "optimizer_s": 0.2,
    },
    static_bytes=20e9,
    activation_bytes=20e9,
    peak_allocated_bytes=40e9,
    reserved_bytes=44e9,
    device_used_bytes=45e9,
    capacity_bytes=80e9,
    fits=True,
    worst_stage=0,
    model_flops=1e15,
)
FIRST = RankMeasurement(
    stage=0,
    static_bytes=22_000_000_000,
    peak_forward_backward_bytes=60_000_000_000,
    peak_optimizer_bytes=30_000_000_000,
    peak_allocated_bytes=60_000_000_000,
    reserved_bytes=62_000_000_000,
    device_used_bytes=62_500_000_000,
    compute_time_s=2.5,
    compute_spread_s=0.0,
    optimizer_time_s=0.1,
    optimizer_spread_s=0.0,
    steps=3,
    microbatches=8,
    microbatches_run=8,
)
LAST = replace(FIRST, stage=3, reserved_bytes=30_000_000_000, device_used_bytes=30_500_000_000, compute_time_s=3.25)
RANK = RankPrediction(
    rank=0,
    static_bytes=0.0,
    peak_allocated_bytes=0.0,
    reserved_bytes=0.0,
    device_used_bytes=0.0,
    compute_time_s=None,
    optimizer_time_s=None,
)


WORK = ("compute_s", "tp_comm_s", "cp_comm_s", "ep_comm_s")


def probe(*measured: RankMeasurement, failed: TrialState | None = None) -> Probe:
    ranks = [RankProbe(rank=m.stage, state=TrialState.MEASURED, predicted=RANK, measured=m) for m in measured]
    if failed is not None:
        ranks.append(RankProbe(rank=9, state=failed, predicted=RANK, reason="why"))
    return Probe(candidate=Candidate(()), ranks=tuple(ranks))


def test_the_buffers_of_communicators_are_added_to_probed_memory() -> None:
    predicted = replace(PREDICTED, device_used_bytes=PREDICTED.device_used_bytes + 3e9)
    plain = combine(PREDICTED, probe(FIRST), MEMORY, WORK)
    buffers = combine(predicted, probe(FIRST), replace(MEMORY, communicator=1e9), WORK)
    assert buffers.device_used_bytes - plain.device_used_bytes == 3e9


def test_the_rank_with_the_highest_peak_determines_the_memory() -> None:
    found = combine(PREDICTED, probe(LAST, FIRST), MEMORY, WORK)
    assert found.worst_stage == 0
    assert found.static_bytes == 22e9
    assert found.activation_bytes == 38e9
    assert found.peak_allocated_bytes == 60e9
    assert found.reserved_bytes == 62e9
    assert found.fits is True


def test_buffers_of_collectives_that_a_probe_does_not_have_are_added() -> None:
    assert combine(PREDICTED, probe(FIRST), MEMORY, WORK).device_used_bytes == 63e9
    shown = replace(FIRST, device_used_bytes=70_000_000_000)
    assert combine(PREDICTED, probe(shown), MEMORY, WORK).device_used_bytes == 70e9


def test_a_probe_that_needs_more_memory_corrects_the_prediction() -> None:
    large = replace(FIRST, reserved_bytes=79_500_000_000)
    assert combine(PREDICTED, probe(large), MEMORY, WORK).fits is False


def test_a_missing_allocator_is_modelled() -> None:
    plain = replace(FIRST, reserved_bytes=None, device_used_bytes=0)
    found = combine(PREDICTED, probe(plain), MEMORY, WORK)
    assert found.reserved_bytes == pytest.approx(66e9)
    assert found.device_used_bytes == pytest.approx(67e9)


def test_running_out_of_memory_excludes_a_candidate() -> None:
    found = combine(PREDICTED, probe(FIRST, failed=TrialState.OUT_OF_MEMORY), MEMORY, WORK)
    assert found.fits is False
    assert found.device_used_bytes >= 80e9


def test_the_slowest_rank_determines_the_time_and_communication_stays_modelled() -> None:
    found = combine(PREDICTED, probe(FIRST, LAST), MEMORY, WORK)
    assert found.time_s["compute_s"] == 3.25
    assert found.time_s["optimizer_s"] == 0.1
    assert found.time_s["tp_comm_s"] == 0.5
    assert found.time_s["pp_bubble_s"] == pytest.approx(1.0 * 3.75 / 2.5)
    assert found.step_time_s == pytest.approx(sum(found.time_s.values()))


def test_the_interval_is_narrow_if_all_parts_were_measured() -> None:
    none = dict.fromkeys(PREDICTED.time_s, 0.0)
    bare = replace(PREDICTED, step_time_s=2.2, time_s={**none, "compute_s": 2.0, "optimizer_s": 0.2})
    found = combine(bare, probe(FIRST), MEMORY, WORK)
    assert found.step_time_s == pytest.approx(2.6)
    assert found.low_s is not None
    assert found.high_s is not None
    assert 0.9 * 2.6 < found.low_s < 2.6 < found.high_s < 1.25 * 2.6


def test_without_measurements_nothing_changes() -> None:
    assert combine(PREDICTED, probe(failed=TrialState.FAILED), MEMORY, WORK) == PREDICTED


def test_an_unpredictable_time_stays_unknown() -> None:
    unknown = replace(PREDICTED, step_time_s=None, low_s=None, high_s=None, time_s={})
    found = combine(unknown, probe(FIRST), MEMORY, WORK)
    assert found.step_time_s is None
    assert found.peak_allocated_bytes == 60e9
