"""Checks of chips: names, plausible figures in base units, and agreement with their sources and the transcripts."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from datetime import date, datetime, timedelta
from typing import Any

import numpy as np
from flagcore_vendorkit.fields import SOURCE_KEYS

from flagcore.contracts import KernelCosts
from flagcore.domain.chip import Chip, Fact, normalize_name
from flagcore_testing.kit import Problem, Problems, Skip, Subject, check, chips, need
from flagcore_testing.package import Transcript

KINDS = {*SOURCE_KEYS, "user"}
DATES = {"date", "checked", "quoted"}
DATE = re.compile(r"\d{4}(-\d{2}){0,2}")


@check()
def chips_and_devices_are_valid(plugin: Subject) -> Problems:
    plugin.loaded.chips()
    plugin.loaded.devices()
    for problem in plugin.problems_of("flagcore_chips", "flagcore_devices"):
        if "is already a name of" not in problem.message:
            yield problem


OPENED, FIRST_YEAR = {"checked", "quoted"}, "2024"
"""Days on which a source was opened are not before this year: it is older than the first plugin."""


def _is_date(text: str) -> bool:
    """Return whether a text is a day, a month or a year."""
    try:
        date.fromisoformat(f"{text}-01-01"[:10])
    except ValueError:
        return False
    return DATE.fullmatch(text) is not None


@check()
def dates_of_sources_are_valid(plugin: Subject) -> Problems:
    for name, content in plugin.yaml_files("**/*.yaml"):
        for path, entry in mappings(content):
            for key in DATES & entry.keys():
                value, fix = entry[key], "write the day on which you did it, as 2026-11-02, or 2026-11"
                if not (isinstance(value, date | datetime) or _is_date(str(value))):
                    yield Problem(f"{name}: {path}{key} = {value!r} is not a date", fix)
                elif str(value)[:10] > str(date.today() + timedelta(days=1)):
                    yield Problem(f"{name}: {path}{key} = {value} is in the future", fix)
                elif key in OPENED and str(value)[:4] < FIRST_YEAR:
                    yield Problem(f"{name}: {path}{key} = {value} is long ago", fix)
            if entry.get("kind") == "measured" and not entry.get("date"):
                fix = "add date: 2026-11-02, and preferably software and repeats; measurements of others are published"
                yield Problem(f"{name}: {path.rstrip('.')} is measured, but has no date", fix)


@check("give each name or alias to one chip")
def chip_names_are_unique(plugin: Subject) -> Problems:
    plugin.own_chips()
    for problem in plugin.problems_of("flagcore_chips"):
        if "is already a name of" in problem.message:
            yield problem.message


@check("list only names that this vendor's tools print")
def chip_names_differ_from_other_plugins(plugin: Subject) -> Problems:
    for chip in plugin.own_chips():
        vendor = normalize_name(chip.vendor)
        for name in (chip.name, *chip.aliases):
            spellings = dict.fromkeys((name, normalize_name(name).removeprefix(vendor)))
            if owner := next(filter(None, map(plugin.others.owner, spellings)), None):
                yield f"{chip.name}: {name!r} is also a name of a chip of the plugin {owner}"


@check("separate words by single spaces, and keep one of names that differ in case only", each=chips)
def chip_names_are_clean(chip: Chip) -> Problems:
    for name in (chip.name, chip.vendor, *chip.aliases):
        if not name or name != " ".join(name.split()) or not name.isprintable():
            yield f"{chip.name}: the name {name!r} has extra spaces"
    for name, times in Counter(name.casefold() for name in chip.aliases).items():
        if times > 1:
            yield f"{chip.name}: aliases has {name!r} {times} times, ignoring case"


@check("remove the name or the family name, or correct it")
def family_names_are_of_no_chip(plugin: Subject) -> Problems:
    names = {name.casefold(): chip.name for chip in plugin.own_chips() for name in (chip.name, *chip.aliases)}
    for chip in plugin.own_chips():
        for name in chip.family_names:
            if (owner := names.get(name.casefold(), chip.name)) != chip.name:
                yield f"{chip.name}: family_names has {name!r}, which is a name of {owner}"


@check("write the same lower-case word in each chips/*.yaml")
def chips_have_one_lowercase_vendor(plugin: Subject) -> Problems:
    usual = Counter(chip.vendor.casefold() for chip in plugin.own_chips()).most_common(1)[0][0]
    for chip in plugin.own_chips():
        if chip.vendor != usual:
            yield f"{chip.name}: vendor is {chip.vendor}, not {usual}"


@check()
def chip_files_match_chip_names(plugin: Subject) -> Problems:
    files = {name: content for name, content in plugin.yaml_files("chips/*.yaml") if isinstance(content, dict)}
    need(files, "the plugin has no chips/*.yaml")
    names = {chip.name for chip in plugin.chips}
    for name, content in files.items():
        chip = str(content.get("chip"))
        file = f"{chip.casefold().replace(' ', '-')}.yaml"
        if name != f"chips/{file}":
            yield Problem(f"{name}: chip is {chip}", f"name the file {file}")
        elif names and chip not in names:
            fix = "return load_chips(package) there, as VendorPlugin does"
            yield Problem(f"{name}: flagcore_chips does not return {chip}", fix)


def mappings(content: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every mapping of a file with its path. A path ends in a dot; the path of the whole file is empty."""
    if isinstance(content, dict):
        yield path, content
    pairs = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in pairs:
        yield from mappings(value, f"{path}{key}.")


