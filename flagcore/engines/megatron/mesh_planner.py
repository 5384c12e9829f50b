"""Plans the meshes of a mixed cluster: the combinations that may be the fastest.

Each group's own sizes have a seconds-per-layer figure and a memory limit, so a combination is scored without its
prediction: the shortest time of the slowest stage at which the stages have room for all layers. The best combinations
by score become candidates, which are predicted exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product

import numpy as np

from flagcore.contracts import Costs, Platform
from flagcore.domain.effects import engine_task
from flagcore.domain.space import BoolArray, FloatArray, IntArray
from flagcore.domain.spec import AUTO, Task
from flagcore.engines.megatron import rules as legality
from flagcore.engines.megatron.knobs import BY_NAME, candidate_columns, divisors
from flagcore.engines.megatron.memory.states import split_parameters
from flagcore.engines.megatron.memory.training import stages_in_use
from flagcore.engines.megatron.mesh_rules import WHOLE_CLUSTER
from flagcore.engines.megatron.meshes import (
    MBS,
    MESHES,
    RECOMPUTE,
    RECOMPUTE_CODES,
    SIZES,
    SP,
    SPLIT,
    group_names,
    mesh_text,
)
from flagcore.engines.megatron.parallel.layout import ArrayRecord, Layout, Training
from flagcore.engines.megatron.parallel.parameters import stage_parameters
from flagcore.engines.megatron.parallel.pipeline import Part, Stage, stage_with
from flagcore.engines.megatron.predict import layout_of, training
from flagcore.engines.megatron.rules import DIST_OPT
from flagcore.engines.megatron.split import Split, derived
from flagcore.engines.megatron.time.optimizer import gradient_time, optimizer_time
from flagcore.engines.megatron.time.pace import Pace
from flagcore.engines.megatron.time.passes import Seconds, StageTime
from flagcore.engines.megatron.time.step import Blocks, costs_in_run

DP, TP, PP, CP, EP = (SIZES[name] for name in ("dp", "tp", "pp", "cp", "ep"))
PLANNED = 256
"""Number of meshes that become candidates; each order of the node groups has an equal share besides."""
NEAR = 1.5
"""Combinations are dropped if their score, or a lower bound of it, exceeds the best score by this factor."""
MOST_SCORED = 4096
"""Maximum number of combinations that are scored, of one order and one batch."""
LEAST_TOKENS = 2048
"""Minimum number of tokens of a sequence on one context-parallel rank."""
MOST_SAMPLES = 64
"""Maximum micro-batch size."""
STEPS = 24
"""Halvings of the interval of the slowest stage's time."""


@dataclass(frozen=True, slots=True)
class _Options(ArrayRecord):
    """Ways to use one node group, as arrays: sizes, and figures of a stage with `base` layers.

    `seconds` is the time of a micro-batch, `layer` that of a further layer, `first` and `last` those of the embedding
    and of the head. `used` is the memory of the stage with one micro-batch in flight, relative to the capacity, as are
    `weights` and `activations` of a further layer; `last_layer` is that of the last stage. `step` is the time of
    gradients and optimizer.
    """

    tp: IntArray
    ep: IntArray
    dp: IntArray
    pp: IntArray
    recompute: IntArray
    base: FloatArray
    seconds: FloatArray
    layer: FloatArray
    first: FloatArray
    last: FloatArray
    used: FloatArray
    used_first: FloatArray
    used_last: FloatArray
    last_layer: FloatArray
    weights: FloatArray
    activations: FloatArray
    step: FloatArray
    more_step: FloatArray
    samples: IntArray
    context: IntArray

    def room(self, in_flight: FloatArray, ends: FloatArray) -> FloatArray:
        """Return the maximum number of layers of a stage; `ends` is the memory of embedding or head."""
        per_layer = self.weights + self.activations * in_flight
        free = 1.0 - self.used - ends - self.base * self.activations * (in_flight - 1.0)
        return np.floor(self.base + free / np.maximum(per_layer, 1e-12))

    def room_last(self) -> FloatArray:
        """Return the maximum number of layers of the last stage, which has one micro-batch in flight."""
        return np.floor(self.base + (1.0 - self.used - self.used_last) / np.maximum(self.last_layer, 1e-12))


