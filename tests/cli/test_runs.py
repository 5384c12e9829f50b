"""`flag runs`, and runs in which nothing was measured: every command names the cause and the next command."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flagcore import api
from flagcore.api.runs import state_of_ended
from flagcore.contracts import Event
from flagcore.errors import EveryTrialFailed, Interrupted
from flagcore.plugins.entry_points import PAGES, names
from flagcore.tuner.run_folder import RunDirectory
from tests.cli.conftest import Flag, Project
from tests.page_reading import run_data

pytestmark = pytest.mark.slow
REASON = "ValueError: it is broken"
STATES = {"failed": "no measurement", "interrupted": "interrupted", "killed": "interrupted", "estimate": "finished"}
CODES = {"failed": 5, "interrupted": 2, "killed": 2}
NEED_THE_BEST = (("run", "RUN"), ("explain", "RUN", "best"), ("compare", "RUN", "RUN:baseline"))


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder with a run of each of STATES: all trials failed, none has ended, and an estimate."""
    project = Project(tmp_path_factory.mktemp("unmeasured"))
    folder = project.folder / "runs"

    def interrupt(event: Event) -> None:
        raise KeyboardInterrupt

    api.tune(project.spec(), run_dir=folder / "estimate", fidelity="estimate")
    with pytest.raises(Interrupted):
        api.tune(project.spec(does="hang"), run_dir=folder / "interrupted", on_event=interrupt)
    with pytest.raises(EveryTrialFailed, match=REASON):
        api.tune(project.spec(does="crash", control={"max_trials": 2}), run_dir=folder / "failed")
    shutil.copytree(folder / "interrupted", folder / "killed")
    (folder / "killed" / "result.json").unlink()
    yield folder
    assert project.all_gone()


@pytest.mark.parametrize(
    ("kind", "command"),
    [("failed", each) for each in NEED_THE_BEST] + [(kind, NEED_THE_BEST[0]) for kind in ("interrupted", "killed")],
)
def test_a_command_that_needs_the_best_ends_with_the_cause_and_the_next_command(
    flag: Flag, ended: Path, kind: str, command: tuple[str, ...]
) -> None:
    run = str(ended / kind)
    ended = flag(*(word.replace("RUN", run) for word in command)).refused(
        CODES[kind], f"`flag tune SPEC --run-dir {run}{' --new' if kind == 'failed' else ''}`"
    )
    assert (REASON in ended.err, f"{run}/trials/0" in ended.err) == (kind == "failed", kind == "failed")
    assert "(missing)" not in ended.err


def test_lists_name_the_state_and_the_cause(flag: Flag, ended: Path) -> None:
    records = {Path(each["run"]).name: each for each in json.loads(flag("runs", "list", str(ended), "--json").out)}
    assert {name: each["state"] for name, each in records.items()} == STATES
    assert REASON in records["failed"]["no_best"]
    assert records["estimate"]["no_best"] is None
    listed = flag("runs", "list", str(ended))
    assert (listed.code, listed.err.count(REASON), listed.err.count("\n")) == (0, 1, 1)


def test_runs_of_engines_without_a_best_are_listed(ended: Path, tmp_path: Path) -> None:
    shutil.copytree(ended / "failed", tmp_path / "several" / "one")
    shutil.copytree(ended / "killed", tmp_path / "several" / "other")
    (tmp_path / "several" / "notes.txt").touch()
    assert {Path(each["run"]).name for each in api.list_runs(tmp_path)} == {"one", "other"}


@pytest.mark.parametrize("kind", CODES)
def test_reports_work_and_name_the_cause(flag: Flag, ended: Path, kind: str) -> None:
    run = str(ended / kind)
    explained = flag("explain", run, "--json")
    texts = [json.loads(explained.out)["no_best"], flag("explain", run).out, flag("runs", "show", run).out]
    assert explained.code == 0
    for text in texts:
        assert f"flag tune SPEC --run-dir {run}" in text
    texts += [flag("report", run, "-o", "-").out] if names(PAGES) else []
    for text in texts:
        assert (REASON in text) == (kind == "failed")
    assert ", measured;" not in texts[-1]


