"""Bytes of the activations of a pipeline stage, from its layers, recompute, offload, embedding and head.

Also the modules of a layer, by its mixer and its network, and the vision tower for the images of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from typing import NamedTuple

import numpy as np
from flagcore_models.layers import depth_of
from flagcore_models.mixers.attention import Attention
from flagcore_models.networks.experts import Experts
from flagcore_models.parts.tower import VisionTower

from flagcore.domain.model import Layer as ModelLayer
from flagcore.domain.model import Mixer, Network, Part
from flagcore.domain.space import BoolArray, FloatArray
from flagcore_training.kinds import Numbers, layer_kinds
from flagcore_training.layout import LayerLayout, Layout, Tower, Training
from flagcore_training.memory.activations import attention, depths, embedding, ffn, head, mixer, mixture
from flagcore_training.memory.modules import OFFLOADED, Layer, Module, Sizes, frozen, recomputed_tensors, saving
from flagcore_training.schedules import in_flight
from flagcore_training.stages import Stage, depths_received
from flagcore_training.vision import tower_layout, tower_repeats, tower_training
from flagcore_training.weights import Parts, add_parts


def modules_of(train: Training, layout: Layout, sizes: Sizes, layer: ModelLayer) -> list[Module]:
    """Return the modules of a layer."""
    return [module for part in layer.parts for module in part_modules(train, layout, sizes, part)]


def part_modules(train: Training, layout: Layout, sizes: Sizes, part: Part) -> list[Module]:
    """Return the modules of a mixer or a network."""
    if isinstance(part, Attention):
        if "attention" in train.options.wide_modules:
            sizes = replace(sizes, linear=sizes.unit)
        modules = attention(train, layout, sizes, part)
    elif isinstance(part, Mixer):
        modules = mixer(train, layout, sizes, part)
    elif isinstance(part, Experts):
        modules = mixture(train, layout, sizes, part)
    else:
        assert isinstance(part, Network)
        modules = ffn(train, layout, sizes, part)
    return frozen(train, layout, sizes, modules, part)


def with_tower(entry: Module, train: Training, tower: Tower, layout: Layout) -> Module:
    """Return the embedding `entry` with the tower before it.

    Layers store their tensors if they are trained, and only their input if they are recomputed. The language model
    stores the outputs of the mergers. Selective recompute is not included: fused attention stores no scores.
    """
    vision, own, mesh = tower.vision, tower_training(tower, train), tower_layout(tower, layout)
    whole = VisionTower(vision=vision)
    sizes, count = Sizes.from_layout(own, mesh), np.full_like(layout.tensor, float(vision.num_layers))
    layer = Layer.from_modules(modules_of(own, mesh, sizes, whole.layer))
    repeated = tower_repeats(tower, layout)
    outputs = vision.mergers * sizes.unit * vision.output_size * sizes.tokens / vision.merge_size**2
    is_merged = not (tower.frozen and tower.frozen_mergers)
    stored = outputs + is_merged * sizes.unit * sizes.tokens * whole.saved_by_mergers(mesh.tensor)
    work = layer.stored
    if not tower.frozen:
        stored = stored + count * (repeated * sizes.hidden + (1.0 - repeated) * layer.stored)
        work = layer.above(count) + (repeated > 0) * layer.stored
    return replace(entry, tensors={**entry.tensors, "vision": stored}, work=np.maximum(entry.work, work))


PRODUCTS = (
    "qkv_linear",
    "latent",
    "context",
    "mixer_linear",
    "mlp_input",
    "mlp_act",
    "shared_act",
    "expert_fc1",
    "moe_act",
)
"""Names of the stored inputs of linear layers, which the weight gradients need."""


ENTRY = {"tokens": "embedding", "vision": "vision"}
"""The components of the tensors that are stored before the first layer."""


class Kinds(NamedTuple):
    """The bytes that each kind of layer of a model stores, with recompute and offload, for each candidate.

    `modules` are those of each mixer and each network, `entry` is the module of the embedding, and `head_row` are the
    modules of the head. `recomputed` is 1 where selective recompute applies to a module. `plain` are the layers of each
    group if all layers of a group are alike, on a stage that offloads; otherwise a stage has its own means. `mtp` is a
    layer of multi-token prediction, which offloads nothing; None if there is none.
    """

    train: Training
    layout: Layout
    sizes: Sizes
    modules: Mapping[Part, list[Module]]
    entry: Module
    head_row: list[Module]
    recomputed: Mapping[str, FloatArray]
    offloaded: Collection[str]
    head: Layer
    mtp: Layer | None = None
    plain: tuple[Layer, ...] = ()

    @classmethod
    def from_layout(cls, train: Training, layout: Layout) -> Kinds:
        """Return the kinds of layers for each candidate in `layout`."""
        sizes, options, model = Sizes.from_layout(train, layout), train.options, train.model
        recomputed: Mapping[str, FloatArray] = {}
        kinds = layer_kinds(model)
        parts = dict.fromkeys(part for layer in kinds.layers for part in layer.parts)
        modules = {part: part_modules(train, layout, sizes, part) for part in parts}
        if layout.selective.any():
            recomputed = dict.fromkeys(sorted(options.recompute_modules), layout.selective)
        offloaded = {name for module in options.offload_modules for name in OFFLOADED.get(module, ())}
        head_row = head(train, layout, sizes)
        entry = embedding(train, layout, sizes)
        if train.tower is not None:
            entry = with_tower(entry, train, train.tower, layout)
        last, ends = Layer.from_modules(head_row), (entry, head_row)
        found = cls(train, layout, sizes, modules, *ends, recomputed, offloaded, last)
        if model.mtp_num_layers:
            row = modules_of(train.of_depths, layout, sizes, depth_of(model).layer)
            found = found._replace(mtp=found._layer(row))
        if kinds.are_plain:
            none = tuple(np.zeros(()) for _ in kinds.layers)
            found = found._replace(plain=found.layers(none, () if options.offload_stages else offloaded))
        return found

    def rows(self, numbers: Numbers) -> list[list[Module]]:
        """Return the modules of the mean layer of each group of a stage with these numbers of layers."""
        kinds, rows = layer_kinds(self.train.model), []
        for group in kinds.groups:
            parts = kinds.parts(numbers, group)
            if len(kinds.layers[group]) == 1:
                rows.append([module for part in parts for module in self.modules[part]])
                continue
            total = np.maximum(sum(numbers[group]), 1.0)
            rows.append([each.shared(count / total) for part, count in parts.items() for each in self.modules[part]])
        return rows

    def layers(
        self, numbers: Numbers, offloaded: Collection[str] = (), on_host: FloatArray | float = 1.0
    ) -> tuple[Layer, ...]:
        """Return the bytes of the mean layer of each group of a stage with these numbers of layers.

        The tensors `offloaded` are on the host where `on_host` is 1.
        """
        return tuple(self._layer(row, offloaded, on_host) for row in self.rows(numbers))

    def _layer(self, row: list[Module], offloaded: Collection[str] = (), on_host: FloatArray | float = 1.0) -> Layer:
        tensors = recomputed_tensors(self.train, self.sizes, self.recomputed)
        split = len(row) - 1 if row[-1].component == "experts" else len(row) - 2
        front = split if self.train.options.overlap_expert_comm else 0
        return Layer.from_modules(saving(row, tensors, offloaded, on_host if offloaded else 0.0), front)

    def on(self, stage: Stage) -> tuple[Layer, ...]:
        """Return the bytes of the mean layer of each group of a stage.

        If `offload_stages` is empty, all stages offload.
        """
        stages = self.train.options.offload_stages
        if self.plain and not (self.offloaded and stages):
            return self.plain
        on_host = np.isin(stage.index, stages).astype(np.float64) if stages else 1.0
        return self.layers(stage.numbers, self.offloaded, on_host)

    def ends(self, stage: Stage) -> Layer:
        """Return the bytes of the modules after the layers of a stage: multi-token prediction and the head.

        Multi-token prediction offloads nothing.
        """
        if self.mtp is None:
            return self.head
        train, layers = self.train, stage.later * stage.in_flight * (not self.offloaded)
        above = self.mtp.above(train.model.mtp_num_layers + layers, self.crossed(stage))
        row = [*depths(train, self.layout, self.sizes, self.mtp.stored, above, layers), *self.head_row]
        if np.any((stage.mtp > 0) != (stage.last > 0)):
            is_here = [stage.mtp > 0, *[stage.last > 0] * (1 + len(self.head_row))]
            row = [each.only(is_on_stage) for each, is_on_stage in zip(row, is_here, strict=True)]
        return Layer.from_modules(row)

    def in_flight(self, stage: Stage) -> FloatArray:
        """Return the number of micro-batches in flight if all virtual stages of a device have equally many layers."""
        layout, schedule = self.layout, self.train.options.schedule or "interleaved"
        return in_flight(schedule, stage.index, layout.pipeline, layout.virtual, layout.microbatches)

    def early_in_flight(self, stage: Stage) -> FloatArray:
        """Return the number of micro-batches in flight on the last virtual stage of devices with early MTP.

        The result is 0 for other stages.
        """
        chunks = self.in_flight(stage) * self.layout.virtual
        chunks_in_flight = np.maximum(chunks - (self.layout.virtual - 1.0) * self.layout.pipeline, 1.0)
        return np.where(_early(stage), chunks_in_flight, 0.0)

    def crossed(self, stage: Stage) -> BoolArray:
        """Return whether a forward pass of another micro-batch overlaps the backward pass, for each candidate."""
        pairs = LayerLayout.of(self.train, self.layout).pairs(self.train.model)
        return (stage.in_flight < self.layout.microbatches) & pairs

    def waiting(self, stage: Stage) -> FloatArray:
        """Return the bytes of a stage that are stored from the backward pass (B) until the weight gradients (W).

        ZB-2p defers W for as many micro-batches as fit in the memory of 2p micro-batches.
        """
        count = stage.deferred
        if not count.any():
            return count
        if self.train.options.schedule == "zb-2p":
            count = np.minimum(count, (2.0 * stage.index + 1.0) / self.train.weight_share)
        row = self.rows(stage.numbers)[-1]
        products = [value for module in row for name, value in module.tensors.items() if name in PRODUCTS]
        return count * stage.layers * (2.0 * sum(products, np.zeros(())))


def offloaded_bytes(train: Training, layout: Layout, stage: Stage) -> FloatArray:
    """Return the bytes that a stage copies to the host for each micro-batch, and later back."""
    kinds = Kinds.from_layout(train, layout)
    on_stage, unsaved = kinds.on(stage), kinds.layers(stage.numbers)
    here, whole = (_sum(stage.of_groups(len(each)), each) for each in (on_stage, unsaved))
    return whole - here + (1.0 - _kept(train, stage)) * here


def _sum(numbers: Sequence[FloatArray], layers: Sequence[Layer]) -> FloatArray:
    """Return the bytes that these numbers of the layers of each group store."""
    return reduce(add, (number * each.stored for number, each in zip(numbers, layers, strict=True)))


def _kept(train: Training, stage: Stage) -> FloatArray:
    """Return the share of a stage's layers that are on the device. The last layer is needed again at once."""
    away = np.minimum(float(train.options.offload_layers), np.maximum(stage.layers - 1.0, 0.0))
    return 1.0 - away / np.maximum(stage.layers, 1.0)


