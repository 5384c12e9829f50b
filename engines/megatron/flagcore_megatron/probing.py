"""Starts a probe of one rank with the trial program, and reads its measurement."""

import statistics
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
from flagcore_training.kinds import layer_kinds
from flagcore_training.reading import INVALID_JSON
from flagcore_training.stages import stage
from flagcore_training.start import program_launch
from flagcore_vendorkit.metrics import METRICS, NoMetrics, interquartile_range, read_metrics

from flagcore.contracts import Costs, Platform, Probes
from flagcore.domain.launch import Launch
from flagcore.domain.prediction import RankPrediction
from flagcore.domain.probe import RankMeasurement
from flagcore.domain.space import Candidate, Columns
from flagcore.domain.spec import Spec, Task
from flagcore.errors import SpecError
from flagcore_megatron.predict import inputs, rank_figures
from flagcore_megatron.space.knobs import columns as row_of
from flagcore_megatron.space.meshes import stage_devices
from flagcore_megatron.start import PROGRAM, job, ready

PROBE_FIGURES = (
    *("stage", "static_bytes", "peak_forward_backward_bytes", "peak_optimizer_bytes", "peak_allocated_bytes"),
    *("device_used_bytes", "microbatches_run"),
)
"""Whole numbers in the metrics of a probe that are fields of `RankMeasurement`."""


class MegatronProbes(Probes):
    """Probes by the trial program."""

    def ready(self, spec: Spec) -> None:
        """Raise SpecError or NoDevice if the trial program cannot run a single rank of `spec` on this machine."""
        if spec.train.command is not None:
            problem = "cannot be probed: a probe runs flagcore's own trial program"
            raise SpecError(key="train.command", value=" ".join(spec.train.command), problem=problem, fix="remove it")
        ready(replace(spec, cluster=replace(spec.cluster, nodes=1)))

    def predict(self, task: Task, columns: Columns, rank: int, costs: Costs, *, alone: bool = True) -> RankPrediction:
        return rank_figures(task, columns, rank, costs, alone=alone)

    def launch(self, platform: Platform, candidate: Candidate, rank: int, folder: str, device: int = 0) -> Launch:
        """Return the launch of a probe of one rank. Raises LaunchError if its job file cannot be written."""
        return program_launch(job(platform, candidate, folder, {"rank": rank, "device": device}), folder, PROGRAM)

    def stage_ranks(self, task: Task, columns: Columns) -> tuple[int, ...]:
        """Return the first rank of each stage; the pipeline is the outermost dimension of Megatron's ranks."""
        return tuple(accumulate(stage_devices(task, columns)[:-1], initial=0))

    def ranks(self, task: Task, candidate: Candidate, costs: Costs) -> tuple[int, ...]:
        """Return the ranks to probe: the first rank of each selected stage.

        The stages are the first and the last one, those predicted to need the most memory and the most time, and a
        stage with experts.
        """
        row = row_of(task, candidate.as_dict())
        train, layout = inputs(task, row, costs)
        width, stages = (int(layout.tensor[0] * layout.context[0] * layout.data[0]), int(layout.pipeline[0]))
        figures = [rank_figures(task, row, each * width, costs) for each in range(stages)]
        stages_to_probe = {
            0,
            stages - 1,
            max(range(stages), key=lambda each: figures[each].device_used_bytes),
            max(range(stages), key=lambda each: figures[each].compute_time_s or 0.0),
        }
        kinds, every = layer_kinds(train.model), [np.array([float(each)]) for each in range(stages)]
        numbers = [stage(train.model, layout, each, train.options).numbers for each in every]
        expert_stages = [place for place, each in enumerate(numbers) if np.any(kinds.with_experts(each))]
        if expert_stages and stages_to_probe.isdisjoint(expert_stages):
            stages_to_probe.add(expert_stages[0])
        return tuple(each * width for each in sorted(stages_to_probe))

    def read(self, task: Task, folder: str) -> RankMeasurement:
        """Return the trial program's measurement of one rank. Raises NoMetrics if there is none."""
        data = read_metrics(folder)
        try:
            steps: list[dict[str, Any]] = data["steps"][task.spec.control.warmup_iters :]
            if not steps:
                raise NoMetrics(f"the probe wrote {len(data['steps'])} steps, and all of them are warm-up")
            compute, optimizer = ([float(step[name]) for step in steps] for name in ("compute_s", "optimizer_s"))
            reserved_bytes = data["peak_reserved_bytes"]
            return RankMeasurement(
                **{name: int(data[name]) for name in PROBE_FIGURES},
                reserved_bytes=None if reserved_bytes is None else int(reserved_bytes),
                compute_time_s=statistics.median(compute),
                compute_spread_s=interquartile_range(compute),
                optimizer_time_s=statistics.median(optimizer),
                optimizer_spread_s=interquartile_range(optimizer),
                steps=len(steps),
                microbatches=int(data["num_microbatches"]),
                versions={name: str(version) for name, version in data["versions"].items()},
            )
        except INVALID_JSON as error:
            raise NoMetrics(f"{METRICS} is not complete ({type(error).__name__}: {error})") from None
