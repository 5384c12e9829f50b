"""Computes the metrics of all candidates: by simulation for the best, in closed form for the rest of a large space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np

from flagcore.domain.model import Vision
from flagcore.domain.serving import HIGHEST_LOAD, LATENCIES, RATES, STATISTICS, ServeSpec
from flagcore.domain.space import FloatArray, IntArray
from flagcore.domain.spec import figure_name, is_rate, seconds
from flagcore.engines.serving.load.progress import MIN_RATE, highest_load
from flagcore.engines.serving.model.closed_loop import ClosedLoop, parts, steady_state
from flagcore.engines.serving.model.disaggregated import Prefill
from flagcore.engines.serving.model.iteration import IterationCosts
from flagcore.engines.serving.model.memory import ServingMemory
from flagcore.engines.serving.model.simulated_load import HIT_RATE, MAX_REQUESTS, SimulatedLoad
from flagcore.engines.serving.model.simulation import Lane, Price, tokens_per_iteration
from flagcore.engines.serving.model.vision import EncoderCosts, ImageWork
from flagcore.engines.serving.model.work import TOKENIZER, Overheads, Split
from flagcore.engines.serving.space.placement import InstanceKinds
from flagcore.engines.serving.space.settings import Settings

MAX_SIMULATED = 4096
"""Maximum number of simulated candidates: the best ones in closed form. Their median ratio scales the others."""

MAX_WORK = 150_000
"""Maximum number of simulated requests, as far as it allows `MIN_SIMULATED` candidates."""
MIN_SIMULATED = 64

FIRST_LOAD = 8.0
"""The clients or requests per second that a search for the highest load starts with."""

UNLIMITED_TOKENS = 1e15
"""Size of an unlimited cache in tokens."""

FIGURE_NAMES = (
    *(name for name in RATES if not name.endswith("per_device")),
    *(f"{name}.{statistic}" for name in LATENCIES for statistic in STATISTICS),
)

Key: TypeAlias = "tuple[int, tuple[Lane, ...], bytes]"
"""The inputs that determine the simulation of a kind of instance: its count, its lanes and its costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Candidates and their kinds of instances, with settings, split, memory and costs of iterations.

    `transfer` are the seconds for the cache of a prompt token if the instances of a kind only prefill or decode.
    `encoder` are the costs of the `vision` tower, None without one.
    """

    kinds: InstanceKinds
    serve: ServeSpec
    objective: str
    settings: Settings
    split: Split
    memory: ServingMemory
    times: IterationCosts
    overheads: Overheads
    transfer: FloatArray
    vision: Vision | None = None
    encoder: EncoderCosts | None = None


def expected_figures(context: Candidates) -> dict[str, FloatArray]:
    """Return the metrics of each candidate by name; NaN if its costs are unknown or the host computes layers.

    Equal candidates are simulated once. With several load points, one point determines the metrics, as in a
    measurement.
    """
    loads = [
        SimulatedLoad.draw(load, context.vision, prefix_aware=context.serve.prefix_aware)
        for load in context.serve.loads
    ]
    times, members = context.times, context.kinds.members
    has_costs = np.isfinite(times.local + times.shared).all(axis=1) & np.isfinite(times.cached + times.pair)
    if context.kinds.role is not None:
        has_costs &= np.isfinite(context.transfer) | (context.kinds.role == 0)
    if context.settings.on_device is not None:
        has_costs &= context.settings.on_device >= 1.0
    candidates_by_key: dict[tuple[Key, ...], list[int]] = {}
    for candidate, kinds in enumerate(members):
        if has_costs[kinds].all():
            candidates_by_key.setdefault(tuple(_key(context, loads, row) for row in kinds), []).append(candidate)
    names = (*FIGURE_NAMES, HIT_RATE) if any(load.parts for load in loads) else FIGURE_NAMES
    names = (*names, HIGHEST_LOAD) if context.serve.highest else names
    table = {name: np.full(context.kinds.size, np.nan) for name in names}
    representatives = np.array([rows[0] for rows in candidates_by_key.values()], dtype=np.int64)
    requests = sum(min(load.input_len.size, MAX_REQUESTS) for load in loads)
    limit = min(MAX_SIMULATED, max(MIN_SIMULATED, MAX_WORK // requests))
    simulates_all = representatives.size <= limit
    heaviest_load = max(loads, key=lambda load: load.flight(1))
    closed_form = {} if simulates_all else _in_closed_form(context, heaviest_load)
    simulated = representatives if simulates_all else _best_rows(context, closed_form, representatives, limit)
    simulated_rows = set(simulated.tolist())
    for keys, rows in candidates_by_key.items():
        if rows[0] in simulated_rows:
            counts = [(row, count) for row, (count, _, _) in zip(members[rows[0]], keys, strict=True)]
            if context.serve.highest is None:
                points = [_load_figures(context, load, counts) for load in loads]
            else:
                points = _highest(context, loads[0], counts)
            best = _select(points, context.serve.slo, context.objective)
            for name in names:
                table[name][rows] = best.get(name, np.nan)
    if not simulates_all:
        for name in FIGURE_NAMES:
            ratio = float(np.nanmedian(table[name][simulated] / closed_form[name][simulated]))
            is_scaled = np.isnan(table[name])
            is_scaled[np.isnan(closed_form[name])] = False
            table[name] = np.where(is_scaled, closed_form[name] * ratio, table[name])
    return table


def _load_figures(context: Candidates, load: SimulatedLoad, kinds: Sequence[tuple[int, int]]) -> Mapping[str, float]:
    """Return the metrics of a load on a candidate's `kinds` of instances: the row and the count of each kind."""
    overheads = replace(context.overheads, prompt_token=TOKENIZER) if load.is_text else context.overheads
    prices = [
        (Price(context.times, row, _lane(context, load, row), overheads, partial(_encoding, context, row)), count)
        for row, count in kinds
    ]
    role = context.kinds.role
    if role is None or not role[kinds[0][0]]:
        return load.figures(*prices[0], context.serve.slo)
    (first, prefills), (decode, decodes) = prices
    prefill = Prefill(price=first, per_decode=prefills / decodes, transfer=float(context.transfer[kinds[1][0]]))
    return load.figures(decode, decodes, context.serve.slo, prefill)


