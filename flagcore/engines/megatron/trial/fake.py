"""A world of which this process is the only rank. Never used in a trial.

Torch's `fake` process group answers every collective at once. What it answers with differs between versions of torch,
and may be what a freed tensor left behind; here it is always numbers: this rank's own values again, or made-up ones.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.tensor_parallel import layers, mappings
from torch.testing._internal.distributed.fake_pg import FakeStore

ACTIVATION, GRADIENT = 1.0, 1e-4
"""The largest values in made-up messages: such that losses and norms are finite and fp16 does not overflow."""


def meet_nobody(kind: str, rank: int, world_size: int) -> None:
    """Be `rank` of a world of `world_size` on devices that torch calls `kind`."""
    known = dist.Backend.backend_capability.get("fake", [])
    backend = "fake" if kind in known else f"cpu:fake,{kind}:fake"  # devices that torch learnt of from an import
    dist.init_process_group(backend, store=FakeStore(), rank=rank, world_size=world_size)
    # What the others would send is not there: each function tells what stands in for it.
    dist.all_to_all_single = _exchange
    for module in (mappings, layers, param_and_grad_buffer):  # they keep the functions under names of their own
        module.dist_all_gather_func = _all_gather
        module.dist_reduce_scatter_func = _reduce_scatter
    P2PCommunicator._communicate = _with_messages(P2PCommunicator._communicate)


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
    """Receive this rank's own rows, over and over; a rank that sends nothing receives numbers."""
    sent = input.size(0)
    with torch.no_grad():
        if not sent:
            output.uniform_(-ACTIVATION, ACTIVATION)
        for start in range(0, output.size(0), sent or output.size(0) or 1):
            rows = output[start : start + sent]
            rows.copy_(input[: rows.size(0)])
    return _Done() if async_op else None


class _Done:
    """A request that was answered at once."""

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
