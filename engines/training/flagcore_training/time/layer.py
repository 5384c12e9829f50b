"""Time of one layer for one micro-batch, dense or with experts: kernels and collectives, forward and backward.

Also that of the vision tower for its images, without its patch embedding.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import add

import numpy as np
from flagcore_models.layers import head_of, streams_of
from flagcore_models.mixers.attention import Attention, Indexer
from flagcore_models.mixers.latent_attention import LatentAttention
from flagcore_models.mixers.mamba import Mamba
from flagcore_models.mixers.mamba2 import Mamba2
from flagcore_models.networks.experts import Experts
from flagcore_models.parts.tables import Embedding, Head
from flagcore_models.parts.tower import VisionTower

from flagcore.contracts import AttentionShape, Costs
from flagcore.domain.model import Layer, Mixer, Network, Part, Product
from flagcore.domain.space import FloatArray
from flagcore_training.layout import LayerLayout, Tower, Training
from flagcore_training.lengths import attention_length, one_by_one
from flagcore_training.time.experts import moe_block
from flagcore_training.time.passes import (
    GRAPH_LAUNCHES,
    MODULE_LAUNCHES,
    Block,
    Linear,
    Seconds,
    StageTime,
    TensorCollectives,
    activation_seconds,
    collective,
    context_collective,
    is_captured,
    linear,
    norm_and_residual,
    norm_seconds,
)
from flagcore_training.time.products import adapter_launches, product_time
from flagcore_training.vision import tower_layout, tower_training
from flagcore_training.weights import padded_vocab

LAUNCHES = {True: (50.0, 27.0), False: (103.0, 55.0)}
"""Kernels of the forward pass of attention and of an FFN, with and without transformer-engine's layers.

Each includes the norm and the residual sum. Backward launches twice as many. Fitted to step times that did not depend
on sizes: one published sweep and four measured ranks."""

LINEAR_LAUNCHES = {True: 11.5, False: 14.0}
"""Launches of one more linear layer, with and without transformer-engine's: half of what an FFN has besides its
activation function and its residual sum, four kernels. megatron-core's own layer took 0.26 of the host's time of an FFN
with its norm (timed with torch on a CPU, on which attention took 1.8 times as long as an FFN, as in `LAUNCHES`)."""

REPEATED_LAUNCHES = 0.35
"""Kernels of one recomputed module of attention, as a share of all kernels of attention. Fitted like `LAUNCHES`."""

ROTATION = {True: (2.0, 2.0), False: (70.0, 35.0)}
"""Memory passes over queries and keys for rotary embedding and for the layout of a fused core, forward and backward.

True is for transformer-engine's single kernel, False for torch, which needs many operations (slices, concatenations,
products, copies)."""

ROTATION_LAUNCHES, ROTATION_PASSES = (26.0, 22.0), (14.0, 18.0)
"""Kernels that rotate queries and keys in transformer-engine's layers without its single kernel, and their memory
passes, forward and backward. Counted with torch. If sequences of a pack are rotated one by one, each has so many
kernels, and its backward copies the gradient of the whole tensor (megatron-core 0.16 to 0.19 `rope_utils.py`)."""

REORDER_LAUNCHES = (40.0, 32.0)
"""Kernels, and numbers that the host reads, for each chunk of a sequence of a pack before and after the exchanges of
context parallelism with a2a: of queries, keys, values and outputs, and of their gradients. There are two chunks per
rank. Counted with torch (transformer-engine until 2.17 `context_parallel.py`, reorder_seq_chunks)."""


STREAMS_LAUNCHES = {True: (6.0, 9.0), False: (131.0, 535.0)}
"""Kernels of the residual streams around a mixer or a network, forward and backward, by whether they are fused.

