"""Reads traces of real traffic: lengths of requests and, if present, arrival times, texts and shared blocks.

A file contains JSON lines, or one JSON list. Each row is one of these:

- a prompt, which may have images;
- a conversation, as in ShareGPT and in vLLM's multi-turn files;
- the lengths of a request, as in Mooncake's traces: timestamp in milliseconds, input_length, output_length, and
  hash_ids of blocks of 512 tokens (kvcache-ai/Mooncake). Rows with the same session_id are the turns of a conversation,
  each sent `delay` milliseconds after the answer before (traces of Dynamo; aiperf 0.13 `dataset/loader/models.py`);
- an agent, as in AgentX (Weka): its requests with `in`, `out`, `think_time` in seconds and hash_ids of blocks of
  `block_size` tokens, and those of its sub-agents (aiperf 0.13 `dataset/loader/weka_trace_models.py`).
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from flagcore.domain.files import read_regular
from flagcore.domain.space import BoolArray, FloatArray, IntArray
from flagcore.errors import SpecError
from flagcore_serving.job import Load
from flagcore_serving.load.images import Image, RequestImages, read_image

BLOCK = 512
"""Tokens of one of Mooncake's blocks."""
MAX_TOKENS = 10_000_000
"""Maximum number of tokens of a prompt or an answer, as in a spec."""
MAX_SPAN_S = 366 * 86_400.0
"""Maximum seconds from the first to the last request."""
BYTES_PER_TOKEN = 4
"""Estimated UTF-8 bytes per token, for use without a tokenizer. English has about 4 characters per token, Chinese about
1.5 with 3 bytes each."""

_TEXT = ("prompt", "text", "conversations", "messages")
_INPUT = ("input_len", "input_length", "input_tokens", "prompt_len", "prompt_tokens")
_OUTPUT = ("output_len", "output_length", "output_tokens", "completion_tokens", "max_tokens")
_IMAGES = ("images", "image")
_HALF = re.compile("[\ud800-\udfff]")
"""A lone surrogate (half of a character), which JSON can contain but UTF-8 cannot."""
_ANSWERS = ("assistant", "gpt")
"""Roles of messages that are answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The requests of a load in order.

    - `input_len`, `output_len`: tokens of prompts and of answers.
    - `arrive_s`: seconds after the first request; None for a closed loop.
    - `blocks`: the ids of each prompt's blocks of `block_len` tokens, which prompts may share; empty if unknown.
    - `texts`: the prompts, if the trace contains them.
    - `is_estimated`: whether some lengths of texts are estimates.
    - `follows`: the index of the previous turn in the same conversation, -1 for a first turn; None if there are no
      conversations. The prompt of a turn continues the previous prompt. The requests of a conversation are contiguous
      and have the same arrival time. Each is sent after the answer to the one before it.
    - `fresh`: which later requests of a conversation continue no prompt, as those of sub-agents; None if all do.
    - `wait_s`: seconds from the answer before to each request of a conversation; 0 for first turns, None if unknown.
    - `images`: the images of each request, in addition to its prompt; empty if there are none.
    - `adapters`: the adapter that each request uses, -1 for none; None if none uses one.
    - `notes`: notes to the user about estimates and about differences between trace and load.
    """

    input_len: IntArray
    output_len: IntArray
    arrive_s: FloatArray | None = None
    blocks: Sequence[Sequence[int]] = ()
    block_len: int = BLOCK
    texts: Sequence[str] = ()
    follows: IntArray | None = None
    fresh: BoolArray | None = None
    wait_s: FloatArray | None = None
    images: RequestImages = ()
    adapters: IntArray | None = None
    notes: tuple[str, ...] = ()
    is_estimated: bool = False

    def first(self, count: int | None) -> Traffic:
        """Return the first `count` requests, or all if `count` is None. If there are fewer, add a note."""
        available = self.input_len.size
        notes = (f"the trace has only {available} of {count} requests",) if count and count > available else ()
        names = ("input_len", "output_len", "arrive_s", "follows", "fresh", "wait_s", "blocks", "texts", "images")
        columns: dict[str, Any] = {name: getattr(self, name) for name in names}
        columns = {name: None if column is None else column[:count] for name, column in columns.items()}
        return replace(self, **columns, notes=(*self.notes, *notes))

    @property
    def tasks(self) -> tuple[IntArray, IntArray]:
        """The number of each request's conversation, and of the request in its conversation, both from 0."""
        index = np.arange(self.input_len.size)
        if self.follows is None:
            return index, np.zeros_like(index)
        first = self.follows < 0
        return np.cumsum(first) - 1, index - np.maximum.accumulate(np.where(first, index, 0))

    @property
    def continued(self) -> IntArray:
        """The index of the request whose prompt each request continues, -1 if there is none."""
        follows = np.full(self.input_len.size, -1) if self.follows is None else self.follows
        return follows if self.fresh is None else np.where(self.fresh, -1, follows)


