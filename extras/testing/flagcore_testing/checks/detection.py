"""Checks of device detection: with the tool, without it, with a broken tool, and from transcripts. Fake tools are
executables.

Also that the transcripts reach what the plugin's parsers do: each device, each reason and each reading.
"""

import ast
import io
import random
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from itertools import product
from math import isclose
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

from flagcore_vendorkit import rows

from flagcore.domain.chip import Chip, Device
from flagcore.errors import SpecError
from flagcore.plugins.entry_points import capture_warnings
from flagcore_testing import fakes
from flagcore_testing.checks.detector import detector_of, others_hooks
from flagcore_testing.checks.telemetry import READ
from flagcore_testing.hook_runner import seconds_without_waiting
from flagcore_testing.kit import Items, Problems, Skip, Subject, check, need, once
from flagcore_testing.package import FOLDER, SOURCES, Transcript, saved_outputs

SECONDS = 15.0
TOTAL_SECONDS = 30.0
"""Time limit in seconds for all hanging tools of one command."""
ENDLESS = "prints without end"
BROKEN = {
    "crashes": "kill -SEGV $$",
    "fails": "echo 'failed to initialize' >&2; exit 139",
    "does not reach its driver": "echo 'No devices were found'; exit 0",
    "prints nothing": "exit 0",
    "prints binary data": r"head -c 20000 /bin/sh",
    ENDLESS: "exec yes '| 0  |'",
    "prints half a line": "printf '| 0  '",
}


@check("give the tool a time limit", hook="devices")
def detection_is_quick(plugin: Subject) -> Problems:
    start = seconds_without_waiting()
    devices = fakes.ask(plugin)
    is_slow = seconds_without_waiting() - start > SECONDS
    yield is_slow, f"flagcore_devices takes more than {SECONDS:.0f} s here"
    is_twice = len({device.index for device in devices}) != len(devices)
    yield is_twice, "flagcore_devices returns two devices with one index", "leave out both"


@check("return no devices, and raise nothing, if the tool or driver is missing")
def missing_tool_lists_no_devices(plugin: Subject) -> Problems:
    _tools(plugin)
    devices = fakes.without_tools(plugin)
    if any(plugin.loaded.find_chip(device.chip) is None for device in devices):
        yield f"flagcore_devices returns {devices[0].chip!r} without the vendor's tool"


@check("use only lines in a known format; ignore the output of a failed tool")
def broken_tool_lists_no_devices(plugin: Subject) -> Problems:
    for how, script in BROKEN.items():
        with fakes.with_short_timeouts({}, seconds=0.2 if how == ENDLESS else 10.0):
            yield from _unexpected_devices(plugin, script, f"if {_tools(plugin)[0]} {how}")


@check()
def hanging_tool_is_stopped(plugin: Subject) -> Problems:
    tools, has_limit = _tools(plugin), True
    waited: dict[int, float] = {}
    with fakes.with_short_timeouts(waited):
        try:
            fakes.devices(plugin, dict.fromkeys(tools, "exec sleep 5"))
        except fakes.NoLimit:
            has_limit = False
    seconds = sum(waited.values())
    yield (not has_limit, f"flagcore_devices waits for {tools[0]} without a time limit",
           "run it with flagcore_vendorkit.machine.tool_output, or give subprocess a timeout")  # fmt: skip
    yield (has_limit and seconds > TOTAL_SECONDS, f"flagcore_devices waits {seconds:.0f} s for hanging tools",
           f"lower timeout_seconds: together they must take less than {TOTAL_SECONDS:.0f} s")  # fmt: skip


@check("check the title, the PCI vendor or the devices' names before using a table")
def output_of_other_vendors_is_ignored(plugin: Subject) -> Problems:
    texts = {"a vendor that does not exist": fakes.FOREIGN_TABLE}
    for name, hooks in others_hooks(plugin):
        with suppress(Skip, OSError, SpecError):
            first = Subject(name=name, hooks=hooks).listings[0]
            texts[f"{name} ({first.name})"] = first.text
    for name, text in texts.items():
        yield from _unexpected_devices(plugin, fakes.prints(text), f"which a tool of {name} printed")


