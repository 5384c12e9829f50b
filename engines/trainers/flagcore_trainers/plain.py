"""Memory of a decoder whose layers are plain operators of torch, such as one of transformers, without a pipeline.

What autograd stores and the moments at which the most is allocated were counted in torch 2.13. Rotary embeddings store
nothing but queries and keys, as cosines and sines need no gradient.
"""

from dataclasses import dataclass, replace

import numpy as np
from flagcore_models.layers import layer_counts
from flagcore_models.mixers.attention import Attention
from flagcore_training.layout import Layout, Training
from flagcore_training.memory.activations import stored_scores
from flagcore_training.memory.adapters import PEFT_STORED
from flagcore_training.memory.states import states_of
from flagcore_training.stages import stage
from flagcore_training.weights import stage_parameters

from flagcore.domain.space import FloatArray
from flagcore_trainers.fully_shard.activations import activations
from flagcore_trainers.fully_shard.memory import LOSS_BYTES
from flagcore_trainers.fully_shard.weights import MemoryInputs

NORM_BYTES = 4.0
"""Bytes per element that a norm of several kernels stores beyond a copy of its input: it computes in fp32."""


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Bytes per rank at the moments of a step at which the most is allocated, above what stays between steps.

    `forward`: at its end. `loss`: in the backward of the loss. `head`: in that of the head. `layer`: in that of a
    layer. `end`: at the end of backward.
    """

    forward: FloatArray
    loss: FloatArray
    head: FloatArray
    layer: FloatArray
    end: FloatArray

    def highest(self) -> FloatArray:
        highest: FloatArray = np.max(np.stack(np.broadcast_arrays(*vars(self).values())), axis=0)
        return highest

    def plus(self, **extra: FloatArray) -> "Moments":
        """Return moments with further bytes, by name."""
        return replace(self, **{name: getattr(self, name) + value for name, value in extra.items()})


def moments(train: Training, layout: Layout) -> Moments:
    """Return the moments of a step, without weights and buffers that a program gathers or reduces gradients in.

    With a single micro-batch, gradients that ranks do not shard are not there before their backward.
    """
    model, u, ones = train.model, float(train.value_bytes), np.ones_like(layout.data)
    job = MemoryInputs(
        model=model,
        value_bytes=u,
        ranks=layout.expert,
        tensor=layout.tensor,
        context=ones,
        tokens=layout.tokens(train.sequence),
        microbatches=layout.microbatches,
        reshard=ones < 0,
        checkpointing=np.where(layout.uniform > 0, 2.0, 0.0),
        reduce_bytes=u * ones,
        offload=ones < 0,
        replicated=ones < 0,
        expert=layout.expert,
        pipeline=ones,
        schedule=np.zeros_like(ones, dtype=np.int64),
        fused_norm=False,
        split_tokens=layout.sequence_parallel > 0,
        gradients_wait=False,
        tiled_loss=train.options.tiled_loss,
        adapter=train.options.adapter,
        dora_stored=PEFT_STORED,
    )
    act = activations(job)
    norm = NORM_BYTES * act.hidden / u
    is_kept = job.checkpointing == 0
    stored, layer = act.stored, np.zeros_like(ones)
    for each, number in layer_counts(model).items():
        extra = len(each.parts) * norm
        if isinstance(mixer := each.mixer, Attention):
            extra = extra + stored_scores(train, layout, mixer) - 4.0 * mixer.num_heads * job.tokens / layout.tensor
        stored = stored + number * np.where(is_kept, extra, 0.0)
        for moment in act.layers[each].backward:
            layer = np.maximum(layer, moment + np.where(is_kept, 0.0, extra))
    layer = stored + layer
    rows = u * model.vocab_size / layout.tensor * (train.options.adapter is None)  # frozen weights have no gradients
    table, own = rows * model.hidden_size, rows * model.num_layers * model.layer_embedding_size
    logits, at_head = job.logits, stored + act.head_input + norm
    loss, gradients = LOSS_BYTES * logits, u * logits + table + act.hidden
    if job.tiled_loss:  # gradients of hidden states and head in fp32, and a tile or the same in the format of weights
        of_tile = 4.0 * (act.hidden + table) / u
        loss, gradients = of_tile + u * logits, of_tile + act.hidden + table
    states = states_of(train, layout, stage_parameters(train, layout, stage(model, layout, np.zeros_like(ones))))
    late = np.where(layout.microbatches > 1, 0.0, states[0].gradients + states[1].gradients)
    late = late * (not train.options.fsdp)
    return Moments(
        forward=at_head - late,
        loss=at_head + loss - late,
        head=at_head + gradients - late,
        layer=layer - np.maximum(late - table, 0.0),
        end=act.hidden + np.maximum(table, own),
    )
