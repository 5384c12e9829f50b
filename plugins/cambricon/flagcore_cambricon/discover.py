"""Finds Cambricon MLUs.

With torch_mlu's gpu_migration, torch.cuda also lists MLUs; therefore only torch.mlu is used. An MLU370-X8 card has two
devices.
"""

from flagcore_vendorkit.detection import DeviceDetector, list_with

from flagcore_cambricon import smi

PCI_VENDOR = 0xCABC
"""Source: gpustack/runtime gpustack_runtime/detector. jklincn/cambricon-mlu-driver lists the devices 0370, 0580 and
0590."""

DETECTOR = DeviceDetector(
    vendor="cambricon",
    tool="cnmon",
    listing=list_with(smi.read, "cnmon"),
    visible=("MLU_VISIBLE_DEVICES",),
    vendor_variables=("GEMS_VENDOR", "FLAGGEMS_VENDOR", "GEMS_BACKEND", "FLAGGEMS_BACKEND"),
    own_variables=("MLU_", "CNCL_", "NEUWARE_"),
    device_file="dev/cambricon_dev[0-9]*",
    pci_vendor=PCI_VENDOR,
    torch_device="mlu",
    torch_attributes=("mlu",),
    topology=("cnmon", "topo", "-m"),
    trusts=lambda report: "mlu" in report.attributes,
)
