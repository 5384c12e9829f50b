"""Chips: whether figures are plausible in base units and in one direction."""

from __future__ import annotations

from flagcore.domain.chip import Chip
from flagcore.testing.kit import Problems, check, chips

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
"""Operations per byte of memory traffic, from a core of a CPU to an accelerator with all of its matrix units."""

ALIKE = (0.6, 1.5)
"""Ratio of the bf16 peak to the fp16 peak: about 1, except for the few chips whose notes explain another one."""

LINK_SHARE = 0.75
"""Maximum ratio of a link's rate to the memory's; no known accelerator reaches half of it."""


@check("write bytes, bytes per second or flops per second, without prefixes; YAML wants 3.0e+14", each=chips)
def figures_are_plausible(chip: Chip) -> Problems:
    for key, fact in chip.figures.items():
        low, high = next(limits for start, limits in RANGES.items() if key.startswith(start))
        if not low <= fact.value <= high:
            yield f"{chip.name}: {key} = {fact.value:g} is not in {low:g} to {high:g}"


@check("check both peaks; if the chip emulates a format, say so in notes", each=chips)
def narrow_formats_are_not_slower(chip: Chip) -> Problems:
    peaks = chip.dense_flops_per_second
    for wide, narrow in NARROWER:
        comparable = wide in peaks and narrow in peaks and "emulated" not in chip.notes
        if comparable and peaks[narrow].value < 0.999 * peaks[wide].value:
            yield f"{chip.name}: {narrow} = {peaks[narrow].value:g} is below {wide} = {peaks[wide].value:g}"


@check("give both dense and of matrix units; if one really has half the rate, say 'half the rate' in notes", each=chips)
def fp16_and_bf16_peaks_are_similar(chip: Chip) -> Problems:
    peaks = chip.dense_flops_per_second
    explained = "emulated" in chip.notes or "half the rate" in chip.notes
    if "bf16" in peaks and "fp16" in peaks and not explained:
        ratio = peaks["bf16"].value / peaks["fp16"].value
        if not ALIKE[0] <= ratio <= ALIKE[1]:
            yield f"{chip.name}: bf16 is {ratio:g} times fp16"


@check("one of dense_flops_per_second and memory_bandwidth_bytes_per_second has a wrong prefix", each=chips)
def peaks_match_memory_bandwidth(chip: Chip) -> Problems:
    rate = chip.memory_bandwidth_bytes_per_second
    for name, peak in chip.dense_flops_per_second.items():
        if rate and name in ("bf16", "fp16") and not INTENSITY[0] <= peak.value / rate.value <= INTENSITY[1]:
            yield f"{chip.name}: {name} does {peak.value / rate.value:g} operations a byte of memory traffic"


@check("give bytes, not bits, that one device sends in one direction", each=chips)
def links_are_slower_than_memory(chip: Chip) -> Problems:
    rate = chip.memory_bandwidth_bytes_per_second
    link = chip.link if chip.link and chip.link.topology != "shared-memory" else None
    if link and rate and link.bytes_per_second.value > LINK_SHARE * rate.value:
        share = link.bytes_per_second.value / rate.value
        yield f"{chip.name}: link.bytes_per_second is {share:.2g} of memory_bandwidth_bytes_per_second"


@check(
    "give one device's share in bytes, not bits: 400 Gb/s are 5.0e+10; if links and network are one fabric, notes "
    "say the words 'same fabric'",
    each=chips,
)
def network_is_slower_than_the_link(chip: Chip) -> Problems:
    card, figures = chip.nic_bytes_per_second, chip.figures
    for key, share in (("link.bytes_per_second", 0.999), ("host_bytes_per_second", 1.001)):
        rate = figures.get(key)
        if card and rate and card.value > share * rate.value and "same fabric" not in chip.notes:
            yield f"{chip.name}: nic_bytes_per_second = {card.value:g} is not below {key} = {rate.value:g}"


@check("a small message takes about 1.0e-6 to 1.0e-4 seconds; leave it out if unmeasured", each=chips)
def link_latency_is_in_seconds(chip: Chip) -> Problems:
    if chip.link and not 1e-8 <= chip.link.latency_seconds <= 1e-3:
        yield f"{chip.name}: link.latency_seconds = {chip.link.latency_seconds:g}"


@check("give how many consecutive devices the link joins: a share of a node, or whole nodes", each=chips)
def link_domains_divide_nodes(chip: Chip) -> Problems:
    size, node = chip.link.domain_size if chip.link else None, chip.devices_per_node
    if size is not None and (size < 1 or (size % node and node % size)):
        yield f"{chip.name}: link.domain_size = {size} does not divide devices_per_node = {node}"
