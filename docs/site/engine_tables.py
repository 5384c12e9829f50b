"""Tables of the knobs of serving engines, from the engines' records."""

from __future__ import annotations

import re
from functools import partial

from flagcore.domain.knob import Flag, Knob
from flagcore.engines.serving.engine import Engine
from flagcore.plugins import WORKLOADS, names, workload

MARK = re.compile(r"^<!-- knobs (\w+) -->$", re.MULTILINE)
ENGINES = {each.name: each for each in map(workload, names(WORKLOADS)) if isinstance(each, Engine)}
HEAD = "| knob | flag | releases | values | `auto` tries | meaning |\n| --- | --- | --- | --- | --- | --- |"
VALUES = {"int": "whole number", "share": "above 0, at most 1", "flag": "true, false"}


def fill(text: str) -> str:
    """Return the text with a table below each mark `<!-- knobs ENGINE -->`."""
    return MARK.sub(lambda found: _table(found[1]), text)


def _table(name: str) -> str:
    return "\n".join([HEAD, *map(_row, ENGINES[name].knobs)])


def _row(knob: Knob) -> str:
    by_release = [flag for flag in knob.flags if flag.versions or flag.word] or knob.flags[:1]
    flag = ", ".join(map(partial(_flag, knob), by_release)) or "–"
    values = VALUES.get(knob.kind) or ", ".join(knob.words) or "unequal sizes such as 4+2+2"
    neutral_text = "" if knob.neutral in (None, 1) and knob.neutral is not True else f" ({str(knob.neutral).lower()})"
    releases = knob.versions or "all"
    return f"| `{knob.name}` | {flag} | {releases} | {values}{neutral_text} | {knob.auto_help} | {knob.help} |"


def _flag(knob: Knob, flag: Flag) -> str:
    """Return a flag, and its releases if other releases have another one."""
    releases = f" ({flag.versions})" if flag.versions else ""
    return f"`--{flag.off if knob.neutral is True else flag.name}`{releases}"
