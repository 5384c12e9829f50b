"""Probes of single ranks, and what is concluded from them."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from flagcore_testing.toy import Toy, ToyProbes

from flagcore.contracts import Platform
from flagcore.domain.chip import Device
from flagcore.domain.engine import EngineSupport
from flagcore.domain.launch import Launch
from flagcore.domain.prediction import RankPrediction
from flagcore.domain.probe import Probe, RankMeasurement, RankProbe
from flagcore.domain.space import Candidate
from flagcore.domain.trial import TimeLimit, TrialState
from flagcore.launchers.local import LAUNCHER
from flagcore.physics.roofline import PlainMemory
from flagcore.tuner.devices import parallel_probe_ranks
from flagcore.tuner.probe import combine, probe
from tests import tasks
from tests.checks import within

METRICS = json.dumps({"step_s": 1.0, "loss": 1.0, "effective": {}}) + "\n"
TASK = tasks.task(devices=4)
CANDIDATE = tasks.candidate(pipeline_model_parallel_size=4, data_parallel_size=1)
RANKS = (0, 1, 2, 3)
PROGRAM = """
import json, os, sys, time
folder, rank, what = sys.argv[1], int(sys.argv[2]), sys.argv[3]
open(os.path.join(folder, "..", f"started-{rank}"), "w").write(str(os.getpid()))
def started():
    return sum(name.startswith("started-") for name in os.listdir(os.path.join(folder, "..")))
if what == "fail":
    while started() < 2: time.sleep(0.01)
    sys.exit("no such luck")
