"""Checks of telemetry: the figures, against what the transcripts show and a person reads.

Also of the patterns of log lines of failed trials.
"""

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.resources import files

from flagcore_vendorkit.engines import Failure

from flagcore.domain.chip import Device
from flagcore.domain.launch import FailurePattern
from flagcore.domain.trial import TrialState
from flagcore_testing import fakes
from flagcore_testing.checks.bounds import READINGS, outside
from flagcore_testing.kit import Items, Problems, Skip, Subject, check, need, once

USED = "memory_used_bytes"
UNITS = {"power_watts": "W", "power_limit_watts": "W", "temperature_celsius": "C", "utilization_share": "%"}
"""The unit of a figure in the outputs of tools."""
UNIT = r"(?:\.\d+)?\"? *\"?°?(W|C|%|MiB|MHz|Mhz|GiB|V|RPM)?(?![\w/])"
"""What may follow a number: decimals, and a unit, of a field of its own in JSON."""
Sample = tuple[Device, Mapping[str, float], str]
"""A device, a reading of it, and the text of its transcript, if it is of one."""


@once
def _samples(plugin: Subject) -> list[Sample]:
    """Return a reading of each device of this machine, or else of each device of the transcripts with known chips."""
    plugin.implements("flagcore_telemetry")
    here = plugin.loaded.devices()
    readers = ((device, plugin.loaded.telemetry(device)) for device in here)
    samples: list[Sample] = [(device, reader.sample(), "") for device, reader in readers if reader]
    with suppress(Skip):
        for each in plugin.listings if not here else ():
            if all(plugin.loaded.find_chip(listed.chip) and listed.memory_mib for listed in each.lists):
                found = [(*pair, each.text) for pair in fakes.samples(plugin, each)]
                samples += [each for each in found if not samples or USED in each[1]]  # others are of another command
    return need(samples, "there is no device of a known chip, neither here nor in a transcript with its memory")


def _devices(plugin: Subject) -> Items:
    return [(f"flagcore_telemetry of device {each[0].index}: ", each[1]) for each in _samples(plugin)]


BASE = "give bytes, watts, degrees, shares of 1 and hertz; leave out what the tool does not report"


@check(BASE, each=_devices)
def telemetry_is_plausible(sample: Mapping[str, float]) -> Problems:
    names = [bound.quantity for bound in READINGS]
    for name in sample:
        if not any(name == each or name.startswith(f"{each}_") for each in names):
            yield True, f"{name} is an unknown figure", f"use these names: {', '.join(names)}"
    numbers = {name: value for name, value in sample.items() if type(value) in (int, float)}
    watts, limit = numbers.get("power_watts", 0.0), numbers.get("power_limit_watts", math.inf)
    yield from (each[:2] for each in outside(numbers, READINGS))
    fix = "read it from the same output: trials use the values that the device reports"
    yield USED not in sample, f"{USED} is missing", fix
    yield from (f"{name} = {sample[name]!r} is no number" for name in sample.keys() - numbers.keys())
    yield watts > 1.3 * limit, f"power_watts = {watts:g}, but power_limit_watts = {limit:g}"


@check("read the first figure of the cell: memory in use is not the memory of the device")
def telemetry_is_of_its_own_column(plugin: Subject) -> Problems:
    samples = _samples(plugin)
    full = [device for device, sample, _ in samples if sample.get(USED) == (device.memory_bytes or -1)]
    if full and len(full) == len(samples):
        yield f"flagcore_telemetry: {USED} = {full[0].memory_bytes} of every device, which is all of its memory"
    pairs = [(sample.get("temperature_celsius"), sample.get("power_watts")) for _, sample, _ in samples]
    same = [celsius for celsius, watts in pairs if celsius is not None and celsius == watts]
    if len(same) == len(pairs) > 1:
        text = f"temperature_celsius and power_watts are both {same[0]:g}, and equal on every device"
        yield True, f"flagcore_telemetry: {text}", "read the column of the temperature"


@check("read the column of that unit, and keep the tool's figure: a share is percent divided by 100")
def telemetry_is_what_the_tool_prints(plugin: Subject) -> Problems:
    samples = _samples(plugin)
    for name, unit in UNITS.items():
        read = [(sample[name], text) for _, sample, text in samples if name in sample]
        others = [shown for value, text in read if (shown := _other_unit(name, value, unit, text))]
        yield others and len(others) * 2 >= len(read), f"flagcore_telemetry: {[*others, ''][0]}"
    printed, known = "\n".join(dict.fromkeys(each[2] for each in samples)), {key for each in samples for key in each[1]}
    for name, pattern in PRINTED.items():
        yield (name not in known and re.search(pattern, printed),
               f"flagcore_telemetry has no {name}, although the tool prints it",
               f"return {name}: trials show it, and find slow devices by it")  # fmt: skip


