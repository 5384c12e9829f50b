"""Checks of the environment of trials: the hook's answer, and the entries of `environment.yaml` one by one."""

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any
from unittest import mock

from flagcore_vendorkit.detection import DeviceDetector
from flagcore_vendorkit.engines import Variable, all_knobs, read_quirks, read_variables
from flagcore_vendorkit.fields import applicable

from flagcore.domain.chip import Chip
from flagcore.errors import SpecError
from flagcore.launchers.network import placeholders
from flagcore.plugins import find_engine, kind_of
from flagcore_testing import fakes
from flagcore_testing.checks.detector import (
    AGREE,
    SHARED,
    detector_of,
    is_near,
    others_detectors,
    others_hooks,
    words_of,
)
from flagcore_testing.kit import Problem, Problems, Skip, Subject, check, need, once, repeated, wrong

COLLECTIVES = re.compile(r"^[A-Z]{1,3}CL_")
"""The beginning of variables of collective libraries, most of which have the same names after it."""
PLACEHOLDER = re.compile(r"\$\{?\w+\}?|\{\w*\}")
OF_MACHINE = re.compile(r"_SOCKET_IFNAME$|_IB_HCA$|_IF_IP$")
"""Variables whose value differs between machines."""
UNSET = re.compile(r"\b(?:leave|unset|do not set) ([A-Z][A-Z0-9_]{4,})")
DOCUMENT = "use `used` instead of `value`: it documents the value without setting it"
RESTRICT = "use `used` instead of `value`, or restrict it by unless, several_nodes, chips or versions"
FILL_IN = (
    "write {interface} or {adapters}, or `used` instead of `value`: flagcore fills in what differs between machines"
)
ONE_NODE = "add several_nodes: true: a job on one node needs no interface or adapter"


def _others_files(plugin: Subject, read: Any) -> Iterator[Any]:
    """Yield the content of a file of each other installed plugin."""
    for name, hooks in others_hooks(plugin):
        with suppress(SpecError, ModuleNotFoundError):  # the checks of the other plugin report it
            yield read(str(getattr(hooks, "package", name)))


@once
def _others_variables(plugin: Subject) -> list[list[Variable]]:
    """Return the variables that each other installed plugin describes."""
    return [[*variables] for variables in _others_files(plugin, read_variables)]


def _others_names(plugin: Subject) -> list[str]:
    return [name for variables in _others_variables(plugin) for name in sorted({each.name for each in variables})]


def _named(plugin: Subject) -> Iterator[tuple[str, str]]:
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
    words, others = words_of(plugin), _others_names(plugin)
    known: dict[str, list[str]] = {}
    for name in (*others, *(word for word in words if "_" in word and word.isupper() for _ in (1, 2))):
        known.setdefault(COLLECTIVES.sub("CL_", name), []).append(name)
    parts = Counter(part for name in {*others, *(each for _, each in _named(plugin))} for part in name.split("_"))
    for file, name in dict.fromkeys(_named(plugin)):
        for part in (part for part in name.split("_") if len(part) > 6 and parts[part] == 1):
            near = (other for other in parts if is_near(part, other) and part not in other and other not in part)
            if meant := next(near, ""):
                yield f"{file}: {name} has the word {part}, and other variables have {meant}"
        general = COLLECTIVES.sub("CL_", name)
        if words[name] > 1 or name in others or {*known[general]} != {name}:
            continue
        near = (names[0] for each, names in known.items() if len(names) > 1 and is_near(general, each))
        if meant := next(near, ""):
            yield f"{file}: {name} is not known, but {meant} is"


def _variables(plugin: Subject) -> list[tuple[Subject, Variable]]:
    return [(plugin, each) for each in plugin.variables]


