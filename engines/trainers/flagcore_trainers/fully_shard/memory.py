"""Memory of one rank of a program on `fully_shard`: sharded states, gathered units, gradients and activations.

The peak is the maximum over the moments of a step at which the most is allocated. Sources: torch 2.13's
`distributed/fsdp/_fully_shard` (`_fsdp_param_group.py`, `_fsdp_collectives.py`), and the tensors that autograd stores
for the operators of a decoder in plain torch (`engines/trainers/tests/decoder`). ZeRO: arXiv 1910.02054; checkpoints:
arXiv 2205.05198.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from flagcore_models.shapes import attended, latent_widths, widths
from flagcore_training.adapters import (
    BASE_BYTES,
    chosen,
    has_adapter,
    weights_beside,
)
from flagcore_training.memory.adapters import DORA_STORED
from flagcore_training.memory.training import Memory

from flagcore.domain.model import Attention, Layer, Mixer, Model
from flagcore.domain.space import BoolArray, FloatArray, IntArray
from flagcore.domain.spec import Adapter
from flagcore_trainers.fully_shard import DUALPIPEV, INTERLEAVED, ZBV
from flagcore_trainers.fully_shard.linear_layers import (
    Product,
    attention_products,
    mixer_products,
    network_products,
)

MAIN_BYTES = 4.0
"""Bytes per sharded weight in fp32. A sharded gradient and each of both moments of Adam have the same format."""
LOSS_BYTES = 12.0
"""Peak bytes per logit in the backward of the loss: log-probabilities, their gradient, and that of the logits."""
SPLIT_LOSS_BYTES = 4.0
"""Bytes per logit that a loss over split logits needs in addition. Counted in torch 2.13's `loss_parallel`."""
LOSS_FORWARD_BYTES = 8.0
"""Bytes per logit when the loss is computed: fp32 logits and log-probabilities."""
ROUTER_BYTES, COPY_BYTES = 6.0, 26.0
"""Bytes that a router stores per token and expert (scores, and probabilities in fp32), and per copy of a token
(indices and weights). Counted."""
NORM_VALUES = {2.0: 14.0, 4.0: 5.0}
"""Values per element that the backward of a norm without a fused kernel allocates, in values of 2 or 4 bytes. Counted
in torch 2.13."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryInputs:
    """What the memory of candidates depends on. Arrays have one element per candidate.

    `ranks`: ranks that share each weight, of which `expert` have different experts.
    `replicated`: whether gradients are also summed over replicas.
    `schedule`: the code of the schedule of a pipeline, as in `space`.
    `checkpointing`: 0 none, 1 selective, 2 full. `reduce_bytes`: bytes of a gradient while it is reduced, and
    `main_bytes` of a sharded weight, of its gradient, and of each moment of Adam.
    `value_bytes`: bytes of an activation. `fused_norm`: whether norms are one kernel.
    `compiled_loss`: whether the loss is one kernel per pass, which reads and writes 16-bit logits.
    `split_tokens`: whether tensor-parallel ranks divide the tokens between blocks.
    `adapter`: the adapters that are trained; the other weights are then frozen, in the format of activations.
    `dora_stored`: outputs that DoRA stores.
    `sends_stay`: whether a send keeps its tensor until the schedule drops it, as Gloo's does. NCCL frees what is sent.
    """

    model: Model
    value_bytes: float
    ranks: FloatArray
    tensor: FloatArray
    context: FloatArray
    tokens: FloatArray
    microbatches: FloatArray
    reshard: BoolArray
    checkpointing: FloatArray
    reduce_bytes: FloatArray
    offload: BoolArray
    replicated: BoolArray
    expert: FloatArray
    pipeline: FloatArray
    schedule: IntArray
    fused_norm: bool = True
    compiled_loss: bool = False
    split_tokens: BoolArray | bool = True
    sends_stay: bool = False
    adapter: Adapter | None = None
    dora_stored: float = DORA_STORED
    main_bytes: FloatArray | float = MAIN_BYTES

    @property
    def expert_layers(self) -> float:
        """The number of layers with experts."""
        return float(self.model.feed_forward_layers("experts")) if self.model.num_moe_experts else 0.0

    @property
    def base_bytes(self) -> float:
        """The bytes of a gathered weight of a layer."""
        is_narrow = self.adapter is not None and self.adapter.base is not None
        return BASE_BYTES[str(self.adapter and self.adapter.base)] if is_narrow else self.value_bytes


EXPERTS = "experts"
"""The feed-forward network of layers with experts (see `Layer`)."""


def kinds(model: Model) -> Mapping[Layer, int]:
    """Return the kinds of layers of a model, with the number of each."""
    if model.layers:
        return Counter(model.layers)
    found = {
        Layer(mixer=Attention(), feed_forward=each): model.feed_forward_layers(each) for each in ("dense", EXPERTS)
    }
    return {kind: number for kind, number in found.items() if number}


def units(job: MemoryInputs) -> list[tuple[FloatArray, float]]:
    """Return the number of weights of each kind of unit of a layer, and the number of such layers.

    All layers of a plain model count as the last one.
    """
    if not job.model.layers:
        return [(unit_weights(job)[0], float(job.model.num_layers))]
    return [(_layer_weights(job, kind), float(number)) for kind, number in kinds(job.model).items()]


def unit_weights(job: MemoryInputs) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the numbers of weights of the last layer, of the embedding or head, and of the rest.

    They are padded over the ranks, and are those of a tensor-parallel rank. Each weight is sharded by rows, so its rows
    are padded to a multiple. A layer has no routed experts: if the model has some, it is a layer with a router.
    """
    h, n = job.model.hidden_size, job.ranks
    layer = _layer_weights(job, _backwards(job.model)[0])
    return layer, _padded([(job.model.vocab_size / job.tensor, h)], n), _padded([(h, 1)], n)


