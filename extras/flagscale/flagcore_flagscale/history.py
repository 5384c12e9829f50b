"""Reads FlagScale's history.csv: one row per task with its knobs and measurements.

The format follows `flagscale/runner/auto_tuner/record/recorder.py`, commit 16a2dd5b5c41: an empty cell is None,
switches are True and False, lists are JSON, times are milliseconds except `elapsed_time`, memory is MB or the word OOM.
"""

import codecs
import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from flagcore.contracts import History, HistoryRow
from flagcore.domain.files import read_regular
from flagcore.domain.space import KnobValue
from flagcore.errors import UsageError
from flagcore_flagscale.experiment import TIME_LIMITS
from flagcore_flagscale.source import ENGINES, KNOB_NAMES, TABLES

TRAIN_COLUMN = "performance"
SERVE_COLUMNS: dict[str, str] = TABLES["served_columns"]
OTHER_COLUMNS = (*TABLES["bookkeeping_columns"], TRAIN_COLUMN, *SERVE_COLUMNS)
"""Names of columns that are not knobs."""
FIGURES = ("elapsed_time", "max_mem", TRAIN_COLUMN, *SERVE_COLUMNS)
EMPTY_CELLS = ("", "none", "nan", "null", "n/a", "na", "<na>")
"""Texts that mean an empty cell."""
SPLITS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
IGNORED_KNOBS = ("split_mode",)
"""Knobs that FlagScale records but never passes to an engine."""
OUT_OF_MEMORY = "OOM"
OUT_OF_MEMORY_ERRORS = ("out of memory", "outofmemory")
MAX_EXACT = 2**53
"""Integers from this value on are not exact as floats."""
MIB = 2**20
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_history(path: Path) -> History:
    """Read a history.csv. Raises UsageError for an invalid file."""
    try:
        data = read_regular(path)
        lines = [] if data.startswith(_UTF_16) else _records(data.decode("utf-8", errors="replace").lstrip("\ufeff"))
    except (OSError, csv.Error) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    if data.startswith(_UTF_16):
        raise UsageError(f"{path} is not UTF-8 text")
    if not lines:
        raise UsageError(f"{path} is empty; give the history.csv of a FlagScale run")
    (_, heading), *records = lines
    serves = bool(SERVE_COLUMNS.keys() & set(heading))
    if TRAIN_COLUMN not in heading and not serves:
        names = [name if name.isprintable() and len(name) <= 60 else f"{name[:60]!r}..." for name in heading[:8]]
        columns = f"{', '.join(names)}{', ...' if len(heading) > 8 else ''}"
        raise UsageError(
            f"{path} is not a history of FlagScale: it has neither the column {TRAIN_COLUMN!r} nor any of "
            f"{', '.join(SERVE_COLUMNS)}; its columns are {columns}"
        )
    if duplicates := [name for name in dict.fromkeys(heading) if name and heading.count(name) > 1]:
        raise UsageError(f"{path} has duplicate columns: {', '.join(duplicates)}; keep one of each")
    rows = [_row(number, heading, cells) for number, cells in records]
    sorted_rows = tuple(sorted(rows, key=lambda row: (row.index, row.line)))
    return History(rows=sorted_rows, serves=serves, time_limit_s=TIME_LIMITS["serve" if serves else "train"])


def _records(text: str) -> Sequence[tuple[int, list[str]]]:
    """Return each non-empty record with the number of the line on which it ends. Python before 3.11 refuses NUL
    characters.
    """
    size_limit = csv.field_size_limit(max(len(text), 1))  # the column `error` may contain a long log
    try:
        reader = csv.reader(io.StringIO(text.replace("\0", "\ufffd"), newline=""), escapechar="\\")
        records = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader]
    finally:
        csv.field_size_limit(size_limit)
    return [(line, cells) for line, cells in records if any(cells)]


def _row(line: int, heading: Sequence[str], values: Sequence[str]) -> HistoryRow:
    cells = dict(zip(heading, values, strict=False))
    step_ms, memory = _number(cells.get(TRAIN_COLUMN)), cells.get("max_mem", "")
    error = cells.get("error", "")
    is_out_of_memory = any(cells.get(name, "").upper() == OUT_OF_MEMORY for name in ("max_mem", TRAIN_COLUMN))
    is_out_of_memory = is_out_of_memory or OUT_OF_MEMORY in error.split("|")
    figures = {ours: _number(cells.get(name)) for name, ours in SERVE_COLUMNS.items()}
    reserved_mib = _number(memory)
    index = _number(cells.get("idx"))
    return HistoryRow(
        line=line,
        index=line if index is None else int(index),
        knobs={
            KNOB_NAMES.get(name, name): _value(cell)
            for name, cell in cells.items()
            if name and name not in (*OTHER_COLUMNS, *SPLITS, *IGNORED_KNOBS)
        },
        engine=ENGINES.get(cells.get("engine", ""), cells.get("engine") or None),
        step_s=step_ms / 1e3 if step_ms is not None and step_ms > 0 else None,
        figures={
            name: value / 1e3 if name.endswith("_s.mean") else value
            for name, value in figures.items()
            if value is not None and value > 0
        },
        reserved_bytes=int(reserved_mib * MIB) if reserved_mib is not None and reserved_mib > 0 else None,
        out_of_memory=is_out_of_memory or any(words in error.lower() for words in OUT_OF_MEMORY_ERRORS),
        error=" ".join(error.split())[:200] or None,
        elapsed_s=max(_number(cells.get("elapsed_time")) or 0.0, 0.0),
        split=any(_value(cells.get(name, "")) is not None for name in SPLITS),
        cut=_value(cells.get("stopped_by_tuner", "")) is True,
        refused=_refusal(heading, values, cells),
    )


def _refusal(heading: Sequence[str], values: Sequence[str], cells: Mapping[str, str]) -> str:
    if len(values) != len(heading):
        return f"it has {len(values)} cells, but the heading has {len(heading)}; quote lists"
    if _value(cells.get("pruned", "")) is True:
        return "FlagScale pruned it and copied the result of another row"
    for name in FIGURES:
        cell = cells.get(name, "")
        if cell.lower() in EMPTY_CELLS or cell.upper() == OUT_OF_MEMORY:
            continue
        number = _number(cell)
        if number is None:
            return f"{name} = {cell[:40]!r} is not a number; remove units and thousands separators"
        if number <= 0 and name in (TRAIN_COLUMN, *SERVE_COLUMNS):
            return f"{name} = {cell} must be above 0"
    return ""


def _value(cell: str) -> KnobValue:
    if cell.lower() in EMPTY_CELLS:
        return None
    if cell.lower() in ("true", "false"):
        return cell.lower() == "true"
    number = _number(cell)
    return int(number) if number is not None and abs(number) < MAX_EXACT and number == int(number) else cell


def _number(cell: str | None) -> float | None:
    try:
        number = float(cell or "nan")
    except ValueError:
        return None
    return number if math.isfinite(number) else None
