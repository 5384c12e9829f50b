"""Writes the tables of knobs into docs/engines.md: `python docs/site/engine_tables.py`."""

from __future__ import annotations

import re
from pathlib import Path

from flagcore.domain.knob import Knob
from flagcore.engines.serving.adapter import Serving
from flagcore.plugins import WORKLOADS, names, workload

PAGE = Path(__file__).parents[1] / "engines.md"
BLOCK = re.compile(r"<!-- knobs (\w+) -->\n.*?<!-- end -->", re.DOTALL)
ENGINES = {each.engine.name: each.engine for each in map(workload, names(WORKLOADS)) if isinstance(each, Serving)}
VALUES = {"int": "whole number", "share": "above 0, at most 1", "flag": "true, false"}


def page(text: str) -> str:
    """Return the page with the tables of all installed engines made again."""
    return BLOCK.sub(lambda found: _block(found[1]) if found[1] in ENGINES else found[0], text)


def _block(name: str) -> str:
    rows = "\n".join(map(_row, ENGINES[name].knobs))
    head = "| knob | flag | values | `auto` tries | meaning |\n| --- | --- | --- | --- | --- |"
    return f"<!-- knobs {name} -->\n\n{head}\n{rows}\n\n<!-- end -->"


def _row(knob: Knob) -> str:
    spellings = [flag.off if knob.neutral is True else flag.name for flag in knob.flags[:1]]
    flag = f"`--{spellings[0]}`" if spellings else "–"
    values = VALUES.get(knob.kind) or ", ".join(knob.words) or "unequal sizes such as 4+2+2"
    own = "" if knob.neutral in (None, 1) and knob.neutral is not True else f" ({str(knob.neutral).lower()})"
    return f"| `{knob.name}` | {flag} | {values}{own} | {knob.auto_help} | {knob.help} |"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
