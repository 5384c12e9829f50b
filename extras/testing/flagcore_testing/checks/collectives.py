"""Checks of topologies and of the times of collectives."""

from contextlib import suppress
from dataclasses import replace

import numpy as np
from flagcore_vendorkit.chip_file import collective_table, shared_costs

from flagcore.contracts import CollectiveCosts
from flagcore.domain.chip import Chip, with_network
from flagcore.domain.cluster import NodeGroup
from flagcore.errors import SpecError
from flagcore.physics.collective_costs import topology_of
from flagcore.physics.collective_curves import KINDS, CollectiveTable, Curve
from flagcore_testing.checks.bounds import LINK, OF_LEVELS, outside
from flagcore_testing.checks.costs import folders
from flagcore_testing.examples import group_of
from flagcore_testing.kit import Items, Problems, Subject, check, wrong

OUTER = "give what one device sends over each level; nic_bytes_per_second is its share in bytes"


@check(OUTER)
def levels_are_plausible(plugin: Subject) -> Problems:
    for group in plugin.groups():
        topology, chip = plugin.loaded.topology(group), group.chip
        for level in topology.levels if topology else ():
            figures = {key: getattr(level, key) for key in ("latency_seconds", "efficiency")}
            yield from wrong(outside(figures, OF_LEVELS), f"flagcore_topology: level {level.name} of {chip.name}: ")
        names = [level.name for level in topology.levels] if topology else []
        yield (len(set(names)) != len(names) or not all(names),
               f"flagcore_topology: the levels of {chip.name} are named {', '.join(names)}",
               "give each level its own name; measured curves refer to it")  # fmt: skip
        if topology or chip.link:  # the outer levels are not faster than the innermost one; those between may be slower
            inner, *others = (topology or topology_of(group)).levels
            for outer in others:
                rate, inside = outer.bytes_per_second, inner.bytes_per_second
                is_equal = outer.devices <= group.devices_per_node and 0.999 * inside < rate <= 1.001 * inside
                where = f"{chip.name}, {group.nodes} x {group.devices_per_node}: level {outer.name} has"
                yield rate > 1.001 * inside, f"{where} {rate:g} B/s, {inner.name} inside it {inside:g}"
                fix = "give one device's share of what connects the groups, or leave out the level"
                yield is_equal, f"{where} the rate of {inner.name} inside it", fix


SLOWER_THAN_LINK = 0.45
"""Minimum rate of the innermost level, relative to the link of the chip."""
USER_RATE = 1.25e9
"""The rate of a network in bytes per second, as a user sets it. It is far below any default."""


@check(hook="topology")
def topologies_fit_their_chips(plugin: Subject) -> Problems:
    for chip in plugin.own_chips():
        node, link = chip.devices_per_node, chip.link
        of_node = NodeGroup(chip=chip, nodes=1, devices_per_node=node)
        topology, twice = (plugin.loaded.topology(replace(of_node, devices_per_node=by * node)) for by in (1, 2))
        of_user = plugin.loaded.topology(replace(of_node, chip=with_network(chip, USER_RATE), nodes=2))
        rate = topology.levels[0].bytes_per_second if topology else 0.0
        network = of_user.levels[-1].bytes_per_second if of_user else 0.0
        of_link, joined = (link.bytes_per_second.value, min(link.domain_size or node, node)) if link else (0.0, 0)
        sizes = [each.devices for each in topology.levels] if topology else [0]
        cases = (
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
        )  # fmt: skip
        yield from wrong(cases, "flagcore_topology: ")


PAYLOADS = np.exp2(np.arange(10, 30)).astype(np.float64)
ONES = np.ones(20, dtype=np.int64)
MEASURED = 1.1
"""Tolerance of a message above the memory bandwidth."""


def _costs(plugin: Subject) -> Items:
    find = plugin.loaded.collective_costs
    return plugin.each("flagcore_collective_costs", lambda chip: find(group_of(chip), "megatron"))


@check("check the times (in seconds) in costs/*/collectives.yaml", each=_costs)
def collective_times_are_plausible(plugin: Subject, chip: Chip, costs: CollectiveCosts) -> Problems:
    for kind in KINDS:
        is_growing = (np.diff(costs.seconds(kind, PAYLOADS, 2 * ONES, ONES)) >= 0).all()
        yield not is_growing, f"a larger {kind} of two devices is predicted to take less time"
    share, memory = costs.compute_share(2 * ONES, ONES), chip.memory_bandwidth_bytes_per_second
    alone = (costs.seconds("all_reduce", PAYLOADS, ONES, ONES), costs.compute_share(ONES, ONES))
    seconds = costs.seconds("send", PAYLOADS[-1:], 2 * ONES[:1], ONES[:1])[0]
    yield from (
        (any((each != 0).any() for each in alone), "a collective of one device takes time, or compute",
         "return 0 where ranks is 1"),
        (not ((share >= 0) & (share < 1)).all(), "compute_share is not 0 to 1", "give a share of the device's compute"),
        (memory and PAYLOADS[-1] / seconds > MEASURED * memory.value,
         f"a message of {PAYLOADS[-1]:g} bytes takes {seconds:g} s",
         "give seconds and the payload of the whole tensor in bytes in costs/*/collectives.yaml"),
    )  # fmt: skip


