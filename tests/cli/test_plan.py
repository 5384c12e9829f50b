"""A plan ends with a command and says what it lacks; the line of progress fits the width of the terminal."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from flagcore_testing import toy

from flagcore.cli.progress import line, live_lines
from flagcore.contracts import Event
from flagcore.domain.trial import Role, Trial, TrialState
from tests import tasks
from tests.cli.conftest import Flag, Project


def test_a_plan_ends_with_a_command_that_writes_its_script(flag: Flag, project: Project) -> None:
    spec = project.spec()
    last = flag("estimate", spec, "--top", "1").worked().err.splitlines()[-1]
    words = shlex.split(last.partition("flag export")[2])
    files = [Path(each).name for each in flag("export", *words).worked().out.splitlines()]
    assert "job.json" in files
    flag("export", *words, "-o", "-").refused(2, "--to toy")


def test_a_plan_without_a_chip_asks_for_one(flag: Flag, project: Project) -> None:
    spec = project.spec(cluster={"chip": "auto"})
    flag("estimate", spec).refused(2, "--chip")
    flag("estimate", spec, "--chip", "cpu", "--top", "1").worked()


@pytest.mark.parametrize("target", ["toyy", "compose"])
def test_a_refused_target_lists_those_that_accept_the_job(flag: Flag, project: Project, target: str) -> None:
    refused = flag("export", project.spec(), "--to", target)
    assert refused.code == 2
    known = refused.err.strip().rpartition(": ")[2].split(", ")
    assert "toy" in known
    for each in known:
        flag("export", project.spec(), "--to", each).worked()


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


def test_the_live_lines_show_budget_phase_step_and_the_best() -> None:
    found, trial = event()
    start = replace(found, trial=replace(trial, role=Role.REPEAT), steps=lambda: (3, 8), repeats=(1, 4))
    second = tasks.trial(5, tasks.candidate(), 0.5)
    leaders = tuple(filter(None, (found.best, second)))
    shown = live_lines(replace(found, elapsed_s=120.0, leaders=leaders), [start], 60.0)
    (budget, _), (running, _), *best = shown
    assert budget == "12/20 trials, 3.0 min elapsed, at most ~4.0 min left"
    assert ("repeat 2/4: 12: MBS" in running, "step 3/8" in running) == (True, True)
    assert [(text[:2], "0.412" in text, style) for text, style in best] == [("1.", True, "green"), ("2.", False, "")]
    served = tasks.trial(3, CANDIDATE, 1 / 40535)
    served = replace(served, measurement=replace(served.measurement, figures={"output_tokens_per_s": 40535.0}))
    served_event = replace(found, leaders=(served,), objective="output_tokens_per_s", seconds_left=None)
    (budget, _), (text, _) = live_lines(served_event, [], 0.0)
    assert (budget, "1. 40,535 output" in text) == ("12/20 trials, 0 s elapsed", True)


@pytest.mark.parametrize(("objective", "value"), [("output_tokens_per_s", "50 "), ("e2e_s.mean", "0.02 ")])
def test_a_trial_starts_with_the_prediction_that_earlier_trials_corrected(objective: str, value: str) -> None:
    found, trial = event()
    trial = replace(trial, predicted=tasks.prediction(compute_s=0.001), believed=tasks.belief(0.02))
    assert f"~{value}" in line(replace(found, trial=trial, objective=objective))
