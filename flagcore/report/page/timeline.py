"""The pipeline as a timeline: which device runs the pass of which micro-batch, and when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flagcore.domain.passes import Passes
from flagcore.errors import NotModelled
from flagcore.physics.schedules.catalogue import SCHEDULES
from flagcore.physics.schedules.execution import ExecutedPass
from flagcore.physics.schedules.replay import predicted_seconds, simulate, step_seconds
from flagcore.report.formats import shown
from flagcore.report.page.blocks import Block, Chart, Section, Table, Text, cell, percent, table
from flagcore.report.page.charts import COLOURS, bars, rows_layout
from flagcore.report.page.run import RunData

MOST_PASSES = 4200
"""Passes that a timeline has at most: more cannot be told apart, and browsers draw them slowly."""
MOST_COUNTED = 50_000
"""Passes of a whole step that are played to tell how long stages idle; with more, those that are drawn stand for it."""
MOST_NUMBERED, MOST_EDGED = 300, 1500
"""Passes up to which each has its micro-batch's number on it, and up to which each has an edge."""
KINDS = {"F": "forward", "BW": "backward", "B": "gradients of inputs", "W": "gradients of weights"}
HIGH = 0.85
"""Height of a bar, as a share of its row."""
TONES = {"BW": {"size": 6, "solidity": 0.3}, "B": {"size": 5, "solidity": 0.25}, "W": {"size": 4, "solidity": 0.55}}
"""Patterns of bars that are too narrow for their shape to be seen: told apart by how dark they are."""
LAYOUT: dict[str, Any] = {"barmode": "overlay", "uniformtext": {"mode": "hide", "minsize": 8}}


def pipeline(run: RunData) -> Section | None:
    """Return the timeline of the best's pipeline; None where it has none."""
    data = run.insight.get("pipeline")
    if not data:
        return None
    kept: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    return Section(anchor="pipeline", title="The pipeline of the best", blocks=_blocks(Passes(**kept)))


