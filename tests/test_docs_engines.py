"""The page of engines has every knob with its flag, every rule and every counter."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from docs.site import engine_tables
from flagcore.engines.serving.engine import Engine
from flagcore.plugins import WORKLOADS, names, workload
from tests.engines.serving.engines.tasks import serving
from tests.small import EXPERTS

PAGE = (Path(__file__).parent.parent / "docs" / "engines.md").read_text(encoding="utf-8")
ENGINES = [
    each for each in map(workload, names(WORKLOADS)) if isinstance(each, Engine) and each.where.startswith("flagcore.")
]
FLAGS: dict[str, dict[str, Any]] = {
    "sglang": {"attention_backend": "flashmla"},
    "llamacpp": {"ctx_size": 4096},
}
"""Flags that activate further rules."""
RULE = re.compile(r"^\| `(\w+)` \| [^|]+ \|$", re.MULTILINE)

engines = pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)


def section(name: str) -> str:
    return PAGE.split(f"\n## {name}\n")[1].split("\n## ")[0]


@engines
def test_site_has_a_table_with_all_knobs_of_an_engine(engine: Engine) -> None:
    table = engine_tables.fill(section(engine.program.title))
    assert {knob.name for knob in engine.knobs if f"\n| `{knob.name}` |" not in table} == set()


@engines
def test_every_rule_of_an_engine_is_on_the_page(engine: Engine) -> None:
    args = {"model": EXPERTS, "weights": "w", "command": ("/bin/echo",), "engine_args": FLAGS.get(engine.name, {})}
    tasks = [serving(engine.name, **args), serving(engine.name, on_cores=True, devices=2, **args)]
    expected = {rule.name for task in tasks for rule in engine.rules(task)}
    shared, own = (set(RULE.findall(section(name))) for name in ("Rules of all engines", engine.program.title))
    assert own <= expected <= shared | own


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
        for name in (*engine.program.counters.values(), *engine.program.shares)
    }
