"""The model of a trial in plain torch, and how it is sharded: tensor and context parallelism, checkpoints, FSDP2.

A rank has one stage of a pipeline, or two; without a pipeline, the stage is the whole model. The units of `fully_shard`
are the embedding, each layer, the head, and the rest; a tied head is in the rest with the embedding. Initial weights do
not depend on the layout: the seed of a weight is derived from its name, and each rank keeps its part of the weight.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from flagcore.domain.model import Model
from flagcore_trainers.fsdp2.job import Job, Meshes

STD = 0.02
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROTARY_BASE = 10000.0


def _has_fused_norm(device: str) -> bool:
    """Return whether torch has a kernel for RMS norms on devices of this type. CPUs and some builds have none."""
    with contextlib.suppress(RuntimeError):  # torch does not know the operator or the device
        key = torch._C._dispatch_key_for_device(device)
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_rms_norm", key))
    return False


class _NormOfInput(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed
    """RMS norm that stores only its input, like a fused kernel. Separate kernels store two copies in fp32."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any) -> Any:
        ctx.save_for_backward(hidden, weight)
        return functional.rms_norm(hidden, weight.shape, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        hidden, weight = (each.detach().requires_grad_() for each in ctx.saved_tensors)
        with torch.enable_grad():
            normed = functional.rms_norm(hidden, weight.shape, weight)
        return torch.autograd.grad(normed, (hidden, weight), gradient)


class Norm(nn.RMSNorm):  # type: ignore[misc]
    """RMS norm that stores its input, and no normed copy."""

    def forward(self, hidden: Any) -> Any:
        return (
            super().forward(hidden) if _has_fused_norm(hidden.device.type) else _NormOfInput.apply(hidden, self.weight)
        )


class Attention(nn.Module):  # type: ignore[misc]  # torch is not followed
    """Causal attention with rotary positions and grouped queries. Keys are gathered from context-parallel ranks."""

    def __init__(self, model: Model, context: DeviceMesh | None) -> None:
        super().__init__()
        self.channels, self.context = model.kv_channels, context
        width, shared = model.num_attention_heads * model.kv_channels, model.num_query_groups * model.kv_channels
        self.wq = nn.Linear(model.hidden_size, width, bias=model.add_qkv_bias)
        self.wk = nn.Linear(model.hidden_size, shared, bias=model.add_qkv_bias)
        self.wv = nn.Linear(model.hidden_size, shared, bias=model.add_qkv_bias)
        self.wo = nn.Linear(width, model.hidden_size, bias=False)
        has_norm = model.qk_layernorm
        self.q_norm = Norm(model.kv_channels) if has_norm else nn.Identity()
        self.k_norm = Norm(model.kv_channels) if has_norm else nn.Identity()

    def forward(self, hidden: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        batch, length = hidden.shape[:2]
        query, key, value = (
            product(hidden).view(batch, length, -1, self.channels) for product in (self.wq, self.wk, self.wv)
        )
        query, key = rotated(self.q_norm(query), angles), rotated(self.k_norm(key), angles)
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        mask = None
        if self.context is not None:
            key, value = (_gathered(each, self.context) for each in (key, value))
            mask = _mask(length, self.context.size(), self.context.get_local_rank(), query.device)
        output = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=key.size(1) != query.size(1)
        )
        return self.wo(output.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):  # type: ignore[misc]
    """A feed-forward block, with a gate or without one."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.w1 = nn.Linear(model.hidden_size, model.ffn_hidden_size, bias=False)
        self.w2 = nn.Linear(model.ffn_hidden_size, model.hidden_size, bias=False)
        self.w3 = nn.Linear(model.hidden_size, model.ffn_hidden_size, bias=False) if model.gated_linear_unit else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        first = self.w1(hidden)
        return self.w2(functional.silu(first) * self.w3(hidden) if self.w3 is not None else functional.gelu(first))


class Layer(nn.Module):  # type: ignore[misc]
    """A transformer layer with norms before its blocks."""

    def __init__(self, model: Model, context: DeviceMesh | None) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = Norm(model.hidden_size), Norm(model.hidden_size)
        self.attention, self.feed_forward = Attention(model, context), FeedForward(model)

    def forward(self, hidden: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), angles)
        return hidden + self.feed_forward(self.ffn_norm(hidden))


class Transformer(nn.Module):  # type: ignore[misc]
    """A stage of a decoder: the embedding on the first one, layers, and the final norm and the head on the last one.

    It takes tokens, or the last stage's tensor between layers, and returns such a tensor, [batch, sequence, hidden], or
    logits, [batch, sequence, vocabulary]. `angles`: see `rotary_angles`.
    """

    def __init__(self, model: Model, angles: torch.Tensor, *, first: bool, last: bool) -> None:
        super().__init__()
        self.angles = angles
        self.embedding = nn.Embedding(model.vocab_size, model.hidden_size) if first else None
        self.layers = nn.ModuleDict()
        self.norm = Norm(model.hidden_size) if last else None
        self.head = nn.Linear(model.hidden_size, model.vocab_size, bias=False) if last else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            hidden = self.embedding(hidden)
        for layer in self.layers.values():
            hidden = layer(hidden, self.angles)
        return hidden if self.head is None or self.norm is None else self.head(self.norm(hidden))


def rotary_angles(job: Job, positions: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the cosine and sine of each position, [2, sequence, 1, channels / 2], in the data type of activations."""
    steps = torch.arange(0, job.model.kv_channels, 2, device=device) / job.model.kv_channels
    angles = positions.to(device)[:, None] / ROTARY_BASE**steps
    return torch.stack((angles.cos(), angles.sin()))[:, :, None].to(DTYPES[job.train.precision])


def rotated(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Return heads, [batch, sequence, heads, channels], rotated by the angles of their positions."""
    cosine, sine = angles
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)


def _gathered(tensor: torch.Tensor, context: DeviceMesh) -> torch.Tensor:
    """Return the keys or values of all context-parallel ranks, in the order of ranks. Gradients are summed."""
    return collectives.all_gather_tensor_autograd(tensor.contiguous(), gather_dim=2, group=(context, 0))


@functools.lru_cache(maxsize=4)
def _mask(length: int, size: int, rank: int, device: torch.device) -> torch.Tensor:
    """Return which gathered keys each query of a rank attends to, [length, length * size]."""
    positions = [own_positions(length * size, size, each).to(device) for each in range(size)]
    return positions[rank][:, None] >= torch.cat(positions)[None, :]


def own_positions(length: int, size: int, rank: int) -> torch.Tensor:
    """Return the positions of a context-parallel rank: the chunks r and 2n-1-r of 2n, so that all compute as much."""
    if size == 1:
        return torch.arange(length)
    chunks = torch.arange(length).chunk(2 * size)
    return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]))


def build(job: Job, meshes: Meshes, device: torch.device, angles: torch.Tensor, stage: int = 0) -> Transformer:
    """Return a stage of the model.

    One layer after the other is created, split and sharded, so that no rank holds the whole model.
    """
    candidate, mesh = job.candidate, meshes.weights
    tensor = mesh["tp"] if candidate.tensor > 1 else None
    context = meshes.samples["cp"] if candidate.context > 1 else None
    with torch.device(device):
        whole = Transformer(job.model, angles, first=stage == 0, last=stage == job.stages - 1)
        set_weights(whole, job.train.seed, "")
        if tensor is not None:
            plan = {name: each for name, each in _edges_plan().items() if getattr(whole, name) is not None}
            parallelize_module(whole, tensor, plan, src_data_rank=None)
        is_tied = not job.model.untie_embeddings_and_output_weights
        if is_tied and whole.head is not None and whole.embedding is not None:
            whole.head.weight = whole.embedding.weight
        elif whole.embedding is not None:
            _shard(whole.embedding, job, mesh)
        count = job.model.num_layers // job.stages
        for number in range(stage * count, (stage + 1) * count):
            layer: nn.Module = Layer(job.model, context)
            set_weights(layer, job.train.seed, f"layer{number}.")
            if tensor is not None:
                parallelize_module(layer, tensor, _layer_plan(job.model), src_data_rank=None)
            if candidate.checkpointing != "none":
                layer = _checkpointed(layer, candidate.checkpointing)
            if candidate.compile:
                layer.compile()
            _shard(layer, job, mesh)
            whole.layers[str(number)] = layer
        if whole.head is not None and not is_tied:
            _shard(whole.head, job, mesh, stays=True)
    _shard(whole, job, mesh, stays=True)
    return whole


def _shard(module: nn.Module, job: Job, mesh: DeviceMesh, *, stays: bool = False) -> None:
    """Make a module a unit of FSDP2. `stays`: its weights stay gathered until its backward."""
    candidate = job.candidate
    dtype = DTYPES[job.train.precision]
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=DTYPES[candidate.reduce_dtype])
    fully_shard(
        module,
        mesh=mesh["replicate", "fsdp"] if candidate.replicate > 1 else mesh["fsdp"],
        reshard_after_forward=candidate.reshard_after_forward and candidate.pipeline == 1 and not stays,
        mp_policy=MixedPrecisionPolicy() if dtype is torch.float32 else policy,
        offload_policy=CPUOffloadPolicy(pin_memory=job.device.type != "cpu") if candidate.offload else OffloadPolicy(),
    )


def set_weights(module: nn.Module, seed: int, prefix: str) -> None:
    """Set the initial weights of a module that is not yet split: ones in norms, zeros in biases, else random."""
    for name, weight in module.named_parameters():
        generator = torch.Generator(weight.device).manual_seed(zlib.crc32(f"{prefix}{name}".encode()) + seed)
        with torch.no_grad():
            if weight.dim() > 1:
                weight.normal_(std=STD, generator=generator)
            else:
                weight.fill_(0.0 if name.endswith("bias") else 1.0)


def _edges_plan() -> dict[str, Any]:
    """Return how embedding, final norm and head are split. Between layers, the sequence is split."""
    return {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }


def _layer_plan(model: Model) -> dict[str, Any]:
    """Return how the modules of a layer are split over tensor-parallel ranks."""
    inputs = PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None))
    plan: dict[str, Any] = {
        "attention_norm": SequenceParallel(),
        "attention": inputs,
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    }
    if model.gated_linear_unit:
        plan["feed_forward.w3"] = ColwiseParallel()
    if model.qk_layernorm:
        plan |= {f"attention.{name}": SequenceParallel(sequence_dim=2) for name in ("q_norm", "k_norm")}
    return plan


SAVED = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
)
"""Operators whose results selective checkpointing stores, besides every second matrix product (torchtitan's `op`)."""


def _checkpointed(layer: nn.Module, kind: str) -> nn.Module:
    """Wrap a layer so that backward computes it again: all of it, or what is cheap."""
    if kind == "full":
        return checkpoint_wrapper(layer, preserve_rng_state=False)

    def contexts() -> Any:
        products = {False: 0, True: 0}

        def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
            is_product = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
            products[context.is_recompute] += is_product
            is_saved = operator in SAVED or (is_product and products[context.is_recompute] % 2 == 1)
            return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return checkpoint_wrapper(layer, preserve_rng_state=False, context_fn=contexts)
