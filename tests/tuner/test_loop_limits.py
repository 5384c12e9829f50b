"""The loop with long steps, busy devices and derived time limits; a launcher plays each trial at once."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flagcore.contracts import Launcher
from flagcore.domain.chip import Fact
from flagcore.domain.launch import Exit, Launch
from flagcore.domain.plan import Plan
from flagcore.domain.spec import ClusterSpec
from flagcore.domain.trial import Role, Trial, TrialState
from flagcore.hooks import hookimpl
from flagcore.i18n import choose
from flagcore.report.result import Result, notes_of
from flagcore.tuner import devices
from flagcore.tuner.parallel import MAX_CONSECUTIVE_BUSY
from tests import tasks
from tests.tuner.benches import Bench, Ended, job_of, plugin, sizes_of, write_steps

GIB = 2**30
SLOW = Fact(value=1e9, source=tasks.SOURCE)
CHIP = replace(tasks.CHIP, dense_flops_per_second={"bf16": SLOW}, memory_bandwidth_bytes_per_second=SLOW)
"""A chip on which a step of the small model takes minutes."""
SAMPLE_S = 0.5


def seconds(tensor: int, micro: int, batch: int) -> float:
    return SAMPLE_S * batch * {1: 1.5, 2: 1.0, 4: 1.2}[micro] * {1: 1.3, 2: 1.0}[tensor]


class Player(Launcher):
    """Plays launches: writes the log of a run at once, or ends as `ends` says."""

    name = "player"

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.ends: Callable[[int], Exit | None] = lambda number: None
        self.step_s: Callable[[float], float] = lambda step: step
        self.steps = 3
        """Each run times out after this number of steps, if it is less than 3."""

    def start(self, launch: Launch) -> Ended:
        self.launches.append(launch)
        if ended := self.ends(len(self.launches)):
            return Ended(ended)
        step = self.step_s(seconds(*sizes_of(launch), batch_of(launch)))
        write_steps(launch, 1000 * step, self.steps)
        code, by = (0, None) if self.steps == 3 else (-15, "timeout")
        return Ended(Exit(code=code, ended_by=by, duration_s=10.0 + self.steps * step))


class OnTwoHosts(Player):
    """Plays launches on one of two hosts: the second one once the first was lost."""

    lost = False

    def __init__(self) -> None:
        super().__init__()
        self.resumed: list[str] = []

    def resume(self, lost: Iterable[str], cut_off: Iterable[str]) -> None:
        self.resumed = [*lost]

    def choose_hosts(self, hosts: Sequence[str], count: int) -> tuple[str, ...]:
        return tuple(hosts[1:] if self.lost else hosts[:count])


def batch_of(launch: Launch) -> int:
    return int(job_of(launch)["global_batch_size"])


class BusyBench(Bench):
    """A bench whose devices have memory in use."""

    used_gib: Callable[[], float] = staticmethod(lambda: 0.0)
    on_cores = False

    @property
    def player(self) -> Any:
        return self.launcher

    def plan(self, batch: int = 512, **control: Any) -> Plan:
        reader = SimpleNamespace(sample=lambda: {"memory_used_bytes": self.used_gib() * GIB})
        self.plugin = plugin(CHIP, shared_devices=self.on_cores)
        self.plugin.flagcore_telemetry = hookimpl(lambda device: reader)
        return self.tune(batch, **control).plan


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BusyBench:
    monkeypatch.setattr(devices, "POLL_SECONDS", 0.01)
    monkeypatch.setattr("flagcore.tuner.trial_runner.SETTLE_SECONDS", 0.02)
    return BusyBench(tmp_path, Player())


def shortened_trials(plan: Plan) -> list[Trial]:
    return [trial for trial in plan.trials if trial.shortened]


def test_long_steps_run_shortened_and_the_finalists_whole(bench: BusyBench) -> None:
    plan = bench.plan(repeats=1, max_trials=4)
    assert len(shortened_trials(plan)) == 4
    for trial in shortened_trials(plan):
        assert trial.measurement.scaled_from is not None
        assert trial.shortened.global_batch_size < trial.shortened.whole == 512
    assert {batch_of(launch) for launch in bench.player.launches[:4]} < set(range(512))
    assert {batch_of(launch) for launch in bench.player.launches[4:]} == {512}
    assert plan.best.measurement is not None
    assert plan.best.is_final
    assert plan.baseline.is_final
    assert plan.best.role is Role.REPEAT
    assert len(plan.speedup.rounds) == 1


@pytest.mark.parametrize(("batch", "control"), [(512, {"max_step_time": None}), (4, {})], ids=["off", "too small"])
def test_steps_run_whole_on_request_or_if_they_cannot_be_shorter(
    bench: BusyBench, batch: int, control: dict[str, Any]
) -> None:
    assert shortened_trials(bench.plan(batch, repeats=0, max_trials=2, **control)) == []
    assert {batch_of(launch) for launch in bench.player.launches} == {batch}


def test_without_whole_runs_there_is_no_gain(bench: BusyBench) -> None:
    def ends(number: int) -> None:
        if number > 3:
            raise KeyboardInterrupt

    bench.player.ends = ends
    plan = bench.plan(repeats=1, max_trials=3)
    assert plan.best.shortened
    assert plan.speedup is None


def test_the_limit_follows_the_prediction_and_is_recorded(bench: BusyBench) -> None:
    plan = bench.plan(repeats=0, max_trials=1)
    trial, launch = plan.trials[0], bench.player.launches[0]
    assert launch.timeout_seconds == trial.time_limit.seconds > 300.0
    assert launch.timeout_because == trial.time_limit.because
    record = Result.write(plan, "run")["trials"][0]
    assert record["time_limit"] == asdict(trial.time_limit)
    assert record["shortened"]["whole"] == 512
    assert record["measured"]["step_time_s"]["scaled_from"] == trial.measurement.scaled_from


def test_the_first_event_reports_how_long_all_trials_may_take(bench: BusyBench) -> None:
    bench.plan(repeats=0, max_trials=2)
    plans = [event.search_time for event in bench.events]
    assert plans[1:] == [None] * (len(plans) - 1)
    assert plans[0].trials == 2
    assert plans[0].at_most_s > (plans[0].measuring_s or 0.0) > 0.0


def test_busy_devices_fail_a_trial_that_proves_nothing_and_stop_the_search(bench: BusyBench) -> None:
    bench.used_gib = lambda: 20.0
    plan = bench.plan(device_wait=0.05)
    assert bench.player.launches == []
    assert [event.kind for event in bench.events] == [
        "trial_started",
        "trial_waits",
        "trial_finished",
    ] * MAX_CONSECUTIVE_BUSY
    waiting = bench.events[1].trial.reason
    assert waiting is not None
    assert "device 0" in waiting
    assert "20.0 of 64.0 GiB" in waiting
    (trial,) = plan.trials
    assert (trial.state, trial.inconclusive) == (TrialState.FAILED, True)
    assert trial.reason.startswith("device busy: device 0")
    assert plan.counts.balanced
    assert plan.counts.pruned == {}
    bench.used_gib = lambda: 0.0
    again = bench.plan(repeats=0, max_trials=2)
    assert again.trials[0].role is Role.BASELINE
    assert [trial.state for trial in again.trials] == [TrialState.MEASURED] * 2


def test_out_of_memory_next_to_other_processes_is_tried_again(bench: BusyBench) -> None:
    out = Exit(code=-9, ended_by="memory", duration_s=1.0)

    def ends(number: int) -> Exit | None:
        bench.used_gib = lambda: 30.0 if number == 2 and len(bench.events) < 4 else 0.0
        return out if number == 2 else None

    bench.player.ends = ends
    plan = bench.plan(repeats=0, max_trials=4)
    failed = [event.trial for event in bench.events if event.kind == "trial_finished" and event.trial.inconclusive]
    assert [trial.state for trial in failed] == [TrialState.FAILED]
    assert failed[0].reason is not None
    assert "out of memory" in failed[0].reason
    assert plan.counts.pruned == {}
    assert {trial.candidate: trial for trial in plan.trials}[failed[0].candidate].state is TrialState.MEASURED


def test_a_spare_replaces_a_lost_host_and_a_resumed_search_remembers_the_loss(bench: BusyBench) -> None:
    bench.launcher = player = OnTwoHosts()
    bench.cluster = ClusterSpec(hosts=("a", "b"), nodes=1, spares=1)
    lost_host = Exit(code=1, ended_by="host", duration_s=1.0, detail="a: gone", lost_host="a")
    player.ends = lambda number: lost_host if number <= MAX_CONSECUTIVE_BUSY + 1 else None
    plan = bench.plan(repeats=0, max_trials=3, max_step_time=None)
    assert len(player.launches) == MAX_CONSECUTIVE_BUSY + 4
    assert plan.counts.balanced
    bench.plan(repeats=0, max_trials=3, max_step_time=None)
    assert player.resumed == ["a"] * (MAX_CONSECUTIVE_BUSY + 1)


def test_trials_whose_time_is_over_after_two_steps_are_measured(bench: BusyBench) -> None:
    bench.player.steps, bench.on_cores = 2, True
    plan = bench.plan(4, repeats=1, max_trials=3)
    assert plan.best.measurement.few_steps
    assert plan.best.interval == pytest.approx(0.15)
    assert [trial.state for trial in plan.trials] == [TrialState.MEASURED] * 3
    record = Result.write(plan, "run")
    assert (
        record["trials"][0]["measured"]["step_time_s"]["high"]
        > record["trials"][0]["measured"]["step_time_s"]["median"]
    )
    assert any("no time for all their steps" in note for note in record["notes"])
    assert choose("zh")
    try:
        notes = notes_of(json.loads(json.dumps(record)))
        assert len(notes) == len(record["notes"]) > 0
        assert not any("trials" in note for note in notes)
        assert notes_of({"notes": ["of an engine"]}) == ["of an engine"]
    finally:
        choose("en")


def test_a_search_whose_trials_have_time_for_one_step_ends_with_advice(bench: BusyBench) -> None:
    bench.player.steps, bench.on_cores = 1, True
    bench.player.step_s = lambda step: 50.0 * step
    plan = bench.plan(4, repeats=1, max_trials=9, max_time_per_task=60.0)
    assert plan.best is None
    assert len(bench.player.launches) <= 2
    assert "auto_tuner.control.max_time_per_task: " in plan.stopped_because
    (record, *_others) = Result.write(plan, "run")["trials"]
    assert (record["state"], len(record["finished_steps_s"])) == ("timed_out", 1)
