"""Finds MetaX GPUs. MetaX's torch uses the device name cuda: its version or the devices' names decide."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from flagcore.vendorkit.detection import DeviceDetector, list_with
from flagcore.vendorkit.machine import TorchReport
from flagcore.vendorkit.matrix import adapter_share, read_matrix
from flagcore.vendorkit.smi import tool_output
from flagcore_metax import smi

NAME = re.compile(r"MetaX |MX[CNX]\d")
DEVICE_FILE = "dev/mxcd"
PCI_VENDOR = 0x9999
"""From an lspci of a C500 node (9999:4001): wangzheng422/docker_env 2025.12.metax.mccl.perf.debug.md."""
ADAPTERS = ("mx-smi", "topo", "-n")


def adapters(root: Path = Path("/")) -> float | None:
    """Return each device's share of this machine's network adapters in bytes per second; None if unknown."""
    text = tool_output(*ADAPTERS) or ""
    matrix = read_matrix(text)
    return adapter_share(matrix, text, root) if matrix else None


def _trusts(report: TorchReport) -> bool:
    return "+metax" in report.version or all(NAME.match(each.chip) for each in report.devices)


def _uuids() -> Mapping[int, str]:
    return smi.uuids(tool_output("mx-smi", "-L") or "")


DETECTOR = DeviceDetector(
    vendor="metax",
    tool="mx-smi",
    listing=list_with(smi.read, "mx-smi", "ht-smi"),
    visible=("MACA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    vendor_variables=("GEMS_VENDOR", "FLAGGEMS_VENDOR", "GEMS_BACKEND", "FLAGGEMS_BACKEND"),
    own_variables=("MACA_",),
    device_file=DEVICE_FILE,
    pci_vendor=PCI_VENDOR,
    trusts=_trusts,
    uuids=_uuids,
    topology=ADAPTERS,
)
