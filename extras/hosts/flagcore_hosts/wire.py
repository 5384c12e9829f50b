"""Messages between flagcore and an agent: lines of JSON in both directions. Imports only the standard library.

Run as `wire.py SOCKET HOST`, it connects its standard input and output to a hub.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time

BEAT_SECONDS = 2.0


class Wire:
    """Reads messages from one descriptor and writes them to another. It never waits.

    `ended`: whether the other side has closed the stream. `broken`: whether the other side no longer reads.
    """

    def __init__(self, source: int, target: int, received: bytes = b"") -> None:
        self.source, self.target, self.received = source, target, received
        self.outgoing = bytearray()
        self.heard_at = self.beat_at = time.monotonic()
        self.ended = self.broken = False
        for descriptor in (source, target):
            os.set_blocking(descriptor, False)

    def send(self, **message: object) -> None:
        """Queue a message, and write as much of the queue as the channel accepts."""
        self.outgoing += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Write as much of the queued messages as the channel accepts."""
        try:
            while self.outgoing:
                del self.outgoing[: os.write(self.target, self.outgoing[: 1 << 16])]
        except BlockingIOError:
            pass
        except OSError:
            self.outgoing.clear()
            self.broken = True

    def read_lines(self) -> list[bytes]:
        """Return the complete lines that have arrived."""
        try:
            data = os.read(self.source, 1 << 18)
            self.ended = not data
            self.heard_at = time.monotonic() if data else self.heard_at
        except BlockingIOError:
            data = b""
        *lines, self.received = (self.received + data).split(b"\n")
        return lines

    def beat(self) -> None:
        """Send a heartbeat if one is due."""
        if time.monotonic() - self.beat_at > BEAT_SECONDS:
            self.beat_at = time.monotonic()
            self.send()

    def is_silent(self, seconds: float) -> bool:
        """Return whether nothing has arrived for `seconds`."""
        return time.monotonic() - self.heard_at > seconds


REASON = b"\0"
"""The prefix of the reason why a hub closes a channel. All other messages are lines of JSON."""


def short(path: str) -> str:
    """Return a short path to the same socket, valid in this process.

    The path of a socket is limited to 107 bytes, and TMPDIR may be longer.
    """
    folder, name = os.path.split(path)
    return f"/proc/self/fd/{os.open(folder, os.O_PATH)}/{name}"


def main(path: str, host: str) -> int:
    """Copy data in both directions until one side closes. If the hub gives a reason, it is written to stderr."""
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
