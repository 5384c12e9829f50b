"""The summary of a run: the best configuration, its speedup with the uncertainty, and what to do next."""

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from flagcore.domain.metrics import devices_pair, load_text
from flagcore.domain.plan import DAY
from flagcore.domain.spec import figure_name, objective_value, seconds
from flagcore.domain.trial import ESTIMATE, RUN, Measurement, Trial, TrialState
from flagcore.i18n import N_, _, ngettext
from flagcore.report import text as texts
from flagcore.report.blocks import Block, Cell, Facts, Table, Text, cell, table
from flagcore.report.explanation import causes_text, differences_text, figure_pairs
from flagcore.report.formats import NAMES, shown, size_text
from flagcore.report.result import notes_of, number
from flagcore.report.run import Record, RunData, measured_s, served

MIN_DAYS = 2
"""Jobs that take fewer days are shown in hours, minutes or seconds."""
MAX_RIVALS = 5
"""The maximum number of listed candidates that do not differ significantly from the best."""


def answer(run: RunData) -> list[Block]:
    """Return the best configuration, its speedup and the uncertainty of both, or else why there is no best."""
    blocks: list[Block] = [Text(note, warning=True) for note in run.warnings]
    best = run.best
    if best is None:
        blocks += [Text(line, warning=True) for line in f"{'; '.join(_why_no_best(run))}.".splitlines()]
        listed = [each for each in run.trials if each.number in run.listed]
        rows = [
            [run.cell(each), run.state_text(each), run.broken_limits(each) or texts.reason_text(each.reason) or None]
            for each in listed
        ]
        return blocks + ([table(_("Reasons"), [_("trial"), _("state"), _("reason")], rows)] if rows else [])
    blocks.append(Facts(list(_main_results(run, best)), lead=True))
    blocks += [Text(run.expected)] if run.expected else []
    blocks += [Text(_("Why: {reason}", reason=reason)) for reason in filter(None, [why(run)])]
    return [*blocks, *_uncertainty_notes(run, best)]


def details(run: RunData) -> list[Block]:
    """Return further metrics of the best, the results of several engines, slow devices, and notes."""
    blocks: list[Block] = [Facts(list(_facts(run, run.best)))] if run.best else []
    blocks += [_engines(run)] if run.engines else []
    for line, numbers in run.slow_devices.items():
        text = N_("Slow device, which delays all other devices: {line} (trial {trials}).")
        blocks.append(Text(_(text, line=line, trials=", ".join(map(str, numbers)))))
    return blocks + [Text(_("Note: {note}.", note=note)) for note in notes_of(run.data)]


def ending(run: RunData) -> list[Text]:
    """Return why the run stopped, and what to do next.

    Without a best, the reason is not repeated, because the summary begins with it.
    """
    has_reason = run.best and run.stop_reason and run.fidelity != ESTIMATE
    reason = [_("Stopped: {reason}.", reason=run.stop_reason)] if has_reason else []
    return [Text(text) for text in (*reason, *(_("Next: {step}.", step=step) for step in next_steps(run)))]


def no_best(run: RunData) -> str:
    """Return in one paragraph why there is no best, and what to do next."""
    return "; ".join([*_why_no_best(run), *next_steps(run)])


def _why_no_best(run: RunData) -> list[str]:
    """Return why there is no best: the trial nearest to the limits, why the run stopped, and the most frequent failure.

    The failure is left out if it is the reason why the run stopped, or if trials were measured.
    """
    count, closest, nearest = len(run.trials), run.nearest, ""
    if not run.trials:
        text = _("No trial has finished")
    elif run.is_unmeasured:
        text = ngettext("{count} trial, not measured", "{count} trials, none measured", count)
    else:
        text = ngettext(
            "{count} trial, not within the limits {limits}",
            "{count} trials, none within the limits {limits}",
            count,
            limits=texts.limits_text(run.limits),
        )
    if closest is not None:
        values, reason = run.configuration(closest), run.broken_limits(closest)
        text_of_trial = N_("nearest: trial {number} ({values}): {reason}")
        nearest = _(text_of_trial, number=closest.number, values=values, reason=reason)
    return [*filter(None, [text, nearest, run.stop_reason]), *(_failures(run) if run.is_unmeasured else ())]


def _failures(run: RunData) -> Iterator[str]:
    """Yield the most frequent failure of the trials with its logs. Failures may differ in digits, such as times."""
    failures = [each for each in run.trials if each.state is not TrialState.INTERRUPTED]
    failures = [each for each in failures if str(each.reason) not in run.stopped_because]
    if failures:
        kinds = [(each.state, re.sub(r"\d", "", str(each.reason))) for each in failures]
        kind, count = Counter(kinds).most_common(1)[0]
        first = failures[kinds.index(kind)]
        yield _(
            "{part} of {count} trials ended as '{state}': {reason} (logs in {folder})",
            part=count,
            count=len(run.trials),
            state=texts.state_name(first.state.value),
            reason=texts.reason_text(first.reason),
            folder=Path(run.folder_name, first.log).parent,
        )


