"""FlagScale's history.csv: one row per task with its knobs and measurements.

Format of `flagscale/runner/auto_tuner/record/recorder.py`, commit 16a2dd5b5c41: an empty cell is None, words are True
and False, lists are JSON, times are milliseconds except `elapsed_time`, memory is MB or the word OOM.
"""

from __future__ import annotations

import codecs
import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from flagcore.contracts import History, HistoryRow
from flagcore.domain.candidate import KnobValue
from flagcore.errors import UsageError
from flagcore.files import read_regular
from flagcore.importers.flagscale.engines import ENGINES, KNOB_NAMES, TABLES
from flagcore.importers.flagscale.experiment import TIME_LIMITS

TRAINED = "performance"
SERVED: dict[str, str] = TABLES["served_columns"]
BOOKKEEPING = (*TABLES["bookkeeping_columns"], TRAINED, *SERVED)
"""Columns that are not knobs."""
FIGURES = ("elapsed_time", "max_mem", TRAINED, *SERVED)
EMPTY = ("", "none", "nan", "null", "n/a", "na", "<na>")
"""Values of an empty cell."""
SPLITS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
IGNORED = ("split_mode",)
"""Knobs that FlagScale records but never passes to an engine."""
OUT_OF_MEMORY = "OOM"
OUT_OF_MEMORY_ERRORS = ("out of memory", "outofmemory")
LARGEST = 2**53
"""Whole numbers from here on are not exact in a float."""
MIB = 2**20
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_history(path: Path) -> History:
    """Read a history.csv. Raises UsageError if the file is not one."""
    try:
        data = read_regular(path)
        lines = [] if data.startswith(_UTF_16) else _records(data.decode("utf-8", errors="replace").lstrip("\ufeff"))
    except (OSError, csv.Error) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    if data.startswith(_UTF_16):
        raise UsageError(f"{path} is not UTF-8 text")
    if not lines:
        raise UsageError(f"{path} is empty; give the history.csv of a FlagScale run")
    (_, heading), *rest = lines
    serves = bool(SERVED.keys() & set(heading))
    if TRAINED not in heading and not serves:
        names = [name if name.isprintable() and len(name) <= 60 else f"{name[:60]!r}..." for name in heading[:8]]
        columns = f"{', '.join(names)}{', ...' if len(heading) > 8 else ''}"
        raise UsageError(
            f"{path} is not a history of FlagScale: it has neither the column {TRAINED!r} nor one of "
            f"{', '.join(SERVED)}; its columns are {columns}"
        )
    if twice := [name for name in dict.fromkeys(heading) if name and heading.count(name) > 1]:
        raise UsageError(f"{path} has duplicate columns: {', '.join(twice)}; keep one of each")
    rows = [_row(number, heading, cells) for number, cells in rest]
    ordered = tuple(sorted(rows, key=lambda row: (row.index, row.line)))
    return History(rows=ordered, serves=serves, time_limit_s=TIME_LIMITS["serve" if serves else "train"])


def _records(text: str) -> Sequence[tuple[int, list[str]]]:
    """Return each non-empty record with the line on which it ends."""
    most = csv.field_size_limit(max(len(text), 1))  # an error may be a long log
    try:
        reader = csv.reader(io.StringIO(text, newline=""), escapechar="\\")
        records = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader]
    finally:
        csv.field_size_limit(most)
    return [(line, cells) for line, cells in records if any(cells)]


def _row(line: int, heading: Sequence[str], values: Sequence[str]) -> HistoryRow:
    cells = dict(zip(heading, values, strict=False))
    step, memory = _number(cells.get(TRAINED)), cells.get("max_mem", "")
    error = cells.get("error", "")
    no_memory = any(cells.get(name, "").upper() == OUT_OF_MEMORY for name in ("max_mem", TRAINED))
    no_memory = no_memory or OUT_OF_MEMORY in error.split("|")
    figures = {ours: _number(cells.get(name)) for name, ours in SERVED.items()}
    reserved = _number(memory)
    index = _number(cells.get("idx"))
    return HistoryRow(
        line=line,
        index=line if index is None else int(index),
        knobs={
            KNOB_NAMES.get(name, name): _value(cell)
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
        out_of_memory=no_memory or any(words in error.lower() for words in OUT_OF_MEMORY_ERRORS),
        error=" ".join(error.split())[:200] or None,
        elapsed_s=max(_number(cells.get("elapsed_time")) or 0.0, 0.0),
        split=any(_value(cells.get(name, "")) is not None for name in SPLITS),
        cut=_value(cells.get("stopped_by_tuner", "")) is True,
        refused=_refused(heading, values, cells),
    )


def _refused(heading: Sequence[str], values: Sequence[str], cells: Mapping[str, str]) -> str:
    if len(values) != len(heading):
        return f"it has {len(values)} cells, the heading {len(heading)}; quote lists"
    if _value(cells.get("pruned", "")) is True:
        return "FlagScale pruned it: its figures are those of another row"
    for name in FIGURES:
        cell = cells.get(name, "")
        if cell.lower() in EMPTY or cell.upper() == OUT_OF_MEMORY:
            continue
        number = _number(cell)
        if number is None:
            return f"{name} = {cell[:40]!r} is not a number; remove units and thousands separators"
        if number <= 0 and name in (TRAINED, *SERVED):
            return f"{name} = {cell} must be above 0"
    return ""


def _value(cell: str) -> KnobValue:
    if cell.lower() in EMPTY:
        return None
    if cell.lower() in ("true", "false"):
        return cell.lower() == "true"
    number = _number(cell)
    return int(number) if number is not None and abs(number) < LARGEST and number == int(number) else cell


def _number(cell: str | None) -> float | None:
    try:
        number = float(cell or "nan")
    except ValueError:
        return None
    return number if math.isfinite(number) else None
