"""Times of the parts of a pass: linear layers, element-wise kernels, collectives, and messages between stages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from flagcore_models.layers import streams_of
from flagcore_models.mixers.attention import Attention
from flagcore_models.networks.experts import Experts
from flagcore_models.parts.norm import Norm

from flagcore.contracts import CollectiveCosts, Costs, KernelCosts
from flagcore.domain.model import Network
from flagcore.domain.space import BoolArray, FloatArray, IntArray
from flagcore_training.adapters import has_adapter
from flagcore_training.layout import ArrayRecord, LayerLayout, Layout, Training
from flagcore_training.schedules import SCHEDULES
from flagcore_training.stages import StageGroups, layer_input_bytes

ACTIVATION_PASSES = {
    (True, True): (3.0, 5.0),
    (True, False): (2.0, 3.0),
    (False, True): (8.0, 24.0),
    (False, False): (5.0, 12.0),
}
"""Memory passes of an activation function over one tensor of the FFN's width, forward and backward.

The keys are whether it is one kernel and whether it is gated. The values for one kernel are counted. The values for
several kernels are fitted to 12 measured ranks (gated; 10 and 32 without any fusion); those without a gate are
proportional."""

GRAPH_LAUNCHES = 2.0
"""Launches of a part of a layer that is a CUDA graph: the copy of its input, and the graph (transformer-engine 2.20
`graph.py`, `Graphed`)."""

MODULE_LAUNCHES = 17.5
"""Launches that take the host as long as the recompute of one module: it reads and sets the states of random numbers,
and calls autograd again. As `layer.REPEATED_LAUNCHES` of attention's; timed with torch on a CPU, 19 times as long as a
linear layer of torch (megatron-core 0.16.1 `CheckpointWithoutOutput`)."""


def is_captured(train: Training, layout: LayerLayout, *parts: str) -> BoolArray:
    """Return whether a CUDA graph launches one of `parts`, for each candidate. Graphs exclude full recompute."""
    captured: BoolArray = (layout.recomputes == 0.0) & bool(train.options.graphs.intersection(parts))
    return captured


@dataclass(frozen=True, slots=True)
class Seconds(ArrayRecord):
    """The times of kernels (`compute`) and of exposed collectives, by kind of parallelism, in seconds.

    `launches` is the number of kernels.
    """

    compute: FloatArray
    tensor: FloatArray
    context: FloatArray
    expert: FloatArray
    launches: FloatArray

    @classmethod
    def from_compute(cls, compute: FloatArray, **others: FloatArray) -> Seconds:
        """Return a `Seconds` with `compute` and the fields in `others`. All other fields are 0."""
        zeros = np.zeros_like(compute)
        parts = {"tensor": zeros, "context": zeros, "expert": zeros, "launches": zeros, **others}
        return cls(compute, **parts)

    @property
    def total(self) -> FloatArray:
        return self.compute + self.tensor + self.context + self.expert

    def plus(self, seconds: FloatArray) -> Seconds:
        """Return the times with `seconds` more of the device."""
        return replace(self, compute=self.compute + seconds)


@dataclass(frozen=True, slots=True)
class Total(ArrayRecord):
    """The sum of the times of `Seconds`, and its launches, for searches that add up many."""

    total: FloatArray
    launches: FloatArray

    @classmethod
    def of(cls, seconds: Seconds) -> Total:
        return cls(seconds.total, seconds.launches)

    def plus(self, seconds: FloatArray) -> Total:
        """Return the sum with `seconds` more of the device."""
        return Total(self.total + seconds, self.launches)


@dataclass(frozen=True, slots=True)
class Block(ArrayRecord):
    """The times of a part of the model in seconds: forward, input gradients, and kernels of the weight gradients.

    `repeated` is the part of the forward that selective recompute adds to the backward pass.
    """

    forward: Seconds
    backward: Seconds
    weight: FloatArray
    repeated: Seconds


@dataclass(frozen=True, slots=True)
class StageTime(ArrayRecord):
    """The times of one micro-batch on a pipeline stage in seconds: forward, input gradients, weight gradients."""

    forward: Seconds
    backward: Seconds
    weight: FloatArray

    @property
    def busy(self) -> FloatArray:
        return self.forward.total + self.backward.total + self.weight


def norm_seconds(kernels: KernelCosts, tensor_bytes: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the seconds of a norm over a tensor, forward and backward."""
    forward, backward = Norm.passes
    return kernels.memory_seconds(forward * tensor_bytes), kernels.memory_seconds(backward * tensor_bytes)


