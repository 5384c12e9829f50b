"""Checks of names that no program reports if they are wrong: variables, placeholders, modules, backends and PCI IDs."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from fnmatch import fnmatch
from itertools import pairwise

from flagcore_vendorkit.detection import DeviceDetector
from flagcore_vendorkit.engines import all_knobs, read_engines

from flagcore.domain.engine import EngineSupport
from flagcore.errors import SpecError
from flagcore.launchers.network import placeholders
from flagcore.plugins import find_engine, kind_of
from flagcore_testing import fakes
from flagcore_testing.kit import Problem, Problems, Skip, Subject, check, need, once

BUILT_IN = {"gloo", "mpi", "nccl", "ucc", "xccl"}
"""Backends of torch.distributed that need no module to be imported first."""
COLLECTIVES = re.compile(r"^[A-Z]{1,3}CL_")
"""The beginning of variables of collective libraries, most of which have the same names after it."""
PLACEHOLDER = re.compile(r"\$\{?\w+\}?|\{\w*\}")
SHARED = ("CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "GLOO_SOCKET_IFNAME", "TORCH_LOGS", "OMP_NUM_THREADS", "PYTORCH_DEBUG")
"""Variables that software of several vendors reads."""
OF_MACHINE = re.compile(r"_SOCKET_IFNAME$|_IB_HCA$|_IF_IP$")
"""Variables whose value differs between machines."""
TUPLES = ("visible", "vendor_variables", "own_variables", "pci_classes", "torch_attributes", "topology")
"""Fields of a detector. A text instead would be read as its letters."""
RESOURCE = re.compile(r"[a-z0-9-]+(\.[a-z0-9-]+)+/[\w.-]+")
PCI_ID = re.compile(r"\b([0-9a-f]{4}):[0-9a-f]{4}\b(?!:)", re.I)


def _is_near(word: str, other: str) -> bool:
    """Return whether two words differ by one letter, or by the order of two letters. Digits may differ."""
    same = next((at for at, (one, two) in enumerate(zip(word, other, strict=False)) if one != two), None)
    same = min(len(word), len(other)) if same is None else same
    first, second = word[same:], other[same:]
    if (not first and not second) or (first[:1] + second[:1]).isdigit():
        return False
    is_swapped = len(first) > 1 and first[:2] == second[1::-1] and first[2:] == second[2:]
    return is_swapped or first[1:] == second[1:] or first[1:] == second or first == second[1:]


@once
def _words(plugin: Subject) -> Counter[str]:
    """Return how often each word occurs in the plugin's files and its README."""
    package = plugin.package_folder
    texts = [path.read_text("utf-8", "replace") for path in package.rglob("*") if path.suffix in (".py", ".yaml")]
    return Counter(word for text in [*texts, plugin.packaged.readme] for word in re.findall(r"[A-Za-z_]\w+", text))


@once
def _others_variables(plugin: Subject) -> list[str]:
    """Return the names of variables that other installed plugins describe, one of each plugin."""
    names: list[str] = []
    for name, hooks in others_hooks(plugin):
        with suppress(Skip, SpecError):  # the checks of the other plugin report it
            names += sorted({each.name for each in Subject(name=name, hooks=hooks).variables})
    return names


def detector_of(plugin: Subject) -> DeviceDetector:
    """Return the plugin's detector. Raises Skip if it has none."""
    return need(plugin.detector, "the plugin has no DeviceDetector")


def _sections(plugin: Subject) -> list[tuple[str, EngineSupport]]:
    """Return the sections of `engines.yaml`, train first."""
    return sorted(plugin.shipped("engines.yaml", read_engines).items(), reverse=True)


def _variables(plugin: Subject) -> Iterator[tuple[str, str]]:
    """Yield each variable that a file or the detector names, with the file."""
    if (plugin.package_folder / "environment.yaml").is_file():
        yield from (("environment.yaml", each.name) for each in plugin.variables)
    for listed in all_knobs(plugin.package):
        for effect in listed.knob.effects.values():
            yield from (("knobs.yaml", name) for name in effect.environment)
    if detector := plugin.detector:
        names = (*detector.visible, detector.outer, *detector.vendor_variables)
        yield from (("discover.py", name) for name in names if name)