Fused: of the projection with its norm, the weights, the sum, the mixing and what backward reduces (Megatron-LM, branch
dev, `fused_mhc_kernels.py`). Otherwise 20 normalizations of the mixing weights by rows and columns are 123 operations
in forward, which backward repeats and differentiates, in 521; compiled kernels do the rest, about 8 and 14. Counted
with torch in megatron-core @d98e8a64 `hyper_connection.py`; releases until 0.19 have no residual streams."""


def layer_time(train: Training, layout: LayerLayout, costs: Costs, layer: Layer) -> Block:
    """Return the time of a layer without recompute. `repeated` is the time that selective recompute would add.

    Layers in 16 bits among those of fewer bits count as a share of each layer.
    """
    if train.options.wide_layers and train.precision != train.unquantised:
        share = train.wide_share
        narrow = replace(train, options=replace(train.options, wide_layers=0))
        wide = layer_time(replace(narrow, precision=train.unquantised), layout, costs, layer)
        return layer_time(narrow, layout, costs, layer) * (1.0 - share) + wide * share
    tp = TensorCollectives.from_layout(train, layout, costs)
    return reduce(
        add, (part_block(part, train, layout, costs, tp) + _streams_block(part, train, layout) for part in layer.parts)
    )


def part_block(part: Part, train: Training, layout: LayerLayout, costs: Costs, tp: TensorCollectives) -> Block:
    """Return the time of a mixer or a network, with its norm and its residual sum."""
    if isinstance(part, Attention):
        return attention_block(part, train, layout, costs, tp)
    if isinstance(part, Mixer):
        return mixer_block(part, train, layout, costs, tp)
    if isinstance(part, Experts):
        return moe_block(part, train, layout, costs, tp)
    assert isinstance(part, Network)
    return ffn_block(part, train, layout, costs, tp)


def _streams_block(part: Part, train: Training, layout: LayerLayout) -> Block:
    """Return the launches of the residual streams around a mixer or a network, without the seconds of its norm."""
    is_mamba, zeros = isinstance(part, Mamba | Mamba2), np.zeros_like(layout.tensor)
    mixer, network = "mamba" if is_mamba else "attn", ("moe", "moe_router") if isinstance(part, Experts) else ("mlp",)
    graphs = network if isinstance(part, Network) else (mixer,)
    alone = np.where(is_captured(train, layout, *graphs), 0.0, float(streams_of(train.model) is not None))
    forward, backward = (
        Seconds.from_compute(zeros, launches=each * alone) for each in STREAMS_LAUNCHES[train.options.fused_streams]
    )
    return Block(forward, backward, zeros, Seconds.from_compute(zeros))


CORE_SHARE, CORE_BACKWARD = 0.3, 2.5
"""The share of the rate of large matrix products that kernels of mixers reach, and their flops in the backward pass
relative to forward. Estimates: flash-linear-attention and mamba-ssm publish a third to half of the rates of fused
attention."""


def mixer_block(mixer: Mixer, train: Training, layout: LayerLayout, costs: Costs, tp: TensorCollectives) -> Block:
    """Return the time of a layer with another mixer than attention: norm, products, other kernels, residual sum.

    Context-parallel ranks exchange what the products computed, so that each has some heads of all tokens (megatron-core
    0.16 `ssm/mamba_context_parallel.py`).
    """
    kernels, unit, tensor = costs.kernels, float(train.value_bytes), layout.tensor
    tokens = layout.tokens(train.sequence)
    tp, described = tp.beside(train, "out_proj"), mixer.products(train.model.hidden_size)
    products = reduce(add, (product_time(train, layout, costs, each) for each in described))
    width = float(sum(each.outputs for each in described if each.split == "outputs"))
    norm, norm_back, residual = norm_and_residual(train, layout, costs)
    square = np.full_like(tokens, SQUARE)
    per_flop = kernels.gemm_seconds(square, square, square, train.unquantised) / (2.0 * SQUARE**3)
    arithmetic = mixer.core_flops(float(train.sequence)) * tokens / tensor * per_flop / CORE_SHARE
    traffic = unit * tokens / tensor
    core = kernels.memory_seconds(traffic * mixer.moved) + arithmetic
    core_back = kernels.memory_seconds(traffic * mixer.moved_back) + CORE_BACKWARD * arithmetic
    exchange = collective(costs, "all_to_all", traffic * width, layout.context, tensor) * (layout.context > 1.0)
    launches = _launches(train, layout, 0, "mamba" if isinstance(mixer, Mamba | Mamba2) else "attn", described)
    element, element_back = norm + residual, norm_back + residual
    seconds, gradients = products.forward + core + element, products.input_gradient + core_back + element_back
    forward = Seconds.from_compute(seconds, tensor=tp.forward, context=exchange, launches=launches)
    backward = Seconds.from_compute(gradients, tensor=tp.backward(products), context=exchange, launches=2.0 * launches)
    repeated = norm if "layernorm" in train.options.recompute_modules else np.zeros_like(norm)
    for each in described:
        if each.name == "queries" and "mla_up_proj" in train.options.recompute_modules:  # with their norm and rotation
            moved = kernels.memory_seconds(4.0 * traffic * each.outputs)
            repeated = repeated + product_time(train, layout, costs, each).forward + moved
    return Block(forward, backward, products.weight_gradient, Seconds.from_compute(repeated))


def _launches(train: Training, layout: LayerLayout, kind: int, part: str, products: Sequence[Product]) -> FloatArray:
    """Return the launches of the forward pass of a mixer (`kind` 0) or an FFN (1), the `part` of graphs.

    A linear layer has one or more kernels. Compressed queries and keys have one each.
    """
    linears = len(products) + sum(each.name == "compression" and len(each.joined) > 1 for each in products)
    launches = LAUNCHES[train.transformer_engine][kind] + (linears - 2) * LINEAR_LAUNCHES[train.transformer_engine]
    launches = launches + adapter_launches(train, products)
    return np.where(is_captured(train, layout, part), GRAPH_LAUNCHES, launches)


SQUARE = 8192.0
"""Rows and columns of a large matrix product."""


def attention_block(
    mixer: Attention, train: Training, layout: LayerLayout, costs: Costs, tp: TensorCollectives
) -> Block:
    """Return the time of attention: norm, projections, attention core and residual sum."""
    kernels, unit = costs.kernels, float(train.value_bytes)
    width, tokens = mixer.query_width + mixer.key_width, layout.tokens(train.sequence) / layout.tensor
    (qkv, latent, output), tp = _projections(mixer, train, layout, costs), tp.beside(train, "o_proj")
    products = qkv + latent + output
    norm, norm_back, residual = norm_and_residual(train, layout, costs)
    tensor_bytes = unit * width * tokens
    sequences = one_by_one(train) * layout.micro_batch
    is_apart = train.transformer_engine and not train.options.rope_fusion  # other layers' figures have it
    share = is_apart * min(mixer.rotated / width, 1.0)  # other dimensions of latent attention are only concatenated
    both = zip(ROTATION[train.transformer_engine], ROTATION_PASSES, strict=True)
    passes, passes_back = (together + share * (apart - together) for together, apart in both)
    rotation = kernels.memory_seconds(passes * tensor_bytes)
    rotation_back = kernels.memory_seconds((passes_back + 2.0 * share * sequences) * tensor_bytes)
    if mixer.qk_norm:
        extra, extra_back = norm_seconds(kernels, tensor_bytes)
        rotation, rotation_back = rotation + extra, rotation_back + extra_back
    core, core_back = _attention_core(mixer, train, layout, costs)
    ring = context_collective(mixer, train, layout, costs)
    is_ring = train.options.cp_comm == "p2p"
    # a transfer overlaps the attention of the chunk before it; nothing is left to overlap the last chunk
    overlap = is_ring * (1.0 - 1.0 / layout.context)
    ring_forward = np.maximum(ring - overlap * core, 0.0)
    ring_back = np.maximum((1.0 + is_ring) * ring - overlap * core_back, 0.0)
    element = norm + rotation + residual
    element_back = norm_back + rotation_back + residual
    launches = _launches(train, layout, 0, "attn", mixer.products(train.model.hidden_size))
    is_a2a = train.transformer_engine and "a2a" in train.options.cp_comm
    chunks = is_a2a * (layout.context > 1.0) * 2.0 * layout.context * sequences
    rotations = is_apart * np.maximum(sequences, 1.0)
    more, more_back = (
        (rotate * rotations + reorder * chunks) * ~is_captured(train, layout, "attn")
        for rotate, reorder in zip(ROTATION_LAUNCHES, REORDER_LAUNCHES, strict=True)
    )
    seconds, gradients = products.forward + core + element, products.input_gradient + core_back + element_back
    forward = Seconds.from_compute(seconds, tensor=tp.forward, context=ring_forward, launches=launches + more)
    backward = Seconds.from_compute(
        gradients, tensor=tp.backward(qkv), context=ring_back, launches=2.0 * launches + more_back
    )
    repeats = {"core_attn": core, "layernorm": norm, "mla_up_proj": latent.forward + rotation}
    recomputed_modules = [repeats[name] for name in train.options.recompute_modules if name in repeats]
    recomputed = sum(recomputed_modules, np.zeros_like(core))
    repeated = Seconds.from_compute(recomputed, launches=launches * (REPEATED_LAUNCHES * len(recomputed_modules)))
    return Block(forward, backward, products.weight_gradient, repeated)


def ffn_block(network: Network, train: Training, layout: LayerLayout, costs: Costs, tp: TensorCollectives) -> Block:
    """Return the time of a dense layer's FFN: norm, both products, activation function and residual sum."""
    tokens, width = layout.tokens(train.sequence), network.width / layout.tensor
    described, tp = network.products(train.model.hidden_size), tp.beside(train, "down_proj")
    up, down = (product_time(train, layout, costs, each) for each in described)
    products = up + down
    norm, norm_back, residual = norm_and_residual(train, layout, costs)
    activation, activation_back = activation_seconds(train, network, costs.kernels, train.value_bytes * width * tokens)
    launches = _launches(train, layout, 1, "mlp", described)
    seconds = products.forward + norm + activation + residual
    forward = Seconds.from_compute(seconds, tensor=tp.forward, launches=launches)
    gradients = products.input_gradient + norm_back + activation_back + residual
    backward = Seconds.from_compute(gradients, tensor=tp.backward(up), launches=2.0 * launches)
    modules, repeated = train.options.recompute_modules, Seconds.from_compute(np.zeros_like(tokens))
    if "layernorm" in modules:
        again = np.where(is_captured(train, layout, "mlp"), 0.0, MODULE_LAUNCHES)
        repeated = repeated + Seconds.from_compute(norm, launches=again)
    if "mlp" in modules:
        repeated = repeated + Seconds.from_compute(products.forward + activation, tensor=tp.forward, launches=launches)
    return Block(forward, backward, products.weight_gradient, repeated)


