"""The loop with a launcher that starts nothing and writes at once what a run would print; all else is real. The loop
with long steps, busy devices and derived time limits; a launcher plays each trial at once."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flagcore_testing.toy import Toy

from flagcore.contracts import Launcher
from flagcore.domain.chip import Fact
from flagcore.domain.launch import Exit, Launch
from flagcore.domain.plan import Plan
from flagcore.domain.spec import ClusterSpec, Task
from flagcore.domain.trial import Answers, Role, Trial, TrialState
from flagcore.errors import Interrupted, LaunchError, NoDevice, NothingFits
from flagcore.hooks import hookimpl
from flagcore.i18n import choose
from flagcore.report.result import Result, notes_of
from flagcore.report.text import answers_text
from flagcore.tuner import devices
from flagcore.tuner.budget import seconds_used
from flagcore.tuner.parallel import MAX_CONSECUTIVE_BUSY
from tests import tasks
from tests.tuner.benches import Bench, Ended, Instant, at, job_of, knobs, plain, plugin, sizes_of, sound, write_steps

CRASH = Exit(code=1, ended_by=None, duration_s=1.0)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_the_baseline_runs_first_then_the_rest_then_both_again_in_alternation(bench: Bench) -> None:
    plan = bench.tune(repeats=2).plan
    assert knobs(plan.best.candidate) == (2, 2)
    assert [trial.role for trial in plan.trials] == [Role.BASELINE] + [Role.SEARCH] * (len(plan.trials) - 1)
    pair = [plan.baseline.candidate, plan.best.candidate]
    assert [trial.candidate for trial in plan.repeats] == [*pair, pair[1]]  # the baseline is clearly slower
    assert plan.speedup.rounds == pytest.approx((0.95,) * 2)
    assert plan.stopped_because == "all candidates have been tried or pruned"
    assert sound(plan)


class Wrong(Toy):
    """An engine whose fastest candidate computes something else than the baseline."""

    def answers(self, task: Task, change: str, folder: str, baseline: str) -> Answers:
        assert Path(baseline).name == "0"
        is_wrong = '"micro_batch_size": 2' in Path(folder, "job.json").read_text()
        return Answers(difference=9.0 if is_wrong else 0.3, limit=5.0, unit="of it", text="loss 2 instead of 1")


@pytest.mark.parametrize(("limit", "best"), [(0.01, (2, 4)), (None, (2, 2))])
def test_a_candidate_with_other_answers_is_not_recommended(
    bench: Bench, limit: float | None, best: tuple[int, int]
) -> None:
    bench.engine = Wrong()
    plan = bench.tune(answers=limit).plan
    assert knobs(plan.best.candidate) == best
    assert {knobs(each.candidate)[1] for each in plan.trials if each.state is TrialState.INVALID} == {2} - {best[1]}
    assert bool(plan.best.measurement.answers) == bool(limit)
    assert answers_text(plan.best, plan.baseline).startswith("answers: 0.3 of it" if limit else "answers: not checked")
    assert answers_text(plan.baseline, plan.baseline) == ""
    assert sound(plan)


def test_the_gain_is_relative_to_the_users_own_baseline(bench: Bench) -> None:
    own = {"micro_batch_size": 8, "tensor_model_parallel_size": 2, "data_parallel_size": 1}
    bench.launcher = Instant(lambda tensor, micro: 400.0 if micro == 8 else plain(tensor, micro))
    plan = bench.tune(baseline=own).plan
    assert knobs(plan.baseline.candidate) == (2, 8)
    assert plan.gain == pytest.approx(3.0)
    assert sound(plan)


def test_a_baseline_above_the_memory_by_less_than_the_error_runs_alone(bench: Bench) -> None:
    own = {"micro_batch_size": 1, "tensor_model_parallel_size": 2, "data_parallel_size": 1}
    used = bench.tune(baseline=own).plan.baseline.predicted.device_used_bytes
    for share, runs in ((0.5, False), (0.97, True)):
        bench.beside(str(share))
        bench.cluster = ClusterSpec(memory_bytes_per_device=int(share * used))
        if runs:
            assert [trial.role for trial in bench.tune(baseline=own).plan.trials][:1] == [Role.BASELINE]
        else:
            with pytest.raises(NothingFits):
                bench.tune(baseline=own)


def test_events_report_start_and_end_of_each_trial_and_the_best_so_far(bench: Bench) -> None:
    plan = bench.tune(repeats=1).plan
    kinds = [event.kind for event in bench.events]
    assert kinds == ["trial_started", "trial_finished"] * (len(plan.trials) + len(plan.repeats))
    bests = [event.best.measurement.step_time_s for event in bench.events if event.best and event.best.measurement]
    assert bests == sorted(bests, reverse=True)
    assert [event.trials_finished for event in bench.events] == sorted(event.trials_finished for event in bench.events)
    assert all(event.trials_finished <= event.trials_planned for event in bench.events)
    assert all(event.seconds_left is None or event.seconds_left >= 0 for event in bench.events)


def test_a_search_that_ended_resumes_only_with_higher_limits(bench: Bench) -> None:
    first = bench.tune(max_trials=3).plan
    assert len(first.repeats) == 2
    launcher, bench.launcher = bench.launcher, Instant(lambda tensor, micro: AssertionError("no trial should start"))
    assert bench.tune(max_trials=3).plan == first
    bench.launcher = launcher
    numbers = [each.number for each in bench.tune(max_trials=6).plan.trials]
    assert len(numbers) > len(first.trials)
    assert numbers[: len(first.trials)] == [each.number for each in first.trials]


def test_time_between_trials_counts_after_a_restart(bench: Bench) -> None:
    trials = [replace(each, duration_s=1.0) for each in bench.tune(repeats=0).plan.trials]
    assert all(isinstance(each.began_s, float) for each in trials)
    late = [replace(each, began_s=10.0 * place) for place, each in enumerate(trials)]
    assert seconds_used(late) == 10.0 * (len(trials) - 1) + 1.0
    assert seconds_used([replace(each, began_s=None) for each in trials]) == len(trials)  # of an earlier version
    assert seconds_used([]) == 0.0


@pytest.mark.parametrize("stop_at", [0, 1, 4, 7])
def test_a_run_interrupted_at_any_trial_resumes_to_the_same_result(bench: Bench, stop_at: int) -> None:
    bench.launcher = Instant(at(stop_at, plain, KeyboardInterrupt()))
    first = bench.tune()
    assert isinstance(first.error, Interrupted)
    assert len(first.plan.trials) + len(first.plan.repeats) == stop_at + 1
    last = max((*first.plan.trials, *first.plan.repeats), key=lambda trial: trial.number)
    assert last.state is TrialState.INTERRUPTED
    assert sound(first.plan)
    bench.launcher = Instant(plain)
    second = bench.tune()
    assert second.error is None
    assert knobs(second.plan.best.candidate) == (2, 2)
    assert {trial.state for trial in second.plan.trials} <= {TrialState.MEASURED, TrialState.STOPPED}
    assert len([trial for trial in second.plan.repeats if trial.state is TrialState.MEASURED]) == 2
    assert len(second.plan.speedup.rounds) == 2
    assert sound(second.plan)


def test_one_fast_outlier_does_not_win(bench: Bench) -> None:
    run_counts = Counter[tuple[int, int]]()

    def seconds_with_outlier(tensor: int, micro: int) -> float:
        run_counts[tensor, micro] += 1
        if (tensor, micro) == (2, 4):
            return 99.0 if run_counts[tensor, micro] == 1 else 110.0
        return plain(tensor, micro)

    bench.launcher = Instant(seconds_with_outlier)
    assert knobs(bench.tune(repeats=1).plan.best.candidate) == (2, 2)


def test_machine_drift_is_reported(bench: Bench) -> None:
    starts = iter(range(100))
    bench.launcher = Instant(lambda *of: plain(*of) * (1.2 if next(starts) >= 6 else 1.0))
    plan = bench.tune(repeats=1).plan
    assert plan.drift == pytest.approx(1 / 1.2 - 1)
    assert plan.drifted
    assert Result.write(plan, "runs")["noise"]["drifted"]


def test_a_forked_trial_that_fails_starts_again_as_a_new_process(bench: Bench) -> None:
    answers = [replace(CRASH, warm=True)]
    bench.launcher = Instant(lambda tensor, micro: answers.pop() if answers and micro == 2 else plain(tensor, micro))
    trials = bench.tune().plan.trials
    again = [trial for trial in trials if trial.duration_s == 2.0]
    assert [trial.state for trial in again] == [TrialState.MEASURED]
    assert again[0].reason
    assert {trial.state for trial in trials} == {TrialState.MEASURED}


def test_a_failed_launch_ends_the_run_and_keeps_its_measurements(bench: Bench) -> None:
    bench.launcher = Instant(at(2, plain, LaunchError("no free TCP port")))
    ending = bench.tune()
    assert isinstance(ending.error, LaunchError)
    assert ending.plan.best is not None
    assert sound(ending.plan)
    bench.launcher = Instant(plain)
    resumed = bench.tune()
    assert resumed.error is None
    assert TrialState.INTERRUPTED not in {trial.state for trial in resumed.plan.trials}


def test_a_run_whose_first_trials_all_failed_resumes_when_the_cause_is_gone(bench: Bench) -> None:
    bench.launcher = Instant(lambda tensor, micro: CRASH)
    assert [trial.state for trial in bench.tune(max_trials=9).plan.trials] == [TrialState.FAILED] * 5
    bench.launcher = Instant(plain)
    resumed = bench.tune(max_trials=9).plan
    assert knobs(resumed.best.candidate) == (2, 2)
    assert sound(resumed)


def test_out_of_memory_does_not_stop_the_search(bench: Bench) -> None:
    out = Exit(code=-9, ended_by="memory", duration_s=1.0)
    bench.launcher = Instant(lambda tensor, micro: plain(tensor, micro) if (tensor, micro) == (2, 1) else out)
    plan = bench.tune().plan
    assert knobs(plan.best.candidate) == (2, 1)
    assert plan.counts.pruned["needs_as_much_memory_as_one_that_ran_out"] > 0
    assert sound(plan)


def test_with_a_failed_baseline_there_is_a_best_but_no_gain(bench: Bench) -> None:
    bench.launcher = Instant(at(0, plain, CRASH))
    plan = bench.tune().plan
    assert plan.best is not None
    assert (plan.gain, plan.repeats) == (None, ())
    assert sound(plan)


def test_the_time_limit_of_a_trial_is_at_most_the_remaining_time_of_the_run(bench: Bench) -> None:
    bench.tune(max_time_per_task=50.0, max_trials=2)
    assert set(bench.launcher.limits) == {50.0}
    bench.launcher = Instant(plain)
    bench.beside("other")
    bench.tune(max_time_per_task=50.0, max_time=20.0, max_trials=2)
    assert 0 < max(bench.launcher.limits) <= 20.0


def test_the_time_of_earlier_starts_counts(bench: Bench) -> None:
    bench.tune(max_trials=3, repeats=0)
    plan = bench.tune(max_trials=9, max_time=3.5, repeats=0).plan
    assert "max_time" in plan.stopped_because
    assert len(plan.trials) == 3


def test_no_trial_starts_without_enough_devices_or_memory(bench: Bench) -> None:
    with pytest.raises(NoDevice):
        bench.tune(cluster=ClusterSpec(devices_per_node=4))
    with pytest.raises(NothingFits):
        bench.tune(cluster=ClusterSpec(memory_bytes_per_device=1 << 20))
    assert bench.events == []
    assert list(bench.folder.iterdir()) == []


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
def busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BusyBench:
    monkeypatch.setattr(devices, "POLL_SECONDS", 0.01)
    monkeypatch.setattr("flagcore.tuner.trial_runner.SETTLE_SECONDS", 0.02)
    return BusyBench(tmp_path, Player())


def shortened_trials(plan: Plan) -> list[Trial]:
    return [trial for trial in plan.trials if trial.shortened]


def test_long_steps_run_shortened_and_the_finalists_whole(busy: BusyBench) -> None:
    plan = busy.plan(repeats=1, max_trials=4)
    assert len(shortened_trials(plan)) == 4
    for trial in shortened_trials(plan):
        assert trial.measurement.scaled_from is not None
        assert trial.shortened.global_batch_size < trial.shortened.whole == 512
    assert {batch_of(launch) for launch in busy.player.launches[:4]} < set(range(512))
    assert {batch_of(launch) for launch in busy.player.launches[4:]} == {512}
    assert plan.best.measurement is not None
    assert plan.best.is_final
    assert plan.baseline.is_final
    assert plan.best.role is Role.REPEAT
    assert len(plan.speedup.rounds) == 1


@pytest.mark.parametrize(("batch", "control"), [(512, {"max_step_time": None}), (4, {})], ids=["off", "too small"])
def test_steps_run_whole_on_request_or_if_they_cannot_be_shorter(
    busy: BusyBench, batch: int, control: dict[str, Any]
) -> None:
    assert shortened_trials(busy.plan(batch, repeats=0, max_trials=2, **control)) == []
    assert {batch_of(launch) for launch in busy.player.launches} == {batch}


def test_without_whole_runs_there_is_no_gain(busy: BusyBench) -> None:
    def ends(number: int) -> None:
        if number > 3:
            raise KeyboardInterrupt

    busy.player.ends = ends
    plan = busy.plan(repeats=1, max_trials=3)
    assert plan.best.shortened
    assert plan.speedup is None


def test_the_limit_follows_the_prediction_and_is_recorded(busy: BusyBench) -> None:
    plan = busy.plan(repeats=0, max_trials=1)
    trial, launch = plan.trials[0], busy.player.launches[0]
    assert launch.timeout_seconds == trial.time_limit.seconds > 300.0
    assert launch.timeout_because == trial.time_limit.because
    record = Result.write(plan, "run")["trials"][0]
    assert record["time_limit"] == asdict(trial.time_limit)
    assert record["shortened"]["whole"] == 512
    assert record["measured"]["step_time_s"]["scaled_from"] == trial.measurement.scaled_from


def test_the_first_event_reports_how_long_all_trials_may_take(busy: BusyBench) -> None:
    busy.plan(repeats=0, max_trials=2)
    plans = [event.search_time for event in busy.events]
    assert plans[1:] == [None] * (len(plans) - 1)
    assert plans[0].trials == 2
    assert plans[0].at_most_s > (plans[0].measuring_s or 0.0) > 0.0


def test_busy_devices_fail_a_trial_that_proves_nothing_and_stop_the_search(busy: BusyBench) -> None:
    busy.used_gib = lambda: 20.0
    plan = busy.plan(device_wait=0.05)
    assert busy.player.launches == []
    assert [event.kind for event in busy.events] == [
        "trial_started",
        "trial_waits",
        "trial_finished",
    ] * MAX_CONSECUTIVE_BUSY
    waiting = busy.events[1].trial.reason
    assert waiting is not None
    assert "device 0" in waiting
    assert "20.0 of 64.0 GiB" in waiting
    (trial,) = plan.trials
    assert (trial.state, trial.inconclusive) == (TrialState.FAILED, True)
    assert trial.reason.startswith("device busy: device 0")
    assert plan.counts.balanced
    assert plan.counts.pruned == {}
    busy.used_gib = lambda: 0.0
    again = busy.plan(repeats=0, max_trials=2)
    assert again.trials[0].role is Role.BASELINE
    assert [trial.state for trial in again.trials] == [TrialState.MEASURED] * 2


def test_out_of_memory_next_to_other_processes_is_tried_again(busy: BusyBench) -> None:
    out = Exit(code=-9, ended_by="memory", duration_s=1.0)

    def ends(number: int) -> Exit | None:
        busy.used_gib = lambda: 30.0 if number == 2 and len(busy.events) < 4 else 0.0
        return out if number == 2 else None

    busy.player.ends = ends
    plan = busy.plan(repeats=0, max_trials=4)
    failed = [event.trial for event in busy.events if event.kind == "trial_finished" and event.trial.inconclusive]
    assert [trial.state for trial in failed] == [TrialState.FAILED]
    assert failed[0].reason is not None
    assert "out of memory" in failed[0].reason
    assert plan.counts.pruned == {}
    assert {trial.candidate: trial for trial in plan.trials}[failed[0].candidate].state is TrialState.MEASURED


def test_a_spare_replaces_a_lost_host_and_a_resumed_search_remembers_the_loss(busy: BusyBench) -> None:
    busy.launcher = player = OnTwoHosts()
    busy.cluster = ClusterSpec(hosts=("a", "b"), nodes=1, spares=1)
    lost_host = Exit(code=1, ended_by="host", duration_s=1.0, detail="a: gone", lost_host="a")
    player.ends = lambda number: lost_host if number <= MAX_CONSECUTIVE_BUSY + 1 else None
    plan = busy.plan(repeats=0, max_trials=3, max_step_time=None)
    assert len(player.launches) == MAX_CONSECUTIVE_BUSY + 4
    assert plan.counts.balanced
    busy.plan(repeats=0, max_trials=3, max_step_time=None)
    assert player.resumed == ["a"] * (MAX_CONSECUTIVE_BUSY + 1)


def test_trials_whose_time_is_over_after_two_steps_are_measured(busy: BusyBench) -> None:
    busy.player.steps, busy.on_cores = 2, True
    plan = busy.plan(4, repeats=1, max_trials=3)
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


def test_a_search_whose_trials_have_time_for_one_step_ends_with_advice(busy: BusyBench) -> None:
    busy.player.steps, busy.on_cores = 1, True
    busy.player.step_s = lambda step: 50.0 * step
    plan = busy.plan(4, repeats=1, max_trials=9, max_time_per_task=60.0)
    assert plan.best is None
    assert len(busy.player.launches) <= 2
    assert "auto_tuner.control.max_time_per_task: " in plan.stopped_because
    (record, *_others) = Result.write(plan, "run")["trials"]
    assert (record["state"], len(record["finished_steps_s"])) == ("timed_out", 1)
