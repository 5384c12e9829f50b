"""Checks of the detector and of `engines.yaml`: names that no program reports if they are wrong, and other plugins.

Vendors' software often has the same origin. Where all other plugins that state a thing agree, a different value is
probably a slip.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatch
from itertools import pairwise

from flagcore_vendorkit.detection import DeviceDetector
from flagcore_vendorkit.engines import read_engines
from flagcore_vendorkit.machine import TorchReport

from flagcore.domain.chip import Chip, Device
from flagcore.domain.engine import EngineSupport
from flagcore.errors import SpecError
from flagcore_testing import fakes
from flagcore_testing.kit import Case, Items, Problems, Subject, T, check, need
from flagcore_testing.package import Transcript

AGREE = 3
"""Minimum number of other plugins that agree."""
BUILT_IN = {"gloo", "mpi", "nccl", "ucc", "xccl"}
"""Backends of torch.distributed that need no module to be imported first."""
SHARED = ("CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "GLOO_SOCKET_IFNAME", "TORCH_LOGS", "OMP_NUM_THREADS", "PYTORCH_DEBUG")
"""Variables that software of several vendors reads."""
TUPLES = ("visible", "vendor_variables", "own_variables", "pci_classes", "torch_attributes", "topology")
"""Fields of a detector. A text instead would be read as its letters."""
RESOURCE = re.compile(r"[a-z0-9-]+(\.[a-z0-9-]+)+/[\w.-]+")
PCI_ID = re.compile(r"\b([0-9a-f]{4}):[0-9a-f]{4}\b(?!:)", re.I)


def is_near(word: str, other: str) -> bool:
    """Return whether two words differ by one letter, or by the order of two letters. Digits may differ."""
    same = next((at for at, (one, two) in enumerate(zip(word, other, strict=False)) if one != two), None)
    same = min(len(word), len(other)) if same is None else same
    first, second = word[same:], other[same:]
    if (not first and not second) or (first[:1] + second[:1]).isdigit():
        return False
    is_swapped = len(first) > 1 and first[:2] == second[1::-1] and first[2:] == second[2:]
    return is_swapped or first[1:] == second[1:] or first[1:] == second or first == second[1:]


def nearest(word: str, words: Iterable[str]) -> str:
    """Return the first of `words` from which a word differs as in `is_near`, or an empty string."""
    return next((each for each in words if is_near(word, each)), "")


def others_hooks(plugin: Subject) -> Iterable[tuple[str, object]]:
    """Return the name and the hooks of each other installed plugin."""
    return ((each.name, hooks) for each in plugin.others.plugins for hooks in each.manager.get_plugins())


def others_files(plugin: Subject, read: Callable[[str], T]) -> Iterator[tuple[str, T]]:
    """Yield the name of each other installed plugin with the content of a file of its package."""
    for name, hooks in others_hooks(plugin):
        package = getattr(hooks, "package", None) or getattr(hooks, "__package__", name)
        with suppress(SpecError, ModuleNotFoundError):  # the checks of the other plugin report it
            yield name, read(str(package))


def others_detectors(plugin: Subject) -> Iterator[tuple[str, DeviceDetector]]:
    """Yield the name and the detector of each other installed plugin that has one."""
    for name, hooks in others_hooks(plugin):
        if isinstance(detector := getattr(hooks, "detector", None), DeviceDetector):
            yield name, detector


def detector_of(plugin: Subject) -> DeviceDetector:
    """Return the plugin's detector. Raises Skip if it has none."""
    return need(plugin.detector, "the plugin has no DeviceDetector")


def sections_of(plugin: Subject) -> list[tuple[str, EngineSupport]]:
    """Return the sections of `engines.yaml`, train first."""
    return sorted(plugin.shipped("engines.yaml", read_engines).items(), reverse=True)


