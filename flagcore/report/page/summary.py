"""The summary: the best configuration, its speedup and uncertainty, and how to start it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from flagcore.domain.objective import is_rate
from flagcore.domain.trial import PROBE, RUN
from flagcore.i18n import _, ngettext
from flagcore.report import serving_text
from flagcore.report.formats import lookup, shown
from flagcore.report.page.blocks import Block, Cell, Code, Facts, Section, Text, table
from flagcore.report.page.run import HOW, RunData, configuration, name_of, objective_text, text_file
from flagcore.report.text import state_name


def summary(run: RunData) -> Section:
    """Return the first section."""
    blocks: list[Block] = [Text(note, warning=True) for note in run.notes]
    best = run.best
    if best is None:
        blocks += [Text(_no_best(run), warning=True), *_failures(run)]
    else:
        blocks += [Facts(tuple(_facts(run, best))), *_doubts(run, best), *_commands(run)]
    if "engines" in run.result:
        blocks.append(_engines(run))
    if run.result["stopped_because"]:
        blocks.append(Text(_("Stopped: {reason}.", reason=_(run.result["stopped_because"]))))
    return Section(anchor="summary", title=_("Summary"), blocks=tuple(blocks))


def gain_cell(run: RunData, gain: float | None) -> Cell:
    """Return a speedup as a cell: the increase of a rate, or the decrease of a latency."""
    if gain is None:
        return Cell("-")
    mark = "" if run.fidelity == RUN else "~"
    return Cell(mark + serving_text.gain_text(run.objective, gain), gain)


def _facts(run: RunData, best: Mapping[str, Any]) -> Iterator[tuple[str, Cell]]:
    yield _("Best configuration"), Cell(configuration(run, best))
    measured, mark = best["measured"], "" if run.fidelity == RUN else "~"
    figure = run.figure(best) if measured else run.predicted(best)
    yield _("Speed"), Cell(f"{mark}{objective_text(run, figure)}", figure)
    yield _("Speedup over the baseline"), _gain(run, best)
    for name, low, high in _intervals(run, best):
        yield name, Cell(_("{low} to {high}", low=shown(low), high=shown(high)))
    gains = run.result.get("gains") or []
    if len(gains) > 1:
        least, most = (serving_text.gain_text(run.objective, each).split()[0] for each in (min(gains), max(gains)))
        text = _("{low} to {high}; lowest of {count} rounds shown", low=least, high=most, count=len(gains))
        yield _("Uncertainty of the speedup"), Cell(text)
    elif gains and best["measured"]:
        yield _("Uncertainty of the speedup"), Cell(_("unknown: not repeated"))
    if not run.serves and measured:
        step = measured["step_time_s"]
        text = _(
            "{seconds} s, spread {spread} s over {count} steps",
            seconds=mark + shown(step["median"]),
            spread=shown(step["spread"]),
            count=step["n"],
        )
        yield _("Step time"), Cell(text, float(step["median"]))
    for each in lookup(run.result, "noise.medians") or []:
        if each["trial"] == best["number"]:
            middle = each[run.objective]
            yield _("Median of its runs"), Cell(objective_text(run, middle), middle)
    used = (measured or {}).get("device_used_gib", lookup(best["predicted"], "memory.device_used_gib"))
    if used is not None:
        approximate = "" if measured and "device_used_gib" in measured else "~"
        capacity = lookup(best["predicted"], "memory.capacity_gib")
        limit = "" if capacity is None else f" / {shown(capacity)} GiB"
        yield _("Device memory in use"), Cell(f"{approximate}{shown(used)} GiB{limit}", used)
    if run.result.get("limits"):
        yield _("Within latency limits"), Cell(serving_text.limits_text(run.result["limits"]))
    yield _("Hardware"), Cell(f"{run.result['devices']} x {run.result['chip']}")
    source = f"{_(HOW[run.fidelity])}, {_('trial')} {best['number']}"
    yield _("Source"), Cell(source, None, f"#trial-{best['number']}")


def _intervals(run: RunData, best: Mapping[str, Any]) -> Iterator[tuple[str, float, float]]:
    if best["measured"] and run.fidelity == PROBE:
        step = best["measured"]["step_time_s"]
        if step.get("low") and step.get("high"):
            yield _("Step time, 80% interval, s"), step["low"], step["high"]
    elif not best["measured"]:
        low, high = run.predicted(best, "low"), run.predicted(best, "high")
        if low is not None and high is not None:
            yield _("80% interval, {unit}", unit=run.unit), low, high


def _gain(run: RunData, best: Mapping[str, Any]) -> Cell:
    baseline, gain = run.baseline, run.result["gain"]
    if baseline is None:
        return Cell(_("unknown: the baseline was not run"))
    if gain is None:
        state = state_name(baseline["state"])
        return Cell(
            _("unknown: the baseline ({baseline}) is {state}", baseline=configuration(run, baseline), state=state)
        )
    if best["candidate"] == baseline["candidate"]:
        return Cell(_("this is the baseline: no trial was faster"), gain)
    text = gain_cell(run, gain).text
    return Cell(_("{gain} vs baseline: {baseline}", gain=text, baseline=configuration(run, baseline)), gain)


def _doubts(run: RunData, best: Mapping[str, Any]) -> Iterator[Block]:
    noise, gains = run.result.get("noise") or {}, run.result.get("gains") or []
    if len(gains) > 1 and min(gains) <= 0 and best["candidate"] != (run.baseline or best)["candidate"]:
        text = _("The speedup is not significant: the machine was noisy, and the baseline was as fast in one round.")
        yield Text(text, warning=True)
    if noise.get("not_told_apart"):
        numbers = ", ".join(str(number) for number in noise["not_told_apart"])
        yield Text(_("The best is not significantly faster than trial {numbers}.", numbers=numbers))
    if noise.get("drifted") and noise.get("drift") is not None:
        text = _(
            "Machine drift: the speed of the baseline changed by {drift:+.1%} between its first and last run. "
            "Results of trials that are far apart in time may differ by as much.",
            drift=noise["drift"],
        )
        yield Text(text, warning=True)
    fastest = run.result.get("fastest")
    if run.result.get("limits") and fastest is not None and fastest != best["number"]:
        yield Text(_("Trial {number} is faster, but not within the latency limits.", number=fastest))
    rounds = [[str(place), gain_cell(run, gain)] for place, gain in enumerate(gains, start=1)]
    if len(rounds) > 1:
        yield table(_("Speedup over the baseline per round"), [_("round"), _("speedup")], rounds)


def _commands(run: RunData) -> Iterator[Block]:
    script = text_file(run.folder / "best.sh", run.secrets)
    if "this cannot be started as it stands" in script:
        yield Code(_("Why it cannot be started here (best.sh)"), script)
        return
    yield Code(_("Start command"), f"flag run {shlex.quote(run.called)}")
    if script:
        yield Code(_("Start script without flagcore (best.sh)"), script)


def _no_best(run: RunData) -> str:
    trials = run.trials
    if not trials:
        return _("No trial has finished.")
    limits = run.result.get("limits")
    if limits and any(trial["measured"] for trial in trials):
        text = ngettext(
            "{count} trial, not within the limits {limits}",
            "{count} trials, none within the limits {limits}",
            len(trials),
            limits=serving_text.limits_text(limits),
        )
        near = run.nearest
        if near is None:
            return f"{text}."
        number, values, reason = near["number"], configuration(run, near), run.why_broken(near)
        nearest = _("nearest: trial {number} ({values}): {reason}", number=number, values=values, reason=reason)
        return f"{text}; {nearest}."
    return ngettext("{count} trial, not measured.", "{count} trials, none measured.", len(trials))


def _failures(run: RunData) -> Iterator[Block]:
    rows = []
    for trial in run.trials:
        why = run.why_broken(trial) or trial["reason"]
        rows.append([Cell(name_of(run, trial), None, f"#trial-{trial['number']}"), state_name(trial["state"]), why])
    if rows:
        yield table(_("Reasons"), [_("trial"), _("state"), _("reason")], rows)


def _engines(run: RunData) -> Block:
    rows = []
    for engine, data in run.result["engines"].items():
        best, link = data.get("best"), f"{engine}/report.html" if "error" not in data else ""
        figure = None
        if best and best["measured"]:
            seconds = float(best["measured"]["step_time_s"]["median"])
            figure = 1.0 / seconds if is_rate(run.objective) else seconds
        rows.append([Cell(engine, None, link), figure, data.get("error") or data.get("stopped_because")])
    return table(_("Tuned engines"), [_("engine"), run.unit, _("stopped")], rows)
