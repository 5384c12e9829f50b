"""Predictions as plain data, in GiB and seconds: the format of job records, journals, result.json and `flag estimate`.

The functions that read this format raise TypeError, LookupError, ValueError, AttributeError for other data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from flagcore.domain.metrics import LATENCIES, flat_statistics, nest_statistics
from flagcore.domain.prediction import MEMORY, Belief, Interval, ModelPart, Prediction, RankPrediction

GIB = 2**30
COSTS = ("cost_per_million_tokens", "planned_days", "planned_cost")
"""The names of the figures that `flagcore.domain.plan.cost_figures` returns."""
RATES = ("model_tflops_per_device", "mfu")
INTERVALS = ("objective", "step_time_s", "tokens_per_second_per_device")
NESTED = (*LATENCIES, "time")
CACHE = "kv_cache"


def in_gib(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Convert each value in `figures` whose name ends in `_bytes` to GiB, under a name that ends in `_gib`."""
    return {
        name.replace("_bytes", "_gib"): value / GIB if name.endswith("_bytes") and value is not None else value
        for name, value in figures.items()
    }


def in_bytes(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Convert each value in `figures` whose name ends in `_gib` to bytes. This reverses `in_gib`."""
    return {
        name.replace("_gib", "_bytes"): value * GIB if name.endswith("_gib") else value
        for name, value in figures.items()
    }


def prediction_record(found: Prediction) -> dict[str, Any]:
    """Return a prediction as plain data. Unknown figures are left out."""
    data: dict[str, Any] = {"reason": found.reason} if found.reason else {}
    cache = {name: figure for name, figure in found.figures.items() if name.startswith(CACHE)}
    data |= nest_statistics({name: figure for name, figure in found.figures.items() if name not in cache})
    intervals = (found.objective, found.step, found.tokens_per_second_per_device)
    data |= {name: asdict(each) for name, each in zip(INTERVALS, intervals, strict=True) if each}
    data |= found.costs
    data |= {name: rate for name in RATES if (rate := getattr(found, name)) is not None}
    if found.limit:
        data |= {"time": dict(found.time_s), "limit": found.limit}
    memory: dict[str, Any] = {name: getattr(found, name) for name in MEMORY}
    if found.capacity_bytes is not None:
        memory = {"fits": found.fits, "capacity_bytes": found.capacity_bytes, **memory}
    data["memory"] = in_gib({**memory, "worst_stage": found.worst_stage})
    if found.components:
        data["memory"]["components"] = {name: in_gib(part) for name, part in found.components.items()}
    data["memory"] |= in_gib(cache)
    return data | ({"stage_layers": list(found.stage_layers)} if found.stage_layers else {})


def read_prediction(data: Mapping[str, Any]) -> Prediction:
    """Convert the result of `prediction_record` back to a prediction. Other entries of `data` are ignored."""
    memory, is_training = in_bytes(data["memory"]), "limit" in data
    intervals: dict[str, Any] = {name: Interval(**data[name]) for name in INTERVALS if name in data}
    step = intervals.pop("step_time_s", None)
    step_s, low_s, high_s = (step.value, step.low, step.high) if step else (None, None, None)
    named = {*COSTS, *RATES, *["time"] * is_training}  # what is no figure
    own = {name: data[name] for name in data if name in NESTED or isinstance(data[name], float) if name not in named}
    cache = {name: figure for name, figure in memory.items() if name.startswith(CACHE)}
    sizes: dict[str, Any] = {name: memory.get(name) for name in (*MEMORY, "capacity_bytes", "fits", "worst_stage")}
    others = {name: data[name] for name in (*RATES, "limit", "reason") if name in data}
    return Prediction(
        step_time_s=step_s,
        low_s=low_s,
        high_s=high_s,
        time_s=data["time"] if is_training else {},
        **sizes,
        components={name: in_bytes(part) for name, part in memory.get("components", {}).items()},
        figures=flat_statistics(own) | cache,
        costs={name: data[name] for name in COSTS if name in data},
        stage_layers=tuple(data.get("stage_layers", ())),
        **others,
        **intervals,
    )


def belief_record(belief: Belief | None) -> dict[str, Any]:
    """Return the corrected prediction of a strategy as plain data. Empty if the strategy has none."""
    if belief is None:
        return {}
    step = {"value": belief.step_time_s, "low": belief.low_s, "high": belief.high_s}
    gain = {} if belief.max_expected_gain is None else {"max_expected_gain": belief.max_expected_gain}
    return {"step_time_s": step, "chance_to_fit": belief.chance_to_fit, **gain}


def read_belief(data: Mapping[str, Any]) -> Belief | None:
    """Convert the result of `belief_record` back to a belief."""
    if not data:
        return None
    step, others = data["step_time_s"], {name: value for name, value in data.items() if name != "step_time_s"}
    return Belief(step_time_s=step["value"], low_s=step["low"], high_s=step["high"], **others)


def rank_record(figures: RankPrediction) -> dict[str, object]:
    """Return the prediction of a rank as plain data. Unknown values are left out."""
    return {name: value for name, value in in_gib(asdict(figures)).items() if value is not None}


def model_table(parts: Sequence[ModelPart]) -> list[dict[str, object]]:
    """Return the parts of a model as plain data, with their numbers of parameters."""
    names = ("component", "params_per_layer", "layers", "params")
    rows = ((part.name, part.params, part.layers, part.params * part.layers) for part in parts)
    return [dict(zip(names, row, strict=True)) for row in rows]
