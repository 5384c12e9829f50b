"""Checks of the environment of trials: the hook's answer, and the entries of `environment.yaml` one by one."""

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from unittest import mock

from flagcore_vendorkit.engines import Variable, all_knobs, read_quirks, read_variables
from flagcore_vendorkit.fields import applicable

from flagcore.domain.chip import Chip
from flagcore.domain.engine import ValueRule
from flagcore.launchers.network import placeholders
from flagcore.plugins import find_engine, kind_of
from flagcore_testing import fakes
from flagcore_testing.checks.detector import (
    AGREE,
    SHARED,
    detector_of,
    is_near,
    nearest,
    others_detectors,
    others_files,
)
from flagcore_testing.kit import Items, Problems, Skip, Subject, check, need, once, repeated


@check("return the entries of quirks.yaml there, as VendorPlugin does")
def quirks_are_used(plugin: Subject) -> Problems:
    need(plugin.quirks.refused or plugin.quirks.forced, "quirks.yaml refuses nothing")
    need(not plugin.failed("flagcore_check_task"), "flagcore_check_task has no valid answer")
    for chip, engine, advice in plugin.advice:
        about = (chip, engine, None, kind_of(engine))
        refused, forced = applicable(plugin.quirks.refused, *about), applicable(plugin.quirks.forced, *about)
        expected: tuple[ValueRule, ...] = (*refused, *forced)
        for name in (quirk.name for quirk in expected if quirk not in advice.rules):
            yield f"flagcore_check_task: {chip.name} lacks {name} of quirks.yaml"


COLLECTIVES = re.compile(r"^[A-Z]{1,3}CL_")
"""The beginning of variables of collective libraries, most of which have the same names after it."""
PLACEHOLDER = re.compile(r"\$\{?\w+\}?|\{\w*\}")
OF_MACHINE = re.compile(r"_SOCKET_IFNAME$|_IB_HCA$|_IF_IP$")
"""Variables whose value differs between machines."""
UNSET = re.compile(r"\b(?:leave|unset|do not set) ([A-Z][A-Z0-9_]{4,})")
DOCUMENT = "use `used` instead of `value`: it documents the value without setting it"


@once
def _others_variables(plugin: Subject) -> list[Variable]:
    """Return the variables that other installed plugins describe."""
    return [each for _, variables in others_files(plugin, read_variables) for each in variables]


@once
def _others_names(plugin: Subject) -> list[str]:
    """Return the names of these variables, one of each plugin."""
    files = others_files(plugin, read_variables)
    return [name for _, variables in files for name in sorted({each.name for each in variables})]


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


@once
def _known_variables(plugin: Subject) -> dict[str, list[str]]:
    """Return the names of other plugins' variables, and those in the plugin's files, without the vendor's prefix."""
    own = (word for word in plugin.words if "_" in word and word.isupper() for _ in (1, 2))
    known: dict[str, list[str]] = {}
    for name in (*_others_names(plugin), *own):
        known.setdefault(COLLECTIVES.sub("CL_", name), []).append(name)
    return known


@check("correct the name; if it is right, other files of the plugin may name it too, such as the README")
def variables_are_spelled_correctly(plugin: Subject) -> Problems:
    words, others, known = plugin.words, _others_names(plugin), _known_variables(plugin)
    own = [*dict.fromkeys(_named(plugin))]
    parts = Counter(part for name in {*others, *(name for _, name in own)} for part in name.split("_"))
    for file, name in own:
        for part in (part for part in name.split("_") if len(part) > 6 and parts[part] == 1):
            near = (other for other in parts if is_near(part, other) and part not in other and other not in part)
            for meant in [*near][:1]:
                yield f"{file}: {name} has the word {part}, and other variables have {meant}"
        general = COLLECTIVES.sub("CL_", name)
        if words[name] <= 1 and name not in others and {*known[general]} == {name}:
            near = (names[0] for each, names in known.items() if len(names) > 1 and is_near(general, each))
            yield from (f"{file}: {name} is not known, but {meant} is" for meant in [*near][:1])


def _variables(plugin: Subject) -> Items:
    """Return each entry of `environment.yaml` with its location."""
    return [(f"environment.yaml: {each.name}", plugin, each) for each in plugin.variables]


