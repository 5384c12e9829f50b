"""Figures of chips against what their sources and the transcripts state: units, directions and shares."""

from __future__ import annotations

import re

from flagcore.domain.chip import Chip, Fact
from flagcore.testing.kit import Problems, Skip, Subject, check, chips

ONE_WAY = re.compile(r"one way|one direction|each direction|unidirectional|halved|half of|\u5355\u5411", re.I)
"""Words that confirm the rate of one device in one direction."""
BOTH_WAYS = re.compile(r"both directions|two directions|bidirectional|per pair|a pair\b|in total|\u53cc\u5411", re.I)
GIGABITS = re.compile(r"(?<![\d.])(?<!lanes of )(\d+(?:\.\d+)?) ?(?:Gb/s|Gbps|Gbit/s)")
PER_NODE = re.compile(r"(?:a|per|each|every) (?:node|server|machine|host)\b|\u6bcf\u8282\u70b9|\u6bcf\u53f0", re.I)
MEMORY_RATIOS = (0.98, 1.25)
"""Memory of a chip over the memory in a transcript, which error correction reduces."""


@check(
    "give what one device sends in one direction, half of what is published for both; say 'one way' in the source or "
    "the notes",
    each=chips,
)
def link_rates_are_one_way(chip: Chip) -> Problems:
    link = chip.link
    if link is None or link.topology in ("pcie", "shared-memory"):
        return
    words = f"{link.bytes_per_second.source.detail} {chip.notes}"
    if not ONE_WAY.search(words):
        two_way = BOTH_WAYS.search(link.bytes_per_second.source.detail)
        problem = f"has a source for {two_way[0]!r}" if two_way else "does not say whether it is one way"
        yield f"{chip.name}: link.bytes_per_second = {link.bytes_per_second.value:g} {problem}"


@check("give bytes: 64 GiB are 68719476736; if only the nominal size is known, say 'nominal' in the source", each=chips)
def memory_is_in_binary_units(chip: Chip) -> Problems:
    memory = chip.memory_bytes
    if memory and memory.value % 1e9 == 0 and "nominal" not in memory.source.detail:
        yield f"{chip.name}: memory_bytes = {memory.value:g} is {memory.value / 1e9:g} GB, not GiB"


@check("give bytes per second of one device: 400 Gb/s are 5.0e+10; divide what a node shares by devices_per_node")
def rates_match_their_sources(plugin: Subject) -> Problems:
    for chip in plugin.own_chips():
        for key in ("link.bytes_per_second", "nic_bytes_per_second", "host_bytes_per_second"):
            fact = chip.figures.get(key)
            if fact and (why := _unlike(fact, chip)):
                yield f"{chip.name}: {key} = {fact.value:g}, {why}"


def _unlike(fact: Fact, chip: Chip) -> str:
    """Return how a rate differs from what its source states in gigabits; empty if it does not."""
    for number in map(float, GIGABITS.findall(fact.source.detail)):
        stated = number * 1e9 / 8
        if abs(fact.value / (8 * stated) - 1) < 0.01:
            return f"but its source has {number:g} Gb/s, which are {stated:g} bytes per second"
        shared = PER_NODE.search(fact.source.detail) and not re.search(r"shared|share of", fact.source.detail)
        if shared and chip.devices_per_node > 1 and abs(fact.value / stated - 1) < 0.01:
            share = stated / chip.devices_per_node
            return f"but its source has {number:g} Gb/s for a node of {chip.devices_per_node} devices: {share:g} each"
    return ""


@check("give the total that the tool reports, not what is in use, in bytes")
def memory_matches_transcripts(plugin: Subject) -> Problems:
    compared = [
        (each.name, chip, listed.memory_mib * 2**20, chip.memory_bytes.value)
        for chip in plugin.own_chips()
        for each in plugin.listings
        for listed in each.lists
        if chip.memory_bytes and listed.memory_mib and chip.has_name(listed.chip)
    ]
    if not compared:
        raise Skip("no transcript has the memory of a chip")
    for name, chip, reported, given in compared:
        if not MEMORY_RATIOS[0] <= given / reported <= MEMORY_RATIOS[1]:
            shown = f"{reported / 2**20:g} MiB = {reported}"
            yield f"{chip.name}: memory_bytes = {given:g}, but the transcript {name} has {shown}"
