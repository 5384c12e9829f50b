"""Sends single requests over HTTP, classifies their failures, and parses streamed answers.

Answers are server-sent events of OpenAI's APIs for completions and chats; their parser does no I/O.

The events of one answer usually differ only in their text. An event is parsed only if it also differs elsewhere from
the last parsed event: comparing bytes is ten times as fast as parsing.

Sources of the protocols between servers that only prefill and servers that only decode: vllm 0.32
`distributed/kv_transfer/kv_connector/v1/nixl`, vllm 0.23 `v1/p2p/p2p_nccl_connector.py` (addresses in the request's
id), sglang 0.5.23 `srt/disaggregation` (bootstrap room).
"""

import asyncio
import contextlib
import json
import math
import random
import time
import types
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from flagcore_serving.load.result import Answer, ProblemKind, RequestFailed, Target
from flagcore_serving.load.routing import BOOTSTRAP, NIXL, P2P, LeastBusy

_IGNORED_FIELDS = (b":", b"event:", b"id:", b"retry:")
_TEXTS = (b'"text":', b'"content":')
_DELTAS = ("content", "reasoning_content", "reasoning")
"""Keys that contain the text in an event of a chat."""
_NO_PREFIX = b"\n"
"""A prefix that no line has."""
_MAX_LINE = 1 << 24
"""Maximum number of bytes of a line."""
_FINISH_REASONS = (None, "length", "stop")
_MAX_EXTRA = 100
"""An answer with this many more events than requested tokens fails before its end."""


