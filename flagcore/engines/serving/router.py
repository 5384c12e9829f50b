"""A router for instances that only prefill and instances that only decode, if the engine's own router is not installed.

    python router.py --port 8000 --protocol nixl --prefill http://127.0.0.1:8001 --decode http://127.0.0.1:8017

A request goes to the least busy healthy instance of each kind; the answer comes from the one that decodes. Status 503
with the reason is the answer if no instance of a kind is healthy, or if one is lost before the answer begins. If a
client closes its connection, its requests are cancelled. The protocol is that of the engine's connector. This file
needs only Python's standard library, because exports copy it.

Sources of the protocols: vllm 0.32 `distributed/kv_transfer/kv_connector/v1/nixl`, vllm 0.23
`v1/p2p/p2p_nccl_connector.py` (addresses in the request's id), sglang 0.5.23 `srt/disaggregation` (bootstrap room).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

CHUNK_BYTES = 1 << 16
MAX_BODY = 1 << 28
PROTOCOLS = ("nixl", "p2p", "folder", "bootstrap")
"""nixl: the prefill's answer has the place of its cache. p2p: both have the addresses in the request's id. folder: the
cache is found by the prompt. bootstrap: both get the request at once, with a number by which they meet."""
GENERATING = ("/v1/completions", "/v1/chat/completions", "/generate")
REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
}


HEALTH = "/health"
HEALTH_INTERVAL_S, HEALTH_TIMEOUT_S = 2.0, 10.0
"""The seconds between two health checks of an instance, and after which an instance that does not answer one is lost. A
busy engine may take seconds to answer."""


@dataclass(slots=True)
class Place:
    """One instance: its URL, the port for caches, the number of its requests in flight, and why it is lost."""

    url: str
    transfer_port: int = 0
    busy: int = 0
    problem: bytes = b""
    lost: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    def parse(cls, text: str) -> Place:
        """Return the place of URL or URL,PORT."""
        url, _, port = text.partition(",")
        return cls(url.rstrip("/"), int(port or 0))

    def lose(self, problem: bytes) -> Upstream:
        """Mark the instance as lost until it is healthy again, and return the answer to its requests."""
        self.problem = problem
        self.lost.set()
        return Upstream(503, problem)

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or "127.0.0.1"

    @property
    def transfer_address(self) -> str:
        return f"{self.host}:{self.transfer_port}"


@dataclass(slots=True)
class Request:
    """A request of a client. `headers` are those that instances get, too."""

    method: str
    path: str
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)

    def to(self, body: dict[str, Any], **headers: str) -> Request:
        """Return the request with another JSON body and further headers."""
        return Request(self.method, self.path, json.dumps(body).encode(), {**self.headers, **headers})


class Upstream(Exception):
    """An instance did not answer, or refused a request: the status and the body of the answer."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status)
        self.status, self.body = status, body


@dataclass(slots=True)
class Answer:
    """The answer to a client. After it has begun, no other one can be sent."""

    writer: asyncio.StreamWriter
    has_begun: bool = False

    async def send(self, data: bytes) -> None:
        self.has_begun = True
        self.writer.write(data)
        await self.writer.drain()

    async def reply(self, status: int, body: bytes) -> None:
        head = f"HTTP/1.1 {status} {'OK' if status == 200 else 'Error'}\r\nContent-Type: application/json\r\n"
        await self.send(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)


