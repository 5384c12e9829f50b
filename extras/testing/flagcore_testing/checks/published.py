"""Checks of the published runs that a plugin ships."""

import re
from math import prod

from flagcore import plugins
from flagcore.domain.spec import JobRecord
from flagcore.errors import FlagError
from flagcore.spec.jobs import read_job
from flagcore_testing.kit import Problem, Problems, Subject, check, need, once, repeated, wrong

PEAKS = {"mxfp8": "fp8", "nvfp4": "fp4"}
"""The peaks of formats with another name."""
UTILIZATION, OF_EXPERTS = (0.08, 0.95), (0.02, 0.95)
"""Range of the share of the peak that a published run reaches, from the flops of its matrix products, and of one of a
mixture of experts. 0.06 to 0.74 are known."""
ADDRESS = re.compile(r"^https?://[\w.-]+\.\w+")
DEVICES = ("devices", "devices_per_node")
DEGREES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


Run = tuple[Subject, str, JobRecord | FlagError, dict[str, object]]


@once
def _runs(plugin: Subject) -> list[Run]:
    """Return each published run: its name in messages, the job or why it cannot be read, and the measurements."""
    plugin.implements("flagcore_published_runs")
    runs = list[Run]()
    for record in plugin.loaded.published_runs():
        where, measured = f"published.jsonl: {record.get('id')!r}", record.get("measured")
        try:
            job: JobRecord | FlagError = read_job(record, plugins.engines())
        except FlagError as error:
            job = error
        runs.append((plugin, where, job, dict(measured) if isinstance(measured, dict) else {}))
    return need(runs, "the plugin has no published runs")


@check("correct that key; docs/load.md describes job records", each=_runs)
def published_runs_are_job_records(
    plugin: Subject, where: str, job: JobRecord | FlagError, measured: dict[str, object]
) -> Problems:
    if isinstance(job, FlagError):
        yield f"{where}: {job}"
    elif plugin.loaded.find_chip(job.chip) is None:
        chips = ", ".join(chip.name for chip in plugin.own_chips())
        yield Problem(f"{where}: cluster.chip = {job.chip!r} is unknown", f"name one of {chips}")


@check("give measured.step_time_s in seconds, and the number of devices of the whole job", each=_runs)
def published_times_are_plausible(
    plugin: Subject, where: str, job: JobRecord | FlagError, measured: dict[str, object]
) -> Problems:
    seconds = measured.get("step_time_s")
    if isinstance(job, FlagError) or not job.work.has_steps:
        return
    if not isinstance(seconds, int | float) or seconds <= 0:
        yield f"{where}: measured.step_time_s = {seconds!r} is no time"
        return
    chip = plugin.loaded.find_chip(job.chip)
    peak = chip.dense_flops_per_second.get(PEAKS.get(job.work.precision, job.work.precision)) if chip else None
    if peak and job.work.kind == "train":  # other kinds do more than train
        model, tokens = job.model, job.work.step_tokens
        low, high = OF_EXPERTS if model.experts else UTILIZATION
        width = model.ffn_hidden_size
        if model.experts:
            width = (model.moe_ffn_hidden_size or width) * (model.moe_router_topk or 1)
        layer = 2 * model.hidden_size * (model.hidden_size + model.num_query_groups * model.kv_channels)
        layer += 3 * model.hidden_size * width
        flops = 6.0 * tokens * (model.num_layers * layer + model.hidden_size * model.vocab_size)
        share = flops / (seconds * job.devices * peak.value)
        if not low <= share <= high:
            yield f"{where}: measured.step_time_s = {seconds:g} is {share:.2g} of the peak of {job.devices} devices"


@check()
def published_runs_can_be_found(plugin: Subject) -> Problems:
    plugin.implements("flagcore_published_runs")
    records = plugin.loaded.published_runs()
    for name, times in repeated(str(each.get("id")) for each in records):
        yield Problem(f"published.jsonl: {times} lines have the id {name!r}", "give each run its own id")
    for each in records:
        parts = (each.get("cluster"), each.get("candidate"))
        cluster, candidate = (part if isinstance(part, dict) else {} for part in parts)
        devices, node = (found if isinstance(found := cluster.get(key), int) else 0 for key in DEVICES)
        degrees = prod(degree for name in DEGREES if isinstance(degree := candidate.get(name, 1), int))
        shown = f"cluster.devices = {devices} is no multiple of"
        yield from wrong(
            (not ADDRESS.match(str(each.get("source", ""))), f"source = {each.get('source')!r}",
             "let it begin with the address of the publication: https://..."),
            (degrees and devices % degrees, f"{shown} the parallel sizes, {degrees}",
             "correct one of them: the rest is data parallel"),
            (devices > node > 0 and devices % node, f"{shown} devices_per_node = {node}",
             "count all devices of the job"),
            where=f"published.jsonl: {each.get('id')!r}: ",
        )  # fmt: skip
