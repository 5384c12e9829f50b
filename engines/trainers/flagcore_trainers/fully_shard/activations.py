"""Activations of the layers of a program on `fully_shard`: what autograd stores for the operators of plain layers of
torch, and the bytes at the moments of their backward. Counted in torch 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from flagcore_models.layers import layer_counts, own_embeddings
from flagcore_models.mixers.attention import Attention
from flagcore_models.mixers.latent_attention import LatentAttention
from flagcore_models.networks.experts import Experts
from flagcore_training.adapters import beside

from flagcore.domain.model import Layer, Mixer, Network
from flagcore.domain.space import FloatArray
from flagcore.domain.spec import Adapter
from flagcore_trainers.fully_shard.weights import MemoryInputs, part_weights, trained_weights, widths

ROUTER_BYTES, COPY_BYTES = 6.0, 26.0
"""Bytes that a router stores per token and expert (scores, and probabilities in fp32), and per copy of a token
(indices and weights). Counted."""
NORM_BYTES = 4.0
"""Bytes per element that a norm of several operators stores beyond its input and its output: it computes in fp32.
Frozen, it stores nothing but its input in fp32. Beside fp32 weights, its input has fp32, and so has what its weight
multiplies. Counted in transformers 5.24."""
NORM_VALUES = {2.0: 14.0, 4.0: 5.0}
"""Values per element that the backward of a norm without a fused kernel allocates, in values of 2 or 4 bytes. Counted
in torch 2.13."""


class LayerActivations(NamedTuple):
    """Bytes of a layer for one micro-batch: `stored` before backward, and at moments of `backward` above all stored.

    `gradients`: of the outputs of all products and norms.
    """

    stored: FloatArray
    backward: tuple[FloatArray, ...]
    gradients: FloatArray


class Activations(NamedTuple):
    """Bytes of activations of one micro-batch.

    `stored`: of all layers before backward, of which `embeddings` are those of the embeddings that layers have of their
    own. `layers`: of each kind of layer. `hidden`: the tensor between layers, which is the input of a layer.
    `head_input`: what the head and the norm before it store. `norm`: of the backward of a norm.
    """

    stored: FloatArray
    embeddings: FloatArray
    layers: Mapping[Layer, LayerActivations]
    hidden: FloatArray
    head_input: FloatArray
    norm: FloatArray

    def of_stage(self, numbers: Mapping[Layer, FloatArray], size: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the bytes that these numbers of layers of a pipeline of `size` ranks store, and their `gradients`."""
        pairs = [(number, self.layers[layer]) for layer, number in numbers.items()]
        stored = sum((number * each.stored for number, each in pairs), self.embeddings / size)
        return stored, sum((number * each.gradients for number, each in pairs), np.zeros_like(size))


class _PartBytes(NamedTuple):
    """Bytes of a mixer or network for one micro-batch.

    `stored`: besides its input. `kept`: with selective checkpoints, of which `shared` are among those stored.
    `moments`: at which its backward may need the most, above what its layer still stores. `gradients`: of its weights,
    while the backward of the part before it runs.
    """

    stored: FloatArray
    kept: FloatArray
    shared: FloatArray
    moments: tuple[FloatArray, ...] = ()
    gradients: FloatArray | float = 0.0


def activations(job: MemoryInputs) -> Activations:
    """Return the bytes that a rank without a pipeline stores and allocates.

    What the embeddings of layers save stays until the end of backward. With `host_activations`, a checkpoint comes back
    from the host while the one before it is still there; without checkpoints, tensors come back node by node, of which
    a whole layer is the most (trl 1.16 `models/activation_offloading.py`).
    """
    model, u, tensor = job.model, job.value_bytes, job.tensor
    whole = u * model.hidden_size * job.tokens
    hidden = np.where(job.split_tokens, whole / tensor, whole)
    norm = hidden * (NORM_VALUES[u] if not job.fused_norm else 2.0)
    found = {layer: _layer_activations(job, layer, hidden, whole, norm) for layer in layer_counts(model)}
    own = own_embeddings(model)
    embeddings = u * own.saved * job.tokens if own else 0.0 * job.tokens
    stored = sum((found[layer].stored * number for layer, number in layer_counts(model).items()), embeddings)
    if job.host_activations:
        largest = np.max([each.stored for each in found.values()], axis=0)
        on_host = np.minimum(stored, np.where(job.checkpointing == 2, 2.0, 1.0) * largest)
        stored = np.where((job.checkpointing == 2) | (job.host_activations == "all"), on_host, stored)
    return Activations(
        stored=stored,
        embeddings=embeddings,
        layers=found,
        hidden=hidden * model.residual_streams,
        head_input=hidden + whole,
        norm=norm,
    )


