"""The loop with a launcher that starts nothing and writes at once what a run would print; all else is real."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from flagcore.domain.launch import Exit
from flagcore.domain.spec import ClusterSpec
from flagcore.domain.trial import Role, TrialState
from flagcore.errors import Interrupted, LaunchError, NoDevice, NothingFits
from flagcore.report.result import Result
from flagcore.tuner.budget import seconds_used
from tests.tuner.benches import Bench, Instant, at, knobs, plain, sound

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


def test_a_search_that_ended_does_not_resume_with_higher_limits(bench: Bench) -> None:
    first = bench.tune(max_trials=3).plan
    assert len(first.repeats) == 2
    bench.launcher = Instant(lambda tensor, micro: AssertionError("no trial should start"))
    assert bench.tune(max_trials=6, max_time=100.0).plan == first


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
