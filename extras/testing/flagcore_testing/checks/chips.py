"""Checks of chips: names, figures, links, and agreement with the notes and the transcripts."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from flagcore.domain.chip import Chip, Link, normalize_name
from flagcore_testing.checks.bounds import DENSE, HOST, LINK, figures_outside
from flagcore_testing.kit import Problem, Problems, Skip, Subject, check, chips, linked, need, repeated, wrong
from flagcore_testing.package import Transcript


@check()
def chips_and_devices_are_valid(plugin: Subject) -> Problems:
    plugin.loaded.chips()
    plugin.loaded.devices()
    for problem in plugin.problems_of("flagcore_chips", "flagcore_devices"):
        is_twice = "is already a name of" in problem.message
        yield Problem(problem.message, "give each name or alias to one chip") if is_twice else problem


@check("write names as the vendor's tools print them, of this chip only, with single spaces")
def chip_names_are_clean_and_own(plugin: Subject) -> Problems:
    own = plugin.own_chips()
    names = {name.casefold(): chip.name for chip in own for name in (chip.name, *chip.aliases)}
    usual = Counter(chip.vendor.casefold() for chip in own).most_common(1)[0][0]
    for chip in own:
        where, vendor = f"{chip.name}: ", normalize_name(chip.vendor)
        if chip.vendor != usual:
            yield Problem(f"{where}vendor is {chip.vendor}, not {usual}", "write the same lower-case word in each file")
        for name in (chip.name, chip.vendor, *chip.aliases):
            if not name or name != " ".join(name.split()) or not name.isprintable():
                yield Problem(f"{where}the name {name!r} has extra spaces", "separate words by single spaces")
        for name, times in repeated(name.casefold() for name in chip.aliases):
            yield Problem(f"{where}aliases has {name!r} {times} times, ignoring case", "keep one of them")
        for name in (chip.name, *chip.aliases):
            spellings = dict.fromkeys((name, normalize_name(name).removeprefix(vendor)))
            if owner := next(filter(None, map(plugin.others.owner, spellings)), None):
                yield f"{where}{name!r} is also a name of a chip of the plugin {owner}"
            yield from _memory_in_name(chip, name)
        for name in chip.family_names:
            if (owner := names.get(name.casefold(), chip.name)) != chip.name:
                yield f"{where}family_names has {name!r}, which is a name of {owner}"
        for name in (each for each in chip.aliases if normalize_name(chip.name) not in normalize_name(each)):
            words = {*re.split(r"[ /,()]+", name.casefold()), re.sub(r"^[a-z]+(?=\d)", "", name.casefold())}
            for other in (other for other in own if other is not chip and other.name.casefold() in words):
                yield f"{where}aliases has {name!r}, which names {other.name}"


GIBIBYTES = re.compile(r"(?<![\w.])(\d{1,3}) ?G(?:i?B)?\b")
NAMED = (0.86, 1.08)
"""Range of a chip's memory divided by the GiB in a name; error correction takes a sixteenth."""


def _memory_in_name(chip: Chip, name: str) -> Iterator[Problem]:
    memory = chip.memory_bytes.value / 2**30 if chip.memory_bytes else 0.0
    for size in GIBIBYTES.findall(name.replace("-", " ")) if memory else ():
        if not NAMED[0] <= memory / int(size) <= NAMED[1]:
            text = f"{chip.name}: the name {name!r} has {size} GB, but memory_bytes are {memory:.3g} GiB"
            yield Problem(text, "correct the name or the figure")


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


@check(each=chips)
def figures_are_plausible(chip: Chip) -> Problems:
    yield from figures_outside(chip)


@check("remove the peak, or the sentence", each=chips)
def notes_and_sources_agree_with_peaks(chip: Chip) -> Problems:
    for name, peak in chip.dense_flops_per_second.items():
        detail = peak.source.detail
        if said := re.search(rf"\b(no|does not support) {name}\b", chip.notes, re.I):
            yield f"{chip.name}: dense_flops_per_second has {name}, and notes say {said[0]!r}"
        if re.search(r"spars|\u7a00\u758f", detail, re.I) and not re.search(DENSE, detail) and "half" not in detail:
            text = f"{chip.name}: {name} has the source {detail[:120]!r}, which mentions sparsity"
            yield Problem(text, "give the dense peak, and say so in the source: 'dense' or 'without sparsity'")


OF_A_NODE = re.compile(
    r"\b[Aa] (?:node|server) (?:has|of) (\d+) (?:of (?:these|the \d+) )?devices"
    r"|\b(\d+) devices (?:a|per) (?:node|server)"
)
MOST_DEVICES = 32
"""Maximum number of devices of a node. A rack of several hosts is a link domain."""
OF_A_CARD = re.compile(r"\b(a|per|each) (card|module)\b[^;]*halved|halved[^;]*\b(a|per) (die|device|chip)\b")


@check("devices_per_node counts devices, as the tool lists them: a card may have several")
def nodes_and_cards_are_counted(plugin: Subject) -> Problems:
    for chip in plugin.own_chips():
        card, node = chip.devices_per_card, chip.devices_per_node
        where, link = f"{chip.name}: devices_per_node = {node}", chip.link
        if node % card:
            yield f"{chip.name}: devices_per_card = {card} does not divide devices_per_node = {node}"
        said = {int(one or two) for one, two in OF_A_NODE.findall(chip.notes)}
        if said and node not in said:
            yield f"{where}, but notes say {min(said)}"
        if node > MOST_DEVICES and not (link and link.topology == "shared-memory"):
            yield f"{where}, more than any known node has"
        for each in _listings(plugin):
            listed = sum(one.devices for one in each.lists if chip.has_name(one.chip))
            if listed > node:
                yield f"{where}, but {each.name} lists {listed}"
        for key, fact in chip.figures.items() if card == 1 else ():
            if not key.startswith(("link", "nic", "host")) and OF_A_CARD.search(fact.source.detail):
                text = f"{chip.name}: {key} is half of a card's figure by its source, but devices_per_card = 1"
                yield Problem(text, "write devices_per_card: the figures of a card are shared by its devices")