class StageActivations(NamedTuple):
    """The activations of a stage at the memory peak of forward and backward.

    `whole` are the numbers of layers of each group that store all their tensors. `inputs`: bytes of the inputs of
    recomputed layers. `stored`: bytes of all micro-batches in flight. `above`: bytes at the peak beyond `stored`.
    """

    whole: Sequence[FloatArray]
    inputs: FloatArray
    stored: FloatArray
    above: FloatArray


def stage_activations(stage: Stage, kinds: Kinds) -> StageActivations:
    """Return the number of fully stored layers of a stage, and the bytes of its activations.

    Full recompute stores the input of each recomputed layer or chunk of layers. While one chunk is recomputed, all of
    its tensors are stored (arXiv 2205.05198, section 5). Uniform recompute applies to all layers, block recompute to
    the first layers of each virtual stage.

    If virtual stages have different numbers of layers, leading dense layers and recomputed chunks are computed as on
    equal virtual stages. More layers on a stage never need less memory.
    """
    train, layout, sizes = kinds.train, kinds.layout, kinds.sizes
    in_flight_ratio = kinds.in_flight(stage) / stage.in_flight
    if train.model.moe_first_dense_layers:
        stage = replace(stage, leading=np.minimum(stage.leading * in_flight_ratio, stage.layers))
    work = _Work.from_stage(stage, kinds)
    full = (layout.uniform > 0) | (work.block > 0)
    whole, inputs = work.split(work.block)
    above = work.plain
    if np.any(full):
        several, chunks = layout.uniform > 1, np.ceil(stage.chunk / np.maximum(layout.uniform, 1.0)) * layout.virtual
        whole = [np.where(several, 0.0, each) for each in whole]
        inputs = np.where(several, chunks * in_flight_ratio * work.input, inputs)
        least = np.where(several, work.in_chunks(inputs), work.in_blocks())
        above = np.where(full, least - stage.in_flight * work.bytes(whole, inputs), above)
    whole = [each * _kept(train, stage) for each in whole]
    one = work.bytes(whole, inputs)
    at_entry = stage.first * (kinds.entry.work - one / layout.virtual)
    above = np.maximum(np.where(stage.layers > 0, above, 0.0), at_entry)
    loop, loop_at_loss = _schedule_tensors(layout, stage)
    loop_at_loss = loop_at_loss + (loop_at_loss + 2.0) * depths_received(train.model, stage)
    above, ends = above + loop * sizes.between, kinds.ends(stage)
    at_loss = np.maximum(ends.above(np.zeros(())) + loop_at_loss * sizes.between, above - ends.stored)
    count = stage.last
    if np.any(_early(stage)):
        at_mtp = np.maximum(ends.above(np.zeros(())) + loop * sizes.between, above - ends.stored)
        above, count = np.where(_early(stage), at_mtp, above), count + kinds.early_in_flight(stage)
    above = np.where(stage.last > 0, at_loss, above)
    end_bytes = ends.stored * count + kinds.entry.stored * stage.first * stage.in_flight + kinds.waiting(stage)
    return StageActivations(whole, inputs, one * stage.in_flight + end_bytes, above)


