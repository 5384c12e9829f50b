"""Finds Cambricon MLUs through cnmon. A MLU370-X8 card lists two devices."""

from __future__ import annotations

from flagcore.domain.chip import Device
from flagcore.vendorkit.smi import table_devices, tool_output, visible


def devices() -> tuple[Device, ...]:
    """Return the MLUs that processes started from here can see; none without the tool."""
    return visible(parse(tool_output("cnmon") or ""), "MLU_VISIBLE_DEVICES")


def parse(text: str) -> tuple[Device, ...]:
    """Return the devices of cnmon's table: card, virtual function, name and firmware, then memory in MiB."""
    return table_devices(
        text,
        row=r"^\|\s*(?P<index>\d+)\s+\S*\s+(?P<name>MLU[\w-]+)",
        memory=r"\|\s*\d+ MiB/\s*(?P<mib>\d+) MiB",
        driver=r"Driver\s+v?(\d[\w.]*)",
    )
