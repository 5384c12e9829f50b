"""Bytes that the modules of a layer store for one micro-batch, with the effects of selective recompute and offload.

More recompute or offload never increases the predicted memory: what it adds to the peak is limited to the bytes that
the other layers in flight save. In Megatron it may increase: with one layer in flight, recompute holds a module's
output and its recomputed tensors.

Autograd stores the input of a linear layer only for the gradient of its weight, so a frozen layer without an adapter
stores none, and one with an adapter stores it for the first matrix (transformer-engine 2.9 to 2.20 `module/linear.py`,
`backward_needs_input`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from flagcore_models.layers import attention_of, experts_of
from flagcore_models.mixers.latent_attention import LatentAttention

from flagcore.domain.model import Part
from flagcore.domain.space import BoolArray, FloatArray
from flagcore_training.adapters import beside_of, has_adapter
from flagcore_training.layout import Layout, Training
from flagcore_training.weights import Parts, add_parts


class ExtraBytes(NamedTuple):
    """Bytes that recompute or offload adds to a module's peak.

    The bytes are limited to `saved_per_layer` times the number of other layers in flight.
    """

    bytes: FloatArray
    saved_per_layer: FloatArray


@dataclass(frozen=True, slots=True)
class Module:
    """Bytes that one module needs for one micro-batch.

    `tensors` are the bytes stored for the backward pass, by name. `work` is the peak of this module's forward or
    backward, above the bytes that it and the modules before it store. `extras` are added to the peak by recompute and
    offload.
    """

    component: str
    tensors: Mapping[str, FloatArray]
    work: FloatArray
    extras: tuple[ExtraBytes, ...] = ()

    @property
    def stored(self) -> FloatArray:
        return sum(self.tensors.values(), np.zeros(()))

    def shared(self, share: FloatArray) -> Module:
        """Return the mean of this module over layers of which `share` have it. Its peak is that of these layers."""
        tensors = {name: value * share for name, value in self.tensors.items()}
        return Module(self.component, tensors, self.work * (share > 0.0), self.extras)

    def only(self, rows: BoolArray) -> Module:
        """Return this module with zero bytes for the candidates for which `rows` is false."""
        tensors = {name: value * rows for name, value in self.tensors.items()}
        return Module(self.component, tensors, self.work * rows, self.extras)


def stored(modules: Sequence[Module]) -> FloatArray:
    """Return the total bytes that `modules` store."""
    return sum((module.stored for module in modules), np.zeros(()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the common tensors of one micro-batch.

    `hidden` is the bytes of a layer's output on one rank, `between` those of the tensor between two layers, with all
    residual streams, `whole` those of an output for all tokens of the tensor-parallel group. `gathered` and `scattered`
    are copies of outputs in backward under sequence parallelism.

    Bytes per element: `unit` of an activation, `linear` of a linear layer's saved input, `weight` of the temporary
    gradient of a weight (0 if the kernel accumulates it). Numbers of tokens: `tokens` of the tensor-parallel group,
    `rows` of one rank outside the tensor-parallel layers, and `local`, which is `tokens` divided by the tensor-parallel
    size.
    """

    unit: float
    linear: float
    weight: float
    tokens: FloatArray
    rows: FloatArray
    local: FloatArray
    hidden: FloatArray
    between: FloatArray
    whole: FloatArray
    gathered: FloatArray
    scattered: FloatArray

    @classmethod
    def from_layout(cls, train: Training, layout: Layout) -> Sizes:
        unit, h = float(train.value_bytes), float(train.model.hidden_size)
        tokens, rows = layout.tokens(train.sequence), layout.token_rows(train.sequence)
        is_split = layout.sequence_parallel * (layout.tensor > 1)
        return cls(
            unit=unit,
            linear=LINEAR_BYTES.get(train.precision, unit),
            weight=0.0 if train.transformer_engine or train.options.adapter else unit,
            tokens=tokens,
            rows=rows,
            local=tokens / layout.tensor,
            hidden=unit * h * rows,
            between=train.model.residual_streams * (unit * h * rows),
            whole=unit * h * tokens,
            gathered=is_split * unit * h * tokens,
            scattered=is_split * unit * h * rows,
        )


