"""One request over HTTP: sent, read to its end, and every way in which it can fail told by its kind."""

from __future__ import annotations

import asyncio
import time

import aiohttp

from flagcore.engines.serving.load.result import NotAnswered, ProblemKind
from flagcore.engines.serving.load.stream import Stream, message_of

_HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
_ERROR_BYTES = 1 << 16
_LOOK_S = 0.5
"""How often a waiting reader's connection is looked at."""


def session() -> aiohttp.ClientSession:
    """Return what requests are sent with. Every request has a connection of its own, without a limit of their number.

    A connection that is kept may be closed by the server in the moment in which it is used again, which would look
    like a failure; and a server that has one thread a connection would let new ones wait for those that are kept.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None),
        headers=_HEADERS,
        auto_decompress=False,
    )


async def ask(http: aiohttp.ClientSession, url: str, body: bytes, stream: Stream) -> float:
    """Send one request, feed its answer to `stream`, and return when it was sent, by `time.perf_counter`.

    Raises NotAnswered for all that a network and a server can do; the time is the caller's to limit.
    """
    sent = time.perf_counter()
    try:
        async with http.post(url, data=body, allow_redirects=False) as response:
            if response.status != 200:
                said = message_of(await response.content.read(_ERROR_BYTES))
                raise NotAnswered(ProblemKind.STATUS, f"HTTP {response.status} {response.reason or ''}: {said}")
            coding = response.headers.get("Content-Encoding", "identity")
            if coding.lower() != "identity":
                raise NotAnswered(ProblemKind.BROKEN, f"the stream is compressed ({coding}), which was not asked for")
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
        raise NotAnswered(ProblemKind.NOT_REACHED, f"{url}: {error.strerror or error}") from None
    except aiohttp.InvalidURL:
        raise NotAnswered(ProblemKind.NOT_REACHED, f"{url} is no URL of a server") from None
    except aiohttp.ClientResponseError as error:
        raise NotAnswered(ProblemKind.BROKEN, f"{url} does not answer in HTTP: {error.message}") from None
    except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
        why = str(error) or type(error).__name__
        raise NotAnswered(ProblemKind.CONNECTION_LOST, f"after {stream.events} events: {why}") from None
    return sent


class _Watch:
    """Wakes the reader of a response whose connection is gone while it waits.

    aiohttp 3.14 closes the connection at bytes that are no HTTP, and leaves who reads on waiting, if these bytes came
    after the headers.
    """

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self._handle: asyncio.TimerHandle | None = None
        self._look()

    def _look(self) -> None:
        content, connection = self._response.content, self._response.connection
        if connection is None or content.is_eof() or content.exception() is not None:
            return  # the answer is whole, or its reader has been told
        if connection.transport is None or connection.transport.is_closing():
            gone = "the connection was given up for what came after the headers"
            content.set_exception(
                aiohttp.ClientResponseError(self._response.request_info, self._response.history, message=gone)
            )
            return
        self._handle = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def end(self) -> None:
        """Look no more."""
        if self._handle is not None:
            self._handle.cancel()