def test_a_reason_of_several_lines_is_shown_in_lines(flag: Flag, ended: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(ended / "failed", run)
    result = json.loads((run / "result.json").read_text())
    reason = {"stopped_because": "a step takes 58 s\nset train.precision: fp32", "stopped_message": None}
    (run / "result.json").write_text(json.dumps(result | reason))
    assert "; a step takes 58 s\nset train.precision: fp32; " in flag("run", str(run)).err
    assert "58 s\n\nset" in flag("runs", "show", str(run)).out


BEST = {"number": 0, "candidate": {}}


@pytest.mark.parametrize(
    ("result", "state"),
    [
        ({"stopped_because": None, "best": BEST}, "interrupted"),
        ({"stopped_because": "interrupted", "best": None}, "interrupted"),
        ({"stopped_because": "max_time = 3 s reached", "best": None}, "no measurement"),
        ({"stopped_because": "max_time = 3 s reached", "best": None, "fastest": None}, "no measurement"),
        ({"stopped_because": "all is tried", "best": None, "trials": [BEST], "fastest": 0}, "finished"),
        ({"stopped_because": "all is tried", "best": BEST}, "finished"),
    ],
)
def test_the_state_follows_from_the_result(result: dict[str, Any], state: str) -> None:
    assert state_of_ended(run_data(**result)) == state


@pytest.fixture
def two_runs(made_run: Path, tmp_path: Path) -> Path:
    """Return a folder with two copies of a finished run."""
    folder = tmp_path / "runs"
    for name in ("first", "second"):
        shutil.copytree(made_run, folder / name)
    return folder


def test_a_group_alone_lists(flag: Flag, two_runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(two_runs)
    assert (flag("runs", "--json").out.strip(), "flag tune" in flag("runs").err) == ("[]", True)
    assert (flag("runs", "-q").err, flag("runs", "nosuch").code) == ("", 2)
    monkeypatch.chdir(two_runs.parent)
    assert flag("runs").out == flag("runs", "list", "runs").out != ""
    assert flag("plugins", "--json").out == flag("plugins", "list", "--json").out


def test_a_dry_run_prints_the_script_of_the_best(flag: Flag, made_run: Path) -> None:
    assert flag("run", str(made_run), "--dry-run").out == (made_run / "best.sh").read_text()


def test_a_run_and_its_script_may_be_moved(flag: Flag, made_run: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(made_run, moved)
    script = flag("run", str(moved), "--dry-run").out
    assert str(made_run) not in script


def test_runs_are_listed_with_their_best_and_state(flag: Flag, two_runs: Path) -> None:
    (two_runs / "second" / "result.json").unlink()
    (two_runs / "not a run").mkdir()
    records = {Path(each["run"]).name: each for each in json.loads(flag("runs", "list", str(two_runs), "--json").out)}
    assert set(records) == {"first", "second"}
    result = json.loads((two_runs / "first" / "result.json").read_text())
    assert records["first"]["state"] == "finished"
    assert records["first"]["speedup"] == result["speedup"]["value"]
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
    result = json.loads((two_runs / "second" / "result.json").read_text())
    (two_runs / "second" / "result.json").unlink()
    running = RunDirectory(two_runs / "second")
    running.open()
    try:
        (record,) = json.loads(flag("runs", "list", str(two_runs / "second"), "--json").out)
    finally:
        running.close()
    facts = {"state": "running", "model": "tiny", "hardware": f"{result['devices']} x {result['chip']}"}
    assert {name: record[name] for name in facts} == facts
    assert record["speedup"] == pytest.approx(result["speedup"]["value"])
    assert record["seconds_left"] >= 0.0
