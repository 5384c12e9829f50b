"""Combines memory, iteration times and simulated loads into the predictions of candidates."""

import math
import os
from dataclasses import fields, replace
from typing import TypeVar

import numpy as np
from flagcore_models.layers import parameters, state_bytes

from flagcore.contracts import Costs, KernelCosts, communicator_bytes
from flagcore.domain.model import Model
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import BoolArray, FloatArray
from flagcore.domain.spec import Task, figure_name, is_rate
from flagcore.physics.roofline import BYTES
from flagcore_serving.model.adapters import swap_seconds
from flagcore_serving.model.attention import REFERENCE_TOKENS
from flagcore_serving.model.candidates import Candidates, expected_figures, time_parts
from flagcore_serving.model.iteration import NODES, IterationCosts, at_counts, iteration_costs
from flagcore_serving.model.memory import ServingMemory, serving_memory
from flagcore_serving.model.simulated_load import SimulatedLoad
from flagcore_serving.model.simulation import Simulation
from flagcore_serving.model.speculation import drafts, uncertainty
from flagcore_serving.model.tiers import tiers_of
from flagcore_serving.model.vision import encoder_costs
from flagcore_serving.model.work import HOST_RATE, AdaptedRequests, Overheads, Serving
from flagcore_serving.space.hardware import Hardware
from flagcore_serving.space.placement import ENCODES, InstanceKinds, uniform_kinds
from flagcore_serving.space.settings import Settings
from flagcore_serving.space.weights import (
    ATTENTION,
    EXPERTS,
    STORED_BYTES,
    Quantization,
    cache_bytes_per_token,
    cached_heads,
    quantization,
)

T = TypeVar("T", IterationCosts, ServingMemory)
COMPUTE_FORMATS = ("bf16", "fp16", "fp32")
"""Compute formats for weights whose own format serves only for storage, or is not supported by the chip. The first
format that the chip supports is used.
"""

BOUNDS = {
    "rate": ((0.86, 1.3), (0.82, 2.58), (0.65, 1.71)),
    "tpot_s": ((0.82, 1.29), (0.77, 2.82), (0.74, 1.35)),
    "itl_s": ((0.8, 1.3), (0.75, 2.8), (0.72, 1.4)),
    "ttft_s": ((0.72, 2.37), (0.82, 2.53), (0.64, 4.62)),
    "e2e_s": ((0.86, 1.3), (0.82, 2.58), (0.65, 1.71)),
}
"""80% intervals of times relative to the prediction: of closed loops, of open loops such as bursts, and of servers that
are apart (prefill or decode only) or span hosts. They are quantiles over published points (benchmarks/LOG.md). Those
of ITL and of the time of a request are estimates."""

OVERLAPPED = 0.25
"""Share of the host's time per sequence that remains if a knob lets the host schedule while the device computes. Chosen
with 16 bursts on two accelerators (benchmarks/LOG.md)."""

NO_GOOD_SHARE = 1e-3
"""Assumed share of requests within the SLO if no request is, so that such candidates can still be ordered."""

NARROW_BYTES = 1.9
"""A file with fewer bytes per weight than this stores weights in fewer than 16 bits."""

WIDTH_FACTOR = 2.0
"""Factor on both ends of an interval if the chip was not measured, the engine was not fitted, weights are read from the
host or computed there, or caches are loaded from other tiers. `Overheads.compared` or `uncalibrated` is used instead if
only the chip was not measured, or only its matrix products."""

NETWORK_FACTOR = 1.2
"""An additional factor on both ends if the rate of the network between hosts is assumed. A choice."""


