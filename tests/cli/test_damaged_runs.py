"""Damaged and hostile run folders: each command reports what can be read, or names the file, and loses no trial."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flagcore import api
from flagcore.api.runs import read_result, saved_trials
from flagcore.errors import RunError
from flagcore.plugins.entry_points import PAGES, names
from flagcore.tuner.run_folder import RunDirectory
from flagcore.tuner.store import OptunaStore
from tests.cli.conftest import Flag

case = pytest.param
Damage = Callable[[Path], object]
Lines = list[bytes]
STUDY, START, END, CLOSE = 0, 4, 5, 6
"""Lines of the journal: the study, and the start, the end and the state of the second trial."""


def lines(change: Callable[[Lines], object]) -> Damage:
    """Change the lines of the journal."""

    def damage(run: Path) -> None:
        content = (run / "journal.log").read_bytes().splitlines(keepends=True)
        change(content)
        (run / "journal.log").write_bytes(b"".join(content))

    return damage


def cut(place: int, size: int) -> Damage:
    return lines(lambda content: content.__setitem__(place, content[place][:size]))


def put(place: int, line: bytes) -> Damage:
    return lines(lambda content: content.insert(place, line))


def swap(first: int, second: int) -> Damage:
    def change(content: Lines) -> None:
        content[first], content[second] = content[second], content[first]

    return lines(change)


def drop(*places: int) -> Damage:
    return lines(lambda content: [content.pop(place) for place in sorted(places, reverse=True)])


def edit(**values: Any) -> Damage:
    """Change keys of result.json."""
    return lambda run: write_result(run, {**json.loads((run / "result.json").read_text()), **values})


def edit_trial(path: str, value: object) -> Damage:
    """Change a key of the fourth trial in result.json."""

    def damage(run: Path) -> None:
        data = json.loads((run / "result.json").read_text())
        *keys, last = path.split(".")
        record = data["trials"][3]
        for key in keys:
            record = record[key]
        record[last] = value
        write_result(run, data)

    return damage


def write_result(run: Path, data: object) -> None:
    (run / "result.json").write_text(json.dumps(data))


def content(name: str, data: bytes) -> Damage:
    return lambda run: (run / name).write_bytes(data)


def prepend(name: str, data: bytes) -> Damage:
    return lambda run: (run / name).write_bytes(data + (run / name).read_bytes())


def add_engine(run: Path) -> None:
    data = json.loads((run / "result.json").read_text())
    write_result(run, {**data, "engine": "../outside", "engines": {"../outside": data}})


def instead(name: str, make: Callable[[Path], object]) -> Damage:
    """Replace a file or folder of the run."""

    def damage(run: Path) -> None:
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        make(path)

    return damage


def remove(*removed: str) -> Damage:
    def damage(run: Path) -> None:
        for name in removed:
            instead(name, lambda path: None)(run)

    return damage


def both(*damages: Damage) -> Damage:
    return lambda run: [damage(run) for damage in damages]


def link(path: Path) -> None:
    """Link to a file outside the run."""
    path.symlink_to(outside(path))


def link_folder(path: Path) -> None:
    """Link to a folder outside the run."""
    outside(path).with_name("outside_folder").mkdir()
    path.symlink_to(outside(path).with_name("outside_folder"))


def outside(path: Path) -> Path:
    return next(parent for parent in path.parents if parent.name == "run").with_name("outside")


def large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


@pytest.fixture
def run(made_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of a finished run, next to a file of the user."""
    monkeypatch.setattr("flagcore.tuner.journal.MAX_BYTES", 1 << 24)  # to read more takes a second
    (tmp_path / "outside").write_text(OUTSIDE)
    return Path(shutil.copytree(made_run, tmp_path / "run"))


