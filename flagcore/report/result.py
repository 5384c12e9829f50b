"""A plan as plain data, the format of `result.json` and of `flag tune --format json`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from flagcore.domain.front import pareto
from flagcore.domain.interference import Interference
from flagcore.domain.objective import SERVING, is_rate, objective_value
from flagcore.domain.plan import Plan, measured_to_predicted
from flagcore.domain.serving import PER_DEVICE, PER_USER, nest_statistics
from flagcore.domain.trial import Measurement, Trial
from flagcore.i18n import Message
from flagcore.report.text import notes as notes_of

SCHEMA_VERSION = 1
GIB = 2**30


def result(plan: Plan, run_dir: str) -> dict[str, Any]:
    """Return a plan in the format of result.json, in seconds, GiB, and tokens per second and device."""
    return {
        "schema_version": SCHEMA_VERSION,
        "run_dir": run_dir,
        "chip": plan.chip,
        "devices": plan.devices,
        "objective": {"name": plan.objective, "direction": "max" if is_rate(plan.objective) else "min"},
        "fidelity": plan.fidelity,
        "stopped_because": plan.stopped_because,
        **({"stopped_message": because.record} if isinstance(because := plan.stopped_because, Message) else {}),
        "counts": asdict(plan.counts),
        "baseline": trial(plan.baseline) if plan.baseline else None,
        "best": trial(plan.best) if plan.best else None,
        **({"limits": dict(plan.limits), "fastest": plan.fastest and plan.fastest.number} if plan.limits else {}),
        "gain": plan.gain,
        "gains": list(plan.gains),
        "speedup": asdict(plan.speedup) if plan.speedup else None,
        "noise": {
            "drift": plan.drift,
            "drifted": plan.drifted,
            "cold_start": plan.cold_start,
            "cold_start_differs": plan.cold_start_differs,
            "not_told_apart": [each.number for each in plan.rivals],
            "medians": [{"trial": number, plan.objective: figure} for number, figure in medians(plan).items()],
        },
        "side_by_side": _side_by_side(plan.interference) if plan.interference else None,
        "predictions_off": asdict(plan.prediction_error) if plan.prediction_error else None,
        "trials": [trial(each) for each in plan.trials],
        "repeats": [trial(each) for each in plan.repeats],
        "probes": [trial(each) for each in plan.probes],
        "slow_devices": slow_devices(plan),
        **(
            {"front": [nest_statistics(point) for point in _front(plan)], "notes": notes_of(plan)}
            if plan.objective in SERVING
            else {}
        ),
    }


def _side_by_side(found: Interference) -> dict[str, Any]:
    """Return whether trials ran side by side, and the slowdown as a share of the time alone."""
    return {**asdict(found), "quiet": found.is_negligible, "text": found.text, "message": found.text.record}


def _front(plan: Plan) -> list[Mapping[str, Any]]:
    """Return the Pareto-optimal load points of output tokens per second of a device and of a user, fastest first.

    A user's rate is the inverse of the median time per token.
    """
    points = [
        {"trial": trial.number, **point, PER_USER: 1.0 / point["tpot_s.p50"]}
        for trial in plan.trials
        if trial.measurement
        for point in trial.measurement.points
        if point.get(PER_DEVICE) and point.get("tpot_s.p50")
    ]
    by_device, by_user = (np.array([point[name] for point in points]) for name in (PER_DEVICE, PER_USER))
    return [points[index] for index in pareto(by_device, by_user)]


def slow_devices(plan: Plan) -> dict[str, list[int]]:
    """Return the warnings about slow devices, without their figures, each with the numbers of its trials."""
    found: dict[str, list[int]] = {}
    for each in (*plan.trials, *plan.repeats):
        for line in each.measurement.slow if each.measurement else ():
            found.setdefault(re.split(" (?:takes|runs) ", line)[0], []).append(each.number)
    return found


def medians(plan: Plan) -> dict[int, float]:
    """Return the median of the objective of each repeated candidate, by the number of its first trial."""
    by_number = {each.number: each.measurement for each in (*plan.trials, *plan.repeats)}
    return {number: objective_value(plan.objective, step, by_number[number]) for number, step in plan.medians.items()}


def trial(each: Trial) -> dict[str, Any]:
    """Return one trial as plain data."""
    search_fields = each.search_fields
    run_fields = {name: search_fields.pop(name, None) for name in ("time_limit", "shortened", "group")}
    return {
        "number": each.number,
        "role": each.role.value,
        "candidate": each.candidate.as_dict(),
        "state": each.state.value,
        "reason": each.reason,
        "fidelity": each.fidelity,
        "inconclusive": each.inconclusive,
        "warm": each.warm,
        **run_fields,
        "predicted": {**each.predicted, **search_fields},
        "measured": _measured(each.measurement) if each.measurement else None,
        "measured_over": {name: measured_to_predicted(each, name) for name in ("predicted", "believed")},
        "duration_s": each.duration_s,
        "log": each.log,
        "source": each.source,
    }


def _measured(measured: Measurement) -> dict[str, Any]:
    data: dict[str, Any] = {
        "step_time_s": {
            "median": measured.step_time_s,
            "spread": measured.spread_s,
            "n": len(measured.step_times_s),
            "steps": list(measured.step_times_s),
        },
        "tokens_per_second_per_device": measured.tokens_per_second_per_device,
        "losses": list(measured.losses),
        "effective": dict(measured.effective),
        "versions": dict(measured.versions),
        "telemetry": dict(measured.telemetry),
        "devices": [dict(each) for each in measured.devices],
        "slow_devices": list(measured.slow),
    }
    for name in ("peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes"):
        figure = getattr(measured, name)
        if figure is not None:
            data[name.replace("_bytes", "_gib")] = figure / GIB
    if measured.scaled_from is not None:
        data["step_time_s"]["scaled_from"] = measured.scaled_from
    if measured.modelled_s is not None:
        data["step_time_s"] |= {"modelled": measured.modelled_s, "low": measured.low_s, "high": measured.high_s}
    if measured.figures:
        points = [nest_statistics(point) for point in measured.points]
        data |= {"figures": nest_statistics(measured.figures), "points": points, "broken": list(measured.broken)}
    return data | ({"partial": True} if measured.partial else {})
