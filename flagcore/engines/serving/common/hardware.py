"""Where a task's servers run: how many devices, what memory, and whether these are the machine's own cores."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import numpy as np

from flagcore.domain.serving import Load
from flagcore.domain.space import Columns, IntArray
from flagcore.domain.spec import Task
from flagcore.errors import SpecError

CORES = "cores"
"""Column of the cores of one instance where instances are not equal; 0 where they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """`cards` are the devices that a candidate may use, `memory_bytes` is that of one, NaN if nobody knows it.

    `on_cores` says that devices are cores of the machine: they share its memory, and an instance is pinned to some.
    `fp8` says that a peak rate in fp8 is known of the chip.
    """

    cards: int
    on_cores: bool
    memory_bytes: float
    fp8: bool

    @classmethod
    def of(cls, task: Task) -> Hardware:
        """Return the place of a task, from the facts about its first chip. Raises SpecError for too many cards."""
        group, wanted = task.cluster.groups[0], task.spec.serve.cards
        if wanted is not None and wanted > task.cluster.devices:
            problem = f"is more than the {task.cluster.devices} devices of the cluster"
            fix = f"use {task.cluster.devices} at the most, or name a larger cluster"
            raise SpecError(key="auto_tuner.cards", value=wanted, problem=problem, fix=fix)
        chip = group.chip
        known = group.memory_bytes or (chip.memory_bytes.value if chip.memory_bytes else math.nan)
        return cls(
            cards=wanted or task.cluster.devices,
            on_cores=chip.link is not None and chip.link.topology == "shared-memory",
            memory_bytes=float(known),
            fp8="fp8" in chip.dense_flops_per_second,
        )

    def cores(self, first: int, count: int) -> tuple[int, ...]:
        """Return `count` of the cores that this process may use, from number `first` on.

        None where devices are not cores. Where the process may use fewer, the last of these stand in.
        """
        if not self.on_cores:
            return ()
        usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        return tuple(usable[first : first + count]) or tuple(usable[-count:])

    def share(self, instances: IntArray, columns: Columns) -> IntArray:
        """Return the cores of one instance: an even share, or those of `CORES`."""
        even: IntArray = np.maximum(self.cards // np.maximum(instances, 1), 1)
        return np.where(columns[CORES] > 0, columns[CORES], even) if CORES in columns else even


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
