"""The answer first: what is best, by how much, how sure that is, and how it is started."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from flagcore.domain.objective import is_rate
from flagcore.domain.trial import ESTIMATE, PROBE, RUN
from flagcore.report import serving_text
from flagcore.report.formats import lookup, shown
from flagcore.report.page.blocks import Block, Cell, Code, Facts, Section, Text, table
from flagcore.report.page.run import RunData, configuration, name_of, objective_text, text_file

HOW = {RUN: "measured", PROBE: "probed on one device, it never ran", ESTIMATE: "predicted, nothing ran"}


def answer(run: RunData) -> Section:
    """Return the section that stands first."""
    blocks: list[Block] = [Text(note, warns=True) for note in run.notes]
    best = run.best
    if best is None:
        blocks += [Text(_no_best(run), warns=True), *_failures(run)]
    else:
        blocks += [Facts(tuple(_facts(run, best))), *_doubts(run, best), *_commands(run)]
    if "engines" in run.result:
        blocks.append(_engines(run))
    if run.result["stopped_because"]:
        blocks.append(Text(f"It ended because {run.result['stopped_because']}."))
    return Section(anchor="answer", title="The answer", blocks=tuple(blocks))


def gain_cell(run: RunData, gain: float | None) -> Cell:
    """Return a gain as a cell: more of a rate, or less of a latency."""
    if gain is None:
        return Cell("-")
    mark = "" if run.fidelity == RUN else "~"
    text = serving_text.gain_text(run.objective, gain) if run.serves else f"{gain:+.1%} tokens/s"
    return Cell(mark + text, gain)


def _facts(run: RunData, best: Mapping[str, Any]) -> Iterator[tuple[str, Cell]]:
    yield "Best configuration", Cell(configuration(best))
    measured, mark = best["measured"], "" if run.fidelity == RUN else "~"
    figure = run.figure(best) if measured else run.predicted(best)
    yield "Speed", Cell(f"{mark}{objective_text(run, figure)}", figure)
    yield "Gain over the baseline", _gain(run, best)
    for name, low, high in _intervals(run, best):
        yield name, Cell(f"{shown(low)} to {shown(high)}")
    gains = run.result.get("gains") or []
    if len(gains) > 1:
        told = f"{_share(run, min(gains))} to {_share(run, max(gains))} in {len(gains)} rounds; the least is told"
        yield "Uncertainty of the gain", Cell(told)
    elif gains and best["measured"]:
        yield "Uncertainty of the gain", Cell("one round only: not repeated")
    if not run.serves and measured:
        step = measured["step_time_s"]
        text = f"{mark}{shown(step['median'])} s, spread {shown(step['spread'])} s over {step['n']} steps"
        yield "Step", Cell(text, float(step["median"]))
    for each in lookup(run.result, "noise.medians") or []:
        if each["trial"] == best["number"]:
            middle = each[run.objective]
            yield "Median of its runs", Cell(objective_text(run, middle), middle)
    used = (measured or {}).get("device_used_gib", lookup(best["predicted"], "memory.device_used_gib"))
    if used is not None:
        known = "" if measured and "device_used_gib" in measured else "~"
        capacity = lookup(best["predicted"], "memory.capacity_gib")
        yield "Memory in use on the device", Cell(f"{known}{shown(used)} GiB" + _of(capacity), used)
    if run.result.get("limits"):
        yield "Limits that it keeps", Cell(serving_text.limits_text(run.result["limits"]))
    yield "On", Cell(f"{run.result['devices']} x {run.result['chip']}")
    yield "Told by", Cell(f"{HOW[run.fidelity]}: trial {best['number']}", None, f"#trial-{best['number']}")


def _of(capacity: float | None) -> str:
    return "" if capacity is None else f" of {shown(capacity)} GiB"


def _intervals(run: RunData, best: Mapping[str, Any]) -> Iterator[tuple[str, float, float]]:
    if best["measured"] and run.fidelity == PROBE:
        step = best["measured"]["step_time_s"]
        if step.get("low") and step.get("high"):
            yield "Step, 80% interval, s", step["low"], step["high"]
    elif not best["measured"]:
        low, high = run.predicted(best, "low"), run.predicted(best, "high")
        if low is not None and high is not None:
            yield f"80% interval, {run.unit}", low, high


def _gain(run: RunData, best: Mapping[str, Any]) -> Cell:
    baseline, gain = run.baseline, run.result["gain"]
    if baseline is None:
        return Cell("unknown: the baseline never ran")
    if gain is None:
        return Cell(f"unknown: the baseline ({configuration(baseline)}) is {baseline['state']}")
    if best["candidate"] == baseline["candidate"]:
        return Cell("it is the baseline: nothing that was tried is better", gain)
    told = gain_cell(run, gain)
    return Cell(f"{told.text} against {configuration(baseline)}", gain)


def _share(run: RunData, gain: float) -> str:
    return serving_text.gain_text(run.objective, gain).split()[0] if run.serves else f"{gain:+.1%}"


def _doubts(run: RunData, best: Mapping[str, Any]) -> Iterator[Block]:
    """Yield what a reader must know before trusting the answer."""
    noise, gains = run.result.get("noise") or {}, run.result.get("gains") or []
    if len(gains) > 1 and min(gains) <= 0 and best["candidate"] != (run.baseline or best)["candidate"]:
        yield Text(
            "The machine was not quiet: in one round the baseline was as fast, so no gain is proved.", warns=True
        )
    if noise.get("not_told_apart"):
        numbers = ", ".join(str(number) for number in noise["not_told_apart"])
        yield Text(f"Its runs do not tell it apart from trial {numbers}: they may be as fast.")
    if noise.get("drifted") and noise.get("drift") is not None:
        how = "faster" if noise["drift"] > 0 else "slower"
        told = f"the baseline's last run was {abs(noise['drift']):.1%} {how} than its first"
        yield Text(f"The machine changed: {told}. Figures of trials far apart may differ by as much.", warns=True)
    fastest = run.result.get("fastest")
    if run.result.get("limits") and fastest is not None and fastest != best["number"]:
        yield Text(f"Trial {fastest} is faster, but it does not keep the limits.")
    rounds = [[f"round {place + 1}", gain_cell(run, gain)] for place, gain in enumerate(gains)]
    if len(rounds) > 1:
        yield table("Gain over the baseline in each round", ["round", "gain"], rounds)


def _commands(run: RunData) -> Iterator[Block]:
    script = text_file(run.folder / "best.sh", run.secrets)
    if "this cannot be started as it stands" in script:
        yield Code("Why it cannot be started from here (best.sh)", script)
        return
    yield Code("Start it", f"flag run {shlex.quote(run.called)}")
    if script:
        yield Code("The same without flagcore's command (best.sh)", script)


def _no_best(run: RunData) -> str:
    trials = run.trials
    if not trials:
        return "No trial has ended, so there is no answer."
    limits = run.result.get("limits")
    if limits and any(trial["measured"] for trial in trials):
        near = run.nearest
        told = (
            f" The nearest is trial {near['number']} ({configuration(near)}): {run.why_broken(near)}." if near else ""
        )
        return f"None of {len(trials)} trials kept {serving_text.limits_text(limits)}.{told}"
    kind = "probe" if run.fidelity == PROBE else "trial"
    return f"None of {len(trials)} {kind}s gave a measurement, so there is no best configuration."


def _failures(run: RunData) -> Iterator[Block]:
    rows = []
    for trial in run.trials:
        why = run.why_broken(trial) or trial["reason"]
        rows.append([Cell(name_of(run, trial), None, f"#trial-{trial['number']}"), trial["state"], why])
    if rows:
        yield table("Why", ["trial", "state", "reason"], rows)


def _engines(run: RunData) -> Block:
    rows = []
    for engine, data in run.result["engines"].items():
        best, link = data.get("best"), f"{engine}/report.html" if "error" not in data else ""
        figure = None
        if best and best["measured"]:
            seconds = float(best["measured"]["step_time_s"]["median"])
            figure = 1.0 / seconds if is_rate(run.objective) else seconds
        rows.append([Cell(engine, None, link), figure, data.get("error") or data.get("stopped_because")])
    return table("Engines that were tuned", ["engine", run.unit, "it ended because"], rows)