def head_time(train: Training, layout: LayerLayout, costs: Costs) -> StageTime:
    """Return the time of final norm, output head and loss, for the model and each depth of multi-token prediction.

    The head runs in 16 bits at every precision of the layers, unless "head" is one of `mxfp8_modules`. A fused loss
    needs half of the memory traffic that `Head` describes.
    """
    model, kernels, unit = train.model, costs.kernels, float(train.value_bytes)
    tokens, rows = layout.tokens(train.sequence), layout.token_rows(train.sequence)
    vocab = padded_vocab(model, layout.tensor) / layout.tensor
    precision = "mxfp8" if "head" in train.options.mxfp8_modules else train.unquantised
    head = head_of(model)
    (described,) = head.products(model.hidden_size)
    product = linear(kernels, tokens, described.inputs, vocab, precision)
    norm, norm_back = norm_seconds(kernels, unit * model.hidden_size * rows)
    traffic = (1.0 if train.options.cross_entropy_fusion else 2.0) * vocab * tokens
    capped = (2.0 * vocab * tokens * each * (head.cap_bytes > 0) for each in Head.capped)
    loss, loss_back = (
        kernels.memory_seconds(passes * traffic + more) for passes, more in zip(Head.passes, capped, strict=True)
    )
    tp = TensorCollectives.from_layout(train, layout, costs)
    launches = np.full_like(tokens, Head.launches)
    gather = tp.gather * layout.sequence_parallel
    forward = Seconds.from_compute(product.forward + norm + loss, tensor=gather, launches=launches)
    gradients = product.input_gradient + norm_back + loss_back + train.options.tiled_loss * product.forward
    backward = Seconds.from_compute(gradients, tensor=tp.backward(product), launches=launches)
    return StageTime(forward, backward, product.weight_gradient) * (1.0 + model.mtp_num_layers)


