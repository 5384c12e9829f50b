"""Converts a plan to and from result.json, which is plain data in seconds and GiB."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from flagcore.domain.plan import Counts, Plan, measured_to_predicted
from flagcore.domain.serving import PER_DEVICE, PER_USER, nest_statistics
from flagcore.domain.space import Candidate
from flagcore.domain.spec import SERVING, is_rate, objective_value, pareto
from flagcore.domain.trial import SEARCH_FIELDS, Measurement, Role, Trial, TrialState
from flagcore.i18n import Message, _, from_record
from flagcore.report.text import notes

SCHEMA_VERSION = 1
GIB = 2**30
SIZES = {f"{name}_gib": f"{name}_bytes" for name in ("peak_allocated", "peak_reserved", "device_used")}
STEPS = {"scaled_from": "scaled_from", "modelled": "modelled_s", "low": "low_s", "high": "high_s"}
"""Fields of a measurement, with their names in JSON. The JSON contains only the fields that are known."""
RUN_FIELDS = ("time_limit", "shortened", "group")
"""The fields of SEARCH_FIELDS that JSON does not store next to the prediction."""
NOISE = ("drift", "drifted", "cold_start", "cold_start_differs")


def number(value: Any) -> float | None:
    """Return a number as float, or None for anything else."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def result(plan: Plan, run_dir: str) -> dict[str, Any]:
    """Return a plan in the format of result.json."""
    because = plan.stopped_because
    fastest = plan.fastest.number if plan.fastest else None
    return {
        "schema_version": SCHEMA_VERSION,
        "run_dir": run_dir,
        "chip": plan.chip,
        "devices": plan.devices,
        "objective": {"name": plan.objective, "direction": "max" if is_rate(plan.objective) else "min"},
        "fidelity": plan.fidelity,
        "stopped_because": because,
        **({"stopped_message": because.record} if isinstance(because, Message) else {}),
        "counts": asdict(plan.counts),
        "baseline": trial(plan.baseline) if plan.baseline else None,
        "best": trial(plan.best) if plan.best else None,
        **({"limits": dict(plan.limits), "fastest": fastest} if plan.limits else {}),
        "gain": plan.gain,
        "gains": list(plan.gains),
        "speedup": asdict(plan.speedup) if plan.speedup else None,
        "noise": {
            **{name: getattr(plan, name) for name in NOISE},
            "not_told_apart": [each.number for each in plan.rivals],
            "medians": list(_medians(plan)),
        },
        "side_by_side": _side_by_side(plan),
        "predictions_off": asdict(plan.prediction_error) if plan.prediction_error else None,
        "trials": [trial(each) for each in plan.trials],
        "repeats": [trial(each) for each in plan.repeats],
        "probes": [trial(each) for each in plan.probes],
        "slow_devices": slow_devices(plan),
        "notes": notes(plan),
        **({"front": [nest_statistics(point) for point in front(plan)]} if plan.objective in SERVING else {}),
    }


def trial(each: Trial) -> dict[str, Any]:
    """Return a trial in the format of result.json.

    `measured_over` contains ratios of the measured step time: to the time as `predicted` before all trials, and to the
    time as `believed`.
    """
    search_fields = each.search_fields
    run_fields = {name: search_fields.pop(name, None) for name in RUN_FIELDS}
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
        "measured_over": {
            "predicted": measured_to_predicted(each, "predicted"),
            "believed": measured_to_predicted(each, "believed"),
        },
        "duration_s": each.duration_s,
        "log": each.log,
        "source": each.source,
        **({"finished_steps_s": list(each.finished_steps_s)} if each.finished_steps_s else {}),
        **({"telemetry": dict(each.telemetry)} if each.telemetry else {}),
    }


def _measured(measured: Measurement) -> dict[str, Any]:
    """Return a measurement as plain data. The `figures` of a server contain nested statistics of latencies."""
    steps = {name: value for name, field in STEPS.items() if (value := getattr(measured, field)) is not None}
    sizes = {name: size / GIB for name, field in SIZES.items() if (size := getattr(measured, field)) is not None}
    served: dict[str, Any] = {}
    if measured.figures:
        points = [nest_statistics(point) for point in measured.points]
        served = {"figures": nest_statistics(measured.figures), "points": points, "broken": list(measured.broken)}
    return {
        "step_time_s": {
            "median": measured.step_time_s,
            "spread": measured.spread_s,
            "n": len(measured.step_times_s),
            "steps": list(measured.step_times_s),
            **steps,
        },
        "tokens_per_second_per_device": measured.tokens_per_second_per_device,
        "losses": list(measured.losses),
        "effective": dict(measured.effective),
        "versions": dict(measured.versions),
        "telemetry": dict(measured.telemetry),
        "devices": [dict(each) for each in measured.devices],
        "slow_devices": list(measured.slow),
        **sizes,
        **served,
        **{name: True for name in ("few_steps", "partial") if getattr(measured, name)},
    }


