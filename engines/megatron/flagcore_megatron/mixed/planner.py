"""Plans the meshes of a mixed cluster: the combinations that may be the fastest.

The time and the memory of a layer are known for the sizes of each node group, so a combination is scored without
predicting it: the score is based on the shortest time of the slowest stage for which the stages have room for all
layers. The combinations with the best scores become candidates, which are predicted exactly.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations

import numpy as np

from flagcore.contracts import Costs, Platform
from flagcore.domain.space import BoolArray, FloatArray, IntArray, KnobValue
from flagcore.domain.spec import AUTO, Task
from flagcore.i18n import N_, _
from flagcore_megatron.mixed import hetero
from flagcore_megatron.mixed.hetero import require_runnable
from flagcore_megatron.mixed.options import FEW, MeshOptions, mesh_options, node_sets, recompute_words
from flagcore_megatron.mixed.replicas import planned_replicas
from flagcore_megatron.mixed.rules import tied
from flagcore_megatron.space.knobs import BY_NAME, program_runs_meshes
from flagcore_megatron.space.meshes import DP, MESHES, PIPELINE, PP, RECOMPUTE_KNOBS, SIZES, Meshes
from flagcore_megatron.space.split import derived

PLANNED = 768
"""Number of meshes that become candidates. In addition, each order of the node groups gets an equal share of this
number."""
NEAR, NEAR_OF_MANY = 1.5, 1.15
"""A combination is dropped if its score, or a lower bound of the score, exceeds the best score by the first factor.

With more than FEW node groups, the second factor applies to the best score of all orders, else the first to each order.
"""
MAX_SIZES = 16
"""Of the options of a node group with equal numbers of stages, with and without EP, this many of the fastest and this
many of those with the most room for layers are combined."""
MAX_SCORED = 4096
"""Maximum number of combinations that are scored, for one set of node groups and one batch."""
EQUAL = ("tp", "dp", "ep", "recompute")
"""Sizes and recompute that must be equal on all meshes of a trial."""
MAX_MESHES = 45
"""Only meshes of some orders of node groups become candidates: as many as have this number of meshes together.

These are all orders of up to FEW groups and, of more, those with the best scores."""
LARGE = 64
"""For node groups with more devices than this, candidates on such a group alone only have the sizes of its meshes."""
STEPS = 24
"""Number of times that the interval of the slowest stage's time is halved."""


def with_meshes(platform: Platform, *, plan: bool = True) -> Platform:
    """Return `platform` with a space that includes the meshes that may be the fastest.

    If the spec lists meshes, nothing is added. Meshes of any sizes are added with `plan`, or if the command runs
    FlagScale with meshes. Otherwise, only meshes that flagcore's trials can run are added: with equal sizes, in another
    order than the spec, or without some groups. Raises SpecError for meshes in the spec that trials cannot run.
    """
    task = platform.task
    if len(task.cluster.groups) == 1:
        return platform
    any_sizes = plan or hetero.command_runs_meshes(task.spec)
    if not any_sizes:
        require_runnable(task)
    listed = task.spec.space.get(MESHES, AUTO)
    if listed != AUTO or not derived(task.for_engine()) or not (any_sizes or program_runs_meshes(task.spec)):
        return platform
    texts = planned(task.for_engine(), platform.costs, plan=any_sizes)
    if not hetero.command_runs_meshes(task.spec):
        texts += planned_replicas(task.for_engine(), platform.costs)
    task_with_meshes = _with_space(task, {MESHES: (None, *texts)})
    return replace(
        platform, task=_with_space(task_with_meshes, values_alone(task_with_meshes)) if plan else task_with_meshes
    )


def notes(task: Task) -> tuple[str, ...]:
    """Return a note if `with_meshes` left out sets and orders of node groups, because the task has many."""
    number, listed = len(task.cluster.groups), task.spec.space.get(MESHES, AUTO)
    if number <= FEW or isinstance(listed, str) or None not in listed:
        return ()
    text = N_("of {number} node groups, some sets and orders were not planned: list others in {key}")
    return (_(text, number=number, key=f"auto_tuner.space.{MESHES}"),)


