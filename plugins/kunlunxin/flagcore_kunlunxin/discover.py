"""Finds Kunlunxin XPUs with xpu-smi. The vendor's torch uses the device name cuda and may call a device just GPU."""

from flagcore_vendorkit.detection import DeviceDetector, list_with

from flagcore_kunlunxin import smi

PCI_VENDOR = 0x1D22
"""Baidu's PCI vendor ID. The PCI ID database lists the cards under it."""


DETECTOR = DeviceDetector(
    vendor="kunlunxin",
    tool="xpu-smi",
    listing=list_with(smi.read, "xpu-smi", "xpu_smi", processes=smi.processes),
    visible=("XPU_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    vendor_variables=("GEMS_VENDOR", "FLAGGEMS_VENDOR", "GEMS_BACKEND", "FLAGGEMS_BACKEND"),
    own_variables=("XMLIR_", "BKCL_", "XDNN_"),
    device_file="dev/xpu[0-9]*",
    pci_vendor=PCI_VENDOR,
    torch_device="cuda",
    topology=("xpu-smi", "topo", "-m"),
    trusts=lambda report: all(each.chip == "GPU" or smi.is_xpu(each.chip) for each in report.devices),
)
