"""Figures of servers as text: the objective, latencies, and what the limits cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flagcore.domain.objective import SERVING, figure_name, is_rate, told
from flagcore.domain.plan import Plan
from flagcore.domain.serving import LATENCIES, RATES
from flagcore.domain.trial import Measurement, Trial
from flagcore.report.formats import lookup

SHORT_RATES = {
    "output_tokens_per_s": "output tok/s",
    "total_tokens_per_s": "tok/s",
    "requests_per_s": "req/s",
    "goodput_requests_per_s": "good req/s",
    "output_tokens_per_s_per_device": "output tok/s/dev",
}
SHORT_LATENCIES = dict(zip(LATENCIES, ("TTFT", "TPOT", "ITL", "e2e"), strict=True))


def serves(plan: Plan) -> bool:
    """Return whether a plan is of servers."""
    return plan.objective in SERVING


def heading(objective: str) -> str:
    """Return what a table calls an objective, its unit included."""
    if objective in RATES:
        return SHORT_RATES[objective]
    of, _, statistic = objective.partition(".")
    return f"{SHORT_LATENCIES[of]} {statistic or 'mean'} s"


def objective_text(objective: str, figure: float) -> str:
    """Return an objective's figure with its unit."""
    return f"{_number(figure)} {heading(objective)}"


def figures_line(measured: Measurement, objective: str) -> str:
    """Return the figures of a measurement in one line: the objective first."""
    own = figure_name(objective)
    figures = [objective_text(objective, told(objective, measured.step_time_s))]
    rates = [name for name in ("output_tokens_per_s", "requests_per_s") if name != own]
    figures += [f"{_number(measured.figures[name])} {SHORT_RATES[name]}" for name in rates if name in measured.figures]
    for name, short in SHORT_LATENCIES.items():
        known = [(each, measured.figures.get(f"{name}.{each}")) for each in ("p50", "p99")]
        told_of = ", ".join(f"{each} {_number(value)}" for each, value in known if value is not None)
        if told_of and name != "itl_s":
            figures.append(f"{short} {told_of} s")
    return "; ".join(figures)


def short_line(measured: Measurement) -> str:
    """Return the figures of a measurement that fit beside others in a line of progress."""
    rate = measured.figures.get("output_tokens_per_s")
    said = [f"{_number(rate)} {SHORT_RATES['output_tokens_per_s']}"] if rate else []
    for name in ("ttft_s", "tpot_s"):
        middle = measured.figures.get(f"{name}.p50")
        said += [f"{SHORT_LATENCIES[name]} {_number(middle)} s"] if middle is not None else []
    return ", ".join([*said, *measured.broken])


def limits_text(limits: Mapping[str, float]) -> str:
    """Return limits in words."""
    return ", ".join(f"{name_of(name)} <= {limit:g} s" for name, limit in limits.items())


def name_of(figure: str) -> str:
    """Return what the field calls a latency's statistic."""
    of, _, statistic = figure.partition(".")
    return f"{statistic} {SHORT_LATENCIES.get(of, of)}".strip()


def limit_lines(plan: Plan) -> list[str]:
    """Return what the limits are and what they cost: how much faster the fastest that breaks them is."""
    if not plan.limits:
        return []
    lines = [f"  it keeps {limits_text(plan.limits)}"]
    best, fastest = plan.best, plan.fastest
    if best is None or fastest is None or best.measurement is None or fastest.measurement is None:
        return lines
    if fastest.candidate == best.candidate:
        return [*lines, "  the limits cost nothing: it is the fastest of all that ran"]
    cost = best.measurement.step_time_s / fastest.measurement.step_time_s - 1.0
    why = "; ".join(fastest.measurement.broken) or "it broke them when it ran again"
    return [*lines, f"  the limits cost {cost:.1%}: trial {fastest.number} is that much better, but {why}"]


def nearest(plan: Plan) -> tuple[Trial, float] | None:
    """Return the measured trial that misses the limits by least, and by which factor; None if none was measured."""
    missed = [
        (trial, max(trial.measurement.figures.get(name, float("inf")) / limit for name, limit in plan.limits.items()))
        for trial in plan.trials
        if trial.measurement and trial.measurement.figures and plan.limits
    ]
    return min(missed, key=lambda pair: pair[1], default=None)


def impossible(plan: Plan) -> str:
    """Return that no trial kept the limits, and which one came nearest."""
    near = nearest(plan)
    line = f"none of {len(plan.trials)} trials kept {limits_text(plan.limits)}"
    if near is None or near[0].measurement is None:
        return line
    trial, _ = near
    return f"{line}; the nearest is trial {trial.number} ({trial.candidate}): {'; '.join(near[0].measurement.broken)}"


def cells(trial: Trial, objective: str, base: float | None) -> list[str]:
    """Return the figures of one trial for a table with the columns of `HEADINGS`."""
    predicted = lookup(trial.predicted, "objective.value")
    guess = f"~{_number(predicted)}" if isinstance(predicted, float) else "-"
    measured = trial.measurement
    if measured is None:
        return ["-", "-", guess, "-", "-", "-", "-"]
    spread = measured.spread_s / measured.step_time_s
    gain = (base / measured.step_time_s - 1.0) if base else None
    latencies = [measured.figures.get(name) for name in ("ttft_s.p50", "ttft_s.p99", "tpot_s.p50")]
    return [
        _number(told(objective, measured.step_time_s)) + (" !" if measured.broken else ""),
        f"{spread:.1%}",
        guess,
        f"{gain:+.1%}" if gain is not None else "-",
        *(_number(value) if value is not None else "-" for value in latencies),
    ]


def headings(objective: str) -> list[str]:
    """Return the headings of `cells`."""
    of = heading(objective)
    return [of, "spread", f"~{of}", "vs base", "TTFT p50", "p99", "TPOT p50"]


def front(plan: Plan) -> list[Mapping[str, Any]]:
    """Return the load points that no other beats in both output tokens per second and median time per token."""
    points = [
        {"trial": trial.number, **point}
        for trial in plan.trials
        if trial.measurement
        for point in trial.measurement.points
        if point.get("output_tokens_per_s") and point.get("tpot_s.p50") is not None
    ]
    points.sort(key=lambda point: (-point["output_tokens_per_s"], point["tpot_s.p50"]))
    kept: list[Mapping[str, Any]] = []
    for point in points:
        if not kept or point["tpot_s.p50"] < kept[-1]["tpot_s.p50"]:
            kept.append(point)
    return kept


def better(objective: str) -> str:
    """Return what a gain is of."""
    return heading(objective) if is_rate(objective) else f"speed of {heading(objective).removesuffix(' s')}"


def _number(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 1000 else f"{figure:.4g}"