def embedding_time(train: Training, layout: LayerLayout, costs: Costs) -> StageTime:
    """Return the time of the embedding: looking up a micro-batch's tokens, and computing the gradient of the table."""
    tokens, row_bytes = layout.tokens(train.sequence), train.value_bytes * train.model.hidden_size
    tp = TensorCollectives.from_layout(train, layout, costs)
    zeros, launches = np.zeros_like(tokens), np.full_like(tokens, Embedding.launches)
    reduction = np.where(layout.sequence_parallel > 0, tp.scatter, tp.reduce)
    looked_up, summed = (costs.kernels.memory_seconds(passes * row_bytes * tokens) for passes in Embedding.passes)
    forward = Seconds.from_compute(looked_up, tensor=reduction, launches=launches)
    backward = Seconds.from_compute(zeros, tensor=tp.gather * layout.sequence_parallel, launches=launches)
    return StageTime(forward, backward, summed)


def _projections(mixer: Attention, train: Training, layout: LayerLayout, costs: Costs) -> tuple[Linear, Linear, Linear]:
    """Return the linear layers of attention: input projections, latent up-projections, output projection.

    Those of an indexer are left out.
    """
    products = (each for each in mixer.products(train.model.hidden_size) if each.name != "index")
    times = {each.name: product_time(train, layout, costs, each) for each in products}
    if not isinstance(mixer, LatentAttention):
        return times["qkv"], times["qkv"] * 0.0, times["output"]
    down, queries, up = (times[name] for name in ("compression", "queries", "expansion"))
    return (down, up + queries, times["output"]) if mixer.query_rank else (down + queries, up, times["output"])


