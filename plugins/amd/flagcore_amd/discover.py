"""Finds AMD GPUs with rocm-smi, or with amd-smi if rocm-smi is missing. ROCm's torch uses the device name cuda."""

import re

from flagcore_vendorkit.detection import DeviceDetector, list_with
from flagcore_vendorkit.machine import tool_output
from flagcore_vendorkit.rows import Listing

from flagcore_amd import smi

PCI_VENDOR = 0x1002
"""gpustack/runtime gpustack_runtime/detector/amd.py @88026d62."""
ROCM_SMI = (
    "rocm-smi --showproductname --showmeminfo vram --showuse --showpower --showtemp --showuniqueid "
    "--showdriverversion --json"
)
AMD_SMI = "amd-smi static --asic --driver --vram --json"
METRICS = ("amd-smi", "metric", "--mem-usage", "--power", "--temperature", "--usage", "--json")

_list = list_with(smi.read, ROCM_SMI, AMD_SMI)


def _read(timeout_seconds: float) -> Listing:
    """Return the devices with their telemetry. amd-smi prints telemetry with a separate command."""
    found = _list(timeout_seconds)
    if not found.rows or any(row.reading for row in found.rows):
        return found
    return smi.with_metrics(found, smi.read_metrics(tool_output(*METRICS, timeout_seconds=timeout_seconds) or ""))


class AmdDetector(DeviceDetector):
    """A detector that reads the links from rocm-smi's matrix, which contains 0 on its diagonal."""

    def matrix(self) -> str:
        return re.sub(r"(?<=\s)0(?=\s)", "X", super().matrix())


DETECTOR = AmdDetector(
    vendor="amd",
    tool="rocm-smi",
    listing=_list,
    reading=_read,
    visible=("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    outer="ROCR_VISIBLE_DEVICES",
    empty_is_unset=True,
    vendor_variables=("GEMS_VENDOR", "FLAGGEMS_VENDOR", "GEMS_BACKEND", "FLAGGEMS_BACKEND"),
    device_file="dev/kfd",
    pci_vendor=PCI_VENDOR,
    pci_classes=("0x0380", "0x12"),  # without VGA controllers (0x0300), as for other vendors
    torch_device="cuda",
    trusts=lambda report: "+rocm" in report.version or all(smi.is_amd(each.chip) for each in report.devices),
    topology=("rocm-smi", "--showtopotype"),
)
