"""Sends single requests over HTTP and classifies their failures."""

import asyncio
import contextlib
import time
import types
from collections.abc import AsyncIterator, Mapping

import aiohttp

from flagcore.engines.serving.load.result import ProblemKind, RequestFailed
from flagcore.engines.serving.load.stream import Stream, message_of

_HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
_ERROR_BYTES = 1 << 16


def session() -> aiohttp.ClientSession:
    """Return a session that opens a new connection for every request, without a limit on their number.

    If connections were kept alive, a server could close one just when it is reused, which would look like a failure,
    and a server with one thread per connection would delay new ones.
    """
    trace = aiohttp.TraceConfig()
    trace.on_request_chunk_sent.append(_Sending.store)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None),
        headers=_HEADERS,
        auto_decompress=False,
        trace_configs=[trace],
    )


class _Sending:
    """The `time.perf_counter()` at which the first bytes of a request's body are sent; until then, of its creation."""

    def __init__(self) -> None:
        self.time_s, self.has_begun = time.perf_counter(), False

    @staticmethod
    async def store(
        http: aiohttp.ClientSession, context: types.SimpleNamespace, params: aiohttp.TraceRequestChunkSentParams
    ) -> None:
        sending: _Sending = context.trace_request_ctx
        if not sending.has_begun:
            sending.time_s, sending.has_begun = time.perf_counter(), True


async def send_request(
    http: aiohttp.ClientSession, url: str, body: bytes, stream: Stream, headers: Mapping[str, str] | None = None
) -> float:
    """Send one request, feed its answer to `stream`, and return the `time.perf_counter()` at which it was sent.

    The time to open the connection does not count, because clients that reuse connections do not measure it either.
    Raises RequestFailed for every failure of the network or the server. The caller is responsible for a timeout.
    """
    sending = _Sending()
    async with _answer(http, url, body, headers, sending, stream) as response:
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            raise RequestFailed(ProblemKind.BROKEN, f"the stream is compressed ({encoding}), which was not requested")
        while not stream.done and (data := await response.content.readany()):
            now = time.perf_counter()
            if b"[DONE]" in data:
                await asyncio.sleep(0)  # let other answers that arrived now be read first
            stream.feed(data, now)
    return sending.time_s


async def post(http: aiohttp.ClientSession, url: str, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
    """Send one request and return its whole answer. Raises RequestFailed, as `send_request` does."""
    async with _answer(http, url, body, headers, _Sending(), None) as response:
        return await response.read()


@contextlib.asynccontextmanager
async def _answer(
    http: aiohttp.ClientSession,
    url: str,
    body: bytes,
    headers: Mapping[str, str] | None,
    sending: _Sending,
    stream: Stream | None,
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Send one request and yield the response. Raises RequestFailed, also for a status other than 200."""
    try:
        async with http.post(
            url, data=body, headers=headers, allow_redirects=False, trace_request_ctx=sending
        ) as response:
            if response.status != 200:
                message = message_of(await response.content.read(_ERROR_BYTES))
                raise RequestFailed(ProblemKind.STATUS, f"HTTP {response.status} {response.reason or ''}: {message}")
            yield response
    except aiohttp.ClientConnectorError as error:
        raise RequestFailed(ProblemKind.NOT_REACHED, f"{url}: {error.strerror or error}") from None
    except aiohttp.InvalidURL:
        raise RequestFailed(ProblemKind.NOT_REACHED, f"{url} is not the URL of a server") from None
    except aiohttp.ClientResponseError as error:
        raise RequestFailed(ProblemKind.BROKEN, f"{url} does not answer in HTTP: {error.message}") from None
    except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
        reason = str(error) or type(error).__name__
        events = 0 if stream is None else stream.events
        raise RequestFailed(ProblemKind.CONNECTION_LOST, f"after {events} events: {reason}") from None
