"""What this machine reports of its accelerators without their management tool. No driver is loaded here."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flagcore.domain.chip import Device
from flagcore.vendorkit.smi import tool_output

LOG = logging.getLogger(__name__)
ACCELERATORS = ("0x03", "0x12")
"""PCI classes of display controllers and of processing accelerators."""

TORCH_SECONDS = 10.0

_QUERY_TORCH = """
import importlib.util, json, sys
import torch
kind = sys.argv[1]
if kind != "cuda" and importlib.util.find_spec("torch_" + kind):
    __import__("torch_" + kind)
backend = getattr(torch, kind)
found = [backend.get_device_properties(i) for i in range(backend.device_count())]
print(json.dumps({
    "version": torch.__version__,
    "attributes": [name for name in sys.argv[2:] if hasattr(torch, name)],
    "devices": [[each.name, each.total_memory] for each in found],
}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchReport:
    """torch's version, which of the requested attributes it has, and its devices with their memory in bytes."""

    version: str
    attributes: frozenset[str]
    devices: tuple[Device, ...]


def other_vendor_selected(vendor: str, variables: Sequence[str], environment: Mapping[str, str] | None = None) -> bool:
    """Return whether the first of `variables` that is set names another vendor."""
    values = os.environ if environment is None else environment
    selected = next((values[name] for name in variables if values.get(name)), vendor)
    return selected.casefold() != vendor


def pci_ids(vendor_id: int, root: Path = Path("/"), kinds: tuple[str, ...] = ACCELERATORS) -> tuple[str, ...]:
    """Return the PCI device ids ("0x4001") of a vendor's accelerators, in the order of their addresses."""
    found = []
    for folder in sorted((root / "sys/bus/pci/devices").glob("*")):
        vendor, kind, device = (_line(folder / name) for name in ("vendor", "class", "device"))
        if vendor == f"{vendor_id:#06x}" and kind.startswith(kinds):
            found.append(device)
    return tuple(found)


def has_device_files(pattern: str, root: Path = Path("/")) -> bool:
    """Return whether a device file such as `dev/acme*` exists. Without one, no process here can use a device."""
    return any(root.glob(pattern))


def query_torch(kind: str, attributes: Sequence[str] = ()) -> TorchReport | None:
    """Return the report of the installed torch on its devices of `kind`, and which of `attributes` it has.

    `kind` is torch's name of the devices. torch runs in a separate process and may crash or hang there. None without
    torch, without such a backend, or if it fails.
    """
    if importlib.util.find_spec("torch") is None:
        return None
    printed = tool_output(sys.executable, "-c", _QUERY_TORCH, kind, *attributes, timeout_seconds=TORCH_SECONDS)
    if printed is None:
        LOG.warning("device files exist, but the management tool is missing and torch lists no %s devices", kind)
    return read_torch(printed or "")


def read_torch(printed: str) -> TorchReport | None:
    """Return the report in what the process printed; a vendor's library may print a banner first."""
    for line in reversed(printed.splitlines()):
        try:
            report = json.loads(line[line.index("{") :])
            devices = tuple(
                Device(index=index, chip=str(name), memory_bytes=int(total))
                for index, (name, total) in enumerate(report["devices"])
            )
            attributes = frozenset(report["attributes"])
            return TorchReport(version=str(report["version"]), attributes=attributes, devices=devices)
        except (ValueError, KeyError, TypeError):
            continue
    return None


def _line(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace").strip()
    except OSError:
        return ""
