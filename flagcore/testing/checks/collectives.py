"""Collectives: their time and their share of the compute."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from flagcore.contracts import CollectiveCosts
from flagcore.domain.chip import Chip
from flagcore.physics.collectives.curves import CollectiveTable, problem
from flagcore.physics.collectives.model import KINDS
from flagcore.testing.problem import Problem
from flagcore.testing.subject import Subject

PAYLOADS = np.exp2(np.arange(10, 30)).astype(np.float64)
ONES = np.ones(20, dtype=np.int64)
MEASURED = 1.1
MINIMUM_SHARE = 0.5
"""Minimum share of the best bandwidth for the largest message; 0.58 was measured with copies through the host."""
OVER_LINK = 1.25
"""Tolerance of a measured collective above the rate of its link."""


def collective_costs_are_valid(plugin: Subject) -> Iterator[Problem]:
    plugin.implements("flagcore_collective_costs")
    for group in plugin.groups():
        plugin.loaded.collective_costs(group, "megatron")
    yield from plugin.problems_of("flagcore_collective_costs")


def collective_times_grow_with_payload(plugin: Subject) -> Iterator[Problem]:
    for chip, costs in _costs(plugin):
        for kind in KINDS:
            if not (np.diff(costs.seconds(kind, PAYLOADS, 2 * ONES, ONES)) >= 0).all():
                yield Problem(
                    f"{chip.name}: a larger {kind} of two devices is predicted to take less time",
                    "check the times (in seconds) in costs/*/collectives.yaml",
                )


def measured_bandwidth_does_not_fall(plugin: Subject) -> Iterator[Problem]:
    for chip, table in _tables(plugin):
        for curve in table.curves:
            rates = [size / time for size, time in zip(curve.payload_bytes, curve.seconds, strict=True)]
            if rates[-1] < MINIMUM_SHARE * max(rates):
                yield Problem(
                    f"{chip.name}: the curve of {curve.kind} of {curve.ranks} falls from {max(rates):.3g} to "
                    f"{rates[-1]:.3g} bytes a second at its last point, from which larger payloads are extrapolated",
                    "check its last seconds and payload_bytes; leave out a disturbed point",
                )


def measured_curves_do_not_exceed_the_link(plugin: Subject) -> Iterator[Problem]:
    for chip, table in _tables(plugin):
        if chip.link is None or table.level:
            continue
        for curve in table.curves:
            sent = (curve.ranks - 1) / curve.ranks if curve.kind != "send" else 1.0
            rate = sent * max(size / time for size, time in zip(curve.payload_bytes, curve.seconds, strict=True))
            link = chip.link.bytes_per_second.value
            if rate > OVER_LINK * link:
                yield Problem(
                    f"{chip.name}: in the curve of {curve.kind} of {curve.ranks} a device sends {rate:.3g} "
                    f"bytes a second, above link.bytes_per_second = {link:.3g}",
                    "give seconds and the payload of the whole tensor in bytes, or correct the rate of the link",
                )


def single_device_collectives_are_free(plugin: Subject) -> Iterator[Problem]:
    for chip, costs in _costs(plugin):
        if (costs.seconds("all_reduce", PAYLOADS, ONES, ONES) != 0).any() or (
            costs.compute_share(ONES, ONES) != 0
        ).any():
            yield Problem(
                f"{chip.name}: a collective of one device takes time, or compute", "return 0 where ranks is 1"
            )


def collectives_leave_compute_for_kernels(plugin: Subject) -> Iterator[Problem]:
    for chip, costs in _costs(plugin):
        taken = costs.compute_share(2 * ONES, ONES)
        if not ((taken >= 0) & (taken < 1)).all():
            yield Problem(f"{chip.name}: compute_share is not 0 to 1", "give a share of the device's compute")


def messages_do_not_exceed_memory_bandwidth(plugin: Subject) -> Iterator[Problem]:
    for chip, costs in _costs(plugin):
        rate = chip.memory_bandwidth_bytes_per_second
        seconds = costs.seconds("send", PAYLOADS[-1:], 2 * ONES[:1], ONES[:1])
        if rate is not None and PAYLOADS[-1] / seconds[0] > MEASURED * rate.value:
            yield Problem(
                f"{chip.name}: a message of {PAYLOADS[-1]:g} bytes takes {seconds[0]:g} s",
                "give seconds and the payload of the whole tensor in bytes in costs/*/collectives.yaml",
            )


def _tables(plugin: Subject) -> list[tuple[Chip, CollectiveTable]]:
    """Return the measured curves. Raises Skip without usable ones."""
    _costs(plugin)

    def table(chip: Chip) -> CollectiveTable | None:
        about = {"group": plugin.group(chip), "engine": "megatron"}
        answer = plugin.ask("flagcore_collective_costs", about)
        good = isinstance(answer, CollectiveTable) and not problem(answer)
        return answer if good and isinstance(answer, CollectiveTable) else None

    return plugin.each("flagcore_collective_costs", table)


def _costs(plugin: Subject) -> list[tuple[Chip, CollectiveCosts]]:
    return plugin.each(
        "flagcore_collective_costs", lambda chip: plugin.loaded.collective_costs(plugin.group(chip), "megatron")
    )
