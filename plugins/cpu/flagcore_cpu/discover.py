"""Finds the devices of a CPU: one per usable core, with an equal share of the memory."""

import psutil

from flagcore.domain.chip import Device
from flagcore.vendorkit import machine

SHARE_OF_TOTAL = 0.75
SHARE_OF_AVAILABLE = 0.9
"""Memory that all trials together may use; the rest is for the system and flagcore. The smaller value applies."""


def memory_bytes_per_device() -> int:
    """Return the memory of one device: a safe share of the memory of the machine or container, divided by the cores."""
    memory = psutil.virtual_memory()
    total = min(memory.total, machine.allowed_memory_bytes() or memory.total)
    return int(min(total * SHARE_OF_TOTAL, memory.available * SHARE_OF_AVAILABLE)) // machine.cores()


def devices() -> tuple[Device, ...]:
    """Return one device per usable core."""
    memory = memory_bytes_per_device()
    return tuple(Device(index=index, chip="cpu", memory_bytes=memory) for index in range(machine.cores()))