@check()
def visible_devices_are_respected(plugin: Subject) -> Problems:
    names = sorted({name for pair in plugin.pairs() for name in plugin.loaded.engine_support(*pair).visible_devices})
    need(names, "no engine has visible_devices")
    multi_device = need([each for each in plugin.listings if each.devices >= 2], "no transcript lists two devices")
    for name, (setting, wanted) in product(names, (("1,0", ["1", "0"]), ("0", ["0"]), ("-1", []))):
        with fakes.machine(fakes.printing(multi_device[0])):
            devices = fakes.ask(plugin, **{name: setting})
        yield ([device.selector for device in devices] != wanted,
               f"flagcore_devices returns the devices {[each.index for each in devices]} with {name}={setting}",
               f"return visible(found, {name!r}, environment=environment) of flagcore_vendorkit.machine; "
               "indices start at 0, and `visible` of the detector names the variable")  # fmt: skip


@check()
def vendor_selection_is_respected(plugin: Subject) -> Problems:
    chip = plugin.own_chips()[0]
    of_engines = (plugin.loaded.environment(chip, engine).items() for engine in plugin.engines)
    names = dict.fromkeys(name for each in of_engines for name, value in each if value.casefold() == chip.vendor)
    for name in need(names, "no variable of trials selects the vendor"):
        for setting, seen in ((chip.vendor.upper(), True), ("another_vendor", False)):
            devices = fakes.devices(plugin, fakes.printing(plugin.listings[0]), **{name: setting})
            fix = f"return none if {name} names another vendor, in any case: give the detector vendor_variables"
            text = f"flagcore_devices returns {len(devices)} devices with {name}={setting}"
            yield bool(devices) is not seen, text, fix


def _tools(plugin: Subject) -> tuple[str, ...]:
    plugin.implements("flagcore_devices")
    return need(fakes.tools_of(plugin), "the plugin runs no tool for devices")


def _unexpected_devices(plugin: Subject, script: str, when: str) -> Problems:
    """Yield each device that is found although the tools run `script`, which prints no devices of this vendor."""
    own_devices = fakes.without_tools(plugin)
    devices = fakes.devices(plugin, dict.fromkeys(_tools(plugin), script), when)
    if more := [device for device in devices if device not in own_devices]:
        yield f"flagcore_devices returns {more[0].chip!r}, {when}"


@check("add where it was printed")
def transcripts_have_sources(plugin: Subject) -> Problems:
    listed_files = {each.of or each.name for each in plugin.transcripts}
    present_files = saved_outputs(plugin.source / FOLDER).keys()
    for name in sorted(listed_files ^ present_files):
        is_there, fix = name in present_files, "add the file, or remove the entry"
        yield is_there, f"{FOLDER / SOURCES} has no entry for {name}"
        yield not is_there, f"{FOLDER / name} is missing, but {SOURCES} lists it", fix
    for each in plugin.transcripts:
        own = [one.chip for one in each.lists if one.other and any(chip.has_name(one.chip) for chip in plugin.chips)]
        where, is_unread = f"{FOLDER / SOURCES}: {each.name} has", each.lists and not each.tool
        yield not each.source.strip(), f"{where} no source"
        yield is_unread, f"{where} lists, but no tool: nothing reads it", "add the tool that printed it"
        yield own, f"{where} other: true, but {own[:1]} is a chip of the plugin", "remove other"


def _printing(plugin: Subject) -> Items:
    tools = [each for each in plugin.transcripts if each.tool]
    return [(f"{FOLDER / each.name}: flagcore_devices ", plugin, each) for each in tools]


@check(f"correct the parser, or `lists` in {SOURCES}", each=_printing)
def transcripts_are_parsed(plugin: Subject, each: Transcript) -> Problems:
    with (
        fakes.machine(fakes.printing(each)),
        fakes.warnings_enabled(),
        capture_warnings() as warnings,
        redirect_stdout(io.StringIO()) as output,
    ):
        devices = fakes.ask(plugin)
    if not each.devices and fakes.without_tools(plugin):
        return  # these are the devices of this machine
    wanted, printed = [listed for listed in each.lists for _ in range(listed.devices)], output.getvalue().strip()
    is_right = len(devices) == len(wanted) and all(one.matches(is_) for one, is_ in zip(wanted, devices, strict=True))
    listed = ", ".join(f"{one.devices} {one.chip!r} with {one.memory_mib} MiB" for one in each.lists)
    indices, left_out = [device.index for device in devices], each.left_out
    is_shifted = is_right and indices and indices[0] != 0 and not (left_out or each.of)
    yield from (
        (not is_right, f"returns {_device_text(devices)}, expected {listed or 'no device'}"),
        (is_shifted, f"returns the indices {', '.join(map(str, indices))}, which start at 0 in the tool",
         "return the indices of the tool"),
        (printed, f"prints {printed[:60]!r}", "remove the print: the output of commands is data; use logging"),
        (each.devices and len(warnings) != left_out,
         f"leaves out {len(warnings)} devices, expected {left_out}: {'; '.join(warnings)[:200] or 'nothing'}",
         f"read these lines, or state in {SOURCES} how many devices are `left_out`"),
    )  # fmt: skip


