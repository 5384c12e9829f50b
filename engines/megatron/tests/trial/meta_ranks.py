"""One rank of a larger world, built and trained by megatron-core without a device: its parameters and its memory.

Tensors are on torch's meta device, the other ranks are torch's fake process group, and an allocator that rounds to
512 bytes counts what lives. Kernels that torch would pick on an accelerator, and not on the meta device, are replaced
by functions that allocate what those kernels do: fused attention and RMS norm, and compiled SwiGLU.

To be used in a process of its own, for it replaces functions of torch, whose compiler the environment must disable:
TORCHDYNAMO_DISABLE=1.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.optim.optimizer as optimizers
from flagcore_megatron.trial import model as trial_model
from flagcore_megatron.trial import rank, training
from flagcore_megatron.trial.config import transformer_config
from flagcore_megatron.trial.job import TrialCandidate, TrialJob
from flagcore_training.trial.job import Device, Train
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import param_and_grad_buffer as buffers
from megatron.core.fusions import fused_bias_swiglu
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.tensor_parallel import layers as parallel_layers
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flagcore.domain.model import Model

META = torch.device("meta")


class Allocator(TorchDispatchMode):
    """Counts the storages that live, as torch's caching allocator does: in blocks of 512 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._blocks: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(answer):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                self._allocate(tensor.untyped_storage())
        return answer

    def forget(self) -> None:
        """Start anew: what lives already is another job's."""
        gc.collect()
        self._blocks.clear()
        self.live = self.peak = 0

    def resize(self, storage: Any) -> None:
        if storage._cdata in self._blocks:
            self._set(storage._cdata, storage.nbytes())

    def _allocate(self, storage: Any) -> None:
        if storage._cdata not in self._blocks:
            self._blocks[storage._cdata] = 0
            self._set(storage._cdata, storage.nbytes())
            weakref.finalize(storage, self._free, storage._cdata)

    def _set(self, key: int, size: int) -> None:
        block = -(-size // 512) * 512
        self.live += block - self._blocks[key]
        self._blocks[key] = block
        self.peak = max(self.peak, self.live)

    def _free(self, key: int) -> None:
        self.live -= self._blocks.pop(key, 0)


ALLOCATOR = Allocator()


class FlashAttention(torch.autograd.Function):
    """Keeps its inputs, its output and one fp32 number a row; backward adds an fp32 sum of the queries' gradients."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any) -> Any:
        batch, heads, length, _ = query.shape
        output = _empty_view(query, value.shape[-1])
        ctx.save_for_backward(query, key, value, output, torch.empty(batch, heads, length, device=META))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        query, key, value, *_ = ctx.saved_tensors
        gradients = tuple(_empty_view(tensor, tensor.shape[-1]) for tensor in (query, key, value))
        total = [torch.empty(query.shape, device=META)]
        if key.shape[1] < query.shape[1]:
            total += [_empty_view(query, query.shape[-1]) for _ in range(2)]
        return gradients


class CoreAttention(torch.nn.Module):
    """Causal attention as torch's fused kernel does it."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
        output = FlashAttention.apply(*(tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)))
        return output.permute(2, 0, 1, 3).reshape(*query.shape[:2], -1)


class FusedRms(torch.autograd.Function):
    """Keeps its input and one fp32 number a row."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, weight: Any) -> Any:
        ctx.save_for_backward(tensor, weight, torch.empty(tensor.numel() // tensor.shape[-1], device=META))
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=META)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        tensor, weight, _ = ctx.saved_tensors
        return tuple(torch.empty(each.shape, dtype=each.dtype, device=META) for each in (tensor, weight))


class Norm(trial_model.Norm):
    """The trial program's norm."""

    def forward(self, tensor: Any) -> Any:
        return FusedRms.apply(tensor, self.weight)