def _backwards(model: Model) -> tuple[Layer, ...]:
    """Return the layers in the order of a backward pass. All layers of a plain model count as the last one."""
    return model.layers[::-1] or (list(kinds(model))[-1],) * model.num_layers


def _layer_weights(job: MemoryInputs, kind: Layer) -> FloatArray:
    """Return the padded number of weights of a layer without routed experts."""
    norms = (kind.mixer is not None) + bool(kind.feed_forward)
    total = _padded([(job.model.hidden_size, 1)] * norms, job.ranks)
    if isinstance(kind.mixer, Mixer):
        total = total + _mixer_weights(job, kind.mixer)
    elif kind.mixer is not None:
        total = total + (_latent_weights if job.model.multi_latent_attention else _attention_weights)(job)
    if kind.feed_forward:
        total = total + (_router_weights(job) if kind.feed_forward == EXPERTS else _block_weights(job))
    return total


def expert_weights(job: MemoryInputs) -> FloatArray:
    """Return the number of weights of a rank's experts in a layer, padded over the ranks that share them."""
    model, shared = job.model, job.ranks / job.expert
    if not job.expert_layers:
        return np.zeros_like(job.ranks)
    columns = float(model.hidden_size * (model.moe_ffn_hidden_size or model.ffn_hidden_size))
    matrices = 2.0 + model.gated_linear_unit
    return matrices * _padded([((model.num_moe_experts or 1) / job.expert, columns)], shared)


def trained_units(job: MemoryInputs, kind: Layer) -> tuple[FloatArray, FloatArray]:
    """Return the numbers of trained weights of a layer without its routed experts, and of a rank's routed experts."""
    ones = np.ones_like(job.ranks)
    if (adapter := job.adapter) is None:
        return _layer_weights(job, kind), expert_weights(job) * (kind.feed_forward == EXPERTS)
    model, mixer, h = job.model, kind.mixer, float(job.model.hidden_size)
    products = list[Product]()
    if isinstance(mixer, Mixer):
        products += mixer_products(mixer, model.hidden_size)
    elif mixer is not None:
        products += attention_products(model)
    shared = model.moe_shared_expert_intermediate_size or 0
    width = {"": 0, EXPERTS: shared}.get(kind.feed_forward, model.ffn_hidden_size)
    if width:
        products += network_products(model, float(width), h)
    experts = weights_beside(adapter, network_products(model, float(model.moe_ffn_hidden_size or 0), h))
    experts = experts * (model.num_moe_experts or 0) / job.expert * (kind.feed_forward == EXPERTS)
    return weights_beside(adapter, products) / job.tensor * ones, experts * ones


