"""The collectives inside a layer: what travels between tensor, context and expert ranks for one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flagcore.contracts import Costs
from flagcore.domain.space import FloatArray, IntArray
from flagcore.engines.megatron.parallel.layout import Layout, Training
from flagcore.engines.megatron.parallel.parameters import layer_input_bytes
from flagcore.physics.transformer import widths

OVERLAPPED_EXPOSED = 0.7
"""Share of a tensor-parallel collective that is waited for although it is cut up and run beside its product
(`tp_comm_overlap`). Fitted to published runs on one generation of accelerators: 0.5 to 0.8."""


def integers(array: FloatArray) -> IntArray:
    """Return counts as the integers that a collective takes."""
    return array.astype(np.int64)


def ones(array: FloatArray) -> IntArray:
    """Return a stride of one device for each candidate."""
    return np.ones(array.shape, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class TensorExchange:
    """Seconds of the collectives around one block of tensor-parallel layers (attention, or an FFN).

    Without sequence parallelism `enter` is nothing and `leave` an all-reduce; with it, `enter` gathers the tokens
    and `leave` scatters their sums (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2).
    """

    gather: FloatArray
    scatter: FloatArray
    reduce: FloatArray
    sequence_parallel: FloatArray

    @classmethod
    def of(cls, train: Training, layout: Layout, costs: Costs) -> TensorExchange:
        """Return the exchange of one micro-batch's tokens."""
        payload = train.value_bytes * train.model.hidden_size * layout.tokens(train.sequence)
        ranks, stride = integers(layout.tensor), ones(layout.tensor)

        exposed = OVERLAPPED_EXPOSED if train.options.tp_comm_overlap else 1.0

        def seconds(kind: str) -> FloatArray:
            return exposed * costs.collectives.seconds(kind, payload, ranks, stride)

        return cls(seconds("all_gather"), seconds("reduce_scatter"), seconds("all_reduce"), layout.sequence_parallel)

    @property
    def forward(self) -> FloatArray:
        """Return what a block waits for in its forward pass."""
        return np.where(self.sequence_parallel > 0, self.gather + self.scatter, self.reduce)

    def backward(self, input_gradient: FloatArray, weight_gradient: FloatArray) -> FloatArray:
        """Return what a block waits for in its backward pass.

        The gradient of its output is gathered first (sequence parallel). Behind the first layer's own products hide
        the second gather of its input (behind the gradient of the input) and the reduction of the input's gradient
        (behind the gradient of the weight). Source: megatron-core 0.16 `tensor_parallel/layers.py`.
        """
        hidden = np.maximum(self.gather - input_gradient, 0.0) + np.maximum(self.scatter - weight_gradient, 0.0)
        return np.where(
            self.sequence_parallel > 0, self.gather + hidden, np.maximum(self.reduce - weight_gradient, 0.0)
        )


def context_exchange(train: Training, layout: Layout, costs: Costs) -> FloatArray:
    """Return one passage of all keys and values round the context-parallel ranks (arXiv 2310.01889).

    With `cp_comm` a2a, queries, keys, values and outputs change from split tokens to split heads and back
    (DeepSpeed Ulysses, arXiv 2309.14509).
    """
    query, key, value = widths(train.model)
    ranks, stride = integers(layout.context), integers(layout.tensor)
    rows = layout.micro_batch * train.sequence / layout.tensor
    if train.options.cp_comm == "a2a":
        payload = train.value_bytes * (2.0 * query + key + value) * rows / layout.context
        return costs.collectives.seconds("all_to_all", payload, ranks, stride)
    return costs.collectives.seconds("all_gather", train.value_bytes * (key + value) * rows, ranks, stride)


def expert_exchange(train: Training, layout: Layout, costs: Costs) -> FloatArray:
    """Return one exchange of token copies among expert ranks: a dispatch, or a combine.

    A rank sends each of its tokens to `topk` experts; where a dispatcher sends a token to each rank at most once,
    fewer copies travel: e (1 - (1 - 1/e)^k) of k for routing at random over e ranks (derived). The all-gather
    dispatcher gathers all tokens instead.
    """
    model, options = train.model, train.options
    topk = float(model.moe_router_topk)
    if options.deduplicated_dispatch:
        distinct = layout.expert * (1.0 - (1.0 - 1.0 / layout.expert) ** topk)
        copies = np.minimum(distinct, topk)
    else:
        copies = np.full_like(layout.expert, topk)
    tokens = layer_input_bytes(train, layout)
    ranks, stride = integers(layout.expert), integers(layout.expert_tensor)
    if options.dispatcher == "allgather":
        exchange = costs.collectives.seconds("all_gather", tokens * layout.expert, ranks, stride)
    else:
        exchange = costs.collectives.seconds("all_to_all", copies * tokens, ranks, stride)
    return exchange + costs.collectives.seconds(
        "all_gather", copies * tokens * layout.expert_tensor, integers(layout.expert_tensor), ones(layout.tensor)
    )
