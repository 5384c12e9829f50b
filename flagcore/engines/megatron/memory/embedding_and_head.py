"""Embedding, output head with loss, and multi-token prediction: what they store, and their worst moments.

Counted op by op in megatron-core 0.16 (`gpt_model.py`, `tensor_parallel/cross_entropy.py`,
`multi_token_prediction.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flagcore.domain.space import FloatArray
from flagcore.engines.megatron.memory.modules import Module, Sizes
from flagcore.engines.megatron.parallel.layout import Layout, Training
from flagcore.engines.megatron.parallel.parameters import padded_vocab


def embedding(train: Training, layout: Layout, sizes: Sizes) -> Module:
    """Return the embedding: it stores token numbers alone, and the gradient of its weights is as wide as they."""
    table = sizes.unit * padded_vocab(train.model, layout.tensor) / layout.tensor * train.model.hidden_size
    return Module("embedding", {"tokens": 8.0 * sizes.tokens}, sizes.hidden + sizes.gathered + table)


def head(train: Training, layout: Layout, sizes: Sizes) -> list[Module]:
    """Return final norm and output head with its loss.

    The loss stores fp32 probabilities, and has 16-bit logits besides at its peak; in backward the 16-bit gradient
    replaces them while the gradients of input and weight are computed. A fused loss works in the
    logits themselves. The logits of the last depth of multi-token prediction are still there.
    """
    logits = _logits(train, layout, sizes)
    tensors = {"head_input": sizes.unit * train.model.hidden_size * sizes.rows, "logits": logits.stored}
    earlier = logits.plain * (train.model.mtp_num_layers > 0)
    return [
        Module("norms", {"final_norm": sizes.hidden + 4.0 * sizes.rows}, 2.0 * sizes.hidden),
        Module("output_head", tensors, np.maximum(logits.forward + earlier, logits.backward)),
    ]


def depths(
    train: Training, layout: Layout, sizes: Sizes, stored: FloatArray, above: FloatArray, layers: FloatArray
) -> list[Module]:
    """Return multi-token prediction: per depth one more layer, which stores `stored` and needs `above`, and a loss.

    Besides, a depth stores an embedding of all tokens, two norms' inputs and their outputs side by side, its output
    before and after a norm, and a copy of that beside the others' outputs. Uniform recompute stores inputs alone, and
    has an output besides, where the stage's other `layers` and depths spare as much.
    """
    number = train.model.mtp_num_layers
    if not number:
        return []
    full = layout.uniform > 0
    one = stored + 6.0 * sizes.hidden + 12.0 * sizes.rows + sizes.gathered - sizes.scattered
    spared = 3.0 * sizes.hidden
    logits = _logits(train, layout, sizes)
    gradients = number * sizes.hidden  # of all depths' outputs, side by side
    others = (number - 1.0) * (one - spared) + layers * (stored - sizes.hidden)
    output = np.clip(others, 0.0, sizes.hidden)
    work = gradients + np.where(full, one - spared + above + output, above)
    return [
        Module("mtp", {"mtp": number * np.where(full, spared, one)}, work),
        Module("mtp", {"mtp_logits": number * logits.stored}, np.maximum(logits.forward, logits.backward)),
    ]


@dataclass(frozen=True, slots=True)
class _Logits:
    """Bytes of one loss: computed logits, stored logits, and the worst moments of forward and backward above them."""

    plain: FloatArray
    stored: FloatArray
    forward: FloatArray
    backward: FloatArray


def _logits(train: Training, layout: Layout, sizes: Sizes) -> _Logits:
    vocab = padded_vocab(train.model, layout.tensor) / layout.tensor
    plain = sizes.unit * vocab * sizes.tokens
    products = sizes.whole + sizes.scattered + sizes.weight * vocab * train.model.hidden_size
    if train.options.cross_entropy_fusion and train.transformer_engine:
        return _Logits(plain, plain, np.zeros_like(plain), products)
    wide = 4.0 * vocab * sizes.tokens
    half = plain * (train.value_bytes == 2)
    return _Logits(plain, wide, half, np.maximum(half, products + plain - wide))
