"""Inputs to the memory and time formulas: parallel layouts, options that all candidates share, and layer splits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from flagcore.domain.model import Model, Vision
from flagcore.domain.space import BoolArray, FloatArray, IntArray
from flagcore.domain.spec import Adapter
from flagcore.domain.work import Lengths
from flagcore_training.peft import Peft
from flagcore_training.splits import Splits

T = TypeVar("T")
R = TypeVar("R", bound="ArrayRecord")


@dataclass(frozen=True, slots=True)
class ArrayRecord:
    """A record whose fields are arrays or other records; addition, multiplication and indexing apply to each field."""

    @property
    def columns(self) -> list[Any]:
        """The fields, in order."""
        return [getattr(self, name) for name in self.__dataclass_fields__]

    def __add__(self: R, other: R) -> R:
        return type(self)(**{name: getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__})

    def __mul__(self: R, times: FloatArray | float) -> R:
        return type(self)(**{name: getattr(self, name) * times for name in self.__dataclass_fields__})

    def __getitem__(self: R, rows: slice | IntArray) -> R:
        return type(self)(**{name: _rows(getattr(self, name), rows) for name in self.__dataclass_fields__})


def _rows(values: Any, rows: slice | IntArray) -> Any:
    """Return the rows `rows` of an array, of a record, or of each record in a tuple. A number is that of all rows."""
    if isinstance(values, tuple):
        return tuple(each[rows] for each in values)
    if isinstance(values, float):
        return values
    if isinstance(values, np.ndarray) and not isinstance(rows, slice):
        return values.take(rows, -1)  # several times faster than fancy indexing
    return values[rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The settings of a job that the formulas need. Each engine derives them from its own settings.

    `schedule` is a name in `SCHEDULES`; None means 1F1B, or interleaved 1F1B with virtual stages.
    `splits` are the splits to which `Layout.split` refers. With `early_mtp`, derived splits may place multi-token
    prediction on the stage before the last.

    `offload_stages` is empty if all stages offload. `offload_layers` offload all that they store. The host collects
    garbage every `gc_interval` steps (0: never). Fields in bytes are per element. With an `adapter`, the model's
    weights have no gradients and no optimizer state; `joint_adapters` are those of projections that Megatron joins, of
    which tensor-parallel ranks gather the outputs, and `peft` is what PEFT does with a model, for adapters of PEFT.
    `graphs` are the parts that a CUDA graph launches: `GRAPH_PARTS` of layers, or `WHOLE_STEP`. The flex and hybridep
    `dispatcher` send a token to a rank once, for all of its experts there, and over the network to `linked_devices`
    once. `dispatch_share` is the share of the bytes of 16-bit tokens that the experts' dispatch sends in forward,
    `combine_gradient_share` that of the gradients of their outputs in backward. With `neighbours`, the experts of a
    token follow one another. With `fused_experts`, those in 8 or 4 bits are fused kernels, with `router_fusion` the
    scores and the loss of a router. Without `router_loss`, it has none. `padded_experts` have a fixed number of tokens,
    for which the host does not wait. `routing_spread` is the standard deviation of the loads of experts, relative to
    their mean, where a router balances them. With `assumed_fp8_gather`, only candidates with the distributed optimizer
    have fp8 weights. With `fsdp`, ranks share weights, gradients and optimizer states, but for those in `whole`. With
    `shard_gradients` (ZeRO-2), its ranks also share the gradients, which are scattered for each micro-batch. Without
    `gradient_fusion`, weight gradients are added to their buffers by kernels of their own. With `sparse_kernels`,
    sparse attention computes only the chosen scores. With `fused_streams`, a few kernels mix several residual streams.
    With `indexer_loss`, its indexer is trained. With `fused_adam`, Adam is a kernel that works in place.
    `second_moments` are the parameters with a second moment: "all", "others" (than the matrices of linear layers) or
    "none". With `whole_matrices`, a distributed optimizer shards no matrix of a linear layer: each is on one rank. With
    `stores_core_copy`, context parallelism keeps the attention core's output before its collective, too. In a job of
    fewer than 16 bits, `wide_layers` is the number of layers in 16 bits, and with `wide_mtp`, multi-token prediction is
    in 16 bits. The products of `wide_modules` are in 16 bits in all layers, those of `mxfp8_modules` in MXFP8;
    `Training.precision_of` lists the names (and "head"). With `frees_mtp_logits`, the logits of multi-token prediction
    are freed before those of the model are computed. With `in_place_loss`, the loss works in place on 16-bit logits;
    with `copied_loss`, its backward copies the fp32 probabilities. With `tiled_loss`, backward computes the head again,
    on tiles of its logits. Plain layers without stages keep `host_activations` on the host until backward: all that
    autograd stores, or the checkpoints of layers. They run head and loss on `loss_parts` parts of the tokens, one after
    another. With `fused_layers`, their norms and gates are kernels, with `autocast`, trained weights are in fp32 and
    its casts compute. With `rope_fusion`, transformer-engine's layers rotate queries and keys by one kernel. With
    `one_by_one`, other operations on the sequences of a pack run on each of them.
    """

    schedule: str | None = None
    splits: Splits | None = None
    early_mtp: bool = False
    account_for_embedding: bool = False
    account_for_loss: bool = False
    recompute_modules: frozenset[str] = frozenset({"core_attn"})
    grad_bytes: int = 4
    main_grad_bytes: int = 4
    main_param_bytes: int = 4
    exp_avg_bytes: int = 4
    exp_avg_sq_bytes: int = 4
    second_moments: str = "all"
    whole_matrices: bool = False
    precision_aware_optimizer: bool = False
    fp8_param_gather: bool = False
    assumed_fp8_gather: bool = False
    optimizer_offload_fraction: float = 0.0
    offload_modules: frozenset[str] = frozenset()
    offload_stages: tuple[int, ...] = ()
    offload_layers: int = 0
    gc_interval: int = 0
    fsdp: bool = False
    whole: frozenset[str] = frozenset()
    shard_gradients: bool = False
    fused_adam: bool = False
    gradient_fusion: bool = True
    sparse_kernels: bool = False
    fused_streams: bool = False
    indexer_loss: bool = False
    adapter: Adapter | None = None
    joint_adapters: bool = False
    peft: Peft | None = None
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    tp_comm_overlap: bool = False
    overlap_p2p_comm: bool = True
    overlap_expert_comm: bool = False
    dispatcher: str = "alltoall"
    dispatch_share: float = 1.0
    combine_gradient_share: float = 1.0
    linked_devices: float = np.inf
    neighbours: bool = False
    grouped_gemm: bool = True
    fused_experts: bool = False
    router_fusion: bool = False
    router_loss: bool = True
    padded_experts: bool = False
    expert_imbalance: float = 1.0
    routing_spread: float = 0.0
    cp_comm: str = "p2p"
    stores_core_copy: bool = False
    attention_kernel: str = ""
    rope_fusion: bool = True
    one_by_one: bool = False
    graphs: frozenset[str] = frozenset()
    cross_entropy_fusion: bool = False
    tiled_loss: bool = False
    host_activations: str = ""
    autocast: bool = False
    fused_layers: bool = False
    loss_parts: float = 1.0
    in_place_loss: bool = False
    copied_loss: bool = False
    wide_layers: int = 0
    wide_mtp: bool = False
    wide_modules: frozenset[str] = frozenset()
    mxfp8_modules: frozenset[str] = frozenset()
    frees_mtp_logits: bool = False
    dropout: bool = False

    def shares(self, states: str) -> bool:
        """Return whether the ranks of FSDP share "weights", "gradients" or "states" of the optimizer."""
        return self.fsdp and states not in self.whole


