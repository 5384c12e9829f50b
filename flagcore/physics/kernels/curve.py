"""What shares of its peaks a chip reaches: the few numbers that turn facts into kernel times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flagcore.domain.chip import NotNegative, Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The parameters of `flagcore.physics.kernels.roofline.Roofline`.

    The defaults were fitted to 354 kernels of one current data-centre accelerator (178 bf16 matrix products, 93
    forward and 83 backward passes of causal attention) whose times the host did not limit: mean error 5.5%, 1.9% and
    3.0%. They are shares of peak and counts, so they carry over to a chip of a like design with its own peaks.
    """

    gemm_share: Positive = 0.81
    """Share of the peak that large matrix products reach."""
    gemm_shares: Mapping[str, Positive] = field(default_factory=dict)
    """The same by precision, where one differs."""
    units: Positive = 132.0
    """Units that work side by side: pieces of a product beyond a multiple of them wait for another wave."""
    tile: Positive = 64.0
    """Side of the piece of a product that a unit works on; a product is padded to it."""
    tile_overhead: NotNegative = 143.0
    """Start and end of a piece, in the depth k that a unit computes meanwhile in a 16-bit precision."""
    split_depth: NotNegative = 2048.0
    """Depth below which a product of fewer pieces than units is not split along k."""
    memory_share: Positive = 0.91
    """Share of the memory's rate that copies and operands of matrix products reach."""
    elementwise_share: Positive = 0.77
    """The same for element-wise kernels: activation functions, optimizers."""
    kernel_seconds: NotNegative = 2e-6
    """The least that a kernel takes on the device."""
    attention_share: Positive = 0.72
    """Share of the peak that long causal attention reaches forward, with heads of 128, where products reach
    `gemm_share`; in a precision that is in `gemm_shares`, as much more or less."""
    attention_overhead: NotNegative = 230.0
    """Start and end of a block of queries, in keys."""
    attention_backward_share: Positive = 0.69
    """The same for its backward pass."""
    attention_backward_overhead: NotNegative = 580.0
    """The same for its backward pass."""
    attention_tail: NotNegative = 0.61
    """How much of the longest block of 128 queries the units spend waiting for the last one."""
    half_head: NotNegative = 76.0
    """Width of a head that reaches half of what a very wide one would; nothing is gained beyond 128."""
    launch_seconds: NotNegative = 11e-6
    """What the host needs to launch one kernel, framework included."""
    run_slowdown: NotNegative = 1.0
    """Slowdown of kernels in a run on many devices against the curve: 1 if it was fitted to such runs."""
    host_bytes_per_second: Positive = 25e9
    """Rate of copies between device and pinned host memory, one way. PCIe 4.0 x16 reached 26 to 28 GB/s on two chips
    (FlagPerf interconnect-h2d; llaisys docs/hardware); newer links reach more, so a chip's curve should set it."""
