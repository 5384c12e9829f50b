"""Finds Hygon DCUs with hy-smi. DTK's torch uses the device name cuda.

Reads the JSON of hy-smi: one object per card, with units in the names of its fields.
"""

import re
from collections.abc import Iterator, Mapping

from flagcore_vendorkit.detection import DeviceDetector, list_with
from flagcore_vendorkit.machine import TorchReport
from flagcore_vendorkit.rows import UNITS, Listing, Row, listing_of, parse_json, reading, search, strip_controls

from flagcore.domain.chip import Device

PCI_VENDOR = 0x1D94
"""gpustack/runtime gpustack_runtime/detector/hygon.py @88026d62."""
FIELDS = (
    "--showproductname --showmeminfo vram --showuse --showpower --showtemp --showuniqueid --showdriverversion --json"
)

_NAME = re.compile(r"(BW\d*|[KZ]100(L|SM|_AI)?)\b")
_CARD = re.compile(r"card(\d+)")
_NO_COMMA = re.compile(r'(?<=[\w.)])""(?=\w)')
"""Matches the place of a missing comma: releases for DTK 26.04 omit the comma after a power value."""


def is_dcu(name: str) -> bool:
    """Return whether `name` is the name of a DCU. AMD's rocm-smi prints the same fields."""
    return _NAME.match(name) is not None


def read(text: str) -> Listing:
    """Return the devices in the JSON, each by its printed number."""
    text = strip_controls(text)
    driver = search(r"Driver [Vv]ersion\"?: *\"?([\w.+-]+)", text)[0] or ""
    found = parse_json(_NO_COMMA.sub('", "', text))
    return listing_of(_cards(found, driver) if isinstance(found, dict) else ())


def _cards(found: Mapping[str, object], driver: str) -> Iterator[Row | str]:
    for key, fields in found.items():
        number = _CARD.fullmatch(key)
        if number is None or not isinstance(fields, dict):
            continue
        card = {str(name): str(word) for name, word in fields.items()}
        name, total = card.get("Card Series", ""), _bytes(card, "vram Total Memory")
        if name and not is_dcu(name):
            continue
        if not name or not total:
            yield f"{key} has no name or no memory: it hangs, or the driver did not start it"
            continue
        unique = card.get("Unique ID", "")
        digits = unique.lower().removeprefix("0x")
        yield Row(
            device=Device(
                index=int(number[1]),
                chip=name,
                memory_bytes=int(total),
                driver=driver,
                uuid=f"GPU-{digits}" if re.fullmatch(r"[0-9a-f]{16}", digits) else unique,  # for HIP_VISIBLE_DEVICES
            ),
            reading=reading(
                used_bytes=_bytes(card, "vram Total Used Memory"),
                watts=card.get("Average Graphics Package Power (W)", ""),
                celsius=_first(card, *(f"Temperature (Sensor {place}) (C)" for place in ("junction", "core", "edge"))),
                percent=_first(card, "HCU use (%)", "DCU use (%)"),
            ),
        )


def _first(card: Mapping[str, str], *names: str) -> str:
    return next((card[name] for name in names if name in card), "")


def _bytes(card: Mapping[str, str], name: str) -> float | None:
    words = ((word, search(rf"(?i)^{name} \((\w+)\)$", key)[0]) for key, word in card.items())
    return next((float(word) * UNITS[unit] for word, unit in words if unit in UNITS and word.isdigit()), None)


def _is_own_torch(report: TorchReport) -> bool:
    return "dtk" in report.version or "+das" in report.version or all(is_dcu(each.chip) for each in report.devices)


DETECTOR = DeviceDetector(
    vendor="hygon",
    tool="hy-smi",
    # The driver does not add its folder to PATH.
    listing=list_with(read, f"hy-smi {FIELDS}", f"/opt/hyhal/bin/hy-smi {FIELDS}"),
    visible=("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    outer="ROCR_VISIBLE_DEVICES",
    empty_is_unset=True,
    device_file="dev/kfd",
    pci_vendor=PCI_VENDOR,
    pci_classes=("0x0380", "0x0302", "0x0b40", "0x12"),  # lspci calls them display controllers or co-processors
    torch_device="cuda",
    trusts=_is_own_torch,
)