DEFAULTS = Options()

GRAPH_PARTS = frozenset({"attn", "mamba", "mlp", "moe", "moe_router", "moe_preprocess"})
WHOLE_STEP = frozenset({"full_iteration"})
"""`Options.graphs` for graphs of whole layers and of a whole step."""


class Tower(NamedTuple):
    """A vision tower, and the images that it reads: in the mean `images` per sequence, of `tokens` prompt tokens each.

    `frozen`: whether the weights of its layers are not trained. `frozen_mergers`: the same for those of its mergers.
    """

    vision: Vision
    images: float
    tokens: int
    frozen: bool = False
    frozen_mergers: bool = False

    @property
    def patches(self) -> int:
        """The number of patches of an image."""
        return self.tokens * self.vision.merge_size**2

    @property
    def pairs(self) -> float:
        """The share of all pairs of patches of an image that a layer computes, as a mean over its layers."""
        vision = self.vision
        in_window = min((vision.window_size / vision.patch_size) ** 2 / self.patches, 1.0)
        return (vision.full_layers + (vision.num_layers - vision.full_layers) * in_window) / vision.num_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Inputs to the formulas that all candidates of a task share.

    With `flash` the attention kernel stores no scores. With `fused_activation` the FFN's activation function is one
    kernel. With `transformer_engine`, Transformer Engine's layers replace megatron-core's own: rotary embedding and
    the accumulation of weight gradients are fused, and the down-projections of latent attention are replicated on
    each tensor-parallel rank. With `gathered_keys`, context parallelism gathers keys and values, with a copy for
    each query head. `core_share` is the share of the pairs of a causal attention core that each layer computes, if
    it does not follow from the model's layers. `lengths` are those of the samples; None if all have `sequence`
    tokens. `tower` is the vision tower; None if there is none, or no images.
    """

    model: Model
    sequence: int
    global_batch: int
    precision: str
    flash: bool = True
    fused_activation: bool = False
    transformer_engine: bool = False
    gathered_keys: bool = False
    core_share: float | None = None
    lengths: Lengths | None = None
    tower: Tower | None = None
    options: Options = DEFAULTS

    @property
    def value_bytes(self) -> int:
        """The bytes of one activation or weight. With 8-bit formats, activations between layers have 16 bits."""
        return 4 if self.precision == "fp32" else 2

    @property
    def unquantised(self) -> str:
        """The precision of attention, router and head, which never run in 8 or 4 bits."""
        return self.precision if self.precision in ("fp32", "fp16", "bf16") else "bf16"

    def precision_of(self, module: str) -> str:
        """Return the precision of the products of a module: `attention`, `latent` (projections of the tokens of routed
        experts) or `mixer_output` (the output projections of other mixers than attention)."""
        if self.precision == self.unquantised or module in self.options.wide_modules:
            return self.unquantised
        return "mxfp8" if module in self.options.mxfp8_modules else self.precision

    @property
    def wide_share(self) -> float:
        """The share of layers that are in 16 bits, in a job of fewer bits."""
        return min(self.options.wide_layers / self.model.num_layers, 1.0)

    @property
    def of_depths(self) -> Training:
        """The inputs for the layer of multi-token prediction, which may have another precision."""
        if not self.options.wide_mtp:
            return self
        return replace(self, precision=self.unquantised, options=replace(self.options, wide_layers=0))

    @property
    def weight_share(self) -> float:
        """The share of a micro-batch's activations that is stored until its weight gradients are computed, as in ZB-2p.

        It is 32 h / (34 h + 5 a s); flash attention drops the term 5 a s (arXiv 2401.10241, its scheduler).
        """
        scores = 0.0 if self.flash else 5.0 * self.model.num_attention_heads * self.sequence / self.model.hidden_size
        return 32.0 / (34.0 + scores)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes(ArrayRecord):
    """The parallel sizes and the micro-batch size that the weights and the tokens of a layer on a rank depend on."""

    tensor: FloatArray
    context: FloatArray
    micro_batch: FloatArray
    sequence_parallel: FloatArray
    expert: FloatArray
    expert_tensor: FloatArray

    def tokens(self, sequence: int) -> FloatArray:
        """Return the number of tokens of one micro-batch that a tensor-parallel group processes."""
        return self.micro_batch * sequence / self.context

    def token_rows(self, sequence: int) -> FloatArray:
        """Return the number of tokens of one micro-batch that one rank processes outside the tensor-parallel layers."""
        sequence_shards: FloatArray = 1.0 + self.sequence_parallel * (self.tensor - 1.0)
        return self.tokens(sequence) / sequence_shards

    def expert_tokens(self, chosen: int, sequence: int) -> FloatArray:
        """Return the number of token copies that the experts of one rank process if routing is balanced.

        `chosen`: the number of experts that a token chooses.
        """
        return chosen * self.token_rows(sequence) * self.expert_tensor

    def busiest(self, options: Options, count: int) -> FloatArray:
        """Return the load of the busiest of the ranks that share `count` experts, relative to the mean.

        A rank's load is the sum of those of its experts, which differ by `routing_spread`; of n normal ones, the
        largest is expected at the quantile (n - 3/8) / (n + 1/4) (Blom 1958; the quantile by Shore 1982, within 0.05).
        """
        odds = 0.625 / (self.expert - 0.375)
        deviations = 5.5556 * (1.0 - odds**0.1186)
        return options.expert_imbalance * (1.0 + options.routing_spread * np.sqrt(self.expert / count) * deviations)


AnySizes = TypeVar("AnySizes", bound=LayerSizes)
L = TypeVar("L", bound="LayerLayout")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLayout(LayerSizes):
    """All that the time of a layer depends on. Candidates that are equal in each field share one computed time.

    `overlap_kind`: see `Layout`. `recomputes` is 1 if layers are recomputed in full, which excludes the job's graphs.
    """

    overlap_kind: FloatArray
    recomputes: FloatArray

    @classmethod
    def of(cls: type[L], train: Training, layout: Layout) -> L:
        """Return the fields of a layout that times depend on. Jobs without graphs need no `recomputes`."""
        recomputes = np.where((layout.uniform + layout.block > 0.0) & bool(train.options.graphs), 1.0, 0.0)
        names = (name for name in cls.__dataclass_fields__ if name != "recomputes")
        return cls(recomputes=recomputes, **{name: getattr(layout, name) for name in names})

    def pairs(self, model: Model) -> BoolArray:
        """Return whether `overlap_moe_expert_parallel_comm` is legal, for each candidate."""
        depths = model.mtp_num_layers
        return (self.overlap_kind > min(depths, 1)) & (depths < 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayout(LayerLayout):
    """All that the seconds of a stage depend on, apart from its numbers of layers and from offload of activations."""

    virtual: FloatArray
    selective: FloatArray
    uniform: FloatArray
    block: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout(LayerSizes):
    """The parallel sizes and layer splits of candidates, as float arrays with one element per candidate.

    `uniform` is the number of layers in a recomputed chunk, `block` the number of layers recomputed at the start of
    each (virtual) stage; 0 means off. `selective` is 1 with selective recompute, else 0. `expert_groups` is 1 if
    experts have data-parallel groups of their own also without expert parallelism, else 0. `first_layers` and
    `last_layers` are 0 for an even split. `split` is the number of a split in `Options.splits`, 0 for none.

    `further` are the meshes after the first one, for the node groups after the first one. They have the same
    `pipeline`, `virtual`, `microbatches` and `split` as the first mesh. The tuple is empty if all node groups have the
    same parallel sizes.

    If each node group has whole replicas, `data` is the number of replicas in all groups, and `here` contains the
    number of replicas in this layout's group.

    `sharded_optimizer` may be a column of all its values, of the shape (values, 1). What depends on it then has the
    shape (values, candidates).
    """

    data: FloatArray
    pipeline: FloatArray
    virtual: FloatArray
    expert_groups: FloatArray
    microbatches: FloatArray
    sharded_optimizer: FloatArray
    selective: FloatArray
    uniform: FloatArray
    block: FloatArray
    first_layers: FloatArray
    last_layers: FloatArray
    split: FloatArray
    further: tuple[MeshStages, ...] = ()
    here: tuple[FloatArray, ...] = ()

    def __getitem__(self, rows: slice | IntArray) -> Layout:
        if self.sharded_optimizer.ndim == 1:
            return ArrayRecord.__getitem__(self, rows)
        part = ArrayRecord.__getitem__(replace(self, sharded_optimizer=self.data), rows)
        return replace(part, sharded_optimizer=self.sharded_optimizer)

    def sharing(self) -> tuple[IntArray, IntArray]:
        """Find the candidates that differ in more than `sharded_optimizer`, as `distinct` does, on one node group."""
        others = [name for name in self.__dataclass_fields__ if name not in ("sharded_optimizer", "further", "here")]
        return distinct([*self.here, *(getattr(self, name) for name in others)])

    def shards(self) -> FloatArray:
        """Return the number of ranks that shard the optimizer state of a dense weight."""
        return 1.0 + self.sharded_optimizer * (self.data * self.context - 1.0)

    @property
    def overlap_kind(self) -> FloatArray:
        """Whether the layers of two micro-batches can overlap, as a code for each candidate.

        0: they cannot. 1: without a pipeline. 2: in an interleaved pipeline.
        """
        recomputes, kinds = (self.uniform > 0) | (self.block > 0), np.where(self.virtual > 1.0, 2.0, 0.0)
        return np.where((self.expert == 1.0) | recomputes, 0.0, np.where(self.pipeline > 1.0, kinds, 1.0))

    def expert_replicas(self) -> FloatArray:
        """Return the number of ranks that reduce the gradients of the same experts.

        Without groups of their own, their gradients are reduced like those of other weights, even if experts are split
        by tensor parallelism.
        """
        dense = self.data * self.context
        group: FloatArray = dense * self.tensor / (self.expert * self.expert_tensor)
        return np.where(self._has_expert_groups(), group, dense).clip(min=1.0)

    def _has_expert_groups(self) -> BoolArray:
        return (self.expert > 1.0) | (self.expert_groups > 0.0)

    def communicators(self, linked: float = 1.0) -> FloatArray:
        """Return the number of communicators of a rank whose groups have ranks outside of `linked` devices.

        There is one communicator of all ranks, and one of each parallel group that has several ranks.
        """
        shards, none = self.data * self.context, np.ones_like(self.data)
        experts = np.where(self._has_expert_groups(), self.expert_replicas(), 1.0)
        owners, world = self.expert * self.expert_tensor, self.tensor * shards * self.pipeline
        groups = [(world, none), (self.tensor, none), (self.context, self.tensor), (shards, self.tensor)]
        groups += [(self.pipeline, self.tensor * shards), (self.expert, self.expert_tensor), (experts, owners)]
        count: FloatArray = np.sum([(size > 1.0) & (size * stride > linked) for size, stride in groups], axis=0)
        return count + 0.0

    def expert_shards(self) -> FloatArray:
        """Return the number of ranks that shard the optimizer state of an expert's weight."""
        return 1.0 + self.sharded_optimizer * (self.expert_replicas() - 1.0)


