"""Builds Megatron-core's model, data-parallel wrapper and optimizer for a job.

The layers are transformer-engine's or megatron-core's. Megatron-core's layers run on every device, because two torch
modules replace those that need further libraries.

Initial weights do not depend on the layout, so every layout has the same losses. The seed of each weight is derived
from its global name. Every rank draws the whole weight and keeps its own part.
"""

import functools
import math
import re
import zlib
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flagcore_training.weights import padded_vocab
from megatron.core import parallel_state as groups
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer import distrib_optimizer, get_megatron_optimizer
from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch.nn import functional

from flagcore_megatron.trial.config import (
    accepted_arguments,
    ddp_config,
    optimizer_config,
    start_buffers,
    transformer_config,
)
from flagcore_megatron.trial.job import TrialJob


def has_fused_norm(device: str) -> bool:
    """Return whether torch has a kernel for RMS norms on devices of this type.

    CPUs, torch before 2.9 and the builds of some vendors have none.
    """
    with suppress(RuntimeError):  # torch does not know the operator or the device
        key = torch._C._dispatch_key_for_device(device)
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_rms_norm", key))
    return False


class NormOfInput(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed
    """RMS norm that stores only its input, like a fused kernel. Torch's separate kernels store two copies in fp32."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, eps: float | None) -> Any:
        ctx.save_for_backward(hidden, weight)
        ctx.eps = eps
        return functional.rms_norm(hidden, weight.shape, weight, eps)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        hidden, weight = (each.detach().requires_grad_() for each in ctx.saved_tensors)
        with torch.enable_grad():
            normed = functional.rms_norm(hidden, weight.shape, weight, ctx.eps)
        return (*torch.autograd.grad(normed, (hidden, weight), gradient), None)


def own_positions(length: int, size: int, rank: int) -> torch.Tensor:
    """Return the positions of a context-parallel rank: the chunks r and 2n-1-r of 2n, so that all compute as much."""
    if size == 1:
        return torch.arange(length)
    chunks = torch.arange(length).chunk(2 * size)
    return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]))


@functools.lru_cache(maxsize=4)
def causal_mask(length: int, size: int, rank: int, device: torch.device) -> torch.Tensor:
    """Return which gathered keys each query of a rank attends to: boolean [length, length * size]."""
    positions = [own_positions(length * size, size, each).to(device) for each in range(size)]
    return positions[rank][:, None] >= torch.cat(positions)[None, :]


@dataclass(frozen=True)
class BuiltModel:
    """The model chunks of this rank, one per virtual stage, with their configuration and optimizer."""

    config: Any
    chunks: list[Any]
    optimizer: Any


def build(job: TrialJob, device: torch.device) -> BuiltModel:
    """Build this rank's part of the model. The process groups must exist. Raises the errors of Megatron's checks."""
    if job.transformer_engine:
        model_parallel_cuda_manual_seed(job.train.seed)
        if job.candidate.tp_comm_overlap:
            start_buffers(job)
    else:
        patch_without_transformer_engine()
        initialize_rng_tracker(inference_rng_tracker=True)  # without dropout, all ranks can share one random state
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


def _set_overlap_functions(config: Any, job: TrialJob, chunks: list[Any]) -> None:
    """Set the functions that start collectives of gradients and weights during a schedule, like Megatron-LM."""

    def of_chunks(name: str) -> Any:
        functions = [getattr(chunk, name) for chunk in chunks]
        return functions if len(functions) > 1 else functions[0]

    if job.candidate.overlap_grad_reduce:
        config.no_sync_func, config.grad_sync_func = of_chunks("no_sync"), of_chunks("start_grad_sync")
    if job.candidate.overlap_param_gather and job.virtual_stages:
        config.param_sync_func = of_chunks("start_param_sync")


def _build_chunk(job: TrialJob, config: Any, vp_stage: int | None, device: torch.device) -> Any:
    if vp_stage is not None:
        groups.set_virtual_pipeline_model_parallel_rank(vp_stage)  # 0.12 has no argument for the virtual stage
    stage_argument, is_te = accepted_arguments(groups.is_pipeline_last_stage, vp_stage=vp_stage), job.transformer_engine
    model = GPTModel(
        config,
        block_spec(config, vp_stage, transformer_engine=is_te),
        vocab_size=int(padded_vocab(job.model, np.array(job.candidate.tensor_model_parallel_size))),
        max_sequence_length=job.train.seq_length,
        pre_process=groups.is_pipeline_first_stage(ignore_virtual=False, **stage_argument),
        post_process=groups.is_pipeline_last_stage(ignore_virtual=False, **stage_argument),
        share_embeddings_and_output_weights=not job.model.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        mtp_block_spec=mtp_spec(config, vp_stage, transformer_engine=is_te),
        **accepted_arguments(GPTModel.__init__, vp_stage=vp_stage),
    )
    model.to(device)
    set_initial_weights(model, config, job.train.seed)
    return Float16Module(config, model) if config.bf16 or config.fp16 else model


_LIMIT = 0.02 * math.sqrt(3.0)  # limit of a uniform distribution with std 0.02; drawing it is faster than a normal one
_EXPERT_PATTERN = re.compile(r"\.local_experts\.(\d+)\.|\.weight(\d+)$")


def set_initial_weights(chunk: torch.nn.Module, config: Any, seed: int) -> None:
    """Set the initial weights of one model chunk before it is wrapped for mixed precision or data parallelism."""
    layers = _layer_names(chunk)
    is_tied = bool(chunk.share_embeddings_and_output_weights)
    for name, weight in chunk.named_parameters():
        if weight.dim() == 1:  # weight of a norm
            weight.data.fill_(1.0)
            continue
        generator = torch.Generator(device=weight.device)
        generator.manual_seed(zlib.crc32(_global_name(name, layers, config, is_tied).encode()) + seed)
        weight.data.copy_(_own_part(name, weight, config, generator))


def _layer_names(chunk: torch.nn.Module) -> dict[str, str]:
    """Return a name with the global layer number for each layer in this chunk, by the layer's module path."""
    return {
        path: f"layer{module.layer_number}"
        for path, module in chunk.named_modules()
        if hasattr(module, "layer_number") and hasattr(module, "mlp")
    }


def _global_name(name: str, layers: dict[str, str], config: Any, is_tied: bool) -> str:
    """Return the name that a parameter has in the unsplit model, where layers and experts have global numbers."""
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
    """Draw the whole weight and return this rank's part of it."""
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
    if config.gated_linear_unit and "linear_fc1" in name:  # a rank has a part of the gate and a part of the value
        return torch.cat([half.chunk(size, axis)[rank] for half in whole_weight.chunk(2, axis)], axis)
    return whole_weight.chunk(size, axis)[rank]


_attention = torch.nn.functional.scaled_dot_product_attention
_HAS_SHARED_KEYS = "enable_gqa" in (_attention.__doc__ or "")  # torch 2.5 and later


class Norm(torch.nn.RMSNorm):  # type: ignore[misc]
    """RMS norm with the attribute for sequence parallelism, which is missing in Megatron's wrapper."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        # On the device from the start, as Megatron's own weights: `Module.to` replaces the parameters of devices that
        # register themselves with torch, and the new ones have no attributes.
        super().__init__(hidden_size, eps=eps, device=torch.cuda.current_device(), dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel
        kind = self.weight.device.type
        self._is_fused = kind == "cpu" or has_fused_norm(kind)

    def forward(self, hidden: Any) -> Any:
        return super().forward(hidden) if self._is_fused else NormOfInput.apply(hidden, self.weight, self.eps)


class CoreAttention(torch.nn.Module):  # type: ignore[misc]
    """Causal attention with torch's scaled_dot_product_attention.

    Under context parallelism, a rank has the tokens of `own_positions`. Keys and values are gathered from all ranks,
    and their gradients are scattered back; queries stay local.
    """

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self._group = groups.get_context_parallel_group()
        self._scale = softmax_scale

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Return the output, [sequence, batch, heads * channels]. The inputs are [sequence, batch, heads, channels]."""
        length, batch = query.shape[:2]
        size = self._group.size()
        mask = None
        if size > 1:
            key = gather_from_sequence_parallel_region(key.contiguous(), True, self._group)
            value = gather_from_sequence_parallel_region(value.contiguous(), True, self._group)
            mask = causal_mask(length, size, self._group.rank(), query.device)
        repeats = query.size(2) // key.size(2)
        shared_keys = {"enable_gqa": True} if repeats > 1 and _can_share_keys(query, mask) else {}
        if repeats > 1 and not shared_keys:
            key, value = (tensor.repeat_interleave(repeats, dim=2) for tensor in (key, value))
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        output = _attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=self._scale, **shared_keys)
        return output.permute(2, 0, 1, 3).reshape(length, batch, -1)