def trained_of_rank(job: MemoryInputs) -> tuple[FloatArray, FloatArray]:
    """Return the numbers of trained weights of all layers of a stage, whole, and of a rank's share of them."""
    whole = share = np.zeros_like(job.ranks)
    for kind, number in kinds(job.model).items():
        layer, experts = trained_units(job, kind)
        whole = whole + number * (layer + experts) / job.pipeline
        share = share + number * (layer + experts * job.expert) / job.ranks / job.pipeline
    return whole, share


def layers_of_rank(job: MemoryInputs) -> tuple[FloatArray, FloatArray]:
    """Return the numbers of weights of all layers of a stage, gathered, and of a rank's share of them."""
    experts, count = expert_weights(job), job.expert_layers
    each = (_layer_weights(job, kind) * number for kind, number in kinds(job.model).items())
    layers = sum(each, np.zeros_like(job.ranks))
    shares = layers / job.ranks + experts * count * job.expert / job.ranks
    return (layers + experts * count) / job.pipeline, shares / job.pipeline


def _attention_weights(job: MemoryInputs) -> FloatArray:
    model, h = job.model, job.model.hidden_size
    query, key, _value = (width / job.tensor for width in widths(model))
    rows: list[tuple[FloatArray | float, FloatArray | float]]
    rows = [(query, h), (key, h), (key, h), (h, query)]
    if model.add_qkv_bias:
        rows += [(query, 1), (key, 1), (key, 1)]
    if model.qk_layernorm:
        rows += [(model.kv_channels, 1)] * 2
    return _padded(rows + [(query, h)] * model.attention_output_gate, job.ranks)


def _latent_weights(job: MemoryInputs) -> FloatArray:
    """Return the padded number of weights of latent attention. Each tensor-parallel rank has all down-projections."""
    model, h, (q_rank, kv_rank, rope) = job.model, job.model.hidden_size, latent_widths(job.model)
    query, heads, value = (each / job.tensor for each in (widths(model)[0], _expanded(model), attended(model)))
    rows: list[tuple[FloatArray | float, FloatArray | float]]
    rows = [(query, q_rank or h), (kv_rank + rope, h), (heads, kv_rank), (h, value), (q_rank, h)]
    return _padded(rows + [(q_rank, 1), (kv_rank, 1)] * model.qk_layernorm, job.ranks)


def _expanded(model: Model) -> int:
    """Return the width of keys without their rotary part and of values, to which latent attention expands."""
    return model.num_attention_heads * ((model.qk_head_dim or 0) + (model.v_head_dim or 0))


def _mixer_weights(job: MemoryInputs, mixer: Mixer) -> FloatArray:
    """Return the padded number of weights of another mixer than attention."""
    rows: list[tuple[FloatArray | float, FloatArray | float]] = [(mixer.other_weights / job.tensor, 1)]
    for each in mixer.products(job.model.hidden_size):
        inputs, outputs = (
            size / job.tensor if each.split == name else float(size) * np.ones_like(job.tensor)
            for name, size in (("inputs", each.inputs), ("outputs", each.outputs))
        )
        rows.append((outputs, inputs))
    return _padded(rows, job.ranks)


def _block_weights(job: MemoryInputs, width: int | None = None) -> FloatArray:
    """Return the padded number of weights of a feed-forward block without experts."""
    model, h = job.model, job.model.hidden_size
    ffn = (model.ffn_hidden_size if width is None else width) / job.tensor
    return _padded([*[(ffn, h)] * (1 + model.gated_linear_unit), (h, ffn)], job.ranks)


