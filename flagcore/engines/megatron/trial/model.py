"""Builds Megatron-core's model, data-parallel wrapper and optimizer of a job.

Initial weights do not depend on the layout, so every layout has the same losses. The seed of each weight is derived
from its global name; every rank draws the whole weight and keeps its own part.
"""

from __future__ import annotations

import math
import re
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state as groups
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module

from flagcore.engines.megatron.trial import layers, te
from flagcore.engines.megatron.trial.config import accepted_arguments, ddp_config, optimizer_config, transformer_config
from flagcore.engines.megatron.trial.job import Job
from flagcore.engines.training.parameters import padded_vocab


@dataclass(frozen=True)
class BuiltModel:
    """The model chunks of this rank, one per virtual stage, with their configuration and optimizer."""

    config: Any
    chunks: list[Any]
    optimizer: Any


def build(job: Job, device: torch.device) -> BuiltModel:
    """Build this rank's part of the model. The process groups must exist. Raises the errors of Megatron's checks."""
    if job.transformer_engine:
        model_parallel_cuda_manual_seed(job.train.seed)
        if job.candidate.tp_comm_overlap:
            te.start_buffers(job)
    else:
        layers.patch_without_transformer_engine()
        initialize_rng_tracker(inference_rng_tracker=True)  # without dropout, ranks need no separate random states
    config = transformer_config(job)
    stages = range(job.virtual_stages) if job.virtual_stages else (None,)
    chunks = [_build_chunk(job, config, stage, device) for stage in stages]
    wrapped_chunks = [
        DistributedDataParallel(config, ddp_config(job), chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    optimizer = get_megatron_optimizer(optimizer_config(job, config), wrapped_chunks, use_gloo_process_groups=False)
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    _set_overlap_functions(config, job, wrapped_chunks)
    return BuiltModel(config, wrapped_chunks, optimizer)


def _set_overlap_functions(config: Any, job: Job, chunks: list[Any]) -> None:
    """Set the schedules' functions that start collectives of gradients and weights, as Megatron-LM's training loop."""

    def of_chunks(name: str) -> Any:
        functions = [getattr(chunk, name) for chunk in chunks]
        return functions if len(functions) > 1 else functions[0]

    if job.candidate.overlap_grad_reduce:
        config.no_sync_func, config.grad_sync_func = of_chunks("no_sync"), of_chunks("start_grad_sync")
    if job.candidate.overlap_param_gather and job.virtual_stages:
        config.param_sync_func = of_chunks("start_param_sync")


def _build_chunk(job: Job, config: Any, vp_stage: int | None, device: torch.device) -> Any:
    if vp_stage is not None:
        groups.set_virtual_pipeline_model_parallel_rank(vp_stage)  # 0.12 has no argument for it
    stage_argument, is_te = accepted_arguments(groups.is_pipeline_last_stage, vp_stage=vp_stage), job.transformer_engine
    model = GPTModel(
        config,
        layers.block_spec(config, vp_stage, transformer_engine=is_te),
        vocab_size=int(padded_vocab(job.model, np.array(job.candidate.tensor_model_parallel_size))),
        max_sequence_length=job.train.seq_length,
        pre_process=groups.is_pipeline_first_stage(ignore_virtual=False, **stage_argument),
        post_process=groups.is_pipeline_last_stage(ignore_virtual=False, **stage_argument),
        share_embeddings_and_output_weights=not job.model.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        mtp_block_spec=layers.mtp_spec(config, vp_stage, transformer_engine=is_te),
        **accepted_arguments(GPTModel.__init__, vp_stage=vp_stage),
    )
    model.to(device)
    set_initial_weights(model, config, job.train.seed)
    return Float16Module(config, model) if config.bf16 or config.fp16 else model


_LIMIT = 0.02 * math.sqrt(3.0)  # of a uniform distribution with standard deviation 0.02, which is faster than a normal
_EXPERT_PATTERN = re.compile(r"\.local_experts\.(\d+)\.|\.weight(\d+)$")


def set_initial_weights(chunk: torch.nn.Module, config: Any, seed: int) -> None:
    """Set the parameters of one model chunk that is not yet wrapped for mixed precision or data parallelism."""
    layers = _layer_names(chunk)
    is_tied = bool(chunk.share_embeddings_and_output_weights)
    for name, weight in chunk.named_parameters():
        if weight.dim() == 1:  # normalisation
            weight.data.fill_(1.0)
            continue
        generator = torch.Generator(device=weight.device)
        generator.manual_seed(zlib.crc32(_global_name(name, layers, config, is_tied).encode()) + seed)
        weight.data.copy_(_own_part(name, weight, config, generator))


def _layer_names(chunk: torch.nn.Module) -> dict[str, str]:
    """Return a name with the global layer number for the module path of each layer in this chunk."""
    return {
        path: f"layer{module.layer_number}"
        for path, module in chunk.named_modules()
        if hasattr(module, "layer_number") and hasattr(module, "mlp")
    }


def _global_name(name: str, layers: dict[str, str], config: Any, is_tied: bool) -> str:
    """Return a parameter's name in the unsplit model, with global numbers of layers and experts."""
    if name == "output_layer.weight" and is_tied:
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
    return _EXPERT_PATTERN.sub(lambda match: f".expert{int(match[1] or match[2]) + first_expert}.", name)


def _own_part(name: str, weight: torch.Tensor, config: Any, generator: torch.Generator) -> torch.Tensor:
    """Draw a whole weight and return this rank's part of it."""
    if _EXPERT_PATTERN.search(name):
        size, rank = groups.get_expert_tensor_parallel_world_size(), groups.get_expert_tensor_parallel_rank()
    else:
        size, rank = groups.get_tensor_model_parallel_world_size(), groups.get_tensor_model_parallel_rank()
    is_split = getattr(weight, "tensor_model_parallel", False) and size > 1
    shape = list(weight.shape)
    axis = int(getattr(weight, "partition_dim", 0)) if is_split else 0
    if is_split:
        shape[axis] *= size
    whole_weight = torch.empty(shape, device=weight.device).uniform_(-_LIMIT, _LIMIT, generator=generator)
    if not is_split:
        return whole_weight
    if config.gated_linear_unit and "linear_fc1" in name:  # a rank holds its parts of the gate and of the value
        return torch.cat([half.chunk(size, axis)[rank] for half in whole_weight.chunk(2, axis)], axis)
    return whole_weight.chunk(size, axis)[rank]
