"""A router for instances that cache prefixes, or that only prefill or only decode, if the engine's is not installed.

    python router.py --port 8000 --protocol prefix --decode http://127.0.0.1:8001 --decode http://127.0.0.1:8002
    python router.py --port 8000 --protocol nixl --prefill http://127.0.0.1:8001 --decode http://127.0.0.1:8017

With the protocol `prefix`, a request goes to the instance that got the longest prefix of its prompt before. Otherwise
it goes to the least busy instance of each kind; the answer comes from the one that decodes, and the protocol is that of
the engine's connector. This file needs only Python's standard library, because exports copy it.

Sources of the protocols: vllm 0.32 `distributed/kv_transfer/kv_connector/v1/nixl`, vllm 0.23
`v1/p2p/p2p_nccl_connector.py` (addresses in the request's id), sglang 0.5.23 `srt/disaggregation` (bootstrap room).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import socket
import time
import uuid
from collections.abc import AsyncIterator, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

CHUNK_BYTES = 1 << 16
MAX_BODY = 1 << 28
PREFIX = "prefix"
PROTOCOLS = (PREFIX, "nixl", "p2p", "folder", "bootstrap")
"""nixl: the prefill's answer has the place of its cache. p2p: both have the addresses in the request's id. folder: the
cache is found by the prompt. bootstrap: both get the request at once, with a number. PREFIX: instances do both."""
CONNECT_SECONDS = 5.0
"""The limit of a connection to an instance. Chosen: above a lost packet's retry, below what a client waits."""
CLIENT_SECONDS = 60.0
"""The limit of a client that sends its request, or reads nothing of its answer. Chosen."""
HEALTH_SECONDS, REQUEST_SECONDS = 5.0, 1800.0
"""The limits of an instance's health and of a whole request, as in sglang-router (`router_args.py`, 083d601)."""
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""A host that is off is noticed after 25 s, also if an instance has long been busy with a request. Chosen."""
AVOIDED_SECONDS = 10.0
"""How long an instance that could not be reached gets no further request if another one can take it. Chosen."""
PIECE_TOKENS, PIECE_CHARACTERS = 16, 64
"""The part of a prompt that is remembered as one."""
MIN_MATCH = 0.3
"""Share of a prompt from which its prefix decides, as in vllm-router 0.1.17 and sglang-router 0.3.2."""
MAX_RATIO, MAX_MORE = 1.5, 4
"""An instance gets no request for its prefix if it has more than `MAX_RATIO` x the requests of the least busy one +
MAX_MORE. Chosen: the routers' own limit of 64 more requests would leave small instances idle."""
MAX_PIECES = 1 << 18
"""Pieces that are remembered of an instance; the ones that were used longest ago are forgotten."""
GENERATING = ("/v1/completions", "/v1/chat/completions", "/generate")
REMOTE_KEYS = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False, **dict.fromkeys(REMOTE_KEYS)}


@dataclass(slots=True)
class Place:
    """One instance: its URL, the port for caches, the number of its requests in flight, and when it last failed."""

    url: str
    transfer_port: int = 0
    busy: int = 0
    failed_at: float = -AVOIDED_SECONDS

    @classmethod
    def parse(cls, text: str) -> Place:
        """Return the place of URL or URL,PORT."""
        url, _, port = text.partition(",")
        return cls(url.rstrip("/"), int(port or 0))

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or "127.0.0.1"


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


