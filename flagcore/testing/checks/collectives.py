"""Collectives: what they take, of time and of the compute beside them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from flagcore.contracts import CollectiveCosts
from flagcore.domain.chip import Chip
from flagcore.physics.collectives.model import KINDS
from flagcore.testing.kit import Problem
from flagcore.testing.subject import Subject

PAYLOADS = np.exp2(np.arange(10, 30)).astype(np.float64)
ONES = np.ones(20, dtype=np.int64)
MEASURED = 1.1


def collectives_are_answered_as_their_hook_promises(plugin: Subject) -> Iterator[Problem]:
    plugin.implements("flagcore_collective_costs")
    for group in plugin.groups():
        plugin.loaded.collective_costs(group, "megatron")
    yield from plugin.told("flagcore_collective_costs")


def collective_times_grow_with_the_payload(plugin: Subject) -> Iterator[Problem]:
    for chip, costs in _costs(plugin):
        for kind in KINDS:
            if not (np.diff(costs.seconds(kind, PAYLOADS, 2 * ONES, ONES)) >= 0).all():
                yield Problem(
                    message=f"{chip.name}: a larger {kind} of two devices is predicted to take less time",
                    fix="look for a wrong time (in seconds) in costs/*/collectives.yaml",
                )


def a_collective_of_one_device_is_free(plugin: Subject) -> Iterator[Problem]:
    for chip, costs in _costs(plugin):
        if (costs.seconds("all_reduce", PAYLOADS, ONES, ONES) != 0).any() or (
            costs.compute_taken(ONES, ONES) != 0
        ).any():
            yield Problem(
                message=f"{chip.name}: a collective of one device takes time, or compute",
                fix="answer 0 where ranks is 1",
            )


def collectives_leave_kernels_a_share_of_the_compute(plugin: Subject) -> Iterator[Problem]:
    for chip, costs in _costs(plugin):
        taken = costs.compute_taken(2 * ONES, ONES)
        if not ((taken >= 0) & (taken < 1)).all():
            yield Problem(
                message=f"{chip.name}: compute_taken is not 0 to 1", fix="give a share of the device's compute"
            )


def no_message_is_faster_than_the_memory_of_the_devices(plugin: Subject) -> Iterator[Problem]:
    for chip, costs in _costs(plugin):
        rate = chip.memory_bandwidth_bytes_per_second
        seconds = costs.seconds("send", PAYLOADS[-1:], 2 * ONES[:1], ONES[:1])
        if rate is not None and PAYLOADS[-1] / seconds[0] > MEASURED * rate.value:
            yield Problem(
                message=f"{chip.name}: a message of {PAYLOADS[-1]:g} bytes takes {seconds[0]:g} s",
                fix="give seconds, and the payload of the whole tensor in bytes, in costs/*/collectives.yaml",
            )


def _costs(plugin: Subject) -> list[tuple[Chip, CollectiveCosts]]:
    return plugin.each(
        "flagcore_collective_costs", lambda chip: plugin.loaded.collective_costs(plugin.group(chip), "megatron")
    )
