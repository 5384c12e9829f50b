"""Finds MetaX GPUs. MetaX's torch uses the device name cuda, so its version or the devices' names identify it."""

import re
from pathlib import Path

from flagcore_vendorkit.detection import DeviceDetector, list_with
from flagcore_vendorkit.machine import tool_output
from flagcore_vendorkit.rows import adapter_share, read_matrix

from flagcore_metax import smi

NAME = re.compile(r"MetaX |MX[CNX]\d")
DEVICE_FILE = "dev/mxcd"
PCI_VENDOR = 0x9999
"""From the output of lspci on a C500 node (9999:4001): wangzheng422/docker_env 2025.12.metax.mccl.perf.debug.md."""
TOOLS = ("mx-smi", "ht-smi")
"""The names of the management tool. Rebranded machines have the second one."""


def topology(option: str = "-m") -> str:
    """Return the matrix of links that the management tool prints: for devices (-m), or for devices and adapters
    (-n)."""
    return next((text for tool in TOOLS if (text := tool_output(tool, "topo", option))), "")


def adapters(root: Path = Path("/")) -> float | None:
    """Return each device's share of the rate of this machine's network adapters in bytes per second, or None if
    unknown."""
    text = topology("-n")
    matrix = read_matrix(text)
    return adapter_share(matrix, text, root) if matrix else None


PEER_MEMORY = "sys/kernel/mm/memory_peers/mxcd/version"
"""A file that exists if GPUDirect RDMA works. It is missing if the kernel does not export mm_kobj (RHEL 9.6, for
example). An all-reduce over two C500 nodes then fell from 73 to 8 GB/s: wangzheng422/docker_env
redhat/notes/2025/2025.12.metax.mccl.perf.debug.md."""


def peer_memory_problem(root: Path = Path("/")) -> str:
    """Return why network adapters cannot access the devices' memory. It is empty if they can, or if there are no
    devices."""
    if (root / PEER_MEMORY).exists() or not (root / DEVICE_FILE).exists():
        return ""
    return f"/{PEER_MEMORY} is missing: GPUDirect RDMA of MetaX is off, so nodes exchange data slowly"


class MetaxDetector(DeviceDetector):
    """A detector that runs whichever of the two tools is installed."""

    def matrix(self) -> str:
        return topology("-n")


DETECTOR = MetaxDetector(
    vendor="metax",
    tool="mx-smi",
    listing=list_with(smi.read, *TOOLS),
    visible=("MACA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    vendor_variables=("GEMS_VENDOR", "FLAGGEMS_VENDOR", "GEMS_BACKEND", "FLAGGEMS_BACKEND"),
    own_variables=("MACA_",),
    device_file=DEVICE_FILE,
    pci_vendor=PCI_VENDOR,
    torch_device="cuda",
    trusts=lambda report: "+metax" in report.version or all(NAME.match(each.chip) for each in report.devices),
    uuids=lambda: next((found for tool in TOOLS if (found := smi.uuids(tool_output(tool, "-L") or ""))), {}),
    topology=(TOOLS[0], "topo", "-n"),
)