LINEAR_BYTES = {"fp8": 1.0, "mxfp8": 1.0 + 1 / 32, "nvfp4": 0.5 + 1 / 16, "mxfp4": 0.5 + 1 / 32}
"""Bytes per element of a linear layer's saved input: 8 or 4 bits, and the scale of a block of 32 or 16 elements.

The values follow from the definitions of the number formats."""


EXPERT_TENSORS = ("routing", "shared_first", "shared_act", "expert_fc1", "moe_first", "moe_act")
"""Names of the tensors that a mixture of experts stores in addition to its input."""

OFFLOADED = {
    "attn_norm": ("attn_norm",),
    "qkv_linear": ("qkv_linear", "latent"),
    "core_attn": ("qkv",),
    "attn_proj": ("context", "attn_proj"),
    "mlp_norm": ("mlp_norm",),
    "expert_fc1": ("expert_fc1",),
    "moe_act": ("moe_first",),
    "fused_group_mlp": ("expert_fc1", "moe_first", "moe_act"),
}
"""The tensors that are sent to the host if a module is offloaded: the module's inputs."""


class RecomputedTensors(NamedTuple):
    """Tensors that are recomputed together instead of stored, by name.

    `enabled` is 1 for candidates that recompute them. The tensors are allocated again when backward reaches the last
    module that would store one of them, or the later component `restored_at`. `copies` of each tensor are held until
    the backward of its module is done; `output` is held until the backward of all modules is done. `copies` and
    `output` are ignored if `nested` is 1: then a larger part of the layer, which contains these modules, is recomputed.
    """

    names: Collection[str]
    enabled: FloatArray
    restored_at: str = ""
    copies: float = 1.0
    output: FloatArray | None = None
    nested: FloatArray | float = 0.0


def recomputed_tensors(train: Training, sizes: Sizes, modules: Mapping[str, FloatArray]) -> list[RecomputedTensors]:
    """Return the tensors that selective recompute of `modules` does not store.

    The values of `modules` are 1 for candidates that recompute the module. A module that is recomputed as a whole also
    stores its output until its backward is done. If only the output of a module is recomputed, two copies of it are
    stored (megatron-core 0.16 `tensor_parallel/random.py`). Norms are recomputed when backward reaches the next block.
    Transformer-engine's layers that fuse norm and projection never store the norm's output.
    """
    attention, experts, hidden = attention_of(train.model), experts_of(train.model), sizes.hidden
    context = sizes.unit * sizes.local * attention.attended
    separate = not train.transformer_engine
    stores_norm = {
        "qkv_linear": separate or isinstance(attention, LatentAttention),
        "mlp_input": separate or experts is not None,
    }
    block, moe = "ffn" if experts is None else "experts", modules.get("moe", 0.0)

    def of_module(name: str, mask: FloatArray) -> list[RecomputedTensors]:
        if name == "layernorm":
            pairs = (("qkv_linear", "out_proj"), ("mlp_input", block))
            return [
                RecomputedTensors((tensor,), mask, component, copies=2.0)
                for tensor, component in pairs
                if stores_norm[tensor]
            ]
        by_module = {
            "moe": RecomputedTensors(EXPERT_TENSORS, mask, output=hidden),
            "mlp": RecomputedTensors(("mlp_first", "mlp_act"), mask, output=hidden),
            "core_attn": RecomputedTensors(("scores",), mask, output=context),
            "mla_up_proj": RecomputedTensors(("qkv",), mask, copies=2.0),
            "moe_act": RecomputedTensors(("moe_act",), mask, copies=2.0, nested=moe),
            "shared_experts": RecomputedTensors(("shared_first", "shared_act"), mask, output=hidden, nested=moe),
        }
        return [by_module[name]]

    order = ("mlp", "core_attn", "mla_up_proj", "layernorm", "moe_act", "shared_experts", "moe")
    return [group for name in order if name in modules for group in of_module(name, modules[name])]


