"""Chips: whether figures are plausible in base units and in one direction."""

from __future__ import annotations

from collections.abc import Iterator

from flagcore.testing.facts import facts_of
from flagcore.testing.problem import Problem
from flagcore.testing.subject import Subject

RANGES = {
    "memory_bytes": (2**27, 2**40),
    "memory_bandwidth_bytes_per_second": (1e9, 1e14),
    "dense_flops_per_second": (1e9, 1e17),
    "link.bytes_per_second": (1e8, 1e13),
    "host_bytes_per_second": (1e8, 1e12),
    "nic_bytes_per_second": (1e8, 1e12),
}
"""Plausible figures of one device in base units. A figure in GB, TFLOP/s or Gb/s falls far outside.

The lower ends leave room for one core of a small CPU; an accelerator is far above them.
"""

NARROWER = (("fp64", "fp32"), ("fp32", "tf32"), ("tf32", "bf16"), ("tf32", "fp16"), ("bf16", "fp8"), ("fp8", "fp4"))
"""The narrower format is never slower, as it moves less."""

INTENSITY = (0.5, 2000.0)
"""Operations a byte of memory traffic, from a core of a CPU to an accelerator with all of its matrix units."""

LIKE = (0.6, 1.5)
"""What bf16 does of fp16: the same, but for the few chips that say otherwise."""

LINK_SHARE = 0.75
"""What a link may move of what the memory does; no accelerator's reaches half of it."""


def figures_are_plausible(plugin: Subject) -> Iterator[Problem]:
    for chip in plugin.own_chips():
        for key, fact in facts_of(chip):
            low, high = next(limits for start, limits in RANGES.items() if key.startswith(start))
            if not low <= fact.value <= high:
                yield Problem(
                    f"{chip.name}: {key} = {fact.value:g} is not in {low:g} to {high:g}",
                    "write bytes, bytes per second or flops per second, without prefixes; YAML wants 3.0e+14",
                )


def narrow_formats_are_not_slower(plugin: Subject) -> Iterator[Problem]:
    for chip in plugin.own_chips():
        peaks = chip.dense_flops_per_second
        for wide, narrow in NARROWER:
            comparable = wide in peaks and narrow in peaks and "emulated" not in chip.notes
            if comparable and peaks[narrow].value < 0.999 * peaks[wide].value:
                yield Problem(
                    f"{chip.name}: {narrow} = {peaks[narrow].value:g} is below {wide} = {peaks[wide].value:g}",
                    "check both peaks; if the chip emulates a format, say so in notes",
                )


def fp16_and_bf16_peaks_are_similar(plugin: Subject) -> Iterator[Problem]:
    for chip in plugin.own_chips():
        peaks = chip.dense_flops_per_second
        explained = "emulated" in chip.notes or "half the rate" in chip.notes
        if "bf16" in peaks and "fp16" in peaks and not explained:
            ratio = peaks["bf16"].value / peaks["fp16"].value
            if not LIKE[0] <= ratio <= LIKE[1]:
                yield Problem(
                    f"{chip.name}: bf16 is {ratio:g} times fp16",
                    "give both dense and of matrix units, or neither; if one really has half the rate, say so in notes",
                )


def peaks_match_memory_bandwidth(plugin: Subject) -> Iterator[Problem]:
    low, high = INTENSITY
    for chip in plugin.own_chips():
        rate = chip.memory_bandwidth_bytes_per_second
        for name, peak in chip.dense_flops_per_second.items():
            if rate is not None and name in ("bf16", "fp16") and not low <= peak.value / rate.value <= high:
                yield Problem(
                    f"{chip.name}: {name} does {peak.value / rate.value:g} operations a byte of memory traffic",
                    "one of dense_flops_per_second and memory_bandwidth_bytes_per_second has a wrong prefix",
                )


def links_are_slower_than_memory(plugin: Subject) -> Iterator[Problem]:
    for chip in plugin.own_chips():
        rate = chip.memory_bandwidth_bytes_per_second
        link = chip.link if chip.link and chip.link.topology != "shared-memory" else None
        if link and rate and link.bytes_per_second.value > LINK_SHARE * rate.value:
            share = link.bytes_per_second.value / rate.value
            yield Problem(
                f"{chip.name}: link.bytes_per_second is {share:.2g} of memory_bandwidth_bytes_per_second",
                "give bytes, not bits, that one device sends in one direction",
            )


def network_is_slower_than_the_link(plugin: Subject) -> Iterator[Problem]:
    for chip in plugin.own_chips():
        card, inside = chip.nic_bytes_per_second, chip.link.bytes_per_second if chip.link else None
        for key, rate, share in (
            ("link.bytes_per_second", inside, 0.999),
            ("host_bytes_per_second", chip.host_bytes_per_second, 1.001),
        ):
            if card and rate and card.value > share * rate.value and "same fabric" not in chip.notes:
                yield Problem(
                    f"{chip.name}: nic_bytes_per_second = {card.value:g} is not below {key} = {rate.value:g}",
                    "give one device's share in bytes, not bits: 400 Gb/s are 5.0e+10; if links and network are "
                    "one fabric, notes say the words 'same fabric'",
                )


def link_latency_is_in_seconds(plugin: Subject) -> Iterator[Problem]:
    for chip in plugin.own_chips():
        if chip.link and not 1e-8 <= chip.link.latency_seconds <= 1e-3:
            yield Problem(
                f"{chip.name}: link.latency_seconds = {chip.link.latency_seconds:g}",
                "a small message takes about 1.0e-6 to 1.0e-4 seconds; leave it out if unmeasured",
            )


def link_domains_divide_nodes(plugin: Subject) -> Iterator[Problem]:
    for chip in plugin.own_chips():
        size, node = chip.link.domain_size if chip.link else None, chip.devices_per_node
        if size is not None and (size < 1 or (size % node and node % size)):
            yield Problem(
                f"{chip.name}: link.domain_size = {size} does not divide devices_per_node = {node}",
                "give how many consecutive devices the link joins: a share of a node, or whole nodes",
            )
