"""Published runs that resemble a training job, with their measured and predicted speeds."""

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from flagcore import plugins
from flagcore.api.planning.jobs import predict_records
from flagcore.domain.serving import ServeSpec
from flagcore.domain.space import KnobValue
from flagcore.domain.spec import Job, Task
from flagcore.errors import FlagError, UsageError
from flagcore.i18n import N_, _
from flagcore.plugins import LoadedPlugins, workload_of
from flagcore.report.estimate import PublishedRun

NEAREST = 8
"""How many of the nearest runs a plan is compared with. Each prediction of a run takes about 50 ms."""


CHOSEN = 1.16
"""Geometric mean of measured over planned seconds of the fastest published runs of 50 training jobs with experts (1.14
to 1.17 without one source). It is 1.02 in 62 dense jobs. `benchmarks/chosen.py` measures both."""


def expected_seconds(task: Task, loaded: LoadedPlugins, planned_s: float) -> float | None:
    """Return the seconds that a step of the plan is expected to take, or None if they are as predicted, or unknown: if
    no run with experts is published that this engine made on these chips."""
    jobs = _nearest(task, loaded) if task.spec.model.num_moe_experts and math.isfinite(planned_s) else ()
    known = (job for job, _ in jobs if job.model.num_moe_experts and job.work.engine == task.spec.work.engine)
    return CHOSEN * planned_s if any(known) else None


def published_runs(task: Task, loaded: LoadedPlugins, limit: int | None = NEAREST) -> tuple[PublishedRun, ...]:
    """Return the published training runs on the task's kinds of chips, at most `limit` of them, the nearest first."""
    nearest = _nearest(task, loaded)[:limit]
    pairs = zip(nearest, predict_records([record for _, record in nearest], loaded), strict=True)
    return tuple(_run(job, record, answer) for (job, record), answer in pairs if "step_time_s" in answer)


def published_layout(task: Task, loaded: LoadedPlugins, name: str) -> tuple[str, Mapping[str, KnobValue]]:
    """Return the nearest published run whose id or source contains all words of `name`: id and source, and its knobs.

    Runs on the task's kinds of chips come first. Raises UsageError if there is no such run.
    """
    words, runs = name.casefold().split(), [*_nearest(task, loaded), *_nearest(task, loaded, others=True)]
    for job, record in runs:
        title = f"{job.id} ({record['source']})"
        if all(word in title.casefold() for word in words):
            return title, workload_of(task.spec.work).in_space(job.candidate, job.model)
    text = N_("--like {name}: no published run contains these words; the nearest runs: {known}")
    raise UsageError(_(text, name=name, known="; ".join(job.id for job, _record in runs[:3]) or _("none")))


def _nearest(task: Task, loaded: LoadedPlugins, *, others: bool = False) -> list[tuple[Job, Mapping[str, Any]]]:
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
                found.append((_distance(task, job), job, record))
    return [(job, record) for _, job, record in sorted(found, key=lambda each: each[0])]


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