def saving(
    row: Sequence[Module],
    recomputed: Sequence[RecomputedTensors],
    offloaded: Collection[str],
    on_host: FloatArray | float,
) -> list[Module]:
    """Return a layer's modules without the tensors that are recomputed or, where `on_host` is 1, `offloaded`.

    `row`: the modules of the layer.

    If several groups in `recomputed` contain the same tensor, the first group applies. Recomputed tensors are not
    offloaded. During backward, the offloaded tensors of one layer are on the device, because each tensor that is no
    longer needed is replaced by the same tensor of the previous layer (megatron-core 0.16
    `fine_grained_activation_offload.py`).
    """
    remaining = [dict(module.tensors) for module in row]
    work = [module.work for module in row]
    extras: list[list[ExtraBytes]] = [[] for _ in row]
    for group in recomputed:
        owners = [index for index, tensors in enumerate(remaining) if any(name in tensors for name in group.names)]
        if not owners:
            continue
        restorers = [index for index, module in enumerate(row) if module.component == group.restored_at]
        restored, extra_copies, saved = np.zeros(()), np.zeros(()), np.zeros(())
        needs: list[tuple[int, FloatArray]] = []
        for index in range(owners[0], max(owners + restorers) + 1):
            for name in group.names:
                if name in remaining[index]:
                    recomputed_bytes = group.enabled * remaining[index][name]
                    on_device = recomputed_bytes * (1.0 - on_host) if name in offloaded else recomputed_bytes
                    restored, saved = restored + recomputed_bytes, saved + on_device
                    extra_copies = extra_copies + (group.copies - 1.0) * on_device
                    remaining[index][name] = remaining[index][name] - recomputed_bytes
            work[index] = work[index] + restored
            needs.append((index, extra_copies if group.output is None else extra_copies + group.output * group.enabled))
        if group.copies > 1.0 or group.output is not None:
            for index, amount in needs:
                extras[index].append(ExtraBytes(amount * (1.0 - group.nested), saved))
    if offloaded:
        _offload(remaining, work, extras, offloaded, on_host)
    rows = zip(row, remaining, work, extras, strict=True)
    return [replace(module, tensors=tensors, work=need, extras=tuple(extra)) for module, tensors, need, extra in rows]


def _offload(
    remaining: list[dict[str, FloatArray]],
    work: list[FloatArray],
    extras: list[list[ExtraBytes]],
    offloaded: Collection[str],
    on_host: FloatArray | float,
) -> None:
    """Remove offloaded tensors from the modules' stored tensors in place, and add their bytes to the peaks."""
    offloaded_bytes = []
    for tensors in remaining:
        names = [name for name in tensors if name in offloaded]
        offloaded_bytes.append(sum((on_host * tensors[name] for name in names), np.zeros(())))
        tensors.update({name: tensors[name] * (1.0 - on_host) for name in names})
    total, offloaded_before = sum(offloaded_bytes, np.zeros(())), np.zeros(())
    for index, module_bytes in enumerate(offloaded_bytes):
        offloaded_before = offloaded_before + module_bytes
        work[index] = work[index] + offloaded_before
        if index + 1 < len(offloaded_bytes):
            extras[index].append(ExtraBytes(total - offloaded_before, total - offloaded_before))


@dataclass(frozen=True, slots=True)
class Moments:
    """Peaks of a layer above its stored bytes: one per module with recompute or offload, and one for the rest."""

    without_savings: FloatArray
    saving: tuple[tuple[FloatArray, tuple[ExtraBytes, ...]], ...]

    @classmethod
    def from_modules(cls, row: Sequence[Module], offset: FloatArray | float = 0.0, split: int = 0) -> Moments:
        """Return the peaks of a layer that consists of the modules `row`, plus `offset` bytes.

        The peaks of the first `split` modules do not depend on the later modules.
        """
        without_savings, later_bytes, saving = np.zeros(()), np.zeros(()), []
        for index, module in reversed(list(enumerate(row))):
            if index == split - 1:
                later_bytes = np.zeros(())
            peak = module.work - later_bytes + offset
            later_bytes = later_bytes + module.stored
            if module.extras:
                saving.append((peak, module.extras))
            else:
                without_savings = np.maximum(without_savings, peak)
        return cls(without_savings, tuple(saving))

    def worst(self, layers: FloatArray) -> FloatArray:
        peak, other_layers = self.without_savings, np.maximum(layers - 1.0, 0.0)
        for above, extras in self.saving:
            extra_bytes = sum(np.minimum(extra.bytes, other_layers * extra.saved_per_layer) for extra in extras)
            peak = np.maximum(peak, above + extra_bytes)
        return peak


