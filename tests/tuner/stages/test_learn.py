"""What trials teach: the best, and the fastest where a limit rules it out."""

from dataclasses import replace

from flagcore.domain.trial import Role
from flagcore.tuner.stages.learn import learn
from tests.serving_trials import trial

FAST, SLOW_RATIO = trial(1, 200.0, ttft=1.5), trial(2, 150.0, ttft=0.9)


def test_the_best_meets_every_limit_even_if_another_is_faster() -> None:
    for trials, best in (((trial(0, 100.0, role=Role.BASELINE), FAST, SLOW_RATIO), SLOW_RATIO), ((FAST,), None)):
        search_state = learn(trials)
        assert (search_state.best, search_state.fastest) == (best, FAST)


def test_a_candidate_that_breaks_a_limit_in_half_of_its_runs_is_not_the_best() -> None:
    again = trial(3, 150.0, ttft=1.2, role=Role.REPEAT, slots=2)
    assert learn((trial(0, 100.0), SLOW_RATIO, again)).best == trial(0, 100.0)
    twice = trial(4, 150.0, ttft=0.8, role=Role.REPEAT, slots=2)
    assert learn((trial(0, 100.0), SLOW_RATIO, again, twice)).best == SLOW_RATIO


def test_a_run_of_flagcore_replaces_an_imported_one() -> None:
    imported = replace(trial(1, 200.0), source="history.csv")
    assert learn((imported,)).speed_of(imported.candidate) == imported.speed
    again = replace(trial(2, 100.0, role=Role.REPEAT), candidate=imported.candidate)
    assert learn((imported, again)).speed_of(imported.candidate) == again.speed
    own = replace(trial(2, 100.0), candidate=imported.candidate)
    assert learn((imported, own)).trials == (own,)
