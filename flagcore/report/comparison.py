"""Two candidates side by side as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flagcore.domain.knob import Knobs
from flagcore.domain.objective import SERVING, objective_value
from flagcore.i18n import N_, _
from flagcore.report.candidate_report import differs_text
from flagcore.report.explanation import part_name
from flagcore.report.formats import lookup, shown, table
from flagcore.report.serving_text import heading, name_of
from flagcore.report.text import state_name, values_text

SAME = 1e-9
"""The largest relative difference of equal figures."""

VERDICTS = {
    "surely": N_("significant: larger than the noise of their runs"),
    "perhaps": N_("not significant: within the noise of their runs"),
    "as believed": N_("predicted after trials: not both were measured"),
    "as predicted": N_("predicted: not both were measured"),
}


def compared_text(both: Mapping[str, Any], knobs: Knobs) -> str:
    """Return a comparison from the fields of `flagcore.api.explaining.compare.Comparison`."""
    lines = [f"{name}: {_side(both[name.lower()], knobs)}" for name in ("A", "B")]
    lines.append(_("Changed knobs: {changes}", changes=differs_text(both["differs"], knobs) or "-"))
    if both["tasks"]:
        lines.append(_("Changed tasks: {changes}", changes="; ".join(both["tasks"])))
    rows = list(_rows(both))
    parts = ["\n".join(lines), *([table(["", "A", "B", "B - A", "%"], rows)] if rows else [])]
    if both["gap"] is not None:
        verdict = VERDICTS[both["sure"]]
        parts.append(_("Time of B vs A: {gap:+.1%} ({verdict})", gap=both["gap"], verdict=_(verdict)))
    return "\n".join(["\n\n".join(parts), *(f"  {line}" for line in both["because"])])


def _side(side: Mapping[str, Any], knobs: Knobs) -> str:
    place = f"{side['where']}, {side['devices']} x {side['chip']}"
    state = state_name(side["state"])
    return f"{side['name']} ({place}): {values_text(side['candidate'], knobs)} ({state})"


def _rows(both: Mapping[str, Any]) -> Iterator[list[str]]:
    sides, objective = (both["a"], both["b"]), both["objective"]
    name = heading(objective) if objective in SERVING else _("step s")
    measured = [lookup(side, "measured.step_time_s") for side in sides]
    if any(measured):
        yield _row(name, [_figure(objective, step) for step in measured])
        yield [*_row(_("spread within a run"), [_share(side, "spread_s") for side in sides])[:3], "-", "-"]
        yield [*_row(_("spread between runs"), [_share(side, "between_s") for side in sides])[:3], "-", "-"]
        yield [*_row(_("runs"), [lookup(side, "measured.runs") for side in sides])[:3], "-", "-"]
        used = [lookup(side, "measured.device_used_gib") for side in sides]
        if any(used):
            yield _row(_("in use GiB"), used)
    steps = [lookup(side, "predicted.step_time_s.value") for side in sides]
    if any(steps):
        yield _row(f"~{name}", [_figure(objective, step) for step in steps])
    believed = [lookup(side, "believed.step_time_s.value") for side in sides]
    if any(believed):
        yield _row(f"~{name} {_('(after trials)')}", [_figure(objective, step) for step in believed])
    for part, pair in both["time"].items():
        yield _row(f"~  {_(part_name(part))} s", pair)
    for figure, pair in both["figures"].items():
        yield _row(f"~{name_of(figure)} s", pair)
    needed = [lookup(side, "predicted.memory.device_used_gib") for side in sides]
    if any(needed):
        yield _row(_("~in use GiB"), needed)
    for part, pair in both["memory"].items():
        yield _row(f"~  {_(part)} GiB", pair)


def _figure(objective: str, seconds: float | None) -> float | None:
    return objective_value(objective, seconds) if seconds and objective in SERVING else seconds


def _share(side: Mapping[str, Any], name: str) -> float | None:
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