class Selected(torch.autograd.Function):
    """The values under a mask, of which there are as many as choices of experts."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, mask: Any, count: int) -> Any:
        ctx.save_for_backward(mask)
        ctx.shape = tensor.shape
        return torch.empty(count, dtype=tensor.dtype, device=META)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return torch.zeros(ctx.shape, dtype=gradient.dtype, device=META), None, None


class Done:
    """A collective that took no time, and the manager of several."""

    def __call__(self, *_: Any, **__: Any) -> Done:
        return self

    def __enter__(self) -> Done:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def wait(self) -> bool:
        return True


def _empty_view(tensor: Any, width: int) -> Any:
    """Memory of [batch, length, heads, width], seen as [batch, heads, length, width]."""
    batch, heads, length, _ = tensor.shape
    return torch.empty((batch, length, heads, width), dtype=tensor.dtype, device=META).transpose(1, 2)


def _half(tensor: Any, *_: Any) -> Any:
    return torch.empty((*tensor.shape[:-1], tensor.shape[-1] // 2), dtype=tensor.dtype, device=META)


def _same(tensor: Any) -> Any:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=META)


def stand_in() -> None:
    """Make "cuda" mean the meta device, collectives mean nothing, and answers of the device mean one."""

    def on_meta(factory: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
                kwargs["device"] = META
            return factory(*args, **kwargs)

        return make

    for name in ("tensor", "zeros", "empty", "ones", "arange"):
        setattr(torch, name, on_meta(getattr(torch, name)))
    torch.cuda.current_device = lambda: META
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    words = {"float32": "FloatTensor", "float16": "HalfTensor", "bfloat16": "BFloat16Tensor"}
    plain = torch.Tensor.type
    torch.Tensor.type = lambda tensor, *args, **named: (
        plain(tensor, *args, **named) if args or named else f"torch.cuda.{words[str(tensor.dtype).split('.')[1]]}"
    )
    for name, answer in (("item", 1.0), ("__float__", 1.0), ("__bool__", False)):
        setattr(torch.Tensor, name, _answering(getattr(torch.Tensor, name), answer))
    resize = torch.UntypedStorage.resize_
    torch.UntypedStorage.resize_ = lambda storage, size: (resize(storage, size), ALLOCATOR.resize(storage))[0]
    # On an accelerator torch's AdamW works on lists of tensors.
    optimizers._get_foreach_kernels_supported_devices = lambda: ["cuda", "meta"]
    make = torch.optim.AdamW.__init__
    torch.optim.AdamW.__init__ = lambda self, *args, **named: make(self, *args, **{**named, "foreach": True})

    done = Done()
    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast"):
        setattr(dist, name, done)
    for name in ("all_gather", "isend", "irecv", "barrier", "reduce_scatter"):
        setattr(dist, name, done)
    dist.P2POp, dist.batch_isend_irecv = done, lambda operations: [done for _ in operations]
    for module in (buffers, mappings, parallel_layers):
        for name in ("dist_all_gather_func", "dist_reduce_scatter_func", "_coalescing_manager"):
            if hasattr(module, name):
                setattr(module, name, done)

    fused_bias_swiglu.swiglu = fused_bias_swiglu.weighted_swiglu = _half
    fused_bias_swiglu.swiglu_back = lambda gradient, tensor: _same(tensor)
    fused_bias_swiglu.weighted_swiglu_back = lambda gradient, tensor, weights: (_same(tensor), _same(weights))
    random = tensor_parallel.random
    random._get_cuda_rng_state = lambda *_, **__: torch.empty(0, dtype=torch.uint8)
    random._set_cuda_rng_state = lambda *_, **__: None
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = object()
    MoEAlltoAllTokenDispatcher.preprocess = _even(MoEAlltoAllTokenDispatcher.preprocess)
    MoEAllGatherTokenDispatcher.dispatch_postprocess = _even_gathered(MoEAllGatherTokenDispatcher.dispatch_postprocess)
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = lambda dispatcher, point, tokens=None: tokens
    trial_model.Norm, trial_model.CoreAttention = Norm, CoreAttention
    trial_model.set_initial_weights = lambda *_: None


def _answering(method: Callable[..., Any], answer: Any) -> Callable[..., Any]:
    return lambda tensor, *args: answer if tensor.is_meta else method(tensor, *args)


def _even(preprocess: Callable[..., Any]) -> Callable[..., Any]:
    """Deal tokens out to the experts evenly."""

    def evenly(dispatcher: Any, routing: Any) -> Any:
        preprocess(dispatcher, routing)
        count, ranks = dispatcher.num_out_tokens, dispatcher.ep_size
        experts, width = dispatcher.num_local_experts, dispatcher.tp_size
        if ranks * width > 1:
            dispatcher.input_splits = dispatcher.output_splits = [count // ranks] * ranks
            dispatcher.output_splits_tp = torch.tensor([count] * width)
        each = torch.full((width * ranks, experts), count // (ranks * experts))
        if experts > 1:
            dispatcher.num_global_tokens_per_local_expert = each
        return each.sum(0)

    return evenly


def _even_gathered(postprocess: Callable[..., Any]) -> Callable[..., Any]:
    """Deal gathered tokens out to the experts evenly."""

    def evenly(dispatcher: Any, tokens: Any, probabilities: Any) -> Any:
        each = tokens.shape[0] * dispatcher.router_topk // dispatcher.config.num_moe_experts
        plain = torch.Tensor.cpu
        torch.Tensor.cpu = lambda counts: torch.full(counts.shape, each)
        try:
            return postprocess(dispatcher, tokens, probabilities)
        finally:
            torch.Tensor.cpu = plain

    return evenly


def job_of(job: dict[str, Any]) -> TrialJob:
    """Return a job as the trial program reads it."""
    shape = dict(job["model"])
    shape.setdefault("num_query_groups", shape["num_attention_heads"])
    shape.setdefault("kv_channels", shape["hidden_size"] // shape["num_attention_heads"])
    candidate = {**job["candidate"], **job.get("config", {})}
    candidate["moe_token_dispatcher_type"] = job.get("dispatcher", "alltoall")
    work = Train(job["seq_length"], job["global_batch_size"], job["precision"], train_iters=2, seed=1)
    parts = {"model": Model(name="x", **shape), "train": work, "candidate": TrialCandidate(**candidate)}
    return TrialJob(**parts, device=Device(type="cuda"), output=Path())


def configuration(job: TrialJob, *, plain_activation: bool = False) -> Any:
    """Return Megatron's configuration of a job."""
    config = transformer_config(job)
    config.bias_activation_fusion = config.gated_linear_unit and not plain_activation
    config.batch_p2p_sync = config.perform_initialization = False
    if experts := config.num_moe_experts:
        torch.Tensor.masked_select = lambda tensor, mask: Selected.apply(
            tensor, mask, mask.numel() // experts * config.moe_router_topk
        )
    return config