def _with_space(task: Task, values: Mapping[str, str | tuple[KnobValue, ...]]) -> Task:
    """Return the task with these values of knobs, unless the spec lists values for them."""
    space = {**values, **{knob: listed for knob, listed in task.spec.space.items() if listed != AUTO}}
    return replace(task, spec=replace(task.spec, space=space))


def values_alone(task: Task, group: int | None = None) -> dict[str, str | tuple[KnobValue, ...]]:
    """Return the parallel sizes and the recompute of the meshes in a space, as knob values for jobs without meshes.

    With `group`, only texts with a single mesh on this node group are used. The result is then empty unless the group
    is `LARGE`, because the whole space of smaller groups is searched. Candidates without meshes need no other values:
    their sizes are also sizes of meshes. PP and DP are omitted, because virtual stages, which meshes cannot have,
    favour longer pipelines.
    """
    if group is not None and task.cluster.groups[group].devices <= LARGE:
        return {}
    table = Meshes.from_task(task)
    number, rows = table.number(np.arange(table.lengths.size)), table.groups >= 0
    if group is not None:
        rows &= (number == 1)[:, None] & (table.groups == group)
    values: dict[str, str | tuple[KnobValue, ...]] = {}
    for knob in (*SIZES.values(), *RECOMPUTE_KNOBS) if rows.any() else ():
        if knob not in (DP, PP):
            axis = BY_NAME[knob].axis(())
            codes = np.unique(table.codes[knob][rows]).tolist()
            values[knob] = tuple(axis.decode(code) for code in codes if code or knob == RECOMPUTE_KNOBS[0])
    return {knob: listed for knob, listed in values.items() if listed}


def planned(task: Task, costs: Costs, *, plan: bool = True) -> tuple[str, ...]:
    """Return the texts of the meshes that may be the fastest, sorted by score.

    Without `plan`, only meshes that trials can run are returned.
    """
    names, words = task.cluster.names, recompute_words(task)
    groups = [replace(each, further={}, between=None) for each in costs.groups]
    options = [mesh_options(task, each, number) for number, each in enumerate(groups)]
    orders_of = _orders(options, task.spec.model.num_layers)
    scores: dict[tuple[int, ...], dict[str, float]] = {order: {} for orders in orders_of.values() for order in orders}
    equal_fields = () if plan else EQUAL
    equal = equal_fields or (("tp", "dp") if tied(task) else ())
    has_few, fastest = len(names) <= FEW, np.inf
    for _bound, context, samples in sorted(_batches(task, options)):
        parts = [each[np.flatnonzero((each.context == context) & (each.samples == samples))] for each in options]
        parts = [_useful(each, task.spec.model.num_layers, np.inf, equal=equal) for each in parts]
        for subset, orders in orders_of.items():
            limits = dict.fromkeys(orders, NEAR_OF_MANY * fastest)
            if has_few:
                limits = {order: NEAR * min(scores[order].values(), default=np.inf) for order in orders}
            of_set = _crossed(task, [parts[group] for group in subset], max(limits.values()), equal, equal_fields)
            crossed = dict(zip(subset, of_set, strict=True))
            if not has_few:  # an order changes scores less than the sizes do
                best = np.argsort(_score(task, [crossed[group] for group in orders[0]]))[:PLANNED]
                crossed = {group: each[best] for group, each in crossed.items()}
            for order, limit in limits.items():
                if not plan and order == (*range(len(names)),):
                    continue  # candidates without meshes have these sizes
                seconds, chosen = _best(task, [crossed[group] for group in order], limit)
                fastest = min([fastest, *seconds[:1].tolist()])
                texts = [each.texts(names[group], words) for group, each in zip(order, chosen, strict=True)]
                for score, *meshes in zip(seconds.tolist(), *texts, strict=True):
                    text = PIPELINE.join(meshes)
                    scores[order][text] = min(scores[order].get(text, np.inf), score)
    return _with_best_scores(scores)


