"""Finds Enflame GCUs. torch_gcu adds torch.gcu; with its transfer_to_gcu, torch.cuda uses these devices too."""

from flagcore_vendorkit.detection import DeviceDetector, list_with

from flagcore_enflame import smi

PCI_VENDOR = 0x1E36
"""`efsmi -q` of an S60 shows 1e36:c035 (rongxinzy/suanctl src/collectors/fixtures/efsmi_query.txt @9b70406d)."""

DETECTOR = DeviceDetector(
    vendor="enflame",
    tool="efsmi",
    listing=list_with(smi.read, "efsmi -q"),
    visible=("TOPS_VISIBLE_DEVICES",),
    vendor_variables=("GEMS_VENDOR", "FLAGGEMS_VENDOR", "GEMS_BACKEND", "FLAGGEMS_BACKEND"),
    own_variables=("TOPS_", "ENFLAME_"),
    device_file="dev/gcu[0-9]*",
    pci_vendor=PCI_VENDOR,
    pci_classes=("0x0302", "0x12"),
    torch_device="gcu",
    torch_attributes=("gcu",),
    topology=("efsmi", "--topo", "-m"),
    trusts=lambda report: "gcu" in report.attributes,
)