def next_steps(run: RunData) -> Iterator[str]:
    """Yield what to do next, with the command for it. It is empty if the best of a finished run can be started."""
    command = "flag tune SPEC" + (f" --run-dir {shlex.quote(run.folder_name)}" if run.folder_name else "")
    if run.was_interrupted:
        text = N_("`{command}` resumes it") if run.stopped_because else N_("if it has ended, `{command}` resumes it")
        yield _(text, command=command)
    elif run.fidelity == ESTIMATE:
        command = run.start.replace("flag export", "flag tune").partition(" --to ")[0] or command
        command += " --fidelity run" if run.folder_name else ""
        yield _("on the devices, `{command}` measures candidates", command=command)
    elif run.is_unmeasured:
        yield _("when the cause is fixed, `{command}` starts again", command=f"{command} --new")
    elif run.best is None:
        text = N_("with higher limits, a lower load or more devices, `{command}` starts again")
        yield _(text, command=f"{command} --new")


def _main_results(run: RunData, best: Trial) -> Iterator[tuple[str, Cell]]:
    """Yield the name and the cell of each main result: the best configuration, its gain, speed and cost."""
    yield _(NAMES["best"][run.fidelity], hardware=run.hardware), Cell(run.configuration(best))
    yield _("Speedup over the baseline"), _gain(run, best)
    yield _("Speed"), _speed(run, best)
    yield from _cost(run, best)


def _mark(run: RunData) -> str:
    """Return the mark `~` if metrics of the run are predicted or partly modelled, otherwise an empty string."""
    return "" if run.fidelity == RUN else "~"


def _speed(run: RunData, best: Trial) -> Cell:
    """Return the median objective of the best with the range over its runs, or the 80% interval if it was not run."""
    figures, count, note = run.figures(best), len(run.runs_of(best.candidate).counted), ""
    predicted = run.predicted(best)
    value = figures[0] if figures else run.figure(best) or (predicted[0] if predicted else None)
    name, points = figure_name(run.objective), best.measurement.points if best.measurement else ()
    loads = [load_text(point) for point in points if number(point.get(name)) == served(best, name)]
    load = loads[0] if len(points) > 1 and loads else ""  # the load at which the best was rated
    if figures and run.fidelity == ESTIMATE:
        note = "" if run.expected else _("(80%: {low} to {high})", low=shown(figures[1]), high=shown(figures[2]))
    elif figures and count > 1:
        note = _("({count} runs: {low} to {high})", count=count, low=shown(figures[1]), high=shown(figures[2]))
    elif count == 1:
        note = _("(ran once)")
    text = "-" if value is None else f"{shown(value)} {run.unit}"
    return Cell(_mark(run) + texts.at_load(text, load), value, note=note)


def _facts(run: RunData, best: Trial) -> Iterator[tuple[str, Cell]]:
    measured, predicted = run.measured(best), best.predicted
    if run.serves and measured:
        yield _("Also measured"), Cell(texts.figures_text(measured, run.objective))
    if not run.serves:
        yield _("Step time"), _step(run, best)
    own_bytes = measured.device_used_bytes if measured else None
    used = predicted.device_used_bytes if predicted and own_bytes is None else own_bytes
    if used is not None:
        approximate, capacity = "~" if own_bytes is None else "", predicted.capacity_bytes if predicted else None
        limit = "" if capacity is None else f" / {size_text(capacity)}"
        yield _("Device memory in use"), Cell(f"{approximate}{size_text(used)}{limit}", used / 2**30)
    if answers := texts.answers_text(best, run.baseline):
        yield _("Checked"), Cell(answers)
    if run.limits:
        yield _("Within latency limits"), Cell(texts.limits_text(run.limits))
        if measured:
            if (nearest := texts.nearest_limit(measured.figures, run.limits))[0]:
                yield _("Nearest limit"), Cell(*nearest[1:])
            yield _("Without the limits"), Cell(_fastest_without_limits(run, best))
    source = f"{_(NAMES['trials_made'][run.fidelity])}, {_(NAMES['row'][run.fidelity])} {best.number}"
    yield _("Source"), Cell(source, None, f"#trial-{best.number}")