@lru_cache(maxsize=4)
def _cached(path: str, turns: int, output_len: int, modified_ns: int) -> Traffic:
    return read_trace(path, turns, output_len)


def trace_of(load: Load) -> Traffic:
    """Return all requests of a load's trace, as `read_trace` does. A file is read again only if it has changed."""
    path = load.trace or ""
    return _cached(path, load.turns, load.output_len, os.stat(path).st_mtime_ns if os.path.exists(path) else 0)


MOST_OBJECTS = 2_000_000
"""The maximum number of JSON objects in a trace."""


class _InvalidRow(Exception):
    """The trace contains an invalid row."""


def read_trace(path: str, turns: int = 1, output_len: int = 0) -> Traffic:
    """Return the requests of a trace file, with at most `turns` turns of each conversation.

    `output_len`: the number of tokens for answers whose length is not in the trace. If it is 0, requests without this
    length are skipped.
    Raises SpecError with the file, the row and the problem.
    """
    file, refused = Path(path), partial(SpecError, key="serve.profile.trace", value=path)
    try:
        data = read_regular(file, max_bytes=3 << 28)
        if (count := data.count(b"{")) > MOST_OBJECTS:
            raise refused(problem=f"has {count:,} objects", fix=f"give at most {MOST_OBJECTS:,}")
        text = data.decode("utf-8-sig")
        del data  # which may be large
        trace = _json(text, turns, output_len, file.parent)
    except OSError as error:
        problem, fix = f"cannot be read: {error.strerror or error}", "give a file, relative to the spec"
        raise refused(problem=problem, fix=fix) from None
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8: {error.reason} at byte {error.start}"
        raise refused(problem=problem, fix="convert it") from None
    except _InvalidRow as error:
        raise refused(problem=f"is not a valid trace: {error}", fix="correct the file") from None
    if not trace.input_len.size:
        raise refused(problem="has no request with both lengths", fix="give the tokens of prompts and answers")
    return trace


def _json(text: str, turns: int, output_len: int, folder: Path) -> Traffic:
    rows = _rows(text)
    if not rows:
        raise _InvalidRow("it is empty")
    if any(name in rows[0] for name in _TEXT):
        return _traffic(rows, lambda row, number: _turns(row, number, turns, folder), output_len)
    if isinstance(rows[0].get("requests"), list):
        return _traffic(rows, lambda row, number: _agent(row, number)[:turns], output_len, _block_len(rows))
    if any(name in rows[0] for name in _INPUT):
        has_blocks = any("hash_ids" in row for row in rows)
        read = partial(_lengths, folder=folder, has_blocks=has_blocks)
        if any("session_id" in row for row in rows):
            return _traffic(
                _sessions(rows), lambda row, _: [read(each, n) for n, each in row["turns"][:turns]], output_len
            )
        return _traffic(rows, lambda row, number: [read(row, number)], output_len)
    raise _InvalidRow(f"row 1 has none of {', '.join((*_TEXT, *_INPUT))}")


