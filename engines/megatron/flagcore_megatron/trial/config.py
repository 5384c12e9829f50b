"""Builds Megatron-core's configurations of model, gradient buffers and optimizer from the job, for any release.

Also prepares transformer-engine before a model with its layers is built.
"""

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import megatron.core
import torch
from flagcore_training.trial.job import JobError
from megatron.core import parallel_state as groups
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from flagcore_megatron.trial.job import TrialJob

T = TypeVar("T")


def accepted_arguments(function: Callable[..., Any], **values: Any) -> dict[str, Any]:
    """Return the `values` that `function` accepts as arguments. Other values belong to later Megatron releases."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in values.items() if name in parameters}


def build_config(kind: type[T], values: Mapping[str, Any]) -> T:
    """Build a configuration of megatron-core. Raises JobError for a setting that this release does not support.

    An unsupported field is ignored if its value is off.
    """
    field_names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name, value in values.items():
        if name not in field_names and value:
            raise JobError(f"megatron-core {megatron.core.__version__} does not support {name} = {value}")
    return kind(**{name: value for name, value in values.items() if name in field_names})


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_STATE_DTYPES = {**_DTYPES, "fp8": torch.uint8}
_EIGHT_BITS = {"fp8": "delayed", "mxfp8": "mxfp8"}
"""Precisions with 8-bit matrix products, with the default recipe of their scales.

Weights and activations between layers are bf16. Only transformer-engine supports these precisions."""
_BLOCK_RECIPES = ("mxfp8", "blockwise")
"""Recipes with one scale for each small block, so gradients do not need a format with a wider range."""
_MODEL_FIELDS = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("qk_layernorm", "add_qkv_bias", "gated_linear_unit"),
)
_CANDIDATE_FIELDS = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    *("tp_comm_overlap", "cp_comm_type", "cross_entropy_loss_fusion"),
)
_RECOMPUTE_FIELDS = ("recompute_granularity", "recompute_method", "recompute_num_layers")
_FUSIONS = (
    *("bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion"),
    *("gradient_accumulation_fusion", "apply_rope_fusion", "persist_layer_norm"),
)
_STATE_FIELDS = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_FIRST_LOSS_SCALE = 2.0**12  # with the default of 2**32, the first fp16 steps, which a trial measures, would be skipped


def transformer_config(job: TrialJob) -> Any:
    """Return Megatron's configuration of the model. Megatron's checks raise AssertionError or ValueError."""
    model, candidate = job.model, job.candidate
    dtype = _DTYPES.get(job.train.precision, torch.bfloat16)
    values: dict[str, Any] = {
        **{name: getattr(model, name) for name in _MODEL_FIELDS},
        **{name: getattr(candidate, name) for name in _CANDIDATE_FIELDS},
        **_fusions(job),
        **_eight_bit_values(job),
        **_message_values(job),
        "mtp_num_layers": model.mtp_num_layers or None,
        "mtp_loss_scaling_factor": 0.1,  # Megatron-LM's default; 0.12 has none
        "normalization": "RMSNorm",
        "activation_func": torch.nn.functional.silu if model.gated_linear_unit else torch.nn.functional.gelu,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        # Megatron's initialization records how each weight is split; `set_initial_weights` sets the values.
        "perform_initialization": True,
        "init_method": _keep_weight,
        "output_layer_init_method": _keep_weight,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "virtual_pipeline_model_parallel_size": job.virtual_stages,
        "expert_tensor_parallel_size": groups.get_expert_tensor_parallel_world_size(),
        # Without tensor parallelism, Megatron-core refuses sequence parallelism; Megatron-LM switches it off.
        "sequence_parallel": candidate.sequence_parallel and candidate.tensor_model_parallel_size > 1,
        "pipeline_model_parallel_layout": candidate.pipeline_model_parallel_layout,
    }
    if model.mtp_use_repeated_layer:
        values["mtp_use_repeated_layer"] = True
    if candidate.cross_entropy_fusion_impl is not None:
        values["cross_entropy_fusion_impl"] = candidate.cross_entropy_fusion_impl
    if candidate.recomputes:
        values |= {name: getattr(candidate, name) for name in _RECOMPUTE_FIELDS}
        if candidate.recompute_modules is not None:
            values["recompute_modules"] = list(candidate.recompute_modules)
    if model.experts:
        values.update(_expert_values(job))
    if model.kv_lora_rank:
        return build_config(MLATransformerConfig, values | _latent_attention_values(job))
    return build_config(TransformerConfig, values)


def ddp_config(job: TrialJob) -> Any:
    """Return the configuration of the gradient buffers. Its data types default to Megatron-LM's."""
    candidate, fp32_setting = job.candidate, job.candidate.accumulate_allreduce_grads_in_fp32
    is_narrow = candidate.grad_reduce_in_bf16 or job.train.precision == "fp16"
    values = {
        "use_distributed_optimizer": candidate.use_distributed_optimizer,
        "grad_reduce_in_fp32": not is_narrow if fp32_setting is None else fp32_setting,
        "overlap_grad_reduce": candidate.overlap_grad_reduce,
        "overlap_param_gather": candidate.overlap_param_gather,
        "align_param_gather": job.virtual_stages is not None,
    }
    return build_config(DistributedDataParallelConfig, values)


