"""Why one candidate is faster than another: the parts of the predicted time that differ most."""

from __future__ import annotations

from collections.abc import Mapping

from flagcore.domain.objective import SERVING, objective_value
from flagcore.i18n import N_, _
from flagcore.report.explanation import part_name
from flagcore.report.formats import shown
from flagcore.report.text import heading

MAX_PARTS = 3
"""Maximum number of listed parts."""
SAME = 5e-4
"""Relative difference below which two times are shown as equal."""


def largest_differences(time: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Return the seconds by which parts of a time differ, second minus first, the largest first.

    Only parts with the sign of the total difference are returned.
    """
    differences = {name: second - first for name, (first, second) in time.items()}
    total = sum(differences.values())
    parts = (name for name, seconds in differences.items() if seconds * total > 0.0)
    return {name: differences[name] for name in sorted(parts, key=lambda name: -abs(differences[name]))}


def parts_text(differences: Mapping[str, float]) -> str:
    """Return the largest differences of parts as text."""
    return ", ".join(f"{_(part_name(name))} {differences[name]:+.3g} s" for name in list(differences)[:MAX_PARTS])


def causes_text(
    objective: str,
    other: str,
    seconds: tuple[float, float],
    predicted: tuple[float | None, float | None],
    time: Mapping[str, tuple[float, float]],
    source: str,
    *,
    has_rounds: bool = False,
) -> str:
    """Return a paragraph on where a candidate spends more or less time than another one.

    `other` is the name of the other. `seconds` are the step times of the other and of the candidate, `predicted` the
    same as predicted, `time` the parts of the predicted time of both. `source` is how `seconds` are known. With
    `has_rounds`, the speedup is that of rounds, which reports show, so the text has no other.
    """
    before, after = seconds
    if abs(after - before) <= SAME * before:
        return _("It is as fast as {other} ({source}).", other=other, source=source)
    if objective in SERVING:
        first, second = (objective_value(objective, each) for each in seconds)
        with_change = N_("It has {value} {unit}, {change:+.1%} against the {before} of {other} ({source}).")
        text = _(
            N_("It has {value} {unit} against the {before} of {other} ({source}).") if has_rounds else with_change,
            value=shown(second),
            unit=heading(objective),
            change=second / first - 1.0,
            before=shown(first),
            other=other,
            source=source,
        )
        parts_of = N_("By prediction, the largest differences in the time of a request: {parts}.")
    else:
        with_change = N_("A step takes {value} s, {change:+.1%} against the {before} s of {other} ({source}).")
        text = _(
            N_("A step takes {value} s against the {before} s of {other} ({source}).") if has_rounds else with_change,
            value=shown(after),
            change=after / before - 1.0,
            before=shown(before),
            other=other,
            source=source,
        )
        parts_of = N_("By prediction, the largest differences: {parts}.")
    if None in predicted or not (differences := largest_differences(time)):
        return text
    expected = float(predicted[1] or 0.0) - float(predicted[0] or 0.0)
    if expected * (after - before) <= 0.0:
        return text + " " + _("The prediction expected the opposite, so its parts do not explain it.")
    return text + " " + _(parts_of, parts=parts_text(differences))
