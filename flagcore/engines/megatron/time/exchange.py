"""Communication of one micro-batch: collectives inside a layer, and messages between pipeline stages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flagcore.contracts import CollectiveCosts, Costs
from flagcore.domain.space import FloatArray, IntArray
from flagcore.engines.megatron.parallel.layout import Layout, Placement, Training
from flagcore.engines.megatron.parallel.parameters import layer_input_bytes
from flagcore.engines.megatron.time.passes import Linear
from flagcore.physics.schedules.catalogue import SCHEDULES
from flagcore.physics.transformer import widths

OVERLAPPED_EXPOSED = 0.7
"""Share of a tensor-parallel collective that is waited for although it is split and overlaps its product
(`tp_comm_overlap`, which needs sequence parallelism). Fitted to published runs on one generation of accelerators:
0.5 to 0.8."""


def integers(array: FloatArray) -> IntArray:
    """Return counts as the integers that a collective takes."""
    return array.astype(np.int64)


def collective(
    costs: Costs, kind: str, payload: FloatArray, ranks: FloatArray, stride: FloatArray | None = None
) -> FloatArray:
    """Return the seconds of a collective among `ranks` devices, `stride` (1 by default) apart."""
    apart = integers(np.ones_like(ranks) if stride is None else stride)
    return costs.collectives.seconds(kind, payload, integers(ranks), apart)


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
        payload = train.value_bytes * train.model.hidden_size * layout.tokens(train.sequence)
        exposed = OVERLAPPED_EXPOSED if train.options.tp_comm_overlap else 1.0
        kinds = ("all_gather", "reduce_scatter", "all_reduce")
        gather, scatter, reduce = (collective(costs, kind, payload, layout.tensor) for kind in kinds)
        return cls(exposed * gather, exposed * scatter, reduce, layout.sequence_parallel)

    @property
    def forward(self) -> FloatArray:
        return np.where(self.sequence_parallel > 0, self.gather + self.scatter, self.reduce)

    def backward(self, first: Linear) -> FloatArray:
        """Return the wait time of a block in its backward pass; `first` is its first layer.

        The gradient of its output is gathered first (sequence parallel). Behind that layer's own products hide
        the second gather of its input (behind the gradient of the input) and the reduction of the input's gradient
        (behind the gradient of the weight). Source: megatron-core 0.16 `tensor_parallel/layers.py`.
        """
        weight = first.weight_gradient
        hidden = np.maximum(self.gather - first.input_gradient, 0.0) + np.maximum(self.scatter - weight, 0.0)
        return np.where(self.sequence_parallel > 0, self.gather + hidden, np.maximum(self.reduce - weight, 0.0))


def context_exchange(train: Training, layout: Layout, costs: Costs) -> FloatArray:
    """Return one passage of all keys and values round the context-parallel ranks (arXiv 2310.01889).

    With `cp_comm` a2a, queries, keys, values and outputs change from split tokens to split heads and back
    (DeepSpeed Ulysses, arXiv 2309.14509).
    """
    query, key, value = widths(train.model)
    rows = layout.micro_batch * train.sequence / layout.tensor
    if train.options.cp_comm == "a2a":
        payload = train.value_bytes * (2.0 * query + key + value) * rows / layout.context
        return collective(costs, "all_to_all", payload, layout.context, layout.tensor)
    payload = train.value_bytes * (key + value) * rows
    return collective(costs, "all_gather", payload, layout.context, layout.tensor)


def expert_exchange(train: Training, layout: Layout, costs: Costs) -> FloatArray:
    """Return one exchange of token copies among expert ranks: a dispatch, or a combine.

    A rank sends each of its tokens to `topk` experts; where a dispatcher sends a token to each rank at most once,
    fewer copies travel: e (1 - (1 - 1/e)^k) of k for routing at random over e ranks (derived). The all-gather
    dispatcher gathers all tokens instead.
    """
    model, options = train.model, train.options
    topk = float(model.moe_router_topk)
    if options.dispatcher == "flex":
        distinct = layout.expert * (1.0 - (1.0 - 1.0 / layout.expert) ** topk)
        copies = np.minimum(distinct, topk)
    else:
        copies = np.full_like(layout.expert, topk)
    tokens = layer_input_bytes(train, layout)
    gathers = options.dispatcher == "allgather"
    kind, payload = ("all_gather", tokens * layout.expert) if gathers else ("all_to_all", copies * tokens)
    exchange = collective(costs, kind, payload, layout.expert, layout.expert_tensor)
    return exchange + collective(costs, "all_gather", copies * tokens * layout.expert_tensor, layout.expert_tensor)


@dataclass(frozen=True, slots=True)
class Messages:
    """Seconds of one message: the `usual` one, the slowest inside a node group, and how much `longer` it takes from one
    group to the next. None where nothing is, as in a cluster of one group.
    """

    usual: FloatArray
    longer: FloatArray | None = None

    @classmethod
    def of(cls, train: Training, layout: Layout, costs: Costs, place: Placement) -> Messages:
        """Return the messages of one micro-batch's hidden states.

        Schedules that fold the pipeline go from group to group both ways, and take the slowest message for all.
        """
        payload, stage = layer_input_bytes(train, layout), layout.tensor * layout.context * layout.data
        pair = integers(np.minimum(layout.pipeline, 2.0))
        if costs.between is None:
            return cls(_mean_send(costs.collectives, payload, stage, layout.pipeline))
        counts, stride = place.stages(layout), integers(stage)
        inside = [
            _mean_send(each.collectives, payload, stage, count)
            for each, count in zip(costs.groups, counts, strict=True)
        ]
        between = costs.between.seconds("send", payload, pair, stride)
        several = np.maximum.reduce(counts) > 1.0
        usual = np.where(several, np.maximum.reduce(inside), between)
        if SCHEDULES[train.options.schedule or "interleaved"].parts == 2:
            return cls(np.maximum(usual, between))
        return cls(usual, np.maximum(between - usual, 0.0))

    def mean(self, layout: Layout, place: Placement) -> FloatArray:
        if self.longer is None:
            return self.usual
        ring = (layout.virtual > 1.0) * 1.0  # the last stage sends to the first
        crossings = len(place.starts) + ring
        return self.usual + self.longer * crossings / np.maximum(layout.pipeline - 1.0 + ring, 1.0)

    def send_delays(
        self, length: int, rows: IntArray, layout: Layout, place: Placement
    ) -> tuple[FloatArray, FloatArray] | None:
        """Return for how much longer each stage sends forward and backward in pipelines of `length`, (stages, rows)."""
        if self.longer is None:
            return None
        each, longer = layout.virtual[rows], self.longer[rows]
        forward, backward = np.zeros((2, length, rows.size))
        for stage in range(1, length):
            crosses = np.logical_or.reduce([start[rows] == stage for start in place.starts])
            forward[stage - 1] = backward[stage] = each * longer * crosses
        forward[-1] = backward[0] = (each - 1.0) * longer
        return forward, backward


def _mean_send(collectives: CollectiveCosts, payload: FloatArray, stage: FloatArray, stages: FloatArray) -> FloatArray:
    """Return the mean time of a message between neighbours of `stages` stages of `stage` devices each.

    Where several stages share a node, or a rack, some of the borders between them are its own: of p stages,
    p / 2**k - 1 borders lie at multiples of 2**k stages, and messages over them travel as far as such a block is wide.
    """
    pair, borders = integers(np.clip(stages, 1.0, 2.0)), np.maximum(stages - 1.0, 1.0)
    total, width = np.zeros_like(payload), 1.0
    while np.any(width < np.maximum(stages, 2.0)):
        here = np.maximum(np.ceil(stages / width) - 1.0, 0.0) - np.maximum(np.ceil(stages / (2.0 * width)) - 1.0, 0.0)
        some = np.flatnonzero(here > 0) if width > 1.0 else slice(None)
        distance = integers(stage[some] * width)
        total[some] += here[some] * collectives.seconds("send", payload[some], pair[some], distance)
        width *= 2.0
    return total / borders
