"""Finding devices: with the vendor's tool, without it, and with one that is broken. Tools are real programs, faked."""

from __future__ import annotations

import time
from collections.abc import Iterator

from flagcore.domain.chip import Device
from flagcore.errors import SpecError
from flagcore.testing import fakes
from flagcore.testing.problem import Problem, Skip
from flagcore.testing.subject import Subject

SECONDS = 15.0
HANGS = 30.0
"""How long tools that hang may keep a command, all together."""
CRASHES = {
    "dies of a signal": "kill -SEGV $$",
    "fails": "echo 'failed to initialize' >&2; exit 139",
    "cannot talk to its driver": "echo 'No devices were found'; exit 0",
    "prints nothing": "exit 0",
}
RUBBISH = {
    "prints rubbish": r"head -c 20000 /bin/sh",
    "floods": "exec yes '| 0  |'",
    "prints half a line": "printf '| 0  '",
}


def detection_is_quick(plugin: Subject) -> Iterator[Problem]:
    plugin.implements("flagcore_devices")
    start = time.monotonic()
    found = fakes.ask(plugin)
    if time.monotonic() - start > SECONDS:
        yield Problem(
            message=f"flagcore_devices takes more than {SECONDS:.0f} s here", fix="give the tool a time limit"
        )
    if len({device.index for device in found}) != len(found):
        yield Problem(message="flagcore_devices tells two devices with one index", fix="leave out what is not sure")


def missing_tool_lists_no_devices(plugin: Subject) -> Iterator[Problem]:
    _tools(plugin)
    found = fakes.without_tools(plugin)
    if any(plugin.loaded.find_chip(device.chip) is None for device in found):
        yield Problem(
            message=f"flagcore_devices tells {found[0].chip!r} where the vendor's tool is missing",
            fix="a missing tool or driver means no devices: answer nothing, and raise nothing",
        )


def crashing_tool_lists_no_devices(plugin: Subject) -> Iterator[Problem]:
    yield from _broken(plugin, CRASHES)


def garbage_lists_no_devices(plugin: Subject) -> Iterator[Problem]:
    yield from _broken(plugin, RUBBISH)


def hanging_tool_is_stopped(plugin: Subject) -> Iterator[Problem]:
    tools = _tools(plugin)
    waited: dict[int, float] = {}
    with fakes.impatient(waited):
        try:
            fakes.devices(plugin, dict.fromkeys(tools, "exec sleep 5"))
        except fakes.NoLimit:
            yield Problem(
                message=f"flagcore_devices waits for {tools[0]} without a limit",
                fix="ask it by flagcore.vendorkit.smi.tool_output, or give subprocess a timeout",
            )
            return
    if sum(waited.values()) > HANGS:
        yield Problem(
            message=f"flagcore_devices waits {sum(waited.values()):.0f} s for tools that hang",
            fix=f"lower timeout_seconds: together they must take less than {HANGS:.0f} s",
        )


def output_of_other_vendors_is_ignored(plugin: Subject) -> Iterator[Problem]:
    tools = _tools(plugin)
    sure = fakes.without_tools(plugin)
    foreign = {"a vendor that does not exist": fakes.NOBODYS, **_transcripts_of_others(plugin)}
    for whose, text in foreign.items():
        found = _found(plugin, dict.fromkeys(tools, fakes.prints(text)))
        if isinstance(found, Problem):
            yield found
        elif more := [device for device in found if device not in sure]:
            yield Problem(
                message=f"flagcore_devices takes {more[0].chip!r}, printed by a tool of {whose}, for its own",
                fix="ask for the tool's title, the PCI vendor or the devices' names before you believe a table",
            )


def visible_devices_are_respected(plugin: Subject) -> Iterator[Problem]:
    said = {
        plugin.loaded.engine_support(chip, engine).visible_devices for chip in plugin.chips for engine in plugin.engines
    }
    names = sorted(name for name in said if name)
    if not names:
        raise Skip("no engine is told which variable makes devices visible")
    several = [each for each in plugin.listings if each.devices >= 2]
    if not several:
        raise Skip("no transcript lists two devices")
    tools = {several[0].tool: fakes.prints(several[0].text)}
    for name in names:
        for setting, indices in (("1,0", [1, 0]), ("0", [0]), ("-1", [])):
            found = [device.index for device in fakes.devices(plugin, tools, **{name: setting})]
            if found != indices:
                yield Problem(
                    message=f"flagcore_devices tells the devices {found} where {name}={setting}",
                    fix=f"answer visible(found, {name!r}) of flagcore.vendorkit.smi",
                )


def vendor_selection_is_respected(plugin: Subject) -> Iterator[Problem]:
    chip = plugin.own_chips()[0]
    given = {
        name: value for engine in plugin.engines for name, value in plugin.loaded.environment(chip, engine).items()
    }
    names = [name for name, value in given.items() if value.casefold() == chip.vendor]
    if not names:
        raise Skip("no variable of trials names the vendor")
    first = plugin.listings[0]
    for name in names:
        for setting, seen in ((chip.vendor.upper(), True), ("somebody_else", False)):
            found = fakes.devices(plugin, {first.tool: fakes.prints(first.text)}, **{name: setting})
            if bool(found) is not seen:
                yield Problem(
                    message=f"flagcore_devices tells {len(found)} devices where {name}={setting}",
                    fix=f"answer none where vendorkit.machine.named_otherwise({chip.vendor!r}, ({name!r},))",
                )


def _tools(plugin: Subject) -> tuple[str, ...]:
    plugin.implements("flagcore_devices")
    found = fakes.tools_of(plugin)
    if not found:
        raise Skip("no tool is asked for devices")
    return found


def _found(plugin: Subject, tools: dict[str, str]) -> tuple[Device, ...] | Problem:
    try:
        return fakes.devices(plugin, tools)
    except Exception as error:
        return Problem(
            message=f"flagcore_devices raises {type(error).__name__}: {' '.join(str(error).split())[:200]}",
            fix="what cannot be read is no device: skip the line, and answer those that are sure",
        )


def _broken(plugin: Subject, scripts: dict[str, str]) -> Iterator[Problem]:
    tools = _tools(plugin)
    sure = fakes.without_tools(plugin)
    for how, script in scripts.items():
        with fakes.impatient({}):
            found = _found(plugin, dict.fromkeys(tools, script))
        if isinstance(found, Problem):
            yield Problem(message=f"{found.message}, where {tools[0]} {how}", fix=found.fix)
        elif more := [device for device in found if device not in sure]:
            yield Problem(
                message=f"flagcore_devices tells {more[0].chip!r} where {tools[0]} {how}",
                fix="believe only the lines of a table that you know; a tool that fails has said nothing",
            )


def _transcripts_of_others(plugin: Subject) -> dict[str, str]:
    found = {}
    for other in plugin.others.plugins:
        hooks = next(iter(other.manager.get_plugins()), None)
        try:
            listings = Subject(name=other.name, hooks=hooks).listings
        except (Skip, OSError, SpecError):
            continue
        found[f"{other.name} ({listings[0].name})"] = listings[0].text
    return found
