"""Metrics of serving as text: the objective, rates, latencies and loads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flagcore.domain.objective import SERVING, is_rate, objective_value
from flagcore.domain.plan import Plan
from flagcore.domain.serving import LATENCIES, RATES
from flagcore.domain.trial import Measurement
from flagcore.i18n import _
from flagcore.report.formats import lookup, shown

SHORT_RATES = {
    "output_tokens_per_s": "output tok/s",
    "total_tokens_per_s": "tok/s",
    "requests_per_s": "req/s",
    "goodput_requests_per_s": "good req/s",
    "output_tokens_per_s_per_device": "output tok/s/dev",
}
FEWEST = {"p99": 100, "p90": 10}
"""The least number of requests for which a percentile is not their maximum."""
SHORT_LATENCIES = dict(zip(LATENCIES, ("TTFT", "TPOT", "ITL", "e2e"), strict=True))


def heading(objective: str) -> str:
    """Return the heading of an objective, with its unit."""
    if objective in RATES:
        return SHORT_RATES[objective]
    of, _, statistic = objective.partition(".")
    return f"{SHORT_LATENCIES[of]} {statistic or 'mean'} s"


def objective_text(objective: str, figure: float) -> str:
    """Return the value of an objective with its unit."""
    return f"{shown(figure)} {heading(objective)}"


def figures_text(figures: Mapping[str, Any], objective: str) -> str:
    """Return rates and latencies (nested, as in a result) in one line, without the objective."""
    rates = [name for name in ("output_tokens_per_s", "requests_per_s") if name != objective and name in figures]
    parts = [f"{shown(figures[name])} {SHORT_RATES[name]}" for name in rates]
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        known = [(each, lookup(figures, f"{name}.{each}")) for each in ("p50", "p99")]
        text = ", ".join(f"{each} {shown(value)}" for each, value in known if value is not None)
        parts += [f"{SHORT_LATENCIES[name]} {text} s"] if text else []
    return "; ".join(parts)


def short_line(measured: Measurement, objective: str) -> str:
    """Return the main figures of a measurement for a line of progress, the objective first."""
    figures = [objective_text(objective, objective_value(objective, measured.step_time_s))]
    rate = measured.figures.get("output_tokens_per_s")
    figures += [f"{shown(rate)} {SHORT_RATES['output_tokens_per_s']}"] if rate and not is_rate(objective) else []
    for name in ("ttft_s", "tpot_s"):
        middle = measured.figures.get(f"{name}.p50")
        figures += [f"{SHORT_LATENCIES[name]} {shown(middle)} s"] if middle is not None else []
    return ", ".join([*figures, *measured.broken])


def limits_text(limits: Mapping[str, float]) -> str:
    """Return latency limits as text."""
    return ", ".join(f"{name_of(name)} <= {limit:g} s" for name, limit in limits.items())


def name_of(figure: str) -> str:
    """Return the usual name of a statistic of a latency, such as p99 TTFT."""
    of, _, statistic = figure.partition(".")
    return f"{statistic} {SHORT_LATENCIES.get(of, of)}".strip()


def notes(plan: Plan) -> list[str]:
    """Return warnings about percentiles of too few requests."""
    best = plan.best or plan.fastest
    measured = best.measurement if best else None
    answered = [point["answered"] for point in (measured.points if measured else ()) if "answered" in point]
    weak = [name for name, fewest in FEWEST.items() if answered and min(answered) < fewest]
    if not weak:
        return []
    percentiles, need = " and ".join(weak), max(FEWEST[name] for name in weak)
    return [f"{percentiles} of {min(answered):g} requests are unreliable: use num_prompts >= {need}"]


def load_text(point: Mapping[str, Any]) -> str:
    """Return the load of a load point."""
    if "concurrency" in point:
        return _("{count} clients", count=f"{point['concurrency']:g}")
    return _("{rate} requests/s", rate=point["request_rate"]) if "request_rate" in point else ""


def at_load(text: str, load: str) -> str:
    """Return a figure with the load that it was measured at, if there are several."""
    return _("{value} at {load}", value=text, load=load) if load else text


def gain_text(objective: str, gain: float) -> str:
    """Return a speedup as the change of the objective: an increase of a rate, or a decrease of a latency."""
    if objective not in SERVING:
        return f"{gain:+.1%} tokens/s"
    if is_rate(objective):
        return f"{gain:+.1%} {heading(objective)}"
    return f"{1.0 / (1.0 + gain) - 1.0:+.1%} {heading(objective).removesuffix(' s')}"


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