OUTSIDE = "of the user\n"
HOSTILE = "\x1b[2J\x9b31m\r\a\u202egnp.exe"
JOURNAL_CASES = [
    # the words of the message; all trials are read, because result.json has them, too
    case(put(3, b"not json\n"), "damaged lines: 4", id="text"),
    case(put(3, b"\x00\xff\xfe\n"), "damaged lines: 4", id="foreign bytes"),
    case(put(3, b"\n"), "damaged lines: 4", id="an empty line"),
    case(put(3, b"[" * 100_000 + b"\n"), "damaged lines: 4", id="deep nesting"),
    case(put(3, b"[]\n"), "damaged lines: 4", id="a list"),
    case(put(3, b'{"op_code":4}\n'), "damaged lines: 4", id="missing keys"),
    case(put(3, b'{"op_code":77,"worker_id":""}\n'), "damaged lines: 4", id="an unknown operation"),
    case(put(3, b'{"op_code":1,"worker_id":"","study_id":0}\n'), "damaged lines: 4", id="the study deleted"),
    case(lines(lambda all_lines: all_lines.__setitem__(4, b"\0" * 4096 + all_lines[4])), "damaged lines: 5", id="NULs"),
    case(cut(END, 100), "damaged lines: 6", id="a line cut, and the next one appended"),
    case(cut(-1, 60), "damaged lines: 22", id="the last line cut"),
    case(drop(STUDY), "doubled or out of order: 1", id="no study"),
    case(drop(START), "result.json: 1", id="no start"),
    case(drop(END), "result.json: 1", id="no end"),
    case(drop(START, END, CLOSE), "result.json: 1", id="no trial"),
    case(drop(*range(10, 22)), "result.json: 3-6", id="no end of the file"),
    case(swap(START, START + 3), "out of order: 6-8", id="starts swapped"),
    case(swap(END, CLOSE), "out of order: 7", id="end and state swapped"),
    case(swap(START, END), "out of order: 5", id="start and end swapped"),
    case(lines(lambda all_lines: all_lines.insert(5, all_lines[4])), "out of order: 6", id="a doubled start"),
    case(lines(lambda all_lines: all_lines.insert(6, all_lines[5])), "out of order: 7", id="a doubled end"),
    case(lines(lambda all_lines: all_lines.extend(list(all_lines))), "out of order: 24-44", id="all doubled"),
    case(lines(lambda all_lines: all_lines.reverse()), "out of order", id="reversed"),
    case(remove("journal.log"), "result.json: 0-6", id="no journal"),
    case(content("journal.log", b""), "result.json: 0-6", id="an empty journal"),
]


