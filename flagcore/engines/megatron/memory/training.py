"""Memory of one rank in training: states and activations of the worst stage, and whether they fit its device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from flagcore.contracts import Costs
from flagcore.domain.space import FloatArray, IntArray
from flagcore.engines.megatron.memory.states import (
    LINEAR_PARTS,
    State,
    buffers,
    bytes_held_after_step,
    padding,
    split_parameters,
    state,
    step_bytes,
    unsharded,
    workspaces,
)
from flagcore.engines.megatron.memory.stored_activations import Kinds, activation_parts, stage_activations
from flagcore.engines.megatron.parallel.layout import ArrayRecord, Layout, Placement, Training, pick
from flagcore.engines.megatron.parallel.parameters import EXPERT_PARTS, Parts, stage_parameters
from flagcore.engines.megatron.parallel.pipeline import Stage, stage, stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory(ArrayRecord):
    """Bytes of one stage of each candidate. `static` is what stays allocated between steps, `activation` what a step
    also holds at the worst moment of forward and backward, `peak` the worst moment of the step.
    """

    static: FloatArray
    activation: FloatArray
    peak: FloatArray
    worst_stage: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class InUse(ArrayRecord):
    """Bytes of one stage of each candidate: tensors, what the allocator holds, what the device shows in use, and what
    it has (NaN: unknown).
    """

    memory: Memory
    reserved: FloatArray
    used: FloatArray
    capacity: FloatArray


def memory_in_use(train: Training, layout: Layout, costs: Costs) -> InUse:
    """Return the memory of the worst stage: the one that needs most or, on devices of several kinds, has least room.

    The peak is the larger of two phases: forward and backward, at the worst moment of the schedule, and the optimizer's
    step. Room is measured as the share of its device's capacity that a stage uses. A stage with unknown capacity is the
    worst unless another exceeds its own, so that no candidate is reported to fit that may not.
    """
    place = Placement.of(layout, costs)
    found = stages_in_use(train, layout, costs, stages(train.model, layout, train.options, place.starts))
    if len(costs.groups) == 1:
        need = np.stack([each.memory.peak for each in found])
    else:
        share = np.stack([each.used for each in found]) / np.stack([each.capacity for each in found])
        need = np.where(np.isnan(share), 1.0, share)
    return pick(np.argmax(need, axis=0), found)


def stages_in_use(train: Training, layout: Layout, costs: Costs, wanted: Sequence[Stage]) -> list[InUse]:
    """Return the memory of some stages."""
    place, models = Placement.of(layout, costs), [each.memory for each in costs.groups]
    workspaces = [np.array(model.workspace_bytes()) for model in models]
    capacities = [np.array(np.nan if (known := model.capacity_bytes()) is None else known) for model in models]
    estimate = _Estimate.of(train, layout)
    found = []
    for where in wanted:
        memory = estimate.memory(where, place.pick(where.index, workspaces))
        reserved = [model.reserved_bytes(memory.peak) for model in models]
        used = [model.device_used_bytes(held) for model, held in zip(models, reserved, strict=True)]
        chosen = [place.pick(where.index, values) for values in (reserved, used, capacities)]
        found.append(InUse(memory=memory, reserved=chosen[0], used=chosen[1], capacity=chosen[2]))
    return found


def rank_memory(train: Training, layout: Layout, rank: FloatArray | int, workspace_bytes: float = 0.0) -> Memory:
    """Return the memory of one global rank of each candidate, in Megatron's order of ranks: tp-cp-ep-dp-pp."""
    where = stage(train.model, layout, stage_of_rank(layout, rank), train.options)
    return _Estimate.of(train, layout).memory(where, workspace_bytes)


def stage_of_rank(layout: Layout, rank: FloatArray | int) -> FloatArray:
    """Return the pipeline stage of a global rank: ranks of one stage follow each other."""
    index: FloatArray = np.floor(rank / (layout.tensor * layout.context * layout.data))
    return np.minimum(index, layout.pipeline - 1.0)


def component_table(
    train: Training, layout: Layout, index: FloatArray, workspace_bytes: FloatArray | float = 0.0
) -> dict[str, dict[str, FloatArray]]:
    """Return the parameters and bytes of each component on stage `index` of each candidate.

    The bytes but activations add up to `Memory.static`, the activations to `Memory.activation`. Besides components,
    `padding` fills gradient buffers up, `buffers` belong to the engine, and `backward` is what the worst moment needs
    in addition to the tensors that wait for it.
    """
    where = stage(train.model, layout, index, train.options)
    estimate = _Estimate.of(train, layout)
    params, parts = stage_parameters(train, layout, where), estimate.parts(where)
    none = np.zeros_like(layout.data)
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
        table[name] = {key: value + none for key, value in figures.items()}

    for name in dict.fromkeys((*params, *parts)):
        count = params.get(name, none)
        linear = count if name in LINEAR_PARTS else 0.0
        bytes_ = state(train, layout, count, experts=name in EXPERT_PARTS, linear=linear)
        add(name, count, bytes_, parts.get(name, none))
    dense, routed = (
        state(train, layout, padding(layout, count, experts=experts), experts=experts, linear=0.0)
        for count, experts in zip(split_parameters(params), (False, True), strict=True)
    )
    held = bytes_held_after_step(train, layout, where, estimate.kinds.sizes)
    add("padding", none, dense + routed, none)
    add("buffers", none, State(estimate.engine_bytes(where, workspace_bytes) + held, none, none, none), none)
    return table


