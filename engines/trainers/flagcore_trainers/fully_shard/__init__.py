"""Predictions of training with torch's `fully_shard`, for the engines `fsdp2` and `torchtitan`. Here: their columns."""

import numpy as np
from flagcore_models.layers import attention_counts, mixer_counts
from flagcore_models.mixers.attention import Attention

from flagcore.domain.model import Model
from flagcore.domain.space import Columns, IntArray

REPLICATE, SHARD, TP = "data_parallel_replicate_size", "data_parallel_shard_size", "tensor_model_parallel_size"
CP, MBS, RESHARD = "context_parallel_size", "micro_batch_size", "reshard_after_forward"
AC, REDUCE, OFFLOAD, COMPILE = "activation_checkpointing", "reduce_dtype", "cpu_offload", "compile"
STATES = "state_dtype"
COUNT = "microbatches"
"""Micro-batches of a pass through a pipeline, if these are not all of a step."""
PP, SCHEDULE, EP = "pipeline_model_parallel_size", "pipeline_schedule", "expert_model_parallel_size"
DISPATCHER = "moe_token_dispatcher_type"
"""What a job record leaves open: how experts exchange tokens (`Options.dispatcher`)."""
SCHEDULES = ("1f1b", "interleaved", "zbv", "dualpipev")
INTERLEAVED, ZBV, DUALPIPEV, SELECTIVE = 2, 3, 4, 2
"""Codes of the schedules after the first one, whose code is 1, and of selective checkpoints."""


def missing_parts(model: Model) -> list[str]:
    """Return the names of the parts of a model that predictions do not have."""
    return ["sparse attention"] * any(each.indexer is not None for each in attention_counts(model))


def is_plain(model: Model) -> bool:
    """Return whether all layers have attention over all tokens, not latent and without a gate, and the same order."""
    return not model.layers and all(type(each) is Attention and not each.gate for each in mixer_counts(model))


def parts(columns: Columns) -> IntArray:
    """Return how many parts of the model a rank has."""
    return np.where((columns[PP] > 1) & (columns[SCHEDULE] >= INTERLEAVED), 2, 1)