def predict(
    task: Task,
    settings: Settings,
    costs: Costs,
    overheads: Overheads,
    *,
    untested: bool = False,
    kinds: InstanceKinds | None = None,
    draft: Model | None = None,
    simulates: bool = True,
    simulation: type[Simulation] | None = None,
) -> Predictions:
    """Return memory and metrics of each candidate. Times are NaN if facts about the chip are missing.

    `settings` has one row per kind of instance in `kinds`. If `kinds` is None, all instances of a candidate are equal.
    Memory refers to the fullest device. With several load points, the metrics refer to the point that
    `flagcore_serving.trial.reading.read` chooses. Intervals are wider for an `untested` engine. `draft`: the model that
    drafts tokens, if it is known. Without `simulates`, metrics are in closed form, without the parts of times.
    `simulation`: as in `Price`.
    """
    kinds = kinds or uniform_kinds(settings.instances)
    settings = settings.encoding(kinds.role == ENCODES)
    if not costs.synchronous:
        settings = replace(settings, crowding=crowding(task, kinds, settings))
    serving, vision, serve = serving_of(task, costs.kernels, overheads, draft), task.spec.model.vision, task.spec.serve
    memory, times = _memory_and_times(task, serving, settings, costs)
    encoder = None if vision is None else encoder_costs(vision, serving, settings, costs)
    context = Candidates(
        kinds=kinds,
        task=task,
        loads=[SimulatedLoad.draw(load, vision, prefix_aware=serve.prefix_aware) for load in serve.loads],
        settings=settings,
        memory=memory,
        times=times,
        overheads=overheads,
        transfer=transfer_seconds(task, kinds, settings, costs),
        swap_s=swap_seconds(serving, settings),
        about=repr(overheads),
        has_states=state_bytes(task.spec.model) > 0.0,
        encoder=encoder,
        tiers=tiers_of(task, serving, settings, memory, costs),
        simulation=simulation,
    )
    figures = expected_figures(context, simulates=simulates)
    figures["output_tokens_per_s_per_device"] = figures["output_tokens_per_s"] / kinds.total(settings.devices)
    tokens = np.maximum(memory.longest_tokens, 0.0)
    figures["kv_cache_tokens"] = kinds.total(np.where(np.isin(kinds.role, (0, 2)), tokens, 0.0))
    if settings.fits_context.any():  # the longest sequence that an instance accepts
        fitting = np.floor(np.minimum(settings.context_len, tokens / settings.data))
        figures["context_tokens"] = np.where(settings.fits_context, fitting, settings.context_len)[kinds.first_rows]
    figures["kv_cache_request_bytes"] = (memory.token * max(serving.tokens, 1.0))[kinds.first_rows]
    if simulates:
        figures |= {f"time.{part}": seconds for part, seconds in time_parts(context, figures).items()}
    unmeasured = costs.synchronous or untested or bool(settings.offloaded.any() or settings.prefetched.any())
    factor = overheads.compared or overheads.uncalibrated or (WIDTH_FACTOR if costs.guessed else 1.0)
    loads = np.nan_to_num(figures.get("cache_load_s", np.zeros(kinds.size)))
    on_host = np.zeros(kinds.size)
    np.maximum.at(on_host, kinds.owner, settings.experts_on_host)
    width_factor = np.where(unmeasured | (loads > 0.0) | (on_host > 0.0), WIDTH_FACTOR, factor)
    width_factor = width_factor * np.maximum.reduceat(uncertainty(serve.loads, settings), kinds.first_rows)
    width_factor = width_factor * (NETWORK_FACTOR if costs.assumed_network else 1.0)
    return _predictions(context, figures, costs, width_factor)


def transfer_seconds(task: Task, kinds: InstanceKinds, settings: Settings, costs: Costs) -> FloatArray:
    """Return the seconds to send the cache of one prompt token from a prefill instance to a decode instance, and the
    embedding of one token of an image from an instance that encodes.

    All ranks send at the same time, and each link carries an equal part of the cache. The number of parts is the
    smaller of the two instances' numbers of different parts. The link connects hosts unless both instances fit on one
    host. The time is 0 for instances that both prefill and decode.
    """
    if not kinds.role.any():
        return np.zeros(kinds.owner.size)
    model, hardware = task.spec.model, Hardware.of(task)
    parts = np.minimum(settings.tensor, float(cached_heads(model))) * settings.pipeline
    smaller, encodes = np.full(kinds.size, np.inf), kinds.role == ENCODES
    np.minimum.at(smaller, kinds.owner, np.where(encodes, np.inf, parts))
    prompt = float(np.mean([load.means[0] for load in task.spec.serve.loads]))
    payload = prompt * cache_bytes_per_token(model, 1.0, prompt) * settings.cache_element_bytes / smaller[kinds.owner]
    devices = kinds.total(settings.tensor * settings.pipeline * settings.data)[kinds.owner]
    stride = np.where(devices > hardware.per_host, hardware.per_host, 1).astype(np.int64)
    seconds = costs.collectives.seconds("send", payload, np.full(stride.shape, 2, dtype=np.int64), stride)
    if model.vision is not None:  # with those of the layers that DeepStack adds
        embeddings = REFERENCE_TOKENS * 2.0 * model.vision.output_size * model.vision.mergers * np.ones_like(payload)
        sent = costs.collectives.seconds("send", embeddings, np.full(stride.shape, 2, dtype=np.int64), stride)
        seconds = np.where(encodes, sent * prompt / REFERENCE_TOKENS, seconds)
    return np.where(kinds.role > 0, seconds / prompt, 0.0)


