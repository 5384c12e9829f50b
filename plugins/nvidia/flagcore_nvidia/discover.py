"""Finds NVIDIA GPUs. Other vendors' torch also uses the device name cuda, and their drivers may contain an nvidia-smi,
so PCI IDs and names identify the devices.

Reads the output of nvidia-smi: CSV queries, with a header or with known fields, and the table.
"""

import re
import time
from collections.abc import Iterator, Mapping, Sequence

from flagcore_vendorkit.detection import DeviceDetector
from flagcore_vendorkit.machine import query_tool, tool_output
from flagcore_vendorkit.rows import (
    UNITS,
    Listing,
    Named,
    Row,
    blocked_reason,
    listing_of,
    reading,
    search,
    strip_controls,
    table_reader,
    usual_row,
)

from flagcore.domain.chip import Device, DeviceUse

FIELDS = ("index", "name", "memory.total", "driver_version", "uuid", "pci.device_id", "mig.mode.current")
READING_FIELDS = (
    *FIELDS,
    *("memory.used", "power.draw", "power.limit", "temperature.gpu", "utilization.gpu", "clocks.sm"),
)
MEMORY_FIELDS = ("memory.used", "memory.total")
USE_FIELDS = ("index", "uuid", "compute_mode", "mig.mode.current", "mig.mode.pending")
PROCESS_FIELDS = ("gpu_uuid", "pid", "process_name", "used_memory")
TITLE = "NVIDIA-SMI"
PCI_VENDOR = 0x10DE
"""NVIDIA's vendor ID, the last four digits of pci.device_id. Drivers of other vendors contain an nvidia-smi that lists
their devices."""
INSTANCES = "is divided into instances (MIG), so a process cannot use all its memory"

_NVIDIA = re.compile(
    r"(NVIDIA|Tesla|GeForce|Quadro|TITAN|Titan|GRID|RTX|GTX|Jetson|Orin|Thor)\b|(A|H|L|T|V|P|GB|GH|B)\d{1,3}S?\b"
    r"(?<!\bP800)"  # a card of Kunlunxin
)
_LISTED = re.compile(r"(?m)^GPU (\d+): (\S.*?) \(UUID: (\S+)\)[ \t]*((?:\n[ \t]+MIG .*)*)")
"""A GPU in the output of `-L`, with the lines of its instances."""
_NAME = re.compile(r"(\d+)\s+(\S.*?)\s+(?:On|Off|N/A|WDDM|TCC|MCDM)")


def read(text: str, fields: Sequence[str] = FIELDS) -> Listing:
    """Return the devices of a CSV query for `fields`, of the table, or of `-L`, whichever `text` is.

    Devices without a name, devices divided into instances, and devices of other vendors (by PCI ID or name) are left
    out.
    """
    text = strip_controls(text)
    queried = _of_table(text).or_else(lambda: listing_of(_queried(_csv_rows(text, fields))))
    return queried.or_else(lambda: listing_of(_queried(_listed(text))))


def _listed(text: str) -> list[dict[str, str]]:
    """Return the devices of `-L` as lines of a CSV query."""
    names = ("index", "name", "uuid", "mig.mode.current")
    found = ((*row[:3], "Enabled" if row[3] else "") for row in _LISTED.findall(text))
    return [dict(zip(names, row, strict=True)) for row in found]


def _csv_rows(text: str, fields: Sequence[str]) -> list[dict[str, str]]:
    """Return the lines of a CSV query by field. A header line, if there is one, has the names of the fields."""
    rows = []
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) > 1 and "name" in words:
            fields = [word.partition(" [")[0] for word in words]
        elif len(words) == len(fields):
            rows.append(dict(zip(fields, words, strict=True)))
    return rows


def _row(line: Mapping[str, str], place: int) -> Row | str:
    """Return the device of one line of a CSV query, or why it cannot be used. `place` is the index if none is given."""
    index, name = line.get("index", str(place)), line.get("name", "")
    if not index.isdigit() or not name or name.startswith("[") or "ERR!" in name:
        return f"device {index} has no name: {', '.join(line.values())}"

    def figure(field: str) -> str | None:
        return search(r"^(\d+(?:\.\d+)?)(?: \w+)?$", line.get(field, ""))[0]

    used, total = (None if word is None else float(word) * UNITS["MiB"] for word in map(figure, MEMORY_FIELDS))
    return Row(
        device=Device(
            index=int(index),
            chip=name,
            memory_bytes=None if total is None else int(total),  # it is [N/A] if the chip shares the host's memory
            driver=line.get("driver_version", ""),
            uuid=line.get("uuid", ""),
        ),
        reading=reading(
            used_bytes=used,
            watts=figure("power.draw"),
            limit_watts=figure("power.limit"),
            celsius=figure("temperature.gpu"),
            percent=figure("utilization.gpu"),
            megahertz=figure("clocks.sm"),
        ),
    )