if what == "stay": time.sleep(600)
while started() < int(what): time.sleep(0.01)
open(os.path.join(folder, "metrics.json"), "w").write(sys.argv[4])
"""


class Rehearsed(ToyProbes):
    """Starts a small program in place of each rank, as `part` says: how many must have started, stay, or fail."""

    def __init__(self, engine: Toy, part: Callable[[int], str]) -> None:
        super().__init__(engine)
        self.part = part
        self.devices: dict[int, int] = {}

    def launch(self, platform: Platform, candidate: Candidate, rank: int, folder: str, device: int = 0) -> Launch:
        self.devices[rank] = device
        argv = (sys.executable, "-c", PROGRAM, folder, str(rank), self.part(rank), METRICS)
        return Launch(argv=argv, folder=folder)


class Rehearsal(Toy):
    """An engine whose ranks are `Rehearsed`."""

    def __init__(self, part: Callable[[int], str]) -> None:
        self.probes = Rehearsed(self, part)


LIMIT = TimeLimit(seconds=60.0, because="a test")


def play(
    folder: Path, part: Callable[[int], str], devices: int, on_rank: Callable[[int], object] = lambda rank: None
) -> tuple[Probe, Rehearsal]:
    engine = Rehearsal(part)
    found = probe(
        tasks.platform(TASK, engine=engine), LAUNCHER, CANDIDATE, str(folder), LIMIT, RANKS, on_rank,
        finish=False, devices=devices,
    )  # fmt: skip
    return found, engine


def have_ended(folder: Path, ranks: tuple[int, ...]) -> bool:
    """Whether the processes of some ranks end within seconds."""
    pids = [int((folder / f"started-{rank}").read_text()) for rank in ranks if (folder / f"started-{rank}").exists()]
    return within(10, lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))


def test_with_fewer_devices_than_ranks_a_rank_uses_the_first_free_device(tmp_path: Path) -> None:
    found, engine = play(tmp_path, lambda rank: "4" if rank == 0 else "1", devices=2)
    assert [rank.state for rank in found.ranks] == [TrialState.MEASURED] * 4
    assert engine.probes.devices == {0: 0, 1: 1, 2: 1, 3: 1}
    first, *others = (rank.duration_s for rank in found.ranks)
    assert found.duration_s == pytest.approx(max(first, sum(others)))


def test_a_failing_rank_ends_the_others_and_is_reported(tmp_path: Path) -> None:
    found, _ = play(tmp_path, lambda rank: "fail" if rank == 1 else "stay", devices=2)
    assert [(rank.rank, rank.state) for rank in found.ranks] == [(1, TrialState.FAILED)]
    assert "no such luck" in (found.ranks[0].reason or "")
    assert have_ended(tmp_path, (0, 1))
    assert not (tmp_path / "started-2").exists()


@pytest.mark.slow
def test_an_interrupt_ends_all_probes(tmp_path: Path) -> None:
    def interrupt(rank: int) -> None:
        if rank == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play(tmp_path / "first", lambda rank: "3" if rank == 0 else "stay", devices=3, on_rank=interrupt)
    assert have_ended(tmp_path / "first", RANKS)


def test_probes_run_in_parallel_unless_devices_are_shared() -> None:
    first = tuple(Device(index=at, chip="test-chip", memory_bytes=1) for at in range(3))
    plain = tasks.platform(TASK, devices=(*first, Device(index=3, chip="another", memory_bytes=1)))
    assert parallel_probe_ranks(plain) == 3
    shared = EngineSupport(support=plain.support.support, shared_devices=True)
    assert parallel_probe_ranks(replace(plain, support=shared)) == 1
    assert parallel_probe_ranks(replace(plain, devices=())) == 1


MEMORY = PlainMemory(capacity=80e9, context_bytes=1e9, fragmentation=0.1)
PLATFORM = tasks.platform(TASK, costs=replace(tasks.costs(TASK), memory=MEMORY))
PARTS = {"compute_s": 2.0, "tp_comm_s": 0.5, "pp_bubble_s": 1.0, "pp_comm_s": 0.1, "dp_comm_exposed_s": 0.2}
PREDICTED = replace(
    tasks.prediction(45e9, 80e9, **PARTS, optimizer_s=0.2),
    low_s=3.0,
    high_s=6.0,
    peak_allocated_bytes=40e9,
    reserved_bytes=44e9,
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


def probe_of(*measured: RankMeasurement, failed: TrialState | None = None) -> Probe:
    ranks = [RankProbe(rank=m.stage, state=TrialState.MEASURED, predicted=RANK, measured=m) for m in measured]
    if failed is not None:
        ranks.append(RankProbe(rank=9, state=failed, predicted=RANK, reason="why"))
    return Probe(candidate=Candidate(()), ranks=tuple(ranks))


def test_the_buffers_of_communicators_are_added_to_probed_memory() -> None:
    predicted = replace(PREDICTED, device_used_bytes=PREDICTED.device_used_bytes + 3e9)
    plain = combine(PREDICTED, probe_of(FIRST), PLATFORM)
    costs = replace(PLATFORM.costs, memory=replace(MEMORY, communicator=1e9))
    buffers = combine(predicted, probe_of(FIRST), replace(PLATFORM, costs=costs))
    assert buffers.device_used_bytes - plain.device_used_bytes == 3e9


def test_the_rank_with_the_highest_peak_determines_the_memory() -> None:
    found = combine(PREDICTED, probe_of(LAST, FIRST), PLATFORM)
    assert found.worst_stage == 0
    assert found.static_bytes == 22e9
    assert found.activation_bytes == 38e9
    assert found.peak_allocated_bytes == 60e9
    assert found.reserved_bytes == 62e9
    assert found.fits is True


def test_buffers_of_collectives_that_a_probe_does_not_have_are_added() -> None:
    assert combine(PREDICTED, probe_of(FIRST), PLATFORM).device_used_bytes == 63e9
    shown = replace(FIRST, device_used_bytes=70_000_000_000)
    assert combine(PREDICTED, probe_of(shown), PLATFORM).device_used_bytes == 70e9


def test_a_rank_that_needs_too_much_or_ran_out_of_memory_excludes_its_candidate() -> None:
    assert combine(PREDICTED, probe_of(replace(FIRST, reserved_bytes=79_500_000_000)), PLATFORM).fits is False
    found = combine(PREDICTED, probe_of(FIRST, failed=TrialState.OUT_OF_MEMORY), PLATFORM)
    assert found.fits is False
    assert found.device_used_bytes >= 80e9


def test_a_missing_allocator_is_modelled() -> None:
    found = combine(PREDICTED, probe_of(replace(FIRST, reserved_bytes=None, device_used_bytes=0)), PLATFORM)
    assert found.reserved_bytes == pytest.approx(66e9)
    assert found.device_used_bytes == pytest.approx(67e9)


def test_the_slowest_rank_determines_the_time_and_communication_stays_modelled() -> None:
    found = combine(PREDICTED, probe_of(FIRST, LAST), PLATFORM)
    assert found.time_s["compute_s"] == 3.25
    assert found.time_s["optimizer_s"] == 0.1
    assert found.time_s["tp_comm_s"] == 0.5
    assert found.time_s["pp_bubble_s"] == pytest.approx(1.0 * 3.75 / 2.5)
    assert found.step_time_s == pytest.approx(sum(found.time_s.values()))


def test_the_interval_is_narrow_if_all_parts_were_measured() -> None:
    none = dict.fromkeys(PREDICTED.time_s, 0.0)
    bare = replace(PREDICTED, step_time_s=2.2, time_s={**none, "compute_s": 2.0, "optimizer_s": 0.2})
    found = combine(bare, probe_of(FIRST), PLATFORM)
    assert found.step_time_s == pytest.approx(2.6)
    assert 0.9 * 2.6 < found.low_s < 2.6 < found.high_s < 1.25 * 2.6


def test_without_measurements_nothing_changes_and_an_unknown_time_stays_unknown() -> None:
    assert combine(PREDICTED, probe_of(failed=TrialState.FAILED), PLATFORM) == PREDICTED
    unknown = replace(PREDICTED, step_time_s=None, low_s=None, high_s=None, time_s={})
    found = combine(unknown, probe_of(FIRST), PLATFORM)
    assert (found.step_time_s, found.peak_allocated_bytes) == (None, 60e9)