def _encoding(context: Candidates, row: int, images: Sequence[ImageWork]) -> list[float]:
    """Return the seconds of the vision tower for the images of each request."""
    return [] if context.encoder is None else context.encoder.seconds(row, images)


def _highest(context: Candidates, load: SimulatedLoad, kinds: Sequence[tuple[int, int]]) -> list[Mapping[str, float]]:
    """Return the figures at each load that the search for the highest load tries."""
    points, slo, is_concurrency = list[Mapping[str, float]](), context.serve.slo, context.serve.highest == "concurrency"

    def meets_limits(value: float) -> bool:
        points.append({**_load_figures(context, load.at(value), kinds), HIGHEST_LOAD: value})
        return all(points[-1].get(name, 0.0) <= limit for name, limit in slo.items())

    maximum = float((load.load.concurrency if is_concurrency else load.load.request_rate) or 1)
    highest_load(
        meets_limits,
        FIRST_LOAD,
        minimum=1.0 if is_concurrency else MIN_RATE,
        maximum=maximum,
        is_integer=is_concurrency,
    )
    return points


def _key(context: Candidates, loads: Sequence[SimulatedLoad], row: int) -> Key:
    times = context.times
    costs = times.local[row].tobytes() + times.shared[row].tobytes() + times.cached[row].tobytes()
    other_costs = np.array([times.floor[row], times.captured[row], times.fixed[row], times.crowding[row]]).tobytes()
    if context.encoder is not None:
        other_costs += context.encoder.patch[row].tobytes() + context.encoder.ranks[row].tobytes()
    if context.kinds.role is not None:
        other_costs += np.array([context.kinds.role[row], context.transfer[row]]).tobytes()
    return int(context.kinds.count[row]), tuple(_lane(context, load, row) for load in loads), costs + other_costs


