"""Checks of figures against the words of their sources: units, directions, shares, and what a text lets compute."""

import math
import re
from collections.abc import Iterator, Sequence
from datetime import date, datetime, timedelta
from difflib import get_close_matches

from flagcore_vendorkit.fields import SOURCE_KEYS

from flagcore.domain.chip import Chip, Fact, Link
from flagcore_testing.checks.bounds import BANDWIDTH, BF16, FP16, HOST, LINK, MEMORY, NIC, PEAK, WATTS
from flagcore_testing.checks.chips import mappings
from flagcore_testing.kit import Problems, Subject, check, chips, linked

ONE_WAY = re.compile(r"one way|one direction|each direction|unidirectional|halved|half of|\u5355\u5411", re.I)
"""Words that confirm the rate of one device in one direction."""
BOTH_WAYS = re.compile(r"both directions|two directions|bidirectional|per pair|a pair\b|in total|\u53cc\u5411", re.I)
PER_NODE = re.compile(r"(?:a|per|each|every) (?:node|server|machine|host)\b|\u6bcf\u8282\u70b9|\u6bcf\u53f0", re.I)
PER_CARD = re.compile(r"[^;,]{0,30}\b(?:a|per) (?:card|module)\b")
SHARED = re.compile(r"shared by (?:its |the |all )?(\w+)", re.I)
WORDS = {"two": 2, "three": 3, "four": 4, "six": 6, "seven": 7, "eight": 8, "sixteen": 16}
NUMBER = r"(?<![\w.,])(?<!lanes of )(\d+(?:,\d{3})*(?:\.\d+)?)"
BITS = 0.125e9
"""A gigabit in bytes: every unit of RATE that UNITS lacks."""
UNITS = {"GB/s": 1e9, "TB/s": 1e12, "MiB": 2.0**20, "GiB": 2.0**30, "GB": 2.0**30, "GHz": 1e9, "MHz": 1e6}
RATE = re.compile(rf"{NUMBER} ?(Gb/s|Gbps|Gbit/s|GB/s|TB/s)")
ONE_LINK = re.compile(rf"\b(?:links of|a link of|per link:?|each link has) {NUMBER} ?(Gb/s|Gbps|GB/s|TB/s)")
FLOPS = re.compile(rf"{NUMBER}(?=[^;(]{{0,40}}?(?:TFLOP|TOP))")
OF_WATTS = re.compile(rf"{NUMBER} W\b")
PCIE = re.compile(r"PCIe ?(?:gen ?)?([2-6])\b", re.I)
TRANSFERS = re.compile(r"(\d+) ?GT/s")
LANES = re.compile(r"\bx(\d{1,2})\b|(\d{1,2}) lanes")
LARGEST_PCIE = 6.6e10
"""Rate of PCIe 5.0 with 16 lanes in one direction, in bytes per second, rounded up. Faster interfaces to the host are
rare, so their sources must state the direction."""


def _number(match: re.Match[str], unit: int = 2) -> float:
    """Return the value of a number and its unit in base units."""
    return float(match[1].replace(",", "")) * UNITS.get(match[unit], BITS)


def is_close(value: float, other: float, tolerance: float = 0.01) -> bool:
    """Return whether two figures differ by less than a share of the second one."""
    return abs(value / other - 1) < tolerance if other else False


DIRECTION = (
    "give what one device sends in one direction, half of what is published for both; say 'one way' in the source or "
    "the notes"
)


@check(DIRECTION, each=linked)
def link_rates_are_one_way_and_of_all_links(chip: Chip, link: Link) -> Problems:
    fact, detail = link.bytes_per_second, link.bytes_per_second.source.detail
    shown, two_way = f"{LINK} = {fact.value:g}", BOTH_WAYS.search(detail)
    if link.topology not in ("pcie", "shared-memory") and not ONE_WAY.search(f"{detail} {chip.notes}"):
        yield f"{shown} {f'has a source for {two_way[0]!r}' if two_way else 'does not say whether it is one way'}"
    has_peers = min(chip.devices_per_node, link.domain_size or 3) >= 3
    for one in map(_number, ONE_LINK.finditer(detail)) if has_peers and link.topology in ("mesh", "switch") else ():
        is_one = is_close(fact.value, one) or is_close(fact.value, 0.5 * one)
        fix = "add the rates of all links of a device: collectives use them together"
        yield is_one, f"{shown} is that of one of its links", fix


