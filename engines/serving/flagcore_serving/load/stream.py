"""Parses one streamed answer: server-sent events of OpenAI's APIs for completions and chats, without I/O.

The events of one answer usually differ only in their text. An event is parsed only if it also differs elsewhere from
the last parsed event: comparing bytes is ten times as fast as parsing.
"""

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

from flagcore_serving.load.result import Answer, ProblemKind, RequestFailed

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
