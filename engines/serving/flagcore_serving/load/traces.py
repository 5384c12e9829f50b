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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from flagcore.domain.files import open_regular
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


class Traffic(NamedTuple):
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
        return self._replace(**columns, notes=(*self.notes, *notes))

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
def _cached(path: str, turns: int, output_len: int, most: int | None, modified_ns: int) -> Traffic:
    return read_trace(path, turns, output_len, most)


def trace_of(load: Load) -> Traffic:
    """Return the requests of a load's trace, as `read_trace` does. A file is read again only if it has changed."""
    path = load.trace or ""
    modified_ns = os.stat(path).st_mtime_ns if os.path.exists(path) else 0
    return _cached(path, load.turns, load.output_len, load.num_prompts, modified_ns)


MOST_BYTES, MOST_PART = 3 << 28, 1 << 24
"""The most bytes of a trace, and the most characters of a row."""
MOST_REQUESTS, MOST_BLOCKS, MOST_TEXT = 500_000, 5_000_000, 100_000_000
"""The most requests of a trace, ids of blocks of all of them, and characters of all prompts: these are in memory."""


class _InvalidRow(Exception):
    """The trace contains an invalid row."""


def read_trace(path: str, turns: int = 1, output_len: int = 0, most: int | None = None) -> Traffic:
    """Return the requests of a trace file, with at most `turns` turns of each conversation.

    If `most` is given, texts and agents without times are read until there are as many requests.

    `output_len`: the number of tokens for answers whose length is not in the trace. If it is 0, requests without this
    length are skipped.
    Raises SpecError with the file, the row and the problem.
    """
    file, refused = Path(path), partial(SpecError, key="serve.profile.trace", value=path)
    try:
        with open_regular(file) as data:
            if (size := os.fstat(data.fileno()).st_size) > MOST_BYTES:
                raise refused(problem=f"has {size:,} bytes", fix=f"give at most {MOST_BYTES:,}")
            trace = _json(TextIOWrapper(data, "utf-8-sig", newline="\n"), turns, output_len, most, file.parent)
    except OSError as error:
        problem, fix = f"cannot be read: {error.strerror or error}", "give a file, relative to the spec"
        raise refused(problem=problem, fix=fix) from None
    except UnicodeDecodeError as error:
        raise refused(problem=f"is not UTF-8: {error.reason}", fix="convert it") from None
    except _InvalidRow as error:
        fix = 'give JSON lines, such as {"input_length": 512, "output_length": 128}'
        raise refused(problem=f"is not a valid trace: {error}", fix=fix) from None
    if not trace.input_len.size:
        raise refused(problem="has no request with both lengths", fix="give the tokens of prompts and answers")
    return trace


def _json(text: TextIO, turns: int, output_len: int, most: int | None, folder: Path) -> Traffic:
    rows = _rows(text)
    if (first := next(rows, None)) is None:
        raise _InvalidRow("it is empty")
    traffic = partial(_traffic, chain([first], rows), turns=turns, output_len=output_len, most=most)
    if any(name in first for name in _TEXT):
        return traffic(partial(_turns, count=turns, folder=folder))
    if isinstance(first.get("requests"), list):
        block_len = _count(first, ("block_size",), 1)
        return traffic(partial(_agent, block_len=block_len), block_len=block_len)
    if any(name in first for name in _INPUT):
        return traffic(partial(_lengths, folder=folder), has_sessions=True)
    raise _InvalidRow(f"row 1 has none of {', '.join((*_TEXT, *_INPUT))}")


def _rows(text: TextIO) -> Iterator[dict[str, Any]]:
    """Yield the objects in JSON or JSON lines."""
    number = 0
    for value in _values(text):
        for row in value if isinstance(value, list) else [value]:
            number += 1
            if not isinstance(row, dict):
                raise _InvalidRow(f"row {number} is not an object")
            yield row


