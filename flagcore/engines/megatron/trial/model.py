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
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from flagcore.engines.megatron.parallel.parameters import padded_vocab
from flagcore.engines.megatron.trial import layers
from flagcore.engines.megatron.trial.job import Job

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_OF_MODEL = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("qk_layernorm", "add_qkv_bias", "gated_linear_unit"),
)
_OF_CANDIDATE = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
)
_OF_RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers")
_FIRST_LOSS_SCALE = 2.0**12  # fp16; the usual 2**32 skips the first steps, which are the ones measured here


@dataclass(frozen=True)
class Built:
    """What the training loop needs: one model chunk per virtual stage of this rank, and their optimizer."""

    config: Any
    chunks: list[Any]
    optimizer: Any


def build(job: Job, device: torch.device) -> Built:
    """Build this rank's part. The process groups must exist. Megatron's own checks raise through it."""
    layers.patch_without_transformer_engine()
    initialize_rng_tracker(inference_rng_tracker=True)  # dropout is off: no random states to keep apart
    config = transformer_config(job)
    stages = range(job.virtual_stages) if job.virtual_stages else (None,)
    chunks = [_chunk(job, config, stage, device) for stage in stages]
    use_distributed_optimizer = job.candidate.use_distributed_optimizer
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=use_distributed_optimizer, grad_reduce_in_fp32=config.bf16
    )
    wrapped = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=0.0,  # until training sets it
            weight_decay=0.01,
            clip_grad=1.0,
            bf16=config.bf16,
            fp16=config.fp16,
            params_dtype=config.params_dtype,
            initial_loss_scale=_FIRST_LOSS_SCALE,
            use_distributed_optimizer=use_distributed_optimizer,
        ),
        wrapped,
        use_gloo_process_groups=False,
    )
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    return Built(config, wrapped, optimizer)


def transformer_config(job: Job) -> Any:
    """Translate the job into Megatron's configuration; its checks raise AssertionError or ValueError."""
    model, candidate = job.model, job.candidate
    dtype = _DTYPES[job.train.precision]
    interleaved = job.virtual_stages is not None
    values: dict[str, Any] = {
        **{name: getattr(model, name) for name in _OF_MODEL},
        **{name: getattr(candidate, name) for name in _OF_CANDIDATE},
        "mtp_num_layers": model.mtp_num_layers or None,
        "normalization": "RMSNorm",
        "activation_func": torch.nn.functional.silu if model.gated_linear_unit else torch.nn.functional.gelu,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        # Fused kernels need extra libraries, and then every device could not run the same program.
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        # The weights come from initial.py. Megatron's own pass still marks which weights are split, and how.
        "perform_initialization": True,
        "init_method": _leave,
        "output_layer_init_method": _leave,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "virtual_pipeline_model_parallel_size": job.virtual_stages,
        "expert_tensor_parallel_size": groups.get_expert_tensor_parallel_world_size(),
        # Without tensor parallelism Megatron-LM clears the flag, where Megatron-core would refuse it.
        "sequence_parallel": candidate.sequence_parallel and candidate.tensor_model_parallel_size > 1,
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        "deallocate_pipeline_outputs": True,
    }
    if candidate.pipeline_model_parallel_layout:
        values["pipeline_model_parallel_layout"] = candidate.pipeline_model_parallel_layout
    if candidate.recomputes:
        values |= {name: getattr(candidate, name) for name in _OF_RECOMPUTE}
        if candidate.recompute_modules is not None:
            values["recompute_modules"] = list(candidate.recompute_modules)
    if model.num_moe_experts is not None:
        values.update(_expert_values(job))
    kind = TransformerConfig
    if model.multi_latent_attention:
        kind = MLATransformerConfig
        values.update(_latent_attention_values(job))
    if job.device.type == "cpu":
        values["batch_p2p_sync"] = False  # a device synchronisation after each pipeline transfer
        # Gloo may still be sending outputs under the interleaved schedule: freed, losses go wrong without an error.
        values["deallocate_pipeline_outputs"] = not interleaved
    return kind(**values)


def _expert_values(job: Job) -> dict[str, Any]:
    model = job.model
    dense = model.moe_first_dense_layers
    return {
        "num_moe_experts": model.num_moe_experts,
        "moe_router_topk": model.moe_router_topk,
        "moe_router_pre_softmax": model.moe_router_topk == 1,  # Megatron requires it for a single choice
        "moe_ffn_hidden_size": model.moe_ffn_hidden_size or model.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size,
        "moe_layer_freq": [0] * dense + [1] * (model.num_layers - dense),
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_force_load_balancing": job.train.balanced_routing,
        "moe_router_load_balancing_type": "none",  # an auxiliary loss would depend on the micro-batches
        "moe_aux_loss_coeff": 0.0,
    }


def _latent_attention_values(job: Job) -> dict[str, Any]:
    model = job.model
    values = {"q_lora_rank": model.q_lora_rank, "multi_latent_attention": True, "rope_type": "rope"}
    for name in ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"):
        if getattr(model, name) is not None:  # else Megatron's default
            values[name] = getattr(model, name)
    return values


def _chunk(job: Job, config: Any, vp_stage: int | None, device: torch.device) -> Any:
    model = GPTModel(
        config,
        layers.block_spec(config, vp_stage),
        vocab_size=int(padded_vocab(job.model, np.array(job.candidate.tensor_model_parallel_size))),
        max_sequence_length=job.train.seq_length,
        pre_process=groups.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=groups.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=not job.model.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        mtp_block_spec=layers.mtp_spec(config, vp_stage),
        vp_stage=vp_stage,
    )
    model.to(device)
    set_initial_weights(model, config, job.train.seed)
    return Float16Module(config, model) if config.bf16 or config.fp16 else model


def _leave(weight: torch.Tensor) -> torch.Tensor:
    return weight


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
