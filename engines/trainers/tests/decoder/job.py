"""A job of the decoder: the model, the work of a step and the layout. Sizes are numbers of elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flagcore.domain.model import Model
from flagcore.domain.spec import Adapter


@dataclass(frozen=True)
class Layout:
    """The values of the knobs of `fsdp2`."""

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
    state_dtype: str = "fp32"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A step. `adapter`: the adapters that it trains."""

    model: Model
    candidate: Layout
    sequence: int
    samples: int
    precision: str = "bf16"
    adapter: Adapter | None = None

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
    def replicas(self) -> int:
        """The number of ranks that process different samples."""
        return self.candidate.replicate * self.candidate.shard

    @property
    def num_microbatches(self) -> int:
        return self.samples // (self.candidate.micro_batch * self.replicas)


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
