"""The data of a report: the result of a run, its predictions, and files of its folder."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from statistics import median_high
from typing import Any

from flagcore.domain.files import open_regular, read_regular
from flagcore.domain.knob import Knobs
from flagcore.domain.objective import SERVING, is_rate, objective_value
from flagcore.domain.prediction import Labels
from flagcore.domain.secrets import redact_data, redact_text
from flagcore.i18n import _
from flagcore.report.formats import hardware_text, shown
from flagcore.report.page.blocks import Cell
from flagcore.report.result import RunResult, TrialResult
from flagcore.report.text import heading, values_text

INSIGHT = "insight.json"
TAIL_LINES, TAIL_BYTES = 25, 4000
"""Maximum number of lines, and of bytes, of the end of a log."""
MAX_LISTED, MAX_FAILED = 500, 100
"""Maximum number of trials in tables, and of those without a time among them. Charts have all."""
MAX_FILE = 1 << 20
"""Maximum size of a displayed file in bytes."""
COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
WHOLE_PATH = r"(?<![\w.~-])(?:{})(?![\w-]|\.\w)"
"""Paths that are not a part of another name."""

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """The result of a run, and its `insight` (`flagcore.api.managing.report`), empty if missing.

    `folder` has the files of trials. `called` is the folder in commands, relative to the working directory; `.` if it
    is elsewhere. `notes` are warnings at the top of the page. `secrets` are values that must not be shown. `knobs` are
    those of the task, `labels` those of its engine.
    """

    result: RunResult
    folder: Path
    called: str = ""
    insight: Record = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    knobs: Knobs = field(default_factory=dict)
    labels: Labels = field(default_factory=Labels)

    @classmethod
    def redacted(cls, result: Record, insight: Record, secrets: Sequence[str], **rest: Any) -> RunData:
        """Return a run without its secrets, because users share reports. `result` has the format of result.json."""
        paths = own_paths(rest["folder"])
        plain, insight = (_shortened(redact_data(each, secrets), paths) for each in (result, insight))
        return cls(result=RunResult.from_json(plain), insight=insight, secrets=tuple(secrets), **rest)

    @property
    def objective(self) -> str:
        """The objective's name."""
        return self.result.objective.name

    @property
    def serves(self) -> bool:
        """Whether the run is for serving."""
        return self.objective in SERVING

    @property
    def is_rate(self) -> bool:
        """Whether a larger objective is better."""
        return not self.serves or is_rate(self.objective)

    @property
    def unit(self) -> str:
        """The objective with its unit."""
        return heading(self.objective) if self.serves else "tokens/s/device"

    @property
    def hardware(self) -> str:
        """The number of devices and their chip."""
        return hardware_text(self.result.devices, self.result.chip)

    @property
    def fidelity(self) -> str:
        """The fidelity of its trials."""
        return self.result.fidelity

    @property
    def best(self) -> TrialResult | None:
        """The best trial."""
        return self.result.best

    @property
    def baseline(self) -> TrialResult | None:
        """The trial of the baseline."""
        return self.result.baseline

    @property
    def trials(self) -> Sequence[TrialResult]:
        """One trial per candidate, in their order."""
        return self.result.trials

    @property
    def all_trials(self) -> Sequence[TrialResult]:
        """Probes, trials and repeats in their order."""
        return self.result.all_trials

    @property
    def limits(self) -> Mapping[str, float]:
        """The latency limits in seconds."""
        return self.result.limits or {}

    def figure(self, trial: TrialResult) -> float | None:
        """Return the measured objective of a trial, None without a measurement."""
        if not trial.measured:
            return None
        if not self.serves:
            return float(trial.measured.tokens_per_second_per_device)
        return objective_value(self.objective, float(trial.measured.step_time_s.median))

    def predicted(self, trial: TrialResult, bound: str = "value") -> float | None:
        """Return the predicted objective of a trial, or its `low` or `high` bound; None without a prediction."""
        key = "objective" if self.serves else "tokens_per_second_per_device"
        return trial.predicted.figure(f"{key}.{bound}")

    def runs(self, trial: TrialResult) -> list[TrialResult]:
        """Return a trial and its repeats."""
        same_candidate = (each for each in self.result.repeats if each.candidate == trial.candidate)
        return [trial, *(each for each in same_candidate if each.number != trial.number)]

    def broken_limits(self, trial: TrialResult) -> str:
        """Return the limits that a trial, or else its repeats, exceeded; empty if none."""
        by_trial = {each.number: "; ".join(each.broken) for each in self.runs(trial)}
        if own := by_trial.pop(trial.number):
            return own
        repeat_texts = [
            _("trial {number}: {reason}", number=number, reason=why) for number, why in by_trial.items() if why
        ]
        return _("exceeded when repeated ({runs})", runs=", ".join(repeat_texts)) if repeat_texts else ""

    @property
    def nearest(self) -> TrialResult | None:
        """The trial nearest to the limits if none meets them, by the median of its runs (of two runs, the worse)."""
        if self.best is not None or not self.limits:
            return None
        ranked = []
        for trial in self.trials:
            missed_limits = [
                max((each.figure(name) or inf) / most for name, most in self.limits.items())
                for each in self.runs(trial)
                if each.measured
            ]
            if trial.measured and missed_limits:
                ranked.append((median_high(missed_limits), int(trial.number), trial))
        return min(ranked, key=lambda each: each[:2])[2] if ranked else None

    def text_of(self, file: Path) -> str:
        """Return a text file without secrets and without absolute paths; empty if it is missing or too large."""
        return str(_shortened(text_file(file, self.secrets), own_paths(self.folder)))

    def trial_folder(self, trial: TrialResult) -> Path:
        """Return the folder of a trial."""
        return self.folder / "trials" / str(int(trial.number))

    def metrics(self, trial: TrialResult) -> Record:
        """Return the metrics.json of a trial, empty if it cannot be read."""
        return json_file(self.trial_folder(trial) / "metrics.json")

    def tails(self, trial: TrialResult) -> list[tuple[str, str]]:
        """Return names and ends of the logs of a trial and of its probed ranks.

        Empty logs and links out of the folder are omitted.
        """
        folder, whole = self.trial_folder(trial), (self.folder / "trials").resolve()
        try:
            files = sorted([*folder.glob("*.log"), *folder.glob("rank-*/*.log")], key=_log_order)
            files = [file for file in files if file.resolve().is_relative_to(whole)]
        except (OSError, RuntimeError):
            return []
        paths = own_paths(self.folder)
        log_ends = [
            (str(file.relative_to(folder)), _shortened(redact_text(tail(file), self.secrets), paths)) for file in files
        ]
        return [(name, text) for name, text in log_ends if text.strip()]