@check("give what one direction of PCIe carries: 1.6e+10 for 3.0 x16, 3.2e+10 for 4.0, 6.4e+10 for 5.0", each=chips)
def pcie_rates_are_one_way(chip: Chip) -> Problems:
    name = chip.link.name if chip.link and chip.link.topology == "pcie" else None
    for key, words in ((HOST, ""), *(() if name is None else ((LINK, name),))):
        if fact := chip.figures.get(key):
            words, value, shown = f"{words} {fact.source.detail}", fact.value, f"{key} = {fact.value:g}"
            limit = _pcie_rate(words)
            is_half = limit and is_close(value / limit, 0.5) and not re.search(r"halved|share|device of|die\b", words)
            if limit and (not 0.4 * limit < value < 1.05 * limit or is_half):
                yield f"{shown}, but one direction of its interface carries {limit:g}"
            elif value > LARGEST_PCIE and not ONE_WAY.search(f"{words} {chip.notes}"):
                yield f"{shown} is above PCIe 5.0, and its source does not say 'one way'"


def _pcie_rate(words: str) -> float | None:
    """Return the rate in one direction of the fastest PCIe interface in a text in bytes per second, or None."""
    transfers = [float(each) for each in TRANSFERS.findall(words)]
    transfers += [2.0 ** (int(generation) - 1) * 2.0 for generation in PCIE.findall(words) if not transfers]
    lanes = [int(first or second) for first, second in LANES.findall(words)]
    return max(transfers) * max(lanes, default=16) / 8 * 1e9 if transfers else None


ONE_DEVICE = "give one device's figure: one direction, in bytes, dense; divide what the devices of a card or node share"
COPY = "copy the figure of the source; of a card or a node, say so: 'halved', or its share"
COMPUTE = "correct the figure, or the units, clock and operations in its source: a multiply-add is two operations"


@check(ONE_DEVICE, each=chips)
def figures_match_their_sources(chip: Chip) -> Problems:
    for key, fact in chip.figures.items():
        yield from (f"{key} = {fact.value:g}, {why}" for why in [*_differences(key, fact, chip)][:1])
        derived = _derived(key, fact.source.detail)
        for values, low, high, fix in ((_said(key, fact), 0.93, 1.05, COPY), (derived, 0.88, 1.12, COMPUTE)):
            is_other = values and not any(low < fact.value / number < high for number in values.values())
            text = ", ".join(f"{text} = {value:.4g}" for text, value in values.items())
            yield is_other, f"{key} = {fact.value:g}, but its source has {text}", fix


POWERS_OF_TEN = (1e-3, 1e-2, 0.1, 10.0, 1e2, 1e3)
WAYS, BITS_OR_BYTES = (2.0, 4.0, 16.0), (8.0, 0.125)
"""Ratios of a figure to that of its source which slips lead to: units, directions or halving twice, bits."""


def _differences(key: str, fact: Fact, chip: Chip) -> Iterator[str]:
    """Yield how a figure differs from those in its source by a factor that slips lead to."""
    detail, stated = fact.source.detail, _stated(key, fact.source.detail)
    halved = next((words for words in ("halved twice", "halved") if words in detail), "")
    share = {"halved twice": 4.0, "halved": 2.0}.get(halved, 1.0)
    whole, after_halving = fact.value * share, f", {halved}" if halved else ""
    numbers, cards = [number for _, number, _ in stated], 1 if halved else chip.devices_per_card
    sharing = _sharing(detail, chip) if key == NIC else 1
    for shown, number, after in stated:
        says, ratio = f"but its source has {shown}", whole / (number or math.nan)
        if _is_slip(key, fact, chip, whole, ratio, numbers):
            yield f"{says}{after_halving}: {number / share:g}; the figure is {ratio:.3g} times as much"
        if cards > 1 and PER_CARD.match(after) and is_close(ratio, 1.0, 0.025):
            yield f"{says} for a card of {cards} devices"
        if sharing > 1 and ratio > 1.01 * share / sharing:
            yield f"{says} for {sharing} devices: {number / sharing:g} each"


def _is_slip(key: str, fact: Fact, chip: Chip, whole: float, ratio: float, numbers: Sequence[float]) -> bool:
    """Return whether a slip leads from a number of the source to the figure. That of another peak is none."""
    if is_one_of(whole, numbers):
        return False
    if key.startswith(PEAK):
        peaks = [peak.value for peak in chip.dense_flops_per_second.values()]
        is_explained = is_one_of(whole / ratio, peaks) or is_one_of(whole, numbers, 0.15)
        is_half = key in (BF16, FP16) and 1.96 <= ratio <= 2.27 and not is_explained
        return is_half or is_one_of(ratio, POWERS_OF_TEN, 0.01)
    of_rates = (*BITS_OR_BYTES[: 1 if key == NIC else 2], *(WAYS if fact.source.kind != "estimated" else ()))
    return is_one_of(ratio, (*POWERS_OF_TEN, *(of_rates if key != WATTS else ())), 0.01)


