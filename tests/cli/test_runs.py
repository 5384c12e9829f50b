"""`flag runs`, and runs in which nothing was measured: every command names the cause and the next command.

Each figure of a run has one value on every screen: the table, JSON, lists, the page, explain, compare and Python.
"""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flagcore import api
from flagcore.api.runs import state_of_ended
from flagcore.contracts import Event
from flagcore.domain.chip import CORES, OTHERS_CORES
from flagcore.errors import EveryTrialFailed, Interrupted
from flagcore.plugins.entry_points import PAGES, names
from flagcore.report.formats import shown
from flagcore.tuner.run_folder import RunDirectory
from flagcore.tuner.stages import measure
from tests.cli.conftest import TRAIN, Flag, Project
from tests.page_reading import read, run_data

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
    launch = moved / "best" / "launch.json"
    launch.write_text(json.dumps({**json.loads(launch.read_text()), "missing": "the data"}))
    incomplete = flag("run", str(moved))  # it would train on generated data
    assert (incomplete.code, incomplete.out, "add the data" in incomplete.err) == (2, script, True)


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


DISTURBED, FAILED = "0", "5"
"""The trials beside which other programs used the cores, and that failed: a first run and a repeat."""
UNEVEN = TRAIN.replace(
    "sys.argv = [sys.argv[1], folder]",
    f"""\
number = folder.rpartition("trials/")[2]
if number == {FAILED!r}:
    sys.exit("ValueError: it is broken")
with open(folder + "/job.json") as file:
    job = json.load(file)
job["global_batch_size"] *= 2.0 if number == {DISTURBED!r} else 1.0 + 0.01 * int(number)
with open(folder + "/job.json", "w") as file:
    json.dump(job, file)
sys.argv = [sys.argv[1], folder]""",
)
"""Later trials are slower, as on a machine that drifts."""


class Uneven(Project):
    train = UNEVEN


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run with a disturbed and a failed run among those of the best and the baseline."""
    project, taken = Uneven(tmp_path_factory.mktemp("uneven")), measure.Readings.summary
    numbers = iter(range(99))
    with pytest.MonkeyPatch.context() as patch:
        busy = {CORES: 2.0, OTHERS_CORES: 1.5}
        patch.setattr(
            measure.Readings,
            "summary",
            lambda self: {**taken(self), **(busy if next(numbers) == int(DISTURBED) else {OTHERS_CORES: 0.0})},
        )
        api.tune(project.spec(control={"max_trials": 4, "repeats": 2}), run_dir=project.run_dir)
    yield project.run_dir
    assert project.all_gone()


def test_every_screen_has_the_same_figures(run_dir: Path, flag: Flag) -> None:
    def answer(*command: str) -> Any:
        return json.loads(flag(*command, "--json").worked().out)

    data, text, run = (
        answer("runs", "show", str(run_dir)),
        flag("runs", "show", str(run_dir)).out,
        api.load_run(run_dir),
    )
    assert run.best
    assert run.baseline
    runs = {each["trial"]: each for each in data["runs"]}
    states = {each["number"]: each["state"] for each in (*data["trials"], *data["repeats"])}
    assert states[int(FAILED)] == "failed"
    left_out = {number: why for each in runs.values() for number, why in each["not_counted"].items()}
    assert left_out == {DISTURBED: "other programs used its cores", FAILED: "failed"}
    sides = {name: run.search_state.all_runs(getattr(run, name).candidate) for name in ("best", "baseline")}
    of = {
        name: next(each for each in runs.values() if each["counted"] == [t.number for t in side.counted])
        for name, side in sides.items()
    }
    assert max(len(each["counted"]) for each in of.values()) > 1
    best_s, base_s = (sides[name].median_s or 0.0 for name in ("best", "baseline"))
    rates = {name: each["tokens_per_second_per_device"] for name, each in of.items()}

    gain = data["gain"]
    assert gain == pytest.approx(base_s / best_s - 1.0) == pytest.approx(rates["best"] / rates["baseline"] - 1.0)
    assert gain == data["speedup"]["value"] == run.gain
    (listed,) = answer("runs", "list", str(run_dir))
    assert (listed["speedup"], listed["value"]) == pytest.approx((gain, rates["best"]))
    both = answer("compare", str(run_dir), "baseline")
    assert (both["gap"], both["a"]["measured"]["step_time_s"]) == pytest.approx((gain, best_s))
    assert [both[side]["measured"]["runs"] for side in "ab"] == [len(of[name]["counted"]) for name in of]
    explained = answer("explain", str(run_dir), "best")
    assert explained["known_s"] == pytest.approx(best_s)
    predicted = next(each for each in data["trials"] if each["number"] == of["best"]["trial"])["predicted"]
    assert explained["predicted"]["step_time_s"] == both["a"]["predicted"]["step_time_s"] == predicted["step_time_s"]

    assert f"{gain:+.1%} tokens/s" in text
    assert f"Speed: {shown(rates['best'])} tokens/s/device" in text
    assert f"Step time: {shown(best_s)} s" in text
    rows = {
        int(line.split()[0]): line
        for line in re.findall(r"^\d+ .*", text, re.MULTILINE)
        if "%" in line or "not c" in line
    }
    first = of["best"]["trial"]
    assert f"{shown(rates['best'])}  {gain:+.1%}" in re.sub(" +", "  ", rows[first])
    assert "measured, not counted: other programs used its cores" in rows[int(DISTURBED)]
    for command in (
        ("explain", str(run_dir)),
        ("explain", str(run_dir), "best"),
        ("compare", str(run_dir), "baseline"),
    ):
        assert shown(best_s) in flag(*command).out
    assert "not counted: other programs used its cores" in flag("explain", str(run_dir), DISTURBED).out

    if names(PAGES):
        facts = read(api.report(run_dir)).facts("summary")
        assert facts["Speedup over the baseline"].value == pytest.approx(gain)
        assert facts["Speed"].value == pytest.approx(rates["best"])