def fewest(passes: Passes, most: int) -> int | None:
    """Return how many of a step's micro-batches are enough to show its start, its middle and its end.

    None where even so the timeline would have more than `most` passes.
    """
    count = len(passes.forward_s)
    wanted = min(passes.microbatches, max(2 * count, 8))
    if passes.virtual > 1:
        wanted = min(passes.microbatches, -(-wanted // count) * count)
    return wanted if _each(passes) * wanted <= most else None


def _each(passes: Passes) -> int:
    """Return how many passes a micro-batch has at most."""
    schedule = SCHEDULES[passes.schedule]
    parts = 1 if schedule.copies > 1 else schedule.parts or passes.virtual
    return (3 if schedule.splits_backward else 2) * len(passes.forward_s) * parts


def _blocks(passes: Passes) -> tuple[Block, ...]:
    if SCHEDULES[passes.schedule].splits_backward and not passes.weight_s:
        why = (
            f"The schedule {passes.schedule} runs the gradients of weights apart, and this run, of an earlier version, "
            "does not keep their seconds: no timeline is drawn. Without its insight.json the run is predicted anew."
        )
        return Text(why), _seconds(passes, passes.microbatches)
    number = fewest(passes, MOST_PASSES)
    if number is None:
        why = f"{len(passes.forward_s)} stages have more passes than can be told apart, so their timeline is not drawn."
        return Text(why), _seconds(passes, passes.microbatches)
    try:
        return (_timeline(passes, number),)
    except NotModelled as error:
        return Text(f"No timeline is drawn: {error}."), _seconds(passes, passes.microbatches)


def _timeline(passes: Passes, number: int) -> Chart:
    drawn, count = simulate(passes, number), len(passes.forward_s)
    counted = passes.microbatches if _each(passes) * passes.microbatches <= MOST_COUNTED else number
    played = simulate(passes, counted) if counted != number else drawn
    step, paired = step_seconds(passes, played), any(each.beside for each in drawn)
    seen = {kind: [each for each in drawn if each.kind == kind and each.end_s > each.start_s] for kind in KINDS}
    traces = [
        _bars(passes, series, kind, mine, len(drawn), paired)
        for series, (kind, mine) in enumerate(seen.items())
        if mine
    ]
    held = _seconds(passes, counted, played, step)
    idle = max(float(row[-1].value or 0.0) for row in held.rows)
    says = [*_idles(passes, counted, idle), *_agrees(passes, counted, step)]
    if number < passes.microbatches:
        says.append(f"Drawn are the passes of a step of {number}.")
    if paired:
        says.append("A forward and a backward above each other run together.")
    if SCHEDULES[passes.schedule].copies > 1:
        says.append(f"Micro-batches from {number - number // 2} on go from the last device to the first.")
    if len(drawn) <= MOST_NUMBERED:
        says.append("Numbers, where there is room, are micro-batches.")
        says += ["A stroke, as in 1′, marks the second of a stage's two parts."] * _twofold(passes)
    return Chart(
        title="Forward and backward passes of each stage, as predicted",
        says=" ".join(says),
        traces=tuple(traces),
        layout=rows_layout("seconds since the step began", count, each=44 if paired else 30, **LAYOUT),
        table=held,
    )


def _bars(
    passes: Passes, series: int, kind: str, mine: Sequence[ExecutedPass], among: int, paired: bool
) -> dict[str, Any]:
    trace = bars(
        KINDS[kind],
        series,
        [each.end_s - each.start_s for each in mine],
        [f"device {each.device}" if _called(passes) == "device" else f"stage {each.device}" for each in mine],
        base=[each.start_s for each in mine],
        hovertext=[_words(passes, each) for each in mine],
        hoverinfo="text",
        width=[HIGH / 2.0 if each.beside else HIGH for each in mine] if paired else HIGH,
    )
    if paired:
        trace["offset"] = [0.0 if each.beside > 0 else -HIGH / 2.0 for each in mine]
    pattern = {**trace["marker"]["pattern"], **TONES.get(kind, {})}
    numbered = among <= MOST_NUMBERED
    line = {"width": 1 if numbered else 0.3 if among <= MOST_EDGED else 0, "color": "#ffffff"}
    trace["marker"] = {**trace["marker"], "pattern": pattern, "line": line}
    if kind == "F":
        trace["marker"]["color"] = COLOURS[4]
    if numbered:
        second = [len(passes.forward_s) <= each.part for each in mine] if _twofold(passes) else [False] * len(mine)
        numbers = [f"{each.microbatch}{'′' * later}" for each, later in zip(mine, second, strict=True)]
        trace |= {"text": numbers, "textposition": "inside", "insidetextanchor": "middle", "textangle": 0}
        trace |= {"textfont": {"color": "#ffffff" if kind == "W" else "#000000", "size": 12}}
    return trace


def _idles(passes: Passes, counted: int, idle: float) -> list[str]:
    virtual = f", {passes.virtual} virtual stages a device" if passes.virtual > 1 else ""
    count = len(passes.forward_s)
    rows = f"{count} devices" if _called(passes) == "device" else f"{count} stages{virtual}"
    schedule = "1f1b" if passes.schedule == "interleaved" and passes.virtual < 2 else passes.schedule
    return [
        f"{rows}, schedule {schedule}.",
        f"Over {_of(passes, counted)} one of them idles for up to {idle:.1%} of the time.",
    ]


def _agrees(passes: Passes, counted: int, step: float) -> list[str]:
    """Return how long the played step takes, beside what its formula says of it."""
    if counted < passes.microbatches:
        return []
    formula = predicted_seconds(passes)
    told = [f"Played pass by pass they take {shown(step)} s, by the formula that predicts steps {shown(formula)} s."]
    if SCHEDULES[passes.schedule].post_validation:
        told.append("No stage waits for the others before the optimizer, so the longest span of one stage counts.")
    return told


def _seconds(passes: Passes, counted: int, played: Sequence[ExecutedPass] = (), step: float = 0.0) -> Table:
    """Return what one micro-batch takes of each device, and so many of them; and, where a step is played, idle time."""
    columns: dict[str, Sequence[float]] = {"~forward, s": passes.forward_s, "~backward, s": passes.backward_s}
    if SCHEDULES[passes.schedule].splits_backward and passes.weight_s:
        columns["~of it weights, s"] = passes.weight_s
    if passes.paired_s:
        columns["~both together, s"] = passes.paired_s
    if SCHEDULES[passes.schedule].copies > 1:
        columns = {
            name: [(one + two) / 2.0 for one, two in zip(s, s[::-1], strict=True)] for name, s in columns.items()
        }
    busy = [counted * (forward + backward) for forward, backward in zip(*list(columns.values())[:2], strict=True)]
    if played:
        busy = [0.0] * len(busy)
        for each in played:
            busy[each.device] += each.end_s - each.start_s if each.beside <= 0 else 0.0
    columns["~busy, s"] = busy
    if played:
        columns["~idle, s"] = [step - each for each in busy]
    rows: list[list[Any]] = [[cell(r), *map(cell, row)] for r, row in enumerate(zip(*columns.values(), strict=True))]
    if played:
        rows = [[*row, percent((step - each) / step)] for row, each in zip(rows, busy, strict=True)]
    return table(
        f"Seconds of one micro-batch, and of {_of(passes, counted)}; a message takes {shown(passes.send_s)} s",
        [_called(passes), *columns, *["~idle, share"] * bool(played)],
        rows,
    )


def _of(passes: Passes, counted: int) -> str:
    of = f"the {passes.microbatches} micro-batches of a step" if passes.microbatches > 1 else "a step"
    return f"{counted} of {of}" if counted < passes.microbatches else of


def _called(passes: Passes) -> str:
    """Return what a row is: in DualPipe two stages of the model share two devices."""
    return "device" if SCHEDULES[passes.schedule].copies > 1 else "stage"


def _twofold(passes: Passes) -> bool:
    """Return whether a device holds two parts of one copy of the model."""
    schedule = SCHEDULES[passes.schedule]
    return schedule.copies == 1 and (schedule.parts or passes.virtual) == 2


def _words(passes: Passes, one: ExecutedPass) -> str:
    count = len(passes.forward_s)
    if SCHEDULES[passes.schedule].copies > 1:
        return f"micro-batch {one.microbatch}, {KINDS[one.kind]}: part {one.part % count} on device {one.device}"
    return f"micro-batch {one.microbatch}, {KINDS[one.kind]}: part {one.part} on stage {one.device}"
