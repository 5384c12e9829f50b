"""The ladder from predictions over probes to runs: a launcher that writes at once what ranks and runs would leave."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flagcore_testing.toy import Toy

from flagcore.contracts import Costs, Launcher
from flagcore.domain.launch import Exit, Launch
from flagcore.domain.plan import Plan
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import Columns
from flagcore.domain.spec import ClusterSpec, Task
from flagcore.domain.trial import Role, Trial, TrialState
from flagcore.errors import Interrupted, NoDevice
from flagcore.report.result import Result
from flagcore.tuner.loop import TuneResult
from flagcore.tuner.strategies import RANDOM, learned
from tests import tasks
from tests.checks import given
from tests.tuner.benches import Bench, Ended, at, job_of, plugin, write_steps

pytestmark = pytest.mark.slow

GIB = 1 << 30
Answer = float | int | BaseException | None


def compute(knobs: dict[str, Any], rank: int) -> float:
    """Seconds of a rank: pipelines are far faster than predicted, and their last stage is the slowest."""
    stages = knobs["pipeline_model_parallel_size"]
    return {1: 0.12, 2: 0.05, 4: 0.02}[stages] / knobs["micro_batch_size"] * (1.5 if rank and stages > 1 else 1.0)


class Ranks(Launcher):
    """Plays probes and runs: `rank` gives the seconds of (knobs, rank), bytes of memory that ran out, or an exception.

    `probed` and `ran` are what was started, `devices` where.
    """

    name = "ranks"

    def __init__(self, rank: Callable[[dict[str, Any], int], Answer] = compute) -> None:
        self.rank = rank
        self.probed: list[tuple[str, int]] = []
        self.devices: list[int] = []
        self.ran: list[dict[str, Any]] = []

    def start(self, launch: Launch) -> Ended:
        job = job_of(launch)
        if "rank" not in job:
            self.ran.append(job["knobs"])
            write_steps(launch, 1000 * compute(job["knobs"], 1))
            return Ended(Exit(code=0, ended_by=None, duration_s=1.0))
        answer = self.rank(job["knobs"], job["rank"])
        self.devices.append(job["device"])
        self.probed.append((json.dumps(job["knobs"], sort_keys=True), job["rank"]))
        if isinstance(answer, BaseException):
            raise answer
        if answer is None:
            ended = Exit(code=-9, ended_by="memory", duration_s=1.0)
        else:
            write_steps(launch, 1000 * answer)
            ended = Exit(code=0, ended_by=None, duration_s=1.0)
        Path(launch.folder, "exit.json").write_text(json.dumps({"code": ended.code, "ended_by": ended.ended_by}))
        return Ended(ended)


ONE_DEVICE, FOUR_DEVICES = (plugin(tasks.CHIP, count) for count in (1, 4))


class OnlyPipelines(Toy):
    """Predicts no time without a pipeline."""

    def predict(self, task: Task, columns: Columns, costs: Costs) -> Predictions:
        found = super().predict(task, columns, costs)
        return replace(
            found, step_time_s=np.where(columns["pipeline_model_parallel_size"] > 1, found.step_time_s, np.nan)
        )


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return new_bench(tmp_path)


def new_bench(folder: Path) -> Bench:
    folder.mkdir(exist_ok=True)
    created = Bench(folder, Ranks())
    created.plugin, created.cluster = ONE_DEVICE, ClusterSpec(chip="test-chip", nodes=1, devices_per_node=4)
    return created


def probe(bench: Bench, most: int, **changes: Any) -> Plan:
    return bench.tune(16, fidelity="probe", max_trials=most, **changes).plan


def run(bench: Bench, **control: Any) -> TuneResult:
    return bench.tune(16, plugin=FOUR_DEVICES, fidelity="run", **control)


def layout(trial: Trial | None) -> tuple[Any, ...]:
    values = trial.candidate.as_dict()
    return values["pipeline_model_parallel_size"], values["micro_batch_size"]


def test_an_estimate_starts_nothing_and_needs_no_device(bench: Bench) -> None:
    bench.plugin = plugin(tasks.CHIP, 0)
    plan = bench.tune(16, fidelity="estimate", max_trials=5).plan
    assert bench.launcher.probed == bench.launcher.ran == []
    assert {trial.state for trial in plan.trials} == {TrialState.PREDICTED}
    assert plan.counts.balanced
    assert plan.counts.measured == 0
    steps = {trial.number: trial.predicted_step_s for trial in plan.trials}
    assert steps[plan.best.number] == min(steps.values())
    assert plan.gain == pytest.approx(steps[plan.baseline.number] / steps[plan.best.number] - 1)
    data = Result.write(plan, "run")
    assert data["fidelity"] == "estimate"
    assert data["best"]["measured"] is None
    assert bench.tune(16, fidelity="estimate", max_trials=5).plan == plan


def test_estimates_and_probes_need_a_predicted_time(bench: Bench) -> None:
    bench.plugin = plugin(replace(tasks.CHIP, dense_flops_per_second={}), 1)
    for fidelity in ("estimate", "probe"):
        with pytest.raises(NoDevice, match="peak rate of test-chip"):
            bench.tune(16, fidelity=fidelity)
    assert bench.launcher.probed == []


def test_one_device_probes_the_ranks_of_four_and_the_slowest_rank_decides(bench: Bench) -> None:
    with pytest.raises(NoDevice):
        bench.tune(16, fidelity="run")
    plan = probe(bench, 100)
    assert layout(plan.best) == (4, 4)
    assert bench.launcher.ran == []
    assert plan.repeats == ()
    assert plan.counts.balanced
    for trial in plan.trials:
        assert (trial.fidelity, trial.state) == ("probe", TrialState.MEASURED)
        measured = trial.measurement
        stages, micro = layout(trial)
        ranks = [0, 3] if stages > 1 else [0]
        knobs = {"pipeline_model_parallel_size": stages, "micro_batch_size": micro}
        probed = max(compute(knobs, rank) for rank in ranks) + 0.001
        assert measured.step_time_s == pytest.approx(probed + given(measured.modelled_s))
        assert measured.low_s < measured.step_time_s < measured.high_s
        assert measured.device_used_bytes > 3 * GIB
        assert trial.predicted_step_s != measured.step_time_s
        assert (bench.folder / trial.log).parent.joinpath("metrics.json").exists()
    assert Result.write(plan, "run")["best"]["measured"]["step_time_s"]["modelled"] > 0


def test_candidates_without_a_predicted_time_are_not_probed(bench: Bench) -> None:
    bench.engine = OnlyPipelines()
    plan = probe(bench, 100)
    assert plan.trials
    assert all(trial.predicted_step_s for trial in plan.trials)
    assert plan.baseline is None
    assert plan.gain is None
    assert plan.counts.untried > 0


def test_a_rank_that_runs_out_of_memory_excludes_its_candidate_and_those_that_need_as_much(bench: Bench) -> None:
    bench.launcher = Ranks(
        lambda knobs, rank: None if knobs["pipeline_model_parallel_size"] == 1 else compute(knobs, 0)
    )
    plan = probe(bench, 100)
    assert layout(given(plan.best))[0] > 1
    failed = [trial for trial in plan.trials if layout(trial)[0] == 1]
    assert failed
    assert {trial.state for trial in failed} == {TrialState.OUT_OF_MEMORY}
    assert all("rank 0" in (trial.reason or "") for trial in failed)
    assert plan.counts.pruned["needs_as_much_memory_as_one_that_ran_out"] > 0
    assert plan.counts.balanced
    ranks = Counter(candidate for candidate, _ in bench.launcher.probed)
    for trial in failed:
        values = {knob: value for knob, value in trial.candidate.items if knob != "layer_split"}
        assert len([job for job in ranks.elements() if values.items() <= json.loads(job).items()]) == 1


def test_a_probed_rank_that_needs_more_than_a_device_has_is_out_of_memory(bench: Bench) -> None:
    bench.plugin = plugin(tasks.CHIP, 1, gib=1.5)
    plan = probe(bench, 1)
    (trial,) = plan.trials
    assert trial.state is TrialState.OUT_OF_MEMORY
    assert "1.50 GiB" in (trial.reason or "")
    assert plan.best is None


def test_an_interrupted_probe_resumes_with_the_ranks_that_are_left(bench: Bench) -> None:
    stop_at = 4
    uninterrupted = new_bench(bench.folder / "whole")
    expected = probe(uninterrupted, 8)
    bench.launcher = Ranks(at(stop_at, compute, KeyboardInterrupt()))
    assert isinstance(bench.tune(16, fidelity="probe", max_trials=8).error, Interrupted)
    done = bench.launcher.probed[:stop_at]
    bench.launcher = Ranks()
    second = bench.tune(16, fidelity="probe", max_trials=8)
    assert second.error is None
    assert set(done).isdisjoint(bench.launcher.probed), "a finished probe was repeated"
    assert len(done) + len(bench.launcher.probed) == len(uninterrupted.launcher.probed)
    plan = second.plan
    assert [trial.candidate for trial in plan.trials] == [trial.candidate for trial in expected.trials]
    assert [trial.measurement for trial in plan.trials] == [trial.measurement for trial in expected.trials]
    assert plan.best.candidate == expected.best.candidate


def test_a_search_by_probes_starts_without_extra_probes(bench: Bench) -> None:
    plan = probe(bench, 2, plugin=FOUR_DEVICES, probes=1)
    assert len(plan.trials) == 2
    assert plan.trials[0].role is Role.BASELINE
    assert not plan.probes


@pytest.mark.timeout(60)  # a loop that probes the same candidate again never ends
def test_probed_candidates_can_still_be_run(bench: Bench) -> None:
    plan = run(bench, probes=3, repeats=0, max_trials=100).plan
    assert len(plan.probes) == len({trial.candidate for trial in plan.probes}) == 3
    assert {trial.fidelity for trial in plan.probes} == {"probe"}
    assert [trial.number for trial in plan.probes] == [0, 1, 2]
    assert plan.trials[0].role is Role.BASELINE
    assert {trial.fidelity for trial in plan.trials} == {"run"}
    assert {trial.candidate for trial in plan.probes} <= {trial.candidate for trial in plan.trials}
    assert plan.best.fidelity == "run"
    assert len(Result.write(plan, "run")["probes"]) == 3
    assert plan.counts.balanced
    assert plan.counts.measured + plan.counts.stopped == len(plan.trials)


def test_probes_before_the_first_run_go_to_the_fastest_predicted_regardless_of_the_strategy(bench: Bench) -> None:
    bench.strategy, bench.prober = RANDOM, learned.STRATEGY
    plan = run(bench, probes=1, repeats=0, max_trials=3).plan
    fastest = bench.tune(16, fidelity="estimate", max_trials=1).plan.best
    assert [probe.candidate for probe in plan.probes] == [fastest.candidate]
    assert "random" in (plan.trials[1].chosen_because or "")


def test_ranks_of_a_candidate_are_probed_on_all_available_devices(bench: Bench) -> None:
    one = probe(bench, 3)
    side = new_bench(bench.folder / "side")
    four = probe(side, 3, plugin=FOUR_DEVICES)
    assert set(bench.launcher.devices) == {0}
    assert set(side.launcher.devices) == {0, 1}
    assert [trial.measurement for trial in four.trials] == [trial.measurement for trial in one.trials]
    assert sum(trial.duration_s for trial in four.trials) < sum(trial.duration_s for trial in one.trials)


def test_memory_that_runs_out_in_a_probe_keeps_its_candidate_from_running(bench: Bench) -> None:
    bench.launcher = Ranks(lambda knobs, rank: None)
    plan = run(bench, probes=2, repeats=0, max_trials=100).plan
    assert {trial.state for trial in plan.probes} == {TrialState.OUT_OF_MEMORY}
    assert plan.counts.pruned["needs_as_much_memory_as_one_that_ran_out"] >= 2
    searched = {trial.candidate for trial in plan.trials if trial.role is Role.SEARCH}
    assert searched.isdisjoint(trial.candidate for trial in plan.probes)
    assert plan.counts.balanced


def test_runs_learn_from_earlier_probes(bench: Bench) -> None:
    probed = probe(bench, 6)
    assert layout(probed.best) == (4, 4)
    bench.strategy = learned.STRATEGY
    plan = run(bench, max_trials=2, repeats=0).plan
    assert plan.probes == probed.trials
    other = new_bench(bench.folder / "other")
    other.strategy = learned.STRATEGY
    assert plan.trials[1].believed != run(other, max_trials=2, repeats=0).plan.trials[1].believed


def test_probes_leave_half_of_the_time_for_runs(bench: Bench) -> None:
    bench.launcher = Ranks(at(5, compute, KeyboardInterrupt()))
    limits = {"probes": 100, "repeats": 0, "max_trials": 2}
    spent = sum(trial.duration_s for trial in run(bench, **limits).plan.probes)
    assert spent > 1.0
    bench.launcher = Ranks()
    plan = run(bench, max_time=2 * spent, **limits).plan
    assert bench.launcher.probed == []
    assert len(plan.trials) == 2