def norm_and_residual(train: Training, layout: LayerLayout, costs: Costs) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the seconds of a block's norm in forward and in backward, with its residual streams if there are several,
    and of the residual sum after the block."""
    kernels, unit = costs.kernels, float(train.value_bytes)
    h, rows = train.model.hidden_size, layout.token_rows(train.sequence)
    norm, back = norm_seconds(kernels, unit * h * rows)
    if streams := streams_of(train.model):
        mixed = kernels.memory_seconds(unit * streams.moved * h * rows)
        norm, back = norm + mixed, back + 2.0 * mixed
    return norm, back, kernels.memory_seconds(unit * 3.0 * h * rows)


def activation_seconds(
    train: Training, network: Network, kernels: KernelCosts, tensor_bytes: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return the seconds of an FFN's activation function, forward and backward.

    `tensor_bytes` is the size of one tensor of the FFN's width. A single fused kernel reads two tensors and writes one;
    in backward it reads three and writes two.
    """
    forward, backward = ACTIVATION_PASSES[train.transformer_engine, network.gated]
    return kernels.memory_seconds(forward * tensor_bytes), kernels.memory_seconds(backward * tensor_bytes)


@dataclass(frozen=True, slots=True)
class Linear(ArrayRecord):
    """The times of a linear layer's three matrix products in seconds: output, input gradient, weight gradient."""

    forward: FloatArray
    input_gradient: FloatArray
    weight_gradient: FloatArray


def linear(
    kernels: KernelCosts, tokens: FloatArray, inputs: FloatArray | float, outputs: FloatArray | float, precision: str
) -> Linear:
    """Return the seconds of the linear layer Y[tokens, outputs] = X[tokens, inputs] W[inputs, outputs]."""
    width_in, width_out = np.broadcast_to(inputs, tokens.shape), np.broadcast_to(outputs, tokens.shape)
    return Linear(
        kernels.gemm_seconds(tokens, width_out, width_in, precision),
        kernels.gemm_seconds(tokens, width_in, width_out, precision),
        kernels.gemm_seconds(width_out, width_in, tokens, precision),
    )


EXPOSED_SHARE = 0.7
"""Exposed share of a tensor-parallel collective that is split to overlap its matrix product (`tp_comm_overlap`).

Fitted to published runs on one generation of accelerators: 0.5 to 0.8."""


def as_integers(array: FloatArray) -> IntArray:
    """Return float counts as integers, which cost tables require."""
    return array.astype(np.int64)


def collective(
    costs: Costs, kind: str, payload: FloatArray, ranks: FloatArray, stride: FloatArray | None = None
) -> FloatArray:
    """Return the seconds of a collective among `ranks` devices, whose indices differ by `stride` (default 1)."""
    strides = as_integers(np.ones_like(ranks) if stride is None else stride)
    return costs.collectives.seconds(kind, payload, as_integers(ranks), strides)