def is_one_of(value: float, numbers: Sequence[float], tolerance: float = 0.03) -> bool:
    """Return whether a figure is close to one of several."""
    return any(is_close(value, number, tolerance) for number in numbers)


def _stated(key: str, detail: str) -> list[tuple[str, float, str]]:
    """Return the figures of a source with the unit of a key: the text, the value in base units, and the text after."""
    if key.endswith("bytes_per_second"):
        found = [(match, _number(match)) for match in RATE.finditer(detail)]
    else:
        pattern, unit = (FLOPS, 1e12) if key.startswith(PEAK) else (OF_WATTS, 1.0)
        matches = pattern.finditer(detail) if key != MEMORY else ()
        found = [(match, float(match[1].replace(",", "")) * unit) for match in matches]
    return [(match[0], value, detail[match.end() :]) for match, value in found]


def _sharing(detail: str, chip: Chip) -> int:
    """Return the number of devices that share the network adapter of a source, or 1 if the source does not say it."""
    if shared := SHARED.search(detail):
        word = shared[1].casefold()
        return int(word) if word.isdecimal() else WORDS.get(word, 1)
    return chip.devices_per_node if PER_NODE.search(detail) and "share of" not in detail else 1


FORMAT = "fp64|fp32|tf32|bf16|fp16|fp8|fp4|int8"
EXACT = r"(?<![\w.,])(\d+(?:,\d{3})*(?:\.\d+)?)"
PRECISE = re.compile(rf"{EXACT} (?:dense )?((?:(?:{FORMAT})(?: and |, |/)?)+)(?= ?T(?:FLOP|OP)| and \d)", re.I)
COMPUTED = re.compile(r"\bof \d+ [^;]*?multiply-adds")
SIZE = re.compile(rf"{EXACT} ?(MiB|GiB|GB)(?!/s)\b")
EXPLAINED = re.compile(r"halved|shared|server|node|module|accumulation|less|\d or \d")
"""Words of a source whose figure is of something larger than one device, or one of several."""


def _said(key: str, fact: Fact) -> dict[str, float]:
    """Return the figures that a source states for exactly this key, by their text. A size in GB may be in GiB."""
    detail, said = fact.source.detail, dict[str, float]()
    if fact.source.kind in ("published", "datasheet", "measured") and not EXPLAINED.search(detail):
        for match in SIZE.finditer(detail) if key == MEMORY else ():
            said[match[0]] = _number(match)
            said |= {f"{match[0]} of 1e9 bytes": _number(match) / 2**30 * 1e9} if match[2] == "GB" else {}
        for match in PRECISE.finditer(COMPUTED.sub("", detail)) if key.startswith(PEAK) else ():
            if key.removeprefix(PEAK) in re.split(r" and |, |/", match[2].casefold()):
                said[match[0]] = float(match[1].replace(",", "")) * 1e12
    return said


CLOCK = re.compile(r"\bat (\d+(?:\.\d+)?) ?(GHz|MHz)")
CORES = re.compile(r"\b(\d+) (?:[a-z]+ )?(?:units|cores)(?: at [\d.]+ ?[GM]Hz)? of (\d+)\b")
OF_FORMATS = re.compile(r"\b(\d+) (fp64|fp32|tf32|bf16|fp16|fp8|fp4|int8)\b(?=[^;]*multiply-adds)")
OF_PINS = re.compile(r"\b(\d+) bits? (?:x|at) (\d+(?:\.\d+)?) ?(GHz|MHz)(.*?two transfers)?")
TAKEN = re.compile(r"\b([\d.]+) GB/s\b[^;]*?\btaken as (\d+)% of (?:the|a) link")
LINKS = re.compile(r"\b(two|three|four|six|seven|eight) links")


def _derived(key: str, detail: str) -> dict[str, float]:
    """Return the figures that follow from the pins, the links, or the units and the clock in a source, by how."""
    if key == BANDWIDTH:
        pins = ((each, float(each[2]) * UNITS[each[3]] * (2 if each[4] else 1)) for each in OF_PINS.finditer(detail))
        return {f"{each[1]} bit x {each[2]} {each[3]}": float(each[1]) / 8 * clock for each, clock in pins}
    if key == LINK and (taken := TAKEN.search(detail)):
        links = LINKS.findall(detail)[:1]
        rate = float(taken[1]) * 1e9 / (int(taken[2]) / 100) * WORDS.get("".join(links), 1)
        return {f"{f'{links[0]} links of ' if links else ''}{taken[1]} GB/s / {taken[2]}%": rate}
    clock, cores = CLOCK.search(detail), CORES.findall(detail)
    is_computed = key.startswith(PEAK) and "multiply-adds" in detail and cores
    return _operations(key.removeprefix(PEAK), _number(clock), cores, detail) if is_computed and clock else {}


