"""Finds Iluvatar GPUs. CoreX's torch uses the device name cuda, so its version, an attribute or the devices' names
identify it.

A card with two chips (BI-V150, MR-V100 DUO) has two devices.

Reads the output of ixsmi. The bars of its table separate the columns, because widths differ between versions.
"""

import re
from collections.abc import Mapping

from flagcore_vendorkit.detection import DeviceDetector, list_with
from flagcore_vendorkit.machine import TorchReport, tool_output
from flagcore_vendorkit.rows import (
    BUS,
    Listing,
    Row,
    parse_power,
    read_table,
    search,
    strip_controls,
    usual_row,
    with_driver,
)

PCI_VENDOR = 0x1E3E
"""Source: gpustack/runtime gpustack_runtime/detector. The ID 1e3e:0002 is an MR-V100 (ywh555hhh/llaisys notes)."""

TITLE = "IX-ML:"

_NAME = re.compile(r"(\d+)\s+(\S.*)")
_DEAD_WATTS = "65535"
"""Power that a hung device reports: a counter with all 16 bits set. Such a device also reports 0 C and 25 MHz."""


def read(text: str) -> Listing:
    """Return the devices of ixsmi's table. A card with two chips has two devices; only the second one reports power."""
    text = strip_controls(text)
    if TITLE not in text:
        return Listing()
    return with_driver(read_table(text, _head, _body), search(r"Driver Version:\s*([\w.]+)", text)[0])


def uuids(text: str) -> Mapping[int, str]:
    """Return the UUIDs in the output of `ixsmi --query-gpu=index,uuid --format=csv,noheader`, by index."""
    lines = re.finditer(r"^\s*(\d+),\s*([\w-]+)\s*$", strip_controls(text), re.MULTILINE)
    return {int(line[1]): line[2] for line in lines}


def _head(parts: list[str]) -> tuple[int, str, str | None] | None:
    name = _NAME.fullmatch(parts[0]) if len(parts) == 3 else None
    if name is None or not BUS.fullmatch(parts[1]):
        return None
    return int(name[1]), name[2], search(r"(\d+) ?MHz", parts[2])[0]


def _body(head: tuple[int, str, str | None], parts: list[str], after: list[str]) -> Row | str | None:
    index, name, megahertz = head
    mode = parts[-1].split()[-1] if parts and len(parts[-1].split()) > 1 else ""
    row = usual_row(index, name, parts, mode=mode, megahertz=megahertz)
    if row and (watts := parse_power(parts[0])[0]) == _DEAD_WATTS:
        return f"GPU {index} ({name}) is not usable: it hangs and reports {watts} W"
    return row


def _is_own_torch(report: TorchReport) -> bool:
    named = all("iluvatar" in each.chip.casefold() for each in report.devices)
    return named or "corex" in report.attributes or "+corex" in report.version


DETECTOR = DeviceDetector(
    vendor="iluvatar",
    tool="ixsmi",
    listing=list_with(read, "ixsmi"),
    visible=("CUDA_VISIBLE_DEVICES", "ILUVATAR_VISIBLE_DEVICES"),
    vendor_variables=("GEMS_VENDOR", "FLAGGEMS_VENDOR", "GEMS_BACKEND", "FLAGGEMS_BACKEND"),
    device_file="dev/iluvatar[0-9]*",
    pci_vendor=PCI_VENDOR,
    torch_device="cuda",
    torch_attributes=("corex",),
    trusts=_is_own_torch,
    uuids=lambda: uuids(tool_output("ixsmi", "--query-gpu=index,uuid", "--format=csv,noheader") or ""),
    topology=("ixsmi", "topo", "-m"),
)
