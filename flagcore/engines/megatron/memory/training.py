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
    left_over,
    padding,
    state,
    step_bytes,
    unsharded,
    workspaces,
)
from flagcore.engines.megatron.memory.states import split_parameters as split_parameters
from flagcore.engines.megatron.memory.stored_activations import Kinds, activation_parts, stage_activations
from flagcore.engines.megatron.parallel.layout import Layout, Placement, Training, pick
from flagcore.engines.megatron.parallel.parameters import EXPERT_PARTS, Parts
from flagcore.engines.megatron.parallel.parameters import stage_parameters as stage_parameters
from flagcore.engines.megatron.parallel.pipeline import Stage, stage, stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one stage of each candidate. `static` is what stays allocated between steps, `activation` what a step
    holds besides states and buffers at the worst moment of forward and backward, `peak` the worst moment of the step.
    """

    static: FloatArray
    activation: FloatArray
    peak: FloatArray
    worst_stage: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """What one component takes on a rank of one stage of each candidate: parameters, and bytes."""

    params: FloatArray
    weights: FloatArray
    gradients: FloatArray
    main_parameters: FloatArray
    optimizer: FloatArray
    activation: FloatArray

    @property
    def static(self) -> FloatArray:
        return self.weights + self.gradients + self.main_parameters + self.optimizer


def training_memory(train: Training, layout: Layout, workspace_bytes: float = 0.0) -> Memory:
    """Return the memory of the worst stage of each candidate.

    The peak is the larger of two phases: forward and backward, at the worst moment of the schedule, and the optimizer's
    step. `workspace_bytes` is one workspace of the library of matrix products.
    """
    places = stages(train.model, layout, train.options)
    found = stage_memories(train, layout, places, [workspace_bytes] * len(places))
    return of_stage(np.argmax(np.stack([memory.peak for memory in found]), axis=0), found)


def stage_memories(
    train: Training, layout: Layout, places: Sequence[Stage], workspaces: Sequence[FloatArray | float]
) -> list[Memory]:
    """Return the memory of each of some stages; of each the workspace of its own device's library."""
    estimate = _Estimate.of(train, layout, 0.0)
    pairs = zip(places, workspaces, strict=True)
    return [replace(estimate, workspace_bytes=workspace).memory(where) for where, workspace in pairs]


def of_stage(which: IntArray, found: Sequence[Memory]) -> Memory:
    """Return for each candidate the memory at its number in `which`."""

    def chosen(name: str) -> FloatArray:
        return pick(which, [getattr(memory, name) for memory in found])

    index = pick(which, [memory.worst_stage for memory in found]).astype(np.int64)
    return Memory(static=chosen("static"), activation=chosen("activation"), peak=chosen("peak"), worst_stage=index)


def rank_memory(train: Training, layout: Layout, rank: FloatArray | int, workspace_bytes: float = 0.0) -> Memory:
    """Return the memory of one global rank of each candidate, in Megatron's order of ranks: tp-cp-ep-dp-pp."""
    where = stage(train.model, layout, stage_of_rank(layout, rank), train.options)
    return _Estimate.of(train, layout, workspace_bytes).memory(where)


def stage_of_rank(layout: Layout, rank: FloatArray | int) -> FloatArray:
    """Return the pipeline stage of a global rank: ranks of one stage follow each other."""
    index: FloatArray = np.floor(rank / (layout.tensor * layout.context * layout.data))
    return np.minimum(index, layout.pipeline - 1.0)


def component_table(
    train: Training, layout: Layout, index: FloatArray, workspace_bytes: FloatArray | float = 0.0
) -> dict[str, Component]:
    """Return what each component takes on stage `index` of each candidate.

    The bytes but activations add up to `Memory.static`, the activations to `Memory.activation`. Besides components,
    `padding` fills gradient buffers up, `buffers` belong to the engine, and `backward` is what the worst moment needs
    besides the tensors that wait for it.
    """
    where = stage(train.model, layout, index, train.options)
    estimate = _Estimate.of(train, layout, workspace_bytes)
    params, parts = stage_parameters(train, layout, where), estimate.parts(where)
    none = np.zeros_like(layout.data)
    table: dict[str, Component] = {}
    for name in dict.fromkeys((*params, *parts)):
        count = params.get(name, none)
        linear = count if name in LINEAR_PARTS else 0.0
        bytes_ = state(train, layout, count, experts=name in EXPERT_PARTS, linear=linear)
        table[name] = _component(count, bytes_, parts.get(name, none))
    spare = State.zero(none)
    for count, experts in zip(split_parameters(params), (False, True), strict=True):
        spare = spare + state(train, layout, padding(layout, count, experts=experts), experts=experts, linear=0.0)
    engine = estimate.engine_bytes(where) + left_over(train, layout, where, estimate.kinds.sizes)
    table["padding"] = _component(none, spare, none)
    table["buffers"] = _component(none, State(engine, none, none, none), none)
    return table


def _component(count: FloatArray, bytes_: State, activation: FloatArray) -> Component:
    none = np.zeros_like(count)
    return Component(
        params=count,
        weights=bytes_.weights + none,
        gradients=bytes_.gradients + none,
        main_parameters=bytes_.main_parameters + none,
        optimizer=bytes_.optimizer + none,
        activation=activation + none,
    )


