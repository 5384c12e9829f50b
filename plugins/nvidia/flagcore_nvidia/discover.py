"""Finds NVIDIA GPUs through nvidia-smi."""

from __future__ import annotations

from flagcore.domain.chip import Device
from flagcore.vendorkit.smi import MIB, tool_output, visible

QUERY = ("nvidia-smi", "--query-gpu=index,name,memory.total,driver_version,uuid", "--format=csv,noheader,nounits")


def devices() -> tuple[Device, ...]:
    """Return the GPUs that processes started from here can see; none without the tool."""
    return visible(parse(tool_output(*QUERY) or ""), "CUDA_VISIBLE_DEVICES")


def parse(text: str) -> tuple[Device, ...]:
    """Return the devices of nvidia-smi's answer to QUERY. A line of another shape (a warning) is skipped."""
    found = []
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) != 5 or not words[0].isdigit():
            continue
        index, name, mib, driver, uuid = words
        memory = int(mib) * MIB if mib.isdigit() else None  # [N/A] where the GPU shares the host's memory
        found.append(Device(index=int(index), chip=name, memory_bytes=memory, driver=driver, uuid=uuid))
    return tuple(found)
