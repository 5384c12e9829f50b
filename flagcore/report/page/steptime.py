"""Where the time of a step goes, and the pipeline as a timeline."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from flagcore.domain.passes import Passes
from flagcore.report.explained import PARTS
from flagcore.report.formats import lookup, shown
from flagcore.report.page.blocks import Block, Chart, Section, Table, Text, cell, percent, table
from flagcore.report.page.charts import COLOURS, bars, points, rows_layout
from flagcore.report.page.run import RunData, number
from flagcore.report.page.timeline import DRAWN, Pass, fewest, timeline

MOST_PASSES = 3000
"""Passes that a timeline has at most: more cannot be told apart, and browsers draw them slowly."""
MOST_COUNTED = 100_000
"""Passes of a whole step that are played to tell how long stages idle; with more, those that are drawn stand for it."""
MEASURED = {"forward_backward_s": "forward and backward", "optimizer_s": "optimizer"}
"""What the trial program measures of a step, of its first rank."""


def step_time(run: RunData) -> Section | None:
    """Return the parts of a step; None where none is known."""
    trials = {"best": run.best, "baseline": run.baseline}
    if run.best and run.baseline and run.best["candidate"] == run.baseline["candidate"]:
        trials.pop("baseline")
    known = {name: parts for name, trial in trials.items() if trial and (parts := _parts(trial))}
    if not known:
        return None
    blocks: list[Block] = [_by_part(run, known, {name: trial for name, trial in trials.items() if trial})]
    measured = [[name, *_measured(run, trial)] for name, trial in trials.items() if trial and _measured(run, trial)]
    if measured:
        headings = ["what ran", *(f"{text}, s" for text in MEASURED.values()), "step, s"]
        blocks.append(table("Measured by the trial program, median over the steps that count", headings, measured))
    return Section(anchor="step", title="Time of a step", blocks=tuple(blocks))


def pipeline(run: RunData) -> Section | None:
    """Return the timeline of the best's pipeline; None where it has none."""
    data = run.insight.get("pipeline")
    if not data:
        return None
    passes = Passes(**{**data, "forward_s": tuple(data["forward_s"]), "backward_s": tuple(data["backward_s"])})
    drawn = fewest(passes, MOST_PASSES) if passes.schedule in DRAWN else None
    if drawn is None:
        why = f"{len(passes.forward_s)} stages have more passes than can be told apart, so their timeline is not drawn."
        if passes.schedule not in DRAWN:
            why = (
                f"The time of its schedule, {passes.schedule}, is predicted by a formula: in which order each stage "
                "runs its passes is not known here, so no timeline is drawn. The seconds of each stage are below."
            )
        blocks: tuple[Block, ...] = (Text(why), _stage_seconds(passes))
    else:
        blocks = (_timeline(passes, drawn),)
    return Section(anchor="pipeline", title="The pipeline of the best", blocks=blocks)


def _parts(trial: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(seconds) for name, seconds in (trial["predicted"].get("time") or {}).items()}


def _by_part(run: RunData, known: Mapping[str, Mapping[str, float]], trials: Mapping[str, Mapping[str, Any]]) -> Chart:
    names = list(dict.fromkeys(name for parts in known.values() for name in parts))
    traces = [
        bars(PARTS.get(name, name), place, [parts.get(name, 0.0) for parts in known.values()], list(known), width=0.5)
        for place, name in enumerate(names)
        if any(parts.get(name) for parts in known.values())
    ]
    steps = {name: number(lookup(trials[name], "measured.step_time_s.median")) for name in known}
    if any(step is not None for step in steps.values()):
        there = [(step, name) for name, step in steps.items() if step is not None]
        trace = points("the step as measured", 5, [step for step, _ in there], [name for _, name in there])
        traces.append(trace | {"marker": {**trace["marker"], "symbol": "star", "size": 13}})
    totals = {name: sum(parts.values()) for name, parts in known.items()}
    rows: list[list[Any]] = []
    for part in names:
        figures = [(known[name].get(part, 0.0), totals[name]) for name in known]
        shares = [
            each for seconds, total in figures for each in (cell(seconds), percent(seconds / total if total else 0))
        ]
        rows.append([PARTS.get(part, part), *shares])
    rows.append(["step, predicted", *(each for name in known for each in (cell(totals[name]), cell(None)))])
    rows.append(["step, measured", *(each for name in known for each in (cell(steps[name]), cell(None)))])
    held = table(
        "Seconds of a step by part, as predicted",
        ["part", *(heading for name in known for heading in (f"~{name}, s", f"~{name}, share"))],
        rows,
    )
    first = next(iter(known))
    most = max(known[first], key=lambda part: known[first][part])
    return Chart(
        title="What a step is predicted to be spent on",
        says=f"Of the {first}'s predicted {shown(totals[first])} s a step, {PARTS.get(most, most)} takes "
        f"{known[first][most] / (totals[first] or 1.0):.1%}.",
        traces=tuple(traces),
        layout=rows_layout("seconds", len(known), each=60, barmode="stack") | {"height": 240 + 50 * len(known)},
        table=held,
    )


