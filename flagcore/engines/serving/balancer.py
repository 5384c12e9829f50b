"""A balancer for where nginx is not installed: each connection goes to the server with the fewest.

    python -m flagcore.engines.serving.balancer 8000 127.0.0.1:8001 node-2:8001    (the first port is its own)

It passes bytes on as they come, so streams stay streams. nginx serves more clients; this is a few lines on one core.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence

PIECE = 1 << 16


class Balancer:
    """Connections spread over `places`, HOST:PORT."""

    def __init__(self, places: Sequence[str]) -> None:
        self._open = dict.fromkeys(places, 0)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass one connection on until a side ends it; a server that does not answer is left out for it."""
        for place in sorted(self._open, key=self._open.__getitem__):
            host, _, port = place.rpartition(":")
            try:
                upstream = await asyncio.open_connection(host, int(port))
            except OSError:
                continue
            self._open[place] += 1
            try:
                await _join((reader, writer), upstream)
            finally:
                self._open[place] -= 1
            return
        writer.close()


Side = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _join(client: Side, server: Side) -> None:
    """Pass bytes both ways. When a server ends or a client is gone the other side is closed."""
    try:
        await asyncio.gather(_pass(client[0], server[1]), _pass(server[0], client[1]))
    finally:
        for _, writer in (client, server):
            writer.close()


async def _pass(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(PIECE):
            sink.write(data)
            await sink.drain()
        if sink.can_write_eof():
            sink.write_eof()


async def main(front: int, places: Sequence[str]) -> None:
    """Listen at `front` until the process is ended."""
    listener = await asyncio.start_server(Balancer(places).serve, "127.0.0.1", front, limit=PIECE, backlog=1024)
    async with listener:
        await listener.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2:]))