class Stream:
    """Parses the bytes of one answer as they arrive. Raises RequestFailed at the first invalid event.

    `requested`: the requested number of output tokens.
    """

    def __init__(self, requested: float = math.inf) -> None:
        self.done = False
        self._most = requested + _MAX_EXTRA
        self._rest = b""
        self._head, self._tail = _NO_PREFIX, _NO_PREFIX
        self._pieces: list[float] = []
        self._textless: list[float] = []
        self._last = 0.0
        self._usage: dict[str, Any] | None = None
        self._finish: str | None = None

    def feed(self, data: bytes, now: float) -> None:
        """Parse bytes that arrived at the time `now`, in seconds of any clock."""
        lines = (self._rest + data if self._rest else data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > _MAX_LINE:
            raise RequestFailed(ProblemKind.BROKEN, f"a line has no end: {self._rest[:80]!r}")
        head, tail = self._head, self._tail
        begin, end = len(head), len(tail)
        for line in lines:
            stop = len(line) - end
            if stop > begin and line.startswith(head) and line.endswith(tail) and line.find(b'"', begin, stop) < 0:
                self._pieces.append(now)
                self._last = now
            elif line and line != b"\r":
                self._line(line, now)
                head, tail = self._head, self._tail
                begin, end = len(head), len(tail)
        if len(self._pieces) > self._most:
            reason = f"the answer goes on after {self._most:.0f} events with text; max_tokens was ignored"
            raise RequestFailed(ProblemKind.WRONG_LENGTH, reason)

    @property
    def events(self) -> int:
        return len(self._pieces) + len(self._textless)

    @property
    def times(self) -> Sequence[float]:
        """The arrival times of the events with text, or of all events if none has text."""
        return self._pieces or self._textless

    def answer(self, *, sent_s: float, start_s: float, input_tokens: int, output_tokens: int, target: int) -> Answer:
        """Return the complete answer. `sent_s`: when the request was sent, on the clock of `feed`.

        Raises RequestFailed if the answer is incomplete or has a wrong length.
        """
        usage = self._usage
        if not self.done:
            if (unparsed := self._rest.strip()).startswith(b"{"):
                self._raise_unstreamed(unparsed)
            problem = "unfinished" if usage is None else "without [DONE]"
            raise RequestFailed(ProblemKind.CONNECTION_LOST, f"the stream ended after {self.events} events, {problem}")
        if usage is None:
            raise RequestFailed(ProblemKind.NO_USAGE, "the stream ended without token counts")
        if self._finish not in _FINISH_REASONS:
            raise RequestFailed(ProblemKind.ERROR, f"finish_reason is {self._finish!r}")
        self._check_counts(usage, input_tokens, output_tokens)
        input_tokens = input_tokens or _prompt_tokens(usage)
        pieces = self.times  # if no event has text, all are special tokens or incomplete characters
        if not pieces:
            raise RequestFailed(ProblemKind.BROKEN, f"the server counts {output_tokens} tokens, but no event has any")
        first = pieces[0]
        return Answer(
            start_s=start_s,
            ttft_s=first - sent_s,
            tpot_s=(self._last - first) / (output_tokens - 1) if output_tokens > 1 and self.events > 1 else None,
            e2e_s=self._last - sent_s,
            gaps_s=tuple(after - before for before, after in pairwise(pieces)),
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            target=target,
        )

    def _check_counts(self, usage: dict[str, Any], input_tokens: int, output_tokens: int) -> None:
        completion, prompt = usage.get("completion_tokens"), usage.get("prompt_tokens")
        if type(completion) is not int or completion < 0:
            raise RequestFailed(ProblemKind.NO_USAGE, f"completion_tokens is {completion!r}")
        # one extra event is allowed: the server may send the rest of its text buffer without a new token
        if len(self._pieces) > completion + 1:
            reason = f"the server counts {completion} tokens, but {len(self._pieces)} events have text"
            raise RequestFailed(ProblemKind.NO_USAGE, reason)
        if completion != output_tokens:
            reason = "ignore_eos was ignored" if self._finish == "stop" else "max_tokens was ignored"
            if self._finish != "stop" and completion < output_tokens:
                reason = "prompt and answer do not fit into the context of one request"
            raise RequestFailed(ProblemKind.WRONG_LENGTH, f"{completion} tokens instead of {output_tokens}; {reason}")
        if isinstance(prompt, int) and prompt < input_tokens:
            raise RequestFailed(
                ProblemKind.WRONG_LENGTH, f"the server counts {prompt} prompt tokens, but {input_tokens} were sent"
            )

    def _line(self, line: bytes, now: float) -> None:
        if self.done:
            return
        if line.startswith(b"data:"):
            payload = line[5:].strip()
            if payload == b"[DONE]":
                self.done, self._head = True, _NO_PREFIX
            else:
                self._event(payload, now, line)
        elif line.startswith(b"error:"):
            raise RequestFailed(ProblemKind.ERROR, message_of(line[6:].strip()))
        elif line.startswith(b"{"):
            self._raise_unstreamed(line)
        elif not line.startswith(_IGNORED_FIELDS):
            raise RequestFailed(ProblemKind.BROKEN, f"a line is not an event: {line[:80]!r}")

    def _event(self, payload: bytes, now: float, line: bytes) -> None:
        try:
            data = json.loads(payload)
        except (ValueError, RecursionError):
            raise RequestFailed(ProblemKind.BROKEN, f"an event is not JSON: {payload[:80]!r}") from None
        if not isinstance(data, dict):
            raise RequestFailed(ProblemKind.BROKEN, f"an event is not an object: {payload[:80]!r}")
        if _is_error(data):
            raise RequestFailed(ProblemKind.ERROR, message_of(payload))
        usage, choices = data.get("usage"), data.get("choices")
        if isinstance(data.get("meta_info"), dict):
            usage, choices = data["meta_info"], [_native_choice(data)]
        if isinstance(usage, dict):
            self._usage = usage
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            if len(choices) > 1 or choices[0].get("index"):
                raise RequestFailed(ProblemKind.BROKEN, "the answer has several choices instead of one")
            self._choice(choices[0], now)
            if choices[0].get("finish_reason") is None and usage is None:
                self._store_frame(line)
        elif choices != [] and not isinstance(usage, dict):
            raise RequestFailed(ProblemKind.BROKEN, f"an event has neither choices nor usage: {payload[:80]!r}")

    def _raise_unstreamed(self, body: bytes) -> None:
        """Raise RequestFailed for a JSON body instead of a stream, with the body's error message if it has one."""
        data = None
        with suppress(ValueError, RecursionError):
            data = json.loads(body)
        if isinstance(data, dict) and _is_error(data):
            raise RequestFailed(ProblemKind.ERROR, message_of(body))
        raise RequestFailed(ProblemKind.BROKEN, f"the answer is not streamed: {body[:80]!r}")

    def _choice(self, choice: dict[str, Any], now: float) -> None:
        text, finish = choice.get("text"), choice.get("finish_reason")
        if isinstance(delta := choice.get("delta"), dict):
            text = next((delta[key] for key in _DELTAS if delta.get(key)), None)
        if not isinstance(text, str | None):
            raise RequestFailed(ProblemKind.BROKEN, f"the text of a choice is {type(text).__name__}")
        (self._pieces if text or choice.get("token_ids") else self._textless).append(now)
        self._last = now
        if finish is not None:
            self._finish = str(finish)

    def _store_frame(self, line: bytes) -> None:
        """Store the bytes of an event around its text, so that events that differ only in their text are not parsed."""
        key = next((key for key in _TEXTS if key in line), b"")
        begin = line.find(key)
        if not key or line.find(key, begin + 1) >= 0:
            return
        begin += len(key)
        while line[begin : begin + 1] == b" ":
            begin += 1
        end = line.find(b'"', begin + 1)
        if line[begin : begin + 1] == b'"' and end > 0 and b"\\" not in line[begin:end]:
            self._head, self._tail = line[: begin + 1], line[end:]


def _prompt_tokens(usage: dict[str, Any]) -> int:
    """Return the number of prompt tokens that the server counted. Raises RequestFailed if it is missing or invalid."""
    count = usage.get("prompt_tokens")
    if type(count) is not int or not 0 < count < 1 << 31:
        raise RequestFailed(ProblemKind.NO_USAGE, f"prompt_tokens is {count!r}")
    return count


def _is_error(data: dict[str, Any]) -> bool:
    return bool(data.get("error")) or data.get("object") == "error"


def message_of(body: bytes) -> str:
    """Return the message in an error response of any known format, or else the whole body."""
    text = body.decode("utf-8", "replace").strip()
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return text
    for _ in range(3):
        if not isinstance(data, dict):
            break
        data = next((data[key] for key in ("error", "message", "detail") if data.get(key)), str(data))
    return data if isinstance(data, str) else text


def _native_choice(data: dict[str, Any]) -> dict[str, Any]:
    """Return an event of /generate as a choice."""
    end = data["meta_info"].get("finish_reason")
    end = end.get("type") if isinstance(end, dict) else end
    return {"text": data.get("text"), "token_ids": data.get("output_ids"), "finish_reason": end}


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