@check("correct the name; if it is right, other files of the plugin may name it too, such as the README")
def variables_are_spelled_correctly(plugin: Subject) -> Problems:
    words, others = _words(plugin), _others_variables(plugin)
    known: dict[str, list[str]] = {}
    for name in (*others, *(word for word in words if "_" in word and word.isupper() for _ in (1, 2))):
        known.setdefault(COLLECTIVES.sub("CL_", name), []).append(name)
    parts = Counter(part for name in {*others, *(each for _, each in _variables(plugin))} for part in name.split("_"))
    for file, name in dict.fromkeys(_variables(plugin)):
        for part in (part for part in name.split("_") if len(part) > 6 and parts[part] == 1):
            near = (other for other in parts if _is_near(part, other) and part not in other and other not in part)
            if meant := next(near, ""):
                yield f"{file}: {name} has the word {part}, and other variables have {meant}"
        general = COLLECTIVES.sub("CL_", name)
        if words[name] > 1 or name in others or {*known[general]} != {name}:
            continue
        near = (names[0] for each, names in known.items() if len(names) > 1 and _is_near(general, each))
        if meant := next(near, ""):
            yield f"{file}: {name} is not known, but {meant} is"


@check("correct the name of the backend or of the module; write modules as in `import torch_acme`")
def backends_and_modules_are_spelled_correctly(plugin: Subject) -> Problems:
    words = Counter[str]()
    for word, times in _words(plugin).items():
        words[word.casefold()] += times
    for kind, support in _sections(plugin):
        for key, name in (
            ("distributed_backend", support.distributed_backend or ""),
            *(("preload", part) for module in support.preload for part in module.split(".")),
        ):
            meant = next((word for word in words if _is_near(name.casefold(), word)), "")
            if key == "preload" and not name.isidentifier():
                yield f"engines.yaml: {kind}.{key} has {name!r}, which is not the name of a module"
            elif words[name.casefold()] < 2 and meant:
                yield f"engines.yaml: {kind}.{key} has {name!r}, but other files have {meant!r}"
        if not support.preload and support.distributed_backend not in BUILT_IN:
            names = ", ".join(sorted(BUILT_IN))
            text = f"engines.yaml: {kind}.distributed_backend = {support.distributed_backend!r}"
            yield f"{text}, but preload is empty, and torch's own backends are {names}"


@check("write {address}, {interface}, {adapters}, or the value itself")
def placeholders_are_known(plugin: Subject) -> Problems:
    known = set(placeholders())
    for each in plugin.variables:
        for unknown in sorted({*PLACEHOLDER.findall(each.value or "")} - known):
            yield f"environment.yaml: {each.name} has the unknown placeholder {unknown}"
        if known & {*PLACEHOLDER.findall(each.value or "")} and not each.several_nodes:
            fix = "add several_nodes: true: a job on one node needs no interface or adapter"
            yield Problem(f"environment.yaml: {each.name} = {each.value!r} is set for one node, too", fix)


@check("name a setting of a training engine, as in docs/spec.md")
def conditions_are_known(plugin: Subject) -> Problems:
    trains = [each for each in plugin.engines if kind_of(each) == "train"]
    known = {name for engine in trains for knob in find_engine(engine).knobs for name in knob.names}
    names = sorted({*_others_variables(plugin), *(each.name for each in plugin.variables)})
    for each in plugin.variables:
        meant = next((name for name in names if each.overridden_by and _is_near(each.overridden_by, name)), "")
        if meant and each.overridden_by not in names:
            yield f"environment.yaml: {each.name}.overridden_by = {each.overridden_by!r}, but {meant} is known"
        if each.unless and each.unless not in known:
            yield f"environment.yaml: {each.name}.unless = {each.unless!r} is unknown"


@check("write {interface} or {adapters}, or `used` instead of `value`: flagcore fills in what differs between machines")
def variables_hold_for_all_machines(plugin: Subject) -> Problems:
    for each in plugin.variables:
        if each.value and OF_MACHINE.search(each.name) and "{" not in each.value:
            yield f"environment.yaml: {each.name} = {each.value!r} is the name of a device of one machine"


@check("name the variable that the runtime below torch reads, not that of containers or of another vendor")
def devices_are_selected_by_an_own_variable(plugin: Subject) -> Problems:
    detector = detector_of(plugin)
    need(detector.own_variables, "the detector names no variables of its own software")
    prefixes = (*map(str, detector.own_variables), f"{detector.torch_device.upper()}_")
    if not any(str(name).startswith(prefixes) for name in detector.visible):
        shown = f"none begins with a prefix of torch_device or own_variables, {', '.join(prefixes)}"
        yield f"discover.py: visible = {detector.visible!r}: {shown}"


@check("use `used` instead of `value`: flagcore sets them to the devices of each trial")
def variables_do_not_select_devices(plugin: Subject) -> Problems:
    detector = detector_of(plugin)
    for each in plugin.variables:
        if each.value and each.name in (*detector.visible, detector.outer):
            yield f"environment.yaml: {each.name} = {each.value!r} selects devices"