LARGE = 2.0**16
"""Minimum size in bytes of the largest payload of a curve. Smaller ones are probably in KiB or MiB."""
SLOW_SHARE, OVER_LINK = 0.03, 1.25
"""Range of the rate that a curve reaches, relative to its link; 0.038 is the smallest of a known curve."""
MINIMUM_SHARE = 0.5
"""Minimum share of the best bandwidth for the largest message; 0.58 was measured with copies through the host."""
BASE_UNITS = "give seconds, the payload of the whole tensor in bytes, and the name of a level of flagcore_topology"


def _curves(plugin: Subject) -> Items:
    """Return each measured curve of a valid answer. Raises Skip if there are none."""
    _costs(plugin)

    def table(chip: Chip) -> CollectiveTable | None:
        answer = plugin.ask("flagcore_collective_costs", {"group": group_of(chip), "engine": "megatron"})
        return answer if isinstance(answer, CollectiveTable) else None

    for where, _, chip, found in plugin.each("flagcore_collective_costs", table):
        for each in found.curves:
            yield f"{where}the curve of {each.kind} of {each.ranks}", plugin, chip, found, each


@check(BASE_UNITS, each=_curves)
def measured_curves_are_plausible(plugin: Subject, chip: Chip, table: CollectiveTable, curve: Curve) -> Problems:
    rates = [size / time for size, time in zip(curve.payload_bytes, curve.seconds, strict=True)]
    best, largest, of_link = max(rates), curve.payload_bytes[-1], chip.link.bytes_per_second.value if chip.link else 0.0
    groups = [replace(group_of(chip), nodes=nodes) for nodes in (1, 2)]
    names = {level.name for each in groups for level in (plugin.loaded.topology(each) or topology_of(each)).levels}
    share = (curve.ranks - 1) / curve.ranks if curve.kind != "send" else 1.0  # of the payload, over a device's link
    twice = 2.0 if curve.kind == "all_reduce" and chip.link and not chip.link.switch_reduces else 1.0
    sent, is_inner = share * twice * best, not table.level
    yield from (
        (largest < LARGE, f" ends at payload_bytes = {largest:g}"),
        (largest >= LARGE and is_inner and best < SLOW_SHARE * of_link,
         f" reaches {best:.3g} bytes per second, and {LINK} = {of_link:.3g}"),
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
    )  # fmt: skip


SHORTEST = 1e-6
"""Seconds that a collective takes at least."""
PARTS, PART_OF = ("all_gather", "reduce_scatter"), (0.2, 1.5)
"""Halves of an all-reduce, and the range of their time relative to it: 0.45 to 0.55 is known."""


@check("give the number of devices that take part, and seconds", each=folders)
def collectives_of_one_group_agree(plugin: Subject, chip: Chip) -> Problems:
    table: CollectiveTable | None = None
    with suppress(SpecError):  # another check reports it
        table = collective_table(plugin.package, chip)
    times = dict[tuple[str, int, float], float]()
    is_own = (chip.name.casefold(), "collectives.yaml") not in shared_costs(plugin.package)
    for curve in table.curves if table else ():
        points = zip(curve.payload_bytes, curve.seconds, strict=False)
        times |= {(curve.kind, curve.ranks, payload): seconds for payload, seconds in points}
        ranks, size, is_inner = curve.ranks, chip.link.domain_size if chip.link else None, table and not table.level
        most, where = max(chip.devices_per_node, size or 0), f"collectives.yaml: {curve.kind} with ranks = {ranks}"
        if is_own:
            yield is_inner and ranks > most, f"{where}, but {chip.name} has devices_per_node = {most}"
            fix = "write level: the name of the level of flagcore_topology on which it was measured"
            is_over = is_inner and size and size < ranks <= most
            yield is_over, f"{where} spans links of {size} devices, and has no level", fix
            yield min(curve.seconds) < SHORTEST, f"{where} has seconds = {min(curve.seconds):g}"
    for (kind, ranks, payload), seconds in times.items():
        whole = times.get(("all_reduce", ranks, payload), 0.0)
        text = f"{kind} of {payload:g} bytes with ranks = {ranks} takes {seconds:g} s, and the all_reduce {whole:g}"
        fix = "correct the slower or the faster of them: an all-reduce is a reduce-scatter and an all-gather"
        is_off = kind in PARTS and whole and not PART_OF[0] <= seconds / whole <= PART_OF[1]
        yield is_off, f"collectives.yaml: {text}", fix