def _attention_core(
    mixer: Attention, train: Training, layout: LayerLayout, costs: Costs
) -> tuple[FloatArray, FloatArray]:
    """Return the seconds of the attention core, forward and backward, as a mean over layers with and without windows.

    An unfused core computes all scores, twice as many as a causal kernel. It moves them through memory seven times in
    forward (write of the product, read and write of masked softmax and of dropout with its mask, read of the second
    product) and 9.5 times in backward.
    """
    length, heads = float(train.sequence), mixer.num_heads / layout.tensor
    groups = np.maximum(mixer.groups / layout.tensor, 1.0)
    size = (mixer.query_width + mixer.attended) / 2 / mixer.num_heads
    precision = train.unquantised
    width = np.full_like(heads, size)
    if mixer.indexer and not train.options.sparse_kernels:
        return _unfused_sparse_core(train, layout, costs, mixer.indexer, heads, size)
    if train.flash:
        lengths = np.zeros_like(heads) + attention_length(train, layout.micro_batch)
        kernel, sizes = train.options.attention_kernel, {"queries": lengths, "keys": lengths, "head_dim": width}
        batch = layout.micro_batch * length / lengths
        shape = AttentionShape(batch=batch, heads=heads, groups=groups, kernel=kernel, **sizes)
        return _fused_core(mixer, train, layout, costs, shape, precision)
    scores = train.value_bytes * layout.micro_batch * heads * length**2 / layout.context
    score_rows = layout.micro_batch * heads * length / layout.context
    lengths = np.full_like(heads, length)
    product = costs.kernels.gemm_seconds(score_rows, lengths, width, precision)
    product = product + costs.kernels.gemm_seconds(score_rows, width, lengths, precision)
    traffic_s, traffic_back_s = costs.kernels.memory_seconds(7.0 * scores), costs.kernels.memory_seconds(9.5 * scores)
    return product + traffic_s, 2.0 * product + traffic_back_s


SPARSE_PASSES, INDEX_PASSES, LOSS_PASSES = (9.0, 12.0), (6.0, 20.0), (11.0, 11.0)
"""Passes over 32-bit scores, forward and backward: of attention (product, scale, mask, softmax, cast, product with the
values), of the indexer (product, activation function, weights, sum; backward only with a loss), and of the attention's
scores in the indexer's loss, which are computed again in both (product, scale, two masks, softmax, sum). Counted in the
source."""