def _lane(context: Candidates, load: SimulatedLoad, row: int) -> Lane:
    """Return the limits of one lane of a candidate, without limits that the load cannot reach.

    A cache that is too small for one request counts as unlimited: the memory already excludes the candidate.
    """
    settings, stages = context.settings, float(context.split.pipeline[row])
    ranks, block = float(context.split.data[row]), float(settings.block_size[row])
    flight, longest = load.flight(int(context.kinds.lanes[row])), load.longest
    tokens = float(context.memory.cache_tokens[row])
    is_unlimited = tokens >= flight * (longest + block) or tokens < longest + block
    running = max(1.0, float(settings.max_running[row])) * ranks
    evicted = 0.0 if settings.host_tokens is None else float(settings.host_tokens[row])
    acceptance, drafted = load.load.acceptance, 0.0
    if acceptance is not None and settings.drafted is not None:
        drafted = float(settings.drafted[row])
    return Lane(
        budget=float(settings.max_batched_tokens[row]) * ranks * stages if settings.chunked[row] else float("inf"),
        running=min(running, float(flight)),
        cache_tokens=UNLIMITED_TOKENS if is_unlimited else tokens,
        block=1.0 if is_unlimited else block,
        ranks=ranks,
        stages=stages,
        shared_prefix=float(load.load.prefix_len) if settings.prefix_caching[row] else 0.0,
        retained=max(tokens, 0.0) + evicted if settings.prefix_caching[row] and load.parts else 0.0,
        page=float(settings.block_size[row]) if load.parts else 1.0,
        drafted=drafted,
        gain=tokens_per_iteration(acceptance or 0.0, drafted),
    )


def _select(points: Sequence[Mapping[str, float]], slo: Mapping[str, float], objective: str) -> Mapping[str, float]:
    """Return the metrics of the load point that `flagcore.engines.serving.trial.reading.read` would choose."""

    def order(figures: Mapping[str, float]) -> tuple[float, float]:
        excess = max((figures.get(name, 0.0) / limit for name, limit in slo.items()), default=0.0)
        return max(excess, 1.0), seconds(objective, figures.get(figure_name(objective), figures["output_tokens_per_s"]))

    return (min if is_rate(objective) else max)(points, key=order)


