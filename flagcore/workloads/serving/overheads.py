"""What engines add to their kernels, fitted to published points: docs/serving-model.md tells which, and the errors.

Of llama.cpp no points were published in this form: its figures are estimates, corrected by each trial.
"""

from __future__ import annotations

from collections.abc import Mapping

from flagcore.physics.serving.work import Overheads

FITTED: Mapping[str, Overheads] = {
    "vllm": Overheads(
        iteration=876e-6,
        sequence=13.6e-6,
        request=30e-3,
        entry=2e-3,
        attention=14.8e-6,
        latent=14.1e-6,
        ffn=10.9e-6,
        experts={"bf16": 55.7e-6, "fp8": 55.7e-6, "nvfp4": 24.2e-6},
        reduce=5.17e-6,
        reduce_doubling=1.25e-6,
        grouped_share=1.08,
        spread=0.709,
        eager_kernels=58.0,
        eager_experts=11.6,
        eager_latent=25.7,
    ),
    "sglang": Overheads(
        iteration=796e-6,
        sequence=8.09e-6,
        request=40e-3,
        entry=2e-3,
        attention=15.0e-6,
        latent=14.1e-6,
        ffn=13.1e-6,
        experts={"bf16": 31.0e-6, "fp8": 31.0e-6, "nvfp4": 24.6e-6},
        reduce=5.48e-6,
        reduce_doubling=1.4e-6,
        grouped_share=0.984,
        spread=0.5,
        eager_kernels=40.5,
        eager_experts=18.0,
        eager_latent=25.7,
        receive=30,
        mixes=False,
        reserve=0.5,
        activations_beside=True,
    ),
    "llamacpp": Overheads(iteration=0.5e-3, sequence=50e-6, request=2e-3, attention=0.0, ffn=0.0),
}
