"""How long a run may go on."""

from dataclasses import replace

from flagcore.domain.space import Candidate
from flagcore.domain.spec import Control
from flagcore.domain.trial import Role, Trial, TrialState
from flagcore.tuner.budget import REPEAT_SLACK, has_time_to_repeat, repeats_seconds, seconds_left, stop_reason
from flagcore.tuner.search_state import EXTRA_ROUNDS, SearchState
from flagcore.tuner.stages.learn import learn
from tests import tasks

CONTROL = Control(max_trials=4, max_time=100.0, max_time_per_task=30.0, repeats=1)


def trial(number: int, speed: float | None = 1.0, *, role: Role = Role.SEARCH, seconds: float = 10.0) -> Trial:
    step, candidate = 1.0 / speed if speed else None, Candidate.of({"micro_batch_size": number})
    return tasks.trial(number, candidate, step, rate=speed, role=role, duration_s=seconds)


def search_state(*trials: Trial) -> SearchState:
    return learn(trials)


def test_the_number_of_trials_ends_a_run() -> None:
    known = [trial(0, role=Role.BASELINE), *(trial(n) for n in (1, 2, 3))]
    assert stop_reason(CONTROL, search_state(*known[:3]), 0.0) is None
    assert stop_reason(CONTROL, search_state(*known), 0.0) == "max_trials = 4 reached"


def test_an_interrupted_trial_uses_no_budget() -> None:
    known = [trial(n) for n in range(4)]
    known[3] = replace(known[3], state=TrialState.INTERRUPTED, measurement=None)
    assert stop_reason(CONTROL, search_state(*known), 0.0) is None


def test_time_is_reserved_for_the_repeats_and_one_more_trial() -> None:
    known = search_state(trial(0, 1.0, role=Role.BASELINE, seconds=20.0), trial(1, 2.0, seconds=10.0))
    assert repeats_seconds(CONTROL, known) == 30.0 * REPEAT_SLACK
    assert stop_reason(CONTROL, known, 79.0 - 30.0 * REPEAT_SLACK) is None
    assert stop_reason(CONTROL, known, 80.0 - 30.0 * REPEAT_SLACK) is not None


def test_time_is_also_reserved_for_the_repeats_of_rivals() -> None:
    known = search_state(trial(0, 1.0, role=Role.BASELINE), trial(1, 2.0), trial(2, 1.99))
    assert repeats_seconds(CONTROL, known) == 30.0 * REPEAT_SLACK
    most = (30.0 + 20.0 * EXTRA_ROUNDS) * REPEAT_SLACK
    assert repeats_seconds(CONTROL, known, at_most=True) == seconds_left(CONTROL, known, 3, 0.0) == most
    one_done = search_state(
        *known.trials, replace(trial(3, 1.0, role=Role.REPEAT), candidate=known.trials[0].candidate)
    )
    assert repeats_seconds(CONTROL, one_done) == 20.0 * REPEAT_SLACK
    assert repeats_seconds(replace(CONTROL, repeats=0), known, at_most=True) == 0.0


def test_repeats_that_would_not_end_in_time_do_not_start() -> None:
    most = 10.0 * REPEAT_SLACK
    assert has_time_to_repeat(CONTROL, trial(0, seconds=10.0), 100.0 - most)
    assert not has_time_to_repeat(CONTROL, trial(0, seconds=10.0), 101.0 - most)
    assert has_time_to_repeat(replace(CONTROL, max_time=None), trial(0, seconds=10.0), 1e9)


def test_a_hang_leaves_time_for_the_others() -> None:
    known = search_state(
        trial(0, 1.0, role=Role.BASELINE), replace(trial(1, None, seconds=30.0), state=TrialState.TIMED_OUT)
    )
    assert stop_reason(CONTROL, known, 80.0) is None


def test_no_trial_starts_in_the_last_seconds_after_a_timeout() -> None:
    known = search_state(replace(trial(0, None, role=Role.BASELINE, seconds=80.0), state=TrialState.TIMED_OUT))
    assert stop_reason(CONTROL, known, 80.0) is None
    assert vars(stop_reason(CONTROL, known, 99.0))["values"] == {"elapsed": 99.0, "seconds": 100.0}


def test_it_ends_early_if_all_trials_fail() -> None:
    assert stop_reason(replace(CONTROL, max_trials=99), search_state(*(trial(n, None) for n in range(5))), 0.0) == (
        "the first 5 trials all failed"
    )
    memory = [replace(trial(n, None), state=TrialState.OUT_OF_MEMORY) for n in range(5)]
    assert stop_reason(replace(CONTROL, max_trials=99), search_state(*memory), 0.0) is None
    one_worked = (trial(0), *(trial(n, None) for n in range(1, 6)))
    assert stop_reason(replace(CONTROL, max_trials=99), search_state(*one_worked), 0.0) is None


def test_imported_trials_use_no_budget() -> None:
    imported = [replace(trial(n), source="history.csv") for n in range(4)]
    assert stop_reason(CONTROL, search_state(*imported), 0.0) is None
    assert seconds_left(CONTROL, search_state(*imported), 50, 0.0) is None


def test_time_is_kept_for_the_whole_runs_of_shortened_finalists() -> None:
    both = [trial(0, 1.0, role=Role.BASELINE), trial(1, 2.0)]
    known = search_state(*(scaled(each, 0.25) for each in both))
    durations = [REPEAT_SLACK * (10.0 + CONTROL.train_iters * share) for share in (0.75, 0.25)]
    assert repeats_seconds(CONTROL, known) == sum(durations)
    assert repeats_seconds(replace(CONTROL, repeats=0), known) == sum(durations)
    assert has_time_to_repeat(CONTROL, known.trials[0], 100.0 - durations[0])
    assert not has_time_to_repeat(CONTROL, known.trials[0], 100.1 - durations[0])


def scaled(trial: Trial, seconds: float) -> Trial:
    """The trial as if its step had been scaled from one of `seconds`."""
    measured = trial.measurement
    step = measured.step_time_s
    return replace(trial, measurement=replace(measured, scaled_from=seconds, low_s=0.99 * step, high_s=1.01 * step))


def test_the_remaining_time_includes_trials_and_repeats() -> None:
    known = search_state(trial(0, 1.0, role=Role.BASELINE), trial(1, 2.0))
    assert seconds_left(CONTROL, search_state(), 50, 0.0) is None
    only_baseline = search_state(trial(0, 1.0, role=Role.BASELINE))
    assert seconds_left(CONTROL, only_baseline, 3, 0.0) == 2 * 10.0 + 20.0
    assert seconds_left(replace(CONTROL, repeats=0), only_baseline, 3, 0.0) == 2 * 10.0
    assert seconds_left(CONTROL, known, 50, 0.0) == 2 * 10.0 + 20.0 * REPEAT_SLACK
    assert seconds_left(CONTROL, known, 3, 0.0) == 1 * 10.0 + 20.0 * REPEAT_SLACK
    assert seconds_left(CONTROL, known, 50, 95.0) == 5.0