class _Work(NamedTuple):
    """The mean layer of each group of a stage, and the bytes that they need with full recompute.

    `plain` is the peak of the backward pass of fully stored layers above the stored bytes. `input` is the bytes that
    each recomputed layer stores.
    """

    layout: Layout
    stage: Stage
    layers: tuple[Layer, ...]
    chunk: FloatArray
    block: FloatArray
    input: FloatArray
    hidden: FloatArray
    plain: FloatArray

    @classmethod
    def from_stage(cls, stage: Stage, kinds: Kinds) -> _Work:
        """Return the layers of a stage with their recompute.

        Uniform recompute in chunks of one layer is treated as one block of all layers.
        """
        layers, layout, hidden = kinds.on(stage), kinds.layout, kinds.sizes.between
        chunk = np.maximum(stage.chunk, 1.0)
        block = np.where(layout.uniform > 0, 0.0, layout.block)
        block = np.where(layout.uniform == 1, chunk, np.minimum(block, chunk))
        least = reduce(np.minimum, [each.stored for each in layers], hidden) if kinds.offloaded else hidden
        plain = _backward(layout, stage, layers, block, kinds.crossed(stage))
        return cls(layout, stage, layers, chunk, block, least, hidden, plain)

    def split(self, block: FloatArray) -> tuple[Sequence[FloatArray], FloatArray]:
        """Return the numbers of fully stored layers of each group, and the bytes of the other layers' inputs."""
        whole = _whole(self.layout, self.stage, block, len(self.layers))
        return whole, (self.stage.layers - sum(whole)) * self.input

    def bytes(self, whole: Sequence[FloatArray], inputs: FloatArray) -> FloatArray:
        return _sum(whole, self.layers) + inputs

    def again(self, number: FloatArray) -> FloatArray:
        """Return the bytes of `number` layers while they are recomputed, for the group of layers that needs more."""
        pairs = zip(self.stage.of_groups(len(self.layers)), self.layers, strict=True)
        needs = [np.where(count > 0, number * each.stored + each.above(number), 0.0) for count, each in pairs]
        return reduce(np.maximum, needs)

    def in_chunks(self, inputs: FloatArray) -> FloatArray:
        """Return the peak with uniform recompute, including stored bytes. It is at most the peak without recompute."""
        peak = self.stage.in_flight * inputs + self.again(np.minimum(np.maximum(self.layout.uniform, 1.0), self.chunk))
        return np.minimum(peak, self._without())

    def in_blocks(self) -> FloatArray:
        """Return the peak with block recompute, including stored bytes.

        The result is at most the peak with a smaller block. The peak is in the last recomputed layer, after the inputs
        of the layers before it, or in the last layer of the stage, after the output of the recomputed ones. With one
        micro-batch in flight, the former grows by an input per layer, as in Megatron. Both are piecewise linear in the
        size of the block, so the minimum over smaller blocks is where they are equal, where the kind of layer changes,
        at 0, or at the block itself.
        """
        repeated, virtual = self.again(np.ones_like(self.chunk)), self.layout.virtual
        backward_peak = self.plain + self.hidden * (self.stage.last == 0)
        none = np.zeros(())

        def peak(block: FloatArray) -> FloatArray:
            whole, inputs = self.split(block)
            later = self.bytes(whole, none) / virtual
            above = np.maximum(np.where(self.chunk > block, backward_peak, 0.0), repeated - later)
            return self.stage.in_flight * self.bytes(whole, inputs) + above

        leading, others, *first, last = self.stage.leading / virtual, self.stage.later / virtual, *self.layers
        equal_depth = leading + others - (repeated - backward_peak) / np.maximum(last.stored, 1.0)
        depths = [np.maximum(equal_depth, leading)]
        for each in first:
            short_bytes = repeated - backward_peak - others * last.stored
            depths += [leading, leading - short_bytes / np.maximum(each.stored, 1.0)]
        least_peak = np.minimum(peak(self.block), self._without())
        for depth in depths:
            least_peak = np.minimum(least_peak, peak(np.clip(depth, 0.0, np.minimum(self.block, self.chunk - 1.0))))
        return least_peak

    def _without(self) -> FloatArray:
        return self.stage.in_flight * _sum(self.stage.of_groups(len(self.layers)), self.layers) + self.plain