def _orders(options: Sequence[MeshOptions], layers: int) -> dict[tuple[int, ...], list[tuple[int, ...]]]:
    """Return the sets of node groups whose meshes are planned, and for each set the orders of its meshes.

    Of up to FEW groups, each set has all orders. Of more, it has one: sorted by room, because the first stages hold the
    most micro-batches. Of all groups together, each pair is also the first and the last. So the number of orders grows
    with the square of the number of groups.
    """
    every = (*range(len(options)),)
    if len(every) <= FEW:
        return {subset: list(permutations(subset)) for subset in node_sets([0.0] * len(every))}
    speed, room = [], []
    for each in options:
        most = np.minimum(each.room(np.full(each.pp.shape, 16.0), np.zeros(1)), layers)
        speed.append(float((each.pp * each.samples / each.layer)[most >= 1.0].max(initial=0.0)))
        room.append(float((most * each.layer / each.samples).max(initial=0.0)))
    roomiest = sorted(every, key=lambda group: -room[group])
    orders = {each: [tuple(group for group in roomiest if group in each)] for each in reversed(node_sets(speed))}
    for first, last in permutations(roomiest, 2):
        if (first, last) != (roomiest[0], roomiest[-1]):
            between = (group for group in roomiest if group not in (first, last))
            orders[every].append((first, *between, last))
    return orders