@check("name the same variables in `visible` of the detector and in environment.yaml")
def device_variables_are_those_of_the_detector(plugin: Subject) -> Problems:
    detector, listed = detector_of(plugin), plugin.variables
    known = {*detector.visible, detector.outer}
    for each in listed:
        if each.name.endswith("VISIBLE_DEVICES") and not each.used.startswith("as ") and each.name not in known:
            yield f"environment.yaml: {each.name} restricts devices, but discover.py does not read it"
    texts = [*(each.advice for each in plugin.quirks.failures), *(each.note for each in plugin.quirks.notes)]
    said = " ".join(text for text in texts if not re.search(r"\b(no|not|ignored|instead)\b", text))
    for name in sorted({*re.findall(r"\b[A-Z_]+_VISIBLE_DEVICES\b", said)} - {*known, *(each.name for each in listed)}):
        yield f"quirks.yaml names {name}, which discover.py does not read"
    for each in listed:
        same = each.used.removeprefix("as ")
        if same != each.used and same.isidentifier() and same not in {*known, *(one.name for one in listed)}:
            yield f"environment.yaml: {each.name} is used as {same}, which discover.py does not read"


@check("add the variable that names the vendor to environment.yaml, with a value, or remove it from discover.py")
def vendor_is_selected(plugin: Subject) -> Problems:
    detector = detector_of(plugin)
    need(detector.vendor_variables, "no variable selects the vendor")
    if not {each.name for each in plugin.variables if each.value} & {*detector.vendor_variables}:
        yield f"discover.py reads {', '.join(detector.vendor_variables)}, but environment.yaml sets none of them"


OTHER_FILES = ("_manager", "ctl", "_ctl", "_control")
"""Ends of the names of files in /dev that belong to a driver and are no devices."""


@check('write a tuple of names, with a comma after a single one: ("ACME_VISIBLE_DEVICES",)')
def detector_has_tuples(plugin: Subject) -> Problems:
    detector = detector_of(plugin)
    for name in TUPLES:
        words = getattr(detector, name)
        if not isinstance(words, tuple) or not all(isinstance(word, str) and word.strip() for word in words):
            yield f"discover.py: {name} = {words!r}"
    pattern = detector.device_file
    if pattern.startswith("/") or pattern.count("[") != pattern.count("]"):
        fix = "write a glob pattern below the root, such as dev/acme[0-9]*"
        yield Problem(f"discover.py: device_file = {pattern!r}", fix)
    for other in (f"{pattern.rstrip('*')}{suffix}" for suffix in OTHER_FILES if pattern.endswith("*")):
        if fnmatch(other, pattern) and not pattern.endswith("]*"):
            fix = "match numbers only, such as dev/acme[0-9]*: drivers have files that are no devices"
            yield Problem(f"discover.py: device_file = {pattern!r} matches /{other}, too", fix)
    for name in detector.pci_classes if isinstance(detector.pci_classes, tuple) else ():
        if not re.fullmatch(r"0x(03|12|0b)([0-9a-f]{2}){0,2}", name.casefold()):
            fix = "write the beginning of a class as in sysfs: 0x12 (accelerators), 0x0302 or 0x0380 (displays)"
            yield Problem(f"discover.py: pci_classes has {name!r}", fix)
    tools = fakes.tools_of(plugin)
    if tools and detector.topology and not isinstance(detector.topology, str) and detector.topology[0] not in tools:
        fix = "name a tool that `listing` runs"
        yield Problem(f"discover.py: topology runs {detector.topology[0]!r}, not {', '.join(tools)}", fix)
    if tools and detector.tool not in tools:
        fix = "name the tool that `listing` runs: messages name it"
        yield Problem(f"discover.py: tool = {detector.tool!r}, but the detector runs {', '.join(tools)}", fix)


@check("write the same name in discover.py, engines.yaml and chips/*.yaml")
def detector_agrees_with_the_files(plugin: Subject) -> Problems:
    detector, vendors = detector_of(plugin), sorted({chip.vendor for chip in plugin.own_chips()})
    in_hooks = getattr(plugin.hooks, "vendor", detector.vendor)
    for where, vendor in (("hooks.py", in_hooks), ("discover.py", detector.vendor)):
        if vendor not in vendors:
            yield f"{where}: vendor is {vendor!r}, but {', '.join(vendors)} in the chips' files"
    types = dict.fromkeys((each.device_type, kind) for kind, each in _sections(plugin) if each.device_type != "cpu")
    for device_type, kind in types:
        if device_type != detector.torch_device:
            text = f"engines.yaml: {kind}.device_type = {device_type!r}"
            yield f"{text}, but torch_device of discover.py is {detector.torch_device!r}"
    shared = {*_others_variables(plugin), *SHARED}
    for prefix in detector.own_variables:
        if taken := sorted(name for name in shared if name.startswith(prefix) and "_" in prefix):
            fix = "name only prefixes of variables that no other vendor's software reads"
            yield Problem(f"discover.py: own_variables has {prefix!r}, with which {taken[0]} begins, too", fix)
        if len(prefix) < 3 or not prefix.endswith("_"):
            fix = "write the prefix of the vendor's variables, such as ACME_"
            yield Problem(f"discover.py: own_variables has {prefix!r}", fix)


