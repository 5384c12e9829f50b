"""Finds MetaX GPUs through mx-smi."""

from __future__ import annotations

from flagcore.domain.chip import Device
from flagcore.vendorkit.smi import table_devices, tool_output, visible

TITLE = "MetaX System Management Interface"
"""Another vendor's tool has the same name, so the title is asked for."""


def devices() -> tuple[Device, ...]:
    """Return the GPUs that processes started from here can see; none without the tool."""
    return visible(parse(tool_output("mx-smi") or ""), "MACA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


def parse(text: str) -> tuple[Device, ...]:
    """Return the devices of mx-smi's table, in any of its three layouts. A dead device has no memory line.

    From 2.2.9 on a line starts with the board's number, which is the GPU's on every board seen so far.
    """
    if TITLE not in text:
        return ()
    return table_devices(
        text,
        row=r"^\|\s*(?P<index>\d+)\s+(?P<name>(?:MetaX |MX)\w+)",
        memory=r"\|\s*\d+/(?P<mib>\d+) MiB",
        driver=r"Kernel Mode Driver Version:\s*(\S+)",
    )