def _cost(run: RunData, best: Trial) -> Iterator[tuple[str, Cell]]:
    """Yield the time and the cost of the planned job, and the cost of tokens, where they are known."""
    cost = (run.data.get("best") or {}).get("cost") or {}
    mark = _mark(run) if best.measurement else "~"
    if days := cost.get("planned_days"):
        text = _("{days} days", days=shown(days)) if days >= MIN_DAYS else texts.duration_text(days * DAY)
        price = cost.get("planned_cost")
        total = "" if price is None else ", " + _("cost {cost}", cost=shown(price))
        yield _("Planned steps"), Cell(f"{mark}{text}{total}", days)
    if (price := cost.get("cost_per_million_tokens")) is not None:
        yield _("Cost per million tokens"), Cell(f"{mark}{shown(price)}", price)


def _step(run: RunData, best: Trial) -> Cell:
    """Return the step time of the best with its uncertainty: the range over runs, the spread, or the 80% interval."""
    step = best.measurement
    runs = [measured_s(each) or 0.0 for each in run.runs_of(best.candidate).counted]
    if len(runs) > 1 and step is not None and step.scaled_from is None and step.modelled_s is None:
        note = _("({count} runs: {low} to {high})", count=len(runs), low=shown(min(runs)), high=shown(max(runs)))
        return Cell(f"{shown(run.median_s(best))} s", run.median_s(best), note=note)
    value = step.step_time_s if step else best.predicted_step_s
    bounds = step or best.predicted
    low, high = (bounds.low_s, bounds.high_s) if bounds else (None, None)
    text = f"{_mark(run)}{shown(value)} s"
    if low and high and not run.expected:  # one interval for one figure
        text += " " + _("(80%: {low} to {high} s)", low=shown(low), high=shown(high))
    return Cell(text + (_origin(best, step, has_interval=bool(low and high)) if step else ""), value)


def _origin(best: Trial, step: Measurement, *, has_interval: bool) -> str:
    """Return what a step time was derived from, or else its spread if it has no interval, to be appended to it."""
    if step.scaled_from is not None:
        return ", " + texts.scaled_text(step.scaled_from, best.shortened)
    if step.modelled_s is not None:
        modelled = N_("of which ~{seconds} s are predicted communication and waiting")
        return ", " + _(modelled, seconds=shown(step.modelled_s))
    steps = N_("(spread {spread} s over {count} steps)")
    return "" if has_interval else " " + _(steps, spread=shown(step.spread_s), count=len(step.step_times_s))


def _gain(run: RunData, best: Trial) -> Cell:
    baseline, speedup = run.baseline, run.speedup
    if baseline is None:
        return Cell(_("unknown: the baseline was not run"))
    values = run.configuration(baseline)
    if speedup is None:
        return Cell(_why_unknown(run, baseline, values))
    if best.candidate == baseline.candidate:
        text = N_("the baseline is the best: no trial was significantly faster")
        if run.fidelity == ESTIMATE:
            text = N_("the baseline is recommended: no candidate is predicted to be clearly faster")
        elif not any(each.measurement and each.candidate != baseline.candidate for each in run.trials):
            text = N_("the baseline is the best: no other candidate was measured")
        return Cell(_(text), run.gain)
    devices = devices_pair(run.figures_of(baseline), run.figures_of(best))
    value, low, high = (
        _mark(run) + texts.gain_text(run.objective, each, devices)
        for each in (speedup.value, speedup.low, speedup.high)
    )
    is_shown = speedup.significant or run.fidelity == ESTIMATE
    note, count = "" if is_shown else f"({value})", len(speedup.rounds)
    if speedup.low < speedup.high:
        text = N_("({count} rounds: {low} to {high})") if count > 1 else N_("({low} to {high})")
        if count > 1 and not min(speedup.rounds) <= speedup.value <= max(speedup.rounds):
            text = N_("({count} rounds, and the ratio of the medians: {low} to {high})")
        interval = _(text, count=count, low=low.split()[0], high=high.split()[0])
        note = f"{note} {interval}".strip() if speedup.conclusive else interval
    verdict = N_("no significant gain")
    if not speedup.conclusive:
        verdict = N_("not conclusive, rounds differ by more than the gain")
    elif min(len(run.runs_of(each.candidate).counted) for each in (baseline, best)) < 2:
        verdict = N_("not conclusive, because one of them ran once")
    over = _("over {baseline}", baseline=values + run.over(baseline))
    return Cell(value if is_shown else _(verdict), speedup.value, note=f"{note} {over}".strip())


