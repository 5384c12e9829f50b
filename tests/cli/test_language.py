"""`flag` in Chinese."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator

import click
import pytest

from flagcore.i18n import choose
from flagcore.i18n.width import columns
from tests.cli.conftest import Project, Ran
from tests.cli.test_terminal import on_terminal

Flag = Callable[..., Ran]
CHINESE = re.compile("[\u4e00-\u9fff]")


@pytest.fixture(autouse=True)
def _chinese(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FLAGCORE_LANG", "zh_CN.UTF-8")
    yield
    choose("")
    click.Context.formatter_class = click.HelpFormatter


def test_help_is_chinese_and_fits(flag: Flag) -> None:
    told = flag("tune", "--help").out
    assert "用法：flag tune" in told
    assert "显示本说明并退出。" in told
    assert not re.search(r"[a-z]+ [a-z]+ [a-z]+", told)
    assert max(map(columns, told.splitlines())) <= 80


def test_wrong_usage_is_told_in_chinese(flag: Flag) -> None:
    ran = flag("tuen")
    assert ran.code == 2
    assert "没有命令 'tuen'" in ran.err
    assert "是否想写 'tune'？" in ran.err
    assert "必须同时给出" in flag("tune", "--config-path", "x").err


def test_data_are_english(flag: Flag, project: Project) -> None:
    spec = project.spec()
    for form in ("json", "csv", "yaml", "jsonl"):
        assert not CHINESE.search(flag("estimate", spec, "--format", form).out)
    assert json.loads(flag("explain", spec, "--json").out)["counts"]


def test_tables_are_aligned_in_any_width(project: Project, flag: Flag) -> None:
    head, rule, *rows = flag("estimate", project.spec()).out.splitlines()
    assert columns(head) <= columns(rule)
    assert "受限于" in head
    ends = [match.end() for match in re.finditer("-+", rule)]
    for line in rows:
        narrow = "".join(letter + "\0" * (columns(letter) - 1) for letter in line)
        assert all(narrow[end : end + 2].strip() == "" for end in ends)
    for width in (60, 120):
        told = on_terminal(project, "estimate", project.spec(), COLUMNS=str(width)).replace("\r", "")
        table = told[told.index("\n#") : told.index("\n\n")] if "\n#" in told else told
        assert max(map(columns, table.splitlines())) <= width


def test_what_a_run_keeps_is_english(project: Project, flag: Flag) -> None:
    spec = project.spec(control={"max_trials": 2}, auto_tuner={"space": {"use_distributed_optimizer": [True]}})
    ran = flag("tune", spec, "--run-dir", str(project.run_dir))
    assert ran.code == 0
    assert CHINESE.search(ran.out)
    assert CHINESE.search(ran.err)
    for file in ("report.txt", "result.json", "insight.json", "best.sh", "best.yaml"):
        assert not CHINESE.search((project.run_dir / file).read_text(encoding="utf-8")), file


def test_a_language_that_nobody_speaks_is_told(flag: Flag, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAGCORE_LANG", "klingon")
    ran = flag("--help")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == "flag: FLAGCORE_LANG = 'klingon' is no language that flagcore speaks; use en or zh\n"


def test_a_terminal_without_chinese_letters_is_spoken_to_in_english(project: Project) -> None:
    ran = project.run("--help", PYTHONIOENCODING="ascii")
    assert ran.code == 0
    assert "Usage: flag" in ran.out
    assert "\\u" not in ran.out


def test_english_loads_no_catalogue() -> None:
    code = (
        "import sys, flagcore.report.formats, flagcore.cli; print([name for name in sys.modules if 'phrases' in name])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_what_is_wrong_with_a_key_is_told_part_by_part(flag: Flag, project: Project) -> None:
    (project.folder / "twice.yaml").write_text("train: {}\ntrain: {}\n")
    assert "第 2 行，第 1 列 第二次给出键 'train'；请只保留其中一个" in flag("estimate", "twice.yaml").err
