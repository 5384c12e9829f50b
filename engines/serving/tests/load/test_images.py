"""Images of a load: what a client sends, what a trace has, and how many tokens they are. What is counted of one answer,
and when: pieces, tokens, and the clock that the test holds."""

import base64
import json
import struct
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flagcore_serving.job import Images, Load
from flagcore_serving.load.images import Image, image_tokens
from flagcore_serving.load.result import Answer, RequestFailed, Target
from flagcore_serving.load.routing import BOOTSTRAP
from flagcore_serving.load.stream import Stream
from flagcore_serving.load.traces import read_trace
from flagcore_serving.load.traffic import traffic

from engines.serving.tests.load.servers import Body, Wire, send, serving
from engines.serving.tests.load.test_traffic import written
from tests.checks import refuses
from tests.product.tasks import VISION

SMALL = Images(buckets=((40, 20, 0.5), (16, 32, 0.5)), base_items_per_request=2, num_mm_items_range_ratio=0.5)


def load(**changes: Any) -> Load:
    return Load(**{"input_len": 8, "output_len": 3, "num_prompts": 6, "concurrency": 2, "images": SMALL} | changes)


def delta(finish: str | None = None, **content: str) -> Body:
    return {"id": "x", "choices": [{"index": 0, "delta": content, "finish_reason": finish}], "usage": None}


async def chats(body: Body, wire: Wire) -> None:
    await wire.head()
    await wire.event(delta(role="assistant", content=""))
    for _ in range(body["max_tokens"]):
        await wire.event(delta(content=" a"))
    await wire.event(delta("length", content=""))
    await wire.event({"choices": [], "usage": {"prompt_tokens": 77, "completion_tokens": body["max_tokens"]}})
    await wire.event("[DONE]")
    await wire.end()


@pytest.mark.parametrize(("protocol", "by_client"), [("", True), (BOOTSTRAP, False)])
def test_images_go_to_servers_that_encode_before_the_request(protocol: str, by_client: bool) -> None:
    def urls(bodies: list[Body]) -> list[str]:
        parts = [part for body in bodies for part in body["messages"][0]["content"]]
        return sorted(part["image_url"]["url"] for part in parts if part["type"] == "image_url")

    with serving(chats) as encoder, serving(chats) as served:
        result = send(served.url, load=load(), encode=[Target(encoder.url)], protocol=protocol)
    assert (result.completed, result.problems) == (6, ())
    assert urls(encoder.bodies) == (urls(served.bodies) if by_client else [])
    assert all(part["type"] == "image_url" for body in encoder.bodies for part in body["messages"][0]["content"])


def sent(load: Load, seed: int = 0) -> list[Body]:
    with serving(chats) as served:
        result = send(served.url, load=load, seed=seed)
    assert result.problems == ()
    assert {answer.input_tokens for answer in result.requests} == {77}  # as the server counts them
    return served.bodies


def parts(body: Body) -> list[Any]:
    (message,) = body["messages"]
    return list(message["content"])


def pixels(uri: str) -> tuple[int, int, bytes]:
    """The size of a PNG in a data URI, and its RGB values without filters."""
    data = base64.b64decode(uri.removeprefix("data:image/png;base64,"), validate=True)
    width, height = struct.unpack(">2I", data[16:24])
    position, stream = 8, b""
    while position < len(data):
        (length,) = struct.unpack(">I", data[position : position + 4])
        kind, content = data[position + 4 : position + 8], data[position + 8 : position + 8 + length]
        assert data[position + 8 + length : position + 12 + length] == struct.pack(">I", zlib.crc32(kind + content))
        stream += content if kind == b"IDAT" else b""
        position += 12 + length
    rows = np.frombuffer(zlib.decompress(stream), dtype=np.uint8).reshape(height, 1 + 3 * width)
    assert (rows[:, 0] == 2).all()
    return width, height, np.cumsum(rows[:, 1:], axis=0, dtype=np.uint8).tobytes()


def test_images_are_sent_in_a_chat_after_the_text() -> None:
    bodies = sent(load(warmup=1))
    assert len(bodies) == 7
    for body in bodies:
        text, *images = parts(body)
        assert text["type"] == "text"
        assert len(text["text"].split()) == 8
        assert 1 <= len(images) <= 3
        assert all(pixels(each["image_url"]["url"])[:2] in ((40, 20), (16, 32)) for each in images)
        assert body["stream_options"] == {"include_usage": True}
        assert body["ignore_eos"] is True
        assert "prompt" not in body


def test_repeats_have_the_same_sizes_but_no_image_or_text_twice() -> None:
    first, again, other = (sorted(sent(load(concurrency=1), seed), key=json.dumps) for seed in (1, 1, 2))
    assert first == again
    uris = [each["image_url"]["url"] for body in (*first, *other) for each in parts(body)[1:]]
    assert len(set(uris)) == len(uris)
    assert len({parts(body)[0]["text"] for body in (*first, *other)}) == 12
    sizes = [sorted(len(parts(body)) for body in bodies) for bodies in (first, other)]
    assert sizes[0] == sizes[1]