@check(each=_variables)
def variables_hold_for_all_users(plugin: Subject, it: Variable) -> Problems:
    value, shown, known = it.value or "", f" = {it.value!r}", {*placeholders()}
    filled = {*PLACEHOLDER.findall(value)}
    yield from (
        (re.match(r"[/~]\w|[A-Z]:\\", value), f"{shown} is a path of one machine",
         "use `used` instead of `value`, or name a file that the vendor installs on every machine"),
        (value and (value != value.strip() or value[0] in "'\""), f"{shown} has quotes or spaces",
         "write the value as the program reads it"),
        (re.fullmatch(rf"{it.name}\w*=.*", value), f"{shown} repeats the name", "write only the value"),
        (value and not it.several_nodes and it.condition.startswith("several nodes"),
         f"{shown} is set for one node, too, but its condition is {it.condition!r}",
         "add several_nodes: true; condition is only a text"),
        (value and it.condition and not any((it.unless, it.several_nodes, it.chips, it.versions)),
         f"{shown} is always set, and condition is {it.condition!r}, which is only a text",
         "use `used` instead of `value`, or restrict it by unless, several_nodes, chips or versions"),
        (it.several_nodes and not value, ": several_nodes has no effect without value", "give value, or remove it"),
        *((True, f" has the unknown placeholder {each}",
           "write {address}, {interface}, {adapters}, or the value itself") for each in sorted(filled - known)),
        (filled & known and not it.several_nodes, f"{shown} is set for one node, too",
         "add several_nodes: true: a job on one node needs no interface or adapter"),
        (value and OF_MACHINE.search(it.name) and "{" not in value, f"{shown} is the name of a device of one machine",
         "write {interface} or {adapters}, or `used` instead of `value`: flagcore fills in what differs"),
        (value and it.name in _selecting(plugin), f"{shown} selects devices",
         "use `used` instead of `value`: flagcore sets them to the devices of each trial"),
    )  # fmt: skip


def _reader(it: Variable, plugin: Subject) -> str:
    """Return whom an entry is for, and the engine that reads it by its name, if these differ."""
    starts = {f"{re.sub(r'[^A-Z]', '', engine.upper())}_": engine for engine in plugin.engines}
    engine = starts.get(f"{it.name.partition('_')[0]}_", "")
    is_other = engine and ((it.engines and engine not in it.engines) or (it.kinds and kind_of(engine) not in it.kinds))
    return f"{', '.join(it.engines or it.kinds)}, and {engine}" if is_other else ""


def _differences(it: Variable, plugin: Subject) -> list[str]:
    """Return what an entry has otherwise than all others of its name, if at least AGREE plugins agree."""
    same = [each for each in _others_variables(plugin) if each.name == it.name and each.value and not each.chips]
    usual, differences = {each.value for each in same}, []
    for key in ("value", "unless", "several_nodes", "overridden_by", "engines", "kinds"):
        values, own = {getattr(each, key) for each in same}, getattr(it, key)
        if it.value and len(same) >= AGREE and len(usual) == len(values) == 1 and own not in values:
            differences.append(f"{key} = {own!r}, and {len(same)} other plugins have {values.pop()!r}")
    return differences


def _usual_placeholder(it: Variable, plugin: Subject) -> str:
    """Return what other plugins fill in for variables with the same ending, if it is something else."""
    end = it.name.partition("_")[2]
    theirs = [each for each in _others_variables(plugin) if "{" in (each.value or "")]
    usual = Counter(str(each.value) for each in theirs if each.name.partition("_")[2] == end)
    if not usual or "{" not in (it.value or "") or it.value in usual:
        return ""
    return f"{usual.total()} variables of other plugins with this ending have {usual.most_common(1)[0][0]!r}"


def _selecting(plugin: Subject) -> set[str]:
    return {*plugin.detector.visible, plugin.detector.outer} if plugin.detector else set()


def _unread(it: Variable, plugin: Subject) -> str:
    """Return why an entry about the selection of devices has no counterpart in the detector."""
    known, same = _selecting(plugin), it.used.removeprefix("as ")
    if plugin.detector is None:
        return ""
    if same != it.used:
        names = {*known, *(each.name for each in plugin.variables)}
        return f"is used as {same}" if same.isidentifier() and same not in names else ""
    return "restricts devices" if it.name.endswith("VISIBLE_DEVICES") and it.name not in known else ""


BOTH = "name the same variables in `visible` of the detector and in environment.yaml"


@check(each=_variables)
def variables_have_their_meaning(plugin: Subject, it: Variable) -> Problems:
    names = sorted({*_others_names(plugin), *(each.name for each in plugin.variables)})
    meant = nearest(it.overridden_by, names) if it.overridden_by and it.overridden_by not in names else ""
    trains = [engine for engine in plugin.engines if kind_of(engine) == "train"]
    settings = {name for engine in trains for knob in find_engine(engine).knobs for name in knob.names}
    reader, unread, usual = (part(it, plugin) for part in (_reader, _unread, _usual_placeholder))
    is_own = not plugin.detector or it.name.startswith(plugin.detector.own_variables)
    prefixes = ((name, each) for name, other in others_detectors(plugin) for each in other.own_variables)
    yield from (
        (meant, f".overridden_by = {it.overridden_by!r}, but {meant} is known", "correct the name"),
        (it.unless and it.unless not in settings, f".unless = {it.unless!r} is unknown",
         "name a setting of a training engine, as in docs/spec.md"),
        (reader, f" is for {reader} reads it", "use the engine that reads the variable"),
        (unread, f" {unread}, but discover.py does not read it", BOTH),
        *((True, f" has {each}", "write the value of the others, or restrict the variable to what differs")
          for each in _differences(it, plugin)),
        (usual, f" = {it.value!r}, and {usual}",
         "write what they fill in: {interface} for sockets, {adapters} for InfiniBand, {address} for hosts"),
        *((not is_own and it.name.startswith(prefix), f" begins with {prefix}, which only software of {name} reads",
           "remove it, or write this vendor's variable of the same meaning") for name, prefix in prefixes),
    )  # fmt: skip


