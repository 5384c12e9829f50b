"""Finds Iluvatar GPUs. CoreX's torch uses the device name cuda, so its version, an attribute or the devices' names
identify it.

A card with two chips (BI-V150, MR-V100 DUO) has two devices.
"""

from flagcore_vendorkit.detection import DeviceDetector, list_with
from flagcore_vendorkit.machine import TorchReport, tool_output

from flagcore_iluvatar import smi

PCI_VENDOR = 0x1E3E
"""Source: gpustack/runtime gpustack_runtime/detector. The ID 1e3e:0002 is an MR-V100 (ywh555hhh/llaisys notes)."""


def _is_own_torch(report: TorchReport) -> bool:
    named = all("iluvatar" in each.chip.casefold() for each in report.devices)
    return named or "corex" in report.attributes or "+corex" in report.version


DETECTOR = DeviceDetector(
    vendor="iluvatar",
    tool="ixsmi",
    listing=list_with(smi.read, "ixsmi"),
    visible=("CUDA_VISIBLE_DEVICES", "ILUVATAR_VISIBLE_DEVICES"),
    vendor_variables=("GEMS_VENDOR", "FLAGGEMS_VENDOR", "GEMS_BACKEND", "FLAGGEMS_BACKEND"),
    device_file="dev/iluvatar[0-9]*",
    pci_vendor=PCI_VENDOR,
    torch_device="cuda",
    torch_attributes=("corex",),
    trusts=_is_own_torch,
    uuids=lambda: smi.uuids(tool_output("ixsmi", "--query-gpu=index,uuid", "--format=csv,noheader") or ""),
    topology=("ixsmi", "topo", "-m"),
)