@dataclass(frozen=True, slots=True)
class _Estimate:
    """What the stages of a call share.

    `selective` is the same work with the settings' modules recomputed in place of all layers one by one, which must not
    need more by the model. `before` is the same work without the recompute that leaves more behind a step: of whole
    layers, and of whole mixtures of experts. Both are None where they would not differ.
    """

    train: Training
    layout: Layout
    kinds: Kinds
    selective: _Estimate | None = None
    before: _Estimate | None = None

    @classmethod
    def of(cls, train: Training, layout: Layout) -> _Estimate:
        modules, every = train.options.recompute_modules, layout.uniform == 1
        whole = np.any(layout.uniform + layout.block > 0) or bool(train.options.recompute_stage_layers)
        experts = train.model.num_moe_experts is not None
        found = cls(train, layout, Kinds.of(train, layout))
        if every.any():
            found = replace(found, selective=found._with(modules))
        if experts and (whole or ("moe" in modules and layout.selective.any())):
            found = replace(found, before=found._with(modules - {"moe"}))
        return found

    def _with(self, modules: frozenset[str]) -> _Estimate:
        """Return the same work with these modules recomputed where others or all layers one by one are."""
        none = np.zeros_like(self.layout.data)
        on = np.maximum(self.layout.selective, self.layout.uniform == 1)
        options = replace(self.train.options, recompute_stage_layers=(), recompute_modules=modules)
        train = replace(self.train, options=options)
        layout = replace(self.layout, selective=on, uniform=none, block=none)
        return _Estimate(train, layout, Kinds.of(train, layout, self.kinds.rows))

    def engine_bytes(self, where: Stage, workspace_bytes: FloatArray | float) -> FloatArray:
        own = buffers(self.train, self.layout, where, self.kinds.sizes)
        return own + workspaces(self.train) * workspace_bytes

    def activation(self, where: Stage) -> FloatArray:
        found = stage_activations(self.train, self.layout, where, self.kinds)
        total = found.stored + found.above
        if self.selective is not None:
            total = np.where(self.layout.uniform == 1, np.minimum(total, self.selective.activation(where)), total)
        return total

    def parts(self, where: Stage) -> Parts:
        """Return the same by component, with the bytes above the stored ones as `backward`."""
        found = stage_activations(self.train, self.layout, where, self.kinds)
        parts = activation_parts(self.train, self.layout, where, self.kinds, found)
        whole = unsharded(self.train, self.layout, *self.states(stage_parameters(self.train, self.layout, where)))
        return {**parts, "backward": self.activation(where) + whole - found.stored}

    def states(self, params: Parts) -> tuple[State, State]:
        """Return the states of the weights that all data-parallel ranks replicate, and of those of the experts."""
        train, layout = self.train, self.layout
        dense, experts = split_parameters(params)
        of_linear = [params[name] for name in LINEAR_PARTS if name in params and name not in EXPERT_PARTS]
        filled = dense + padding(layout, dense, experts=False)
        total = state(train, layout, filled, experts=False, linear=sum(of_linear, np.zeros(())))
        if train.model.num_moe_experts is None:
            none = np.zeros(())
            return total, State(none, none, none, none)
        filled = experts + padding(layout, experts, experts=True)
        return total, state(train, layout, filled, experts=True, linear=experts)

    def memory(self, where: Stage, workspace_bytes: FloatArray | float) -> Memory:
        """Return the memory of one stage; `workspace_bytes` is one workspace of the library of matrix products.

        What a step leaves behind is there in the optimizer's step and gone before the next one's peak. More recompute,
        which leaves more, is never predicted to need more.
        """
        train, layout, sizes = self.train, self.layout, self.kinds.sizes
        params = stage_parameters(train, layout, where)
        states = self.states(params)
        base = states[0].total + states[1].total + self.engine_bytes(where, workspace_bytes)
        static = base + bytes_held_after_step(train, layout, where, sizes)
        step, whole = step_bytes(train, layout, *split_parameters(params)), unsharded(train, layout, *states)
        activation = self.activation(where) + whole
        left = bytes_held_after_step(train, layout, where, sizes, at_most=True) + step
        if self.before is not None:
            for less in (self.before, self.selective or self.before):
                least = bytes_held_after_step(less.train, less.layout, where, sizes) + step
                left = np.minimum(left, np.maximum(least, less.activation(where) + whole))
        peak = base + np.maximum(activation, left)
        return Memory(static=static, activation=activation, peak=peak, worst_stage=where.index.astype(np.int64))
