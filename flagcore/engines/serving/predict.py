"""Memory, latencies and rates of servers for whole columns of candidates."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np

from flagcore.contracts import Costs, KernelCosts
from flagcore.domain.objective import figure_name, is_rate
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import FloatArray
from flagcore.domain.spec import Task
from flagcore.engines.serving.common.heterogeneous import InstanceKinds, uniform
from flagcore.engines.serving.common.weights import parameters
from flagcore.engines.serving.model.iteration import iteration_costs
from flagcore.engines.serving.model.memory import ServingMemory, serving_memory, table_bytes
from flagcore.engines.serving.model.work import Overheads, Serving, Split
from flagcore.engines.serving.settings import GRAPH_TOKENS, Settings
from flagcore.engines.serving.simulate import Candidates, expected_figures, time_parts

STORED = {"q4_0": 18 / 32, "q4_k": 144 / 256, "q4_k_m": 0.6, "q5_k_m": 0.71, "q6_k": 210 / 256, "q8_0": 34 / 32}
STORED |= {"int4": 0.53, "awq": 0.53, "gptq": 0.53, "w4a16": 0.53}
"""Bytes of a weight that is stored narrower than computed: GGUF blocks; 4 bits with a scale for each 128."""

COMPUTED = ("bf16", "fp16", "fp32")
"""Formats in which such weights, and those in formats unknown to the chip, are computed: the first that it has."""

BOUNDS = {
    "rate": (0.92, 1.41),
    "tpot_s": (0.92, 1.35),
    "itl_s": (0.8, 1.5),
    "ttft_s": (0.7, 1.97),
    "e2e_s": (0.97, 1.48),
}
"""Factors on the prediction that hold for 80% of published points, each predicted by a fit to the others;
ITL is estimated."""

NO_GOOD_SHARE = 1e-3
"""The share of good requests that represents none, so that goodput can be compared."""

NARROW = 1.9
"""Bytes of a weight below which a file has weights of less than 16 bits."""

WIDER = 2.0
"""How much wider, as a factor, intervals are if the chip was not measured or the engine not fitted."""


def predict(
    task: Task,
    settings: Settings,
    costs: Costs,
    overheads: Overheads,
    *,
    graph_tokens: int = GRAPH_TOKENS,
    untested: bool = False,
    kinds: InstanceKinds | None = None,
) -> Predictions:
    """Return memory and figures of each candidate; times are NaN if facts about the chip are missing.

    `settings` are those of `kinds` of instances, or, without, of candidates whose instances are all alike. Memory is
    that of the fullest device. Of several load points, a candidate's figures are those of one, chosen as in
    `flagcore.engines.serving.reading.read`. Intervals are wider for an engine that is `untested`.
    """
    serve = task.spec.serve
    serving = serving_of(task, costs.kernels, overheads)
    split = split_of(settings, graph_tokens)
    memory = memory_of(serving, split, settings, costs)
    times = iteration_costs(serving, split, costs)
    kinds = kinds or uniform(settings.instances)
    context = Candidates(
        kinds=kinds,
        serve=serve,
        objective=task.spec.objective,
        settings=settings,
        split=split,
        memory=memory,
        times=times,
        overheads=overheads,
    )
    figures = expected_figures(context)
    figures["output_tokens_per_s_per_device"] = figures["output_tokens_per_s"] / kinds.total(settings.devices)
    figures["kv_cache_tokens"] = kinds.total(np.maximum(memory.cache_tokens, 0.0))
    figures |= {f"time.{part}": seconds for part, seconds in time_parts(context, figures).items()}
    wider = WIDER if costs.guessed or costs.synchronous or untested else 1.0
    return _predictions(context, figures, costs, wider)


def serving_of(task: Task, kernels: KernelCosts, over: Overheads) -> Serving:
    """Return the data that all candidates share. A format that the chip does not compute in is only stored.

    For weights in one file (GGUF), the file has the stored size, and `precision` is that of computing.
    """
    model, precision = task.spec.model, task.spec.serve.precision
    one, filed = np.ones(1), _file_weight_bytes(task)
    if precision not in STORED and filed is None and np.isfinite(kernels.gemm_seconds(one, one, one, precision)).all():
        return Serving(model=model, precision=precision, overheads=over)
    known = [name for name in COMPUTED if np.isfinite(kernels.gemm_seconds(one, one, one, name)).all()]
    stored = filed or STORED.get(
        precision, {"fp8": 1.0, "mxfp8": 1.0, "int8": 1.0, "nvfp4": 0.5625, "fp4": 0.5625}.get(precision)
    )
    wide = precision if filed and precision in known else known[0] if known else "bf16"
    return Serving(model=model, precision=wide, overheads=over, weight_bytes=stored)


def _file_weight_bytes(task: Task) -> float | None:
    """Return the bytes of a weight in a file with less than 16 bits for each; None without such a file."""
    weights = task.spec.serve.weights
    if weights is None or not os.path.isfile(weights):
        return None
    each = os.path.getsize(weights) / parameters(task.spec.model)
    return each if each < NARROW else None


def split_of(settings: Settings, captured_tokens: int = GRAPH_TOKENS) -> Split:
    """Return how candidates split the work."""
    names = ("tensor", "data", "expert", "pipeline", "instances", "pass_tokens")
    counts = {name: np.maximum(getattr(settings, name).astype(np.float64), 1.0) for name in names}
    ranks = counts["tensor"] * counts["data"] * counts["pipeline"]
    captured = np.minimum(captured_tokens, 2.0 * settings.max_running)
    return Split(
        **counts,
        cores=np.maximum(settings.devices / ranks, 1.0),
        captured=np.where(settings.graphs > 0, captured, 0.0),
        cache_bytes=settings.cache_element_bytes.astype(np.float64),
    )


def memory_of(serving: Serving, split: Split, settings: Settings, costs: Costs) -> ServingMemory:
    """Return the memory of a device. Driver and libraries reduce what an engine can use."""
    capacity = costs.memory.capacity_bytes()
    none = float(costs.memory.device_used_bytes(np.zeros(1))[0]) if not serving.overheads.activations_beside else 0.0
    budget = (
        np.full(settings.instances.shape, np.inf) if capacity is None else settings.memory_fraction * capacity - none
    )
    memory = serving_memory(
        serving,
        split,
        budget=budget,
        own_cache=settings.cache_bytes,
        batched_tokens=settings.max_batched_tokens.astype(np.float64),
        running=settings.max_running.astype(np.float64),
    )
    return memory if settings.on_device is None else _offloaded(serving, split, memory, settings.on_device)


def _offloaded(serving: Serving, split: Split, memory: ServingMemory, on_device: FloatArray) -> ServingMemory:
    """Return the memory of a device if the host has some layers, the tables and their cache."""
    model = serving.model
    part = np.minimum(on_device * (model.num_layers + 1) / model.num_layers, 1.0)
    layers = np.maximum(memory.weights - table_bytes(model, split), 0.0) * part
    weights = np.where(on_device < 1.0, layers, memory.weights)
    return replace(memory, weights=weights, cache=memory.cache * part, token=memory.token * part)


def _predictions(context: Candidates, figures: dict[str, FloatArray], costs: Costs, wider: float) -> Predictions:
    objective, memory, settings = context.objective, context.memory, context.settings
    name = figure_name(objective)
    figure = figures.get(name, figures["output_tokens_per_s"])
    if objective == "goodput_requests_per_s":  # so that candidates without good requests can be compared
        figure = np.where(figure > 0, figure, NO_GOOD_SHARE * figures["requests_per_s"])
    with np.errstate(divide="ignore"):
        time = 1.0 / figure if is_rate(objective) else figure
    low, high = BOUNDS["rate" if is_rate(objective) else name.partition(".")[0]]
    capacity = costs.memory.capacity_bytes()
    least = memory.weights + memory.activations + memory.graphs
    one = settings.context_len * memory.token
    cache = np.where(np.isinf(memory.cache), one, memory.cache)  # unknown room: what one request needs
    needed = least + np.maximum(cache, one)
    reserved = np.where(np.isnan(settings.cache_bytes), needed, costs.memory.reserved_bytes(needed))
    used = costs.memory.device_used_bytes(reserved)
    if capacity is not None:  # an engine does not start without room for one request
        outside = np.where(np.isnan(settings.memory_fraction), 0.0, (1.0 - settings.memory_fraction) * capacity)
        used = np.where(memory.cache < one, np.maximum(used + outside, capacity * (1.0 + 1e-9)), used)
    fullest, cache = context.kinds.worst(used), np.maximum(cache, 0.0)
    figures["kv_cache_gib"] = np.maximum(memory.cache, 0.0)[fullest] / 2**30
    return Predictions(
        step_time_s=time,
        low_s=time * low / wider,
        high_s=time * high * wider,
        time_s={},
        static_bytes=(memory.weights + cache)[fullest],
        activation_bytes=(memory.activations + memory.graphs)[fullest],
        peak_allocated_bytes=needed[fullest],
        reserved_bytes=reserved[fullest],
        device_used_bytes=used[fullest],
        worst_stage=np.zeros(time.shape, dtype=np.int64),
        capacity_bytes=capacity,
        model_flops=0.0,
        figures=figures,
    )