class Prefixes:
    """Chooses one of `count` instances by the prefixes of the prompts that they got.

    A prompt is a sequence of pieces; the identity of a piece includes all pieces before it.
    """

    def __init__(self, count: int) -> None:
        self._seen: list[dict[Hashable, None]] = [{} for _ in range(count)]

    def choose(self, pieces: Sequence[Hashable], busy: Sequence[float]) -> int:
        """Return the instance for a prompt: that with the longest prefix, or else the least busy one.

        `busy` are the requests of each instance.
        """
        most = MAX_RATIO * min(busy) + MAX_MORE
        matches = [self._match(seen, pieces) if busy[index] <= most else 0 for index, seen in enumerate(self._seen)]
        needed = max(matches) if max(matches) >= MIN_MATCH * len(pieces) else 0
        suitable = [index for index, match in enumerate(matches) if match >= needed]
        chosen = min(suitable, key=lambda index: (busy[index], len(self._seen[index])))
        seen = self._seen[chosen]
        for piece in pieces:
            seen.pop(piece, None)
            seen[piece] = None
        while len(seen) > MAX_PIECES:
            del seen[next(iter(seen))]
        return chosen

    def _match(self, seen: dict[Hashable, None], pieces: Sequence[Hashable]) -> int:
        return next((index for index, piece in enumerate(pieces) if piece not in seen), len(pieces))


def pieces_of(prompt: str | Sequence[int]) -> tuple[int, ...]:
    """Return the whole pieces of a prompt."""
    size = PIECE_CHARACTERS if isinstance(prompt, str) else PIECE_TOKENS
    pieces, last = list[int](), 0
    for end in range(size, len(prompt) + 1, size):
        part = prompt[end - size : end]
        last = hash((last, part if isinstance(part, str) else tuple(part)))
        pieces.append(last)
    return tuple(pieces)


def prompt_of(body: dict[str, Any]) -> str | list[int]:
    """Return the prompt of a request: its text or token ids, of a chat the text of its messages."""
    prompt = body.get("prompt") or body.get("text") or body.get("input_ids") or body.get("messages") or ""
    is_ids = isinstance(prompt, list) and all(isinstance(each, int) for each in prompt)
    return prompt if isinstance(prompt, str) or is_ids else json.dumps(prompt)


