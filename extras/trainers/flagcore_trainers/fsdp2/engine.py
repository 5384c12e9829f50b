"""The engine `fsdp2`: flagcore's own trial program on torch's `fully_shard`, described by the model's shapes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from flagcore.contracts import Platform, Workload
from flagcore.domain.chip import SPEED_TEST
from flagcore.domain.knob import Knob
from flagcore.domain.launch import FailurePattern, Launch
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import BoolArray, Candidate, Columns, KnobValue
from flagcore.domain.spec import AUTO, Spec, Task
from flagcore.domain.trial import Measurement
from flagcore.engines.megatron.reading import FAILURES, INVALID_JSON, measurement, program_progress
from flagcore.engines.megatron.start import installed
from flagcore.engines.results import METRICS, NoMetrics, read_metrics
from flagcore.errors import LaunchError, NoDevice, SpecError
from flagcore_trainers.fsdp2 import predict as prediction
from flagcore_trainers.fsdp2 import space
from flagcore_trainers.fsdp2.space import (
    AC,
    COMPILE,
    CP,
    MBS,
    OFFLOAD,
    PP,
    REDUCE,
    REPLICATE,
    RESHARD,
    SCHEDULE,
    SHARD,
    TP,
)

PROGRAM = "flagcore_trainers.fsdp2"
SEED = 1234
PRECISIONS = ("bf16", "fp32")
FIELDS = {
    REPLICATE: "replicate",
    SHARD: "shard",
    TP: "tensor",
    CP: "context",
    PP: "pipeline",
    SCHEDULE: "schedule",
    MBS: "micro_batch",
    AC: "checkpointing",
    RESHARD: "reshard_after_forward",
    REDUCE: "reduce_dtype",
    OFFLOAD: "offload",
    COMPILE: "compile",
}
"""The field of `job.Candidate` of each knob."""


class Fsdp2(Workload):
    """Training with FSDP2 in flagcore's own trial program."""

    name = "fsdp2"
    kind = "train"
    knobs: tuple[Knob, ...] = space.KNOBS
    modules: Mapping[str, str] = {"torch": "torch>=2.7"}
    distribution = "torch"

    rules = staticmethod(space.rules)
    merges = staticmethod(space.merges)
    predict = staticmethod(prediction.predict)

    def usual_space(self, task: Task) -> Mapping[str, str | tuple[KnobValue, ...]]:
        """Return what an expert would consider: weights shared by all replicas, sizes of TP and of micro-batches."""
        neutral: dict[str, str | tuple[KnobValue, ...]] = {knob.name: (knob.neutral,) for knob in self.knobs}
        return {**neutral, SHARD: AUTO, TP: AUTO, MBS: AUTO, AC: ("none", "full")}

    def rule_of_thumb(self, task: Task, columns: Columns, predictions: Predictions) -> int:
        """Return the row with the smallest TP that fits, then without checkpoints, then the largest micro-batch."""
        missing_bytes = np.where(predictions.fits, 0.0, predictions.device_used_bytes)
        return int(np.lexsort((-columns[MBS], columns[AC], columns[TP], missing_bytes))[0])

    def needs_at_least(self, columns: Columns, candidate: Candidate) -> BoolArray:
        """Return whether candidates differ from `candidate` only by a larger micro-batch."""
        others = candidate.as_dict()
        codes = {knob.name: knob.axis(()).encode(others[knob.name]) for knob in self.knobs}
        same = [columns[name] == code for name, code in codes.items() if name != MBS]
        result: BoolArray = np.logical_and.reduce([*same, columns[MBS] >= codes[MBS]])
        return result

    # Trials

    def ready(self, spec: Spec) -> None:
        train = spec.train
        if train.command is not None:
            fix = "remove it, or use engine: command for your own program"
            raise SpecError(key="train.command", value=list(train.command), problem="is not used by fsdp2", fix=fix)
        if train.precision not in (AUTO, *PRECISIONS):
            fix = f"use {' or '.join(PRECISIONS)}"
            raise SpecError(
                key="train.precision", value=train.precision, problem="cannot run in trials of fsdp2", fix=fix
            )
        if spec.cluster.groups or (spec.cluster.nodes != 1 and not spec.on_each_host):
            problem = "is more than one machine of one chip, which trials need"
            fix = "list the hosts in cluster.hostfile and set auto_tuner.launcher to ssh or slurm"
            raise SpecError(key="cluster.nodes", value=spec.cluster.nodes, problem=problem, fix=fix)
        if not installed("torch", self.modules["torch"]):
            raise NoDevice(f"trials need {self.modules['torch']}, not installed here; pip install it")

    def launch(self, platform: Platform, candidate: Candidate, folder: str, *, for_real: bool = False) -> Launch:
        if for_real:
            raise LaunchError("fsdp2 has no real job: use the values of the best candidate in your own program")
        task, support, file = platform.task, platform.support, Path(folder, "job.json")
        spec, train, values = task.spec, task.spec.train, candidate.as_dict()
        hosts = spec.cluster.hosts[: spec.cluster.nodes] if spec.on_each_host else ()
        group = task.cluster.groups[0]
        cores = len(platform.cores) or group.chip.devices_per_node
        backend = support.distributed_backend
        if values[OFFLOAD] and backend and support.device_type != "cpu":  # gradients are clipped where they are
            backend = f"{support.device_type}:{backend},cpu:gloo"
        job = {
            "model": asdict(replace(spec.model, vision=None, windows=None)),
            "train": {
                "seq_length": train.seq_length,
                "global_batch_size": train.global_batch_size,
                "precision": train.precision,
                "train_iters": spec.control.train_iters,
                "seed": SEED,
            },
            "candidate": {field: values[name] for name, field in FIELDS.items()},
            "device": {
                "type": support.device_type,
                "backend": backend,
                "preload": list(support.preload),
                "threads_per_rank": max(1, cores // group.devices_per_node) if support.shared_devices else 1,
            },
            "output": folder,
            "nodes": len(hosts) or 1,
            "end_after_s": spec.control.max_time_per_task,
        }
        try:
            file.write_text(json.dumps(job, indent=1), encoding="utf-8")
        except OSError as error:
            raise LaunchError(f"{file} cannot be written: {error.strerror or error}") from None
        environment = {"GLOO_SOCKET_IFNAME": "{interface}"} if hosts and (backend or "").endswith("gloo") else {}
        argv = (sys.executable, "-m", PROGRAM, str(file))
        return Launch(argv=argv, folder=folder, warm=True, hosts=hosts, environment=environment)

    def progress(self, task: Task, folder: str) -> Callable[[], tuple[float, ...]]:
        return lambda: program_progress(folder)

    def read(self, task: Task, candidate: Candidate, folder: str, *, partial: bool = False) -> Measurement:
        if partial:
            return measurement(task, program_progress(folder), losses=())
        data = read_metrics(folder)
        try:
            ranks = data["ranks"]
            peaks = {
                name: max(int(rank[name]) for rank in ranks)
                for name in ("peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes")
                if ranks[0][name] is not None
            }
            return measurement(
                task,
                [float(step["step_time_s"]) for step in data["steps"]],
                losses=[step["loss"] for step in data["steps"]],
                effective=data["effective"],
                versions={name: str(text) for name, text in data["versions"].items()},
                devices=tuple(
                    {"device": int(rank["rank"]), SPEED_TEST: float(rank[SPEED_TEST])}
                    for rank in ranks
                    if rank[SPEED_TEST] is not None
                ),
                **peaks,
            )
        except INVALID_JSON as error:
            raise NoMetrics(f"{METRICS} is not complete ({type(error).__name__}: {error})") from None

    def failure_patterns(self) -> tuple[FailurePattern, ...]:
        return FAILURES


FSDP2 = Fsdp2()