def _router_weights(job: MemoryInputs) -> FloatArray:
    """Return the padded number of weights of a router, and of the shared experts."""
    model = job.model
    router = _padded([(float(model.num_moe_experts or 1), model.hidden_size)], job.ranks)
    shared = model.moe_shared_expert_intermediate_size
    return router + _block_weights(job, shared) if shared else router


def _padded(weights: Sequence[tuple[FloatArray | float, FloatArray | float]], ranks: FloatArray) -> FloatArray:
    return sum((np.ceil(rows / ranks) * ranks * columns for rows, columns in weights), np.zeros_like(ranks))


def of_rank(job: MemoryInputs) -> Memory:
    """Return the memory of the rank that needs the most. Without a pipeline, all ranks need about the same."""
    alone, (staged, stage) = _without_pipeline(job), _with_pipeline(job)
    is_staged = job.pipeline > 1
    static, activation, peak = (np.where(is_staged, *each) for each in zip(staged, alone, strict=True))
    return Memory(static=static, activation=activation, peak=peak, worst_stage=np.where(is_staged, stage, 0))


_Sizes = tuple[FloatArray, FloatArray, FloatArray]
"""The bytes between steps, above it at the peak, and at the peak."""


def stage_weights(job: MemoryInputs) -> tuple[FloatArray, FloatArray]:
    """Return the numbers of weights of the rank of a pipeline that has the most, gathered, and of its share of them."""
    _layer, table, rest = unit_weights(job)
    is_folded = (job.schedule >= ZBV) | (job.pipeline == 1)
    both = table * (1.0 + (is_folded & job.model.untie_embeddings_and_output_weights)) + np.where(is_folded, rest, 0.0)
    edges = np.maximum(both, np.where(is_folded, 0.0, table + rest))
    whole, share = layers_of_rank(job)
    return whole + edges, share + edges / job.ranks


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
    _layer, table, rest = unit_weights(job)
    layer = np.max([weights for weights, _number in units(job)], axis=0)
    if job.adapter:
        layer = np.max([trained_units(job, kind)[0] for kind in kinds(job.model)], axis=0)
    (whole, share), trained, is_trained = layers_of_rank(job), trained_of_rank(job), job.adapter is None
    act, logits = activations(job), job.tokens * job.model.vocab_size / job.tensor
    splits, parts = job.schedule >= ZBV, np.where(job.schedule >= INTERLEAVED, 2.0, 1.0)
    loss = (_loss_bytes(job) + u) * logits + act.head_input
    # The first backward of a zero-bubble stage retains the loss's graph, and the gradient of logits for the second one.
    graph = (2.0 * u + (0.0 if job.compiled_loss else LOSS_BYTES / 3.0)) * logits + act.head_input
    stays = job.sends_stay & (job.schedule >= INTERLEAVED)
    found = []
    for place in (np.zeros_like(size), size - 1.0):  # others have as many layers, but no embedding or head
        first, last = place == 0, np.where(splits, place == 0, place == size - 1.0)
        edges = table * first + (table + rest) * last
        weights = whole + edges
        at_edges = edges * is_trained
        gradients, own_trained = trained[0] + at_edges, trained[1] + at_edges / n
        frozen = 0.0 if is_trained else job.base_bytes * share + u * edges / n
        # The gradients of a backward in two passes wait for the next pass in their own data type.
        waiting = np.where((job.schedule == ZBV) & (r != u), u * gradients, 0.0)
        gathered = u * weights if is_trained else u * (trained[0] + edges) + job.base_bytes * whole
        held = 3.0 * job.main_bytes * own_trained + frozen + gathered + r * gradients + waiting
        turns = splits & (place == size - 1.0)  # both stages are of this rank, so nothing is sent between them
        neighbours = act.hidden * (2.0 * parts - first - last - 2.0 * turns)
        buffers, flight = neighbours * job.microbatches, in_flight(job, place)
        sent = np.where(stays, neighbours * (job.microbatches - flight), 0.0)
        stored = flight * (act.stored / size + act.hidden * (parts - last))
        one = act.stored / size / parts
        # The first backward of a zero-bubble stage keeps the gradients of all products for the second one. Most wait at
        # the end, when ranks have computed the first backward of all micro-batches but not yet the second.
        kept = np.where(job.schedule == ZBV, act.gradients / size / parts, 0.0)
        waits = np.maximum(kept, (2.0 * place + 1.0) * kept - one)
        ends = held + buffers + np.where(stays, buffers, 0.0)
        held = held + buffers + sent
        left = np.where(job.schedule == ZBV, graph * last, 0.0)
        moments = [held + stored + waits + left + extra for extra in act.backward]
        moments.append(held + stored + loss * last)
        moments.append(held + stored - one + (u * table + act.hidden) * first)
        moments.append(ends + _reduction(job, np.where(first, table * is_trained, layer), n))
        static = 4.0 * job.main_bytes * own_trained + frozen
        found.append((static, np.max(np.stack(np.broadcast_arrays(*moments)), axis=0)))
    (first_static, first_peak), (last_static, last_peak) = found
    is_last = last_peak > first_peak
    static, peak = np.where(is_last, last_static, first_static), np.maximum(first_peak, last_peak)
    return (static, peak - static, peak), np.where(is_last, size - 1.0, 0.0).astype(np.int64)