def crowding(task: Task, kinds: InstanceKinds, settings: Settings) -> FloatArray:
    """Return the number of busy processes per CPU of a host, at least 1. It is 1 if the number of CPUs is unknown.

    An instance has a front end, a scheduler for each attention rank and a process for each device (vLLM,
    `docs/design/arch_overview.md`). With fewer CPUs than processes, launches and requests are delayed (Chung et al.
    2026, arXiv 2603.22774).
    """
    group = task.cluster.groups[0]
    processes = kinds.total(1 + settings.data + settings.devices)
    hosts = np.ceil(kinds.total(settings.devices) / group.devices_per_node)
    return np.maximum(processes / hosts / (group.cpus_per_node or np.inf), 1.0)[kinds.owner]


def _memory_and_times(
    task: Task, serving: Serving, settings: Settings, costs: Costs
) -> tuple[ServingMemory, IterationCosts]:
    """Return the memory and the iteration costs of candidates. Each candidate may set a weight format and a host
    time."""
    serve, overheads = task.spec.serve, serving.overheads
    memory, times = serving_memory(serving, settings, costs), iteration_costs(serving, settings, costs)
    if settings.quantized.any() and serve.precision in COMPUTE_FORMATS:
        fp8_task = replace(task, spec=replace(task.spec, work=replace(serve, precision="fp8")))
        fp8 = serving_of(fp8_task, costs.kernels, overheads, serving.draft)
        memory = _selected(settings.quantized, serving_memory(fp8, settings, costs), memory)
        times = _selected(settings.quantized, iteration_costs(fp8, settings, costs), times)
    times = with_drafts(times, serving, settings, costs)
    hidden_s = np.where(times.crowding > 1.0, overheads.hidden, 0.0)
    added_s = np.where(np.isnan(settings.host_s), hidden_s, settings.host_s - overheads.iteration)
    sequence = np.where(settings.host_s == 0.0, OVERLAPPED, 1.0) * times.sequence
    return memory, replace(times, fixed=times.fixed + added_s * times.crowding, sequence=sequence)


def with_drafts(times: IterationCosts, serving: Serving, settings: Settings, costs: Costs) -> IterationCosts:
    """Return iteration costs with those of drafts: of a pass through their layers and head, and on the host. Passes run
    on the last pipeline stage, for which the others wait."""
    none = np.zeros_like(settings.offloaded)
    alone = replace(settings, pipeline=np.ones_like(settings.pipeline), offloaded=none, prefetched=none)
    layers, heads, cached = times.drafts, times.draft_heads, times.draft_cached
    for rows, draft, _ in drafts(serving, settings):
        each = iteration_costs(draft, alone, costs)
        floor = np.where(each.captured > 0, each.decode_floor, each.floor)[:, None]
        seconds = np.maximum(each.local + at_counts(each.shared, NODES * settings.data[:, None]), floor)
        stages, rows_of_table = settings.pipeline[:, None], rows[:, None]
        layers = np.where(rows_of_table, seconds * stages, layers)
        heads = np.where(rows_of_table, each.sampled * stages, heads)
        cached = np.where(rows, each.cached * settings.pipeline, cached)
    host = settings.draft_host_s * settings.crowding
    return replace(times, drafts=layers, draft_heads=heads, draft_cached=cached, sequence=times.sequence + host)


def _selected(rows: BoolArray, chosen: T, others: T) -> T:
    """Return a dataclass of arrays with the elements of `chosen` where `rows` is true, and of `others` elsewhere."""
    arrays = {field.name: (getattr(chosen, field.name), getattr(others, field.name)) for field in fields(others)}
    return replace(
        others, **{name: np.where(rows.reshape(-1, *[1] * (each[1].ndim - 1)), *each) for name, each in arrays.items()}
    )