@dataclass(frozen=True, slots=True)
class _Estimate:
    """What the stages of a call share.

    `selective` is the same work with the settings' modules recomputed in place of all layers one by one, which is not
    said to need more. `before` is the same work without the recompute that leaves more behind a step: of whole layers,
    and of whole mixtures of experts. Both are None where they would not differ.
    """

    train: Training
    layout: Layout
    kinds: Kinds
    workspace_bytes: FloatArray | float
    selective: _Estimate | None = None
    before: _Estimate | None = None

    @classmethod
    def of(cls, train: Training, layout: Layout, workspace_bytes: FloatArray | float) -> _Estimate:
        modules, every = train.options.recompute_modules, layout.uniform == 1
        whole = np.any(layout.uniform + layout.block > 0) or bool(train.options.recompute_stage_layers)
        experts = train.model.num_moe_experts is not None
        found = cls(train, layout, Kinds.of(train, layout), workspace_bytes)
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
        return _Estimate(train, layout, Kinds.of(train, layout, self.kinds.rows), self.workspace_bytes)

    def engine_bytes(self, where: Stage) -> FloatArray:
        own = buffers(self.train, self.layout, where, self.kinds.sizes)
        return own + workspaces(self.train) * self.workspace_bytes

    def activation(self, where: Stage) -> FloatArray:
        found = stage_activations(self.train, self.layout, where, self.kinds)
        total = found.stored + found.above
        if self.selective is not None:
            total = np.where(self.layout.uniform == 1, np.minimum(total, self.selective.activation(where)), total)
        return total

    def parts(self, where: Stage) -> Parts:
        """Return the same by component, with what is above all that is stored as `backward`."""
        found = stage_activations(self.train, self.layout, where, self.kinds)
        parts = activation_parts(self.train, self.layout, where, self.kinds, found)
        whole = unsharded(self.train, self.layout, *self.states(where))
        return {**parts, "backward": self.activation(where) + whole - found.stored}

    def states(self, where: Stage) -> tuple[State, State]:
        """Return the states of the weights that all data-parallel ranks replicate, and of those of the experts."""
        return _states(self.train, self.layout, stage_parameters(self.train, self.layout, where))

    def memory(self, where: Stage) -> Memory:
        """Return the memory of one stage.

        What a step leaves behind is there in the optimizer's step and gone before the next one's peak. More recompute,
        which leaves more, is never predicted to need more.
        """
        train, layout = self.train, self.layout
        dense, experts = split_parameters(stage_parameters(train, layout, where))
        states = self.states(where)
        base = states[0].total + states[1].total + self.engine_bytes(where)
        static = base + left_over(train, layout, where, self.kinds.sizes)
        step, whole = step_bytes(train, layout, dense, experts), unsharded(train, layout, *states)
        activation = self.activation(where) + whole
        left = left_over(train, layout, where, self.kinds.sizes, at_most=True) + step
        if self.before is not None:
            for less in (self.before, self.selective or self.before):
                least = left_over(less.train, less.layout, where, self.kinds.sizes) + step
                left = np.minimum(left, np.maximum(least, less.activation(where) + whole))
        peak = base + np.maximum(activation, left)
        return Memory(static=static, activation=activation, peak=peak, worst_stage=where.index.astype(np.int64))


def _states(train: Training, layout: Layout, params: Parts) -> tuple[State, State]:
    dense, experts = split_parameters(params)
    linear = sum((params[name] for name in LINEAR_PARTS if name in params and name not in EXPERT_PARTS), np.zeros(()))
    filled = dense + padding(layout, dense, experts=False)
    total = state(train, layout, filled, experts=False, linear=linear)
    if train.model.num_moe_experts is None:
        return total, State.zero(np.zeros(()))
    filled = experts + padding(layout, experts, experts=True)
    return total, state(train, layout, filled, experts=True, linear=experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class InUse:
    """Bytes of the worst stage of each candidate: tensors, what the allocator holds, what the device shows in use, and
    what it has: one figure for all, one a candidate where devices differ; None or NaN if unknown.
    """

    memory: Memory
    reserved: FloatArray
    used: FloatArray
    capacity: FloatArray | float | None


def memory_in_use(train: Training, layout: Layout, costs: Costs) -> InUse:
    """Return the memory of the worst stage: the one that needs most or, on devices of several kinds, has least room.

    Room is measured as the share of its device's capacity that a stage uses. A stage with unknown capacity is the worst
    unless another exceeds its own, so that no candidate is reported to fit that may not.
    """
    if len(costs.groups) == 1:
        memory = training_memory(train, layout, costs.memory.workspace_bytes())
        reserved = costs.memory.reserved_bytes(memory.peak)
        used = costs.memory.device_used_bytes(reserved)
        return InUse(memory=memory, reserved=reserved, used=used, capacity=costs.memory.capacity_bytes())
    place, models = Placement.of(layout, costs), [each.memory for each in costs.groups]
    places = stages(train.model, layout, train.options, place.starts)
    wanted = [np.array(model.workspace_bytes()) for model in models]
    found = stage_memories(train, layout, places, [place.pick(where.index, wanted) for where in places])
    has = [np.array(np.nan if (known := model.capacity_bytes()) is None else known) for model in models]
    reserved_by, used_by, capacity_by = [], [], []
    for where, memory in zip(places, found, strict=True):
        reserved_each = [model.reserved_bytes(memory.peak) for model in models]
        shown = [model.device_used_bytes(each) for model, each in zip(models, reserved_each, strict=True)]
        reserved_by.append(place.pick(where.index, reserved_each))
        used_by.append(place.pick(where.index, shown))
        capacity_by.append(place.pick(where.index, has))
    share = np.stack(used_by) / np.stack(capacity_by)
    worst = np.argmax(np.where(np.isnan(share), 1.0, share), axis=0)
    return InUse(
        memory=of_stage(worst, found),
        reserved=pick(worst, reserved_by),
        used=pick(worst, used_by),
        capacity=pick(worst, capacity_by),
    )
