"""Messages between flagcore and an agent: lines of JSON in both directions. Imports only the standard library."""

from __future__ import annotations

import json
import os
import time

BEAT_SECONDS = 2.0


class Wire:
    """Reads messages from one descriptor and writes them to another, and never waits.

    `ended` is whether the other side has closed the stream, `broken` whether it reads no more.
    """

    def __init__(self, source: int, target: int, received: bytes = b"") -> None:
        self.source, self.target, self.received = source, target, received
        self.outgoing = bytearray()
        self.heard_at = self.beat_at = time.monotonic()
        self.ended = self.broken = False
        for descriptor in (source, target):
            os.set_blocking(descriptor, False)

    def send(self, **message: object) -> None:
        """Queue a message, and write as much as the channel accepts."""
        self.outgoing += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Write queued messages, as much as the channel accepts."""
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
        """Return whether nothing has arrived for some seconds."""
        return time.monotonic() - self.heard_at > seconds
