"""A decoder in plain torch, and how it is sharded: tensor, context and expert parallelism, FSDP2.

A rank has one stage of a pipeline, or two; without a pipeline, the stage is the whole model. The units of `fully_shard`
are the embedding, each layer, a layer's experts, the head, and the rest; a tied head is in the rest with the embedding.
Initial weights do not depend on the layout: their seeds are derived from names, and each rank keeps its part.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from flagcore_megatron.trial.model import NormOfInput, causal_mask, has_fused_norm
from flagcore_models.layers import layers_of
from flagcore_models.mixers import attention
from flagcore_training.adapters import has_adapter
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
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

from engines.trainers.tests.decoder.job import Job, Meshes
from engines.trainers.tests.decoder.mixers import MIXERS, again, narrow_attention, windowed_attention
from flagcore.domain import model as domain
from flagcore.domain.model import Model
from flagcore.domain.spec import Adapter

STD = 0.02
SEED = 1
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROTARY_BASE = 10000.0
ADAPTER_SCALE = 2.0
"""The factor of an adapter's output, alpha over its rank, as in most recipes."""


class Norm(nn.RMSNorm):
    """RMS norm that stores its input, and no normed copy."""

    def forward(self, hidden: Any) -> Any:
        is_fused = has_fused_norm(hidden.device.type)
        return super().forward(hidden) if is_fused else NormOfInput.apply(hidden, self.weight, None)


