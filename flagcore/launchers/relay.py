"""Connects its standard input and output to a hub: `relay.py SOCKET HOST`. Imports only the standard library."""

from __future__ import annotations

import os
import select
import socket
import sys

REASON = b"\0"
"""Marks the reason why a hub closes a channel; other messages are lines of JSON."""


def short(path: str) -> str:
    """Return a path of the same socket for this process: a socket's may have 107 bytes, and TMPDIR may be longer."""
    folder, name = os.path.split(path)
    return f"/proc/self/fd/{os.open(folder, os.O_PATH)}/{name}"


def main(path: str, host: str) -> int:
    """Copy data in both directions until one side closes. A reason goes to stderr."""
    with socket.socket(socket.AF_UNIX) as hub:
        hub.connect(short(path))
        hub.sendall(os.fsencode(host) + b"\n")
        poll = select.poll()
        poll.register(0, select.POLLIN)
        poll.register(hub, select.POLLIN)
        output = 1
        while True:
            ready_descriptors = [descriptor for descriptor, _ in poll.poll()]
            if hub.fileno() in ready_descriptors:
                data = hub.recv(1 << 16)
                if not data:
                    return int(output == 2)
                before, reason, after = data.partition(REASON) if output == 1 else (data, b"", b"")
                _write(output, before)
                if reason:
                    output = 2
                    _write(output, after)
            if 0 in ready_descriptors:
                data = os.read(0, 1 << 16)
                if not data:
                    return 0
                hub.sendall(data)


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except OSError as error:
        sys.exit(f"the connection to the hub failed: {error.strerror or error}")
