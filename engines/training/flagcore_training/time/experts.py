"""Time of a layer's experts for one micro-batch: router, dispatch, routed and shared experts."""

from dataclasses import replace
from functools import reduce
from operator import add

import numpy as np
from flagcore_models.networks.experts import Experts

from flagcore.contracts import Costs
from flagcore.domain.space import FloatArray
from flagcore_training.layout import LayerLayout, Training
from flagcore_training.time.passes import (
    GRAPH_LAUNCHES,
    MODULE_LAUNCHES,
    Block,
    Seconds,
    TensorCollectives,
    activation_seconds,
    as_integers,
    expert_dispatch,
    is_captured,
    norm_and_residual,
)
from flagcore_training.time.products import adapter_launches, product_time

EXPERT_LAUNCHES = {True: 25.0, False: 33.0}
"""Launches of the forward pass of one expert (or of all experts with grouped products), and of the shared experts, with
and without transformer-engine's layers. Backward launches twice as many. Without them, fitted to 13 measured ranks with
2 to 64 experts each; with them, an FFN without its norm and residual sum (`layer.LAUNCHES`)."""

ROUTER_KERNELS, FUSED_ROUTER_KERNELS = {True: 28.0, False: 34.0}, 11.0
"""Kernels of the norm, the router with its loss, and the residual sum, with and without transformer-engine's layers,
and of these with fused scores. Counted with torch in megatron-core 0.16.1 (`router.py`, `moe_utils.py`)."""

LOSS_KERNELS = 16.0
"""Those of the loss, which jobs without load balancing lack. Counted likewise: 30 operators with `aux_loss`, 14 with
`none`."""

KERNEL_LAUNCHES = 2.63
"""Launches of one kernel of a router or a dispatcher, whose modules keep the host busy between kernels: of 57 kernels
with megatron-core's own layers, the ranks of `EXPERT_LAUNCHES` showed 150 launches."""

DISPATCH_KERNELS = {"alltoall": 23.0, "allgather": 23.0, "flex": 18.0, "hybridep": 9.0}
"""Kernels from the numbers of tokens to the permutation before the experts, and back, by dispatcher. HybridEP permutes
while it sends. Counted as `ROUTER_KERNELS`, with one for each kernel of transformer-engine 2.20 `permutation.py`,
DeepEP and HybridEP (megatron-core `fused_a2a.py`)."""

PREPROCESS_SHARE = 0.6
"""Share of the kernels of a dispatcher before its exchange, which moe_preprocess captures. Of the alltoall one."""

GROUPED_LAUNCHES, CAST_LAUNCHES = 2.0, {"fp8": 2.0, "mxfp8": 2.0}
"""Kernels for each expert with grouped products, which are a product of cuBLAS per expert and linear layer, on several
streams (transformer-engine 2.14 `cublaslt_gemm.cu`, multi_stream_cublas_gemm), and those that cast its inputs, and in
backward its gradients; in NVFP4 one kernel casts those of all experts (@d0067d0d `cast.cpp`). Half of the kernels of
adapters are such products. Counted."""

FUSED_PASSES = (-1.0, 0.0)
"""Memory passes over a tensor of the experts' width of products fused with the activation function, apart from those of
products and casts. Of 3 and 5 passes of the function, two stay in backward, which read its inputs; its output and their
gradients are cast where they are computed, not read again. The numbers of tokens stay on the device, and all experts
are one kernel (transformer-engine @d0067d0d `ops/fused/grouped_mlp.py`; MXFP8 and NVFP4)."""

_BIAS_BYTES = {2.0: (12.0, 16.0), 4.0: (28.0, 40.0)}
"""The bytes per output element, forward and backward, of the biases of experts with a grouped product, by the bytes of
the router's weights. The biases are scaled by these and added expert by expert, then all outputs are concatenated, and
cast if the weights have 4 bytes, as with the flex dispatcher (megatron-core 0.16 `moe/experts.py`, `_apply_bias`)."""


