"""How candidates split a training job, the options that all candidates share, and the node group of each stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, TypeVar, cast

import numpy as np

from flagcore.contracts import Costs
from flagcore.domain.model import Model
from flagcore.domain.space import BoolArray, FloatArray, IntArray

T = TypeVar("T")
R = TypeVar("R", bound="ArrayRecord")


@dataclass(frozen=True, slots=True)
class ArrayRecord:
    """A record of arrays, or of other such records: added, scaled and indexed field by field."""

    def __add__(self: R, other: R) -> R:
        return type(self)(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})

    def __mul__(self: R, times: FloatArray | float) -> R:
        return type(self)(**{each.name: getattr(self, each.name) * times for each in fields(self)})

    def __getitem__(self: R, rows: slice | IntArray) -> R:
        return type(self)(**{each.name: getattr(self, each.name)[rows] for each in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayers:
    """What one (virtual) stage of a pipeline holds: 1 where it has the embedding or the loss with its head."""

    embedding: int = 0
    layers: int = 0
    mtp: int = 0
    loss: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Splits:
    """Splits of layers over stages, by number from 1; candidates with number 0 are split by the rules of `Layout`.

    `holdings` is what each stage of a split holds: (splits, stages, fields of `pipeline.Part`). `turns` are the first
    stage, the second, and those that hold something else than the one before, the last one repeated: (splits, turns);
    `counts` is how many of them differ, `lengths` the number of stages.
    """

    holdings: FloatArray
    lengths: FloatArray
    turns: FloatArray
    counts: IntArray

    @classmethod
    def of(cls, holdings: FloatArray, lengths: FloatArray, before: Splits | None = None) -> Splits:
        """Return splits of `lengths` stages with these holdings, numbered behind those of `before`."""
        held, length = (np.zeros((1, 1, holdings.shape[2])), np.ones(1))
        if before is not None:
            held, length = before.holdings, before.lengths
        longest = max(held.shape[1], holdings.shape[1])
        both = [np.pad(each, ((0, 0), (0, longest - each.shape[1]), (0, 0))) for each in (held, holdings)]
        held, length = np.concatenate(both), np.concatenate((length, lengths))
        place, last = np.arange(longest), length[:, None] - 1.0
        turn = np.ones(held.shape[:2], dtype=np.bool_)
        turn[:, 2:] = (held[:, 2:] != held[:, 1:-1]).any(axis=2)
        turns = np.sort(np.where(turn & (place < last), place, last), axis=1)
        counts = np.maximum((turns < last).sum(axis=1), 1)
        return cls(held, length, turns[:, : counts.max()], counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of Megatron and of other schedules, for formulas. `flagcore.engines.megatron.settings` describes
    what each setting means.

    `schedule` is a name of `flagcore.physics.schedules.catalogue`; None is 1F1B, interleaved with virtual stages.
    `splits` are those of candidates with a `Layout.split`. With `equal_stages`, for releases without layouts, derived
    splits have stages of one size between the first and the last. `recompute_stage_layers` is empty where all stages
    recompute as many layers, `offload_stages` where all stages offload. Widths are bytes of one element. With
    `adapters` the model's weights have no gradients and no optimizer. `cuda_graph` is which part of a step is launched
    as one: "", "layer", or "iteration". The dispatcher flex sends a token to a rank once, for any number of its
    experts there. `assumed_fp8_gather`: fp8 weights are of plans, for candidates with the distributed optimizer.
    """

    schedule: str | None = None
    splits: Splits | None = None
    equal_stages: bool = False
    account_for_embedding: bool = False
    account_for_loss: bool = False
    recompute_modules: frozenset[str] = frozenset({"core_attn"})
    recompute_stage_layers: tuple[int, ...] = ()
    grad_bytes: int = 4
    main_grad_bytes: int = 4
    main_param_bytes: int = 4
    exp_avg_bytes: int = 4
    exp_avg_sq_bytes: int = 4
    precision_aware_optimizer: bool = False
    fp8_param_gather: bool = False
    assumed_fp8_gather: bool = False
    optimizer_offload_fraction: float = 0.0
    offload_modules: frozenset[str] = frozenset()
    offload_stages: tuple[int, ...] = ()
    fsdp: bool = False
    adapters: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    tp_comm_overlap: bool = False
    overlap_p2p_comm: bool = True
    overlap_expert_comm: bool = False
    dispatcher: str = "alltoall"
    grouped_gemm: bool = True
    expert_imbalance: float = 1.0
    cp_comm: str = "p2p"
    cuda_graph: str = ""
    cross_entropy_fusion: bool = False
    dropout: bool = False