def with_meshes(platform: Platform) -> Platform:
    """Return `platform` with the meshes that may be the fastest in its space, unless the spec lists them."""
    task = platform.task
    if len(task.cluster.groups) == 1 or task.spec.space.get(MESHES, AUTO) != AUTO or not derived(engine_task(task)):
        return platform
    space = {**task.spec.space, MESHES: (None, *planned(engine_task(task), platform.costs))}
    return replace(platform, task=replace(task, spec=replace(task.spec, space=space)))


def planned(task: Task, costs: Costs) -> tuple[str, ...]:
    """Return the meshes that may be the fastest, the best by score first."""
    names, words = group_names(task.cluster), _recompute_words(task)
    groups = [replace(each, further={}, between=None) for each in costs.groups]
    options = [_options(task, each, number) for number, each in enumerate(groups)]
    orders = [order for size in range(1, len(names) + 1) for order in permutations(range(len(names)), size)]
    scores: dict[tuple[int, ...], dict[str, float]] = {order: {} for order in orders}
    for _, context, samples in sorted(_batches(task, options)):
        parts = [each[np.flatnonzero((each.context == context) & (each.samples == samples))] for each in options]
        for order, of_order in scores.items():
            fastest = min(of_order.values(), default=np.inf)
            seconds, chosen = _best(task, [parts[group] for group in order], NEAR * fastest)
            for place, score in enumerate(seconds.tolist()):
                meshes = zip(order, chosen, strict=True)
                text = " + ".join(_text(names[group], each, place, words) for group, each in meshes)
                of_order[text] = min(of_order.get(text, np.inf), score)
    ranked = {text: score for of_order in scores.values() for text, score in of_order.items()}
    found = sorted(ranked, key=lambda text: ranked[text])[:PLANNED]
    for of_order in scores.values():
        found += sorted(of_order, key=lambda text: of_order[text])[: PLANNED // len(orders)]
    return tuple(dict.fromkeys(found))


def _text(name: str, options: _Options, row: int, words: Sequence[str]) -> str:
    sizes = {key: int(getattr(options, key)[row]) for key in ("tp", "ep", "dp", "pp")}
    return mesh_text(name, {**sizes, "cp": int(options.context[row])}, words[int(options.recompute[row])])


def _batches(task: Task, options: Sequence[_Options]) -> Iterator[tuple[float, int, int]]:
    """Yield each context-parallel size and number of samples per micro-batch of all replicas, after a lower bound of
    the seconds of a step.
    """
    layers, batch = task.spec.model.num_layers, task.spec.train.global_batch_size
    for context, samples in {
        key for each in options for key in zip(each.context.tolist(), each.samples.tolist(), strict=True)
    }:
        rates = [(each.pp / each.layer)[(each.context == context) & (each.samples == samples)] for each in options]
        rate = sum(float(each.max(initial=0.0)) for each in rates)
        yield batch / samples * layers / max(rate, 1e-30), context, samples


def _best(task: Task, options: Sequence[_Options], limit: float) -> tuple[FloatArray, list[_Options]]:
    """Return the lowest scores below `limit`, and the option of each mesh."""
    model, samples = task.spec.model, options[0].samples[:1]
    if not all(each.pp.size for each in options):
        return np.zeros(0), []
    layers, microbatches = float(model.num_layers), task.spec.train.global_batch_size / float(samples[0])
    useful = [_useful(each, layers, limit / microbatches, tied=_tied(task)) for each in options]
    rows = np.indices([each.pp.size for each in useful]).reshape(len(useful), -1)
    rate, stages, step = (
        function.reduce([values[row] for values, row in zip(columns, rows, strict=True)])
        for function, columns in (
            (np.add, [each.pp / each.layer for each in useful]),
            (np.add, [each.pp for each in useful]),
            (np.maximum, [each.step for each in useful]),
        )
    )
    bound = (microbatches - 1.0 + stages) * layers / rate + step
    kept = np.flatnonzero((bound <= limit) & (stages <= layers))
    rows = rows[:, kept[np.argsort(bound[kept])[:MOST_SCORED]]]
    chosen = [each[row] for each, row in zip(useful, rows, strict=True)]
    seconds = np.where(_legal(chosen, tied=_tied(task)), _seconds(chosen, layers, microbatches), np.inf)
    best = np.argsort(seconds)[:PLANNED]
    best = best[seconds[best] <= min(limit, NEAR * float(seconds[best[0]]) if best.size else 0.0)]
    best = best[np.isfinite(seconds[best])]
    return seconds[best], [each[best] for each in chosen]


def _tied(task: Task) -> bool:
    """Return whether the first and the last stage share weights."""
    return task.spec.model.mtp_num_layers > 0 or not task.spec.model.untie_embeddings_and_output_weights


def _useful(options: _Options, layers: float, seconds: float, *, tied: bool) -> _Options:
    """Return the options that no other one with as many stages beats in time and memory, and whose stages can have a
    layer within `seconds`.
    """
    one = np.ones(options.pp.size)
    most = np.minimum(_fits(options, seconds * one), layers)
    equal: list[IntArray | BoolArray] = [options.pp, options.ep > 1, *([options.tp, options.dp] if tied else [])]
    room = [np.minimum(options.room(flight * one, 0.0 * one), most) for flight in (1.0, 4.0, 16.0, 64.0)]
    room.append(np.minimum(options.room_last(), most))
    less = [options.layer, options.seconds - options.base * options.layer, options.step, *(-each for each in room)]
    beats: BoolArray = np.ones((one.size, one.size), dtype=np.bool_)
    for values in equal:
        beats &= values[:, None] == values
    for values in less:
        beats &= values[:, None] <= values + 1e-12
    beats &= ~(beats.T & (np.arange(one.size)[:, None] >= np.arange(one.size)))  # of equal options, the first
    return options[np.flatnonzero(~beats.any(axis=0) & (room[0] >= 1.0))]


def _legal(chosen: Sequence[_Options], *, tied: bool) -> BoolArray:
    """Return which combinations keep the rules between meshes."""
    tensor, data, expert = (np.stack([getattr(each, name) for each in chosen]) for name in ("tp", "dp", "ep"))
    legal: BoolArray = (expert > 1).all(axis=0) | (expert == 1).all(axis=0)
    if tied:
        legal &= (tensor[0] == tensor[-1]) & ((data[0] % data[-1] == 0) | (data[-1] % data[0] == 0))
    return legal


def _seconds(parts: Sequence[_Options], layers: float, microbatches: float) -> FloatArray:
    """Return the seconds of a step: those of the slowest stage of all micro-batches, the filling of the pipeline, and
    the longest step of gradients and optimizer.
    """
    kinds = [kind for number in range(len(parts)) for kind in _kinds(parts, number, microbatches)]

    def held(seconds: FloatArray) -> list[FloatArray]:
        """Return the layers of one stage of each kind within `seconds`."""
        return [np.minimum(_fits(each.of, seconds - each.extra), each.room) for each in kinds]

    def enough(seconds: FloatArray) -> BoolArray:
        counts = sum((each.count * most for each, most in zip(kinds, held(seconds), strict=True)), np.zeros(()))
        return np.asarray(counts >= layers)

    low, possible = np.zeros(parts[0].pp.shape), np.logical_and.reduce([(e.room >= 0) | (e.count == 0) for e in kinds])
    high = np.maximum.reduce([each.of.seconds + layers * each.of.layer + each.extra for each in kinds])
    possible &= enough(high)
    for _ in range(STEPS):
        middle = (low + high) / 2.0
        low, high = np.where(enough(middle), low, middle), np.where(enough(middle), middle, high)
    filling, steps = np.zeros(low.shape), np.zeros(low.shape)
    for each, count in zip(kinds, held(high), strict=True):
        more = count - each.of.base
        filling += each.count * (each.of.seconds + each.of.layer * more + each.extra)
        steps = np.maximum(steps, (each.count > 0) * (each.of.step + each.of.more_step * more))
    return np.where(possible, (microbatches - 1.0) * high + filling + steps, np.inf)


@dataclass(frozen=True, slots=True)
class _Kind:
    """Stages of one mesh with the same contents: their number, the maximum number of layers of each, and the seconds of
    embedding and head.
    """

    of: _Options
    count: FloatArray
    room: FloatArray
    extra: FloatArray


def _kinds(parts: Sequence[_Options], number: int, microbatches: float) -> Iterator[_Kind]:
    """Yield the first stage, the last one, and the stages between, as far as they are on mesh `number`.

    The stages between count with the mean of the first and of the last of them.
    """
    each, none = parts[number], np.zeros(parts[0].pp.shape)
    stages, after = each.pp.astype(np.float64), none + sum(part.pp for part in parts[number + 1 :])
    is_first, is_last = number == 0, number == len(parts) - 1
    alone = (stages == 1.0) & is_first & is_last
    most = np.minimum(after + stages, microbatches)
    if is_first:
        room = each.room(most, each.used_first + alone * each.used_last)
        yield _Kind(each, none + 1.0, room, each.first + alone * each.last)
    if is_last:
        yield _Kind(each, 1.0 - alone, each.room_last(), each.last)
    least = np.minimum(after + 1.0 + is_last, microbatches)
    room = np.maximum((each.room(most, none) + each.room(least, none)) / 2.0, 0.0)
    yield _Kind(each, np.maximum(stages - is_first - is_last, 0.0), room, none)


def _fits(options: _Options, seconds: FloatArray) -> FloatArray:
    """Return the maximum number of layers of a stage that takes at most `seconds` for a micro-batch."""
    return np.maximum(np.floor(options.base + (seconds - options.seconds) / options.layer + 1e-9), 0.0)


def _recompute_words(task: Task) -> list[str]:
    """Return the ways to recompute that the space has: none, selective, full, and the first 1, 2, 4, ... layers."""
    words = [*RECOMPUTE_CODES, *(f"block{2**power}" for power in range(6) if 2**power < task.spec.model.num_layers)]
    if task.spec.train.attention == "flash":
        words.remove("selective")
    return [word for word in words if all(_has(task, *pair) for pair in zip(RECOMPUTE, _codes(word), strict=True))]


def _codes(word: str) -> tuple[int, ...]:
    """Return the codes of the recompute knobs."""
    return RECOMPUTE_CODES[word] if word in RECOMPUTE_CODES else (1, 2, 2, int(word.removeprefix("block")))


def _has(task: Task, knob: str, code: int) -> bool:
    """Return whether the space has a value of a recompute knob; knobs that do not apply have no code."""
    listed = task.spec.space.get(knob, AUTO)
    if isinstance(listed, str) or (not code and knob != RECOMPUTE[0]):
        return True
    return code in [BY_NAME[knob].axis(()).encode(value) for value in listed]


def _largest(task: Task, switch: str) -> int:
    """Return 1 if the space has the value true of a switch."""
    listed = task.spec.space.get(switch, AUTO)
    return int(isinstance(listed, str) or True in listed)


def _stage(
    train: Training,
    layout: Layout,
    layers: FloatArray,
    in_flight: FloatArray,
    *,
    first: bool = False,
    last: bool = False,
) -> Stage:
    """Return a stage with these layers, with experts if the model has any."""
    zeros = np.zeros_like(layers)
    part = Part(
        first=zeros + first,
        last=zeros + last,
        final_norm=zeros + last,
        layers=layers,
        dense=layers if train.model.num_moe_experts is None else zeros,
        mtp=zeros + last * train.model.mtp_num_layers,
    )
    return replace(stage_with(part, train.model, layout, zeros + 1.0, train.options), in_flight=in_flight)


def _step_seconds(train: Training, layout: Layout, costs: Costs, stage: Stage, seconds: FloatArray) -> FloatArray:
    """Return the seconds of a stage for gradients and optimizer; a third of its passes is forward."""
    params = split_parameters(stage_parameters(train, layout, stage))
    time = StageTime(Seconds.of(seconds / 3.0), Seconds.of(seconds * 2.0 / 3.0), np.zeros_like(seconds))
    gradients = gradient_time(train, layout, costs.collectives, params, time)
    return gradients + optimizer_time(train, layout, costs, stage, params)


def _options(task: Task, costs: Costs, group: int) -> _Options:
    """Return the figures of all legal sizes of one node group."""
    train, columns = training(task), _columns(task, group)
    layout = replace(layout_of(task, columns), pipeline=np.full(columns[PP].shape, 4.0))
    run = costs_in_run(costs)
    pace = Pace.of(train, layout, run, Blocks.of(train, layout, run))
    base = np.maximum(layout.block, 1.0) + 1.0
    one, two = np.ones_like(base), 2.0 * np.ones_like(base)
    stages = [
        _stage(train, layout, base, one),
        _stage(train, layout, base + 1.0, one),
        _stage(train, layout, base + 1.0, two),
        _stage(train, layout, base, one, first=True),
        _stage(train, layout, base, one, last=True),
        _stage(train, layout, base + 1.0, one, last=True),
    ]
    in_use = stages_in_use(train, layout, costs, stages)
    capacity = np.nan_to_num(in_use[0].capacity, nan=1e30)
    used, longer, twice, first, last, longer_last = (each.used / capacity for each in in_use)
    activations = np.maximum(twice - longer, 0.0) / (base + 1.0)
    seconds, more = pace.seconds(base, 0), pace.seconds(base + 1.0, 0)
    steps = [_step_seconds(train, layout, run, each, time) for each, time in zip(stages, (seconds, more), strict=False)]
    return _Options(
        **{key: columns[SIZES[key]] for key in ("tp", "ep", "dp", "pp")},
        recompute=columns["word"],
        base=base,
        seconds=seconds,
        layer=np.maximum(more - seconds, 1e-12),
        first=pace.seconds(base, 0, first=True) - seconds,
        last=pace.seconds(base, 0, mtp=True, last=True) - seconds,
        used=used,
        used_first=first - used,
        used_last=last - used,
        last_layer=longer_last - last,
        weights=np.maximum(longer - used - activations, 0.0),
        activations=activations,
        step=steps[0],
        more_step=steps[1] - steps[0],
        samples=columns[MBS] * columns[DP],
        context=columns[CP],
    )


def _columns(task: Task, group: int) -> dict[str, IntArray]:
    """Return the columns of all legal sizes of one node group; `word` is the number of the way to recompute."""
    nodes, batch, space = task.cluster.groups[group], task.spec.train.global_batch_size, task.spec.space
    words, experts = _recompute_words(task), task.spec.model.num_moe_experts
    common = int(np.gcd.reduce([each.devices for each in task.cluster.groups]))
    suggested = {
        TP: divisors(nodes.devices_per_node),
        CP: [size for size in divisors(common) if size == 1 or task.spec.train.seq_length >= LEAST_TOKENS * size],
        PP: [size for size in divisors(nodes.devices) if size <= task.spec.model.num_layers],
        EP: divisors(int(np.gcd(experts, nodes.devices))) if experts else [1],
        MBS: [size for size in divisors(batch) if size <= MOST_SAMPLES],
        "word": range(len(words)),
    }
    values = [
        given if isinstance(listed := space.get(knob, AUTO), str) else listed for knob, given in suggested.items()
    ]
    table = np.array(list(product(*values)), dtype=np.int64).reshape(-1, len(suggested))
    columns = {**{name: np.repeat(each, len(table)) for name, each in candidate_columns({}).items()}}
    columns |= zip(suggested, table.T, strict=True)
    size = columns[TP] * columns[CP] * columns[PP]
    columns[DP] = np.maximum(nodes.devices // size, 1)
    codes = np.array([_codes(word) for word in words], dtype=np.int64)
    columns |= zip(RECOMPUTE, codes[columns["word"]].T, strict=True)
    columns[SP] = (columns[TP] > 1) * _largest(task, SP)
    columns[DIST_OPT], columns[SPLIT] = np.full_like(size, _largest(task, DIST_OPT)), np.ones_like(size)
    expert_ranks = Split.of(task).expert_tensor_size(columns) * columns[EP]
    broken = (nodes.devices % size != 0) | ((columns[TP] > 1) & (columns[SP] == 0))
    broken |= (nodes.devices // columns[PP] % expert_ranks != 0) & (experts is not None)
    listed = space.get(DP, AUTO)
    if not isinstance(listed, str):
        broken |= ~np.isin(columns[DP], np.array(listed, dtype=np.int64))
    for rule in legality.rules(task):
        if rule.name not in WHOLE_CLUSTER:
            broken |= rule.broken(columns)
    return {name: column[~broken] for name, column in columns.items()}
