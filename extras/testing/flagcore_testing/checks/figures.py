"""Checks of a chip's figures and names against its class, its other names, and what its sources say."""

import re
from collections import Counter
from collections.abc import Iterator
from math import inf

from flagcore.domain.chip import Chip, normalize_name
from flagcore_testing.checks.chips import ACCELERATOR_BANDWIDTH, BANDWIDTH, HOST, LINK, PEAK
from flagcore_testing.kit import Problem, Problems, Subject, check, chips

WATTS, MEMORY = "tdp_watts", "memory_bytes"
ONE_UNIT = "check both: one of them has another unit, or counts a card or a node"
CLASS = (
    (PEAK + "fp16", WATTS, 2e11, 5e12),
    (PEAK + "bf16", WATTS, 2e11, 5e12),
    (BANDWIDTH, WATTS, 1e9, 1.6e10),
    (MEMORY, WATTS, 5e7, 1.2e9),
    (LINK, BANDWIDTH, 0.007, inf),
    (HOST, BANDWIDTH, 0.004, 0.25),
    ("nic_bytes_per_second", HOST, 0.03, inf),
    (PEAK + "fp16", MEMORY, 500, 2.5e4),
    (PEAK + "fp16", PEAK + "fp32", 1.6, inf),
    (PEAK + "bf16", PEAK + "fp32", 1.6, inf),
    (PEAK + "tf32", PEAK + "fp32", 0.999, 20),
)
"""Bounds of a figure relative to another one for accelerators. Known chips are inside by a factor of about 1.5."""


@check(ONE_UNIT, each=chips)
def figures_are_of_their_class(chip: Chip) -> Problems:
    figures = {key: fact.value for key, fact in chip.figures.items()}
    if figures.get(BANDWIDTH, inf) < ACCELERATOR_BANDWIDTH or "emulated" in chip.notes:
        return
    for figure, base, low, high in CLASS:
        if figure in figures and base in figures and not low <= figures[figure] / figures[base] <= high:
            ratio = figures[figure] / figures[base]
            values = f"{figure} = {figures[figure]:g} is {ratio:.3g} times {base} = {figures[base]:g}"
            yield f"{chip.name}: {values}, and {low:g} to {high:g} on known chips"


PCIE = re.compile(r"\bPCIe\b", re.I)
NIC_LATENCY = (1e-7, 1e-3)


@check(each=chips)
def links_are_named_as_they_are(chip: Chip) -> Problems:
    if chip.nic_latency_seconds is not None and not NIC_LATENCY[0] <= chip.nic_latency_seconds <= NIC_LATENCY[1]:
        text = f"{chip.name}: nic_latency_seconds = {chip.nic_latency_seconds:g}"
        yield Problem(text, "give seconds: 5 us are 5.0e-6")
    link, host = chip.link, chip.host_bytes_per_second
    if link is None or link.topology == "shared-memory":
        return
    rate = link.bytes_per_second.value
    if bool(PCIE.search(link.name)) != (link.topology == "pcie"):
        text = f"{chip.name}: link.topology = {link.topology!r}, but link.name = {link.name!r}"
        yield Problem(text, "write topology: pcie for devices that PCIe connects, and only for these")
    if host and link.topology == "pcie" and not 0.49 <= rate / host.value <= 1.01:
        text = f"{chip.name}: {LINK} = {rate:g} over PCIe, but host_bytes_per_second = {host.value:g}"
        yield Problem(text, "both are the rate of the device's interface in one direction")
    if host and link.topology != "pcie" and rate < host.value:
        text = f"{chip.name}: {LINK} = {rate:g} of {link.name} is below host_bytes_per_second = {host.value:g}"
        yield Problem(text, "give bytes, not bits, and the rate to all peers together; a link below PCIe is no gain")
    if link.whole_domains and link.domain_size is None:
        yield Problem(f"{chip.name}: link.whole_domains without link.domain_size", "give the size of a domain")


GIBIBYTES = re.compile(r"(?<![\w.])(\d{1,3}) ?G(?:i?B)?\b")
NAMED = (0.86, 1.08)
"""Range of a chip's memory divided by the GiB in a name; error correction takes a sixteenth."""


@check("correct the name or the figure", each=chips)
def names_agree_with_the_memory(chip: Chip) -> Problems:
    memory = chip.memory_bytes.value if chip.memory_bytes else 0.0
    for name in (chip.name, *chip.aliases) if memory else ():
        for size in GIBIBYTES.findall(name.replace("-", " ")):
            if not NAMED[0] <= memory / (int(size) * 2**30) <= NAMED[1]:
                shown = f"{memory / 2**30:.3g} GiB"
                yield f"{chip.name}: the name {name!r} has {size} GB, but memory_bytes are {shown}"


