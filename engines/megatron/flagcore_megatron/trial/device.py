"""Replaces a missing GPU in trials on a CPU, and missing ranks in probes of a single rank.

Megatron-core hard-codes the device "cuda" in many functions. So the rank's process replaces a few functions of torch
and Megatron; a comment gives the reason for each. The replacements are plain functions. A torch function mode would be
off during the backward pass, in which recompute runs forward code.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.tensor_parallel import layers, mappings
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch.testing._internal.distributed.fake_pg import FakeStore

_CPU = torch.device("cpu")


def map_cuda_to_cpu() -> None:
    """Map the device "cuda" to the CPU in this process. Call it once per rank, before Megatron builds anything."""
    # Schedules, optimizers and gradient clipping create small tensors with device="cuda"; rotary embeddings under
    # context parallelism create one in pinned memory.
    torch.tensor = _on_cpu(torch.tensor)
    torch.zeros = _on_cpu(torch.zeros)
    # About seventy calls pass it as `device=`.
    torch.cuda.current_device = lambda: _CPU
    # Pipeline stages that exchange the shapes of their messages call this to wait for the device.
    torch.cuda.synchronize = lambda *args: None
    # Optimizers sort parameters by their type's name, such as torch.cuda.FloatTensor.
    torch.Tensor.type = _cuda_type_name
    # Rotary embeddings under context parallelism and tied embeddings move tensors to the device.
    torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor

    # Recompute saves and restores the random state of the device. Without a device, torch would queue a call that waits
    # for it for ever.
    tensor_parallel.random._get_cuda_rng_state = lambda *args, **kwargs: torch.empty(0, dtype=torch.uint8)
    tensor_parallel.random._set_cuda_rng_state = lambda *args, **kwargs: None
    # The all-to-all dispatcher creates a stream to copy split sizes in the background; gradient buffers of newer
    # releases use the current stream.
    torch.cuda.Stream = torch.cuda.current_stream = _Stream
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = _splits_to_numpy


class _Stream:
    """A replacement for a CUDA stream, without asynchronous work."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make_on_cpu(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make_on_cpu


_plain_type = torch.Tensor.type


def _cuda_type_name(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs:
        return _plain_type(tensor, *args, **kwargs)
    return str(_plain_type(tensor)).replace("torch.", "torch.cuda.", 1)


def _splits_to_numpy(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
    """Convert the split sizes of the token dispatcher to host arrays, at the `point` at which Megatron copies them.
    Megatron copies them on a side stream."""
    if point == dispatcher.cuda_dtoh_point and not dispatcher.drop_and_pad:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            value = getattr(dispatcher, name)
            if isinstance(value, torch.Tensor):
                setattr(dispatcher, name, value.numpy())
    return tokens_per_expert


MAX_ACTIVATION, MAX_GRADIENT = 1.0, 1e-4
"""Maximum absolute values in generated messages: losses and norms stay finite, and fp16 does not overflow."""


def init_fake_world(kind: str, rank: int, world_size: int) -> None:
    """Initialize this process as one of `world_size` ranks without the others. `kind` is torch's device type."""
    known = dist.Backend.backend_capability.get("fake", [])
    backend = "fake" if kind in known else f"cpu:fake,{kind}:fake"  # for devices that are registered by an import
    dist.init_process_group(backend, store=FakeStore(), rank=rank, world_size=world_size)
    # The other ranks send nothing. Each function below documents what is received instead.
    dist.all_to_all_single = _all_to_all
    for module in (mappings, layers, param_and_grad_buffer):  # these modules import the functions under other names
        module.dist_all_gather_func = _all_gather
        module.dist_reduce_scatter_func = _reduce_scatter
    # From 0.14 on these are methods of a class, in earlier releases functions of the module.
    owner = getattr(p2p_communication, "P2PCommunicator", p2p_communication)
    owner._communicate = _with_messages(owner._communicate)


def _all_gather(output: torch.Tensor, input: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Receive copies of this rank's input in place of the other ranks' inputs.

    Weights that are gathered in place stay unchanged, because the buffer already contains the weights of the other
    ranks.
    """
    if output.untyped_storage().data_ptr() != input.untyped_storage().data_ptr():
        with torch.no_grad():
            output.view(dist.get_world_size(group), -1).copy_(input.reshape(1, -1))
    return _CompletedRequest() if async_op else None


def _reduce_scatter(
    output: torch.Tensor, input: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False
) -> Any:
    """Write this rank's part of its own input to `output`, in place of the sum over all ranks."""
    with torch.no_grad():
        output.view(-1).copy_(input.reshape(dist.get_world_size(group), -1)[dist.get_rank(group)])
    return _CompletedRequest() if async_op else None


def _all_to_all(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Receive repeated copies of this rank's own rows. A rank that sends nothing receives random numbers."""
    row_count = input.size(0)
    with torch.no_grad():
        if not row_count:
            output.uniform_(-MAX_ACTIVATION, MAX_ACTIVATION)
        for start in range(0, output.size(0), row_count or output.size(0) or 1):
            received_rows = output[start : start + row_count]
            received_rows.copy_(input[: received_rows.size(0)])
    return _CompletedRequest() if async_op else None


class _CompletedRequest:
    """A replacement for the request of an asynchronous collective. It is already complete."""

    def wait(self, *_: Any) -> bool:
        return True


def _with_messages(communicate: Any) -> Any:
    """Wrap `communicate` so that received messages are small random numbers. Uninitialized memory may contain NaN, and
    then a router sends every token to the same experts."""

    @functools.wraps(communicate)
    def communicate_random(*args: Any, **kwargs: Any) -> Any:
        from_before, from_after, requests = communicate(*args, **kwargs)
        for tensor, largest in ((from_before, MAX_ACTIVATION), (from_after, MAX_GRADIENT)):
            if tensor is not None:
                with torch.no_grad():
                    tensor.uniform_(-largest, largest)
        return from_before, from_after, requests

    return communicate_random
