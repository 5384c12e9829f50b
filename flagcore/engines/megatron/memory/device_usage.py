"""Device memory in use at the peak of a step, for each stage on its own kind of device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flagcore.contracts import Costs
from flagcore.domain.space import FloatArray
from flagcore.engines.megatron.memory.training import Memory, of_stage, stage_memories, training_memory
from flagcore.engines.megatron.parallel.layout import Layout, Training, pick
from flagcore.engines.megatron.parallel.pipeline import stages
from flagcore.engines.megatron.parallel.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class InUse:
    """Bytes of the worst stage of each candidate: tensors, reserved by the allocator, in use on the device, and its
    capacity: one figure for all, one per candidate if devices differ, None or NaN if unknown.
    """

    memory: Memory
    reserved: FloatArray
    used: FloatArray
    capacity: FloatArray | float | None


def memory_in_use(train: Training, layout: Layout, costs: Costs) -> InUse:
    """Return the memory of the worst stage: the one that needs most or, on devices of several kinds, has least room.

    Stages are compared by the share of their device's capacity. A stage of unknown capacity is the worst unless another
    exceeds its own, so that nothing is reported to fit which may not.
    """
    if len(costs.groups) == 1:
        memory = training_memory(train, layout, costs.memory.workspace_bytes())
        reserved = costs.memory.reserved_bytes(memory.peak)
        used = costs.memory.device_used_bytes(reserved)
        return InUse(memory=memory, reserved=reserved, used=used, capacity=costs.memory.capacity_bytes())
    place, models = Placement.of(layout, costs), [each.memory for each in costs.groups]
    places = stages(train.model, layout, train.options, place.starts)
    capacities = [np.array(model.workspace_bytes()) for model in models]
    found = stage_memories(train, layout, places, [place.pick(where.index, capacities) for where in places])
    has = [np.array(np.nan if (known := model.capacity_bytes()) is None else known) for model in models]
    reserved_by, used_by, capacity_by = [], [], []
    for where, memory in zip(places, found, strict=True):
        reserved_each = [model.reserved_bytes(memory.peak) for model in models]
        shown = [model.device_used_bytes(each) for model, each in zip(models, reserved_each, strict=True)]
        reserved_by.append(place.pick(where.index, reserved_each))
        used_by.append(place.pick(where.index, shown))
        capacity_by.append(place.pick(where.index, has))
    share = np.stack(used_by) / np.stack(capacity_by)
    worst = np.argmax(np.where(np.isnan(share), 1.0, share), axis=0)
    return InUse(
        memory=of_stage(worst, found),
        reserved=pick(worst, reserved_by),
        used=pick(worst, used_by),
        capacity=pick(worst, capacity_by),
    )
