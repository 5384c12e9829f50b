"""Reads FlagScale's history.csv: one row per task with its knobs and measurements.

The format follows `flagscale/runner/auto_tuner/record/recorder.py`, commit 16a2dd5b5c41: an empty cell is None,
switches are True and False, lists are JSON, times are milliseconds except `elapsed_time`, memory is MB or the word OOM.
"""

import codecs
import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from flagcore.contracts import FindCandidate
from flagcore.domain.files import read_regular
from flagcore.domain.space import Axis, Candidate, KnobValue
from flagcore.domain.spec import Task, figure_name, seconds
from flagcore.domain.trial import Measurement, Role, Trial, TrialState
from flagcore.errors import UsageError
from flagcore.i18n import _
from flagcore_flagscale.experiment import TIME_LIMITS
from flagcore_flagscale.source import ENGINES, KNOB_NAMES, TABLES

TRAIN_COLUMN = "performance"
SERVE_COLUMNS: dict[str, str] = TABLES["served_columns"]
SPLITS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
IGNORED_KNOBS = ("split_mode",)
"""Knobs that FlagScale records but never passes to an engine."""
NO_KNOBS = ("", *TABLES["bookkeeping_columns"], TRAIN_COLUMN, *SERVE_COLUMNS, *SPLITS, *IGNORED_KNOBS)
"""Names of columns that are not knobs of a candidate."""
FIGURES = ("elapsed_time", "max_mem", TRAIN_COLUMN, *SERVE_COLUMNS)
EMPTY_CELLS = ("", "none", "nan", "null", "n/a", "na", "<na>")
"""Texts that mean an empty cell."""
OUT_OF_MEMORY = "OOM"
MAX_EXACT = 2**53
"""Integers from this value on are not exact as floats."""
MIB = 2**20
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

Cells = Mapping[str, str]
"""A row of the file, by the names of its columns."""


def read_history(
    path: Path, task: Task, axes: Sequence[Axis], find: FindCandidate
) -> tuple[tuple[Trial, ...], tuple[str, ...]]:
    """Return the trials in a history.csv, and notes on skipped rows and columns; see `HistoryReader`."""
    heading, records = _table(path)
    serves = bool(SERVE_COLUMNS.keys() & set(heading))
    if serves == task.spec.work.has_steps:
        kinds = (_("serving"), _("training")) if serves else (_("training"), _("serving"))
        raise UsageError(_("{file}: {kind}; the spec: {other}", file=path, kind=kinds[0], other=kinds[1]))
    known = {axis.knob for axis in axes}
    columns = {name: KNOB_NAMES.get(name, name) for name in heading if name not in NO_KNOBS}
    rows = [(line, dict(zip(heading, values, strict=False)), len(values)) for line, values in records]
    rows.sort(key=lambda row: _order(*row[:2]))
    notes = list[str]()
    if unknown := [knob for knob in columns.values() if knob not in known]:
        notes.append(_("columns that are not knobs are skipped: {names}", names=", ".join(unknown)))
    trials, lines, lines_of_figures = list[Trial](), dict[Candidate, int](), dict[tuple[float, ...], int]()
    for line, cells, width in rows:
        try:
            _check(task, heading, cells, width)
            knobs = {knob: _value(cells[name]) for name, knob in columns.items() if knob in known}
            candidate = find(knobs)
            if candidate in lines:
                raise UsageError(_("the same candidate as line {number}", number=lines[candidate]))
        except UsageError as error:
            notes.append(_("line {number} is skipped: {reason}", number=line, reason=error))
            continue
        lines[candidate] = line
        trials.append(_trial(task, cells, candidate, line, lines_of_figures))
    absent = [axis.knob for axis in axes if len(axis.values) > 1 and axis.knob not in columns.values()]
    if absent and trials:
        notes.append(_("missing columns have their defaults: {names}", names=", ".join(absent)))
    return tuple(trials), tuple(notes)