def _rows(text: str) -> list[dict[str, Any]]:
    """Return the objects in JSON or JSON lines. Only a line feed ends a line, because texts may contain U+2028."""
    parsed_rows: list[Any] = []
    lines = (text,) if text.lstrip().startswith("[") else (each[0] for each in re.finditer(r"[^\n]*\n?", text))
    for number, part in enumerate(lines, 1):
        try:
            parsed = json.loads(part) if part.strip() else []
        except (ValueError, RecursionError) as error:
            raise _InvalidRow(f"it is neither JSON nor JSON lines (line {number}): {error}") from None
        parsed_rows += parsed if isinstance(parsed, list) else [parsed]
    for number, row in enumerate(parsed_rows, 1):
        if not isinstance(row, dict):
            raise _InvalidRow(f"row {number} is not an object")
    return parsed_rows


def _images(row: Mapping[str, Any], number: int, folder: Path) -> tuple[Image, ...]:
    """Return the images of a row, which has one image or a list.

    Each image is the path of a file, or WIDTHxHEIGHT for a random image.
    """
    value: Any = next((row[name] for name in _IMAGES if row.get(name)), [])
    entries = value if isinstance(value, list) else [value]
    try:
        return tuple(read_image(entry, folder) for entry in entries)
    except (TypeError, ValueError, OSError) as error:
        problem = f"row {number}: images must be paths of PNG or JPEG files, or WIDTHxHEIGHT; {error}"
        raise _InvalidRow(problem) from None


def _times(rows: Sequence[Mapping[str, Any]]) -> list[float] | None:
    """Return the timestamps of the rows in seconds, or None if no row has one."""
    if not any("timestamp" in row for row in rows):
        return None
    return [_number(row.get("timestamp"), "timestamp", number) / 1e3 for number, row in enumerate(rows, 1)]


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn of a conversation: its whole prompt, its lengths in tokens, its answer, its images, and its blocks.

    A prompt, lengths and a wait that the trace lacks are None. A block of an agent has the number of its row.
    """

    prompt: str | None
    input_len: int | None
    output_len: int | None
    answer: str = ""
    images: tuple[Image, ...] = ()
    blocks: tuple[Any, ...] = ()
    wait_s: float | None = None

    def answer_len(self, usual: int) -> int:
        """Return the tokens of the answer: `usual` ones if the trace has neither their number nor a text."""
        return self.output_len or (estimated_tokens(self.answer) if self.answer else usual)


def _traffic(
    rows: Sequence[Mapping[str, Any]],
    read: Callable[[Mapping[str, Any], int], Sequence[_Turn]],
    output_len: int,
    block_len: int = BLOCK,
) -> Traffic:
    """Return the requests of `rows`, sorted by time. `read` returns the turns of a row, given the row and its number.

    A turn that lacks a question or an answer ends its conversation.
    """
    times = _times(rows)
    order = range(len(rows)) if times is None else np.argsort(times, kind="stable").tolist()
    requests, follows, arrivals = list[_Turn](), list[int](), list[float]()
    for index in order:
        previous = -1
        only_asks = bool(output_len) and not {"prompt", "text"}.isdisjoint(rows[index])  # such rows have no answers
        for turn in read(rows[index], index + 1):
            lacks_answer = not (turn.answer or turn.output_len)
            if turn.prompt == "" or (lacks_answer and not (turn.prompt and only_asks)):
                break
            requests.append(turn)
            follows.append(previous)
            previous = len(follows) - 1
            arrivals.append(0.0 if times is None else times[index])
    if arrivals and arrivals[-1] - arrivals[0] > MAX_SPAN_S:
        raise _InvalidRow("its timestamps span more than a year")
    return _of_turns(requests, np.array(follows, dtype=np.int64), arrivals if times else None, output_len, block_len)


def _input_lens(requests: Sequence[_Turn], follows: Sequence[int]) -> list[int]:
    """Return the tokens of each prompt. A prompt is at least as long as the one that it continues."""
    inputs = list[int]()
    for turn, before in zip(requests, follows, strict=True):
        past = inputs[before] if before >= 0 else 0
        inputs.append(turn.input_len or max(past, estimated_tokens(turn.prompt or "")))
    return inputs


def _of_turns(
    requests: Sequence[_Turn], follows: IntArray, arrivals: Sequence[float] | None, output_len: int, block_len: int
) -> Traffic:
    """Return the requests with their arrival times, of which answers without a length have `output_len` tokens."""
    inputs = _input_lens(requests, follows.tolist())
    answers = [turn.answer_len(output_len) for turn in requests]
    estimated = sum(turn.input_len is None for turn in requests)
    unknown = sum(turn.answer_len(0) == 0 for turn in requests)
    of_prompts = f"the lengths of {estimated} requests are estimated, with {BYTES_PER_TOKEN} bytes of UTF-8 per token"
    of_answers = f"{unknown} requests have no length of the answer: serve.profile.output_len = {output_len} is used"
    notes = [text for text, number in ((of_prompts, estimated), (of_answers, unknown)) if number]
    blocks, images, waits = ([getattr(turn, name) for turn in requests] for name in ("blocks", "images", "wait_s"))
    has_waits, is_later = any(each is not None for each in waits), follows >= 0
    return Traffic(
        input_len=np.array(inputs, dtype=np.int64),
        output_len=np.array(answers, dtype=np.int64),
        arrive_s=None if arrivals is None else np.array(arrivals) - min(arrivals, default=0.0),
        blocks=blocks if any(blocks) else (),
        block_len=block_len,
        texts=[_HALF.sub("\ufffd", turn.prompt) for turn in requests if turn.prompt is not None],
        follows=follows if is_later.any() else None,
        wait_s=np.where(is_later, [each or 0.0 for each in waits], 0.0) if has_waits else None,
        images=images if any(images) else (),
        notes=tuple(notes),
        is_estimated=bool(estimated),
    )


def _sessions(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each session, with its `turns` as numbered rows, at the time of the first one."""
    sessions = dict[object, dict[str, Any]]()
    for number, row in enumerate(rows, 1):
        first = {name: row[name] for name in ("timestamp",) if name in row}
        sessions.setdefault(row.get("session_id", (number,)), {**first, "turns": []})["turns"].append((number, row))
    if any("timestamp" in each for each in sessions.values()) and not all(
        "timestamp" in each for each in sessions.values()
    ):
        raise _InvalidRow("only some sessions have a timestamp")
    return [*sessions.values()]


