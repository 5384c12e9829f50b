"""Sizes of weights and cache, and the fewest devices that a model needs."""

from __future__ import annotations

import math
import os

from flagcore.domain.model import Model
from flagcore.domain.spec import Task
from flagcore.engines.serving.common.hardware import Hardware
from flagcore.physics.kernels.roofline import BYTES
from flagcore.physics.transformer import attended, widths

ROOM = 0.85
"""Share of a device's memory for weights (a choice): the rest is for activations, graphs and cache."""


def parameters(model: Model) -> float:
    """Return the number of weights of a model."""
    hidden, gates = float(model.hidden_size), 3.0 if model.gated_linear_unit else 2.0
    query, key, value = widths(model)
    rank = (model.q_lora_rank or 0) + (model.kv_lora_rank or 0) if model.multi_latent_attention else 0
    attention = hidden * (query + key + value + attended(model)) if not rank else hidden * (rank + attended(model))
    if rank:
        heads = model.num_attention_heads * ((model.qk_head_dim or 0) + (model.v_head_dim or 0))
        attention += (model.q_lora_rank or hidden) * query + (model.kv_lora_rank or 0) * heads
    experts = model.num_moe_experts or 0
    sparse = model.num_layers - model.moe_first_dense_layers if experts else 0
    routed = experts * (model.moe_ffn_hidden_size or 0) + (model.moe_shared_expert_intermediate_size or 0)
    layers = model.num_layers * attention + (model.num_layers - sparse) * gates * hidden * model.ffn_hidden_size
    tables = (1 + model.untie_embeddings_and_output_weights) * model.vocab_size * hidden
    return layers + sparse * (gates * hidden * routed + hidden * experts) + tables


def weight_bytes(task: Task) -> float:
    """Return the bytes of a task's weights: the size of a file, else their number at the job's precision."""
    weights = task.spec.serve.weights
    if weights is not None and os.path.isfile(weights):
        return float(os.path.getsize(weights))
    return parameters(task.spec.model) * BYTES.get(task.spec.serve.precision, 2.0)


def cache_bytes_per_token(model: Model, element_bytes: float) -> float:
    """Return the bytes of one token in the KV cache, over all devices without replication."""
    if model.multi_latent_attention:
        return model.num_layers * ((model.kv_lora_rank or 0) + (model.qk_pos_emb_head_dim or 0)) * element_bytes
    return 2.0 * model.num_layers * model.num_query_groups * model.kv_channels * element_bytes


def fewest_devices(task: Task) -> int:
    """Return the smallest power of two of devices that the weights fit into; 1 if the memory is unknown.

    At most the largest one that there are devices for, and that divides the attention heads.
    """
    hardware, heads = Hardware.of(task), task.spec.model.num_attention_heads
    if hardware.on_cores or math.isnan(hardware.memory_bytes):
        return 1
    devices = 1
    while weight_bytes(task) > ROOM * hardware.memory_bytes * devices and devices * 2 <= hardware.cards:
        if heads % (devices * 2):
            break
        devices *= 2
    return devices