@check(each=_variables)
def variables_hold_for_all_users(plugin: Subject, each: Variable) -> Problems:
    value, condition, known = each.value or "", each.condition, set(placeholders())
    filled = {*PLACEHOLDER.findall(value)}
    restricted = each.unless or each.several_nodes or each.chips or str(each.versions or "")
    yield from wrong(
        (re.match(r"[/~]\w|[A-Z]:\\", value), "is a path of one machine",
         "use `used` instead of `value`, or name a file that the vendor installs on every machine"),
        (value != value.strip() or value[:1] in ("'", '"'), "has quotes or spaces",
         "write the value as the program reads it"),
        (re.fullmatch(r"\w+=.*", value) and value.startswith(each.name), "repeats the name", "write only the value"),
        (value and not each.several_nodes and re.match(r"several nodes", condition),
         f"is set for one node, too, but its condition is {condition!r}",
         "add several_nodes: true; condition is only a text"),
        (value and condition and not restricted,
         f"is always set, and condition is {condition!r}, which is only a text", RESTRICT),
        (each.several_nodes and not value, "has several_nodes, which has no effect without value",
         "give value, or remove it"),
        *((True, f"has the unknown placeholder {word}", "write {address}, {interface}, {adapters}, or the value itself")
          for word in sorted(filled - known)),
        (known & filled and not each.several_nodes, "is set for one node, too", ONE_NODE),
        (value and OF_MACHINE.search(each.name) and "{" not in value,
         "is the name of a device of one machine", FILL_IN),
        where=f"environment.yaml: {each.name} = {each.value!r} ",
    )  # fmt: skip


@check("name a setting of a training engine, as in docs/spec.md", each=_variables)
def conditions_are_known(plugin: Subject, each: Variable) -> Problems:
    trains = [engine for engine in plugin.engines if kind_of(engine) == "train"]
    known = {name for engine in trains for knob in find_engine(engine).knobs for name in knob.names}
    names, other = sorted({*_others_names(plugin), *(one.name for one in plugin.variables)}), each.overridden_by
    meant = next((name for name in names if other and is_near(other, name)), "")
    if meant and other not in names:
        yield f"environment.yaml: {each.name}.overridden_by = {other!r}, but {meant} is known"
    if each.unless and each.unless not in known:
        yield f"environment.yaml: {each.name}.unless = {each.unless!r} is unknown"
    starts = {f"{re.sub(r'[^A-Z]', '', engine.upper())}_": engine for engine in plugin.engines}
    engine = starts.get(f"{each.name.partition('_')[0]}_", "")
    for scope, reader in ((each.engines, engine), (each.kinds, kind_of(engine) if engine else "")):
        if engine and scope and reader not in scope:
            text = f"environment.yaml: {each.name} is for {', '.join(scope)}, and {engine} reads it"
            yield Problem(text, "use the engine that reads the variable")


@check("use `used` instead of `value`: flagcore sets them to the devices of each trial")
def variables_of_the_detector_are_those_of_the_files(plugin: Subject) -> Problems:
    detector = detector_of(plugin)
    known, listed = {*detector.visible, detector.outer}, plugin.variables if _has_file(plugin) else ()
    names = {*known, *(each.name for each in listed)}
    both = "name the same variables in `visible` of the detector and in environment.yaml"
    for each in listed:
        same = each.used.removeprefix("as ")
        yield from wrong(
            (each.value and each.name in known, f" = {each.value!r} selects devices",
             "use `used` instead of `value`: flagcore sets them to the devices of each trial"),
            (each.name.endswith("VISIBLE_DEVICES") and same == each.used and each.name not in known,
             " restricts devices, but discover.py does not read it", both),
            (same != each.used and same.isidentifier() and same not in names,
             f" is used as {same}, which discover.py does not read", both),
            where=f"environment.yaml: {each.name}",
        )  # fmt: skip
    quirks = read_quirks(plugin.package)
    texts = [*(each.advice for each in quirks.failures), *(each.note for each in quirks.notes)]
    said = " ".join(text for text in texts if not re.search(r"\b(no|not|ignored|instead)\b", text))
    for name in sorted({*re.findall(r"\b[A-Z_]+_VISIBLE_DEVICES\b", said)} - names):
        yield Problem(f"quirks.yaml names {name}, which discover.py does not read", both)
    selecting = detector.vendor_variables
    if selecting and _has_file(plugin) and not {each.name for each in listed if each.value} & {*selecting}:
        text = f"discover.py reads {', '.join(selecting)}, but environment.yaml sets none of them"
        fix = "add the variable that names the vendor to environment.yaml, with a value, or remove it from discover.py"
        yield Problem(text, fix)
    shared = {*_others_names(plugin), *SHARED}
    for prefix in detector.own_variables:
        if taken := sorted(name for name in shared if name.startswith(prefix) and "_" in prefix):
            fix = "name only prefixes of variables that no other vendor's software reads"
            yield Problem(f"discover.py: own_variables has {prefix!r}, with which {taken[0]} begins, too", fix)


