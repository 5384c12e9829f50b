"""What the formulas take: the work of a training step, and how it is split, one array element a candidate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from flagcore.domain.model import Model
from flagcore.domain.space import FloatArray, IntArray
from flagcore.engines.megatron.parallel.options import DEFAULTS, Options


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What all candidates of a task share.

    `flash` tells an attention kernel that keeps no scores from one that does. `fused_activation` says that
    the FFN's activation function is one kernel. `transformer_engine` says that its layers replace megatron-core's
    own: rotation and the accumulation of weight gradients are fused, and the down-projections of latent
    attention are whole on each tensor-parallel rank. `repeated_keys` says that attention copies keys and values for
    each query head that shares them. `options` are the engine's further settings.
    """

    model: Model
    sequence: int
    global_batch: int
    precision: str
    flash: bool = True
    fused_activation: bool = False
    transformer_engine: bool = False
    repeated_keys: bool = False
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
class Layout:
    """How candidates split the work. Counts, as floats; arrays of one length.

    `uniform` is the number of layers in a recomputed chunk, `block` the number of layers recomputed at the
    start of each (virtual) stage, `selective` 1 where only the attention core is recomputed; 0 is off.
    `first_layers` and `last_layers` are 0 where the pipeline is split evenly.
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

    def rows(self, part: slice | IntArray) -> Layout:
        """Return some of the candidates."""
        return Layout(**{field.name: getattr(self, field.name)[part] for field in fields(self)})

    def distinct(self, names: Sequence[str]) -> tuple[IntArray, IntArray]:
        """Return the first row of each combination of the named counts, and for each candidate which one it has."""
        key = np.zeros(self.data.shape, dtype=np.int64)
        for name in names:
            values = getattr(self, name).astype(np.int64)
            many = int(values.max(initial=0)) + 1
            if int(key.max(initial=0)) * many >= 1 << 62:
                key = np.unique(key, return_inverse=True)[1]
            key = key * many + values
        _, first, which = np.unique(key, return_index=True, return_inverse=True)
        return first, which

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

    def expert_replicas(self) -> FloatArray:
        """Return the ranks that reduce the gradients of the same experts: the world without pipeline, expert and its
        tensor split. Without expert parallelism experts are reduced like all other weights, whatever their tensor split
        (megatron-core 0.16 `transformer/moe/experts.py`).
        """
        dense = self.data * self.context
        group: FloatArray = dense * self.tensor / (self.expert * self.expert_tensor)
        return np.where(self.expert > 1.0, group, dense).clip(min=1.0)

    def expert_shards(self) -> FloatArray:
        """Return the ranks that share the optimizer state of an expert's weight."""
        return 1.0 + self.sharded_optimizer * (self.expert_replicas() - 1.0)


MOST_CHOICES = 30
"""Arrays among which `numpy.choose` chooses: its limit is 32 or 64, depending on its version."""


def pick(which: IntArray, values: Sequence[FloatArray] | Sequence[IntArray]) -> FloatArray:
    """Return for each candidate the value at its number in `which`. As `numpy.choose`, without its limit."""
    if len(values) <= MOST_CHOICES:
        few: FloatArray = np.choose(which, values)
        return few
    rows = np.stack([np.broadcast_to(value, which.shape) for value in values])
    many: FloatArray = np.take_along_axis(rows, which[None], axis=0)[0]
    return many