def time_parts(context: Candidates, figures: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
    """Return the mean seconds of a request by part, weighted by the counts of the kinds of instances.

    A request visits one instance that prefills and one that decodes, if a candidate has such. `figures` are the metrics
    of the candidates. The parts add up to the mean seconds of a request; the rest is the queue.
    """
    serve, kinds = context.serve, context.kinds
    load = SimulatedLoad.draw(serve.loads[0], context.vision, prefix_aware=serve.prefix_aware)
    lanes = np.minimum(kinds.lanes, load.flight(1))
    e2e, ttft, rate = (figures[name][kinds.owner] for name in ("e2e_s.mean", "ttft_s.mean", "requests_per_s"))
    loop, running = _closed_loop(context, load), rate / lanes * (e2e - ttft)
    visits = np.ones(kinds.owner.size) if kinds.role is None else np.where(kinds.role > 0, 1.0 / kinds.count, 1.0)
    count = kinds.total(np.where(visits < 1.0, 0.0, 1.0)) if kinds.role is not None else kinds.total(visits)
    raw = parts(loop, running)
    found = {name: kinds.total(visits * seconds) / np.maximum(count, 1.0) for name, seconds in raw.items()}
    if kinds.role is not None:
        caches = np.where(kinds.role == 2, context.transfer * load.means[0], 0.0)
        found["transfer_s"] = kinds.total(visits * caches)
    total = sum(found.values(), np.zeros(kinds.size))
    whole = figures["e2e_s.mean"]
    share = np.minimum(1.0, whole / total)
    return {"queue_s": np.maximum(whole - total, 0.0)} | {name: each * share for name, each in found.items()}


def _closed_loop(context: Candidates, load: SimulatedLoad) -> ClosedLoop:
    """Return the closed loop of one lane of each candidate with its mean share of the load."""
    split, settings, tokens = context.split, context.settings, context.memory.cache_tokens
    prompt, output = (np.full(tokens.shape, mean) for mean in load.means)
    return ClosedLoop(
        costs=context.times,
        overheads=context.overheads,
        flight=np.maximum(float(load.flight(1)) / context.kinds.lanes, 1.0),
        prompt=prompt,
        output=output,
        budget=np.where(settings.chunked > 0, settings.max_batched_tokens * split.data * split.pipeline, np.inf),
        running=np.maximum(settings.max_running, 1.0) * split.data,
        cache_tokens=np.where(tokens < load.longest, UNLIMITED_TOKENS, tokens),
        ranks=split.data,
        stages=split.pipeline,
        role=context.kinds.role,
        encode=_mean_encoding(context, load),
    )


def _mean_encoding(context: Candidates, load: SimulatedLoad) -> FloatArray:
    """Return the mean seconds of the vision tower for a request."""
    rows = range(context.kinds.owner.size) if context.encoder is not None and load.images else ()
    seconds = [float(np.mean(_encoding(context, row, load.images))) for row in rows]
    return np.array(seconds) if seconds else np.zeros(context.kinds.owner.size)


def _in_closed_form(context: Candidates, load: SimulatedLoad) -> dict[str, FloatArray]:
    """Return the metrics of the steady state, with means in place of percentiles."""
    loop, kinds, lanes = _closed_loop(context, load), context.kinds, context.kinds.lanes
    state = steady_state(loop)
    share = np.minimum(lanes, load.flight(1)) / lanes
    rate = kinds.total(state.rate * share)

    def mean(values: FloatArray) -> FloatArray:
        """Return the mean latencies of candidates, weighted by the rates of their kinds of instances."""
        return kinds.total(state.rate * share * values) / rate

    ttft, tpot = mean(state.ttft), mean(state.tpot)
    if kinds.role is not None:
        of_kind = [kinds.total(np.where(kinds.role == number, state.rate * share, 0.0)) for number in (1, 2)]
        once = np.where(kinds.role > 0, 1.0 / kinds.count, 0.0)
        is_divided = of_kind[0] > 0.0
        caches = kinds.total(np.where(kinds.role == 2, once * context.transfer, 0.0)) * load.means[0]
        rate = np.where(is_divided, np.minimum(*of_kind), rate)
        tpot = np.where(is_divided, kinds.total(once * state.tpot), tpot)
        wait = load.flight(1) * load.means[1] / rate - load.means[1] * tpot  # Little's law
        ttft = np.where(is_divided, np.maximum(wait, kinds.total(once * state.ttft) + caches), ttft)
    latencies = {"ttft_s": ttft, "tpot_s": tpot, "itl_s": tpot, "e2e_s": ttft + load.means[1] * tpot}
    return {name: latencies.get(name.partition(".")[0], rate) for name in FIGURE_NAMES}


def _best_rows(context: Candidates, figures: Mapping[str, FloatArray], rows: IntArray, limit: int) -> IntArray:
    """Return the `limit` rows with the best objective in closed form."""
    name = figure_name(context.objective)
    base = figures.get(name, figures["output_tokens_per_s"])[rows]
    if name.endswith("per_device"):
        base = base / context.kinds.total(context.settings.devices)[rows]
    return rows[np.argsort(-base if name in RATES else base, kind="stable")[:limit]]
