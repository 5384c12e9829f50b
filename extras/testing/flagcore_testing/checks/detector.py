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
from flagcore_testing.kit import Case, Problem, Problems, Subject, T, check, need, once, wrong
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


@once
def words_of(plugin: Subject) -> Counter[str]:
    """Return how often each word occurs in the plugin's files and its README."""
    package = plugin.package_folder
    texts = [path.read_text("utf-8", "replace") for path in package.rglob("*") if path.suffix in (".py", ".yaml")]
    return Counter(word for text in [*texts, plugin.packaged.readme] for word in re.findall(r"[A-Za-z_]\w+", text))


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


@check("correct the name of the backend or of the module; write modules as in `import torch_acme`")
def backends_and_modules_are_spelled_correctly(plugin: Subject) -> Problems:
    words = Counter[str]()
    for word, times in words_of(plugin).items():
        words[word.casefold()] += times
    for kind, support in sections_of(plugin):
        backend = support.distributed_backend or ""
        modules = [("preload", part) for module in support.preload for part in module.split(".")]
        for key, name in (("distributed_backend", backend), *modules):
            meant = nearest(name.casefold(), words)
            if key == "preload" and not name.isidentifier():
                yield f"engines.yaml: {kind}.{key} has {name!r}, which is not the name of a module"
            elif words[name.casefold()] < 2 and meant:
                yield f"engines.yaml: {kind}.{key} has {name!r}, but other files have {meant!r}"
        if not support.preload and support.distributed_backend not in BUILT_IN:
            names = ", ".join(sorted(BUILT_IN))
            text = f"engines.yaml: {kind}.distributed_backend = {support.distributed_backend!r}"
            yield f"{text}, but preload is empty, and torch's own backends are {names}"


@check("preload the module that adds the devices to torch in both sections, before all others")
def sections_preload_the_same_module(plugin: Subject) -> Problems:
    sections = [(kind, each) for kind, each in sections_of(plugin) if each.device_type]
    for (kind, one), (other_kind, other) in pairwise(sections):
        first, second = (each.preload[:1] for each in (one, other))
        if one.device_type == other.device_type and one.distributed_backend != other.distributed_backend:
            text = f"{one.distributed_backend} and {other.distributed_backend}"
            fix = "write the same distributed_backend: torch has one of each device"
            yield Problem(f"engines.yaml: distributed_backend of {kind} and {other_kind} is {text}", fix)
        if one.device_type == other.device_type and first != second:
            text = ", ".join((*first, *second))
            yield f"engines.yaml: {kind} and {other_kind} have the device {one.device_type}, but one preloads {text}"


RESOURCE_FIX = "write the name of this vendor's resource, or leave out `kubernetes`"


@check(RESOURCE_FIX)
def resources_are_the_vendors(plugin: Subject) -> Problems:
    theirs = [(name, each) for name, sections in others_files(plugin, read_engines) for each in sections.values()]
    libraries = sorted({name for _, each in theirs for name in each.cross_vendor_libraries})
    others = {each.kubernetes.name: name for name, each in theirs if each.kubernetes}
    most = max(chip.devices_per_card for chip in plugin.own_chips())
    for kind, each in sections_of(plugin):
        for name in {*each.cross_vendor_libraries} - {*libraries}:
            if meant := nearest(name, libraries):
                fix = "write the name as other plugins do: chips are connected by a library that both name"
                yield Problem(f"engines.yaml: {kind}.cross_vendor_libraries has {name!r}, others have {meant!r}", fix)
        for resource in [each.kubernetes] if each.kubernetes else []:
            unread = [name for name in resource.chips.values() if not RESOURCE.fullmatch(name)]
            yield from wrong(
                (unread, f"chips has {unread}", "write the domain of the vendor, and the resource"),
                (resource.counts == "cards" and most == 1, "counts = 'cards', but each card has one device",
                 "remove counts, or give the chips devices_per_card"),
                (not RESOURCE.fullmatch(resource.name), f"name = {resource.name!r}",
                 "write the domain of the vendor and the resource, such as acme.com/gpu"),
                (resource.name in others, f"name is that of the plugin {others.get(resource.name)}", RESOURCE_FIX),
                where=f"engines.yaml: {kind}.kubernetes.",
            )  # fmt: skip


OTHER_FILES = ("_manager", "ctl", "_ctl", "_control")
"""Ends of the names of files in /dev that belong to a driver and are no devices."""
CLASS = re.compile(r"0x(03|12|0b)([0-9a-f]{2}){0,2}", re.I)


@check('write a tuple of names, with a comma after a single one: ("ACME_VISIBLE_DEVICES",)')
def detector_is_well_formed(plugin: Subject) -> Problems:
    detector = detector_of(plugin)
    for name in TUPLES:
        words = getattr(detector, name)
        if not isinstance(words, tuple) or not all(isinstance(word, str) and word.strip() for word in words):
            yield f"discover.py: {name} = {words!r}"
    own_id, tools, tool = detector.pci_vendor, fakes.tools_of(plugin), detector.tool
    first = next(iter(detector.topology), tool) if isinstance(detector.topology, tuple) else tool
    yield from wrong(
        *_file_cases(detector.device_file),
        *((not CLASS.fullmatch(str(name)), f"pci_classes has {name!r}",
           "write the beginning of a class as in sysfs: 0x12 (accelerators), 0x0302 or 0x0380 (displays)")
          for name in detector.pci_classes),
        (tools and first != tool and first not in tools, f"topology runs {first!r}, not {', '.join(tools)}",
         "name a tool that `listing` runs"),
        (tools and tool not in tools, f"tool = {tool!r}, but the detector runs {', '.join(tools)}",
         "name the tool that `listing` runs: messages name it"),
        *((len(prefix) < 3 or not prefix.endswith("_"), f"own_variables has {prefix!r}",
           "write the prefix of the vendor's variables, such as ACME_") for prefix in detector.own_variables),
        *(_pci_cases(plugin, own_id) if isinstance(own_id, int) else
          [(True, f"pci_vendor = {own_id!r} is no number", LSPCI)]),
        where="discover.py: ",
    )  # fmt: skip


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
        if vendor not in vendors:
            yield f"{where}: vendor is {vendor!r}, but {', '.join(vendors)} in the chips' files"
    sections = sections_of(plugin) if (plugin.package_folder / "engines.yaml").is_file() else []
    types = dict.fromkeys((each.device_type, kind) for kind, each in sections if each.device_type != "cpu")
    for device_type, kind in types:
        if device_type != detector.torch_device:
            text = f"engines.yaml: {kind}.device_type = {device_type!r}"
            yield f"{text}, but torch_device of discover.py is {detector.torch_device!r}"
    yield from _readme_problems(detector, plugin.packaged.readme)


