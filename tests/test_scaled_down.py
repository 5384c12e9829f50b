"""The loop with trials on fewer nodes than the job; a launcher plays each trial at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from flagcore.domain.launch import Exit, Launch
from flagcore.domain.plan import Plan
from flagcore.domain.spec import ClusterSpec
from flagcore.domain.trial import Trial, TrialState
from flagcore.report.result import result
from tests.test_loop import Ended
from tests.test_loop_limits import Bench, OnTwoHosts, Player, batch_of, seconds

BATCH, NODES = 64, 4
CLUSTER = ClusterSpec(chip="test-chip", nodes=NODES, devices_per_node=2, nic_bytes_per_second=1e9)


class Nodes(Player):
    """Plays launches on as many nodes as their batch shows: a step takes 2.5% more for each doubling."""

    def start(self, launch: Launch) -> Ended:
        self.launches.append(launch)
        nodes, knobs = batch_of(launch) * NODES // BATCH, launch.environment
        sizes = (int(knobs[f"FLAGCORE_{name}"]) for name in ("TENSOR_MODEL_PARALLEL_SIZE", "MICRO_BATCH_SIZE"))
        step = seconds(*sizes, BATCH) * (1.0 + 0.025 * math.log2(nodes))
        line = " iteration {}/ 3 | elapsed time per iteration (ms): {} | lm loss: 7.0E+00 |\n"
        Path(launch.folder, "stdout.log").write_text("".join(line.format(n, 1000 * step) for n in (1, 2, 3)))
        return Ended(Exit(code=0, ended_by=None, duration_s=10.0 + 3 * step))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    created = Bench(tmp_path)
    created.player, created.cluster = Nodes(), CLUSTER
    return created


def nodes_of(trial: Trial) -> int:
    return trial.shortened.nodes if trial.shortened else NODES


def best_of(plan: Plan) -> Trial:
    assert plan.best is not None
    assert plan.best.measurement is not None
    return plan.best


def test_trials_run_on_fewer_nodes_with_fewer_replicas_and_the_same_batch_of_each(bench: Bench) -> None:
    plan = bench.tune(BATCH, trial_nodes=(1,), repeats=1, max_trials=4)
    assert {batch_of(launch) for launch in bench.player.launches} == {BATCH // NODES}
    assert {nodes_of(trial) for trial in (*plan.trials, *plan.repeats)} == {1}
    for trial, launch in zip(plan.trials, bench.player.launches, strict=False):
        values = trial.candidate.as_dict()
        assert values["data_parallel_size"] == NODES * int(launch.environment["FLAGCORE_DATA_PARALLEL_SIZE"])
    best = best_of(plan)
    assert best.is_final
    assert best.measurement is not None
    assert best.measurement.scaled_from is not None
    assert best.measurement.low_s is not None
    assert best.measurement.high_s is not None
    assert best.measurement.low_s < best.measurement.step_time_s < best.measurement.high_s
    record = result(plan, "run")["best"]
    assert record["shortened"]["nodes"] == 1
    assert record["measured"]["step_time_s"]["scaled_from"] == best.measurement.scaled_from


def test_a_candidate_that_cannot_run_on_fewer_nodes_is_illegal(bench: Bench) -> None:
    plan = bench.tune(BATCH, trial_nodes=(1,), max_trials=20)
    assert plan.counts.illegal["trial_nodes"] > 0
    assert all(int(trial.candidate.as_dict()["data_parallel_size"]) % NODES == 0 for trial in plan.trials)  # type: ignore[call-overload]


def test_repeats_run_on_growing_numbers_of_nodes_and_calibrate_the_scaling(bench: Bench) -> None:
    first = best_of(bench.tune(BATCH, trial_nodes=(1,), max_trials=4))
    bench.folder = bench.folder / "grown"
    bench.folder.mkdir()
    plan = bench.tune(BATCH, trial_nodes=(1, 2), repeats=1, max_trials=4)
    assert {nodes_of(trial) for trial in plan.trials} == {1}
    assert {nodes_of(trial) for trial in plan.repeats} == {2}
    grown = best_of(plan)
    assert nodes_of(grown) == 2
    assert grown.candidate == first.candidate
    assert first.measurement is not None
    assert grown.measurement is not None
    assert first.measurement.scaled_from is not None
    assert grown.measurement.low_s is not None
    assert grown.measurement.high_s is not None
    truth = first.measurement.scaled_from * (1.0 + 0.025 * math.log2(NODES))
    assert abs(grown.measurement.step_time_s - truth) < abs(first.measurement.step_time_s - truth)
    assert grown.measurement.low_s < truth < grown.measurement.high_s


def test_the_last_runs_may_have_all_nodes(bench: Bench) -> None:
    plan = bench.tune(BATCH, trial_nodes=(2, NODES), repeats=1, max_trials=4)
    best = best_of(plan)
    assert nodes_of(best) == NODES
    assert best.measurement is not None
    assert best.measurement.scaled_from is None
    assert batch_of(bench.player.launches[-1]) == BATCH


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
def test_without_spares_trials_continue_on_the_hosts_that_are_left(bench: Bench, gone: str, nodes: int) -> None:
    bench.player = player = Hosts()
    player.gone = gone
    bench.cluster = replace(CLUSTER, hosts=("a", "b", "c", "d"), min_nodes=2)
    plan = bench.tune(BATCH, repeats=1, max_trials=3, max_step_time=None)
    ran = [launch for launch in player.launches if gone not in launch.hosts or not gone]
    assert {(len(launch.hosts), batch_of(launch)) for launch in ran} == {(nodes, BATCH * nodes // NODES)}
    assert {(trial.state, nodes_of(trial)) for trial in plan.trials} == {(TrialState.MEASURED, nodes)}
    assert [nodes_of(event.trial) for event in bench.events if event.trial.inconclusive] == [NODES] * player.losses
    scaled_from = best_of(plan).measurement.scaled_from  # type: ignore[union-attr]
    assert (scaled_from is None) == (nodes == NODES)
