"""Two candidates side by side as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flagcore.domain.objective import SERVING, told
from flagcore.report.candidate_report import differs_text
from flagcore.report.explanation import part_name
from flagcore.report.formats import lookup, shown, table
from flagcore.report.serving_text import heading, name_of
from flagcore.report.text import values_text

SAME = 1e-9
"""Figures that differ by no more than this share are the same."""

VERDICTS = {
    "surely": "surely: in every run, and by more than they differ",
    "perhaps": "perhaps: their runs differ too much to tell",
    "as believed": "as trials let believe; not both were measured",
    "as predicted": "as predicted; not both were measured",
}


def compared_text(both: Mapping[str, Any]) -> str:
    """Return two candidates part by part, by the fields of `flagcore.api.explaining.compare.Comparison`."""
    lines = [f"{name}: {_side(both[name.lower()])}" for name in ("A", "B")]
    lines.append(f"They differ in {differs_text(both['differs']) or 'no knob'}.")
    if both["tasks"]:
        lines.append("Their tasks differ, too: " + "; ".join(both["tasks"]))
    rows = list(_rows(both))
    parts = ["\n".join(lines), *([table(["", "A", "B", "B - A", "%"], rows)] if rows else [])]
    if both["gap"] is not None:
        parts.append(
            f"B takes {abs(both['gap']):.1%} {'more' if both['gap'] > 0 else 'less'} time, {VERDICTS[both['sure']]}."
        )
    return "\n".join(["\n\n".join(parts), *(f"  {line}" for line in both["because"])])


def _side(side: Mapping[str, Any]) -> str:
    place = f"{side['where']}, {side['devices']} x {side['chip']}"
    return f"{side['name']} of {place}: {values_text(side['candidate'])} ({side['state']})"


def _rows(both: Mapping[str, Any]) -> Iterator[list[str]]:
    sides, objective = (both["a"], both["b"]), both["objective"]
    name = heading(objective) if objective in SERVING else "step s"
    measured = [lookup(side, "measured.step_time_s") for side in sides]
    if any(measured):
        yield _row(name, [_figure(objective, step) for step in measured])
        yield [*_row("spread within a run, share", [_share(side, "spread_s") for side in sides])[:3], "-", "-"]
        yield [*_row("runs differ by, share", [_share(side, "between_s") for side in sides])[:3], "-", "-"]
        yield [*_row("runs", [lookup(side, "measured.runs") for side in sides])[:3], "-", "-"]
        used = [lookup(side, "measured.device_used_gib") for side in sides]
        if any(used):
            yield _row("in use GiB", used)
    steps = [lookup(side, "predicted.step_time_s.value") for side in sides]
    if any(steps):
        yield _row(f"~{name}", [_figure(objective, step) for step in steps])
    believed = [lookup(side, "believed.step_time_s.value") for side in sides]
    if any(believed):
        yield _row(f"~believed {name}", [_figure(objective, step) for step in believed])
    for part, pair in both["time"].items():
        yield _row(f"~  {part_name(part)} s", pair)
    for figure, pair in both["figures"].items():
        yield _row(f"~{name_of(figure)} s", pair)
    needed = [lookup(side, "predicted.memory.device_used_gib") for side in sides]
    if any(needed):
        yield _row("~in use GiB", needed)
    for part, pair in both["memory"].items():
        yield _row(f"~  {part} GiB", pair)


def _figure(objective: str, seconds: float | None) -> float | None:
    return told(objective, seconds) if seconds and objective in SERVING else seconds


def _share(side: Mapping[str, Any], name: str) -> float | None:
    """Return a figure of a side's runs in seconds as a share of its step."""
    seconds = lookup(side, f"measured.{name}")
    return None if seconds is None else float(seconds) / float(side["measured"]["step_time_s"])


def _row(name: str, pair: Sequence[float | None]) -> list[str]:
    a, b = pair
    cells = [name, *("-" if figure is None else shown(figure) for figure in (a, b))]
    if a is None or b is None:
        return [*cells, "-", "-"]
    if abs(b - a) <= SAME * abs(a):
        return [*cells, "0", "0.0%"]
    return [*cells, f"{b - a:+.3g}", f"{b / a - 1.0:+.1%}" if a * b > 0.0 else "-"]