def _output_bytes(job: MemoryInputs, layer: Layer) -> FloatArray:
    """Return the bytes of the outputs of a layer's products but those that leave its parts."""
    total = np.zeros_like(job.tensor)
    for product in layer.mixer.products(job.model.hidden_size) if layer.mixer else ():
        if product.split != "inputs":
            total = total + sum(widths(job, product))
    if layer.network:
        total = total + (1.0 + layer.network.gated) * layer.network.active_width / job.tensor
    return job.value_bytes * job.tokens * total


def _layer_activations(
    job: MemoryInputs, layer: Layer, hidden: FloatArray, whole: FloatArray, norm: FloatArray
) -> LayerActivations:
    """Return the bytes of a layer of one kind. `hidden` and `whole`: of its input, on a rank and in a tensor group.

    A connection of several residual streams stores all of them.
    """
    u, blocks, streams, is_wide = job.value_bytes, len(layer.parts), job.model.residual_streams, job.is_wide
    mixer, network = _mixer(job, layer.mixer, hidden), _network(job, layer.network, hidden, whole, norm)
    between = hidden * streams * (1.0 + is_wide)
    full = blocks * (hidden + whole + between * (streams > 1)) + mixer.stored + network.stored
    full = full + blocks * (_norm_bytes(job) + 2.0 * is_wide * job.plain_norm) * hidden / u
    if own := own_embeddings(job.model):
        tensors, elements = own.saved_by_layer
        full = full + tensors * hidden + u * elements * job.tokens
    if job.adapter:
        full = full + _adapter_bytes(job, layer, job.adapter, whole)
    # Selective checkpoints store every second product, the outputs of attention and of the block, and what tensor
    # parallelism scatters: the outputs of both blocks.
    selective = between + mixer.kept + network.kept + whole + 2.0 * hidden * (job.tensor > 1)
    stored = np.select([job.checkpointing == 0, job.checkpointing == 1], [full, selective], between)
    again = np.where(job.checkpointing > 0, full, 0.0) - np.where(job.checkpointing == 2, between, 0.0)
    again = np.where(job.checkpointing == 1, full - between - mixer.shared - network.shared, again)
    left = again - network.stored - (hidden + whole) * (layer.network is not None) + network.gradients
    moments = [again + each for each in network.moments] + [left + each for each in mixer.moments]
    return LayerActivations(stored, tuple(moments), _output_bytes(job, layer) + blocks * (hidden + whole))


def _norm_bytes(job: MemoryInputs) -> float:
    """Return the bytes per element that a norm stores beyond its input and its output."""
    return job.plain_norm * (NORM_BYTES - job.value_bytes * (job.adapter is not None))


def _network(
    job: MemoryInputs, network: Network | None, hidden: FloatArray, whole: FloatArray, norm: FloatArray
) -> _PartBytes:
    """Return the bytes of a network: with a gate, of the gate, its silu unless fused, the other half, the product."""
    none = np.zeros_like(job.tensor)
    if network is None:
        return _PartBytes(stored=none, kept=none, shared=none)
    u, h, rows, is_trained = job.value_bytes, job.model.hidden_size, job.tokens / job.tensor, job.adapter is None
    gate, matrices = (4.0 - job.fused_activation, 3.0) if network.gated else (2.0, 2.0)
    width = u * network.active_width * rows
    if isinstance(network, Experts):
        # The backward begins with gradients of the experts' outputs and of their weights. At the end, what experts
        # stored is free but for gradients of their inputs, and gradients of all weights wait until they are stacked.
        # Adapters beside experts have the gradient of one sum at a time.
        copies = network.chosen * rows
        inside, routed = gate * u * network.width * copies, u * network.expert_width(h) * copies
        scores = ROUTER_BYTES * network.count * rows + COPY_BYTES * copies
        others = (gate * network.shared + 2.0 * network.latent) * u * rows
        experts = u * trained_weights(job, network)[1]
        if not is_trained and _adapts_experts(job, network):
            experts = u * part_weights(job, network)[1] * (matrices - 1.0) / matrices
        of_shared = u * network.shared * rows  # selective checkpoints store none of routed experts (torchtitan 0.3)
        ends = hidden + experts * (1.0 + 1.0 / matrices) - inside - routed
        return _PartBytes(
            stored=inside + 2.0 * routed + others + scores,
            kept=of_shared,
            shared=of_shared,
            moments=(3.0 * routed + hidden, ends),
            gradients=experts + u * part_weights(job, network)[0] * is_trained,
        )
    weights = u * h * network.width / job.tensor * is_trained
    at_gate = (gate - 2.0) * width + hidden + weights + whole * (job.tensor > 1)
    waiting = weights * (matrices if job.gradients_wait else 1.0)
    return _PartBytes(
        stored=gate * width,
        kept=width,
        shared=width,
        moments=(at_gate, waiting + norm + hidden - gate * width - whole),
        gradients=waiting * job.gradients_wait,
    )


