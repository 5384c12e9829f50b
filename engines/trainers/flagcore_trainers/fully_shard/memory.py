"""Memory of one rank of a program on `fully_shard`: sharded states, gathered units, gradients and activations.

The peak is the maximum over the moments of a step at which the most is allocated. Sources: torch 2.13's
`distributed/fsdp/_fully_shard` (`_fsdp_param_group.py`, `_fsdp_collectives.py`), and the tensors that autograd stores
for the operators of a decoder in plain torch (`engines/trainers/tests/decoder`). ZeRO: arXiv 1910.02054; checkpoints:
arXiv 2205.05198.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from flagcore_models.layers import head_of, layer_counts, layers_of
from flagcore_training.frameworks import ADAM
from flagcore_training.memory.training import Memory

from flagcore.domain.model import Layer
from flagcore.domain.space import FloatArray, IntArray
from flagcore_trainers.fully_shard import DUALPIPEV, INTERLEAVED, ZBV
from flagcore_trainers.fully_shard.activations import Activations, activations
from flagcore_trainers.fully_shard.weights import (
    MemoryInputs,
    layers_of_rank,
    places,
    root_weights,
    stage_layers,
    table_weights,
)

LOSS_BYTES = 12.0
"""Peak bytes per logit in the backward of the loss: log-probabilities, their gradient, and that of the logits."""
SPLIT_LOSS_BYTES = 4.0
"""Bytes per logit that a loss over split logits needs in addition. Counted in torch 2.13's `loss_parallel`."""
LOSS_FORWARD_BYTES = 8.0
"""Bytes per logit when the loss is computed: fp32 logits and log-probabilities."""


def of_rank(job: MemoryInputs) -> Memory:
    """Return the memory of the rank that needs the most. Without a pipeline, all ranks need about the same."""
    alone, (staged, stage) = _without_pipeline(job), _with_pipeline(job)
    is_staged = job.pipeline > 1
    static, activation, peak = (np.where(is_staged, *each) for each in zip(staged, alone, strict=True))
    return Memory(static=static, activation=activation, peak=peak, worst_stage=np.where(is_staged, stage, 0))


_Sizes = tuple[FloatArray, FloatArray, FloatArray]
"""The bytes between steps, above it at the peak, and at the peak."""


