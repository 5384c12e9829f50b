"""Computes the metrics of all candidates: by simulation or, for the slower ones of a large space, in closed form."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any, TypeAlias

import numpy as np

from flagcore.domain.metrics import HIGHEST_LOAD, LATENCIES, RATES, STATISTICS
from flagcore.domain.space import BoolArray, FloatArray, IntArray
from flagcore.domain.spec import Task, figure_name, is_rate, seconds
from flagcore_serving.job import ServeSpec
from flagcore_serving.load.figures import MAX_TURNS, TASK_S, TURN_TTFT, keeps_up
from flagcore_serving.load.progress import GROWTH, MIN_RATE, RESOLUTION, Verdict, highest_load
from flagcore_serving.model.closed_loop import PARTS, ClosedLoop, LoopMeans, parts, steady_state
from flagcore_serving.model.disaggregated import Prefill
from flagcore_serving.model.iteration import IterationCosts
from flagcore_serving.model.memory import ServingMemory
from flagcore_serving.model.price import UNLIMITED_TOKENS, Lane, Price
from flagcore_serving.model.simulated_load import (
    CACHE_FIGURES,
    HIT_RATE,
    MAX_REQUESTS,
    MAX_SEARCHED,
    TIER_HIT_RATE,
    WAVES_IN_FLIGHT,
    SimulatedLoad,
)
from flagcore_serving.model.simulation import Simulation
from flagcore_serving.model.speculation import gains
from flagcore_serving.model.tiers import Tier, reached
from flagcore_serving.model.vision import EncoderCosts, Encoders, ImageWork
from flagcore_serving.model.work import TOKENIZER, Overheads
from flagcore_serving.space.placement import ENCODES, InstanceKinds
from flagcore_serving.space.settings import TIERS, Settings
from flagcore_serving.space.weights import context_at

MAX_SIMULATED = 4096
"""Maximum number of simulated candidates: the best ones in closed form. The median ratio of their simulated to their
closed-form metrics scales the metrics of the others."""

MAX_WORK = 150_000
"""Maximum number of simulated requests in total. `MIN_SIMULATED` candidates are simulated even if they exceed it."""
MIN_SIMULATED = 64

FIRST_LOAD = 8.0
"""The number of clients, or of requests per second, with which a search for the highest load starts."""

FIGURE_NAMES = (
    *(name for name in RATES if not name.endswith("per_device")),
    *(f"{name}.{statistic}" for name in LATENCIES for statistic in STATISTICS),
)

SIMULATION = "simulation"

FAR = 0.7
"""Candidates that are expected to reach a lower share of the best highest rate are only tried at this share. A
choice."""

PIECE = 4096
"""The rows that are compared at once, to save memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """All inputs to the metrics of candidates: their kinds of instances, with settings, memory and iteration costs.

    `loads`: the load points of the task, drawn for all candidates.

    `transfer`: seconds to send the cache of one prompt token, for kinds that only prefill or only decode, or the
    embedding of one token of an image, for kinds that only encode. `swap_s`: those to load an adapter into a slot.
    `has_states`: whether the model has recurrent states.
    `about`: the overheads as text, which identifies them in keys. It takes long.
    `encoder`: the costs of the vision tower; None if there is none. `tiers`: those of `tiers_of`. `simulation`: as in
    `Price`.
    """

    kinds: InstanceKinds
    task: Task
    loads: Sequence[SimulatedLoad]
    settings: Settings
    memory: ServingMemory
    times: IterationCosts
    overheads: Overheads
    transfer: FloatArray
    swap_s: FloatArray
    about: str
    has_states: bool = False
    encoder: EncoderCosts | None = None
    tiers: Mapping[str, tuple[FloatArray, FloatArray]] = field(default_factory=dict)
    simulation: type[Simulation] | None = None

    @property
    def serve(self) -> ServeSpec:
        job: ServeSpec = self.task.spec.serve
        return job

    def encoding(self, row: int, images: Sequence[ImageWork]) -> list[float]:
        """Return the seconds that the vision tower takes for the images of each request, or an empty list.

        The list is empty if there is no tower. `row`: the row of the candidate's instances.
        """
        return [] if self.encoder is None else self.encoder.seconds(row, images)


