"""What a pipeline stage holds of its micro-batches: layers, recompute, offload and the edges put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flagcore.domain.space import BoolArray, FloatArray
from flagcore.physics.layout import Layout, Training
from flagcore.physics.memory.activations import attention, ffn
from flagcore.physics.memory.edges import depths, embedding, head
from flagcore.physics.memory.experts import mixture
from flagcore.physics.memory.modules import Dropped, Module, Sizes, kept, sent_away, without, worst
from flagcore.physics.pipeline import Stage, block_layers
from flagcore.physics.transformer import Parts, add_parts, attended

EXPERTS = ("routing", "shared_first", "shared_act", "expert_fc1", "moe_first", "moe_act")
"""What a mixture of experts keeps besides its input."""

OFFLOADED = {
    "attn_norm": ("attn_norm",),
    "qkv_linear": ("qkv_linear", "latent"),
    "core_attn": ("qkv",),
    "attn_proj": ("context", "attn_proj"),
    "mlp_norm": ("mlp_norm",),
    "expert_fc1": ("expert_fc1",),
    "moe_act": ("moe_first",),
}
"""What offload of a module sends to the host: its inputs."""

PRODUCTS = ("qkv_linear", "latent", "context", "mlp_input", "mlp_act", "shared_act", "expert_fc1", "moe_act")
"""Inputs of linear layers: what the gradients of weights need."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of one kind, bytes of one micro-batch: what it keeps, and how far its worst moment lies above that."""

    parts: Parts
    kept: FloatArray
    above: FloatArray

    @classmethod
    def of(cls, row: Sequence[Module]) -> Layer:
        """Add up a row of modules."""
        parts: Parts = {}
        for module in row:
            add_parts(parts, {module.component: module.kept})
        return cls(parts, kept(row), worst(row))

    def where(self, condition: BoolArray, other: Layer) -> Layer:
        """Return this layer where the condition holds, and the other elsewhere."""
        parts = {name: np.where(condition, value, other.parts[name]) for name, value in self.parts.items()}
        return Layer(parts, np.where(condition, self.kept, other.kept), np.where(condition, self.above, other.above))


@dataclass(frozen=True, slots=True)
class Kinds:
    """What the stages of each candidate are made of. `offloaded` are the layers of stages whose activations go to the
    host; `deferred` is what a layer holds of a micro-batch whose weights' gradients alone are left to compute.
    """

    sizes: Sizes
    dense: Layer
    moe: Layer
    offloaded: tuple[Layer, Layer] | None
    entry: Module
    exit: Layer
    deferred: FloatArray

    @classmethod
    def of(cls, train: Training, layout: Layout) -> Kinds:
        """Return the kinds of layers; without experts both are the same."""
        sizes = Sizes.of(train, layout)
        heads = attention(train, layout, sizes)
        rows = [[*heads, *ffn(train, layout, sizes)]]
        if train.model.num_moe_experts is not None:
            rows.append([*heads, *mixture(train, layout, sizes)])
        dropped, offloaded = _dropped(train, layout, sizes), None
        layers = [_selected(layout, row, dropped) for row in rows]
        if train.options.offload_modules:
            away = {name for module in train.options.offload_modules for name in OFFLOADED.get(module, ())}
            spared = [_selected(layout, sent_away(row, away), dropped) for row in rows]
            offloaded = (spared[0], spared[-1])
        last = layers[-1]
        ends = [*depths(train, layout, sizes, last.kept, last.above), *head(train, layout, sizes)]
        products = [value for module in rows[-1] for name, value in module.tensors.items() if name in PRODUCTS]
        return cls(
            sizes=sizes,
            dense=layers[0],
            moe=last,
            offloaded=offloaded,
            entry=embedding(train, layout, sizes),
            exit=Layer.of(ends),
            deferred=2.0 * sum(products, np.zeros(())),
        )

    def on(self, train: Training, stage: Stage) -> tuple[Layer, Layer]:
        """Return the layers of a stage without and with experts; without named stages all offload."""
        if self.offloaded is None:
            return self.dense, self.moe
        named = train.options.offload_stages
        here = np.isin(stage.index, named) if named else np.ones(stage.index.shape, dtype=bool)
        return self.offloaded[0].where(here, self.dense), self.offloaded[1].where(here, self.moe)


def offloaded_bytes(train: Training, layout: Layout, stage: Stage) -> FloatArray:
    """Return the bytes that a stage sends to the host for each micro-batch, and fetches back."""
    kinds = Kinds.of(train, layout)
    dense, moe = kinds.on(train, stage)
    return stage.dense * (kinds.dense.kept - dense.kept) + stage.moe * (kinds.moe.kept - moe.kept)


@dataclass(frozen=True, slots=True)
class Held:
    """A stage at its worst moment of forward and backward.

    Numbers of layers that keep all their tensors, without and with experts, and of inputs of recomputed ones; bytes
    that all held micro-batches keep, and that are allocated above.
    """

    dense: FloatArray
    moe: FloatArray
    inputs: FloatArray
    kept: FloatArray
    above: FloatArray


