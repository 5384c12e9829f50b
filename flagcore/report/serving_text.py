"""Figures of servers as text: the objective, latencies, and what the limits cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median_high
from typing import Any

from flagcore.domain.candidate import Candidate
from flagcore.domain.objective import SERVING, figure_name, is_rate, seconds, told
from flagcore.domain.plan import Plan
from flagcore.domain.serving import LATENCIES, RATES
from flagcore.domain.trial import Measurement, Trial
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
"""Requests of which a percentile leaves out at least one."""
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
    where = _load_of(measured, own)
    figures = [objective_text(objective, told(objective, measured.step_time_s)) + (f" at {where}" if where else "")]
    rates = [name for name in ("output_tokens_per_s", "requests_per_s") if name != own]
    figures += [f"{_number(measured.figures[name])} {SHORT_RATES[name]}" for name in rates if name in measured.figures]
    for name, short in SHORT_LATENCIES.items():
        known = [(each, measured.figures.get(f"{name}.{each}")) for each in ("p50", "p99")]
        told_of = ", ".join(f"{each} {_number(value)}" for each, value in known if value is not None)
        if told_of and name != "itl_s":
            figures.append(f"{short} {told_of} s")
    return "; ".join(figures)


def short_line(measured: Measurement, objective: str) -> str:
    """Return the figures of a measurement that fit beside others in a line of progress, the objective first."""
    said = [objective_text(objective, told(objective, measured.step_time_s))]
    rate = measured.figures.get("output_tokens_per_s")
    said += [f"{_number(rate)} {SHORT_RATES['output_tokens_per_s']}"] if rate and not is_rate(objective) else []
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
    """Return what the limits are and what they cost: how much better the best load point that breaks them is."""
    if not plan.limits:
        return []
    lines = [f"  it keeps {limits_text(plan.limits)}"]
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
        return [*lines, "  the limits cost nothing: nothing that ran is better"]
    where = load_text(point) if len(best.measurement.points) > 1 else ""
    broken = [
        f"{each} is {_number(point[each])} s" for each, most in plan.limits.items() if point.get(each, 0.0) > most
    ]
    reached = objective_text(plan.objective, told(plan.objective, step)) + (f" at {where}" if where else "")
    why = ", ".join(broken) or "it broke them when it ran again"
    return [*lines, f"  the limits have a price: trial {trial.number} gave {reached}, but {why}"]


def notes(plan: Plan) -> list[str]:
    """Return what is to be known of a plan's figures: percentiles of so few requests that they say little."""
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
    told = f"{' and '.join(weak)} are" if len(weak) > 1 else f"{weak[0]} is"
    need = max(FEWEST[name] for name in weak)
    return [f"{told} of {few} requests only, hardly more than the slowest of them: num_prompts of {need} or more tell"]


def load_text(point: Mapping[str, Any]) -> str:
    """Return which load a point is of."""
    if "concurrency" in point:
        return f"{point['concurrency']:g} clients"
    return f"{point['request_rate']} requests/s" if "request_rate" in point else ""


def front_table(plan: Plan) -> str:
    """Return throughput against latency, a line a load point that no other beats; nothing for one load point."""
    if not any(trial.measurement and len(trial.measurement.points) > 1 for trial in plan.trials):
        return ""
    rows = [
        [str(point["trial"]), load_text(point), *(_number(point[name]) if name in point else "-" for name in FRONT)]
        for point in front(plan)
    ]
    named = ["output tok/s", "TPOT p50 s", "TTFT p50 s", "TTFT p99 s"]
    return f"Throughput against latency, what no other load point beats:\n{table(['trial', 'load', *named], rows)}"


def gain_text(objective: str, gain: float) -> str:
    """Return a gain in words: more of a rate, or less of a latency."""
    if is_rate(objective):
        return f"{gain:+.1%} {heading(objective)}"
    return f"{1.0 / (1.0 + gain) - 1.0:+.1%} {heading(objective).removesuffix(' s')}"


def nearest(plan: Plan) -> tuple[Trial, float] | None:
    """Return the measured trial that misses the limits by least, and by which factor; None if none was measured.

    Of a candidate that ran several times the median of its runs counts, of two the worse.
    """
    missed = [
        (trial, median_high([_missed(run.measurement, plan.limits) for run in _runs(plan, trial) if run.measurement]))
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
    given = Candidate(tuple(each for each in trial.candidate.items if each[1] is not None))
    broken = [
        (run.number, "; ".join(run.measurement.broken))
        for run in _runs(plan, trial)
        if run.measurement and run.measurement.broken
    ]
    return f"{line}; the nearest is trial {trial.number} ({given}): {broken_text(trial.number, broken)}"


def broken_text(number: int, broken: Sequence[tuple[int, str]]) -> str:
    """Return which limits a trial broke, or its repeats did; `broken` has numbers of runs with what each broke."""
    own = [why for run, why in broken if run == number]
    again = [f"trial {run}: {why}" for run, why in broken if run != number]
    return own[0] if own else f"it broke them when it ran again ({', '.join(again)})" if again else ""


def _runs(plan: Plan, trial: Trial) -> list[Trial]:
    """Return a trial and its repeats."""
    return [trial, *(each for each in plan.repeats if each.candidate == trial.candidate)]


def _missed(measured: Measurement, limits: Mapping[str, float]) -> float:
    """Return by which factor figures miss the limits, below 1 where they keep them."""
    return max(measured.figures.get(name, float("inf")) / limit for name, limit in limits.items())


def cells(trial: Trial, objective: str, base: float | None) -> list[str]:
    """Return the figures of one trial for a table with the columns of `HEADINGS`."""
    predicted = lookup(trial.predicted, "objective.value")
    guess = f"~{_number(predicted)}" if isinstance(predicted, float) else "-"
    measured = trial.measurement
    if measured is None:
        return ["-", "-", guess, "-", "-", "-", "-"]
    spread = f"{measured.spread_s / measured.step_time_s:.1%}" if len(measured.step_times_s) > 1 else "-"
    change = gain_text(objective, base / measured.step_time_s - 1.0).split()[0] if base else "-"
    latencies = [measured.figures.get(name) for name in ("ttft_s.p50", "ttft_s.p99", "tpot_s.p50")]
    return [
        _number(told(objective, measured.step_time_s)) + (" !" if measured.broken else ""),
        spread,
        guess,
        change,
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


def _load_of(measured: Measurement, name: str) -> str:
    """Return of which load point the figures of a measurement are; nothing where it has one only."""
    if len(measured.points) < 2:
        return ""
    return next((load_text(point) for point in measured.points if point.get(name) == measured.figures[name]), "")


def _number(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 1000 else f"{figure:.4g}"
