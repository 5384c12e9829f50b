"""A TCP load balancer for machines without nginx: each connection goes to the server with the fewest connections.

    python -m flagcore.engines.serving.balancer 8000 127.0.0.1:8001 node-2:8001    (listens at the first port)

It forwards bytes immediately, so streams stay streams. nginx has a higher throughput; this balancer uses one core.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence

CHUNK_BYTES = 1 << 16
CONNECT_SECONDS = 5.0
"""The limit of a connection to a server. Chosen: above a lost packet's retry."""


class Balancer:
    """Forwards connections to the servers at `addresses`, HOST:PORT."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._connections = dict.fromkeys(addresses, 0)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection until one side closes it; a server that refuses it is skipped."""
        for address in sorted(self._connections, key=self._connections.__getitem__):
            host, _, port = address.rpartition(":")
            try:
                upstream = await asyncio.wait_for(asyncio.open_connection(host, int(port)), CONNECT_SECONDS)
            except (OSError, asyncio.TimeoutError):
                continue
            self._connections[address] += 1
            try:
                await _forward_both((reader, writer), upstream)
            finally:
                self._connections[address] -= 1
            return
        writer.close()


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _forward_both(client: Connection, server: Connection) -> None:
    """Forward bytes in both directions until the server has closed its side; a client that has may still read."""
    to_server = asyncio.ensure_future(_forward(client[0], server[1]))
    try:
        await _forward(server[0], client[1])
    finally:
        to_server.cancel()
        for _, writer in (client, server):
            writer.close()


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward bytes until the reader's side is closed or lost, and close that of the writer."""
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError):
        if writer.can_write_eof():
            writer.write_eof()


async def main(port: int, addresses: Sequence[str]) -> None:
    """Listen at the port `port` until the process is stopped."""
    listener = await asyncio.start_server(Balancer(addresses).serve, "127.0.0.1", port, limit=CHUNK_BYTES, backlog=1024)
    async with listener:
        await listener.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2:]))
