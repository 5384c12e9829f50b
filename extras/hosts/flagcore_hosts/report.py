"""The report of a host, as the program that each host runs.

`python -m flagcore_hosts.report FILE...` prints the devices, packages and files of its host as JSON. With the argument
`watch` instead of files, it prints the telemetry of each device every second until it is ended.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.util import find_spec
from math import nan
from pathlib import Path
from typing import Any

import numpy as np

from flagcore.api.commands.doctor import doctor
from flagcore.api.inputs import loaded_plugins
from flagcore.contracts import Telemetry, device_use
from flagcore.domain.chip import MEMORY_IN_USE, Device
from flagcore.domain.cluster import NodeGroup
from flagcore.errors import FlagError, NoDevice
from flagcore.plugins import LoadedPlugins, first_engine, target
from flagcore.tuner.devices import busy_reason

PERIOD_SECONDS = 1.0
HASHED_BYTES = 1 << 20
"""For larger files, only the size and the beginning are hashed."""


def digest(path: str) -> str:
    """Return a hash of a file, or of the files in a folder. Returns an empty string if it is missing."""
    if not os.path.exists(path):
        return ""
    digest_of_files = hashlib.sha256()
    try:
        for each in sorted(Path(path).iterdir()) if os.path.isdir(path) else [Path(path)]:
            if each.is_file():
                digest_of_files.update(f"{each.name} {each.stat().st_size}\n".encode())
                with each.open("rb") as file:
                    digest_of_files.update(file.read(HASHED_BYTES))
    except OSError:
        return ""
    return digest_of_files.hexdigest()


def how_torch_runs(loaded: LoadedPlugins) -> dict[str, Any] | None:
    """Return the devices that torch uses here, with one device for all cores of a CPU. Returns None without torch."""
    if find_spec("torch") is None:
        return None
    with suppress(FlagError):
        _, support, chip_devices, _ = target(loaded)
        return {
            "kind": support.device_type,
            "backend": support.distributed_backend,
            "preload": list(support.preload),
            "devices": 1 if support.shared_devices else len(chip_devices),
        }
    return None


def reading(reader: Telemetry | None) -> dict[str, Any]:
    """Return the telemetry and the processes of a device as plain data.

    The data contains only `lost` if the device does not respond. It is empty if the telemetry is unknown.
    """
    try:
        if reader is None:
            return {}
        figures = {name: float(value) for name, value in reader.sample().items()}
        return {"figures": figures, "use": asdict(device_use(reader))}
    except LookupError:
        return {"lost": True}
    except NoDevice as error:  # raised by a plugin's proxy, with the plugin's error as its cause
        return {"lost": True} if isinstance(error.__cause__, LookupError) else {}
    except (FlagError, TypeError, ValueError):
        return {}


def idle_bytes(loaded: LoadedPlugins, device: Device) -> float:
    """Return the memory in use on a device without tensors, in bytes. It is 0 if the chip is unknown."""
    chip, engine = loaded.find_chip(device.chip), first_engine()
    model = loaded.memory_model(NodeGroup(chip=chip, nodes=1, devices_per_node=1), engine) if chip else None
    return float(model.device_used_bytes(np.zeros(1))[0]) if model else 0.0


def busy(device: Device, reader: Telemetry | None, idle: float = 0.0) -> str:
    """Return why a trial cannot use a device, or an empty string if it can.

    `idle` is the number of bytes that are always in use. A device that uses the machine's memory is never busy.
    """
    found = reading(reader)
    if found.get("lost"):
        return "does not respond"
    if reader is None or not found or found["use"]["free_bytes"] is not None:
        return ""
    memory_bytes = float(device.memory_bytes or nan)
    return busy_reason(device, reader, found["figures"].get(MEMORY_IN_USE, nan), memory_bytes, idle)


def main(arguments: Sequence[str]) -> None:
    """Print the report on this host or, with the argument `watch`, the telemetry of its devices every second."""
    watch = list(arguments) == ["watch"]
    with loaded_plugins(()) as loaded:
        devices = [(device, loaded.telemetry(device)) for device in loaded.devices()]
        if not watch:
            reasons = ((device, busy(device, reader, idle_bytes(loaded, device))) for device, reader in devices)
            report = {
                "devices": [asdict(device) for device, _reader in devices],
                "versions": {each["name"]: each["version"] for each in doctor(measure=False) if each["version"]},
                "torch": how_torch_runs(loaded),
                "files": {path: digest(path) for path in arguments},
                "busy": [f"{device.title} {reason}" for device, reason in reasons if reason],
            }
            print(json.dumps(report))
    while watch:
        print(json.dumps([reading(reader) for _device, reader in devices]), flush=True)
        time.sleep(PERIOD_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1:])