@check(BOTH)
def detector_reads_what_the_files_name(plugin: Subject) -> Problems:
    detector, listed, quirks = detector_of(plugin), read_variables(plugin.package), read_quirks(plugin.package)
    texts = [*(each.advice for each in quirks.failures), *(each.note for each in quirks.notes)]
    said = " ".join(text for text in texts if not re.search(r"\b(no|not|ignored|instead)\b", text))
    known = {*_selecting(plugin), *(each.name for each in listed)}
    for name in sorted({*re.findall(r"\b[A-Z_]+_VISIBLE_DEVICES\b", said)} - known):
        yield f"quirks.yaml names {name}, which discover.py does not read"
    selecting, values = {*detector.vendor_variables}, {each.name for each in listed if each.value}
    text = f"discover.py reads {', '.join(detector.vendor_variables)}, but environment.yaml sets none of them"
    fix = "add the variable that names the vendor to environment.yaml, with a value, or remove it from discover.py"
    yield listed and selecting and not values & selecting, text, fix
    shared = sorted({*_others_names(plugin), *SHARED})
    for prefix in (each for each in detector.own_variables if "_" in each):
        taken = next((name for name in shared if name.startswith(prefix)), "")
        yield (taken, f"discover.py: own_variables has {prefix!r}, with which {taken} begins, too",
               "name only prefixes of variables that no other vendor's software reads")  # fmt: skip


@check("write the same, or a pattern of this vendor's own text")
def failures_agree_with_other_plugins(plugin: Subject) -> Problems:
    theirs = [each for _, quirks in others_files(plugin, read_quirks) for each in quirks.failures]
    for place, each in enumerate(plugin.quirks.failures):
        for key in ("state", "weak"):
            values, own = [getattr(one, key) for one in theirs if one.pattern == each.pattern], getattr(each, key)
            if values and own not in values:
                shown, usual = (getattr(value, "value", value) for value in (own, values[0]))
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


def _environments(plugin: Subject) -> Items:
    return [("", plugin, *pair, plugin.loaded.environment(*pair)) for pair in plugin.pairs()]


@check(DOCUMENT, each=_environments, hook="environment")
def system_variables_are_not_set(plugin: Subject, chip: Chip, engine: str, variables: Mapping[str, str]) -> Problems:
    where, fix = "flagcore_environment: ", "use `used` instead of `value`: it is for debugging, and slows runs"
    for name, value in sorted(variables.items()):
        yield name in OF_LAUNCHERS, f"{where}{name} of {engine} on {chip.name} is set by the launcher of each job"
        yield name in USERS, f"{where}{name} of {engine} on {chip.name} replaces the user's value"
        is_loud = DEBUGGING.search(name) and value.casefold() not in QUIET
        yield is_loud, f"{where}{name} = {value!r} of {engine} on {chip.name}", fix


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
    for each in (each for each in plugin.variables if each.value and each.name in warned):
        text = f"environment.yaml: {each.name} = {each.value!r}, and quirks.yaml has {warned[each.name][:80]!r}"
        yield True, text, "remove the value, or the note"


@check("write the name that the software has for this vendor, and handle it in discover.py", hook="environment")
def variables_do_not_select_another_vendor(plugin: Subject) -> Problems:
    other_vendors = {name for chip in plugin.others.chips() for name in _accelerator(plugin, chip)}
    for _, _, chip, _, variables in _environments(plugin):
        wrong_names = [name for name, value in variables.items() if value.casefold() in other_vendors - {chip.vendor}]
        for name in dict.fromkeys([*wrong_names, *_device_variables(plugin, variables)]):
            reason = "another vendor" if name in wrong_names else "its own devices are then not found"
            yield f"flagcore_environment sets {name} = {variables[name]!r} on {chip.name} of {chip.vendor}: {reason}"


@check("add it with value, meaning and source", each=_environments, hook="environment")
def variables_are_documented(plugin: Subject, chip: Chip, engine: str, variables: Mapping[str, str]) -> Problems:
    for name in sorted(set(variables) - {each.name for each in plugin.variables if each.value}):
        yield f"flagcore_environment sets {name} for {engine}, which is missing in environment.yaml"


@check("return the variables of environment.yaml there, as VendorPlugin does", each=_environments, hook="environment")
def documented_variables_are_set(plugin: Subject, chip: Chip, engine: str, variables: Mapping[str, str]) -> Problems:
    need(not plugin.failed("flagcore_environment"), "flagcore_environment has no valid answer")
    for each in applicable(plugin.variables, chip, engine, None, kind_of(engine)):
        is_unconditional = each.applies_to(None) and not each.condition and "{" not in str(each.value)
        is_missing = each.value and is_unconditional and each.name not in variables
        yield is_missing, f"environment.yaml: {each.name} is for {engine} on {chip.name}, but is not set"


OWN = "return what trials need: the core keeps the user's values and reports conflicts"


@check(OWN, each=_environments, hook="environment")
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