@check("correct the name of the backend or module, or preload the module that adds it, as in `import torch_acme`")
def backends_and_modules_are_spelled_correctly(plugin: Subject) -> Problems:
    words = Counter[str]()
    for word, times in plugin.words.items():
        words[word.casefold()] += times
    for kind, support in sections_of(plugin):
        modules = [("preload", part) for module in support.preload for part in module.split(".")]
        for key, name in (("distributed_backend", support.distributed_backend or ""), *modules):
            has, meant = f"engines.yaml: {kind}.{key} has {name!r}", nearest(name.casefold(), words)
            is_name = key != "preload" or name.isidentifier()
            yield not is_name, f"{has}, which is not the name of a module"
            yield is_name and meant and words[name.casefold()] < 2, f"{has}, but other files have {meant!r}"
        if not support.preload and support.distributed_backend not in BUILT_IN:
            names = ", ".join(sorted(BUILT_IN))
            text = f"engines.yaml: {kind}.distributed_backend = {support.distributed_backend!r}"
            yield f"{text}, but preload is empty, and torch's own backends are {names}"


@check("preload the module that adds the devices to torch in both sections, before all others")
def sections_preload_the_same_module(plugin: Subject) -> Problems:
    sections = [(kind, each) for kind, each in sections_of(plugin) if each.device_type]
    for (kind, one), (other_kind, other) in pairwise(sections):
        first, second, kinds = one.preload[:1], other.preload[:1], f"{kind} and {other_kind}"
        if one.device_type == other.device_type:
            own, theirs = one.distributed_backend, other.distributed_backend
            yield (own != theirs, f"engines.yaml: distributed_backend of {kinds} is {own} and {theirs}",
                   "write the same distributed_backend: torch has one of each device")  # fmt: skip
            text = f"the device {one.device_type}, but one preloads {', '.join((*first, *second))}"
            yield first != second, f"engines.yaml: {kinds} have {text}"


RESOURCE_FIX = "write the name of this vendor's resource, or leave out `kubernetes`"


@check(RESOURCE_FIX)
def resources_are_the_vendors(plugin: Subject) -> Problems:
    theirs = [(name, each) for name, sections in others_files(plugin, read_engines) for each in sections.values()]
    libraries = sorted({name for _, each in theirs for name in each.cross_vendor_libraries})
    others = {each.kubernetes.name: name for name, each in theirs if each.kubernetes}
    most = max(chip.devices_per_card for chip in plugin.own_chips())
    for kind, each in sections_of(plugin):
        where, resource = f"engines.yaml: {kind}.kubernetes.", each.kubernetes
        for name in {*each.cross_vendor_libraries} - {*libraries}:
            meant, has = nearest(name, libraries), f"engines.yaml: {kind}.cross_vendor_libraries has {name!r}"
            fix = "write the name as other plugins do: chips are connected by a library that both name"
            yield meant, f"{has}, others have {meant!r}", fix
        if resource:
            unread = [name for name in resource.chips.values() if not RESOURCE.fullmatch(name)]
            is_single, is_name = resource.counts == "cards" and most == 1, RESOURCE.fullmatch(resource.name)
            yield unread, f"{where}chips has {unread}", "write the domain of the vendor, and the resource"
            fix = "remove counts, or give the chips devices_per_card"
            yield is_single, f"{where}counts = 'cards', but each card has one device", fix
            fix = "write the domain of the vendor and the resource, such as acme.com/gpu"
            yield not is_name, f"{where}name = {resource.name!r}", fix
            yield resource.name in others, f"{where}name is that of the plugin {others.get(resource.name)}"


OTHER_FILES = ("_manager", "ctl", "_ctl", "_control")
"""Ends of the names of files in /dev that belong to a driver and are no devices."""
CLASS = re.compile(r"0x(03|12|0b)([0-9a-f]{2}){0,2}", re.I)


def _detector(plugin: Subject) -> Items:
    return [("discover.py: ", plugin, detector_of(plugin))]


