"""Checks of a plugin against the other installed plugins, and of its files against each other.

Vendors' software often has the same origin. Where all other plugins that state a thing agree, a different value is
probably a slip.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from flagcore_vendorkit.detection import DeviceDetector
from flagcore_vendorkit.engines import Variable, read_quirks, read_variables

from flagcore.domain.chip import Chip
from flagcore.domain.engine import RefusedValues
from flagcore.errors import SpecError
from flagcore_testing import fakes
from flagcore_testing.checks.spelling import detector_of, others_detectors, others_hooks
from flagcore_testing.examples import task_on
from flagcore_testing.kit import Problem, Problems, Subject, check, chips, need
from flagcore_testing.package import Transcript

AGREE = 3
"""Minimum number of other plugins that agree."""


@check()
def detector_agrees_with_its_runtime(plugin: Subject) -> Problems:
    detector, others = detector_of(plugin), [each for _, each in others_detectors(plugin)]
    alike = [each for each in others if each.visible[:1] == detector.visible[:1]]
    for other in (each for each in alike if min(len(each.visible), len(detector.visible)) > 1 or each.outer):
        for key in ("visible", "outer", "empty_is_unset"):
            if (own := getattr(detector, key)) != (theirs := getattr(other, key)):
                text = f"discover.py: {key} = {own!r}, but {theirs!r} for {other.vendor}, with the same first variable"
                yield Problem(text, "write the same value: the variable belongs to one runtime")


def missing_variables(plugin: Subject, key: str) -> str:
    """Return a sentence about the variables of a detector that all others of its kind have, if there are any."""
    detector, others = detector_of(plugin), [each for _, each in others_detectors(plugin)]
    kind = [each for each in others if key != "visible" or each.torch_device == detector.torch_device]
    sets = [{*getattr(each, key)} for each in kind if getattr(each, key)]
    missing = sorted(set.intersection(*sets) - {*getattr(detector, key)}) if len(sets) >= AGREE else []
    return f"{key} lacks {', '.join(missing)}, which all {len(sets)} other plugins of its kind have" if missing else ""


def _others_files(plugin: Subject, read: Any) -> Iterator[Any]:
    for name, hooks in others_hooks(plugin):
        with suppress(SpecError, ModuleNotFoundError):  # the checks of the other plugin report it
            yield read(str(getattr(hooks, "package", name)))


@check("write the value of the others, or restrict the variable to what differs")
def values_agree_with_other_plugins(plugin: Subject) -> Problems:
    theirs: dict[str, list[Variable]] = {}
    for variables in _others_files(plugin, read_variables):
        for each in variables:
            theirs.setdefault(each.name, []).append(each)
    for each in plugin.variables:
        same = [one for one in theirs.get(each.name, ()) if one.value and not one.chips]
        if not each.value or len(same) < AGREE or len({one.value for one in same}) > 1:
            continue
        for key in ("value", "unless", "several_nodes", "overridden_by", "engines", "kinds"):
            values = [getattr(one, key) for one in same]
            if len(set(values)) == 1 and getattr(each, key) != values[0]:
                where = f"environment.yaml: {each.name} has {key} = {getattr(each, key)!r}"
                yield f"{where}, and {len(values)} other plugins have {values[0]!r}"


@check("write what the other plugins fill in: {interface} for sockets, {adapters} for InfiniBand, {address} for hosts")
def placeholders_agree_with_other_plugins(plugin: Subject) -> Problems:
    theirs: dict[str, Counter[str]] = {}
    for variables in _others_files(plugin, read_variables):
        for each in (each for each in variables if "{" in (each.value or "")):
            theirs.setdefault(each.name.partition("_")[2], Counter())[str(each.value)] += 1
    for each in (each for each in plugin.variables if "{" in (each.value or "")):
        usual = theirs.get(each.name.partition("_")[2], Counter())
        if usual and each.value not in usual:
            shown = f"{usual.total()} variables of other plugins with this ending have {usual.most_common(1)[0][0]!r}"
            yield f"environment.yaml: {each.name} = {each.value!r}, and {shown}"


@check("remove it, or write this vendor's variable of the same meaning")
def variables_are_of_this_vendor(plugin: Subject) -> Problems:
    own = detector_of(plugin).own_variables
    foreign = {prefix: name for name, each in others_detectors(plugin) for prefix in each.own_variables}
    for each in plugin.variables:
        for prefix, name in foreign.items():
            if each.name.startswith(prefix) and not each.name.startswith(own):
                yield f"environment.yaml: {each.name} begins with {prefix}, which only software of {name} reads"


@check("write the same, or a pattern of this vendor's own text")
def failures_agree_with_other_plugins(plugin: Subject) -> Problems:
    theirs = [each for quirks in _others_files(plugin, read_quirks) for each in quirks.failures]
    for place, each in enumerate(plugin.quirks.failures):
        for key in ("state", "weak"):
            values = {getattr(one, key) for one in theirs if one.pattern == each.pattern}
            if values and getattr(each, key) not in values:
                shown, usual = (getattr(value, "value", value) for value in (getattr(each, key), values.pop()))
                where = f"quirks.yaml: failures[{place}].{key} = {shown!r}"
                yield f"{where}, and other plugins have {usual!r} for its pattern"


HARDWARE = re.compile(r"\bunits?\b|hardware|(does|do) not support")


@check("remove the peak or the rule, or restrict the rule to other chips")
def refused_precisions_have_no_peak(plugin: Subject) -> Problems:
    for chip, engine in plugin.pairs():
        for rule in plugin.loaded.check_task(task_on(chip, engine)).rules:
            if isinstance(rule, RefusedValues) and rule.knob == "precision" and HARDWARE.search(rule.reason):
                for value in {*map(str, rule.values)} & {*chip.dense_flops_per_second}:
                    yield f"quirks.yaml: {rule.name} refuses {value} on {chip.name}, whose file has a peak in it"
            if isinstance(rule, RefusedValues) and rule.knob == "precision":
                usable = {*chip.dense_flops_per_second} & {"bf16", "fp16"}
                if usable and usable <= {*map(str, rule.values)}:
                    shown = ", ".join(sorted(usable))
                    yield f"quirks.yaml: {rule.name} refuses {shown} on {chip.name}: no 16-bit format is left"


OF_A_CARD = re.compile(r"\b(a|per|each) (card|module)\b[^;]*halved|halved[^;]*\b(a|per) (die|device|chip)\b")


@check("write devices_per_card: the figures of a card are shared by its devices", each=chips)
def cards_are_counted(chip: Chip) -> Problems:
    for key, fact in chip.figures.items() if chip.devices_per_card == 1 else ():
        if not key.startswith(("link", "nic", "host")) and OF_A_CARD.search(fact.source.detail):
            yield f"{chip.name}: {key} is half of a card's figure by its source, but devices_per_card = 1"


@check(each=chips)
def links_can_be_what_they_claim(chip: Chip) -> Problems:
    link = chip.link
    if link is None:
        return
    where, size = f"with topology {link.topology}", link.domain_size
    if link.switch_reduces and link.topology != "switch":
        yield Problem(f"{chip.name}: link.switch_reduces = True {where}", "remove it: only a switch reduces")
    if not link.peer_access and link.topology not in ("pcie", "shared-memory"):
        fix = "remove it: devices on a link of their own can access each other's memory"
        yield Problem(f"{chip.name}: link.peer_access = False {where}", fix)
    of_a_node = " ".join(each for each in re.split(r"[.;]", chip.notes) if "node" not in each)
    none = re.search(r"\bno (?:peer access|copies between devices)\b", of_a_node)
    if none and link.peer_access:
        text = f"{chip.name}: link.peer_access = True, but notes say {none[0]!r}"
        yield Problem(text, "write peer_access: false, or correct the notes")
    said = re.search(r"\bof (\d+)\b", link.name)
    if said and int(said[1]) != (size or chip.devices_per_node):
        text = f"{chip.name}: link.domain_size = {size}, but link.name = {link.name!r}"
        yield Problem(text, "write the same number of devices in both")
    if size and (size < 2 or (size > chip.devices_per_node and link.topology != "switch")):
        fix = "give the number of devices on the link; only a switch joins several nodes"
        yield Problem(f"{chip.name}: link.domain_size = {size} {where}", fix)


SLIPS = (0.125, 0.5, 2.0, 8.0)
"""Ratios of bits and bytes, and of one direction and both."""


@check("give what one device sends in one direction, in bytes; links of the same name usually have the same rate")
def links_of_one_name_agree(plugin: Subject) -> Problems:
    rates: dict[str, list[float]] = {}
    links = [(chip, chip.link) for chip in plugin.own_chips() if chip.link]
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
            text = f"{chip.name}: link.bytes_per_second = {rate:g} of {link.name}"
            yield f"{text}, {rate / usual:g} times that of {times} other chip{'s' * (times > 1)}"


UUIDS = re.compile(r"\bUUID\b[: ]+\S*-\S", re.I)


@check("give the detector `uuids`: the variables that select devices may contain UUIDs")
def uuids_are_read(plugin: Subject) -> Problems:
    detector, printed = detector_of(plugin), [each for each in plugin.transcripts if UUIDS.search(each.text)]
    own = [each for each in printed if each.tool or each.name.startswith(detector.tool)]
    if detector.uuids is not None:
        with fakes.machine(), fakes.quiet():
            answer: object = detector.uuids()
        if not isinstance(answer, Mapping):
            text = f"discover.py: uuids returns a {type(answer).__name__}"
            yield Problem(text, "return a mapping from the index of a device to its UUID")
        is_lacking = isinstance(answer, Mapping) and not any(_uuids_of(detector, each) for each in plugin.listings)
        if is_lacking and _asks_its_tool(detector):
            text = "discover.py: no transcript has a UUID, although the detector reads them"
            yield Problem(text, "save what that command prints, and name it in `others` of sources.yaml")
    need(own, "no transcript has UUIDs")
    if detector.uuids is None:
        devices = fakes.devices(plugin, fakes.printing(plugin.listings[0]))
        if devices and not any(each.uuid for each in devices):
            yield f"discover.py: uuids = None, although {own[0].name} prints them"


@check("save its output in tests/smi, or name the command in maturity.yaml if no output could be had")
def topology_command_is_known(plugin: Subject) -> Problems:
    detector = detector_of(plugin)
    command, package = " ".join(map(str, detector.topology)), plugin.package_folder
    need(command, "the detector reads no links")
    files = [path for path in package.rglob("*") if path.suffix in (".yaml", ".py") and path.name != "discover.py"]
    files += [path for folder in ("tests/smi", "tests") for path in sorted((plugin.source / folder).glob("*.*"))]
    words = " ".join(path.read_text("utf-8", "replace") for path in files if path.is_file()) + plugin.packaged.readme
    arguments = " ".join(map(str, detector.topology[1:]))
    if not re.search(re.escape(arguments).replace(r"\ ", r"\s+") + r"(?!\w)", words):
        yield f"discover.py: topology runs `{command}`, which no other file of the plugin has"


def _asks_its_tool(detector: DeviceDetector) -> bool:
    """Return whether `uuids` runs the tool. Others read files or a library, which no transcript shows."""
    with fakes.machine({detector.tool: ': > "$(dirname "$0")/../asked"'}) as folder:
        if detector.uuids:
            detector.uuids()
        return (folder / "asked").exists()


def _uuids_of(detector: DeviceDetector, each: Transcript) -> object:
    with fakes.machine(fakes.printing(each)), fakes.quiet():
        return detector.uuids() if detector.uuids else None


UNSELECTABLE = re.compile(r"0x|[^\w-]|^GPU-.*[^0-9a-fA-F-]")


@check("return the form that the variables accept, such as GPU-1234abcd: hexadecimal digits, without 0x and brackets")
def uuids_can_be_selected(plugin: Subject) -> Problems:
    for each in plugin.listings:
        words = [device.uuid for device in fakes.devices(plugin, fakes.printing(each)) if device.uuid]
        if wrong := next((word for word in words if UNSELECTABLE.search(word)), ""):
            yield f"flagcore_devices: the UUID {wrong!r} of {each.name} is not one that a variable accepts"


@check("write the same name in both")
def readme_names_the_tool(plugin: Subject) -> Problems:
    detector, readme = detector_of(plugin), plugin.packaged.readme
    need(readme, "README.md is missing")
    files = {each.rstrip(".,)`*") for each in re.findall(r"/(dev/[\w./*\[\]<>-]+)", readme)}
    stem = re.split(r"[\[*]", detector.device_file)[0]
    if files and not any(each.startswith(stem) or stem.startswith(re.split(r"[\[*<]", each)[0]) for each in files):
        yield f"discover.py: device_file = {detector.device_file!r}, but README.md names {', '.join(sorted(files))}"
    tools = {*re.findall(r"\b([a-z]+[-_](?:smi|gmi|info)|cnmon|[a-z]+smi)\b", readme)}
    if tools and detector.tool not in tools:
        yield f"discover.py: tool = {detector.tool!r}, but README.md names {', '.join(sorted(tools))}"
