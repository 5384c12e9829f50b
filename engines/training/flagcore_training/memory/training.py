"""Memory of one rank in training: the model states and activations of the stage that needs the most.

Sources of what the engine allocates beside states (`states`) and activations: megatron-core 0.16 to 0.20
(`parallel_state.py`, `schedules.py`, `token_dispatcher.py`), transformer-engine 2.9 to 2.20 (`get_dummy_wgrad`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from flagcore_models.layers import attention_of, depth_of, experts_of
from flagcore_models.mixers.attention import Attention
from flagcore_models.mixers.latent_attention import LatentAttention

from flagcore.contracts import Costs, MemoryModel, communicator_bytes
from flagcore.domain.model import Part
from flagcore.domain.space import FloatArray, IntArray
from flagcore_training.kinds import layer_kinds
from flagcore_training.layout import ArrayRecord, Layout, Training, pick
from flagcore_training.memory.activations import gathered_tokens
from flagcore_training.memory.modules import Sizes
from flagcore_training.memory.states import (
    LINEAR_PARTS,
    State,
    frozen_state,
    gathered_bytes,
    largest_matrix,
    padding,
    split_parameters,
    state,
    states_of,
    step_bytes,
    trained_parts,
    wide_parts,
)
from flagcore_training.memory.stored_activations import Kinds, activation_parts, stage_activations
from flagcore_training.stages import Stage, StageGroups, depths_received, stage, stages
from flagcore_training.vision import tower_weights
from flagcore_training.weights import ADAPTER_PARTS, EXPERT_PARTS, Parts, stage_parameters, table_sizes


def workspaces(train: Training) -> float:
    """Return the number of matrix-library workspaces of a rank.

    torch has one for the forward thread and one for the backward thread. Transformer-engine adds one, and four for
    grouped products.
    """
    if not train.transformer_engine:
        return 2.0
    return 3.0 + 4.0 * (experts_of(train.model) is not None and train.options.grouped_gemm)


def buffers(train: Training, layout: Layout, stage: Stage, sizes: Sizes) -> FloatArray:
    """Return the bytes of permanent buffers.

    These are fp32 angles of the rotary embedding, for each virtual stage or each layer of latent attention; the buffer
    into which megatron-core's own linear layers gather their input under sequence parallelism; and transformer-engine's
    placeholders for gradients that its kernels accumulate.
    """
    attention = attention_of(train.model)
    if isinstance(attention, LatentAttention):
        rotary_bytes = 4.0 * train.sequence * attention.rope_dim * (stage.layers + stage.mtp)
    else:
        rotary_bytes = 4.0 * train.sequence * attention.head_dim * layout.virtual
    if train.options.adapter and train.options.adapter.base:  # into which the weights of a product are converted
        largest = largest_matrix(train, layout, stage_parameters(train, layout, stage), experts=False)
        rotary_bytes = rotary_bytes + train.value_bytes * largest
    if train.options.dropout:  # dropout implies an older engine, with learned positions and without placeholders
        return sizes.gathered * np.ones(())
    if train.transformer_engine:
        gather_buffer = _gather_buffer(train, layout, stage, sizes, sizes.gathered * stage.last)
        return (
            rotary_bytes
            + gather_buffer
            + (0.0 if train.options.adapter else _gradient_placeholders(train, layout, stage))
        )
    return rotary_bytes + _gather_buffer(train, layout, stage, sizes, sizes.gathered) + sizes.gathered * (stage.mtp > 0)


def _gather_buffer(train: Training, layout: Layout, stage: Stage, sizes: Sizes, gathered: FloatArray) -> FloatArray:
    """Return the bytes of the buffer for gathered tokens, which linear layers share with the allgather dispatcher."""
    if experts_of(train.model) is None or train.options.dispatcher != "allgather":
        return gathered
    return np.maximum(gathered, gathered_tokens(layout, sizes) * (stage.later + stage.mtp > 0))


def bytes_held_after_step(
    train: Training, layout: Layout, stage: Stage, sizes: Sizes, *, at_most: bool = False
) -> FloatArray:
    """Return the bytes of activations that stay allocated after a step. The next step frees them before its own peak.

    These are the last input of each virtual stage with its gradient and, for each layer with experts, its routing. If
    the layer or its experts are recomputed, their input with its gradient is added. `at_most` assumes that all layers
    are recomputed if any layer is.
    """
    model, inputs = train.model, layout.virtual - (stage.index == 0) + depths_received(train.model, stage)
    routing, experts = np.zeros(()), experts_of(model)
    if experts is not None:
        block = np.clip(layout.block * layout.virtual - stage.leading, 0.0, stage.later)
        recomputes_all = (layout.uniform > 0) | ((layout.block > 0) & at_most)
        layers = np.where(recomputes_all, stage.later, block)
        # The first layer's input is already counted as the stage's input.
        inputs = inputs + layers - 0.5 * ((layers > 0) & (stage.index > 0) & (stage.leading == 0))
        if "moe" in train.options.recompute_modules:
            inputs = inputs + (stage.later + stage.mtp) * layout.selective
        uniform = np.where(layout.uniform > 0, 2.0, (layout.block > 0) * 1.0) if at_most else 2.0 * (layout.uniform > 0)
        inputs = inputs + stage.mtp * uniform  # each MTP depth also holds its own input
        moe = layer_kinds(model).with_experts(stage.numbers) + stage.mtp
        routing = (3.0 * experts.count + 8.0 * experts.chosen) * sizes.rows * moe
    held_bytes: FloatArray = 2.0 * sizes.between * inputs + routing
    return held_bytes


def _gradient_placeholders(train: Training, layout: Layout, stage: Stage) -> FloatArray:
    """Return the bytes of the placeholders for gradients: one 16-bit tensor for each distinct weight shape."""
    model, tensor, h = train.model, layout.tensor, train.model.hidden_size
    experts, shapes = experts_of(model), dict[Part, FloatArray]()
    for part, number in layer_kinds(model).parts(stage.numbers).items():
        shape = replace(part, window=None) if isinstance(part, Attention) else part
        if part.kind != "experts":
            shapes[shape] = shapes.get(shape, 0.0) + number
    weights = np.zeros_like(tensor)
    for part, number in shapes.items():
        products = sum(each.weights / (tensor if each.split else 1.0) for each in part.products(h))
        weights = weights + (products + part.other_weights / tensor) * (number > 0)
    if experts is not None:
        expert = sum(each.inputs * each.outputs for each in experts.routed(h)) / layout.expert_tensor
        shared = sum(each.weights for each in experts.always(h)) / tensor
        is_same = (experts.shared / tensor == experts.width / layout.expert_tensor) & (experts.expert_width(h) == h)
        weights = weights + (expert + shared * ~is_same) * (stage.later > 0)
    weights = weights + stage.last * table_sizes(train, tensor)[1]
    joined = sum(each.weights for each in depth_of(model).products(h))
    return 2.0 * (weights + joined / tensor * (stage.mtp > 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory(ArrayRecord):
    """Bytes of one stage of each candidate.

    `static` stays allocated between steps. `activation` is added to it at the peak of forward and backward. `peak` is
    the maximum during the step.
    """

    static: FloatArray
    activation: FloatArray
    peak: FloatArray
    worst_stage: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class InUse(ArrayRecord):
    """Bytes in use on one stage of each candidate.

    `memory` is the bytes of tensors, `reserved` the bytes that the allocator reserves, `used` the bytes in use on the
    device, and `capacity` the device's memory (NaN: unknown).
    """

    memory: Memory
    reserved: FloatArray
    used: FloatArray
    capacity: FloatArray


def memory_in_use(
    train: Training, layout: Layout, costs: Costs, distinct_stages: Sequence[Stage] | None = None
) -> InUse:
    """Return the memory in use of the worst stage of each candidate. `distinct_stages` are `stages`, if known.

    The worst stage has the largest peak or, with several chip models, uses the largest share of its device's capacity.
    A stage with unknown capacity counts as full, so that no candidate is reported to fit by mistake. The peak is the
    maximum over forward and backward and the optimizer step.
    """
    placement = StageGroups.from_layout(layout, costs)
    if distinct_stages is None:
        distinct_stages = stages(train.model, layout, train.options, placement.starts)
    memories = stages_in_use(train, layout, costs, distinct_stages)
    if len(costs.groups) == 1:
        figures = np.stack([each.memory.peak for each in memories])
    else:
        share = np.stack([each.used for each in memories]) / np.stack([each.capacity for each in memories])
        figures = np.where(np.isnan(share), 1.0, share)
    return pick(np.argmax(figures, axis=0), memories)


def stages_in_use(
    train: Training, layout: Layout, costs: Costs, requested_stages: Sequence[Stage], *, alone: bool = False
) -> list[InUse]:
    """Return the memory in use of each stage in `requested_stages`, for all candidates. `alone`: as in `in_use`."""
    placement, models = StageGroups.from_layout(layout, costs), [each.memory for each in costs.groups]
    workspaces = [np.array(model.workspace_bytes()) for model in models]
    estimates = [_Estimate.from_layout(train, each) for each in placement.layouts]
    memories = []
    for stage_ in requested_stages:
        of_groups = zip(models, estimates, workspaces, strict=True)
        found = [
            in_use(model, each.memory(stage_, size), layout, train, alone=alone) for model, each, size in of_groups
        ]
        memories.append(placement.pick(stage_.index, found))
    return memories


ROUTED = {False: 62570.0 / 60154.0 - 1.0, True: 68392.0 / 60378.0 - 1.0}
"""Reserved memory divided by allocated memory, minus one, of experts without and with overlap of their exchange.

