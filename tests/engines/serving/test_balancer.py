"""Connections go to the server that has fewest, and streams stay streams."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable

from flagcore.engines.serving.balancer import Balancer

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def listening(serve: Serve) -> tuple[asyncio.Server, int]:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    return server, int(server.sockets[0].getsockname()[1])


def echo(name: bytes) -> Serve:
    """A server that answers each line at once with its name and the line, until the client ends."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(name + line)
        writer.close()

    return serve


def test_open_connections_are_spread_evenly_and_answers_pass_at_once() -> None:
    async def run() -> None:
        servers = [await listening(echo(name)) for name in (b"a", b"b")]
        front, port = await listening(Balancer([f"127.0.0.1:{each}" for _, each in servers]).serve)
        clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        names = []
        for reader, writer in clients:
            for _ in range(2):  # the connection stays open, and with its server
                writer.write(b"hello\n")
                names.append((await asyncio.wait_for(reader.readline(), 10))[:1])
        assert sorted(names) == [b"a"] * 4 + [b"b"] * 4
        assert names[::2] == names[1::2]
        for _, writer in clients:
            writer.close()
        for server in (front, *(each for each, _ in servers)):
            server.close()

    asyncio.run(run())


def test_the_balancer_skips_dead_servers_and_closes_the_connection_if_all_are_dead() -> None:
    async def run() -> None:
        closed = socket.socket()  # bound, but does not listen
        closed.bind(("127.0.0.1", 0))
        closed_port = closed.getsockname()[1]
        server, alive = await listening(echo(b"a"))
        front, port = await listening(Balancer([f"127.0.0.1:{closed_port}", f"127.0.0.1:{alive}"]).serve)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"hello\n")
        assert await asyncio.wait_for(reader.readline(), 10) == b"ahello\n"
        writer.close()
        only_closed, port = await listening(Balancer([f"127.0.0.1:{closed_port}"]).serve)
        reader, _ = await asyncio.open_connection("127.0.0.1", port)
        assert await asyncio.wait_for(reader.read(), 10) == b""
        for each in (front, only_closed, server, closed):
            each.close()

    asyncio.run(run())


def resets(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def test_a_connection_that_the_server_resets_is_closed_for_the_client() -> None:
    async def run() -> None:
        server = await asyncio.start_server(resets, "127.0.0.1", 0)
        front, port = await listening(Balancer([f"127.0.0.1:{server.sockets[0].getsockname()[1]}"]).serve)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await asyncio.wait_for(reader.read(), 10) == b""
        for each in (writer, front, server):
            each.close()

    asyncio.run(run())


def test_a_client_that_has_closed_its_side_gets_the_answer() -> None:
    async def run() -> None:
        server, alive = await listening(echo(b"a"))
        front, port = await listening(Balancer([f"127.0.0.1:{alive}"]).serve)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"hello\n")
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 10) == b"ahello\n"
        for each in (writer, front, server):
            each.close()

    asyncio.run(run())
