"""Memory of one rank in training: model states and activations of the worst stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from flagcore.contracts import Costs, MemoryModel, communicator_bytes
from flagcore.domain.space import FloatArray, IntArray
from flagcore.engines.training.layout import ArrayRecord, Layout, Placement, Training, pick
from flagcore.engines.training.memory.states import (
    LINEAR_PARTS,
    State,
    buffers,
    bytes_held_after_step,
    gathered_bytes,
    padding,
    split_parameters,
    state,
    step_bytes,
    workspaces,
)
from flagcore.engines.training.memory.stored_activations import Kinds, activation_parts, stage_activations
from flagcore.engines.training.parameters import EXPERT_PARTS, Parts, stage_parameters
from flagcore.engines.training.stages import Stage, stage, stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory(ArrayRecord):
    """Bytes of one stage of each candidate.

    `static` stays allocated between steps, `activation` is added at the peak of forward and backward, `peak` is the
    maximum of the step.
    """

    static: FloatArray
    activation: FloatArray
    peak: FloatArray
    worst_stage: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class InUse(ArrayRecord):
    """Bytes of one stage of each candidate.

    `memory` is of tensors, `reserved` of the allocator, `used` of the device, `capacity` the device's size (NaN:
    unknown).
    """

    memory: Memory
    reserved: FloatArray
    used: FloatArray
    capacity: FloatArray


def memory_in_use(train: Training, layout: Layout, costs: Costs) -> InUse:
    """Return the memory of the worst stage.

    It is the stage with the largest peak or, with several chip models, the one that uses the largest share of its
    device's capacity. A stage with unknown capacity counts as full, so that no candidate is reported to fit by mistake.
    The peak is the maximum over forward and backward and the optimizer step.
    """
    placement = Placement.from_layout(layout, costs)
    memories = stages_in_use(train, layout, costs, stages(train.model, layout, train.options, placement.starts))
    if len(costs.groups) == 1:
        needed = np.stack([each.memory.peak for each in memories])
    else:
        share = np.stack([each.used for each in memories]) / np.stack([each.capacity for each in memories])
        needed = np.where(np.isnan(share), 1.0, share)
    return pick(np.argmax(needed, axis=0), memories)


def stages_in_use(train: Training, layout: Layout, costs: Costs, requested_stages: Sequence[Stage]) -> list[InUse]:
    """Return the memory of each of `requested_stages`, for all candidates."""
    placement, models = Placement.from_layout(layout, costs), [each.memory for each in costs.groups]
    workspaces = [np.array(model.workspace_bytes()) for model in models]
    capacities = [np.array(np.nan if (known := model.capacity_bytes()) is None else known) for model in models]
    estimates = [_Estimate.from_layout(train, each) for each in placement.layouts]
    memories = []
    for stage_ in requested_stages:
        group_memory = [each.memory(stage_, size) for each, size in zip(estimates, workspaces, strict=True)]
        memory = placement.pick(stage_.index, group_memory)
        reserved = [model.reserved_bytes(memory.peak) for model in models]
        used = [used_bytes(model, held, layout) for model, held in zip(models, reserved, strict=True)]
        stage_values = [placement.pick(stage_.index, values) for values in (reserved, used, capacities)]
        memories.append(InUse(memory=memory, reserved=stage_values[0], used=stage_values[1], capacity=stage_values[2]))
    return memories


def used_bytes(model: MemoryModel, reserved: FloatArray, layout: Layout) -> FloatArray:
    """Return the memory in use on a device whose allocator has reserved `reserved` bytes."""
    used, buffers = model.device_used_bytes(reserved), communicator_bytes(model)
    return used + buffers * layout.communicators() if buffers else used


def states_of(train: Training, layout: Layout, params: Parts) -> tuple[State, State]:
    """Return the states of the dense weights and of the expert weights."""
    dense, experts = split_parameters(params)
    of_linear = [params[name] for name in LINEAR_PARTS if name in params and name not in EXPERT_PARTS]
    padded = dense + padding(layout, dense, experts=False)
    total = state(train, layout, padded, experts=False, linear=sum(of_linear, np.zeros(())))
    if train.model.num_moe_experts is None:
        none = np.zeros(())
        return total, State(none, none, none, none)
    padded = experts + padding(layout, experts, experts=True)
    return total, state(train, layout, padded, experts=True, linear=experts)


def rank_memory(train: Training, layout: Layout, rank: FloatArray | int, workspace_bytes: float = 0.0) -> Memory:
    """Return the memory of one global rank of each candidate, in Megatron's rank order tp-cp-ep-dp-pp."""
    rank_stage = stage(train.model, layout, stage_of_rank(layout, rank), train.options)
    return _Estimate.from_layout(train, layout).memory(rank_stage, workspace_bytes)


def stage_of_rank(layout: Layout, rank: FloatArray | int) -> FloatArray:
    """Return the pipeline stage of a global rank; the ranks of a stage are consecutive."""
    index: FloatArray = np.floor(rank / (layout.tensor * layout.context * layout.data))
    return np.minimum(index, layout.pipeline - 1.0)


