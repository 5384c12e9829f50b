"""Checks of what trials use: telemetry, and patterns of log lines of failed trials."""

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.resources import files

from flagcore.domain.chip import CORES, DISK_WAIT, OTHERS_CORES, SWAPPED, Device
from flagcore.domain.launch import FailurePattern
from flagcore.domain.trial import TrialState
from flagcore_testing import fakes
from flagcore_testing.kit import Problem, Problems, Skip, Subject, check, need, once

RANGES: Mapping[str, tuple[float, float]] = {
    "memory_used_bytes": (2**20, 2**42),
    "power_watts": (0, 5000),
    "power_limit_watts": (1, 5000),
    "temperature_celsius": (-40, 150),
    "utilization_share": (0, 1),
    "clock_hertz": (1e6, 1e10),
    "load_average": (0, 1e5),
    OTHERS_CORES: (0, 1e4),
    CORES: (1, 1e4),
    DISK_WAIT: (0, 1),
    SWAPPED: (0, 1e11),
    "throttled": (0, 1),
}
"""Range of each figure other than 0, by the end of its name, which is the unit. A longer name precedes its prefixes."""
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


@check("use these names: " + ", ".join(RANGES), each=_samples)
def telemetry_names_are_known(device: Device, sample: Mapping[str, float], text: str) -> Problems:
    for name in sample:
        if not any(name == prefix or name.startswith(f"{prefix}_") for prefix in RANGES):
            yield f"flagcore_telemetry of device {device.index}: {name} is an unknown figure"
    if "memory_used_bytes" not in sample:
        yield Problem(
            f"flagcore_telemetry of device {device.index} lacks memory_used_bytes",
            "read it from the same output: trials use the values that the device reports",
        )


@check("give bytes, watts, degrees, shares of 1 and hertz; leave out what the tool does not report", each=_samples)
def telemetry_is_plausible(device: Device, sample: Mapping[str, float], text: str) -> Problems:
    for name, value in sample.items():
        low, high = next((limits for prefix, limits in RANGES.items() if name.startswith(prefix)), (-1e30, 1e30))
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not (value == 0 or low <= value <= high):
            yield f"flagcore_telemetry of device {device.index}: {name} = {value!r}, not {low:g} to {high:g}"
    watts, limit = sample.get("power_watts", 0.0), sample.get("power_limit_watts", math.inf)
    if watts > 1.3 * limit:
        yield f"flagcore_telemetry of device {device.index}: power_watts = {watts:g}, but power_limit_watts = {limit:g}"


@check("read the first figure of the cell: memory in use is not the memory of the device")
def telemetry_memory_is_that_in_use(plugin: Subject) -> Problems:
    samples = _samples(plugin)
    full = [device for device, sample, _ in samples if sample.get("memory_used_bytes") == (device.memory_bytes or -1)]
    if full and len(full) == len(samples):
        used = full[0].memory_bytes
        yield f"flagcore_telemetry: memory_used_bytes = {used} of every device, which is all of its memory"


@check("read the column of the temperature")
def temperature_is_not_the_power(plugin: Subject) -> Problems:
    pairs = [(sample.get("temperature_celsius"), sample.get("power_watts")) for _, sample, _ in _samples(plugin)]
    same = [celsius for celsius, watts in pairs if celsius is not None and celsius == watts]
    if len(same) == len(pairs) > 1:
        yield f"flagcore_telemetry: temperature_celsius and power_watts are both {same[0]:g}, and equal on every device"


@check("read the column of that unit, and keep the tool's figure: a share is percent divided by 100")
def telemetry_is_what_the_tool_prints(plugin: Subject) -> Problems:
    samples = _samples(plugin)
    for name, unit in UNITS.items():
        wrong: list[str] = []
        read = [(sample[name], text) for _, sample, text in samples if name in sample]
        for value, text in read:
            shown = f"{value * 100 if unit == '%' else value:g}"
            units = {match[1] or "" for match in re.finditer(rf"(?<![\w.-]){re.escape(shown)}{UNIT}", text)}
            if units and units <= {"W", "C", "%", "MiB", "MHz"} - {unit}:
                wrong.append(f"{name} = {value:g}, which the tool prints with {', '.join(sorted(units))}")
        if wrong and len(wrong) * 2 >= len(read):
            yield f"flagcore_telemetry: {wrong[0]}"
    printed = "\n".join(dict.fromkeys(text for _, _, text in samples))
    for name, pattern in PRINTED.items():
        if printed and re.search(pattern, printed) and not any(name in sample for _, sample, _ in samples):
            fix = f"return {name}: trials show it, and find slow devices by it"
            yield Problem(f"flagcore_telemetry has no {name}, although the tool prints it", fix)


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
        place = each.reads.get("device", 0)
        with fakes.machine(fakes.printing(each)), fakes.uncached():
            readers = [plugin.loaded.telemetry(device) for device in fakes.ask(plugin) if device.index == place]
            sample = next((reader.sample() for reader in readers if reader), {})
        for key in sorted({*each.reads} - {"device", *READ}):
            yield Problem(f"sources.yaml: {each.name}: reads has {key!r}", f"write device, {', '.join(READ)}")
        for key, (name, unit) in READ.items():
            found, read = sample.get(name), each.reads.get(key)
            is_equal = found is not None and read is not None and math.isclose(found, read * unit, rel_tol=1e-3)
            if not is_equal and found != read:
                shown = "missing" if found is None else f"{found / unit:g}"
                text = f"{each.name}, device {place:g}: reads has {key}: {'no value' if read is None else f'{read:g}'}"
                yield f"{text}, and {name} of flagcore_telemetry is {shown}"


