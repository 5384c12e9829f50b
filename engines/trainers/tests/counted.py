"""Counts the tensors of a rank of the decoder, without the other ranks: with torch's own tracker, or the storages of a
rank of a pipeline.

Tensors are fake, except with tensor parallelism, whose lookup of the embedding needs values.

`python -m engines.trainers.tests.counted SEED COUNT` prints the errors of the predicted memory for random jobs.
"""

import contextlib
import random
import sys
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing import get_context
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from flagcore_megatron.trial.model import causal_mask, own_positions
from flagcore_trainers.fully_shard import SCHEDULES, memory, weights
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from engines.models.tests.examples import layer_of
from engines.trainers.tests.decoder.job import Job, Layout
from engines.trainers.tests.decoder.mixers import MIXERS  # noqa: F401  # of `decoder`
from engines.trainers.tests.decoder.model import build, rotary_angles
from engines.trainers.tests.decoder.ranks import device_meshes, pipeline
from flagcore.domain.model import Model
from flagcore.domain.spec import Adapter

SHAPE = {
    "name": "made up",
    "num_layers": 4,
    "hidden_size": 512,
    "ffn_hidden_size": 1536,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "kv_channels": 64,
    "vocab_size": 8192,
}
LEVELS = {"none": 0.0, "selective": 1.0, "full": 2.0}


def job(
    shape: Mapping[str, Any],
    layout: Mapping[str, Any],
    sequence: int = 1024,
    precision: str = "bf16",
    adapter: Adapter | None = None,
) -> Job:
    """Return a job of two micro-batches. `layers` of a shape: the arguments of `layer_of` for each layer."""
    each, kinds = Layout(**layout), shape.get("layers", ())
    samples, model = 2 * each.micro_batch * each.replicate * each.shard, Model(**{**SHAPE, **shape, "layers": ()})
    model = replace(model, layers=tuple(layer_of(model, *kind) for kind in kinds))
    return Job(model=model, candidate=each, sequence=sequence, samples=samples, precision=precision, adapter=adapter)