@check('write a tuple of names, with a comma after a single one: ("ACME_VISIBLE_DEVICES",)', each=_detector)
def detector_is_well_formed(plugin: Subject, detector: DeviceDetector) -> Problems:
    for name in TUPLES:
        words = getattr(detector, name)
        is_tuple = isinstance(words, tuple) and all(isinstance(word, str) and word.strip() for word in words)
        yield not is_tuple, f"{name} = {words!r}"
    own_id, tools, tool = detector.pci_vendor, fakes.tools_of(plugin), detector.tool
    first = next(iter(detector.topology), tool) if isinstance(detector.topology, tuple) else tool
    yield from _file_cases(detector.device_file)
    for name in detector.pci_classes:
        fix = "write the beginning of a class as in sysfs: 0x12 (accelerators), 0x0302 or 0x0380 (displays)"
        yield not CLASS.fullmatch(str(name)), f"pci_classes has {name!r}", fix
    yield (tools and first != tool and first not in tools, f"topology runs {first!r}, not {', '.join(tools)}",
           "name a tool that `listing` runs")  # fmt: skip
    yield (tools and tool not in tools, f"tool = {tool!r}, but the detector runs {', '.join(tools)}",
           "name the tool that `listing` runs: messages name it")  # fmt: skip
    for prefix in detector.own_variables:
        fix = "write the prefix of the vendor's variables, such as ACME_"
        yield len(prefix) < 3 or not prefix.endswith("_"), f"own_variables has {prefix!r}", fix
    if isinstance(own_id, int):
        yield from _pci_cases(plugin, own_id)
    else:
        yield True, f"pci_vendor = {own_id!r} is no number", LSPCI


def _file_cases(pattern: str) -> Iterator[Case]:
    wide = pattern.endswith("*") and not pattern.endswith("]*")
    others = [other for end in OTHER_FILES if fnmatch(other := f"{pattern.rstrip('*')}{end}", pattern)]
    fix = "write a glob pattern below the root, such as dev/acme[0-9]*"
    yield pattern.startswith("/") or pattern.count("[") != pattern.count("]"), f"device_file = {pattern!r}", fix
    fix = "match numbers only, such as dev/acme[0-9]*: drivers have files that are no devices"
    yield wide and others, f"device_file = {pattern!r} matches /{[*others, ''][0]}, too", fix


LSPCI = "write the ID that `lspci -nn` prints for the device, such as 0x1E3E"


def _pci_cases(plugin: Subject, own_id: int) -> Iterator[Case]:
    shown, file = f"pci_vendor = {own_id:#06x}", plugin.package_folder / "discover.py"
    no_vendor = "has not four hexadecimal digits, and IDs below 0x1000 belong to no vendor of accelerators"
    yield not 0x1000 <= own_id <= 0xFFFF, f"{shown} {no_vendor}", LSPCI
    for name, other in others_detectors(plugin):
        yield other.pci_vendor == own_id, f"{shown} is that of the plugin {name}", LSPCI
    quoted = {int(each, 16) for each in PCI_ID.findall(file.read_text("utf-8") if file.is_file() else "")}
    others = ", ".join(f"{each:04x}" for each in sorted(quoted))
    yield quoted and own_id not in quoted, f"{shown}, but the same file quotes {others}", LSPCI


