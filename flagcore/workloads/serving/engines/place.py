"""Where a task's servers run: how many devices, what memory, and whether these are the machine's own cores."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from flagcore.domain.serving import Load
from flagcore.domain.spec import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """`cards` are the devices that a candidate may use, `memory_bytes` is that of one, NaN if nobody knows it.

    `on_cores` says that devices are cores of the machine: they share its memory, and an instance is pinned to some.
    `fp8` says that a peak rate in fp8 is known of the chip.
    """

    cards: int
    on_cores: bool
    memory_bytes: float
    fp8: bool

    @classmethod
    def of(cls, task: Task) -> Place:
        """Return the place of a task, from the facts about its first chip."""
        group, wanted = task.cluster.groups[0], task.spec.serve.cards
        chip = group.chip
        known = group.memory_bytes or (chip.memory_bytes.value if chip.memory_bytes else math.nan)
        return cls(
            cards=min(wanted or task.cluster.devices, task.cluster.devices),
            on_cores=chip.link is not None and chip.link.topology == "shared-memory",
            memory_bytes=float(known),
            fp8="fp8" in chip.dense_flops_per_second,
        )

    def cores(self, instances: int, index: int) -> tuple[int, ...]:
        """Return the cores of one of several instances: an equal share of those that this process may use."""
        if not self.on_cores:
            return ()
        usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        share = max(1, self.cards // instances)
        return tuple(usable[index * share : (index + 1) * share]) or tuple(usable)


def longest(loads: tuple[Load, ...]) -> int:
    """Return the tokens of the longest request of all loads, prompt and answer; those of a trace are not known here."""
    return max((_longest(load) for load in loads), default=1)


def _longest(load: Load) -> int:
    spread = load.range_spread or 0.0
    return load.prefix_len + sum(
        length + math.ceil(round(length * spread, 6)) for length in (load.input_len, load.output_len)
    )


def most_in_flight(loads: tuple[Load, ...]) -> int:
    """Return how many requests the heaviest load may have in flight: its concurrency, or all of an open loop."""
    return max((load.concurrency or load.num_prompts or 1 for load in loads), default=1)