def test_numbers_and_sizes_follow_the_buckets() -> None:
    skewed = Images(buckets=((8, 8, 0.9), (16, 16, 0.1)), base_items_per_request=3, num_mm_items_range_ratio=1.0)
    images = traffic(load(images=skewed, num_prompts=2000)).images
    counts = np.bincount([len(each) for each in images])
    assert counts.size == 7
    assert counts.min() > 200
    assert 0.87 < np.mean([image.width == 8 for each in images for image in each]) < 0.93


JPEG = b"\xff\xd8\xff\xe0\x00\x04ab\xff\xc0\x00\x11\x08" + struct.pack(">2H", 20, 30) + b"\x03" + bytes(9)


def test_a_trace_has_images_as_files_or_sizes(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(JPEG)
    rows = [
        {"prompt": "What is this?", "images": ["a.jpg", "56x28"], "max_tokens": 2, "timestamp": 1000},
        {"text": "And this?", "image": "84x84", "max_tokens": 2, "timestamp": 0},
        {"prompt": "no image", "max_tokens": 2, "timestamp": 2000},
    ]
    trace = read_trace(written(tmp_path, rows))
    assert trace.images == [(Image(84, 84),), (Image(30, 20, str(tmp_path / "a.jpg")), Image(56, 28)), ()]
    bodies = sent(load(images=None, trace=str(tmp_path / "trace.jsonl"), num_prompts=None, concurrency=1))
    urls = [[part["image_url"]["url"] for part in parts(body)[1:]] for body in bodies]
    assert [len(each) for each in urls] == [1, 2, 0]
    assert urls[1][0] == "data:image/jpeg;base64," + base64.b64encode(JPEG).decode()
    assert parts(bodies[2])[0]["text"].endswith("no image")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a", "max_tokens": 1, "images": ["missing.png"]},
        {"prompt": "a", "max_tokens": 1, "images": ["trace.jsonl"]},
        {"prompt": "a", "max_tokens": 1, "images": [7]},
        {"prompt": "a", "max_tokens": 1, "images": "0x8"},
        {"turns": [{"text": "a", "image": "8x8"}], "max_tokens": 1},
        {"input_len": 5, "output_len": 1, "hash_ids": [1], "images": ["8x8"]},
    ],
)
def test_an_invalid_image_names_its_row(tmp_path: Path, row: Body) -> None:
    with refuses("serve.profile.trace") as raised:
        read_trace(written(tmp_path, [row]))
    assert "row 1" in raised.value.problem or "images" in raised.value.problem


@pytest.mark.parametrize(
    ("width", "height", "tokens"),
    [  # prompt_tokens of vLLM 0.32 with a Qwen2.5-VL, minus those of the same chat without the image
        (1280, 720, 1198),
        (256, 256, 83),
        (100, 30, 6),
        (1920, 1080, 2693),
        (333, 777, 338),
        (3000, 100, 430),
    ],
)
def test_image_tokens_are_those_that_a_server_counts(width: int, height: int, tokens: int) -> None:
    assert image_tokens([(Image(width, height),), ()], VISION).tolist() == [tokens, 0]


def chat(events: list[Body], made: int) -> Any:
    stream = Stream()
    for now, event in enumerate(events):
        stream.feed(b"data: " + json.dumps(event).encode() + b"\n\n", float(now))
    stream.feed(b"data: [DONE]\n\n", float(len(events)))
    return stream.answer(sent_s=0.0, start_s=0.0, input_tokens=0, output_tokens=made, target=0)


def test_the_first_event_of_a_chat_has_no_text() -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}
    events = [delta(role="assistant", content=""), delta(reasoning_content="a"), delta(content="b"), delta("length")]
    found = chat([*events, usage], 2)
    assert (found.ttft_s, found.gaps_s, found.input_tokens) == (1.0, (1.0,), 9)


def event(text: str | None = " a", **changes: Any) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None} | changes.pop("choice", {})
    return line({"id": "x", "created": 1, "choices": [choice], "usage": None, **changes})


def line(data: Any) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def ending(made: int = 3) -> bytes:
    usage = {"prompt_tokens": 8, "completion_tokens": made}
    return event("", choice={"finish_reason": "length"}) + line({"choices": [], "usage": usage}) + b"data: [DONE]\n\n"


COUNTS, DONE = {"prompt_tokens": 8, "completion_tokens": 3}, b"data: [DONE]\n\n"
FINISH, USAGE = event("", choice={"finish_reason": "length"}), line({"choices": [], "usage": COUNTS})


def answer(stream: Stream, made: int = 3) -> Answer:
    return stream.answer(sent_s=10.0, start_s=1.0, input_tokens=8, output_tokens=made, target=0)


def fed(*parts: tuple[float, bytes], made: int = 3) -> Answer:
    stream = Stream()
    for now, data in parts:
        stream.feed(data, now)
    assert stream.done
    return answer(stream, made)


