"""The summary: the best configuration, its speedup with the uncertainty, and the command that starts it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from flagcore.domain.objective import figure_name, is_rate, objective_value, seconds
from flagcore.domain.price import DAY
from flagcore.domain.trial import ESTIMATE, RUN
from flagcore.i18n import _, ngettext
from flagcore.report.formats import lookup, shown
from flagcore.report.names import NAMES
from flagcore.report.page.blocks import Block, Cell, Code, Facts, Section, Text, cell, table
from flagcore.report.page.run import (
    Record,
    RunData,
    configuration,
    json_file,
    number,
    objective_text,
    points_of,
    text_file,
    trial_cell,
)
from flagcore.report.text import (
    at_load,
    cold_start_text,
    drift_text,
    duration_text,
    figures_text,
    gain_text,
    limits_text,
    load_text,
    scaled_text,
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
        blocks += [Facts(tuple(_facts(run, best))), *_uncertainty_notes(run, best), *_commands(run)]
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


def gain_cell(run: RunData, gain: float | None) -> Cell:
    """Return a speedup as a cell: the increase of a rate, or the decrease of a latency."""
    if gain is None:
        return Cell("-")
    mark = "" if run.fidelity == RUN else "~"
    return Cell(mark + gain_text(run.objective, gain), gain)


def _facts(run: RunData, best: Record) -> Iterator[tuple[str, Cell]]:
    yield _(NAMES["best"][run.fidelity], hardware=run.hardware), Cell(configuration(run, best))
    measured, mark = best["measured"] or {}, "" if run.fidelity == RUN else "~"
    figure = run.figure(best) if measured else run.predicted(best)
    speed = at_load(objective_text(run, figure), _load_of_best(run, best))
    yield _("Speed"), Cell(f"{mark}{speed}", figure)
    if run.serves and measured:
        yield _("Also measured"), Cell(figures_text(measured["figures"], run.objective))
    yield _("Speedup over the baseline"), _gain(run, best)
    gains = run.result.get("gains") or []
    if len(gains) > 1:
        rounds = ", ".join(gain_text(run.objective, each).split()[0] for each in gains)
        yield (
            _("Uncertainty of the speedup"),
            Cell(_("lowest of {count} rounds: {rounds}", count=len(gains), rounds=rounds)),
        )
    elif gains and measured:
        yield _("Uncertainty of the speedup"), Cell(_("unknown: not repeated"))
    if not run.serves:
        yield _("Step time"), _step(best, mark)
    elif not measured:
        low, high = (objective_text(run, run.predicted(best, bound)) for bound in ("low", "high"))
        yield _("80% interval"), Cell(_("{low} to {high}", low=low, high=high))
    for each in lookup(run.result, "noise.medians") or []:
        if each["trial"] == best["number"]:
            median = each[run.objective]
            yield _("Median of its runs"), Cell(objective_text(run, median), median)
    used = measured.get("device_used_gib", lookup(best["predicted"], "memory.device_used_gib"))
    if used is not None:
        approximate = "" if "device_used_gib" in measured else "~"
        capacity = lookup(best["predicted"], "memory.capacity_gib")
        limit = "" if capacity is None else f" / {shown(capacity)} GiB"
        yield _("Device memory in use"), Cell(f"{approximate}{shown(used)} GiB{limit}", used)
    yield from _cost(best, mark if measured else "~")
    if run.limits:
        yield _("Within latency limits"), Cell(limits_text(run.limits))
        if measured:
            yield _("Without the limits"), Cell(_fastest_without_limits(run, best))
    source = f"{_(NAMES['trials_made'][run.fidelity])}, {_('trial')} {best['number']}"
    yield _("Source"), Cell(source, None, f"#trial-{best['number']}")


def _cost(best: Record, mark: str) -> Iterator[tuple[str, Cell]]:
    """Yield the time and the cost of the planned job, and the cost and energy of tokens, as far as they are known."""
    cost = best.get("cost") or {}
    if days := cost.get("planned_days"):
        text = _("{days} days", days=shown(days)) if days >= MIN_DAYS else duration_text(days * DAY)
        price = cost.get("planned_cost")
        total = "" if price is None else ", " + _("cost {cost}", cost=shown(price))
        yield _("Planned steps"), Cell(f"{mark}{text}{total}", days)
    if (price := cost.get("cost_per_million_tokens")) is not None:
        yield _("Cost per million tokens"), Cell(f"{mark}{shown(price)}", price)
    if (joules := lookup(best, "measured.figures.joules_per_output_token")) is not None:
        yield _("Joules per output token"), Cell(shown(joules), joules)


def _step(best: Record, mark: str) -> Cell:
    """Return the step time of the best with its spread, or its 80% interval."""
    step = lookup(best, "measured.step_time_s") or best["predicted"]["step_time_s"]
    value = step.get("median", step.get("value"))
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
    return Cell(_("{gain} (baseline: {baseline})", gain=gain_cell(run, gain).text, baseline=values), gain)


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
    noise, gains = run.result.get("noise") or {}, run.result.get("gains") or []
    if len(gains) > 1 and min(gains) <= 0 and best["candidate"] != (run.baseline or best)["candidate"]:
        text = _("The speedup is not significant: the machine was noisy, and the baseline was as fast in one round.")
        yield Text(text, warning=True)
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


def _commands(run: RunData) -> Iterator[Block]:
    script = text_file(run.folder / "best.sh", run.secrets)
    if json_file(run.folder / "best" / "launch.json").get("missing"):
        yield Code(_("Command of the best configuration, for you to complete (best.sh)"), script)
    elif (run.folder / "best" / "launch.json").exists():
        yield Code(_("Start command"), f"flag run {shlex.quote(run.called)}")
        yield Code(_("Start script without flagcore (best.sh)"), script)
    elif script:
        yield Code(_("Why it cannot be started here (best.sh)"), script)


def _failures(run: RunData) -> Iterator[Block]:
    rows = [
        [trial_cell(run, trial), state_name(trial["state"]), run.broken_limits(trial) or trial["reason"]]
        for trial in run.trials
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
