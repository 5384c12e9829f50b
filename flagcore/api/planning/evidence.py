"""Published runs that resemble a training job, with their measured and predicted speeds."""

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from flagcore import plugins
from flagcore.api.planning.jobs import predict_records
from flagcore.domain.serving import ServeSpec
from flagcore.domain.spec import Job, Task
from flagcore.errors import FlagError
from flagcore.plugins import LoadedPlugins
from flagcore.report.estimate import PublishedRun

NEAREST = 8
"""How many of the nearest runs a plan is compared with. Each prediction of a run takes about 50 ms."""


def published_runs(task: Task, loaded: LoadedPlugins, limit: int | None = NEAREST) -> tuple[PublishedRun, ...]:
    """Return the published training runs on the task's kinds of chips, at most `limit` of them, the nearest first."""
    from flagcore.spec.jobs import read_job  # takes long to import

    if isinstance(task.spec.work, ServeSpec):
        return ()
    chips, engines, found = {group.chip.name for group in task.cluster.groups}, plugins.engines(), []
    for record in loaded.published_runs():
        with suppress(FlagError):
            job = read_job(record, engines)
            chip = loaded.find_chip(job.chip)
            if chip and chip.name in chips and not isinstance(job.work, ServeSpec):
                found.append((_distance(task, job), job, record))
    nearest = sorted(found, key=lambda each: each[0])[:limit]
    answers = predict_records([record for _, _, record in nearest], loaded)
    return tuple(
        _run(job, record, answer)
        for (_, job, record), answer in zip(nearest, answers, strict=True)
        if "step_time_s" in answer
    )


def _run(job: Job, record: Mapping[str, Any], answer: Mapping[str, Any]) -> PublishedRun:
    measured_s, speedup = record["measured"]["step_time_s"], answer["step_time_s"]["value"]
    speedup /= measured_s
    predicted = answer["tokens_per_second_per_device"]["value"]
    return PublishedRun(
        run=job.id,
        precision=job.work.precision,
        candidate=job.candidate,
        measured=predicted * speedup,
        predicted=predicted,
        mfu=answer["mfu"] * speedup if "mfu" in answer else None,
        source=record["source"],
    )


def _distance(task: Task, job: Job) -> float:
    """Return how much a published job differs from `task`: in model, precision, devices and length of the sequences.

    The weights were chosen by hand: a run of the same model and precision at another scale is nearer than another
    model's.
    """
    model, train = task.spec.model, task.spec.train
    assert not isinstance(job.work, ServeSpec)
    sizes = [math.log2(each.num_layers * each.hidden_size**2) for each in (model, job.model)]
    is_other_kind = (model.num_moe_experts is None) != (job.model.num_moe_experts is None)
    scale = abs(math.log2(task.cluster.devices / job.devices)) + abs(math.log2(train.seq_length / job.work.seq_length))
    return abs(sizes[0] - sizes[1]) + 2 * is_other_kind + (train.precision != job.work.precision) + scale / 4
