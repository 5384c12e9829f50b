"""A plan as text: the best configuration, every trial, and what predictions and repeats show."""

from __future__ import annotations

from flagcore.domain.objective import TOKENS_PER_SECOND_PER_DEVICE, objective_value
from flagcore.domain.plan import Plan, failed_repeats, measured_over
from flagcore.domain.trial import ESTIMATE, PROBE, RUN, Trial, TrialState
from flagcore.i18n import _, ngettext
from flagcore.report import serving_text
from flagcore.report.formats import lookup, table
from flagcore.report.text import candidate_text, funnel, repeats_text, role_text, state_text

GIB = 2**30
MAX_RIVALS = 5
"""The most candidates to list that do not differ significantly from the best."""


def plan_text(plan: Plan) -> str:
    """Return the best configuration, every trial, and the funnel of the search space."""
    parts = [
        _answer(plan),
        trials_table(plan),
        serving_text.front_table(plan),
        learned_table(plan),
        slow_text(plan),
        "\n".join([funnel(plan.counts, plan.fidelity), *repeats_text(failed_repeats(plan.repeats))]),
    ]
    notes = serving_text.notes(plan) if serving_text.serves(plan) else []
    parts += [_("Note: {note}.", note=note) for note in notes]
    return "\n\n".join([*filter(None, parts), _("Stopped: {reason}.", reason=_(plan.stopped_because))])


def slow_text(plan: Plan) -> str:
    """Return the slow devices with the trials that showed them; empty without any."""
    lines = []
    for each in (*plan.trials, *plan.repeats):
        slow = each.measurement.slow if each.measurement else ()
        lines += [_("trial {number}: {reason}", number=each.number, reason=line) for line in slow]
    return "\n".join([_("Slow devices, which all others wait for:"), *lines]) if lines else ""


def learned_table(plan: Plan) -> str:
    """Return the errors of predictions before and after learning, a line per trial; empty without learning."""
    if plan.prediction_error is None:
        return ""
    line = ngettext(
        "Median prediction error over {count} trial: {before}, after learning {after}",
        "Median prediction error over {count} trials: {before}, after learning {after}",
        plan.prediction_error.trials,
        before=far(plan.prediction_error.before),
        after=far(plan.prediction_error.after),
    )
    what = serving_text.heading(plan.objective) if serving_text.serves(plan) else _("step s")
    headings = [_("trial"), f"~{what}", _("~learned"), what, _("error"), _("after learning")]
    rows = []
    for trial in plan.trials:
        ratios = [measured_over(trial, name) for name in ("predicted", "believed")]
        if None in ratios or trial.measurement is None:
            continue
        step = trial.measurement.step_time_s
        expected = [_figure(plan, step / ratio) for ratio in ratios if ratio]
        shares = [f"{ratio - 1:+.1%}" for ratio in ratios if ratio]
        rows.append([str(trial.number), *expected, _figure(plan, step), *shares])
    return f"{line}.\n{table(headings, rows)}"


def _figure(plan: Plan, seconds: float) -> str:
    return f"{objective_value(plan.objective, seconds) if serving_text.serves(plan) else seconds:.4g}"


def far(share: float) -> str:
    """Return a relative error as percent, or as a factor from 100% on."""
    return f"{share:.1%}" if share < 1.0 else _("a factor of {factor}", factor=f"{1.0 + share:.3g}")


def trials_table(plan: Plan) -> str:
    """Return one line per trial: configuration, measured and predicted (~) figures; below, reasons of failures."""
    trials = [*plan.probes, *plan.trials, *plan.repeats]
    if not trials:
        return _("No trial ran.")
    base = _step(plan.baseline) if plan.baseline else None
    headings = [_("trial"), _("configuration"), _("state")]
    if serving_text.serves(plan):
        headings += serving_text.headings(plan.objective)
    else:
        headings += [_("step s"), _("spread"), _("~step s"), "tok/s/dev", _("vs base"), "GiB", "~GiB"]
    rows = []
    for trial in trials:
        reference = base if trial.fidelity == plan.fidelity else None
        figures = (
            [state_text(trial), *serving_text.cells(trial, plan.objective, reference)]
            if serving_text.serves(plan)
            else _figures(trial, reference)
        )
        rows.append([_name(plan, trial), candidate_text(trial.candidate, plan.knobs), *figures])
    failed = [trial for trial in trials if trial.reason and trial.state.failed]
    reasons = [_("trial {number}: {reason}", number=trial.number, reason=trial.reason) for trial in failed]
    return "\n".join([table(headings, rows), *reasons])