def _early(stage: Stage) -> BoolArray:
    """Return a mask of the candidates with multi-token prediction, but not the loss, on this stage."""
    is_early: BoolArray = (stage.mtp > 0) & (stage.last == 0)
    return is_early


def _whole(layout: Layout, stage: Stage, block: FloatArray, count: int) -> Sequence[FloatArray]:
    """Return the numbers of layers of each of `count` groups that block recompute does not recompute.

    `block` is the number of recomputed layers at the start of each virtual stage.
    """
    recomputed, whole = np.minimum(block * layout.virtual, stage.layers), []
    for number in stage.of_groups(count):
        first = np.minimum(recomputed, number)
        whole.append(number - first)
        recomputed = recomputed - first
    return whole


def _backward(
    layout: Layout, stage: Stage, layers: Sequence[Layer], block: FloatArray, crossed: BoolArray
) -> FloatArray:
    """Return the peak of the backward pass of a stage's fully stored layers, in bytes above their stored bytes.

    Backward begins with the last layer. When it reaches the leading dense layers, the later layers have been freed. If
    a forward pass overlaps, it has allocated the freed bytes again by then.
    """
    whole = _whole(layout, stage, block, len(layers))
    *first, last = (each.above(number * stage.in_flight, crossed) for number, each in zip(whole, layers, strict=True))
    for peak in first:
        freed_bytes = np.minimum(stage.later / layout.virtual, np.maximum(stage.chunk, 1.0)) * layers[1].stored
        if layers[0].crossing is not None:
            freed_bytes = np.where(crossed & (stage.leading > 0), 0.0, freed_bytes)
        last = np.where(stage.later > 0, last, peak)
        last = np.where(stage.leading > 0, np.maximum(last, peak - freed_bytes), last)
    return last