def _loss_bytes(job: MemoryInputs) -> FloatArray:
    """Return the peak bytes per logit in the backward of the loss. A compiled one has logits and their gradient."""
    if job.compiled_loss:
        return np.full_like(job.tensor, 2.0 * job.value_bytes)
    return np.where(job.tensor > 1, LOSS_BYTES + SPLIT_LOSS_BYTES, LOSS_BYTES)


def _reduction(job: MemoryInputs, weights: FloatArray, ranks: FloatArray) -> FloatArray:
    """Return the bytes of the reduction of a unit's gradients: its input, its output, and that in the states' format.

    Source: torch 2.13 `_fsdp_collectives.py`, `foreach_reduce`.
    """
    cast = np.where(job.reduce_bytes != job.main_bytes, job.main_bytes, 0.0)
    return weights * (job.reduce_bytes + (job.reduce_bytes + cast) / ranks)


def _without_pipeline(job: MemoryInputs) -> _Sizes:
    model, u, r, n, main = job.model, job.value_bytes, job.reduce_bytes, job.ranks, job.main_bytes
    layer, table, rest = unit_weights(job)
    all_layers, share = layers_of_rank(job)
    experts = expert_weights(job)
    is_tied = not model.untie_embeddings_and_output_weights
    edges, is_trained = table * (1.0 if is_tied else 2.0) + rest, job.adapter is None
    (trained, own), frozen = trained_of_rank(job), 0.0 * share
    if not is_trained:
        frozen, layer = job.base_bytes * share + u * edges / n, layer * (job.base_bytes / u)
        all_layers = all_layers * (job.base_bytes / u)
    own, table_gradient = own + edges / n * is_trained, table * is_trained
    states = np.where(job.offload, 0.0, 3.0 * main * own + frozen)
    gradients = np.where(job.offload, 0.0, main * own)
    # Gradients of earlier micro-batches are there from the start. Those of a single one fill up during backward.
    early = np.where(job.microbatches > 1, gradients, 0.0)
    held = early + np.where(job.microbatches > 1, 0.0, np.where(job.offload, 0.0, main * table_gradient / n))
    # Buffers of sums over replicas stay until backward ends, unless they become the gradients.
    is_copied = job.replicated & ((job.microbatches > 1) | (r != main))
    summed = np.where(is_copied, r / n, 0.0)
    held = held + summed * table_gradient * (not is_tied)
    act = activations(job)
    is_shared = n > 1
    buffer = 1.0 * is_shared  # a gather has a buffer, and the weights are copied out of it
    gathered = np.where(job.reshard, 0.0, u * all_layers)  # weights that stay from forward to backward
    ahead = np.where(job.reshard, u * layer * buffer, 0.0)  # the next layer, gathered during this one
    # The buffer of the last gather stays until the next one. Without gathers in backward, this is the end of the step.
    stale = np.where(job.reshard, 0.0, u * buffer * table * (not is_tied))
    early, held = early + stale, held + stale
    edge = u * (table + rest) if is_tied else u * (table + rest / n)
    late = u * table_gradient if is_tied else 0.0  # a tied head's gradient waits for the embedding's
    logits = job.tokens * model.vocab_size / job.tensor
    at_head = act.stored + act.head_input + edge + gathered
    head_reduce = np.zeros_like(n) if is_tied else r * table_gradient
    moments = [
        early
        - stale
        + at_head
        + (u if job.compiled_loss else LOSS_FORWARD_BYTES) * logits
        + u * buffer * (layer if is_tied else table),
        early + at_head + _loss_bytes(job) * logits,
        early + at_head + (u + (u if job.compiled_loss else 4.0)) * logits,
        early + at_head + u * logits + u * table_gradient + act.hidden * job.tensor + ahead,
    ]
    # The gradient of a tensor-parallel head is computed whole, and then divided (`_fsdp_param.py`).
    moments.append(
        early + act.stored + gathered + edge + np.where(job.tensor > 1, u * table_gradient * (job.tensor + 1.0), 0.0)
    )
    if not is_tied:  # the head's gradients are copied into the buffer of their reduction
        moments.append(
            early + act.stored + gathered + u * table + _reduction(job, table_gradient, n) + act.hidden + ahead
        )
    for kind, previous, after, passed in _moments_of_layers(job, act, head_reduce):
        one, here = act.layers[kind], experts * (kind.feed_forward == EXPERTS)
        unit, graded = _layer_weights(job, kind) * (job.base_bytes / u), trained_units(job, kind)
        here = here * (job.base_bytes / u)
        left = act.stored - after
        kept = held + late + gathered - np.where(job.reshard, 0.0, u * passed * is_trained)
        kept = kept + edge * is_tied + ahead + summed * passed * is_trained
        own = np.where(job.reshard, u * (unit + here), 0.0)
        for extra in one.backward:
            moments.append(kept + own + previous + left + extra)
        moments.append(kept + own + previous + left - one.stored + act.hidden + u * graded[0] + act.norm)
        for weights, changed, sharing in ((unit, graded[0], n), (here, graded[1], n / job.expert)):
            copies = u * changed + _reduction(job, changed, sharing)
            moments.append(kept - np.where(job.reshard, 0.0, u * weights) + left - one.stored + copies + act.hidden)
    graded_edges = edges * is_trained
    end = gradients + stale + act.hidden + summed * (trained + graded_edges - table_gradient)
    first = np.maximum(
        u * table_gradient + r * trained_units(job, _backwards(model)[0])[0], _reduction(job, table_gradient, n)
    )
    moments.append(end + u * table + first + late)
    moments.append(gradients + summed * (trained + graded_edges))
    above: FloatArray = np.max(np.stack(np.broadcast_arrays(*moments)), axis=0)
    return states + gradients, above - gradients, states + above


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """Bytes of a layer for one micro-batch: `stored` before backward, and at moments of `backward` above all stored."""

    stored: FloatArray
    backward: tuple[FloatArray, ...]


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of activations of one micro-batch.

    `stored`: of all layers before backward. `layers`: of each kind of layer. `hidden`: the tensor between layers, which
    is the input of a layer. `head_input`: what the head and the norm before it store. `norm`: of the backward of a
    norm. `gradients`: of the outputs of all products and norms.
    """

    stored: FloatArray
    layers: Mapping[Layer, LayerActivations]
    hidden: FloatArray
    head_input: FloatArray
    norm: FloatArray
    gradients: FloatArray

    @property
    def backward(self) -> Iterator[FloatArray]:
        """Yield the bytes at all moments of the backward of layers."""
        return (moment for each in self.layers.values() for moment in each.backward)


def _moments_of_layers(
    job: MemoryInputs, act: Activations, head_reduce: FloatArray
) -> Iterator[tuple[Layer, FloatArray, FloatArray, FloatArray]]:
    """Yield the layers whose backward may need the most: the last two layers, and the last one of each kind.

    With each come the bytes of the reduction of the unit after it, the stored bytes of the layers after it, and their
    weights.
    """
    seen, previous = set[Layer](), head_reduce
    after = passed = np.zeros_like(job.ranks)
    for number, kind in enumerate(_backwards(job.model)):
        unit = _layer_weights(job, kind)
        if number < 2 or kind not in seen:
            yield kind, previous, after, passed
        seen.add(kind)
        previous, after, passed = (
            job.reduce_bytes * trained_units(job, kind)[0],
            after + act.layers[kind].stored,
            passed + unit,
        )
    if job.model.num_layers == 1:  # the only layer is the one before itself
        yield kind, previous, np.zeros_like(after), np.zeros_like(passed)


def activations(job: MemoryInputs) -> Activations:
    """Return the bytes that a rank without a pipeline stores and allocates."""
    model, u, tensor = job.model, job.value_bytes, job.tensor
    rows = job.tokens / tensor
    whole = u * model.hidden_size * job.tokens
    hidden = np.where(job.split_tokens, whole / tensor, whole)
    query, key, _value = (u * width * rows for width in widths(model))
    width = u * model.ffn_hidden_size * rows
    norm = hidden * (NORM_VALUES[u] if not job.fused_norm else 2.0)
    gradients = query + 2.0 * key + (1.0 + model.gated_linear_unit) * width + 2.0 * (hidden + whole)
    found, stored = dict[Layer, LayerActivations](), np.zeros_like(rows)
    shown = kinds(model)
    for kind, number in shown.items():
        found[kind] = _layer_activations(job, kind, hidden, whole, norm)
        stored = stored + found[kind].stored * number
    if not model.layers:  # all layers count as the last one
        found = {list(shown)[-1]: found[list(shown)[-1]]}
    return Activations(
        stored=stored,
        layers=found,
        hidden=hidden,
        head_input=hidden + whole,
        norm=norm,
        gradients=gradients * model.num_layers,
    )


def _layer_activations(
    job: MemoryInputs, kind: Layer, hidden: FloatArray, whole: FloatArray, norm: FloatArray
) -> LayerActivations:
    """Return the bytes of a layer of one kind. `hidden` and `whole`: of its input, on a rank and in a tensor group."""
    model, u, tensor = job.model, job.value_bytes, job.tensor
    rows, blocks = job.tokens / tensor, (kind.mixer is not None) + bool(kind.feed_forward)
    query, key, _value = (u * each * rows for each in widths(model))
    width = u * model.ffn_hidden_size * rows
    gate = 4.0 if model.gated_linear_unit else 2.0  # gate, its silu, the other half and the product
    weights = u * model.hidden_size * model.ffn_hidden_size / tensor
    matrices = 3.0 if model.gated_linear_unit else 2.0
    core, work = _core_bytes(job, kind)
    if adapter := job.adapter:
        weights = 0.0 * weights  # has no gradient
    routed, network = u * 0.0 * rows, gate * width * (kind.feed_forward != "")
    inside = routed
    if kind.feed_forward == EXPERTS:
        copies, width_of_expert = model.moe_router_topk * rows, model.moe_ffn_hidden_size or model.ffn_hidden_size
        shared = gate * u * rows * (model.moe_shared_expert_intermediate_size or 0)
        routed = u * model.hidden_size * copies
        scores = ROUTER_BYTES * (model.num_moe_experts or 1) * rows + COPY_BYTES * copies
        inside = gate * u * width_of_expert * copies
        network = inside + 2.0 * routed + shared + scores
    full = blocks * (hidden + whole) + core + network
    if adapter:
        full = full + _adapter_bytes(job, kind, adapter, whole)
    # Selective checkpoints store every second product, queries, values, gate and the output of the block, and what
    # tensor parallelism scatters: the outputs of both blocks.
    products = query + key + query + width + whole + 2.0 * hidden * (tensor > 1)
    selective = hidden + products + 4.0 * model.num_attention_heads * rows
    stored = np.select([job.checkpointing == 0, job.checkpointing == 1], [full, selective], hidden)
    again = np.where(job.checkpointing > 0, full, 0.0) - np.where(job.checkpointing == 2, hidden, 0.0)
    again = np.where(job.checkpointing == 1, full - hidden - query - width, again)
    moments, gradients = list[FloatArray](), np.zeros_like(rows)
    if kind.feed_forward == EXPERTS:
        # The backward begins with gradients of the experts' outputs and of their weights. At the end, what experts
        # stored is free but for gradients of their inputs, and gradients of all weights wait until they are stacked.
        experts = u * trained_units(job, kind)[1]
        moments = [again + 3.0 * routed + hidden]
        moments.append(again - inside - routed + hidden + experts * (1.0 + 1.0 / matrices))
        gradients = experts + u * _router_weights(job) * (not adapter)
    elif kind.feed_forward:
        at_gate = again + (gate - 2.0) * width + hidden + weights + whole * (tensor > 1)
        moments = [at_gate, again - gate * width - whole + matrices * weights + norm + hidden]
        gradients = matrices * weights
    if work is not None:
        after_network = again - network - (hidden + whole) * (kind.feed_forward != "")
        moments.append(after_network + gradients + 2.0 * hidden + work)
    return LayerActivations(stored, tuple(moments))


def _adapter_bytes(job: MemoryInputs, kind: Layer, adapter: Adapter, whole: FloatArray) -> FloatArray:
    """Return what a layer stores beside its adapters, less the inputs of frozen layers without one.

    Experts are left out.
    """
    model, u, none = job.model, job.value_bytes, np.zeros_like(job.tensor)
    inputs = (("q_proj", "k_proj", "v_proj", "in_proj"), kind.mixer), (("gate_proj", "up_proj"), kind.feed_forward)
    unused = sum((whole * (not has_adapter(adapter, *names)) for names, block in inputs if block), none)
    if kind.feed_forward and kind.feed_forward != EXPERTS and not has_adapter(adapter, "down_proj"):
        unused = unused + u * model.ffn_hidden_size * job.tokens / job.tensor
    products = [*attention_products(model)] if isinstance(kind.mixer, Attention) else []
    if kind.feed_forward not in ("", EXPERTS):
        products += network_products(model, float(model.ffn_hidden_size), float(model.hidden_size))
    found = [chosen(adapter, outer, joint=False) for _, outer in products]
    width = sum(len(each) * adapter.rank for each in found)
    if adapter.kind == "dora":
        return u * job.tokens * (width + job.dora_stored * sum(map(sum, found)) / job.tensor) - unused
    return u * job.tokens * width - unused


def _core_bytes(job: MemoryInputs, kind: Layer) -> tuple[FloatArray, FloatArray | None]:
    """Return the bytes that a mixer stores besides its input, and those that its backward needs, if it is the largest.

    The backward has the gradients of what the kernels stored and of the outputs of products.
    """
    model, u, mixer = job.model, job.value_bytes, kind.mixer
    rows = job.tokens / job.tensor
    if mixer is None:
        return np.zeros_like(rows), None
    if isinstance(mixer, Mixer):
        outputs = sum(each.outputs for each in mixer.products(model.hidden_size))
        return u * mixer.saved * rows, u * outputs * rows
    query, key, value = (u * each * rows for each in widths(model))
    softmax = 4.0 * model.num_attention_heads * rows
    if not model.multi_latent_attention:
        keys = 2.0 * key * job.context  # all context-parallel ranks' keys and values
        gate = 2.0 * query * model.attention_output_gate  # the gate, and the output times the gate
        return 2.0 * query + keys + softmax + (query + key) * model.qk_layernorm + gate, None
    q_rank, kv_rank, rope = (u * each * job.tokens for each in latent_widths(model))
    normed = (q_rank + kv_rank) * model.qk_layernorm
    expanded = u * _expanded(model) * rows  # values are a part of this tensor
    keys = (query + expanded) * job.context
    return q_rank + kv_rank + rope + normed + query + keys + value + softmax, 2.0 * query + expanded + value