RANGES = {
    "memory_bytes": (2**27, 2**40),
    "memory_bandwidth_bytes_per_second": (1e9, 1e14),
    "dense_flops_per_second": (1e8, 1e17),
    "link.bytes_per_second": (1e8, 1e13),
    "link.latency_seconds": (1e-8, 1e-3),
    "host_bytes_per_second": (1e8, 1e12),
    "nic_bytes_per_second": (1e8, 1e12),
    "tdp_watts": (1, 3000),
}
"""Plausible figures of one device in base units. A figure in GB, TFLOP/s or Gb/s is far outside. The lower bounds are
for one core of a small CPU."""

BANDWIDTH, LINK, NIC = "memory_bandwidth_bytes_per_second", "link.bytes_per_second", "nic_bytes_per_second"
HOST, PEAK = "host_bytes_per_second", "dense_flops_per_second."
OPERATIONS_PER_BYTE = (0.5, 2000.0)
"""Operations per byte of memory traffic, from a CPU core to an accelerator with all matrix units."""
ACCELERATOR_BANDWIDTH = 1e11
"""Memory bandwidth in bytes per second above which a chip is an accelerator."""
MATRIX_OPERATIONS_PER_BYTE = 25.0
"""Minimum number of 16-bit operations per byte of an accelerator; 31 is the smallest of a known chip."""
SECONDS_OF_MEMORY = (0.012, 0.5)
"""Seconds in which an accelerator reads its whole memory; 0.013 and 0.47 are the extremes of known chips."""
FORMATS = (("fp64", "fp32"), ("fp32", "tf32"), ("bf16", "fp8"), ("fp8", "fp4"))
"""Pairs of number formats. The narrower format is never slower, because it moves fewer bytes."""
SPARSE = 3.8
"""Maximum ratio of the rates of a pair: half the bits give about twice the rate, and four times means a sparse rate."""
DENSE_PEAK = (
    "check both peaks, and give dense ones: half of what is published with structured sparsity; if the chip emulates a "
    "format, say so in notes"
)
HALF_RATE = "give both dense and of matrix units; if one really has half the rate, say 'half the rate' in notes"
SLOW_INTEGERS = "check both; if the chip really has few units for integers, say so of int8 in notes"
ONE_DEVICE = (
    "give one device's share in bytes, not bits: 400 Gb/s are 5.0e+10; if links and network are one fabric, notes say "
    "the words 'same fabric'"
)
SIXTEEN_BITS = ("bf16", "fp16")
RATIOS = (
    *((PEAK + two, PEAK + one, 0.999, SPARSE, DENSE_PEAK, "emulated|more than four") for one, two in FORMATS[2:]),
    *((PEAK + two, PEAK + one, 0.999, math.inf, DENSE_PEAK, "emulated") for one, two in FORMATS[:2]),
    *((PEAK + two, PEAK + "tf32", 1.6, SPARSE, DENSE_PEAK, "emulated") for two in SIXTEEN_BITS),
    (PEAK + "bf16", PEAK + "fp16", 0.6, 1.5, HALF_RATE, "emulated|half the rate"),
    *((PEAK + name, BANDWIDTH, *OPERATIONS_PER_BYTE, "correct a prefix", "emulated") for name in ("bf16", "fp16")),
    (LINK, BANDWIDTH, 0.0, 0.75, "give bytes, not bits, that one device sends in one direction", "$."),
    (NIC, LINK, 0.0, 0.999, f"check both; {ONE_DEVICE}", "same fabric"),
    *((PEAK + "int8", PEAK + two, 0.0, SPARSE, DENSE_PEAK, "half the rate|fp32 accumulation") for two in SIXTEEN_BITS),
    *((PEAK + "int8", PEAK + two, 0.0, 2 * SPARSE, DENSE_PEAK, "$.") for two in SIXTEEN_BITS),
    (PEAK + "int8", PEAK + "fp8", 0.0, SPARSE, DENSE_PEAK, "$."),
    (PEAK + "int8", PEAK + "bf16", 0.999, math.inf, SLOW_INTEGERS, "int8"),
    (NIC, HOST, 0.0, 1.001, ONE_DEVICE, "same fabric"),
)
"""Bounds of a figure relative to another one, the fix, and words of the notes that explain another ratio."""


