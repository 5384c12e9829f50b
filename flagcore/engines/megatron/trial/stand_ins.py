"""Replacements for missing parts: a GPU when a trial runs on a CPU, and other ranks when a probe runs one alone.

Megatron-core names the device "cuda" in the text of many functions. Nothing in its files is edited: a few
functions of torch and of Megatron are replaced inside the rank's process, each for the reason given with it.
The replacements are plain functions, not a function mode, because a mode is off while torch runs a backward
pass, and recomputation runs the forward code there.
"""

from __future__ import annotations

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


def stand_in_for_cuda() -> None:
    """Make "cuda" mean the CPU in this process. Call once per rank, before Megatron builds anything."""
    # Schedules, optimizers and gradient clipping make small tensors with device="cuda", rotary embeddings
    # under context parallelism one in pinned memory.
    torch.tensor = _on_cpu(torch.tensor)
    torch.zeros = _on_cpu(torch.zeros)
    # Passed as `device=` in some seventy places.
    torch.cuda.current_device = lambda: _CPU
    # Optimizers sort parameters by their type's name, such as torch.cuda.FloatTensor.
    torch.Tensor.type = _type
    # Rotary embeddings under context parallelism and tied embeddings move tensors to the device.
    torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor

    # Recomputation saves the device's random state, which is not there, and restores it, for which torch would
    # queue a call that waits for the device for ever.
    tensor_parallel.random._get_cuda_rng_state = lambda *args, **kwargs: torch.empty(0, dtype=torch.uint8)
    tensor_parallel.random._set_cuda_rng_state = lambda *args, **kwargs: None
    # The all-to-all dispatcher makes a stream, to copy split sizes in the background; gradient buffers of newer
    # releases ask for the one in use.
    torch.cuda.Stream = torch.cuda.current_stream = _Stream
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = _splits_to_numpy


class _Stream:
    """A stream whose work is done when it is asked for."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


_plain_type = torch.Tensor.type


def _type(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs:
        return _plain_type(tensor, *args, **kwargs)
    return str(_plain_type(tensor)).replace("torch.", "torch.cuda.", 1)


def _splits_to_numpy(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
    """What the original does with a side stream: turn the split sizes into host arrays at the agreed point."""
    if point == dispatcher.cuda_dtoh_point and not dispatcher.drop_and_pad:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            value = getattr(dispatcher, name)
            if isinstance(value, torch.Tensor):
                setattr(dispatcher, name, value.numpy())
    return tokens_per_expert


ACTIVATION, GRADIENT = 1.0, 1e-4
"""The largest values in made-up messages: such that losses and norms are finite and fp16 does not overflow."""


def init_fake_world(kind: str, rank: int, world_size: int) -> None:
    """Be `rank` of a world of `world_size` on devices that torch calls `kind`."""
    known = dist.Backend.backend_capability.get("fake", [])
    backend = "fake" if kind in known else f"cpu:fake,{kind}:fake"  # devices that an import registers
    dist.init_process_group(backend, store=FakeStore(), rank=rank, world_size=world_size)
    # What the others would send is not there: each function documents the replacement.
    dist.all_to_all_single = _exchange
    for module in (mappings, layers, param_and_grad_buffer):  # they hold the functions under other names
        module.dist_all_gather_func = _all_gather
        module.dist_reduce_scatter_func = _reduce_scatter
    # A class from 0.14 on, functions of the module before.
    owner = getattr(p2p_communication, "P2PCommunicator", p2p_communication)
    owner._communicate = _with_messages(owner._communicate)


def _all_gather(output: torch.Tensor, input: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Receive copies of what this rank sends. Weights that are gathered in place stay: the others' are there already,
    and copies of this rank's would be other weights.
    """
    if output.untyped_storage().data_ptr() != input.untyped_storage().data_ptr():
        with torch.no_grad():
            output.view(dist.get_world_size(group), -1).copy_(input.reshape(1, -1))
    return _Done() if async_op else None


def _reduce_scatter(
    output: torch.Tensor, input: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False
) -> Any:
    """Receive this rank's part of its own values."""
    with torch.no_grad():
        output.view(-1).copy_(input.reshape(dist.get_world_size(group), -1)[dist.get_rank(group)])
    return _Done() if async_op else None


def _exchange(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Receive this rank's own rows, repeated; a rank that sends nothing receives random numbers."""
    sent = input.size(0)
    with torch.no_grad():
        if not sent:
            output.uniform_(-ACTIVATION, ACTIVATION)
        for start in range(0, output.size(0), sent or output.size(0) or 1):
            rows = output[start : start + sent]
            rows.copy_(input[: rows.size(0)])
    return _Done() if async_op else None


class _Done:
    """A request that is already complete."""

    def wait(self, *_: Any) -> bool:
        return True


def _with_messages(communicate: Any) -> Any:
    """Let what a stage receives be small random numbers, not what a freed tensor left behind: it may be NaN, of which
    a router sends every token to the same experts.
    """

    @functools.wraps(communicate)
    def received(*args: Any, **kwargs: Any) -> Any:
        from_before, from_after, requests = communicate(*args, **kwargs)
        for tensor, largest in ((from_before, ACTIVATION), (from_after, GRADIENT)):
            if tensor is not None:
                with torch.no_grad():
                    tensor.uniform_(-largest, largest)
        return from_before, from_after, requests

    return received
