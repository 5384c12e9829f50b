"""Finds the network devices of a host, and fills them into variables. Imports only the standard library."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

SIOCGIFADDR = 0x8915
OUTSIDE = "192.0.2.1"
"""An address that belongs to no network (RFC 5737), so it is reached by the default route."""


def placeholders(host: str = OUTSIDE) -> dict[str, str]:
    """Return the value of each placeholder on this machine, empty if the machine has no such device.

    The placeholders are the address and the network interface that lead to `host`, and the InfiniBand adapters that
    are up.
    """
    return {"{address}": address_to(host), "{interface}": interface_to(host), "{adapters}": adapters()}


def fill(environment: Mapping[str, str], values: Mapping[str, str]) -> dict[str, str]:
    """Return variables with their placeholders filled in. A variable is left out if its placeholder has no value."""
    filled = {}
    for name, text in environment.items():
        # The value may have another type; the launcher reports this as an error.
        used = {placeholder: value for placeholder, value in values.items() if placeholder in str(text)}
        if all(used.values()):
            filled[name] = replaced(text, used)
    return filled


def replaced(text: str, values: Mapping[str, str]) -> str:
    """Return a text in which each key of `values` is replaced by its value."""
    for name, value in values.items():
        text = text.replace(name, value)
    return text


def free_port(address: str = "") -> int:
    """Return a free TCP port at an address of this machine, by default at all of them. Raises OSError."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def address_to(host: str) -> str:
    """Return this machine's IPv4 address on the way to a host (outside if it has none), or "". Nothing is sent."""
    for each in (host, OUTSIDE):
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((each, 9))
            address = str(probe.getsockname()[0])
            known = (each for each in _addresses().values() if not each.startswith("127."))
            return next(known, "127.0.0.1") if address.startswith("127.") else address
    return ""


def interface_to(host: str) -> str:
    """Return the network interface with the address of `address_to`, or an empty string if unknown."""
    address = address_to(host)
    return next((name for name, known in _addresses().items() if known == address), "")


def _addresses() -> dict[str, str]:
    """Return the IPv4 address of each network interface that has one (netdevice(7))."""
    by_name = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", os.fsencode(name[:15]))
                by_name[name] = socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24])
    return by_name


def adapters() -> str:
    """Return the InfiniBand adapters with an active port, sorted by number and joined by commas."""
    up = set()
    for state in Path("/sys/class/infiniband").glob("*/ports/*/state"):
        with contextlib.suppress(OSError):
            if "ACTIVE" in state.read_text("utf-8"):
                up.add(state.parts[-4])
    return ",".join(sorted(up, key=lambda name: (len(name), name)))