def _order(line: int, cells: Cells) -> tuple[float, int]:
    """Return a sort key that puts rows in the order in which FlagScale ran the tasks."""
    index = _number(cells.get("idx"))
    return (line if index is None else index), line


def _table(path: Path) -> tuple[list[str], Sequence[tuple[int, list[str]]]]:
    """Return the heading of a history.csv, and its records with their line numbers.

    Raises UsageError for an invalid file.
    """
    try:
        data = read_regular(path)
        lines = [] if data.startswith(_UTF_16) else _records(data.decode("utf-8", errors="replace").lstrip("\ufeff"))
    except (OSError, csv.Error) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    if data.startswith(_UTF_16):
        raise UsageError(f"{path} is not UTF-8 text")
    if not lines:
        raise UsageError(f"{path} is empty; give the history.csv of a FlagScale run")
    (_line, heading), *records = lines
    if TRAIN_COLUMN not in heading and not SERVE_COLUMNS.keys() & set(heading):
        names = [name if name.isprintable() and len(name) <= 60 else f"{name[:60]!r}..." for name in heading[:8]]
        columns = f"{', '.join(names)}{', ...' if len(heading) > 8 else ''}"
        raise UsageError(
            f"{path} is not a history of FlagScale: it has neither the column {TRAIN_COLUMN!r} nor any of "
            f"{', '.join(SERVE_COLUMNS)}; its columns are {columns}"
        )
    if duplicates := [name for name in dict.fromkeys(heading) if name and heading.count(name) > 1]:
        raise UsageError(f"{path} has duplicate columns: {', '.join(duplicates)}; keep one of each")
    return heading, records


def _records(text: str) -> Sequence[tuple[int, list[str]]]:
    """Return each non-empty record with the number of the line on which it ends. Python before 3.11 refuses NUL
    characters."""
    size_limit = csv.field_size_limit(max(len(text), 1))  # the column `error` may contain a long log
    try:
        reader = csv.reader(io.StringIO(text.replace("\0", "\ufffd"), newline=""), escapechar="\\")
        records = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader]
    finally:
        csv.field_size_limit(size_limit)
    return [(line, cells) for line, cells in records if any(cells)]


def _check(task: Task, heading: Sequence[str], cells: Cells, width: int) -> None:
    """Raise UsageError if a row of `width` cells cannot be imported as a trial of a task."""
    if width != len(heading):
        raise UsageError(f"it has {width} cells, but the heading has {len(heading)}; quote lists")
    if _value(cells.get("pruned", "")) is True:
        raise UsageError("FlagScale pruned it and copied the result of another row")
    for name in FIGURES:
        cell = cells.get(name, "")
        if cell.lower() in EMPTY_CELLS or cell.upper() == OUT_OF_MEMORY:
            continue
        number = _number(cell)
        if number is None:
            text = f"{name} = {cell[:40]!r} is not a number; remove units and thousands separators"
            raise UsageError(text)
        if number <= 0 and name in (TRAIN_COLUMN, *SERVE_COLUMNS):
            raise UsageError(f"{name} = {cell} must be above 0")
    engine = ENGINES.get(cells.get("engine", ""), cells.get("engine") or task.spec.work.engine)
    if engine != task.spec.work.engine:
        raise UsageError(_("its engine is {engine}, not {wanted}", engine=engine, wanted=task.spec.work.engine))
    if any(_value(cells.get(name, "")) is not None for name in SPLITS):
        raise UsageError(_("the layers of the first and the last stage are not knobs; see train.settings"))


