"""Finds Enflame GCUs. torch_gcu adds torch.gcu; with its transfer_to_gcu, torch.cuda uses these devices too.

Reads `efsmi -q`: one block of lines `name : value` per device. The table of `efsmi` lacks the memory in use.
"""

import re

from flagcore_vendorkit.detection import DeviceDetector, list_with
from flagcore_vendorkit.rows import UNITS, Listing, Row, listing_of, reading, strip_controls

from flagcore.domain.chip import Device

PCI_VENDOR = 0x1E36
"""`efsmi -q` of an S60 shows 1e36:c035 (rongxinzy/suanctl src/collectors/fixtures/efsmi_query.txt @9b70406d)."""

TITLE = "Enflame System Management Interface"

_LINE = re.compile(r"(?m)^ +(\S[^:\n]*?) *: *(.*?) *$")


def read(text: str) -> Listing:
    """Return the devices in the output of `efsmi -q`. Those that are not healthy are left out."""
    title, *blocks = re.split(r"(?m)^DEV ID +(\d+) *$", strip_controls(text))
    if TITLE not in title:
        return Listing()
    return listing_of(_device(int(index), block) for index, block in zip(blocks[::2], blocks[1::2], strict=True))


def _device(index: int, block: str) -> Row | str:
    fields = dict(reversed(_LINE.findall(block)))  # of fields that occur twice, the first one

    def figure(*names: str) -> str | None:
        words = (fields[name].split() for name in names if name in fields)
        return next((word[0] for word in words if word), None)

    name, total = fields.get("Dev Name"), figure("Total Size", "Mem Size")
    used, reserved = (word or "" for word in (figure("Used Size", "Mem Usage"), figure("Reserved Size")))
    if not name or total is None or not total.isdigit():
        return f"unknown format (please report it): DEV ID {index}"
    if fields.get("Health", "True") != "True":
        return f"GCU {index} ({name}) is not healthy"
    held = float(used) + float(reserved if reserved.isdigit() else 0) if used.isdigit() else None
    return Row(
        device=Device(index=index, chip=name, memory_bytes=int(total) * UNITS["MiB"], driver=fields.get("Ver", "")),
        reading=reading(
            used_bytes=None if held is None else held * UNITS["MiB"],
            watts=figure("Cur Power"),
            limit_watts=figure("Power Capa"),
            celsius=figure("GCU Temp"),
            percent=figure("GCU Usage"),
        ),
    )


DETECTOR = DeviceDetector(
    vendor="enflame",
    tool="efsmi",
    listing=list_with(read, "efsmi -q"),
    visible=("TOPS_VISIBLE_DEVICES",),
    own_variables=("TOPS_", "ENFLAME_"),
    device_file="dev/gcu[0-9]*",
    pci_vendor=PCI_VENDOR,
    pci_classes=("0x0302", "0x12"),
    torch_device="gcu",
    torch_attributes=("gcu",),
    topology=("efsmi", "--topo", "-m"),
    trusts=lambda report: "gcu" in report.attributes,
)
