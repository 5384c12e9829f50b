"""What devices show in use at a step's peak, and whether it fits: of each stage on the device where it lies."""

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
    """Bytes of the worst stage of each candidate: tensors, what the allocator holds, what the device shows in use, and
    what it has: one figure for all, one a candidate where devices differ; None or NaN where nobody knows.
    """

    memory: Memory
    reserved: FloatArray
    used: FloatArray
    capacity: FloatArray | float | None


def memory_in_use(train: Training, layout: Layout, costs: Costs) -> InUse:
    """Return the memory of the worst stage: the one that needs most or, on devices of several kinds, has least room.

    Room is told by the share of its device's capacity that a stage uses. A stage whose capacity nobody knows is the
    worst unless another outgrows its own, so that nothing is said to fit which may not.
    """
    if len(costs.groups) == 1:
        memory = training_memory(train, layout, costs.memory.workspace_bytes())
        reserved = costs.memory.reserved_bytes(memory.peak)
        used = costs.memory.device_used_bytes(reserved)
        return InUse(memory=memory, reserved=reserved, used=used, capacity=costs.memory.capacity_bytes())
    place, models = Placement.of(layout, costs), [each.memory for each in costs.groups]
    places = stages(train.model, layout, train.options, place.starts)
    wanted = [np.array(model.workspace_bytes()) for model in models]
    found = stage_memories(train, layout, places, [place.pick(where.index, wanted) for where in places])
    has = [np.array(np.nan if (known := model.capacity_bytes()) is None else known) for model in models]
    reserved_by, used_by, capacity_by = [], [], []
    for where, memory in zip(places, found, strict=True):
        held = [model.reserved_bytes(memory.peak) for model in models]
        shown = [model.device_used_bytes(each) for model, each in zip(models, held, strict=True)]
        reserved_by.append(place.pick(where.index, held))
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
