"""The page of engines has every counter, and marks engines that never ran."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flagcore.engines.serving.engine import Engine
from flagcore.plugins import WORKLOADS, names, workload

PAGE = (Path(__file__).parent.parent / "docs" / "engines.md").read_text(encoding="utf-8")
ENGINES = [
    each for each in map(workload, names(WORKLOADS)) if isinstance(each, Engine) and each.where.startswith("flagcore.")
]

engines = pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)


def section(name: str) -> str:
    return PAGE.split(f"\n## {name}\n")[1].split("\n## ")[0]


@engines
def test_an_engine_without_a_run_is_marked(engine: Engine) -> None:
    assert ("**Untested**" in section(engine.program.title)) == bool(engine.untested)


def test_every_counter_is_on_the_page_with_the_engines_that_report_it() -> None:
    rows = re.findall(r"^\| (`.+?`) \| (.+?) \| .+ \|$", section("Counters"), re.MULTILINE)
    listed = {
        (name, engine)
        for names, predictions in rows
        for name in re.findall(r"\w+", names)
        for engine in predictions.split(", ")
    }
    assert listed == {
        (name, engine.program.title)
        for engine in ENGINES
        for name in (*engine.reports.counters.values(), *engine.reports.shares)
    }