class TensorCollectives(NamedTuple):
    """The times of the collectives around one block of tensor-parallel layers (attention or an FFN), in seconds.

    With sequence parallelism a block gathers its input tokens and reduce-scatters its output; without it, the block
    all-reduces its output (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2). `adapter`: see `beside`.
    """

    gather: FloatArray
    scatter: FloatArray
    reduce: FloatArray
    sequence_parallel: FloatArray
    adapter: FloatArray | float = 0.0

    @classmethod
    def from_layout(cls, train: Training, layout: LayerLayout, costs: Costs) -> TensorCollectives:
        payload = train.value_bytes * train.model.hidden_size * layout.tokens(train.sequence)
        exposed = EXPOSED_SHARE if train.options.tp_comm_overlap else 1.0
        kinds = ("all_gather", "reduce_scatter", "all_reduce")
        gather, scatter, reduce = (collective(costs, kind, payload, layout.tensor) for kind in kinds)
        return cls(exposed * gather, exposed * scatter, reduce, layout.sequence_parallel)

    @property
    def forward(self) -> FloatArray:
        return np.where(self.sequence_parallel > 0, self.gather + self.scatter, self.reduce) + self.adapter

    def beside(self, train: Training, target: str) -> TensorCollectives:
        """Return the collectives of a block with an adapter beside its last layer, if `target` has a joint one.

        The output of the adapter is gathered, and the gradient of a part of it (Megatron-Bridge @067f987d
        `peft/utils.py`, `ParallelLinearAdapter`: gather_output).
        """
        is_gathered = train.options.joint_adapters and has_adapter(train.options.adapter, target)
        return self._replace(adapter=self.gather * is_gathered)

    def backward(self, first: Linear) -> FloatArray:
        """Return the exposed communication of a block's backward pass in seconds. `first` is its first linear layer.

        With sequence parallelism the gradient of the output is gathered first. The second gather of the input overlaps
        the product for the input gradient, and the reduction of the input gradient overlaps the product for the weight
        gradient. Source: megatron-core 0.16 `tensor_parallel/layers.py`.
        """
        weight = first.weight_gradient
        exposed = np.maximum(self.gather - first.input_gradient, 0.0) + np.maximum(self.scatter - weight, 0.0)
        found = np.where(self.sequence_parallel > 0, self.gather + exposed, np.maximum(self.reduce - weight, 0.0))
        return found + self.adapter


def context_collective(mixer: Attention, train: Training, layout: LayerLayout, costs: Costs) -> FloatArray:
    """Return the seconds to pass all keys and values around the context-parallel ranks once (ring attention).

    Where each pair of devices has a link of its own, a ring uses one link of a device, and other exchanges all of them
    (gitcode.com/Ascend/MindSpeed docs/zh/features/hybrid-context-parallel.md: a ring does not use the whole bandwidth).

    With `cp_comm` a2a, queries, keys, values and outputs are redistributed between splits by tokens and by heads
    (DeepSpeed Ulysses, arXiv 2309.14509). Source of ring attention: arXiv 2310.01889.
    """
    keys = mixer.key_width + mixer.value_width
    tokens = layout.micro_batch * train.sequence / layout.tensor
    if train.options.cp_comm == "a2a":
        payload = train.value_bytes * (2.0 * mixer.query_width + keys) * tokens / layout.context
        return collective(costs, "all_to_all", payload, layout.context, layout.tensor)
    payload = train.value_bytes * keys * tokens
    gathered = collective(costs, "all_gather", payload, layout.context, layout.tensor)
    if train.options.cp_comm != "p2p":
        return gathered
    pair = np.minimum(layout.context, 2.0)
    hops = (layout.context - 1.0) * collective(costs, "send", payload / layout.context, pair, layout.tensor)
    return np.maximum(gathered, hops)


