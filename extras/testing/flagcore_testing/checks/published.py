"""Checks of the published runs that a plugin ships."""

from collections.abc import Iterator

from flagcore import plugins
from flagcore.domain.serving import ServeSpec
from flagcore.domain.spec import Job
from flagcore.errors import FlagError
from flagcore.spec.jobs import read_job
from flagcore_testing.kit import Problem, Problems, Skip, Subject, check

PEAKS = {"mxfp8": "fp8", "nvfp4": "fp4"}
"""The peaks of formats with another name."""
UTILIZATION = (0.01, 0.95)
"""Range of the share of the peak that a published run reaches, from the flops of its matrix products."""


Run = tuple[Subject, str, Job | FlagError, dict[str, object]]


def _runs(plugin: Subject) -> list[Run]:
    """Return each published run: its name in messages, the job or why it cannot be read, and the measurements."""
    plugin.implements("flagcore_published_runs")
    return plugin.once("published runs", lambda: list(_read_runs(plugin)))


def _read_runs(plugin: Subject) -> Iterator[Run]:
    records = plugin.loaded.published_runs()
    if not records:
        raise Skip("the plugin has no published runs")
    for record in records:
        where, measured = f"published.jsonl: {record.get('id')!r}", record.get("measured")
        try:
            job: Job | FlagError = read_job(record, plugins.engines())
        except FlagError as error:
            job = error
        yield plugin, where, job, dict(measured) if isinstance(measured, dict) else {}


@check("correct that key; docs/load.md describes job records", each=_runs)
def published_runs_are_job_records(
    plugin: Subject, where: str, job: Job | FlagError, measured: dict[str, object]
) -> Problems:
    if isinstance(job, FlagError):
        yield f"{where}: {job}"
    elif plugin.loaded.find_chip(job.chip) is None:
        chips = ", ".join(chip.name for chip in plugin.own_chips())
        yield Problem(f"{where}: cluster.chip = {job.chip!r} is unknown", f"name one of {chips}")


@check("give measured.step_time_s in seconds, and the number of devices of the whole job", each=_runs)
def published_times_are_plausible(
    plugin: Subject, where: str, job: Job | FlagError, measured: dict[str, object]
) -> Problems:
    seconds = measured.get("step_time_s")
    if isinstance(job, FlagError) or isinstance(job.work, ServeSpec):
        return
    if not isinstance(seconds, int | float) or seconds <= 0:
        yield f"{where}: measured.step_time_s = {seconds!r} is no time"
        return
    chip = plugin.loaded.find_chip(job.chip)
    peak = chip.dense_flops_per_second.get(PEAKS.get(job.work.precision, job.work.precision)) if chip else None
    if peak and not job.model.num_moe_experts:
        model, tokens = job.model, job.work.global_batch_size * job.work.seq_length
        layer = 2 * model.hidden_size * (model.hidden_size + model.num_query_groups * model.kv_channels)
        layer += 3 * model.hidden_size * model.ffn_hidden_size
        flops = 6.0 * tokens * (model.num_layers * layer + model.hidden_size * model.vocab_size)
        share = flops / (seconds * job.devices * peak.value)
        if not UTILIZATION[0] <= share <= UTILIZATION[1]:
            yield f"{where}: measured.step_time_s = {seconds:g} is {share:.2g} of the peak of {job.devices} devices"
