"""Selective recompute and offload: the tensors that rows of modules omit, what they need instead, and layers of both.

A set of savings never needs more than a subset of it: a saving adds at most what the other layers in flight store less.
In Megatron it may: with one layer in flight, recompute holds a module's output and what it would have stored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flagcore.domain.space import BoolArray, FloatArray
from flagcore.engines.megatron.memory.modules import Extra, Module, Sizes, stored
from flagcore.engines.megatron.parallel.layout import Training
from flagcore.engines.megatron.parallel.parameters import Parts, add_parts
from flagcore.engines.transformer import attended

EXPERTS = ("routing", "shared_first", "shared_act", "expert_fc1", "moe_first", "moe_act")
"""What a mixture of experts stores in addition to its input."""

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


@dataclass(frozen=True, slots=True)
class Dropped:
    """Tensors that a row does not store, by name, because they are recomputed together, where `on` is 1.

    They come back when backward reaches the last module that had one, or the component `at` behind it. Each stays until
    its own module is done, `copies` times; `output` is also held until all of them are. Neither counts where `within`
    is 1: there a larger part of the layer is recomputed with what is left of it.
    """

    names: Collection[str]
    on: FloatArray
    at: str = ""
    copies: float = 1.0
    output: FloatArray | None = None
    within: FloatArray | float = 0.0

    @property
    def more(self) -> bool:
        """Whether recompute needs more memory than it saves."""
        return self.copies > 1.0 or self.output is not None


def dropped(train: Training, sizes: Sizes, modules: Mapping[str, FloatArray]) -> list[Dropped]:
    """Return the bytes that selective recompute of each of the named modules drops, where it is 1.

    A module that is recomputed as a whole also has its output, until its backward is done; one whose output alone
    is recomputed has it twice (megatron-core 0.16 `tensor_parallel/random.py`). Norms are recomputed when backward
    reaches the block behind them. In transformer-engine's layers that are a norm and a projection in one, the norm's
    output is not dropped.
    """
    model, hidden = train.model, sizes.hidden
    context = sizes.unit * sizes.local * attended(model)
    apart = not train.transformer_engine
    normed = {"qkv_linear": apart or model.multi_latent_attention, "mlp_input": apart or model.num_moe_experts}
    block, moe = "ffn" if model.num_moe_experts is None else "experts", modules.get("moe", 0.0)

    def drops(name: str, on: FloatArray) -> list[Dropped]:
        if name == "layernorm":
            pairs = (("qkv_linear", "out_proj"), ("mlp_input", block))
            return [Dropped((tensor,), on, at, copies=2.0) for tensor, at in pairs if normed[tensor]]
        known = {
            "moe": Dropped(EXPERTS, on, output=hidden),
            "mlp": Dropped(("mlp_first", "mlp_act"), on, output=hidden),
            "core_attn": Dropped(("scores",), on, output=context),
            "mla_up_proj": Dropped(("qkv",), on, copies=2.0),
            "moe_act": Dropped(("moe_act",), on, copies=2.0, within=moe),
            "moe_fc1": Dropped(("moe_first",), on),
            "router": Dropped(("routing",), on),
            "shared_experts": Dropped(("shared_first", "shared_act"), on, output=hidden, within=moe),
        }
        return [known[name]]

    order = ("mlp", "core_attn", "mla_up_proj", "layernorm", "moe_act", "moe_fc1", "router", "shared_experts", "moe")
    return [drop for name in order if name in modules for drop in drops(name, modules[name])]


def saving(
    row: Sequence[Module], drops: Sequence[Dropped], offloaded: Collection[str], on_host: FloatArray | float
) -> list[Module]:
    """Return a row that stores neither what is dropped nor, where `on_host` is 1, the `offloaded` tensors.

    A tensor that several drop belongs to the first; one that is dropped is not sent. Of what is on the host a layer in
    backward has its own, and each tensor that it is done with makes room for that of the layer before, which is fetched
    at the same time: all of one layer's are always on the device (megatron-core 0.16
    `fine_grained_activation_offload.py`).
    """
    left = [dict(module.tensors) for module in row]
    work = [module.work for module in row]
    extras: list[list[Extra]] = [[] for _ in row]
    for drop in drops:
        owners = [place for place, tensors in enumerate(left) if any(name in tensors for name in drop.names)]
        if not owners:
            continue
        behind = [place for place, module in enumerate(row) if module.component == drop.at]
        back, more, spared = np.zeros(()), np.zeros(()), np.zeros(())
        needed: list[tuple[int, FloatArray]] = []
        for place in range(owners[0], max(owners + behind) + 1):
            for name in drop.names:
                if name in left[place]:
                    gone = drop.on * left[place][name]
                    own = gone * (1.0 - on_host) if name in offloaded else gone
                    back, more, spared = back + gone, more + (drop.copies - 1.0) * own, spared + own
                    left[place][name] = left[place][name] - gone
            work[place] = work[place] + back
            needed.append((place, more if drop.output is None else more + drop.output * drop.on))
        if drop.more:
            for place, amount in needed:
                extras[place].append(Extra(amount * (1.0 - drop.within), spared))
    if offloaded:
        _send(left, work, extras, offloaded, on_host)
    rows = zip(row, left, work, extras, strict=True)
    return [replace(module, tensors=tensors, work=need, extras=tuple(extra)) for module, tensors, need, extra in rows]


def _send(
    left: list[dict[str, FloatArray]],
    work: list[FloatArray],
    extras: list[list[Extra]],
    offloaded: Collection[str],
    on_host: FloatArray | float,
) -> None:
    """Take what is on the host out of what modules store, and add it to what they need."""
    sent = []
    for tensors in left:
        names = [name for name in tensors if name in offloaded]
        sent.append(sum((on_host * tensors[name] for name in names), np.zeros(())))
        tensors.update({name: tensors[name] * (1.0 - on_host) for name in names})
    total, done = sum(sent, np.zeros(())), np.zeros(())
    for place, own in enumerate(sent):
        done = done + own
        work[place] = work[place] + done
        if place + 1 < len(sent):
            extras[place].append(Extra(total - done, total - done))


@dataclass(frozen=True, slots=True)
class Moments:
    """Peaks of a layer above its stored bytes: the highest without savings, and one for each saving."""

    plain: FloatArray
    saving: tuple[tuple[FloatArray, tuple[Extra, ...]], ...]

    @classmethod
    def of(cls, row: Sequence[Module], offset: FloatArray | float = 0.0, split: int = 0) -> Moments:
        """Return the moments of a row, higher by `offset`. The first `split` modules do not wait for those behind."""
        plain, behind, saving = np.zeros(()), np.zeros(()), []
        for place, module in reversed(list(enumerate(row))):
            if place == split - 1:
                behind = np.zeros(())
            above = module.work - behind + offset
            behind = behind + module.stored
            if module.extras:
                saving.append((above, module.extras))
            else:
                plain = np.maximum(plain, above)
        return cls(plain, tuple(saving))

    def worst(self, layers: FloatArray) -> FloatArray:
        found = self.plain
        for above, extras in self.saving:
            found = np.maximum(found, above + sum(extra.extra_bytes(layers) for extra in extras))
        return found


@dataclass(frozen=True, slots=True)
class Layer:
    """A row of modules, such as a layer, bytes of one micro-batch: what it stores, and its moments; `crossing`: those
    while a layer of another micro-batch runs forward at the same time as its backward, None where none does.
    """

    parts: Parts
    stored: FloatArray
    moments: Moments
    crossing: Moments | None = None

    @classmethod
    def of(cls, row: Sequence[Module], front: int = 0) -> Layer:
        """Add up a row of modules. With `front`, its backward may overlap another micro-batch's forward.

        Both go module by module (megatron-core 0.16 `model_chunk_schedule_plan.py`): the other layer has run its first
        `front` modules, attention and router, before this one's backward of the rest, the experts, and that rest before
        this one's backward of attention.
        """
        parts: Parts = {}
        for module in row:
            add_parts(parts, {module.component: module.stored})
        crossing = Moments.of(row, stored(row[:front]), front) if front else None
        return cls(parts, stored(row), Moments.of(row), crossing)

    def above(self, layers: FloatArray, crossed: BoolArray | bool = False) -> FloatArray:
        alone = self.moments.worst(layers)
        if self.crossing is None:
            return alone
        return np.where(crossed, self.crossing.worst(layers), alone)
