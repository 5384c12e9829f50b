"""Checks of chips: names, figures, links, and agreement with the notes and the transcripts."""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from flagcore.domain.chip import Chip, Link, normalize_name
from flagcore_testing.checks import bounds
from flagcore_testing.checks.bounds import DENSE, HOST, LINK
from flagcore_testing.kit import Items, Problem, Problems, Skip, Subject, check, chips, linked, need, repeated, wrong


@check()
def chips_and_devices_are_valid(plugin: Subject) -> Problems:
    plugin.loaded.chips()
    plugin.loaded.devices()
    for problem in plugin.problems_of("flagcore_chips", "flagcore_devices"):
        is_twice = "is already a name of" in problem.message
        yield Problem(problem.message, "give each name or alias to one chip") if is_twice else problem


@check("separate words by single spaces, and keep one of names that differ in case only")
def chip_names_are_clean(plugin: Subject) -> Problems:
    usual = Counter(chip.vendor.casefold() for chip in plugin.own_chips()).most_common(1)[0][0]
    for chip in plugin.own_chips():
        fix = "write the same lower-case word in each chips/*.yaml"
        yield chip.vendor != usual, f"{chip.name}: vendor is {chip.vendor}, not {usual}", fix
        for name in (chip.name, chip.vendor, *chip.aliases):
            is_clean = name and name == " ".join(name.split()) and name.isprintable()
            yield not is_clean, f"{chip.name}: the name {name!r} has extra spaces"
        for name, times in repeated(name.casefold() for name in chip.aliases):
            yield f"{chip.name}: aliases has {name!r} {times} times, ignoring case"


GIBIBYTES = re.compile(r"(?<![\w.])(\d{1,3}) ?G(?:i?B)?\b")
NAMED = (0.86, 1.08)
"""Range of a chip's memory divided by the GiB in a name; error correction takes a sixteenth."""


def _with_plugin(plugin: Subject) -> Items:
    return [(f"{chip.name}: ", plugin, chip) for chip in plugin.own_chips()]


@check("list only names of this chip that this vendor's tools print", each=_with_plugin)
def chip_names_are_own(plugin: Subject, chip: Chip) -> Problems:
    vendor, memory = normalize_name(chip.vendor), chip.memory_bytes.value / 2**30 if chip.memory_bytes else 0.0
    for name in (chip.name, *chip.aliases):
        spellings = dict.fromkeys((name, normalize_name(name).removeprefix(vendor)))
        owner = next(filter(None, map(plugin.others.owner, spellings)), None)
        yield owner, f"{name!r} is also a name of a chip of the plugin {owner}"
        for size in map(int, GIBIBYTES.findall(name.replace("-", " ")) if memory else ()):
            text = f"the name {name!r} has {size} GB, but memory_bytes are {memory:.3g} GiB"
            yield not NAMED[0] * size <= memory <= NAMED[1] * size, text, "correct the name or the figure"
    others = [other for other in plugin.chips if other is not chip]
    names = {name.casefold(): other.name for other in others for name in (other.name, *other.aliases)}
    for name in (each for each in chip.family_names if each.casefold() in names):
        yield f"family_names has {name!r}, which is a name of {names[name.casefold()]}"
    for name in (each for each in chip.aliases if normalize_name(chip.name) not in normalize_name(each)):
        words = {*re.split(r"[ /,()]+", name.casefold()), re.sub(r"^[a-z]+(?=\d)", "", name.casefold())}
        named = (other.name for other in others if other.name.casefold() in words)
        yield from (f"aliases has {name!r}, which names {other}" for other in named)


@check("return load_chips(package) there, as VendorPlugin does")
def chip_files_match_chip_names(plugin: Subject) -> Problems:
    files = [(name, content) for name, content in plugin.yaml_files("chips/*.yaml") if isinstance(content, dict)]
    names, sizes = {chip.name for chip in plugin.chips}, Counter(name.partition(" ")[0] for name, _ in files)
    for name, content in need(files, "the plugin has no chips/*.yaml"):
        chip, path = str(content.get("chip")), name.partition(" ")[0]
        file = f"chips/{chip.casefold().replace(' ', '-')}.yaml"
        stem, of_vendor = path.removesuffix(".yaml"), f"chips/{content.get('vendor')}.yaml"
        is_named = path == file or (sizes[path] > 1 and (path == of_vendor or file.startswith(stem)))
        fix = f"name the file {file[6:]}, a series by the start of its names, or several chips by their vendor"
        yield not is_named, f"{name}: chip is {chip}", fix
        yield is_named and names and chip not in names, f"{name}: flagcore_chips does not return {chip}"


