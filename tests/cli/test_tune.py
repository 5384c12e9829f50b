"""`flag tune` with real processes that play training runs of known speed. `flag` itself: what it imports, and how it
behaves among other programs."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from fixed_machine import PINS
from flagcore_testing import toy_program

from flagcore import api
from flagcore.cli import options
from flagcore.cli.main import OWN
from flagcore.plugins import ENGINES, IMPORTERS, find_engine, importer, names
from tests.checks import books_balance, check_kept_once, within
from tests.cli.conftest import BEST, FLAG, SPACE, Flag, Project, Ran

pytestmark = [pytest.mark.slow, pytest.mark.spread]

LONG = pytest.mark.long


def tune(flag: Flag, project: Project, *more: str, **of_spec: Any) -> Ran:
    return flag("tune", project.spec(**of_spec), "--run-dir", str(project.run_dir), *more)


def states(result: Any) -> list[str]:
    return [trial["state"] for trial in result["trials"]]


def test_the_known_best_is_found_and_every_trial_is_stored(flag: Flag, project: Project) -> None:
    completed = tune(flag, project, "--json").worked()
    result = json.loads(completed.out)
    assert result == project.result()
    assert result["best"]["candidate"].items() >= BEST.items()
    assert result["baseline"]["role"] == "baseline"
    assert result["baseline"]["number"] == 0
    base, best = (result[name]["measured"]["step_time_s"]["median"] for name in ("baseline", "best"))
    assert best == pytest.approx(0.1, rel=0.01)
    assert result["gain"] == pytest.approx(base / best - 1)
    assert {trial["candidate"]["micro_batch_size"] for trial in result["repeats"]} == {
        result[name]["candidate"]["micro_batch_size"] for name in ("baseline", "best")
    }
    assert books_balance(result)
    tried_candidates = [json.dumps(trial["candidate"]) for trial in result["trials"]]
    assert len(set(tried_candidates)) == len(tried_candidates) >= 5
    for trial in result["trials"]:
        folder = project.run_dir / "trials" / str(trial["number"])
        assert {"launch.json", "stdout.log", "stderr.log"} <= {file.name for file in folder.iterdir()}
        assert (project.run_dir / trial["log"]).exists()
    assert "trial 0 (baseline) starts" in completed.err
    assert "Traceback" not in completed.err
    assert project.all_gone()


@pytest.mark.costly
@pytest.mark.parametrize(
    ("does", "state", "words"),  # ends that only a real process has; tests of measure.py have others
    [
        ("binary", "failed", "exit code 3"),
        ("oom", "out_of_memory", "more than the memory budget"),
        ("vanish", "failed", "no metrics.json"),
        ("disk", "failed", "disk_limit"),
    ],
)
def test_a_trial_that_fails_is_reported_and_the_others_continue(
    does: str, state: str, words: str, flag: Flag, project: Project
) -> None:
    completed = tune(flag, project, "--json", does=does, when="1x1", control={"max_trials": 4, "repeats": 0}).worked()
    result = project.result()
    failed_trials = [trial for trial in result["trials"] if trial["state"] not in ("measured", "stopped")]
    assert [trial["state"] for trial in failed_trials] == [state] * len(failed_trials)
    assert failed_trials
    assert all(words in trial["reason"] for trial in failed_trials)
    assert "measured" in states(result)
    assert result["best"]["state"] == "measured"
    assert books_balance(result)
    assert "Traceback" not in completed.err
    assert project.all_gone()


def test_when_every_trial_failed_the_exit_code_is_5_and_the_last_reason_is_reported(
    flag: Flag, project: Project
) -> None:
    completed = tune(flag, project, "-q", does="crash")
    assert completed.code == 5
    assert completed.err.count("\n") == 1
    assert "it is broken" in completed.err
    result = project.result()
    assert set(states(result)) == {"failed"}
    assert result["best"] is None
    assert result["gain"] is None
    assert books_balance(result)
    assert len(result["trials"]) == 5
    assert flag("run", str(project.run_dir)).code == 5


@pytest.mark.parametrize("where", [None, "elsewhere"])
def test_a_command_runs_in_the_folder_of_the_spec_or_in_its_own_directory(
    where: str | None, flag: Flag, project: Project
) -> None:
    folder = project.folder / (where or ".")
    folder.mkdir(exist_ok=True)
    (folder / "here.py").write_text((project.folder / "train.py").read_text())
    train = {"command": [sys.executable, "here.py", toy_program.__file__], "directory": where}
    tune(flag, project, train=train, control={"max_trials": 1, "repeats": 0}).worked()
    assert yaml.safe_load((project.run_dir / "best.yaml").read_text())["train"]["directory"] == str(folder)


def test_a_changed_spec_is_refused_with_the_difference_and_new_starts_again(flag: Flag, project: Project) -> None:
    small_budget = {"max_trials": 1, "repeats": 0}
    assert tune(flag, project, control=small_budget).code == 0
    changed = {"train": {"seq_length": 256}, "control": small_budget}
    completed = tune(flag, project, "-q", **changed).refused(2, "spec.train.seq_length: 1024 -> 256")
    assert completed.err.count("\n") == 1
    assert tune(flag, project, "--new", **changed).code == 0
    saved = [folder for folder in project.folder.iterdir() if folder.name.startswith("run.")]
    assert len(saved) == 1
    assert json.loads((saved[0] / "result.json").read_text())["trials"]


def test_an_unknown_command_is_reported_immediately(flag: Flag, project: Project) -> None:
    completed = tune(flag, project, "-q", train={"command": ["/no/such/program"]}).refused(
        2, "cannot run /no/such/program"
    )
    assert completed.err.count("\n") == 1


def test_a_run_is_resumed_with_more_trials_and_time(flag: Flag, project: Project) -> None:
    limits = ("--max-trials", "2", "--time", "5min", "--json")
    small_budget = {"repeats": 0, "max_trials": 9}
    dry = tune(flag, project, "--dry-run", *limits, control=small_budget).worked()
    assert (len(json.loads(dry.out)), project.run_dir.exists()) == (2, False)
    assert len(json.loads(tune(flag, project, *limits, control=small_budget).worked().out)["trials"]) == 2
    more = tune(flag, project, "--max-trials", "3", "--json", control=small_budget).worked()
    assert len(json.loads(more.out)["trials"]) == 3
    assert "max_time" in tune(flag, project, "--time", "5 parsecs").err


def test_progress_on_a_pipe_is_plain_lines_on_stderr_and_quiet_is_quiet(flag: Flag, project: Project) -> None:
    small_budget = {"max_trials": 3, "repeats": 0}
    progress = tune(flag, project, control=small_budget).err.splitlines()
    assert len([line for line in progress if line.startswith("trial ") and "starts" in line]) == 3
    assert any("best" in line and "3/3 trials" in line for line in progress)
    assert "\x1b" not in "".join(progress)
    assert tune(flag, project, "-q", "--new", control={**small_budget, "max_trials": 1}).err == ""


@pytest.mark.costly
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=LONG), pytest.param(signal.SIGHUP, marks=LONG)]
)
def test_an_interrupt_keeps_the_measurements(number: int, project: Project) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("this signal is ignored here, as under nohup, and so it is by flagcore")
    process = project.start("tune", project.spec(sleeps=0.15), "--run-dir", str(project.run_dir))
    assert within(60, (project.run_dir / "trials" / "2" / "launch.json").exists)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in err
    assert "interrupted" in err.splitlines()[-1]
    result = project.result()
    assert states(result).count("measured") + states(result).count("stopped") >= 2
    assert result["trials"][-1]["state"] == "interrupted"
    assert books_balance(result)
    assert result["best"] is not None
    assert project.all_gone()


CORES = sorted(os.sched_getaffinity(0))
TWO_AT_ONCE = {
    "cluster": {"devices_per_node": 1, "memory_per_device": "1GiB"},
    "control": {"parallel_trials": 2},
    "auto_tuner": {"space": {**SPACE, "micro_batch_size": [1, 2, 4, 8]}},
}


def test_trials_side_by_side_have_separate_cores(flag: Flag, project: Project) -> None:
    completed = tune(flag, project, "--json", sleeps=0.3, **TWO_AT_ONCE).worked()
    result = json.loads(completed.out)
    assert result["side_by_side"]["quiet"]
    assert result["side_by_side"]["text"] in completed.err
    assert {trial["group"] for trial in result["trials"]} >= {None, 1}  # on the first core, the baseline runs again
    assert {trial["group"] for trial in result["repeats"]} == {None}
    for trial in (*result["trials"], *result["repeats"]):
        log = (project.run_dir / trial["log"]).read_text()
        assert log.startswith(f"cores [{CORES[trial['group'] or 0]}]\n") or not PINS
    assert books_balance(result)


@pytest.mark.parametrize("kills", [2, pytest.param(6, marks=LONG)])
@pytest.mark.costly
def test_a_run_killed_at_random_times_resumes_without_loss(kills: int, flag: Flag, project: Project) -> None:
    draw = random.Random(11)
    space = {**SPACE, "micro_batch_size": [1, 2]}
    spec = project.spec(sleeps=0.1, auto_tuner={"space": space}, control={"repeats": 0})
    arguments = ("tune", spec, "--run-dir", str(project.run_dir), "--json", "-q")
    for _ in range(kills):
        number = sum(1 for _ in (project.run_dir / "trials").glob("*"))
        process = project.start(*arguments)
        while not (project.run_dir / "trials" / str(number)).exists() and process.poll() is None:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.6))
        process.kill()
        process.communicate()
        assert project.all_gone(10)
    completed = flag(*arguments).worked()
    result = json.loads(completed.out)
    assert result == project.result()
    assert result["best"]["candidate"].items() >= BEST.items()
    assert books_balance(result)
    check_kept_once(project.run_dir, result)


@pytest.mark.costly
def test_a_run_learns_from_earlier_ones_unless_disabled(
    flag: Flag, project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLAGCORE_HOME", str(tmp_path / "home"))

    def corrected_prediction(name: str, **control: object) -> float:
        spec = project.spec(control={"max_trials": 2, "repeats": 0, **control}, auto_tuner={"strategy": "learned"})
        completed = flag("tune", spec, "--run-dir", str(tmp_path / name), "--json", "--quiet")
        return float(json.loads(completed.out)["trials"][1]["predicted"]["believed"]["step_time_s"]["value"])

    first = corrected_prediction("one")
    assert corrected_prediction("two", use_experience=False) == first
    assert corrected_prediction("three") != first
    assert len(list((tmp_path / "home" / "experience").iterdir())) == 3
    shutil.rmtree(tmp_path / "home" / "experience")
    assert corrected_prediction("four") == first


HEAVY = ("numpy", "pydantic", "optuna", "torch", "yaml", "stevedore", "pluggy", "rich", "psutil")
IMPORTED = """
import sys
from flagcore.cli import main
try:
    main(sys.argv[2:])