@check("write the same name in discover.py, engines.yaml, chips/*.yaml and README.md")
def detector_agrees_with_the_files(plugin: Subject) -> Problems:
    detector, vendors = detector_of(plugin), sorted({chip.vendor for chip in plugin.own_chips()})
    in_hooks = getattr(plugin.hooks, "vendor", detector.vendor)
    for where, vendor in (("hooks.py", in_hooks), ("discover.py", detector.vendor)):
        yield vendor not in vendors, f"{where}: vendor is {vendor!r}, but {', '.join(vendors)} in the chips' files"
    sections = sections_of(plugin) if (plugin.package_folder / "engines.yaml").is_file() else []
    types = dict.fromkeys((each.device_type, kind) for kind, each in sections if each.device_type != "cpu")
    for device_type, kind in types:
        text = f"{kind}.device_type = {device_type!r}, but torch_device of discover.py is {detector.torch_device!r}"
        yield device_type != detector.torch_device, f"engines.yaml: {text}"
    device_file, tool, readme = detector.device_file, detector.tool, plugin.packaged.readme
    files = sorted({each.rstrip(".,)`*") for each in re.findall(r"/(dev/[\w./*\[\]<>-]+)", readme)})
    stem, named = re.split(r"[\[*]", device_file)[0], [(each, re.split(r"[\[*<]", each)[0]) for each in files]
    is_named = not files or any(each.startswith(stem) or stem.startswith(start) for each, start in named)
    yield not is_named, f"discover.py: device_file = {device_file!r}, but README.md names {', '.join(files)}"
    tools = sorted({*re.findall(r"\b([a-z]+[-_](?:smi|gmi|info)|cnmon|[a-z]+smi)\b", readme)})
    yield tools and tool not in tools, f"discover.py: tool = {tool!r}, but README.md names {', '.join(tools)}"


@check("write the same value: the variable belongs to one runtime")
def detector_agrees_with_its_runtime(plugin: Subject) -> Problems:
    detector, others = detector_of(plugin), [each for _, each in others_detectors(plugin)]
    alike = [each for each in others if each.visible[:1] == detector.visible[:1]]
    for other in (each for each in alike if min(len(each.visible), len(detector.visible)) > 1 or each.outer):
        for key in ("visible", "outer", "empty_is_unset"):
            own, theirs = getattr(detector, key), getattr(other, key)
            text = f"{key} = {own!r}, but {theirs!r} for {other.vendor}, with the same first variable"
            yield own != theirs, f"discover.py: {text}"


def missing_variables(plugin: Subject, key: str) -> str:
    """Return a sentence about the variables of a detector that all others of its kind have, if there are any."""
    detector, others = detector_of(plugin), [each for _, each in others_detectors(plugin)]
    kind = [each for each in others if key != "visible" or each.torch_device == detector.torch_device]
    sets = [{*getattr(each, key)} for each in kind if getattr(each, key)]
    missing = sorted(set.intersection(*sets) - {*getattr(detector, key)}) if len(sets) >= AGREE else []
    return f"{key} lacks {', '.join(missing)}, which all {len(sets)} other plugins of its kind have" if missing else ""


@check(
    "name the variable that the runtime below torch reads, not that of containers or of another vendor", each=_detector
)
def devices_are_selected_by_an_own_variable(plugin: Subject, detector: DeviceDetector) -> Problems:
    need(detector.own_variables, "the detector names no variables of its own software")
    prefixes = (*map(str, detector.own_variables), f"{detector.torch_device.upper()}_")
    shown = f"none begins with a prefix of torch_device or own_variables, {', '.join(prefixes)}"
    is_own = any(str(name).startswith(prefixes) for name in detector.visible)
    yield not is_own, f"visible = {detector.visible!r}: {shown}"


TRUST = "let `trusts` look at the version, the attributes and the devices' names that only this vendor's torch has"


@check(TRUST)
def torch_of_others_is_not_trusted(plugin: Subject) -> Problems:
    own, detector = plugin.own_chips(), detector_of(plugin)
    foreign = {chip.vendor: chip for chip in plugin.others.chips() if chip.name != "cpu"}

    def trusts(chip: Chip, *names: str) -> bool:
        devices = (Device(index=0, chip=name, memory_bytes=2**36) for name in (chip.name, *chip.aliases))
        reports = (TorchReport(version="2.10.0", attributes=frozenset(names), devices=(each,)) for each in devices)
        return any(map(detector.trusts, reports))

    for vendor, chip in foreign.items():
        yield trusts(chip), f"discover.py: trusts accepts a torch 2.10.0 with a device of {vendor}"
    if detector.torch_device != "cuda" and not any(trusts(chip, *detector.torch_attributes) for chip in own):
        yield f"discover.py: trusts rejects a torch that has {detector.torch_device} and devices of {own[0].vendor}"
    for name in detector.torch_attributes:
        is_unused = all(trusts(chip, name) == trusts(chip) for chip in (*own, *foreign.values()))
        yield (is_unused, f"discover.py: torch_attributes has {name!r}, which changes no answer of trusts",
               "write the attribute of torch that trusts looks for, or remove it")  # fmt: skip