def _values(text: TextIO) -> Iterator[Any]:
    """Yield the items of a JSON list, or the values of JSON lines, one at a time: a whole trace may not fit in memory.

    Where a value is incomplete, as many characters are added as it has.
    """
    decode, buffer, line = json.JSONDecoder().raw_decode, text.read(1 << 20), 1
    is_list = buffer.lstrip().startswith("[")
    place = buffer.index("[") + 1 if is_list else 0
    gap = re.compile(r"[\s,]*" if is_list else r"\s*")
    while True:
        start = gap.match(buffer, place).end()  # type: ignore[union-attr]
        try:
            value, place = decode(buffer, start)
        except (ValueError, RecursionError) as error:
            if is_list and buffer.startswith("]", start) and not (buffer[start + 1 :] + text.read(1)).strip():
                return
            is_long = len(buffer) - start > MOST_PART or isinstance(error, RecursionError)
            if more := "" if is_long else text.read(min(max(len(buffer) - start, 1 << 20), MOST_PART)):
                line += buffer.count("\n", 0, start)
                buffer, place = buffer[start:] + more, 0
            elif start == len(buffer) and not is_list:
                return
            else:
                line += buffer.count("\n", 0, start)
                problem = f"it is neither JSON nor JSON lines (line {line}): {getattr(error, 'msg', error)}"
                raise _InvalidRow(problem + f", or more than {MOST_PART:,} characters" * is_long) from None
        else:
            yield value


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


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn of a conversation: its whole prompt, its lengths in tokens, the estimated length of its answer (0 without
    a text), its images, and its blocks.

    A prompt, lengths and a wait that the trace lacks are None. A block of an agent has the number of its row.
    """

    prompt: str | None
    input_len: int | None
    output_len: int | None
    estimated: int = 0
    images: tuple[Image, ...] = ()
    blocks: tuple[Any, ...] = ()
    wait_s: float | None = None

    @property
    def answer_len(self) -> int:
        """The tokens of the answer, 0 if the trace has neither their number nor a text."""
        return self.output_len or self.estimated


def _traffic(
    rows: Iterable[Mapping[str, Any]],
    read: Callable[[Mapping[str, Any], int], Sequence[_Turn]],
    turns: int,
    output_len: int,
    most: int | None,
    block_len: int = BLOCK,
    *,
    has_sessions: bool = False,
) -> Traffic:
    """Return the requests of `rows`, sorted by time. `read` returns the turns of a row, given the row and its number.

    A turn that lacks a question or an answer ends its conversation. With `has_sessions`, rows with the same session_id
    are a conversation, at the time of the first one.
    """
    found, ended = dict[object, tuple[int, float, list[_Turn]]](), set[object]()
    requests = blocks = characters = without_blocks = 0
    for number, row in enumerate(rows, 1):
        session = repr(row["session_id"]) if has_sessions and "session_id" in row else number
        time = _number(row["timestamp"], "timestamp", number) / 1e3 if "timestamp" in row else math.nan
        _first, _time, conversation = found.setdefault(session, (number, time, []))
        only_asks = bool(output_len) and not {"prompt", "text"}.isdisjoint(row)  # such rows have no answers
        for turn in read(row, number)[: turns - len(conversation)] if session not in ended else ():
            if turn.prompt == "" or not (turn.answer_len or (turn.prompt and only_asks)):
                ended.add(session)
                break
            conversation.append(turn)
            if not turn.blocks:
                without_blocks = without_blocks or number
            requests, blocks = requests + 1, blocks + len(turn.blocks)
            characters += len(turn.prompt or "")
        if requests > MOST_REQUESTS or blocks > MOST_BLOCKS or characters > MOST_TEXT:
            limits = f"{MOST_REQUESTS:,} requests, {MOST_BLOCKS:,} hash_ids or {MOST_TEXT:,} characters of prompts"
            raise _InvalidRow(f"it has more than {limits}")
        if most and requests >= most and math.isnan(time) and not has_sessions:
            break
    if blocks and without_blocks:
        raise _InvalidRow(f"row {without_blocks}: hash_ids is not a list of counts")
    times = [time for _, time, _ in found.values()]
    missing = [number for number, time, _ in found.values() if math.isnan(time)]
    if missing and len(missing) < len(times):
        raise _InvalidRow(f"row {missing[0]}: timestamp is None, not a number")
    conversations = [each for *_, each in found.values()]
    order = range(len(times)) if missing else np.argsort(np.array(times), kind="stable").tolist()
    whole = [turn for index in order for turn in conversations[index]]
    follows = [place - 1 if n else -1 for place, n in enumerate(n for i in order for n in range(len(conversations[i])))]
    arrivals = [0.0 if missing else times[index] for index in order for _ in conversations[index]]
    if arrivals and arrivals[-1] - arrivals[0] > MAX_SPAN_S:
        raise _InvalidRow("its timestamps span more than a year")
    return _of_turns(whole, np.array(follows, dtype=np.int64), None if missing else arrivals, output_len, block_len)


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
    answers = [turn.answer_len or output_len for turn in requests]
    estimated = sum(turn.input_len is None for turn in requests)
    unknown = sum(turn.answer_len == 0 for turn in requests)
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


def _agent(row: Mapping[str, Any], number: int, *, block_len: int) -> list[_Turn]:
    """Return the requests of an agent and of its sub-agents by time. Each is sent after the answer before: sub-agents
    that ran at the same time run one after the other. The ids of blocks refer to this agent only."""
    requests = list[Mapping[str, Any]]()
    for each in row["requests"] if isinstance(row.get("requests"), list) else [None]:
        if not isinstance(each, dict):
            raise _InvalidRow(f"row {number} has a request that is not an object")
        requests += each["requests"] if isinstance(each.get("requests"), list) else [each]
    if _count(row, ("block_size",), number) != block_len:
        raise _InvalidRow("rows have different block_size")
    turns = list[_Turn]()
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


def _lengths(row: Mapping[str, Any], number: int, *, folder: Path) -> list[_Turn]:
    """Return the turn of a row that has lengths under the keys of Mooncake or other common keys."""
    length, images, ids = _count(row, _INPUT, number), _images(row, number, folder), row.get("hash_ids", ())
    has_blocks = "hash_ids" in row
    if has_blocks and images:
        raise _InvalidRow("images and hash_ids cannot be combined")
    if has_blocks and not (isinstance(ids, list) and all(isinstance(one, int) and one >= 0 for one in ids)):
        raise _InvalidRow(f"row {number}: hash_ids is not a list of counts")
    if has_blocks and len(ids) * BLOCK < length:
        raise _InvalidRow(f"row {number}: {len(ids)} hash_ids of {BLOCK} tokens do not cover {length}")
    wait_s = _number(row["delay"], "delay", number) / 1e3 if row.get("delay") is not None else None
    return [_Turn(None, length, _count(row, _OUTPUT, number), images=images, blocks=tuple(ids), wait_s=wait_s)]


def estimated_tokens(text: str) -> int:
    """Return the approximate number of tokens of a text."""
    return max(1, round(len(text.encode(errors="replace")) / BYTES_PER_TOKEN))


def _turns(row: Mapping[str, Any], number: int, *, count: int, folder: Path) -> list[_Turn]:
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
    answers = [estimated_tokens(text) if text else 0 for text in (*texts, "")]
    turns = [_Turn("\n".join(texts[:end]), None, None, answers[end]) for end in ends[:count]]
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
