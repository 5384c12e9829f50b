"""Finds Kunlunxin XPUs with xpu-smi. The vendor's torch uses the device name cuda and may call a device just GPU.

Reads xpu-smi's table, which has three lines per device. Intel's tool of the same name is ignored.
"""

import re
from functools import partial

from flagcore_vendorkit.detection import DeviceDetector, list_with
from flagcore_vendorkit.rows import Named, Row, read_processes, table_reader, usual_row

PCI_VENDOR = 0x1D22
"""Baidu's PCI vendor ID. The PCI ID database lists the cards under it."""

_CHIP = re.compile(r"(Kunlunxin )?[PR]\d{3}")
"""Matches the name of a card, such as `P800 OAM`."""
TITLE = r"\| XPU-SMI +Driver Version: \S"
_NAME = re.compile(r"(\d+) +([A-Z]\d{3}\S*( \S+)*?) +\S+")
_PROCESS = re.compile(r"(?m)^ *\| +(\d+) +\S+ +\S+ +(\d+) +\S+ +(\S.*?) +(\d+)MiB *\| *$")
"""A line of the list of processes: device, two instance numbers, process, type, name and MiB."""

processes = partial(read_processes, pattern=_PROCESS)


def _body(head: Named, parts: list[str], after: list[str]) -> Row | str | None:
    index, name, _ = head
    row = usual_row(index, name, parts)
    if row is None or row.device.memory_bytes == 0:
        return None
    return f"XPU {index} ({name}) is a part of another" if name.endswith(" VF") else row


read = table_reader(TITLE, _NAME, _body, lines_per_device=3)
"""Returns the devices in the table, without virtual devices."""


DETECTOR = DeviceDetector(
    vendor="kunlunxin",
    tool="xpu-smi",
    listing=list_with(read, "xpu-smi", "xpu_smi", processes=processes),
    visible=("XPU_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    own_variables=("XMLIR_", "BKCL_", "XDNN_"),
    device_file="dev/xpu[0-9]*",
    pci_vendor=PCI_VENDOR,
    torch_device="cuda",
    topology=("xpu-smi", "topo", "-m"),
    trusts=lambda report: all(each.chip == "GPU" or _CHIP.match(each.chip) for each in report.devices),
)