def activation_parts(stage: Stage, kinds: Kinds, activations: StageActivations) -> Parts:
    """Return the stored bytes of a stage's micro-batches, by component."""
    parts: Parts = {}
    for number, layer in zip(activations.whole, kinds.on(stage), strict=True):
        add_parts(parts, layer.parts, number * stage.in_flight)
    add_parts(parts, {"norms": activations.inputs}, stage.in_flight)
    add_parts(parts, kinds.ends(stage).parts, stage.last + kinds.early_in_flight(stage))
    for name, value in kinds.entry.tensors.items():
        add_parts(parts, {ENTRY[name]: value}, stage.first * stage.in_flight)
    return {**parts, "deferred_weight_gradients": kinds.waiting(stage)}


def _schedule_tensors(layout: Layout, stage: Stage) -> tuple[FloatArray, FloatArray]:
    """Return the number of tensors sent between stages that the pipeline's loop still references.

    There are two numbers: during a layer's backward, and at the loss. With 1F1B the tensors are the last sent gradient
    and, until a new graph replaces the old one, the last stage's previous input. With interleaved 1F1B there are about
    as many for each virtual stage, with an error of at most two. Counted in megatron-core 0.16
    (`pipeline_parallel/schedules.py`).
    """
    end = layout.pipeline - 1.0
    steady = (stage.index > 0) & (layout.microbatches > end - stage.index + 1.0)
    several, last = layout.virtual > 1, (stage.index == end) & (end > 0)
    filled = np.minimum(np.minimum(2.0 * layout.virtual, 6.0) - 1.0 + 2.0 * (stage.index > 0), 7.0)
    inner = np.where(last, 4.0, filled * (layout.microbatches > layout.pipeline))
    return np.where(several, inner, steady), np.where(several, 4.0 * last, 2.0 * steady)
