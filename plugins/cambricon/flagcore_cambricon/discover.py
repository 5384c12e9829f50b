"""Finds Cambricon MLUs.

With torch_mlu's gpu_migration, torch.cuda also lists MLUs; therefore only torch.mlu is used. An MLU370-X8 card has two
devices.

Reads the output of cnmon: the table and `cnmon info` of versions 1 to 5.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from flagcore_vendorkit.detection import DeviceDetector, list_with
from flagcore_vendorkit.rows import (
    UNITS,
    Listing,
    Row,
    listing_of,
    read_table,
    reading,
    search,
    strip_controls,
    usual_row,
    with_driver,
)

from flagcore.domain.chip import Device

PCI_VENDOR = 0xCABC
"""Source: gpustack/runtime gpustack_runtime/detector. jklincn/cambricon-mlu-driver lists the devices 0370, 0580 and
0590."""

TITLE = re.compile(r"\bCNMON v?\d")

_NAME = re.compile(r"(\d+)\s+(\S+)\s+(MLU[\w.-]+)(?:\s+\S+)?")


def read(text: str) -> Listing:
    """Return the devices of cnmon's table (card, virtual function, name and firmware, then memory) or of `cnmon info`.

    Devices without a number for memory, and virtual functions of other devices, are left out. Version 4 prints no PCI
    address, and repeats the driver in each line. `cnmon info` may be text or JSON.
    """
    text = strip_controls(text)
    if text.lstrip().startswith("{"):
        return listing_of(_objects(text))
    (driver,) = search(r"Driver\s+v(\d[\d.]*)", text)
    table = read_table(text, _head, _body) if TITLE.search(text) else Listing()
    return with_driver(table, driver).or_else(lambda: listing_of(_blocks(text)))


def _blocks(text: str) -> Iterator[Row | str]:
    """Yield the devices in the output of `cnmon info`, which prints a block per card with indented sections."""
    for index, block in re.findall(r"^Card (\d+)[ \t]*\n((?:[ \t]+.*\n?)*)", text, re.MULTILINE):
        (name,) = search(r"Product Name\s*:\s*(MLU[\w.-]+)", block)
        used, total = (
            search(rf"Physical Memory Usage\s*:?\s*\n(?:[ \t]+\w+\s*:.*\n)*?[ \t]+{word}\s*:\s*(\d+) MiB", block)[0]
            for word in ("Used", "Total")
        )
        if name and total:
            yield Row(
                device=Device(
                    index=int(index),
                    chip=name,
                    memory_bytes=int(total) * UNITS["MiB"],
                    driver=search(r"Driver\s*:\s*v(\d[\d.]*)", block)[0] or "",
                    uuid=search(r"UUID\s*:\s*([\w-]+)", block)[0] or "",
                ),
                reading=reading(
                    used_bytes=int(used) * UNITS["MiB"] if used else None,
                    watts=search(r"Power\s*:?\s*\n\s*Usage\s*:\s*(\d+(?:\.\d+)?) W", block)[0],
                    celsius=search(r"Temperature\s*:?\s*\n\s*(?:Board|Chip)\s*:\s*(\d+) C", block)[0],
                    percent=search(r"MLU Average\s*:\s*(\d+) %", block)[0],
                ),
            )
        else:
            yield f"card {index} has no MLU product name or no memory"


def _objects(text: str) -> Iterator[Row | str]:
    """Yield the devices in the JSON file that `cnmon info -j` writes."""
    try:
        cards = json.loads(text)["CnmonInfo"]
    except (ValueError, KeyError, TypeError):
        return
    for card in cards if isinstance(cards, list) else ():
        try:
            yield _object(card)
        except (ValueError, KeyError, TypeError):
            yield f"a card cannot be read: {json.dumps(card)[:80]}"


def _object(card: Mapping[str, Any]) -> Row:
    memory = card["PhysicalMemUsage"]
    return Row(
        device=Device(
            index=int(card["CardNum"]),
            chip=str(card["ProductName"]),
            memory_bytes=int(memory["Total"]) * UNITS["MiB"],
            uuid=str(card.get("UUID", "")),
        ),
        reading=reading(used_bytes=float(memory["Used"]) * UNITS["MiB"]),
    )


def _head(parts: list[str]) -> tuple[int, str, str, str, str | None] | None:
    name = _NAME.fullmatch(parts[0]) if len(parts) == 3 else None
    if name is None:
        return None
    (driver,) = search(r"\bv(\d[\d.]*)$", parts[1])
    return int(name[1]), name[2], name[3], driver or "", search(r"(\d+)%", parts[2])[0]


def _body(head: tuple[int, str, str, str, str | None], parts: list[str], after: list[str]) -> Row | str | None:
    index, function, name, own, percent = head
    if function != "/":
        return f"card {index} ({name}) is virtual function {function} of another"
    return usual_row(index, name, parts, driver=own, percent=percent, mode=" ".join(parts[2:]).rpartition(" ")[2])


DETECTOR = DeviceDetector(
    vendor="cambricon",
    tool="cnmon",
    listing=list_with(read, "cnmon"),
    visible=("MLU_VISIBLE_DEVICES",),
    own_variables=("MLU_", "CNCL_", "NEUWARE_"),
    device_file="dev/cambricon_dev[0-9]*",
    pci_vendor=PCI_VENDOR,
    torch_device="mlu",
    torch_attributes=("mlu",),
    topology=("cnmon", "topo", "-m"),
    trusts=lambda report: "mlu" in report.attributes,
)
