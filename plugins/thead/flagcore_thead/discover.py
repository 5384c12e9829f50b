"""Finds T-Head PPUs. SAIL's torch uses the device name cuda, so its version or the devices' names identify it."""

from flagcore_vendorkit.detection import DeviceDetector, list_with
from flagcore_vendorkit.machine import tool_output

from flagcore_thead import smi

PCI_VENDOR = 0x1DED
"""Alibaba's: gpustack/runtime gpustack_runtime/detector/thead.py @88026d62."""


DETECTOR = DeviceDetector(
    vendor="thead",
    tool="ppu-smi",
    listing=list_with(smi.read, "ppu-smi", processes=smi.processes),
    visible=("CUDA_VISIBLE_DEVICES",),
    vendor_variables=("GEMS_VENDOR", "FLAGGEMS_VENDOR", "GEMS_BACKEND", "FLAGGEMS_BACKEND"),
    own_variables=("PPU_", "PCCL_", "HGGC_"),
    device_file="dev/alixpu_ppu[0-9]*",
    pci_vendor=PCI_VENDOR,
    pci_classes=("0x0302", "0x12"),
    torch_device="cuda",
    trusts=lambda report: "+ppu" in report.version or all(smi.is_ppu(each.chip) for each in report.devices),
    uuids=lambda: smi.uuids(tool_output("ppu-smi", "-L") or ""),
    topology=("ppu-smi", "topo", "-m"),
)
