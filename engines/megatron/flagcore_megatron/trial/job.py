"""The job file of a trial: the model, the candidate and the type of device. This module does not import torch.

Sizes are numbers of elements. null, or 0 in an optional size, means "off" or "the default".
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

from flagcore_training.splits import StageLayers
from flagcore_training.trial.job import TrainingJob, build, read_job

from flagcore_megatron.space.stages import parse_layout

_MIN_MICROBATCHES = 4
"""Minimum number of micro-batches of a probe. The first micro-batches take longer."""


@dataclass(frozen=True)
class TrialCandidate:
    """The knobs and settings of a candidate, with their names in the spec."""

    data_parallel_size: int = 1
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    virtual_pipeline_model_parallel_size: int | None = None
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    pipeline_model_parallel_layout: str | None = None
    micro_batch_size: int = 1
    use_distributed_optimizer: bool = False
    sequence_parallel: bool = False
    use_recompute: bool | None = None
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    recompute_modules: tuple[str, ...] | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    accumulate_allreduce_grads_in_fp32: bool | None = None
    grad_reduce_in_bf16: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    overlap_p2p_comm: bool = True
    tp_comm_overlap: bool = False
    cp_comm_type: str | None = None
    cross_entropy_loss_fusion: bool = False
    cross_entropy_fusion_impl: str | None = None
    moe_token_dispatcher_type: str = "alltoall"
    moe_grouped_gemm: bool = False
    fp8_recipe: str | None = None
    use_precision_aware_optimizer: bool = False
    main_grads_dtype: str | None = None
    main_params_dtype: str | None = None
    exp_avg_dtype: str | None = None
    exp_avg_sq_dtype: str | None = None

    @property
    def recomputes(self) -> bool:
        """Whether activations are recomputed; by default if a granularity is set."""
        return self.recompute_granularity is not None if self.use_recompute is None else self.use_recompute


@dataclass(frozen=True)
class Probe:
    """A single rank that runs on one device without the other ranks."""

    rank: int
    device: int = 0


@dataclass(frozen=True)
class Share:
    """The replicas of one kind of hosts, if the data is split unevenly.

    `replicas` is their number, `microbatches` the number of micro-batches of each. `values` are the values that differ
    from the candidate.
    """

    replicas: int
    microbatches: int
    values: dict[str, Any]


@dataclass(frozen=True)
class Replica:
    """One replica of an uneven data split.

    `first_sample` is its first sample in a step, `microbatches` its number of micro-batches, and `weight` the weight of
    its mean loss. All weights add up to the number of replicas, because Megatron takes the mean of the gradients over
    replicas.
    """

    first_sample: int
    microbatches: int
    weight: float


@dataclass(frozen=True, kw_only=True)
class TrialJob(TrainingJob):
    """One trial, or the probe of one of its ranks.

    With `shares`, the ranks of a replica are consecutive, and `replica` is the replica of this rank.
    """

    candidate: TrialCandidate
    probe: Probe | None = None
    shares: tuple[Share, ...] = ()
    replica: Replica | None = None

    def on_replica(self, number: int) -> TrialJob:
        """Return the job for the ranks of data-parallel replica `number`."""
        first_sample = 0
        for share in self.shares:
            candidate = dataclasses.replace(self.candidate, **share.values)
            samples = candidate.micro_batch_size * share.microbatches
            if number < share.replicas:
                weight = samples * candidate.data_parallel_size / self.train.global_batch_size
                replica = Replica(first_sample + number * samples, share.microbatches, weight)
                return dataclasses.replace(self, candidate=candidate, replica=replica)
            number, first_sample = number - share.replicas, first_sample + share.replicas * samples
        return self

    @property
    def world_size(self) -> int:
        c = self.candidate
        stage_devices = c.data_parallel_size * c.tensor_model_parallel_size * c.context_parallel_size
        return stage_devices * c.pipeline_model_parallel_size

    @property
    def transformer_engine(self) -> bool:
        """Whether the layers are transformer-engine's."""
        return self.train.implementation == "transformer_engine"

    @property
    def processes(self) -> int:
        """The number of ranks on this host: its share of all ranks, or 1 for a probe."""
        return self.world_size // self.nodes if self.probe is None else 1

    @property
    def num_microbatches(self) -> int:
        """The number of micro-batches per step of each data-parallel replica, or of `replica` if it is set."""
        if self.replica:
            return self.replica.microbatches
        return self.train.global_batch_size // (self.candidate.micro_batch_size * self.candidate.data_parallel_size)

    def enough_microbatches(self, stage: int) -> int:
        """Return the number of micro-batches after which `stage` is in its steady state, at most all of a step.

        1F1B begins with one forward pass per later stage. The interleaved schedule has groups of as many micro-batches
        as stages, and begins backward passes before the second group ends.
        """
        stages = self.candidate.pipeline_model_parallel_size
        count = 2 * stages if self.virtual_stages else max(_MIN_MICROBATCHES, stages - stage + 1)
        return min(self.num_microbatches, count)

    @property
    def stage_layers(self) -> tuple[StageLayers, ...]:
        """The contents of each (virtual) stage in a layout; empty if there is no layout."""
        layout = self.candidate.pipeline_model_parallel_layout
        return parse_layout(layout, self.model.num_layers, self.model.mtp_num_layers) if layout else ()

    @property
    def virtual_stages(self) -> int | None:
        """The number of model chunks on each pipeline stage, or None if the schedule is not interleaved."""
        if layout := self.stage_layers:
            chunks = len(layout) // self.candidate.pipeline_model_parallel_size
            return chunks if chunks > 1 else None
        if number := self.candidate.virtual_pipeline_model_parallel_size:
            return number if number > 1 else None
        layers_per_chunk = self.candidate.num_layers_per_virtual_pipeline_stage
        if layers_per_chunk is None:
            return None
        stages = self.candidate.pipeline_model_parallel_size * layers_per_chunk
        chunks = self.model.num_layers // stages
        return chunks if chunks > 1 else None


def _of_ranks(data: dict[str, Any]) -> dict[str, Any]:
    probe, shares = data.get("probe"), data.get("shares", ())
    return {"probe": probe and build(Probe, probe), "shares": tuple(build(Share, share) for share in shares)}


parse_job = partial(read_job, TrialJob, TrialCandidate, further=_of_ranks)
"""Returns the job in decoded JSON. Raises JobError if a key is unknown or missing; Megatron checks the values."""