@check("ask the tool for the format of its transcript, such as --json")
def commands_ask_for_the_format(plugin: Subject) -> Problems:
    for each in (each for each in plugin.listings if each.name.endswith((".json", ".csv"))):
        form = each.name.rpartition(".")[2]
        with fakes.machine({each.tool: f'echo "$@" >> "$0.arguments"\n{fakes.prints(each.text)}'}) as folder:
            fakes.ask(plugin)
            words = (folder / "bin" / f"{each.tool}.arguments").read_text("utf-8")
        text = f"{FOLDER / each.name} is {form}, but the arguments of {each.tool} are {words.split()}"
        yield form not in words.casefold(), text


STATES = {"Available": "Not Available", "OK": "Critical", "Healthy": "Unhealthy", "Good": "Bad"}
"""Words for the state of a usable device, and for one that cannot be used."""


@check("leave out a device that the tool reports as unusable")
def unusable_devices_are_left_out(plugin: Subject) -> Problems:
    for each, (good, bad) in product(plugin.listings, STATES.items()):
        pattern = rf"(?<![\w ]) {good}(?=\s*\|)"
        if len(re.findall(pattern, each.text)) >= each.devices:
            text = re.sub(pattern + r" {0,9}", f" {bad}".ljust(len(good) + 5), each.text)
            found = fakes.devices(plugin, {each.tool: fakes.prints(text)})
            shown = f"flagcore_devices returns {_device_text(found)} if each device is {bad!r}"
            yield found, f"{FOLDER / each.name}: {shown}"


@check("accept the names of all chips of the plugin, or add the names that the tool prints to aliases")
def all_chips_are_read(plugin: Subject) -> Problems:
    listings = [each for each in plugin.listings if each.lists[0].chip in each.text]
    need(listings, "no transcript has the name of its chip")

    def is_read(chip: Chip, each: Transcript, name: str) -> bool:
        printed = each.lists[0].chip
        text = each.text.replace(printed.ljust(len(name)), name.ljust(len(printed))) if name != printed else each.text
        text = text if name in text else text.replace(printed, name)
        found = fakes.devices(plugin, {each.tool: fakes.prints(text)})
        return any(chip.has_name(device.chip) for device in found)

    for chip in plugin.own_chips():
        has_device = any(is_read(chip, each, name) for each in listings for name in (chip.name, *chip.aliases))
        text = f"flagcore_devices lists no device if {listings[0].name} has the name of this chip"
        yield not has_device, f"{chip.name}: {text}"


@check("add it to the aliases of its chip, or mark it other: true in sources.yaml")
def transcript_names_match_one_chip(plugin: Subject) -> Problems:
    plugin.own_chips()
    matches = [(each, listed) for each in plugin.listings for listed in each.lists if not listed.other]
    for each, listed in need(matches, "the transcripts list only unknown chips"):
        count = sum(chip.has_name(listed.chip) for chip in plugin.chips)
        yield count != 1, f"{FOLDER / each.name} lists {listed.chip!r}, a name of {count} chips"


@check(f"correct `topology` or `matrix` of the detector, or `matrix` in {SOURCES}")
def matrices_of_links_are_read(plugin: Subject) -> Problems:
    for each in (each for each in plugin.transcripts if each.matrix):
        with fakes.machine(fakes.printing(each)):
            found = rows.read_matrix(detector_of(plugin).matrix())
        devices = len(found.devices) if found else 0
        text = f"the detector reads the links of {devices} devices, expected {each.matrix}"
        yield devices != each.matrix, f"{FOLDER / each.name}: {text}"


