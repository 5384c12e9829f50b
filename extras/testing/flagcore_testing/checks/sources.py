"""Checks of figures against the words of their sources: units, directions, and what a card or a node shares."""

import re
from collections.abc import Iterator
from difflib import get_close_matches

from flagcore_vendorkit.fields import SOURCE_KEYS

from flagcore.domain.chip import Chip, Fact
from flagcore_testing.checks.chips import BANDWIDTH, DATES, HOST, LINK, NIC, PEAK, mappings
from flagcore_testing.kit import Problem, Problems, Subject, check, chips

ONE_WAY = re.compile(r"one way|one direction|each direction|unidirectional|halved|half of|\u5355\u5411", re.I)
"""Words that confirm the rate of one device in one direction."""
BOTH_WAYS = re.compile(r"both directions|two directions|bidirectional|per pair|a pair\b|in total|\u53cc\u5411", re.I)
PER_NODE = re.compile(r"(?:a|per|each|every) (?:node|server|machine|host)\b|\u6bcf\u8282\u70b9|\u6bcf\u53f0", re.I)
SHARED = re.compile(r"shared by (?:its |the |all )?(\w+)", re.I)
COUNTS = {"two": 2, "four": 4, "eight": 8, "sixteen": 16}
NUMBER = r"(?<![\w.,])(?<!lanes of )(\d+(?:,\d{3})*(?:\.\d+)?)"
RATE = re.compile(rf"{NUMBER} ?(Gb/s|Gbps|Gbit/s|GB/s|TB/s)")
ONE_LINK = re.compile(rf"\b(?:links of|a link of|per link:?|each link has) {NUMBER} ?(Gb/s|Gbps|GB/s|TB/s)")
FLOPS = re.compile(rf"{NUMBER}(?=[^;(]{{0,40}}?(?:TFLOP|TOP))")
WATTS = re.compile(rf"{NUMBER} W\b")
HALF = (f"{PEAK}bf16", f"{PEAK}fp16")
"""Figures that are compared with half of their value: sources also state the peaks of narrower formats."""
UNITS = {"GB/s": 1e9, "TB/s": 1e12}
"""Units in bytes per second. All others in RATE are gigabits."""
PER_CARD = re.compile(r"[^;,]{0,30}\b(?:a|per) (?:card|module)\b")
PCIE = re.compile(r"PCIe ?(?:gen ?)?([2-6])\b", re.I)
TRANSFERS = re.compile(r"(\d+) ?GT/s")
LANES = re.compile(r"\bx(\d{1,2})\b|(\d{1,2}) lanes")
LARGEST_PCIE = 6.6e10
"""Rate of PCIe 5.0 with 16 lanes in one direction, in bytes per second, rounded up. Faster interfaces to the host are
rare, so their sources must state the direction."""


@check(
    "give what one device sends in one direction, half of what is published for both; say 'one way' in the source or "
    "the notes",
    each=chips,
)
def link_rates_are_one_way(chip: Chip) -> Problems:
    link = chip.link
    if link is not None and link.topology not in ("pcie", "shared-memory"):
        words = f"{link.bytes_per_second.source.detail} {chip.notes}"
        if not ONE_WAY.search(words):
            two_way = BOTH_WAYS.search(link.bytes_per_second.source.detail)
            problem = f"has a source for {two_way[0]!r}" if two_way else "does not say whether it is one way"
            yield f"{chip.name}: link.bytes_per_second = {link.bytes_per_second.value:g} {problem}"


@check("give what one direction of PCIe carries: 1.6e+10 for 3.0 x16, 3.2e+10 for 4.0, 6.4e+10 for 5.0", each=chips)
def pcie_rates_are_one_way(chip: Chip) -> Problems:
    for key in (HOST, LINK):
        fact = chip.figures.get(key)
        if fact is None or (key == LINK and (chip.link is None or chip.link.topology != "pcie")):
            continue
        words = f"{chip.link.name if chip.link and key == LINK else ''} {fact.source.detail}"
        limit = _pcie_rate(words)
        if limit and (not 0.4 * limit < fact.value < 1.05 * limit or _is_unexplained_half(fact.value / limit, words)):
            yield f"{chip.name}: {key} = {fact.value:g}, but one direction of its interface carries {limit:g}"
        elif fact.value > LARGEST_PCIE and not ONE_WAY.search(f"{words} {chip.notes}"):
            yield f"{chip.name}: {key} = {fact.value:g} is above PCIe 5.0, and its source does not say 'one way'"