class Layer(NamedTuple):
    """Bytes of one layer for one micro-batch: the stored bytes, and the peaks above them.

    `crossing` are the peaks while another micro-batch's forward overlaps this layer's backward. It is None without such
    an overlap.
    """

    parts: Parts
    stored: FloatArray
    moments: Moments
    crossing: Moments | None = None

    @classmethod
    def from_modules(cls, row: Sequence[Module], front: int = 0) -> Layer:
        """Return the bytes of a layer from its modules.

        With `front`, its backward may overlap another micro-batch's forward.

        Both then run module by module (megatron-core 0.16 `model_chunk_schedule_plan.py`). The forward of the first
        `front` modules (attention and router) precedes the backward of the experts, and the forward of the experts
        precedes the backward of attention.
        """
        parts: Parts = {}
        for module in row:
            add_parts(parts, {module.component: module.stored})
        crossing = Moments.from_modules(row, stored(row[:front]), front) if front else None
        return cls(parts, stored(row), Moments.from_modules(row), crossing)

    def above(self, layers: FloatArray, is_overlapped: BoolArray | bool = False) -> FloatArray:
        peak = self.moments.worst(layers)
        if self.crossing is None:
            return peak
        return np.where(is_overlapped, self.crossing.worst(layers), peak)


DORA_STORED, PEFT_STORED, DORA_COPIES = 1.0, 2.0, 3.0
"""Outputs that DoRA stores for the gradient of its magnitude (Megatron-Bridge @067f987d `peft/dora_layers.py`), those
that PEFT and NeMo AutoModel store (PEFT @0a6cd5a4 `tuners/lora/dora.py`: of the layer and of the adapter), and copies
of a matrix while it computes its norm."""
INPUTS: Mapping[str, Sequence[str]] = {
    "qkv_linear": ("q_proj", "k_proj", "v_proj"),
    "mixer_linear": ("in_proj",),
    "mlp_input": ("gate_proj", "up_proj"),
    "mlp_act": ("down_proj",),
    "shared_act": ("down_proj",),
    "expert_fc1": ("gate_proj", "up_proj"),
    "moe_act": ("down_proj",),
}
"""The targets that need a stored input of linear layers, by its name (`memory`). The router also needs its input, and
the attention core its output."""


def frozen(train: Training, layout: Layout, sizes: Sizes, modules: Sequence[Module], part: Part) -> list[Module]:
    """Return the modules of a part of a layer, of which adapters and not weights are trained.

    An adapter of a joint projection stores its input as gathered over the tensor-parallel ranks, the output of its
    first matrix, and with DoRA the outputs. Workspaces have the matrix that is converted, or whose norm is computed.
    """
    adapter = train.options.adapter
    if adapter is None:
        return list(modules)
    products = part.products(train.model.hidden_size)
    gathers = sizes.tokens / sizes.rows if train.options.joint_adapters else 1.0
    result = []
    for each in modules:
        tensors, work, tokens, split = dict(each.tensors), each.work, sizes.tokens, layout.tensor
        if each.component == "experts":
            width = next(product.inputs for product in products if product.component == each.component)
            tokens, split = tensors["expert_fc1"] / (sizes.linear * width), layout.expert_tensor
        for name in tensors.keys() & INPUTS.keys() if each.component != "router" else ():
            is_whole = name in ("qkv_linear", "mixer_linear", "mlp_input")
            tensors[name] = tensors[name] * has_adapter(adapter, *INPUTS[name]) * (gathers if is_whole else 1.0)
        for product in products:
            if product.component != each.component or not product.adapts:
                continue
            found = beside_of(train, product)
            outputs = sum(width for _rank, width in found) / split * (adapter.kind == "dora")
            stored = sum(rank for rank, _width in found) + DORA_STORED * outputs
            tensors["adapters"] = tensors.get("adapters", 0.0) + sizes.unit * tokens * stored
            copies = 1.0 * bool(adapter.base) + DORA_COPIES * (adapter.kind == "dora")
            work = np.maximum(work, each.work + copies * sizes.unit * product.inputs * product.outputs / split)
        result.append(replace(each, tensors=tensors, work=work))
    return result
