"""The layers of a model: transformer-engine's or megatron-core's own.

The latter run on every device: two torch modules replace those that need extra libraries.
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

from flagcore.engines.megatron.trial.releases import accepted

_attention = torch.nn.functional.scaled_dot_product_attention
_SHARES_KEYS = "enable_gqa" in (_attention.__doc__ or "")  # torch 2.5 and later


class Norm(torch.nn.RMSNorm):  # type: ignore[misc]  # torch is not followed
    """RMS normalisation. Megatron's wrapper of it does not support sequence parallelism, which needs one attribute."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


class CoreAttention(torch.nn.Module):  # type: ignore[misc]
    """Causal attention by torch's scaled_dot_product_attention.

    Under context parallelism a rank holds chunks r and 2n-1-r of the sequence's 2n. Keys and values are
    gathered from all ranks (and their gradients scattered back); queries stay.
    """

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self._group = groups.get_context_parallel_group()
        self._scale = softmax_scale

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Attend. Inputs are [sequence, batch, heads, channels], the output [sequence, batch, heads * channels]."""
        length, batch = query.shape[:2]
        size = self._group.size()
        mask = None
        if size > 1:
            key = gather_from_sequence_parallel_region(key.contiguous(), True, self._group)
            value = gather_from_sequence_parallel_region(value.contiguous(), True, self._group)
            mask = _chunked_causal_mask(length, size, self._group.rank(), query.device)
        repeats = query.size(2) // key.size(2)
        shares = {"enable_gqa": True} if repeats > 1 and _shares_keys(query, mask) else {}
        if repeats > 1 and not shares:
            key, value = (tensor.repeat_interleave(repeats, dim=2) for tensor in (key, value))
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        output = _attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=self._scale, **shares)
        return output.permute(2, 0, 1, 3).reshape(length, batch, -1)


def _shares_keys(query: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Return whether a fused kernel takes keys and values that query heads share: no mask, and 16 bits on a device.

    Without a fused kernel torch stores all scores, which costs more than repeated keys do.
    """
    return _SHARES_KEYS and mask is None and (query.device.type == "cpu" or query.element_size() == 2)


@functools.lru_cache(maxsize=4)
def _chunked_causal_mask(length: int, size: int, rank: int, device: torch.device) -> torch.Tensor:
    """Return which gathered keys each query of this rank attends to: [length, length * size], boolean."""
    chunks = torch.arange(length * size, device=device).view(2 * size, -1)
    positions = torch.cat([chunks[i] for r in range(size) for i in (r, 2 * size - 1 - r)])
    own = positions[rank * length : (rank + 1) * length]
    return own[:, None] >= positions[None, :]


def block_spec(config: Any, vp_stage: int | None, *, transformer_engine: bool = False) -> TransformerBlockSubmodules:
    """Return the layers that this pipeline stage (and virtual stage) builds, dense or expert by the config."""
    place = accepted(get_gpt_decoder_block_spec, vp_stage=vp_stage)
    spec = get_gpt_decoder_block_spec(config, transformer_engine, normalization="RMSNorm", **place)
    if not transformer_engine:
        spec.layer_norm = Norm
        for layer in spec.layer_specs:
            _replace_modules(layer)
    return spec


def mtp_spec(config: Any, vp_stage: int | None, *, transformer_engine: bool = False) -> Any:
    """Return the multi-token prediction layers of this stage, or None where there are none."""
    if config.mtp_num_layers is None:
        return None
    place = accepted(get_gpt_mtp_block_spec, vp_stage=vp_stage)
    last_layer = _last_layer(config, transformer_engine=transformer_engine)
    spec = get_gpt_mtp_block_spec(config, last_layer, transformer_engine, **place)
    if not transformer_engine:
        _replace_modules(last_layer)
        for layer in spec.layer_specs if spec is not None else ():
            parts = layer.submodules
            parts.enorm = parts.hnorm = parts.layer_norm = Norm
    return spec


def _last_layer(config: Any, *, transformer_engine: bool) -> ModuleSpec:
    """Return the specification of the model's last layer, which a stage with extra predictions may not have."""
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
    """Patch places of megatron-core that assume transformer-engine is installed.

    The expert router reads a name that only a successful import binds. A recomputed normalisation asks for
    fp8 state unless it gets None, and its default is False. Latent attention asks whether a layer is one
    of transformer-engine's, which are None. The sharded optimizer of 0.12 raises where it has no fp8 weights to fill.
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