DEFAULTS = Options()


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What all candidates of a task share.

    `flash`: the attention kernel stores no scores. `fused_activation`:
    the FFN's activation function is one kernel. `transformer_engine`: its layers replace megatron-core's
    own: rotation and the accumulation of weight gradients are fused, and the down-projections of latent
    attention are whole on each tensor-parallel rank. `gathered_keys`: under context
    parallelism attention gathers keys and values, a copy for each query head. `options` are the engine's further
    settings.
    """

    model: Model
    sequence: int
    global_batch: int
    precision: str
    flash: bool = True
    fused_activation: bool = False
    transformer_engine: bool = False
    gathered_keys: bool = False
    options: Options = DEFAULTS

    @property
    def value_bytes(self) -> int:
        """Bytes of one activation or weight; 8-bit formats keep 16-bit activations between layers."""
        return 4 if self.precision == "fp32" else 2

    @property
    def weight_share(self) -> float:
        """Share of a micro-batch's activations that waits for the gradients of weights, as ZB-2p plans it.

        32 h / (34 h + 5 a s), whose last term flash attention does not keep (arXiv 2401.10241, its scheduler).
        """
        scores = 0.0 if self.flash else 5.0 * self.model.num_attention_heads * self.sequence / self.model.hidden_size
        return 32.0 / (34.0 + scores)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout(ArrayRecord):
    """How candidates split the work. Counts, as floats; arrays of one length.

    `uniform` is the number of layers in a recomputed chunk, `block` the number of layers recomputed at the
    start of each (virtual) stage, `selective` 1 where only the attention core is recomputed; 0 is off.
    `first_layers` and `last_layers` are 0 where the pipeline is split evenly, `split` is the number of a candidate's
    split in `Options.splits`, 0 for one by these rules.
    """

    data: FloatArray
    tensor: FloatArray
    pipeline: FloatArray
    virtual: FloatArray
    context: FloatArray
    expert: FloatArray
    expert_tensor: FloatArray
    micro_batch: FloatArray
    microbatches: FloatArray
    sharded_optimizer: FloatArray
    sequence_parallel: FloatArray
    selective: FloatArray
    uniform: FloatArray
    block: FloatArray
    first_layers: FloatArray
    last_layers: FloatArray
    split: FloatArray

    def distinct(self, names: Sequence[str]) -> tuple[IntArray, IntArray]:
        """Return the first row of each combination of the named counts, and for each candidate which one it has."""
        return distinct([getattr(self, name) for name in names])

    def tokens(self, sequence: int) -> FloatArray:
        """Return the tokens of one micro-batch that a tensor-parallel group holds."""
        return self.micro_batch * sequence / self.context

    def token_rows(self, sequence: int) -> FloatArray:
        """Return the tokens that one rank holds outside of the tensor-parallel layers."""
        split: FloatArray = 1.0 + self.sequence_parallel * (self.tensor - 1.0)
        return self.tokens(sequence) / split

    def expert_tokens(self, model: Model, sequence: int) -> FloatArray:
        """Return the token copies that one rank's experts work on, with routing in balance."""
        return model.moe_router_topk * self.token_rows(sequence) * self.expert_tensor

    def shards(self) -> FloatArray:
        """Return the ranks that share the optimizer state of a dense weight."""
        return 1.0 + self.sharded_optimizer * (self.data * self.context - 1.0)

    @property
    def pairing(self) -> FloatArray:
        """Return whether layers of two micro-batches may run together: 0 no, 1 in one stage, 2 in interleaved ones."""
        whole, ways = (self.uniform > 0) | (self.block > 0), np.where(self.virtual > 1.0, 2.0, 0.0)
        return np.where((self.expert == 1.0) | whole, 0.0, np.where(self.pipeline > 1.0, ways, 1.0))

    def pairs(self, model: Model) -> BoolArray:
        """Return where the exchange of the experts may overlap another micro-batch, by the rule of that setting."""
        depths = model.mtp_num_layers
        return (self.pairing > min(depths, 1)) & (depths < 2)

    def expert_replicas(self) -> FloatArray:
        """Return the ranks that reduce the gradients of the same experts: the world without pipeline, expert and its
        tensor split. Without expert parallelism experts are reduced like all other weights, for any tensor split
        (megatron-core 0.16 `transformer/moe/experts.py`).
        """
        dense = self.data * self.context
        group: FloatArray = dense * self.tensor / (self.expert * self.expert_tensor)
        return np.where(self.expert > 1.0, group, dense).clip(min=1.0)

    def expert_shards(self) -> FloatArray:
        """Return the ranks that share the optimizer state of an expert's weight."""
        return 1.0 + self.sharded_optimizer * (self.expert_replicas() - 1.0)


