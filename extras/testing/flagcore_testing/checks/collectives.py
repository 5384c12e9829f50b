"""Checks of topologies and of the times of collectives."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np
from flagcore_vendorkit.chip_file import collective_table, shared_costs

from flagcore.contracts import CollectiveCosts
from flagcore.domain.chip import Chip, with_network
from flagcore.domain.cluster import NodeGroup, Topology
from flagcore.errors import SpecError
from flagcore.physics.collective_costs import topology_of
from flagcore.physics.collective_curves import KINDS, CollectiveTable, Curve
from flagcore_testing.checks.bounds import LINK, OF_LEVELS, outside
from flagcore_testing.checks.costs import folders
from flagcore_testing.examples import group_of
from flagcore_testing.kit import Problem, Problems, Subject, check, wrong

OUTER = "give what one device sends over each level; nic_bytes_per_second is its share in bytes"


@check(OUTER)
def levels_are_plausible(plugin: Subject) -> Problems:
    for group in plugin.groups():
        topology, chip = plugin.loaded.topology(group), group.chip
        for level in topology.levels if topology else ():
            figures = {key: getattr(level, key) for key in ("latency_seconds", "efficiency")}
            yield from outside(f"flagcore_topology: level {level.name} of {chip.name}: ", figures, OF_LEVELS)
        names = [level.name for level in topology.levels] if topology else []
        if len(set(names)) != len(names) or not all(names):
            text = f"flagcore_topology: the levels of {chip.name} are named {', '.join(names)}"
            yield Problem(text, "give each level its own name; measured curves refer to it")
        if topology or chip.link:
            yield from _rate_problems(group, topology or topology_of(group))


def _rate_problems(group: NodeGroup, topology: Topology) -> Iterator[Problem]:
    """Yield the outer levels that are faster than the innermost one; those between may be slower."""
    inner, *others = topology.levels
    where = f"{group.chip.name}, {group.nodes} x {group.devices_per_node}: level"
    for outer in others:
        rate, inside = outer.bytes_per_second, inner.bytes_per_second
        is_equal = outer.devices <= group.devices_per_node and 0.999 * inside < rate <= 1.001 * inside
        yield from wrong(
            (rate > 1.001 * inside, f" has {rate:g} B/s, {inner.name} inside it {inside:g}", OUTER),
            (is_equal, f" has the rate of {inner.name} inside it",
             "give one device's share of what connects the groups, or leave out the level"),
            where=f"{where} {outer.name}",
        )  # fmt: skip


SLOWER_THAN_LINK = 0.45
"""Minimum rate of the innermost level, relative to the link of the chip."""
USER_RATE = 1.25e9
"""The rate of a network in bytes per second, as a user sets it. It is far below any default."""


@check()
def topologies_fit_their_chips(plugin: Subject) -> Problems:
    plugin.implements("flagcore_topology")
    for chip in plugin.own_chips():
        node, link = chip.devices_per_node, chip.link
        of_node = NodeGroup(chip=chip, nodes=1, devices_per_node=node)
        topology, twice = (plugin.loaded.topology(replace(of_node, devices_per_node=by * node)) for by in (1, 2))
        of_user = plugin.loaded.topology(replace(of_node, chip=with_network(chip, USER_RATE), nodes=2))
        rate = topology.levels[0].bytes_per_second if topology else 0.0
        network = of_user.levels[-1].bytes_per_second if of_user else 0.0
        of_link, joined = (link.bytes_per_second.value, min(link.domain_size or node, node)) if link else (0.0, 0)
        sizes = [each.devices for each in topology.levels] if topology else [0]
        yield from wrong(
            (not topology and twice, f"no levels of {chip.name} with its own devices_per_node = {node}, and it "
             "answers for twice as many",
             "devices_per_node counts devices, not cards; or let flagcore_topology answer for whole nodes"),
            (topology and rate < SLOWER_THAN_LINK * of_link,
             f"the innermost level of {chip.name} has {rate:g} B/s, and its link {of_link:g}",
             "give the innermost level the rate of link.bytes_per_second, or restrict the topology to its chips"),
            (topology and joined and joined not in sizes,
             f"the innermost level of {chip.name} has {sizes[0]} devices, and its link joins {joined}",
             "correct it, or link.domain_size"),
            (network > 1.01 * USER_RATE,
             f"{chip.name} has {network:g} B/s between nodes, the user stated {USER_RATE:g}",
             "take the rate of the network from group.chip.nic_bytes_per_second, which has the user's value"),
            where="flagcore_topology: ",
        )  # fmt: skip


PAYLOADS = np.exp2(np.arange(10, 30)).astype(np.float64)
ONES = np.ones(20, dtype=np.int64)
MEASURED = 1.1
"""Tolerance of a message above the memory bandwidth."""


def _costs(plugin: Subject) -> list[tuple[Chip, CollectiveCosts]]:
    return plugin.each(
        "flagcore_collective_costs", lambda chip: plugin.loaded.collective_costs(group_of(chip), "megatron")
    )


@check("check the times (in seconds) in costs/*/collectives.yaml", each=_costs)
def collective_times_are_plausible(chip: Chip, costs: CollectiveCosts) -> Problems:
    for kind in KINDS:
        if not (np.diff(costs.seconds(kind, PAYLOADS, 2 * ONES, ONES)) >= 0).all():
            yield f"{chip.name}: a larger {kind} of two devices is predicted to take less time"
    share, memory = costs.compute_share(2 * ONES, ONES), chip.memory_bandwidth_bytes_per_second
    alone = (costs.seconds("all_reduce", PAYLOADS, ONES, ONES), costs.compute_share(ONES, ONES))
    seconds = costs.seconds("send", PAYLOADS[-1:], 2 * ONES[:1], ONES[:1])[0]
    yield from wrong(
        (any((each != 0).any() for each in alone), "a collective of one device takes time, or compute",
         "return 0 where ranks is 1"),
        (not ((share >= 0) & (share < 1)).all(), "compute_share is not 0 to 1", "give a share of the device's compute"),
        (memory and PAYLOADS[-1] / seconds > MEASURED * memory.value,
         f"a message of {PAYLOADS[-1]:g} bytes takes {seconds:g} s",
         "give seconds and the payload of the whole tensor in bytes in costs/*/collectives.yaml"),
        where=f"{chip.name}: ",
    )  # fmt: skip


LARGE = 2.0**16
"""Minimum size in bytes of the largest payload of a curve. Smaller ones are probably in KiB or MiB."""
SLOW_SHARE, OVER_LINK = 0.03, 1.25
"""Range of the rate that a curve reaches, relative to its link; 0.038 is the smallest of a known curve."""
MINIMUM_SHARE = 0.5
"""Minimum share of the best bandwidth for the largest message; 0.58 was measured with copies through the host."""
BASE_UNITS = "give seconds, the payload of the whole tensor in bytes, and the name of a level of flagcore_topology"


def _curves(plugin: Subject) -> list[tuple[Subject, Chip, CollectiveTable, Curve]]:
    """Return each measured curve of a valid answer. Raises Skip if there are none."""
    _costs(plugin)

    def table(chip: Chip) -> CollectiveTable | None:
        answer = plugin.ask("flagcore_collective_costs", {"group": group_of(chip), "engine": "megatron"})
        return answer if isinstance(answer, CollectiveTable) else None

    tables = plugin.each("flagcore_collective_costs", table)
    return [(plugin, chip, table, curve) for chip, table in tables for curve in table.curves]


@check(each=_curves)
def measured_curves_are_plausible(plugin: Subject, chip: Chip, table: CollectiveTable, curve: Curve) -> Problems:
    rates = [size / time for size, time in zip(curve.payload_bytes, curve.seconds, strict=True)]
    best, largest, of_link = max(rates), curve.payload_bytes[-1], chip.link.bytes_per_second.value if chip.link else 0.0
    groups = [replace(group_of(chip), nodes=nodes) for nodes in (1, 2)]
    names = {level.name for each in groups for level in (plugin.loaded.topology(each) or topology_of(each)).levels}
    sent, is_inner = _sent(curve, chip) * best, not table.level
    yield from wrong(
        (largest < LARGE, f" ends at payload_bytes = {largest:g}", BASE_UNITS),
        (largest >= LARGE and is_inner and best < SLOW_SHARE * of_link,
         f" reaches {best:.3g} bytes per second, and {LINK} = {of_link:.3g}", BASE_UNITS),
        (rates[-1] < MINIMUM_SHARE * best,
         f" falls from {best:.3g} to {rates[-1]:.3g} bytes a second at its last point, from which larger payloads are "
         "extrapolated",
         "check its last seconds and payload_bytes; leave out a disturbed point"),
        (chip.link and is_inner and sent > OVER_LINK * of_link,
         f": a device sends {sent:.3g} bytes per second, above {LINK} = {of_link:.3g}",
         "give seconds and the payload of the whole tensor in bytes, or correct the rate of the link"),
        (table.level and table.level not in names,
         f" of costs/{chip.name.casefold()}/collectives.yaml: level = {table.level!r} is none of {sorted(names)}",
         "name a level of flagcore_topology, or leave `level` out for the innermost one"),
        where=f"{chip.name}: the curve of {curve.kind} of {curve.ranks}",
    )  # fmt: skip


def _sent(curve: Curve, chip: Chip) -> float:
    """Return what a device sends over its link, relative to the payload."""
    share = (curve.ranks - 1) / curve.ranks if curve.kind != "send" else 1.0
    return share * (2.0 if curve.kind == "all_reduce" and chip.link and not chip.link.switch_reduces else 1.0)


SHORTEST = 1e-6
"""Seconds that a collective takes at least."""
PARTS, PART_OF = ("all_gather", "reduce_scatter"), (0.2, 1.5)
"""Halves of an all-reduce, and the range of their time relative to it: 0.45 to 0.55 is known."""


@check("give the number of devices that take part, and seconds", each=folders)
def collectives_of_one_group_agree(plugin: Subject, chip: Chip, folder: str) -> Problems:
    table: CollectiveTable | None = None
    with suppress(SpecError):  # another check reports it
        table = collective_table(plugin.package, chip)
    file, times = f"{folder}/collectives.yaml", dict[tuple[str, int, float], float]()
    is_own = (chip.name.casefold(), "collectives.yaml") not in shared_costs(plugin.package)
    for curve in table.curves if table else ():
        points = zip(curve.payload_bytes, curve.seconds, strict=False)
        times |= {(curve.kind, curve.ranks, payload): seconds for payload, seconds in points}
        if table and is_own:
            yield from _group_problems(chip, table, curve, f"{file}: {curve.kind} with ranks = {curve.ranks}")
    for (kind, ranks, payload), seconds in times.items():
        whole = times.get(("all_reduce", ranks, payload))
        if kind in PARTS and whole and not PART_OF[0] <= seconds / whole <= PART_OF[1]:
            text = f"{file}: {kind} of {payload:g} bytes with ranks = {ranks} takes {seconds:g} s"
            fix = "correct the slower or the faster of them: an all-reduce is a reduce-scatter and an all-gather"
            yield Problem(f"{text}, and the all_reduce {whole:g}", fix)


def _group_problems(chip: Chip, table: CollectiveTable, curve: Curve, where: str) -> Iterator[Problem]:
    ranks, size = curve.ranks, chip.link.domain_size if chip.link else None
    most, fix = max(chip.devices_per_node, size or 0), "give the number of devices that take part, and seconds"
    yield from wrong(
        (not table.level and ranks > most, f", but {chip.name} has devices_per_node = {most}", fix),
        (not table.level and size and size < ranks <= most, f" spans links of {size} devices, and has no level",
         "write level: the name of the level of flagcore_topology on which it was measured"),
        (min(curve.seconds) < SHORTEST, f" has seconds = {min(curve.seconds):g}", fix),
        where=where,
    )  # fmt: skip