@check("add the rates of all links of a device: collectives use them together", each=chips)
def links_are_added_up(chip: Chip) -> Problems:
    link = chip.link
    if link is None or link.topology not in ("mesh", "switch") or min(chip.devices_per_node, link.domain_size or 3) < 3:
        return
    for match in ONE_LINK.finditer(link.bytes_per_second.source.detail):
        one = float(match[1]) * UNITS.get(match[2], 0.125e9)
        if any(_close(link.bytes_per_second.value, one * share) for share in (1.0, 0.5)):
            yield f"{chip.name}: link.bytes_per_second = {link.bytes_per_second.value:g} is that of one of its links"


def _is_unexplained_half(share: float, words: str) -> bool:
    return _close(share, 0.5) and not re.search(r"halved|shared|share of|device of|die\b", words)


def _pcie_rate(words: str) -> float | None:
    """Return the rate in one direction of the fastest PCIe interface in a text in bytes per second, or None."""
    transfers = [float(each) for each in TRANSFERS.findall(words)]
    transfers += [2.0 ** (int(generation) - 1) * 2.0 for generation in PCIE.findall(words) if not transfers]
    lanes = [int(first or second) for first, second in LANES.findall(words)]
    return max(transfers) * max(lanes, default=16) / 8 * 1e9 if transfers else None


@check("give one device's figure: one direction, in bytes, dense; divide what the devices of a card or node share")
def figures_match_their_sources(plugin: Subject) -> Problems:
    for chip in plugin.own_chips():
        for key, fact in chip.figures.items():
            if why := next(_differences(key, fact, chip), ""):
                yield f"{chip.name}: {key} = {fact.value:g}, {why}"


def _differences(key: str, fact: Fact, chip: Chip) -> Iterator[str]:
    """Yield how a figure differs from those in its source."""
    detail, value = fact.source.detail, fact.value
    stated = _stated(key, detail)
    halvings = 2 if "halved twice" in detail else 1 if "halved" in detail else 0
    share = 2.0**halvings
    for shown, number, after in stated:
        says = f"but its source has {shown}"
        if (
            halvings
            and not _is_one_of(value * share, stated)
            and any(_close(value, number * times) for times in (1.0, 0.5, 8.0, 8.0 / share, 0.125 / share))
        ):
            yield f"{says}, halved{' twice' if halvings == 2 else ''}: {number / share:g}"
        elif not _is_one_of(value, stated) and not halvings:
            bits = {LINK: (8.0, 0.125), HOST: (8.0, 0.125), BANDWIDTH: (8.0, 0.125), NIC: (8.0,)}.get(key, ())
            if any(_close(value, number * times) for times in bits):
                yield f"{says}, which is {number:g}"
            elif (
                fact.source.kind != "estimated"
                and not key.startswith((PEAK, "tdp"))
                and any(_close(value, number * times) for times in (2.0, 4.0))
            ):
                yield f"{says}: {value / number:.2g} times as much"
            elif key in HALF and 0.44 <= number / value <= 0.51 and _is_unexplained(number, value, stated, chip):
                yield f"{says}, about half of it"
        powers = (10.0**power for power in (-3, -2, -1, 1, 2, 3))
        if not _is_one_of(value * share, stated) and any(_close(value * share, number * power) for power in powers):
            yield f"{says}: a power of ten lies between them"
        if chip.devices_per_card > 1 and not halvings and PER_CARD.match(after) and _close(value, number, 0.025):
            yield f"{says} for a card of {chip.devices_per_card} devices"
        if key == NIC and (sharing := _sharing(detail, chip)) > 1 and value > 1.01 * number / sharing:
            yield f"{says} for {sharing} devices: {number / sharing:g} each"