def expert_dispatch(
    network: Experts, train: Training, layout: LayerLayout, costs: Costs, share: float = 1.0
) -> FloatArray:
    """Return the seconds to dispatch `share` of the bytes of the tokens to the expert-parallel ranks, or to combine.

    A rank sends each token to the experts that it chooses. The flex dispatcher sends a token once to each node, to the
    device in the same place, which forwards it to each rank once (DeepEP, `docs/legacy.md`), see `_distinct`. On H100
    with 50 GB/s this is 52 to 55 GB/s with EP 32, and 45 to 47 with EP 64, with the tokens that stay; the same page
    has 57 to 58, and 50 to 51. The allgather dispatcher gathers all tokens.
    """
    options, ranks, stride = train.options, layout.expert, layout.expert_tensor
    tokens = (
        share * train.value_bytes * network.expert_width(train.model.hidden_size) * layout.token_rows(train.sequence)
    )
    copies = sent = np.full_like(ranks, float(network.chosen))
    near = ranks
    if options.dispatcher in ("flex", "hybridep"):
        near = np.minimum(ranks, np.maximum(np.floor(options.linked_devices / stride), 1.0))
        sent, copies = (_distinct(network, n, neighbours=options.neighbours) for n in (ranks / near, ranks))
    dispatch = collective(costs, "all_to_all", copies * tokens, near, stride)
    if options.dispatcher == "allgather":
        dispatch = collective(costs, "all_gather", tokens * ranks, ranks, stride)
    elif (near < ranks).any():
        nodes = np.ceil(ranks / near)
        dispatch = np.maximum(dispatch, collective(costs, "all_to_all", sent * tokens, nodes, stride * near))
    return dispatch + collective(costs, "all_gather", copies * tokens * stride, stride)


def _distinct(network: Experts, n: FloatArray, *, neighbours: bool) -> FloatArray:
    """Return on how many of the n ranks or nodes that share the experts a token's experts are, in the mean.

    With random routing to k experts, these are n (1 - (1 - 1/n)^k) (derived). With groups of experts, a token's experts
    are in a few groups (DeepSeek-V3, arXiv 2412.19437), so on the ranks that have these. With `neighbours`, k experts
    that follow one another are on as few ranks as possible.
    """
    if neighbours:
        return np.maximum(n * (network.chosen / network.count), 1.0)
    if network.groups:
        chosen, all_groups = float(network.chosen_groups), float(network.groups)
        n = np.where(n < all_groups, n * (1.0 - (1.0 - 1.0 / n) ** chosen), n * (chosen / all_groups))
    return np.minimum(n * (1.0 - (1.0 - 1.0 / np.maximum(n, 1.0)) ** network.chosen), network.chosen)


class Messages(NamedTuple):
    """The times of messages between neighbouring pipeline stages, in seconds.

    `inside` is the mean time of a message inside each node group, `between` the time of a message across each border
    between two groups, and `usual` the longest mean.
    """

    usual: FloatArray
    inside: tuple[FloatArray, ...]
    between: tuple[FloatArray, ...] = ()

    @classmethod
    def from_layout(cls, train: Training, layout: Layout, costs: Costs, placement: StageGroups) -> Messages:
        """Return the seconds of a message that contains the hidden states of one micro-batch.

        Schedules that fold the pipeline cross the groups in both directions, so all their messages take as long as the
        slowest one.
        """
        if costs.between is None or not costs.further:
            mean = _mean_send(costs.collectives, train, layout, layout.pipeline)
            return cls(mean, (mean,))
        counts = placement.stages(layout)
        groups = zip(costs.groups, placement.layouts, counts, strict=True)
        inside = tuple(_mean_send(each.collectives, train, mesh, count) for each, mesh, count in groups)
        between = tuple(_border_seconds(train, *meshes, costs.between) for meshes in pairwise(placement.layouts))
        longest: FloatArray = np.maximum.reduce(inside)
        usual = np.where(np.maximum.reduce(counts) > 1.0, longest, np.maximum.reduce(between))
        if SCHEDULES[train.options.schedule or "interleaved"].parts == 2:
            usual = reduce(np.maximum, between, usual)
            return cls(usual, (usual,) * len(inside), (usual,) * len(between))
        return cls(usual, inside, between)

    def mean(self, layout: Layout, placement: StageGroups) -> FloatArray:
        if not self.between:
            return self.usual
        ring = (layout.virtual > 1.0) * 1.0  # with virtual stages, the last stage sends to the first one
        counts = placement.stages(layout)
        total = sum((each * np.maximum(count - 1.0, 0.0) for each, count in zip(self.inside, counts, strict=True)))
        total = total + sum(self.between) + ring * self.between[-1]
        return np.asarray(total / np.maximum(layout.pipeline - 1.0 + ring, 1.0))

    def send_delays(
        self, length: int, rows: IntArray, layout: Layout, placement: StageGroups
    ) -> tuple[FloatArray, FloatArray] | None:
        """Return the seconds by which messages of each stage exceed the pipeline's usual message time (`usual`).

        The two arrays are for forward and backward messages, and have the shape (stages, rows). None if there is only
        one node group.
        """
        if not self.between:
            return None
        virtual, usual = layout.virtual[rows], self.usual[rows]
        forward, backward = np.zeros((2, length, rows.size))
        for stage in range(1, length):
            seconds = placement.pick(np.full_like(layout.pipeline, float(stage)), self.inside)[rows]
            for start, border in zip(placement.starts, self.between, strict=True):
                seconds = np.where(start[rows] == stage, border[rows], seconds)
            forward[stage - 1] = backward[stage] = virtual * (seconds - usual)
        forward[-1] = backward[0] = (virtual - 1.0) * (self.between[-1][rows] - usual)
        return forward, backward