PROCESS = re.compile(r"(?m)^[| ]*\d+\b[^%\n]*\b\d{3,7}\b[^%\n]*\b[a-z][\w./:-]{2,}[^%\n]*\b\d+ *(MiB|MB)?\b.*[| ]*$")
"""A line of a table of processes: the device, the process, its name, and its memory."""


@check("give list_with the function that reads the tool's table of processes, as processes=")
def processes_are_read(plugin: Subject) -> Problems:
    plugin.implements("flagcore_telemetry")
    for each in plugin.listings:
        table = each.text[match.start() :] if (match := re.search("process", each.text, re.I)) else ""
        if not (row := PROCESS.search(table)):
            continue
        with fakes.machine(fakes.printing(each)), fakes.uncached():
            readers = [plugin.loaded.telemetry(device) for device in fakes.ask(plugin)]
            used = [use().processes for reader in readers if (use := getattr(reader, "use", None))]
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


def _is_slow(pattern: str) -> bool:
    return NESTED.search(pattern) is not None


@check("repeat only once: write [a-z ]+ and not ([a-z]+ ?)+")
def failure_patterns_are_fast(plugin: Subject) -> Problems:
    for place, each in enumerate(plugin.quirks.failures):
        if _is_slow(each.pattern):
            yield f"quirks.yaml: failures[{place}].pattern = {each.pattern!r} nests repetitions"


@check("correct the pattern or the example, or put the narrower pattern first")
def failure_examples_match(plugin: Subject) -> Problems:
    failures = plugin.quirks.failures
    need(not any(_is_slow(each.pattern) for each in failures), "a pattern nests repetitions")
    need(failures, "quirks.yaml has no failures")
    need(not plugin.failed("flagcore_check_task"), "flagcore_check_task has no valid answer")
    for place, each in enumerate(failures):
        engines = {*each.engines}
        same_engines = [
            other_match
            for other_match in failures
            if not engines or not other_match.engines or engines & {*other_match.engines}
        ]
        first = next(
            (other_match for other_match in same_engines if re.search(other_match.pattern, each.example)), None
        )
        if first is not each:
            other_match = f"the earlier pattern {first.pattern!r} does" if first else "none does"
            yield f"quirks.yaml: failures[{place}].example is not matched by its own pattern: {other_match}"


@check("write state: out_of_memory, from which the search learns; other states end a candidate only")
def memory_failures_have_their_state(plugin: Subject) -> Problems:
    for place, each in enumerate(plugin.quirks.failures):
        if each.state not in FAILED:
            yield f"quirks.yaml: failures[{place}].state = {each.state.value}, which is no failure"
        if each.state is TrialState.OUT_OF_MEMORY and not re.search("memory|alloc|oom|resource", each.example, re.I):
            shown = each.example[:80]
            yield f"quirks.yaml: failures[{place}].state = {each.state.value}, but its example, {shown!r}, is of none"
        if NO_MEMORY.search(each.example) and each.state is not TrialState.OUT_OF_MEMORY:
            yield f"quirks.yaml: failures[{place}].state = {each.state.value}, but its example is {each.example[:80]!r}"


OTHER_ERRORS = (
    "RuntimeError: {0} error: an illegal memory access was encountered",
    "RuntimeError: {0} error: device-side assert triggered",
    "RuntimeError: {0} error: unspecified launch failure",
    "RuntimeError: {0} driver error: the device was lost",
)
"""Errors of a device, by its name, that say nothing about free memory."""


@check("match the words about memory only: a search avoids larger candidates after such a failure")
def memory_patterns_match_only_memory(plugin: Subject) -> Problems:
    names = {"CUDA", "HIP", *(plugin.loaded.engine_support(*pair).device_type or "" for pair in plugin.pairs())}
    lines = [line.format(name.upper()) for name in sorted(names) if name for line in OTHER_ERRORS]
    for pattern in _patterns(plugin):
        if pattern.state is TrialState.OUT_OF_MEMORY:
            for line in (line for line in lines if re.search(pattern.pattern, line)):
                yield f"flagcore_check_task: {pattern.pattern!r} matches {line!r}, which is no lack of memory"


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


@check("match more of the failure's text")
def failure_patterns_ignore_healthy_logs(plugin: Subject) -> Problems:
    for pattern in _patterns(plugin):
        for line in HEALTHY:
            if re.search(pattern.pattern, line):
                yield f"flagcore_check_task: {pattern.pattern!r} matches {line.strip()!r} of a successful run"


def _patterns(plugin: Subject) -> Sequence[FailurePattern]:
    patterns = [pattern for task in plugin.tasks() for pattern in plugin.loaded.check_task(task).failures]
    need(not any(_is_slow(each.pattern) for each in patterns), "a pattern nests repetitions")
    return tuple(dict.fromkeys(patterns))
