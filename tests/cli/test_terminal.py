"""What people see on a terminal, and what goes to a pipe.

A plan ends with a command and says what it lacks; the line of progress fits the width of the terminal.

Secrets of a spec, its command and the shell do not get where other users can read them."""

import contextlib
import json
import os
import pty
import re
import shlex
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path

import click
import pytest
from flagcore_testing import toy

from flagcore.cli import options
from flagcore.cli.progress import line, live_lines
from flagcore.contracts import Event
from flagcore.domain.trial import Role, Trial, TrialState
from flagcore.launchers import guard
from tests import tasks
from tests.checks import MARK, SHELL, VARIABLES, WORDS, leaking_files, leaks
from tests.cli.conftest import TRAIN, Flag, Project


@pytest.fixture
def on_terminal(flag: Flag, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return what `flag` prints on a terminal of 80 columns."""

    def call(*arguments: str, columns: int = 80, colours: bool = False) -> str:
        controller, terminal_end = pty.openpty()
        pieces: list[bytes] = []
        reader = threading.Thread(target=read_all, args=(controller, pieces))
        reader.start()
        with monkeypatch.context() as patch, open(terminal_end, "w") as terminal, redirect_stdout(terminal):
            patch.setenv("COLUMNS", str(columns))
            patch.setenv("TERM", "xterm-256color")
            patch.setenv("NO_COLOR", "" if colours else "1")
            with redirect_stderr(terminal):
                completed = flag(*arguments)
        reader.join(60)
        output = b"".join(pieces).decode()
        assert completed.code == 0, output
        return output

    return call


def read_all(terminal: int, pieces: list[bytes]) -> None:
    """Read until the other end is closed."""
    with contextlib.suppress(OSError):
        while piece := os.read(terminal, 65536):
            pieces.append(piece)
    os.close(terminal)


@pytest.mark.slow
def test_a_line_shows_that_a_long_plan_is_working(
    on_terminal: Callable[..., str], flag: Flag, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "SILENT_S", 0.0)
    monkeypatch.setattr(options, "AGAIN_S", 1000)
    line = "predicting the candidates ..."
    assert line in on_terminal("estimate", project.spec())
    planned = flag("estimate", project.spec(), "--json")
    assert planned.err.count(line) == 1
    assert json.loads(planned.out)


def test_a_long_plan_says_again_that_it_is_working(monkeypatch: pytest.MonkeyPatch) -> None:
    said, enough = list[str](), threading.Event()

    def say(text: str) -> None:
        said.append(text)
        if len(said) == 3:
            enough.set()

    for name, value in (("SILENT_S", 0.0), ("AGAIN_S", 0.125), ("say", say)):
        monkeypatch.setattr(options, name, value)
    with options.patience("works"):
        assert enough.wait(60.0)
    assert said[:3] == ["works ...", "works ... 0.125 s", "works ... 0.25 s"]


@pytest.mark.slow
def test_tables_fit_a_terminal_and_are_complete_elsewhere(
    flag: Flag, on_terminal: Callable[..., str], project: Project
) -> None:
    narrow_output = on_terminal("explain", project.spec())
    assert max(map(len, narrow_output.splitlines())) <= 80
    assert "\x1b" not in narrow_output
    wide_output = on_terminal("explain", project.spec(), "--wide").replace("\r\n", "\n")
    assert wide_output == flag("explain", project.spec()).out
    assert max(map(len, wide_output.splitlines())) > 80
    assert on_terminal("explain", project.spec(), "--json").count("{") > 1


@pytest.mark.slow
def test_sentences_fit_a_terminal_too_and_keep_every_word(
    flag: Flag, on_terminal: Callable[..., str], project: Project
) -> None:
    arguments = ("explain", project.spec(), "tp=2, mbs=3")
    narrow_output, full_output = on_terminal(*arguments, columns=40), flag(*arguments).out
    longest = max(map(len, full_output.split()))
    assert max(map(len, narrow_output.splitlines())) <= max(40, longest + len("  - "))
    assert narrow_output.split() == full_output.split()


@pytest.mark.slow
def test_messages_fit_a_terminal_unless_it_is_wide(
    flag: Flag, on_terminal: Callable[..., str], project: Project
) -> None:
    full = flag("estimate", project.spec())
    assert max(map(len, full.err.splitlines())) > 70
    lines = on_terminal("estimate", project.spec(), columns=70).splitlines()
    assert max(len(line) for line in lines if len(line.split()) > 1) <= 70  # a path is not divided
    wide = on_terminal("estimate", project.spec(), "--wide", columns=70).replace("\r\n", "\n")
    assert not Counter((full.err + full.out).split("\n")) - Counter(wide.split("\n"))


@pytest.mark.slow
def test_files_of_a_run_are_complete_regardless_of_the_terminal(
    on_terminal: Callable[..., str], project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    spec = project.spec(control={"max_trials": 2}, auto_tuner={"space": {"use_distributed_optimizer": [True]}})
    output = on_terminal("tune", spec, "--run-dir", "run", columns=70)
    rows = [line for line in (project.run_dir / "report.txt").read_text().splitlines() if line.startswith("0 baseline")]
    assert len(rows) == 1
    assert len(rows[0]) > 70
    assert "\x1b[3" not in output  # no colour
    assert "trial 0 (baseline) measured" in output


@pytest.mark.slow
def test_results_have_colours_on_a_terminal_only(
    flag: Flag, on_terminal: Callable[..., str], project: Project, made_run: Path
) -> None:
    text = on_terminal("runs", "show", str(made_run), columns=300, colours=True)
    best = next(line for line in text.splitlines() if re.match(r"\x1b\[32m\d+ (.* )?best ", line))
    assert best.endswith("\x1b[0m")
    assert re.search(r"\x1b\[2m~[\d.]+\x1b\[0m", text)
    plain = on_terminal("runs", "show", str(made_run), columns=300)
    assert click.unstyle(text) == plain != text
    assert options._coloured("3  TP 2  failed  -") == click.style("3  TP 2  failed  -", fg="red")


@pytest.mark.slow
def test_verbose_reports_why_each_trial_was_chosen_and_where_its_log_is(flag: Flag, project: Project) -> None:
    arguments = ("tune", project.spec(control={"max_trials": 2}), "--run-dir", str(project.run_dir))
    progress = flag(*arguments, "-v").err
    assert progress.count("  log: trials/") == 4  # two trials and their repeats
    assert "  chosen for the fastest predicted candidate" in progress
    assert "log:" not in flag(*arguments, "--new").err


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_get_completion(shell: str, flag: Flag) -> None:
    script = flag("completion", shell).out
    assert f"_FLAG_COMPLETE={shell}_complete" in script
    assert "flag" in script


@pytest.mark.slow
def test_commands_and_options_are_completed(flag: Flag, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_FLAG_COMPLETE", "bash_complete")

    def completed(words: str, place: int) -> str:
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(place))
        return flag().out

    assert completed("flag ex", 1).split() == ["plain,explain", "plain,export"]
    assert "plain,--format" in completed("flag explain --", 2).split()
    assert completed("flag estimate --chip cp", 3).split() == ["plain,cpu"]
    assert completed("flag estimate --no-plugin cp", 3).split() == ["plain,cpu"]


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
    assert {"toy", "kubernetes"} <= {*known}
    for each in known:
        tried = flag("export", project.spec(), "--to", each)
        assert tried.code == 0 or "needs --image" in tried.err


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
    assert f"expected ~{value}" in line(replace(found, trial=trial, objective=objective))


LOGS = """\
import os, sys
print(sys.argv, {**os.environ}, sep="\\n")
pid = os.getppid()
while pid > 1 and pid != int(os.environ["TUNER"]):  # what `ps` shows of the processes that started this one
    print("ancestor:", open(f"/proc/{pid}/cmdline").read(), flush=True)
    pid = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
if os.environ["FAILS"]:
    sys.exit(f"cannot log in with {os.environ['MY_PASSWORD']} at {sys.argv[3:-1]}, or {os.environ['UPSTREAM']}")
"""
SHOWN = (["explain", "spec.yaml"], ["estimate", "spec.yaml", "--json"], ["runs", "list", "."])
"""What shows a spec or runs."""


@pytest.mark.slow
def test_no_file_of_others_no_screen_and_no_process_list_has_a_secret(
    flag: Flag, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reasons of failures are cut in the middle of secrets, which are then not recognized in what is left of them."""
    folder = project.folder
    for name, value in {**SHELL, "FLAGCORE_HOME": str(folder / "home")}.items():
        monkeypatch.setenv(name, value)
    (folder / "train.py").write_text(LOGS + TRAIN)
    spec = project.spec(
        control={"max_trials": 2, "repeats": 0},
        train={"command": [*project.job(0)["train"]["command"], *WORDS]},
        envs={**VARIABLES, "TUNER": str(os.getpid()), "FAILS": ""},
    )
    screens = [flag("tune", spec, "--run-dir", "run").worked()]
    logged = (folder / "run/trials/0/stdout.log").read_text()
    ancestors = [line for line in logged.splitlines() if line.startswith("ancestor:")]
    assert guard.__file__ in "".join(ancestors)
    assert not leaks("".join(ancestors))
    assert logged.count(MARK) >= len(VARIABLES) + len(SHELL) + 9  # all of them are there

    screens += [flag("tune", spec, "--run-dir", "failed", "--set", "envs.FAILS=1")]
    assert "cannot log in with (left out)" in screens[-1].err
    screens += [flag(*words).worked() for words in SHOWN]
    screens += [flag("runs", "show", run, *form) for run in ("run", "failed") for form in ([], ["--json"])]
    screens += [flag("tune", spec, "--set", f"{key}={MARK}-0123456789") for key in ("envs.my_token.b", "hf_token")]
    assert [leaks(each.out + each.err) for each in screens] == [[]] * len(screens)
    assert leaking_files(folder, inputs={"spec.yaml"}) == {}
