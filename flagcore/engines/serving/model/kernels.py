"""Matrix products of an engine, with few tokens and weights that may be stored narrower, and routed experts."""

from __future__ import annotations

import numpy as np

from flagcore.contracts import Costs, KernelCosts
from flagcore.domain.space import FloatArray
from flagcore.engines.serving.model.work import Serving, Split
from flagcore.physics.kernels.roofline import cast_bytes


def linear(
    kernels: KernelCosts,
    tokens: FloatArray,
    inner: FloatArray | float,
    outer: FloatArray | float,
    serving: Serving,
    *,
    attention: bool = False,
    wide: bool = False,
) -> FloatArray:
    """Return the seconds of Y[tokens, outer] = X[tokens, inner] W[inner, outer].

    `attention` products may be in a wider precision than the others, `wide` ones are in 16 bits. Weights that only are
    stored narrower are read as such and computed in the wider format. Operands are cast by the small kernels before
    products, which the engine's overheads count: no cast of a product's own is counted.
    """
    one = np.ones_like(tokens)
    precision = serving.wide_precision if wide else serving.attention_precision if attention else serving.precision
    if serving.weight_bytes is None:
        seconds = kernels.gemm_seconds(tokens, outer * one, inner * one, precision)
        cast = cast_bytes(tokens, inner * one, precision)
        return seconds if cast is None else seconds - kernels.memory_seconds(cast)
    if wide:
        return kernels.gemm_seconds(tokens, outer * one, inner * one, serving.precision)
    whole, single = (kernels.gemm_seconds(rows, outer * one, inner * one, precision) for rows in (tokens, one))
    read = kernels.gemm_seconds(one, outer * one * (0.5 * serving.weight_bytes), inner * one, precision)
    return np.maximum(whole - single, 0.0) + read


TILE_ROWS = 8.0
"""Rows that a grouped product computes for an expert at the least."""


def touched(count: float, chosen: float, tokens: FloatArray) -> FloatArray:
    """Return how many distinct experts of `count` are chosen by `tokens` that choose `chosen` each, at random."""
    return count * (1.0 - (1.0 - chosen / count) ** tokens)


def experts(serving: Serving, split: Split, kernels: KernelCosts, tokens: FloatArray) -> FloatArray:
    """Return the time of the routed experts for `tokens` of all attention ranks together.

    The two products of all experts on a device are one kernel each: as long as their arithmetic, or as reading the
    weights of those that were chosen, whichever is larger. With groups of experts each is computed whole, else each
    device has a slice of all of them.
    """
    model, over, precision = serving.model, serving.overheads, serving.precision
    count, chosen, h = float(model.num_moe_experts or 1), float(model.moe_router_topk), float(model.hidden_size)
    gates = 2.0 if model.gated_linear_unit else 1.0
    width = (model.moe_ffn_hidden_size or 0) * split.expert / (split.tensor * split.data)
    here = touched(count, chosen, tokens * over.spread) / split.expert
    routed = tokens * chosen / split.expert
    rows, one = np.maximum(routed, here * TILE_ROWS), np.ones_like(tokens)
    time = np.zeros_like(tokens)
    for inner, outer in ((h, gates * width), (width, h)):
        work = linear(kernels, rows, inner, outer, serving) / over.grouped_work
        read = linear(kernels, one, inner, here * outer, serving) / over.grouped_share
        time = time + (work**3 + read**3) ** (1 / 3)
    moved = kernels.memory_seconds(routed * 2.0 * (2.0 * h + (gates + 1.0) * width))
    router = linear(kernels, tokens / split.data, h, count, serving, wide=True)
    small = over.experts.get(precision, max(over.experts.values(), default=0.0))
    return time + moved + router + small


def exchange(serving: Serving, split: Split, costs: Costs, tokens: FloatArray) -> FloatArray:
    """Return what brings tokens of several attention ranks to the experts and back: a gather, then a scatter."""
    ranks = (split.tensor * split.data).astype(np.int64)
    stride = np.ones(ranks.shape, dtype=np.int64)
    payload = tokens * (2.0 * serving.model.hidden_size)
    time = costs.collectives.seconds("all_gather", payload, ranks, stride)
    time = time + costs.collectives.seconds("reduce_scatter", payload, ranks, stride)
    return np.where(split.data > 1.0, time, 0.0)