def mappings(content: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every mapping of a file with its path. A path ends in a dot; the path of the whole file is empty."""
    if isinstance(content, dict):
        yield path, content
    pairs = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in pairs:
        yield from mappings(value, f"{path}{key}.")


@check(each=chips)
def figures_are_plausible(chip: Chip) -> Problems:
    figures = bounds.figures_of(chip)
    yield from bounds.outside(figures, bounds.FIGURES)
    if chip.link and chip.link.topology == "shared-memory":
        del figures[LINK]
    is_accelerator = figures.get(bounds.BANDWIDTH, 0.0) >= bounds.ACCELERATOR_BANDWIDTH
    words = {
        key: f"{fact.source.detail if key in (bounds.BF16, bounds.FP16) else ''} {chip.notes}"
        for key, fact in chip.figures.items()
    }
    yield from bounds.outside(figures, (*bounds.RATIOS, *(bounds.OF_ACCELERATORS if is_accelerator else ())), words)


@check("remove the peak, or the sentence", each=chips)
def notes_and_sources_agree_with_peaks(chip: Chip) -> Problems:
    for name, peak in chip.dense_flops_per_second.items():
        detail, said = peak.source.detail, re.search(rf"\b(no|does not support) {name}\b", chip.notes, re.I)
        yield said, f"dense_flops_per_second has {name}, and notes say {said and said[0]!r}"
        is_sparse = re.search(r"spars|\u7a00\u758f", detail, re.I)
        yield (is_sparse and not re.search(DENSE, detail) and "half" not in detail,
               f"{name} has the source {detail[:120]!r}, which mentions sparsity",
               "give the dense peak, and say so in the source: 'dense' or 'without sparsity'")  # fmt: skip


OF_A_NODE = re.compile(
    r"\b[Aa] (?:node|server) (?:has|of) (\d+) (?:of (?:these|the \d+) )?devices"
    r"|\b(\d+) devices (?:a|per) (?:node|server)"
)
MOST_DEVICES = 32
"""Maximum number of devices of a node. A rack of several hosts is a link domain."""
OF_A_CARD = re.compile(r"\b(a|per|each) (card|module)\b[^;]*halved|halved[^;]*\b(a|per) (die|device|chip)\b")


@check("devices_per_node counts devices, as the tool lists them: a card may have several", each=_with_plugin)
def nodes_and_cards_are_counted(plugin: Subject, chip: Chip) -> Problems:
    node, where = chip.devices_per_node, f"devices_per_node = {chip.devices_per_node}"
    is_rack = chip.link is not None and chip.link.topology == "shared-memory"
    said = {int(one or two) for one, two in OF_A_NODE.findall(chip.notes)}
    yield node % chip.devices_per_card, f"{where} is no multiple of devices_per_card = {chip.devices_per_card}"
    yield said and node not in said, f"{where}, but notes say {min(said, default=0)}"
    yield node > MOST_DEVICES and not is_rack, f"{where}, more than any known node has"
    with suppress(Skip):
        for each in plugin.listings:
            listed = sum(one.devices for one in each.lists if chip.has_name(one.chip))
            yield listed > node, f"{where}, but {each.name} lists {listed}"
    for key, fact in chip.figures.items() if chip.devices_per_card == 1 else ():
        is_shared = not key.startswith(("link", "nic", "host")) and OF_A_CARD.search(fact.source.detail)
        yield (is_shared, f"{key} is half of a card's figure by its source, but devices_per_card = 1",
               "write devices_per_card: the figures of a card are shared by its devices")  # fmt: skip


@check("write the compiler's target, as for the vendor's other chips")
def architectures_are_alike(plugin: Subject) -> Problems:
    named = [chip for chip in plugin.own_chips() if chip.architecture]
    usual = _usual([_start(chip.architecture, r"\D*") for chip in named])
    for chip in named:
        own, said = chip.architecture, re.search(r"\b(gfx|sm_)\d\w+", chip.notes)
        shown, is_name = f"{chip.name}: architecture = {own!r}", re.fullmatch(r"[A-Za-z]+_?\d+\w*", own)
        kin = [one.architecture for one in named if _start(one.name, r"\D*\d+") == _start(chip.name, r"\D*\d+")]
        yield not is_name or _start(own, r"\D*") != (usual or _start(own, r"\D*")), shown
        yield own != (_usual(kin) or own), f"{shown}, but {_usual(kin)!r} for others of its family"
        yield said and said[0] != own, f"{shown}, but notes say {said and said[0]}"


def _usual(words: list[str]) -> str:
    """Return the most frequent word, or an empty string if none is there twice."""
    return next((word for word, times in Counter(words).most_common(1) if times > 1), "")


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
        yield f"memory_bytes = {memory.value:g} is {memory.value / 1e9:g} GB, not GiB"


@check("give the total that the tool reports, not what is in use, in bytes")
def memory_matches_transcripts(plugin: Subject) -> Problems:
    compared = [
        (each.name, chip, listed.memory_mib, chip.memory_bytes.value)
        for chip in plugin.own_chips()
        for each in plugin.listings
        for listed in each.lists
        if chip.memory_bytes and listed.memory_mib and chip.has_name(listed.chip)
    ]
    for name, chip, mib, given in need(compared, "no transcript has the memory of a chip"):
        text = f"memory_bytes = {given:g}, but the transcript {name} has {mib:g} MiB = {mib * 2**20}"
        yield not MEMORY_RATIOS[0] <= given / (mib * 2**20) <= MEMORY_RATIOS[1], f"{chip.name}: {text}"


PCIE = re.compile(r"\bPCIe\b", re.I)
NO_PEERS = re.compile(r"\bno (?:peer access|copies between devices)\b")


@check(each=linked)
def links_are_what_they_claim(chip: Chip, link: Link) -> Problems:
    host, rate, topology = chip.host_bytes_per_second, link.bytes_per_second.value, link.topology
    over_host, is_own = rate / host.value if host else 1.0, topology not in ("pcie", "shared-memory")
    of_a_node = " ".join(each for each in re.split(r"[.;]", chip.notes) if "node" not in each)
    none, with_topology = NO_PEERS.findall(of_a_node), f" with topology {topology}"
    shown, of_host = f"bytes_per_second = {rate:g}", f"{HOST} = {host.value if host else 0:g}"
    is_named = bool(PCIE.search(link.name)) == (topology == "pcie") or topology == "shared-memory"
    cases = (
        (link.switch_reduces and topology != "switch",
         f"switch_reduces = True{with_topology}", "remove it: only a switch reduces"),
        (not link.peer_access and is_own, f"peer_access = False{with_topology}",
         "remove it: devices on a link of their own can access each other's memory"),
        (none and link.peer_access, f"peer_access = True, but notes say {min(none, default='')!r}",
         "write peer_access: false, or correct the notes"),
        (not is_named, f"topology = {topology!r}, but link.name = {link.name!r}",
         "write topology: pcie for devices that PCIe connects, and only for these"),
        (topology == "pcie" and not 0.49 <= over_host <= 1.01, f"{shown} over PCIe, but {of_host}",
         "both are the rate of the device's interface in one direction"),
        (is_own and over_host < 1, f"{shown} of {link.name} is below {of_host}",
         "give bytes, not bits, and the rate to all peers together; a link below PCIe is no gain"),
    )  # fmt: skip
    return wrong(cases, f"{chip.name}: link.")


@check("give how many consecutive devices the link joins: a share of a node, or whole nodes", each=linked)
def link_domains_are_possible(chip: Chip, link: Link) -> Problems:
    node, size, shown = chip.devices_per_node, link.domain_size or 0, f"link.domain_size = {link.domain_size}"
    said = [int(number) for number in re.findall(r"\bof (\d+)\b", link.name)[:1] if int(number) != (size or node)]
    is_given = link.domain_size is not None
    fix = "give the size of a domain"
    yield link.whole_domains and not is_given, "link.whole_domains without link.domain_size", fix
    yield said, f"{shown}, but link.name = {link.name!r}", "write the same number of devices in both"
    yield (is_given and (size < 2 or (size > node and link.topology != "switch")),
           f"{shown} with topology {link.topology}",
           "give the number of devices on the link; only a switch joins several nodes")  # fmt: skip
    is_divisor = size > 0 and (node % size == 0 or size % node == 0)
    yield is_given and not is_divisor, f"{shown} does not divide devices_per_node = {node}"


SLIPS = (0.125, 0.5, 2.0, 8.0)
"""Ratios of bits and bytes, and of one direction and both."""


@check("give what one device sends in one direction, in bytes; links of the same name usually have the same rate")
def links_of_one_name_agree(plugin: Subject) -> Problems:
    links = [(chip, chip.link) for chip in plugin.own_chips() if chip.link]
    guessed = {link.name for _, link in links if link.bytes_per_second.source.kind == "estimated"}
    for chip, link in links:
        rate, alike = link.bytes_per_second.value, (one for _, one in links if one.name == link.name)
        (usual, times), *more = Counter(one.bytes_per_second.value for one in alike).most_common()
        is_pair = times == 1 and len(more) == 1 and link.name not in guessed
        if is_pair:
            usual = min(usual, more[0][0])  # the faster one of two is the likelier slip
        is_slip = (times > 1 or is_pair) and any(abs(rate / usual / slip - 1) < 0.02 for slip in SLIPS)
        text = f"{LINK} = {rate:g} of {link.name}, {rate / usual:g} times that of {times} other chip{'s' * (times > 1)}"
        yield is_slip, f"{chip.name}: {text}"