@check("write bytes, seconds, bytes or flops per second, without prefixes; YAML wants 3.0e+14", each=chips)
def figures_are_plausible(chip: Chip) -> Problems:
    figures = {key: fact.value for key, fact in chip.figures.items()}
    if chip.link:
        figures["link.latency_seconds"] = chip.link.latency_seconds
    for key, value in figures.items():
        low, high = next(limits for start, limits in RANGES.items() if key.startswith(start))
        if not low <= value <= high:
            yield f"{chip.name}: {key} = {value:g} is not in {low:g} to {high:g}"


@check(each=chips)
def figures_are_consistent(chip: Chip) -> Problems:
    figures = {key: fact.value for key, fact in chip.figures.items()}
    if chip.link and chip.link.topology == "shared-memory":
        del figures[LINK]
    for figure, base, low, high, fix, words in RATIOS:
        if figure in figures and base in figures and not re.search(words, chip.notes):
            ratio = figures[figure] / figures[base]
            if not low <= ratio <= high:
                values = f"{figure} = {figures[figure]:g} is {ratio:.3g} times {base} = {figures[base]:g}"
                yield Problem(f"{chip.name}: {values}", fix)


OF_A_NODE = re.compile(
    r"\b[Aa] (?:node|server) (?:has|of) (\d+) (?:of (?:these|the \d+) )?devices"
    r"|\b(\d+) devices (?:a|per) (?:node|server)"
)
MOST_DEVICES = 32
"""Maximum number of devices of a node. A rack of several hosts is a link domain."""