def _operations(name: str, clock: float, cores: list[tuple[str, str]], detail: str) -> dict[str, float]:
    """Return the rate in a format of `cores`, each a number of units and their multiply-adds in a clock."""
    of_formats = {each: number for number, each in OF_FORMATS.findall(detail)}
    own = [(cores[0][0], of_formats[name])] if name in of_formats else []
    pairs = own if of_formats else cores
    rate = 2 * clock * sum(float(count) * float(each) for count, each in pairs)
    return {f"2 x {' and '.join(f'{count} x {each}' for count, each in pairs)} at {clock:g} Hz": rate} if pairs else {}


DATES, OPENED, FIRST_YEAR = {"date", "checked", "quoted"}, {"checked", "quoted"}, "2024"
"""Days on which a source was opened are not before the year of the first plugin."""
DATE = re.compile(r"\d{4}(-\d{2}){0,2}")
ADDRESS = re.compile(
    r"\b[\w-]+(\.[\w-]+)*\.[a-z]{2,}\b|\b[\w.-]+/[\w.-]+|\bissues? \d+|\bpull requests? \d+|@[0-9a-f]{6}|"
    r"\bpytorch\b|PyPI|arXiv|\bISBN|[\w-]+\.(py|cpp|md|pdf)\b",
    re.I,
)
"""An address, a repository with a path, or a document of one's own with a number."""
OF_OTHERS = re.compile(r"https?://|github\.com|@[0-9a-f]{7,}\b")
SOURCE_WORDS = {"kind", *SOURCE_KEYS.values(), *DATES, "page", "software", "repeats", "confidence", "note", "driver"}
"""The keys of sources. Others are allowed, and added to the text of the source."""
WAIVED = re.compile("not checked|without an address")
"""Words of a source that say that nothing can be opened."""
DOCUMENT = re.compile(r"page|\d")
"""What finds a place in a document of the vendor: a page, a revision, or a date."""
FIND = (
    "give an address that others can open: a page with its section, or a repository, path and commit; without one, let "
    "confidence begin with 'not checked'"
)


@check(FIND)
def sources_are_dated_and_found(plugin: Subject) -> Problems:
    for name, content in plugin.yaml_files("**/*.yaml"):
        for path, entry in mappings(content):
            where, kind, words = f"{name}: {path}", entry.get("kind"), " ".join(map(str, entry.values()))
            place, document, how = (str(entry.get(key))[:80] for key in ("where", "document", "how"))
            for key in DATES & entry.keys():
                if problem := _date_problem(key, entry[key]):
                    fix = "write the day on which you did it, as 2026-11-02, or 2026-11"
                    yield True, f"{where}{key} = {problem}", fix
            for key in sorted(map(str, entry.keys() - SOURCE_WORDS)) if "kind" in entry else ():
                if near := get_close_matches(key, SOURCE_WORDS, n=1, cutoff=0.75):
                    yield True, f"{where}{key} is unknown", f"write {near[0]}"
            yield from (
                (kind == "measured" and not entry.get("date"), f"{where.rstrip('.')} is measured, but has no date",
                 "add date: 2026-11-02, and preferably software and repeats; measurements of others are published"),
                (kind == "published" and not ADDRESS.search(str(entry.get("where"))) and not WAIVED.search(words),
                 f"{where}where = {place!r} has no address"),
                (kind == "datasheet" and not (DOCUMENT.search(words) or ADDRESS.search(words)),
                 f"{where}document = {document!r} has no page, revision or address"),
                (kind == "measured" and OF_OTHERS.search(str(entry.get("how"))), f"{where}how = {how!r} is of others",
                 "write kind: published with where: measured means by the authors of this plugin"),
            )  # fmt: skip


def _date_problem(key: str, value: object) -> str:
    """Return a date with what is wrong with it, or an empty string."""
    text = str(value)
    try:
        date.fromisoformat(f"{text}-01-01"[:10])
        is_date = isinstance(value, date | datetime) or DATE.fullmatch(text) is not None
    except ValueError:
        is_date = False
    if not is_date:
        return f"{value!r} is not a date"
    if text[:10] > str(date.today() + timedelta(days=1)):
        return f"{value} is in the future"
    return f"{value} is long ago" if key in OPENED and text[:4] < FIRST_YEAR else ""
