"""`flag tune` with servers of known speed: the best that meets the limits, a run that goes on, and what is left."""

import json
import os
import signal
import sys
import time
from typing import Any

import pytest

from tests.product.cli.conftest import SERVER, Flag, Project, Ran
from tests.run_checks import books_balance

pytestmark = [pytest.mark.slow, pytest.mark.spread]


def tune(flag: Flag, project: Project, **arguments: Any) -> Ran:
    return flag("tune", project.served(**arguments), "--run-dir", str(project.run_dir))


def test_if_no_configuration_meets_the_slo_the_nearest_is_named(flag: Flag, project: Project) -> None:
    only = {"parallel": 4}
    completed = tune(flag, project, serve={"slo": {"ttft_s": {"p99": 0.05}}}, space=only, baseline=only)
    assert completed.code == 3, completed.err
    assert "nearest" in completed.err
    assert "parallel" in completed.err


def test_the_fastest_that_keeps_the_slo_wins_and_the_cost_of_the_slo_is_reported(flag: Flag, project: Project) -> None:
    completed = tune(flag, project, serve={"slo": {"ttft_s": {"p99": 0.6}}}).worked()
    result = project.result()
    assert [trial["state"] for trial in result["trials"]] == ["measured"] * 3
    assert result["best"]["candidate"]["parallel"] == 2
    assert "Without the limits: trial " in completed.out
    measured = {trial["candidate"]["parallel"]: trial["measured"] for trial in result["trials"]}
    assert [bool(measured[slots]["broken"]) for slots in (1, 2, 4)] == [False, False, True]
    assert measured[4]["figures"]["goodput_requests_per_s"] == 0.0


def test_a_killed_run_leaves_no_process_and_resumes_to_the_fastest_with_its_start_script(
    flag: Flag, project: Project, caplog: pytest.LogCaptureFixture
) -> None:
    file = project.served(space={"parallel": [1, 4]})
    process = project.start("tune", file, "--run-dir", str(project.run_dir))
    deadline = time.monotonic() + 60
    while not (project.run_dir / "trials" / "1" / "serve.json").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert project.all_gone()
    rerun = flag("tune", file, "--run-dir", str(project.run_dir)).worked()
    assert "trial 0 (" not in rerun.err
    assert "resuming" in caplog.text
    result = project.result()
    assert books_balance(result)
    assert [trial["state"] for trial in result["trials"]] == ["measured"] * 2
    best = result["best"]
    assert best["candidate"]["parallel"] == best["measured"]["effective"]["parallel"] == 4
    assert result["baseline"]["candidate"]["parallel"] == 1
    assert result["gain"] > 0.2
    assert best["measured"]["figures"]["output_tokens_per_s"] > 0
    assert best["measured"]["figures"]["ttft_s"]["p99"] > 0.8
    launch = json.loads((project.run_dir / "best" / "launch.json").read_text())
    assert launch["argv"][:3] == [sys.executable, str(SERVER), "known"]
    assert "--parallel 4" in (project.run_dir / "best.sh").read_text()
    assert project.all_gone()