def _has_file(plugin: Subject) -> bool:
    return (plugin.package_folder / "environment.yaml").is_file()


@check("write the value of the others, or restrict the variable to what differs")
def values_agree_with_other_plugins(plugin: Subject) -> Problems:
    theirs = [each for variables in _others_variables(plugin) for each in variables]
    ends: dict[str, Counter[str]] = {}
    for each in (each for each in theirs if "{" in (each.value or "")):
        ends.setdefault(each.name.partition("_")[2], Counter())[str(each.value)] += 1
    foreign: Mapping[str, DeviceDetector] = dict(others_detectors(plugin))
    own = plugin.detector.own_variables if plugin.detector else ()
    for each in plugin.variables:
        where = f"environment.yaml: {each.name}"
        same = [one for one in theirs if one.name == each.name and one.value and not one.chips]
        is_usual = each.value and len(same) >= AGREE and len({one.value for one in same}) == 1
        for key in ("value", "unless", "several_nodes", "overridden_by", "engines", "kinds") if is_usual else ():
            values = [getattr(one, key) for one in same]
            if len(set(values)) == 1 and getattr(each, key) != values[0]:
                yield f"{where} has {key} = {getattr(each, key)!r}, and {len(values)} other plugins have {values[0]!r}"
        usual = ends.get(each.name.partition("_")[2], Counter()) if "{" in (each.value or "") else Counter[str]()
        if usual and each.value not in usual:
            shown = f"{usual.total()} variables of other plugins with this ending have {usual.most_common(1)[0][0]!r}"
            fix = (
                "write what the others fill in: {interface} for sockets, {adapters} for InfiniBand, {address} for hosts"
            )
            yield Problem(f"{where} = {each.value!r}, and {shown}", fix)
        for name, prefix in ((name, prefix) for name, other in foreign.items() for prefix in other.own_variables):
            if plugin.detector and each.name.startswith(prefix) and not each.name.startswith(own):
                text = f"{where} begins with {prefix}, which only software of {name} reads"
                yield Problem(text, "remove it, or write this vendor's variable of the same meaning")


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


USERS = {"PATH", "HOME", "USER", "PYTHONPATH", "LD_LIBRARY_PATH", "TMPDIR"}
"""Variables that belong to the user's shell."""
OF_LAUNCHERS = {
    *("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"),
    *("NNODES", "NPROC_PER_NODE", "GROUP_WORLD_SIZE"),
}
"""Variables that a launcher sets in each process."""
DEBUGGING = re.compile(r"LAUNCH_BLOCKING|_DEBUG(_|$)|_TRACE|PROFIL|NO_\w*MEMORY_CACHING|LOG_LEVEL|VERBOS")
QUIET = {"0", "false", "off", "warn", "warning", "error", "none"}
Set = tuple[Subject, Chip, str, Mapping[str, str]]


def _environments(plugin: Subject) -> list[Set]:
    plugin.implements("flagcore_environment")
    return [(plugin, chip, engine, plugin.loaded.environment(chip, engine)) for chip, engine in plugin.pairs()]


@check(DOCUMENT, each=_environments)
def system_variables_are_not_set(plugin: Subject, chip: Chip, engine: str, variables: Mapping[str, str]) -> Problems:
    for name, value in sorted(variables.items()):
        if name in OF_LAUNCHERS:
            yield f"flagcore_environment: {name} of {engine} on {chip.name} is set by the launcher of each job"
        if name in USERS:
            yield f"flagcore_environment: {name} of {engine} on {chip.name} replaces the user's value"
        if DEBUGGING.search(name) and value.casefold() not in QUIET:
            fix = "use `used` instead of `value`: it is for debugging, and slows runs"
            yield Problem(f"flagcore_environment: {name} = {value!r} of {engine} on {chip.name}", fix)