@check("devices_per_node counts devices, as the tool lists them: a card may have several")
def nodes_have_the_devices_of_transcripts(plugin: Subject) -> Problems:
    for chip in plugin.own_chips():
        if chip.devices_per_node % chip.devices_per_card:
            count = f"devices_per_card = {chip.devices_per_card} does not divide devices_per_node"
            yield f"{chip.name}: {count} = {chip.devices_per_node}"
        said = {int(one or two) for one, two in OF_A_NODE.findall(chip.notes)}
        if said and chip.devices_per_node not in said:
            yield f"{chip.name}: devices_per_node = {chip.devices_per_node}, but notes say {min(said)}"
        if chip.devices_per_node > MOST_DEVICES and not (chip.link and chip.link.topology == "shared-memory"):
            yield f"{chip.name}: devices_per_node = {chip.devices_per_node}, more than any known node has"
        for each in _listings(plugin):
            listed = sum(one.devices for one in each.lists if chip.has_name(one.chip))
            if listed > chip.devices_per_node:
                yield f"{chip.name}: devices_per_node = {chip.devices_per_node}, but {each.name} lists {listed}"


def _listings(plugin: Subject) -> tuple[Transcript, ...]:
    try:
        return plugin.listings
    except Skip:
        return ()


@check("give how many consecutive devices the link joins: a share of a node, or whole nodes", each=chips)
def link_domains_divide_nodes(chip: Chip) -> Problems:
    size, node = chip.link.domain_size if chip.link else None, chip.devices_per_node
    if size is not None and (size < 1 or (size % node and node % size)):
        yield f"{chip.name}: link.domain_size = {size} does not divide devices_per_node = {node}"


@check("correct the bandwidth, the memory or the peak: bytes, not bits, of one device", each=chips)
def memory_bandwidth_is_plausible(chip: Chip) -> Problems:
    rate, memory = chip.memory_bandwidth_bytes_per_second, chip.memory_bytes
    if rate is None or rate.value < ACCELERATOR_BANDWIDTH:
        return
    given, (low, high) = f"{chip.name}: {BANDWIDTH} = {rate.value:g}", SECONDS_OF_MEMORY
    for name in ("bf16", "fp16"):
        peak = chip.dense_flops_per_second.get(name)
        if peak and peak.value < MATRIX_OPERATIONS_PER_BYTE * rate.value:
            ratio = peak.value / rate.value
            yield f"{given} leaves {ratio:.3g} operations per byte in {name}, fewer than any known chip"
    if memory and not low <= memory.value / rate.value <= high:
        yield f"{given} reads the whole memory in {memory.value / rate.value:.2g} s; known chips take {low} to {high}"


USUAL_OPERATIONS_PER_BYTE, MOST_OPERATIONS_PER_BYTE = 330.0, 460.0
"""Operations per byte of memory traffic in 16 bits. Few chips exceed the first figure, none the second, but most would
with doubled (sparse) peaks."""
OVER_FP32 = 40.0
"""Maximum ratio of a 16-bit peak to fp32; 31 is the largest of a known chip."""
SAME = (0.9, 1.25)
"""8 bits are about twice as fast as 16 bits, or integers are slow. If both are equal, one of the peaks is sparse."""

REACHED = 0.3
"""Minimum share of a dense peak that large products reach. They reach half as much of a sparse peak."""

DENSE = re.compile(r"\bdense\b|(without|no|not) (structured )?sparsity", re.I)
"""Words of a source or of the notes that confirm a dense peak."""


@check(
    "give dense peaks, half of what is published with structured sparsity; if they are dense, add the word 'dense' to "
    "the source or the notes",
    each=chips,
)
def peaks_are_dense(chip: Chip) -> Problems:
    peaks = chip.dense_flops_per_second
    for name in ("bf16", "fp16"):
        if name in peaks and (why := _peak_problem(chip, name)):
            yield f"{chip.name}: {name} = {peaks[name].value:g} {why}"


@check("remove the peak, or the sentence", each=chips)
def notes_agree_with_peaks(chip: Chip) -> Problems:
    for name in chip.dense_flops_per_second:
        if said := re.search(rf"\b(no|does not support) {name}\b", chip.notes, re.I):
            yield f"{chip.name}: dense_flops_per_second has {name}, and notes say {said[0]!r}"


