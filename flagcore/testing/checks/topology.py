"""Topologies: the levels over which devices communicate."""

from __future__ import annotations

from collections.abc import Iterator

from flagcore.physics.collectives.topology import topology_of
from flagcore.testing.problem import Problem
from flagcore.testing.subject import Subject


def topology_is_valid(plugin: Subject) -> Iterator[Problem]:
    plugin.implements("flagcore_topology")
    for group in plugin.groups():
        plugin.loaded.topology(group)
    yield from plugin.problems_of("flagcore_topology")  # the levels were checked when they were answered


def outer_levels_are_not_faster(plugin: Subject) -> Iterator[Problem]:
    for group in plugin.groups():
        if group.chip.link is None and plugin.loaded.topology(group) is None:
            continue
        inner, *others = (plugin.loaded.topology(group) or topology_of(group)).levels
        for outer in others:  # one between may be slower: what goes to another node need not cross a host's bridge
            if outer.bytes_per_second > 1.001 * inner.bytes_per_second:
                yield Problem(
                    f"{group.chip.name}, {group.nodes} x {group.devices_per_node}: level {outer.name} has "
                    f"{outer.bytes_per_second:g} B/s, {inner.name} inside it {inner.bytes_per_second:g}",
                    "give what one device sends over each level; nic_bytes_per_second is its share in bytes",
                )


def level_names_are_unique(plugin: Subject) -> Iterator[Problem]:
    for group in plugin.groups():
        found = plugin.loaded.topology(group)
        names = [level.name for level in found.levels] if found else []
        if len(set(names)) != len(names) or not all(names):
            yield Problem(
                f"flagcore_topology: the levels of {group.chip.name} are named {', '.join(names)}",
                "give each level its own name; measured curves refer to it",
            )
