"""FlagScale's history.csv: a row a task, its knobs, and what it measured.

Read was `flagscale/runner/auto_tuner/record/recorder.py` of FlagScale's commit 16a2dd5b5c41: an empty cell is None,
words are True and False, lists are JSON, times are milliseconds but `elapsed_time`, memory is MB or the word OOM.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flagcore.domain.candidate import KnobValue
from flagcore.errors import UsageError
from flagcore.files import read_regular
from flagcore.spec.flagscale.engines import ENGINES

TRAINED = "performance"
SERVED = {
    "e2e_latency": "e2e_s.mean",
    "request_throughput": "requests_per_s",
    "token_throughput": "total_tokens_per_s",
    "ttft": "ttft_s.mean",
    "itl": "itl_s.mean",
    "topt": "tpot_s.mean",
}
"""Columns of a server's figures, and what they are here: latencies in milliseconds, tokens with those of prompts."""
BOOKKEEPING = (
    "idx",
    "acc_step",
    "memory_model",
    "gpu_utilization",
    "elapsed_time",
    "start_time",
    "max_mem",
    "error",
    "engine",
    TRAINED,
    *SERVED,
)
"""Columns that are no knobs."""
SPLITS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
SPELT = {"instance": "instances", "instace": "instances"}
IGNORED = ("split_mode",)
"""Knobs that FlagScale writes down, but never passes on."""
OUT_OF_MEMORY = "OOM"
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRow:
    """One task of FlagScale's. `line` is its place in the file, from 1 for the heading.

    `step_s` are the mean seconds of a training step, `figures` those of a server by flagcore's names; `error` says why
    there are none. `split` is whether its first or last pipeline stage has another number of layers.
    """

    line: int
    index: int
    knobs: Mapping[str, KnobValue]
    engine: str | None
    step_s: float | None
    figures: Mapping[str, float]
    reserved_bytes: int | None
    out_of_memory: bool
    error: str | None
    elapsed_s: float
    split: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The rows of a history in the order in which they ran, and whether they are of servers."""

    rows: tuple[HistoryRow, ...]
    serves: bool


def read_history(path: Path) -> History:
    """Read a history.csv. Raises UsageError for a file that is none, with what its heading lacks."""
    try:
        text = read_regular(path).decode("utf-8-sig", errors="replace")
        lines = [(number, row) for number, row in _records(text)]
    except (OSError, csv.Error) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    if not lines:
        raise UsageError(f"{path} is empty; give the history.csv of a run of FlagScale's")
    (_, heading), *rest = lines
    serves = bool(SERVED.keys() & set(heading))
    if TRAINED not in heading and not serves:
        columns = f"{', '.join(heading[:8])}{', ...' if len(heading) > 8 else ''}"
        raise UsageError(
            f"{path} is no history of FlagScale's: it has neither {TRAINED!r} nor a server's figures "
            f"({', '.join(SERVED)}); its columns are {columns}"
        )
    rows = [_row(number, dict(zip(heading, cells, strict=False))) for number, cells in rest if any(cells)]
    return History(rows=tuple(sorted(rows, key=lambda row: (row.index, row.line))), serves=serves)


def _records(text: str) -> Sequence[tuple[int, list[str]]]:
    """Return each record with the line on which it ends."""
    reader = csv.reader(io.StringIO(text, newline=""), escapechar="\\")
    return [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader]


def _row(line: int, cells: Mapping[str, str]) -> HistoryRow:
    step, memory = _number(cells.get(TRAINED)), cells.get("max_mem", "")
    figures = {ours: _number(cells.get(name)) for name, ours in SERVED.items()}
    reserved = _number(memory)
    index = _number(cells.get("idx"))
    return HistoryRow(
        line=line,
        index=line if index is None else int(index),
        knobs={
            SPELT.get(name, name): _value(cell)
            for name, cell in cells.items()
            if name and name not in (*BOOKKEEPING, *SPLITS, *IGNORED)
        },
        engine=ENGINES.get(cells.get("engine", ""), cells.get("engine") or None),
        step_s=step / 1e3 if step is not None and step > 0 else None,
        figures={
            name: value / 1e3 if name.endswith("_s.mean") else value
            for name, value in figures.items()
            if value is not None and value > 0
        },
        reserved_bytes=int(reserved * MIB) if reserved is not None and reserved > 0 else None,
        out_of_memory=memory.upper() == OUT_OF_MEMORY or "out of memory" in cells.get("error", "").lower(),
        error=" ".join(cells.get("error", "").split())[:200] or None,
        elapsed_s=max(_number(cells.get("elapsed_time")) or 0.0, 0.0),
        split=any(cells.get(name) for name in SPLITS),
    )


def _value(cell: str) -> KnobValue:
    if cell.lower() in ("", "none", "nan", "null"):
        return None
    if cell.lower() in ("true", "false"):
        return cell.lower() == "true"
    number = _number(cell)
    return int(number) if number is not None and number == int(number) else cell


def _number(cell: str | None) -> float | None:
    try:
        number = float(cell or "nan")
    except ValueError:
        return None
    return number if math.isfinite(number) else None
