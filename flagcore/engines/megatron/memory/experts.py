"""A mixture of experts: what router, dispatch and experts keep, and what they need besides at their worst moments.

Counted op by op in megatron-core 0.16 (`moe/moe_layer.py`, `router.py`, `token_dispatcher.py`, `experts.py`), with
tokens dealt out evenly, times `Options.expert_imbalance`.
"""

from __future__ import annotations

import numpy as np

from flagcore.domain.space import BoolArray, FloatArray
from flagcore.engines.megatron.memory.activations import dense_products, norm, products
from flagcore.engines.megatron.memory.modules import Module, Sizes
from flagcore.engines.megatron.parallel.layout import Layout, Training

MAP_BYTES, CHOICE_BYTES = 4.0, 22.0
"""Bytes that routing keeps of each token: for an expert a 16-bit probability and two flags, for a choice its place,
and its probability before and after the tokens are sorted."""


def mixture(train: Training, layout: Layout, sizes: Sizes) -> list[Module]:
    """Return norm, router, shared experts and routed experts of one layer."""
    model = train.model
    routing = (MAP_BYTES * (model.num_moe_experts or 0) + CHOICE_BYTES * model.moe_router_topk) * sizes.rows
    entry = sizes.unit * model.hidden_size * sizes.rows
    modules = [
        norm("mlp_norm", sizes),
        Module("router", {"mlp_input": entry, "routing": routing}, 3.0 * sizes.hidden),
    ]
    if shared := model.moe_shared_expert_intermediate_size:
        first, last, work = dense_products(train, sizes, shared / layout.tensor)
        tensors = {"shared_first": first, "shared_act": last}
        modules.append(Module("shared_experts", tensors, 2.0 * sizes.hidden + work))
    return [*modules, routed(train, layout, sizes)]


def routed(train: Training, layout: Layout, sizes: Sizes) -> Module:
    """Return the routed experts of one rank with the way of their tokens there and back."""
    model, options = train.model, train.options
    h, load = model.hidden_size, options.expert_imbalance
    own = np.maximum((model.num_moe_experts or 0) / layout.expert, 1.0)
    batched = options.grouped_gemm and train.transformer_engine
    number = np.ones_like(own) if batched else own
    copies = layout.expert_tokens(model, train.sequence) * load
    width = (model.moe_ffn_hidden_size or 0) / layout.expert_tensor
    first, last, moments = products(train, sizes, copies / number, width, weighted=True)
    sent = sizes.unit * h * model.moe_router_topk * sizes.rows * load
    every = sizes.unit * h * copies
    last_gradient = every * (number > 1.0)  # of the output: there until all experts are done, but one lets it go
    each = np.maximum(moments[1], moments[2] + every / number) + last_gradient
    several, apart = own > 1, layout.expert_tensor > 1
    if options.dispatcher == "allgather":
        everywhere = gathered_tokens(layout, sizes)
        enter = every + everywhere
        forward = every + np.maximum(every * several, np.maximum(everywhere, sizes.hidden))
    else:
        enter = np.maximum(2.0 * sent, np.maximum((sent + every) * apart, 2.0 * every * several))
        forward = _dispatch(layout, sent, every, several, apart)
    backward = sizes.hidden + np.maximum(enter, np.maximum(every + moments[0], each))
    beside = (layout.pipeline > 1) * 1.0 + (model.moe_shared_expert_intermediate_size is not None)
    forward = forward + sizes.hidden * beside  # a gradient that the pipeline still holds, the shared experts' output
    tensors = {"expert_fc1": sizes.linear * h * copies, "moe_first": first * number, "moe_act": last * number}
    return Module("experts", tensors, np.maximum(forward, backward))


def gathered_tokens(layout: Layout, sizes: Sizes) -> FloatArray:
    """Return the bytes of the tokens of all ranks that share a layer's experts, where they are gathered."""
    ranks = layout.expert * layout.expert_tensor
    return np.where(ranks > 1, ranks * sizes.hidden, 0.0)


def _dispatch(layout: Layout, sent: FloatArray, every: FloatArray, several: BoolArray, apart: BoolArray) -> FloatArray:
    """Return what lies on the way to the experts and back, besides the experts' input, when their output goes back.

    The tokens sorted by expert, what came in from other expert ranks, the experts' output, and the same in the
    order of the tokens or summed over ranks; a step that a layout does not have is no tensor of its own.
    """
    away = layout.expert > 1
    permuted = sent * (away | several | apart)
    received = sent * (away & (several | apart))
    back: FloatArray = np.where(several, every + sent * apart, sent * (away | apart))
    total: FloatArray = permuted + received + every + back
    return total
