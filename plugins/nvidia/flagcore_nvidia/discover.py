"""Finds NVIDIA GPUs. Other vendors' torch also uses the device name cuda, and their drivers may contain an nvidia-smi,
so PCI IDs and names identify the devices."""

import time

from flagcore_vendorkit.detection import DeviceDetector
from flagcore_vendorkit.machine import query_tool, tool_output
from flagcore_vendorkit.rows import Listing

from flagcore.domain.chip import DeviceUse
from flagcore_nvidia import smi


def _query(fields: tuple[str, ...], timeout_seconds: float) -> Listing:
    """Return the devices with `fields` from a CSV query, or the devices of the table if nvidia-smi does not support a
    field."""
    query = ("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    start = time.monotonic()
    found = query_tool(lambda text: smi.read(text, fields), *query, timeout_seconds=timeout_seconds) or Listing()
    if found.rows or not found.left_out or time.monotonic() - start >= timeout_seconds:
        return found
    table = query_tool(smi.read, "nvidia-smi", timeout_seconds=timeout_seconds)
    return table if table is not None and table.rows else found


def _uses(timeout_seconds: float) -> dict[int, DeviceUse]:
    def run_query(what: str, fields: tuple[str, ...]) -> str:
        query = ("nvidia-smi", f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits")
        return tool_output(*query, timeout_seconds=timeout_seconds) or ""

    devices = run_query("gpu", smi.USE_FIELDS) or run_query(
        "gpu", smi.USE_FIELDS[:3]
    )  # older drivers do not report a pending MIG mode
    return smi.uses(devices, run_query("compute-apps", smi.PROCESS_FIELDS))


DETECTOR = DeviceDetector(
    vendor="nvidia",
    tool="nvidia-smi",
    listing=lambda seconds: _query(smi.FIELDS, seconds),
    reading=lambda seconds: _query(smi.READING_FIELDS, seconds),
    visible=("CUDA_VISIBLE_DEVICES",),
    vendor_variables=("GEMS_VENDOR", "FLAGGEMS_VENDOR", "GEMS_BACKEND", "FLAGGEMS_BACKEND"),
    device_file="dev/nvidia[0-9]*",
    pci_vendor=0x10DE,
    pci_classes=("0x0302", "0x12"),  # without VGA controllers: the GPU of a desktop may only drive its screen
    torch_device="cuda",
    torch_attributes=("corex", "mlu", "musa", "npu"),  # a torch with one of these is another vendor's build
    trusts=lambda report: not report.attributes and all(smi.is_nvidia(each.chip) for each in report.devices),
    topology=("nvidia-smi", "topo", "-m"),
    uses=_uses,
)