def _unfused_sparse_core(
    train: Training, layout: LayerLayout, costs: Costs, indexer: Indexer, heads: FloatArray, size: float
) -> tuple[FloatArray, FloatArray]:
    """Return the seconds of sparse attention without fused kernels, forward and backward.

    It computes all scores of the attention and of the indexer in 32 bits, and masks those that are not chosen. On chips
    without a known rate of 32-bit products, that of 16 bits is a lower bound. Source: megatron-core 0.16 to 0.18
    `experimental_attention_variant/dsa.py` (`unfused_dsa_fn`, `_compute_index_scores`, `compute_dsa_indexer_loss`,
    `bwd_fused_indexer_loss_naive`).
    """
    kernels, length = costs.kernels, float(train.sequence)
    rows, keys = layout.micro_batch * length / layout.context, np.full_like(heads, length)
    forward = backward = np.zeros_like(heads)
    index_heads = np.full_like(heads, float(indexer.heads))
    has_loss = train.options.indexer_loss
    index_passes = INDEX_PASSES if has_loss else (INDEX_PASSES[0], 0.0)
    parts = [(heads, size, SPARSE_PASSES, 2.0), (index_heads, float(indexer.head_dim), index_passes, 4.0 * has_loss)]
    parts += [(heads, size, LOSS_PASSES, 1.0)] * has_loss
    for count, width, (passes, passes_back), products_back in parts:
        shape = rows * count, keys, np.full_like(heads, width)
        product = kernels.gemm_seconds(*shape, "fp32")
        product = np.where(np.isnan(product), kernels.gemm_seconds(*shape, train.unquantised), product)
        scores = 4.0 * rows * count * length
        forward = forward + product + kernels.memory_seconds(passes * scores)
        backward = backward + products_back * product + kernels.memory_seconds(passes_back * scores)
    values = kernels.gemm_seconds(rows * heads, np.full_like(heads, size), keys, train.unquantised)
    return forward + values, backward + 2.0 * values


def _fused_core(
    mixer: Attention, train: Training, layout: LayerLayout, costs: Costs, shape: AttentionShape, precision: str
) -> tuple[FloatArray, FloatArray]:
    """Return the seconds of fused attention over context-parallel ranks, forward and backward.

    `shape` is the shape of the whole sequences. Each rank has one chunk from the front and one from the back, so all
    ranks compute the same share of the scores. With p2p, the outputs and gradients of each further step are rescaled
    and summed (arXiv 2310.01889). Kernels skip the keys outside sliding windows.
    """
    kernels, context = costs.kernels, layout.context
    share = train.core_share
    if share is None:
        length = float(shape.queries.mean()) if shape.queries.size else 1.0
        share = mixer.pairs(length)
    ring = (context - 1.0) * (train.options.cp_comm == "p2p")
    output = train.value_bytes * shape.batch * shape.heads * shape.queries / context * shape.head_dim
    rescaling = ring * kernels.memory_seconds(3.0 * output)
    forward = share * kernels.attention_seconds(shape, precision) / context + rescaling
    return forward, share * kernels.attention_backward_seconds(shape, precision) / context + 2.0 * rescaling


def tower_block(train: Training, tower: Tower, layout: LayerLayout, costs: Costs) -> Block:
    """Return the time of the tower's layers and mergers. Nothing before frozen layers needs gradients."""
    vision, own, mesh = tower.vision, tower_training(tower, train), tower_layout(tower, layout)
    whole = VisionTower(vision=vision)
    layer = layer_time(own, mesh, costs, whole.layer) * float(vision.num_layers)
    if tower.frozen:
        layer = Block(layer.forward, layer.backward * 0.0, layer.weight * 0.0, layer.repeated * 0.0)
    rows = mesh.tokens(own.sequence) / vision.merge_size**2
    mergers = (
        linear(costs.kernels, rows, each.inner(mesh.tensor), each.outer(mesh.tensor), own.precision)
        * float(each.copies)
        for each in whole.merging
    )
    products = reduce(add, mergers)
    return layer + Block(
        Seconds.from_compute(products.forward),
        Seconds.from_compute(products.input_gradient * (not tower.frozen)),
        products.weight_gradient * (not tower.frozen_mergers),
        Seconds.from_compute(0.0 * products.forward),
    )
