"""Finds T-Head PPUs. SAIL's torch uses the device name cuda, so its version or the devices' names identify it.

Reads ppu-smi's table, as versions 1.17 to 1.28 print it: three lines per device, with the MIG mode in the third.
"""

import re
from collections.abc import Mapping
from functools import partial

from flagcore_vendorkit.detection import DeviceDetector, list_with
from flagcore_vendorkit.machine import tool_output
from flagcore_vendorkit.rows import Named, Row, read_processes, search, strip_controls, table_reader, usual_row

PCI_VENDOR = 0x1DED
"""Alibaba's: gpustack/runtime gpustack_runtime/detector/thead.py @88026d62."""

TITLE = "PPU-SMI"

_NAME = re.compile(r"(\d+) +(\S.*?) +(?:On|Off|Enabled|Disabled|N/A)")
_PROCESS = re.compile(r"(?m)^ *\| +(\d+) +\S+ +\S+ +(\d+) +\S+ +(\S.*?) +(\d+)MiB *\| *$")
_LISTED = re.compile(r"(?m)^PPU (\d+): .*\(UUID: (\S+)\)")

processes = partial(read_processes, pattern=_PROCESS)


def uuids(text: str) -> Mapping[int, str]:
    """Return the UUIDs in the output of `ppu-smi -L`, by index."""
    return {int(index): uuid for index, uuid in _LISTED.findall(strip_controls(text))}


def _body(head: Named, parts: list[str], after: list[str]) -> Row | str | None:
    index, name, _ = head
    row = usual_row(index, name, parts, mode=search(r"\d% +(\S.*)", parts[-1] if parts else "")[0])
    if row and after[-1:] == ["Enabled"]:
        return f"PPU {index} ({name}) is divided into instances (MIG), so a process cannot use all its memory"
    return row


read = table_reader(TITLE, _NAME, _body)
"""Returns the devices in the table, without those that are divided into instances (MIG)."""
DETECTOR = DeviceDetector(
    vendor="thead",
    tool="ppu-smi",
    listing=list_with(read, "ppu-smi", processes=processes),
    visible=("CUDA_VISIBLE_DEVICES",),
    own_variables=("PPU_", "PCCL_", "HGGC_"),
    device_file="dev/alixpu_ppu[0-9]*",
    pci_vendor=PCI_VENDOR,
    pci_classes=("0x0302", "0x12"),
    torch_device="cuda",
    # PPUs report names such as PPU-ZW810E or ZW-M890P
    trusts=lambda report: "+ppu" in report.version or all(each.chip[:3] in ("PPU", "ZW-") for each in report.devices),
    uuids=lambda: uuids(tool_output("ppu-smi", "-L") or ""),
    topology=("ppu-smi", "topo", "-m"),
)
