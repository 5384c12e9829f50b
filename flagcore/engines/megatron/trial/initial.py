"""Initial weights that do not depend on how the model is split, so that every layout has the same losses.

Each weight is drawn whole from a seed made of its global name, and each rank keeps its own part.
"""

from __future__ import annotations

import math
import re
import zlib
from typing import Any

import torch
from megatron.core import parallel_state as groups

_SPREAD = 0.02 * math.sqrt(3.0)  # a uniform draw with the usual standard deviation of 0.02, cheaper than a normal
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


def set_initial_weights(chunk: torch.nn.Module, config: Any, seed: int) -> None:
    """Fill one model chunk's parameters, before it is wrapped for mixed precision or data parallelism."""
    layers = _layer_names(chunk)
    tied = bool(chunk.share_embeddings_and_output_weights)
    for name, weight in chunk.named_parameters():
        if weight.dim() == 1:  # normalisation
            weight.data.fill_(1.0)
            continue
        generator = torch.Generator(device=weight.device)
        generator.manual_seed(zlib.crc32(_global_name(name, layers, config, tied).encode()) + seed)
        weight.data.copy_(_own_part(name, weight, config, generator))


def _layer_names(chunk: torch.nn.Module) -> dict[str, str]:
    """Map each layer's module path in this chunk to a name that holds its number in the whole model."""
    return {
        path: f"layer{module.layer_number}"
        for path, module in chunk.named_modules()
        if hasattr(module, "layer_number") and hasattr(module, "mlp")
    }


def _global_name(name: str, layers: dict[str, str], config: Any, tied: bool) -> str:
    """Name a parameter as the unsplit model would: whole-model layer and expert numbers, one tied embedding."""
    if name == "output_layer.weight" and tied:
        return "embedding.word_embeddings.weight"
    for path, layer in layers.items():
        if name.startswith(path + "."):
            name = layer + name[len(path) :]
            break
    first_expert = 0
    if config.num_moe_experts is not None:
        first_expert = groups.get_expert_model_parallel_rank() * (
            config.num_moe_experts // groups.get_expert_model_parallel_world_size()
        )
    return _EXPERT.sub(lambda match: f".expert{int(match[1]) + first_expert}.", name)


def _own_part(name: str, weight: torch.Tensor, config: Any, generator: torch.Generator) -> torch.Tensor:
    """Draw the whole weight and return this rank's part of it."""
    if _EXPERT.search(name):
        size, rank = groups.get_expert_tensor_parallel_world_size(), groups.get_expert_tensor_parallel_rank()
    else:
        size, rank = groups.get_tensor_model_parallel_world_size(), groups.get_tensor_model_parallel_rank()
    split = getattr(weight, "tensor_model_parallel", False) and size > 1
    shape = list(weight.shape)
    axis = int(getattr(weight, "partition_dim", 0)) if split else 0
    if split:
        shape[axis] *= size
    whole = torch.empty(shape, device=weight.device).uniform_(-_SPREAD, _SPREAD, generator=generator)
    if not split:
        return whole
    if config.gated_linear_unit and "linear_fc1" in name:  # each rank holds its part of the gate, then of the rest
        return torch.cat([half.chunk(size, axis)[rank] for half in whole.chunk(2, axis)], axis)
    return whole.chunk(size, axis)[rank]
