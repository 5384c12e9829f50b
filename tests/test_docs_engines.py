"""The page of engines has every knob, its flag and its rules, and no others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from flagcore.domain.knob import Knob
from flagcore.engines.serving.adapter import Serving
from flagcore.engines.serving.engine import Engine
from flagcore.plugins import WORKLOADS, names, workload
from tests.engines.serving.engines.tasks import serving
from tests.small import EXPERTS

PAGE = (Path(__file__).parent.parent / "docs" / "engines.md").read_text(encoding="utf-8")
ENGINES = [each.engine for each in map(workload, names(WORKLOADS)) if isinstance(each, Serving)]
FLAGS: dict[str, dict[str, Any]] = {
    "sglang": {"attention_backend": "flashmla"},
    "llamacpp": {"ctx_size": 4096},
}
"""Flags with which rules apply that do not otherwise."""
KINDS = {"int": "whole number", "share": "above 0, at most 1", "flag": "true, false"}

engines = pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)


def section(name: str) -> str:
    return PAGE.split(f"\n## {name}\n")[1].split("\n## ")[0]


def row(knob: Knob) -> str:
    """The line of the table that documents a knob."""
    names = [flag.off if knob.neutral is True else flag.name for flag in knob.flags[:1]]
    flag = f"`--{names[0]}`" if names else "–"
    values = KINDS.get(knob.kind) or ", ".join(knob.words) or "unequal sizes such as 4+2+2"
    own = "" if knob.neutral in (None, 1) and knob.neutral is not True else f" ({str(knob.neutral).lower()})"
    return f"| `{knob.name}` | {flag} | {values}{own} | {knob.auto_help} | {knob.help} |"


@engines
def test_every_knob_of_an_engine_is_on_the_page(engine: Engine) -> None:
    rows = re.findall(r"^(\| `\w+` \| .+? \| .+? \| .+ \| .+ \|)$", section(engine.title), re.MULTILINE)
    assert rows == [row(knob) for knob in engine.knobs]


@engines
def test_every_rule_of_an_engine_is_on_the_page(engine: Engine) -> None:
    args = {"model": EXPERTS, "weights": "w", "command": ("/bin/echo",), "engine_args": FLAGS.get(engine.name, {})}
    tasks = [serving(engine.name, **args), serving(engine.name, on_cores=True, devices=2, **args)]
    expected = {rule.name for task in tasks for rule in engine.rules(task)}
    assert set(re.findall(r"^\| `(\w+)` \| [^|]+ \|$", section(engine.title), re.MULTILINE)) == expected


@engines
def test_an_engine_without_a_run_is_marked(engine: Engine) -> None:
    assert ("**Untested**" in section(engine.title)) == bool(engine.untested)


def test_every_counter_is_on_the_page_with_the_engines_that_report_it() -> None:
    rows = re.findall(r"^\| (`.+?`) \| (.+?) \| .+ \|$", section("Counters"), re.MULTILINE)
    listed = {(name, engine) for names, of in rows for name in re.findall(r"\w+", names) for engine in of.split(", ")}
    assert listed == {(name, engine.title) for engine in ENGINES for name in engine.counters.values()}
