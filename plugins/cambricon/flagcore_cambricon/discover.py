"""Finds Cambricon MLUs: by cnmon; where it is missing, by torch_mlu in a process of its own if a device file is there.

A MLU370-X8 card lists two devices. With torch_mlu's gpu_migration, torch.cuda answers for MLUs too: only torch.mlu is
asked here, and the other vendors' plugins believe names.
"""

from __future__ import annotations

import logging
from pathlib import Path

from flagcore.domain.chip import Device
from flagcore.vendorkit import machine
from flagcore.vendorkit.machine import TorchSays
from flagcore.vendorkit.rows import Listing, Row
from flagcore.vendorkit.smi import ask_tool, tool_output, visible
from flagcore_cambricon import smi

LOG = logging.getLogger(__name__)
VISIBLE = "MLU_VISIBLE_DEVICES"
PCI_VENDOR = 0xCABC
"""gpustack/runtime gpustack_runtime/detector; jklincn/cambricon-mlu-driver has the devices 0370, 0580 and 0590."""
DEVICE_FILE = "dev/cambricon_dev[0-9]*"
OVERRIDES = ("GEMS_VENDOR", "FLAGGEMS_VENDOR", "GEMS_BACKEND", "FLAGGEMS_BACKEND")
"""The first that is set names the vendor (flagos-ai/FlagGems src/flag_gems/runtime/backend/device_finder.py)."""
ATTRIBUTES = ("mlu",)
"""Attribute of a torch with torch_mlu."""


def devices(root: Path = Path("/")) -> tuple[Device, ...]:
    """Return the MLUs that processes started from here can see; none if the user's environment names another vendor.

    Device files and the PCI bus are looked up below `root`.
    """
    if machine.named_otherwise("cambricon", OVERRIDES):
        return ()
    listing = listed()
    for line in listing.left_out:
        LOG.warning("%s", line)
    if listing.rows:
        return visible(tuple(row.device for row in listing.rows), VISIBLE)
    if not machine.has_nodes(DEVICE_FILE, root):
        if machine.pci_ids(PCI_VENDOR, root):
            LOG.warning("there are MLUs on the PCI bus, but neither cnmon nor /%s: no driver here", DEVICE_FILE)
        return ()
    return torch_devices(machine.ask_torch("mlu", ATTRIBUTES))


def listed(timeout_seconds: float = 10.0) -> Listing:
    """Return what the management tool lists."""
    return ask_tool(smi.read, "cnmon", timeout_seconds=timeout_seconds) or Listing()


def now() -> tuple[Row, ...]:
    """Return what cnmon lists during a trial, which must not wait long for it."""
    return listed(timeout_seconds=3.0).rows


def topo() -> str | None:
    """Return how the devices of this machine are joined, as cnmon shows it; None without the tool."""
    return tool_output("cnmon", "topo", "-m")


def torch_devices(said: TorchSays | None) -> tuple[Device, ...]:
    """Return the devices that torch.mlu lists; torch has honoured the visible devices already."""
    return said.devices if said is not None and "mlu" in said.attributes else ()
