"""Warnings about a search problem, and how they reach the user."""

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

from flagcore.contracts import Problem
from flagcore.domain.chip import ASSUMED_NETWORK, MUCH_SLOWER, TRAINED, Support, slowness
from flagcore.domain.cluster import NodeGroup
from flagcore.domain.secrets import redact_data
from flagcore.domain.spec import AUTO, PRECISIONS, Task
from flagcore.i18n import N_, _, printable
from flagcore.physics.roofline import RUNS_AS
from flagcore.spec.models import model_from, public_name
from flagcore.tuner.problem import recommended_row

DEVICE_KNOBS = ("instances", "tensor_model_parallel_size", "pipeline_model_parallel_size")
"""The knobs that increase the number of devices of a server. Warnings advise them."""
LOG = logging.getLogger("flagcore")


def warn_about_problem(problem: Problem) -> None:
    """Warn about everything in a search problem that the user may want to change.

    The warnings are about engines that are untested on the chip, devices that no candidate or not the fastest one uses,
    a slow precision, environment variables that differ from the plugins', and settings without effect.
    """
    support, task, engine = problem.platform.support, problem.task, problem.engine
    name, lines = task.spec.work.engine, list[object]()
    unknown = support.reason if support.support is Support.UNKNOWN else ""
    if reasons := [reason for reason in (unknown, engine.untested) if reason]:
        names = {"engine": name, "chip": task.cluster.chips, "reason": "; ".join(map(_, reasons))}
        lines.append(_("{engine} on {chip}: untested; {reason}", **names))
    lines += [problem.platform.precision_reason] if task.spec.work.precision != TRAINED[0] else []
    warn([*filter(None, lines), *_idle_devices(problem), *_task_notes(task), *problem.platform.conflicts])
    warn(problem.platform.unmodelled)
    warn(engine.warnings(task))


def _task_notes(task: Task) -> Iterator[str]:
    """Yield notes on the shape of a public model that a similar name or path has, and on chips: names of families,
    assumed networks, estimated links, and precisions that are slow.

    A precision is slow if matrix products of a training job are much slower in it than in fp32.
    """
    name = task.spec.model.name
    public = public_name(name)
    if public and public.lower() != name.lower() and model_from(name, base=Path()) == task.spec.model:
        yield _("model {name} is not a file or folder: the shape of {public} is used", name=name, public=public)
    sections = task.spec.cluster.groups or (task.spec.cluster,)
    for section, group in zip(sections, task.cluster.groups, strict=False):
        if section.chip != AUTO and not group.chip.has_name(section.chip):
            text = N_("chip {name} means {chip}; name another variant by its own name")
            yield _(text, name=section.chip, chip=group.chip.name)
    for group in {group.chip.name: group for group in task.cluster.groups}.values():
        yield from _chip_notes(task, group)


def _chip_notes(task: Task, group: NodeGroup) -> Iterator[str]:
    chip, work, precision = group.chip, task.spec.work, task.spec.work.computes_in
    if chip.nic_bytes_per_second == ASSUMED_NETWORK:
        text = N_(
            "the network bandwidth between hosts of {chip} is unknown: {rate:.0f} GB/s per device is assumed; "
            "set {key} to its value"
        )
        key = f"cluster.{'groups.' if task.spec.cluster.groups else ''}nic_bytes_per_second"
        yield _(text, chip=chip.name, rate=ASSUMED_NETWORK.value / 1e9, key=key)
    stored, rates = "" if precision else work.precision, chip.dense_flops_per_second
    if stored in PRECISIONS and rates and RUNS_AS.get(stored, stored) not in rates:
        text = N_(
            "{chip} has no {precision} units: {engine} is assumed to convert the weights in each product, which "
            "saves memory, but no compute"
        )
        yield _(text, chip=chip.name, precision=stored, engine=work.engine)
    link = chip.figures.get("link.bytes_per_second") if group.devices_per_node > 1 else None
    if link and link.source.kind == "estimated":
        text = N_("the bandwidth between devices of {chip} is estimated: {rate:.3g} GB/s ({source})")
        yield _(text, chip=chip.name, rate=link.value / 1e9, source=link.source.detail)
    if (ratio := slowness(chip, precision)) >= MUCH_SLOWER:
        text = N_("products in {precision} are {ratio} times slower than in fp32 on {chip}: set train.precision: auto")
        yield _(text, precision=precision, ratio=f"{ratio:.2g}", chip=chip.name)


def _idle_devices(problem: Problem) -> list[str]:
    """Return a warning if no candidate of a server uses all devices that a trial may use.

    If all are used by some candidate, but not by the recommended one, return a warning about that.
    """
    work, task, rows = problem.platform.task.spec.work, problem.platform.task, problem.pruned.open_rows
    columns = problem.space.columns(rows) if rows.size else problem.space.columns()
    if work.has_steps or work.only_best or not len(problem.space):  # `flag size` counts those in use
        return []
    used = problem.engine.device_counts(task.for_engine(), columns)
    usable_count = work.cards or task.cluster.devices
    if (max_used := int(used.max())) < usable_count:
        text = _("candidates use at most {most} of {usable} devices; ", most=max_used, usable=usable_count)
        listed = [name for name in DEVICE_KNOBS if name in problem.knobs and task.spec.space.get(name) != AUTO]
        change = _("set {knobs} to auto in auto_tuner.space, or ", knobs=", ".join(listed)) if listed else ""
        return [text + change + _("set auto_tuner.cards: {most}", most=max_used)]
    first = recommended_row(problem)
    of_plan = usable_count if first is None else int(used[rows == first][0])
    text = _("the recommended candidate uses {used} of {usable} devices", used=of_plan, usable=usable_count)
    return [text] if of_plan < usable_count else []


def warn(texts: Iterable[object]) -> None:
    """Log each of `texts` without secrets as a warning."""
    for text in texts:
        LOG.warning("%s", printable(str(redact_data(text))))
