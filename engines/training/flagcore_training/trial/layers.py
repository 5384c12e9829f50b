"""What the models of several trial programs share: RMS norms, and the order of tokens under context parallelism."""

import functools
from contextlib import suppress
from typing import Any

import torch
from torch.nn import functional


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