def serving_of(task: Task, kernels: KernelCosts, overheads: Overheads, draft: Model | None = None) -> Serving:
    """Return the inputs to the formulas that all candidates of a task share.

    A number format in which the chip cannot compute is used for storage only. For a weights file (GGUF), the bytes per
    weight follow from the size of the file, and the spec's precision is the format of the matrix products.
    """
    model, precision = task.spec.model, task.spec.serve.precision
    loads, file_bytes = task.spec.serve.loads, _file_weight_bytes(task)
    prompt, answer = (float(each) for each in np.mean([load.means for load in loads], axis=0))
    group = task.cluster.groups[0]
    on_bus = (link := group.chip.link) is not None and link.topology == "pcie"
    bus_ranks = (2.0 if link.peer_access else 1.0) if link is not None and on_bus else math.inf
    serving = Serving(model=model, precision=precision, overheads=overheads, prompt=prompt, draft=draft)
    serving = serving._replace(tokens=prompt + answer)
    peak = group.chip.dense_flops_per_second.get("bf16")
    serving = serving._replace(architecture=group.chip.architecture, peak=peak.value if peak else math.nan)
    host, checkpoint = group.chip.host_bytes_per_second, quantization(task.spec) or Quantization()
    if precision == "mxfp4" and ATTENTION in checkpoint.wide and (narrow := overheads.narrows):
        own = {**checkpoint.parts, ATTENTION: (narrow, None)}
        checkpoint = checkpoint._replace(wide=checkpoint.wide - {ATTENTION}, parts=own)
    serving = serving._replace(link_domain=group.link_domain, bus_ranks=bus_ranks, wide=checkpoint.wide)
    serving = serving._replace(host_rate=host.value if host else HOST_RATE, adapters=AdaptedRequests.of(loads[0]))
    precision, only_stored = checkpoint.others or precision, checkpoint.weights_only
    # kernels that convert FP8 have a scale in 16 bits for each column (vLLM 0.32 `utils/marlin_utils_fp8.py`)
    stored = 1.0 + 2.0 / checkpoint.block if precision == "fp8" and checkpoint.block > 1 else checkpoint.bytes
    computed, weight_bytes = _computed(kernels, precision, file_bytes, stored, only_stored=only_stored)
    parts = {
        part: _part(kernels, form, size, only_stored=only_stored and part not in (ATTENTION, EXPERTS))
        for part, (form, size) in checkpoint.parts.items()
    }
    experts = checkpoint.parts.get(EXPERTS, ("", None))[0]
    form = experts or ("w4a16" if only_stored else precision)
    overheads = replace(overheads, **overheads.grouped.get(serving.architecture, {}).get(form, {}))
    if form in STORED_BYTES and form in overheads.experts:
        overheads = replace(overheads, experts={parts.get(EXPERTS, (computed,))[0]: overheads.experts[form]})
    if overheads.embeds_on_host and not Hardware.of(task).on_cores:
        serving = serving._replace(head_bytes=weight_bytes or 2.0)
    serving = serving._replace(weight_bytes=weight_bytes, parts=parts)
    return serving._replace(precision=computed, overheads=overheads)


def _computed(
    kernels: KernelCosts,
    precision: str,
    file_bytes: float | None = None,
    stored_bytes: float | None = None,
    *,
    only_stored: bool = False,
) -> tuple[str, float | None]:
    """Return the format in which weights of a `precision` are multiplied, and their stored bytes if it is another."""
    if not (only_stored or precision in STORED_BYTES or file_bytes is not None) and _computes(kernels, precision):
        return precision, None
    supported = [name for name in COMPUTE_FORMATS if _computes(kernels, name)]
    stored = {"fp8": 1.0, "mxfp8": 1.0, "int8": 1.0, "nvfp4": 0.5625, "fp4": 0.5625, **STORED_BYTES}
    computed = precision if file_bytes and precision in supported else supported[0] if supported else "bf16"
    return computed, file_bytes or stored_bytes or stored.get(precision)


def _part(
    kernels: KernelCosts, precision: str, size: float | None, *, only_stored: bool
) -> tuple[str, float | None, float]:
    """Return what `_computed` does for a part of a model, and its mean bytes per weight. `size`: see `Quantization`."""
    computed, stored = _computed(kernels, precision, None, size, only_stored=only_stored)
    return computed, stored, size or (BYTES.get(computed, 2.0) if stored is None else stored)


def _computes(kernels: KernelCosts, precision: str) -> bool:
    one = np.ones(1)
    return bool(np.isfinite(kernels.gemm_seconds(one, one, one, precision)).all())


def _file_weight_bytes(task: Task) -> float | None:
    """Return the bytes per weight in the task's weights file. Returns None if the task has no weights file, or if the
    file has 16 or more bits per weight."""
    weights = task.spec.serve.weights
    if weights is None or not os.path.isfile(weights):
        return None
    weight_bytes = os.path.getsize(weights) / parameters(task.spec.model)
    return weight_bytes if weight_bytes < NARROW_BYTES else None


def _offered(context: Candidates, figures: dict[str, FloatArray], objective: str) -> FloatArray:
    """Return the value of a rate if all requests that the loads offer per second are answered, else infinity."""
    rates = [load.load.request_rate or math.inf for load in context.loads]
    if not is_rate(objective) or context.serve.highest:
        return np.full(context.kinds.size, math.inf)
    if objective in ("requests_per_s", "goodput_requests_per_s"):
        return np.full(context.kinds.size, max(rates))
    return max(rates) * figures.get(objective, figures["output_tokens_per_s"]) / figures["requests_per_s"]


