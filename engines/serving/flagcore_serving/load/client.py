"""Sends single requests over HTTP and classifies their failures.

Sources of the protocols between servers that only prefill and servers that only decode: vllm 0.32
`distributed/kv_transfer/kv_connector/v1/nixl`, vllm 0.23 `v1/p2p/p2p_nccl_connector.py` (addresses in the request's
id), sglang 0.5.23 `srt/disaggregation` (bootstrap room).
"""

import asyncio
import contextlib
import json
import random
import time
import types
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from flagcore_serving.load.result import ProblemKind, RequestFailed, Target
from flagcore_serving.load.routing import BOOTSTRAP, NIXL, P2P, LeastBusy
from flagcore_serving.load.stream import Stream, message_of

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
    """The `time.perf_counter()` value at which the first bytes of a request's body were sent.

    Until then, it is the time at which this object was created.
    """

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
    Raises RequestFailed if the network or the server fails. The caller must set a timeout.
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


_REMOTE_KEYS = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
_REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False, **dict.fromkeys(_REMOTE_KEYS)}


class Pairs:
    """Sends each request to the least busy of the servers `prefill`, and to the server that decodes its answer."""

    def __init__(self, protocol: str, prefill: Sequence[Target]) -> None:
        self._protocol, self._prefill, self._router = protocol, prefill, LeastBusy(len(prefill))

    async def send(self, http: aiohttp.ClientSession, decode: Target, body: bytes, stream: Stream) -> float:
        """Send one request to both servers and feed the answer of the server `decode` to `stream`.

        Returns the `time.perf_counter()` of the first send. Raises RequestFailed.
        """
        place = self._router.choose()
        prefill, request, headers = self._prefill[place], json.loads(body), dict[str, str]()
        self._router.begin(place)
        try:
            if self._protocol == BOOTSTRAP:
                host = urlsplit(prefill.url).hostname
                room = {"bootstrap_host": host, "bootstrap_port": prefill.transfer_port}
                body_for_both = _encoded({**request, **room, "bootstrap_room": random.getrandbits(62)})
                first = asyncio.ensure_future(post(http, prefill.address, body_for_both))
                second = asyncio.ensure_future(send_request(http, decode.address, body_for_both, stream))
                try:  # cancel both if one fails, because the other one would wait for it
                    return (await asyncio.gather(first, second))[1]
                finally:
                    first.cancel()
                    second.cancel()
            if self._protocol == P2P:
                places = [f"{urlsplit(each.url).hostname}:{each.transfer_port}" for each in (prefill, decode)]
                addresses = "___prefill_addr_{}___decode_addr_{}".format(*places)
                headers["X-Request-Id"] = f"{addresses}_{uuid.uuid4().hex}"
            sent = time.perf_counter()
            answer = await post(http, prefill.address, _encoded(self._prompt_only(request)), headers)
        finally:
            self._router.end(place)
        if self._protocol == NIXL:
            request["kv_transfer_params"] = _transfer_params(answer, prefill.url)
        await send_request(http, decode.address, _encoded(request), stream, headers)
        return sent

    def _prompt_only(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the request for the prefill server. The server answers with one token, which is not used."""
        dropped = ("stream", "stream_options")
        prompt = {key: value for key, value in request.items() if key not in dropped} | {"max_tokens": 1}
        return prompt | ({"kv_transfer_params": _REMOTE_DECODE} if self._protocol == NIXL else {})


class Encoders:
    """Sends each image to the least busy of `servers`, which encode images for the server that gets the request."""

    def __init__(self, servers: Sequence[Target]) -> None:
        self._servers, self._router = servers, LeastBusy(len(servers))

    async def send(self, http: aiohttp.ClientSession, body: bytes) -> float | None:
        """Send the images of a request, and return the `time.perf_counter()` of the first send when all are encoded.

        Returns None if there are none. Raises RequestFailed.
        """
        request, sent = json.loads(body), time.perf_counter()
        contents = [each["content"] for each in request.get("messages", ()) if isinstance(each["content"], list)]
        images = [part for content in contents for part in content if part["type"] == "image_url"]
        await asyncio.gather(*(self._encode(http, request["model"], each) for each in images))
        return sent if images else None

    async def _encode(self, http: aiohttp.ClientSession, model: str, image: dict[str, Any]) -> None:
        place = self._router.choose()
        self._router.begin(place)
        try:
            message = {"role": "user", "content": [image]}
            await post(
                http, self._servers[place].address, _encoded({"model": model, "messages": [message], "max_tokens": 1})
            )
        finally:
            self._router.end(place)


def _transfer_params(answer: bytes, url: str) -> Any:
    """Return the location of a prompt's cache from the answer of the prefill server at `url`. Raises RequestFailed."""
    try:
        params = json.loads(answer)["kv_transfer_params"]
    except (ValueError, LookupError, TypeError):
        params = None
    if params is None:
        raise RequestFailed(ProblemKind.BROKEN, f"{url} answered without kv_transfer_params")
    return params


def _encoded(request: dict[str, Any]) -> bytes:
    return json.dumps(request, separators=(",", ":")).encode()