def distinct(columns: Sequence[FloatArray]) -> tuple[IntArray, IntArray]:
    """Return the first row of each combination of some counts, and for each row which combination it has."""
    key = np.zeros(columns[0].shape, dtype=np.int64)
    for column in columns:
        values = column.astype(np.int64)
        many = int(values.max(initial=0)) + 1
        if int(key.max(initial=0)) * many >= 1 << 62:
            key = np.unique(key, return_inverse=True)[1]
        key = key * many + values
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    return first, which


MOST_CHOICES = 30
"""Arrays among which `numpy.choose` chooses: its limit is 32 or 64, depending on its version."""


def pick(which: IntArray, values: Sequence[T]) -> T:
    """Return for each candidate the value at its number in `which`, of arrays or records of arrays.

    As `numpy.choose`, without its limit.
    """
    first: Any = values[0]
    found: Any
    if isinstance(first, ArrayRecord):
        names = [each.name for each in fields(first)]
        found = type(first)(**{name: pick(which, [getattr(value, name) for value in values]) for name in names})
    elif len(values) <= MOST_CHOICES:
        found = np.choose(which, cast("Any", values))
    else:
        rows = np.stack([np.broadcast_to(cast("Any", value), which.shape) for value in values])
        found = np.take_along_axis(rows, which[None], axis=0)[0]
    return cast("T", found)


@dataclass(frozen=True, slots=True)
class Placement:
    """The first stage of each node group but the first, an array of candidates each; none in a cluster of one group.

    Stage i of p has the ranks i W/p to (i+1) W/p of W. That no stage has devices of two groups is for the caller.
    """

    starts: tuple[FloatArray, ...]

    @classmethod
    def of(cls, layout: Layout, costs: Costs) -> Placement:
        size = layout.tensor * layout.context * layout.data
        end = layout.pipeline - 1.0
        return cls(tuple(np.minimum(np.ceil(first / size), end) for first in costs.further))

    def group(self, index: FloatArray) -> IntArray:
        number = np.zeros(index.shape, dtype=np.int64)
        for start in self.starts:
            number += index >= start
        return number

    def pick(self, index: FloatArray, values: Sequence[T]) -> T:
        """Select from `values` (one per group, arrays or records of arrays) those of stage `index` of each
        candidate."""
        return values[0] if len(values) == 1 else pick(self.group(index), values)

    def stages(self, layout: Layout) -> list[FloatArray]:
        edges = (np.zeros_like(layout.pipeline), *self.starts, layout.pipeline)
        return [after - before for before, after in pairwise(edges)]
