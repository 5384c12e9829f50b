"""Topologies and collectives: communication levels, times, and the share of compute that collectives use."""

from __future__ import annotations

import numpy as np

from flagcore.contracts import CollectiveCosts
from flagcore.domain.chip import Chip, with_network
from flagcore.domain.cluster import NodeGroup
from flagcore.physics.collectives.curves import CollectiveTable, Curve
from flagcore.physics.collectives.model import KINDS
from flagcore.physics.collectives.topology import topology_of
from flagcore.testing.examples import group_of
from flagcore.testing.kit import Problems, Subject, check

PAYLOADS = np.exp2(np.arange(10, 30)).astype(np.float64)
ONES = np.ones(20, dtype=np.int64)
MEASURED = 1.1
"""Tolerance of a message above the memory bandwidth."""
MINIMUM_SHARE = 0.5
"""Minimum share of the best bandwidth for the largest message; 0.58 was measured with copies through the host."""
OVER_LINK = 1.25
"""Tolerance of a measured collective above the rate of its link."""


@check("give what one device sends over each level; nic_bytes_per_second is its share in bytes")
def outer_levels_are_not_faster(plugin: Subject) -> Problems:
    for group in plugin.groups():
        topology = plugin.loaded.topology(group)
        if group.chip.link is None and topology is None:
            continue
        inner, *others = (topology or topology_of(group)).levels
        for outer in others:  # one between may be slower: traffic to another node need not cross a host's bridge
            if outer.bytes_per_second > 1.001 * inner.bytes_per_second:
                yield (
                    f"{group.chip.name}, {group.nodes} x {group.devices_per_node}: level {outer.name} has "
                    f"{outer.bytes_per_second:g} B/s, {inner.name} inside it {inner.bytes_per_second:g}"
                )


@check("give each level its own name; measured curves refer to it")
def level_names_are_unique(plugin: Subject) -> Problems:
    for group in plugin.groups():
        topology = plugin.loaded.topology(group)
        names = [level.name for level in topology.levels] if topology else []
        if len(set(names)) != len(names) or not all(names):
            yield f"flagcore_topology: the levels of {group.chip.name} are named {', '.join(names)}"


USER_RATE = 1.25e9
"""A network far slower than any default, as a user states it."""


@check("take the rate of the network from group.chip.nic_bytes_per_second, which has the user's value")
def topology_uses_the_users_network(plugin: Subject) -> Problems:
    plugin.implements("flagcore_topology")
    for chip in plugin.own_chips():
        with_rate = with_network(chip, USER_RATE)
        found = plugin.loaded.topology(NodeGroup(chip=with_rate, nodes=2, devices_per_node=chip.devices_per_node))
        if found and found.levels[-1].bytes_per_second > 1.01 * USER_RATE:
            rate = found.levels[-1].bytes_per_second
            yield f"flagcore_topology: {chip.name} has {rate:g} B/s between nodes, the user stated {USER_RATE:g}"


def _costs(plugin: Subject) -> list[tuple[Chip, CollectiveCosts]]:
    return plugin.each(
        "flagcore_collective_costs", lambda chip: plugin.loaded.collective_costs(group_of(chip), "megatron")
    )


def _curves(plugin: Subject) -> list[tuple[Chip, CollectiveTable, Curve, float]]:
    """Return each measured curve with its best bytes per second. Raises Skip without usable ones."""
    _costs(plugin)

    def table(chip: Chip) -> CollectiveTable | None:
        about = {"group": group_of(chip), "engine": "megatron"}
        answer = plugin.ask("flagcore_collective_costs", about)
        return answer if isinstance(answer, CollectiveTable) else None

    return [
        (chip, table, curve, max(_rates(curve)))
        for chip, table in plugin.each("flagcore_collective_costs", table)
        for curve in table.curves
    ]


def _rates(curve: Curve) -> list[float]:
    return [size / time for size, time in zip(curve.payload_bytes, curve.seconds, strict=True)]


@check("check the times (in seconds) in costs/*/collectives.yaml", each=_costs)
def collective_times_grow_with_payload(chip: Chip, costs: CollectiveCosts) -> Problems:
    for kind in KINDS:
        if not (np.diff(costs.seconds(kind, PAYLOADS, 2 * ONES, ONES)) >= 0).all():
            yield f"{chip.name}: a larger {kind} of two devices is predicted to take less time"


@check("check its last seconds and payload_bytes; leave out a disturbed point", each=_curves)
def measured_bandwidth_does_not_fall(chip: Chip, table: CollectiveTable, curve: Curve, best: float) -> Problems:
    last_rate = _rates(curve)[-1]
    if last_rate < MINIMUM_SHARE * best:
        yield (
            f"{chip.name}: the curve of {curve.kind} of {curve.ranks} falls from {best:.3g} to {last_rate:.3g} bytes a "
            "second at its last point, from which larger payloads are extrapolated"
        )


@check("give seconds and the payload of the whole tensor in bytes, or correct the rate of the link", each=_curves)
def measured_curves_do_not_exceed_the_link(chip: Chip, table: CollectiveTable, curve: Curve, best: float) -> Problems:
    rate = best * ((curve.ranks - 1) / curve.ranks if curve.kind != "send" else 1.0)
    if chip.link and not table.level and rate > OVER_LINK * chip.link.bytes_per_second.value:
        yield (
            f"{chip.name}: in the curve of {curve.kind} of {curve.ranks} a device sends {rate:.3g} bytes a second, "
            f"above link.bytes_per_second = {chip.link.bytes_per_second.value:.3g}"
        )


@check("return 0 where ranks is 1", each=_costs)
def single_device_collectives_are_free(chip: Chip, costs: CollectiveCosts) -> Problems:
    seconds, share = costs.seconds("all_reduce", PAYLOADS, ONES, ONES), costs.compute_share(ONES, ONES)
    if (seconds != 0).any() or (share != 0).any():
        yield f"{chip.name}: a collective of one device takes time, or compute"


@check("give a share of the device's compute", each=_costs)
def collectives_leave_compute_for_kernels(chip: Chip, costs: CollectiveCosts) -> Problems:
    share = costs.compute_share(2 * ONES, ONES)
    if not ((share >= 0) & (share < 1)).all():
        yield f"{chip.name}: compute_share is not 0 to 1"


@check("give seconds and the payload of the whole tensor in bytes in costs/*/collectives.yaml", each=_costs)
def messages_do_not_exceed_memory_bandwidth(chip: Chip, costs: CollectiveCosts) -> Problems:
    rate = chip.memory_bandwidth_bytes_per_second
    seconds = costs.seconds("send", PAYLOADS[-1:], 2 * ONES[:1], ONES[:1])
    if rate is not None and PAYLOADS[-1] / seconds[0] > MEASURED * rate.value:
        yield f"{chip.name}: a message of {PAYLOADS[-1]:g} bytes takes {seconds[0]:g} s"