@dataclass(frozen=True, slots=True)
class MeshStages(ArrayRecord):
    """The layout of the stages on one node group that has its own parallel sizes. `start` is the index of the first."""

    start: FloatArray
    layout: Layout


def distinct(columns: Sequence[FloatArray | IntArray | BoolArray]) -> tuple[IntArray, IntArray]:
    """Find the distinct rows of columns of integers, none of which is negative.

    Returns two arrays: the index of the first occurrence of each distinct row, and, for each row, the index of its
    distinct row in the first array.
    """
    key, size = np.zeros(columns[0].shape, dtype=np.int64), 1
    for column in columns:
        value_count = int(column.max(initial=0)) + 1
        if value_count == 1:
            continue
        if size * value_count >= 1 << 62:
            key = np.unique(key, return_inverse=True)[1]
            size = int(key.max(initial=0)) + 1
        key, size = key * value_count + column.astype(np.int64), size * value_count
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return first, inverse


def pick(indices: IntArray, values: Sequence[T]) -> T:
    """Return `values[indices[i]][i]` for each candidate i. The values are arrays or records of arrays.

    It is faster than `numpy.choose` and does not limit the number of arrays.
    """
    return _picked(indices * indices.size + np.arange(indices.size).reshape(indices.shape), values)


def _picked(places: IntArray, values: Sequence[T]) -> T:
    """Return the elements at the indices `places` of the concatenation of `values`."""
    first: Any = values[0]
    result: Any
    if isinstance(first, tuple):
        result = tuple(_picked(places, each) for each in zip(*cast("Any", values), strict=True))
    elif isinstance(first, ArrayRecord):
        parts = {
            name: _picked(places, [getattr(value, name) for value in values]) for name in first.__dataclass_fields__
        }
        result = type(first)(**parts)
    else:
        result = np.concatenate([np.broadcast_to(cast("Any", value), places.shape) for value in values]).take(places)
    return cast("T", result)