def _block_len(rows: Sequence[Mapping[str, Any]]) -> int:
    """Return the tokens of a block of agents, which must be equal in all rows."""
    sizes = {_count(row, ("block_size",), number) for number, row in enumerate(rows, 1)}
    if len(sizes) > 1:
        raise _InvalidRow("rows have different block_size")
    return sizes.pop()


def _agent(row: Mapping[str, Any], number: int) -> list[_Turn]:
    """Return the requests of an agent and of its sub-agents by time. Each is sent after the answer before: sub-agents
    that ran at the same time run one after the other. The ids of blocks refer to this agent only."""
    requests = list[Mapping[str, Any]]()
    for each in row["requests"] if isinstance(row["requests"], list) else [None]:
        if not isinstance(each, dict):
            raise _InvalidRow(f"row {number} has a request that is not an object")
        requests += each["requests"] if isinstance(each.get("requests"), list) else [each]
    block_len, turns = _count(row, ("block_size",), number), list[_Turn]()
    for each in requests:
        length, ids = _count(each, ("in",), number), each.get("hash_ids") or []
        if not isinstance(ids, list):
            raise _InvalidRow(f"row {number}: hash_ids is {ids!r:.60}, not a list")
        whole: list[tuple[Any, ...]] = [(number, one) for one in ids]
        missing = -(-length // block_len) - len(whole)  # the last block may be incomplete, and then has no id
        whole += [(number, len(turns), place) for place in range(missing)]
        wait_s = _number(each.get("think_time") or 0.0, "think_time", number)
        turns.append(_Turn(None, length, _count(each, ("out",), number), blocks=tuple(whole), wait_s=max(wait_s, 0.0)))
    return turns


def _lengths(row: Mapping[str, Any], number: int, folder: Path, *, has_blocks: bool) -> _Turn:
    """Return the turn of a row that has lengths under the keys of Mooncake or other common keys.

    `has_blocks`: whether the rows of the trace have blocks. Either all rows have them, or none.
    """
    length, images, ids = _count(row, _INPUT, number), _images(row, number, folder), row.get("hash_ids", ())
    if has_blocks and images:
        raise _InvalidRow("images and hash_ids cannot be combined")
    if has_blocks and not (isinstance(ids, list) and all(isinstance(one, int) and one >= 0 for one in ids)):
        raise _InvalidRow(f"row {number}: hash_ids is not a list of counts")
    if has_blocks and len(ids) * BLOCK < length:
        raise _InvalidRow(f"row {number}: {len(ids)} hash_ids of {BLOCK} tokens do not cover {length}")
    wait_s = _number(row["delay"], "delay", number) / 1e3 if row.get("delay") is not None else None
    return _Turn(None, length, _count(row, _OUTPUT, number), images=images, blocks=tuple(ids), wait_s=wait_s)


def estimated_tokens(text: str) -> int:
    """Return the approximate number of tokens of a text."""
    return max(1, round(len(text.encode(errors="replace")) / BYTES_PER_TOKEN))


def _turns(row: Mapping[str, Any], number: int, count: int, folder: Path) -> list[_Turn]:
    """Return the first `count` turns of a row. Each prompt contains all turns and answers before it."""
    input_tokens = _count(row, _INPUT, number) if any(name in row for name in _INPUT) else None
    output = _count(row, _OUTPUT, number) if any(row.get(name) is not None for name in _OUTPUT) else None
    name = next((name for name in _TEXT[:2] if row.get(name) is not None), "")
    if name:
        if not isinstance(row[name], str):
            raise _InvalidRow(f"row {number}: {name} is {row[name]!r:.60}, not a string")
        return [_Turn(row[name], input_tokens, output, images=_images(row, number, folder))]
    messages = row.get("conversations", row.get("messages"))
    texts = _texts(row, messages, number)
    roles = [message.get("from", message.get("role")) for message in messages]
    ends = [place for place, role in enumerate(roles) if role in _ANSWERS] or [1]
    ends = [end for end in ends if end < len(texts)] or [len(texts)]
    turns = [_Turn("\n".join(texts[:end]), None, None, [*texts, ""][end]) for end in ends[:count]]
    return [replace(turns[0], input_len=input_tokens, output_len=output), *turns[1:]]


def _texts(row: Mapping[str, Any], messages: Any, number: int) -> list[str]:
    """Return the texts of the messages of a row."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise _InvalidRow(f"row {number} has no list of turns")
    if any(name in each for each in (row, *messages) for name in _IMAGES):
        raise _InvalidRow(f"row {number}: conversations cannot have images; give prompts")
    texts = [next((part for name in _PARTS if (part := each.get(name))), "") for each in messages]
    if not all(isinstance(text, str) for text in texts):
        raise _InvalidRow(f"row {number} has a turn whose {' or '.join(_PARTS)} is not a string")
    return texts


_PARTS = ("value", "content", "text")
"""Keys of the text of a message."""


def _count(row: Mapping[str, Any], names: Sequence[str], number: int) -> int:
    name = next((name for name in names if row.get(name) is not None), None)
    if name is None:
        raise _InvalidRow(f"row {number} lacks {' or '.join(names)}")
    value = _number(row[name], name, number)
    if value < 1 or value != int(value):
        raise _InvalidRow(f"row {number}: {name} is {row[name]!r:.60}, not a count of tokens")
    if value > MAX_TOKENS:
        raise _InvalidRow(
            f"row {number}: {name} is {row[name]!r:.60}, and no request has more than {MAX_TOKENS:,} tokens"
        )
    return int(value)


def _number(value: object, name: str, number: int) -> float:
    try:
        number_ = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number_ = float("nan")
    if isinstance(value, bool) or not math.isfinite(number_):
        raise _InvalidRow(f"row {number}: {name} is {value!r:.60}, not a number")
    return number_