def _other_unit(name: str, value: float, unit: str, text: str) -> str:
    """Return how a figure is printed if it has only other units in a text, else an empty string."""
    shown = f"{value * 100 if unit == '%' else value:g}"
    units = {match[1] or "" for match in re.finditer(rf"(?<![\w.-]){re.escape(shown)}{UNIT}", text)}
    is_other = units and units <= {"W", "C", "%", "MiB", "MHz"} - {unit}
    return f"{name} = {value:g}, which the tool prints with {', '.join(sorted(units))}" if is_other else ""


OTHER_FIELDS = {
    "temperature_celsius": r"mem|vram|hbm|ambient|limit|max",
    "power_watts": r"\bmax|\bcap\b|limit|tdp|default|idle",
    "utilization_share": r"mem|umc|enc|dec|fan",
}
"""Words in the names of fields, in JSON, of which a figure must not be."""
FIELD = re.compile(r'"([^"\n]+)" *: *"?(\d+(?:\.\d+)?)"?')


@check("read the field of the device itself: the temperature of the chip, the power that it draws, its load")
def telemetry_is_of_the_right_field(plugin: Subject) -> Problems:
    samples = _samples(plugin)
    for text in dict.fromkeys(text for _, _, text in samples):
        fields: dict[str, list[float]] = {}
        for name, number in FIELD.findall(text):
            fields.setdefault(name, []).append(float(number))
        of_text = [sample for _, sample, other in samples if other == text]
        for name, words in OTHER_FIELDS.items():
            read = [sample.get(name, math.nan) * (100.0 if name == "utilization_share" else 1.0) for sample in of_text]
            same = [field for field, numbers in fields.items() if numbers == read and any(read)]
            if same and all(re.search(words, field, re.I) for field in same):
                yield f"flagcore_telemetry: {name} is the field {same[0]!r} of the tool"


READ = {
    "used_mib": (USED, 2.0**20),
    "watts": ("power_watts", 1.0),
    "limit_watts": ("power_limit_watts", 1.0),
    "celsius": ("temperature_celsius", 1.0),
    "percent": ("utilization_share", 0.01),
    "mhz": ("clock_hertz", 1e6),
}
"""The figure of each key of `reads` in sources.yaml, and its unit."""


@check("read the text of the transcript again, and correct discover.py or `reads` of sources.yaml", hook="telemetry")
def telemetry_is_what_a_person_reads(plugin: Subject) -> Problems:
    known = [each for each in plugin.listings if any(plugin.loaded.find_chip(listed.chip) for listed in each.lists)]
    if known and not any(each.reads for each in known):
        fix = f"add reads of a device in use, with {', '.join(READ)}, such as {{device: 0, watts: 60, celsius: 41}}"
        yield True, f"sources.yaml: {known[0].name} and the others have no reads", fix
    for each in (each for each in known if each.reads):
        for key in sorted({*each.reads} - {"device", *READ}):
            yield True, f"sources.yaml: {each.name}: reads has {key!r}", f"write device, {', '.join(READ)}"
        place = each.reads.get("device", 0)
        with fakes.readers(plugin, each) as readers:
            sample = next((reader.sample() for device, reader in readers if device.index == place), {})
        for key, (name, unit) in READ.items():
            read, value = each.reads.get(key), sample.get(name)
            found = None if value is None else value / unit
            is_equal = found is not None and read is not None and math.isclose(found, read, rel_tol=1e-3)
            own, theirs = ("missing" if one is None else f"{one:g}" for one in (read, found))
            text = f"reads has {key}: {own}, and {name} of flagcore_telemetry is {theirs}"
            yield not is_equal and found != read, f"{each.name}, device {place:g}: {text}"


PROCESS = re.compile(r"(?m)^[| ]*\d+\b[^%\n]*\b\d{3,7}\b[^%\n]*\b[a-z][\w./:-]{2,}[^%\n]*\b\d+ *(MiB|MB)?\b.*[| ]*$")
"""A line of a table of processes: the device, the process, its name, and its memory."""


@check("give list_with the function that reads the tool's table of processes, as processes=", hook="telemetry")
def processes_are_read(plugin: Subject) -> Problems:
    for each in plugin.listings:
        start = re.search("process", each.text, re.I)
        if start and (row := PROCESS.search(each.text[start.start() :])):
            with fakes.readers(plugin, each) as readers:
                used = [use().processes for _, reader in readers if (use := getattr(reader, "use", None))]
            shown = f"{each.name} has the process {' '.join(row[0].split())!r}, and no device a user"
            yield used and not any(used), f"flagcore_telemetry: {shown}"


PRINTED = {
    "power_watts": r"\d ?W\b|Power[^\"\n]*\(W\)\" *: *\"?\d",
    "temperature_celsius": r"\b\d\d ?C\b|\(C\)\" *: *\"?\d",
    "utilization_share": r"\b\d{1,3} ?%|\buse \(%\)\" *: *\"?\d",
}
"""Patterns of figures that a tool prints, by the name of the figure."""


