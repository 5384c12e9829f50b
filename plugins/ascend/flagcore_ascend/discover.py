"""Finds Ascend NPUs. torch_npu adds torch.npu; a module with two dies (910C, Atlas 300I Duo) counts as two devices.

Reads `npu-smi info`: a table with two lines per device, in the layouts of versions 23 to 26, and the list of processes.
"""

import re
from collections.abc import Mapping

from flagcore_vendorkit.detection import DeviceDetector, list_with
from flagcore_vendorkit.rows import BUS, UNITS, Listing, Row, read_table, reading, search, strip_controls, with_driver

from flagcore.domain.chip import Device

PCI_VENDOR = 0x19E5
"""gpustack/runtime gpustack_runtime/detector/ascend.py @88026d62. Huawei's display and network chips have the same PCI
vendor ID."""

TITLE = re.compile(r"\| *npu-smi +(\S+)")

_NAME = re.compile(r"(\d+) +(\S+)")
_HEALTH = re.compile(r"[A-Za-z]+")
_USABLE = ("OK", "Warning")
"""Health of a usable device. The other values are Alarm, Critical and UNKNOWN."""
_PAIR = re.compile(r"(\d+) */ *(\d+)")
_DEVICE = re.compile(r"(?m)^\| (\d+) +\S+ *\| [A-Za-z]+ .*\n\| (\d+) ")
_PROCESS = re.compile(r"(?m)^\| (\d+) +(\d+) +\| (\d+) +\| (\S.*?) +\| (\d+) +\|")


def read(text: str) -> Listing:
    """Return the devices of the table. The index of a device is its position, as in ASCEND_RT_VISIBLE_DEVICES.

    NPU numbers have gaps in a container, and the two dies of a module share one.
    """
    text = strip_controls(text)
    title = TITLE.search(text)
    if title is None:
        return Listing()
    places = iter(range(len(text)))

    def head(parts: list[str]) -> tuple[int, str, str, str] | None:
        name = _NAME.fullmatch(parts[0]) if len(parts) == 3 else None
        return (next(places), name[2], parts[1], parts[2]) if name and _HEALTH.fullmatch(parts[1]) else None

    return with_driver(read_table(text, head, _body), title[1])


def processes(text: str) -> Mapping[int, tuple[str, ...]]:
    """Return the processes that are listed below the table, by device: texts such as `4711 python3 (20.5 GiB)`."""
    text = strip_controls(text)
    places = {match.groups(): place for place, match in enumerate(_DEVICE.finditer(text))}
    found: dict[int, tuple[str, ...]] = {}
    for npu, chip, pid, name, used in _PROCESS.findall(text):
        if (place := places.get((npu, chip))) is not None:
            found[place] = (*found.get(place, ()), f"{pid} {name} ({int(used) / 1024:.1f} GiB)")
    return found


def _body(head: tuple[int, str, str, str], parts: list[str], after: list[str]) -> Row | str | None:
    place, name, health, first = head
    pairs = [pair for pair in _PAIR.findall(parts[2]) if int(pair[1])] if len(parts) == 3 else []
    if not pairs or not BUS.fullmatch(parts[1]):
        return None
    if health not in _USABLE:
        return f"NPU {place} ({name}) cannot be used: npu-smi reports its health as {health}"
    used, total = pairs[-1]  # HBM is the last column; an inference chip has only DDR memory
    watts, celsius = search(r"^(\S+) +(\d+)", first)
    return Row(
        device=Device(index=place, chip=name, memory_bytes=int(total) * UNITS["MiB"]),
        reading=reading(
            used_bytes=float(used) * UNITS["MiB"], watts=watts, celsius=celsius, percent=search(r"^(\d+) ", parts[2])[0]
        ),
    )


DETECTOR = DeviceDetector(
    vendor="ascend",
    tool="npu-smi",
    listing=list_with(read, "npu-smi info", processes=processes),
    visible=("ASCEND_RT_VISIBLE_DEVICES",),
    own_variables=("ASCEND_", "HCCL_"),
    device_file="dev/davinci[0-9]*",
    pci_vendor=PCI_VENDOR,
    pci_classes=("0x12",),
    torch_device="npu",
    torch_attributes=("npu",),
    topology=("npu-smi", "info", "-t", "topo"),
    trusts=lambda report: "npu" in report.attributes,
)
