"""Runs a vendor's management tool to list devices."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import IO

from flagcore.domain.chip import Device
from flagcore.vendorkit.rows import Listing, strip_controls

_TIME = re.compile(r"(?<![\w:])\d\d:\d\d:\d\d(?!\.\d\b)(?![\w:])")
"""A time of day, but not an address on the PCI bus (`0:07:00`, `00:07:00.0`)."""
MAX_BYTES = 2 * 2**20
"""Maximum size of a tool's output, so that it cannot fill the disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The output of a command, with undecodable bytes replaced, and its exit status; None if it exceeded the time
    limit.
    """

    text: str
    errors: str
    status: int | None


def run_tool(*argv: str, timeout_seconds: float = 10.0, environment: Mapping[str, str] | None = None) -> Output | None:
    """Run a command without a shell; None if it is missing or cannot be started. `environment` replaces this shell's.

    A command that exceeds the time limit is killed with its children. The function does not wait for their end, because
    a process that is stuck in a driver cannot be killed.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
                env=environment,
            )
        except OSError:
            return None
        status = None
        with suppress(OSError):  # the process may have ended
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (MAX_BYTES, MAX_BYTES))
        try:
            status = process.wait(timeout_seconds)
        except BaseException as error:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
        return Output(text=_text(output), errors=_text(errors), status=status)


def tool_output(*argv: str, timeout_seconds: float = 10.0, environment: Mapping[str, str] | None = None) -> str | None:
    """Return the output of a command, or None if it is missing, fails or exceeds the time limit."""
    output = run_tool(*argv, timeout_seconds=timeout_seconds, environment=environment)
    return output.text if output is not None and output.status == 0 else None


def query_tool(read: Callable[[str], Listing], *argv: str, timeout_seconds: float = 10.0) -> Listing | None:
    """Return the devices that a management tool prints, as `read` parses it; None if the tool is missing.

    `left_out` describes lines that cannot be read, with the name of the tool. Devices that were listed before the tool
    failed are valid, because some tools fail to warn about one device.
    """
    output = run_tool(*argv, timeout_seconds=timeout_seconds)
    if output is None:
        return None
    tool = argv[0]
    if output.status is None:
        return Listing(left_out=(f"{tool} did not answer within {timeout_seconds:g} s and was killed",))
    listing = read(strip_controls(output.text))
    first = _first_line(output.text) or _first_line(output.errors) or "nothing"
    if not listing.rows and output.status:
        return Listing(left_out=(f"{tool} failed with exit status {output.status}: {first}",))
    if not listing.rows and not listing.left_out:
        return Listing(left_out=(f"{tool} lists no device in a known format; it prints: {first}",))
    return Listing(listing.rows, tuple(f"{tool}: {line}" for line in listing.left_out))


def visible(
    devices: tuple[Device, ...], *variables: str, environment: Mapping[str, str] | None = None
) -> tuple[Device, ...]:
    """Return the devices that processes with `environment` (None: this shell's) can use, with their names there.

    `variables` are environment variables such as `X_VISIBLE_DEVICES`: names of devices (by default their indices) or
    prefixes of UUIDs, separated by commas. The first variable that is set is used. As in the drivers, an unknown name
    hides all following devices.
    """
    words = setting(variables, os.environ if environment is None else environment)
    if words is None:
        return devices
    chosen: dict[int, Device] = {}
    for word in words:
        match = next((device for device in devices if _matches(device, word)), None)
        if match is None:
            break
        chosen.setdefault(match.index, replace(match, name=word))
    return tuple(chosen.values())


def setting(variables: Iterable[str], environment: Mapping[str, str]) -> list[str] | None:
    """Return the words of the first of `variables` that is set; None if none is."""
    value = next((environment[name] for name in variables if name in environment), None)
    return None if value is None else [word.strip() for word in value.split(",")]


def _matches(device: Device, word: str) -> bool:
    return device.selector == word or (len(word) > 4 and device.uuid.startswith(word))


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")


def _first_line(text: str) -> str:
    """Return up to 120 characters of the first line that has words and is not a time stamp."""
    lines = (" ".join(line.split()) for line in strip_controls(text).splitlines())
    return next((line[:120] for line in lines if re.search(r"\w", line) and not _TIME.search(line)), "")
