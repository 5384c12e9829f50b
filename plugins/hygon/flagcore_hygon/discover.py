"""Finds Hygon DCUs with hy-smi. DTK's torch uses the device name cuda."""

from flagcore_vendorkit.detection import DeviceDetector, list_with
from flagcore_vendorkit.machine import TorchReport

from flagcore_hygon import smi

PCI_VENDOR = 0x1D94
"""gpustack/runtime gpustack_runtime/detector/hygon.py @88026d62."""
FIELDS = (
    "--showproductname --showmeminfo vram --showuse --showpower --showtemp --showuniqueid --showdriverversion --json"
)


def _is_own_torch(report: TorchReport) -> bool:
    return "dtk" in report.version or "+das" in report.version or all(smi.is_dcu(each.chip) for each in report.devices)


DETECTOR = DeviceDetector(
    vendor="hygon",
    tool="hy-smi",
    # The driver does not add its folder to PATH.
    listing=list_with(smi.read, f"hy-smi {FIELDS}", f"/opt/hyhal/bin/hy-smi {FIELDS}"),
    visible=("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    outer="ROCR_VISIBLE_DEVICES",
    empty_is_unset=True,
    vendor_variables=("GEMS_VENDOR", "FLAGGEMS_VENDOR", "GEMS_BACKEND", "FLAGGEMS_BACKEND"),
    device_file="dev/kfd",
    pci_vendor=PCI_VENDOR,
    pci_classes=("0x0380", "0x0302", "0x0b40", "0x12"),  # lspci calls them display controllers or co-processors
    torch_device="cuda",
    trusts=_is_own_torch,
)