def _measured(run: RunData, trial: Mapping[str, Any]) -> list[Any]:
    """Return the medians of what a trial's program measured over the steps that count; nothing without it."""
    count = lookup(trial, "measured.step_time_s.n")
    steps = run.metrics(trial).get("steps")
    if not count or not isinstance(steps, list) or trial["fidelity"] != "run":
        return []
    kept = [step for step in steps if isinstance(step, Mapping)][-count:]
    figures = [[number(step.get(key)) for step in kept] for key in MEASURED]
    if not kept or any(None in values for values in figures):
        return []
    medians = [cell(median(value for value in values if value is not None)) for values in figures]
    return [*medians, cell(number(lookup(trial, "measured.step_time_s.median")))]


def _timeline(passes: Passes, microbatches: int) -> Chart:
    drawn, count = timeline(passes, microbatches), len(passes.forward_s)
    counted = passes.microbatches if 2 * count * passes.virtual * passes.microbatches <= MOST_COUNTED else microbatches
    numbered = len(drawn) <= 260
    traces = []
    for series, (name, backward) in enumerate((("forward", False), ("backward", True))):
        mine = [each for each in drawn if each.backward is backward]
        trace = bars(
            name,
            series,
            [each.end_s - each.start_s for each in mine],
            [f"stage {each.stage}" for each in mine],
            base=[each.start_s for each in mine],
            hovertext=[_words(each, count) for each in mine],
            hoverinfo="text",
        )
        trace["marker"] = {**trace["marker"], "line": {"width": 1 if numbered else 0.3, "color": "#ffffff"}}
        if not backward:
            trace["marker"]["color"] = COLOURS[4]
        if numbered:
            numbers = [str(each.microbatch) for each in mine]
            trace |= {"text": numbers, "textposition": "inside", "insidetextanchor": "middle", "textangle": 0}
            trace |= {"textfont": {"color": "#000000"}}
        traces.append(trace)
    played = timeline(passes, counted)
    whole, rows = max(each.end_s for each in played), []
    for stage in range(count):
        busy = sum(each.end_s - each.start_s for each in played if each.stage == stage)
        figures = [cell(each) for each in (passes.forward_s[stage], passes.backward_s[stage], busy, whole - busy)]
        rows.append([cell(stage), *figures, percent((whole - busy) / whole)])
    of = f"the {passes.microbatches} micro-batches of a step" if passes.microbatches > 1 else "a step"
    if counted < passes.microbatches:
        of = f"{counted} of {of}"
    held = table(
        f"Seconds of one micro-batch, and of {of}; a message takes {shown(passes.send_s)} s",
        ["stage", "~forward, s", "~backward, s", "~busy, s", "~idle, s", "~idle, share"],
        rows,
    )
    idle = max(float(row[-1].value or 0.0) for row in held.rows)
    virtual = f", {passes.virtual} virtual stages a device" if passes.virtual > 1 else ""
    return Chart(
        title="Forward and backward passes of each stage, as predicted",
        says=f"{count} stages{virtual}; over {of} a stage idles for up to {idle:.1%} of the time."
        + (f" Drawn are the passes of a step of {microbatches}." if microbatches < passes.microbatches else "")
        + (" Numbers are micro-batches." if numbered else ""),
        traces=tuple(traces),
        layout=rows_layout("seconds since the step began", count, each=30, barmode="overlay", bargap=0.15),
        table=held,
    )


def _stage_seconds(passes: Passes) -> Table:
    """Return what one micro-batch takes of each stage, for a pipeline that is not drawn."""
    rows = [
        [cell(stage), cell(forward), cell(backward), cell(passes.microbatches * (forward + backward))]
        for stage, (forward, backward) in enumerate(zip(passes.forward_s, passes.backward_s, strict=True))
    ]
    of = f"the {passes.microbatches} of a step"
    return table(
        f"Seconds of one micro-batch, and of {of}; a message takes {shown(passes.send_s)} s",
        ["stage", "~forward, s", "~backward, s", "~busy, s"],
        rows,
    )


def _words(one: Pass, count: int) -> str:
    kind = "backward" if one.backward else "forward"
    return f"micro-batch {one.microbatch} {kind}, part {one.part} on stage {one.part % count}"