def name_of(run: RunData, trial: TrialResult) -> str:
    """Return the number of a trial with its role, or with its fidelity if that is not the fidelity of the run."""
    role = "" if trial.role == "search" else trial.role
    if trial.fidelity != run.fidelity:
        role = trial.fidelity
    imported = _("imported") if trial.source and role != "imported" else ""
    best = _("best") if run.best and trial.number == run.best.number else ""
    return " ".join(filter(None, [str(trial.number), _(role), imported, best]))


def trial_cell(run: RunData, trial: TrialResult) -> Cell:
    """Return the name of a trial as a link to its details."""
    return Cell(name_of(run, trial), float(trial.number), f"#trial-{trial.number}")


def configuration(run: RunData, trial: TrialResult) -> str:
    """Return the candidate of a trial in one line."""
    return values_text(trial.candidate, run.knobs)


def listed(run: RunData) -> frozenset[int]:
    """Return the numbers of the trials that tables list: the best, the baseline, the first failed, and the fastest."""
    own = [each for each in (run.best, run.baseline) if each]
    failed = [each for each in run.all_trials if each.seconds is None][:MAX_FAILED]
    fastest = sorted(run.all_trials, key=lambda each: each.seconds or inf)
    numbers = dict.fromkeys(int(each.number) for each in (*own, *failed, *fastest))
    return frozenset(list(numbers)[:MAX_LISTED])


def objective_text(run: RunData, figure: float | None) -> str:
    """Return a value of the objective with its unit, rounded."""
    return "-" if figure is None else f"{shown(figure)} {run.unit}"


def tail(file: Path) -> str:
    """Return the last lines of a text file, empty if it cannot be read."""
    try:
        with open_regular(file) as log:
            size = os.fstat(log.fileno()).st_size
            log.seek(max(0, size - TAIL_BYTES))
            text = log.read(TAIL_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""
    lines = text.splitlines()
    if size > TAIL_BYTES and len(lines) > 1:
        lines = lines[1:]
    return "\n".join(_printable(line) for line in lines[-TAIL_LINES:])


def text_file(file: Path, secrets: Collection[str] = ()) -> str:
    """Return a text file without `secrets` and texts in the form of secrets; empty if it is missing or too large."""
    try:
        text = read_regular(file, MAX_FILE).decode("utf-8", errors="replace")
    except OSError:
        return ""
    return redact_text(_printable(text), secrets)


def own_paths(folder: Path) -> Mapping[str, str]:
    """Return the absolute paths that a page shortens: folders around the run, of the user, and of Python.

    Paths around the run become relative to it. Others, such as shared storage, are kept.
    """
    folder = folder.resolve()
    paths = {str(Path.home()): "~", sys.prefix: "…", sys.base_prefix: "…"}
    around = [each for each in (folder, *folder.parents) if len(each.parts) > 2]
    relative = {str(each): "/".join([".."] * steps) or "." for steps, each in enumerate(around)}
    return relative | {path: short for path, short in paths.items() if len(Path(path).parts) > 2 or short == "~"}


def _shortened(data: Any, paths: Mapping[str, str]) -> Any:
    """Return plain data with `paths` replaced in its texts."""
    pattern = re.compile(WHOLE_PATH.replace("{}", "|".join(map(re.escape, sorted(paths, key=len, reverse=True)))))

    def shorten(each: Any) -> Any:
        if each is None or isinstance(each, (int, float)):
            return each
        if isinstance(each, Mapping):
            return {key: shorten(value) for key, value in each.items()}
        if isinstance(each, (list, tuple)):
            return [shorten(value) for value in each]
        if not isinstance(each, str):
            return each
        text = pattern.sub(lambda match: paths[match[0]], each)
        return each if text == each else text  # an unchanged Message can still be translated

    return shorten(data)


def json_file(file: Path) -> Record:
    """Return the object in a JSON file; empty if it cannot be read."""
    try:
        data = json.loads(read_regular(file))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _log_order(file: Path) -> tuple[str, int, str]:
    return (str(file.parent), {"stdout.log": 0, "stderr.log": 1}.get(file.name, 2), file.name)


def _printable(text: str) -> str:
    """Return text without terminal colours and other control characters."""
    text = COLOURS.sub("", text)
    return "".join(letter if letter in "\n\t" or letter.isprintable() else "�" for letter in text)
