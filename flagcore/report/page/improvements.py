"""What limits the best, and which change of a knob would help."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flagcore.report.explanation import PARTS
from flagcore.report.formats import lookup, shown
from flagcore.report.page.blocks import Block, Cell, Section, Text, cell, percent, table
from flagcore.report.page.knobs import sensitivity, value_text
from flagcore.report.page.run import RunData, number
from flagcore.report.text import SHORT
from flagcore.stages.predict import LIMITS

MOST = 8
"""Changes that are listed."""


@dataclass(frozen=True, slots=True)
class _Limit:
    """What limits a candidate: its name, where its figure is in a prediction, and what a column of it is called."""

    name: str
    key: str
    heading: str


@dataclass(frozen=True, slots=True)
class _Change:
    """A candidate near the best: its figure of what limits that, its step, and its trial."""

    figure: float
    seconds: float
    near: Mapping[str, Any]
    trial: Mapping[str, Any] | None


def levers(run: RunData) -> Section | None:
    """Return what limits the best and what would change it; None where there is no best or no time is known."""
    if run.best is None or lookup(run.best["predicted"], "step_time_s.value") is None:
        return None
    limit, knobs = _limit(run.best["predicted"]), run.insight.get("knobs") or []
    blocks: list[Block] = [Text(_limited(run, run.best, limit))]
    if knobs:
        blocks += [*_changes(run, run.best, limit), sensitivity(run, knobs)]
    return Section(anchor="levers", title="What limits it, and which knob would help", blocks=tuple(blocks))


def _limit(predicted: Mapping[str, Any]) -> _Limit:
    name = predicted.get("limit")
    part = next((key for key, text in LIMITS.items() if text == name), None)
    if name == "compute":
        part = "compute_s"
    if part is not None:
        return _Limit(str(name), f"time.{part}", f"~{PARTS.get(part, part)}, s")
    if name == "memory":
        return _Limit("memory", "memory.device_used_gib", "~in use, GiB")
    return _Limit("", "step_time_s.value", "")


def _limited(run: RunData, best: Mapping[str, Any], limit: _Limit) -> str:
    predicted = best["predicted"]
    if not limit.name:
        return f"The best is predicted to give {shown(run.predicted(best))} {run.unit}."
    figure, step = float(lookup(predicted, limit.key) or 0.0), float(predicted["step_time_s"]["value"])
    if limit.name == "memory":
        capacity = shown(predicted["memory"]["capacity_gib"])
        return f"It is limited by memory: {shown(figure)} of {capacity} GiB are in use, as predicted."
    return (
        f"It is limited by {limit.name}: {shown(figure)} s, or {figure / step:.1%} of a step of {shown(step)} s, as "
        "predicted."
    )


def _changes(run: RunData, best: Mapping[str, Any], limit: _Limit) -> Iterator[Block]:
    """Yield the candidates in which fewest knobs differ from the best and that lessen what limits it."""
    step = float(best["predicted"]["step_time_s"]["value"])
    found = sorted(_found(run, best, limit), key=lambda change: (change.seconds, change.figure))
    less = {"": "be faster", "memory": "need less memory"}.get(limit.name, f"spend less on it ({limit.name})")
    if not found:
        yield Text(
            f"No candidate that differs in one knob, and where it must in others, is predicted to {less}, and to fit."
        )
        return
    rows: list[list[Any]] = []
    for change in found[:MOST]:
        changed = ", ".join(
            f"{SHORT.get(knob, knob)} {value_text(value)}" for knob, value in change.near["differs"].items()
        )
        predicted = change.near["predicted"]
        told = lookup(predicted, "objective.value") if run.serves else change.seconds
        over = percent(change.seconds / step - 1.0, signed=True)
        own = [cell(change.figure)] if limit.name else []
        used = cell(number(lookup(predicted, "memory.device_used_gib")))
        rows.append([changed, *own, cell(told), over, used, _ran(run, change.trial)])
    heading = [limit.heading] if limit.name else []
    seconds = f"~{run.unit}" if run.serves else "~step, s"
    yield table(
        f"Nearest candidates that are predicted to {less}: the knobs that differ from the best's",
        ["changed to", *heading, seconds, "~time against the best's", "~GiB in use", f"as a trial, {run.unit}"],
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
        return Cell("not tried")
    measured = run.figure(trial)
    text = shown(measured) if measured is not None else str(trial["state"])
    return Cell(f"{text} (trial {trial['number']})", measured, f"#trial-{trial['number']}")


def _key(candidate: Mapping[str, Any]) -> str:
    return repr(sorted(candidate.items()))
