"""The line of progress: what runs, the best so far and the time left, in the width of the terminal."""

from dataclasses import replace

import pytest
from flagcore_testing import toy

from flagcore.cli.progress import line, status_line
from flagcore.contracts import Event
from flagcore.domain.trial import Trial, TrialState
from tests import tasks

CANDIDATE = tasks.candidate(use_recompute=True, recompute_method="block", use_distributed_optimizer=True)


def event(best: bool = True) -> tuple[Event, Trial]:
    trial, done = tasks.trial(12, CANDIDATE, None, state=TrialState.RUNNING), tasks.trial(3, CANDIDATE, 0.4125)
    found = Event(
        kind="trial_started",
        trial=trial,
        trials_finished=12,
        trials_planned=20,
        seconds_left=300.0,
        best=done if best else None,
        objective="tokens_per_second_per_device",
        knobs={knob.name: knob for knob in toy.KNOBS},
    )
    return found, trial


def test_the_line_has_the_most_important_parts_first() -> None:
    found, trial = event()
    count, left, best, running = status_line(found, [trial], 300.0).split(" | ")
    assert (count, "5.0 min left" in left, "0.412" in best) == ("12/20 trials", True, True)
    assert running.startswith("12: MBS")
    served = tasks.trial(3, CANDIDATE, 1 / 40535)
    served = replace(served, measurement=replace(served.measurement, figures={"output_tokens_per_s": 40535.0}))
    found = replace(found, best=served, objective="output_tokens_per_s")
    assert "best 40,535 output" in status_line(found, [], None)
    assert status_line(event(best=False)[0], [], None) == "12/20 trials"


@pytest.mark.parametrize(("objective", "value"), [("output_tokens_per_s", "50 "), ("e2e_s.mean", "0.02 ")])
def test_a_trial_starts_with_the_prediction_that_earlier_trials_corrected(objective: str, value: str) -> None:
    found, trial = event()
    trial = replace(trial, predicted=tasks.prediction(compute_s=0.001), believed=tasks.belief(0.02))
    assert f"~{value}" in line(replace(found, trial=trial, objective=objective))