@check("preload the module that adds the devices to torch in both sections, before all others")
def sections_preload_the_same_module(plugin: Subject) -> Problems:
    sections = [(kind, each) for kind, each in _sections(plugin) if each.device_type]
    for (kind, one), (other_kind, other) in pairwise(sections):
        if one.device_type == other.device_type and one.distributed_backend != other.distributed_backend:
            text = f"{one.distributed_backend} and {other.distributed_backend}"
            fix = "write the same distributed_backend: torch has one of each device"
            yield Problem(f"engines.yaml: distributed_backend of {kind} and {other_kind} is {text}", fix)
        first, second = (each.preload[:1] for each in (one, other))
        if one.device_type == other.device_type and first != second:
            text = ", ".join((*first, *second))
            yield f"engines.yaml: {kind} and {other_kind} have the device {one.device_type}, but one preloads {text}"


@check("write the ID that `lspci -nn` prints for the device, such as 0x1E3E")
def pci_vendor_is_the_vendors(plugin: Subject) -> Problems:
    vendor_id: object = detector_of(plugin).pci_vendor
    if not isinstance(vendor_id, int):
        yield f"discover.py: pci_vendor = {vendor_id!r} is no number"
        return
    where = f"discover.py: pci_vendor = {vendor_id:#06x}"
    if not 0x1000 <= vendor_id <= 0xFFFF:
        yield f"{where} has not four hexadecimal digits, and IDs below 0x1000 belong to no vendor of accelerators"
    for name, other in others_detectors(plugin):
        if other.pci_vendor == vendor_id:
            yield f"{where} is that of the plugin {name}"
    file = plugin.package_folder / "discover.py"
    text = file.read_text("utf-8") if file.is_file() else ""
    if (quoted := {int(each, 16) for each in PCI_ID.findall(text)}) and vendor_id not in quoted:
        yield f"{where}, but the same file quotes {', '.join(f'{each:04x}' for each in sorted(quoted))}"


@check("write the name of this vendor's resource, or leave out `kubernetes`")
def resources_are_the_vendors(plugin: Subject) -> Problems:
    packages = {
        name: str(getattr(other, "package", None) or getattr(other, "__package__", name))
        for name, other in others_hooks(plugin)
    }
    theirs = [(name, each) for name, package in packages.items() for each in read_engines(package).values()]
    libraries = {name for _, each in theirs for name in each.cross_vendor_libraries}
    for kind, each in _sections(plugin):
        for name in each.cross_vendor_libraries:
            if name not in libraries and (meant := next((one for one in sorted(libraries) if _is_near(name, one)), "")):
                fix = "write the name as other plugins do: chips are connected by a library that both name"
                yield Problem(f"engines.yaml: {kind}.cross_vendor_libraries has {name!r}, others have {meant!r}", fix)
        counts = each.kubernetes.counts if each.kubernetes else ""
        if counts == "cards" and all(chip.devices_per_card == 1 for chip in plugin.own_chips()):
            fix = "remove counts, or give the chips devices_per_card"
            yield Problem(f"engines.yaml: {kind}.kubernetes.counts = 'cards', but each card has one device", fix)
        if each.kubernetes and not RESOURCE.fullmatch(each.kubernetes.name):
            fix = "write the domain of the vendor and the resource, such as acme.com/gpu"
            yield Problem(f"engines.yaml: {kind}.kubernetes.name = {each.kubernetes.name!r}", fix)
    others = {each.kubernetes.name: name for name, each in theirs if each.kubernetes}
    for kind, each in _sections(plugin):
        if each.kubernetes and each.kubernetes.name in others:
            yield f"engines.yaml: {kind}.kubernetes.name is that of the plugin {others[each.kubernetes.name]}"


def others_hooks(plugin: Subject) -> Iterable[tuple[str, object]]:
    return ((each.name, hooks) for each in plugin.others.plugins for hooks in each.manager.get_plugins())


def others_detectors(plugin: Subject) -> Iterator[tuple[str, DeviceDetector]]:
    for name, hooks in others_hooks(plugin):
        if isinstance(detector := getattr(hooks, "detector", None), DeviceDetector):
            yield name, detector
