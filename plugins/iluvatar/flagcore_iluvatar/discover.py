"""Finds Iluvatar GPUs: by ixsmi; where it is missing, by torch in a process of its own if a device file is there.

CoreX's torch answers to cuda, so what it lists counts only if its version, an attribute or the names say Iluvatar. A
card with two chips (BI-V150, MR-V100 DUO) lists two devices.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import replace
from pathlib import Path

from flagcore.domain.chip import Device
from flagcore.domain.cluster import NodeGroup
from flagcore.vendorkit import machine
from flagcore.vendorkit.machine import TorchSays
from flagcore.vendorkit.matrix import with_own_adapters
from flagcore.vendorkit.rows import Listing, Row
from flagcore.vendorkit.smi import ask_tool, tool_output, visible
from flagcore_iluvatar import smi

LOG = logging.getLogger(__name__)
VISIBLE = "CUDA_VISIBLE_DEVICES"
PCI_VENDOR = 0x1E3E
"""gpustack/runtime gpustack_runtime/detector; 1e3e:0002 is a MR-V100 (ywh555hhh/llaisys notes)."""
DEVICE_FILE = "dev/iluvatar[0-9]*"
OVERRIDES = ("GEMS_VENDOR", "FLAGGEMS_VENDOR", "GEMS_BACKEND", "FLAGGEMS_BACKEND")
"""The first that is set names the vendor (flagos-ai/FlagGems src/flag_gems/runtime/backend/device_finder.py)."""
ATTRIBUTES = ("corex",)
"""Attribute of CoreX's torch."""


def devices(root: Path = Path("/")) -> tuple[Device, ...]:
    """Return the GPUs that processes started from here can see; none if the user's environment names another vendor.

    Device files and the PCI bus are looked up below `root`.
    """
    if machine.named_otherwise("iluvatar", OVERRIDES):
        return ()
    listing = listed()
    for line in listing.left_out:
        LOG.warning("%s", line)
    if listing.rows:
        return visible(_with_uuids(tuple(row.device for row in listing.rows)), VISIBLE)
    if not machine.has_nodes(DEVICE_FILE, root):
        if machine.pci_ids(PCI_VENDOR, root):
            LOG.warning(
                "there are Iluvatar devices on the PCI bus, but neither ixsmi nor /%s: no driver here", DEVICE_FILE
            )
        return ()
    return torch_devices(machine.ask_torch("cuda", ATTRIBUTES))


def listed(timeout_seconds: float = 10.0) -> Listing:
    """Return what the management tool lists."""
    return ask_tool(smi.read, "ixsmi", timeout_seconds=timeout_seconds) or Listing()


def now() -> tuple[Row, ...]:
    """Return what ixsmi lists during a trial, which must not wait long for it."""
    return listed(timeout_seconds=3.0).rows


def own_network(group: NodeGroup, root: Path = Path("/")) -> NodeGroup | None:
    """Return `group` with the adapters of this machine, if it is such a node and ixsmi shows them; else None."""
    if group.nodes == 1 or not any(group.chip.answers_to(row.device.chip) for row in listed().rows):
        return None
    return with_own_adapters(group, tool_output("ixsmi", "topo", "-m"), root)


def torch_devices(said: TorchSays | None) -> tuple[Device, ...]:
    """Return the devices that torch lists, if they are Iluvatar's; torch has honoured the visible devices already."""
    if said is None:
        return ()
    named = all("iluvatar" in each.chip.casefold() for each in said.devices)
    return said.devices if named or "corex" in said.attributes or "+corex" in said.version else ()


def _with_uuids(listed: tuple[Device, ...]) -> tuple[Device, ...]:
    if not re.search(r"[A-Za-z]", os.environ.get(VISIBLE, "")):
        return listed
    known = smi.uuids(tool_output("ixsmi", "--query-gpu=index,uuid", "--format=csv,noheader") or "")
    return tuple(replace(each, uuid=known.get(each.index, "")) for each in listed)
