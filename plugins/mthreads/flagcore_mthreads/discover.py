"""Finds Moore Threads GPUs. torch_musa adds torch.musa; with torchada, torch.cuda uses these GPUs too.

Reads mthreads-gmi's table, as versions 1.14 to 2.4 print it: three lines per device, columns separated by bars.
"""

import re
from functools import partial

from flagcore_vendorkit.detection import DeviceDetector, list_with
from flagcore_vendorkit.rows import UNITS, Named, Row, read_processes, reading, search, table_reader

from flagcore.domain.chip import Device

PCI_VENDOR = 0x1ED5
"""gpustack/runtime gpustack_runtime/detector/mthreads.py @88026d62; `lspci -d 1ed5:` in the vendor's vGPU guide."""

TITLE = "mthreads-gmi:"

_NAME = re.compile(r"(\d+) +(MTT \S.*)")
_LOAD = re.compile(r"(\S+)% +(\d+)MiB ?\((\d+)MiB\)")
_PROCESS = re.compile(r"(?m)^(\d+) +(\d+) +(\S.*?) +(\d+)MiB *$")

processes = partial(read_processes, pattern=_PROCESS)


def _body(head: Named, parts: list[str], after: list[str]) -> Row | str | None:
    index, name, first = head
    load = _LOAD.fullmatch(first[2])
    if load is None or len(parts) != 3 or load[3] == "0":
        return None
    percent, used, total = load.groups()
    if not parts[0].startswith(("Physical", "MPC Parent")):
        return f"GPU {index} ({name}) is a part of another: {parts[0]}"
    return Row(
        device=Device(index=index, chip=name, memory_bytes=int(total) * UNITS["MiB"]),
        reading=reading(
            used_bytes=float(used) * UNITS["MiB"], celsius=search(r"^(\d+)C\b", parts[2])[0], percent=percent
        ),
    )


read = table_reader(TITLE, _NAME, _body, split=lambda line: [part.strip() for part in line.split("|")])
"""Returns the devices in the table, without virtual devices."""
DETECTOR = DeviceDetector(
    vendor="mthreads",
    tool="mthreads-gmi",
    listing=list_with(read, "mthreads-gmi", processes=processes),
    visible=("MUSA_VISIBLE_DEVICES",),
    own_variables=("MUSA_", "MTHREADS_"),
    device_file="dev/mtgpu.[0-9]*",
    pci_vendor=PCI_VENDOR,
    pci_classes=("0x0302", "0x12"),  # without VGA controllers (0x0300), as for other vendors
    torch_device="musa",
    torch_attributes=("musa",),
    topology=("mthreads-gmi", "topo", "-m"),
    trusts=lambda report: "musa" in report.attributes,
)
