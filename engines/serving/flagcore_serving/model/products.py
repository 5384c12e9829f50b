"""Times of matrix products of an engine."""

import numpy as np

from flagcore.contracts import KernelCosts
from flagcore.domain.model import Product
from flagcore.domain.space import FloatArray
from flagcore.physics.roofline import cast_bytes
from flagcore_serving.model.work import Serving
from flagcore_serving.space.settings import Settings
from flagcore_serving.space.weights import ATTENTION, EXPERTS


def linear(
    serving: Serving,
    kernels: KernelCosts,
    tokens: FloatArray,
    inner: FloatArray | float,
    outer: FloatArray | float,
    group: str,
) -> FloatArray:
    """Return the time of the matrix product Y[tokens, outer] = X[tokens, inner] W[inner, outer], in seconds.

    `group`: that of the weights (see `Product`), which decides the precision: without one, it is 16 bits. Weights in a
    storage format are read in this format and multiplied in a wider one. The engine's overheads already include the
    casts of operands, so the time of casts is subtracted from the product, but for the latency of separate kernels.
    """
    ones = np.ones_like(tokens)
    precision, stored = serving.format_of(group)
    if stored is None:
        seconds = kernels.gemm_seconds(tokens, outer * ones, inner * ones, precision)
        cast = cast_bytes(tokens, inner * ones, precision)
        latency = kernels.memory_seconds(ones) if precision in serving.overheads.casts else 0.0
        return seconds if cast is None else seconds - kernels.memory_seconds(cast) + latency
    if not group or (group == ATTENTION and ATTENTION in serving.wide):
        return kernels.gemm_seconds(tokens, outer * ones, inner * ones, serving.precision)
    all_rows, single_row = (
        kernels.gemm_seconds(row_count, outer * ones, inner * ones, precision) for row_count in (tokens, ones)
    )
    read = kernels.gemm_seconds(ones, outer * ones * (0.5 * stored), inner * ones, precision)
    rate = 1.0 if group == EXPERTS else serving.overheads.converted
    return np.maximum(all_rows - single_row, 0.0) / rate + read


def product_seconds(
    product: Product, serving: Serving, settings: Settings, kernels: KernelCosts, tokens: FloatArray
) -> FloatArray:
    """Return the time of a copy of a product on a tensor rank, in seconds."""
    inner, outer = product.inner(settings.tensor), product.outer(settings.tensor)
    return linear(serving, kernels, tokens, inner, outer, product.group)


def ffn_seconds(
    products: tuple[Product, ...], serving: Serving, settings: Settings, kernels: KernelCosts, tokens: FloatArray
) -> FloatArray:
    """Return the time of a feed-forward network of all tokens, in seconds: its products, and the activation between
    the first and the last one."""
    moved = products[0].outer(settings.tensor) + products[-1].inner(settings.tensor)
    activation = kernels.memory_seconds(tokens * moved * 2.0)
    return sum((product_seconds(each, serving, settings, kernels, tokens) for each in products), activation)
