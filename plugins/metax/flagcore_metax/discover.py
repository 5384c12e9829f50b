"""Finds MetaX GPUs. MetaX's torch uses the device name cuda, so its version or the devices' names identify it.

Reads the output of mx-smi, which is named ht-smi on rebranded machines.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from flagcore_vendorkit.detection import DeviceDetector, list_with
from flagcore_vendorkit.machine import tool_output
from flagcore_vendorkit.rows import (
    BUS,
    Listing,
    Row,
    adapter_share,
    listing_of,
    parse_memory,
    parse_power,
    read_matrix,
    read_table,
    reading,
    search,
    strip_controls,
    with_driver,
)

from flagcore.domain.chip import Device

OWN_NAME = re.compile(r"MetaX |MX[CNX]\d")
DEVICE_FILE = "dev/mxcd"
PCI_VENDOR = 0x9999
"""From the output of lspci on a C500 node (9999:4001): wangzheng422/docker_env 2025.12.metax.mccl.perf.debug.md."""
TOOLS = ("mx-smi", "ht-smi")
"""The names of the management tool. Rebranded machines have the second one."""

TITLES = ("MetaX System Management Interface", "Mars System Management Interface")
"""Moffett's tool is also named mx-smi, so the title is required."""

_NAME = re.compile(r"(\d+)\s+(\S.*?)(?:\s+(?:On|Off|N/?A))?")
_OURS = re.compile(r"(MetaX |MX[CNX]\d|Mars )")
_LISTED = re.compile(rf"^GPU#(\d+)\s+(\S.*?)\s+{BUS.pattern}\s+(\S.*?)(?: \(UUID: (\S+)\))?\s*$", re.MULTILINE)


def is_metax(text: str) -> bool:
    """Return whether `text` is the output of mx-smi or ht-smi."""
    return any(title in text for title in TITLES)


def read(text: str) -> Listing:
    """Return the devices of mx-smi's table, in any of its layouts, or of `-L`, which has no memory.

    In versions up to 2.2.4, a line starts with the GPU's number; since 2.2.9, it starts with the board's number and the
    GPU's number. Devices without memory, unavailable devices and truncated lines are left out.
    """
    text = strip_controls(text)
    if not is_metax(text):
        return listing_of(_listed(text))
    (driver,) = search(r"Kernel Mode Driver Version:\s*([\w.]+)", text)
    (many,) = search(r"Attached GPUs\s*:\s*(\d+)", text)
    listing = read_table(text, _head, _body)
    if many and not listing.left_out and len(listing.rows) < int(many):
        listing = Listing(listing.rows, (f"it counts {many} devices, but lists {len(listing.rows)}",))
    return with_driver(listing, driver)


def uuids(text: str) -> Mapping[int, str]:
    """Return the UUIDs that `mx-smi -L` lists, by index."""
    return {int(line[1]): line[4] for line in _LISTED.finditer(strip_controls(text)) if line[4]}


def _listed(text: str) -> Iterator[Row | str]:
    for line in _LISTED.finditer(text):
        index, name, state, uuid = int(line[1]), line[2], line[3], line[4]
        if state != "Available":
            yield f"GPU {index} ({name}) is not usable: {state}"
        elif not uuid:
            yield f"GPU {index} ({name}) has no UUID: the line was cut"
        elif _OURS.match(name):
            yield Row(device=Device(index=index, chip=name, uuid=uuid))


def _head(parts: list[str]) -> tuple[int, str, str | None] | None:
    name = _NAME.fullmatch(parts[0])
    bus = next((place for place, part in enumerate(parts) if BUS.fullmatch(part)), None)
    if name is None or bus is None:
        return None
    gpu = re.match(r"\d+\b", parts[1]) if bus > 1 else None
    (percent,) = search(r"(\d+)%", parts[bus + 1]) if bus + 1 < len(parts) else (None,)
    return int(gpu[0] if gpu else name[1]), name[2], percent


def _body(head: tuple[int, str, str | None], parts: list[str], after: list[str]) -> Row | str | None:
    index, name, percent = head
    line = " | ".join(parts)
    (state,) = search(r"(Not Available\S*)", line)
    if state:
        return f"GPU {index} ({name}) is not usable: {state}"
    memory = next((amounts for part in parts if (amounts := parse_memory(part))), None)
    if memory is None:
        return None
    power = next((watts for part in parts if any(watts := parse_power(part))), (None, None))
    return Row(
        device=Device(index=index, chip=name, memory_bytes=int(memory[1])),
        reading=reading(
            used_bytes=memory[0],
            watts=power[0],
            limit_watts=power[1],
            celsius=search(r"(\d+)C\b", line)[0],
            percent=percent,
        ),
    )


def topology(option: str = "-m") -> str:
    """Return the matrix of links that the management tool prints: for devices (-m), or for devices and adapters
    (-n)."""
    return next((text for tool in TOOLS if (text := tool_output(tool, "topo", option))), "")


def adapters(root: Path = Path("/")) -> float | None:
    """Return each device's share of the rate of this machine's network adapters in bytes per second, or None if
    unknown."""
    text = topology("-n")
    matrix = read_matrix(text)
    return adapter_share(matrix, text, root) if matrix else None


class MetaxDetector(DeviceDetector):
    """A detector that runs whichever of the two tools is installed."""

    def matrix(self) -> str:
        return topology("-n")


DETECTOR = MetaxDetector(
    vendor="metax",
    tool="mx-smi",
    listing=list_with(read, *TOOLS),
    visible=("MACA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    own_variables=("MACA_",),
    device_file=DEVICE_FILE,
    pci_vendor=PCI_VENDOR,
    torch_device="cuda",
    trusts=lambda report: "+metax" in report.version or all(OWN_NAME.match(each.chip) for each in report.devices),
    uuids=lambda: next((found for tool in TOOLS if (found := uuids(tool_output(tool, "-L") or ""))), {}),
    topology=(TOOLS[0], "topo", "-n"),
)
