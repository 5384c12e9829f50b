"""Servers that misbehave: each way has its class and message, and none leaves a figure behind."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import socket
import struct
from collections.abc import Sequence

import pytest

from flagcore.domain.serving import Load
from flagcore.engines.serving.load.result import LoadResult, ProblemKind, Target
from flagcore.engines.serving.load.sending import measure
from tests.engines.serving.load.servers import (
    Behaviour,
    Body,
    Wire,
    after_each_answer,
    finish,
    piece,
    pieces,
    serving,
    usage,
    well,
)

pytestmark = pytest.mark.slow

LOAD = Load(input_len=8, output_len=5, num_prompts=4, concurrency=2)


def send(*urls: str, load: Load = LOAD, timeout_s: float = 60.0) -> LoadResult:
    return measure([Target(url) for url in urls], load, model="m", vocab_size=1000, seed=0, timeout_s=timeout_s)


def loaded(behaviour: Behaviour, timeout_s: float = 60.0) -> LoadResult:
    with serving(behaviour) as served:
        return send(served.url, timeout_s=timeout_s)


async def cut_short(body: Body, wire: Wire) -> None:
    await wire.head()
    await pieces(3, wire)
    await finish(body, wire, made=3)


async def stops_at_the_end_token(body: Body, wire: Wire) -> None:
    await wire.head()
    await pieces(2, wire)
    await finish(body, wire, made=2, reason="stop")


async def says_more_than_requested(body: Body, wire: Wire) -> None:
    await wire.head()
    await pieces(7, wire)
    await finish(body, wire, made=7)


async def reads_a_part_of_the_prompt(body: Body, wire: Wire) -> None:
    await wire.head()
    await pieces(5, wire)
    await wire.event(piece("", "length"))
    await wire.event(usage(body, read=3))
    await wire.event("[DONE]")
    await wire.end()


async def error_in_the_stream(body: Body, wire: Wire) -> None:
    await wire.head()
    await pieces(2, wire)
    await wire.event({"error": {"message": "EngineCore encountered an issue", "type": "InternalServerError"}})
    await wire.event("[DONE]")
    await wire.end()


async def error_as_a_field_of_the_stream(body: Body, wire: Wire) -> None:
    await wire.head()
    await wire.send(b'error: {"code":500,"message":"failed to decode"}\n\n')
    await wire.end()


async def error_as_an_object(body: Body, wire: Wire) -> None:
    await wire.head()
    await wire.event({"object": "error", "message": "out of blocks", "code": 500})
    await wire.end()


async def error_as_json_instead_of_a_stream(body: Body, wire: Wire) -> None:
    await wire.head(kind="application/json")
    await wire.send(json.dumps({"error": "model is loading"}).encode() + b"\n")
    await wire.end()


async def error_as_json_without_a_newline(body: Body, wire: Wire) -> None:
    await wire.head(kind="application/json")
    await wire.send(json.dumps({"error": {"message": "model is loading", "code": 503}}).encode())
    await wire.end()


async def answers_without_streaming(body: Body, wire: Wire) -> None:
    await wire.head(kind="application/json")
    await wire.send(json.dumps({**piece(" a" * 5, "length"), "usage": usage(body)["usage"]}).encode() + b"\n")
    await wire.end()


async def aborts(body: Body, wire: Wire) -> None:
    await wire.head()
    await pieces(5, wire)
    await finish(body, wire, reason="abort")


async def too_long(body: Body, wire: Wire) -> None:
    await wire.head("400 Bad Request", "application/json")
    reported_text = {
        "error": {"message": "This model's maximum context length is 4 tokens.", "type": "BadRequestError"}
    }
    await wire.send(json.dumps(reported_text).encode())
    await wire.end()


async def unavailable(body: Body, wire: Wire) -> None:
    await wire.head("503 Service Unavailable", "text/html")
    await wire.send(b"<h1>Loading\n model</h1>")
    await wire.end()


async def not_found(body: Body, wire: Wire) -> None:
    await wire.head("404 Not Found", "application/json")
    await wire.send(json.dumps({"detail": "Not Found"}).encode())
    await wire.end()


async def garbage(body: Body, wire: Wire) -> None:
    await wire.head()
    await wire.send(b"\x00\xff\xfe nonsense\n\n")
    await wire.end()


async def event_that_is_cut_off(body: Body, wire: Wire) -> None:
    await wire.head()
    await pieces(2, wire)
    await wire.event('{"id": "x", "choices": [{"index": 0, "text": " a')
    await finish(body, wire)


async def event_that_is_no_object(body: Body, wire: Wire) -> None:
    await wire.head()
    await wire.event("[1, 2]")
    await finish(body, wire)


async def event_without_choices(body: Body, wire: Wire) -> None:
    await wire.head()
    await wire.event({"id": "x"})
    await finish(body, wire)


async def text_that_is_no_text(body: Body, wire: Wire) -> None:
    await wire.head()
    await wire.event({"choices": [{"text": 5}]})
    await finish(body, wire)


async def line_without_end(body: Body, wire: Wire) -> None:
    await wire.head()
    for _ in range(40):
        await wire.send(b"a" * (1 << 19))


async def tokens_without_a_piece(body: Body, wire: Wire) -> None:
    await wire.head()
    await wire.event(usage(body))
    await wire.event("[DONE]")
    await wire.end()


async def no_usage(body: Body, wire: Wire) -> None:
    await wire.head()
    await pieces(5, wire)
    await wire.event(piece("", "length"))
    await wire.event("[DONE]")
    await wire.end()


async def usage_without_a_count(body: Body, wire: Wire) -> None:
    await wire.head()
    await pieces(5, wire)
    await wire.event({"choices": [], "usage": {"completion_tokens": None}})
    await wire.event("[DONE]")
    await wire.end()


async def hangs_up_at_once(body: Body, wire: Wire) -> None:
    wire.close_connection()


async def hangs_up_in_the_stream(body: Body, wire: Wire) -> None:
    await wire.head()
    await pieces(3, wire)
    wire.close_connection()


async def closes_a_chunked_stream(body: Body, wire: Wire) -> None:
    await wire.head()
    await pieces(3, wire)


async def closes_a_plain_stream(body: Body, wire: Wire) -> None:
    await wire.head(chunked=False)
    await pieces(3, wire)


async def ends_without_a_word(body: Body, wire: Wire) -> None:
    await wire.head()
    await pieces(3, wire)
    await wire.end()


async def no_http(body: Body, wire: Wire) -> None:
    await wire.raw(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")


async def bad_chunks(body: Body, wire: Wire) -> None:
    await wire.head()
    await wire.raw(b"zz\r\nnot a chunk\r\n")


async def bad_chunks_later(body: Body, wire: Wire) -> None:
    await wire.head()
    await asyncio.sleep(0.2)
    await wire.raw(b"zz\r\nnot a chunk\r\n")


async def all_but_the_end(body: Body, wire: Wire) -> None:
    await wire.head()
    await pieces(5, wire)
    await wire.event(piece("", "length"))
    await wire.event(usage(body))
    await wire.end()


def counted(made: object) -> Behaviour:
    async def behave(body: Body, wire: Wire) -> None:
        await wire.head()
        await pieces(5, wire)
        await wire.event({"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": made}})
        await wire.event("[DONE]")
        await wire.end()

    behave.__name__ = f"counts_{made}"
    return behave


async def resets_after_the_head(body: Body, wire: Wire) -> None:
    await wire.head()
    wire.close_connection()


async def is_busy(body: Body, wire: Wire) -> None:
    await wire.raw(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 8\r\n\r\noverload")


async def has_too_many_requests(body: Body, wire: Wire) -> None:
    await wire.raw(b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 1\r\nContent-Length: 9999\r\n\r\nslow down")
    await asyncio.sleep(600)


async def never_stops(body: Body, wire: Wire) -> None:
    await wire.head()
    while True:
        await pieces(10, wire)


async def counts_fewer_tokens_than_it_sends(body: Body, wire: Wire) -> None:
    await wire.head()
    await pieces(7, wire)
    await finish(body, wire, made=5)


async def has_a_header_without_end(body: Body, wire: Wire) -> None:
    await wire.raw(b"HTTP/1.1 200 OK\r\nX-Trace: " + b"a" * (1 << 20))
    await asyncio.sleep(600)


async def redirects(body: Body, wire: Wire) -> None:
    await wire.raw(b"HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n")


async def compresses(body: Body, wire: Wire) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Encoding: gzip\r\n"
    packed = gzip.compress(b"data: [DONE]\n\n")
    await wire.raw(head + f"Content-Length: {len(packed)}\r\n\r\n".encode() + packed)


async def promises_more_than_it_sends(body: Body, wire: Wire) -> None:
    await wire.raw(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 999\r\n\r\ndata: {")


async def two_choices_in_an_event(body: Body, wire: Wire) -> None:
    await wire.head()
    await wire.event({"choices": [{"index": 0, "text": " a"}, {"index": 1, "text": " b"}]})
    await finish(body, wire)


async def two_choices_in_turn(body: Body, wire: Wire) -> None:
    await wire.head()
    await wire.event(piece())
    await wire.event({**piece(), "choices": [{"index": 1, "text": " b", "finish_reason": None}]})
    await finish(body, wire)


MISBEHAVING = [
    (all_but_the_end, ProblemKind.CONNECTION_LOST, "the stream ended after 6 events, without [DONE]"),
    (counted(0), ProblemKind.NO_USAGE, "the server counts 0 tokens, but 5 events have text"),
    (counted(-5), ProblemKind.NO_USAGE, "completion_tokens is -5"),
    (counted(True), ProblemKind.NO_USAGE, "completion_tokens is True"),
    (counted(5.0), ProblemKind.NO_USAGE, "completion_tokens is 5.0"),
    (counted(4), ProblemKind.WRONG_LENGTH, "4 tokens instead of 5"),
    (resets_after_the_head, ProblemKind.CONNECTION_LOST, "after 0 events"),
    (is_busy, ProblemKind.STATUS, "HTTP 503 Service Unavailable: overload"),
    (has_too_many_requests, ProblemKind.STATUS, "HTTP 429 Too Many Requests: slow down"),
    (never_stops, ProblemKind.WRONG_LENGTH, "max_tokens was ignored"),
    (counts_fewer_tokens_than_it_sends, ProblemKind.NO_USAGE, "counts 5 tokens, but 7 events have text"),
    (has_a_header_without_end, ProblemKind.BROKEN, "Got more than"),
    (redirects, ProblemKind.STATUS, "HTTP 302 Found"),
    (compresses, ProblemKind.BROKEN, "compressed (gzip)"),
    (promises_more_than_it_sends, ProblemKind.CONNECTION_LOST, "after 0 events"),
    (two_choices_in_an_event, ProblemKind.BROKEN, "several choices"),
    (two_choices_in_turn, ProblemKind.BROKEN, "several choices"),
    (cut_short, ProblemKind.WRONG_LENGTH, "3 tokens instead of 5; prompt and answer do not fit into the context"),
    (stops_at_the_end_token, ProblemKind.WRONG_LENGTH, "2 tokens instead of 5; ignore_eos"),
    (says_more_than_requested, ProblemKind.WRONG_LENGTH, "7 tokens instead of 5; max_tokens"),
    (reads_a_part_of_the_prompt, ProblemKind.WRONG_LENGTH, "the server counts 3 prompt tokens, but 8 were sent"),
    (error_in_the_stream, ProblemKind.ERROR, "EngineCore encountered an issue"),
    (error_as_a_field_of_the_stream, ProblemKind.ERROR, "failed to decode"),
    (error_as_an_object, ProblemKind.ERROR, "out of blocks"),
    (error_as_json_instead_of_a_stream, ProblemKind.ERROR, "model is loading"),
    (error_as_json_without_a_newline, ProblemKind.ERROR, "model is loading"),
    (answers_without_streaming, ProblemKind.BROKEN, "the answer is not streamed: b'{"),
    (aborts, ProblemKind.ERROR, "finish_reason is 'abort'"),
    (too_long, ProblemKind.STATUS, "HTTP 400 Bad Request: This model's maximum context length is 4 tokens."),
    (unavailable, ProblemKind.STATUS, "HTTP 503 Service Unavailable: <h1>Loading model</h1>"),
    (not_found, ProblemKind.STATUS, "HTTP 404 Not Found: Not Found"),
    (garbage, ProblemKind.BROKEN, "b'\\x00\\xff\\xfe nonsense'"),
    (event_that_is_cut_off, ProblemKind.BROKEN, "an event is not JSON"),
    (event_that_is_no_object, ProblemKind.BROKEN, "an event is not an object"),
    (event_without_choices, ProblemKind.BROKEN, "an event has neither choices nor usage"),
    (text_that_is_no_text, ProblemKind.BROKEN, "the text of a choice is int"),
    (line_without_end, ProblemKind.BROKEN, "a line has no end"),
    (tokens_without_a_piece, ProblemKind.BROKEN, "the server counts 5 tokens, but no event has any"),
    (no_usage, ProblemKind.NO_USAGE, "without token counts"),
    (usage_without_a_count, ProblemKind.NO_USAGE, "completion_tokens is None"),
    (hangs_up_at_once, ProblemKind.CONNECTION_LOST, "after 0 events"),
    (hangs_up_in_the_stream, ProblemKind.CONNECTION_LOST, ""),
    (closes_a_chunked_stream, ProblemKind.CONNECTION_LOST, ""),
    (closes_a_plain_stream, ProblemKind.CONNECTION_LOST, "the stream ended after 3 events, unfinished"),
    (ends_without_a_word, ProblemKind.CONNECTION_LOST, "the stream ended after 3 events, unfinished"),
    (no_http, ProblemKind.BROKEN, "does not answer in HTTP"),
    (bad_chunks, ProblemKind.BROKEN, "does not answer in HTTP"),
    (bad_chunks_later, ProblemKind.BROKEN, "does not answer in HTTP"),
]


@pytest.mark.parametrize(("behaviour", "kind", "message"), MISBEHAVING, ids=[one[0].__name__ for one in MISBEHAVING])
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


async def divides_events_into_lines(body: Body, wire: Wire) -> None:
    await wire.head()
    for event in (*[piece()] * 5, piece("", "length"), usage(body)):
        await wire.event(json.dumps(event, indent=1).replace("\n", "\ndata: "))
    await wire.event("[DONE]")
    await wire.end()


@pytest.mark.parametrize(
    "behaviour",
    [keeps_alive_and_spells_it_differently, resets_connections_after_answers, divides_events_into_lines],
)
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
        result = send(f"http://127.0.0.1:{unused.getsockname()[1]}")
    assert result.problems[0].startswith("not reached: http://127.0.0.1")
    assert "Connect call failed" in result.problems[0] or "refused" in result.problems[0].lower()


def test_an_invalid_url_is_reported() -> None:
    assert send("http://:99999").problems[0].startswith("not reached: http://:99999/v1/completions")


async def never_answers(body: Body, wire: Wire) -> None:
    await asyncio.sleep(600)


async def stops_in_the_middle(body: Body, wire: Wire) -> None:
    await wire.head()
    await pieces(2, wire)
    await asyncio.sleep(600)


async def pings_for_ever(body: Body, wire: Wire) -> None:
    await wire.head()
    while True:
        await wire.send(b": ping\n\n")
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("behaviour", [never_answers, stops_in_the_middle, pings_for_ever])
def test_an_endless_answer_ends_with_the_load(behaviour: Behaviour) -> None:
    result = loaded(behaviour, timeout_s=0.3)
    assert re.fullmatch(r"timed out: not answered within 0\.\d s \(4 requests\)", *result.problems)
    assert result.failed == 4
    assert not result.figures


def test_warm_up_that_fails_is_a_problem_of_the_load() -> None:
    with serving(no_usage) as served:
        result = send(served.url, load=Load(input_len=8, output_len=5, num_prompts=4, concurrency=2, warmup=1))
    assert result.problems[0].startswith("no usage")
    assert len(served.bodies) == 1


def test_a_server_that_dies_ends_the_load_immediately(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving(well) as other, serving(stops_in_the_middle) as served:
        seen: Sequence[Body] = other.bodies

        def stop(done: int) -> None:
            if done == 20:
                served.stop()

        after_each_answer(monkeypatch, stop)
        result = measure(
            [Target(served.url), Target(other.url)],
            Load(input_len=8, output_len=5, num_prompts=10_000, concurrency=4),
            model="m",
            vocab_size=1000,
            seed=0,
            timeout_s=600,
        )
    assert result.problems[0].startswith("connection lost")
    assert result.failed >= 1
    assert len(seen) < 9_000
    assert not result.figures
