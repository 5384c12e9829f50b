"""Build the job's model, its data-parallel wrapper and its optimizer, all Megatron-core's own.

Initial weights do not depend on how the model is split, so every layout has the same losses: each weight is drawn whole
from a seed made of its global name, and each rank takes its own part.
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

from flagcore.engines.megatron.parallel.parameters import padded_vocab
from flagcore.engines.megatron.trial import layers, te
from flagcore.engines.megatron.trial.config import ddp_config, optimizer_config, transformer_config
from flagcore.engines.megatron.trial.job import Job
from flagcore.engines.megatron.trial.releases import accepted


@dataclass(frozen=True)
class Built:
    """What the training loop needs: one model chunk per virtual stage of this rank, and their optimizer."""

    config: Any
    chunks: list[Any]
    optimizer: Any


def build(job: Job, device: torch.device) -> Built:
    """Build this rank's part. The process groups must exist. Megatron's own checks raise through it."""
    if job.transformer_engine:
        model_parallel_cuda_manual_seed(job.train.seed)
        if job.candidate.tp_comm_overlap:
            te.start_buffers(job)
    else:
        layers.patch_without_transformer_engine()
        initialize_rng_tracker(inference_rng_tracker=True)  # dropout is off: no random states to keep apart
    config = transformer_config(job)
    stages = range(job.virtual_stages) if job.virtual_stages else (None,)
    chunks = [_chunk(job, config, stage, device) for stage in stages]
    wrapped = [
        DistributedDataParallel(config, ddp_config(job), chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    optimizer = get_megatron_optimizer(optimizer_config(job, config), wrapped, use_gloo_process_groups=False)
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    _overlap(config, job, wrapped)
    return Built(config, wrapped, optimizer)


def _overlap(config: Any, job: Job, chunks: list[Any]) -> None:
    """Give the schedules what starts the collectives of gradients and weights, as Megatron-LM's training loop does."""

    def of_chunks(name: str) -> Any:
        functions = [getattr(chunk, name) for chunk in chunks]
        return functions if len(functions) > 1 else functions[0]

    if job.candidate.overlap_grad_reduce:
        config.no_sync_func, config.grad_sync_func = of_chunks("no_sync"), of_chunks("start_grad_sync")
    if job.candidate.overlap_param_gather and job.virtual_stages:
        config.param_sync_func = of_chunks("start_param_sync")


def _chunk(job: Job, config: Any, vp_stage: int | None, device: torch.device) -> Any:
    if vp_stage is not None:
        groups.set_virtual_pipeline_model_parallel_rank(vp_stage)  # 0.12 has no argument for it
    place, is_te = accepted(groups.is_pipeline_last_stage, vp_stage=vp_stage), job.transformer_engine
    model = GPTModel(
        config,
        layers.block_spec(config, vp_stage, transformer_engine=is_te),
        vocab_size=int(padded_vocab(job.model, np.array(job.candidate.tensor_model_parallel_size))),
        max_sequence_length=job.train.seq_length,
        pre_process=groups.is_pipeline_first_stage(ignore_virtual=False, **place),
        post_process=groups.is_pipeline_last_stage(ignore_virtual=False, **place),
        share_embeddings_and_output_weights=not job.model.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        mtp_block_spec=layers.mtp_spec(config, vp_stage, transformer_engine=is_te),
        **accepted(GPTModel.__init__, vp_stage=vp_stage),
    )
    model.to(device)
    set_initial_weights(model, config, job.train.seed)
    return Float16Module(config, model) if config.bf16 or config.fp16 else model


_SPREAD = 0.02 * math.sqrt(3.0)  # a uniform draw with the usual standard deviation of 0.02, cheaper than a normal
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.|\.weight(\d+)$")


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
    return _EXPERT.sub(lambda match: f".expert{int(match[1] or match[2]) + first_expert}.", name)


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
