"""Replacements for CUDA when the trial runs on a CPU. Never used on an accelerator.

Megatron-core hard-codes the device "cuda" in many functions. A few functions of torch and of Megatron are replaced in
the rank's process, each for the reason given next to it. The replacements are plain functions, not a function mode: a
mode is off while torch runs a backward pass, in which recomputation runs the forward code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

_CPU = torch.device("cpu")


def replace_cuda_with_cpu() -> None:
    """Make "cuda" mean the CPU in this process. Call once per rank, before Megatron builds the model."""
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

    # Recomputation saves the device's random state, which does not exist, and restores it, for which torch would
    # queue a call that never returns.
    tensor_parallel.random._get_cuda_rng_state = lambda *args, **kwargs: torch.empty(0, dtype=torch.uint8)
    tensor_parallel.random._set_cuda_rng_state = lambda *args, **kwargs: None
    # The all-to-all dispatcher makes a stream when this is None, to copy split sizes in the background.
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = object()
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = _splits_to_numpy


def config_overrides(interleaved: bool) -> dict[str, Any]:
    """Values of TransformerConfig that a CPU needs instead of the accelerator's.

    Pipeline outputs must not be freed under the interleaved schedule: gloo may still be sending them, and
    the losses go wrong without an error.
    """
    return {
        "batch_p2p_sync": False,  # a device synchronisation after each pipeline transfer
        "deallocate_pipeline_outputs": not interleaved,
    }


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