@pytest.mark.parametrize(
    ("parts", "made", "e2e_s", "tpot_s", "gaps_s"),
    [
        # an empty event is not the first token
        ([(10.5, event("")), (11.0, event()), (11.5, event()), (12.0, event() + ending())], 3, 2.0, 0.5, (0.5, 0.5)),
        # tokens are those of the usage and not the pieces
        ([(11.0, event("ab")), (13.0, event("cd") + ending(9))], 9, 3.0, 0.25, (2.0,)),
        # a delayed last token ends with the finish event
        ([(11.0, event()), (12.0, event()), (14.0, ending())], 3, 4.0, 1.5, (1.0,)),
        # one token, and an answer in one event, have no time per token
        ([(11.0, event() + ending(1))], 1, 1.0, None, ()),
        ([(11.0, event("abc", choice={"finish_reason": "length"}, usage=COUNTS) + DONE)], 3, 1.0, None, ()),
        # tokens that have no text are timed by their events
        ([(11.0, event("")), (12.0, event(None)), (13.0, ending())], 3, 3.0, 1.0, (1.0, 1.0)),
        ([(11.0, event("", choice={"token_ids": [7]})), (12.0, event() + ending())], 3, 2.0, 0.5, (1.0,)),
        # token counts after the answer do not extend its time
        ([(11.0, event() + event()), (12.0, FINISH), (15.0, USAGE + DONE)], 3, 2.0, 0.5, (0.0,)),
        # events after the end are ignored
        ([(11.0, event() + event()), (12.0, ending() + event() + b"garbage\n")], 3, 2.0, 0.5, (0.0,)),
    ],
)
def test_an_answer_is_timed_by_its_pieces(
    parts: list[tuple[float, bytes]], made: int, e2e_s: float, tpot_s: float | None, gaps_s: tuple[float, ...]
) -> None:
    found = fed(*parts, made=made)
    assert (found.ttft_s, found.e2e_s, found.tpot_s) == (1.0, e2e_s, tpot_s)
    assert (found.gaps_s, found.output_tokens) == (gaps_s, made)
    assert (found.start_s, found.end_s) == (1.0, 1.0 + e2e_s)


WHOLE = b"".join(
    [
        b": ping\n\n",
        event(""),
        event(" a"),
        event(" b"),
        event(' "quoted" \\ é\n'),
        event("c", created=2),
        event("d", created=2),
        event("data: [DONE]", created=2),
        ending(6),
    ]
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_the_chunking_of_reads_does_not_matter(size: int, newline: bytes) -> None:
    data = WHOLE.replace(b"\n", newline)
    result = fed(*((11.0, data[at : at + size]) for at in range(0, len(data), size)), made=6)
    assert len(result.gaps_s) == 5
    assert result.output_tokens == 6


@pytest.mark.parametrize(
    ("late", "message"),
    [
        (event().replace(b'"usage": null', b'"error": {"message": "lost"}'), "lost"),
        (event()[:-4] + b"\n\n", "not JSON"),
        (b"data: {}\n\n", "neither"),
        (b"<html>\n", "<html>"),
        (event(" z", choice={"finish_reason": "abort"}) + USAGE + DONE, "finish_reason is 'abort'"),
    ],
)
def test_malformed_events_after_valid_ones_are_detected(late: bytes, message: str) -> None:
    with pytest.raises(RequestFailed, match=message):
        fed((11.0, event() * 3), (12.0, late))


def test_events_that_differ_only_in_their_text_are_not_parsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = []

    def loads(text: bytes) -> Any:
        parsed.append(text)
        return json.loads(text)

    monkeypatch.setattr("flagcore_serving.load.stream.json", SimpleNamespace(loads=loads))
    stream = Stream()
    for text in ("a", "b", "c", "d"):
        stream.feed(event(text), 11.0)
    assert len(parsed) == 1
    stream.feed(event(created=2) + event(created=2), 12.0)
    assert len(parsed) == 2
    assert stream.events == 6


@pytest.mark.parametrize("read", [None, 0, "8", True, float("nan"), 10**400, [8]])
def test_the_tokens_of_a_text_must_be_counted_by_the_server(read: Any) -> None:
    stream = Stream()
    end = event(" a", choice={"finish_reason": "length"}, usage={"prompt_tokens": read, "completion_tokens": 1})
    stream.feed(end + b"data: [DONE]\n\n", 11.0)
    with pytest.raises(RequestFailed, match="prompt_tokens is"):
        stream.answer(sent_s=10.0, start_s=0.0, input_tokens=0, output_tokens=1, target=0)


@pytest.mark.parametrize("reason", ["length", {"type": "length", "length": 1}])
def test_a_finish_reason_may_be_a_name_or_an_object(reason: Any) -> None:
    meta = {"finish_reason": reason, "prompt_tokens": 8, "completion_tokens": 1}
    assert fed((11.0, line({"text": "a", "meta_info": meta}) + b"data: [DONE]\n\n"), made=1).output_tokens == 1
