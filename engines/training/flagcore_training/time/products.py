"""Time of the products of a layer.

Linear layers with frozen weights have no gradients, but adapters have small products beside them.
"""

from collections.abc import Iterable

import numpy as np

from flagcore.contracts import Costs, KernelCosts
from flagcore.domain.model import Product
from flagcore.domain.space import FloatArray
from flagcore_training.adapters import base_bytes, beside_of
from flagcore_training.layout import LayerLayout, Training
from flagcore_training.time.passes import Linear, linear

LAUNCHES = 4.0
"""Kernels of an adapter's forward: two products, the scale, and the sum. Counted."""
PASSES, BACKWARD_PASSES, INPUT_PASSES = 5.0, 2.0, 3.0
"""Memory passes besides the products: over the output in forward (scale, sum with the layer's output) and in backward
(scale), and over the input in backward (sum with the layer's gradient). Counted."""
DORA_PASSES, DORA_WEIGHT_PASSES = 6.0, 6.0
"""Memory passes of DoRA in addition: over the output in forward and in backward, and over the weights in forward for
the scale, the sum and the norm of the whole matrix (arXiv 2402.09353). The norm has no gradient. Counted."""


def adapted(
    train: Training,
    kernels: KernelCosts,
    precision: str,
    tokens: FloatArray,
    product: Product,
    ranks: FloatArray | float,
) -> Linear:
    """Return the time of a product that `ranks` divide, and of the adapters beside it if some are trained.

    The gradients of an adapter are part of those of the input. Quantized weights are converted before each product.
    """
    inner = product.inputs / (ranks if product.split == "inputs" else 1.0)
    outer_ranks = ranks if product.split == "outputs" else 1.0
    outputs, adapter = product.outputs / outer_ranks, train.options.adapter
    base, unit = linear(kernels, tokens, inner, outputs, precision), float(train.value_bytes)
    if adapter is None:
        return base
    forward, backward = base.forward, base.input_gradient
    stored = base_bytes(adapter, unit, train.options.peft, experts=product.component == "experts")
    if stored != unit:
        converted = kernels.memory_seconds((stored + unit) * inner * outputs * np.ones_like(tokens))
        forward, backward = forward + converted, backward + converted
    if found := beside_of(train, product):
        width = sum(each for _rank, each in found) / outer_ranks
        low = linear(kernels, tokens, inner, float(sum(rank for rank, _width in found)), train.unquantised)
        high = linear(kernels, tokens, float(found[0][0]), width, train.unquantised)
        size, inputs = unit * tokens * width, unit * tokens * inner
        gradients = low.input_gradient + high.input_gradient + low.weight_gradient + high.weight_gradient
        more = 0.0
        if adapter.kind == "dora":
            more = DORA_PASSES
            delta = linear(kernels, width + 0.0 * tokens, float(adapter.rank), inner, train.unquantised).forward
            forward = forward + delta + kernels.memory_seconds(DORA_WEIGHT_PASSES * unit * inner * width + 0.0 * size)
        forward = forward + low.forward + high.forward + kernels.memory_seconds((PASSES + more) * size)
        backward = backward + gradients
        backward = backward + kernels.memory_seconds((BACKWARD_PASSES + more) * size + INPUT_PASSES * inputs)
    return Linear(forward, backward, 0.0 * base.weight_gradient)


def adapter_launches(train: Training, products: Iterable[Product]) -> float:
    """Return the kernels that adapters beside these products add to a forward pass."""
    return LAUNCHES * sum(len(beside_of(train, each)) for each in products)


_MODULES = {"qkv_proj": "attention", "out_proj": "attention", "mixers": "mixer_output"}
"""The modules of `Training.precision_of` by component, of the mixers only for their output projections."""


def product_time(
    train: Training,
    layout: LayerLayout,
    costs: Costs,
    product: Product,
    rows: FloatArray | None = None,
    ranks: FloatArray | None = None,
) -> Linear:
    """Return the time of one copy of a product, with the adapters beside it.

    `ranks`: those that divide it, by default the tensor-parallel ranks. `rows`: by default all tokens of their group if
    they divide it, otherwise those of one rank.
    """
    ranks = layout.tensor if ranks is None else ranks
    if rows is None:
        rows = layout.tokens(train.sequence) if product.split else layout.token_rows(train.sequence)
    if not product.adapts:
        precision = train.precision_of("latent") if product.name == "latent" else train.unquantised
        inner = product.inputs / (ranks if product.split == "inputs" else 1.0)
        return linear(costs.kernels, rows, inner, float(product.outputs), precision)
    module = "" if product.component == "mixers" and product.split != "inputs" else product.component
    return adapted(train, costs.kernels, train.precision_of(_MODULES.get(module, "")), rows, product, ranks)
