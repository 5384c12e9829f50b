"""Megatron-core's configurations of the model, of the gradient buffers and of the optimizer, from the job."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state as groups
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from flagcore.engines.megatron.trial.job import Job, JobError
from flagcore.engines.megatron.trial.releases import accepted, configured

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_STATE_DTYPES = {**_DTYPES, "fp8": torch.uint8}
_EIGHT_BITS = {"fp8": "delayed", "mxfp8": "mxfp8"}
"""Precisions whose matrix products are in 8 bits, and the recipe of their scales: Megatron-LM's default, and the one
that gives the precision its name. Weights and activations between layers are bf16."""
_WITHOUT_RANGE = ("mxfp8", "blockwise")
"""Recipes with a scale for each small block: gradients need no format with a wider range."""
_OF_MODEL = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("qk_layernorm", "add_qkv_bias", "gated_linear_unit"),
)
_OF_CANDIDATE = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    *("tp_comm_overlap", "cp_comm_type", "cross_entropy_loss_fusion"),
)
_OF_RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers")
_FUSED = (
    *("bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion"),
    *("gradient_accumulation_fusion", "apply_rope_fusion", "persist_layer_norm"),
)
_STATE = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_FIRST_LOSS_SCALE = 2.0**12  # fp16; the usual 2**32 skips the first steps, which are the ones measured here


def transformer_config(job: Job) -> Any:
    """Translate the job into Megatron's configuration; its checks raise AssertionError or ValueError."""
    model, candidate = job.model, job.candidate
    dtype = _DTYPES.get(job.train.precision, torch.bfloat16)
    values: dict[str, Any] = {
        **{name: getattr(model, name) for name in _OF_MODEL},
        **{name: getattr(candidate, name) for name in _OF_CANDIDATE},
        **_fusions(job),
        **_eight_bits(job),
        **_messages(job),
        "mtp_num_layers": model.mtp_num_layers or None,
        "mtp_loss_scaling_factor": 0.1,  # Megatron-LM's default, which 0.12 lacks
        "normalization": "RMSNorm",
        "activation_func": torch.nn.functional.silu if model.gated_linear_unit else torch.nn.functional.gelu,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        # The weights come from `set_initial_weights`. Megatron's own pass still marks which weights are split, and how.
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
        "pipeline_model_parallel_layout": candidate.pipeline_model_parallel_layout,
    }
    if candidate.recomputes:
        values |= {name: getattr(candidate, name) for name in _OF_RECOMPUTE}
        if candidate.recompute_modules is not None:
            values["recompute_modules"] = list(candidate.recompute_modules)
    if model.num_moe_experts is not None:
        values.update(_expert_values(job))
    if model.multi_latent_attention:
        return configured(MLATransformerConfig, values | _latent_attention_values(job))
    return configured(TransformerConfig, values)


def ddp_config(job: Job) -> Any:
    """Return the configuration of the gradient buffers, of the default widths of Megatron-LM."""
    candidate, wide = job.candidate, job.candidate.accumulate_allreduce_grads_in_fp32
    narrow = candidate.grad_reduce_in_bf16 or job.train.precision == "fp16"
    values = {
        "use_distributed_optimizer": candidate.use_distributed_optimizer,
        "grad_reduce_in_fp32": not narrow if wide is None else wide,
        "overlap_grad_reduce": candidate.overlap_grad_reduce,
        "overlap_param_gather": candidate.overlap_param_gather,
        "align_param_gather": job.virtual_stages is not None,
    }
    return configured(DistributedDataParallelConfig, values)


def optimizer_config(job: Job, config: Any) -> Any:
    """Return the configuration of the optimizer of a model with `config`."""
    candidate = job.candidate
    values = {
        "optimizer": "adam",
        "lr": 0.0,  # until training sets it
        "weight_decay": 0.01,
        "clip_grad": 1.0,
        "bf16": config.bf16,
        "fp16": config.fp16,
        "params_dtype": config.params_dtype,
        "initial_loss_scale": _FIRST_LOSS_SCALE,
        "use_distributed_optimizer": candidate.use_distributed_optimizer,
        "use_precision_aware_optimizer": candidate.use_precision_aware_optimizer,
    }
    values |= {name: _STATE_DTYPES[kind] for name in _STATE if (kind := getattr(candidate, name)) is not None}
    # From 0.14 on the optimizer must know, too.
    values |= accepted(OptimizerConfig, overlap_param_gather=candidate.overlap_param_gather)
    return configured(OptimizerConfig, values)


def _fusions(job: Job) -> dict[str, bool]:
    """Return which steps are fused kernels: with transformer-engine those of Megatron-LM's defaults.

    Without it none: they need more libraries, and then every device could not run the same program.
    """
    if not job.transformer_engine:
        return dict.fromkeys(_FUSED, False)
    return dict.fromkeys(_FUSED, True) | {
        "bias_activation_fusion": job.model.gated_linear_unit,  # gelu needs a bias
        "apply_rope_fusion": not job.model.multi_latent_attention,  # there for Yarn only
        "gradient_accumulation_fusion": layers._grad_accum_fusion_available,  # by APEX
    }


def _eight_bits(job: Job) -> dict[str, Any]:
    if job.train.precision not in _EIGHT_BITS:
        return {}
    recipe = job.candidate.fp8_recipe or _EIGHT_BITS[job.train.precision]
    return {"fp8": "e4m3" if recipe in _WITHOUT_RANGE else "hybrid", "fp8_recipe": recipe}


def _messages(job: Job) -> dict[str, Any]:
    """Return how pipeline stages exchange messages: only the interleaved schedule can do so during compute."""
    interleaved = job.virtual_stages is not None
    overlapped = interleaved and job.candidate.overlap_p2p_comm
    if interleaved and not overlapped and job.candidate.pipeline_model_parallel_size == 2:
        raise JobError("overlap_p2p_comm = False needs more than two stages: messages of two stages would be mixed up")
    values = {
        "overlap_p2p_comm": overlapped,
        "batch_p2p_comm": not overlapped,
        "deallocate_pipeline_outputs": True,
    }
    if job.device.type == "cpu":
        values["batch_p2p_sync"] = False  # a device synchronisation after each pipeline transfer
        # Gloo may still be sending outputs under the interleaved schedule: freed, losses go wrong without an error.
        values["deallocate_pipeline_outputs"] = not interleaved
    return values


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
        "moe_token_dispatcher_type": job.candidate.moe_token_dispatcher_type,
        "moe_grouped_gemm": job.candidate.moe_grouped_gemm,
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


def _leave(weight: torch.Tensor) -> torch.Tensor:
    return weight