def in_flight(job: MemoryInputs, place: FloatArray) -> FloatArray:
    """Return the largest number of micro-batches whose activations the rank at `place` of its pipeline stores.

    Source: torch 2.13 `distributed/pipelining/schedules.py`. Interleaved stages run rounds of micro-batches.
    """
    size, count = job.pipeline, job.microbatches
    after = size - 1.0 - place
    round_size = count / np.maximum(count // size, 1.0)
    kinds = [job.schedule == INTERLEAVED, job.schedule == ZBV, job.schedule == DUALPIPEV]
    held = np.select(kinds, [(2.0 * after + round_size + 1.0) / 2.0, size, size + 0.5], after + 1.0)
    return np.minimum(held, count)


def _with_pipeline(job: MemoryInputs) -> tuple[_Sizes, IntArray]:
    """Return the memory of the rank of a pipeline that needs the most, and its place.

    A step gathers all weights of a rank once, and gradients of all micro-batches add up before they are scattered.
    There are buffers for the tensors that all micro-batches receive. Schedules of several stages per rank drop their
    sends when the step ends (torch 2.13 `_PipelineScheduleRuntime`, `send_ops`).
    """
    u, r, n, size = job.value_bytes, job.reduce_bytes, job.ranks, job.pipeline
    table, (norm, own) = table_weights(job), root_weights(job)
    is_trained = job.adapter is None
    act, logits = activations(job), job.logits
    splits, parts = job.schedule >= ZBV, np.where(job.schedule >= INTERLEAVED, 2.0, 1.0)
    loss = (_loss_bytes(job) + u) * logits + act.head_input + _hidden_gradients(job)
    # The first backward of a zero-bubble stage retains the loss's graph, and the gradient of logits for the second one.
    graph = (2.0 * u + (0.0 if job.compiled_loss else LOSS_BYTES / 3.0) + job.cap_bytes) * logits + act.head_input
    stays = job.sends_stay & (job.schedule >= INTERLEAVED)
    found = []
    for place in places(job):
        numbers = stage_layers(job, place)
        here = [(layer, 1.0 * (number > 0)) for layer, number in numbers.items()]
        (whole, _share), trained = (layers_of_rank(job, numbers, only_trained=each) for each in (False, True))
        units = (job.base_bytes, job.stored_bytes)
        (base, _), (_, share) = (layers_of_rank(job, numbers, unit_bytes=each) for each in units)
        layer = np.max([job.units[each].trained * is_here for each, is_here in here], axis=0)
        stored, outputs = act.of_stage(numbers, size)
        first, last = place == 0, np.where(splits, place == 0, place == size - 1.0)
        edges = (table + own) * first + (table + norm) * last
        weights = whole + edges
        at_edges = edges * is_trained
        gradients, own_trained = trained[0] + at_edges, trained[1] + at_edges / n
        frozen = 0.0 if is_trained else share + max(u, job.stored_bytes[0]) * edges / n
        # The gradients of a backward in two passes wait for the next pass in their own data type.
        waiting = np.where((job.schedule == ZBV) & (r != u), u * gradients, 0.0)
        gathered = u * weights if is_trained else u * (trained[0] + edges) + base
        held = job.state_bytes * own_trained + frozen + gathered + r * gradients + waiting
        turns = splits & (place == size - 1.0)  # both stages are of this rank, so nothing is sent between them
        neighbours = act.hidden * (2.0 * parts - first - last - 2.0 * turns)
        buffers, flight = neighbours * job.microbatches, in_flight(job, place)
        sent = np.where(stays, neighbours * (job.microbatches - flight), 0.0)
        one = stored / parts
        stored = flight * (stored + act.hidden * (parts - last))
        # The first backward of a zero-bubble stage keeps the gradients of all products for the second one. Most wait at
        # the end, when ranks have computed the first backward of all micro-batches but not yet the second.
        kept = np.where(job.schedule == ZBV, outputs / parts, 0.0)
        waits = np.maximum(kept, (2.0 * place + 1.0) * kept - one)
        ends = held + buffers + np.where(stays, buffers, 0.0)
        held = held + buffers + sent
        left = np.where(job.schedule == ZBV, graph * last, 0.0)
        moments = [
            held + stored + waits + left + is_here * extra
            for each, is_here in here
            for extra in act.layers[each].backward
        ]
        moments.append(held + stored + loss * last)
        moments.append(held + stored - one + (u * (table + own) + act.hidden) * first)
        moments.append(ends + _reduction(job, np.where(first, (table + own) * is_trained, layer), n))
        static = (job.state_bytes + job.main_bytes) * own_trained + frozen
        peak = np.max(np.stack(np.broadcast_arrays(*moments)), axis=0)
        found.append(np.stack(np.broadcast_arrays(static, peak, place)))
    statics, peaks, ranks = np.stack(found, axis=1)
    worst = np.argmax(peaks, axis=0)[None]
    static, peak, rank = (np.take_along_axis(each, worst, axis=0)[0] for each in (statics, peaks, ranks))
    return (static, peak - static, peak), rank.astype(np.int64)


def _loss_bytes(job: MemoryInputs) -> FloatArray:
    """Return the peak bytes per logit in the backward of the loss. A compiled one has logits and their gradient."""
    if job.tiled_loss:
        return np.full_like(job.tensor, job.value_bytes)
    before = job.cap_bytes + job.value_bytes * (job.loss_parts > 1.0)  # the logits of the part before stay
    if job.compiled_loss:
        return np.full_like(job.tensor, 2.0 * job.value_bytes + before)
    return np.where(job.tensor > 1, LOSS_BYTES + SPLIT_LOSS_BYTES, LOSS_BYTES) + before


def _hidden_gradients(job: MemoryInputs) -> FloatArray:
    """Return the bytes of the head's input and of its gradient in fp32, if head and loss run in parts or tiles."""
    is_apart = job.tiled_loss or job.loss_parts > 1.0
    return is_apart * (4.0 + job.value_bytes) * job.model.hidden_size * job.tokens


def _reduction(job: MemoryInputs, weights: FloatArray, ranks: FloatArray) -> FloatArray:
    """Return the bytes of the reduction of a unit's gradients: its input, its output, and that in the states' format.

    Source: torch 2.13 `_fsdp_collectives.py`, `foreach_reduce`.
    """
    cast = np.where(job.reduce_bytes != job.main_bytes, job.main_bytes, 0.0)
    return weights * (job.reduce_bytes + (job.reduce_bytes + cast) / ranks)


def _without_pipeline(job: MemoryInputs) -> _Sizes:
    model, u, r, n, main = job.model, job.value_bytes, job.reduce_bytes, job.ranks, job.main_bytes
    table, (norm, own), (base, of_experts) = table_weights(job), root_weights(job), job.base_bytes
    units = (job.base_bytes, job.stored_bytes)
    (all_layers, _), (_, share) = (layers_of_rank(job, layer_counts(model), unit_bytes=each) for each in units)
    of_whole = (job.stored_bytes[0] * job.whole[0], job.stored_bytes[1] * job.whole[1])
    undivided, divided = layers_of_rank(job, layer_counts(model), unit_bytes=of_whole)
    share = share + undivided - divided
    trained, own_trained = layers_of_rank(job, layer_counts(model), only_trained=True)
    is_tied, is_trained = head_of(model).tied, job.adapter is None
    edges = table * (1.0 if is_tied else 2.0) + norm + own
    frozen = 0.0 * share if is_trained else share + max(u, job.stored_bytes[0]) * edges / n
    own_trained, table_gradient = own_trained + edges / n * is_trained, table * is_trained
    of_layers, of_table = job.moments or (ADAM, ADAM)
    wide = (of_table.of(main) - of_layers.of(main)) * table_gradient / n
    tower = job.tower * (main if is_trained else u) / n  # text gives it no gradients, and so no states
    states = np.where(job.offload, 0.0, job.state_bytes * own_trained + wide + frozen + tower)
    gradients = np.where(job.offload, 0.0, main * own_trained)
    # Gradients of earlier micro-batches are there from the start. Those of a single one fill up during backward.
    whole = r * (trained + edges * is_trained)
    early = np.where(job.microbatches > 1, np.where(job.whole_gradients & (n > 1), whole, gradients), 0.0)
    held = early + np.where(job.microbatches > 1, 0.0, np.where(job.offload, 0.0, main * table_gradient / n))
    # Buffers of sums over replicas stay until backward ends, unless they become the gradients.
    is_copied = job.replicated & ((job.microbatches > 1) | (r != main))
    summed = np.where(is_copied, r / n, 0.0)
    held = held + summed * table_gradient * (not is_tied)
    act = activations(job)
    is_shared = n > 1
    buffer = 1.0 * is_shared  # a gather has a buffer, and the weights are copied out of it
    last = job.units[layers_of(model)[-1]].weights * base
    gathered = np.where(job.reshard, 0.0, all_layers)  # weights that stay from forward to backward
    ahead = np.where(job.reshard, last * buffer, 0.0)  # the next layer, gathered during this one
    # The buffer of the last gather stays until the next one. Without gathers in backward, this is the end of the step.
    stale = np.where(job.reshard | (job.loss_parts > 1.0), 0.0, u * buffer * table * (not is_tied))
    early, held = early + stale, held + stale
    edge = u * (table + own + (norm if is_tied else norm / n))
    late = u * table_gradient if is_tied else 0.0  # a tied head's gradient waits for the embedding's
    logits, hidden_gradients, is_narrow = job.logits, _hidden_gradients(job), job.compiled_loss or job.tiled_loss
    # The gradient of a head in parts is summed in the format of its reduction.
    beside = hidden_gradients + r * table_gradient * (hidden_gradients > 0.0)
    at_head = act.stored + act.head_input + edge + gathered + beside
    head_reduce = np.zeros_like(n) if is_tied else r * table_gradient
    moments = [
        early
        - stale
        + at_head
        + np.where(job.casts, all_layers - gathered, 0.0)
        + ((u if is_narrow else LOSS_FORWARD_BYTES) + job.cap_bytes) * logits
        + buffer * (last if is_tied else u * table),
        early + at_head + _loss_bytes(job) * logits,
        early + at_head + (u + (u if is_narrow else 4.0) + job.cap_bytes) * logits,
        early + at_head + u * logits + u * table_gradient + act.hidden * job.tensor + ahead,
    ]
    # The gradient of a tensor-parallel head is computed whole, and then divided (`_fsdp_param.py`).
    moments.append(
        early + act.stored + gathered + edge + np.where(job.tensor > 1, u * table_gradient * (job.tensor + 1.0), 0.0)
    )
    if not is_tied:  # the head's gradients are copied into the buffer of their reduction
        moments.append(
            early + act.stored + gathered + u * table + _reduction(job, table_gradient, n) + act.hidden + ahead + beside
        )
    for layer, previous, after, passed in _moments_of_layers(job, act, head_reduce):
        one, unit = act.layers[layer], job.units[layer]
        left = act.stored - after
        kept = held + late + gathered - np.where(job.reshard, 0.0, u * passed * is_trained)
        kept = kept + edge * is_tied + ahead + summed * passed * is_trained
        whole = np.where(job.reshard, base * unit.weights + of_experts * unit.experts, 0.0)
        for extra in one.backward:
            moments.append(kept + whole + previous + left + extra)
        moments.append(kept + whole + previous + left - one.stored + act.hidden + u * unit.trained + act.norm)
        for weights, changed, sharing in (
            (base * unit.weights, unit.trained, n),
            (of_experts * unit.experts, unit.trained_experts, n / job.expert),
        ):
            copies = u * changed + _reduction(job, changed, sharing) - np.where(job.reshard, 0.0, weights)
            moments.append(kept + left - one.stored + copies + act.hidden)
    end = gradients + stale + act.hidden + summed * (trained + edges * is_trained - table_gradient)
    at_edge = table_gradient + own * is_trained
    first = np.maximum(u * at_edge + r * job.units[layers_of(model)[0]].trained, _reduction(job, at_edge, n))
    moments.append(end + u * (table + own) + first + late)
    moments.append(gradients + summed * (trained + edges * is_trained))
    above: FloatArray = np.max(np.stack(np.broadcast_arrays(*moments)), axis=0)
    return states + gradients, above - gradients, states + above


def _moments_of_layers(
    job: MemoryInputs, act: Activations, head_reduce: FloatArray
) -> Iterator[tuple[Layer, FloatArray, FloatArray, FloatArray]]:
    """Yield the layers whose backward may need the most: the last two layers, and the last one of each kind.

    With each come the bytes of the reduction of the unit after it, the stored bytes of the layers after it, and their
    weights.
    """
    seen, previous = set[Layer](), head_reduce
    after = passed = np.zeros_like(job.ranks)
    for number, layer in enumerate(reversed(layers_of(job.model))):
        if number < 2 or layer not in seen:
            yield layer, previous, after, passed
        seen.add(layer)
        previous, after = job.reduce_bytes * job.units[layer].trained, after + act.layers[layer].stored
        passed = passed + job.units[layer].weights * (not layer.repeats)
    if job.model.num_layers == 1:  # the only layer is the one before itself
        yield layer, previous, np.zeros_like(after), np.zeros_like(passed)
