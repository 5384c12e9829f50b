"""Memory models: from allocated memory to what the device reports."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flagcore.contracts import MemoryModel
from flagcore.domain.chip import Chip
from flagcore.plugins import workload
from flagcore.stages.discover import costs as costs_of
from flagcore.testing.examples import group_of
from flagcore.testing.kit import Problems, check
from flagcore.testing.subject import Subject

LEAST_BYTES = 2**20
"""Less is a figure in MiB or GiB."""
IDLE_SHARE = 0.25
"""Maximum share of a device's memory for context, libraries and collective buffers."""


def _models(plugin: Subject) -> list[tuple[Chip, MemoryModel]]:
    return plugin.each("flagcore_memory_model", lambda chip: plugin.loaded.memory_model(group_of(chip), "megatron"))


@check("add to the argument, or multiply by at least 1", each=_models)
def memory_use_grows_with_allocation(chip: Chip, model: MemoryModel) -> Problems:
    allocated = np.linspace(0, 2.0**37, 200)
    reserved = model.reserved_bytes(allocated)
    used = model.device_used_bytes(reserved)
    for method, argument, answer in (("reserved_bytes", allocated, reserved), ("device_used_bytes", reserved, used)):
        if not ((answer >= argument).all() and (np.diff(answer) >= 0).all()):
            yield f"{chip.name}: {method} of the memory model returns less than its argument, or falls as that grows"


@check("use group.memory_bytes if it is set, else the chip's memory_bytes")
def memory_budget_is_respected(plugin: Subject) -> Problems:
    for chip, _ in _models(plugin):
        model = plugin.loaded.memory_model(replace(group_of(chip), memory_bytes=10**9), "megatron")
        capacity = model.capacity_bytes() if model else None
        if capacity is None or capacity > 10**9:
            yield f"{chip.name}: capacity_bytes() is {capacity} with a user's budget of 1e9"


@check("use the bytes that the driver reports; GiB and GB differ", each=_models)
def capacity_is_at_most_chip_memory(chip: Chip, model: MemoryModel) -> Problems:
    capacity = model.capacity_bytes()
    if chip.memory_bytes and capacity is not None and capacity > chip.memory_bytes.value:
        yield f"{chip.name}: capacity_bytes() is {capacity:g}, memory_bytes {chip.memory_bytes.value:g}"


@check("context, libraries and collective buffers take hundreds of MiB to a few GiB: give bytes", each=_models)
def idle_memory_is_small(chip: Chip, model: MemoryModel) -> Problems:
    used = float(model.device_used_bytes(np.zeros(1))[0])
    most = IDLE_SHARE * (chip.memory_bytes.value if chip.memory_bytes else 2**35)
    if used != 0 and not LEAST_BYTES <= used <= most:
        yield f"{chip.name}: device_used_bytes(0) = {used:g}"


@check("it is a few MiB: give bytes", each=_models)
def workspace_is_in_bytes(chip: Chip, model: MemoryModel) -> Problems:
    if not 0 <= model.workspace_bytes() <= 2**32:
        yield f"{chip.name}: workspace_bytes() = {model.workspace_bytes():g}"


@check("find the part of the memory model that shrinks as its argument grows")
def larger_micro_batches_need_more_memory(plugin: Subject) -> Problems:
    engine = workload("megatron")
    for task in plugin.tasks():
        made = costs_of(task.cluster, plugin.loaded, "megatron")
        rows = [engine.columns(task, {"micro_batch_size": 2**power}) for power in range(4)]
        columns = {knob: np.concatenate([row[knob] for row in rows]) for knob in rows[0]}
        if not (np.diff(engine.predict(task, columns, made).device_used_bytes) >= 0).all():
            yield f"{task.cluster.chips}: a larger micro_batch_size is predicted to need less memory"