@check("compare names with chip.has_name(device.chip)", hook="telemetry")
def telemetry_accepts_chip_aliases(plugin: Subject) -> Problems:
    def accepts(name: str) -> bool:
        return plugin.loaded.telemetry(Device(index=0, chip=name)) is not None

    for chip in (chip for chip in plugin.chips if accepts(chip.name)):
        for name in sorted({*chip.aliases, chip.name.lower(), f"{chip.vendor} {chip.name}"}):
            yield not accepts(name), f"flagcore_telemetry accepts {chip.name}, but not its other name {name!r}"


FAILED = (TrialState.OUT_OF_MEMORY, TrialState.FAILED, TrialState.TIMED_OUT, TrialState.INVALID)
NO_MEMORY = re.compile(r"out of (device )?memory|OutOfMemory", re.I)
HEALTHY = files(__package__).joinpath("healthy.log").read_text("utf-8").splitlines()
"""Log lines of successful runs, which no failure pattern may match."""
NESTED = re.compile(r"\([^()]*[^\\()][+*][^()]*\)[+*{]")
"""A repetition within a repetition, such as (a+)+, whose time grows exponentially with the length of a line."""
OTHER_ERRORS = (
    "RuntimeError: {0} error: an illegal memory access was encountered",
    "RuntimeError: {0} error: device-side assert triggered",
    "RuntimeError: {0} error: unspecified launch failure",
    "RuntimeError: {0} driver error: the device was lost",
)
"""Errors of a device, by its name, that say nothing about free memory."""


def _failures(plugin: Subject) -> Items:
    return [(f"quirks.yaml: failures[{place}].", each) for place, each in enumerate(plugin.quirks.failures)]


@check("write state: out_of_memory, from which the search learns; other states end a candidate only", each=_failures)
def failures_have_their_pattern_and_state(each: Failure) -> Problems:
    is_memory, example, shown = each.state is TrialState.OUT_OF_MEMORY, each.example, f"state = {each.state.value}"
    yield (NESTED.search(each.pattern), f"pattern = {each.pattern!r} nests repetitions",
           "repeat only once: write [a-z ]+ and not ([a-z]+ ?)+")  # fmt: skip
    yield each.state not in FAILED, f"{shown}, which is no failure"
    is_other = is_memory and not re.search("memory|alloc|oom|resource", example, re.I)
    yield is_other, f"{shown}, but its example, {example[:80]!r}, is of none"
    yield not is_memory and NO_MEMORY.search(example), f"{shown}, but its example is {example[:80]!r}"


@check("correct the pattern or the example, or put the narrower pattern first")
def failure_examples_match(plugin: Subject) -> Problems:
    failures = need(plugin.quirks.failures, "quirks.yaml has no failures")
    need(not any(NESTED.search(each.pattern) for each in failures), "a pattern nests repetitions")
    need(not plugin.failed("flagcore_check_task"), "flagcore_check_task has no valid answer")
    for place, each in enumerate(failures):
        engines = {*each.engines}
        alike = [one for one in failures if not engines or not one.engines or engines & {*one.engines}]
        first = next((one for one in alike if re.search(one.pattern, each.example)), None)
        other = f"the earlier pattern {first.pattern!r} does" if first else "none does"
        text = f"quirks.yaml: failures[{place}].example is not matched by its own pattern: {other}"
        yield first is not each, text


@check("match more of the failure's text")
def failure_patterns_match_only_their_failures(plugin: Subject) -> Problems:
    names = {"CUDA", "HIP", *(plugin.loaded.engine_support(*pair).device_type or "" for pair in plugin.pairs())}
    lines = [line.format(name.upper()) for name in sorted(names) if name for line in OTHER_ERRORS]
    fix = "match the words about memory only: a search avoids larger candidates after such a failure"
    for pattern in _patterns(plugin):
        shown, is_memory = f"flagcore_check_task: {pattern.pattern!r}", pattern.state is TrialState.OUT_OF_MEMORY
        for line in (line for line in HEALTHY if re.search(pattern.pattern, line)):
            yield f"{shown} matches {line.strip()!r} of a successful run"
        for line in (line for line in lines if is_memory and re.search(pattern.pattern, line)):
            yield True, f"{shown} matches {line!r}, which is no lack of memory", fix


@check("correct the pattern or the order of the patterns")
def log_examples_match(plugin: Subject) -> Problems:
    ordered = sorted(_patterns(plugin), key=lambda pattern: pattern.state is not TrialState.OUT_OF_MEMORY)
    without = "there are no log lines in addition to those of quirks.yaml: override the fixture failure_examples"
    for line, state in need(plugin.examples, without):
        first = next((pattern for pattern in ordered if re.search(pattern.pattern, line)), None)
        matched_text = f"as {first.state.value}" if first else "by no pattern"
        text = f"flagcore_check_task: {line!r} is matched {matched_text}, not as {state.value}"
        yield first is None or first.state is not state, text


def _patterns(plugin: Subject) -> Sequence[FailurePattern]:
    advice = sorted(plugin.advice, key=lambda each: each[1] != "megatron")
    patterns = [pattern for each in advice for pattern in each[2].failures]
    need(not any(NESTED.search(each.pattern) for each in patterns), "a pattern nests repetitions")
    return tuple(dict.fromkeys(patterns))