class Router:
    """Sends each request through one instance of `prefill` and one of `decode`; of the latter alone with PREFIX."""

    def __init__(self, protocol: str, prefill: Sequence[Place], decode: Sequence[Place]) -> None:
        self.protocol, self.prefill, self.decode = protocol, prefill, decode
        self._prefixes = Prefixes(len(decode))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the request of one connection."""
        try:
            request = await _read_request(reader)
            if request is None:
                text = f"a request needs a head, and a body of at most {MAX_BODY} bytes with its length"
                with contextlib.suppress(ConnectionError):
                    await _reply(writer, 400, _problem(text))
                return
            answer = asyncio.ensure_future(self._answer_or_fail(request, writer))
            gone = asyncio.ensure_future(_closed(reader))
            try:
                first = asyncio.FIRST_COMPLETED
                if not (await asyncio.wait((answer, gone), timeout=REQUEST_SECONDS, return_when=first))[0]:
                    writer.transport.abort()
            finally:
                await _cancel(answer, gone)  # the instances end the request of a client that has gone
        finally:
            writer.close()

    async def _answer_or_fail(self, request: Request, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            try:
                await self._answer(request, writer)
            except Upstream as failure:
                await _reply(writer, failure.status, failure.body)

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> None:
        if request.path == "/health":
            for place in (*self.prefill, *self.decode):
                try:
                    await asyncio.wait_for(_exchange(place, request), HEALTH_SECONDS)
                except asyncio.TimeoutError:
                    text = f"{place.url} does not answer within {HEALTH_SECONDS:g} s"
                    raise Upstream(504, _problem(text)) from None
            await _reply(writer, 200, b"")
        elif request.method == "POST" and request.path in GENERATING:
            body = _json_object(request.body)
            if body is None:
                return await _reply(writer, 400, _problem("the body is not a JSON object"))
            await self._generate(request, body, writer)
        else:
            await _relay(self.decode[0], request, writer, asyncio.Event())
        return None

    async def _generate(self, request: Request, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if self.protocol == PREFIX:
            recent = time.monotonic() - AVOIDED_SECONDS
            busy = [each.busy + MAX_BODY * (each.failed_at > recent) for each in self.decode]
            chosen = self.decode[self._prefixes.choose(pieces_of(prompt_of(body)), busy)]
            with _least_busy(self.decode, chosen) as decode:
                return await _relay(decode, request, writer, asyncio.Event())
        with _least_busy(self.prefill) as prefill, _least_busy(self.decode) as decode:
            if self.protocol == "bootstrap":
                room = {"bootstrap_host": prefill.host, "bootstrap_port": prefill.transfer_port}
                both = request.to({**body, **room, "bootstrap_room": random.getrandbits(62)})
                return await self._meet(prefill, decode, both, writer)
            headers = {}
            if self.protocol == "p2p":
                first, second = (f"{each.host}:{each.transfer_port}" for each in (prefill, decode))
                places = f"___prefill_addr_{first}___decode_addr_{second}"
                headers["X-Request-Id"] = f"{places}_{uuid.uuid4().hex}"
            answer = await _exchange(prefill, request.to(self._prompt_only(body), **headers))
            if self.protocol == "nixl":
                params = (_json_object(answer) or {}).get("kv_transfer_params")
                if params is None:
                    raise Upstream(502, _problem(f"{prefill.url} answered without kv_transfer_params"))
                body = {**body, "kv_transfer_params": params}
        with _least_busy(self.decode, decode) as decode:
            await _relay(decode, request.to(body, **headers), writer, asyncio.Event())
        return None

    async def _meet(self, prefill: Place, decode: Place, request: Request, writer: asyncio.StreamWriter) -> None:
        """Send a request to both instances. If `prefill` fails first, stop: `decode` would wait for its cache."""
        begun = asyncio.Event()
        first = asyncio.ensure_future(_exchange(prefill, request))
        relay = asyncio.ensure_future(_relay(decode, request, writer, begun))
        try:
            await asyncio.wait((first, relay), return_when=asyncio.FIRST_EXCEPTION)
            await (relay if relay.done() or begun.is_set() else first)
        finally:
            await _cancel(first, relay)

    def _prompt_only(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body for the instance that prefills: it answers with one token, which is dropped."""
        dropped = ("stream", "stream_options", "min_tokens")
        prompt = {key: value for key, value in body.items() if key not in dropped} | {"max_tokens": 1}
        if "max_completion_tokens" in body:
            prompt["max_completion_tokens"] = 1
        return prompt | ({"kv_transfer_params": REMOTE_DECODE} if self.protocol == "nixl" else {})


@contextlib.contextmanager
def _least_busy(places: Sequence[Place], place: Place | None = None) -> Any:
    """Yield the given place, or the one with the fewest requests that has not just failed. Count the request there."""
    recent = time.monotonic() - AVOIDED_SECONDS
    place = place or min(places, key=lambda each: (each.failed_at > recent, each.busy))
    place.busy += 1
    try:
        yield place
    finally:
        place.busy -= 1


async def _read_request(reader: asyncio.StreamReader) -> Request | None:
    """Return the request of a connection, None if it is closed, invalid or late."""
    try:
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), CLIENT_SECONDS)
        lines = head.decode("latin-1").split("\r\n")
        method, path, _ = lines[0].split(" ", 2)
        headers = {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)
        }
        length = int(headers.get("content-length", 0))
        if not 0 <= length <= MAX_BODY or "transfer-encoding" in headers:
            return None
        body = await asyncio.wait_for(reader.readexactly(length), CLIENT_SECONDS)
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.TimeoutError, ConnectionError, ValueError):
        return None
    names = {"authorization": "Authorization", "x-request-id": "X-Request-Id"}
    return Request(method, path, body, {names[name]: value for name, value in headers.items() if name in names})