@check("give the dense peak, and say so in the source: 'dense' or 'without sparsity'", each=chips)
def peak_sources_are_dense(chip: Chip) -> Problems:
    for name, peak in chip.dense_flops_per_second.items():
        detail = peak.source.detail
        if re.search(r"spars|\u7a00\u758f", detail, re.I) and not DENSE.search(detail) and "half" not in detail:
            yield f"{chip.name}: {name} has the source {detail[:120]!r}, which mentions sparsity"


@check(
    "look for a peak with sparsity, a time in another unit than us in kernels.jsonl, or a small gemm_share in "
    "curve.yaml",
    each=Subject.own_costs,
)
def large_matmuls_reach_the_peak(chip: Chip, costs: KernelCosts) -> Problems:
    side = np.full(1, 8192.0)
    for name in ("bf16", "fp16"):
        peak = chip.dense_flops_per_second.get(name)
        rate = 2.0 * 8192.0**3 / float(costs.gemm_seconds(side, side, side, name)[0])
        if peak and rate < REACHED * peak.value:  # false for NaN
            yield f"{chip.name}: a product of 8192 cubed reaches {rate / peak.value:.0%} of the peak in {name}"


def _peak_problem(chip: Chip, name: str) -> str:
    """Return why a 16-bit peak looks like a sparse rate, or an empty string if it does not."""
    peaks, rate = chip.dense_flops_per_second, chip.memory_bandwidth_bytes_per_second
    peak = peaks[name].value
    usual = MOST_OPERATIONS_PER_BYTE if _is_dense(chip, peaks[name]) else USUAL_OPERATIONS_PER_BYTE
    if rate and usual * rate.value < peak <= OPERATIONS_PER_BYTE[1] * rate.value:
        return f"is {peak / rate.value:.0f} operations per byte of memory traffic, more than any known chip"
    if "fp32" in peaks and peak > OVER_FP32 * peaks["fp32"].value:
        return f"is {peak / peaks['fp32'].value:.0f} times fp32, more than any known chip"
    for narrow in ("fp8", "int8"):
        if narrow in peaks and SAME[0] <= peaks[narrow].value / peak <= SAME[1]:
            return f"equals the peak of {narrow}, which has half the bits"
    return ""


def _is_dense(chip: Chip, peak: Fact) -> bool:
    return bool(DENSE.search(peak.source.detail) or DENSE.search(chip.notes))


MEMORY_RATIOS = (0.98, 1.25)
"""Range of a chip's memory divided by the memory in a transcript, which error correction reduces."""


@check("give bytes: 64 GiB are 68719476736; if only the nominal size is known, say 'nominal' in the source", each=chips)
def memory_is_in_binary_units(chip: Chip) -> Problems:
    memory = chip.memory_bytes
    if memory and memory.value % 1e9 == 0 and "nominal" not in memory.source.detail:
        yield f"{chip.name}: memory_bytes = {memory.value:g} is {memory.value / 1e9:g} GB, not GiB"


@check("give the total that the tool reports, not what is in use, in bytes")
def memory_matches_transcripts(plugin: Subject) -> Problems:
    compared = [
        (each.name, chip, listed.memory_mib * 2**20, chip.memory_bytes.value)
        for chip in plugin.own_chips()
        for each in plugin.listings
        for listed in each.lists
        if chip.memory_bytes and listed.memory_mib and chip.has_name(listed.chip)
    ]
    need(compared, "no transcript has the memory of a chip")
    for name, chip, reported, given in compared:
        if not MEMORY_RATIOS[0] <= given / reported <= MEMORY_RATIOS[1]:
            shown = f"{reported / 2**20:g} MiB = {reported}"
            yield f"{chip.name}: memory_bytes = {given:g}, but the transcript {name} has {shown}"