class Router:
    """Sends each request through one instance of `prefill` and one of `decode`."""

    def __init__(self, protocol: str, prefill: Sequence[Place], decode: Sequence[Place]) -> None:
        self.protocol, self.prefill, self.decode = protocol, prefill, decode

    async def watch(self, interval_s: float = HEALTH_INTERVAL_S, timeout_s: float = HEALTH_TIMEOUT_S) -> None:
        """Check the health of all instances until cancelled."""

        async def check(place: Place) -> None:
            while True:
                with contextlib.suppress(Upstream):
                    await _check_health(place, timeout_s)
                await asyncio.sleep(interval_s)

        await asyncio.gather(*(check(place) for place in (*self.prefill, *self.decode)))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the request of one connection."""
        answer = Answer(writer)
        try:
            request = await _read_request(reader)
            if request is None:
                return
            with contextlib.suppress(ConnectionError):
                try:
                    await _guarded(self._answer(request, answer), _disconnect(reader))
                except Upstream as failure:
                    if not answer.has_begun:
                        await answer.reply(failure.status, failure.body)
        finally:
            writer.close()

    async def _answer(self, request: Request, answer: Answer) -> None:
        if request.path == HEALTH:
            for place in (*self.prefill, *self.decode):
                await _check_health(place, HEALTH_TIMEOUT_S)
            await answer.reply(200, b"")
        elif request.method == "POST" and request.path in GENERATING:
            try:
                body = json.loads(request.body)
            except ValueError:
                return await answer.reply(400, _problem("the body is not JSON"))
            with _least_busy(self.decode) as decode, contextlib.ExitStack() as prefilling:
                prefill = prefilling.enter_context(_least_busy(self.prefill))
                work = self._generate(request, body, prefill, decode, answer, prefilling)
                await _guarded(work, _loss(decode), _before(answer, _loss(prefill)))
        else:
            with _least_busy(self.decode) as decode:
                await _guarded(_relay(decode, request, answer), _loss(decode))
        return None

    async def _generate(
        self,
        request: Request,
        body: dict[str, Any],
        prefill: Place,
        decode: Place,
        answer: Answer,
        prefilling: contextlib.ExitStack,
    ) -> None:
        """Send a request through two instances; close `prefilling` when the first one has ended."""
        if self.protocol == "bootstrap":
            room = {"bootstrap_host": prefill.host, "bootstrap_port": prefill.transfer_port}
            both = request.to({**body, **room, "bootstrap_room": random.getrandbits(62)})
            first = asyncio.ensure_future(_before(answer, _exchange(prefill, both)))
            try:
                await _guarded(_relay(decode, both, answer), asyncio.shield(first))
                await first
            finally:
                first.cancel()
            return
        headers = {}
        if self.protocol == "p2p":
            places = f"___prefill_addr_{prefill.transfer_address}___decode_addr_{decode.transfer_address}"
            headers["X-Request-Id"] = f"{places}_{uuid.uuid4().hex}"
        prefilled = await _exchange(prefill, request.to(self._prompt_only(body), **headers))
        prefilling.close()
        if self.protocol == "nixl":
            body = {**body, "kv_transfer_params": json.loads(prefilled)["kv_transfer_params"]}
        await _relay(decode, request.to(body, **headers), answer)

    def _prompt_only(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body for the instance that prefills: it answers with one token, which is dropped."""
        dropped = ("stream", "stream_options", "min_tokens")
        prompt = {key: value for key, value in body.items() if key not in dropped} | {"max_tokens": 1}
        if "max_completion_tokens" in body:
            prompt["max_completion_tokens"] = 1
        return prompt | ({"kv_transfer_params": REMOTE_DECODE} if self.protocol == "nixl" else {})


async def _guarded(work: Awaitable[None], *guards: Awaitable[None]) -> None:
    """Wait for `work`. Cancel it if a guard raises first; a guard that ends has no effect."""
    main = asyncio.ensure_future(work)
    tasks = (main, *(asyncio.ensure_future(each) for each in guards))
    waiting = set(tasks)
    try:
        while not main.done():
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _before(answer: Answer, work: Awaitable[Any]) -> None:
    """Wait for `work`. Raises Upstream as `work` does, unless the answer has begun."""
    try:
        await work
    except Upstream:
        if not answer.has_begun:
            raise


async def _disconnect(reader: asyncio.StreamReader) -> None:
    """Raise ConnectionError when the client closes its connection."""
    while await reader.read(CHUNK_BYTES):
        pass
    raise ConnectionAbortedError


async def _loss(place: Place) -> None:
    """Raise Upstream when an instance is lost."""
    await place.lost.wait()
    raise Upstream(503, place.problem)