@contextlib.asynccontextmanager
async def _sent(place: Place, request: Request) -> AsyncIterator[asyncio.StreamReader]:
    """Send a request to an instance and yield its answer. Raises Upstream if it cannot be reached."""
    parts = urlsplit(place.url)
    try:
        opened = asyncio.open_connection(parts.hostname, parts.port or 80, limit=CHUNK_BYTES)
        reader, writer = await asyncio.wait_for(opened, CONNECT_SECONDS)
    except (OSError, asyncio.TimeoutError) as error:
        place.failed_at = time.monotonic()
        reason = str(error) or f"no connection within {CONNECT_SECONDS:g} s"
        raise Upstream(503, _problem(f"{place.url} cannot be reached: {reason}")) from None
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    try:
        headers = {"Host": parts.netloc, "Connection": "close", "Content-Length": str(len(request.body))}
        headers |= {"Content-Type": "application/json"} if request.body else {}
        lines = "".join(f"{name}: {value}\r\n" for name, value in {**request.headers, **headers}.items())
        writer.write(f"{request.method} {request.path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + request.body)
        await writer.drain()
        yield reader
    except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        place.failed_at = time.monotonic()
        raise Upstream(502, _problem(f"The connection to {place.url} was lost: {error}")) from None
    finally:
        writer.close()


async def _exchange(place: Place, request: Request) -> bytes:
    """Return the body of an instance's answer. Raises Upstream for a status other than 200."""
    async with _sent(place, request) as reader:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        body = await reader.read()
        length = re.search(r"(?im)^content-length: *(\d{1,18})", head)
        if length and len(body) < int(length[1]):
            raise asyncio.IncompleteReadError(body, int(length[1]))
        if not (status := re.match(r"HTTP/1\.\d (\d{3})\b", head)):
            raise ValueError("the answer is not HTTP")
    if status[1] != "200":
        raise Upstream(int(status[1]), body)
    return body


def _json_object(text: bytes) -> dict[str, Any] | None:
    """Return a JSON object, None if the text is not one."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for each in tasks:
        each.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _closed(reader: asyncio.StreamReader) -> None:
    """Return when the client has closed the connection. Further data is dropped."""
    with contextlib.suppress(ConnectionError):
        while await reader.read(CHUNK_BYTES):
            pass


async def _relay(place: Place, request: Request, writer: asyncio.StreamWriter, begun: asyncio.Event) -> None:
    """Forward an instance's answer as it arrives; the first part sets `begun`. Raises Upstream if nothing has arrived;
    otherwise the client gets an incomplete answer.
    """
    try:
        async with _sent(place, request) as reader:
            while data := await reader.read(CHUNK_BYTES):
                begun.set()
                writer.write(data)
                if writer.transport.get_write_buffer_size() > CHUNK_BYTES:
                    try:
                        await asyncio.wait_for(writer.drain(), CLIENT_SECONDS)
                    except (ConnectionError, asyncio.TimeoutError):  # the client has left, or does not read
                        return writer.transport.abort()
    except Upstream:
        if not begun.is_set():
            raise
    else:
        if not begun.is_set():
            raise Upstream(502, _problem(f"{place.url} closed the connection without an answer"))


async def _reply(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    head = f"HTTP/1.1 {status} {'OK' if status == 200 else 'Error'}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    await writer.drain()


def _problem(text: str) -> bytes:
    return json.dumps({"error": {"message": text}}).encode()


async def main(router: Router, host: str, port: int) -> None:
    """Listen at `port` until the process is stopped."""
    listener = await asyncio.start_server(router.serve, host, port, limit=CHUNK_BYTES, backlog=1024)
    async with listener:
        await listener.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Route requests to instances.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--protocol", choices=PROTOCOLS, required=True)
    parser.add_argument("--prefill", type=Place.parse, action="append", default=[], metavar="URL[,PORT]")
    parser.add_argument("--decode", type=Place.parse, action="append", required=True, metavar="URL[,PORT]")
    given = parser.parse_args()
    if bool(given.prefill) == (given.protocol == PREFIX):
        parser.error(f"--protocol {PREFIX} has no --prefill, others need it")
    asyncio.run(main(Router(given.protocol, given.prefill, given.decode), given.host, given.port))