def _trial(
    task: Task, cells: Cells, candidate: Candidate, line: int, lines_of_figures: dict[tuple[float, ...], int]
) -> Trial:
    """Return the trial of a row. `lines_of_figures` contains the first line with each combination of metrics."""
    text, serves = cells.get("error", ""), not task.spec.work.has_steps
    reason = " ".join(text.split())[:200] or None
    elapsed_s = max(_number(cells.get("elapsed_time")) or 0.0, 0.0)
    trial = Trial(
        number=-1,
        candidate=candidate,
        role=Role.SEARCH,
        state=TrialState.FAILED,
        duration_s=elapsed_s,
        reason=reason or "it has no value of the objective",
    )
    marks = [*text.split("|"), *(cells.get(name, "").upper() for name in ("max_mem", TRAIN_COLUMN))]
    if OUT_OF_MEMORY in marks or re.search("out of memory|outofmemory", text, re.IGNORECASE):
        return replace(trial, state=TrialState.OUT_OF_MEMORY, reason=reason or "FlagScale: OOM")
    limit_s = task.spec.control.max_time_per_task or TIME_LIMITS["serve" if serves else "train"]
    is_cut = _value(cells.get("stopped_by_tuner", "")) is True or elapsed_s >= limit_s
    figures = _figures(cells)
    measurement = _serving(task, figures) if serves else _training(task, cells, is_cut)
    if measurement is None:
        return trial
    # After a failed task, FlagScale's recorder repeats the figures of the previous task.
    first = lines_of_figures.setdefault(tuple(figures.values()), line) if figures else line
    if first != line:
        return replace(trial, reason=f"repeats the figures of line {first}, as FlagScale does after a failure")
    return replace(trial, state=TrialState.MEASURED, measurement=measurement, reason=reason)


def _figures(cells: Cells) -> dict[str, float]:
    """Return the metrics of a server in a row under flagcore's names, with latencies in seconds."""
    found = {ours: _number(cells.get(name)) for name, ours in SERVE_COLUMNS.items()}
    known = {name: value for name, value in found.items() if value is not None and value > 0}
    return {name: value / 1e3 if name.endswith("_s.mean") else value for name, value in known.items()}


def _training(task: Task, cells: Cells, is_cut: bool) -> Measurement | None:
    """Return the measurement in the row of a training job, or None if the row has no step time."""
    step_ms, reserved_mib, train = _number(cells.get(TRAIN_COLUMN)), _number(cells.get("max_mem")), task.spec.train
    if step_ms is None or step_ms <= 0:
        return None
    step_s = step_ms / 1e3
    return Measurement(
        step_times_s=(step_s,),
        step_time_s=step_s,
        spread_s=0.0,
        tokens_per_second_per_device=train.global_batch_size * train.seq_length / step_s / task.cluster.devices,
        peak_reserved_bytes=int(reserved_mib * MIB) if reserved_mib is not None and reserved_mib > 0 else None,
        partial=is_cut,
    )


def _serving(task: Task, figures: dict[str, float]) -> Measurement | None:
    """Return the measurement of a server, or None if it has no value of the objective.

    Output tokens are derived from all tokens if all prompts of the load have the same length.
    """
    objective, load, devices = task.spec.objective, task.spec.serve.loads[0], task.cluster.devices
    tokens = figures.get("total_tokens_per_s")
    if tokens and load.range_ratio == 1.0 and "requests_per_s" in figures:
        answers = tokens - (load.prefix_len + load.input_len) * figures["requests_per_s"]
        if answers > 0.0:
            figures = {**figures, "output_tokens_per_s": answers, "output_tokens_per_s_per_device": answers / devices}
    name = figure_name(objective)
    if name not in figures:
        return None
    step = seconds(objective, figures[name])
    broken = tuple(
        f"{each} is {figures[each]:.4g} s, over its limit" if each in figures else f"{each} is not measured"
        for each, limit in task.spec.work.slo.items()
        if figures.get(each, math.inf) > limit
    )
    return Measurement(
        step_times_s=(step,),
        step_time_s=step,
        spread_s=0.0,
        tokens_per_second_per_device=(tokens or 0.0) / devices,
        figures=figures,
        broken=broken,
    )


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