def moe_block(network: Experts, train: Training, layout: LayerLayout, costs: Costs, tp: TensorCollectives) -> Block:
    """Return the time of an MoE block: norm, router, dispatch, experts, combine, shared experts and residual sum.

    The busiest expert rank processes `Layout.busiest` times the mean number of token copies, and the other ranks wait
    for it. With several local experts, the alltoall dispatcher also sorts the copies by expert, and back (Megatron-LM
    @0014f137 `token_dispatcher.py`). With `overlap_expert_comm`, the dispatch overlaps another micro-batch's layer.
    """
    kernels, options, unit = costs.kernels, train.options, float(train.value_bytes)
    h = train.model.hidden_size
    load = layout.busiest(options, network.count)
    copies = layout.expert_tokens(network.chosen, train.sequence) * load
    local_experts, width = network.count / layout.expert, network.width / layout.expert_tensor
    latent, routed = float(network.expert_width(h)), network.routed(h)
    rows, split = copies / local_experts, layout.expert_tensor
    experts = reduce(add, (product_time(train, layout, costs, each, rows, split) for each in routed)) * local_experts
    activation, activation_back = activation_seconds(train, network, kernels, train.value_bytes * width * copies)
    is_fused = options.fused_experts and train.precision in ("mxfp8", "nvfp4")
    if is_fused:
        tensor_bytes = train.value_bytes * width * copies
        activation, activation_back = (each * kernels.memory_seconds(tensor_bytes) for each in FUSED_PASSES)
    router = reduce(add, (product_time(train, layout, costs, each) for each in network.routing(h)))
    norm, norm_back, residual = norm_and_residual(train, layout, costs)
    permute = kernels.memory_seconds(unit * 2.0 * latent * copies)
    sorts = 2.0 * permute * (local_experts > 1.0) * (options.dispatcher == "alltoall")
    is_grouped = options.grouped_gemm and train.transformer_engine
    of_adapters = adapter_launches(train, routed)
    launches = (EXPERT_LAUNCHES[train.transformer_engine] + of_adapters) * (1.0 if is_grouped else local_experts)
    router_kernels = ROUTER_KERNELS[train.transformer_engine] - LOSS_KERNELS * (not options.router_loss)
    router_kernels = FUSED_ROUTER_KERNELS if options.router_fusion else router_kernels
    apart = router_kernels * ~is_captured(train, layout, "moe_router")
    before = PREPROCESS_SHARE * is_captured(train, layout, "moe_preprocess")
    launches = launches + KERNEL_LAUNCHES * (apart + DISPATCH_KERNELS[options.dispatcher] * (1.0 - before))
    single = is_grouped * (not is_fused) * local_experts * ~is_captured(train, layout, "moe")
    casts = single * CAST_LAUNCHES.get(train.precision, 0.0)
    launches = launches + single * (GROUPED_LAUNCHES + of_adapters / 2.0) + casts
    bias = bias_back = np.zeros_like(copies)
    if network.bias and is_grouped:
        weight_bytes = 4.0 if options.dispatcher in ("flex", "hybridep") else 2.0
        bias, bias_back = (kernels.memory_seconds(each * latent * copies) for each in _BIAS_BYTES[weight_bytes])
        launches = launches + 2.0 * local_experts
    launches = np.where(is_captured(train, layout, "moe"), GRAPH_LAUNCHES, launches)
    shares = {1.0, options.dispatch_share, options.combine_gradient_share}
    exchange = {share: load * expert_dispatch(network, train, layout, costs, share) for share in shares}
    sent, returned = (exchange[1.0] + exchange[s] for s in (options.dispatch_share, options.combine_gradient_share))

    element = norm + 2.0 * permute + sorts + residual + activation + bias
    forward = Seconds.from_compute(experts.forward + router.forward + element, expert=sent, launches=launches)
    element_back = norm_back + 3.0 * permute + sorts + activation_back + residual + bias_back
    gradients = experts.input_gradient + router.input_gradient + element_back
    backward = Seconds.from_compute(gradients, expert=returned, launches=2.0 * launches - casts)
    repeated = Seconds.from_compute(np.zeros_like(norm))
    captured = (is_captured(train, layout, "moe", each) for each in ("moe_router", "moe"))
    again, again_act = (np.where(each, 0.0, MODULE_LAUNCHES) for each in captured)
    if "layernorm" in options.recompute_modules:
        repeated = repeated + Seconds.from_compute(norm, launches=again)
    if "moe" in options.recompute_modules:
        repeated = repeated + forward
    elif "moe_act" in options.recompute_modules:
        repeated = repeated + Seconds.from_compute(activation, launches=again_act)
    block = Block(forward, backward, experts.weight_gradient + router.weight_gradient, repeated)
    if network.shared:
        block = block + _shared_expert_block(network, train, layout, costs, tp)
    if not options.overlap_expert_comm:
        return block
    share = costs.collectives.compute_share(as_integers(layout.expert), as_integers(layout.expert_tensor))
    return _overlap_dispatch(block, layout.pairs(train.model) * (1.0 - share))


def _shared_expert_block(
    network: Experts, train: Training, layout: LayerLayout, costs: Costs, tp: TensorCollectives
) -> Block:
    tokens, width = layout.tokens(train.sequence), network.shared / layout.tensor
    described, tp = network.always(train.model.hidden_size), tp.beside(train, "down_proj")
    up, down = (product_time(train, layout, costs, each) for each in described)
    products = up + down
    activation, back = activation_seconds(train, network, costs.kernels, train.value_bytes * width * tokens)
    kernels = EXPERT_LAUNCHES[train.transformer_engine] + adapter_launches(train, described)
    launches = np.where(is_captured(train, layout, "moe", "moe_router"), 0.0, kernels)
    forward = Seconds.from_compute(products.forward + activation, tensor=tp.forward, launches=launches)
    backward = Seconds.from_compute(products.input_gradient + back, tensor=tp.backward(up), launches=2.0 * launches)
    is_recomputed = train.options.recompute_modules & {"shared_experts", "moe"}
    repeated = forward if is_recomputed else Seconds.from_compute(np.zeros_like(tokens))
    return Block(forward, backward, products.weight_gradient, repeated)


def _overlap_dispatch(block: Block, hidden: FloatArray) -> Block:
    """Return a block whose token dispatch overlaps the kernels of another micro-batch, as long as its own. `hidden` is
    the share of an overlapping second that is gained; the rest is the slowdown of the kernels."""

    def expose(seconds: Seconds, kernels: FloatArray) -> Seconds:
        return replace(seconds, expert=seconds.expert - hidden * np.minimum(seconds.expert, kernels))

    forward = expose(block.forward, block.forward.compute)
    return replace(block, forward=forward, backward=expose(block.backward, block.backward.compute + block.weight))
