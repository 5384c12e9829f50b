"""The ranks of a job: their device meshes, and the schedule of their stages."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn import functional

from engines.trainers.tests.decoder.job import Job, Meshes
from engines.trainers.tests.decoder.model import DTYPES

SCHEDULES = {"1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zbv": "ZBVZeroBubble", "dualpipev": "DualPipeV"}
"""The schedule of `torch.distributed.pipelining` of each value of the knob."""


def device_meshes(job: Job) -> Meshes:
    """Return the meshes of all ranks."""
    each, kind = job.candidate, "cpu"
    weights = (each.pipeline, each.replicate, each.shard * each.context, each.tensor)
    samples = (each.pipeline, job.replicas, each.context, each.tensor)
    experts = (*weights[:2], weights[2] // each.expert, each.expert, each.tensor)
    return Meshes(
        init_device_mesh(kind, weights, mesh_dim_names=("pp", "replicate", "fsdp", "tp")),
        init_device_mesh(kind, samples, mesh_dim_names=("pp", "replica", "cp", "tp")),
        init_device_mesh(kind, experts, mesh_dim_names=("pp", "replicate", "efsdp", "ep", "tp")),
    )


def pipeline(job: Job, meshes: Meshes, stages: dict[int, Any], device: torch.device) -> Any:
    """Return the schedule of a rank's stages. The tensors between stages are those between layers."""
    each = job.candidate
    length = job.sequence // each.context
    tokens = torch.empty((each.micro_batch, length), dtype=torch.long, device="meta")
    size = (each.micro_batch, length // each.tensor, job.model.hidden_size)
    hidden = torch.empty(size, dtype=DTYPES[job.precision], device="meta", requires_grad=True)
    group = meshes.weights.get_group("pp")
    parts = [
        PipelineStage(
            module, number, job.stages, device, input_args=hidden if number else tokens, output_args=hidden, group=group
        )
        for number, module in stages.items()
    ]
    schedule = get_schedule_class(SCHEDULES[each.schedule])
    return schedule(parts if len(parts) > 1 else parts[0], job.num_microbatches, loss_fn=loss_of)


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of logits, [batch, sequence, vocabulary]."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