@check("list the names of this chip only", each=lambda plugin: [(plugin, chip) for chip in plugin.own_chips()])
def names_are_of_their_chip(plugin: Subject, chip: Chip) -> Problems:
    others = [other.name for other in plugin.chips if other is not chip]
    for name in chip.aliases:
        words = {*re.split(r"[ /,()]+", name.casefold()), re.sub(r"^[a-z]+(?=\d)", "", name.casefold())}
        if normalize_name(chip.name) not in normalize_name(name):
            for other in (other for other in others if other.casefold() in words):
                yield f"{chip.name}: aliases has {name!r}, which names {other}"


@check("write the compiler's target, as for the vendor's other chips")
def architectures_are_alike(plugin: Subject) -> Problems:
    named = [chip for chip in plugin.own_chips() if chip.architecture]
    starts = Counter(re.match(r"\D*", chip.architecture)[0] for chip in named)  # type: ignore[index]
    usual, times = starts.most_common(1)[0] if starts else ("", 0)
    for chip in named:
        start = re.match(r"\D*", chip.architecture)[0]  # type: ignore[index]
        if not re.fullmatch(r"[A-Za-z]+_?\d+\w*", chip.architecture) or (start != usual and times > 1):
            yield f"{chip.name}: architecture = {chip.architecture!r}"
        kin = [one for one in named if _family(one) == _family(chip)]
        (most, times_of_most), *_ = Counter(one.architecture for one in kin).most_common(1)
        if chip.architecture != most and times_of_most > 1:
            yield f"{chip.name}: architecture = {chip.architecture!r}, but {most!r} for others of its family"
        said = re.search(r"\b(gfx|sm_)\d\w+", chip.notes)
        if said and said[0] != chip.architecture:
            yield f"{chip.name}: architecture = {chip.architecture!r}, but notes say {said[0]}"


def _family(chip: Chip) -> str:
    """Return the first letters and digits of a chip's name, such as A100."""
    found = re.match(r"\D*\d+", chip.name)
    return found[0] if found else chip.name


NUMBER = r"(?<![\w.,])(\d+(?:,\d{3})*(?:\.\d+)?)"
FORMAT = "fp64|fp32|tf32|bf16|fp16|fp8|fp4|int8"
PRECISE = re.compile(rf"{NUMBER} (?:dense )?((?:(?:{FORMAT})(?: and |, |/)?)+)(?= ?T(?:FLOP|OP)| and \d)", re.I)
DERIVED = re.compile(r"\bof \d+ [^;]*?multiply-adds")
SIZE = re.compile(rf"{NUMBER} ?(MiB|GiB|GB)(?!/s)\b")
UNITS = {"MiB": (2.0**20,), "GiB": (2.0**30,), "GB": (2.0**30, 1e9)}
EXPLAINED = re.compile(r"halved|shared|server|node|module|accumulation|less|\d or \d")
"""Words of a source whose figure is of something larger than one device, or one of several."""
STATED_ONLY = ("published", "datasheet", "measured")


@check("copy the figure of the source; if it is of a card or a node, say so with the word 'halved' or its share")
def figures_are_those_of_their_sources(plugin: Subject) -> Problems:
    for chip in plugin.own_chips():
        for key, fact in chip.figures.items():
            said = [*_said(key, fact.source.detail)]
            explained = EXPLAINED.search(fact.source.detail)
            if fact.source.kind not in STATED_ONLY or not said or explained:
                continue
            if not any(0.93 <= fact.value / number <= 1.05 for _, number in said):
                shown = ", ".join(dict.fromkeys(text for text, _ in said))
                yield f"{chip.name}: {key} = {fact.value:g}, but its source has {shown}"


def _said(key: str, detail: str) -> Iterator[tuple[str, float]]:
    """Yield the figures that a source states for exactly this key, as text and value."""
    if key == MEMORY:
        for match in SIZE.finditer(detail):
            yield from ((match[0], float(match[1].replace(",", "")) * unit) for unit in UNITS[match[2]])
    elif key.startswith(PEAK):
        for match in PRECISE.finditer(DERIVED.sub("", detail)):
            if key.removeprefix(PEAK) in re.split(r" and |, |/", match[2].casefold()):
                yield match[0], float(match[1].replace(",", "")) * 1e12