finally:
    found = [name for name in sys.argv[1].split(",") if name in sys.modules]
    print("imported:", *found, file=sys.stderr)
"""


def imported(project: Project, watched: tuple[str, ...], *arguments: str) -> list[str]:
    argv = [sys.executable, "-c", IMPORTED, ",".join(watched), *arguments]
    completed_process = subprocess.run(argv, capture_output=True, text=True, cwd=project.folder, check=True)
    return completed_process.stderr.strip().splitlines()[-1].split()[1:]


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("tune", "--help"), ("estimate", "--help")])
def test_help_imports_nothing_heavy(project: Project, arguments: tuple[str, ...]) -> None:
    assert imported(project, HEAVY, *arguments) == []


@pytest.mark.parametrize("command", [("estimate",), ("explain",), ("export", "--to", "toy", "--output", "out")])
def test_a_plan_imports_nothing_that_only_trials_need(project: Project, command: tuple[str, ...]) -> None:
    unused = ("scipy", "threadpoolctl", "optuna", "torch", "asyncio", "flagcore_rl")
    assert imported(project, unused, command[0], project.spec(cluster={"nodes": 2}), *command[1:]) == []


def test_the_end_of_a_process_looks_for_no_cycles() -> None:
    lines = ("import atexit, gc", "atexit.register(lambda: print(gc.get_freeze_count()))", *FLAG[-1].split("; "))
    argv = [sys.executable, "-c", "\n".join(lines), "--version"]
    completed_process = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert int(completed_process.stdout.splitlines()[-1]) > 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/dev/full is Linux's")
def test_output_that_cannot_be_written_is_reported_in_one_line() -> None:
    with open("/dev/full", "w") as full:
        completed_process = subprocess.run(
            [*FLAG, "completion", "bash"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert completed_process.returncode == 2
    assert completed_process.stderr == "flag: cannot write the output: No space left on device\n"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems have other limits of stacks")
def test_a_thread_that_cannot_start_is_reported_in_one_line(project: Project) -> None:
    lines = ("import threading", "threading.stack_size(1 << 47)", "from flagcore.cli.main import main", "main()")
    argv = [sys.executable, "-c", "\n".join(lines), "estimate", project.spec()]
    completed_process = subprocess.run(argv, capture_output=True, text=True)
    assert completed_process.returncode == 2
    assert completed_process.stderr.startswith("flag: out of memory or threads;")
    assert completed_process.stderr.count("\n") == 1


@pytest.mark.parametrize("closes", ["", ">&-"], ids=["closed pipe", "closed"])
def test_output_that_nobody_reads_is_not_a_failure(closes: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    argv = ["/bin/sh", "-c", f'exec "$@" {closes}', "sh", *FLAG, "completion", "bash"]
    completed_process = subprocess.run(argv, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (completed_process.returncode, completed_process.stderr) == (0, "")


@pytest.mark.costly
def test_nohup_is_respected(project: Project) -> None:
    spec = project.spec(sleeps=0.1, control={"max_trials": 2, "repeats": 0})
    argv, pipe = ["nohup", *FLAG, "tune", spec, "-q", "--json"], subprocess.PIPE
    process = subprocess.Popen(argv, stdout=pipe, stderr=pipe, cwd=project.folder)
    folder = project.folder / "runs" / "spec" / "trials" / "0"
    while not (folder / "launch.json").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGHUP)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert len(json.loads(out)["trials"]) == 2


def test_a_misspelt_command_gets_a_suggestion(flag: Callable[..., Ran]) -> None:
    flag("estimat").refused(2, "'estimat'", "'estimate'?")
    assert "?" not in flag("zzz").err
    assert "'estimate'?" in flag("plan").err
    assert flag("-V").out == flag("--version").out


def test_help_lists_each_command_once_with_its_whole_summary(flag: Callable[..., Ran]) -> None:
    text = flag("--help").out
    assert "..." not in text.partition("Options:")[2]
    assert all(len(re.findall(rf"^  {name}  ", text, re.MULTILINE)) == 1 for name in OWN)
    assert max(map(len, text.splitlines())) <= 80
    imports, plugins = (flag(name, "--help").out.partition("Commands:")[2] for name in ("import", "plugins"))
    assert "..." not in imports + plugins
    readers = [name for name in names(ENGINES) if find_engine(name).commands]
    assert all(name in imports for name in (*readers, *(importer(name).title for name in names(IMPORTERS))))
    assert set(re.findall(r"[\w-]+", flag("export", "--help").out)) >= set(api.export_targets())


@pytest.mark.parametrize(
    "text", ["cluster.nodes", "=1", "cluster..nodes=1", "cluster.nodes=[1", "model.name.x=1", "a=1", "model.x=.nan"]
)
def test_a_bad_setting_is_one_message(text: str, flag: Callable[..., Ran], project: Project) -> None:
    completed = flag("estimate", project.spec(), "--set", text)
    assert (completed.code, completed.out, len(completed.err.splitlines())) == (2, "", 1)
    assert text.partition("=")[0] in completed.err


def test_a_command_to_run_next_sets_each_key_once() -> None:
    context = click.Context(click.Command("size"))
    context.params = {"spec": "a.yaml", "settings": ("k=1", "j=2"), "slo": (), "without": ("acme",), "objective": "m"}
    with context:
        words = options.job_words(["k=3", "l=4"])
    settings = [word for each in ("k=3", "j=2", "auto_tuner.objective=m", "l=4") for word in ("--set", each)]
    assert words == ["a.yaml", *settings, "--no-plugin", "acme"]
