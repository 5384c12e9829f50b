"""Adapters (LoRA): low-rank products that a server computes beside those of the model, for some of the requests.

A slot of an engine holds one adapter, padded to the largest rank: for each product of `inner` x `outer`, a matrix of
`inner` x rank and one of rank x `outer`. All linear layers have them, in vLLM also the embedding and the head (vllm
0.33 `lora/layers/*.py`; sglang 0.5.23 `lora/mem_pool.py`). Layers that tensor ranks split by columns split only the
second matrix, those that they split by rows only the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from flagcore_models.layers import head_of, product_counts

from flagcore.contracts import Costs, KernelCosts
from flagcore.domain.space import FloatArray
from flagcore_serving.model.work import DISK_RATE, Serving, distinct_experts
from flagcore_serving.space.settings import Settings
from flagcore_serving.space.weights import EXPERTS

LAUNCHES = 3
"""Kernels beside a product: one sets the result of the first matrix to 0, and one multiplies with each matrix (vllm
0.33 `lora/ops/triton_ops`)."""

OPERATORS = 34
"""How many operators of PyTorch vLLM calls on CPU cores for a slice of a product: counted with the dispatcher of torch
2.13 for `bgmv_shrink` and `bgmv_expand_slice` of vllm 0.32 (`lora/ops/torch_ops/lora_ops.py`)."""


class Pair(NamedTuple):
    """The two matrices of an adapter beside one product, on a device.

    - `layers`: the number of layers with this product.
    - `inner`, `outer`: sizes of the product.
    - `slices`: products that are computed together on the same input. Each has a first matrix of its own.
    - `experts`, `chosen`: experts on the device, and those that a token chooses of them; 1 without experts.
    """

    layers: float
    inner: FloatArray
    outer: FloatArray
    slices: float = 1.0
    experts: FloatArray | float = 1.0
    chosen: FloatArray | float = 1.0

    @property
    def elements(self) -> FloatArray:
        """The number of elements of both matrices for each rank."""
        return self.slices * self.inner + self.outer


def pairs_of(serving: Serving, settings: Settings) -> Iterator[Pair]:
    """Yield the pairs of all layers. Each linear layer that a product joins is a slice."""
    for product, number in product_counts(serving.model).items():
        if not product.adapts:
            continue
        ranks, experts, chosen = settings.tensor, np.ones(1), np.ones(1)
        if product.group == EXPERTS and serving.experts is not None:
            ranks = ranks * settings.data / settings.expert
            experts, chosen = product.copies / settings.expert, serving.experts.chosen / settings.expert
        inner, outer = (np.asarray(size(ranks)) for size in (product.inner, product.outer))
        yield Pair(number, inner, outer, float(len(product.layers)), experts, chosen)


def adapter_bytes(serving: Serving, settings: Settings) -> FloatArray:
    """Return the bytes of one slot on the fullest device."""
    model, stage = serving.model, np.ceil(serving.model.num_layers / settings.pipeline) / serving.model.num_layers
    none = np.zeros(settings.tensor.shape)
    elements = sum((each.layers * each.experts * each.elements for each in pairs_of(serving, settings)), none) * stage
    if serving.overheads.adapts_tables:  # neither is split (`vocab_parallel_embedding.py`, `logits_processor.py`)
        tables = np.where(settings.pipeline > 1, 1.0, 2.0)
        (head,) = head_of(model).products(model.hidden_size)
        elements = elements + tables * (head.inputs + head.outputs)
    return elements * settings.adapter_rank * _element_bytes(serving) / settings.cores


def _element_bytes(serving: Serving) -> float:
    return 4.0 if serving.precision == "fp32" else 2.0


def swap_seconds(serving: Serving, settings: Settings) -> FloatArray:
    """Return the seconds to load an adapter into a slot: from the host's memory, or if it is not there, from a disk."""
    size = adapter_bytes(serving, settings)
    is_kept = settings.adapters_on_host >= serving.adapters.number
    return size / serving.host_rate + np.where(is_kept, 0.0, size * settings.devices / DISK_RATE)


def head_pair(serving: Serving, settings: Settings) -> tuple[Pair, ...]:
    """Return the pair of the output head, which only tokens that are sampled use, if an engine's slots have one."""
    ones, (head,) = np.ones_like(settings.tensor), head_of(serving.model).products(serving.model.hidden_size)
    return (Pair(1.0, head.inputs * ones, head.outputs * ones),) if serving.overheads.adapts_tables else ()


