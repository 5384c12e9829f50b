"""The published runs that resemble a training job."""

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from flagcore import plugins
from flagcore.domain.serving import ServeSpec
from flagcore.domain.spec import Job, Task
from flagcore.errors import FlagError
from flagcore.plugins import LoadedPlugins


def nearest_runs(
    task: Task, loaded: LoadedPlugins, *, others: bool = False
) -> tuple[tuple[Job, Mapping[str, Any]], ...]:
    """Return the published training runs on the task's kinds of chips (or on `others`), the nearest first."""
    from flagcore.spec.jobs import read_job  # takes long to import

    chips, engines, found = {group.chip.name for group in task.cluster.groups}, plugins.engines(), []
    for record in () if isinstance(task.spec.work, ServeSpec) else loaded.published_runs():
        with suppress(FlagError, KeyError):
            chip = loaded.find_chip(record["cluster"]["chip"])
            if chip is None or (chip.name in chips) == others:
                continue
            job = read_job(record, engines)
            if not isinstance(job.work, ServeSpec):
                found.append((distance(task, job), job, record))
    return tuple((job, record) for _, job, record in sorted(found, key=lambda each: each[0]))


def distance(task: Task, job: Job) -> float:
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
