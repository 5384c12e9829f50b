"""Predictions of training with torch's `fully_shard`, for the engines `fsdp2` and `torchtitan`. Here: their columns."""

import numpy as np

from flagcore.domain.space import Columns, IntArray

REPLICATE, SHARD, TP = "data_parallel_replicate_size", "data_parallel_shard_size", "tensor_model_parallel_size"
CP, MBS, RESHARD = "context_parallel_size", "micro_batch_size", "reshard_after_forward"
AC, REDUCE, OFFLOAD, COMPILE = "activation_checkpointing", "reduce_dtype", "cpu_offload", "compile"
PP, SCHEDULE, EP = "pipeline_model_parallel_size", "pipeline_schedule", "expert_model_parallel_size"
SCHEDULES = ("1f1b", "interleaved", "zbv", "dualpipev")
INTERLEAVED, ZBV, DUALPIPEV, SELECTIVE = 2, 3, 4, 2
"""Codes of the schedules after the first one, whose code is 1, and of selective checkpoints."""
PARTS = (*("multi_latent_attention", "mtp_num_layers", "vision", "layers", "attention_output_gate"),)
"""Fields of a model whose parts the predictions and the trial program of `fsdp2` do not have."""


def parts(columns: Columns) -> IntArray:
    """Return how many parts of the model a rank has."""
    return np.where((columns[PP] > 1) & (columns[SCHEDULE] >= INTERLEAVED), 2, 1)
