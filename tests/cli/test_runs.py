"""`flag runs`: runs are listed and shown."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from flagcore.tuner.store.directory import RunDirectory
from tests.cli.conftest import Flag

pytestmark = pytest.mark.slow


@pytest.fixture
def two_runs(made_run: Path, tmp_path: Path) -> Path:
    """Return a folder with two copies of a finished run."""
    folder = tmp_path / "runs"
    for name in ("first", "second"):
        shutil.copytree(made_run, folder / name)
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


def test_a_run_is_shown_as_tune_shows_it(flag: Flag, two_runs: Path) -> None:
    shown = flag("runs", "show", str(two_runs / "first"))
    assert shown.out.strip().startswith((two_runs / "first" / "report.txt").read_text().split("\n\n")[0])
    data: Any = json.loads(flag("runs", "show", str(two_runs / "first"), "--json").out)
    assert data["best"] == json.loads((two_runs / "first" / "result.json").read_text())["best"]


def test_a_run_that_a_process_holds_is_running(flag: Flag, two_runs: Path) -> None:
    running = RunDirectory(two_runs / "second")
    running.open()
    try:
        (record,) = json.loads(flag("runs", "list", str(two_runs / "second"), "--json").out)
    finally:
        running.close()
    assert record["state"] == "running"