def _adapter_bytes(job: MemoryInputs, layer: Layer, adapter: Adapter, whole: FloatArray) -> FloatArray:
    """Return what a layer stores beside its adapters, less the inputs of frozen layers without one.

    Of experts, PEFT stores the sum of their weights and of the products of their adapters (0.21 `tuners/lora/layer.py`,
    `ParamWrapper`). What else they need is left out. With dropout, other adapters store an input and a mask each; under
    autocast, adapters in fp32 store an input each (PEFT 0.21 `_cast_input_dtype`).
    """
    u, total, own = job.value_bytes, np.zeros_like(job.tensor), adapter.dropout or job.autocast
    for part in layer.parts:
        found = [(each, beside(adapter, each, peft=job.peft)) for each in part.products(job.model.hidden_size)]
        split = {each.split for each, adapters in found if each.adapts and adapters}
        total = total - whole * (own or not split - {"inputs"})
        if isinstance(part, Experts):
            total = total + u * part_weights(job, part)[1] * _adapts_experts(job, part)
            continue
        if isinstance(part, Network) and (own or "inputs" not in split):
            total = total - u * part.width * job.tokens / job.tensor
        ranks, widths = (sum(pair[index] for _each, adapters in found for pair in adapters) for index in (0, 1))
        outputs = widths * job.dora_stored * (adapter.kind == "dora")
        inputs = sum(len(of) * each.inputs / (job.tensor if each.split == "inputs" else 1.0) for each, of in found)
        total = total + job.tokens * (u * (ranks + outputs / job.tensor) + (u * own + adapter.dropout) * inputs)
    return total


def _adapts_experts(job: MemoryInputs, network: Experts) -> bool:
    """Return whether routed experts have adapters."""
    return any(beside(job.adapter, each, peft=job.peft) for each in network.routed(job.model.hidden_size))


def _mixer(job: MemoryInputs, mixer: Mixer | None, hidden: FloatArray) -> _PartBytes:
    """Return the bytes of a mixer. Its backward has the gradients of what its kernels stored and of the outputs of its
    products, but that of plain attention, which never needs the most. Selective checkpoints keep every second product,
    and the output of attention.
    """
    u, rows, none = job.value_bytes, job.tokens / job.tensor, np.zeros_like(job.tensor)
    if mixer is None:
        return _PartBytes(stored=none, kept=none, shared=none)
    products = mixer.products(job.model.hidden_size)
    kept = u * job.tokens * sum([width for each in products for width in widths(job, each)][::2], none)
    if not isinstance(mixer, Attention):
        outputs = u * sum(each.outputs for each in products) * rows
        attends = mixer.token_bytes(1.0) > 0.0
        output = u * sum(each.inputs for each in products if each.split == "inputs") * rows * attends
        moments = (2.0 * hidden + outputs,)
        return _PartBytes(stored=u * mixer.saved * rows, kept=kept + output, shared=output, moments=moments)
    sizes = mixer.query_width, mixer.key_width, mixer.value_width, mixer.attended
    query, key, value, attended = (u * each * rows for each in sizes)
    softmax, is_normed = 4.0 * mixer.num_heads * rows, mixer.qk_norm
    kept = kept + attended + softmax
    stored = query + attended + softmax + 2.0 * attended * mixer.gate  # the gate, and the output times the gate
    if not isinstance(mixer, LatentAttention):  # all context-parallel ranks' keys and values, unless an earlier layer's
        keys = (key + value) * job.context * (mixer.projections > 0)
        norms = (query + key) * is_normed * (1.0 + _norm_bytes(job) / u)
        return _PartBytes(stored=stored + keys + norms, kept=kept, shared=attended)
    compressed = u * job.tokens * ((mixer.query_rank + mixer.latent_rank) * (1.0 + is_normed) + mixer.rope_dim)
    expanded = u * mixer.expanded * rows  # values are a part of this tensor
    stored = stored + compressed + (query + expanded) * job.context
    work = 2.0 * hidden + 2.0 * query + expanded + attended
    return _PartBytes(stored=stored, kept=kept, shared=attended, moments=(work,))


def unpacked_bytes(job: MemoryInputs, layer: Layer) -> float:
    """Return the bytes of what a layer unpacks of quantized weights at once: a matrix, or all of its routed experts.

    Sources: bitsandbytes 0.49 `autograd/_functions.py`; its parametrization of experts, whose result autograd keeps.
    """
    adapter, products = job.adapter, [each for part in layer.parts for each in part.products(job.model.hidden_size)]
    if adapter is None or adapter.base not in ("nf4", "int8"):
        return 0.0
    experts = [each.weights for each in products if each.component == "experts" and adapter.quantized_experts]
    largest = max(each.inputs * out.width for each in products if each.component != "experts" for out in each.layers)
    return job.value_bytes * max(float(sum(experts)), largest)
