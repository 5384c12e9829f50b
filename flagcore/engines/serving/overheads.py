"""What engines add to their kernels. docs/serving-model.md tells to which points they are fitted, and the errors.

All but `request`, `entry`, `receive` and `reserve` are printed by benchmarks/serving_fit.py; these four were chosen so
that simulated times to the first token are those of the same points. Of llama.cpp no points were published in this
form: its figures are estimates, which trials correct.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from flagcore.engines.serving.model.work import Overheads

VLLM = Overheads(
    iteration=956e-6,
    sequence=6.01e-6,
    request=30e-3,
    entry=2e-3,
    attention=17e-6,
    latent=20e-6,
    ffn=13.6e-6,
    experts={"bf16": 56.5e-6, "fp8": 56.5e-6, "nvfp4": 20.9e-6},
    reduce=5.36e-6,
    reduce_doubling=1.24e-6,
    grouped_share=1.15,
    grouped_work=0.356,
    spread=0.753,
    eager_kernels=63.8,
    eager_experts=15.4,
    eager_latent=30.0,
)
"""Releases 0.11 to 0.19."""

VLLM_ASYNC = replace(VLLM, iteration=0.0, request=3e-3, entry=1e-3)
"""From 0.20: the next iteration is scheduled while the device computes. Fitted to 9 points of one model on one
accelerator, whose prompts were token ids."""

SGLANG = Overheads(
    iteration=785e-6,
    sequence=7.99e-6,
    request=40e-3,
    entry=2e-3,
    attention=16e-6,
    latent=14.1e-6,
    ffn=14.1e-6,
    experts={"bf16": 30.8e-6, "fp8": 30.8e-6, "nvfp4": 24.7e-6},
    reduce=5.71e-6,
    reduce_doubling=1.48e-6,
    grouped_share=0.96,
    grouped_work=0.54,
    spread=0.584,
    eager_kernels=48.8,
    eager_experts=17.5,
    eager_latent=24.7,
    mixes=False,
    reserve=0.5,
    activations_beside=True,
)

LLAMACPP = Overheads(iteration=0.5e-3, sequence=50e-6, request=2e-3, attention=0.0, ffn=0.0, eager_kernels=14.0)

ON_HOST: Mapping[str, tuple[float, float]] = {
    "vllm": (2.0e-3, 0.28e-3),
    "sglang": (10e-3, 0.5e-3),
    "llamacpp": (1.9e-3, 0.5e-3),
}
"""Seconds of an iteration and of each of its sequences where the processor that computes is also the one that
schedules, samples and talks to clients. Measured on two cores, each engine serving 50 million parameters to 4 to 16
clients, other work aside: vLLM in 5 settings, the others in one."""

RELEASES: Mapping[str, tuple[tuple[tuple[int, int], Overheads], ...]] = {
    "vllm": (((0, 20), VLLM_ASYNC), ((0, 0), VLLM)),
    "sglang": (((0, 0), SGLANG),),
    "llamacpp": (((0, 0), LLAMACPP),),
}
"""By engine, the release from which on they hold, the newest first."""


def release(version: str | None) -> tuple[int, int] | None:
    """Return the first two numbers of a version; None where it does not begin with two."""
    parts = re.match(r"v?(\d+)\.(\d+)", version or "")
    return None if parts is None else (int(parts[1]), int(parts[2]))


def overheads_of(engine: str, version: str | None, *, on_host: bool = False) -> Overheads:
    """Return the overheads of a release; without a version those of the newest, of an unknown engine vLLM's.

    `on_host` says that there is no device: the host computes itself, and its small kernels are no launches.
    """
    found = _release(engine, version)
    if not on_host:
        return found
    iteration, sequence = ON_HOST.get(engine, ON_HOST["vllm"])
    host = replace(found, iteration=iteration, sequence=sequence, request=3e-3, entry=0.5e-3)
    return replace(host, attention=0.0, latent=0.0, ffn=0.0, experts={})


def _release(engine: str, version: str | None) -> Overheads:
    releases, number = RELEASES.get(engine, RELEASES["vllm"]), release(version)
    if number is None:
        return releases[0][1]
    return next((found for since, found in releases if number >= since), releases[-1][1])