class Attention(nn.Module):
    """Causal attention with rotary positions and grouped queries. Keys are gathered from context-parallel ranks."""

    def __init__(self, model: Model, context: DeviceMesh | None, window: int | None = None) -> None:
        super().__init__()
        self.channels, self.context, self.window = model.kv_channels, context, window
        width, shared = model.num_attention_heads * model.kv_channels, model.num_query_groups * model.kv_channels
        self.wq = nn.Linear(model.hidden_size, width, bias=model.add_qkv_bias)
        self.wk = nn.Linear(model.hidden_size, shared, bias=model.add_qkv_bias)
        self.wv = nn.Linear(model.hidden_size, shared, bias=model.add_qkv_bias)
        self.wo = nn.Linear(width, model.hidden_size, bias=False)
        self.gate = nn.Linear(model.hidden_size, width, bias=False) if model.attention_output_gate else None
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
        if self.window is not None:
            output = again(windowed_attention, query, key, value, self.window)
            return self._output(hidden, output)
        if self.context is not None:
            key, value = (_gathered(each, self.context) for each in (key, value))
            mask = causal_mask(length, self.context.size(), self.context.get_local_rank(), query.device)
        output = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=key.size(1) != query.size(1)
        )
        return self._output(hidden, output)

    def _output(self, hidden: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        output = output.transpose(1, 2).flatten(2)
        return self.wo(output if self.gate is None else output * self.gate(hidden).sigmoid())


class LatentAttention(nn.Module):
    """Causal multi-head latent attention (arXiv 2405.04434): queries, keys and values from compressed inputs."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        h, heads, rank = model.hidden_size, model.num_attention_heads, model.q_lora_rank
        self.rope, self.plain, self.value = (
            each or 0 for each in (model.qk_pos_emb_head_dim, model.qk_head_dim, model.v_head_dim)
        )
        latent = model.kv_lora_rank or 0
        self.wq_a = nn.Linear(h, rank, bias=False) if rank else nn.Identity()
        self.q_norm = Norm(rank) if rank and model.qk_layernorm else nn.Identity()
        self.wq_b = nn.Linear(rank or h, heads * (self.plain + self.rope), bias=False)
        self.wkv_a = nn.Linear(h, latent + self.rope, bias=False)
        self.kv_norm = Norm(latent) if model.qk_layernorm else nn.Identity()
        self.wkv_b = nn.Linear(latent, heads * (self.plain + self.value), bias=False)
        self.wo = nn.Linear(heads * self.value, h, bias=False)

    def forward(self, hidden: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        query = self.wq_b(self.q_norm(self.wq_a(hidden))).unflatten(-1, (-1, self.plain + self.rope))
        query, turned = query.split((self.plain, self.rope), dim=-1)
        query = torch.cat((query, rotated(turned, angles)), dim=-1)
        latent, turned = self.wkv_a(hidden).split((self.wkv_b.in_features, self.rope), dim=-1)
        key, value = (
            self.wkv_b(self.kv_norm(latent))
            .unflatten(-1, (-1, self.plain + self.value))
            .split((self.plain, self.value), dim=-1)
        )
        key = torch.cat((key, rotated(turned[:, :, None], angles).expand(-1, -1, key.size(2), -1)), dim=-1)
        output = again(narrow_attention, *(each.transpose(1, 2) for each in (query, key, value)))
        return self.wo(output.transpose(1, 2).flatten(2))


class Adapted(nn.Module):
    """A linear layer with an adapter: LoRA (arXiv 2106.09685) or DoRA (arXiv 2402.09353)."""

    def __init__(self, base: nn.Linear, adapter: Adapter) -> None:
        super().__init__()
        self.base = base
        self.first = nn.Linear(base.in_features, adapter.rank, bias=False)
        self.second = nn.Linear(adapter.rank, base.out_features, bias=False)
        self.magnitude = nn.Parameter(torch.ones(base.out_features)) if adapter.kind == "dora" else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output = self.base(hidden) + ADAPTER_SCALE * self.second(self.first(hidden))
        if self.magnitude is None:
            return output
        with torch.no_grad():
            norm = (self.base.weight + ADAPTER_SCALE * (self.second.weight @ self.first.weight)).norm(dim=1)
        return output * (self.magnitude / norm)


TARGETS = {
    "q_proj": ("wq", "gate", "wq_a", "wq_b"),
    "k_proj": ("wk", "wkv_a"),
    "v_proj": ("wv", "wkv_b"),
    "o_proj": ("wo",),
    "up_proj": ("w3",),
    "down_proj": ("w2",),
    "gate_proj": ("w1",),
}
"""The modules of the targets of adapters. Without a gate, `w1` is up_proj."""


def with_adapters(module: nn.Module, adapter: Adapter) -> None:
    """Add adapters to the linear layers of a module."""
    for parent in list(module.modules()):
        for target, names in TARGETS.items():
            for name in names:
                found = getattr(parent, name, None)
                is_up = name == "w1" and getattr(parent, "w3", None) is None
                if isinstance(found, nn.Linear) and has_adapter(adapter, "up_proj" if is_up else target):
                    setattr(parent, name, Adapted(found, adapter))


def freeze(module: nn.Module, precision: str) -> None:
    """Freeze all weights but adapters, in the format of the products."""
    for name, weight in module.named_parameters():
        if not name.endswith(("first.weight", "second.weight", "magnitude")):
            weight.requires_grad_(False).data = weight.data.to(DTYPES[precision])


class FeedForward(nn.Module):
    """A feed-forward block, with a gate or without one."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.w1 = nn.Linear(model.hidden_size, model.ffn_hidden_size, bias=False)
        self.w2 = nn.Linear(model.ffn_hidden_size, model.hidden_size, bias=False)
        self.w3 = nn.Linear(model.hidden_size, model.ffn_hidden_size, bias=False) if model.gated_linear_unit else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        first = self.w1(hidden)
        return self.w2(functional.silu(first) * self.w3(hidden) if self.w3 is not None else functional.gelu(first))


class Experts(nn.Module):
    """The experts of one expert-parallel rank. Each is a feed-forward block without biases."""

    def __init__(self, model: Model, count: int) -> None:
        super().__init__()
        width, hidden = model.moe_ffn_hidden_size or model.ffn_hidden_size, model.hidden_size
        self.w1 = nn.Parameter(torch.empty(count, width, hidden))
        self.w2 = nn.Parameter(torch.empty(count, hidden, width))
        self.w3 = nn.Parameter(torch.empty(count, width, hidden)) if model.gated_linear_unit else None

    def forward(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Return the outputs of rows, [copies, hidden], that are sorted by expert. `counts`: the rows of each."""
        gates = self.w3 if self.w3 is not None else [None] * len(counts)
        outputs = []
        for each, up, down, gate in zip(rows.split(counts), self.w1, self.w2, gates, strict=True):
            first = functional.linear(each, up)
            first = functional.gelu(first) if gate is None else functional.silu(first) * functional.linear(each, gate)
            outputs.append(functional.linear(first, down))
        return torch.cat(outputs)


class MixtureOfExperts(nn.Module):
    """A feed-forward block whose tokens go to the `topk` experts with the highest scores, and to the shared experts.

    With expert parallelism, each rank has as many experts, and copies of tokens travel to their ranks and back.
    """

    def __init__(self, model: Model, expert: DeviceMesh) -> None:
        super().__init__()
        self.topk, self.count, self.expert = model.moe_router_topk, model.num_moe_experts or 1, expert
        self.router = nn.Linear(model.hidden_size, self.count, bias=False)
        self.experts = Experts(model, self.count // expert.size())
        shared = model.moe_shared_expert_intermediate_size
        self.shared = FeedForward(replace(model, ffn_hidden_size=shared)) if shared else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.flatten(0, 1)
        weights, chosen = self.router(tokens).float().softmax(-1).topk(self.topk)
        weights = (weights / weights.sum(-1, keepdim=True)).to(hidden.dtype)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self.count)
        outputs = self._exchanged(tokens[order // self.topk], counts)
        outputs = outputs * weights.flatten()[order, None]
        places = (order // self.topk)[:, None].expand_as(outputs)  # `index_add` would store the outputs
        result = torch.zeros_like(tokens).scatter_add(0, places, outputs).view_as(hidden)
        return result if self.shared is None else result + self.shared(hidden)

    def _exchanged(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return the experts' outputs of rows that are sorted by expert. `counts`: the rows of each of all experts."""
        size = self.expert.size()
        if size == 1:
            return self.experts(rows, counts.tolist())
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self.expert.get_group())
        blocks = received.tolist()  # of each rank and each expert of this rank
        sent, arrived = counts.view(size, -1).sum(1).tolist(), received.view(size, -1).sum(1).tolist()
        group = (self.expert, 0)
        rows = collectives.all_to_all_single_autograd(rows, arrived, sent, group)
        order = [rank * (len(blocks) // size) + expert for expert in range(len(blocks) // size) for rank in range(size)]
        parts = rows.split(blocks)
        own = received.view(size, -1).sum(0).tolist()
        outputs = self.experts(torch.cat([parts[each] for each in order]), own).split([blocks[each] for each in order])
        back = sorted(range(len(order)), key=order.__getitem__)
        outputs = torch.cat([outputs[each] for each in back])
        return collectives.all_to_all_single_autograd(outputs, sent, arrived, group)


class Layer(nn.Module):
    """A layer with norms before its blocks. `expert`: the mesh of its experts, if it has some."""

    def __init__(self, model: Model, kind: domain.Layer, context: DeviceMesh | None, expert: DeviceMesh) -> None:
        super().__init__()
        parts: dict[str, Any] = dict.fromkeys(("attention_norm", "attention", "ffn_norm", "feed_forward"))
        self.attention_norm, self.attention, self.ffn_norm, self.feed_forward = parts.values()
        if kind.mixer is not None:
            self.attention_norm = Norm(model.hidden_size)
            self.attention = _mixer(model, kind.mixer, context)
        if kind.network is not None:
            self.ffn_norm = Norm(model.hidden_size)
            has_experts = kind.network.kind == "experts"
            self.feed_forward = MixtureOfExperts(model, expert) if has_experts else FeedForward(model)

    def forward(self, hidden: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        if self.attention is not None:
            hidden = hidden + self.attention(self.attention_norm(hidden), angles)
        return hidden if self.feed_forward is None else hidden + self.feed_forward(self.ffn_norm(hidden))


def _mixer(model: Model, mixer: domain.Mixer, context: DeviceMesh | None) -> nn.Module:
    if not isinstance(mixer, attention.Attention):
        return MIXERS[mixer.label](model.hidden_size, mixer)
    return LatentAttention(model) if model.multi_latent_attention else Attention(model, context, mixer.window)


class Transformer(nn.Module):
    """A stage of a decoder: the embedding on the first one, layers, and the final norm and the head on the last one.

    It takes tokens, or the last stage's tensor between layers, and returns such a tensor, [batch, sequence, hidden], or
    logits, [batch, sequence, vocabulary], or what the head takes. `angles`: see `rotary_angles`.
    """

    def __init__(self, model: Model, angles: torch.Tensor, *, first: bool, last: bool) -> None:
        super().__init__()
        self.angles, self.skips_head, self.capped = angles, False, model.logit_cap_bytes > 0
        self.embedding = nn.Embedding(model.vocab_size, model.hidden_size) if first else None
        self.layers = nn.ModuleDict()
        self.norm = Norm(model.hidden_size) if last else None
        self.head = nn.Linear(model.hidden_size, model.vocab_size, bias=False) if last else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            hidden = self.embedding(hidden)
        for layer in self.layers.values():
            hidden = layer(hidden, self.angles)
        if self.head is None or self.norm is None:
            return hidden
        if self.skips_head:
            return self.norm(hidden)
        logits = self.head(self.norm(hidden))
        return torch.tanh(logits / 30.0) * 30.0 if self.capped else logits


def rotary_angles(job: Job, positions: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the cosine and sine of each position, [2, sequence, 1, channels / 2], in the data type of activations."""
    channels = (job.model.multi_latent_attention and job.model.qk_pos_emb_head_dim) or job.model.kv_channels
    steps = torch.arange(0, channels, 2, device=device) / channels
    angles = positions.to(device)[:, None] / ROTARY_BASE**steps
    return torch.stack((angles.cos(), angles.sin()))[:, :, None].to(DTYPES[job.precision])


def rotated(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Return heads, [batch, sequence, heads, channels], rotated by the angles of their positions."""
    cosine, sine = angles
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)


def _gathered(tensor: torch.Tensor, context: DeviceMesh) -> torch.Tensor:
    """Return the keys or values of all context-parallel ranks, in the order of ranks. Gradients are summed."""
    return collectives.all_gather_tensor_autograd(tensor.contiguous(), gather_dim=2, group=(context, 0))


def build(job: Job, meshes: Meshes, device: torch.device, angles: torch.Tensor, stage: int = 0) -> Transformer:
    """Return a stage of the model.

    One layer after the other is created, split and sharded, so that no rank holds the whole model.
    """
    candidate, mesh = job.candidate, meshes.weights
    tensor = mesh["tp"] if candidate.tensor > 1 else None
    context = meshes.samples["cp"] if candidate.context > 1 else None
    with torch.device(device), _format(DTYPES[candidate.state_dtype]):
        whole = Transformer(job.model, angles, first=stage == 0, last=stage == job.stages - 1)
        set_weights(whole, SEED, "")
        if job.adapter is not None:
            freeze(whole, job.precision)
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
            kind = layers_of(job.model)[number]
            layer: nn.Module = Layer(job.model, kind, context, meshes.experts["ep"])
            if job.adapter is not None:
                with_adapters(layer, job.adapter)
            set_weights(layer, SEED, f"layer{number}.", meshes.experts["ep"].get_local_rank())
            if job.adapter is not None:
                freeze(layer, job.precision)
            if kind.network is not None and kind.network.kind == "experts":
                _shard(layer.feed_forward.experts, job, meshes.experts, "efsdp")
            if tensor is not None:
                parallelize_module(layer, tensor, _layer_plan(job.model), src_data_rank=None)
            if candidate.checkpointing != "none":
                layer = _checkpointed(layer, candidate.checkpointing)
            _shard(layer, job, mesh)
            whole.layers[str(number)] = layer
        if whole.head is not None and not is_tied:
            _shard(whole.head, job, mesh, stays=True)
    _shard(whole, job, mesh, stays=True)
    return whole


@contextlib.contextmanager
def _format(dtype: torch.dtype) -> Iterator[None]:
    """Create weights in a number format."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)


def _shard(module: nn.Module, job: Job, mesh: DeviceMesh, name: str = "fsdp", *, stays: bool = False) -> None:
    """Make a module a unit of FSDP2 over the dimension `name`. `stays`: its weights stay gathered until its backward.

    Gradients are means over all ranks with different tokens, of which only some have a weight of an expert.
    """
    candidate = job.candidate
    dtype = DTYPES[job.precision]
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=DTYPES[candidate.reduce_dtype])
    fully_shard(
        module,
        mesh=mesh["replicate", name] if candidate.replicate > 1 else mesh[name],
        reshard_after_forward=candidate.reshard_after_forward and candidate.pipeline == 1 and not stays,
        mp_policy=MixedPrecisionPolicy() if dtype is torch.float32 else policy,
    )
    if name != "fsdp":
        module.set_gradient_divide_factor(float(job.replicas * candidate.context))
        # Gloo has no other reduction with a factor. With one rank, torch 2.13 would divide twice.
        module.set_force_sum_reduction_for_comms(mesh[name].size() > 1)


def set_weights(module: nn.Module, seed: int, prefix: str, expert_rank: int = 0) -> None:
    """Set the initial weights of a module that is not yet split: ones in norms, zeros in biases, else random."""
    for name, weight in module.named_parameters():
        with torch.no_grad():
            for number, expert in enumerate(weight if weight.dim() == 3 else ()):
                seed_of = zlib.crc32(f"{prefix}{name}{expert_rank * len(weight) + number}".encode()) + seed
                expert.normal_(std=STD, generator=torch.Generator(weight.device).manual_seed(seed_of))
            generator = torch.Generator(weight.device).manual_seed(zlib.crc32(f"{prefix}{name}".encode()) + seed)
            if weight.dim() == 2:
                weight.normal_(std=STD, generator=generator)
            elif weight.dim() == 1:
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
        heads = SequenceParallel(sequence_dim=2, use_local_output=True)
        plan |= {f"attention.{name}": heads for name in ("q_norm", "k_norm")}
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