def _stated(key: str, detail: str) -> list[tuple[str, float, str]]:
    """Return the figures of a source with the unit of a key: the text, the value in base units, and the text after."""
    if key.startswith(PEAK):
        found = [(match, 1e12) for match in FLOPS.finditer(detail)]
    elif key == "tdp_watts":
        found = [(match, 1.0) for match in WATTS.finditer(detail)]
    elif key.endswith("bytes_per_second"):
        found = [(match, UNITS.get(match[2], 0.125e9)) for match in RATE.finditer(detail)]
    else:
        found = []
    return [(match[0], float(match[1].replace(",", "")) * unit, detail[match.end() :]) for match, unit in found]


def _is_one_of(value: float, stated: list[tuple[str, float, str]], tolerance: float = 0.03) -> bool:
    return any(_close(value, number, tolerance) for _, number, _ in stated)


def _is_unexplained(number: float, value: float, stated: list[tuple[str, float, str]], chip: Chip) -> bool:
    """Return whether a figure of a source is not a peak of the chip, and no other figure of it is near `value`."""
    peaks = chip.dense_flops_per_second.values()
    return not _is_one_of(value, stated, 0.15) and not any(_close(number, peak.value, 0.03) for peak in peaks)


def _close(value: float, other: float, tolerance: float = 0.01) -> bool:
    return abs(value / other - 1) < tolerance if other else False


def _sharing(detail: str, chip: Chip) -> int:
    """Return the number of devices that share the network adapter of a source, or 1 if the source does not say it."""
    if shared := SHARED.search(detail):
        word = shared[1].casefold()
        return int(word) if word.isdecimal() else COUNTS.get(word, 1)
    return chip.devices_per_node if PER_NODE.search(detail) and "share of" not in detail else 1


ADDRESS = re.compile(
    r"\b[\w-]+(\.[\w-]+)*\.[a-z]{2,}\b|\b[\w.-]+/[\w.-]+|\bissues? \d+|\bpull requests? \d+|@[0-9a-f]{6}|"
    r"\bpytorch\b|PyPI|arXiv|\bISBN|[\w-]+\.(py|cpp|md|pdf)\b",
    re.I,
)
"""An address, a repository with a path, or a document of one's own with a number."""
SOURCE_WORDS = {"kind", *SOURCE_KEYS.values(), *DATES, "page", "software", "repeats", "confidence", "note", "driver"}
"""The keys of sources. Others are allowed, and added to the text of the source."""
WAIVED = re.compile("not checked|without an address")
"""Words of a source that say that nothing can be opened."""
DOCUMENT = re.compile(r"page|\d")
"""What finds a place in a document of the vendor: a page, a revision, or a date."""


@check(
    "give an address that others can open: a page with its section, or a repository, path and commit; without one, let "
    "confidence begin with 'not checked'"
)
def sources_can_be_found(plugin: Subject) -> Problems:
    for name, content in plugin.yaml_files("**/*.yaml"):
        for path, entry in mappings(content):
            for key in sorted(map(str, entry.keys() - SOURCE_WORDS)) if "kind" in entry else ():
                if near := get_close_matches(key, SOURCE_WORDS, n=1, cutoff=0.75):
                    yield Problem(f"{name}: {path}{key} is unknown", f"write {near[0]}")
            kind, words = entry.get("kind"), " ".join(str(value) for value in entry.values())
            if kind == "published" and not ADDRESS.search(str(entry.get("where"))) and not WAIVED.search(words):
                yield f"{name}: {path}where = {str(entry.get('where'))[:80]!r} has no address"
            if kind == "datasheet" and not (DOCUMENT.search(words) or ADDRESS.search(words)):
                yield f"{name}: {path}document = {str(entry.get('document'))[:80]!r} has no page, revision or address"
            if kind == "measured" and re.search(r"https?://|github\.com|@[0-9a-f]{7,}\b", str(entry.get("how"))):
                fix = "write kind: published with where: measured means by the authors of this plugin"
                yield Problem(f"{name}: {path}how = {str(entry.get('how'))[:80]!r} is of others", fix)
