"""Matrix products of an engine: few tokens against weights that may be stored narrower than they are computed."""

from __future__ import annotations

import numpy as np

from flagcore.contracts import KernelCosts
from flagcore.domain.space import FloatArray
from flagcore.engines.serving.model.work import Serving
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
    products, of which the engine's overheads tell: no cast of a product's own is counted.
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