def tell_shapes(job: dict[str, Any], config: Any) -> None:
    """Return the shapes that stages send where multi-token prediction is before the loss, for one virtual stage.

    There the output has a hidden state for each depth, too, and Megatron sends shapes first.
    """
    tokens, batch = job["seq_length"] // config.context_parallel_size, job["candidate"]["micro_batch_size"]
    if config.sequence_parallel:
        tokens //= config.tensor_model_parallel_size
    number, end = parallel_state.get_pipeline_model_parallel_rank(), config.pipeline_model_parallel_size - 1

    def shapes(_: Any, __: Any, ___: Any, recv_prev: bool, recv_next: bool) -> tuple[Any, Any]:
        depths = 1 + (config.mtp_num_layers or 0)
        before, behind = depths if number == end else 1, depths if number == end - 1 else 1
        found = ([tokens * times, batch, config.hidden_size] for times in (before, behind))
        return tuple(shape if wanted else None for shape, wanted in zip(found, (recv_prev, recv_next), strict=True))

    P2PCommunicator._communicate_shapes = shapes


def join(job: dict[str, Any]) -> None:
    """Become rank `rank` of `world` ranks."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=job["rank"], world_size=job["world"], store=FakeStore())
    rank._make_groups(job_of(job))
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    MTPLossLoggingHelper.tracker = {}


def build(job: dict[str, Any]) -> trial_model.BuiltModel:
    """Build the rank's part of the model with the trial program."""
    trial_model.transformer_config = partial(configuration, plain_activation=job.get("plain_activation", False))
    return trial_model.build(job_of(job), META)


def parameters(job: dict[str, Any]) -> int:
    """Return how many parameters a rank holds."""
    join(job)
    return sum(weight.numel() for chunk in build(job).chunks for weight in chunk.parameters())


def train(job: dict[str, Any]) -> dict[str, int]:
    """Return what two steps take on a rank: between steps, and the peaks of their phases, in bytes."""
    join(job)
    with ALLOCATOR:
        return _train(job)


def _train(job: dict[str, Any]) -> dict[str, int]:
    ALLOCATOR.forget()
    built, candidate = build(job), job["candidate"]
    tell_shapes(job, built.config)
    copies = parallel_state.get_data_parallel_world_size()
    shape = (candidate["micro_batch_size"], job["seq_length"] // built.config.context_parallel_size)
    count = job["global_batch_size"] // (candidate["micro_batch_size"] * copies)
    figures = {"parameters": sum(weight.numel() for chunk in built.chunks for weight in chunk.parameters())}
    for _ in range(2):
        training.clear_gradients(built)
        ALLOCATOR.peak = ALLOCATOR.live
        tokens = [[torch.empty(shape, dtype=torch.int64, device=META) for _ in range(3)] for _ in range(count)]
        training.forward_backward(job_of(job), built, [training.Batch(*each) for each in tokens])
        figures["forward_backward"] = ALLOCATOR.peak
        del tokens
        ALLOCATOR.peak = ALLOCATOR.live
        built.optimizer.step()
        figures["optimizer"], figures["static"] = ALLOCATOR.peak, ALLOCATOR.live
    return figures


def run(jobs: list[dict[str, Any]]) -> list[Any]:
    """Return the figures of each job."""
    stand_in()
    gc.collect()
    gc.freeze()  # collections between jobs need not look at the libraries
    return [train(job) if job.get("train") else parameters(job) for job in jobs]
