"""The oracle, with a program in place of vLLM's that answers as it is told."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from flagcore_serving import schedules
from flagcore_vllm.engine import ENGINE
from flagcore_vllm_schedule import inside, oracle
from flagcore_vllm_schedule.oracle import Process, Unanswered, VllmSchedule

from engines.serving.tests.engines.tasks import planned, space_of
from flagcore.contracts import Problem
from flagcore.domain.space import Candidate, Legality
from flagcore.errors import SpecError, UsageError
from flagcore.tuner.stages.prune import prune
from tests.checks import program
from tests.product import serving_inputs
from tests.product.tasks import platform

ANSWERS = """
import os, sys
for line in sys.stdin:
    print(os.environ["ANSWER"], flush=True)
"""
VALUES = {"tensor_model_parallel_size": 1}


@pytest.fixture
def command(tmp_path: Path) -> str:
    """A program of this Python, as `serve.command`."""
    return str(program(tmp_path / "vllm", "", sys.executable))


@pytest.fixture
def answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[object], VllmSchedule]:
    """A schedule whose program gives always the same answer."""
    (tmp_path / "answers.py").write_text(ANSWERS)
    monkeypatch.setattr(oracle, "INSIDE", tmp_path / "answers.py")
    monkeypatch.setattr("flagcore_importers.programs.package_version", lambda program, *names: "0.32.0")
    schedule = VllmSchedule()
    monkeypatch.setattr("flagcore_serving.engine.schedule_of", lambda name: schedule)

    def answer(data: object) -> VllmSchedule:
        monkeypatch.setenv("ANSWER", json.dumps(data) if not isinstance(data, str) else data)
        return schedule

    return answer


def here(command: str, **more: Any) -> Any:
    """A platform whose servers `command` starts."""
    task = planned("vllm", command=(command, "serve"), memory=8 * 2**30, **more)
    return platform(task, costs=serving_inputs.costs())


def candidate_of(place: Any) -> Candidate:
    return Candidate.of({**ENGINE.defaults(place.task), **VALUES})


def test_a_trial_that_the_engine_refuses_does_not_start(command: str, answered: Any, tmp_path: Path) -> None:
    schedule, place = answered({"refused": "max_model_len (9) is too large"}), here(command)
    with pytest.raises(UsageError, match=r"^max_model_len \(9\) is too large$"):
        ENGINE.launch(place, candidate_of(place), str(tmp_path))
    answered({"blocks": 7})
    schedule.close()
    assert ENGINE.launch(place, candidate_of(place), str(tmp_path)).argv
    assert ENGINE.trial_notes(place, candidate_of(place)) == ()
    schedule.close()


@pytest.mark.parametrize("answer", [{"left": "TypeError: seam"}, "no JSON"])
def test_without_an_answer_the_search_goes_on(command: str, answered: Any, answer: object, tmp_path: Path) -> None:
    schedule, place = answered(answer), here(command)
    assert ENGINE.launch(place, candidate_of(place), str(tmp_path)).argv
    assert len(ENGINE.trial_notes(place, candidate_of(place))) == 1, "it is said once"
    assert schedule.process is None


def test_a_program_that_is_not_vllm_is_not_asked(answered: Any) -> None:
    schedule, place = answered({"refused": "x"}), here("/bin/true")
    assert schedule.refusal(ENGINE, place, candidate_of(place)) == ""
    assert schedule.notes() == ()


def test_what_the_engine_refuses_is_not_planned(command: str, answered: Any) -> None:
    place = here(command, space={"max_num_seqs": (8, 16)})
    space = space_of(ENGINE, place.task)
    predictions = ENGINE.predict(place.task, space.columns(np.arange(len(space))), place.costs)
    problem = Problem(
        platform=place,
        legality=Legality(axes=ENGINE.axes(place.task), rules=(), merges=()),
        space=space,
        predictions=predictions,
        pruned=prune(space, predictions, ()),
        baseline=candidate_of(place),
    )
    assert ENGINE.plans.scheduled(problem) is problem, "its spec does not ask"
    work = replace(place.task.spec.serve, scheduled=True)
    task = replace(place.task, spec=replace(place.task.spec, work=work))
    asking = replace(problem, platform=replace(place, task=task))
    schedule = answered({"refused": "not these"})
    found = ENGINE.plans.scheduled(asking)
    assert found.pruned.open_rows.size == 0
    assert found.messages[oracle.REFUSED] == "not these"
    answered({"left": "x"})
    schedule.close()
    left = ENGINE.plans.scheduled(asking)
    assert left.predictions is predictions
    assert np.array_equal(left.pruned.open_rows, problem.pruned.open_rows)


def test_a_plan_that_asks_needs_the_distribution(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = here(command, scheduled=True)
    monkeypatch.setattr("flagcore_serving.engine.schedule_of", lambda name: None)
    problem: Any = type("", (), {"task": place.task})()
    with pytest.raises(SpecError) as error:
        ENGINE.plans.scheduled(problem)
    assert error.value.key == "auto_tuner.control.fidelity"
    assert ENGINE.trial_notes(place, candidate_of(place)) == ()


def test_it_is_installed() -> None:
    assert isinstance(schedules.schedule_of("vllm"), VllmSchedule)
    assert schedules.schedule_of("sglang") is None


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A vLLM whose import does not end, and starts a process of its own."""
    package = tmp_path / "vllm"
    package.mkdir()
    starts = "import subprocess, time\nsubprocess.Popen(['sleep', '321'])\nfor _ in range(321): time.sleep(1)\n"
    (package / "__init__.py").write_text(starts)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return package


@pytest.mark.slow
def test_what_takes_too_long_is_killed_with_its_children(slow: Path) -> None:
    asked = Process(sys.executable, {})
    root = psutil.Process(asked.pid)
    with pytest.raises(Unanswered):
        asked.ask({"do": "start"}, time.monotonic() + 1.0)
    assert not root.is_running()


ASKING = "import sys, time; from flagcore_vllm_schedule.oracle import Process; p = Process(sys.executable, {}); "
ASKING += "print(p.pid, flush=True); p.ask({'do': 'start'}, time.monotonic() + 300)"


@pytest.mark.slow
@pytest.mark.parametrize("wait", [0.0, 1.0])
def test_nothing_is_left_of_a_killed_search(slow: Path, wait: float) -> None:
    asking = subprocess.Popen((sys.executable, "-c", ASKING), stdout=subprocess.PIPE)
    assert asking.stdout is not None
    root = psutil.Process(int(asking.stdout.readline()))
    time.sleep(wait)
    family = [root, *root.children(recursive=True)]
    asking.send_signal(signal.SIGKILL)
    asking.wait()
    assert not psutil.wait_procs(family, 20.0)[1]


def raised(text: str, kind: type[Exception]) -> Exception:
    """An error of another file than the program's own."""
    try:
        raise kind(text)
    except kind as error:
        return error


@pytest.mark.parametrize(
    ("error", "printed", "expected"),
    [
        (raised("too long", ValueError), "", "too long"),
        (raised("", AssertionError), "", ""),
        (raised("seam", TypeError), "", ""),
        (raised("device", RuntimeError), "", ""),
        (SystemExit(2), "usage: x\nx: error: argument --a: invalid", "argument --a: invalid"),
    ],
)
def test_only_what_the_engine_says_about_values_is_a_refusal(error: BaseException, printed: str, expected: str) -> None:
    assert inside.refusal(error, printed) == expected
