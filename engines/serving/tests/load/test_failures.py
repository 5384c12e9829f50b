"""Servers that misbehave: each way has its class and message, and none leaves a figure behind."""

import asyncio
import gzip
import json
import re
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from flagcore_serving.job import Load
from flagcore_serving.load.result import LoadResult, ProblemKind

from engines.serving.tests.load.servers import (
    Behaviour,
    Body,
    Wire,
    after_each_answer,
    piece,
    pieces,
    send,
    serving,
    usage,
    well,
)

pytestmark = pytest.mark.slow

LOAD = Load(input_len=8, output_len=5, num_prompts=4, concurrency=2)


def loaded(behaviour: Behaviour, timeout_s: float = 60.0) -> LoadResult:
    with serving(behaviour) as served:
        return send(served.url, load=LOAD, timeout_s=timeout_s)


Part = int | float | bytes | str | dict[str, Any] | Callable[[Body], Body]
DONE, END, HANG_UP = "[DONE]", "the end", "hang up"


def sends(*parts: Part, status: str = "200 OK", kind: str = "text/event-stream", chunked: bool = True) -> Behaviour:
    """A server that sends a head and `parts`: as many pieces, bytes, events, seconds to wait, END, or HANG_UP."""

    async def behaviour(body: Body, wire: Wire) -> None:
        await wire.head(status, kind, chunked=chunked)
        for part in parts:
            if part == END:
                await wire.end()
            elif part == HANG_UP:
                wire.close_connection()
            elif isinstance(part, bytes):
                await wire.send(part)
            elif isinstance(part, float):
                await asyncio.sleep(part)
            elif isinstance(part, int):
                await pieces(part, wire)
            else:
                await wire.event(part(body) if callable(part) else part)

    return behaviour


def raw(*parts: bytes | float) -> Behaviour:
    """A server that sends bytes as they are, and waits for seconds."""

    async def behaviour(body: Body, wire: Wire) -> None:
        for part in parts:
            await (wire.raw(part) if isinstance(part, bytes) else asyncio.sleep(part))

    return behaviour


def finished(made: int | None = None, reason: str = "length", read: int | None = None) -> tuple[Part, ...]:
    """The last parts of an answer."""
    return piece("", reason), lambda body: usage(body, made, read), DONE, END


def counts(made: object) -> tuple[Part, ...]:
    return 5, {"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": made}}, DONE, END


def body_of(data: object, end: bytes = b"") -> bytes:
    return json.dumps(data).encode() + end


async def never_stops(body: Body, wire: Wire) -> None:
    await wire.head()
    while True:
        await pieces(10, wire)


async def answers_without_streaming(body: Body, wire: Wire) -> None:
    await sends(body_of({**piece(" a" * 5, "length"), "usage": usage(body)["usage"]}, b"\n"), END, kind=JSON)(
        body, wire
    )


