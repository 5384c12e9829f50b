"""The job file of a trial. This module does not import torch. Sizes are numbers of elements."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from importlib import import_module
from typing import Any

from flagcore_training.trial.job import JobError, TrainingJob, read_job

from flagcore.domain.model import Layer, Model
from flagcore.domain.spec import Adapter


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
    state_dtype: str = "fp32"
    offload: bool = False
    compile: bool = False


@dataclass(frozen=True, kw_only=True)
class TrialJob(TrainingJob):
    """One trial. `adapter`: the adapters that it trains."""

    candidate: TrialCandidate
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


def layers_of(model: Model) -> list[dict[str, Any]]:
    """Return the layers of a model as plain data. A mixer is its class, and its sizes."""
    found = []
    for each in model.layers:
        kind = type(each.mixer)
        name = None if each.mixer is None else f"{kind.__module__}:{kind.__qualname__}"
        sizes = {} if each.mixer is None else asdict(each.mixer)
        found.append({"mixer": name, "sizes": sizes, "feed_forward": each.feed_forward})
    return found


def read(data: dict[str, Any]) -> TrialJob:
    """Return the job in decoded JSON. Raises JobError if a key is unknown or missing."""
    adapter = Adapter(**data["adapter"]) if data.get("adapter") else None
    job = read_job(
        TrialJob, TrialCandidate, {**{name: data[name] for name in data if name != "layers"}, "adapter": adapter}
    )
    try:
        layers = tuple(_layer(each) for each in data.get("layers", ()))
    except (LookupError, TypeError, ValueError, AttributeError, ImportError) as error:
        raise JobError(f"the layers of the job cannot be read: {error}") from None
    return replace(job, model=replace(job.model, layers=layers))


def _layer(data: dict[str, Any]) -> Layer:
    if data["mixer"] is None:
        return Layer(mixer=None, feed_forward=data["feed_forward"])
    module, _, name = data["mixer"].partition(":")
    mixer = getattr(import_module(module), name)(**data["sizes"])
    return Layer(mixer=mixer, feed_forward=data["feed_forward"])
