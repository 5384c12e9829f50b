"""The summary: the best configuration, its speedup with the uncertainty, and the command that starts it."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from flagcore.domain.objective import figure_name, is_rate, objective_value, seconds
from flagcore.domain.plan import DAY, TDP
from flagcore.domain.trial import ESTIMATE, RUN, TrialState
from flagcore.i18n import N_, _, ngettext
from flagcore.report.formats import NAMES, energy_text, lookup, shown, size_text
from flagcore.report.page.blocks import Block, Cell, Code, Collapsed, Facts, Section, Text, cell, table
from flagcore.report.page.configurations import configurations, figures_of, final_runs, median_s, why
from flagcore.report.page.run import (
    RunData,
    configuration,
    json_file,
    listed,
    objective_text,
    trial_cell,
)
from flagcore.report.result import Interval, RunResult, StepTime, TrialResult, number
from flagcore.report.text import (
    at_load,
    duration_text,
    figures_text,
    gain_text,
    limits_text,
    load_text,
    scaled_text,
    state_name,
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
        blocks += [*(Text(line, warning=True) for line in f"{no_best(run)}.".splitlines()), *_failures(run)]
    else:
        blocks.append(Facts(tuple(_answer(run, best)), lead=True))
        blocks += [Text(_("Why: {reason}", reason=reason)) for reason in filter(None, [why(run)])]
        blocks += [*_uncertainty_notes(run, best), *_commands(run, best)]
        blocks += [each for each in [configurations(run)] if each]
        blocks.append(Facts(tuple(_facts(run, best))))
    if run.result.engines is not None:
        blocks.append(_engines(run, run.result.engines))
    for line, numbers in run.result.slow_devices.items():
        trials = ", ".join(map(str, numbers))
        blocks.append(
            Text(_("Slow device, which delays all other devices: {line} (trial {trials}).", line=line, trials=trials))
        )
    blocks += [Text(_("Note: {note}.", note=note)) for note in run.result.notes]
    return Section(anchor="summary", title=_("Summary"), blocks=(*blocks, *stopped(run)))


def stopped(run: RunData) -> list[Text]:
    """Return why the run stopped; empty while it is in progress, and without a best, where `no_best` says it."""
    because = run.result.stop_reason if run.best else ""
    return [Text(_("Stopped: {reason}.", reason=because))] if because else []


def no_best(run: RunData) -> str:
    """Return why there is no best: the trial nearest to the limits, and why the run stopped.

    Without a measurement, the most frequent failure and the command that continues follow.
    """
    trials, closest = run.trials, run.nearest
    if not trials:
        text = _("No trial has finished")
    elif run.result.is_unmeasured:
        text = ngettext("{count} trial, not measured", "{count} trials, none measured", len(trials))
    else:
        text = ngettext(
            "{count} trial, not within the limits {limits}",
            "{count} trials, none within the limits {limits}",
            len(trials),
            limits=limits_text(run.limits),
        )
    nearest, further = "", _ways_on(run) if run.result.is_unmeasured else ()
    if closest is not None:
        values, reason = configuration(run, closest), run.broken_limits(closest)
        text_of_trial = N_("nearest: trial {number} ({values}): {reason}")
        nearest = _(text_of_trial, number=closest.number, values=values, reason=reason)
    return "; ".join(filter(None, [text, nearest, run.result.stop_reason, *further]))


def _ways_on(run: RunData) -> Iterator[str]:
    """Yield the most frequent failure with its logs, unless it is why the run stopped, and the command that resumes the
    run or starts it again."""
    because = str(run.result.stopped_because)
    failures = [each for each in run.trials if each.state != TrialState.INTERRUPTED.value]
    failures = [each for each in failures if str(each.reason) not in because]
    if failures:
        counts = Counter((each.state, each.reason) for each in failures)
        (state, reason), count = counts.most_common(1)[0]
        log = next(each.log for each in failures if (each.state, each.reason) == (state, reason))
        yield _(
            "{part} of {count} {state}: {reason} (logs in {folder})",
            part=count,
            count=len(run.trials),
            state=state_name(state),
            reason=reason,
            folder=Path(run.called, log).parent,
        )
    command = f"flag tune SPEC --run-dir {shlex.quote(run.called)}"
    if run.result.was_interrupted:
        yield _("`{command}` resumes it", command=command)
    else:
        yield _("when the cause is fixed, `{command}` starts again", command=f"{command} --new")


def _answer(run: RunData, best: TrialResult) -> Iterator[tuple[str, Cell]]:
    """Yield what to run, the gain with its range, the speed and the cost."""
    mark = "" if run.fidelity == RUN else "~"
    yield _(NAMES["best"][run.fidelity], hardware=run.hardware), Cell(configuration(run, best))
    yield _("Speedup over the baseline"), _gain(run, best)
    yield _("Speed"), _speed(run, best)
    yield from _cost(best, mark if best.measured else "~")


def _speed(run: RunData, best: TrialResult) -> Cell:
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


def _facts(run: RunData, best: TrialResult) -> Iterator[tuple[str, Cell]]:
    measured, memory, mark = best.measured, best.predicted.memory, "" if run.fidelity == RUN else "~"
    if run.serves and measured:
        yield _("Also measured"), Cell(figures_text(measured.figures or {}, run.objective))
    if not run.serves:
        yield _("Step time"), _step(run, best, mark)
    own_gib = measured.device_used_gib if measured else None
    used = memory.get("device_used_gib") if own_gib is None else own_gib
    if used is not None:
        approximate, capacity = "~" if own_gib is None else "", memory.get("capacity_gib")
        limit = "" if capacity is None else f" / {size_text(capacity)}"
        yield _("Device memory in use"), Cell(f"{approximate}{size_text(used)}{limit}", used)
    if run.limits:
        yield _("Within latency limits"), Cell(limits_text(run.limits))
        if measured:
            yield _("Without the limits"), Cell(_fastest_without_limits(run, best))
    source = f"{_(NAMES['trials_made'][run.fidelity])}, {_('trial')} {best.number}"
    yield _("Source"), Cell(source, None, f"#trial-{best.number}")


def _cost(best: TrialResult, mark: str) -> Iterator[tuple[str, Cell]]:
    """Yield time, cost and energy of the planned job and of tokens, as far as they are known."""
    cost = best.cost or {}
    source = _("(by the TDP of the devices)") if cost.get("energy_source") == TDP else _("(by telemetry)")
    if days := cost.get("planned_days"):
        text = _("{days} days", days=shown(days)) if days >= MIN_DAYS else duration_text(days * DAY)
        price = cost.get("planned_cost")
        total = "" if price is None else ", " + _("cost {cost}", cost=shown(price))
        yield _("Planned steps"), Cell(f"{mark}{text}{total}", days)
    if (price := cost.get("cost_per_million_tokens")) is not None:
        yield _("Cost per million tokens"), Cell(f"{mark}{shown(price)}", price)
    for name, key in (
        (_("Energy per million tokens"), "energy_kwh_per_million_tokens"),
        (_("Energy of the planned steps"), "planned_energy_kwh"),
    ):
        if (energy := number(cost.get(key))) is not None:
            yield name, Cell(f"{mark}{energy_text(energy)}", energy, note=source)
    if (joules := best.figure("joules_per_output_token")) is not None:
        yield _("Joules per output token"), Cell(shown(joules), joules)


def _step(run: RunData, best: TrialResult, mark: str) -> Cell:
    """Return the median step time of the best with the range of its runs, its spread, or its 80% interval."""
    step = best.measured.step_time_s if best.measured else None
    interval: StepTime | Interval | None = step or best.predicted.interval("step_time_s")
    is_whole = step is not None and step.scaled_from is None and step.modelled is None
    runs = [each.seconds or 0.0 for each in final_runs(run, best)]
    if len(runs) > 1 and is_whole:
        low, high = shown(min(runs)), shown(max(runs))
        note = _("({count} runs: {low} to {high})", count=len(runs), low=low, high=high)
        return Cell(f"{shown(median_s(run, best))} s", median_s(run, best), note=note)
    value = step.median if step else best.predicted.step_s
    text = f"{mark}{shown(value)} s"
    if interval and interval.low and interval.high:
        text += " " + _("(80%: {low} to {high} s)", low=shown(interval.low), high=shown(interval.high))
    if step and step.scaled_from is not None:
        nodes = (int((best.shortened or {}).get(key) or 0) for key in ("nodes", "of_nodes"))
        text += ", " + scaled_text(step.scaled_from, *nodes)
    elif step and step.modelled is not None:
        text += ", " + _("~{seconds} s of it modelled communication and waiting", seconds=shown(step.modelled))
    elif step:
        text += " " + _("(spread {spread} s over {count} steps)", spread=shown(step.spread), count=step.n)
    return Cell(text, value)


def _gain(run: RunData, best: TrialResult) -> Cell:
    baseline, gain = run.baseline, run.result.gain
    if baseline is None:
        return Cell(_("unknown: the baseline was not run"))
    values = configuration(run, baseline)
    if gain is None:
        if baseline.measured and baseline.state != "stopped":
            return Cell(_("unknown: no whole steps of both were measured (baseline: {baseline})", baseline=values))
        does_not_fit = run.fidelity == ESTIMATE and baseline.predicted.memory.get("fits") is False
        state_text = _("predicted not to fit") if does_not_fit else state_name(baseline.state)
        return Cell(_("unknown: the baseline ({baseline}) is {state}", baseline=values, state=state_text))
    if best.candidate == baseline.candidate:
        text = N_("this is the baseline: no trial was faster")
        if run.fidelity == ESTIMATE:
            text = N_("this is the baseline: no candidate is predicted to be faster")
        elif not any(each.measured and each.candidate != baseline.candidate for each in run.trials):
            text = N_("this is the baseline: no other candidate was measured")
        return Cell(_(text), gain)
    speedup = run.result.speedup
    headline, note = _speedup_text(run.result)
    over = _("over {baseline}", baseline=values)
    return Cell(headline, speedup.median if speedup else None, note=f"{note} {over}" if note else over)


def _speedup_text(result: RunResult) -> tuple[str, str]:
    """Return the median speedup of a result, or that it is not significant, and its range; empty if unknown."""
    speedup, objective = result.speedup, result.objective.name
    if speedup is None:
        return "", ""
    mark = "" if result.fidelity == RUN else "~"
    low, high = (mark + gain_text(objective, each).split()[0] for each in (speedup.low, speedup.high))
    note = _("({count} rounds: {low} to {high})", count=speedup.rounds, low=low, high=high)
    if speedup.rounds == 1:
        note = "" if speedup.significant else f"({low})"
    return (mark + gain_text(objective, speedup.median) if speedup.significant else _("no significant gain")), note


def _load_of_best(run: RunData, best: TrialResult) -> str:
    """Return the load at which the best was rated; empty for training, and if it has one load point."""
    name, points = figure_name(run.objective), best.points
    loads = [load_text(point) for point in points if number(lookup(point, name)) == best.figure(name)]
    return loads[0] if len(points) > 1 and loads else ""


def _fastest_without_limits(run: RunData, best: TrialResult) -> str:
    """Return the figures of the fastest load point of all trials, and the limits that it exceeds."""
    name = figure_name(run.objective)
    points_by_speed = [
        (seconds(run.objective, float(value)), trial, point)
        for trial in run.trials
        for point in trial.points
        if (value := lookup(point, name))
    ]
    best_s = best.measured_s or 0.0
    step, trial, point = min(points_by_speed, key=lambda each: each[0], default=(best_s, best, {}))
    if best_s <= step:
        return _("no trial was better")
    exceeded = [
        f"{key} = {shown(lookup(point, key))} s" for key, most in run.limits.items() if (lookup(point, key) or 0) > most
    ]
    load = load_text(point) if len(best.points) > 1 else ""
    return _(
        "trial {number} reached {value} ({reason})",
        number=trial.number,
        value=at_load(objective_text(run, objective_value(run.objective, step)), load),
        reason=", ".join(exceeded) or _("exceeded the limits when repeated"),
    )


def _uncertainty_notes(run: RunData, best: TrialResult) -> Iterator[Block]:
    numbers = run.result.noise.not_told_apart
    rivals = [
        f"{_('trial')} {trial.number} ({configuration(run, trial)})" for trial in run.trials if trial.number in numbers
    ]
    if rivals:
        remainder = [_("and {count} more", count=len(rivals) - MAX_RIVALS)] if len(rivals) > MAX_RIVALS else []
        names = "; ".join([*rivals[:MAX_RIVALS], *remainder])
        yield Text(_("The best is not significantly faster than {trials}.", trials=names))
    yield from (Text(text, warning=True) for text in run.result.noise.warnings)
    fastest = run.result.fastest
    if run.limits and fastest is not None and fastest != best.number:
        yield Text(_("Trial {number} is faster, but not within the latency limits.", number=fastest))


def _commands(run: RunData, best: TrialResult) -> Iterator[Block]:
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


def _flags(run: RunData, best: TrialResult) -> list[str]:
    """Return the flags of the engine that set the knobs of the best; empty if they do not set all of them."""
    flags: list[str] = []
    for name, value in best.candidate.items():
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
        [trial_cell(run, trial), state_name(trial.state), run.broken_limits(trial) or trial.reason]
        for trial in run.trials
        if trial.number in shown_numbers
    ]
    if rows:
        yield table(_("Reasons"), [_("trial"), _("state"), _("reason")], rows)


def _engines(run: RunData, engines: Mapping[str, RunResult | str]) -> Block:
    rows = []
    for engine, found in engines.items():
        if isinstance(found, str):
            rows.append([Cell(engine), cell(None), found])
            continue
        step = found.best.measured_s if found.best else None
        figure = cell(None) if step is None else cell(1.0 / step if is_rate(run.objective) else step)
        rows.append([Cell(engine, None, f"{engine}/report.html"), figure, found.stop_reason])
    return table(_("Tuned engines"), [_("engine"), run.unit, _("stopped")], rows)
