"""Asks a vendor's system management tool which devices there are. For plugins; the core never calls it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress

from flagcore.domain.chip import Device

MIB = 2**20


def tool_output(*argv: str, timeout_seconds: float = 10.0) -> str | None:
    """Return what a command prints, or None if it is missing, fails or hangs. Undecodable bytes are replaced.

    Nothing is executed through a shell. What hangs is killed with its children, and not waited for: a process
    that is stuck in a driver cannot be killed.
    """
    if shutil.which(argv[0]) is None:
        return None
    with tempfile.TemporaryFile() as printed:
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.DEVNULL, start_new_session=True
            )
        except OSError:
            return None
        try:
            status = process.wait(timeout_seconds)
        except BaseException as error:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                return None
            raise
        printed.seek(0)
        return printed.read().decode("utf-8", "replace") if status == 0 else None


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
