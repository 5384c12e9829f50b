"""The summary: the best configuration, its speedup with the uncertainty, and the command that starts it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from flagcore.domain.objective import figure_name, is_rate, objective_value, seconds
from flagcore.domain.price import DAY, ENERGY, TDP
from flagcore.domain.trial import ESTIMATE, RUN
from flagcore.i18n import _, ngettext
from flagcore.report.formats import energy_text, lookup, mass_text, shown, size_text
from flagcore.report.names import NAMES
from flagcore.report.page.blocks import Block, Cell, Code, Collapsed, Facts, Section, Text, cell, table
from flagcore.report.page.configurations import configurations, figures_of, final_runs, median_s, why
from flagcore.report.page.run import (
    Record,
    RunData,
    configuration,
    json_file,
    listed,
    number,
    objective_text,
    points_of,
    seconds_of,
    trial_cell,
)
from flagcore.report.text import (
    at_load,
    cold_start_text,
    drift_text,
    duration_text,
    figures_text,
    limits_text,
    load_text,
    scaled_text,
    speedup_of,
    speedup_text,
    state_name,
    stop_reason,
)

MIN_DAYS = 2
"""Shorter jobs are shown in hours, minutes or seconds."""
MAX_RIVALS = 5
"""Maximum number of listed candidates that do not differ significantly from the best."""


def summary(run: RunData) -> Section:
    """Return the section of the summary."""
    blocks: list[Block] = [Text(note, warning=True) for note in run.notes]
    best = run.best
    if best is None:
        blocks += [Text(no_best(run) + ".", warning=True), *_failures(run)]
    else:
        blocks.append(Facts(tuple(_answer(run, best)), lead=True))
        blocks += [Text(_("Why: {reason}", reason=reason)) for reason in filter(None, [why(run)])]
        blocks += [*_uncertainty_notes(run, best), *_commands(run, best)]
        blocks += [each for each in [configurations(run)] if each]
        blocks.append(Facts(tuple(_facts(run, best))))
    if "engines" in run.result:
        blocks.append(_engines(run))
    for line, numbers in (run.result.get("slow_devices") or {}).items():
        trials = ", ".join(map(str, numbers))
        blocks.append(
            Text(_("Slow device, which delays all other devices: {line} (trial {trials}).", line=line, trials=trials))
        )
    blocks += [Text(_("Note: {note}.", note=note)) for note in run.result.get("notes") or ()]
    return Section(anchor="summary", title=_("Summary"), blocks=(*blocks, *stopped(run)))


def stopped(run: RunData) -> list[Text]:
    """Return why the run stopped; empty while it is in progress."""
    because = stop_reason(run.result)
    return [Text(_("Stopped: {reason}.", reason=because))] if because else []


def no_best(run: RunData) -> str:
    """Return why there is no best, with the trial nearest to the limits."""
    trials, closest = run.trials, run.nearest
    if not trials:
        return _("No trial has finished")
    if not run.limits or not any(trial["measured"] for trial in trials):
        return ngettext("{count} trial, not measured", "{count} trials, none measured", len(trials))
    text = ngettext(
        "{count} trial, not within the limits {limits}",
        "{count} trials, none within the limits {limits}",
        len(trials),
        limits=limits_text(run.limits),
    )
    if closest is None:
        return text
    values, reason = configuration(run, closest), run.broken_limits(closest)
    nearest = _("nearest: trial {number} ({values}): {reason}", number=closest["number"], values=values, reason=reason)
    return f"{text}; {nearest}"


def _answer(run: RunData, best: Record) -> Iterator[tuple[str, Cell]]:
    """Yield what to run, the gain with its range, the speed and the cost."""
    measured, mark = best["measured"] or {}, "" if run.fidelity == RUN else "~"
    yield _(NAMES["best"][run.fidelity], hardware=run.hardware), Cell(configuration(run, best))
    yield _("Speedup over the baseline"), _gain(run, best)
    yield _("Speed"), _speed(run, best)
    yield from _cost(best, mark if measured else "~")


def _speed(run: RunData, best: Record) -> Cell:
    """Return the median objective of the best with the range of its runs, or its 80% interval if it was not run."""
    mark = "" if run.fidelity == RUN else "~"
    middle, low, high = figures_of(run, best) or (run.figure(best) or run.predicted(best), None, None)
    text = mark + at_load(objective_text(run, middle), _load_of_best(run, best))
    count = len(final_runs(run, best))
    if None in (low, high):
        return Cell(text, middle)
    note = ""
    if run.fidelity == ESTIMATE:
        note = _("(80%: {low} to {high})", low=shown(low), high=shown(high))
    elif count > 1:
        note = _("({count} runs: {low} to {high})", count=count, low=shown(low), high=shown(high))
    return Cell(text, middle, note=note)


def _facts(run: RunData, best: Record) -> Iterator[tuple[str, Cell]]:
    measured, mark = best["measured"] or {}, "" if run.fidelity == RUN else "~"
    if run.serves and measured:
        yield _("Also measured"), Cell(figures_text(measured["figures"], run.objective))
    if not run.serves:
        yield _("Step time"), _step(run, best, mark)
    used = measured.get("device_used_gib", lookup(best["predicted"], "memory.device_used_gib"))
    if used is not None:
        approximate = "" if "device_used_gib" in measured else "~"
        capacity = lookup(best["predicted"], "memory.capacity_gib")
        limit = "" if capacity is None else f" / {size_text(capacity)}"
        yield _("Device memory in use"), Cell(f"{approximate}{size_text(used)}{limit}", used)
    if run.limits:
        yield _("Within latency limits"), Cell(limits_text(run.limits))
        if measured:
            yield _("Without the limits"), Cell(_fastest_without_limits(run, best))
    source = f"{_(NAMES['trials_made'][run.fidelity])}, {_('trial')} {best['number']}"
    yield _("Source"), Cell(source, None, f"#trial-{best['number']}")


def _cost(best: Record, mark: str) -> Iterator[tuple[str, Cell]]:
    """Yield time, cost, energy and carbon of the planned job and of tokens, as far as they are known."""
    cost = best.get("cost") or {}
    source = _("(by the TDP of the devices)") if cost.get("energy_source") == TDP else _("(by telemetry)")
    if days := cost.get("planned_days"):
        text = _("{days} days", days=shown(days)) if days >= MIN_DAYS else duration_text(days * DAY)
        price = cost.get("planned_cost")
        total = "" if price is None else ", " + _("cost {cost}", cost=shown(price))
        yield _("Planned steps"), Cell(f"{mark}{text}{total}", days)
    if (price := cost.get("cost_per_million_tokens")) is not None:
        yield _("Cost per million tokens"), Cell(f"{mark}{shown(price)}", price)
    for name, key in (
        (_("Energy per million tokens"), "million_tokens"),
        (_("Energy of the planned steps"), "planned"),
    ):
        energy, carbon = (number(cost.get(each)) for each in ENERGY[key])
        if energy is not None:
            emitted = "" if carbon is None else ", " + _("{mass} of CO2", mass=mass_text(carbon))
            yield name, Cell(f"{mark}{energy_text(energy)}{emitted}", energy, note=source)
    if (joules := lookup(best, "measured.figures.joules_per_output_token")) is not None:
        yield _("Joules per output token"), Cell(shown(joules), joules)


def _step(run: RunData, best: Record, mark: str) -> Cell:
    """Return the median step time of the best with the range of its runs, its spread, or its 80% interval."""
    step = lookup(best, "measured.step_time_s") or best["predicted"]["step_time_s"]
    value = step.get("median", step.get("value"))
    runs = [seconds_of(each) or 0.0 for each in final_runs(run, best)]
    if len(runs) > 1 and "spread" in step and step.keys().isdisjoint(("scaled_from", "modelled")):
        low, high = shown(min(runs)), shown(max(runs))
        note = _("({count} runs: {low} to {high})", count=len(runs), low=low, high=high)
        return Cell(f"{shown(median_s(run, best))} s", median_s(run, best), note=note)
    text = f"{mark}{shown(value)} s"
    if step.get("low") and step.get("high"):
        text += " " + _("(80%: {low} to {high} s)", low=shown(step["low"]), high=shown(step["high"]))
    if step.get("scaled_from") is not None:
        text += ", " + scaled_text(
            step["scaled_from"], *(lookup(best, f"shortened.{key}") or 0 for key in ("nodes", "of_nodes"))
        )
    elif step.get("modelled") is not None:
        text += ", " + _("~{seconds} s of it modelled communication and waiting", seconds=shown(step["modelled"]))
    elif "spread" in step:
        text += " " + _("(spread {spread} s over {count} steps)", spread=shown(step["spread"]), count=step["n"])
    return Cell(text, value)


def _gain(run: RunData, best: Record) -> Cell:
    baseline, gain = run.baseline, run.result["gain"]
    if baseline is None:
        return Cell(_("unknown: the baseline was not run"))
    values = configuration(run, baseline)
    if gain is None:
        if baseline["measured"] and baseline["state"] != "stopped":
            return Cell(_("unknown: no whole steps of both were measured (baseline: {baseline})", baseline=values))
        does_not_fit = run.fidelity == ESTIMATE and lookup(baseline["predicted"], "memory.fits") is False
        state_text = _("predicted not to fit") if does_not_fit else state_name(baseline["state"])
        return Cell(_("unknown: the baseline ({baseline}) is {state}", baseline=values, state=state_text))
    if best["candidate"] == baseline["candidate"]:
        is_predicted = run.fidelity == ESTIMATE
        text = _("this is the baseline: no candidate is predicted to be faster")
        return Cell(text if is_predicted else _("this is the baseline: no trial was faster"), gain)
    speedup = speedup_of(run.result)
    headline, note = speedup_text(run.result)
    over = _("over {baseline}", baseline=values)
    return Cell(headline, speedup.median if speedup else None, note=f"{note} {over}" if note else over)


def _load_of_best(run: RunData, best: Record) -> str:
    """Return the load at which the best was rated; empty for training, and if it has one load point."""
    name, points = figure_name(run.objective), points_of(best)
    best_figures = lookup(best, f"measured.figures.{name}")
    loads = [load_text(point) for point in points if lookup(point, name) == best_figures]
    return loads[0] if len(points) > 1 and loads else ""


def _fastest_without_limits(run: RunData, best: Record) -> str:
    """Return the figures of the fastest load point of all trials, and the limits that it exceeds."""
    name = figure_name(run.objective)
    points_by_speed = [
        (seconds(run.objective, float(value)), trial, point)
        for trial in run.trials
        for point in points_of(trial)
        if (value := lookup(point, name))
    ]
    best_s = float(lookup(best, "measured.step_time_s.median"))
    step, trial, point = min(points_by_speed, key=lambda each: each[0], default=(best_s, best, {}))
    if best_s <= step:
        return _("no trial was better")
    exceeded = [
        f"{key} = {shown(lookup(point, key))} s" for key, most in run.limits.items() if (lookup(point, key) or 0) > most
    ]
    load = load_text(point) if len(points_of(best)) > 1 else ""
    return _(
        "trial {number} reached {value} ({reason})",
        number=trial["number"],
        value=at_load(objective_text(run, objective_value(run.objective, step)), load),
        reason=", ".join(exceeded) or _("exceeded the limits when repeated"),
    )


def _uncertainty_notes(run: RunData, best: Record) -> Iterator[Block]:
    noise = run.result.get("noise") or {}
    numbers = noise.get("not_told_apart") or ()
    rivals = [
        f"{_('trial')} {trial['number']} ({configuration(run, trial)})"
        for trial in run.trials
        if trial["number"] in numbers
    ]
    if rivals:
        remainder = [_("and {count} more", count=len(rivals) - MAX_RIVALS)] if len(rivals) > MAX_RIVALS else []
        names = "; ".join([*rivals[:MAX_RIVALS], *remainder])
        yield Text(_("The best is not significantly faster than {trials}.", trials=names))
    for text in filter(None, (drift_text(noise), cold_start_text(noise))):
        yield Text(text, warning=True)
    fastest = run.result.get("fastest")
    if run.limits and fastest is not None and fastest != best["number"]:
        yield Text(_("Trial {number} is faster, but not within the latency limits.", number=fastest))


def _commands(run: RunData, best: Record) -> Iterator[Block]:
    script, launch = run.text_of(run.folder / "best.sh"), run.folder / "best" / "launch.json"
    if json_file(launch).get("missing"):
        yield Code(_("Command of the best configuration, for you to complete (best.sh)"), script, copied=True)
    elif launch.exists():
        here = run.called == "."
        caption = _("Start command, in the folder of the run") if here else _("Start command")
        yield Code(caption, f"flag run {shlex.quote(run.called)}", copied=True)
    elif script:
        yield Code(_("Why it cannot be started here (best.sh)"), script)
    if flags := _flags(run, best):
        yield Code(_("Flags of the engine"), shlex.join(flags), copied=True)
    if script and launch.exists() and not json_file(launch).get("missing"):
        title = _("Start script without flagcore (best.sh)")
        yield Collapsed(anchor="script", title=title, blocks=(Code(title, script),))


def _flags(run: RunData, best: Record) -> list[str]:
    """Return the flags of the engine that set the knobs of the best; empty if they do not set all of them."""
    flags: list[str] = []
    for name, value in best["candidate"].items():
        if knob := run.knobs.get(name):
            effect = knob.effect(value)
            flags += [*knob.arguments(value), *(effect.flags if effect else ())]
            is_default = value is None or value == knob.neutral
            if not (knob.flags or effect or knob.layout or knob.kind == "flag" or is_default):
                return []
    return flags


def _failures(run: RunData) -> Iterator[Block]:
    shown_numbers = listed(run)
    rows = [
        [trial_cell(run, trial), state_name(trial["state"]), run.broken_limits(trial) or trial["reason"]]
        for trial in run.trials
        if trial["number"] in shown_numbers
    ]
    if rows:
        yield table(_("Reasons"), [_("trial"), _("state"), _("reason")], rows)


def _engines(run: RunData) -> Block:
    rows = []
    for engine, data in run.result["engines"].items():
        link = f"{engine}/report.html" if "error" not in data else ""
        step = number(lookup(data, "best.measured.step_time_s.median"))
        figure = cell(None) if step is None else cell(1.0 / step if is_rate(run.objective) else step)
        rows.append([Cell(engine, None, link), figure, data.get("error") or stop_reason(data)])
    return table(_("Tuned engines"), [_("engine"), run.unit, _("stopped")], rows)