def _border_seconds(train: Training, before: Layout, after: Layout, between: CollectiveCosts) -> FloatArray:
    """Return the seconds of a message from the last stage of one mesh to the first stage of the next.

    A device sends its tokens to each device that needs some of them, one after the other (FlagScale's
    `p2p_communication.py`). So the side with fewer devices sends or receives the most bytes per device, and each
    further receiver or sender adds the latency of a message.
    """
    payload = np.maximum(layer_input_bytes(train, before), layer_input_bytes(train, after))
    pieces = np.ones_like(payload)
    for first, second in ((before, after), (after, before)):
        tokens = [1.0 + each.sequence_parallel * (each.tensor - 1.0) for each in (first, second)]
        samples = np.ceil(second.data / first.data)
        pieces = np.maximum(pieces, np.ceil(tokens[1] * second.context / (tokens[0] * first.context)) * samples)
    ranks = as_integers(np.minimum(before.pipeline, 2.0)), as_integers(before.tensor * before.context * before.data)
    latency = between.seconds("send", np.zeros_like(payload), *ranks)
    return between.seconds("send", payload, *ranks) + (pieces - 1.0) * latency


def _mean_send(collectives: CollectiveCosts, train: Training, layout: Layout, stages: FloatArray) -> FloatArray:
    """Return the mean time of a message between neighbouring stages in a pipeline of `stages` stages, in seconds.

    Several stages may share a node or a rack. Of p stages, p / 2**k - 1 boundaries are at multiples of 2**k stages.
    Messages across these boundaries travel the distance of 2**k stages.
    """
    payload, stage = layer_input_bytes(train, layout), layout.tensor * layout.context * layout.data
    pair, boundaries = as_integers(np.clip(stages, 1.0, 2.0)), np.maximum(stages - 1.0, 1.0)
    total, width = np.zeros_like(payload), 1.0
    while np.any(width < np.maximum(stages, 2.0)):
        count = np.maximum(np.ceil(stages / width) - 1.0, 0.0) - np.maximum(np.ceil(stages / (2.0 * width)) - 1.0, 0.0)
        rows = np.flatnonzero(count > 0) if width > 1.0 else slice(None)
        distance = as_integers(stage[rows] * width)
        total[rows] += count[rows] * collectives.seconds("send", payload[rows], pair[rows], distance)
        width *= 2.0
    return total / boundaries