def held(train: Training, layout: Layout, stage: Stage, kinds: Kinds) -> Held:
    """Return what a stage holds.

    Full recompute keeps the input of each recomputed layer or chunk of layers and, while one chunk is recomputed,
    all of that chunk (arXiv 2205.05198, section 5). Uniform recompute does so with all layers, block recompute
    with the first layers of each virtual stage.
    """
    dense, moe = kinds.on(train, stage)
    hidden, chunk, uniform = kinds.sizes.hidden, np.maximum(stage.chunk, 1.0), layout.uniform > 0
    block = np.where(uniform, 0.0, block_layers(layout, stage.index, train.options))
    again = np.where(uniform, stage.layers, np.minimum(block * layout.virtual, stage.layers))
    again_dense = np.minimum(again, stage.dense)
    plain_dense, plain_moe = stage.dense - again_dense, stage.moe - (again - again_dense)
    chunks = np.ceil(stage.chunk / np.maximum(layout.uniform, 1.0)) * layout.virtual
    inputs = np.where(uniform, chunks, again)
    one = plain_dense * dense.kept + plain_moe * moe.kept + inputs * hidden

    routed = stage.moe > 0
    last_kept, last_above = np.where(routed, moe.kept, dense.kept), np.where(routed, moe.above, dense.above)
    plain = np.maximum(last_above, dense.above - np.minimum(stage.moe / layout.virtual, chunk) * moe.kept)
    # Beside the recomputed layers' tensors lies their output; their first input is the one that was kept.
    repeated = np.minimum(np.where(uniform, layout.uniform, 1.0), chunk) * last_kept + last_above
    later = np.maximum(chunk - block, 0.0) * last_kept
    beside = np.where(later > 0, plain + hidden * (stage.last == 0), 0.0)
    above = np.where(uniform, repeated, np.where(block > 0, np.maximum(beside, repeated - later), plain))
    above = np.maximum(above, stage.first * (kinds.entry.work - one / layout.virtual))
    loop, loop_at_loss = _held_by_the_loop(layout, stage)
    above = above + loop * hidden
    at_loss = np.maximum(kinds.exit.above + loop_at_loss * hidden, above - kinds.exit.kept)
    above = np.where(stage.last > 0, at_loss, above)
    waiting = stage.deferred * stage.layers * kinds.deferred
    ends = kinds.exit.kept * stage.last + kinds.entry.kept * stage.first * stage.in_flight + waiting
    return Held(plain_dense, plain_moe, inputs, one * stage.in_flight + ends, above)


def held_parts(train: Training, layout: Layout, stage: Stage, kinds: Kinds, found: Held) -> Parts:
    """Return what the micro-batches that a stage holds keep, by component."""
    dense, moe = kinds.on(train, stage)
    parts: Parts = {}
    add_parts(parts, dense.parts, found.dense * stage.in_flight)
    add_parts(parts, moe.parts, found.moe * stage.in_flight)
    add_parts(parts, {"norms": kinds.sizes.hidden}, found.inputs * stage.in_flight)
    add_parts(parts, kinds.exit.parts, stage.last)
    add_parts(parts, {"embedding": kinds.entry.kept}, stage.first * stage.in_flight)
    waiting = stage.deferred * stage.layers * kinds.deferred
    return {**parts, "deferred_weight_gradients": waiting}


def _dropped(train: Training, layout: Layout, sizes: Sizes) -> list[Dropped]:
    """Return what selective recompute drops; `moe_fc1` and `router` are not among Megatron's own modules.

    A module that is recomputed as a whole has its output besides, until its backward is done; one whose output alone
    is recomputed has it twice (megatron-core 0.16 `tensor_parallel/random.py`). Norms are recomputed when backward
    reaches the block behind them. In transformer-engine's layers that are a norm and a projection in one, the norm's
    output is not dropped.
    """
    modules, model, hidden = train.options.recompute_modules, train.model, sizes.hidden
    context = sizes.unit * sizes.local * attended(model)
    apart = not train.transformer_engine
    normed = {"qkv_linear": apart or model.multi_latent_attention, "mlp_input": apart or model.num_moe_experts}
    block = "ffn" if model.num_moe_experts is None else "experts"
    known = {
        "moe": [Dropped(EXPERTS, output=hidden)],
        "mlp": [Dropped(("mlp_first", "mlp_act"), output=hidden)],
        "core_attn": [Dropped(("scores",), output=context)],
        "mla_up_proj": [Dropped(("qkv",), copies=2.0)],
        "layernorm": [
            Dropped((name,), at, copies=2.0)
            for name, at in (("qkv_linear", "out_proj"), ("mlp_input", block))
            if normed[name]
        ],
        "moe_act": [Dropped(("moe_act",), copies=2.0)],
        "moe_fc1": [Dropped(("moe_first",))],
        "router": [Dropped(("routing",))],
        "shared_experts": [Dropped(("shared_first", "shared_act"), output=hidden)],
    }
    return [drop for module, drops in known.items() if module in modules for drop in drops]


def _selected(layout: Layout, row: Sequence[Module], dropped: Sequence[Dropped]) -> Layer:
    """Return a layer with selective recompute where candidates ask for it."""
    whole = Layer.of(row)
    return Layer.of(without(row, dropped)).where(layout.selective > 0, whole) if dropped else whole


def _held_by_the_loop(layout: Layout, stage: Stage) -> tuple[FloatArray, FloatArray]:
    """Return how many tensors between stages the pipeline's loop still refers to, in a layer's backward, at the loss.

    1F1B: the gradient that was sent last and, until a new graph replaces the old one, the last stage's previous input.
    Interleaved: the same of each virtual stage, to within two. Counted in megatron-core 0.16
    (`pipeline_parallel/schedules.py`).
    """
    end = layout.pipeline - 1.0
    steady = (stage.index > 0) & (layout.microbatches > end - stage.index + 1.0)
    several, last = layout.virtual > 1, (stage.index == end) & (end > 0)
    filled = np.minimum(np.minimum(2.0 * layout.virtual, 6.0) - 1.0 + 2.0 * (stage.index > 0), 7.0)
    inner = np.where(last, 4.0, filled * (layout.microbatches > layout.pipeline))
    return np.where(several, inner, steady), np.where(several, 4.0 * last, 2.0 * steady)