def read_trial(data: Mapping[str, Any]) -> Trial:
    """Convert the result of `trial` back to a trial.

    Raises TypeError, LookupError, ValueError, AttributeError for other data.
    """
    predicted, measured = dict(data.get("predicted") or {}), data.get("measured")
    saved = {**data, **{name: predicted.pop(name) for name in SEARCH_FIELDS if name in predicted}}
    search_fields = {n: parse(saved[n]) for n, parse in SEARCH_FIELDS.items() if saved.get(n) is not None}
    names = ("reason", "fidelity", "inconclusive", "warm", "duration_s", "log", "source", "telemetry")
    return Trial(
        number=int(data["number"]),
        candidate=Candidate.of(data["candidate"]),
        role=Role(data.get("role", Role.SEARCH.value)),
        state=TrialState(data.get("state", TrialState.MEASURED.value)),
        predicted=predicted,
        measurement=_read_measured(measured) if measured else None,
        finished_steps_s=tuple(data.get("finished_steps_s") or ()),
        **{name: data[name] for name in names if name in data},
        **search_fields,
    )


def _read_measured(data: Mapping[str, Any]) -> Measurement:
    step = data["step_time_s"]
    known: dict[str, Any] = {field: int(data[name] * GIB) for name, field in SIZES.items() if name in data}
    known |= {field: step[name] for name, field in STEPS.items() if name in step}
    names = ("effective", "versions", "telemetry", "few_steps", "partial")
    return Measurement(
        step_times_s=tuple(step.get("steps") or ()),
        step_time_s=float(step["median"]),
        spread_s=step.get("spread", 0.0),
        tokens_per_second_per_device=float(data["tokens_per_second_per_device"]),
        losses=tuple(data.get("losses") or ()),
        devices=tuple(data.get("devices") or ()),
        slow=tuple(data.get("slow_devices") or ()),
        figures=_flat(data.get("figures") or {}),
        points=tuple(_flat(point) for point in data.get("points") or ()),
        broken=tuple(data.get("broken") or ()),
        **{name: data[name] for name in names if name in data},
        **known,
    )


def _flat(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return figures by flat names, which reverses `nest_statistics`."""
    nested = {name: value for name, value in figures.items() if isinstance(value, Mapping)}
    statistics = {f"{name}.{each}": figure for name, value in nested.items() for each, figure in value.items()}
    return {name: value for name, value in figures.items() if name not in nested} | statistics


def read_plan(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the plan in a result.json, except for `medians`, `interference` and `knobs`.

    Raises TypeError, LookupError, ValueError, AttributeError for other data.
    """
    lists = {name: tuple(map(read_trial, data.get(name) or ())) for name in ("trials", "repeats", "probes")}
    by_number, noise = {each.number: each for each in lists["trials"]}, data.get("noise") or {}
    return {
        **{name: data[name] for name in ("chip", "devices", "fidelity")},
        **{name: read_trial(data[name]) if data.get(name) else None for name in ("best", "baseline")},
        **lists,
        "objective": data["objective"]["name"],
        "counts": Counts(**data["counts"]),
        "stopped_because": data.get("stopped_because") or "",
        "gains": tuple(data.get("gains") or ()),
        "rivals": tuple(each for each in lists["trials"] if each.number in noise.get("not_told_apart", ())),
        **{name: noise[name] for name in NOISE if name in noise},
        "fastest": by_number.get(data.get("fastest", -1)),
        "limits": data.get("limits") or {},
    }


def stop_reason(data: Mapping[str, Any]) -> str:
    """Return why the run of a result.json stopped, in the selected language.

    It is empty while the run is in progress.
    """
    return from_record(data.get("stopped_because") or "", data.get("stopped_message"))


def noise_warnings(plan: Plan) -> Iterator[str]:
    """Yield warnings if the machine became faster or slower, and if cold trials differ from warm ones."""
    if plan.drifted and plan.drift is not None:
        yield _(
            "machine drift: the speed of the baseline changed by {drift:+.1%} between its first and last run; "
            "results of trials that are far apart in time may differ by as much",
            drift=plan.drift,
        )
    if plan.cold_start_differs:
        yield _(
            "the speed of a candidate changed by {change:+.1%} when it started cold, more than noise: set "
            "auto_tuner.control.warm_start: false, and tune again with --new",
            change=plan.cold_start,
        )


def _side_by_side(plan: Plan) -> dict[str, Any] | None:
    """Return whether trials ran side by side, and their slowdown as a share of the time alone.

    It is None if unknown.
    """
    if (found := plan.interference) is None:
        return None
    return {**asdict(found), "quiet": found.is_negligible, "text": found.text, "message": found.text.record}


def front(plan: Plan) -> list[Mapping[str, Any]]:
    """Return the Pareto-optimal load points of output tokens per second, per device and per user, fastest first.

    The rate of a user is the inverse of the median time per token.
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
    """Return the warnings about slow devices without their figures, each with the numbers of its trials."""
    found: dict[str, list[int]] = {}
    for each in (*plan.trials, *plan.repeats):
        for line in each.measurement.slow if each.measurement else ():
            found.setdefault(re.split(" (?:takes|runs) ", line)[0], []).append(each.number)
    return found


def _medians(plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield the median of the objective of each repeated candidate, with the number of its first trial."""
    by_number = {each.number: each.measurement for each in (*plan.trials, *plan.repeats)}
    for first, step in plan.medians.items():
        yield {"trial": first, plan.objective: objective_value(plan.objective, step, by_number[first])}
