"""Finds Moore Threads GPUs. torch_musa adds torch.musa; with torchada, torch.cuda uses these GPUs too."""

from flagcore_vendorkit.detection import DeviceDetector, list_with

from flagcore_mthreads import smi

PCI_VENDOR = 0x1ED5
"""gpustack/runtime gpustack_runtime/detector/mthreads.py @88026d62; `lspci -d 1ed5:` in the vendor's vGPU guide."""

DETECTOR = DeviceDetector(
    vendor="mthreads",
    tool="mthreads-gmi",
    listing=list_with(smi.read, "mthreads-gmi", processes=smi.processes),
    visible=("MUSA_VISIBLE_DEVICES",),
    vendor_variables=("GEMS_VENDOR", "FLAGGEMS_VENDOR", "GEMS_BACKEND", "FLAGGEMS_BACKEND"),
    own_variables=("MUSA_", "MTHREADS_"),
    device_file="dev/mtgpu.[0-9]*",
    pci_vendor=PCI_VENDOR,
    pci_classes=("0x0302", "0x12"),  # without VGA controllers (0x0300), as for other vendors
    torch_device="musa",
    torch_attributes=("musa",),
    topology=("mthreads-gmi", "topo", "-m"),
    trusts=lambda report: "musa" in report.attributes,
)
