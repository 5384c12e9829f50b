"""Memory of one rank in training: weights, gradients, optimizer state and activations of the worst stage."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flagcore.domain.cluster import NodeGroup
from flagcore.domain.space import FloatArray, IntArray
from flagcore.physics import transformer
from flagcore.physics.layout import Layout, Training
from flagcore.physics.pipeline import Stage, stages
from flagcore.physics.transformer import Parts

STEP_BYTES = 4.0
"""Bytes a parameter that an optimizer step adds: scaled copies of the gradients that a rank owns, in fp32.
Measured: equal to the peak of torch's allocator in the step, less its static memory, on 25 ranks of
megatron-core 0.16.1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of the worst stage. `activation` is what a step adds to `static` at the worst moment of forward
    and backward; `peak` is the worst moment of the whole step.
    """

    static: FloatArray
    activation: FloatArray
    peak: FloatArray
    worst_stage: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainMemory:
    """A device with a caching allocator. Implements `MemoryModel`; for plugins, and for chips without one.

    `capacity` is the budget of one device in bytes (None: nobody knows), `context_bytes` what the device shows
    in use before the first tensor, `fragmentation` the share that the allocator holds beyond what tensors take.
    Defaults: rounded medians of 25 ranks of megatron-core on one accelerator with torch's caching allocator,
    plus 0.4 GB for the buffers of collectives.
    """

    capacity: float | None
    context_bytes: float = 1.2e9
    fragmentation: float = 0.01

    @classmethod
    def of(cls, group: NodeGroup, *, context_bytes: float = 1.2e9, fragmentation: float = 0.01) -> PlainMemory:
        """Take the budget from the group, or else from what the chip is known to have."""
        known = group.chip.memory_bytes
        capacity = group.memory_bytes or (known.value if known else None)
        return cls(capacity=capacity, context_bytes=context_bytes, fragmentation=fragmentation)

    def capacity_bytes(self) -> float | None:
        """Return what one device holds."""
        return self.capacity

    def reserved_bytes(self, allocated: FloatArray) -> FloatArray:
        """Return what the allocator holds."""
        return allocated * (1.0 + self.fragmentation)

    def device_used_bytes(self, reserved: FloatArray) -> FloatArray:
        """Return what the device shows in use."""
        return reserved + self.context_bytes


def training_memory(train: Training, layout: Layout) -> Memory:
    """Return the memory of the worst stage of each candidate.

    The peak is the larger of two phases: forward and backward (all states plus activations) and the
    optimizer step (all states plus `STEP_BYTES` for the larger of the two groups of weights).
    """
    found = [_stage_memory(train, layout, stage) for stage in stages(train.model, layout)]
    peaks = np.stack([memory.peak for memory in found])
    worst = np.argmax(peaks, axis=0)

    def pick(name: str) -> FloatArray:
        values: FloatArray = np.choose(worst, [getattr(memory, name) for memory in found])
        return values

    index = np.choose(worst, [memory.worst_stage for memory in found])
    return Memory(static=pick("static"), activation=pick("activation"), peak=pick("peak"), worst_stage=index)


def stage_parameters(train: Training, layout: Layout, stage: Stage) -> Parts:
    """Return the weights of one stage that a rank holds, by component."""
    model = train.model
    parts = transformer.edge_parameters(train, layout, first=stage.first, last=stage.last)
    _add(parts, transformer.layer_parameters(train, layout, moe=False), stage.dense)
    if model.num_moe_experts is not None:
        _add(parts, transformer.layer_parameters(train, layout, moe=True), stage.moe)
    if model.mtp_num_layers:
        _add(parts, transformer.mtp_parameters(train, layout), stage.last)
    return parts


def split_parameters(parts: Parts) -> tuple[FloatArray, FloatArray]:
    """Return the sums of the weights that all data-parallel ranks replicate, and of those of the experts."""
    dense = sum((value for name, value in parts.items() if name not in transformer.EXPERT_PARTS), np.zeros(()))
    experts = sum((parts[name] for name in transformer.EXPERT_PARTS if name in parts), np.zeros_like(dense))
    return dense, experts


def state_bytes(train: Training, shards: FloatArray) -> FloatArray:
    """Return the bytes a parameter of weights, gradients and Adam's state, which `shards` ranks share.

    16 bit: 2 + 4 + 12 / d; fp32 has no second copy of the weights: 4 + 4 + 8 / d. Source: megatron-core 0.16
    (`param_and_grad_buffer.py`, `distrib_optimizer.py`); ZeRO stage 1 with fp32 gradients (arXiv 1910.02054).
    """
    if train.precision == "fp32":
        return 8.0 + 8.0 / shards
    return 6.0 + 12.0 / shards


def stage_activations(train: Training, layout: Layout, stage: Stage) -> Parts:
    """Return the bytes that a stage holds for the backward pass at its worst moment, by component.

    Full recompute keeps the input of each recomputed layer or chunk of layers (counted under `norms`, the
    first to use it) and, while one chunk is recomputed, all of that chunk (arXiv 2205.05198, section 5).
    """
    model = train.model
    dense = transformer.layer_saved_bytes(train, layout, moe=False)
    layers: Parts = {}
    _add(layers, dense, stage.dense)
    if model.num_moe_experts is not None:
        _add(layers, transformer.layer_saved_bytes(train, layout, moe=True), stage.moe)
    parts = {name: value * kept_share(layout, stage) for name, value in layers.items()}
    rows = transformer.layer_input_bytes(train, layout)
    parts["norms"] = parts["norms"] + _checkpoints(layout, stage) * rows
    parts["norms"] = parts["norms"] + stage.last * rows
    parts["output_head"] = stage.last * (rows + transformer.logits_bytes(train, layout))
    if model.mtp_num_layers:
        one = transformer.layer_saved_bytes(train, layout, moe=model.num_moe_experts is not None)
        depth = sum(one.values(), transformer.logits_bytes(train, layout)) + 5.0 * rows
        parts["mtp"] = stage.last * model.mtp_num_layers * depth
    return parts


def kept_share(layout: Layout, stage: Stage) -> FloatArray:
    """Return how many whole stages' worth of activations are held: in flight, less what recompute drops.

    While a chunk is recomputed the layers behind it are done, so the chunk adds only what they had not taken.
    """
    kept, one_chunk = _shares(layout, stage)
    return stage.in_flight * kept + np.maximum(one_chunk - kept, 0.0)


def backward_bytes(train: Training, layout: Layout, stage: Stage) -> FloatArray:
    """Return what backward needs beyond the saved tensors at the worst moment.

    In a layer: the gradient of the widest weight before it is added to the buffer, the gradient of that width, and
    the layer's input gathered over tensor-parallel ranks. In the loss: 16-bit logits besides the fp32 softmax, and
    then their gradient and that of the head's weight in place of the softmax. Read from megatron-core 0.16's
    `layers.py` and `cross_entropy.py`; the peaks of 25 measured ranks come out 0.7% off on average, 3.1% at worst.
    """
    model, unit = train.model, float(train.value_bytes)
    tokens, hidden = layout.tokens(train.sequence), float(model.hidden_size)
    up = 2.0 if model.gated_linear_unit else 1.0
    wide = model.ffn_hidden_size / layout.tensor * (stage.dense > 0)
    layer = unit * (wide * (up * hidden + tokens) + hidden * tokens)
    if model.num_moe_experts is not None:
        expert = (model.moe_ffn_hidden_size or 0) / layout.expert_tensor * (stage.moe > 0)
        copies = layout.expert_tokens(model, train.sequence)
        layer = np.maximum(layer, unit * (expert * (up * hidden + copies) + hidden * copies))
    vocab = transformer.padded_vocab(model, layout.tensor) / layout.tensor
    softmax = transformer.logits_bytes(train, layout)
    half = unit * vocab * tokens if train.precision != "fp32" else np.zeros_like(tokens)
    loss = np.maximum(half, unit * vocab * (tokens + hidden) - softmax)
    return np.where(stage.last > 0, np.maximum(loss, layer - softmax), layer)


def _stage_memory(train: Training, layout: Layout, stage: Stage) -> Memory:
    dense, experts = split_parameters(stage_parameters(train, layout, stage))
    shards, expert_shards = layout.shards(), layout.expert_shards()
    static = dense * state_bytes(train, shards) + experts * state_bytes(train, expert_shards)
    saved = sum(stage_activations(train, layout, stage).values(), np.zeros(()))
    activation = saved + backward_bytes(train, layout, stage)
    step = STEP_BYTES * np.maximum(dense / shards, experts / expert_shards)
    peak = static + np.maximum(activation, step)
    return Memory(static=static, activation=activation, peak=peak, worst_stage=stage.index.astype(np.int64))


def _shares(layout: Layout, stage: Stage) -> tuple[FloatArray, FloatArray]:
    """Return the share of a stage's layers that keep all their tensors, and the share that is recomputed at a time."""
    chunk = np.maximum(stage.chunk, 1.0)
    kept = np.where(layout.uniform > 0, 0.0, 1.0 - np.minimum(layout.block / chunk, 1.0))
    again = np.where(layout.uniform > 0, layout.uniform, np.minimum(layout.block, 1.0))
    return kept, np.minimum(again, chunk) / (chunk * layout.virtual)


def _checkpoints(layout: Layout, stage: Stage) -> FloatArray:
    """Return the layer inputs that recompute keeps, besides that of a chunk whose tensors are all there."""
    kept, one_chunk = _shares(layout, stage)
    uniform = np.ceil(stage.chunk / np.maximum(layout.uniform, 1.0))
    inputs = np.where(layout.uniform > 0, uniform, np.minimum(layout.block, stage.chunk)) * layout.virtual
    return np.maximum(stage.in_flight * inputs - (one_chunk > kept), 0.0)


def _add(into: Parts, parts: Parts, times: FloatArray) -> None:
    for name, value in parts.items():
        into[name] = into[name] + value * times if name in into else value * times
