"""Finds NVIDIA GPUs: by nvidia-smi; where it is missing, by torch in a process of its own if a device file is there.

Other vendors' torch answers to cuda, and their drivers may bring an nvidia-smi: the PCI id and the names decide.
"""

from __future__ import annotations

import logging
from pathlib import Path

from flagcore.domain.chip import Device
from flagcore.domain.cluster import NodeGroup
from flagcore.vendorkit import machine
from flagcore.vendorkit.machine import TorchSays
from flagcore.vendorkit.matrix import with_own_adapters
from flagcore.vendorkit.rows import Listing, Row
from flagcore.vendorkit.smi import ask_tool, tool_output, visible
from flagcore_nvidia import smi

LOG = logging.getLogger(__name__)
VISIBLE = "CUDA_VISIBLE_DEVICES"
PCI_VENDOR = 0x10DE
COMPUTE = ("0x0302", "0x12")
"""PCI classes of what has no display: a desktop's GPU may be there for its screen alone."""
DEVICE_FILE = "dev/nvidia[0-9]*"
OVERRIDES = ("GEMS_VENDOR", "FLAGGEMS_VENDOR", "GEMS_BACKEND", "FLAGGEMS_BACKEND")
"""The first that is set names the vendor (flagos-ai/FlagGems src/flag_gems/runtime/backend/device_finder.py)."""
ATTRIBUTES = ("corex", "mlu", "musa", "npu")
"""Attributes of a torch that is not for NVIDIA, though it answers to cuda."""
FORMAT = "--format=csv,noheader,nounits"


def devices(root: Path = Path("/")) -> tuple[Device, ...]:
    """Return the GPUs that processes started from here can see; none if the user's environment names another vendor.

    Device files and the PCI bus are looked up below `root`.
    """
    if machine.named_otherwise("nvidia", OVERRIDES):
        return ()
    listing = listed(smi.FIELDS)
    for line in listing.left_out:
        LOG.warning("%s", line)
    if listing.rows:
        return visible(tuple(row.device for row in listing.rows), VISIBLE)
    if not machine.has_nodes(DEVICE_FILE, root):
        if machine.pci_ids(PCI_VENDOR, root, COMPUTE):
            LOG.warning(
                "there are NVIDIA GPUs on the PCI bus, but neither nvidia-smi nor /%s: no driver here", DEVICE_FILE
            )
        return ()
    return torch_devices(machine.ask_torch("cuda", ATTRIBUTES))


def listed(fields: tuple[str, ...], timeout_seconds: float = 10.0) -> Listing:
    """Return what nvidia-smi lists, with `fields` of each device; what its table says where it does not know them."""
    query = ("nvidia-smi", f"--query-gpu={','.join(fields)}", FORMAT)
    found = ask_tool(lambda text: smi.read(text, fields), *query, timeout_seconds=timeout_seconds) or Listing()
    if found.rows or not found.left_out:
        return found
    table = ask_tool(smi.read, "nvidia-smi", timeout_seconds=timeout_seconds)
    return table if table is not None and table.rows else found


def now() -> tuple[Row, ...]:
    """Return what nvidia-smi lists during a trial, which must not wait long for it."""
    return listed(smi.READ_FIELDS, timeout_seconds=3.0).rows


def own_network(group: NodeGroup, root: Path = Path("/")) -> NodeGroup | None:
    """Return `group` with the adapters of this machine, if it is such a node and nvidia-smi shows them; else None."""
    if group.nodes == 1 or not any(group.chip.answers_to(row.device.chip) for row in listed(smi.FIELDS).rows):
        return None
    return with_own_adapters(group, tool_output("nvidia-smi", "topo", "-m"), root)


def torch_devices(said: TorchSays | None) -> tuple[Device, ...]:
    """Return the devices that torch lists, if they are NVIDIA's; torch has honoured the visible devices already."""
    if said is None or said.attributes or not all(smi.sounds(each.chip) for each in said.devices):
        return ()
    return said.devices
