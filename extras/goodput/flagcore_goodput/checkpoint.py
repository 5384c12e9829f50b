"""The bytes of a checkpoint: in sum, and of the rank that writes most."""

from dataclasses import dataclass

import numpy as np
from flagcore_training.weights import ADAPTER_PARTS, EXPERT_PARTS

from flagcore.contracts import Problem
from flagcore.domain.space import Columns, FloatArray, IntArray
from flagcore.errors import UsageError
from flagcore.tuner.stages.predict import predict_components
from flagcore_goodput.job import FORMATS


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Bytes of the checkpoint of each candidate, with one element per candidate.

    `first`: of the rank that writes most if the first replica, of `writers` ranks, writes what the ranks do not share.
    `equal`: the same if all replicas write equal parts. Adam's states are saved in fp32.
    """

    total: FloatArray
    first: FloatArray
    equal: FloatArray
    writers: FloatArray

    def write_s(self, devices: int, parallel: bool, storage: float, rank: float) -> FloatArray:
        """Return the seconds until all is written.

        `storage`: bytes per second of all ranks, which share it equally. `rank`: those of one rank at most. Without
        `parallel`, the first replica goes on alone after the others.
        """
        most = self.equal if parallel else self.first
        writers = np.full(most.shape, float(devices)) if parallel else self.writers
        others = np.clip((self.total - writers * most) / np.maximum(devices - writers, 1.0), 0.0, most)
        together = np.where(writers < devices, others, 0.0)
        alone = np.maximum((most - together) / rank, (self.total - devices * together) / storage)
        return np.asarray(together / np.minimum(rank, storage / devices) + alone, dtype=np.float64)

    def take(self, place: int) -> "Checkpoint":
        """Return the checkpoint of one candidate, in arrays with one element."""
        return Checkpoint(*(each[place : place + 1] for each in (self.total, self.first, self.equal, self.writers)))


def checkpoints(problem: Problem, rows: IntArray) -> Checkpoint:
    """Return the checkpoints of the candidates in `rows` of the space. Raises UsageError if their bytes are unknown."""
    task, engine, columns = problem.task, problem.engine, problem.space.columns(rows)
    train, form = task.spec.train, FORMATS.get(engine.name)
    if form is None or len(task.cluster.groups) > 1:
        what, fix = f"the engine {engine.name}", f"use one of {', '.join(FORMATS)}"
        if form:
            what, fix = "several node groups", "give one kind of chip, without cluster.groups"
        raise UsageError(f"checkpoints of jobs on {what} are not known; {fix}")
    stages = columns.get("pipeline_model_parallel_size", np.ones(rows.shape, dtype=np.int64))
    knob, least = form.get("sharded", ("", 0))
    level = columns.get(knob, np.ones(rows.shape, dtype=np.int64))
    is_shared = level >= least
    weights = np.full(rows.shape, float(form.get("weights") or (4.0 if train.precision == "fp32" else 2.0)))
    optimizer = np.where(weights == 4.0, 8.0, 12.0) + 4.0 * (form.get("repeated", False) & is_shared & (weights == 4.0))
    weights[level >= form.get("no_weights", np.inf)] = 0.0

    devices, count = task.cluster.devices, sum(part.params * part.layers for part in engine.plans.model(task))
    owners, expert_owners = (_owners(devices, columns, stages, is_expert=each) for each in (False, True))
    even = {} if train.adapter else {"": {"params": count * owners / devices}}

    def of_stage(stage: IntArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        total, first, equal = np.zeros(rows.shape), np.zeros(rows.shape), np.zeros(rows.shape)
        for name, part in (predict_components(problem.platform, columns, stage) or even).items():
            if train.adapter is None or name in ADAPTER_PARTS:
                size, shares = part["params"], expert_owners if name in EXPERT_PARTS else owners
                total += size * (weights + optimizer) * devices / stages / shares
                first += size * (weights + optimizer / np.where(is_shared, shares, 1.0))
                equal += size * (weights + optimizer) / shares
        return total, first, equal

    found = [of_stage(each) for each in (0 * stages, stages - 1, problem.predictions.worst_stage[rows])]
    total, first, equal = (np.max(each, axis=0) for each in zip(*found, strict=True))
    if not total.any():
        raise UsageError(f"checkpoints of adapters are not known for the engine {engine.name}")
    is_whole = bool(count) and train.adapter is None
    return Checkpoint(count * (weights + optimizer) if is_whole else total * stages, first, equal, devices / owners)


def _owners(devices: int, columns: Columns, stages: IntArray, *, is_expert: bool) -> FloatArray:
    """Return the number of ranks that hold, or share, the same weights."""
    tensor = columns.get("tensor_model_parallel_size", 0 * stages + 1)
    if is_expert:
        own = columns.get("expert_tensor_parallel_size", 0 * stages)
        tensor = np.where(own > 0, own, tensor) * columns.get("expert_model_parallel_size", 0 * stages + 1)
    return np.asarray(devices / (stages * tensor), dtype=np.float64)