RESULT_CASES = [
    # the words of the message of commands that need result.json
    case(content("result.json", b""), "cannot be read as JSON", id="empty"),
    case(content("result.json", b"[]"), "the document = [] must be a mapping", id="a list"),
    case(content("result.json", b"\xff{}"), "can't decode byte 0xff", id="not UTF-8"),
    case(content("result.json", b'{"a":' * 100_000), "nested too deep", id="deep nesting"),
    case(content("result.json", b'{"a": 1' + b"0" * 5000 + b"}"), "Exceeds the limit", id="many digits"),
    case(edit(schema_version=99), "schema_version = 99 must be 1", id="another schema"),
    case(edit(devices="2"), "devices = '2' must be a whole number", id="a wrong type"),
    case(edit(counts={}), "counts.combinations is missing", id="a missing key"),
    case(edit(notes=[HOSTILE, 1]), "notes[1] = 1 must be a string", id="a wrong item"),
    case(add_engine, "engines.../outside is not a folder of this run", id="a folder outside"),
    case(edit_trial("measured.step_time_s.median", "fast"), "trials[3].measured.step_time_s.median = ", id="text"),
    case(edit_trial("measured.step_time_s.median", float("nan")), "median = nan must be a number above 0", id="NaN"),
    case(edit_trial("measured.step_time_s.median", -1.0), "median = -1.0 must be a number above 0", id="negative"),
    case(edit_trial("measured.telemetry", {"power": float("nan")}), "telemetry.power = nan", id="NaN of telemetry"),
    case(edit_trial("number", 99_999), "number = 99999, but there are only 7 trials", id="a gap of numbers"),
    case(edit_trial("measured.peak_allocated_gib", "x"), "peak_allocated_gib = 'x' must be a number", id="a size"),
    case(edit_trial("number", 10**30), "trials[3].number = 1000000000", id="a huge number"),
    case(edit_trial("state", HOSTILE), "trials[3].state = ", id="escape letters"),
    case(edit_trial("candidate", [1]), "trials[3].candidate = [1] must be a mapping", id="a list as a candidate"),
    case(edit_trial("predicted.step_time_s", {}), "result.json cannot be read", id="an empty prediction"),
    case(instead("result.json", os.mkfifo), "it is not a regular file", id="a pipe"),
    case(instead("result.json", os.mkdir), "it is not a regular file", id="a folder"),
    case(instead("result.json", link), "it is a link to a place outside", id="a link"),
    case(instead("result.json", lambda path: path.symlink_to(path)), "symbolic links", id="a link to itself"),
    case(instead("result.json", large), "more than 67108864 bytes", id="large"),
]
REFUSED_CASES = [
    # the words of the message of commands that read or resume the run
    case(instead("journal.log", os.mkfifo), "journal.log cannot be read (it is not a regular file)", id="a pipe"),
    case(instead("journal.log", link), "journal.log cannot be read (it is a link to a place outside", id="a link"),
    case(instead("journal.log", large), "journal.log cannot be read (it has more than", id="large"),
    case(
        put(0, b'{"op_code":0,"worker_id":"","study_name":"other","directions":[2]}\n'), "of the run other", id="other"
    ),
    case(content("task.json", b"{"), "task.json cannot be read", id="a damaged task"),
    case(remove("task.json"), "task.json is missing; restore it", id="no task"),
    case(instead("task.json", link), "task.json cannot be read", id="a link as task"),
]
READABLE_CASES = [
    # all commands work that need no damaged file, and the file of the user is neither shown nor changed
    case(lambda run: (run / "result.json").write_bytes(b"\xef\xbb\xbf" + (run / "result.json").read_bytes()), id="BOM"),
    case(edit(notes=[HOSTILE]), id="escape letters in notes"),
    case(edit_trial("reason", HOSTILE), id="escape letters in a reason"),
    case(edit_trial("candidate.tensor_model_parallel_size", HOSTILE), id="escape letters in a candidate"),
    case(content("trials/0/stdout.log", HOSTILE.encode()), id="escape letters in a log"),
    *(
        case(instead(name, link), id=f"{name} is a link")
        for name in ("best.sh", "report.html", "report.txt", "best.yaml")
    ),
    *(case(instead(f"trials/0/{name}", link), id=f"{name} is a link") for name in ("stdout.log", "metrics.json")),
    case(instead("trials/0/metrics.json", os.mkfifo), id="metrics.json is a pipe"),
    case(instead("trials/0/stdout.log", large), id="a large log"),
    case(instead("trials/0", link_folder), id="a trial is a link"),
    case(instead("best/launch.json", link), id="launch.json is a link"),
    case(instead("spec.yaml", link), id="the spec is a link"),
    case(content("spec.yaml", HOSTILE.encode()), id="the spec is damaged"),
]


def facts(run: api.Run) -> list[object]:
    trials = (*run.trials, *run.repeats)
    return [(trial.number, trial.role, trial.state, trial.candidate, trial.speed) for trial in trials]


def resume(run: Path) -> tuple[str, ...]:
    """Open the trials as `flag tune` does. Return the notes on damage."""
    directory = RunDirectory(run)
    directory.open()
    try:
        name = (directory.identity() or {"run": directory.claim({}, {})})["run"]
        try:
            saved = saved_trials(run, read_result(run))
        except RunError:
            saved = ()
        return tuple(OptunaStore(run, {}, run=name, saved=saved).notes)
    finally:
        directory.close()