def optimizer_config(job: TrialJob, config: Any) -> Any:
    """Return the configuration of the optimizer for a model with `config`."""
    candidate = job.candidate
    values = {
        "optimizer": "adam",
        "lr": 0.0,  # training sets it later
        "weight_decay": 0.01,
        "clip_grad": 1.0,
        "bf16": config.bf16,
        "fp16": config.fp16,
        "params_dtype": config.params_dtype,
        "initial_loss_scale": _FIRST_LOSS_SCALE,
        "use_distributed_optimizer": candidate.use_distributed_optimizer,
        "use_precision_aware_optimizer": candidate.use_precision_aware_optimizer,
    }
    values |= {name: _STATE_DTYPES[kind] for name in _STATE_FIELDS if (kind := getattr(candidate, name)) is not None}
    # Fields of the optimizer's configuration from 0.13 and 0.14 on. A recipe counts in 16-bit jobs, too.
    recipe = candidate.fp8_recipe or config.fp8_recipe
    given = accepted_arguments(OptimizerConfig, overlap_param_gather=candidate.overlap_param_gather, fp8_recipe=recipe)
    values |= given
    return build_config(OptimizerConfig, values)


def _fusions(job: TrialJob) -> dict[str, bool]:
    """Return the enabled kernel fusions: Megatron-LM's defaults with transformer-engine, none without it. Without
    transformer-engine, fused kernels need further libraries, which are not available on every device."""
    if not job.transformer_engine:
        return dict.fromkeys(_FUSIONS, False)
    return dict.fromkeys(_FUSIONS, True) | {
        "bias_activation_fusion": job.model.gated_linear_unit,  # the fused gelu requires a bias
        "apply_rope_fusion": not job.model.kv_lora_rank,  # with latent attention, it requires YaRN
        "gradient_accumulation_fusion": layers._grad_accum_fusion_available,  # true if APEX is installed
    }


def _eight_bit_values(job: TrialJob) -> dict[str, Any]:
    if job.train.precision not in _EIGHT_BITS:
        return {}
    recipe = job.candidate.fp8_recipe or _EIGHT_BITS[job.train.precision]
    return {"fp8": "e4m3" if recipe in _BLOCK_RECIPES else "hybrid", "fp8_recipe": recipe}


def _message_values(job: TrialJob) -> dict[str, Any]:
    """Return the settings for messages between pipeline stages. Only interleaved schedules can overlap them."""
    interleaved = job.virtual_stages is not None
    overlapped = interleaved and job.candidate.overlap_p2p_comm
    if interleaved and not overlapped and job.candidate.pipeline_model_parallel_size == 2:
        raise JobError("overlap_p2p_comm = False needs more than two stages: two stages confuse each other's messages")
    values = {"overlap_p2p_comm": overlapped, "batch_p2p_comm": not overlapped, "deallocate_pipeline_outputs": True}
    if job.device.type == "cpu":
        values["batch_p2p_sync"] = False  # avoids a device synchronisation after each pipeline transfer
        # Under the interleaved schedule gloo may still be sending outputs; freeing them would silently corrupt losses.
        values["deallocate_pipeline_outputs"] = not interleaved
    return values


def _expert_values(job: TrialJob) -> dict[str, Any]:
    model = job.model
    dense_layers = model.moe_first_dense_layers
    return {
        "num_moe_experts": model.experts,
        "moe_router_topk": model.moe_router_topk,
        "moe_router_num_groups": model.moe_router_num_groups or None,
        "moe_router_group_topk": model.moe_router_group_topk or None,
        "moe_router_pre_softmax": model.moe_router_topk == 1,  # Megatron requires it for one expert per token
        "moe_ffn_hidden_size": model.moe_ffn_hidden_size or model.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size,
        "moe_layer_freq": [0] * dense_layers + [1] * (model.num_layers - dense_layers),
        "moe_token_dispatcher_type": job.candidate.moe_token_dispatcher_type,
        "moe_grouped_gemm": job.candidate.moe_grouped_gemm,
        "moe_router_force_load_balancing": job.train.balanced_routing,
        "moe_router_load_balancing_type": "none",  # an auxiliary loss would depend on the split into micro-batches
        "moe_aux_loss_coeff": 0.0,
    }


def _latent_attention_values(job: TrialJob) -> dict[str, Any]:
    model = job.model
    values = {"q_lora_rank": model.q_lora_rank, "rope_type": "rope"}
    for name in ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"):
        if getattr(model, name) is not None:  # otherwise Megatron's default applies
            values[name] = getattr(model, name)
    return values


def _keep_weight(weight: torch.Tensor) -> torch.Tensor:
    return weight


def check_layers(job: TrialJob) -> None:
    """Raise JobError if the job requires transformer-engine and it does not work on the job's device."""
    precision = job.train.precision
    if not job.transformer_engine and precision in _EIGHT_BITS:
        raise JobError(
            f"train.precision = {precision} needs transformer-engine, which cannot be imported here; use bf16"
        )
    if not job.transformer_engine:
        return
    if job.device.type == "cpu":
        raise JobError(
            "train.implementation = transformer_engine needs an accelerator, but this device is a CPU;"
            " remove train.implementation or set it to local"
        )
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise JobError(f"transformer-engine does not import ({reason}); set train.implementation: local") from error


def start_buffers(job: TrialJob) -> None:
    """Allocate the buffers for collectives that overlap matrix products (Megatron-LM `training/initialize.py`)."""
    base = importlib.import_module("transformer_engine.pytorch.module").base
    candidate, is_8_bit = job.candidate, job.train.precision in _EIGHT_BITS
    tokens = job.train.seq_length * candidate.micro_batch_size // candidate.context_parallel_size
    if hasattr(base, "UserBufferQuantizationMode"):  # transformer-engine 2.7 and later
        modes = base.UserBufferQuantizationMode
        products: dict[str, Any] = {"quantization_modes": [modes.FP8 if is_8_bit else modes.NONE]}
    else:
        products = {"use_fp8": is_8_bit}
    base.initialize_ub(
        shape=[tokens, job.model.hidden_size],
        tp_size=candidate.tensor_model_parallel_size,
        ub_cfgs={},
        bootstrap_backend=job.device.backend,
        **products,
    )
