"""What is counted of one answer, and when: pieces, tokens, and the clock that the test holds."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from flagcore_serving.load.result import Answer, RequestFailed
from flagcore_serving.load.stream import Stream


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
