"""Mistakes in the data files of a plugin are reported with file and key, whatever their types."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flagcore.errors import SpecError
from flagcore.vendorkit.engines import all_knobs, read_engines, read_maturity, read_quirks, read_variables

READERS: dict[str, Any] = {
    "engines": read_engines,
    "environment": read_variables,
    "knobs": all_knobs,
    "maturity": read_maturity,
    "quirks": read_quirks,
}
SOURCE = "source: {kind: published, where: a manual}"
KNOB = f"name: a, engine: e, says: s, {SOURCE}"
Read = Callable[[str, str], object]


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    """Read a file of some text in a package that has no other."""

    def error_of_file(file: str, text: str) -> object:
        package = "data_of_acme"
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
        (tmp_path / package / f"{file}.yaml").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, package, raising=False)
        READERS[file].cache_clear()
        found: object = READERS[file](package)
        return found

    return error_of_file


@pytest.mark.parametrize(
    ("file", "text", "keys"),
    [
        ("knobs", "knobs: 5", ["knobs"]),
        ("knobs", "knobs: [5]", ["knobs[0]"]),
        ("knobs", f"knobs: [{{{KNOB}, choices: [{{value: 1, time: 5}}]}}]", ["knobs[0].choices[0].time"]),
        ("knobs", f"knobs: [{{{KNOB}, minimum: 3, choices: []}}]", ["knobs[0].minimum"]),
        (
            "knobs",
            f"knobs: [{{{KNOB}, choices: [{{value: 1, memory: {{value: 0.9, low: 1.0, high: 1.1}}}}]}}]",
            ["knobs[0].choices[0].memory"],
        ),
        ("quirks", f"refused: [{{name: a, knob: b, reason: c, {SOURCE}}}]", ["refused[0]"]),
        ("quirks", f"failures: [{{pattern: a, state: asleep, example: c, {SOURCE}}}]", ["failures[0].state"]),
        ("quirks", f"notes: [{{note: a, kinds: [x], {SOURCE}}}]", ["notes[0].kinds[0]"]),
        ("quirks", f"notes: [{{note: a, versions: x, {SOURCE}}}]", ["notes[0].versions"]),
        ("quirks", f"notes: [{{note: 1, colour: red, {SOURCE}}}]", ["notes[0].note", "notes[0].colour"]),
        ("quirks", "notes: [{note: a}]", ["notes[0].source"]),
        ("quirks", "notes: [{note: a, source: hello}]", ["notes[0].source"]),
        ("quirks", "2026-11-02: a", ["2026-11-02"]),
        ("quirks", "a: &a [*a]", ["the file"]),
        ("environment", f"variables: [{{name: A, meaning: m, value: 1, {SOURCE}}}]", ["variables[0].value"]),
        ("environment", f"variables: [{{name: A, meaning: m, {SOURCE}}}]", ["variables[0]"]),
        ("engines", "train: {works: maybe, device_type: x}", ["train.works"]),
        ("engines", "train: 3", ["train"]),
        ("engines", "trains: {device_type: x}", ["trains"]),
        ("maturity", "run_on_hardware: [{what: a, chips: [b], software: c}]", ["run_on_hardware[0].date"]),
        ("maturity", "from_documents: [{what: a}]\ncolour: red", ["from_documents[0].chips", "colour"]),
    ],
)
def test_an_error_is_reported_with_its_key(read: Read, file: str, text: str, keys: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        read(file, text)
    assert [each.key for each in caught.value.problems] == keys
    assert caught.value.file.endswith(f"/{file}.yaml")