def _with_best_scores(scores: Mapping[tuple[int, ...], Mapping[str, float]]) -> tuple[str, ...]:
    """Return the texts of meshes with the lowest scores, of all orders of node groups and of each. `scores`: by order,
    those of each text."""
    texts: list[str] = []
    by_score = sorted(scores, key=lambda order: min(scores[order].values(), default=np.inf))
    kept = by_score[: MAX_MESHES // max(map(len, scores))]
    chosen = [of_order for order, of_order in scores.items() if order in kept]
    every = {text: score for of_order in chosen for text, score in of_order.items()}
    for by_text, most in ((every, PLANNED), *((of_order, PLANNED // len(chosen)) for of_order in chosen)):
        texts += sorted(by_text, key=by_text.__getitem__)[:most]
    return tuple(dict.fromkeys(texts))


def _batches(task: Task, options: Sequence[MeshOptions]) -> Iterator[tuple[float, int, int]]:
    """Yield a lower bound of the step time, a context-parallel size, and the number of samples per micro-batch. The
    samples are the total over all replicas. The bound is in seconds."""
    layers, batch = task.spec.model.num_layers, task.spec.train.global_batch_size
    keys = {key for each in options for key in zip(each.context.tolist(), each.samples.tolist(), strict=True)}
    for context, samples in keys:
        # The bound assumes the fastest option of every group, and no embedding, head, filling and optimizer. So no
        # combination with this key is faster. The keys with the lowest bounds come first and limit the others.
        rates = [(each.pp / each.layer)[(each.context == context) & (each.samples == samples)] for each in options]
        rate = sum(float(each.max(initial=0.0)) for each in rates)
        yield batch / samples * layers / max(rate, 1e-30), context, samples


def _crossed(
    task: Task, options: Sequence[MeshOptions], limit: float, equal: Sequence[str], alike: Sequence[str]
) -> list[MeshOptions]:
    """Return the combinations of options whose step time has a lower bound of at most `limit` seconds.

    The result contains the options of each group, with one row per combination. It does not depend on the order of the
    groups. The groups are combined one after the other. The bound of an incomplete combination assumes the best of each
    group that follows: its highest rate, its smallest number of stages, and its largest room. All meshes of a
    combination have equal values in the fields `alike`.
    """
    layers, microbatches = float(task.spec.model.num_layers), _microbatches(task, options)
    useful = [_useful(each, layers, limit / microbatches, equal=equal) for each in options]
    if not all(each.pp.size for each in useful):
        return [each[:0] for each in useful]
    rates = [each.pp / each.layer for each in useful]
    rooms = [each.pp * np.minimum(each.room(np.ones(each.pp.size), np.zeros(1)), layers) for each in useful]
    rows, sums, step = np.zeros((0, 1), dtype=np.int64), np.zeros((3, 1)), np.zeros(1)
    for number, each in enumerate(useful):
        columns, later_groups = np.stack([rates[number], rooms[number], each.pp]), range(number + 1, len(useful))
        place, option = np.divmod(np.arange(step.size * each.pp.size), each.pp.size)
        sums, step = sums[:, place] + columns[:, option], np.maximum(step[place], each.step[option])
        rate = sums[0] + sum(float(rates[later].max()) for later in later_groups)
        room = sums[1] + sum(float(rooms[later].max()) for later in later_groups)
        stages = sums[2] + sum(float(useful[later].pp.min()) for later in later_groups)
        bound = (microbatches - 1.0 + stages) * layers / rate + step
        conditions = [
            getattr(each, name)[option] == getattr(useful[0], name)[rows[0, place]] for name in alike if number
        ]
        chosen = np.flatnonzero(np.logical_and.reduce([bound <= limit, stages <= layers, room >= layers, *conditions]))
        if chosen.size > MAX_SCORED:  # limits the memory for adding the next group
            chosen = chosen[np.argpartition(bound[chosen], MAX_SCORED)[:MAX_SCORED]]
        rows = np.concatenate((rows[:, place[chosen]], option[None, chosen]))
        sums, step = sums[:, chosen], step[chosen]
    return [each[row] for each, row in zip(useful, rows, strict=True)]


def _microbatches(task: Task, options: Sequence[MeshOptions]) -> float:
    """Return the number of micro-batches of a step."""
    samples = next((int(each.samples[0]) for each in options if each.samples.size), 1)
    return task.spec.train.global_batch_size / samples


def _best(task: Task, options: Sequence[MeshOptions], limit: float) -> tuple[FloatArray, list[MeshOptions]]:
    """Return the shortest step times, at most `limit` seconds, in ascending order, and the options that give them. The
    options are one MeshOptions per mesh, in the order of the pipeline."""
    legal = np.flatnonzero(_legal(options, shares_weights=tied(task)))
    chosen = [each[legal] for each in options]
    if not legal.size:
        return np.zeros(0), chosen
    seconds = _score(task, chosen)
    best = np.argsort(seconds)[:PLANNED]
    best = best[np.isfinite(seconds[best]) & (seconds[best] <= min(limit, NEAR * float(seconds[best[0]])))]
    return seconds[best], [each[best] for each in chosen]


def _useful(options: MeshOptions, layers: float, seconds: float, *, equal: Sequence[str]) -> MeshOptions:
    """Return the options that no other option beats in both time and memory.

    Two options are compared if they have the same number of stages and equal values in the fields `equal`. Options
    whose stages cannot compute one layer in `seconds` are dropped.
    """
    ones = np.ones(options.pp.size)
    most = np.minimum(options.fits(seconds * ones), layers)
    equal_fields: list[IntArray | BoolArray] = [options.pp, options.ep > 1, *(getattr(options, name) for name in equal)]
    room = [np.minimum(options.room(flight * ones, 0.0 * ones), most) for flight in (1.0, 4.0, 16.0, 64.0)]
    room.append(np.minimum(options.room_last(), most))
    less = [options.layer, options.seconds - options.base * options.layer, options.step, *(-each for each in room)]
    beats: BoolArray = np.ones((ones.size, ones.size), dtype=np.bool_)
    for values in equal_fields:
        beats &= values[:, None] == values
    for values in less:
        beats &= values[:, None] <= values + 1e-12
    beats &= ~(beats.T & (np.arange(ones.size)[:, None] >= np.arange(ones.size)))  # keeps the first of equal options
    unbeaten = np.flatnonzero(~beats.any(axis=0) & (room[0] >= 1.0))
    useful = options[unbeaten]
    group = 2 * useful.pp + (useful.ep > 1)
    # Options are ranked by their room with 16 micro-batches in flight: the first stages hold about as many.
    return useful[np.flatnonzero(_rank(group, useful.layer) | _rank(group, -room[2][unbeaten]))]


def _rank(alike: IntArray, figure: FloatArray) -> BoolArray:
    """Return a mask of the options with the `MAX_SIZES` lowest values in `figure`, among those with equal `alike`."""
    order = np.lexsort((figure, alike))
    place = np.empty_like(order)
    place[order] = np.arange(order.size) - np.searchsorted(alike[order], alike[order])
    return place < MAX_SIZES


def _legal(chosen: Sequence[MeshOptions], *, shares_weights: bool) -> BoolArray:
    """Return a mask of the combinations that satisfy the rules between meshes."""
    tensor, data, expert = (np.stack([getattr(each, name) for each in chosen]) for name in ("tp", "dp", "ep"))
    legal: BoolArray = (expert > 1).all(axis=0) | (expert == 1).all(axis=0)
    if shares_weights:
        legal &= (tensor[0] == tensor[-1]) & ((data[0] % data[-1] == 0) | (data[-1] % data[0] == 0))
    return legal


def _score(task: Task, parts: Sequence[MeshOptions]) -> FloatArray:
    """Return the estimated step time in seconds, for each combination of options.

    It is the sum of the slowest stage's time for all micro-batches, the pipeline fill time, and the longest time of
    gradient reduction and optimizer step.
    """
    layers, microbatches = float(task.spec.model.num_layers), _microbatches(task, parts)
    kinds = [kind for number in range(len(parts)) for kind in _kinds(parts, number, microbatches)]

    def held(seconds: FloatArray) -> list[FloatArray]:
        """Return the maximum number of layers that a stage of each kind can process within `seconds`."""
        return [np.minimum(mesh.fits(seconds - extra), room) for mesh, _count, room, extra in kinds]

    def enough(seconds: FloatArray) -> BoolArray:
        counts = [count * most for (_mesh, count, _room, _extra), most in zip(kinds, held(seconds), strict=True)]
        return np.asarray(sum(counts) >= layers)

    zeros = np.zeros(parts[0].pp.shape)
    high = np.maximum.reduce([mesh.seconds + layers * mesh.layer + extra for mesh, _count, _room, extra in kinds])
    possible = np.logical_and.reduce(
        [enough(high), *((room >= 0) | (count == 0) for _mesh, count, room, _extra in kinds)]
    )
    low, filling, steps = zeros, zeros, zeros
    for _step in range(STEPS):
        middle = (low + high) / 2.0
        fits = enough(middle)
        low, high = np.where(fits, low, middle), np.where(fits, middle, high)
    for (mesh, count, _room, extra), most in zip(kinds, held(high), strict=True):
        more = most - mesh.base
        filling = filling + count * (mesh.seconds + mesh.layer * more + extra)
        steps = np.maximum(steps, (count > 0) * (mesh.step + mesh.more_step * more))
    return np.where(possible, (microbatches - 1.0) * high + filling + steps, np.inf)


def _kinds(
    parts: Sequence[MeshOptions], number: int, microbatches: float
) -> Iterator[tuple[MeshOptions, FloatArray, FloatArray, FloatArray]]:
    """Yield the kinds of stages on mesh `number`: the pipeline's first stage, its last one, and those between.

    A mesh may not contain all of them. Each item consists of the mesh, the number of such stages, the maximum number of
    layers of each stage, and the seconds of embedding and head. For the stages between, the maximum is the mean of the
    maxima of the first and the last of them.
    """
    options, zeros = parts[number], np.zeros(parts[0].pp.shape)
    stages, after = options.pp.astype(np.float64), zeros + sum(part.pp for part in parts[number + 1 :])
    is_first, is_last = number == 0, number == len(parts) - 1
    alone = (stages == 1.0) & is_first & is_last
    most, least = np.minimum(after + stages, microbatches), np.minimum(after + 1.0 + is_last, microbatches)
    if is_first:
        room = options.room(most, options.used_first + alone * options.used_last)
        yield options, zeros + 1.0, room, options.first + alone * options.last
    if is_last:
        yield options, 1.0 - alone, options.room_last(), options.last
    room = np.maximum((options.room(most, zeros) + options.room(least, zeros)) / 2.0, 0.0)
    yield options, np.maximum(stages - is_first - is_last, 0.0), room, zeros
