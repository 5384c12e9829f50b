"""The toy engine: all that an engine can do, on a page, for tests that are not about a real one.

It is not installed with the kit, so no user sees it. `install` adds it to one environment of Python.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from flagcore.contracts import Costs, Engine, Platform, Probes, Steps, differs_only
from flagcore.domain.knob import Flag, Knob
from flagcore.domain.launch import FailurePattern, Launch
from flagcore.domain.prediction import Predictions, RankPrediction
from flagcore.domain.probe import RankMeasurement
from flagcore.domain.space import BoolArray, Candidate, Columns, FloatArray, KnobValue, Merge, Rule
from flagcore.domain.spec import AUTO, Spec, Task
from flagcore.domain.trial import Measurement, TrialState
from flagcore.errors import FlagError
from flagcore_testing import toy_program

DP, TP, PP = "data_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size"
MBS, DIST_OPT, RECOMPUTE, METHOD = "micro_batch_size", "use_distributed_optimizer", "use_recompute", "recompute_method"


def _powers(task: Task) -> tuple[int, ...]:
    return tuple(1 << power for power in range(task.cluster.devices.bit_length()))


KNOBS: tuple[Knob, ...] = (
    *(
        Knob(name=name, label=label, help=f"Number of {noun}.", neutral=1, maximum=1_000_000, auto=_powers,
             auto_help="the powers of two", flags=(Flag(name=name.replace("_", "-")),), layout=True, memory_order=-1)
        for name, label, noun in ((DP, "DP", "replicas"), (TP, "TP", "parts of a layer"), (PP, "PP", "stages"))
    ),
    Knob(name=MBS, label="MBS", help="Samples.", neutral=1, auto=lambda task: (1, 2, 4, 8), auto_help="1, 2, 4 and 8",
         flags=(Flag(name="micro-batch-size"),), memory_order=1, shows_neutral=True),
    Knob(name=DIST_OPT, label="DO", kind="flag", help="Whether replicas share the optimizer.", neutral=False,
         auto=lambda task: (False, True), auto_help="false and true", memory_order=-1),
    Knob(name=RECOMPUTE, label="RC", kind="flag", help="Whether layers are computed again.", neutral=False,
         auto=lambda task: (False, True), auto_help="false and true", memory_order=-1),
    Knob(name=METHOD, part_of=RECOMPUTE, kind="word", words=("block", "uniform"), help="Which layers.",
         auto=lambda task: ("block", "uniform"), auto_help="block and uniform", memory_order=-1),
    Knob(name="does", kind="word", scope=("setting",), help="How trials fail.", words=toy_program.FAILURES),
    Knob(name="where", kind="text", scope=("setting",), help="Only trials of this TP and MBS fail, such as 1x2."),
    Knob(name="sleeps", kind="number", scope=("setting",), minimum=0, help="Seconds that a step really takes."),
)  # fmt: skip
SPACE_KNOBS = tuple(knob for knob in KNOBS if knob.searchable)


class Toy(Engine):
    """Training that takes no time: a small program claims the times of its steps."""

    name = "toy"
    kind = "train"
    knobs = KNOBS
    replicas = DP
    failures = (
        FailurePattern(pattern=r"out of memory: (.*)", state=TrialState.OUT_OF_MEMORY),
        FailurePattern(pattern=r"invalid: (.*)", state=TrialState.INVALID),
    )

    def __init__(self) -> None:
        self.probes = ToyProbes(self)

    # The search space

    def rules(self, task: Task, /) -> tuple[Rule, ...]:
        batch, devices, layers = task.spec.train.global_batch_size, task.cluster.devices, task.spec.model.num_layers
        return (
            Rule(name="world_size", knobs=(DP, TP, PP), message=f"{DP} x {TP} x {PP} is the number of devices",
                 broken=lambda columns: columns[DP] * columns[TP] * columns[PP] != devices),
            Rule(name="global_batch_size", knobs=(DP, MBS), message=f"{DP} x {MBS} divides the global batch",
                 broken=lambda columns: batch % (columns[DP] * columns[MBS]) != 0),
            Rule(name="layers", knobs=(PP,), message=f"{PP} divides the number of layers",
                 broken=lambda columns: layers % columns[PP] != 0),
            Rule(name="recompute_method", knobs=(RECOMPUTE, METHOD), message=f"{RECOMPUTE} needs a {METHOD}",
                 broken=lambda columns: (columns[RECOMPUTE] == 1) & (columns[METHOD] == 0)),
        )  # fmt: skip

    def merges(self, task: Task, /) -> tuple[Merge, ...]:
        def canonical(columns: Columns) -> Columns:
            return {METHOD: np.where(columns[RECOMPUTE] == 1, columns[METHOD], 0)}

        return (Merge(name="no_recompute", knobs=(RECOMPUTE, METHOD), canonical=canonical),)

    def takes_at_least(self, columns: Columns, candidate: Candidate) -> BoolArray:
        return differs_only(SPACE_KNOBS, columns, candidate, {RECOMPUTE: 1, METHOD: 1})

    def usual_space(self, task: Task) -> Mapping[str, str | tuple[KnobValue, ...]]:
        return {**{knob.name: (knob.neutral,) for knob in SPACE_KNOBS}, **dict.fromkeys((DP, TP, PP), AUTO)}

    # Predictions

    def predict(self, task: Task, columns: Columns, costs: Costs) -> Predictions:
        """Return the memory of weights, optimizer and activations, and the times of products and messages."""
        data, tensor, pipeline, micro = (columns[name] for name in (DP, TP, PP, MBS))
        train, model, kernels = task.spec.train, task.spec.model, costs.kernels
        hidden, per_stage = model.hidden_size, model.num_layers / pipeline
        wide = 4 * hidden + 2 * model.ffn_hidden_size  # output columns of all products of a layer
        params: FloatArray = (per_stage * hidden * wide + model.vocab_size * hidden) / tensor
        passes = train.global_batch_size / (data * micro)
        tokens: FloatArray = np.multiply(micro, float(train.seq_length), dtype=np.float64)
        product = kernels.gemm_seconds(
            tokens * 1.0, wide / tensor, np.full(tensor.shape, hidden * 1.0), train.precision
        )
        compute = passes * per_stage * (product + 4 * kernels.launch_seconds()) * (3 + columns[RECOMPUTE])
        message = costs.collectives.seconds("all_reduce", 2.0 * tokens * hidden, tensor, np.ones_like(tensor))
        parts = {
            "compute_s": compute,
            "tp_comm_s": passes * per_stage * 4 * message,
            "pp_bubble_s": (pipeline - 1) / passes * compute,
            "dp_comm_exposed_s": costs.collectives.seconds("all_reduce", 2.0 * params, data, tensor),
            "optimizer_s": kernels.memory_seconds(params * 28.0 / np.where(columns[DIST_OPT], data, 1)),
        }
        step = np.sum(list(parts.values()), axis=0)
        static = params * (6.0 + 12.0 / np.where(columns[DIST_OPT], data, 1))
        kept = np.array([34.0, 8.0, 3.0])[columns[METHOD]] * model.num_layers / tensor
        activations = tokens * hidden * kept
        reserved = costs.memory.reserved_bytes(static + activations)
        return Predictions(
            step_time_s=step,
            low_s=0.8 * step,
            high_s=1.25 * step,
            time_s=parts,
            static_bytes=static,
            activation_bytes=activations,
            peak_allocated_bytes=static + activations,
            reserved_bytes=reserved,
            device_used_bytes=costs.memory.device_used_bytes(reserved),
            worst_stage=np.zeros(step.shape, dtype=np.int64),
            capacity_bytes=costs.memory.capacity_bytes(),
            model_flops=6.0 * hidden * wide * model.num_layers * train.seq_length * train.global_batch_size,
        )

    def sizes(self, task: Task, columns: Columns) -> Mapping[str, FloatArray]:
        return {"tokens": np.log2(columns[MBS] * task.spec.train.seq_length)}

    # Trials

    def launch(self, platform: Platform, candidate: Candidate, folder: str, *, for_real: bool = False) -> Launch:
        return self.started(platform, candidate, folder)

    def started(self, platform: Platform, candidate: Candidate, folder: str, **probe: int) -> Launch:
        """Write `job.json`. The user's command, if there is one, is started instead of the program."""
        train, knobs = platform.task.spec.train, candidate.as_dict()
        settings, batch = train.settings, train.global_batch_size
        job = {
            "knobs": knobs,
            "global_batch_size": batch,
            "steps": platform.task.spec.control.train_iters,
            "effective": {**knobs, "global_batch_size": batch},
            **{name: settings.get(name, empty) for name, empty in (("does", ""), ("where", ""), ("sleeps", 0.0))},
            **probe,
        }
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, "job.json").write_text(json.dumps(job))
        program = train.command or (sys.executable, "-S", "-E", toy_program.__file__)
        return Launch(
            argv=(*program, folder), folder=folder, environment=platform.environment, directory=train.directory
        )

    def read(self, task: Task, candidate: Candidate, folder: str, *, partial: bool = False) -> Measurement:
        rows, warmup = _rows(folder), task.spec.control.warmup_iters
        if len(rows) <= warmup:
            raise FlagError("it wrote no metrics.json with a timed step")
        times = tuple(row["step_s"] for row in rows[warmup:])
        step, train = median(times), task.spec.train
        return Measurement(
            step_times_s=times,
            step_time_s=step,
            spread_s=max(times) - min(times),
            tokens_per_second_per_device=train.global_batch_size * train.seq_length / step / task.cluster.devices,
            losses=tuple(row["loss"] for row in rows),
            effective=rows[-1]["effective"],
            warmup_steps=warmup,
            partial=partial,
        )

    def steps(self, task: Task, folder: str) -> Steps:
        return Steps(lambda: tuple(row["step_s"] for row in _rows(folder)))

    def shorter_batch(self, task: Task, candidate: Candidate, share: float) -> int | None:
        values, whole = candidate.as_dict(), task.spec.train.global_batch_size
        unit = int(values[DP] or 1) * int(values[MBS] or 1)
        batch = unit * max(2 * int(values[PP] or 1), math.ceil(share * whole / unit))
        return batch if batch < whole else None