def _answer(plan: Plan) -> str:
    if plan.best is None and plan.fastest is not None:
        return _("No configuration is within the limits {limits}.", limits=serving_text.limits_text(plan.limits))
    if plan.best is None:
        return _("No configuration could be measured.")
    hardware, candidate = f"{plan.devices} x {plan.chip}", candidate_text(plan.best.candidate, plan.knobs)
    if plan.fidelity == ESTIMATE:
        heading = _("Best predicted configuration on {hardware}: {candidate}", hardware=hardware, candidate=candidate)
    elif plan.fidelity == PROBE:
        heading = _("Best probed configuration on {hardware}: {candidate}", hardware=hardware, candidate=candidate)
    else:
        heading = _("Best on {hardware}: {candidate}", hardware=hardware, candidate=candidate)
    speed = _served_speed(plan) if serving_text.serves(plan) else _speed(plan.best)
    lines = [heading, f"  {speed}", *serving_text.limit_lines(plan)]
    if plan.baseline is not None:
        lines.append(f"  {_gain(plan, plan.best, plan.baseline)}")
    if len(plan.gains) > 1:
        rounds = ", ".join(serving_text.gain_text(plan.objective, each).split()[0] for each in plan.gains)
        note = _("lowest of {count} rounds: {rounds}", count=len(plan.gains), rounds=rounds)
        proof = "" if min(plan.gains) > 0 else "; " + _("not significant: the machine was noisy")
        lines.append(f"  ({note}{proof})")
    return "\n".join([*lines, *_noise(plan)])


def _gain(plan: Plan, best: Trial, baseline: Trial) -> str:
    """Return the speedup of the best over the baseline, or why there is none."""
    values = candidate_text(baseline.candidate, plan.knobs)
    if plan.gain is None:
        fits = lookup(baseline.predicted, "memory.fits") is not False
        state = state_text(baseline) if plan.fidelity != ESTIMATE or fits else _("predicted not to fit")
        return _("speedup unknown: the baseline ({baseline}) is {state}", baseline=values, state=state)
    if best.candidate == baseline.candidate and plan.fidelity == ESTIMATE:
        return _("this is the baseline: no candidate is predicted to be faster")
    if best.candidate == baseline.candidate:
        return _("this is the baseline: no trial was faster")
    gain = serving_text.gain_text(plan.objective, plan.gain)
    mark = "" if plan.fidelity == RUN else "~"
    return _("{gain} vs baseline: {baseline}", gain=mark + gain, baseline=values)


def _speed(best: Trial) -> str:
    """Return the figures of the best in one line; `~` marks what is predicted, in whole or in part."""
    measured = best.measurement
    if measured is None:
        keys = ("tokens_per_second_per_device.value", "step_time_s.value", "step_time_s.low", "step_time_s.high")
        speed, step, low, high = (lookup(best.predicted, key) for key in keys)
        used = lookup(best.predicted, "memory.device_used_gib")
        return _(
            "~{speed:,.0f} tokens/s/device, step ~{step:.4g} s (80%: {low:.4g} to {high:.4g} s), ~{used:.3g} GiB",
            speed=speed,
            step=step,
            low=low,
            high=high,
            used=used,
        )
    speed, step = measured.tokens_per_second_per_device, measured.step_time_s
    if measured.modelled_s is None:
        return _(
            "{speed:,.0f} tokens/s/device, step {step:.4g} s (spread {spread:.2g} s over {count} steps)",
            speed=speed,
            step=step,
            spread=measured.spread_s,
            count=len(measured.step_times_s),
        )
    within = ""
    if measured.low_s and measured.high_s:
        within = " " + _("(80%: {low:.4g} to {high:.4g} s)", low=measured.low_s, high=measured.high_s)
    return _(
        "~{speed:,.0f} tokens/s/device, step ~{step:.4g} s{within}: {measured:.4g} s measured, ~{modelled:.4g} s "
        "modelled communication and waiting",
        speed=speed,
        step=step,
        within=within,
        measured=step - measured.modelled_s,
        modelled=measured.modelled_s,
    )


