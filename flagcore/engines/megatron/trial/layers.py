"""The layers of a model: those of transformer-engine or of megatron-core.

Megatron-core's layers run on every device, because two torch modules replace those that need further libraries.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core import parallel_state as groups
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer import distrib_optimizer
from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from flagcore.engines.megatron.trial.config import accepted_arguments

_attention = torch.nn.functional.scaled_dot_product_attention
_HAS_SHARED_KEYS = "enable_gqa" in (_attention.__doc__ or "")  # torch 2.5 and later


class Norm(torch.nn.RMSNorm):  # type: ignore[misc]  # torch is not followed
    """RMS norm with the attribute for sequence parallelism, which Megatron's wrapper lacks."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


class CoreAttention(torch.nn.Module):  # type: ignore[misc]
    """Causal attention by torch's scaled_dot_product_attention.

    Under context parallelism rank r of n holds the chunks r and 2n-1-r of the sequence's 2n chunks. Keys and values are
    gathered from all ranks, and their gradients are scattered back; queries stay local.
    """

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self._group = groups.get_context_parallel_group()
        self._scale = softmax_scale

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Return [sequence, batch, heads * channels] from inputs of shape [sequence, batch, heads, channels]."""
        length, batch = query.shape[:2]
        size = self._group.size()
        mask = None
        if size > 1:
            key = gather_from_sequence_parallel_region(key.contiguous(), True, self._group)
            value = gather_from_sequence_parallel_region(value.contiguous(), True, self._group)
            mask = _chunked_causal_mask(length, size, self._group.rank(), query.device)
        repeats = query.size(2) // key.size(2)
        shared_keys = {"enable_gqa": True} if repeats > 1 and _can_share_keys(query, mask) else {}
        if repeats > 1 and not shared_keys:
            key, value = (tensor.repeat_interleave(repeats, dim=2) for tensor in (key, value))
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        output = _attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=self._scale, **shared_keys)
        return output.permute(2, 0, 1, 3).reshape(length, batch, -1)


def _can_share_keys(query: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Return whether a fused kernel supports keys and values that query heads share.

    It needs no mask, and 16 bits on an accelerator. Without a fused kernel torch stores all scores, which costs more
    than repeated keys.
    """
    return _HAS_SHARED_KEYS and mask is None and (query.device.type == "cpu" or query.element_size() == 2)


@functools.lru_cache(maxsize=4)
def _chunked_causal_mask(length: int, size: int, rank: int, device: torch.device) -> torch.Tensor:
    """Return the causal mask of this rank's queries over all gathered keys, boolean [length, length * size]."""
    chunks = torch.arange(length * size, device=device).view(2 * size, -1)
    positions = torch.cat([chunks[i] for r in range(size) for i in (r, 2 * size - 1 - r)])
    own_positions = positions[rank * length : (rank + 1) * length]
    return own_positions[:, None] >= positions[None, :]


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
    """Return the specification of this stage's multi-token prediction layers, None without any."""
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
    """Return the specification of the model's last layer, even if it is on another stage."""
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

    The expert router reads a name that only a successful import binds. A recomputed norm reads fp8 state unless its
    argument is None, but the default is False. Latent attention compares layer classes with transformer-engine's, which
    are None. The distributed optimizer of 0.12 raises an error if there are no fp8 weights.
    """
    if random.HAVE_TE:
        return
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if random.CheckpointWithoutOutput.__init__.__defaults__:
        random.CheckpointWithoutOutput.__init__.__defaults__ = (None,)
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