def _can_share_keys(query: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Return whether a fused kernel can be used with keys and values that several query heads share.

    It requires that there is no mask, and 16 bits on an accelerator. Without a fused kernel torch stores all scores,
    which costs more than repeated keys.
    """
    return _HAS_SHARED_KEYS and mask is None and (query.device.type == "cpu" or query.element_size() == 2)


def block_spec(config: Any, vp_stage: int | None, *, transformer_engine: bool = False) -> TransformerBlockSubmodules:
    """Return the specification of the layers of this (virtual) pipeline stage."""
    stage_argument = accepted_arguments(get_gpt_decoder_block_spec, vp_stage=vp_stage)
    spec = get_gpt_decoder_block_spec(config, transformer_engine, normalization="RMSNorm", **stage_argument)
    if not transformer_engine:
        spec.layer_norm = Norm
        for layer in spec.layer_specs:
            _replace_modules(layer)
    return spec


def mtp_spec(config: Any, vp_stage: int | None, *, transformer_engine: bool = False) -> Any:
    """Return the specification of this stage's multi-token prediction layers, or None if it has none."""
    if config.mtp_num_layers is None:
        return None
    stage_argument = accepted_arguments(get_gpt_mtp_block_spec, vp_stage=vp_stage)
    last_layer = _last_layer(config, transformer_engine=transformer_engine)
    spec = get_gpt_mtp_block_spec(config, last_layer, transformer_engine, **stage_argument)
    if not transformer_engine:
        _replace_modules(last_layer)
        for layer in spec.layer_specs if spec is not None else ():
            parts = layer.submodules
            parts.enorm = parts.hnorm = parts.layer_norm = Norm
    return spec


def _last_layer(config: Any, *, transformer_engine: bool) -> ModuleSpec:
    """Return the specification of the model's last layer, even if that layer is on another stage."""
    is_moe = config.num_moe_experts is not None and config.moe_layer_freq[-1]
    values = {
        "num_experts": config.num_moe_experts if is_moe else None,
        "moe_grouped_gemm": config.moe_grouped_gemm,
        "qk_layernorm": config.qk_layernorm,
        "multi_latent_attention": config.multi_latent_attention,
    }
    if transformer_engine:
        return get_gpt_layer_with_transformer_engine_spec(**values)
    return get_gpt_layer_local_spec(**values, normalization="RMSNorm")


def patch_without_transformer_engine() -> None:
    """Patch parts of megatron-core that assume that transformer-engine is installed.

    The expert router reads a name that is only defined after a successful import. A recomputed norm reads fp8 state
    unless its argument is None, but the default is False. Latent attention compares layer classes with
    transformer-engine's, which are None. The distributed optimizer of 0.12 raises an error if there are no fp8 weights.
    """
    if random.HAVE_TE:
        return
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if defaults := random.CheckpointWithoutOutput.__init__.__defaults__:
        random.CheckpointWithoutOutput.__init__.__defaults__ = (None, *defaults[1:])
    multi_latent_attention.HAVE_TE = False
    distrib_optimizer.quantize_param_shard = lambda *_: None


def _replace_modules(layer: Any) -> None:
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    attention = parts.self_attention.submodules
    attention.core_attention = CoreAttention
    for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
        if getattr(attention, name, IdentityOp) not in (IdentityOp, None):
            setattr(attention, name, Norm)