STREAM, JSON = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n", "application/json"
PACKED = gzip.compress(b"data: [DONE]\n\n")
TOO_LONG = {"error": {"message": "This model's maximum context length is 4 tokens.", "type": "BadRequestError"}}
LOST, BROKEN, NO_USAGE = ProblemKind.CONNECTION_LOST, ProblemKind.BROKEN, ProblemKind.NO_USAGE
WRONG, ERROR, STATUS = ProblemKind.WRONG_LENGTH, ProblemKind.ERROR, ProblemKind.STATUS
cut_short = sends(3, *finished(made=3))
no_usage = sends(5, piece("", "length"), DONE, END)
MISBEHAVING: list[tuple[Behaviour, ProblemKind, str]] = [
    (sends(5, piece("", "length"), usage, END), LOST, "the stream ended after 6 events, without [DONE]"),
    (sends(*counts(-5)), NO_USAGE, "completion_tokens is -5"),
    (sends(*counts(4)), WRONG, "4 tokens instead of 5"),
    (sends(*counts(None)), NO_USAGE, "completion_tokens is None"),
    (sends(HANG_UP), LOST, "after 0 events"),
    (sends(3, HANG_UP), LOST, ""),
    (sends(3, chunked=False), LOST, "the stream ended after 3 events, unfinished"),
    (sends(3, END), LOST, "the stream ended after 3 events, unfinished"),
    (raw(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 8\r\n\r\noverload"), STATUS, "HTTP 503 Service"),
    (raw(b"HTTP/1.1 429 Too Many\r\nContent-Length: 9999\r\n\r\nslow down", 600.0), STATUS, "429 Too Many: slow down"),
    (raw(b"HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n"), STATUS, "HTTP 302 Found"),
    (raw(b"HTTP/1.1 200 OK\r\nX-Trace: " + b"a" * (1 << 20), 600.0), BROKEN, "Got more than"),
    (
        raw(STREAM + f"Content-Encoding: gzip\r\nContent-Length: {len(PACKED)}\r\n\r\n".encode() + PACKED),
        BROKEN,
        "(gzip)",
    ),
    (raw(STREAM + b"Content-Length: 999\r\n\r\ndata: {"), LOST, "after 0 events"),
    (raw(b"SSH-2.0-OpenSSH_9.2\r\n\r\n"), BROKEN, "does not answer in HTTP"),
    (never_stops, WRONG, "max_tokens was ignored"),
    (sends(7, *finished(made=5)), NO_USAGE, "counts 5 tokens, but 7 events have text"),
    (sends({"choices": [{"index": 0, "text": " a"}, {"index": 1, "text": " b"}]}), BROKEN, "several choices"),
    (cut_short, WRONG, "3 tokens instead of 5; prompt and answer do not fit into the context"),
    (sends(2, *finished(made=2, reason="stop")), WRONG, "2 tokens instead of 5; ignore_eos"),
    (sends(7, *finished(made=7)), WRONG, "7 tokens instead of 5; max_tokens"),
    (sends(5, *finished(read=3)), WRONG, "the server counts 3 prompt tokens, but 8 were sent"),
    (sends(5, *finished(reason="abort")), ERROR, "finish_reason is 'abort'"),
    (sends(2, {"error": {"message": "EngineCore encountered an issue"}}, DONE, END), ERROR, "EngineCore encountered"),
    (sends(b'error: {"code":500,"message":"failed to decode"}\n\n', END), ERROR, "failed to decode"),
    (sends({"object": "error", "message": "out of blocks", "code": 500}, END), ERROR, "out of blocks"),
    (sends(body_of({"error": {"message": "model is loading"}}), END, kind=JSON), ERROR, "model is loading"),
    (answers_without_streaming, BROKEN, "the answer is not streamed: b'{"),
    (sends(body_of(TOO_LONG), END, status="400 Bad Request", kind=JSON), STATUS, "HTTP 400 Bad Request: This model's"),
    (
        sends(b"<h1>Loading\n model</h1>", END, status="503 X", kind="text/html"),
        STATUS,
        "503 X: <h1>Loading model</h1>",
    ),
    (sends(b"\x00\xff\xfe nonsense\n\n", END), BROKEN, "b'\\x00\\xff\\xfe nonsense'"),
    (sends(2, '{"id": "x", "choices": [{"index": 0, "text": " a', *finished()), BROKEN, "an event is not JSON"),
    (sends({"id": "x"}, *finished()), BROKEN, "an event has neither choices nor usage"),
    (sends({"choices": [{"text": 5}]}, *finished()), BROKEN, "the text of a choice is int"),
    (sends(*[b"a" * (1 << 19)] * 40), BROKEN, "a line has no end"),
    (sends(usage, DONE, END), BROKEN, "the server counts 5 tokens, but no event has any"),
    (no_usage, NO_USAGE, "without token counts"),
]


@pytest.mark.parametrize(("behaviour", "kind", "message"), MISBEHAVING)
def test_server_that_misbehaves_gives_a_problem_of_its_class_and_no_figures(
    behaviour: Behaviour, kind: ProblemKind, message: str
) -> None:
    result = loaded(behaviour)
    assert result.problems[0].startswith(f"{kind.value}: ")
    assert message in result.problems[0]
    assert "\n" not in result.problems[0]
    assert result.failed > 0
    assert result.completed == 0
    assert not result.figures
    assert not result.requests


async def keeps_alive_and_spells_it_differently(body: Body, wire: Wire) -> None:
    """Comments, no space after `data:`, CRLF, bytes of one character in two chunks: an answer all the same."""
    await wire.head()
    await wire.send(b": keep-alive\r\n\r\n")
    events = [{"choices": [{"index": 0, "text": "\u00e9\u6f22", "finish_reason": None}]}] * 5
    events += [{"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}, usage(body)]
    data = b"".join(b"data:" + json.dumps(event, ensure_ascii=False).encode() + b"\r\n\r\n" for event in events)
    for place in range(0, len(data), 7):
        await wire.send(data[place : place + 7])
    await wire.send(b":\r\n\r\ndata:[DONE]\r\n\r\n")
    await wire.end()


async def resets_connections_after_answers(body: Body, wire: Wire) -> None:
    await wire.head()
    await pieces(5, wire)
    await wire.event(piece("", "length"))
    await wire.event(usage(body))
    await wire.event("[DONE]")
    no_linger = struct.pack("ii", 1, 0)
    wire.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_linger)
    wire.close_connection()


@pytest.mark.parametrize("behaviour", [keeps_alive_and_spells_it_differently, resets_connections_after_answers])
def test_an_answer_counts_in_any_stream_format_and_chunking(behaviour: Behaviour) -> None:
    result = loaded(behaviour)
    assert (result.problems, result.completed) == ((), 4)
    assert {(each.output_tokens, len(each.gaps_s)) for each in result.requests} == {(5, 4)}


def test_one_wrong_answer_among_right_ones_voids_the_load() -> None:
    seen: list[Body] = []

    async def third_is_short(body: Body, wire: Wire) -> None:
        seen.append(body)
        await (cut_short if len(seen) == 3 else well)(body, wire)

    result = loaded(third_is_short)
    assert result.failed == 1
    assert 2 <= result.completed <= 3
    assert not result.figures


def test_a_missing_server_is_not_reached() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        result = send(f"http://127.0.0.1:{unused.getsockname()[1]}", load=LOAD)
    assert result.problems[0].startswith("not reached: http://127.0.0.1")
    assert "Connect call failed" in result.problems[0] or "refused" in result.problems[0].lower()


stops_in_the_middle = sends(2, 600.0)


async def pings_for_ever(body: Body, wire: Wire) -> None:
    await wire.head()
    while True:
        await wire.send(b": ping\n\n")
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("behaviour", [raw(600.0), stops_in_the_middle, pings_for_ever])
def test_an_endless_answer_ends_with_the_load(behaviour: Behaviour) -> None:
    result = loaded(behaviour, timeout_s=0.3)
    assert re.fullmatch(r"timed out: not answered within 0\.\d s \(4 requests\)", *result.problems)
    assert result.failed == 4
    assert not result.figures


def test_a_server_that_dies_ends_the_load_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(well) as other, serving(stops_in_the_middle) as served:
        seen: Sequence[Body] = other.bodies

        def stop(done: int) -> None:
            if done == 20:
                served.stop()

        after_each_answer(monkeypatch, stop)
        load = Load(input_len=8, output_len=5, num_prompts=10_000, concurrency=4)
        result = send(served.url, other.url, load=load, timeout_s=600)
    assert result.problems[0].startswith("connection lost")
    assert result.failed >= 1
    assert len(seen) < 9_000
    assert not result.figures