class ToyProbes(Probes):
    """Probes by the toy program."""

    def __init__(self, engine: Toy) -> None:
        self.engine = engine

    def ready(self, spec: Spec) -> None:
        """Every machine can probe."""

    def stage_ranks(self, task: Task, columns: Columns) -> tuple[int, ...]:
        stages = int(columns[PP][0])
        return tuple(stage * task.cluster.devices // stages for stage in range(stages))

    def ranks(self, task: Task, candidate: Candidate, costs: Costs) -> tuple[int, ...]:
        ranks = self.stage_ranks(task, self.engine.columns(task, candidate.as_dict()))
        return (ranks[0], ranks[-1])[: len(ranks)]

    def predict(self, task: Task, columns: Columns, rank: int, costs: Costs, *, alone: bool = True) -> RankPrediction:
        whole = self.engine.predict(task, columns, costs).row(0)
        return RankPrediction(
            rank=rank,
            static_bytes=whole.static_bytes,
            peak_allocated_bytes=whole.peak_allocated_bytes,
            reserved_bytes=whole.reserved_bytes,
            device_used_bytes=whole.device_used_bytes,
            compute_time_s=whole.time_s.get("compute_s"),
            optimizer_time_s=whole.time_s.get("optimizer_s"),
        )

    def launch(self, platform: Platform, candidate: Candidate, rank: int, folder: str, device: int = 0) -> Launch:
        return self.engine.started(platform, candidate, folder, rank=rank, device=device)

    def read(self, task: Task, folder: str) -> RankMeasurement:
        rows = _rows(folder)
        if not rows:
            raise FlagError("it wrote no metrics.json")
        seconds, memory = median(row["step_s"] for row in rows), 3 << 30
        return RankMeasurement(
            stage=0, static_bytes=memory // 2, peak_forward_backward_bytes=memory, peak_optimizer_bytes=memory // 2,
            peak_allocated_bytes=memory, reserved_bytes=memory, device_used_bytes=memory,
            compute_time_s=seconds, compute_spread_s=0.0, optimizer_time_s=0.001, optimizer_spread_s=0.0,
            steps=len(rows), microbatches=8, microbatches_run=8,
        )  # fmt: skip


def _rows(folder: str) -> list[dict[str, Any]]:
    """Return the finished steps in `metrics.json`."""
    file = Path(folder, "metrics.json")
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


ENGINE = Toy()


def install(folder: Path) -> None:
    """Write a distribution `flagcore-toy` to `folder`: where it is on Python's path, specs can name the engine."""
    info = folder / "flagcore_toy-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flagcore-toy\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[flagcore.engines]\ntoy = flagcore_testing.toy:ENGINE\n")
