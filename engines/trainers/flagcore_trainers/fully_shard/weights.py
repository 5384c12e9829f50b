"""The weights of one rank of a program on `fully_shard`: sums over the linear layers of a model's parts.

Each weight is sharded by rows, so its rows are padded to a multiple of the ranks that share it. Tensor parallelism by
DTensor divides the rows or the columns of a weight, also of heads, evenly. Source: torch 2.13
`distributed/fsdp/_fully_shard/_fsdp_param.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
from flagcore_models.layers import (
    around,
    connections,
    embedding_of,
    head_of,
    layer_counts,
    layer_embeddings,
    layers_of,
    mixer_counts,
    product_counts,
    table_products,
    without_repeats,
)
from flagcore_training.adapters import base_bytes, beside, weights_beside
from flagcore_training.frameworks import ADAM, Moments
from flagcore_training.memory.modules import DORA_STORED
from flagcore_training.peft import Peft

from flagcore.domain.model import Layer, Model, Part, Product
from flagcore.domain.space import BoolArray, FloatArray, IntArray
from flagcore.domain.spec import Adapter
from flagcore_trainers.fully_shard import INTERLEAVED, ZBV

Rows: TypeAlias = list[tuple[FloatArray | float, FloatArray | float]]
"""The numbers of rows and of columns of weights."""
Pair: TypeAlias = tuple[FloatArray, FloatArray]
"""Two numbers of weights: of a layer or part without routed experts, and of the routed experts of a rank."""

TILE = (4096.0, 32768.0)
"""The most tokens and entries of the vocabulary of a tile of logits (trl 1.16 `kernels/chunked_logprob.py`)."""
MAIN_BYTES = 4.0
"""Bytes per sharded weight in fp32. A sharded gradient and each of both moments of Adam have the same format."""


@dataclass(frozen=True, kw_only=True)
class MemoryInputs:
    """What the memory of candidates depends on. Arrays have one element per candidate.

    `ranks`: ranks that share each weight, of which `expert` have different experts.
    `replicated`: whether gradients are also summed over replicas.
    `schedule`: the code of the schedule of a pipeline, as in `space`.
    `checkpointing`: 0 none, 1 selective, 2 full. `reduce_bytes`: bytes of a gradient while it is reduced, and
    `main_bytes` of a sharded weight, of its gradient, and of each moment, unless the optimizer has other `moments`, of
    layers and of the embedding. `tower`: the weights of a vision tower.
    `value_bytes`: bytes of an activation. `fused_norm`: whether norms are one kernel.
    `fused_activation`: whether gates are not stored after their activation, as in compiled layers (torch 2.13).
    `compiled_loss`: whether the loss is one kernel per pass, which reads and writes 16-bit logits.
    `loss_parts`: parts of the tokens of which head and loss run one after another, with their backward.
    `tiled_loss`: whether head and loss run on tiles of `TILE` logits at most, which backward computes again in place.
    `host_activations`: what autograd stores on the host until backward: all, or the checkpoints of layers.
    `split_tokens`: whether tensor-parallel ranks divide the tokens between blocks.
    `gradients_wait`: whether the gradients of a layer's weights wait until all are there, to be reduced together.
    `casts`: whether autocast computes with fp32 weights: it keeps its casts of all layers until the loss is computed.
    `autocast`: whether it does without `fully_shard`, also with adapters in fp32. `plain_norm`: whether norms are
    operators of torch, as in transformers.
    `adapter`: the adapters that are trained; the other weights are then frozen, in the format of activations.
    `whole`: whether each rank holds all quantized weights of layers, and of their experts.
    `dora_stored`: outputs that DoRA stores.
    `sends_stay`: whether a send keeps its tensor until the schedule drops it, as Gloo's does. NCCL frees what is sent.
    """

    model: Model
    value_bytes: float
    ranks: FloatArray
    tensor: FloatArray
    context: FloatArray
    tokens: FloatArray
    microbatches: FloatArray
    reshard: BoolArray
    checkpointing: FloatArray
    reduce_bytes: FloatArray
    offload: BoolArray
    replicated: BoolArray
    expert: FloatArray
    pipeline: FloatArray
    schedule: IntArray
    fused_norm: bool = True
    fused_activation: bool = False
    compiled_loss: bool = False
    loss_parts: float = 1.0
    tiled_loss: bool = False
    host_activations: str = ""
    split_tokens: BoolArray | bool = True
    gradients_wait: bool = True
    whole_gradients: bool = False
    casts: BoolArray | bool = False
    autocast: bool = False
    plain_norm: bool = False
    sends_stay: bool = False
    adapter: Adapter | None = None
    dora_stored: float = DORA_STORED
    main_bytes: FloatArray | float = MAIN_BYTES
    moments: tuple[Moments, Moments] | None = None
    tower: float = 0.0
    whole: tuple[bool, bool] = (False, False)

    @property
    def is_wide(self) -> bool:
        """Whether tensors between layers have fp32, as the embedding does under autocast."""
        return self.autocast and self.adapter is None

    @property
    def state_bytes(self) -> FloatArray | float:
        """The bytes of a sharded weight and of its moments."""
        moments = self.moments[0] if self.moments else ADAM
        return self.main_bytes + moments.of(self.main_bytes)

    @property
    def logits(self) -> FloatArray:
        """The number of logits that a tensor-parallel rank has at once."""
        vocabulary = head_of(self.model).logits / self.tensor
        if self.tiled_loss:
            return np.minimum(self.tokens, TILE[0]) * np.minimum(vocabulary, TILE[1])
        return self.tokens * vocabulary / self.loss_parts

    @property
    def cap_bytes(self) -> float:
        """The bytes per logit that autograd keeps of a soft cap. Tiles compute it again."""
        return 0.0 if self.tiled_loss else head_of(self.model).kept(self.value_bytes)

    @cached_property
    def peft(self) -> Peft:
        """What PEFT does with the model."""
        return Peft.of(self.model)

    @property
    def stored_bytes(self) -> tuple[float, float]:
        """The bytes of a weight of a layer between its passes, and of its routed experts."""
        others, experts = (
            base_bytes(self.adapter, self.value_bytes, self.peft, experts=each) for each in (False, True)
        )
        return others, experts

    @property
    def base_bytes(self) -> tuple[float, float]:
        """The same of a gathered weight, which is cast to the type of the products before, if that has fewer bytes."""
        others, experts = (min(each, float(self.value_bytes)) for each in self.stored_bytes)
        return others, experts

    @cached_property
    def units(self) -> Mapping[Layer, Unit]:
        """The units of each distinct layer."""
        return {layer: Unit.of(self, layer) for layer in layer_counts(self.model)}


class Unit(NamedTuple):
    """The padded numbers of weights of a layer without its routed experts, and of a rank's routed experts: all of them,
    and those that are trained.
    """

    weights: FloatArray
    experts: FloatArray
    trained: FloatArray
    trained_experts: FloatArray

    @classmethod
    def of(cls, job: MemoryInputs, layer: Layer) -> Unit:
        blocks: Rows = [(each.norm_weights, 1) for each in around(job.model)]
        none = np.zeros_like(job.ranks)
        total = [_padded(blocks * len(layer.parts) + _embedding_rows(job)[2:], job.ranks), none, none, none]
        for part in layer.parts:
            found = *part_weights(job, part), *trained_weights(job, part)
            total = [sum_ + each for sum_, each in zip(total, found, strict=True)]
        return cls(*total) if job.adapter else cls(*total[:2], *total[:2])


def widths(job: MemoryInputs, product: Product) -> Iterator[FloatArray | float]:
    """Yield the outputs of each linear layer of a product on a tensor-parallel rank."""
    return (each.width / job.tensor if product.split == "outputs" else float(each.width) for each in product.layers)


def part_weights(job: MemoryInputs, part: Part) -> Pair:
    """Return the padded numbers of weights of a part on a tensor-parallel rank. Ranks have experts whole."""
    rows: Rows = [(part.other_weights / job.tensor, 1), *((width, 1) for width in part.norms)]
    experts: Rows = []
    for product in part.products(job.model.hidden_size):
        if product.component == "experts":
            columns = product.inputs + product.bias
            experts += [(product.copies / job.expert, each.width * columns) for each in product.layers]
            continue
        for outputs in widths(job, product):
            rows += [(outputs, product.inner(job.tensor))] + [(outputs, 1)] * product.bias
    return _padded(rows, job.ranks), _padded(experts, job.ranks / job.expert)


def trained_weights(job: MemoryInputs, part: Part) -> Pair:
    """Return the numbers of trained weights of a part: all of them, or those of adapters."""
    if (adapter := job.adapter) is None:
        return part_weights(job, part)
    others = experts = np.zeros_like(job.ranks)
    for product in part.products(job.model.hidden_size):
        found = weights_beside(adapter, product, beside(adapter, product, peft=job.peft))
        if product.component == "experts":
            experts = experts + found / job.expert
        else:
            others = others + found / job.tensor
    return others, experts


def table_weights(job: MemoryInputs) -> FloatArray:
    """Return the padded number of weights of the embedding, or of the head, on a tensor-parallel rank."""
    (table,) = embedding_of(job.model).products(job.model.hidden_size)
    return _padded([(table.inner(job.tensor), table.outputs)], job.ranks)


def root_weights(job: MemoryInputs) -> Pair:
    """Return the padded numbers of weights of the unit of all other modules: of the final norm, and of the table of the
    embeddings that each layer has of its own, with their projection.
    """
    norms: Rows = [(head_of(job.model).norm_weights, 1)]
    return _padded(norms, job.ranks), _padded(_embedding_rows(job)[:2], job.ranks)


def _embedding_rows(job: MemoryInputs) -> Rows:
    """Return the weights of layers' own embeddings: two of all layers together, and two of each layer."""
    return [(each.outer(job.tensor), each.inner(job.tensor)) for each in layer_embeddings(job.model)]


