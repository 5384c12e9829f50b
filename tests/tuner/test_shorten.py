"""Trials with fewer micro-batches or on fewer nodes, whose times are scaled.

Probes of single ranks, and what is concluded from them.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flagcore_testing.toy import ENGINE, Toy

from flagcore.contracts import Costs, Platform
from flagcore.domain.chip import Device
from flagcore.domain.engine import EngineSupport
from flagcore.domain.launch import Exit, Launch
from flagcore.domain.plan import Plan
from flagcore.domain.prediction import Predictions, RankPrediction
from flagcore.domain.space import Candidate, Columns, KnobValue
from flagcore.domain.spec import ClusterSpec, Control, Task
from flagcore.domain.trial import (
    Measurement,
    Probe,
    RankMeasurement,
    RankProbe,
    Shortened,
    TimeLimit,
    Trial,
    TrialState,
)
from flagcore.launchers.local import LAUNCHER
from flagcore.physics.roofline import PlainMemory
from flagcore.report.result import result
from flagcore.tuner.devices import parallel_probe_ranks
from flagcore.tuner.probe import combine, probe
from flagcore.tuner.shorten import FIXED_FACTOR, UNMODELLED_SHARE, scale_nodes, scale_steps, shorten
from flagcore.tuner.stages.predict import predict_columns
from tests import tasks
from tests.checks import given
from tests.launchers.processes import within
from tests.tuner.benches import Ended, job_of, sizes_of, write_steps
from tests.tuner.test_loop_limits import BusyBench, OnTwoHosts, Player, batch_of, seconds

LONG = tasks.task(global_batch_size=512, control=Control(max_step_time=60.0))


class Linear(Toy):
    """Predicts a step of 20 s that it takes once, and `per_sample` seconds a sample."""

    def __init__(self, once: float = 20.0, per_sample: float = 1.0) -> None:
        self.once, self.per_sample = once, per_sample

    def predict(self, task: Task, columns: Columns, costs: Costs) -> Predictions:
        step = self.once + self.per_sample * task.spec.train.global_batch_size
        return replace(super().predict(task, columns, costs), step_time_s=np.array([step]))


def shortened(task: Task, step_s: float | None, engine: Linear, **values: KnobValue) -> Shortened | None:
    candidate = tasks.candidate(**values)
    columns = ENGINE.columns(task, candidate.as_dict())
    return shorten(tasks.platform(task, engine=engine), candidate, columns, step_s)


def test_a_long_step_runs_fewer_micro_batches_and_is_scaled_by_the_model() -> None:
    short = shortened(LONG, 532.0, Linear(), data_parallel_size=4, micro_batch_size=2)
    assert (short.global_batch_size, short.whole) == (64, 512)  # 8 of 64 micro-batches: 60 s of 532 s are 7.2
    assert short.scale == pytest.approx(532.0 / 84.0)


def test_the_interval_covers_half_and_twice_the_fixed_part() -> None:
    short = scale_steps(64, 512, 84.0, 532.0)
    assert short.low == pytest.approx((20 * FIXED_FACTOR + 512) / (20 * FIXED_FACTOR + 64))
    assert short.high == pytest.approx((20 / FIXED_FACTOR + 512) / (20 / FIXED_FACTOR + 64))
    assert short.low < short.scale < short.high < 8.0
    single = scale_steps(64, 512, 64.0, 512.0)
    one = 64.0 * UNMODELLED_SHARE  # of a step without a fixed part
    assert single.low == pytest.approx((one + 512) / (one + 64))
    assert single.scale == single.high == 8.0


@pytest.mark.parametrize(
    ("most", "step"), [(None, 1e4), (60.0, 59.0), (60.0, None)], ids=["off", "short enough", "unknown"]
)
def test_other_steps_run_whole(most: float | None, step: float | None) -> None:
    task = tasks.task(global_batch_size=512, control=Control(max_step_time=most))
    assert shortened(task, step, Linear()) is None


def test_steps_run_whole_if_the_model_predicts_no_time_or_no_gain() -> None:
    assert shortened(LONG, 600.0, Linear(once=math.nan)) is None
    assert shortened(LONG, 600.0, Linear(once=600.0, per_sample=0.0)) is None


def test_the_model_scales_only_parts_that_grow_with_the_batch() -> None:
    task = tasks.task(global_batch_size=512, devices=4)
    columns = ENGINE.columns(task, {"data_parallel_size": 2, "pipeline_model_parallel_size": 2})

    def predicted(some: Task) -> float:
        return float(predict_columns(tasks.platform(some), columns).step_time_s[0])

    short = scale_steps(16, 512, predicted(task.with_batch(16)), predicted(task))
    assert 8.0 < short.low <= short.scale <= short.high < 32.0


def test_a_measurement_of_shortened_steps_is_scaled_to_whole_steps() -> None:
    measured = Measurement(
        step_times_s=(2.0, 4.0), step_time_s=3.0, spread_s=1.0, tokens_per_second_per_device=100.0, device_used_bytes=7
    )
    full = scale_steps(64, 512, 84.0, 532.0).scaled(measured)
    scale = 532.0 / 84.0
    assert full.step_times_s == pytest.approx((2.0 * scale, 4.0 * scale))
    assert (full.step_time_s, full.spread_s) == pytest.approx((3.0 * scale, scale))
    assert full.tokens_per_second_per_device == pytest.approx(100.0 * 8.0 / scale)
    assert (full.scaled_from, full.device_used_bytes) == (3.0, 7)
    assert full.low_s < full.step_time_s < full.high_s
    assert given(full.modelled_s) == pytest.approx(3.0 * scale - 3.0)


BATCH, NODES = 64, 4
CLUSTER = ClusterSpec(chip="test-chip", nodes=NODES, devices_per_node=2, nic_bytes_per_second=1e9)


class Nodes(Player):
    """Plays launches on as many nodes as their batch shows: a step takes 2.5% more for each doubling."""

    def start(self, launch: Launch) -> Ended:
        self.launches.append(launch)
        nodes = batch_of(launch) * NODES // BATCH
        step = seconds(*sizes_of(launch), BATCH) * (1.0 + 0.025 * math.log2(nodes))
        write_steps(launch, 1000 * step)
        return Ended(Exit(code=0, ended_by=None, duration_s=10.0 + 3 * step))


@pytest.fixture
def bench(tmp_path: Path) -> BusyBench:
    created = BusyBench(tmp_path, Nodes())
    created.cluster = CLUSTER
    return created


def nodes_of(trial: Trial) -> int:
    return trial.shortened.nodes if trial.shortened else NODES


def best_of(plan: Plan) -> Trial:
    assert plan.best.measurement is not None
    return plan.best


def test_trials_run_on_fewer_nodes_with_fewer_replicas_and_the_same_batch_of_each(bench: BusyBench) -> None:
    plan = bench.plan(BATCH, trial_nodes=1, repeats=1, max_trials=4)
    assert {batch_of(launch) for launch in bench.player.launches} == {BATCH // NODES}
    assert {nodes_of(trial) for trial in (*plan.trials, *plan.repeats)} == {1}
    for trial, launch in zip(plan.trials, bench.player.launches, strict=False):
        values = trial.candidate.as_dict()
        assert values["data_parallel_size"] == NODES * int(job_of(launch)["knobs"]["data_parallel_size"])
    best = best_of(plan)
    assert best.is_final
    assert best.measurement.low_s < best.measurement.step_time_s < best.measurement.high_s
    record = result(plan, "run")["best"]
    assert record["shortened"]["nodes"] == 1
    assert record["measured"]["step_time_s"]["scaled_from"] == given(best.measurement.scaled_from)


def test_a_candidate_that_cannot_run_on_fewer_nodes_is_illegal(bench: BusyBench) -> None:
    plan = bench.plan(BATCH, trial_nodes=1, max_trials=20)
    assert plan.counts.illegal["trial_nodes"] > 0
    assert all(int(trial.candidate.as_dict()["data_parallel_size"]) % NODES == 0 for trial in plan.trials)  # type: ignore[call-overload]


class Hosts(Nodes, OnTwoHosts):
    """Plays launches on hosts, of which `gone` ends each trial that it has, until it is not usable any more."""

    gone, losses = "d", 0

    def start(self, launch: Launch) -> Ended:
        played = super().start(launch)
        if self.gone not in launch.hosts:
            return played
        self.losses += 1
        return Ended(Exit(code=1, ended_by="host", duration_s=1.0, lost_host=self.gone))

    def usable_hosts(self, hosts: Sequence[str]) -> tuple[str, ...]:
        return tuple(host for host in hosts if host != self.gone or self.losses < 2)

    def choose_hosts(self, hosts: Sequence[str], count: int) -> tuple[str, ...]:
        return self.usable_hosts(hosts)[:count]


@pytest.mark.parametrize(("gone", "nodes"), [("d", 3), ("", NODES)])
def test_without_spares_trials_continue_on_the_hosts_that_are_left(bench: BusyBench, gone: str, nodes: int) -> None:
    bench.launcher = player = Hosts()
    player.gone = gone
    bench.cluster = replace(CLUSTER, hosts=("a", "b", "c", "d"), min_nodes=2)
    plan = bench.plan(BATCH, repeats=1, max_trials=3, max_step_time=None)
    ran = [launch for launch in player.launches if gone not in launch.hosts or not gone]
    assert {(len(launch.hosts), batch_of(launch)) for launch in ran} == {(nodes, BATCH * nodes // NODES)}
    assert {(trial.state, nodes_of(trial)) for trial in plan.trials} == {(TrialState.MEASURED, nodes)}
    assert [nodes_of(event.trial) for event in bench.events if event.trial.inconclusive] == [NODES] * player.losses
    scaled_from = best_of(plan).measurement.scaled_from  # type: ignore[union-attr]
    assert (scaled_from is None) == (nodes == NODES)


def test_the_scale_to_all_nodes_is_as_predicted_and_uncertain_by_the_growth() -> None:
    def scaled(of_nodes: int) -> Shortened:
        return scale_nodes(replace(LONG, spec=replace(LONG.spec, cluster=ClusterSpec(nodes=of_nodes))), 8, 1.3)

    scale = scaled(64)
    assert scale.scale == pytest.approx(1.3)
    assert scale.low < 1.3 - 0.3 * 0.6 < 1.3 + 0.3 * 0.6 < scale.high
    assert scaled(4096).high > scale.high  # growth that the model does not include
    assert scale.own < (scale.high - scale.low) / 2 / scale.scale  # its own part of it


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


class Rehearsal(Toy):
    """Starts a small program in place of each rank, as `part` says: how many must have started, stay, or fail."""

    def __init__(self, part: Callable[[int], str]) -> None:
        self.part = part
        self.devices: dict[int, int] = {}

    def probe_launch(self, platform: Platform, candidate: Candidate, rank: int, folder: str, device: int = 0) -> Launch:
        self.devices[rank] = device
        argv = (sys.executable, "-c", PROGRAM, folder, str(rank), self.part(rank), METRICS)
        return Launch(argv=argv, folder=folder)


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
    assert engine.devices == {0: 0, 1: 1, 2: 1, 3: 1}
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
