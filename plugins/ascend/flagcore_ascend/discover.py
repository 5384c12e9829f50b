"""Finds Ascend NPUs. torch_npu adds torch.npu; a module with two dies (910C, Atlas 300I Duo) counts as two devices."""

from flagcore_vendorkit.detection import DeviceDetector, list_with

from flagcore_ascend import smi

PCI_VENDOR = 0x19E5
"""gpustack/runtime gpustack_runtime/detector/ascend.py @88026d62. Huawei's display and network chips have the same PCI
vendor ID."""

DETECTOR = DeviceDetector(
    vendor="ascend",
    tool="npu-smi",
    listing=list_with(smi.read, "npu-smi info", processes=smi.processes),
    visible=("ASCEND_RT_VISIBLE_DEVICES",),
    vendor_variables=("GEMS_VENDOR", "FLAGGEMS_VENDOR", "GEMS_BACKEND", "FLAGGEMS_BACKEND"),
    own_variables=("ASCEND_", "HCCL_"),
    device_file="dev/davinci[0-9]*",
    pci_vendor=PCI_VENDOR,
    pci_classes=("0x12",),
    torch_device="npu",
    torch_attributes=("npu",),
    topology=("npu-smi", "info", "-t", "topo"),
    trusts=lambda report: "npu" in report.attributes,
)