def places(job: MemoryInputs) -> list[FloatArray]:
    """Return the places in the pipeline of the ranks that may need the most: both ends, and all if layers differ."""
    last = job.pipeline - 1.0
    if len(layer_counts(job.model)) == 1:
        return [0.0 * last, last]
    return [np.minimum(last, float(place)) for place in range(int(job.pipeline.max(initial=1.0)))]


def stage_layers(job: MemoryInputs, place: FloatArray) -> dict[Layer, FloatArray]:
    """Return the number of each distinct layer on the rank at `place` of its pipeline, which has one stage or two.

    Stages are cut in order. The second one of a rank loops or folds back.
    """
    size, layers, parts = job.pipeline, layers_of(job.model), np.where(job.schedule >= INTERLEAVED, 2.0, 1.0)
    second = np.where(job.schedule == INTERLEAVED, size + place, 2.0 * size - 1.0 - place)
    width, numbers = len(layers) / (size * parts), np.arange(len(layers) + 1)

    def of_stage(until: FloatArray, stage: FloatArray) -> FloatArray:
        return np.interp((stage + 1.0) * width, numbers, until) - np.interp(stage * width, numbers, until)

    found = {}
    for layer in layer_counts(job.model):
        until = np.cumsum([0.0, *(each == layer for each in layers)])
        found[layer] = of_stage(until, place) + of_stage(until, second) * (parts > 1.0)
    return found


