"""The job file of a trial. This module does not import torch. Sizes are numbers of elements."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flagcore_training.trial.job import Device, JobError, Train

from flagcore.domain.model import Model


@dataclass(frozen=True)
class TrialCandidate:
    """The values of the knobs of a candidate."""

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1
    pipeline: int = 1
    schedule: str = "1f1b"
    micro_batch: int = 1
    reshard_after_forward: bool = True
    checkpointing: str = "none"
    reduce_dtype: str = "fp32"
    offload: bool = False
    compile: bool = False


@dataclass(frozen=True)
class TrialJob:
    """One trial. It ends `end_after_s` seconds after its start, at `ends_at` on the clock `time.monotonic`."""

    model: Model
    train: Train
    candidate: TrialCandidate
    device: Device
    output: Path
    nodes: int = 1
    end_after_s: float | None = None
    ends_at: float | None = None

    def started(self) -> TrialJob:
        """Return the job with its end time, for a program that starts now."""
        return dataclasses.replace(self, ends_at=self.end_after_s and time.monotonic() + self.end_after_s)

    @property
    def world_size(self) -> int:
        each = self.candidate
        return self.replicas * each.context * each.tensor * each.pipeline

    @property
    def stages(self) -> int:
        """The number of stages of the pipeline. With other schedules than 1F1B, a rank has two."""
        each = self.candidate
        return each.pipeline * (1 if each.pipeline == 1 or each.schedule == "1f1b" else 2)

    def stages_of(self, place: int) -> tuple[int, ...]:
        """Return the stages of the rank at `place` of its pipeline: `place`, and the one that loops or folds back."""
        size = self.candidate.pipeline
        if self.stages == size:
            return (place,)
        return (place, size + place if self.candidate.schedule == "interleaved" else 2 * size - 1 - place)

    @property
    def processes(self) -> int:
        """The number of ranks on this host."""
        return self.world_size // self.nodes

    @property
    def replicas(self) -> int:
        """The number of ranks that process different samples."""
        return self.candidate.replicate * self.candidate.shard

    @property
    def num_microbatches(self) -> int:
        return self.train.global_batch_size // (self.candidate.micro_batch * self.replicas)


@dataclass(frozen=True)
class Meshes:
    """The device meshes of the ranks, with named dimensions from the outermost to the innermost.

    `weights`: how weights are distributed, `pp`, `replicate`, `fsdp` and `tp`. `samples`: how samples are, `pp`,
    `replica`, `cp` and `tp`. The ranks of `fsdp` are those of several replicas, each with its context-parallel ranks.
    `experts`: how the weights of experts are, `pp`, `replicate`, `efsdp`, `ep` and `tp`; `fsdp` is `efsdp` x `ep`.
    """

    weights: Any
    samples: Any
    experts: Any


def read_job(data: dict[str, Any]) -> TrialJob:
    """Return the job in decoded JSON. Raises JobError if a key is unknown or missing."""
    try:
        kinds: dict[str, Any] = {"model": Model, "train": Train, "candidate": TrialCandidate, "device": Device}
        parts = {name: kind(**data[name]) for name, kind in kinds.items()}
        return TrialJob(**{**data, **parts, "output": Path(data["output"])})
    except (LookupError, TypeError, AttributeError) as error:
        raise JobError(f"the job has a missing or unknown key: {error}") from None
