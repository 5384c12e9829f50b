"""The bottleneck of the best configuration, and the knobs that would help."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flagcore.i18n import _
from flagcore.report.explanation import part_name
from flagcore.report.formats import lookup, shown
from flagcore.report.page.blocks import Block, Cell, Section, Text, cell, percent, table
from flagcore.report.page.knobs import sensitivity, value_text
from flagcore.report.page.run import RunData, number
from flagcore.report.text import SHORT, state_name
from flagcore.stages.predict import LIMITS

MAX_CHANGES = 8
"""The most changes to list."""


@dataclass(frozen=True, slots=True)
class _Limit:
    """The bottleneck of a candidate: its name, the key of its figure in a prediction, and the heading of a column."""

    name: str
    key: str
    heading: str


@dataclass(frozen=True, slots=True)
class _Change:
    """A candidate near the best: its figure of the bottleneck, its step time, and its trial."""

    figure: float
    seconds: float
    near: Mapping[str, Any]
    trial: Mapping[str, Any] | None


def improvements(run: RunData) -> Section | None:
    """Return the bottleneck of the best and changes that reduce it; None without a best or its predicted time."""
    if run.best is None or lookup(run.best["predicted"], "step_time_s.value") is None:
        return None
    limit, knobs = _limit(run.best["predicted"]), run.insight.get("knobs") or []
    blocks: list[Block] = [Text(_limited(run, run.best, limit))]
    if knobs:
        blocks += [*_changes(run, run.best, limit), sensitivity(run, knobs)]
    return Section(anchor="improvements", title=_("Bottleneck and possible improvements"), blocks=tuple(blocks))


def _limit(predicted: Mapping[str, Any]) -> _Limit:
    name = predicted.get("limit")
    part = next((key for key, text in LIMITS.items() if text == name), None)
    if name == "compute":
        part = "compute_s"
    if part is not None:
        return _Limit(str(name), f"time.{part}", f"~{_(part_name(part))}, s")
    if name == "memory":
        return _Limit("memory", "memory.device_used_gib", _("~in use, GiB"))
    return _Limit("", "step_time_s.value", "")


def _limited(run: RunData, best: Mapping[str, Any], limit: _Limit) -> str:
    predicted = best["predicted"]
    if not limit.name:
        return _("Predicted: {value} {unit}.", value=shown(run.predicted(best)), unit=run.unit)
    figure, step = float(lookup(predicted, limit.key) or 0.0), float(predicted["step_time_s"]["value"])
    if limit.name == "memory":
        capacity = shown(predicted["memory"]["capacity_gib"])
        return _(
            "Bottleneck: memory, ~{used} of {capacity} GiB in use (predicted).", used=shown(figure), capacity=capacity
        )
    return _(
        "Bottleneck: {limit}, ~{seconds} s of a step of ~{step} s, or {share:.1%} (predicted).",
        limit=_(limit.name),
        seconds=shown(figure),
        step=shown(step),
        share=figure / step,
    )


def _changes(run: RunData, best: Mapping[str, Any], limit: _Limit) -> Iterator[Block]:
    """Yield the candidates that reduce the bottleneck and differ from the best in the fewest knobs."""
    step = float(best["predicted"]["step_time_s"]["value"])
    found = sorted(_found(run, best, limit), key=lambda change: (change.seconds, change.figure))
    if not found:
        yield Text(_("No candidate with one knob changed is predicted to reduce the bottleneck and to fit."))
        return
    rows: list[list[Any]] = []
    for change in found[:MAX_CHANGES]:
        changed = ", ".join(
            f"{SHORT.get(knob, knob)} {value_text(value)}" for knob, value in change.near["differs"].items()
        )
        predicted = change.near["predicted"]
        figure = lookup(predicted, "objective.value") if run.serves else change.seconds
        over = percent(change.seconds / step - 1.0, signed=True)
        own = [cell(change.figure)] if limit.name else []
        used = cell(number(lookup(predicted, "memory.device_used_gib")))
        rows.append([changed, *own, cell(figure), over, used, _ran(run, change.trial)])
    heading = [limit.heading] if limit.name else []
    seconds = f"~{run.unit}" if run.serves else _("~step, s")
    trial = _("trial, {unit}", unit=run.unit)
    yield table(
        _("Changes of one knob that are predicted to reduce the bottleneck"),
        [_("change"), *heading, seconds, _("~time vs best"), _("~in use, GiB"), trial],
        rows,
        sortable=True,
    )


def _found(run: RunData, best: Mapping[str, Any], limit: _Limit) -> Iterator[_Change]:
    own = float(lookup(best["predicted"], limit.key) or 0.0)
    ran, seen = {_key(trial["candidate"]): trial for trial in run.trials}, set[str]()
    for knob in run.insight.get("knobs") or []:
        for value in knob["values"]:
            near = value["nearest"]
            figure, key = number(lookup(near["predicted"], limit.key)), _key(near["candidate"])
            if key in seen or value["value"] == knob["best"] or figure is None or not figure < own:
                continue
            seen.add(key)
            yield _Change(figure, float(lookup(near["predicted"], "step_time_s.value")), near, ran.get(key))


def _ran(run: RunData, trial: Mapping[str, Any] | None) -> Cell:
    if trial is None:
        return Cell(_("untried"))
    measured = run.figure(trial)
    text = shown(measured) if measured is not None else state_name(trial["state"])
    return Cell(f"{text} ({_('trial')} {trial['number']})", measured, f"#trial-{trial['number']}")


def _key(candidate: Mapping[str, Any]) -> str:
    return repr(sorted(candidate.items()))
