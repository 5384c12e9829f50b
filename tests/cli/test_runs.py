"""`flag runs`: runs are listed, shown, compared and deleted, and never one that is in progress."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flagcore.tuner.store.directory import RunDirectory
from tests.cli.conftest import Project, Ran

Flag = Callable[..., Ran]
pytestmark = pytest.mark.slow


@pytest.fixture
def two_runs(flag: Flag, project: Project) -> Path:
    """Return a folder with a run of two trials, and one without a result."""
    folder = project.folder / "runs"
    spec = project.spec(control={"max_trials": 2, "repeats": 1})
    assert flag("tune", spec, "--run-dir", str(folder / "first"), "-q").code == 0
    shutil.copytree(folder / "first", folder / "second")
    return folder


def test_runs_are_listed_with_their_best_and_state(flag: Flag, two_runs: Path) -> None:
    (two_runs / "second" / "result.json").unlink()
    (two_runs / "not a run").mkdir()
    records = {Path(each["run"]).name: each for each in json.loads(flag("runs", "list", str(two_runs), "--json").out)}
    assert set(records) == {"first", "second"}
    result = json.loads((two_runs / "first" / "result.json").read_text())
    assert records["first"]["state"] == "finished"
    assert records["first"]["speedup"] == result["speedup"]["median"]
    assert records["first"]["candidate"] == result["best"]["candidate"]
    assert records["first"]["trials"] == len(result["trials"]) + len(result["repeats"])
    assert records["second"]["state"] == "interrupted"
    assert flag("runs", "list", str(two_runs / "nowhere")).code == 2


def test_several_runs_are_compared_with_the_first(flag: Flag, two_runs: Path) -> None:
    file = two_runs / "second" / "result.json"
    data = json.loads(file.read_text())
    for trial in [data["best"], *data["trials"], *data["repeats"]]:
        trial["measured"]["tokens_per_second_per_device"] *= 1.25
    file.write_text(json.dumps(data))
    arguments = ("runs", "compare", str(two_runs / "first"), str(two_runs / "second"))
    gains = [each["gain"] for each in json.loads(flag(*arguments, "--json").out)]
    assert gains == pytest.approx([0.0, 0.25])
    assert "+25.0%" in flag(*arguments).out
    assert flag(*arguments[:3]).code == 2


def test_a_run_is_shown_as_tune_shows_it(flag: Flag, two_runs: Path) -> None:
    shown = flag("runs", "show", str(two_runs / "first"))
    assert shown.out.strip().startswith((two_runs / "first" / "report.txt").read_text().split("\n\n")[0])
    data: Any = json.loads(flag("runs", "show", str(two_runs / "first"), "--json").out)
    assert data["best"]["number"] == 1


def test_only_the_files_of_a_run_that_is_not_in_progress_are_deleted(flag: Flag, two_runs: Path) -> None:
    first, second = two_runs / "first", two_runs / "second"
    (first / "notes.txt").write_text("mine")
    running = RunDirectory(second)
    running.open()
    try:
        assert flag("runs", "rm", "--yes", str(second)).code == 2
        assert {each["state"] for each in json.loads(flag("runs", "list", str(second), "--json").out)} == {"running"}
    finally:
        running.close()
    assert (second / "result.json").exists()
    assert flag("runs", "rm", "--yes", str(first), str(second)).code == 0
    assert [file.name for file in first.iterdir()] == ["notes.txt"]
    assert not second.exists()
    assert flag("runs", "rm", "--yes", str(two_runs)).code == 2
    assert two_runs.exists()


def test_without_a_terminal_a_run_is_deleted_only_with_yes(flag: Flag, project: Project, monkeypatch: Any) -> None:
    run = project.folder / "runs" / "plan"
    assert flag("tune", project.spec(), "--fidelity", "estimate", "--run-dir", str(run), "-q").code == 0
    with open(os.devnull, encoding="utf-8") as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        refused = flag("runs", "rm", str(run))
    assert refused.code == 2
    assert "--yes" in refused.err
    assert (run / "result.json").exists()
