"""Writes the files of a trial: `steps.jsonl` while it runs, and `metrics.json` at its end."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import megatron.core
import torch
from megatron.core import parallel_state as groups

from flagcore.engines.megatron.trial import te
from flagcore.engines.megatron.trial.job import Job
from flagcore.engines.megatron.trial.model import BuiltModel

SCHEMA_VERSION = 1
_PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class StepLog:
    """Appends each step to `steps.jsonl` as one line of JSON, flushed immediately."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / "steps.jsonl").open("a", encoding="utf-8")

    def write(self, step: Mapping[str, object]) -> None:
        print(json.dumps(step), file=self._file, flush=True)

    def close(self) -> None:
        self._file.close()


def write_metrics(folder: Path, metrics: dict[str, Any]) -> None:
    """Write `metrics.json` atomically."""
    temporary = folder / ".metrics.json.tmp"
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(metrics, file, indent=1, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / "metrics.json")


def local_parameters(built: BuiltModel) -> int:
    """Return the number of parameters on this rank, including replicas."""
    return sum(weight.numel() for chunk in built.chunks for weight in chunk.parameters())


def distinct_parameters(built: BuiltModel) -> int:
    """Return this rank's share of the model's parameters, in which each parameter counts once.

    The sum over all ranks is the size of the model with the padded vocabulary. The first rank with a replica counts a
    parameter, the first pipeline stage a tied embedding.
    """
    first_dense = groups.get_data_parallel_rank(with_context_parallel=True) == 0
    first_expert = groups.get_expert_data_parallel_rank() == 0
    count = 0
    for weight in (weight for chunk in built.chunks for weight in chunk.parameters()):
        is_expert = not getattr(weight, "allreduce", True)
        tensor_rank = groups.get_expert_tensor_parallel_rank() if is_expert else groups.get_tensor_model_parallel_rank()
        counts_part = tensor_rank == 0 or getattr(weight, "tensor_model_parallel", False)
        if (first_expert if is_expert else first_dense) and counts_part and not getattr(weight, "shared", False):
            count += weight.numel()
    return count


def local_layers(built: BuiltModel) -> int:
    """Return the number of transformer layers on this rank, over all its model chunks."""
    count = 0
    for chunk in built.chunks:
        while not hasattr(chunk, "decoder"):  # unwrap
            chunk = chunk.module
        count += len(chunk.decoder.layers)
    return count


def effective(job: Job, built: BuiltModel, num_microbatches: int, layers_per_stage: list[int]) -> dict[str, Any]:
    """Return the knobs that Megatron's objects use, by the candidate's names."""
    config, ddp_config = built.config, built.chunks[0].ddp_config
    replicas = groups.get_data_parallel_world_size()
    chunks = groups.get_virtual_pipeline_model_parallel_world_size()
    recomputes = config.recompute_granularity is not None
    chunk_layers = layers_per_stage[0] // chunks if chunks else None
    split_values = {"num_layers_per_virtual_pipeline_stage": chunk_layers}
    if layout := getattr(config, "pipeline_model_parallel_layout", None):
        split_values = {"layout": str(layout)}
    return {
        "data_parallel_size": replicas,
        "tensor_model_parallel_size": groups.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": groups.get_pipeline_model_parallel_world_size(),
        "context_parallel_size": groups.get_context_parallel_world_size(),
        "expert_model_parallel_size": groups.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": groups.get_expert_tensor_parallel_world_size(),
        **split_values,
        "num_layers_in_first_pipeline_stage": config.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": config.num_layers_in_last_pipeline_stage,
        "layers_per_stage": layers_per_stage,
        "micro_batch_size": (
            job.candidate.micro_batch_size
            if job.replica
            else job.train.global_batch_size // (num_microbatches * replicas)
        ),
        "use_distributed_optimizer": ddp_config.use_distributed_optimizer,
        "sequence_parallel": config.sequence_parallel,
        "use_recompute": recomputes,
        "recompute_granularity": config.recompute_granularity,
        "recompute_method": config.recompute_method,
        "recompute_num_layers": config.recompute_num_layers,
        "recompute_modules": config.recompute_modules if config.recompute_granularity == "selective" else None,
        "precision": job.train.precision if config.fp8 else _PRECISIONS[next(built.chunks[0].parameters()).dtype],
        "fp8_recipe": config.fp8_recipe if config.fp8 else None,
        "implementation": job.train.implementation,
        "overlap_grad_reduce": ddp_config.overlap_grad_reduce,
        "overlap_param_gather": ddp_config.overlap_param_gather,
        "overlap_p2p_comm": config.overlap_p2p_comm,
        "tp_comm_overlap": config.tp_comm_overlap,
        "cross_entropy_loss_fusion": config.cross_entropy_loss_fusion,
        "moe_token_dispatcher_type": config.moe_token_dispatcher_type if config.num_moe_experts else None,
        "moe_grouped_gemm": config.moe_grouped_gemm,
    }


def versions(job: Job) -> dict[str, str]:
    """Return the versions of the software that the trial runs."""
    extra = {te.DISTRIBUTION: te.installed_version()} if job.transformer_engine else {}
    return {
        "torch": str(torch.__version__),
        "megatron-core": str(megatron.core.__version__),
        "python": platform.python_version(),
        **extra,
    }