def layers_of_rank(
    job: MemoryInputs,
    numbers: Mapping[Layer, FloatArray | int],
    *,
    only_trained: bool = False,
    unit_bytes: tuple[float, float] = (1.0, 1.0),
) -> tuple[FloatArray, FloatArray]:
    """Return the numbers of weights of these numbers of layers, gathered, and of a rank's share of them: all of them,
    or those that are trained. Layers that repeat others have none of their own.

    `unit_bytes`: those of a weight, and of a weight of routed experts, to return bytes.
    """
    whole = share = np.zeros_like(job.ranks)
    for layer, number in numbers.items():
        unit, own = job.units[layer], number * (not layer.repeats)
        counts = (unit.trained, unit.trained_experts) if only_trained else (unit.weights, unit.experts)
        weights, experts = (count * each for count, each in zip(counts, unit_bytes, strict=True))
        whole = whole + own * (weights + experts)
        share = share + own * (weights + experts * job.expert) / job.ranks
    return whole, share


def mean_base_bytes(job: MemoryInputs) -> FloatArray:
    """Return the bytes of a gathered weight of a layer, as the mean of all layers."""
    numbers = layer_counts(job.model)
    return layers_of_rank(job, numbers, unit_bytes=job.base_bytes)[0] / layers_of_rank(job, numbers)[0]


def stage_weights(job: MemoryInputs) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the numbers of weights of the rank of a pipeline that has the most: gathered, its share of them, and those
    of its layers, gathered.
    """
    table, (norm, own) = table_weights(job), root_weights(job)
    is_tied, found = head_of(job.model).tied, []
    for place in places(job):
        last = np.where(job.schedule >= ZBV, place == 0, place == job.pipeline - 1.0)
        head = np.where((job.pipeline == 1) & is_tied, 0.0, table)
        edges = (table + own) * (place == 0) + (head + norm) * last
        whole, share = layers_of_rank(job, stage_layers(job, place))
        found.append((whole + edges, share + edges / job.ranks, whole))
    gathered, shares, of_layers = np.max(found, axis=0)
    return gathered, shares, of_layers


def _padded(rows: Rows, ranks: FloatArray) -> FloatArray:
    return sum((np.ceil(count / ranks) * ranks * columns for count, columns in rows), np.zeros_like(ranks))


def small_weights(model: Model, most: float) -> int:
    """Return the number of weights in tensors of at most `most` elements, which each rank of ZeRO 3 keeps whole."""
    own = without_repeats(model)
    sizes = [(head_of(model).norm_weights, 1), (around(model)[0].norm_weights, connections(model))]
    sizes += [(mixer.other_weights, number) for mixer, number in mixer_counts(own).items()]
    products = Counter(product_counts(own)) + Counter(table_products(model))
    for product, number in products.items():
        sizes += [(product.inputs * each.width, number * product.copies) for each in product.layers]
    return sum(size * number for size, number in sizes if size <= most)


def modules_of_layers(model: Model) -> int:
    """Return the modules of all layers in transformers, 14 in a layer of `modeling_llama.py` before 4.48: the layer,
    its parts, each with a norm and an activation function or rotary embedding, and the linear layers and norms inside.
    Routed experts are one module, as in 5.24, whose attention has no rotary embedding of its own."""
    products, layers = product_counts(model).items(), layer_counts(model).items()
    linear = sum(n * (len(each.layers) if each.copies == 1 else each.name == "up") for each, n in products)
    return linear + sum(n * (1 + sum(3 + len(part.norms) for part in each.parts)) for each, n in layers)
