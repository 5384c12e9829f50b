"""Finds Iluvatar GPUs through ixsmi. A card with two chips lists two devices."""

from __future__ import annotations

from flagcore.domain.chip import Device
from flagcore.vendorkit.smi import table_devices, tool_output, visible


def devices() -> tuple[Device, ...]:
    """Return the GPUs that processes started from here can see; none without the tool."""
    return visible(parse(tool_output("ixsmi") or ""), "CUDA_VISIBLE_DEVICES")


def parse(text: str) -> tuple[Device, ...]:
    """Return the devices of ixsmi's table; its columns are found by the bars, as widths differ."""
    return table_devices(
        text,
        row=r"^\|\s*(?P<index>\d+)\s+(?P<name>Iluvatar [^|]+?)\s*\|",
        memory=r"\|\s*\d+MiB / (?P<mib>\d+)MiB",
        driver=r"Driver Version:\s*(\S+)",
    )
