"""Joins two network interfaces by a link with a delay: `slow_link.py A B MILLISECONDS` (packet(7)).

Frames carry a virtio header, so that a large TCP segment passes as one and needs no checksum here.
"""

import contextlib
import select
import socket
import sys
import time
from collections import deque

SOL_PACKET, ADD_MEMBERSHIP, VNET_HDR, IGNORE_OUTGOING = 263, 1, 15, 23
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
EVERY_PROTOCOL, PROMISCUOUS = 3, 1
BUFFER_BYTES = 64 << 20
LARGEST_FRAME = 70_000


def open_port(name: str) -> socket.socket:
    """Return a socket with all frames that arrive at an interface."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(SOL_PACKET, VNET_HDR, 1)
    port.setsockopt(SOL_PACKET, IGNORE_OUTGOING, 1)
    for option in (SO_SNDBUFFORCE, SO_RCVBUFFORCE):
        port.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    port.bind((name, EVERY_PROTOCOL))
    index = socket.if_nametoindex(name)
    port.setsockopt(SOL_PACKET, ADD_MEMBERSHIP, index.to_bytes(4, sys.byteorder) + bytes([PROMISCUOUS]) + bytes(11))
    port.setblocking(False)
    return port


def main(one: str, other: str, delay_s: float) -> None:
    """Pass frames on for ever."""
    ports = [open_port(one), open_port(other)]
    waiting: deque[tuple[float, socket.socket, bytes]] = deque()
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for port in select.select(ports, [], [], pause)[0]:
            with contextlib.suppress(BlockingIOError):
                for _ in range(64):
                    waiting.append((time.monotonic() + delay_s, ports[port is ports[0]], port.recv(LARGEST_FRAME)))
        while waiting and waiting[0][0] <= time.monotonic():
            _, port, frame = waiting.popleft()
            with contextlib.suppress(OSError):  # a link that is full or down loses frames
                port.send(frame)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]) / 1000)