def _predictions(
    context: Candidates, figures: dict[str, FloatArray], costs: Costs, width_factor: FloatArray
) -> Predictions:
    objective, memory, settings = context.task.spec.objective, context.memory, context.settings
    name = figure_name(objective)
    figure = figures.get(name, figures["output_tokens_per_s"])
    if objective == "goodput_requests_per_s":  # orders candidates whose requests all miss the SLO
        figure = np.where(figure > 0, figure, NO_GOOD_SHARE * figures["requests_per_s"])
    with np.errstate(divide="ignore"):
        time = 1.0 / figure if is_rate(objective) else figure
    is_open = any(load.concurrency is None for load in context.serve.loads)
    closed_loop, open_loop, apart = BOUNDS["rate" if is_rate(objective) else name.partition(".")[0]]
    per_host, kinds = Hardware.of(context.task).per_host, context.kinds
    is_apart = kinds.total(np.where((kinds.role > 0) | (settings.devices > per_host), 1.0, 0.0)) > 0.0
    low, high = np.where(is_apart, np.array([apart]).T, np.array([open_loop if is_open else closed_loop]).T)
    low_s = np.maximum(time * low / width_factor, np.minimum(time, 1.0 / _offered(context, figures, objective)))
    capacity = costs.memory.capacity_bytes()
    static_bytes = memory.weights + memory.adapters
    engine_bytes = static_bytes + memory.activations + memory.graphs + memory.states
    context_bytes = settings.context_len * memory.longest_token
    of_states = settings.least_cache > 1.05 * context_bytes  # more than blocks round up
    of_states &= bool(state_bytes(context.task.spec.model))
    request_bytes = np.maximum(context_bytes, settings.least_cache)
    least = max(load.longest for load in context.loads) * memory.longest_token
    least = np.minimum(request_bytes, np.maximum(memory.cache, least))
    request_bytes = np.where(settings.fits_context, least, request_bytes)
    # If the budget is unknown, assume the cache of one request.
    cache = np.where(np.isinf(memory.cache), request_bytes, memory.cache)
    needed_bytes = engine_bytes + np.maximum(cache, request_bytes)
    fills = np.isnan(settings.cache_bytes) | ~np.isnan(settings.memory_fraction)
    reserved_bytes = np.where(fills, needed_bytes, costs.memory.reserved_bytes(needed_bytes))
    buffers = settings.communicators * communicator_bytes(costs.memory)
    used_bytes = costs.memory.device_used_bytes(reserved_bytes) + buffers
    if capacity is not None:  # an engine without memory for one request or its states does not start
        unused_bytes = np.where(np.isnan(settings.memory_fraction), 0.0, (1.0 - settings.memory_fraction) * capacity)
        over_capacity = np.maximum(used_bytes + unused_bytes, capacity * (1.0 + 1e-9))
        if (of_share := (memory.cache < request_bytes) & (unused_bytes > 0.0)).any():
            enough = np.where(of_share, used_bytes / capacity, np.inf)
            figures["kv_cache_enough_share"] = enough[context.kinds.worst(over_capacity)]
            figures["unused_bytes"] = np.where(of_share, over_capacity - used_bytes, 0.0)[
                context.kinds.worst(over_capacity)
            ]
        used_bytes = np.where(memory.cache < request_bytes, over_capacity, used_bytes)
    fullest_rows, cache = context.kinds.worst(used_bytes), np.maximum(cache, 0.0)
    figures["kv_cache_bytes"] = np.maximum(memory.cache, 0.0)[fullest_rows]
    figures["kv_cache_least_bytes"] = request_bytes[fullest_rows]
    if of_states.any():
        figures["kv_cache_state_bytes"] = (of_states * settings.least_cache)[fullest_rows]
    if memory.adapters.any():
        figures["adapter_bytes"] = memory.adapters[fullest_rows]
    return Predictions(
        step_time_s=time,
        low_s=low_s,
        high_s=time * high * width_factor,
        time_s={},
        static_bytes=(static_bytes + cache)[fullest_rows],
        activation_bytes=(memory.activations + memory.graphs + memory.states)[fullest_rows],
        peak_allocated_bytes=needed_bytes[fullest_rows],
        reserved_bytes=reserved_bytes[fullest_rows],
        device_used_bytes=used_bytes[fullest_rows],
        worst_stage=np.zeros(time.shape, dtype=np.int64),
        capacity_bytes=capacity,
        model_flops=0.0,
        figures=figures,
    )