def _served_speed(plan: Plan) -> str:
    assert plan.best is not None
    if plan.best.measurement is not None:
        return serving_text.figures_line(plan.best.measurement, plan.objective)
    figure = lookup(plan.best.predicted, "objective")
    value, low, high = (serving_text.objective_text(plan.objective, figure[each]) for each in ("value", "low", "high"))
    return _("~{value} (80%: {low} to {high})", value=value, low=low, high=high)


def _step(trial: Trial) -> float | None:
    """Return the measured step time of a trial, of an estimate the predicted one, None without either."""
    if trial.state is TrialState.PREDICTED:
        step = lookup(trial.predicted, "step_time_s.value")
        return step if isinstance(step, float) else None
    return trial.measurement.step_time_s if trial.measurement else None


def drift_text(plan: Plan) -> str | None:
    """Return a warning that the machine got faster or slower during the run, None if it did not."""
    if plan.drift is None or not plan.drifted:
        return None
    how = "faster" if plan.drift > 0 else "slower"
    return (
        f"machine drift: the last run of the baseline was {abs(plan.drift):.1%} {how} than its first; trials that are "
        "far apart in time may differ by as much"
    )


def _noise(plan: Plan) -> list[str]:
    """Return what repeats show: the median of the best, candidates as fast as it, and drift."""
    assert plan.best is not None
    lines, drift = [], drift_text(plan)
    if (middle := plan.medians.get(plan.best.number)) is not None:
        lines.append("  " + _("median of its runs: {value}", value=_middle(plan, middle)))
    if plan.rivals and plan.best.number in plan.medians:
        rivals = [
            f"{_('trial')} {trial.number} ({candidate_text(trial.candidate, plan.knobs)})" for trial in plan.rivals
        ]
        more = [_("and {count} more", count=len(rivals) - MAX_RIVALS)] if len(rivals) > MAX_RIVALS else []
        names = "; ".join([*rivals[:MAX_RIVALS], *more])
        lines.append("  " + _("not significantly faster than {trials}", trials=names))
    return [*lines, *([f"  {drift}"] if drift else [])]


def _middle(plan: Plan, seconds: float) -> str:
    """Return the objective of the best for the median time of its runs."""
    if serving_text.serves(plan):
        return serving_text.objective_text(plan.objective, objective_value(plan.objective, seconds))
    assert plan.best is not None
    return f"{objective_value(TOKENS_PER_SECOND_PER_DEVICE, seconds, plan.best.measurement):,.0f} tokens/s/device"


def _name(plan: Plan, trial: Trial) -> str:
    role = "" if trial.role.value == "search" else role_text(trial.role.value)
    if trial.fidelity != plan.fidelity:
        role = _(trial.fidelity)
    imported = _("imported") if trial.source else ""
    best = _("best") if plan.best is not None and trial.number == plan.best.number else ""
    return " ".join(filter(None, [str(trial.number), role, imported, best]))


def _figures(trial: Trial, base: float | None) -> list[str]:
    predicted = [lookup(trial.predicted, key) for key in ("step_time_s.value", "memory.device_used_gib")]
    guesses = [f"~{figure:.3g}" if isinstance(figure, float) else "-" for figure in predicted]
    measured = trial.measurement
    if measured is None:
        step, speed = _step(trial), lookup(trial.predicted, "tokens_per_second_per_device.value")
        estimate = trial.state is TrialState.PREDICTED
        gain = f"~{base / step - 1:+.1%}" if estimate and base and step else "-"
        tokens = f"~{speed:,.0f}" if estimate and isinstance(speed, float) else "-"
        return [state_text(trial), "-", "-", guesses[0], tokens, gain, "-", guesses[1]]
    mark = "" if measured.modelled_s is None else "~"
    used = measured.device_used_bytes or measured.peak_reserved_bytes
    compared = trial.state in (TrialState.MEASURED, TrialState.STOPPED)
    return [
        state_text(trial),
        f"{mark}{measured.step_time_s:.4g}",
        f"{measured.spread_s:.2g}",
        guesses[0],
        f"{mark}{measured.tokens_per_second_per_device:,.0f}",
        f"{mark}{base / measured.step_time_s - 1:+.1%}" if base and compared else "-",
        f"{used / GIB:.3g}" if used else "-",
        guesses[1],
    ]
