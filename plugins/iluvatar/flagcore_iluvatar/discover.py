"""Finds Iluvatar GPUs. CoreX's torch uses the device name cuda, so its version, an attribute or the devices' names
identify it.

A card with two chips (BI-V150, MR-V100 DUO) has two devices.

Reads the output of ixsmi. The bars of its table separate the columns, because widths differ between versions.
"""

import re
from collections.abc import Mapping

from flagcore_vendorkit.detection import DeviceDetector, list_with
from flagcore_vendorkit.machine import TorchReport, tool_output
from flagcore_vendorkit.rows import Named, Row, parse_power, search, strip_controls, table_reader, usual_row

PCI_VENDOR = 0x1E3E
"""Source: gpustack/runtime gpustack_runtime/detector. The ID 1e3e:0002 is an MR-V100 (ywh555hhh/llaisys notes)."""

TITLE = "IX-ML:"

_NAME = re.compile(r"(\d+)\s+(\S.*)")
_DEAD_WATTS = "65535"
"""Power that a hung device reports: a counter with all 16 bits set. Such a device also reports 0 C and 25 MHz."""


def uuids(text: str) -> Mapping[int, str]:
    """Return the UUIDs in the output of `ixsmi --query-gpu=index,uuid --format=csv,noheader`, by index."""
    lines = re.finditer(r"^\s*(\d+),\s*([\w-]+)\s*$", strip_controls(text), re.MULTILINE)
    return {int(line[1]): line[2] for line in lines}


def _body(head: Named, parts: list[str], after: list[str]) -> Row | str | None:
    index, name, first = head
    megahertz = search(r"(\d+) ?MHz", first[2])[0]
    mode = parts[-1].split()[-1] if parts and len(parts[-1].split()) > 1 else ""
    row = usual_row(index, name, parts, mode=mode, megahertz=megahertz)
    if row and (watts := parse_power(parts[0])[0]) == _DEAD_WATTS:
        return f"GPU {index} ({name}) is not usable: it hangs and reports {watts} W"
    return row


read = table_reader(TITLE, _NAME, _body)
"""Returns the devices of ixsmi's table. A card with two chips has two devices; only the second one reports power."""


def _is_own_torch(report: TorchReport) -> bool:
    named = all("iluvatar" in each.chip.casefold() for each in report.devices)
    return named or "corex" in report.attributes or "+corex" in report.version


DETECTOR = DeviceDetector(
    vendor="iluvatar",
    tool="ixsmi",
    listing=list_with(read, "ixsmi"),
    visible=("CUDA_VISIBLE_DEVICES", "ILUVATAR_VISIBLE_DEVICES"),
    device_file="dev/iluvatar[0-9]*",
    pci_vendor=PCI_VENDOR,
    torch_device="cuda",
    torch_attributes=("corex",),
    trusts=_is_own_torch,
    uuids=lambda: uuids(tool_output("ixsmi", "--query-gpu=index,uuid", "--format=csv,noheader") or ""),
    topology=("ixsmi", "topo", "-m"),
)