def counted(job: Job) -> tuple[float, float]:
    """Return the bytes that rank 0 holds between steps, with gradients, and the peak of forward and backward."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=job.world_size)
    candidate, cpu = job.candidate, torch.device("cpu")
    try:
        meshes = device_meshes(job)
        with contextlib.nullcontext() if candidate.tensor > 1 or job.model.num_moe_experts else FakeTensorMode():
            angles = rotary_angles(job, own_positions(job.sequence, candidate.context, 0), cpu)
            model = build(job, meshes, cpu, angles)
            tracker = FSDPMemTracker(model)
            size = (candidate.micro_batch, job.sequence // candidate.context)
            batches = [torch.zeros(size, dtype=torch.int64) for _ in range(2)]
            copied = mock.patch.object(dist, "all_to_all_single", lambda output, counts, **_: output.copy_(counts))
            with copied, tracker, loss_parallel() if candidate.tensor > 1 else contextlib.nullcontext():
                for tokens in batches:
                    tracker.reset_mod_stats()
                    logits = model(tokens).flatten(0, 1).float()
                    loss = functional.cross_entropy(logits, torch.zeros_like(tokens).flatten())
                    del logits
                    (loss / 2).backward()
                    del loss
            adam = sum(2 * each.to_local().nbytes for each in model.parameters() if each.requires_grad)
            now, peak = (tracker.get_tracker_snapshot(kind)[cpu] for kind in ("current", "peak"))
    finally:
        causal_mask.cache_clear()
        dist.destroy_process_group()
    held = sum(size for kind, size in now.items() if "Sharded" in str(getattr(kind, "value", kind)))
    return held + adam, peak["Total"] + adam


class Storages(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed
    """The storages of all tensors that operators use. `peak`: the most bytes that they had at once.

    `kind`: the type of the job's tensors. DTensor uses fake ones to find shapes, which a job with real ones ignores.
    """

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind, self.live, self.peak = kind, WeakIdKeyDictionary(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor | AsyncCollectiveTensor) for each in types):
            return NotImplemented  # their local tensors follow
        result = func(*args, **(kwargs or {}))
        if self.add((args, kwargs, result)):
            self.peak = max(self.peak, sum(each.nbytes() for each in self.live))
        return result

    def add(self, tree: Any) -> bool:
        """Add the storages of tensors. Return whether some are new."""
        before = len(self.live)
        for each in tree_leaves(tree):
            if type(each) in (self.kind, nn.Parameter) and each.device.type != "meta":
                self.live[each.untyped_storage()] = True
        return len(self.live) > before


def counted_stages(job: Job, place: int) -> tuple[float, float]:
    """Return the bytes of the states of a rank at `place` of its pipeline, and the peak of forward and backward."""
    each, cpu = job.candidate, torch.device("cpu")
    kind = FakeTensor if each.tensor == 1 else torch.Tensor
    first = place * job.world_size // each.pipeline
    dist.init_process_group("fake", store=FakeStore(), rank=first, world_size=job.world_size)
    try:
        meshes = device_meshes(job)
        with (
            FakeTensorMode() if each.tensor == 1 else contextlib.nullcontext(),
            mock.patch.object(schedules, "_batch_p2p", return_value=[]),
            mock.patch.object(schedules._PipelineSchedule, "_warmup_p2p", _without_vote),
        ):
            angles = rotary_angles(job, own_positions(job.sequence, each.context, 0), cpu)
            stages = {number: build(job, meshes, cpu, angles, number) for number in job.stages_of(place)}
            runs = pipeline(job, meshes, stages, cpu)
            shape = (each.micro_batch * job.num_microbatches, job.sequence // each.context)
            tokens, labels = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
            weights = [weight.to_local() for module in stages.values() for weight in module.parameters()]
            inputs = (tokens,) if 0 in stages else ()
            with Storages(kind) as storages, loss_parallel() if each.tensor > 1 else contextlib.nullcontext():
                storages.add(weights)
                runs.step(*inputs, target=labels, losses=[], return_outputs=False)
        size = sum(each.nbytes for each in weights)
    finally:
        causal_mask.cache_clear()
        dist.destroy_process_group()
    return 4.0 * size, storages.peak + 2.0 * size


def counted_parts(job: Job, parts: int) -> tuple[float, float]:
    """Return the same as `counted` if head and loss run on one part of the tokens after another, with their backward.

    As in the `ChunkedLossWrapper` of torchtitan 0.3, a rank sums the gradients of the whole head.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=job.world_size)
    cpu = torch.device("cpu")
    try:
        meshes = device_meshes(job)
        with FakeTensorMode():
            model = build(job, meshes, cpu, rotary_angles(job, own_positions(job.sequence, 1, 0), cpu))
            weights = [weight.to_local() for weight in model.parameters()]
            batches = [torch.zeros((job.candidate.micro_batch, job.sequence), dtype=torch.int64) for _ in range(2)]
            with Storages(FakeTensor) as storages:
                storages.add(weights)
                for tokens in batches:
                    _backward_in_parts(model, tokens, parts)
        size = sum(each.nbytes for each in weights)
    finally:
        causal_mask.cache_clear()
        dist.destroy_process_group()
    return 4.0 * size, storages.peak + 2.0 * size


def _backward_in_parts(model: Any, tokens: torch.Tensor, parts: int) -> None:
    model.skips_head, head = True, model.head
    hidden = model(tokens)
    head.set_reshard_after_backward(False)
    head.unshard()
    pieces = [each.contiguous().requires_grad_() for each in hidden.detach().chunk(parts, 1)]
    gradient = torch.zeros_like(hidden, dtype=torch.float32)
    labels = torch.zeros_like(tokens.chunk(parts, 1)[0]).flatten()
    for number, piece in enumerate(pieces):
        head.set_requires_gradient_sync(number == parts - 1)
        logits = head(piece)
        functional.cross_entropy(logits.flatten(0, 1).float(), labels).backward()
        gradient.chunk(parts, 1)[number].copy_(piece.grad)
        piece.grad = None
    del logits, piece, pieces
    head.set_reshard_after_backward(True)
    head.reshard()
    hidden.backward(gradient.to(hidden.dtype))


def _without_vote(schedule: Any, stages: list[Any], *_: Any) -> None:
    """Do as a vote of all ranks does, which know the sizes of the tensors between stages."""
    for each in stages:
        each._inference_mode = InferenceMode.STATIC