def _why_unknown(run: RunData, baseline: Trial, values: str) -> str:
    """Return why the speedup over a baseline with these values is unknown."""
    if baseline.measurement and baseline.state is not TrialState.STOPPED:
        text = N_("unknown: the best or the baseline ({baseline}) has no measurement of whole steps")
        return _(text, baseline=values)
    does_not_fit = run.fidelity == ESTIMATE and baseline.predicted is not None and baseline.predicted.fits is False
    state_text = _("predicted not to fit") if does_not_fit else texts.state_name(baseline.state.value)
    return _("unknown: state of the baseline ({baseline}): {state}", baseline=values, state=state_text)


def _fastest_without_limits(run: RunData, best: Trial) -> str:
    """Return a text with the metrics of the fastest load point of all trials, and the limits that it exceeds."""
    name = figure_name(run.objective)
    points = [(trial, point) for trial in run.trials if trial.measurement for point in trial.measurement.points]
    by_speed = [
        (seconds(run.objective, value), trial, point)
        for trial, point in points
        if (value := point.get(name)) and (_exceeded(run, point) or run.broken_limits(trial))
    ]
    best_s = run.median_s(best) or 0.0
    step, trial, point = min(by_speed, key=lambda each: each[0], default=(best_s, best, {}))
    if best_s <= step:
        return _("no trial was better")
    load = load_text(point) if best.measurement and len(best.measurement.points) > 1 else ""
    return _(
        "trial {number} reached {value} ({reason})",
        number=trial.number,
        value=texts.at_load(f"{shown(objective_value(run.objective, step))} {run.unit}", load),
        reason=_exceeded(run, point) or _("exceeded the limits when repeated"),
    )


def _exceeded(run: RunData, point: Record) -> str:
    limits = run.limits.items()
    return ", ".join(f"{key} = {shown(point[key])} s" for key, most in limits if (point.get(key) or 0) > most)


def _uncertainty_notes(run: RunData, best: Trial) -> Iterator[Text]:
    rivals = [f"{_('trial')} {each.number} ({run.configuration(each)})" for each in run.rivals]
    if rivals:
        remainder = [_("and {count} more", count=len(rivals) - MAX_RIVALS)] if len(rivals) > MAX_RIVALS else []
        names = "; ".join([*rivals[:MAX_RIVALS], *remainder])
        yield Text(_("The best is not significantly faster than {trials}.", trials=names))
    of_best = run.median_s(best) or 0.0
    once = [
        f"{_('trial')} {each.number} ({run.configuration(each)})"
        for each in run.trials
        if 0.0 < (run.median_s(each) or 0.0) < of_best and len(run.counted(each)) == 1 and not run.broken_limits(each)
    ]
    if once and run.fidelity != ESTIMATE:
        yield Text(_("Faster, but not compared, because it ran once: {trials}.", trials="; ".join(once)))
    yield from (Text(text, warning=True) for text in texts.noise_warnings(run))
    if run.limits and run.fastest is not None and run.fastest.number != best.number:
        yield Text(_("Trial {number} is faster, but not within the latency limits.", number=run.fastest.number))


def _engines(run: RunData) -> Table:
    rows = []
    for engine, found in run.engines.items():
        if isinstance(found, str):
            rows.append([Cell(engine), cell(None), found])
        else:
            figures = found.figures(found.best) if found.best else None
            figure = cell(figures[0] if figures else None)
            rows.append([Cell(engine, None, f"{engine}/report.html"), figure, found.stop_reason])
    return table(_("Tuned engines"), [_("engine"), run.unit, _("stopped")], rows)


def why(run: RunData) -> str:
    """Return why the best is faster than the baseline, or than the second-best if it is the baseline itself.

    The text is empty if the causes are unknown.
    """
    best, other, name = run.best, run.baseline, _("the baseline")
    if best is None or not run.trials:
        return ""
    if other is None or other.candidate == best.candidate:
        others = [each for each in run.trials if each.candidate != best.candidate and run.median_s(each)]
        if (other := min(others, key=lambda each: run.median_s(each) or 0.0, default=None)) is None:
            return ""
        name = _("the second-best (trial {number})", number=other.number)
    times = (run.median_s(other), run.median_s(best))
    if times[0] is None or times[1] is None or (run.fidelity == ESTIMATE and run.speedup is None):
        return ""  # in a plan, a baseline that does not fit is no reference
    text = causes_text(
        run.objective,
        name,
        (times[0], times[1]),
        (other.predicted, best.predicted),
        _(NAMES["trials_made"][run.fidelity]),
        has_rounds=other is run.baseline and run.speedup is not None,
    )
    pairs = figure_pairs(run.step_parts(other), run.step_parts(best))
    measured = {_(run.labels.measured_parts[key]): pair for key, pair in pairs.items()}
    parts = differences_text(measured, times[1] - times[0])
    return " ".join([text, *([_("Measured differences: {parts}.", parts=parts)] if parts else [])])