PIECES = 36
"""Number of truncated and garbled variants of all transcripts together; each transcript has at least six."""
SLOW_SECONDS = 1.0
"""If detection takes longer than these seconds, fewer variants are tried."""


@check("leave out a device with incomplete lines, and raise nothing")
def truncated_transcripts_add_no_devices(plugin: Subject) -> Problems:
    for each, whole, pieces in _whole_transcripts(plugin):
        lines = [match.end() for match in re.finditer("\n", each.text)]
        ends = [len(each.text) * place // pieces for place in range(0, pieces, 2)]
        ends += [lines[len(lines) * place // pieces] for place in range(1, pieces, 2)]
        known = {_identity(device) for device in whole}
        truncated = ((f"truncated after {end} characters", each.text[:end]) for end in ends)
        for texts, is_truncated in ((truncated, True), (_incomplete_texts(each.text, pieces), False)):
            for how, found in _devices_per_text(plugin, each, texts):
                added = [device for device in found if _identity(device) not in known]
                if added and (is_truncated or ("line" not in how and added[0].memory_bytes is not None)):
                    yield f"{how}: {_device_text(added)}"
                    break


@check("leave out rows that share an index or have an unknown format")
def garbled_transcripts_add_no_devices(plugin: Subject) -> Problems:
    for each, whole, pieces in _whole_transcripts(plugin):
        texts = ((f"garbled ({seed})", _garbled_text(each.text, seed)) for seed in range(pieces))
        for how, found in _devices_per_text(plugin, each, texts):
            if len(found) > len(whole) or len({device.index for device in found}) != len(found):
                yield f"{how}: flagcore_devices returns {_device_text(found)}"
                break


def _identity(device: Device) -> tuple[object, ...]:
    return device.index, device.chip, device.memory_bytes


def _incomplete_texts(text: str, pieces: int) -> Iterator[tuple[str, str]]:
    """Yield a text without the fields of one name each, if it is JSON, else without the first lines of devices."""
    names = list(dict.fromkeys(re.findall(r'"([^"\n]+)" *: *(?=["\d])', text)))
    if len(names) > 2 and text.lstrip()[:1] in "[{":
        for name in names[:pieces]:
            yield f"without {name!r}", re.sub(rf'"{re.escape(name)}" *:', '"other":', text)
        return
    lines = text.splitlines(keepends=True)
    numbered = [at for at, line in enumerate(lines) if re.search(r"\d", line)]
    for at in numbered[: max(pieces // 2, 3)]:
        yield f"without line {at + 1}", "".join(lines[:at] + lines[at + 1 :])


def _whole_transcripts(plugin: Subject) -> Iterator[tuple[Transcript, tuple[Device, ...], int]]:
    """Yield each listing, its devices together with the devices of this machine, and the number of variants to try."""
    share = max(PIECES // len(plugin.listings), 6)
    own_devices = fakes.without_tools(plugin)
    for each in plugin.listings:
        start = time.monotonic()
        whole_output = fakes.devices(plugin, fakes.printing(each))
        yield each, (*whole_output, *own_devices), share if time.monotonic() - start < SLOW_SECONDS else 2


def _devices_per_text(
    plugin: Subject, transcript: Transcript, texts: Iterable[tuple[str, str]]
) -> Iterator[tuple[str, tuple[Device, ...]]]:
    """Yield a description of each text, and the devices that are found in it. Raises BadPlugin."""
    for how, text in texts:
        location = f"{FOLDER / transcript.name}, {how}"
        yield location, fakes.devices(plugin, {transcript.tool: fakes.prints(text)}, location)


def _garbled_text(text: str, seed: int) -> str:
    rng, garbled = random.Random(seed), bytearray(text.encode())
    for _ in range((1, 20, 400)[seed % 3]):
        garbled[rng.randrange(len(garbled))] = rng.randrange(1, 256)
    return garbled.decode("utf-8", "replace")


def _device_text(devices: Sequence[Device]) -> str:
    if not devices:
        return "no device"
    first = devices[0]
    mib = first.memory_bytes // 2**20 if first.memory_bytes else None
    return f"{len(devices)} devices, the first {first.index} {first.chip!r} with {mib} MiB, driver {first.driver!r}"


Place = tuple[Path, int]
"""A file, and the number of a line in it."""


def _parsers(plugin: Subject) -> dict[Path, ast.Module]:
    """Return the modules of the plugin that make rows of devices. Raises Skip if there is none."""
    texts = {path: path.read_text("utf-8") for path in sorted(plugin.package_folder.glob("*.py"))}
    found = {path: ast.parse(text) for path, text in texts.items() if "Row(" in text}
    return need(found, "no module of the plugin makes a Row")


@once
def _reached(plugin: Subject) -> tuple[set[Place], dict[Place, set[str]]]:
    """Return the lines that detection and telemetry execute on the transcripts, and the arguments of each call of
    `reading` that gave a figure above 0 which `reads` has."""
    lines, given, expected = set[Place](), dict[Place, set[str]](), dict[str, float]()
    with _traced(plugin.package_folder, lines), _recorded(plugin, given, expected):
        for each in (each for each in plugin.transcripts if each.tool):
            read = ((figure, each.reads.get(key, 0.0) * unit) for key, (figure, unit) in READ.items())
            expected.clear()
            expected.update(read)
            fakes.samples(plugin, each)
    return lines, given


@contextmanager
def _traced(folder: Path, lines: set[Place]) -> Iterator[None]:
    """Add the lines of modules in `folder` that are executed to `lines`."""

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(str(folder)):
            return None
        lines.add((Path(frame.f_code.co_filename), frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@contextmanager
def _recorded(plugin: Subject, given: dict[Place, set[str]], expected: Mapping[str, float]) -> Iterator[None]:
    """Record the arguments of `reading` that give an expected figure above 0, by the place of the call."""

    def is_expected(figures: Mapping[str, float]) -> bool:
        return any(value and isclose(value, expected.get(name, 0.0), rel_tol=1e-3) for name, value in figures.items())

    def recording(own: Callable[..., Mapping[str, float]]) -> Callable[..., Mapping[str, float]]:
        def read(**words: Any) -> Mapping[str, float]:
            caller = sys._getframe(1)
            names = given.setdefault((Path(caller.f_code.co_filename), caller.f_lineno), set())
            names |= {name for name, word in words.items() if is_expected(own(**{name: word}))}
            return own(**words)

        return read

    with ExitStack() as stack:
        for path in _parsers(plugin):
            module = sys.modules.get(f"{plugin.package}.{path.stem}")
            if getattr(module, "reading", None) is rows.reading:
                stack.enter_context(mock.patch.object(module, "reading", recording(rows.reading)))
        yield


@check(f"add a transcript that has such a device, or an entry to {SOURCES} with `of` and `edits`")
def parsers_are_tried_on_transcripts(plugin: Subject) -> Problems:
    lines, _ = _reached(plugin)
    reached = {path for path, _ in lines}  # other modules read files or a library, which no transcript shows
    for path, tree in ((path, tree) for path, tree in _parsers(plugin).items() if path in reached):
        for node in ast.walk(tree):
            value = getattr(node, "value", None) if isinstance(node, ast.Return | ast.Yield) else None
            shown = _result(value)
            if isinstance(node, ast.Continue) and (path, node.lineno) not in lines:
                yield f"{path.name}:{node.lineno}: no file of {FOLDER} has a device or line that is ignored here"
            if value is not None and shown and not {(path, value.lineno), (path, getattr(node, "lineno", 0))} & lines:
                yield f"{path.name}:{value.lineno}: no file of {FOLDER} has {shown}"


def _result(value: ast.expr | None) -> str:
    """Return what a parser's result says about a device, or an empty string for other values."""
    if isinstance(value, ast.JoinedStr):
        words = [part.value for part in value.values if isinstance(part, ast.Constant)]
        return repr(max(map(str, words), key=len).strip()) if any(" " in str(word).strip() for word in words) else ""
    is_row = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "Row"
    return "a device that this line reads" if is_row else ""


@check("correct the column or field, or let `reads` have a device in use: 0 is in many columns; edits of a file count")
def readings_are_found_in_transcripts(plugin: Subject) -> Problems:
    _, given = _reached(plugin)
    for path, tree in _parsers(plugin).items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "reading":
                names = {word.arg for word in node.keywords if word.arg} - given.get((path, node.lineno), set())
                for name in sorted(names) if (path, node.lineno) in given else ():
                    yield f"{path.name}:{node.lineno}: reading gets no {name} above 0 that {FOLDER / SOURCES} has"