def component_table(
    train: Training, layout: Layout, index: FloatArray, workspace_bytes: FloatArray | float = 0.0
) -> dict[str, dict[str, FloatArray]]:
    """Return the parameters and bytes of each component on stage `index` of each candidate.

    Activations add up to `Memory.activation`, all other bytes to `Memory.static`. Additional rows are `padding` of
    gradient buffers, `buffers` of the engine, and `backward`, the bytes of the peak above the stored tensors.
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
        linear = count if name in LINEAR_PARTS else 0.0
        bytes_ = state(train, layout, count, experts=name in EXPERT_PARTS, linear=linear)
        add(name, count, bytes_, parts.get(name, zeros))
    dense, routed = (
        state(train, layout, padding(layout, count, experts=experts), experts=experts, linear=0.0)
        for count, experts in zip(split_parameters(params), (False, True), strict=True)
    )
    engine = estimate.engine_bytes(table_stage, workspace_bytes)
    engine = engine + estimate.held_after_step(table_stage)
    add("padding", zeros, dense + routed, zeros)
    add("buffers", zeros, State(engine, zeros, zeros, zeros), zeros)
    return table


@dataclass(frozen=True, slots=True)
class _Estimate:
    """The data that all stages of a call share.

    `selective` is the estimate of the candidates `uniform` with selective recompute in place of full recompute of
    every layer; the latter must not be predicted to need more. It is None without such candidates.
    """

    kinds: Kinds
    uniform: IntArray
    selective: _Estimate | None = None

    @classmethod
    def from_layout(cls, train: Training, layout: Layout) -> _Estimate:
        uniform = np.flatnonzero(layout.uniform == 1)
        estimate = cls(Kinds.from_layout(train, layout), uniform)
        modules = train.options.recompute_modules
        return replace(estimate, selective=estimate._with_selective(modules, uniform)) if uniform.size else estimate

    def _with_selective(self, modules: frozenset[str], rows: IntArray) -> _Estimate:
        """Return the estimate of some candidates with selective recompute of `modules` in place of any other."""
        train, layout, zeros = self.kinds.train, self.kinds.layout[rows], np.zeros(rows.shape)
        selective = np.maximum(layout.selective, layout.uniform == 1)
        train = replace(train, options=replace(train.options, recompute_stage_layers=(), recompute_modules=modules))
        layout = replace(layout, selective=selective, uniform=zeros, block=zeros)
        return _Estimate(Kinds.from_layout(train, layout), np.flatnonzero(zeros))

    def engine_bytes(self, stage_: Stage, workspace_bytes: FloatArray | float) -> FloatArray:
        engine_buffers = buffers(self.kinds.train, self.kinds.layout, stage_, self.kinds.sizes)
        return engine_buffers + workspaces(self.kinds.train) * workspace_bytes

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
        """Return the activations by component, with the bytes above the stored ones as `backward`."""
        train, layout, activations = self.kinds.train, self.kinds.layout, stage_activations(stage_, self.kinds)
        states = states_of(train, layout, stage_parameters(train, layout, stage_))
        backward = self.activation(stage_) + gathered_bytes(train, layout, *states) - activations.stored
        return {**activation_parts(stage_, self.kinds, activations), "backward": backward}

    def memory(self, stage_: Stage, workspace_bytes: FloatArray | float) -> Memory:
        """Return the memory of one stage; `workspace_bytes` is the size of one workspace of the matrix library.

        The bytes that a step leaves are allocated during the optimizer step and freed before the next peak. More
        recompute leaves more bytes, but is never predicted to need more.
        """
        train, layout = self.kinds.train, self.kinds.layout
        params = stage_parameters(train, layout, stage_)
        states = states_of(train, layout, params)
        base = states[0].total + states[1].total + self.engine_bytes(stage_, workspace_bytes)
        static = base + self.held_after_step(stage_)
        step, gathered = step_bytes(train, layout, *split_parameters(params)), gathered_bytes(train, layout, *states)
        activation = self.activation(stage_) + gathered
        optimizer_peak = self.held_after_step(stage_, at_most=True) + step
        if self._may_hold_more():
            rows = np.flatnonzero(optimizer_peak > activation)
            least = self._peak_without_full(stage_, rows, step, gathered)
            optimizer_peak[rows] = np.minimum(optimizer_peak[rows], least)
        peak = base + np.maximum(activation, optimizer_peak)
        return Memory(static=static, activation=activation, peak=peak, worst_stage=stage_.index.astype(np.int64))

    def _may_hold_more(self) -> bool:
        """Return whether full recompute, or recompute of whole mixtures of experts, keeps more bytes after a step."""
        options, layout = self.kinds.train.options, self.kinds.layout
        if self.kinds.train.model.num_moe_experts is None:
            return False
        recomputes_layers = np.any(layout.uniform + layout.block > 0) or bool(options.recompute_stage_layers)
        return bool(recomputes_layers or ("moe" in options.recompute_modules and layout.selective.any()))

    def _peak_without_full(self, stage_: Stage, rows: IntArray, step: FloatArray, gathered: FloatArray) -> FloatArray:
        """Return the peak of a step of some candidates with less recompute: the least of two estimates."""
        modules, part, peaks = self.kinds.train.options.recompute_modules, stage_[rows], []
        gathered = gathered if gathered.ndim == 0 else gathered[rows]
        for fewer in {modules - {"moe"}, modules}:
            other = self._with_selective(fewer, rows)
            held = other.held_after_step(part) + step[rows]
            peaks.append(np.maximum(held, other.activation(part) + gathered))
        least: FloatArray = np.minimum.reduce(peaks)
        return least