def adapter_seconds(
    serving: Serving, settings: Settings, costs: Costs, tokens: FloatArray, pairs: Iterable[Pair]
) -> FloatArray:
    """Return the seconds that the adapters of an iteration's `tokens` take on a rank for `pairs`.

    The weights of each adapter in the iteration are read once. `settings` has arrays that broadcast with `tokens`.
    """
    load, kernels, rank = serving.adapters, costs.kernels, settings.adapter_rank + 0.0 * tokens
    if not load.number or not rank.any():
        return np.zeros_like(tokens)
    width, precision = _element_bytes(serving), serving.wide_precision if serving.precision != "fp32" else "fp32"
    rank, rows = np.maximum(rank, 1.0), np.maximum(load.share * tokens, 1.0)
    different = np.minimum(load.different(rows), np.maximum(settings.adapter_slots, 1.0))
    byte_s, moves = _byte_seconds(kernels), serving.overheads.adapter_moves
    total = np.zeros_like(tokens)
    for pair in pairs:
        if costs.synchronous and moves:
            seconds = _gathered(pair, kernels, moves, rank, tokens * pair.chosen, precision)
            total = total + pair.layers * pair.slices * seconds
            continue
        routed = np.maximum(rows * pair.chosen, 1.0)
        inner, outer = pair.inner + 0.0 * rows, pair.outer + 0.0 * rows
        seconds = kernels.memory_seconds(routed * pair.slices * rank * 4.0)
        seconds = seconds + kernels.gemm_seconds(routed, pair.slices * rank, inner, precision)
        seconds = seconds + kernels.gemm_seconds(routed, outer, rank, precision) + routed * outer * width * byte_s
        matrices = different * np.minimum(distinct_experts(pair.experts, pair.chosen, rows), pair.experts)
        seconds = seconds + np.maximum(matrices - 1.0, 0.0) * rank * pair.elements * width * byte_s
        total = total + pair.layers * seconds
    is_used = 1.0 - (1.0 - load.share) ** tokens
    return np.where(settings.adapter_rank > 0.0, is_used * total, 0.0)


def _gathered(
    pair: Pair, kernels: KernelCosts, moves: Sequence[float], rank: FloatArray, rows: FloatArray, precision: str
) -> FloatArray:
    """Return the seconds of a slice of a product where each of `rows` first copies the matrices of its adapter.

    `moves`: see `Overheads.adapter_moves`. A product over one element gives the time of a new tensor, which has new
    pages if it is large. Products with the first matrix have 32 bits, and copies of narrower ones are converted, too
    (vllm 0.33 `lora/ops/torch_ops/lora_ops.py`).
    """
    one, outer, bits = np.ones_like(rows), pair.outer / pair.slices, 4.0 if precision == "fp32" else 2.0
    moved_s = _byte_seconds(kernels) * rows * rank
    seconds = rows * rank * (pair.inner + outer) * moves[0] + moved_s * pair.inner * 4.0 * moves[1]
    for width in (pair.inner, outer):
        seconds = seconds + kernels.gemm_seconds(rows, rank * width * (bits / 4.0), one, "fp32")
    if precision == "fp32":
        return np.asarray(seconds + moved_s * outer * 4.0 * moves[1])
    seconds = seconds + kernels.gemm_seconds(rows, rank * pair.inner, one, "fp32")
    return seconds + kernels.gemm_seconds(one, rows * outer, rank, precision)


def _byte_seconds(kernels: KernelCosts) -> float:
    """Return the seconds for each byte that a large element-wise kernel moves."""
    smaller, larger = kernels.memory_seconds(np.array([1e8, 2e8])).tolist()
    return float(larger - smaller) / 1e8


def adapter_launches(serving: Serving, settings: Settings, costs: Costs) -> FloatArray:
    """Return the number of kernels that an iteration with adapters launches for them."""
    if not serving.adapters.number:
        return np.zeros(settings.tensor.shape)
    gathers = costs.synchronous and serving.overheads.adapter_moves
    pairs = (*pairs_of(serving, settings), *head_pair(serving, settings))
    number = sum(each.layers * (OPERATORS * each.slices if gathers else LAUNCHES) for each in pairs)
    return np.where(settings.adapter_rank > 0.0, number, 0.0)