def _listings(plugin: Subject) -> tuple[Transcript, ...]:
    try:
        return plugin.listings
    except Skip:
        return ()


@check("write the compiler's target, as for the vendor's other chips")
def architectures_are_alike(plugin: Subject) -> Problems:
    named = [chip for chip in plugin.own_chips() if chip.architecture]
    starts = Counter(_start(chip.architecture, r"\D*") for chip in named)
    usual, times = starts.most_common(1)[0] if starts else ("", 0)
    for chip in named:
        shown, start = f"{chip.name}: architecture = {chip.architecture!r}", _start(chip.architecture, r"\D*")
        if not re.fullmatch(r"[A-Za-z]+_?\d+\w*", chip.architecture) or (start != usual and times > 1):
            yield shown
        kin = [one for one in named if _start(one.name, r"\D*\d+") == _start(chip.name, r"\D*\d+")]
        (most, times_of_most), *_ = Counter(one.architecture for one in kin).most_common(1)
        if chip.architecture != most and times_of_most > 1:
            yield f"{shown}, but {most!r} for others of its family"
        said = re.search(r"\b(gfx|sm_)\d\w+", chip.notes)
        if said and said[0] != chip.architecture:
            yield f"{shown}, but notes say {said[0]}"


def _start(name: str, pattern: str) -> str:
    """Return what a pattern matches at the start of a name, such as A100, or else the name."""
    found = re.match(pattern, name)
    return found[0] if found else name


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


PCIE = re.compile(r"\bPCIe\b", re.I)
NO_PEERS = re.compile(r"\bno (?:peer access|copies between devices)\b")


@check(each=linked)
def links_are_what_they_claim(chip: Chip, link: Link) -> Problems:
    node, size, topology, host = chip.devices_per_node, link.domain_size, link.topology, chip.host_bytes_per_second
    of_host, rate = host.value if host else 0.0, link.bytes_per_second.value
    is_own = topology not in ("pcie", "shared-memory")
    of_a_node = " ".join(each for each in re.split(r"[.;]", chip.notes) if "node" not in each)
    none, said = NO_PEERS.search(of_a_node), re.search(r"\bof (\d+)\b", link.name)
    with_topology, shown = f" with topology {topology}", f"bytes_per_second = {rate:g}"
    yield from wrong(
        (link.switch_reduces and topology != "switch",
         f"switch_reduces = True{with_topology}", "remove it: only a switch reduces"),
        (not link.peer_access and is_own, f"peer_access = False{with_topology}",
         "remove it: devices on a link of their own can access each other's memory"),
        (none and link.peer_access, f"peer_access = True, but notes say {none and none[0]!r}",
         "write peer_access: false, or correct the notes"),
        (said and int(said[1]) != (size or node), f"domain_size = {size}, but link.name = {link.name!r}",
         "write the same number of devices in both"),
        (size and (size < 2 or (size > node and topology != "switch")), f"domain_size = {size}{with_topology}",
         "give the number of devices on the link; only a switch joins several nodes"),
        (size is not None and (size < 1 or (size % node and node % size)),
         f"domain_size = {size} does not divide devices_per_node = {node}",
         "give how many consecutive devices the link joins: a share of a node, or whole nodes"),
        (link.whole_domains and size is None, "whole_domains without link.domain_size", "give the size of a domain"),
        (topology != "shared-memory" and bool(PCIE.search(link.name)) != (topology == "pcie"),
         f"topology = {topology!r}, but link.name = {link.name!r}",
         "write topology: pcie for devices that PCIe connects, and only for these"),
        (host and topology == "pcie" and not 0.49 <= rate / of_host <= 1.01,
         f"{shown} over PCIe, but {HOST} = {of_host:g}",
         "both are the rate of the device's interface in one direction"),
        (is_own and rate < of_host, f"{shown} of {link.name} is below {HOST} = {of_host:g}",
         "give bytes, not bits, and the rate to all peers together; a link below PCIe is no gain"),
        where=f"{chip.name}: link.",
    )  # fmt: skip


SLIPS = (0.125, 0.5, 2.0, 8.0)
"""Ratios of bits and bytes, and of one direction and both."""


@check("give what one device sends in one direction, in bytes; links of the same name usually have the same rate")
def links_of_one_name_agree(plugin: Subject) -> Problems:
    rates: dict[str, list[float]] = {}
    links = linked(plugin)
    for _, link in links:
        rates.setdefault(link.name, []).append(link.bytes_per_second.value)
    guessed = {link.name for _, link in links if link.bytes_per_second.source.kind == "estimated"}
    for chip, link in links:
        rate = link.bytes_per_second.value
        (usual, times), *more = Counter(rates[link.name]).most_common()
        is_pair = times == 1 and len(more) == 1 and link.name not in guessed
        if is_pair:
            usual = min(usual, more[0][0])  # the faster one of two is the likelier slip
        if (times > 1 or is_pair) and any(abs(rate / usual / slip - 1) < 0.02 for slip in SLIPS):
            text = f"{chip.name}: {LINK} = {rate:g} of {link.name}"
            yield f"{text}, {rate / usual:g} times that of {times} other chip{'s' * (times > 1)}"
