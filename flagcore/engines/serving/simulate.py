"""The figures of all candidates: simulated for the best, in closed form for the rest of a large space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from flagcore.domain.objective import figure_name, is_rate, seconds
from flagcore.domain.serving import LATENCIES, RATES, STATISTICS, ServeSpec
from flagcore.domain.space import FloatArray, IntArray
from flagcore.engines.serving.common.heterogeneous import InstanceKinds
from flagcore.engines.serving.load.highest import highest_load
from flagcore.engines.serving.model.closed_loop import ClosedLoop, parts, steady
from flagcore.engines.serving.model.iteration import IterationCosts
from flagcore.engines.serving.model.memory import ServingMemory
from flagcore.engines.serving.model.price import Lane, Price
from flagcore.engines.serving.model.work import Overheads, Split
from flagcore.engines.serving.settings import Settings
from flagcore.engines.serving.simulated_load import MAX_REQUESTS, SimulatedLoad

MAX_SIMULATED = 4096
"""Most simulated candidates: the best in closed form. The others are scaled by how these differ from it."""

MAX_WORK = 150_000
"""Most simulated requests in all, if that allows `MIN_SIMULATED` candidates."""
MIN_SIMULATED = 64

FIRST_LOAD, LEAST_RATE = 8.0, 1e-3
"""The clients or requests per second that a search for the highest load starts with, and the lowest rate."""

ENDLESS = 1e15
"""Tokens of a cache that is never full."""

NAMES = (
    *(name for name in RATES if not name.endswith("per_device")),
    *(f"{name}.{statistic}" for name in LATENCIES for statistic in STATISTICS),
)

Key: TypeAlias = "tuple[int, tuple[Lane, ...], bytes]"
"""What determines the simulation of a kind of instance: its count, its lanes and its costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Candidates and their kinds of instances: settings, split, memory and costs of iterations."""

    kinds: InstanceKinds
    serve: ServeSpec
    objective: str
    settings: Settings
    split: Split
    memory: ServingMemory
    times: IterationCosts
    overheads: Overheads


def expected_figures(context: Candidates) -> dict[str, FloatArray]:
    """Return the figures of each candidate by name; NaN if its costs are unknown, as if the host computes layers.

    Equal candidates are simulated once. Of several load points one counts, as in a measurement.
    """
    loads = [SimulatedLoad.draw(load) for load in context.serve.loads]
    times, members = context.times, context.kinds.members
    known = np.isfinite(times.local + times.shared).all(axis=1) & np.isfinite(times.cached + times.pair)
    if context.settings.on_device is not None:
        known &= context.settings.on_device >= 1.0
    alike: dict[tuple[Key, ...], list[int]] = {}
    for candidate, kinds in enumerate(members):
        if known[kinds].all():
            alike.setdefault(tuple(_key(context, loads, row) for row in kinds), []).append(candidate)
    table = {name: np.full(context.kinds.size, np.nan) for name in NAMES}
    firsts = np.array([rows[0] for rows in alike.values()], dtype=np.int64)
    requests = sum(min(load.input_len.size, MAX_REQUESTS) for load in loads)
    most = min(MAX_SIMULATED, max(MIN_SIMULATED, MAX_WORK // requests))
    few = firsts.size <= most
    heaviest = max(loads, key=lambda load: load.flight(1))
    bases = {} if few else _in_closed_form(context, heaviest)
    chosen = firsts if few else _promising(context, bases, firsts, most)
    wanted = set(chosen.tolist())
    for keys, rows in alike.items():
        if rows[0] in wanted:
            counts = [(row, count) for row, (count, _, _) in zip(members[rows[0]], keys, strict=True)]
            if context.serve.highest is None:
                points = [_load_figures(context, load, counts) for load in loads]
            else:
                points = _highest(context, loads[0], counts)
            best = _best(points, context.serve.slo, context.objective)
            for name in NAMES:
                table[name][rows] = best[name]
    if not few:
        for name in NAMES:
            ratio = float(np.nanmedian(table[name][chosen] / bases[name][chosen]))
            rest = np.isnan(table[name])
            rest[np.isnan(bases[name])] = False
            table[name] = np.where(rest, bases[name] * ratio, table[name])
    return table


def _load_figures(context: Candidates, load: SimulatedLoad, kinds: Sequence[tuple[int, int]]) -> Mapping[str, float]:
    """Return the figures of a load on kinds of instances: their rows and counts."""
    prices = [(Price(context.times, row, _lane(context, load, row), context.overheads), count) for row, count in kinds]
    return load.figures(prices, context.serve.slo)


def _highest(context: Candidates, load: SimulatedLoad, kinds: Sequence[tuple[int, int]]) -> list[Mapping[str, float]]:
    """Return the figures at the loads that a search for the highest load that keeps the limits tries."""
    points, slo, whole = list[Mapping[str, float]](), context.serve.slo, context.serve.highest == "concurrency"

    def keeps(value: float) -> bool:
        points.append(_load_figures(context, load.at(value), kinds))
        return all(points[-1].get(name, 0.0) <= limit for name, limit in slo.items())

    most = float((load.load.concurrency if whole else load.load.request_rate) or 1)
    highest_load(keeps, FIRST_LOAD, least=1.0 if whole else LEAST_RATE, most=most, whole=whole)
    return points


def _key(context: Candidates, loads: Sequence[SimulatedLoad], row: int) -> Key:
    times = context.times
    costs = times.local[row].tobytes() + times.shared[row].tobytes() + times.cached[row].tobytes()
    rest = np.array([times.floor[row], times.captured[row], times.fixed[row]]).tobytes()
    return int(context.kinds.count[row]), tuple(_lane(context, load, row) for load in loads), costs + rest


def _lane(context: Candidates, load: SimulatedLoad, row: int) -> Lane:
    """Return the limits of one lane of a candidate, without those that the load cannot reach.

    A cache that is too small for one request is no limit here: the memory excludes the candidate, and its figures are
    those with room.
    """
    settings, stages = context.settings, float(context.split.pipeline[row])
    ranks, block = float(context.split.data[row]), float(settings.block_size[row])
    flight, longest = load.flight(int(context.split.instances[row])), load.longest
    tokens = float(context.memory.cache_tokens[row])
    never_full = tokens >= flight * (longest + block) or tokens < longest + block
    running = max(1.0, float(settings.max_running[row])) * ranks
    return Lane(
        budget=float(settings.max_batched_tokens[row]) * ranks * stages if settings.chunked[row] else float("inf"),
        running=min(running, float(flight)),
        cache_tokens=ENDLESS if never_full else tokens,
        block=1.0 if never_full else block,
        ranks=ranks,
        stages=stages,
        shared_prefix=float(load.load.prefix_len) if settings.prefix_caching[row] else 0.0,
    )


def _best(each: Sequence[Mapping[str, float]], slo: Mapping[str, float], objective: str) -> Mapping[str, float]:
    """Return the load point that counts, chosen as in `flagcore.engines.serving.reading.read`."""

    def order(figures: Mapping[str, float]) -> tuple[float, float]:
        over = max((figures.get(name, 0.0) / limit for name, limit in slo.items()), default=0.0)
        return max(over, 1.0), seconds(objective, figures.get(figure_name(objective), figures["output_tokens_per_s"]))

    return (min if is_rate(objective) else max)(each, key=order)


def time_parts(context: Candidates, figures: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
    """Return the mean seconds of a request by part. `figures` are those of the candidates.

    Kinds of instances are weighted by their counts.
    """
    load, kinds = SimulatedLoad.draw(context.serve.loads[0]), context.kinds
    lanes = np.minimum(context.split.instances, load.flight(1))
    e2e, ttft, rate = (figures[name][kinds.owner] for name in ("e2e_s.mean", "ttft_s.mean", "requests_per_s"))
    found = parts(context.times, context.overheads, _closed_loop(context, load), e2e, rate / lanes * (e2e - ttft))
    count = kinds.total(np.ones(kinds.owner.size))
    return {name: kinds.total(seconds) / count for name, seconds in found.items()}


def _closed_loop(context: Candidates, load: SimulatedLoad) -> ClosedLoop:
    """Return a lane of each candidate with its mean share of the load."""
    split, settings, tokens = context.split, context.settings, context.memory.cache_tokens
    prompt, output = (np.full(tokens.shape, mean) for mean in load.means)
    return ClosedLoop(
        flight=np.maximum(float(load.flight(1)) / split.instances, 1.0),
        prompt=prompt,
        output=output,
        budget=np.where(settings.chunked > 0, settings.max_batched_tokens * split.data * split.pipeline, np.inf),
        running=np.maximum(settings.max_running, 1.0) * split.data,
        cache_tokens=np.where(tokens < load.longest, ENDLESS, tokens),
        ranks=split.data,
        stages=split.pipeline,
    )


def _in_closed_form(context: Candidates, load: SimulatedLoad) -> dict[str, FloatArray]:
    """Return the figures of a steady state, with means for percentiles."""
    loop = _closed_loop(context, load)
    found, lanes = steady(context.times, context.overheads, loop), context.split.instances
    kinds, share = context.kinds, np.minimum(lanes, load.flight(1)) / lanes
    rate = kinds.total(found.rate * share)

    def mean(values: FloatArray) -> FloatArray:
        """Return latencies by candidate: a faster kind answers more requests."""
        return kinds.total(found.rate * share * values) / rate

    ttft, tpot = mean(found.ttft), mean(found.tpot)
    whole = {"ttft_s": ttft, "tpot_s": tpot, "itl_s": tpot, "e2e_s": ttft + load.means[1] * tpot}
    return {name: whole.get(name.partition(".")[0], rate) for name in NAMES}


def _promising(context: Candidates, bases: Mapping[str, FloatArray], firsts: IntArray, most: int) -> IntArray:
    """Return the rows whose objective is best in closed form."""
    name = figure_name(context.objective)
    base = bases.get(name, bases["output_tokens_per_s"])[firsts]
    if name.endswith("per_device"):
        base = base / context.kinds.total(context.settings.devices)[firsts]
    return firsts[np.argsort(-base if name in RATES else base, kind="stable")[:most]]