The numbers of tokens of experts change, so the allocator keeps blocks of other sizes; with overlap, also those of two
streams. MiB of DeepSeek-V3 with 14 layers on 64 H100 (Megatron-LM PR 6429)."""


def in_use(
    model: MemoryModel,
    memory: Memory,
    layout: Layout,
    train: Training,
    cached: FloatArray | float = 0.0,
    *,
    alone: bool = False,
) -> InUse:
    """Return the memory in use on devices with the tensors in `memory`.

    `cached`: bytes of blocks that the allocator keeps besides. It frees them before memory runs out. They, and what a
    memory model only estimates, are no reason not to fit, but leave no memory. `alone`: whether the other ranks do not
    exist, so that nothing is exchanged.
    """
    reserved, buffers, capacity = model.reserved_bytes(memory.peak), communicator_bytes(model), model.capacity_bytes()
    number = layout.communicators()
    used = model.device_used_bytes(reserved) + buffers * number
    estimated, full = np.zeros_like(number), np.array(np.nan if capacity is None else capacity)
    if experts_of(train.model) is not None and not alone:  # only such jobs were measured
        each, across = getattr(model, "further", (0.0, 0.0))
        estimated = each * np.maximum(number - 1.0, 0.0) + across * layout.communicators(train.options.linked_devices)
        cached = cached + np.maximum((1.0 + ROUTED[train.options.overlap_expert_comm]) * memory.peak - reserved, 0.0)
    free = np.maximum(full - used, 0.0)
    reserved = reserved + np.fmin(cached, free)
    used = used + np.fmin(cached + estimated, free)
    return InUse(memory=memory, reserved=reserved, used=used, capacity=full)


def component_table(
    train: Training, layout: Layout, index: FloatArray, workspace_bytes: FloatArray | float = 0.0
) -> dict[str, dict[str, FloatArray]]:
    """Return the parameters and bytes of each component of stage `index` of each candidate.

    Activations add up to `Memory.activation`, all other bytes to `Memory.static`. Three additional components are
    `padding` (of gradient buffers), `buffers` (of the engine), and `backward` (the bytes of the peak above the stored
    tensors).
    """
    table_stage = stage(train.model, layout, index, train.options)
    estimate = _Estimate.from_layout(train, layout)
    params, parts = stage_parameters(train, layout, table_stage), estimate.parts(table_stage)
    zeros = np.zeros_like(layout.data)
    table: dict[str, dict[str, FloatArray]] = {}

    def add(name: str, count: FloatArray, bytes_: State, activation: FloatArray) -> None:
        figures = {
            "params": count,
            "weights_bytes": bytes_.weights,
            "gradients_bytes": bytes_.gradients,
            "main_params_bytes": bytes_.main_parameters,
            "optimizer_bytes": bytes_.optimizer,
            "activation_bytes": activation,
        }
        table[name] = {key: value + zeros for key, value in figures.items()}

    for name in dict.fromkeys((*params, *parts)):
        count = params.get(name, zeros)
        linear, wide = (count if name in names else 0.0 for names in (LINEAR_PARTS, wide_parts(train)))
        bytes_ = state(train, layout, count, experts=name in EXPERT_PARTS, linear=linear, wide=wide)
        if train.options.adapter and name not in ADAPTER_PARTS:
            bytes_ = frozen_state(train, bytes_, count, linear, experts=name in EXPERT_PARTS)
        add(name, count, bytes_, parts.get(name, zeros))
    params = trained_parts(train, params)
    extras = [padding(train, layout, params, experts=experts) for experts in (False, True)]
    dense, routed = (
        state(train, layout, extra, experts=bool(experts), linear=float(train.options.whole_matrices) * extra)
        for experts, extra in enumerate(extras)
    )
    engine = estimate.engine_bytes(table_stage, workspace_bytes)
    engine = engine + estimate.held_after_step(table_stage)
    add("padding", zeros, dense + routed, zeros)
    add("buffers", zeros, State(engine, zeros, zeros, zeros), zeros)
    return table


class _Estimate(NamedTuple):
    """The inputs that the memory estimates of all stages share.

    `selective` is an upper bound for the candidates `uniform`, which recompute every layer in full: the estimate with
    selective recompute instead, because full recompute must not be predicted to need more memory. It is None if there
    are no such candidates.
    """

    kinds: Kinds
    uniform: IntArray
    selective: _Estimate | None = None

    @classmethod
    def from_layout(cls, train: Training, layout: Layout) -> _Estimate:
        uniform = np.flatnonzero(layout.uniform == 1)
        estimate = cls(Kinds.from_layout(train, layout), uniform)
        modules = train.options.recompute_modules
        return estimate._replace(selective=estimate._with_selective(modules, uniform)) if uniform.size else estimate

    def _with_selective(self, modules: frozenset[str], rows: IntArray) -> _Estimate:
        """Return the estimate for the candidates `rows` if they only recompute `modules`, selectively."""
        train, layout, zeros = self.kinds.train, self.kinds.layout[rows], np.zeros(rows.shape)
        selective = np.maximum(layout.selective, layout.uniform == 1)
        train = replace(train, options=replace(train.options, recompute_modules=modules))
        layout = replace(layout, selective=selective, uniform=zeros, block=zeros)
        return _Estimate(Kinds.from_layout(train, layout), np.flatnonzero(zeros))

    def engine_bytes(self, stage_: Stage, workspace_bytes: FloatArray | float) -> FloatArray:
        train, layout = self.kinds.train, self.kinds.layout
        engine_buffers = buffers(train, layout, stage_, self.kinds.sizes)
        if train.tower is not None:  # its frozen weights, in 16 bits
            engine_buffers = engine_buffers + train.value_bytes * tower_weights(train.tower, layout)[1] * stage_.first
        return engine_buffers + workspaces(train) * workspace_bytes

    def held_after_step(self, stage_: Stage, *, at_most: bool = False) -> FloatArray:
        kinds = self.kinds
        return bytes_held_after_step(kinds.train, kinds.layout, stage_, kinds.sizes, at_most=at_most)

    def activation(self, stage_: Stage) -> FloatArray:
        activations = stage_activations(stage_, self.kinds)
        total = activations.stored + activations.above
        if self.selective is not None:
            less = self.selective.activation(stage_[self.uniform])
            total[self.uniform] = np.minimum(total[self.uniform], less)
        return total

    def parts(self, stage_: Stage) -> Parts:
        """Return the bytes of activations of a stage by component. `backward` is the peak above the stored bytes."""
        train, layout, activations = self.kinds.train, self.kinds.layout, stage_activations(stage_, self.kinds)
        states = states_of(train, layout, stage_parameters(train, layout, stage_))
        backward = self.activation(stage_) + gathered_bytes(train, layout, *states) - activations.stored
        return {**activation_parts(stage_, self.kinds, activations), "backward": backward}

    def memory(self, stage_: Stage, workspace_bytes: FloatArray | float) -> Memory:
        """Return the memory of one stage. `workspace_bytes` is the size of one workspace of the matrix library.

        The bytes that stay allocated after a step are still there during the optimizer step, and are freed before the
        next peak. More recompute leaves more bytes, but is never predicted to need more.
        """
        train, layout = self.kinds.train, self.kinds.layout
        params = stage_parameters(train, layout, stage_)
        states = states_of(train, layout, params)
        base = states[0].total + states[1].total + self.engine_bytes(stage_, workspace_bytes)
        static = base + self.held_after_step(stage_)
        step, gathered = (
            step_bytes(train, layout, *split_parameters(trained_parts(train, params))),
            gathered_bytes(train, layout, *states),
        )
        activation = self.activation(stage_) + gathered
        optimizer_peak = self.held_after_step(stage_, at_most=True) + step
        if self._may_hold_more():
            rows = np.flatnonzero(np.atleast_2d(optimizer_peak > activation).any(axis=0))
            least = self._peak_without_full(stage_, rows, step, gathered)
            optimizer_peak[..., rows] = np.minimum(optimizer_peak[..., rows], least)
        peak = base + np.maximum(activation, optimizer_peak)
        return Memory(static=static, activation=activation, peak=peak, worst_stage=stage_.index.astype(np.int64))

    def _may_hold_more(self) -> bool:
        """Return whether recompute may leave more bytes allocated after a step than less recompute would. This is the
        case in mixture-of-experts models, for full recompute and for recompute of the module `moe`."""
        options, layout = self.kinds.train.options, self.kinds.layout
        if experts_of(self.kinds.train.model) is None:
            return False
        recomputes_layers = np.any(layout.uniform + layout.block > 0)
        return bool(recomputes_layers or ("moe" in options.recompute_modules and layout.selective.any()))

    def _peak_without_full(self, stage_: Stage, rows: IntArray, step: FloatArray, gathered: FloatArray) -> FloatArray:
        """Return the peak bytes of a step with less recompute, for the candidates `rows`. It is the lower of two
        estimates: selective recompute with and without the module `moe`."""
        modules, stage_of_rows, peaks = self.kinds.train.options.recompute_modules, stage_[rows], []
        gathered = gathered if gathered.ndim == 0 else gathered[..., rows]
        for recomputed_modules in {modules - {"moe"}, modules}:
            other = self._with_selective(recomputed_modules, rows)
            optimizer_peak = other.held_after_step(stage_of_rows) + step[..., rows]
            peaks.append(np.maximum(optimizer_peak, other.activation(stage_of_rows) + gathered))
        least: FloatArray = np.minimum.reduce(peaks)
        return least
