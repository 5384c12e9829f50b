"""Runs one rank of a trial: it joins the other ranks, builds its part of the model, trains, and reports by rank 0.

The files of a trial are `steps.jsonl`, written while it runs, and `metrics.json`, written at its end.
"""

from __future__ import annotations

import contextlib
import platform
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from flagcore_training.trial.layers import own_positions
from flagcore_training.trial.rank_device import RankDevice, append_step, join, open_device, speed_test, write_metrics
from flagcore_training.trial.steps import Step, timed_steps, token_rows
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional

from flagcore.domain.chip import SPEED_TEST
from flagcore_trainers.fsdp2.job import Meshes, TrialJob
from flagcore_trainers.fsdp2.model import DTYPES, build, rotary_angles

MAX_GRADIENT_NORM = 1.0
SCHEDULES = {
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
"""The schedule of `torch.distributed.pipelining` of each value of the knob."""


def run_rank(job: TrialJob, number: int, listener: socket.socket | None, import_s: float) -> None:
    """Run the job as the rank with the index `number`. `listener` is the socket of the rendezvous on the first host."""
    torch.set_num_threads(job.device.threads_per_rank)
    rank_device = open_device(job.device.type, number % job.processes)
    start = time.perf_counter()
    join(job, number, listener)
    meshes = device_meshes(job)
    rank_device.set_baseline()
    joined = time.perf_counter()
    trainer = Trainer(job, meshes, rank_device)
    rank_device.reset_after_build()
    startup = {"import": import_s, "groups": joined - start, "build": time.perf_counter() - joined}
    steps = list[dict[str, Any]]()
    for step in trainer.steps():
        steps.append(asdict(step))
        if number == 0:
            append_step(job.output, steps[-1])
    report = {"rank": number, **rank_device.memory(), SPEED_TEST: speed_test(rank_device, job.train.precision)}
    reports: list[Any] = [None] * job.world_size
    dist.all_gather_object(reports, report)
    if number == 0:
        metrics = {"schema_version": 1, "steps": steps, "ranks": reports, "effective": trainer.effective()}
        versions = {"torch": str(torch.__version__), "python": platform.python_version()}
        write_metrics(job.output, {**metrics, "versions": versions, "startup_s": startup})
    dist.barrier()  # rank 0 may serve the rendezvous, so all ranks wait here until it has written the metrics
    dist.destroy_process_group()


def device_meshes(job: TrialJob) -> Meshes:
    """Return the meshes of all ranks."""
    each, kind = job.candidate, job.device.type
    weights = (each.pipeline, each.replicate, each.shard * each.context, each.tensor)
    samples = (each.pipeline, job.replicas, each.context, each.tensor)
    experts = (*weights[:2], weights[2] // each.expert, each.expert, each.tensor)
    return Meshes(
        init_device_mesh(kind, weights, mesh_dim_names=("pp", "replicate", "fsdp", "tp")),
        init_device_mesh(kind, samples, mesh_dim_names=("pp", "replica", "cp", "tp")),
        init_device_mesh(kind, experts, mesh_dim_names=("pp", "replicate", "efsdp", "ep", "tp")),
    )


def pipeline(job: TrialJob, meshes: Meshes, stages: dict[int, Any], device: torch.device) -> Any:
    """Return the schedule of a rank's stages. The tensors between stages are those between layers."""
    train, each = job.train, job.candidate
    length = train.seq_length // each.context
    tokens = torch.empty((each.micro_batch, length), dtype=torch.long, device="meta")
    size = (each.micro_batch, length // each.tensor, job.model.hidden_size)
    hidden = torch.empty(size, dtype=DTYPES[train.precision], device="meta", requires_grad=True)
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


class Trainer:
    """The stages of the model and the optimizer of a rank. `pipeline` is None without a pipeline."""

    def __init__(self, job: TrialJob, meshes: Meshes, rank_device: RankDevice) -> None:
        self.job, self.meshes, self.rank_device = job, meshes, rank_device
        self.device = rank_device.device
        stage, self.replica, place, _ = meshes.samples.get_coordinate()
        self.positions = own_positions(job.train.seq_length, job.candidate.context, place)
        angles = rotary_angles(job, self.positions, self.device)
        self.stages = {each: build(job, meshes, self.device, angles, each) for each in job.stages_of(stage)}
        self.pipeline = pipeline(job, meshes, self.stages, self.device) if job.candidate.pipeline > 1 else None
        named = [pair for each in self.stages.values() for pair in each.named_parameters() if pair[1].requires_grad]
        kinds = [
            [weight for name, weight in named if (".experts." in name) == is_expert] for is_expert in (False, True)
        ]
        self.weights = [each for each in kinds if each]  # the weights of experts have a mesh of their own
        groups = [{"params": each} for each in self.weights]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, weight_decay=0.01, fused=True)

    def steps(self) -> Iterator[Step]:
        """Run the steps of the trial, and yield each step when it ends."""
        return timed_steps(
            self.job,
            self.rank_device,
            self.optimizer,
            batches=self.batches,
            forward_backward=self.forward_backward,
            update=self.update,
            loss_sums=lambda losses: torch.tensor([sum(losses, 0.0), float(len(losses))], device=self.device),
            memory_step=self.memory_step,
        )

    def memory_step(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Run a step that is not timed, to measure the peak of memory."""
        self.rank_device.start_peak()
        self.forward_backward(batches)
        self.update()
        self.rank_device.end_memory_measurement(self.rank_device.peak_bytes())

    def forward_backward(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
        """Run forward and backward of all micro-batches, and return their losses on the last stage.

        Each micro-batch scatters its gradients, so that gradients stay sharded. A pipeline scatters them at the end.
        """
        losses = list[torch.Tensor]()
        with loss_parallel() if self.job.candidate.tensor > 1 else contextlib.nullcontext():
            if self.pipeline is not None:
                tokens, labels = (torch.cat(each) for each in zip(*batches, strict=True))
                inputs = (tokens,) if 0 in self.stages else ()
                self.pipeline.step(*inputs, target=labels, losses=losses, return_outputs=False)
            else:
                (model,) = self.stages.values()
                for tokens, labels in batches:
                    loss = loss_of(model(tokens), labels)
                    (loss / len(batches)).backward()
                    losses.append(loss.detach())
        return [float(_whole(loss.detach())) for loss in losses]

    def update(self) -> float:
        """Clip the gradients, run the optimizer, and free the gradients. Return the norm of the gradients."""
        norms = []
        for weights, groups in zip(self.weights, ((), ("ep",)), strict=False):
            norm = _whole(torch.nn.utils.get_total_norm([each.grad for each in weights if each.grad is not None]))
            for name in (*groups, *(("pp",) if self.pipeline is not None else ())):
                squared = norm**2
                dist.all_reduce(squared, group=self.meshes.experts.get_group(name))
                norm = squared.sqrt()
            norms.append(norm)
        norm = torch.stack(norms).norm()
        for weights in self.weights:
            torch.nn.utils.clip_grads_with_norm_(weights, MAX_GRADIENT_NORM, norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def batches(self, number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the tokens and labels of this rank's micro-batches, each [micro-batch, sequence / context]."""
        train, size = self.job.train, self.job.candidate.micro_batch
        batches = []
        for index in range(self.job.num_microbatches):
            first = number * train.global_batch_size + (index * self.job.replicas + self.replica) * size
            rows = token_rows(train, self.job.model.vocab_size, first, size)
            parts = (rows[:, self.positions], rows[:, self.positions + 1])
            batches.append((parts[0].to(self.device), parts[1].to(self.device)))
        return batches

    def effective(self) -> dict[str, Any]:
        """Return the values in use, as torch's objects have them."""
        model = next(iter(self.stages.values()))
        layer: Any = next(iter(model.layers.values()))
        state = layer._get_fsdp_state()
        group = state._fsdp_param_group
        trained = next(each for each in group.fsdp_params if each.sharded_param.requires_grad)
        info, policy = group.post_forward_mesh_info, group.mp_policy
        stages, replicate, fsdp, tensor = self.meshes.weights.mesh.shape
        context = self.meshes.samples["cp"].size()
        names = {each: knob for knob, each in SCHEDULES.items()}
        schedule = type(self.pipeline).__name__.removeprefix("Schedule")
        return {
            "pipeline_model_parallel_size": stages,
            "pipeline_schedule": names.get(schedule, "1f1b"),
            "data_parallel_replicate_size": replicate,
            "data_parallel_shard_size": fsdp // context,
            "tensor_model_parallel_size": tensor,
            "context_parallel_size": context,
            "expert_model_parallel_size": self.meshes.experts["ep"].size(),
            "micro_batch_size": self.batches(0)[0][0].size(0),
            "reshard_after_forward": info is not None,
            "cpu_offload": isinstance(group.offload_policy, CPUOffloadPolicy),
            "precision": "bf16" if policy.param_dtype is torch.bfloat16 else "fp32",
            "state_dtype": "bf16" if trained.orig_dtype is torch.bfloat16 else "fp32",
            "compile": layer._compiled_call_impl is not None,
        }


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
