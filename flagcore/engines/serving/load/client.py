"""One request over HTTP, with a kind for every way in which it can fail."""

from __future__ import annotations

import asyncio
import time

import aiohttp

from flagcore.engines.serving.load.result import ProblemKind, RequestFailed
from flagcore.engines.serving.load.stream import Stream, message_of

_HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
_ERROR_BYTES = 1 << 16
_LOOK_S = 0.5
"""Seconds between two checks of a waiting reader's connection."""


def session() -> aiohttp.ClientSession:
    """Return a session that opens a connection for every request, without a limit.

    A server may close a kept-alive connection at the moment of its reuse, which would look like a failure; and a server
    with one thread per connection would let new ones wait.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None),
        headers=_HEADERS,
        auto_decompress=False,
    )


async def ask(http: aiohttp.ClientSession, url: str, body: bytes, stream: Stream) -> float:
    """Send one request, feed its answer to `stream`, and return when it was sent, by `time.perf_counter`.

    Raises RequestFailed for every failure of network and server; the caller limits the time.
    """
    sent = time.perf_counter()
    try:
        async with http.post(url, data=body, allow_redirects=False) as response:
            if response.status != 200:
                message = message_of(await response.content.read(_ERROR_BYTES))
                raise RequestFailed(ProblemKind.STATUS, f"HTTP {response.status} {response.reason or ''}: {message}")
            coding = response.headers.get("Content-Encoding", "identity")
            if coding.lower() != "identity":
                raise RequestFailed(ProblemKind.BROKEN, f"the stream is compressed ({coding}), which was not requested")
            content, watch = response.content, _Watch(response)
            try:
                while not stream.done:
                    data = await content.readany()
                    if not data:
                        break
                    stream.feed(data, time.perf_counter())
            finally:
                watch.end()
    except aiohttp.ClientConnectorError as error:
        raise RequestFailed(ProblemKind.NOT_REACHED, f"{url}: {error.strerror or error}") from None
    except aiohttp.InvalidURL:
        raise RequestFailed(ProblemKind.NOT_REACHED, f"{url} is not the URL of a server") from None
    except aiohttp.ClientResponseError as error:
        raise RequestFailed(ProblemKind.BROKEN, f"{url} does not answer in HTTP: {error.message}") from None
    except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
        why = str(error) or type(error).__name__
        raise RequestFailed(ProblemKind.CONNECTION_LOST, f"after {stream.events} events: {why}") from None
    return sent


class _Watch:
    """Wakes the reader of a response whose connection is gone.

    aiohttp 3.14 closes the connection at invalid bytes, and leaves the reader waiting if they came after the headers.
    """

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self._handle: asyncio.TimerHandle | None = None
        self._look()

    def _look(self) -> None:
        content, connection = self._response.content, self._response.connection
        if connection is None or content.is_eof() or content.exception() is not None:
            return  # the answer is complete, or its reader has the error
        if connection.transport is None or connection.transport.is_closing():
            gone = "the connection was closed for invalid bytes after the headers"
            content.set_exception(
                aiohttp.ClientResponseError(self._response.request_info, self._response.history, message=gone)
            )
            return
        self._handle = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def end(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
