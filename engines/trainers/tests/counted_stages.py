"""Counts the storages of one rank of a pipeline, without the other ranks.

`python -m engines.trainers.tests.counted_stages SEED COUNT` prints the errors of the predicted memory for random jobs.
"""

import random
import sys
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing import get_context
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from flagcore_training.trial.layers import causal_mask, own_positions
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from engines.trainers.tests.counted import LEVELS, job, predicted
from engines.trainers.tests.decoder import ranks
from engines.trainers.tests.decoder.job import Job
from engines.trainers.tests.decoder.model import build, rotary_angles


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


def counted(job: Job, place: int) -> tuple[float, float]:
    """Return the bytes of the states of a rank at `place` of its pipeline, and the peak of forward and backward."""
    each, cpu = job.candidate, torch.device("cpu")
    kind = FakeTensor if each.tensor == 1 else torch.Tensor
    first = place * job.world_size // each.pipeline
    dist.init_process_group("fake", store=FakeStore(), rank=first, world_size=job.world_size)
    try:
        meshes = ranks.device_meshes(job)
        with (
            FakeTensorMode() if each.tensor == 1 else nullcontext(),
            mock.patch.object(schedules, "_batch_p2p", return_value=[]),
            mock.patch.object(schedules._PipelineSchedule, "_warmup_p2p", _without_vote),
        ):
            angles = rotary_angles(job, own_positions(job.sequence, each.context, 0), cpu)
            stages = {number: build(job, meshes, cpu, angles, number) for number in job.stages_of(place)}
            runs = ranks.pipeline(job, meshes, stages, cpu)
            shape = (each.micro_batch * job.num_microbatches, job.sequence // each.context)
            tokens, labels = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
            weights = [weight.to_local() for module in stages.values() for weight in module.parameters()]
            inputs = (tokens,) if 0 in stages else ()
            with Storages(kind) as storages, loss_parallel() if each.tensor > 1 else nullcontext():
                storages.add(weights)
                runs.step(*inputs, target=labels, losses=[], return_outputs=False)
        size = sum(each.nbytes for each in weights)
    finally:
        causal_mask.cache_clear()
        dist.destroy_process_group()
    return 4.0 * size, storages.peak + 2.0 * size


def _without_vote(schedule: Any, stages: list[Any], *_: Any) -> None:
    """Do as a vote of all ranks does, which know the sizes of the tensors between stages."""
    for each in stages:
        each._inference_mode = InferenceMode.STATIC


def drawn(seed: int, count: int) -> list[Job]:
    """Return jobs with random shapes, layouts and schedules."""
    choose, jobs = random.Random(seed), []
    while len(jobs) < count:
        heads, channels, size = choose.choice([4, 8]), choose.choice([64, 128]), choose.choice([2, 2, 2, 4])
        parts = choose.choice(["1f1b", "interleaved", "zbv", "dualpipev"])
        shape = {
            "num_layers": 2 * size,
            "hidden_size": heads * channels,
            "ffn_hidden_size": choose.choice([2, 3, 4]) * heads * channels,
            "num_attention_heads": heads,
            "num_query_groups": choose.choice([heads, heads // 2]),
            "kv_channels": channels,
            "vocab_size": choose.choice([2048, 8192, 16384]),
            "untie_embeddings_and_output_weights": True,
        }
        levels = list(LEVELS) if parts in ("1f1b", "interleaved") else ["none"]
        candidate = {
            "replicate": choose.choice([1, 1, 2]),
            "shard": choose.choice([2, 4]),
            "tensor": choose.choice([1, 1, 1, 2]),
            "context": choose.choice([1, 1, 2]),
            "pipeline": size,
            "schedule": parts,
            "micro_batch": choose.choice([1, 2]),
            "reshard_after_forward": False,
            "checkpointing": choose.choice(levels),
            "reduce_dtype": choose.choice(["fp32", "fp32", "bf16"]),
        }
        each = job(shape, candidate, choose.choice([256, 512, 1024]), choose.choice(["bf16", "bf16", "fp32"]))
        jobs.append(replace(each, samples=each.samples // 2 * size * choose.choice([2, 3])))
    return jobs


if __name__ == "__main__":
    for each in drawn(int(sys.argv[1]), int(sys.argv[2])):
        counts = []
        for place in (0, each.candidate.pipeline - 1):  # torch caches groups, so each rank has a process
            with get_context("fork").Pool(1) as pool:
                counts.append(pool.apply(counted, (each, place)))
        static, peak = max(counts, key=lambda count: count[1])
        guess = predicted(each)
        shape = each.model
        sizes = (shape.num_layers, shape.hidden_size, shape.ffn_hidden_size, shape.vocab_size)
        print(
            f"static {guess[0] / static - 1:+.4f} peak {guess[1] / peak - 1:+.4f}",
            [round(each[1] / 1e6, 1) for each in counts],
            sizes,
            each.candidate,
            (each.sequence, each.samples, each.precision),
            flush=True,
        )
