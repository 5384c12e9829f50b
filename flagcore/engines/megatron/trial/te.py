"""Prepares transformer-engine before a model is built with its layers."""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import Any

from flagcore.engines.megatron.trial.job import Job, JobError

DISTRIBUTION = "transformer-engine"
EIGHT_BITS = ("fp8", "mxfp8")
"""Precisions of matrix products that only transformer-engine supports."""


def check(job: Job) -> None:
    """Raise JobError if the job needs transformer-engine and it does not work on the job's device."""
    precision = job.train.precision
    if not job.transformer_engine and precision in EIGHT_BITS:
        raise JobError(f"train.precision = {precision} needs transformer-engine, which does not import here; use bf16")
    if not job.transformer_engine:
        return
    if job.device.type == "cpu":
        raise JobError("train.implementation = transformer_engine needs an accelerator, this is a CPU; remove it")
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise JobError(f"transformer-engine does not import ({reason}); set train.implementation: local") from error


def start_buffers(job: Job) -> None:
    """Allocate the buffers for collectives that overlap matrix products (Megatron-LM `training/initialize.py`)."""
    base = importlib.import_module("transformer_engine.pytorch.module").base
    candidate, is_8_bit = job.candidate, job.train.precision in EIGHT_BITS
    rows = job.train.seq_length * candidate.micro_batch_size // candidate.context_parallel_size
    if hasattr(base, "UserBufferQuantizationMode"):  # 2.7 and later
        modes = base.UserBufferQuantizationMode
        products: dict[str, Any] = {"quantization_modes": [modes.FP8 if is_8_bit else modes.NONE]}
    else:
        products = {"use_fp8": is_8_bit}
    base.initialize_ub(
        shape=[rows, job.model.hidden_size],
        tp_size=candidate.tensor_model_parallel_size,
        ub_cfgs={},
        bootstrap_backend="nccl",
        **products,
    )


def installed_version() -> str:
    """Return the version of the installed transformer-engine."""
    return version(DISTRIBUTION)
