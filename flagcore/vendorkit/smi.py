"""Asks a vendor's system management tool which devices there are. For plugins; the core never calls it."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from flagcore.domain.chip import Device
from flagcore.vendorkit.rows import Listing, cleaned

MIB = 2**20
MOST_BYTES = 2 * MIB
"""What a tool may print: one that floods is ended by it, before it fills the disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Printed:
    """What a command printed, undecodable bytes replaced, and its exit status: None if it hung and was killed."""

    text: str
    errors: str
    status: int | None


def run_tool(*argv: str, timeout_seconds: float = 10.0) -> Printed | None:
    """Run a command that only tells something; None if it is missing or cannot be started.

    Nothing is executed through a shell. What floods is ended, and what hangs is killed with its children, and not
    waited for: a process that is stuck in a driver cannot be killed.
    """
    if shutil.which(argv[0]) is None:
        return None
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=printed, stderr=errors, start_new_session=True
            )
        except OSError:
            return None
        status = None
        with suppress(OSError):  # it may have ended already
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (MOST_BYTES, MOST_BYTES))
        try:
            status = process.wait(timeout_seconds)
        except BaseException as error:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
        return Printed(text=_text(printed), errors=_text(errors), status=status)


def tool_output(*argv: str, timeout_seconds: float = 10.0) -> str | None:
    """Return what a command prints, or None if it is missing, fails or hangs."""
    printed = run_tool(*argv, timeout_seconds=timeout_seconds)
    return printed.text if printed is not None and printed.status == 0 else None


def ask_tool(read: Callable[[str], Listing], *argv: str, timeout_seconds: float = 10.0) -> Listing | None:
    """Return the devices that a management tool prints, as `read` understands it; None if there is no such tool.

    What the tool could not tell, and what is not understood of it, is said in `left_out`, with the tool's name. A tool
    that failed after it listed devices is believed: some end so to warn of one of them.
    """
    printed = run_tool(*argv, timeout_seconds=timeout_seconds)
    if printed is None:
        return None
    tool = argv[0]
    if printed.status is None:
        return Listing(left_out=(f"{tool} was killed: it said nothing within {timeout_seconds:g} s",))
    listing = read(cleaned(printed.text))
    said = _first_line(printed.text) or _first_line(printed.errors) or "nothing"
    if not listing.rows and printed.status:
        return Listing(left_out=(f"{tool} failed with exit status {printed.status}: {said}",))
    if not listing.rows and not listing.left_out:
        return Listing(left_out=(f"{tool} lists no device of its vendor that is understood; it says: {said}",))
    return Listing(listing.rows, tuple(f"{tool}: {line}" for line in listing.left_out))


def table_devices(text: str, *, row: str, memory: str, driver: str) -> tuple[Device, ...]:
    """Return the devices of a printed table, where a device is two lines: who it is, then how it is.

    `row` matches the first line, with groups `index` and `name`; `memory` the second, with the group `mib`, the
    total in MiB; `driver` the version anywhere. A device without a memory figure (a dead one) is left out.
    """
    found = re.search(driver, text)
    version = found.group(1) if found else ""
    devices, head = [], None
    for line in text.splitlines():
        total = re.search(memory, line)
        if head and total:
            mib, (index, name) = int(total["mib"]), head
            devices.append(Device(index=index, chip=name, memory_bytes=mib * MIB, driver=version))
        start = re.search(row, line)
        head = (int(start["index"]), start["name"].strip()) if start else None
    return tuple(devices)


def visible(devices: tuple[Device, ...], *variables: str) -> tuple[Device, ...]:
    """Return the devices that processes started from here can see.

    `variables` are environment variables such as `X_VISIBLE_DEVICES`: indices or uuid beginnings, by commas. The
    first that is set counts. As in the drivers, nothing after a name that no device has is visible.
    """
    setting = next((os.environ[name] for name in variables if name in os.environ), None)
    if setting is None:
        return devices
    chosen: list[Device] = []
    for word in (part.strip() for part in setting.split(",")):
        match = [device for device in devices if _named(device, word)]
        if not match:
            break
        chosen.append(match[0])
    return tuple(chosen)


def _named(device: Device, word: str) -> bool:
    return str(device.index) == word or (len(word) > 4 and device.uuid.startswith(word))


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")


def _first_line(text: str) -> str:
    """Return the first line that has words and is no time stamp, not longer than a line of a table."""
    lines = (" ".join(line.split()) for line in cleaned(text).splitlines())
    return next((line[:120] for line in lines if re.search(r"\w", line) and not re.search(r"\d:\d\d:\d\d", line)), "")
