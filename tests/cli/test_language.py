"""`flag` in Chinese: help, tables and usage errors; data formats stay English."""

import json
import re
from collections.abc import Iterator

import pytest

from flagcore.i18n import choose, columns
from flagcore.report.text import objective_text
from tests.cli.conftest import Flag, Project

CHINESE = re.compile("[\u4e00-\u9fff]")


@pytest.fixture(autouse=True)
def _chinese(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FLAGCORE_LANG", "zh_CN.UTF-8")
    yield
    choose("en")


def test_help_and_usage_errors_are_chinese(flag: Flag) -> None:
    lines = flag("tune", "--help").out.splitlines()
    assert lines[0].startswith("用法")
    assert max(map(columns, lines)) <= 80
    assert CHINESE.search(flag("--help").out)
    completed = flag("tuen")
    assert completed.code == 2
    assert CHINESE.search(completed.err)
    assert "'tune'" in completed.err


def test_tables_are_chinese_and_aligned(flag: Flag, project: Project) -> None:
    heading, rule, *rows = flag("estimate", project.spec()).out.partition("\n\n")[0].splitlines()
    assert CHINESE.search(heading)
    column_ends = [match.end() for match in re.finditer("-+", rule)]
    for line in (heading, *rows):
        narrow_output = "".join(letter + "\0" * (columns(letter) - 1) for letter in line)
        assert all(narrow_output[end : end + 2].strip() == "" for end in column_ends)


def test_units_of_rates_are_chinese() -> None:
    choose("zh")
    assert objective_text("output_tokens_per_s", 12.0).startswith("12 输出")


def test_data_formats_are_english(flag: Flag, project: Project) -> None:
    spec = project.spec()
    for form in ("json", "csv", "yaml", "jsonl"):
        assert not CHINESE.search(flag("estimate", spec, "--format", form).out)
    assert json.loads(flag("explain", spec, "--json").out)["counts"]
    assert not CHINESE.search(flag("doctor", "--json").out)
    bad_jobs = project.folder / "jobs.jsonl"
    bad_jobs.write_text('{"id": "a", "chip": "cpu", "train": 1}\n', encoding="utf-8")
    completed = flag("estimate", "--jobs", str(bad_jobs))
    assert json.loads(completed.out)["status"] == "invalid"
    assert not CHINESE.search(completed.out)


def test_an_unknown_language_is_invalid_usage(flag: Flag, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAGCORE_LANG", "klingon")
    flag("--help").refused(2, "FLAGCORE_LANG = 'klingon'")


@pytest.mark.slow
def test_a_terminal_that_cannot_encode_chinese_gets_english(project: Project) -> None:
    completed = project.run("--help", PYTHONIOENCODING="ascii").worked()
    assert completed.out.startswith("Usage: flag")


@pytest.mark.parametrize(
    ("variables", "is_chinese"),
    [
        ({"LANG": "zh_CN.UTF-8"}, True),
        ({"LANG": "zh_CN.UTF-8", "FLAGCORE_LANG": "en"}, False),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "C"}, False),
        ({"LANG": "en_US.UTF-8", "LC_MESSAGES": "zh_CN.UTF-8"}, True),
        ({"LANG": "tr_TR.UTF-8"}, False),
        ({}, False),
    ],
)
def test_the_locale_selects_the_language(
    variables: dict[str, str], is_chinese: bool, flag: Flag, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FLAGCORE_LANG", "LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert bool(CHINESE.search(flag("runs", "--help").out)) is is_chinese
