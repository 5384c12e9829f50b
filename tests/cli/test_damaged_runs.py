"""Damaged and hostile run folders: each command reports what can be read, or names the file, and loses no trial."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pytest import param

from flagcore import api
from flagcore.plugins.entry_points import PAGES, names
from tests.cli.conftest import Flag, Ran

Damage = Callable[[Path], object]
Read = Callable[[], Iterator[tuple[str, int, str]]]
Resume = Callable[[], Ran]
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
    """Link to a file or folder outside the run."""
    path.symlink_to(path.parents[len(path.parts) - len(run_parts(path))].with_name("outside"))


def run_parts(path: Path) -> tuple[str, ...]:
    return path.parts[: path.parts.index("run") + 1]


def large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


@pytest.fixture
def run(made_run: Path, tmp_path: Path) -> Path:
    """Return a copy of a finished run, next to a file of the user."""
    (tmp_path / "outside").write_text(OUTSIDE)
    return Path(shutil.copytree(made_run, tmp_path / "run"))


@pytest.fixture
def resume(made_run: Path, flag: Flag, run: Path) -> Resume:
    """Resume the run with its spec."""
    return lambda: flag("tune", str(made_run.with_name("spec.yaml")), "--run-dir", str(run), "-q")


OUTSIDE = "of the user\n"
TRIALS = set(range(7))
JOURNAL_CASES = [
    # what is damaged, the words of the message, the trials that are lost (those that result.json has are not)
    param(put(3, b"not json\n"), "damaged lines: 4", id="text"),
    param(put(3, b"\x00\xff\xfe\n"), "damaged lines: 4", id="foreign bytes"),
    param(put(3, b"\n"), "damaged lines: 4", id="an empty line"),
    param(put(3, b"[" * 100_000 + b"\n"), "damaged lines: 4", id="deep nesting"),
    param(put(3, b"[]\n"), "damaged lines: 4", id="a list"),
    param(put(3, b'{"op_code":4}\n'), "damaged lines: 4", id="missing keys"),
    param(put(3, b'{"op_code":77,"worker_id":""}\n'), "damaged lines: 4", id="an unknown operation"),
    param(put(3, b'{"op_code":1,"worker_id":"","study_id":0}\n'), "damaged lines: 4", id="the study deleted"),
    param(lines(lambda all_lines: all_lines.__setitem__(4, b"\0" * 4096 + all_lines[4])), "damaged lines: 5", id="NULs"),
    param(cut(END, 100), "damaged lines: 6", id="a line cut, and the next one appended"),
    param(cut(-1, 60), "damaged lines: 22", id="the last line cut"),
    param(drop(STUDY), "doubled or out of order: 1", id="no study"),
    param(drop(START), "result.json: 1", id="no start"),
    param(drop(END), "result.json: 1", id="no end"),
    param(drop(START, END, CLOSE), "result.json: 1", id="no trial"),
    param(drop(*range(10, 22)), "result.json: 3-6", id="no end of the file"),
    param(swap(START, START + 3), "out of order: 6-8", id="starts swapped"),
    param(swap(END, CLOSE), "out of order: 7", id="end and state swapped"),
    param(swap(START, END), "out of order: 5", id="start and end swapped"),
    param(lines(lambda all_lines: all_lines.insert(5, all_lines[4])), "out of order: 6", id="a doubled start"),
    param(lines(lambda all_lines: all_lines.insert(6, all_lines[5])), "out of order: 7", id="a doubled end"),
    param(lines(lambda all_lines: all_lines.extend(list(all_lines))), "out of order: 24-44", id="all doubled"),
    param(lines(lambda all_lines: all_lines.reverse()), "out of order", id="reversed"),
    param(remove("journal.log"), "result.json: 0-6", id="no journal"),
    param(content("journal.log", b""), "result.json: 0-6", id="an empty journal"),
]


@pytest.fixture
def read(flag: Flag, run: Path, caplog: pytest.LogCaptureFixture) -> Read:
    """Return a function that calls each command that reads a run. It returns their names, exit statuses and texts."""
    commands = {"show": ("runs", "show", str(run)), "explain": ("explain", str(run))}
    commands |= {"compare": ("compare", f"{run}:baseline", f"{run}:best")}
    commands |= {"report": ("report", str(run), "-o", "-")} if names(PAGES) else {}

    def call() -> Iterator[tuple[str, int, str]]:
        for name, words in commands.items():
            caplog.clear()
            ended = flag(*words)
            text = ended.out + ended.err + caplog.text
            assert not re.search(r"Traceback|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)
            yield name, ended.code, text
        caplog.clear()
        assert flag("runs", "list", str(run)).code == 0

    return call


@pytest.mark.parametrize(("damage", "words"), JOURNAL_CASES)
def test_a_damaged_journal_is_named_and_no_trial_is_lost(
    read: Read, run: Path, resume: Resume, damage: Damage, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = facts(api.load_run(run))
    damage(run)
    for name, code, text in read():
        assert (code, words in text) == (0, True), f"{name}: {text}"
    assert facts(api.load_run(run)) == before
    ended = resume()
    assert (ended.code, words in caplog.text, "7 trials done" in caplog.text) == (0, True, True), ended.err
    (run / "result.json").unlink()
    assert (facts(api.load_run(run)), api.load_run(run).notes) == (before, ())


def facts(run: api.Run) -> list[object]:
    trials = (*run.trials, *run.repeats)
    return [(trial.number, trial.role, trial.state, trial.candidate, trial.speed) for trial in trials]
