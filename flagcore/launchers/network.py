"""Finds the network devices of a host, and fills them into variables. Imports only the standard library.

As a program, it checks that the hosts of a trial can connect: the first listens on MASTER_PORT until all others have
connected to it. It runs once on each host, and prints the port and, on failure, the reason.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import struct
import sys
import time
from collections.abc import Mapping
from pathlib import Path

SIOCGIFADDR = 0x8915
OUTSIDE = "192.0.2.1"
"""An address that belongs to no network (RFC 5737), so it is reached by the default route."""
MUTEX_SECONDS = 5


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
        used = [placeholder for placeholder in values if placeholder in str(text)]
        if all(values[placeholder] for placeholder in used):
            for placeholder in used:
                text = text.replace(placeholder, values[placeholder])
            filled[name] = text
    return filled


def machine() -> str:
    """Return a text that is equal in two processes only if they share a machine. It is empty if unknown.

    Containers of one host have its boot id (random(4)) but their own namespaces. Clones of a virtual machine may have
    one boot id, but have their own names.
    """
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        namespaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("net", "pid")]
        return " ".join([boot_id, *namespaces, os.uname().nodename])
    except OSError:
        return ""


def claim(owner: str) -> tuple[socket.socket, str]:
    """Claim this machine for a search. Return what holds the claim, and the name of another search, or an empty string.

    A claim is the name of an abstract socket (unix(7)): all users see it, and it ends with its processes. Another such
    name is a mutex: of two searches that start together, one gets the machine.
    """
    holder, name = socket.socket(socket.AF_UNIX), repr(owner)[1:-1].encode()[:80].decode("utf-8", "ignore")
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as mutex:
        for _ in range(MUTEX_SECONDS * 50):
            with contextlib.suppress(OSError):
                mutex.bind("\0flagcore")
                break
            time.sleep(0.02)
        names = re.findall(r"@flagcore \d+ (.*)", Path("/proc/net/unix").read_text("utf-8", "replace"))
        if other := next((each for each in names if each != name), ""):
            return holder, other
        holder.bind(f"\0flagcore {os.getpid()} {name}")
    return holder, ""


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


SECONDS = 5.0
RETRY_SECONDS = 0.1


def listen(port: int, others: int) -> None:
    """Wait until each of the other hosts has connected. Raises OSError if the port cannot be used."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    with socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=others) as server:
        server.settimeout(SECONDS)
        try:
            for _ in range(others):
                server.accept()[0].close()
        except TimeoutError:
            pass  # the other hosts report the reason


def connect(host: str, port: int) -> None:
    """Connect to the first host. Retries, because that host may not listen yet. Raises OSError."""
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            socket.create_connection((host, port), max(RETRY_SECONDS, deadline - time.monotonic())).close()
            return
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
        time.sleep(RETRY_SECONDS)


def main() -> int:
    """Check this host, and return the exit code. If the port cannot be used, the other hosts do not wait."""
    port, rank = os.environ["MASTER_PORT"], int(os.environ["NODE_RANK"])
    try:
        if rank:
            connect(os.environ["MASTER_ADDR"], int(port))
        else:
            listen(int(port), int(os.environ["NNODES"]) - 1)
    except (OSError, ValueError, OverflowError) as error:
        print(port, getattr(error, "strerror", None) or error)
        return int(rank == 0)
    print(port)
    return 0


if __name__ == "__main__":
    sys.exit(main())