def _readme_problems(detector: DeviceDetector, readme: str) -> Iterator[str]:
    device_file, tool, stem = detector.device_file, detector.tool, re.split(r"[\[*]", detector.device_file)[0]
    files = sorted({each.rstrip(".,)`*") for each in re.findall(r"/(dev/[\w./*\[\]<>-]+)", readme)})
    if files and not any(each.startswith(stem) or stem.startswith(re.split(r"[\[*<]", each)[0]) for each in files):
        yield f"discover.py: device_file = {device_file!r}, but README.md names {', '.join(files)}"
    tools = sorted({*re.findall(r"\b([a-z]+[-_](?:smi|gmi|info)|cnmon|[a-z]+smi)\b", readme)})
    if tools and tool not in tools:
        yield f"discover.py: tool = {tool!r}, but README.md names {', '.join(tools)}"


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


@check("name the variable that the runtime below torch reads, not that of containers or of another vendor")
def devices_are_selected_by_an_own_variable(plugin: Subject) -> Problems:
    detector = detector_of(plugin)
    need(detector.own_variables, "the detector names no variables of its own software")
    prefixes = (*map(str, detector.own_variables), f"{detector.torch_device.upper()}_")
    if not any(str(name).startswith(prefixes) for name in detector.visible):
        shown = f"none begins with a prefix of torch_device or own_variables, {', '.join(prefixes)}"
        yield f"discover.py: visible = {detector.visible!r}: {shown}"


@check("let `trusts` look at the version, the attributes and the devices' names that only this vendor's torch has")
def torch_of_others_is_not_trusted(plugin: Subject) -> Problems:
    own, detector = plugin.own_chips(), detector_of(plugin)
    foreign = {chip.vendor: chip for chip in plugin.others.chips() if chip.name != "cpu"}

    def trusts(chip: Chip, *names: str) -> bool:
        devices = (Device(index=0, chip=name, memory_bytes=2**36) for name in (chip.name, *chip.aliases))
        reports = (TorchReport(version="2.10.0", attributes=frozenset(names), devices=(each,)) for each in devices)
        return any(map(detector.trusts, reports))

    for vendor, chip in foreign.items():
        if trusts(chip):
            yield f"discover.py: trusts accepts a torch 2.10.0 with a device of {vendor}"
    if detector.torch_device != "cuda" and not any(trusts(chip, *detector.torch_attributes) for chip in own):
        yield f"discover.py: trusts rejects a torch that has {detector.torch_device} and devices of {own[0].vendor}"
    for name in detector.torch_attributes:
        if all(trusts(chip, name) == trusts(chip) for chip in (*own, *foreign.values())):
            text = f"discover.py: torch_attributes has {name!r}, which changes no answer of trusts"
            yield Problem(text, "write the attribute of torch that trusts looks for, or remove it")


UUIDS = re.compile(r"\bUUID\b[: ]+\S*-\S", re.I)
UNSELECTABLE = re.compile(r"0x|[^\w-]|^GPU-.*[^0-9a-fA-F-]")


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
        elif not any(_uuids_of(detector, each) for each in plugin.listings) and _asks_its_tool(detector):
            text = "discover.py: no transcript has a UUID, although the detector reads them"
            yield Problem(text, "save what that command prints, and name it in `others` of sources.yaml")
    need(own, "no transcript has UUIDs")
    if detector.uuids is None:
        devices = fakes.devices(plugin, fakes.printing(plugin.listings[0]))
        if devices and not any(each.uuid for each in devices):
            yield f"discover.py: uuids = None, although {own[0].name} prints them"


@check("return the form that the variables accept, such as GPU-1234abcd: hexadecimal digits, without 0x and brackets")
def uuids_can_be_selected(plugin: Subject) -> Problems:
    for each in plugin.listings:
        words = [device.uuid for device in fakes.devices(plugin, fakes.printing(each)) if device.uuid]
        if wrong := next((word for word in words if UNSELECTABLE.search(word)), ""):
            yield f"flagcore_devices: the UUID {wrong!r} of {each.name} is not one that a variable accepts"


def _asks_its_tool(detector: DeviceDetector) -> bool:
    """Return whether `uuids` runs the tool. Others read files or a library, which no transcript shows."""
    with fakes.machine({detector.tool: ': > "$(dirname "$0")/../asked"'}) as folder:
        if detector.uuids:
            detector.uuids()
        return (folder / "asked").exists()


def _uuids_of(detector: DeviceDetector, each: Transcript) -> object:
    with fakes.machine(fakes.printing(each)), fakes.quiet():
        return detector.uuids() if detector.uuids else None


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