def predicted(job: Job, loss_parts: int = 1) -> tuple[float, float]:
    """Return the predictions of what `counted` returns."""

    def one(number: float) -> Any:
        return np.array([float(number)])

    each, is_narrow = job.candidate, job.precision == "bf16"
    result = memory.of_rank(
        weights.MemoryInputs(
            model=job.model,
            value_bytes=2.0 if is_narrow else 4.0,
            ranks=one(each.shard * each.context),
            tensor=one(each.tensor),
            context=one(each.context),
            tokens=one(each.micro_batch * job.sequence / each.context),
            microbatches=one(job.num_microbatches),
            reshard=np.array([each.reshard_after_forward]),
            checkpointing=one(LEVELS[each.checkpointing]),
            reduce_bytes=one(2.0 if is_narrow and each.reduce_dtype == "bf16" else 4.0),
            offload=np.array([False]),
            replicated=np.array([each.replicate > 1]),
            expert=one(each.expert),
            pipeline=one(each.pipeline),
            schedule=np.array([1 + SCHEDULES.index(each.schedule)]),
            fused_norm=False,
            loss_parts=loss_parts,
            adapter=job.adapter,
            main_bytes=2.0 if each.state_dtype == "bf16" else weights.MAIN_BYTES,
        )
    )
    return float(result.static[0]), float(result.peak[0])


def assert_memory_of(shape: Mapping[str, Any], layout: Mapping[str, Any], loss_parts: int = 1, **work: Any) -> None:
    """Fail if the predicted states differ by more than 0.5% from what torch counts, or the peak by more than 3%.

    The arguments are those of `job`.
    """
    each = job(shape, layout, **work)
    static, peak = counted_stages(each, 1) if each.candidate.pipeline > 1 else counted(each)
    if loss_parts > 1:
        static, peak = counted_parts(each, loss_parts)
    assert predicted(each, loss_parts) == (pytest.approx(static, rel=0.005), pytest.approx(peak, rel=0.03))


def drawn(seed: int, count: int) -> list[Job]:
    """Return jobs with random shapes and layouts, half of them with pipelines."""
    choose, jobs = random.Random(seed), []
    while len(jobs) < count:
        heads, channels, size = choose.choice([4, 8, 16]), choose.choice([64, 128]), choose.choice([1, 1, 1, 2, 2, 4])
        parts = choose.choice(["1f1b", "interleaved", "zbv", "dualpipev"] if size > 1 else ["1f1b"])
        shape = {
            "num_layers": 2 * size if size > 1 else choose.choice([2, 3, 4, 6]),
            "hidden_size": heads * channels,
            "ffn_hidden_size": choose.choice([2, 3, 4]) * heads * channels,
            "num_attention_heads": heads,
            "num_query_groups": choose.choice([heads, heads // 2, 4]),
            "kv_channels": channels,
            "vocab_size": choose.choice([4096, 16384, 32000]),
            "gated_linear_unit": choose.random() < 0.8,
            "untie_embeddings_and_output_weights": size > 1 or choose.random() < 0.7,
        }
        candidate = {
            "replicate": choose.choice([1, 1, 2]),
            "shard": choose.choice([2, 4, 8]),
            "tensor": choose.choice([1, 1, 2, 4]),
            "context": choose.choice([1, 1, 2]),
            "pipeline": size,
            "schedule": parts,
            "micro_batch": choose.choice([1, 2, 4]),
            "reshard_after_forward": size == 1 and choose.random() < 0.7,
            "checkpointing": choose.choice(list(LEVELS) if parts in ("1f1b", "interleaved") else ["none"]),
            "reduce_dtype": choose.choice(["fp32", "fp32", "bf16"]),
        }
        if shape["num_query_groups"] % candidate["tensor"]:
            continue
        each = job(shape, candidate, choose.choice([512, 1024, 2048]), choose.choice(["bf16", "bf16", "fp32"]))
        jobs.append(replace(each, samples=each.samples // 2 * size * choose.choice([2, 3])) if size > 1 else each)
    return jobs


if __name__ == "__main__":
    for each in drawn(int(sys.argv[1]), int(sys.argv[2])):
        counts, size = [], each.candidate.pipeline
        for place in sorted({0, size - 1}):  # torch caches groups, so each rank has a process
            with get_context("fork").Pool(1) as pool:
                counts.append(pool.apply(counted_stages, (each, place)) if size > 1 else pool.apply(counted, (each,)))
        most = max(counts, key=lambda count: count[1])
        errors = [guess / count - 1.0 for guess, count in zip(predicted(each), most, strict=True)]
        model = each.model
        sizes = (model.num_layers, model.hidden_size, model.ffn_hidden_size, model.num_query_groups, model.vocab_size)
        work = (each.sequence, each.samples, each.precision)
        print(f"static {errors[0]:+.4f} peak {errors[1]:+.4f}", sizes, each.candidate, work, flush=True)