@pytest.mark.parametrize(("damage", "words"), JOURNAL_CASES)
def test_a_damaged_journal_is_named_and_no_trial_is_lost(run: Path, damage: Damage, words: str) -> None:
    before = facts(api.load_run(run))
    damage(run)
    damaged = api.load_run(run)
    assert (facts(damaged), words in "".join(damaged.notes), words in api.show_run(run)[1]) == (before, True, True)
    damaged_journal = (run / "journal.log").read_bytes() if (run / "journal.log").exists() else b""
    assert words in "".join(resume(run))
    assert any(file.read_bytes().startswith(damaged_journal) for file in run.glob("journal.log*"))
    (run / "result.json").unlink()
    assert (facts(api.load_run(run)), api.load_run(run).notes, resume(run)) == (before, (), ())


def test_trials_of_which_only_a_folder_is_left_are_lost_with_a_word(run: Path) -> None:
    drop(*range(10, 22))(run)
    (run / "result.json").unlink()
    assert "lost trials: 3-6" in api.load_run(run).notes[0]
    assert "lost trials: 3-6" in resume(run)[0]
    after = api.load_run(run)
    assert ([trial.number for trial in after.trials], "lost trials: 3-6" in after.notes[0]) == ([0, 1, 2], True)


@pytest.mark.parametrize(("damage", "words"), RESULT_CASES)
def test_a_damaged_result_is_refused_with_the_key_and_its_value(run: Path, damage: Damage, words: str) -> None:
    before = facts(api.load_run(run))
    damage(run)
    for call in (api.load_run, api.show_run):
        with pytest.raises(RunError) as caught:
            call(run)
        assert f"{run}/result.json cannot be read" in str(caught.value)
        assert words in str(caught.value)
    assert api.list_runs(run)
    resume(run)
    remove("result.json")(run)
    assert facts(api.load_run(run)) == before


@pytest.mark.parametrize(("damage", "words"), REFUSED_CASES)
def test_a_run_that_cannot_be_resumed_is_refused(run: Path, damage: Damage, words: str) -> None:
    damage(run)
    for call in (api.load_run, api.show_run, resume):
        with pytest.raises(RunError) as caught:
            call(run)
        assert words in str(caught.value)
    assert (run.with_name("outside")).read_text() == OUTSIDE


@pytest.mark.parametrize("damage", READABLE_CASES)
def test_a_hostile_folder_is_shown_without_its_links_and_escape_letters(flag: Flag, run: Path, damage: Damage) -> None:
    damage(run)
    commands = [("runs", "show", str(run)), ("runs", "show", str(run), "--json"), ("runs", "list", str(run))]
    commands += [("report", str(run), "-o", "-"), ("report", str(run))] if names(PAGES) else []
    for words in commands:
        ended = flag(*words)
        assert ended.code == 0, ended.err
        assert OUTSIDE.strip() not in ended.out + ended.err
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", ended.out + ended.err)
    resume(run)
    assert (run.with_name("outside")).read_text() == OUTSIDE


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("trials", link_folder),
        ("best", link_folder),
        ("run.lock", link),
        ("run.lock", os.mkdir),
        ("run.lock", os.mkfifo),
    ],
)
def test_a_link_that_a_resumed_run_would_write_through_is_refused(
    run: Path, name: str, make: Callable[[Path], object]
) -> None:
    instead(name, make)(run)
    with pytest.raises(RunError, match=r"is a link; remove it|cannot be written"):
        resume(run)
    assert (run.with_name("outside")).read_text() == OUTSIDE


@pytest.mark.slow
@pytest.mark.spread
@pytest.mark.parametrize(("damage", "words"), JOURNAL_CASES[8:12])
def test_every_command_names_the_damage(
    flag: Flag, made_run: Path, run: Path, damage: Damage, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage(run)
    commands = [
        ("explain", str(run)),
        ("compare", f"{run}:baseline", f"{run}:best"),
        ("export", str(run), "--to", "toy"),
    ]
    commands += [("tune", str(made_run.with_name("spec.yaml")), "--run-dir", str(run))]
    for command in commands:
        caplog.clear()
        ended = flag(*command)
        assert (ended.code, words in caplog.text) == (0, True), ended.err
    assert "7 trials done" in caplog.text
