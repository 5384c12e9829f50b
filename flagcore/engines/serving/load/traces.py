"""Traces of real traffic: lengths of requests and, where the trace has them, when they came and what they share.

Formats: ShareGPT (conversations, as JSON or JSON lines), Mooncake (JSON lines: timestamp in milliseconds, input_length,
output_length, hash_ids of blocks of 512 tokens; kvcache-ai/Mooncake), BurstGPT (CSV: Timestamp in seconds, Request
tokens, Response tokens; HPMLL/BurstGPT).
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flagcore.domain.space import FloatArray, IntArray
from flagcore.errors import SpecError
from flagcore.files import read_regular

BLOCK = 512
"""Tokens of one of Mooncake's blocks."""
MAX_TOKENS = 10_000_000
"""Of a prompt, and of an answer, as in a spec."""
CHARACTERS_PER_TOKEN = 4
"""Of English text with the usual vocabularies; an estimate without a tokenizer."""

_INPUT = ("input_len", "input_length", "input_tokens", "prompt_len", "prompt_tokens")
_OUTPUT = ("output_len", "output_length", "output_tokens", "completion_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests in order. Lengths are tokens.

    `arrive_s` are seconds after the first, None where the next request is sent when one ends. `blocks` are, of each
    request, ids of pieces of `BLOCK` tokens that requests share; empty if unknown. `notes` list what differs from the
    load, and what is estimated.
    """

    input_len: IntArray
    output_len: IntArray
    arrive_s: FloatArray | None = None
    blocks: Sequence[Sequence[int]] = ()
    notes: tuple[str, ...] = ()

    def first(self, count: int | None) -> Traffic:
        """Return the first `count` requests, all for None or if there are fewer, which is noted."""
        have = self.input_len.size
        notes = (f"the trace has {have} requests, not {count}: {have} are sent",) if count and count > have else ()
        return Traffic(
            input_len=self.input_len[:count],
            output_len=self.output_len[:count],
            arrive_s=None if self.arrive_s is None else self.arrive_s[:count],
            blocks=self.blocks[:count],
            notes=(*self.notes, *notes),
        )


class _Bad(Exception):
    """A row that is not of its format."""


def read_trace(path: str) -> Traffic:
    """Return the requests of a trace file. Raises SpecError with the file, the row and the problem."""
    file = Path(path)
    try:
        text = read_regular(file, max_bytes=1 << 30).decode("utf-8-sig")
        trace = _burstgpt(text) if file.suffix.lower() == ".csv" else _json(text)
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(key="serve.profile.trace", value=path, problem=f"cannot be read: {error}") from None
    except (_Bad, csv.Error) as error:
        raise SpecError(key="serve.profile.trace", value=path, problem=f"is not a valid trace: {error}") from None
    if not trace.input_len.size:
        raise SpecError(key="serve.profile.trace", value=path, problem="has no request with both lengths")
    return trace


def _json(text: str) -> Traffic:
    rows = _rows(text)
    if not rows:
        raise _Bad("it is empty")
    first = rows[0]
    if "conversations" in first or "messages" in first:
        return _sharegpt(rows)
    if any(name in first for name in _INPUT):
        return _lengths(rows)
    raise _Bad(f"row 1 has neither conversations nor one of {', '.join(_INPUT)}")


def _rows(text: str) -> list[dict[str, Any]]:
    """Return the objects of JSON, or of JSON lines: only a line feed ends one, texts may hold other ends (U+2028)."""
    rows: list[Any] = []
    for number, part in enumerate([text] if text.lstrip().startswith("[") else text.split("\n"), 1):
        try:
            found = json.loads(part) if part.strip() else []
        except (ValueError, RecursionError) as error:
            raise _Bad(f"it is neither JSON nor JSON lines (line {number}): {error}") from None
        rows += found if isinstance(found, list) else [found]
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise _Bad(f"row {number} is not an object")
    return rows


def _lengths(rows: Sequence[Mapping[str, Any]]) -> Traffic:
    """Read Mooncake's rows, and any with lengths under a usual name; times and blocks where all rows have them."""
    inputs = [_count(row, _INPUT, number) for number, row in enumerate(rows, 1)]
    outputs = [_count(row, _OUTPUT, number) for number, row in enumerate(rows, 1)]
    times: list[float] | None = None
    if all("timestamp" in row for row in rows):
        times = [_number(row["timestamp"], "timestamp", number) / 1e3 for number, row in enumerate(rows, 1)]
    blocks: list[Sequence[int]] = []
    if all("hash_ids" in row for row in rows):
        for number, (row, length) in enumerate(zip(rows, inputs, strict=True), 1):
            ids = row["hash_ids"]
            if not isinstance(ids, list) or not all(isinstance(one, int) and one >= 0 for one in ids):
                raise _Bad(f"row {number}: hash_ids is not a list of counts")
            if len(ids) * BLOCK < length:
                raise _Bad(f"row {number}: {len(ids)} hash_ids of {BLOCK} tokens do not cover {length}")
            blocks.append(tuple(ids))
    return _trace(inputs, outputs, times, blocks)


def _sharegpt(rows: Sequence[Mapping[str, Any]]) -> Traffic:
    """Take the first question and answer of each conversation; one without both is left out."""
    inputs, outputs, estimated = [], [], 0
    for number, row in enumerate(rows, 1):
        if any(name in row for name in _INPUT):
            inputs.append(_count(row, _INPUT, number))
            outputs.append(_count(row, _OUTPUT, number))
            continue
        turns = row.get("conversations", row.get("messages"))
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            raise _Bad(f"row {number} has no list of turns")
        texts = [str(turn.get("value") or turn.get("content") or "") for turn in turns]
        if len(texts) < 2 or not texts[0] or not texts[1]:
            continue
        inputs.append(max(1, round(len(texts[0]) / CHARACTERS_PER_TOKEN)))
        outputs.append(max(1, round(len(texts[1]) / CHARACTERS_PER_TOKEN)))
        estimated += 1
    note = f"lengths of {estimated} conversations are estimated: {CHARACTERS_PER_TOKEN} characters a token"
    return _trace(inputs, outputs, None, (), (note,) if estimated else ())


def _burstgpt(text: str) -> Traffic:
    """Leave out requests without an answer: BurstGPT's failures have 0 response tokens."""
    table = csv.DictReader(io.StringIO(text, newline=""))
    needed = ("Timestamp", "Request tokens", "Response tokens")
    lacking = [name for name in needed if name not in (table.fieldnames or ())]
    if lacking and text.strip():
        raise _Bad(f"it lacks the column {lacking[0]!r}")
    rows = list(table)
    for number, row in enumerate(rows, 2):
        if short := [name for name in needed if row[name] is None]:
            raise _Bad(f"row {number} lacks {short[0]}")
    answered = [(n, row) for n, row in enumerate(rows, 2) if _number(row["Response tokens"], needed[2], n) > 0]
    return _trace(
        [_count(row, needed[1:2], number) for number, row in answered],
        [_count(row, needed[2:], number) for number, row in answered],
        [_number(row["Timestamp"], needed[0], number) for number, row in answered],
    )


def _trace(
    inputs: Iterable[int],
    outputs: Iterable[int],
    times: Iterable[float] | None,
    blocks: Sequence[Sequence[int]] = (),
    notes: tuple[str, ...] = (),
) -> Traffic:
    lengths, answers = np.array(list(inputs), dtype=np.int64), np.array(list(outputs), dtype=np.int64)
    if times is None:
        return Traffic(input_len=lengths, output_len=answers, blocks=blocks, notes=notes)
    at = np.array(list(times), dtype=np.float64)
    order = np.argsort(at, kind="stable")
    return Traffic(
        input_len=lengths[order],
        output_len=answers[order],
        arrive_s=at[order] - at.min(initial=np.inf) if at.size else at,
        blocks=[blocks[i] for i in order] if blocks else (),
        notes=notes,
    )


def _count(row: Mapping[str, Any], names: Sequence[str], number: int) -> int:
    name = next((name for name in names if row.get(name) is not None), None)
    if name is None:
        raise _Bad(f"row {number} lacks {' or '.join(names)}")
    value = _number(row[name], name, number)
    if value < 1 or value != int(value):
        raise _Bad(f"row {number}: {name} is {row[name]!r}, not a count of tokens")
    if value > MAX_TOKENS:
        raise _Bad(f"row {number}: {name} is {row[name]!r}, and no request has more than {MAX_TOKENS:,} tokens")
    return int(value)


def _number(value: object, name: str, number: int) -> float:
    try:
        found = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        found = float("nan")
    if isinstance(value, bool) or not np.isfinite(found):
        raise _Bad(f"row {number}: {name} is {value!r}, not a number")
    return found