def expected_figures(context: Candidates, *, simulates: bool = True) -> dict[str, FloatArray]:
    """Return the metrics of each candidate by name. Metrics are NaN if costs are unknown or the host computes layers.

    Candidates with equal inputs are simulated once. With several load points, one point determines the metrics, as in a
    measurement. No highest load is searched for candidates whose cache does not hold the longest request. Without
    `simulates`, all metrics are in closed form, at the heaviest load, and SIMULATION is a number that candidates with
    equal simulations share.
    """
    loads, members, candidates_by_key, names = context.loads, context.kinds.members, _by_key(context), _names(context)
    heaviest_load = max(loads, key=lambda load: load.flight(1))
    if not simulates:
        numbers = np.full(context.kinds.size, np.nan)
        for number, rows in enumerate(candidates_by_key.values()):
            numbers[rows] = number
        return _in_closed_form(context, heaviest_load, with_drafts=True) | {SIMULATION: numbers}
    table = {name: np.full(context.kinds.size, np.nan) for name in names}
    representatives = np.array([rows[0] for rows in candidates_by_key.values()], dtype=np.int64)
    requests = sum(min(load.input_len.size, MAX_SEARCHED if context.serve.highest else MAX_REQUESTS) for load in loads)
    limit = min(MAX_SIMULATED, max(MIN_SIMULATED, MAX_WORK // requests))
    simulated, found = representatives, dict[object, tuple[float, Mapping[str, float]]]()
    if context.serve.highest is not None:
        simulated = simulated[~_lacks_room(context)[simulated]]
    needs_rates = context.serve.highest is not None or simulated.size > limit
    closed_form = _in_closed_form(context, heaviest_load) if needs_rates else {}
    expected = closed_form.get("requests_per_s", np.zeros(context.kinds.size))
    simulated = simulated if simulated.size <= limit else _best_rows(context, closed_form, simulated, limit)
    simulated_rows = set(simulated.tolist())
    of_simulated = [row for candidate in simulated_rows for row in members[candidate]]
    lanes = [{} if context.serve.highest else _lanes_by_row(context, load, of_simulated) for load in loads]
    for rows in sorted(candidates_by_key.values(), key=lambda rows: -expected[rows[0]]):
        if rows[0] in simulated_rows:
            counts = [(row, int(context.kinds.count[row])) for row in members[rows[0]]]
            if context.serve.highest is None:
                points = [_load_figures(context, load, counts, known) for load, known in zip(loads, lanes, strict=True)]
            else:
                points = [_highest(context, loads[0], counts, float(expected[rows[0]]), found)]
            best = _select(points, context.serve.slo, context.task.spec.objective)
            for name in names:
                table[name][rows] = best.get(name, np.nan)
    for name in () if simulated.size == representatives.size else FIGURE_NAMES:
        is_missing = np.isnan(table[name])
        table[name] = _completed(table[name], closed_form[name], simulated)
        if name.startswith("e2e"):  # its parts were scaled by ratios of their own
            first, each = (table[name.replace("e2e", part)] for part in ("ttft", "tpot"))
            answer = heaviest_load.means[1] * each
            at_most = np.where(is_missing & (table[name] > answer), table[name] - answer, np.inf)
            first[:] = np.minimum(first, at_most)
            table[name] = np.where(is_missing, first + answer, table[name])
    return table


def _completed(values: FloatArray, closed_form: FloatArray, simulated: IntArray) -> FloatArray:
    """Return a metric with those in closed form where it was not simulated, scaled as in the `simulated` rows."""
    ratios = values[simulated] / closed_form[simulated]
    known = ratios[~np.isnan(ratios)].tolist() or [math.nan if ratios.size else 1.0]
    ratio = median(known)  # np.nanmedian imports numpy.ma, which is slow
    return np.where(np.isnan(values) & ~np.isnan(closed_form), closed_form * ratio, values)


def _by_key(context: Candidates) -> dict[Hashable, list[int]]:
    """Return the candidates whose costs are known, by what determines their simulation."""
    times, found, numbers = context.times, dict[Hashable, list[int]](), dict[Hashable, int]()
    has_costs = np.isfinite(times.local + times.shared).all(axis=1) & np.isfinite(times.cached + times.pair)
    has_costs &= np.isfinite(context.transfer) | (context.kinds.role == 0)
    has_costs &= (context.settings.on_device >= 1.0) | context.settings.encodes
    number_of = np.full(has_costs.size, -1)
    for start in range(0, has_costs.size, PIECE):
        rows = np.flatnonzero(has_costs[start : start + PIECE]) + start
        if not rows.size:
            continue
        lanes = [_lanes(context, load, rows) for load in context.loads]
        parts: list[FloatArray | IntArray] = [column for columns, _ in lanes for column in columns.values()]
        parts += [context.kinds.count[rows], context.kinds.role[rows], context.transfer[rows]]
        parts += [each[rows] for each in times.arrays]
        parts += [] if context.encoder is None else [context.encoder.patch[rows], context.encoder.ranks[rows]]
        table = np.concatenate([each.reshape(rows.size, -1) for each in parts], axis=1, dtype=np.float64)
        tiers = zip(*(each for _, each in lanes), strict=True)
        keys = zip((row.tobytes() for row in table), tiers, strict=True)
        number_of[rows] = [numbers.setdefault(key, len(numbers)) for key in keys]
    for candidate, kinds in enumerate(context.kinds.members):
        if has_costs[kinds].all():
            found.setdefault(tuple(number_of[kinds].tolist()), []).append(candidate)
    return found


def _names(context: Candidates) -> tuple[str, ...]:
    """Return the names of the metrics that loads have: those of caches, turns and searches only where they exist."""
    names, loads = FIGURE_NAMES, context.loads
    if any(load.parts for load in loads):
        absent = {TIER_HIT_RATE.format(tier=tier) for tier in TIERS if tier not in context.tiers}
        names += tuple(name for name in CACHE_FIGURES if name not in absent) if context.tiers else (HIT_RATE,)
    if (turns := max((int(load.turn.max()) + 1 for load in loads if load.turn is not None), default=0)) > 0:
        names += (TASK_S, *(TURN_TTFT.format(number=turn + 1) for turn in range(min(turns, MAX_TURNS))))
    return (*names, HIGHEST_LOAD) if context.serve.highest else names


_Limits: TypeAlias = tuple[tuple[float, float], ...]
"""The least and the most of each value of `_limited` with which a simulation has the same result."""

_known: dict[Hashable, list[tuple[_Limits, Mapping[str, float]]]] = {}
"""Metrics of the last `MAX_KNOWN` simulations: a plan predicts its baseline and the listed candidates again, and
candidates differ in limits that they do not reach. Metrics are empty if the simulation was stopped because a limit of
the SLO was exceeded."""
MAX_KNOWN = 4096


def _load_figures(
    context: Candidates,
    load: SimulatedLoad,
    kinds: Sequence[tuple[int, int]],
    known: Mapping[int, Lane] | None = None,
    *,
    stops: bool = False,
) -> Mapping[str, float]:
    """Return the metrics of a load on one candidate. `kinds`: for each kind of the candidate's instances, its row in
    `context` and its number of instances. `known`: the lanes of the load by row, if they are. With `stops`, the metrics
    may be empty if a limit of the SLO is exceeded."""
    rows = [row for row, _ in kinds]
    by_row = known or _lanes_by_row(context, load, rows)
    lanes = [by_row[row] for row in rows]
    key = _simulation_key(context, load, kinds, lanes)
    if key is None:
        return _simulated(context, load, kinds, lanes, stops=stops)[1]
    values = (*_limited(lanes[0]), float(context.times.captured[kinds[0][0]]))
    for limits, figures in _known.get(key, ()):
        is_same = all(least <= value <= most for (least, most), value in zip(limits, values, strict=True))
        if is_same and (figures or stops):
            return figures
    price, figures = _simulated(context, load, kinds, lanes, stops=stops)
    is_open = load.arrivals is not None and bool(load.arrivals.any())
    _known.setdefault(key, []).append((_same(price, is_open=is_open, is_alone=len(kinds) == 1), figures))
    while sum(map(len, _known.values())) > MAX_KNOWN:
        del _known[next(iter(_known))]
    return figures


def _limited(lane: Lane) -> tuple[float, float, float]:
    return lane.running, lane.budget, lane.cache_tokens


def _same(price: Price, *, is_open: bool, is_alone: bool) -> _Limits:
    """Return the limits with which simulations with this price are the same. `is_open`: whether the loop is open.
    `is_alone`: whether the candidate has no other kind of instances."""
    reached = (price.needed, price.widest, price.filled)
    may_differ = (is_open and is_alone, is_alone, is_open and is_alone)
    limits = [
        (least, math.inf) if may and least <= own else (own, own)
        for own, least, may in zip(_limited(price.lane), reached, may_differ, strict=True)
    ]
    return (*limits, (price.below, price.above if math.isinf(price.above) else math.nextafter(price.above, 0.0)))


def _simulation_key(
    context: Candidates, load: SimulatedLoad, kinds: Sequence[tuple[int, int]], lanes: Sequence[Lane]
) -> Hashable | None:
    """Return what determines `_load_figures` beside `_limited` and `captured` of the first lane, or None for images and
    traces, which have no short key, and for another simulation."""
    if context.encoder is not None or load.load.trace or context.simulation:
        return None
    free = (replace(lanes[0], running=math.inf, budget=math.inf, cache_tokens=math.inf), *lanes[1:])
    costs = tuple(context.times.bytes_of(row) for row, _ in kinds)
    rows = [row for row, _ in kinds]
    arrays = (context.kinds.count, context.kinds.role, context.transfer)
    others = tuple(each[rows].tobytes() for each in arrays), context.times.captured[rows[1:]].tobytes()
    slo = tuple(context.serve.slo.items())
    return load.load, load.is_spread, load.prefix_aware, slo, context.about, free, costs, others


def _simulated(
    context: Candidates,
    load: SimulatedLoad,
    kinds: Sequence[tuple[int, int]],
    lanes: Sequence[Lane],
    *,
    stops: bool,
) -> tuple[Price, Mapping[str, float]]:
    """Return the price of the first of `lanes`, those of `kinds`, and the metrics as in `_load_figures`."""
    overheads = replace(context.overheads, prompt_token=TOKENIZER) if load.is_text else context.overheads
    role, encoders = context.kinds.role, None
    encoding = [each for each in kinds if role[each[0]] == ENCODES]
    for row, count in encoding:
        token_s, busy = float(context.transfer[row]), min(kinds[-1 - len(encoding)][1], load.flight(1))
        encoders = Encoders(partial(context.encoding, row), count, count / busy, token_s)
    own = encoders, context.simulation
    prices = [
        (Price(context.times, row, lane, overheads, partial(context.encoding, row), *own), count)
        for (row, count), lane in zip(kinds, lanes, strict=True)
        if role[row] != ENCODES
    ]
    first, prefills = prices[0]
    if not role[kinds[0][0]]:
        return first, load.figures(first, prefills, context.serve.slo, stops=stops)
    decode, decodes = prices[1]
    prefill = Prefill(price=first, per_decode=prefills / decodes, transfer=float(context.transfer[kinds[1][0]]))
    return first, load.figures(decode, decodes, context.serve.slo, prefill, stops=stops)


def _highest(
    context: Candidates,
    load: SimulatedLoad,
    kinds: Sequence[tuple[int, int]],
    expected: float,
    found: dict[object, tuple[float, Mapping[str, float]]],
) -> Mapping[str, float]:
    """Return the metrics of one candidate at its highest load or, if none meets the limits, at the lowest tried one.

    A search for the highest rate starts where the last one suggests, and tries powers of RESOLUTION, so that candidates
    share requests. A candidate that is expected FAR below the best and has the layout of an earlier one is first tried
    at this rate. If the spec asks only for the best, each is tried at the best rate. One that does not serve it gets a
    bound, so that the closed form alone excludes none. If most requests exceed a limit even alone, the lowest is first.
    `kinds`: as in `_load_figures`. `expected`: the candidate's rate in closed form. `found`: by layout, and by None for
    all of them, this rate and the metrics of the last candidate; this function updates it.
    """
    settings, slo, points = context.settings, context.serve.slo, dict[float, Mapping[str, float]]()
    is_concurrency, maximum = context.serve.highest == "concurrency", load.load.concurrency or load.load.request_rate
    layout = tuple((settings.tensor[row], settings.pipeline[row], settings.data[row], each) for row, each in kinds)
    known = [found[layout]] if layout in found else [*found.values(), (1.0, {HIGHEST_LOAD: 0.0})]
    before, figures = max(known, key=lambda each: each[1][HIGHEST_LOAD] / each[0])
    best, least = max((each[HIGHEST_LOAD] for _, each in found.values()), default=0.0), 0.0

    start = expected / before * figures[HIGHEST_LOAD]

    def load_at(value: float) -> float:
        return value if is_concurrency else float(RESOLUTION ** round(math.log(value, RESOLUTION)))

    def predict(value: float) -> Verdict:
        if (at := load_at(value)) not in points:
            points[at] = _load_figures(context, load.at(at, least), kinds, stops=True)
        is_met = bool(points[at]) and all(points[at].get(name, 0.0) <= limit for name, limit in slo.items())
        return Verdict.MET if is_met and keeps_up(load.at(at, least).load, points[at], slo) else Verdict.EXCEEDED

    tried = best if context.serve.only_best else FAR * best if layout in found else 0.0
    if tried and (context.serve.only_best or start < tried):
        if predict(tried) is not Verdict.MET:
            ratio = min(start, tried / RESOLUTION) / figures[HIGHEST_LOAD]
            return {name: ratio * each if name in (*RATES, HIGHEST_LOAD) else each for name, each in figures.items()}
        start = max(start, tried)
    start, minimum, growth = start or expected, MIN_RATE, RESOLUTION
    if is_concurrency:
        start, minimum, growth = FIRST_LOAD, 1.0, GROWTH
    elif load.load.least_s and not load.load.trace and load.turn is None:
        alone = _load_figures(context, load.alone(max(count for _, count in kinds)), kinds)
        if any(alone.get(f"{name.partition('.')[0]}.p50", 0.0) > limit for name, limit in slo.items()):
            start = minimum

    search = partial(highest_load, predict, minimum=minimum, maximum=float(maximum or 1), growth=growth)
    highest = search(start, is_integer=is_concurrency)
    if highest and not is_concurrency and load.load.least_s and not load.load.trace:
        value = load_at(highest)
        waves = WAVES_IN_FLIGHT * value * points[value]["e2e_s.mean"]
        if waves > load.at(value).input_len.size and not (context.serve.only_best and value < best):
            least = waves
            points.clear()
            highest = search(value)
    value = load_at(highest or min(points))
    figures = {**(points[value] or _load_figures(context, load.at(value, least), kinds)), HIGHEST_LOAD: value}
    if highest is not None and not is_concurrency:
        found[layout] = found[None] = expected, figures
    return figures


def _lanes_by_row(context: Candidates, load: SimulatedLoad, rows: Sequence[int]) -> dict[int, Lane]:
    """Return the limits of a lane (instance) of each row."""
    columns, tiers = _lanes(context, load, np.array(rows, dtype=np.int64))
    values = zip(*(column.tolist() for column in columns.values()), strict=True)
    whole = context.overheads.whole_prompts
    named = (dict[str, Any](zip(columns, each, strict=True)) for each in values)
    return {row: Lane(**each, tiers=of, whole_prompts=whole) for row, each, of in zip(rows, named, tiers, strict=True)}


def _lanes(
    context: Candidates, load: SimulatedLoad, rows: IntArray
) -> tuple[dict[str, FloatArray], list[tuple[Tier, ...]]]:
    """Return the fields of the lane (instance) of each row as arrays, and its tiers. Limits that the load cannot reach
    are removed. A cache that is too small for one request is treated as unlimited: the memory check already excludes
    the candidate."""
    settings, memory, ones = context.settings, context.memory, np.ones(rows.size)
    stages, ranks, block = settings.pipeline[rows], settings.data[rows], 1.0 * settings.block_size[rows]
    flights = {count: load.flight(count) for count in set(context.kinds.count[rows].tolist())}
    flight = np.array([float(flights[count]) for count in context.kinds.count[rows].tolist()])
    tokens, fixed, one = memory.cache_tokens[rows], memory.sequence_tokens[rows], load.longest + block
    one = one + memory.sequence_tokens[rows]
    is_unlimited = (tokens >= flight * one) | (tokens < one)
    running = np.maximum(1.0, np.minimum(settings.max_running[rows], memory.sequences[rows])) * ranks
    drafted, gain = gains(load.load, settings, rows)
    found = float(load.load.prefix_len)
    prefix = found - found % block if context.has_states else found * ones  # a state is stored only after a block
    retained: list[tuple[float, tuple[Tier, ...]]] = [(0.0, ())] * rows.size
    if load.parts:
        each = zip(rows.tolist(), tokens.tolist(), strict=True)
        retained = [_retained(context, load, row, size) for row, size in each]
    used = load.load.adapters + (context.overheads.base_takes_slot and load.load.adapter_share < 1.0)
    slots = settings.adapter_slots[rows] * ranks
    has_all = (slots == 0.0) | (slots >= used)
    return {
        "budget": _budget(context)[rows] * ranks,
        "running": np.minimum(running, flight),
        "group": np.where(context.overheads.own_groups & (stages > 1.0), np.maximum(running // stages, 1.0), np.inf),
        "cache_tokens": np.where(is_unlimited, UNLIMITED_TOKENS, tokens),
        "block": np.where(is_unlimited, 1.0, block),
        "fixed": np.where(is_unlimited, 0.0, fixed),
        "chunk": settings.chunk_tokens[rows] * (settings.max_batched_tokens[rows] >= settings.chunk_tokens[rows]),
        "admits": np.where(is_unlimited, 0.0, memory.admission_tokens[rows]),
        "ranks": ranks,
        "stages": stages,
        "shared_prefix": np.where(settings.prefix_caching[rows], prefix, 0.0),
        "finds": (settings.prefix_caching[rows] > 0) & (fixed == 0.0) & context.overheads.finds_preempted,
        "retained": np.array([device for device, _ in retained]),
        "adapters": np.where(has_all, 0.0, slots),
        "swap_s": np.where(has_all, 0.0, context.swap_s[rows]),
        "page": block if load.parts else ones,
        "mixes": settings.mixed_chunks[rows] | context.overheads.mixes,
        "drafted": drafted,
        "gain": gain,
        "ahead": settings.ahead[rows],
        "event": np.where(context.kinds.role[rows] == 0, context.overheads.event, 0.0),
        "context": np.full(rows.size, load.means[0] + 0.5 * load.means[1]),
    }, [tiers for _, tiers in retained]


def _budget(context: Candidates) -> FloatArray:
    """Return the most tokens of an iteration of one attention DP group."""
    settings, spec = context.settings, context.task.spec
    if context.overheads.whole_unless_latent and not context.overheads.mixes:  # at least the context
        longest = 0 if spec.serve.weights else context_at(spec.model.name) or 0
        return np.maximum(settings.max_batched_tokens, np.maximum(settings.context_len, longest)).astype(np.float64)
    return np.where(settings.chunked > 0, settings.max_batched_tokens, np.inf)


def _retained(context: Candidates, load: SimulatedLoad, row: int, tokens: float) -> tuple[float, tuple[Tier, ...]]:
    """Return the tokens of prefixes that a candidate's devices retain in a cache of `tokens`, and the tiers behind."""
    settings, overheads, least = context.settings, context.overheads, 0.0
    if not (settings.prefix_caching[row] and load.parts):
        return 0.0, ()
    device = max(tokens, 0.0) / (1.0 + float(context.memory.sequence_tokens[row]) / sum(load.means))
    if overheads.whole_prompts:  # each slot has one, and a tier at least one, even one larger than the tier
        least = sum(load.means)
        device = min(device, float(settings.max_running[row]) * float(settings.data[row]) * least)
    sizes = {name: (float(each[row]), float(token_s[row])) for name, (each, token_s) in context.tiers.items()}
    tiers = [(name, max(each, least) if each else 0.0, token_s) for name, (each, token_s) in sizes.items()]
    writes = bool(settings.writes_through[row])
    return device, tuple(reached(device, tiers, writes_through=writes, own_order=overheads.own_order))


def _select(points: Sequence[Mapping[str, float]], slo: Mapping[str, float], objective: str) -> Mapping[str, float]:
    """Return the metrics of the load point that `flagcore_serving.trial.reading.read` would choose."""

    def order(figures: Mapping[str, float]) -> tuple[float, float]:
        excess = max((figures.get(name, 0.0) / limit for name, limit in slo.items()), default=0.0)
        return max(excess, 1.0), seconds(objective, figures.get(figure_name(objective), figures["output_tokens_per_s"]))

    return (min if is_rate(objective) else max)(points, key=order)


def time_parts(context: Candidates, figures: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
    """Return the mean seconds of a request by part (see PARTS), averaged over all instances of a candidate.

    If a candidate has prefill and decode instances, a request visits one of each. `figures`: the metrics of the
    candidates. The parts before the first token add up to the mean TTFT; `queue_s` is what a prompt alone does not
    take. Those after it add up to the rest of the mean time; `shared_s` is what an answer takes longer because the
    steps also compute other requests' prompts.
    """
    kinds, load = context.kinds, context.loads[0]
    lanes = np.minimum(kinds.count, load.flight(1))
    e2e, ttft, rate = (figures[name][kinds.owner] for name in ("e2e_s.mean", "ttft_s.mean", "requests_per_s"))
    loop, running = _closed_loop(context, load), rate / lanes * (e2e - ttft)
    if HIT_RATE in figures:
        loop = loop._replace(cached=np.nan_to_num(figures[HIT_RATE][kinds.owner]))
    visits = np.where(kinds.role > 0, 1.0 / kinds.count, 1.0)
    encodes, count = kinds.role == ENCODES, kinds.total(np.where(kinds.role > 0, 0.0, 1.0))
    before, after = (
        {name: kinds.total(visits * ~encodes * seconds) / np.maximum(count, 1.0) for name, seconds in each.items()}
        for each in parts(loop, running)
    )
    if encodes.any():
        before["encode_s"] = kinds.total(visits * encodes * (loop.encode + context.transfer * load.image_tokens))
    if kinds.role.any():
        caches = np.where(kinds.role == 2, context.transfer * load.means[0], 0.0)
        before["transfer_s"] = kinds.total(visits * caches)
    if "cache_load_s" in figures:
        before["load_s"] = np.nan_to_num(figures["cache_load_s"])
    first_token, end = figures["ttft_s.mean"], figures["e2e_s.mean"]
    found = dict[str, FloatArray]()
    for rest, alone, whole in (("queue_s", before, first_token), ("shared_s", after, end - first_token)):
        total = sum(alone.values(), np.zeros(kinds.size))
        share = np.minimum(1.0, whole / np.maximum(total, 1e-12))
        found[rest] = np.maximum(whole - total, 0.0)
        for name, each in alone.items():
            found[name] = found.get(name, 0.0) + each * share
    return {name: found[name] for name in (*PARTS, *(found.keys() - PARTS))}


def _closed_loop(context: Candidates, load: SimulatedLoad) -> ClosedLoop:
    """Return a closed loop for each candidate: one of its lanes (instances) with a mean share of the load."""
    settings, tokens, fixed = context.settings, context.memory.cache_tokens, context.memory.sequence_tokens
    prompt, output = (np.full(tokens.shape, mean) for mean in load.means)
    rows = range(tokens.size) if context.encoder is not None and load.images else ()
    encode = np.array([float(np.mean(context.encoding(row, load.images))) for row in rows] or [0.0])
    encodes = context.kinds.role == ENCODES
    is_apart = context.kinds.total(1.0 * encodes)[context.kinds.owner] > 0.0
    return ClosedLoop(
        costs=context.times,
        overheads=context.overheads,
        flight=np.maximum(float(load.flight(1)) / context.kinds.count, 1.0),
        prompt=prompt,
        output=output,
        budget=_budget(context) * settings.data * settings.pipeline,
        running=np.maximum(np.minimum(settings.max_running, context.memory.sequences), 1.0) * settings.data,
        cache_tokens=np.where(tokens < load.longest + fixed, UNLIMITED_TOKENS, tokens),
        fixed=fixed,
        ranks=settings.data,
        stages=settings.pipeline,
        role=context.kinds.role,
        ahead=settings.ahead,
        mixes=settings.mixed_chunks | context.overheads.mixes,
        encode=np.where(is_apart & ~encodes, 0.0, encode),
    )


def _in_closed_form(context: Candidates, load: SimulatedLoad, *, with_drafts: bool = False) -> dict[str, FloatArray]:
    """Return the metrics of the steady state, by name. Percentiles are replaced by means. Speculation counts only
    `with_drafts`."""
    loop, kinds, lanes = _closed_loop(context, load), context.kinds, context.kinds.count
    if with_drafts and context.settings.drafted.any():
        drafted, gain = gains(load.load, context.settings, np.arange(loop.prompt.size))
        loop = loop._replace(drafted=drafted, gain=gain)
    state, encodes = steady_state(loop), kinds.role == ENCODES
    state = LoopMeans(state.ttft, state.tpot, np.where(encodes, 0.0, state.rate))
    share = np.minimum(lanes, load.flight(1)) / lanes
    rate = kinds.total(state.rate * share)

    def mean(values: FloatArray) -> FloatArray:
        """Return the mean of a latency over each candidate's kinds of instances, weighted by their request rates."""
        return kinds.total(state.rate * share * values) / rate

    ttft, tpot = mean(state.ttft), mean(state.tpot)
    if (kinds.role % ENCODES).any():
        of_kind = [kinds.total(np.where(kinds.role == number, state.rate * share, 0.0)) for number in (1, 2)]
        once = np.where(kinds.role > 0, 1.0 / kinds.count, 0.0)
        is_divided = of_kind[0] > 0.0
        caches = kinds.total(np.where(kinds.role == 2, once * context.transfer, 0.0)) * load.means[0]
        rate = np.where(is_divided, np.minimum(*of_kind), rate)
        tpot = np.where(is_divided, kinds.total(once * state.tpot), tpot)
        wait = load.flight(1) * load.means[1] / rate - load.means[1] * tpot  # Little's law
        ttft = np.where(is_divided, np.maximum(wait, kinds.total(once * state.ttft) + caches), ttft)
    if encodes.any():
        seconds = np.where(encodes, loop.encode, 0.0)
        most = kinds.total(np.where(encodes, load.means[1] / np.maximum(seconds, 1e-9), 0.0))
        rate = np.where(most > 0.0, np.minimum(rate, most), rate)
        ttft = ttft + kinds.total(np.where(encodes, (seconds + context.transfer * load.image_tokens) / lanes, 0.0))
    latencies = {"ttft_s": ttft, "tpot_s": tpot, "itl_s": tpot, "e2e_s": ttft + load.means[1] * tpot}
    return {name: latencies.get(name.partition(".")[0], rate) for name in FIGURE_NAMES}


def _best_rows(context: Candidates, figures: Mapping[str, FloatArray], rows: IntArray, limit: int) -> IntArray:
    """Return the `limit` best rows by objective in closed form. Rows whose cache holds the longest request come
    first."""
    name = figure_name(context.task.spec.objective)
    base = figures.get(name, figures["output_tokens_per_s"])[rows]
    if name.endswith("per_device"):
        base = base / context.kinds.total(context.settings.devices)[rows]
    return rows[np.lexsort((-base if name in RATES else base, _lacks_room(context)[rows]))[:limit]]


def _lacks_room(context: Candidates) -> BoolArray:
    """Return which candidates have an instance whose cache does not hold the longest request."""
    longest = max(load.longest for load in context.loads)
    lacks = context.memory.cache_tokens < longest + context.memory.sequence_tokens
    lacks &= context.kinds.role != ENCODES
    return context.kinds.total(np.where(lacks, 1.0, 0.0)) > 0