UUIDS = re.compile(r"\bUUID\b[: ]+\S*-\S", re.I)
UNSELECTABLE = re.compile(r"0x|[^\w-]|^GPU-.*[^0-9a-fA-F-]")


@check("give the detector `uuids`: the variables that select devices may contain UUIDs", each=_detector)
def uuids_are_read(plugin: Subject, detector: DeviceDetector) -> Problems:
    printed = [each for each in plugin.transcripts if UUIDS.search(each.text)]
    own = [each for each in printed if each.tool or each.name.startswith(detector.tool)]
    if detector.uuids is not None:
        with fakes.machine(), fakes.quiet():
            answer: object = detector.uuids()
        if not isinstance(answer, Mapping):
            fix = "return a mapping from the index of a device to its UUID"
            yield True, f"uuids returns a {type(answer).__name__}", fix
        elif not any(_uuids_of(detector, each) for each in plugin.listings) and _asks_its_tool(detector):
            fix = "save what that command prints, and name it in `others` of sources.yaml"
            yield True, "no transcript has a UUID, although the detector reads them", fix
    need(own, "no transcript has UUIDs")
    if detector.uuids is None:
        devices = fakes.devices(plugin, fakes.printing(plugin.listings[0]))
        if devices and not any(each.uuid for each in devices):
            yield f"uuids = None, although {own[0].name} prints them"


@check("return the form that the variables accept, such as GPU-1234abcd: hexadecimal digits, without 0x and brackets")
def uuids_can_be_selected(plugin: Subject) -> Problems:
    for each in plugin.listings:
        words = [device.uuid for device in fakes.devices(plugin, fakes.printing(each)) if device.uuid]
        wrong = next((word for word in words if UNSELECTABLE.search(word)), "")
        yield wrong, f"flagcore_devices: the UUID {wrong!r} of {each.name} is not one that a variable accepts"


def _asks_its_tool(detector: DeviceDetector) -> bool:
    """Return whether `uuids` runs the tool. Others read files or a library, which no transcript shows."""
    with fakes.machine({detector.tool: ': > "$(dirname "$0")/../asked"'}) as folder:
        if detector.uuids:
            detector.uuids()
        return (folder / "asked").exists()


def _uuids_of(detector: DeviceDetector, each: Transcript) -> object:
    with fakes.machine(fakes.printing(each)), fakes.quiet():
        return detector.uuids() if detector.uuids else None


@check("save its output in tests/smi, or name the command in maturity.yaml if no output could be had", each=_detector)
def topology_command_is_known(plugin: Subject, detector: DeviceDetector) -> Problems:
    command, package = " ".join(map(str, detector.topology)), plugin.package_folder
    need(command, "the detector reads no links")
    files = [path for path in package.rglob("*") if path.suffix in (".yaml", ".py") and path.name != "discover.py"]
    files += [path for folder in ("tests/smi", "tests") for path in sorted((plugin.source / folder).glob("*.*"))]
    words = " ".join(path.read_text("utf-8", "replace") for path in files if path.is_file()) + plugin.packaged.readme
    arguments = re.escape(" ".join(map(str, detector.topology[1:]))).replace(r"\ ", r"\s+")
    is_known = re.search(arguments + r"(?!\w)", words)
    yield not is_known, f"topology runs `{command}`, which no other file of the plugin has"
