"""Metrics of serving as text: the objective, latencies, and the cost of latency limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median_high
from typing import Any

from flagcore.domain.candidate import Candidate
from flagcore.domain.objective import SERVING, figure_name, is_rate, objective_value, seconds
from flagcore.domain.plan import Plan
from flagcore.domain.serving import LATENCIES, RATES
from flagcore.domain.trial import Measurement, Trial
from flagcore.i18n import _, ngettext
from flagcore.report.formats import lookup, table

SHORT_RATES = {
    "output_tokens_per_s": "output tok/s",
    "total_tokens_per_s": "tok/s",
    "requests_per_s": "req/s",
    "goodput_requests_per_s": "good req/s",
    "output_tokens_per_s_per_device": "output tok/s/dev",
}
FRONT = ("output_tokens_per_s", "tpot_s.p50", "ttft_s.p50", "ttft_s.p99")
FEWEST = {"p99": 100, "p90": 10}
"""The least number of requests for which a percentile is not their maximum."""
SHORT_LATENCIES = dict(zip(LATENCIES, ("TTFT", "TPOT", "ITL", "e2e"), strict=True))


def serves(plan: Plan) -> bool:
    """Return whether the plan is for serving."""
    return plan.objective in SERVING


def heading(objective: str) -> str:
    """Return the heading of an objective, with its unit."""
    if objective in RATES:
        return SHORT_RATES[objective]
    of, _, statistic = objective.partition(".")
    return f"{SHORT_LATENCIES[of]} {statistic or 'mean'} s"


def objective_text(objective: str, figure: float) -> str:
    """Return the value of an objective with its unit."""
    return f"{_number(figure)} {heading(objective)}"


def figures_line(measured: Measurement, objective: str) -> str:
    """Return a measurement in one line, the objective first."""
    own = figure_name(objective)
    figures = [
        at_load(objective_text(objective, objective_value(objective, measured.step_time_s)), _load_of(measured, own))
    ]
    rates = [name for name in ("output_tokens_per_s", "requests_per_s") if name != own]
    figures += [f"{_number(measured.figures[name])} {SHORT_RATES[name]}" for name in rates if name in measured.figures]
    for name, short in SHORT_LATENCIES.items():
        known = [(each, measured.figures.get(f"{name}.{each}")) for each in ("p50", "p99")]
        text = ", ".join(f"{each} {_number(value)}" for each, value in known if value is not None)
        if text and name != "itl_s":
            figures.append(f"{short} {text} s")
    return "; ".join(figures)


def short_line(measured: Measurement, objective: str) -> str:
    """Return the main figures of a measurement for a line of progress, the objective first."""
    figures = [objective_text(objective, objective_value(objective, measured.step_time_s))]
    rate = measured.figures.get("output_tokens_per_s")
    figures += [f"{_number(rate)} {SHORT_RATES['output_tokens_per_s']}"] if rate and not is_rate(objective) else []
    for name in ("ttft_s", "tpot_s"):
        middle = measured.figures.get(f"{name}.p50")
        figures += [f"{SHORT_LATENCIES[name]} {_number(middle)} s"] if middle is not None else []
    return ", ".join([*figures, *measured.broken])


def limits_text(limits: Mapping[str, float]) -> str:
    """Return latency limits as text."""
    return ", ".join(f"{name_of(name)} <= {limit:g} s" for name, limit in limits.items())


def name_of(figure: str) -> str:
    """Return the usual name of a statistic of a latency, such as p99 TTFT."""
    of, _, statistic = figure.partition(".")
    return f"{statistic} {SHORT_LATENCIES.get(of, of)}".strip()


def limit_lines(plan: Plan) -> list[str]:
    """Return the limits, and by how much they slow down the best configuration."""
    if not plan.limits:
        return []
    lines = ["  " + _("within limits: {limits}", limits=limits_text(plan.limits))]
    best, name = plan.best, figure_name(plan.objective)
    if best is None or best.measurement is None:
        return lines
    free = [
        (seconds(plan.objective, point[name]), trial, point)
        for trial in plan.trials
        if trial.measurement
        for point in trial.measurement.points
        if name in point
    ]
    step, trial, point = min(free, key=lambda each: each[0], default=(best.measurement.step_time_s, best, {}))
    cost = best.measurement.step_time_s / step - 1.0
    if cost <= 0.0:
        return [*lines, "  " + _("the limits cost nothing: no trial was better without them")]
    load = load_text(point) if len(best.measurement.points) > 1 else ""
    exceeded = [f"{each} = {_number(point[each])} s" for each, most in plan.limits.items() if point.get(each, 0) > most]
    reached = at_load(objective_text(plan.objective, objective_value(plan.objective, step)), load)
    reason = ", ".join(exceeded) or _("exceeded the limits when repeated")
    cost_line = _(
        "without limits: trial {number} reached {value} ({reason})", number=trial.number, value=reached, reason=reason
    )
    return [*lines, f"  {cost_line}"]


def notes(plan: Plan) -> list[str]:
    """Return warnings about percentiles of too few requests."""
    best = plan.best or plan.fastest
    measured = best.measurement if best else None
    few = (
        min((point["answered"] for point in measured.points if "answered" in point), default=None) if measured else None
    )
    if few is None:
        return []
    weak = [name for name, fewest in FEWEST.items() if few < fewest]
    if not weak:
        return []
    need = max(FEWEST[name] for name in weak)
    return [f"{' and '.join(weak)} of {few:g} requests are unreliable: use num_prompts >= {need}"]


def load_text(point: Mapping[str, Any]) -> str:
    """Return the load of a load point."""
    if "concurrency" in point:
        return _("{count} clients", count=f"{point['concurrency']:g}")
    return _("{rate} requests/s", rate=point["request_rate"]) if "request_rate" in point else ""


def at_load(text: str, load: str) -> str:
    """Return a figure with the load that it was measured at, if there are several."""
    return _("{value} at {load}", value=text, load=load) if load else text


def front_table(plan: Plan) -> str:
    """Return the Pareto front of throughput and latency as a table; empty for one load point."""
    if not any(trial.measurement and len(trial.measurement.points) > 1 for trial in plan.trials):
        return ""
    rows = [
        [str(point["trial"]), load_text(point), *(_number(point[name]) if name in point else "-" for name in FRONT)]
        for point in front(plan)
    ]
    headings = [_("trial"), _("load"), "output tok/s", "TPOT p50 s", "TTFT p50 s", "TTFT p99 s"]
    return "\n".join([_("Pareto front of throughput and latency:"), table(headings, rows)])


def gain_text(objective: str, gain: float) -> str:
    """Return a speedup as the change of the objective: an increase of a rate, or a decrease of a latency."""
    if objective not in SERVING:
        return f"{gain:+.1%} tokens/s"
    if is_rate(objective):
        return f"{gain:+.1%} {heading(objective)}"
    return f"{1.0 / (1.0 + gain) - 1.0:+.1%} {heading(objective).removesuffix(' s')}"


def nearest(plan: Plan) -> tuple[Trial, float] | None:
    """Return the measured trial nearest to the limits, with the factor by which it exceeds them; None without one.

    The median of the runs of a candidate counts, of two runs the worse.
    """
    missed = [
        (trial, median_high([_missed(run.measurement, plan.limits) for run in _runs(plan, trial) if run.measurement]))
        for trial in plan.trials
        if trial.measurement and trial.measurement.figures and plan.limits
    ]
    return min(missed, key=lambda pair: pair[1], default=None)


def impossible(plan: Plan) -> str:
    """Return a message that no trial is within the limits, with the nearest."""
    near = nearest(plan)
    limits = limits_text(plan.limits)
    line = ngettext(
        "{count} trial, not within the limits {limits}",
        "{count} trials, none within the limits {limits}",
        len(plan.trials),
        limits=limits,
    )
    if near is None or near[0].measurement is None:
        return line
    trial = near[0]
    values = Candidate(tuple(each for each in trial.candidate.items if each[1] is not None))
    broken = [
        (run.number, "; ".join(run.measurement.broken))
        for run in _runs(plan, trial)
        if run.measurement and run.measurement.broken
    ]
    reason = broken_text(trial.number, broken)
    near_line = _("nearest: trial {number} ({values}): {reason}", number=trial.number, values=values, reason=reason)
    return f"{line}; {near_line}"


def broken_text(number: int, broken: Sequence[tuple[int, str]]) -> str:
    """Return the limits that a trial, or else its repeats, exceeded; `broken` has (number of the run, limits)."""
    own = [why for run, why in broken if run == number]
    again = [_("trial {number}: {reason}", number=run, reason=why) for run, why in broken if run != number]
    return own[0] if own else _("exceeded when repeated ({runs})", runs=", ".join(again)) if again else ""


def _runs(plan: Plan, trial: Trial) -> list[Trial]:
    return [trial, *(each for each in plan.repeats if each.candidate == trial.candidate)]


def _missed(measured: Measurement, limits: Mapping[str, float]) -> float:
    """Return the largest ratio of a latency to its limit; at most 1 is within the limits."""
    return max(measured.figures.get(name, float("inf")) / limit for name, limit in limits.items())


def cells(trial: Trial, objective: str, base: float | None) -> list[str]:
    """Return the figures of a trial for a table with `headings`."""
    predicted = lookup(trial.predicted, "objective.value")
    guess = f"~{_number(predicted)}" if isinstance(predicted, float) else "-"
    measured = trial.measurement
    if measured is None:
        return ["-", "-", guess, "-", "-", "-", "-"]
    spread = f"{measured.spread_s / measured.step_time_s:.1%}" if len(measured.step_times_s) > 1 else "-"
    change = gain_text(objective, base / measured.step_time_s - 1.0).split()[0] if base else "-"
    latencies = [measured.figures.get(name) for name in ("ttft_s.p50", "ttft_s.p99", "tpot_s.p50")]
    return [
        _number(objective_value(objective, measured.step_time_s)) + (" !" if measured.broken else ""),
        spread,
        guess,
        change,
        *(_number(value) if value is not None else "-" for value in latencies),
    ]


def headings(objective: str) -> list[str]:
    """Return the headings of `cells`."""
    of = heading(objective)
    return [of, _("spread"), f"~{of}", _("vs base"), "TTFT p50", "p99", "TPOT p50"]


def front(plan: Plan) -> list[Mapping[str, Any]]:
    """Return the Pareto-optimal load points of output tokens per second and median time per token."""
    points = [
        {"trial": trial.number, **point}
        for trial in plan.trials
        if trial.measurement
        for point in trial.measurement.points
        if point.get("output_tokens_per_s") and point.get("tpot_s.p50") is not None
    ]
    points.sort(key=lambda point: (-point["output_tokens_per_s"], point["tpot_s.p50"]))
    front: list[Mapping[str, Any]] = []
    for point in points:
        if not front or point["tpot_s.p50"] < front[-1]["tpot_s.p50"]:
            front.append(point)
    return front


def _load_of(measured: Measurement, name: str) -> str:
    """Return the load of the figures of a measurement; empty if it has one load point."""
    if len(measured.points) < 2:
        return ""
    return next((load_text(point) for point in measured.points if point.get(name) == measured.figures[name]), "")


def _number(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 1000 else f"{figure:.4g}"
