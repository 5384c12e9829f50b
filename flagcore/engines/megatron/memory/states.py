"""Bytes that outlive a step: weights, gradients, main parameters and optimizer state, and buffers of the engine.

Source: megatron-core 0.16 (`param_and_grad_buffer.py`, `distrib_optimizer.py`, `optimizer.py`); ZeRO
(arXiv 1910.02054) with whole gradient buffers on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flagcore.domain.space import FloatArray
from flagcore.engines.megatron.parallel.layout import Layout, Training
from flagcore.engines.megatron.parallel.parameters import EXPERT_PARTS, Parts

LINEAR_PARTS = ("qkv_proj", "out_proj", "ffn", "experts", "shared_experts", "mtp")
"""Components whose products run in 8 or 4 bits where the precision says so."""

QUANTISED_BYTES = {"fp8": 2.0, "mxfp8": 2.0 * (1 + 1 / 32), "nvfp4": 2.0 * (1 / 2 + 1 / 16)}
"""Bytes a weight of its narrow copies, one for each direction of a product, with the scales of their blocks of 32 or
16 (transformer-engine 2.9, `get_weight_workspace`; a chip whose fp8 products take both directions keeps one)."""

BUCKET_MULTIPLE = 128
"""Megatron pads gradient buffers to a common multiple of this and of the ranks that share them."""


@dataclass(frozen=True, slots=True)
class State:
    """Bytes of some parameters on one rank."""

    weights: FloatArray
    gradients: FloatArray
    main_parameters: FloatArray
    optimizer: FloatArray

    def __add__(self, other: State) -> State:
        return State(
            self.weights + other.weights,
            self.gradients + other.gradients,
            self.main_parameters + other.main_parameters,
            self.optimizer + other.optimizer,
        )

    @classmethod
    def zero(cls, none: FloatArray) -> State:
        """Return nothing."""
        return cls(none, none, none, none)

    @property
    def total(self) -> FloatArray:
        """All of it."""
        return self.weights + self.gradients + self.main_parameters + self.optimizer


def split_parameters(parts: Parts) -> tuple[FloatArray, FloatArray]:
    """Return the sums of the weights that all data-parallel ranks replicate, and of those of the experts."""
    dense = sum((value for name, value in parts.items() if name not in EXPERT_PARTS), np.zeros(()))
    experts = sum((parts[name] for name in EXPERT_PARTS if name in parts), np.zeros_like(dense))
    return dense, experts


def state(train: Training, layout: Layout, count: FloatArray, *, experts: bool, linear: FloatArray | float) -> State:
    """Return the bytes of `count` parameters, `linear` of which belong to linear layers.

    At 16 bits 2 + 4 + 12 / d with fp32 gradient buffers, over d ranks that share an optimizer; fp32 has no second copy
    of the weights: 4 + 4 + 8 / d. A precision-aware optimizer keeps of a bf16 weight's main parameter only the
    half that the weight does not have. Fully sharded, weights and gradients are shared as well.
    """
    options = train.options
    shards = layout.expert_shards() if experts else layout.shards()
    replicas = layout.expert_replicas() if experts else layout.data * layout.context
    owners = replicas if options.fsdp else shards
    everywhere = replicas if options.fsdp else np.ones(())
    adam = options.exp_avg_bytes + options.exp_avg_sq_bytes
    trained = 0.0 if options.adapters else 1.0
    here = (1.0 - options.optimizer_offload_fraction) * trained
    if train.precision == "fp32":
        gradients = 4.0 * trained * count / everywhere
        return State(4.0 * count / everywhere, gradients, 0.0 * count, adam * here * count / owners)
    main: float = options.main_param_bytes
    if options.precision_aware_optimizer and train.precision != "fp16":
        main = min(main, 2.0)
    narrow = QUANTISED_BYTES.get(train.precision, 0.0)
    wide = np.where(narrow > 0, count - linear, count) if options.fp8_param_gather else count
    weights = 2.0 * wide + narrow * linear
    gradients = options.grad_bytes * trained * count
    return State(
        weights / everywhere, gradients / everywhere, main * here * count / owners, adam * here * count / owners
    )


def padding(layout: Layout, count: FloatArray, *, experts: bool) -> FloatArray:
    """Return the elements that fill a distributed optimizer's buffer up to a multiple of 128 and of its ranks."""
    ranks = (layout.expert_shards() if experts else layout.shards()).astype(np.int64)
    multiple = np.lcm(ranks, BUCKET_MULTIPLE)
    filled = np.ceil(count / multiple) * multiple - count
    return np.where(ranks > 1, filled, 0.0)
