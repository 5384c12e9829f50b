"""Finds MetaX GPUs: by mx-smi; where it is missing, by torch in a process of its own if a device file is there.

MetaX's torch answers to cuda, so what it lists counts only if its version or the devices' names say MetaX.
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
from flagcore.vendorkit.matrix import adapter_share, read_matrix, with_own_adapters
from flagcore.vendorkit.rows import Listing, Row
from flagcore.vendorkit.smi import ask_tool, tool_output, visible
from flagcore_metax import smi

LOG = logging.getLogger(__name__)
TOOLS = ("mx-smi", "ht-smi")
VISIBLE = ("MACA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
PCI_VENDOR = 0x9999
"""Seen in an lspci of a C500 node (9999:4001): wangzheng422/docker_env 2025.12.metax.mccl.perf.debug.md."""
DEVICE_FILE = "dev/mxcd"
OVERRIDES = ("GEMS_VENDOR", "FLAGGEMS_VENDOR", "GEMS_BACKEND", "FLAGGEMS_BACKEND")
"""The first that is set names the vendor (flagos-ai/FlagGems src/flag_gems/runtime/backend/device_finder.py)."""
NAME = re.compile(r"MetaX |MX[CNX]\d")


def devices(root: Path = Path("/")) -> tuple[Device, ...]:
    """Return the GPUs that processes started from here can see; none if the user's environment names another vendor.

    Device files and the PCI bus are looked up below `root`.
    """
    if machine.named_otherwise("metax", OVERRIDES):
        return ()
    listing = listed()
    for line in listing.left_out:
        LOG.warning("%s", line)
    if listing.rows:
        return visible(_with_uuids(tuple(row.device for row in listing.rows)), *VISIBLE)
    if not machine.has_nodes(DEVICE_FILE, root):
        if machine.pci_ids(PCI_VENDOR, root):
            LOG.warning(
                "there are MetaX devices on the PCI bus, but neither mx-smi nor /%s: no driver here", DEVICE_FILE
            )
        return ()
    return torch_devices(machine.ask_torch("cuda"))


def listed(timeout_seconds: float = 10.0) -> Listing:
    """Return what the management tool lists."""
    found = [ask_tool(smi.read, tool, timeout_seconds=timeout_seconds) or Listing() for tool in TOOLS]
    told = tuple(line for each in found for line in each.left_out)
    return next((each for each in found if each.rows), Listing(left_out=told))


def now() -> tuple[Row, ...]:
    """Return what mx-smi lists during a trial, which must not wait long for it."""
    return listed(timeout_seconds=3.0).rows


def topo() -> str | None:
    """Return how the devices of this machine are joined, as mx-smi shows it; None without the tool."""
    return tool_output("mx-smi", "topo", "-m")


def adapters(root: Path = Path("/")) -> float | None:
    """Return the bytes per second that a device has of this machine's network adapters; None if that is not known."""
    text = tool_output("mx-smi", "topo", "-n") or ""
    matrix = read_matrix(text)
    return adapter_share(matrix, text, root) if matrix else None


def own_network(group: NodeGroup, root: Path = Path("/")) -> NodeGroup | None:
    """Return `group` with the adapters of this machine, if it is such a node and mx-smi shows them; else None."""
    if group.nodes == 1 or not any(group.chip.answers_to(row.device.chip) for row in listed().rows):
        return None
    return with_own_adapters(group, tool_output("mx-smi", "topo", "-n"), root)


def torch_devices(said: TorchSays | None) -> tuple[Device, ...]:
    """Return the devices that torch lists, if they are MetaX's; torch has honoured the visible devices already."""
    if said is None or not ("+metax" in said.version or all(NAME.match(each.chip) for each in said.devices)):
        return ()
    return said.devices


def _with_uuids(listed: tuple[Device, ...]) -> tuple[Device, ...]:
    setting = next((os.environ[name] for name in VISIBLE if name in os.environ), "")
    if not re.search(r"[A-Za-z]", setting):
        return listed
    known = smi.uuids(tool_output("mx-smi", "-L") or "")
    return tuple(replace(each, uuid=known.get(each.index, "")) for each in listed)