async def _check_health(place: Place, timeout_s: float) -> None:
    """Ask an instance for its health. Raises Upstream if it is not healthy, and marks it as lost."""
    try:
        await asyncio.wait_for(_exchange(place, Request("GET", HEALTH)), timeout_s)
    except asyncio.TimeoutError:
        problem = _problem(f"{place.url} has not answered a health check within {timeout_s:g} s")
        raise place.lose(problem) from None
    except Upstream as failure:
        place.lose(failure.body or _problem(f"{place.url} is not healthy: status {failure.status}"))
        raise
    place.lost.clear()


@contextlib.contextmanager
def _least_busy(places: Sequence[Place]) -> Iterator[Place]:
    """Yield the healthy place with the fewest requests, and count the request there. Raises Upstream without one."""
    healthy = [place for place in places if not place.lost.is_set()]
    if not healthy:
        raise Upstream(503, places[0].problem)
    place = min(healthy, key=lambda each: each.busy)
    place.busy += 1
    try:
        yield place
    finally:
        place.busy -= 1


async def _read_request(reader: asyncio.StreamReader) -> Request | None:
    """Return the request of a connection, None if it is closed or invalid."""
    try:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = lines[0].split(" ", 2)
        headers = {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)
        }
        length = int(headers.get("content-length", 0))
        body = await reader.readexactly(length) if 0 < length <= MAX_BODY else b""
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError, ValueError):
        return None
    kept = {name: value for name, value in headers.items() if name in ("authorization", "x-request-id")}
    return Request(
        method, path, body, {"X-Request-Id" if name == "x-request-id" else name: v for name, v in kept.items()}
    )


@contextlib.asynccontextmanager
async def _sent(place: Place, request: Request) -> AsyncIterator[asyncio.StreamReader]:
    """Send a request to an instance and yield its answer. Raises Upstream if it cannot be reached."""
    parts = urlsplit(place.url)
    try:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80, limit=CHUNK_BYTES)
    except OSError as error:
        raise place.lose(_problem(f"{place.url} cannot be reached: {error}")) from None
    try:
        own = {"Host": parts.netloc, "Connection": "close", "Content-Length": str(len(request.body))}
        own |= {"Content-Type": "application/json"} if request.body else {}
        lines = [
            f"{request.method} {request.path} HTTP/1.1",
            *(f"{k}: {v}" for k, v in {**request.headers, **own}.items()),
        ]
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + request.body)
        await writer.drain()
        yield reader
    except (ConnectionError, asyncio.IncompleteReadError) as error:
        raise Upstream(502, _problem(f"{place.url} closed the connection: {error}")) from None
    finally:
        writer.close()


async def _exchange(place: Place, request: Request) -> bytes:
    """Return the body of an instance's answer. Raises Upstream for a status other than 200."""
    async with _sent(place, request) as reader:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        body = await reader.read()
    status = int(head.split(" ", 2)[1])
    if status != 200:
        raise Upstream(status, body)
    return body


async def _relay(place: Place, request: Request, answer: Answer) -> None:
    """Forward an instance's answer as it arrives. Raises Upstream if it ends too early."""
    async with _sent(place, request) as reader:
        while data := await reader.read(CHUNK_BYTES):
            await answer.send(data)
    if not answer.has_begun:
        raise Upstream(502, _problem(f"{place.url} closed the connection without an answer"))


def _problem(text: str) -> bytes:
    return json.dumps({"error": {"message": text}}).encode()


async def main(router: Router, host: str, port: int) -> None:
    """Listen at `port` until the process is stopped."""
    listener = await asyncio.start_server(router.serve, host, port, limit=CHUNK_BYTES, backlog=1024)
    async with listener:
        await asyncio.gather(listener.serve_forever(), router.watch())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Route requests to instances that prefill and instances that decode.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--protocol", choices=PROTOCOLS, required=True)
    for kind in ("prefill", "decode"):
        parser.add_argument(f"--{kind}", type=Place.parse, action="append", required=True, metavar="URL[,PORT]")
    given = parser.parse_args()
    asyncio.run(main(Router(given.protocol, given.prefill, given.decode), given.host, given.port))