def _queried(lines: Sequence[Mapping[str, str]]) -> Iterator[Row | str]:
    foreign = []
    for place, line in enumerate(lines):
        row = _row(line, place)
        vendor = line.get("pci.device_id")
        if isinstance(row, str):
            yield row
        elif not (is_nvidia(row.device.chip) if vendor is None else vendor.upper().endswith(f"{PCI_VENDOR:X}")):
            foreign.append(row.device.chip)
        elif line.get("mig.mode.current") == "Enabled" or " MIG " in row.device.chip:
            yield f"GPU {row.device.index} ({row.device.chip}) {INSTANCES}"
        else:
            yield row
    if foreign:
        yield f"{len(foreign)} devices are not NVIDIA's: {', '.join(dict.fromkeys(foreign))}"


def _body(head: Named, parts: list[str], after: list[str]) -> Row | str | None:
    index, name, _ = head
    shares_host = len(parts) == 3 and parts[1] in ("Not Supported", "N/A")
    row = usual_row(index, name, parts, shares_host=shares_host)
    if row is None:
        return None
    if not is_nvidia(name):
        return f"device {index} ({name}) is not NVIDIA's, or is lost"
    if "ERR!" in parts[0]:
        return f"GPU {index} ({name}) reports errors (ERR!) instead of its state"
    if len(after) == 3 and after[2] == "Enabled" and not after[0]:
        return f"GPU {index} ({name}) {INSTANCES}"
    return row


_of_table = table_reader(TITLE, _NAME, _body)


def is_nvidia(name: str) -> bool:
    """Return whether `name` has the form of the device names that NVIDIA's driver reports."""
    return _NVIDIA.match(name) is not None


def uses(devices: str, processes: str) -> dict[int, DeviceUse]:
    """Return the use of each GPU, from CSV queries for USE_FIELDS and PROCESS_FIELDS.

    In a container, processes of other containers may be missing.
    """
    holders: dict[str, list[str]] = {}
    for line in strip_controls(processes).splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) >= len(PROCESS_FIELDS) and words[1].isdigit():
            uuid, pid, *name, used = words
            amount = f" ({int(used) / 1024:.1f} GiB)" if used.isdigit() else ""
            holders.setdefault(uuid, []).append(f"{pid} {', '.join(name).rpartition('/')[2]}{amount}")
    text = strip_controls(devices)
    return {
        int(row["index"]): DeviceUse(
            processes=tuple(held), blocked=blocked_reason(row["compute_mode"], held), pending=_pending(row)
        )
        for row in _csv_rows(text, USE_FIELDS) or _csv_rows(text, USE_FIELDS[:3])
        if row["index"].isdigit()
        for held in [holders.get(row["uuid"], [])]
    }


def _pending(device: Mapping[str, str]) -> str:
    """Return the pending changes that the next reset of a GPU applies. The result is empty if there are none."""
    now, later = (device.get(f"mig.mode.{when}", "") for when in ("current", "pending"))
    return f"the next reset sets MIG to {later}" if now != later and later in ("Enabled", "Disabled") else ""


def _query(fields: tuple[str, ...], timeout_seconds: float) -> Listing:
    """Return the devices with `fields` from a CSV query, or the devices of the table if nvidia-smi does not support a
    field."""
    query = ("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    start = time.monotonic()
    found = query_tool(lambda text: read(text, fields), *query, timeout_seconds=timeout_seconds) or Listing()
    if found.rows or not found.left_out or time.monotonic() - start >= timeout_seconds:
        return found
    table = query_tool(read, "nvidia-smi", timeout_seconds=timeout_seconds)
    return table if table is not None and table.rows else found


def _query_uses(timeout_seconds: float) -> dict[int, DeviceUse]:
    def run_query(what: str, fields: tuple[str, ...]) -> str:
        query = ("nvidia-smi", f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits")
        return tool_output(*query, timeout_seconds=timeout_seconds) or ""

    # older drivers do not report a pending MIG mode
    devices = run_query("gpu", USE_FIELDS) or run_query("gpu", USE_FIELDS[:3])
    return uses(devices, run_query("compute-apps", PROCESS_FIELDS))


DETECTOR = DeviceDetector(
    vendor="nvidia",
    tool="nvidia-smi",
    listing=lambda seconds: _query(FIELDS, seconds),
    reading=lambda seconds: _query(READING_FIELDS, seconds),
    visible=("CUDA_VISIBLE_DEVICES",),
    device_file="dev/nvidia[0-9]*",
    pci_vendor=PCI_VENDOR,
    pci_classes=("0x0302", "0x12"),  # without VGA controllers: the GPU of a desktop may only drive its screen
    torch_device="cuda",
    torch_attributes=("corex", "mlu", "musa", "npu"),  # a torch with one of these is another vendor's build
    trusts=lambda report: not report.attributes and all(is_nvidia(each.chip) for each in report.devices),
    topology=("nvidia-smi", "topo", "-m"),
    uses=_query_uses,
)
