"""Chooses the ranks to probe and reads the results of a probe."""

from __future__ import annotations

import statistics
from itertools import accumulate
from typing import Any

import numpy as np

from flagcore.contracts import Costs
from flagcore.domain.candidate import Candidate
from flagcore.domain.probe import RankMeasurement
from flagcore.domain.space import Columns
from flagcore.domain.spec import Task
from flagcore.engines.megatron.knobs import columns
from flagcore.engines.megatron.meshes import stage_devices
from flagcore.engines.megatron.parallel.pipeline import stage
from flagcore.engines.megatron.predict import inputs, rank_figures
from flagcore.engines.megatron.reading import INVALID_JSON
from flagcore.engines.results import METRICS, NoMetrics, interquartile_range, read_metrics


def stage_ranks(task: Task, columns: Columns) -> tuple[int, ...]:
    """Return the first rank of each stage; the pipeline is the outermost dimension of Megatron's ranks."""
    return tuple(accumulate(stage_devices(task, columns)[:-1], initial=0))


def probe_ranks(task: Task, candidate: Candidate, costs: Costs) -> tuple[int, ...]:
    """Return the first rank of each stage to probe.

    These are the first and last stage, those predicted to need the most memory and the most time, and a stage with
    experts.
    """
    row = columns(task, candidate.as_dict())
    train, layout = inputs(task, row, costs)
    width, stages = (int(layout.tensor[0] * layout.context[0] * layout.data[0]), int(layout.pipeline[0]))
    figures = [rank_figures(task, row, each * width, costs) for each in range(stages)]
    stages_to_probe = {
        0,
        stages - 1,
        max(range(stages), key=lambda each: figures[each].device_used_bytes),
        max(range(stages), key=lambda each: figures[each].compute_time_s or 0.0),
    }
    expert_stages = [
        each
        for each in range(stages)
        if float(stage(train.model, layout, np.array([float(each)]), train.options).moe[0]) > 0
    ]
    if expert_stages and stages_to_probe.isdisjoint(expert_stages):
        stages_to_probe.add(expert_stages[0])
    return tuple(each * width for each in sorted(stages_to_probe))


def read_probe(task: Task, folder: str) -> RankMeasurement:
    """Return the trial program's measurement of one rank. Raises NoMetrics."""
    data = read_metrics(folder)
    try:
        steps: list[dict[str, Any]] = data["steps"][task.spec.control.warmup_iters :]
        if not steps:
            raise NoMetrics(f"the probe wrote {len(data['steps'])} steps, and all of them are warm-up")
        compute = [float(step["compute_s"]) for step in steps]
        optimizer = [float(step["optimizer_s"]) for step in steps]
        reserved_bytes = data["peak_reserved_bytes"]
        return RankMeasurement(
            stage=int(data["stage"]),
            static_bytes=int(data["static_bytes"]),
            peak_forward_backward_bytes=int(data["peak_forward_backward_bytes"]),
            peak_optimizer_bytes=int(data["peak_optimizer_bytes"]),
            peak_allocated_bytes=int(data["peak_allocated_bytes"]),
            reserved_bytes=None if reserved_bytes is None else int(reserved_bytes),
            device_used_bytes=int(data["device_used_bytes"]),
            compute_time_s=statistics.median(compute),
            compute_spread_s=interquartile_range(compute),
            optimizer_time_s=statistics.median(optimizer),
            optimizer_spread_s=interquartile_range(optimizer),
            steps=len(steps),
            microbatches=int(data["num_microbatches"]),
            microbatches_run=int(data["microbatches_run"]),
            versions={name: str(version) for name, version in data["versions"].items()},
        )
    except INVALID_JSON as error:
        raise NoMetrics(f"{METRICS} is not complete ({type(error).__name__}: {error})") from None
