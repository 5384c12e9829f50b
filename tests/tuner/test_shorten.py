"""Trials with fewer micro-batches or on fewer nodes, whose times are scaled."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flagcore_testing.toy import ENGINE, Toy

from flagcore.contracts import Costs
from flagcore.domain.launch import Exit, Launch
from flagcore.domain.plan import Plan
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import Columns, KnobValue
from flagcore.domain.spec import ClusterSpec, Control, Task
from flagcore.domain.trial import Measurement, Shortened, Trial, TrialState
from flagcore.report.result import Result
from flagcore.tuner.shorten import FIXED_FACTOR, UNMODELLED_SHARE, scale_nodes, scale_steps, shorten
from flagcore.tuner.stages.predict import predict_columns
from tests import tasks
from tests.checks import given
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
    record = Result.write(plan, "run")["best"]
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
