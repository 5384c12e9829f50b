"""Finds AMD GPUs with rocm-smi, or with amd-smi if rocm-smi is missing. ROCm's torch uses the device name cuda.

Reads the JSON of rocm-smi (one object per card) and of amd-smi (`static`, and `metric` for readings).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from flagcore_vendorkit.detection import DeviceDetector, list_with
from flagcore_vendorkit.machine import tool_output
from flagcore_vendorkit.rows import UNITS, Listing, Row, listing_of, parse_json, reading

from flagcore.domain.chip import Device

PCI_VENDOR = 0x1002
"""gpustack/runtime gpustack_runtime/detector/amd.py @88026d62."""
ROCM_SMI = (
    "rocm-smi --showproductname --showmeminfo vram --showuse --showpower --showtemp --showuniqueid "
    "--showdriverversion --json"
)
AMD_SMI = "amd-smi static --asic --driver --vram --json"
METRICS = ("amd-smi", "metric", "--mem-usage", "--power", "--temperature", "--usage", "--json")

_NAME = re.compile(r"instinct|\bMI\d{2,3}|radeon (ai )?pro|radeon rx", re.IGNORECASE)
"""Names of accelerators and discrete GPUs, but not of graphics units of a CPU, such as `Radeon 780M`."""
_CARD = re.compile(r"card(\d+)")
_UNITS = {**UNITS, "KB": 2**10, "MB": 2**20, "GB": 2**30}
"""amd-smi prints MB but means MiB: 196592 MB of an MI300X are 206141652992 bytes."""


def is_amd(name: str) -> bool:
    """Return whether `name` is the name of an AMD accelerator or discrete GPU."""
    return _NAME.search(name) is not None


def read(text: str) -> Listing:
    """Return the devices in the JSON of rocm-smi or of `amd-smi static`, each by its printed number."""
    found = parse_json(text)
    if isinstance(found, dict) and any(_CARD.fullmatch(key) for key in found):
        return listing_of(_cards(found))
    return listing_of(_entries(found))


def read_metrics(text: str) -> Mapping[int, Mapping[str, float]]:
    """Return the telemetry in the output of `amd-smi metric --json`, by device."""
    return {entry["gpu"]: _reading(entry) for entry in _list(parse_json(text)) if isinstance(entry.get("gpu"), int)}


def _cards(found: Mapping[str, Any]) -> Iterator[Row | str]:
    driver = _word(found.get("system"), "Driver version")
    for key, card in found.items():
        number = _CARD.fullmatch(key)
        if number is None:
            continue
        name = _word(card, "Card Series", "Card series", "Device Name")
        total, used = (_word(card, f"VRAM Total {word}Memory (B)") for word in ("", "Used "))
        if name and not is_amd(name):
            continue
        if not name or not total.isdigit() or total == "0":
            yield f"{key} has no name or no memory: it hangs, or the driver did not start it"
        else:
            unique = _word(card, "Unique ID")
            yield Row(
                device=Device(
                    index=int(number[1]),
                    chip=name,
                    memory_bytes=int(total),
                    driver=driver,
                    uuid=f"GPU-{unique.removeprefix('0x')}" if unique.startswith("0x") else "",
                ),
                reading=reading(
                    used_bytes=float(used) if used.isdigit() else None,
                    watts=_word(
                        card, "Current Socket Graphics Package Power (W)", "Average Graphics Package Power (W)"
                    ),
                    celsius=_word(card, "Temperature (Sensor junction) (C)", "Temperature (Sensor edge) (C)"),
                    percent=_word(card, "GPU use (%)"),
                ),
            )


def _entries(found: object) -> Iterator[Row | str]:
    for entry in _list(found):
        index, name = entry.get("gpu"), _word(entry.get("asic"), "market_name")
        if not isinstance(index, int):
            continue
        total = _amount(entry.get("vram"), "size")
        if total is None or not name:
            yield f"GPU {index} has no name or no memory: it hangs, or the driver did not start it"
        elif is_amd(name):
            driver = _word(entry.get("driver"), "version", "driver_version")
            yield Row(device=Device(index=index, chip=name, memory_bytes=int(total), driver=driver))


def _reading(entry: Mapping[str, Any]) -> Mapping[str, float]:
    power, temperature, usage = (entry.get(key) for key in ("power", "temperature", "usage"))
    words = (_value(power, "socket_power"), _value(temperature, "hotspot"), _value(usage, "gfx_activity"))
    return reading(
        used_bytes=_amount(entry.get("mem_usage"), "used_vram"), watts=words[0], celsius=words[1], percent=words[2]
    )


def _list(found: object) -> list[dict[str, Any]]:
    entries = found.get("gpu_data", [found]) if isinstance(found, dict) else found
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def _word(fields: object, *names: str) -> str:
    found = (fields.get(name) for name in names) if isinstance(fields, dict) else ()
    return next((str(word) for word in found if word not in (None, "N/A")), "")


def _value(fields: object, name: str) -> str:
    """Return a number that is printed alone or as `{"value": 1, "unit": "W"}`."""
    found = fields.get(name) if isinstance(fields, dict) else None
    return str(found.get("value", "") if isinstance(found, dict) else found)


def _amount(fields: object, name: str) -> float | None:
    word = _value(fields, name)
    unit = fields[name].get("unit", "MB") if isinstance(fields, dict) and isinstance(fields.get(name), dict) else "MB"
    return float(word) * _UNITS[unit] if re.fullmatch(r"[1-9]\d*", word) and unit in _UNITS else None


_devices = list_with(read, ROCM_SMI, AMD_SMI)


def _with_telemetry(timeout_seconds: float) -> Listing:
    """Return the devices with their telemetry. amd-smi prints telemetry with a separate command."""
    found = _devices(timeout_seconds)
    if not found.rows or any(row.reading for row in found.rows):
        return found
    metrics = read_metrics(tool_output(*METRICS, timeout_seconds=timeout_seconds) or "")
    return replace(
        found, rows=tuple(replace(row, reading=metrics.get(row.device.index, row.reading)) for row in found.rows)
    )


class AmdDetector(DeviceDetector):
    """A detector that reads the links from rocm-smi's matrix, which contains 0 on its diagonal."""

    def matrix(self) -> str:
        return re.sub(r"(?<=\s)0(?=\s)", "X", super().matrix())


DETECTOR = AmdDetector(
    vendor="amd",
    tool="rocm-smi",
    listing=_devices,
    reading=_with_telemetry,
    visible=("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    outer="ROCR_VISIBLE_DEVICES",
    empty_is_unset=True,
    device_file="dev/kfd",
    pci_vendor=PCI_VENDOR,
    pci_classes=("0x0380", "0x12"),  # without VGA controllers (0x0300), as for other vendors
    torch_device="cuda",
    trusts=lambda report: "+rocm" in report.version or all(is_amd(each.chip) for each in report.devices),
    topology=("rocm-smi", "--showtopotype"),
)
