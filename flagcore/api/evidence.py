"""Published runs that resemble a training job, with their measured and predicted speeds."""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from flagcore import plugins
from flagcore.api.jobs import predict_records
from flagcore.contracts import Engine, Problem
from flagcore.contracts.capabilities import Shortening, optional, records_of
from flagcore.domain.prediction import Prediction
from flagcore.domain.spec import JobRecord, Spec
from flagcore.errors import FlagError, UsageError
from flagcore.i18n import N_, _
from flagcore.plugins import LoadedPlugins
from flagcore.report.estimate import PublishedRun
from flagcore.tuner.problem import nearest_runs
from flagcore.tuner.stages.build import legality
from flagcore.tuner.stages.predict import predict_columns

NEAREST = 8
"""How many of the nearest runs a plan is compared with. Each prediction of a run takes about 50 ms."""


CHOSEN = {False: (1.08, 0.90, 1.27), True: (1.17, 0.82, 1.56)}
"""Measured over planned seconds of the fastest published runs of 89 dense jobs, and of 55 with experts (True): the
geometric mean (of 38 dense jobs that no fit has used), and an interval that contains 80%. `benchmarks/chosen.py`
measures those of the table, `benchmarks/README.md` has all."""


def expected_seconds(
    problem: Problem, planned_s: float, loaded: LoadedPlugins
) -> tuple[tuple[float, float, float] | None, bool]:
    """Return the seconds that a step of the plan is expected to take with an 80% interval, and whether runs of such a
    model (dense, or with experts) are published on these chips. None if this engine made no such run on any chip."""
    spec = problem.task.spec
    has_experts = spec.model.num_moe_experts is not None

    def is_like(job: JobRecord) -> bool:
        return job.work.engine == spec.work.engine and (job.model.num_moe_experts is not None) == has_experts

    here = any(is_like(job) for job, _ in problem.published)
    known = here or any(is_like(job) for job, _ in nearest_runs(problem.task, loaded, others=True))
    mean, low, high = CHOSEN[has_experts]
    seconds = (mean * planned_s, low * planned_s, high * planned_s) if known and math.isfinite(planned_s) else None
    return seconds, here


def published_runs(problem: Problem, loaded: LoadedPlugins, limit: int | None = NEAREST) -> tuple[PublishedRun, ...]:
    """Return the published training runs on the task's kinds of chips, at most `limit` of them, the nearest first."""
    nearest, engines, spec = problem.published[:limit], plugins.engines(), problem.task.spec
    pairs = zip(nearest, predict_records([record for _, record in nearest], loaded), strict=True)
    return tuple(_run(spec, job, record, answer, engines) for (job, record), answer in pairs if "step_time_s" in answer)


def published_job(problem: Problem, loaded: LoadedPlugins, name: str) -> tuple[str, JobRecord]:
    """Return the nearest published run whose id or source contains all words of `name`, and its id and source.

    Runs on the task's kinds of chips come first. Raises UsageError if there is no such run.
    """
    words, runs = name.casefold().split(), [*problem.published, *nearest_runs(problem.task, loaded, others=True)]
    for job, record in runs:
        title = f"{job.id} ({record['source']})"
        if words and all(word in title.casefold() for word in words):
            return title, job
    text = N_("--like {name!r}: no published run contains these words; the nearest runs: {known}")
    raise UsageError(_(text, name=name, known="; ".join(job.id for job, _record in runs[:3]) or _("none")))


def predicted_like(problem: Problem, job: JobRecord) -> Prediction | None:
    """Return the prediction with the layout and all settings of a published job, or None if they are illegal."""
    train, engine = problem.task.spec.train, problem.engine
    lengths = {key: getattr(train, key) for key in ("seq_length", "global_batch_size", "precision")}
    values = {key: value for key, value in job.candidate.items() if key != optional(engine, Shortening).replicas}
    with suppress(FlagError):
        task = replace(problem.task, spec=replace(problem.task.spec, work=replace(job.work, **lengths)), knobs=())
        task, values, _noted = records_of(engine).published(task, values, job.notes)
        platform, columns = replace(problem.platform, task=task), engine.columns(task, values)
        if not any(rule.broken(columns).any() for rule in legality(platform).rules):
            return predict_columns(platform, columns).row(0)
    return None


def _run(
    spec: Spec, job: JobRecord, record: Mapping[str, Any], answer: Mapping[str, Any], engines: Mapping[str, Engine]
) -> PublishedRun:
    measured_s, speedup = record["measured"]["step_time_s"], answer["step_time_s"]["value"]
    speedup /= measured_s
    predicted, has_experts = answer["tokens_per_second_per_device"]["value"], job.model.num_moe_experts is not None
    return PublishedRun(
        run=job.id,
        precision=job.work.precision,
        candidate=job.candidate,
        measured=predicted * speedup,
        predicted=predicted,
        mfu=answer["mfu"] * speedup if "mfu" in answer else None,
        source=record["source"],
        is_bound=job.work.precision == spec.work.precision and not (has_experts and spec.model.num_moe_experts is None),
        knobs={knob.name: knob for knob in engines[job.work.engine].knobs},
    )