@check("keep one, or restrict each by engines, chips or versions")
def variables_are_listed_once(plugin: Subject) -> Problems:
    for chip, engine in plugin.pairs():
        listed = applicable(plugin.variables, chip, engine, None, kind_of(engine))
        set_names = [each.name for each in listed if each.value]
        for name, times in repeated(set_names):
            yield f"environment.yaml: {name} has {times} values for {engine}"
        for name in sorted({*set_names} & {each.name for each in listed if each.used}):
            yield f"environment.yaml: {name} has value and used for {engine} on {chip.name}"
    warned = {name: each.note for each in read_quirks(plugin.package).notes for name in UNSET.findall(each.note)}
    for each in plugin.variables:
        if each.value and each.name in warned:
            text = f"environment.yaml: {each.name} = {each.value!r}, and quirks.yaml has {warned[each.name][:80]!r}"
            yield Problem(text, "remove the value, or the note")


@check("write the name that the software has for this vendor, and handle it in discover.py")
def variables_do_not_select_another_vendor(plugin: Subject) -> Problems:
    other_vendors = {name for chip in plugin.others.chips() for name in _accelerator(plugin, chip)}
    for _, chip, _, variables in _environments(plugin):
        wrong_names = [name for name, value in variables.items() if value.casefold() in other_vendors - {chip.vendor}]
        for name in dict.fromkeys([*wrong_names, *_device_variables(plugin, variables)]):
            reason = "another vendor" if name in wrong_names else "its own devices are then not found"
            yield f"flagcore_environment sets {name} = {variables[name]!r} on {chip.name} of {chip.vendor}: {reason}"


@check("add it with value, meaning and source", each=_environments)
def variables_are_documented(plugin: Subject, chip: Chip, engine: str, variables: Mapping[str, str]) -> Problems:
    for name in sorted(set(variables) - {each.name for each in plugin.variables if each.value}):
        yield f"flagcore_environment sets {name} for {engine}, which is missing in environment.yaml"


@check("return the variables of environment.yaml there, as VendorPlugin does", each=_environments)
def documented_variables_are_set(plugin: Subject, chip: Chip, engine: str, variables: Mapping[str, str]) -> Problems:
    need(not plugin.failed("flagcore_environment"), "flagcore_environment has no valid answer")
    for each in applicable(plugin.variables, chip, engine, None, kind_of(engine)):
        is_unconditional = each.applies_to(None) and not each.condition and "{" not in str(each.value)
        if each.value and is_unconditional and each.name not in variables:
            yield f"environment.yaml: {each.name} is for {engine} on {chip.name}, but is not set"


@check("return what trials need: the core keeps the user's values and reports conflicts", each=_environments)
def variables_do_not_depend_on_the_shell(
    plugin: Subject, chip: Chip, engine: str, variables: Mapping[str, str]
) -> Problems:
    with mock.patch.dict(os.environ, dict.fromkeys(variables, "the user's own")), fakes.quiet():
        second_answer = plugin.loaded.environment(chip, engine)
    for name in sorted(name for name in variables if second_answer.get(name) != variables[name]):
        yield f"flagcore_environment returns {second_answer.get(name)!r} for {name} if the shell sets it"


def _accelerator(plugin: Subject, chip: Chip) -> tuple[str, ...]:
    """Return the names of the vendor of a chip of another plugin. The result is empty if the devices are plain CPUs."""
    is_cpu = plugin.others.engine_support(chip, "megatron").device_type == "cpu"
    return () if is_cpu else (chip.vendor.casefold(), plugin.others.owner(chip.name) or chip.vendor)


def _device_variables(plugin: Subject, variables: Mapping[str, str]) -> list[str]:
    """Return the variables that hide the devices of the plugin's own transcript."""
    pairs = tuple(pair for pair in sorted(variables.items()) if pair[0] not in USERS)
    try:
        is_hidden = _has_devices(plugin) and not _has_devices(plugin, *pairs)
    except Skip:
        return []
    names = [name for name, value in pairs if is_hidden and not _has_devices(plugin, (name, value))]
    return [name for name in variables if name in names]


@once
def _has_devices(plugin: Subject, *variables: tuple[str, str]) -> bool:
    """Return whether the devices of the plugin's own transcript are found if `variables` are set."""
    tools = fakes.printing(plugin.listings[0])
    with suppress(Exception):  # another check reports it
        return bool(fakes.devices(plugin, tools, **dict(variables)))
    return True
