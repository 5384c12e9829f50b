"""Checks of telemetry: the figures, against what the transcripts show and a person reads.

Also of the patterns of log lines of failed trials.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.resources import files

from flagcore.domain.chip import Device
from flagcore.domain.launch import FailurePattern
from flagcore.domain.trial import TrialState
from flagcore_testing import fakes
from flagcore_testing.checks.bounds import READINGS, outside
from flagcore_testing.kit import Problem, Problems, Skip, Subject, check, need, once, wrong
from flagcore_testing.package import Transcript

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


@check("use these names: " + ", ".join(bound.quantity for bound in READINGS), each=_samples)
def telemetry_is_plausible(device: Device, sample: Mapping[str, float], text: str) -> Problems:
    where = f"flagcore_telemetry of device {device.index}: "
    for name in sample:
        if not any(name == bound.quantity or name.startswith(f"{bound.quantity}_") for bound in READINGS):
            yield f"{where}{name} is an unknown figure"
    numbers = {name: value for name, value in sample.items() if type(value) in (int, float)}
    watts, limit = numbers.get("power_watts", 0.0), numbers.get("power_limit_watts", math.inf)
    fix = "give bytes, watts, degrees, shares of 1 and hertz; leave out what the tool does not report"
    yield from (Problem(problem.message, fix) for problem in outside(where, numbers, READINGS))
    yield from wrong(
        (USED not in sample, f"{USED} is missing",
         "read it from the same output: trials use the values that the device reports"),
        *((True, f"{name} = {sample[name]!r} is no number", fix) for name in sample.keys() - numbers.keys()),
        (watts > 1.3 * limit, f"power_watts = {watts:g}, but power_limit_watts = {limit:g}", fix),
        where=where,
    )  # fmt: skip


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
        yield Problem(f"flagcore_telemetry: {text}", "read the column of the temperature")


@check("read the column of that unit, and keep the tool's figure: a share is percent divided by 100")
def telemetry_is_what_the_tool_prints(plugin: Subject) -> Problems:
    samples = _samples(plugin)
    for name, unit in UNITS.items():
        read = [(sample[name], text) for _, sample, text in samples if name in sample]
        others = [shown for value, text in read if (shown := _other_unit(name, value, unit, text))]
        if others and len(others) * 2 >= len(read):
            yield f"flagcore_telemetry: {others[0]}"
    printed, known = (
        "\n".join(dict.fromkeys(text for *_, text in samples)),
        {key for _, each, _ in samples for key in each},
    )
    for name, pattern in PRINTED.items():
        if name not in known and re.search(pattern, printed):
            fix = f"return {name}: trials show it, and find slow devices by it"
            yield Problem(f"flagcore_telemetry has no {name}, although the tool prints it", fix)


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


@check("read the text of the transcript again, and correct smi.py or `reads` of sources.yaml")
def telemetry_is_what_a_person_reads(plugin: Subject) -> Problems:
    plugin.implements("flagcore_telemetry")
    known = [each for each in plugin.listings if any(plugin.loaded.find_chip(listed.chip) for listed in each.lists)]
    if known and not any(each.reads for each in known):
        fix = f"add reads of a device in use, with {', '.join(READ)}, such as {{device: 0, watts: 60, celsius: 41}}"
        yield Problem(f"sources.yaml: {known[0].name} and the others have no reads", fix)
    for each in (each for each in known if each.reads):
        for key in sorted({*each.reads} - {"device", *READ}):
            yield Problem(f"sources.yaml: {each.name}: reads has {key!r}", f"write device, {', '.join(READ)}")
        yield from _differences(plugin, each)


def _differences(plugin: Subject, each: Transcript) -> Iterator[str]:
    """Yield the figures of a device that differ from those in `reads`."""
    place = each.reads.get("device", 0)
    with fakes.readers(plugin, each) as readers:
        sample = next((reader.sample() for device, reader in readers if device.index == place), {})
    for key, (name, unit) in READ.items():
        read, value = each.reads.get(key), sample.get(name)
        found = None if value is None else value / unit
        is_equal = found is not None and read is not None and math.isclose(found, read, rel_tol=1e-3)
        if not is_equal and found != read:
            shown = ["missing" if one is None else f"{one:g}" for one in (read, found)]
            where = f"{each.name}, device {place:g}"
            yield f"{where}: reads has {key}: {shown[0]}, and {name} of flagcore_telemetry is {shown[1]}"


PROCESS = re.compile(r"(?m)^[| ]*\d+\b[^%\n]*\b\d{3,7}\b[^%\n]*\b[a-z][\w./:-]{2,}[^%\n]*\b\d+ *(MiB|MB)?\b.*[| ]*$")
"""A line of a table of processes: the device, the process, its name, and its memory."""


@check("give list_with the function that reads the tool's table of processes, as processes=")
def processes_are_read(plugin: Subject) -> Problems:
    plugin.implements("flagcore_telemetry")
    for each in plugin.listings:
        table = each.text[match.start() :] if (match := re.search("process", each.text, re.I)) else ""
        if not (row := PROCESS.search(table)):
            continue
        with fakes.readers(plugin, each) as readers:
            used = [use().processes for _, reader in readers if (use := getattr(reader, "use", None))]
        if used and not any(used):
            yield f"flagcore_telemetry: {each.name} has the process {' '.join(row[0].split())!r}, and no device a user"


PRINTED = {
    "power_watts": r"\d ?W\b|Power[^\"\n]*\(W\)\" *: *\"?\d",
    "temperature_celsius": r"\b\d\d ?C\b|\(C\)\" *: *\"?\d",
    "utilization_share": r"\b\d{1,3} ?%|\buse \(%\)\" *: *\"?\d",
}
"""Patterns of figures that a tool prints, by the name of the figure."""


@check("compare names with chip.has_name(device.chip)")
def telemetry_accepts_chip_aliases(plugin: Subject) -> Problems:
    plugin.implements("flagcore_telemetry")
    for chip in plugin.chips:
        if plugin.loaded.telemetry(Device(index=0, chip=chip.name)) is None:
            continue
        for name in sorted({*chip.aliases, chip.name.lower(), f"{chip.vendor} {chip.name}"}):
            if plugin.loaded.telemetry(Device(index=0, chip=name)) is None:
                yield f"flagcore_telemetry accepts {chip.name}, but not its other name {name!r}"


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


@check()
def failures_have_their_pattern_and_state(plugin: Subject) -> Problems:
    for place, each in enumerate(plugin.quirks.failures):
        is_memory, example, shown = each.state is TrialState.OUT_OF_MEMORY, each.example, f"state = {each.state.value}"
        state = "write state: out_of_memory, from which the search learns; other states end a candidate only"
        yield from wrong(
            (NESTED.search(each.pattern), f"pattern = {each.pattern!r} nests repetitions",
             "repeat only once: write [a-z ]+ and not ([a-z]+ ?)+"),
            (each.state not in FAILED, f"{shown}, which is no failure", state),
            (is_memory and not re.search("memory|alloc|oom|resource", example, re.I),
             f"{shown}, but its example, {example[:80]!r}, is of none", state),
            (not is_memory and NO_MEMORY.search(example), f"{shown}, but its example is {example[:80]!r}", state),
            where=f"quirks.yaml: failures[{place}].",
        )  # fmt: skip


@check("correct the pattern or the example, or put the narrower pattern first")
def failure_examples_match(plugin: Subject) -> Problems:
    failures = need(plugin.quirks.failures, "quirks.yaml has no failures")
    need(not any(NESTED.search(each.pattern) for each in failures), "a pattern nests repetitions")
    need(not plugin.failed("flagcore_check_task"), "flagcore_check_task has no valid answer")
    for place, each in enumerate(failures):
        engines = {*each.engines}
        alike = [one for one in failures if not engines or not one.engines or engines & {*one.engines}]
        first = next((one for one in alike if re.search(one.pattern, each.example)), None)
        if first is not each:
            other = f"the earlier pattern {first.pattern!r} does" if first else "none does"
            yield f"quirks.yaml: failures[{place}].example is not matched by its own pattern: {other}"


@check("match more of the failure's text")
def failure_patterns_match_only_their_failures(plugin: Subject) -> Problems:
    names = {"CUDA", "HIP", *(plugin.loaded.engine_support(*pair).device_type or "" for pair in plugin.pairs())}
    lines = [line.format(name.upper()) for name in sorted(names) if name for line in OTHER_ERRORS]
    for pattern in _patterns(plugin):
        shown, is_memory = f"flagcore_check_task: {pattern.pattern!r}", pattern.state is TrialState.OUT_OF_MEMORY
        for line in (line for line in HEALTHY if re.search(pattern.pattern, line)):
            yield f"{shown} matches {line.strip()!r} of a successful run"
        for line in (line for line in lines if is_memory and re.search(pattern.pattern, line)):
            fix = "match the words about memory only: a search avoids larger candidates after such a failure"
            yield Problem(f"{shown} matches {line!r}, which is no lack of memory", fix)


@check("correct the pattern or the order of the patterns")
def log_examples_match(plugin: Subject) -> Problems:
    patterns = _patterns(plugin)
    if not plugin.examples:
        raise Skip("there are no log lines in addition to those of quirks.yaml: override the fixture failure_examples")
    ordered = sorted(patterns, key=lambda pattern: pattern.state is not TrialState.OUT_OF_MEMORY)
    for line, state in plugin.examples:
        first = next((pattern for pattern in ordered if re.search(pattern.pattern, line)), None)
        if first is None or first.state is not state:
            matched_text = f"as {first.state.value}" if first else "by no pattern"
            yield f"flagcore_check_task: {line!r} is matched {matched_text}, not as {state.value}"


def _patterns(plugin: Subject) -> Sequence[FailurePattern]:
    patterns = [pattern for task in plugin.tasks() for pattern in plugin.loaded.check_task(task).failures]
    need(not any(NESTED.search(each.pattern) for each in patterns), "a pattern nests repetitions")
    return tuple(dict.fromkeys(patterns))
