"""HTTP servers on raw sockets, each of which behaves, or misbehaves, as a test says."""

import asyncio
import itertools
import json
import re
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from flagcore_serving.job import Load
from flagcore_serving.load.result import Answer, LoadResult, Target
from flagcore_serving.load.sending import measure
from flagcore_serving.load.stream import Stream

Body = dict[str, Any]


@dataclass
class Wire:
    """One connection, seen from the server."""

    writer: asyncio.StreamWriter
    chunked: bool = True

    async def raw(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self, status: str = "200 OK", kind: str = "text/event-stream", *, chunked: bool = True) -> None:
        self.chunked = chunked
        coding = "Transfer-Encoding: chunked\r\n" if chunked else "Connection: close\r\n"
        await self.raw(f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{coding}\r\n".encode())

    async def send(self, data: bytes) -> None:
        await self.raw(f"{len(data):x}\r\n".encode() + data + b"\r\n" if self.chunked else data)

    async def event(self, event: Any) -> None:
        text = event if isinstance(event, str) else json.dumps(event)
        await self.send(f"data: {text}\n\n".encode())

    async def end(self) -> None:
        if self.chunked:
            await self.raw(b"0\r\n\r\n")

    def close_connection(self) -> None:
        self.writer.transport.abort()


Behaviour = Callable[[Body, Wire], Awaitable[None]]


def piece(text: str = " a", finish: str | None = None) -> Body:
    return {"id": "x", "choices": [{"index": 0, "text": text, "finish_reason": finish}], "usage": None}


def usage(body: Body, made: int | None = None, read: int | None = None) -> Body:
    counts = {"prompt_tokens": len(body["prompt"]) if read is None else read}
    return {"id": "x", "choices": [], "usage": {**counts, "completion_tokens": made or body["max_tokens"]}}


async def well(body: Body, wire: Wire) -> None:
    await wire.head()
    await pieces(body["max_tokens"], wire)
    await finish(body, wire)


async def pieces(count: int, wire: Wire) -> None:
    for _ in range(count):
        await wire.event(piece())


async def finish(body: Body, wire: Wire, made: int | None = None, reason: str = "length") -> None:
    await wire.event(piece("", reason))
    await wire.event(usage(body, made))
    await wire.event("[DONE]")
    await wire.end()


@dataclass
class RequestTimes:
    """What a server saw. `max_in_flight` is the largest number of requests that were in flight at once."""

    url: str = ""
    bodies: list[Body] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    in_flight: int = 0
    max_in_flight: int = 0
    stop: Callable[[], None] = lambda: None


@contextmanager
def serving(behaviour: Behaviour) -> Iterator[RequestTimes]:
    """Run a server in a thread of its own. `stop` lets it die: it takes no connection more and cuts those it has."""
    served, ready, loop = RequestTimes(), threading.Event(), asyncio.new_event_loop()
    open_ones: set[asyncio.StreamWriter] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_ones.add(writer)
        counted = False
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
            )
            request = json.loads(await reader.readexactly(length))
            counted = True
            served.bodies.append(request)
            served.ids.append(b"".join(re.findall(rb"(?i)x-request-id: (.*)", head)).decode().strip())
            served.in_flight += 1
            served.max_in_flight = max(served.max_in_flight, served.in_flight)
            await behaviour(request, Wire(writer))
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            served.in_flight -= counted
            open_ones.discard(writer)
            writer.close()

    async def run() -> None:
        over = asyncio.Event()
        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        served.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

        def stop() -> None:
            server.close()
            for writer in list(open_ones):
                writer.transport.abort()
            over.set()

        served.stop = lambda: loop.call_soon_threadsafe(stop)
        ready.set()
        await over.wait()

    def main() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(run())
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))

    thread = threading.Thread(target=main)
    thread.start()
    ready.wait()
    try:
        yield served
    finally:
        if thread.is_alive():
            served.stop()
        thread.join()
        loop.close()


def send(*urls: str, load: Load, seed: int = 0, timeout_s: float = 60.0, **given: Any) -> LoadResult:
    """Send a load to servers."""
    targets = [Target(url) for url in urls]
    return measure(targets, load, **{"model": "m", "vocab_size": 1000, "seed": seed, "timeout_s": timeout_s, **given})


def answer(start: float = 0.0, ttft: float = 1.0, gaps: tuple[float, ...] = (1.0, 1.0)) -> Answer:
    """An answer with one more token than `gaps` to a prompt of 10."""
    return Answer(
        start_s=start,
        ttft_s=ttft,
        tpot_s=sum(gaps) / len(gaps) if gaps else None,
        e2e_s=ttft + sum(gaps),
        gaps_s=gaps,
        input_tokens=10,
        output_tokens=len(gaps) + 1,
    )


def after_each_answer(monkeypatch: pytest.MonkeyPatch, act: Callable[[int], None]) -> None:
    """Call `act` in the client with the number of answers so far, after each."""
    answers = itertools.count(1)

    class Watched(Stream):
        def answer(self, **request: Any) -> Answer:
            found = super().answer(**request)
            act(next(answers))
            return found

    monkeypatch.setattr("flagcore_serving.load.sending.Stream", Watched)
