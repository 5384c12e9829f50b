"""What the host needs to launch a kernel, with all that a training framework does around it."""

from __future__ import annotations

from typing import Any

import torch

from flagcore.microbench.bench import Bench, Timing
from flagcore.microbench.kernels import Row, record

MODULES = 200


class _Product(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed
    """A product with a backward pass of its own, as the layers of parallel frameworks have."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the product."""
        ctx.save_for_backward(value, weight)
        return value * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two products."""
        value, weight = ctx.saved_tensors
        return gradient * weight, gradient * value


class _Scale(torch.nn.Module):  # type: ignore[misc]
    """A module of one kernel, which does almost nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Return a product."""
        found: torch.Tensor = _Product.apply(value, self.weight)
        return found


def launches(bench: Bench) -> list[Row]:
    """Return the host's time for a kernel of a chain of modules, forward and backward."""
    chain = torch.nn.Sequential(*[_Scale().to(bench.device) for _ in range(MODULES)])
    one, weights = torch.ones(1, device=bench.device), list(chain.parameters())
    forward = bench.host_time(lambda: chain(one), 1)
    end = chain(one)
    backward = bench.host_time(lambda: torch.autograd.grad(end, weights, retain_graph=True), 1)
    both = [
        Timing(timing.seconds / (kernels * MODULES), timing.spread, timing.repeats)
        for timing, kernels in ((forward, 1), (backward, 2))
    ]
    names = ("forward", "backward")
    return [{"kernel": "launch", "name": name, **record(each)} for name, each in zip(names, both, strict=True)]
