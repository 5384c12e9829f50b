"""The cheapest change with which a job fits, or uses far more of its devices."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from flagcore.api.inputs import loaded_plugins
from flagcore.contracts import Problem, Workload
from flagcore.domain.serving import ServeSpec
from flagcore.domain.spec import Spec
from flagcore.errors import FlagError
from flagcore.i18n import _
from flagcore.report.explanation import part_name
from flagcore.report.formats import size_text
from flagcore.tuner.problem import build_problem, rows_by_time
from flagcore.tuner.stages.predict import record

DOUBLINGS = 4
"""How often the number of nodes is doubled."""


def cheapest_change(problem: Problem, without: Collection[str]) -> str:
    """Return the first change with which a candidate is left: other knobs, then more devices or nodes.

    Empty if none of them helps and candidates fit, because then rules remove them.
    """
    task = problem.task
    changes = _changes_to_fit(task.spec, task.cluster.groups[0].chip.devices_per_node)
    for change, changed, first in _fastest_of_each(changes, problem.workload, without):
        candidate = changed.set_knobs(changed.space.candidate(first))
        return _("with {change}, this candidate fits: {candidate}", change=change, candidate=candidate)
    if problem.predictions.fits.any():  # rules are the reason
        return ""
    nodes = task.cluster.groups[0].nodes << DOUBLINGS
    return _("neither other knobs nor up to {nodes} nodes help: use a chip with more memory", nodes=nodes)


def _fastest_of_each(
    changes: Iterable[tuple[str, Spec]], workload: Workload, without: Collection[str]
) -> Iterator[tuple[str, Problem, int]]:
    """Yield the change, the problem and the first row by time of each changed spec with a candidate."""
    with loaded_plugins(without) as loaded:
        for change, spec in changes:
            try:
                changed = build_problem(spec, loaded, workload, plan=True)
            except FlagError:
                continue
            if changed.pruned.open_rows.size:
                yield change, changed, int(rows_by_time(changed)[0])


def _changes_to_fit(spec: Spec, most: int) -> Iterator[tuple[str, Spec]]:
    """Yield descriptions of changes and the changed specs, the cheapest first.

    `most` is the number of devices of a whole node.
    """
    work = replace(spec.work, default_space=True) if isinstance(spec.work, ServeSpec) else spec.work
    widest = replace(spec, space={}, baseline=None, work=work)
    if spec.space:
        yield _("all knobs in the space"), widest
    if spec.cluster.groups:
        return
    devices = spec.cluster.devices_per_node or most
    while (devices := 2 * devices) <= most and spec.cluster.nodes == 1:
        cluster = replace(spec.cluster, devices_per_node=devices)
        yield _("cluster.devices_per_node = {devices}", devices=devices), replace(widest, cluster=cluster)
    for doubling in range(1, DOUBLINGS + 1):
        nodes = spec.cluster.nodes << doubling
        cluster = replace(spec.cluster, nodes=nodes, hosts=())
        yield _("cluster.nodes = {nodes}", nodes=nodes), replace(widest, cluster=cluster)


USUAL_MFU = (0.38, 0.43)
"""The range of MFU that a large pretraining job reports: Llama 3 in bf16, https://arxiv.org/abs/2407.21783, table 4."""
PRECISIONS = ("bf16", "fp16")
"""The precisions of that range. In fp8, the peak is twice as high, and the MFU is lower."""
FAR_BELOW = 0.5
"""The share of the lower end below which a job is far below. Chosen."""
LARGE = 1e9
"""Minimum number of parameters for the comparison. Chosen; kernels of smaller models use less of a device."""
MIN_PART = 0.05
"""Minimum share of a listed part of a step."""
MAX_BATCH_DOUBLINGS = 3
"""How often the global batch size is doubled."""
WORTH = 1.1
"""Minimum factor on the MFU of a change worth naming."""


def bottleneck_text(predicted: Mapping[str, Any]) -> str:
    """Return what limits a predicted training step, with its share; empty without a time."""
    name, time = predicted.get("limit"), predicted.get("time") or {}
    memory, total = predicted["memory"], sum(time.values())
    if name == "memory":
        used, capacity = size_text(memory["device_used_gib"]), size_text(memory.get("capacity_gib"))
        return _("Bottleneck: memory, ~{used} of {capacity}.", used=used, capacity=capacity)
    seconds = next((value for part, value in time.items() if part_name(part) == name), None)
    if seconds is None or not total:
        return ""
    return _("Bottleneck: {limit}, ~{share:.0%} of a step.", limit=_(str(name)), share=seconds / total)


def mfu_warning(problem: Problem, without: Collection[str], predicted: Mapping[str, Any], params: float) -> str:
    """Return a warning if the MFU of a prediction is far below that of large jobs, why, and the cheapest change.

    Empty for servers, small models, other precisions, and if the MFU is unknown.
    """
    spec, mfu = problem.task.spec, predicted.get("mfu")
    if isinstance(spec.work, ServeSpec) or mfu is None or params < LARGE or spec.train.precision not in PRECISIONS:
        return ""
    if mfu >= FAR_BELOW * USUAL_MFU[0]:
        return ""
    low, high = USUAL_MFU
    text = _("MFU ~{mfu:.1%} is far below the {low:.0%} to {high:.0%} of large jobs.", mfu=mfu, low=low, high=high)
    return " ".join(filter(None, [text, _why(predicted), _cheapest_speedup(problem, without, mfu)]))


def _why(predicted: Mapping[str, Any]) -> str:
    """Return the largest parts of a step besides compute, or that its kernels are slow."""
    time, step = predicted["time"], sum(predicted["time"].values())
    parts = sorted((part for part in time if part != "compute_s"), key=lambda part: -time[part])
    large = [part for part in parts[:3] if time[part] > MIN_PART * step]
    shares = ", ".join(f"{_(part_name(part))} {time[part] / step:.0%}" for part in large)
    compute_mfu = predicted["mfu"] * step / time["compute_s"] if time.get("compute_s") else 0.0
    if shares and compute_mfu >= FAR_BELOW * USUAL_MFU[0]:
        return _("The step has {parts}.", parts=shares)
    kernels = _("Its kernels alone reach {mfu:.1%}: they are small, or limited by memory bandwidth.", mfu=compute_mfu)
    return kernels + (" " + _("The step has {parts}.", parts=shares) if shares else "")


def _cheapest_speedup(problem: Problem, without: Collection[str], mfu: float) -> str:
    for change, changed, first in _fastest_of_each(_changes_of_batch(problem.task.spec), problem.workload, without):
        found: Any = record(changed.task, changed.predictions.row(first))
        if found.get("mfu", 0.0) >= WORTH * mfu:
            return _("Cheapest change: {change}, ~{mfu:.1%}.", change=change, mfu=found["mfu"])
    return ""


def _changes_of_batch(spec: Spec) -> Iterator[tuple[str, Spec]]:
    """Yield descriptions of changes that need no other hardware, and the changed specs."""
    if spec.space:
        yield _("all knobs in the space"), replace(spec, space={}, baseline=None)
    for doubling in range(1, MAX_BATCH_DOUBLINGS + 1):
        batch = spec.train.global_batch_size << doubling
        yield f"train.global_batch_size = {batch}", replace(spec, work=replace(spec.train, global_batch_size=batch))
