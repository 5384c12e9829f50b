"""What people see on a terminal, and what goes to a pipe."""

from __future__ import annotations

import os
import pty
import subprocess
from collections.abc import Callable

import pytest

from tests.cli.conftest import FLAG, Project, Ran

Flag = Callable[..., Ran]
pytestmark = pytest.mark.slow


def on_terminal(project: Project, *arguments: str, **environment: str) -> str:
    """Return what `flag` prints on a terminal of 80 columns."""
    controller, terminal = pty.openpty()
    environment = {"COLUMNS": "80", "TERM": "xterm-256color", **environment}
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    environment = {**os.environ, **environment, "PYTHONPATH": root}
    process = subprocess.Popen(
        [*FLAG, *arguments], stdout=terminal, stderr=terminal, env=environment, cwd=project.folder
    )
    os.close(terminal)
    output = b""
    while True:
        try:
            piece = os.read(controller, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        output += piece
    os.close(controller)
    assert process.wait(60) == 0, output
    return output.decode()


def test_tables_fit_a_terminal_and_are_complete_elsewhere(flag: Flag, project: Project) -> None:
    narrow_output = on_terminal(project, "explain", project.spec())
    assert max(map(len, narrow_output.splitlines())) <= 80
    assert "\x1b" not in narrow_output
    wide_output = on_terminal(project, "explain", project.spec(), "--wide").replace("\r\n", "\n")
    assert wide_output == flag("explain", project.spec()).out
    assert max(map(len, wide_output.splitlines())) > 80
    assert on_terminal(project, "explain", project.spec(), "--json").count("{") > 1


@pytest.mark.parametrize("width", [40, *(pytest.param(width, marks=pytest.mark.long) for width in (60, 120))])
def test_sentences_fit_a_terminal_too_and_keep_every_word(width: int, flag: Flag, project: Project) -> None:
    arguments = ("explain", project.spec(), "tp=2, mbs=3")
    narrow_output = on_terminal(project, *arguments, COLUMNS=str(width))
    full_output = flag(*arguments).out
    longest = max(map(len, full_output.split()))
    assert max(map(len, narrow_output.splitlines())) <= max(width, longest + len("  - "))
    assert narrow_output.split() == full_output.split()


def test_files_of_a_run_are_complete_regardless_of_the_terminal(project: Project) -> None:
    spec = project.spec(control={"max_trials": 2}, auto_tuner={"space": {"use_distributed_optimizer": [True]}})
    output = on_terminal(project, "tune", spec, "--run-dir", "run", COLUMNS="70", NO_COLOR="1")
    rows = [line for line in (project.run_dir / "report.txt").read_text().splitlines() if line.startswith("0 baseline")]
    assert len(rows) == 1
    assert len(rows[0]) > 70
    assert "\x1b[3" not in output  # no colour
    assert "trial 0 (baseline) measured" in output


def test_verbose_reports_why_each_trial_was_chosen_and_where_its_log_is(flag: Flag, project: Project) -> None:
    arguments = ("tune", project.spec(control={"max_trials": 2}), "--run-dir", str(project.run_dir))
    progress = flag(*arguments, "-v").err
    assert progress.count("  log: trials/") == 4  # two trials and their repeats
    assert "  chosen for the fastest predicted candidate" in progress
    assert "log:" not in flag(*arguments, "--new").err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_get_completion(shell: str, flag: Flag) -> None:
    script = flag("completion", shell).out
    assert f"_FLAG_COMPLETE={shell}_complete" in script
    assert "flag" in script


def test_commands_and_options_are_completed(project: Project) -> None:
    def completed(words: str, place: int) -> str:
        request = {"_FLAG_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(place)}
        return project.run(**request).out

    assert completed("flag ex", 1).split() == ["plain,explain"]
    assert "plain,--format" in completed("flag explain --", 2).split()
    assert completed("flag estimate --chip h100-s", 3).split() == ["plain,H100-SXM"]
    assert completed("flag estimate --no-plugin nvi", 3).split() == ["plain,nvidia"]
