"""The data of a report: the result of a run, its predictions, and the files in its folder."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from statistics import median, median_high
from typing import Any, TypeAlias

from flagcore.domain.files import read_regular
from flagcore.domain.plan import Plan, typical
from flagcore.domain.prediction import Labels
from flagcore.domain.secrets import redact_data, redact_text
from flagcore.domain.spec import SERVING, is_rate, objective_value
from flagcore.domain.trial import ESTIMATE, RUN, Measurement, Role, Trial, TrialState
from flagcore.i18n import _
from flagcore.report.blocks import Cell
from flagcore.report.formats import NAMES, hardware_text, shown
from flagcore.report.result import Result, number, stop_reason
from flagcore.report.text import candidate_text, duration_text, heading, latency_name, state_name

INSIGHT = "insight.json"
WHOLE_PATH = r"(?<![\w.~-])(?:{})(?![\w-]|\.\w)"
"""A pattern for a path that is not part of a longer name."""

Record: TypeAlias = Mapping[str, Any]
Figures: TypeAlias = tuple[float, float, float]
"""The objective of a configuration: its median or prediction, its lowest value and its highest value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData(Plan):
    """The plan of a run as read from its result.json, and its `insight` (`flagcore.api.commands.report`).

    - `folder`: the folder with the files of trials.
    - `folder_name`: the folder as commands on the page name it: relative to the working directory, or `.` if it is
      elsewhere.
    - `warnings`: shown at the top of the page.
    - `seconds_left`: an upper estimate for a run in progress. None if unknown.
    - `secrets`: values that must not be shown.
    - `labels`: the labels of the engine.
    - `data`: the content of result.json.
    - `stop_reason`: why the run stopped, from `data`, in the selected language.
    - `engines`: the results or errors of several engines, from `data`.
    - `spec`: the content of the spec.
    - `date`: the day of the last change, in UTC. Empty if unknown.
    - `start`, `expected`: of a plan: the command that starts the recommended candidate, and the time that it is
      expected to take, as text. Empty if unknown.
    - `most_listed`: the maximum number of trials in tables; at most a fifth of them have no time. Charts show all.
    """

    folder: Path
    folder_name: str = ""
    insight: Record = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    seconds_left: float | None = None
    secrets: tuple[str, ...] = ()
    labels: Labels = field(default_factory=Labels)
    data: Record = field(default_factory=dict)
    stop_reason: str = ""
    engines: Mapping[str, RunData | str] = field(default_factory=dict)
    spec: Record = field(default_factory=dict)
    date: str = ""
    start: str = ""
    expected: str = ""
    most_listed: int = 500

    @classmethod
    def from_json(cls, data: Record, folder: Path, **context: Any) -> RunData:
        """Create the run from a result.json.

        Raises TypeError, LookupError, ValueError, AttributeError for other data.
        """
        engines = {
            name: each["error"] if "error" in each else cls.from_json(each, folder / name)
            for name, each in (data.get("engines") or {}).items()
        }
        return cls(
            **Result.read(data), folder=folder, data=data, stop_reason=stop_reason(data), engines=engines, **context
        )

    @classmethod
    def redacted(
        cls, data: Record, insight: Record, spec: Record, secrets: Sequence[str], folder: Path, **context: Any
    ) -> RunData:
        """Create a run without its secrets, because users share reports. `data` has the format of result.json."""
        paths = own_paths(folder)
        plain, insight, spec = (_shortened(redact_data(each, secrets), paths) for each in (data, insight, spec))
        return cls.from_json(plain, folder, insight=insight, spec=spec, secrets=tuple(secrets), **context)

    @property
    def serves(self) -> bool:
        """Whether the job is serving."""
        return self.objective in SERVING

    @property
    def is_rate(self) -> bool:
        """Whether a larger objective is better."""
        return not self.serves or is_rate(self.objective)

    @property
    def unit(self) -> str:
        """The name of the objective with its unit."""
        return heading(self.objective) if self.serves else "tokens/s/device"

    @property
    def hardware(self) -> str:
        """The number of devices and their chip."""
        return hardware_text(self.devices, self.chip)

    @property
    def all_trials(self) -> list[Trial]:
        """All probes, trials and repeats, in the order of their numbers."""
        return sorted([*self.probes, *self.trials, *self.repeats], key=lambda trial: trial.number)

    @property
    def was_interrupted(self) -> bool:
        """Whether the run is in progress, was interrupted or was killed."""
        return self.stopped_because in ("", TrialState.INTERRUPTED.value)

    @property
    def is_unmeasured(self) -> bool:
        """Whether no trial was measured, neither within the latency limits nor beyond them."""
        return self.best is None and self.fastest is None

    def figure(self, trial: Trial) -> float | None:
        """Return the measured objective of a trial, or None if it was not measured."""
        if not trial.measurement:
            return None
        if not self.serves:
            return trial.measurement.tokens_per_second_per_device
        return objective_value(self.objective, trial.measurement.step_time_s)

    def predicted(self, trial: Trial) -> Figures | None:
        """Return the predicted objective of a trial and the bounds of its 80% interval. None without a prediction."""
        found = trial.predicted
        interval = found and (found.objective if self.serves else found.tokens_per_second_per_device)
        return (interval.value, interval.low, interval.high) if interval else None

    def counted(self, trial: Trial) -> tuple[Trial, ...]:
        """Return the runs of a trial's configuration that count, or the trial alone if none does."""
        return self.runs_of(trial.candidate).counted or (trial,)

    def figures(self, trial: Trial) -> Figures | None:
        """Return the median objective over the runs of a configuration that count, the lowest and the highest.

        For an estimate, they are the predicted objective and the bounds of its 80% interval. None if unknown.
        """
        if self.fidelity == ESTIMATE:
            return self.predicted(trial)
        values = [value for each in self.runs_of(trial.candidate).counted if (value := self.figure(each)) is not None]
        return (typical(values, is_rate=self.is_rate), min(values), max(values)) if values else None

    def figures_of(self, trial: Trial) -> Mapping[str, float]:
        """Return the figures of a trial: as measured or, in an estimate, as predicted."""
        found = trial.predicted if self.fidelity == ESTIMATE else trial.measurement
        return found.figures if found else {}

    def measured(self, trial: Trial) -> Measurement | None:
        """Return the measurement of a trial with the median figures and the most memory of the runs that count."""
        if (own := trial.measurement) is None:
            return None
        used = [each.measurement.device_used_bytes for each in self.counted(trial) if each.measurement]
        figures = self.runs_of(trial.candidate).figures or own.figures
        return replace(own, figures=figures, device_used_bytes=max(filter(None, used), default=None))

    def broken_limits(self, trial: Trial) -> str:
        """Return the limits that a trial exceeded, or else the limits that its repeats exceeded.

        It is empty if there are none.
        """
        runs = (trial, *self.counted(trial))
        broken = {each.number: "; ".join(each.measurement.broken) for each in runs if each.measurement}
        if own := broken.pop(trial.number, ""):
            return own
        texts = [_("trial {number}: {reason}", number=number, reason=why) for number, why in broken.items() if why]
        return _("exceeded when repeated ({runs})", runs=", ".join(texts)) if texts else ""

    def over(self, trial: Trial) -> str:
        """Return which limits a configuration exceeds, as measured or as predicted, as the end of its name."""
        found = trial.predicted if self.fidelity == ESTIMATE else None
        names = [latency_name(key) for key, most in self.limits.items() if found and found.figures.get(key, 0.0) > most]
        names += [_("memory")] if found and found.fits is False else []
        why = self.broken_limits(trial) or ", ".join(names)
        return f" ({_('over its limit: {why}', why=why)})" if why else ""

    @property
    def nearest(self) -> Trial | None:
        """The trial nearest to the limits if no trial meets them.

        The comparison uses the median over a trial's runs, or the worse one of two runs.
        """
        if self.best is not None or not self.limits:
            return None
        ranked = []
        for trial in self.trials:
            missed_limits = [
                max((each.measurement.figures.get(name) or inf) / most for name, most in self.limits.items())
                for each in self.counted(trial)
                if each.measurement
            ]
            if trial.measurement and missed_limits:
                ranked.append((median_high(missed_limits), trial.number, trial))
        return min(ranked, key=lambda each: each[:2])[2] if ranked else None

    @property
    def listed(self) -> tuple[int, ...]:
        """The numbers of the trials in tables: the best, the baseline, the first failed trials, and the fastest."""
        named = [each for each in (self.best, self.baseline) if each]
        failed = [each for each in self.all_trials if seconds(each) is None][: self.most_listed // 5]
        fastest = sorted(self.all_trials, key=lambda each: seconds(each) or inf)
        return tuple(dict.fromkeys(each.number for each in (*named, *failed, *fastest)))[: self.most_listed]

    def name(self, trial: Trial) -> str:
        """Return the number of a trial with its role.

        If its fidelity differs from the run's, the fidelity replaces the role.
        """
        role = "" if trial.role is Role.SEARCH else trial.role.value
        if trial.fidelity != self.fidelity:
            role = trial.fidelity
        imported = _("imported") if trial.source and role != "imported" else ""
        best = _(NAMES["best_row"][self.fidelity]) if self.best and trial.number == self.best.number else ""
        return " ".join(filter(None, [str(trial.number), _(role), imported, best]))

    def cell(self, trial: Trial) -> Cell:
        """Return the name of a trial as a link to the details of the trial."""
        return Cell(self.name(trial), float(trial.number), f"#trial-{trial.number}")

    def configuration(self, trial: Trial) -> str:
        """Return the candidate of a trial in one line."""
        return candidate_text(trial.candidate, self.knobs)

    def state_text(self, trial: Trial) -> str:
        """Return the name of a trial's state as it is shown to users, with why a measured trial does not count."""
        state, why = state_name(trial.state.value, trial.fidelity), self.runs_of(trial.candidate).left_out
        is_left_out = trial.state is TrialState.MEASURED and trial.number in why
        return _("{state}, not counted: {why}", state=state, why=_(why[trial.number])) if is_left_out else state

    def public_text(self, text: str) -> str:
        """Return text without the secrets of the run and without absolute paths."""
        return str(_shortened(redact_text(text, self.secrets), own_paths(self.folder)))

    def metrics(self, trial: Trial) -> Record:
        """Return the content of a trial's metrics.json. It is empty if the file cannot be read."""
        return json_file(self.folder, f"trials/{trial.number}/metrics.json")

    def step_parts(self, trial: Trial) -> dict[str, float]:
        """Return the median seconds of each measured part of a step after the warm-up, by its key in metrics.json.

        It is empty if no parts were measured.
        """
        count = len(trial.measurement.step_times_s) if trial.measurement else 0
        steps, parts = self.metrics(trial).get("steps"), self.labels.measured_parts
        if not count or not isinstance(steps, list) or trial.fidelity != RUN or not parts:
            return {}
        counted_steps = [step for step in steps if isinstance(step, Mapping)][-count:]
        figures = {key: [number(step.get(key)) for step in counted_steps] for key in parts}
        known = {key: [value for value in values if value is not None] for key, values in figures.items()}
        is_complete = all(len(values) == len(counted_steps) > 0 for values in known.values())
        return {key: median(values) for key, values in known.items()} if is_complete else {}


def measured_s(trial: Trial) -> float | None:
    """Return the measured step time in seconds, or None if the trial was not measured."""
    return trial.measurement.step_time_s if trial.measurement else None


def seconds(trial: Trial) -> float | None:
    """Return the measured step time in seconds. For an estimate, it is the predicted step time."""
    return trial.predicted_step_s if trial.state is TrialState.PREDICTED else measured_s(trial)


def served(trial: Trial, name: str) -> float | None:
    """Return the measured metric `name` of a server, or None if it is unknown."""
    return number(trial.measurement.figures.get(name)) if trial.measurement else None


def own_paths(folder: Path) -> Mapping[str, str]:
    """Return the absolute paths that a page shortens: the run's folder and its parents, the home directory, and the
    prefixes of Python, each with its short form.

    Paths around the run become relative to it. Other paths, such as shared storage, are not shortened.
    """
    folder = folder.resolve()
    paths = {str(Path.home()): "~", sys.prefix: "…", sys.base_prefix: "…"}
    around = [each for each in (folder, *folder.parents) if len(each.parts) > 2]
    relative = {str(each): "/".join([".."] * steps) or "." for steps, each in enumerate(around)}
    return relative | {path: short for path, short in paths.items() if len(Path(path).parts) > 2 or short == "~"}


def _shortened(data: Any, paths: Mapping[str, str]) -> Any:
    """Return plain data in which the `paths` in strings are replaced by their short forms."""
    pattern = re.compile(WHOLE_PATH.replace("{}", "|".join(map(re.escape, sorted(paths, key=len, reverse=True)))))

    def shorten(each: Any) -> Any:
        if isinstance(each, Mapping):
            return {key: shorten(value) for key, value in each.items()}
        if isinstance(each, (list, tuple)):
            return [shorten(value) for value in each]
        return pattern.sub(lambda match: paths[match[0]], each) if isinstance(each, str) else each

    return shorten(data)


def json_file(folder: Path, name: str) -> Record:
    """Return the object in the JSON file `name` in the folder of a run. It is empty if the file cannot be read."""
    try:
        data = json.loads(read_regular(folder / name, folder=folder))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def run_rows(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Convert the values in records of runs to strings for a table, with states in the selected language and units."""
    return [{**each, **_run_texts(each)} for each in records]


def _run_texts(record: Mapping[str, Any]) -> dict[str, str | None]:
    speedup, value, mark = record.get("speedup"), record.get("value"), "" if record.get("fidelity") == RUN else "~"
    left = record.get("seconds_left")
    low, high, unit = record.get("low"), record.get("high"), record.get("unit")
    is_shown = record.get("significant") or record.get("fidelity") == ESTIMATE
    speedup_shown = f"{mark}{speedup or 0.0:+.1%}" if is_shown else _("not significant")
    return {
        "state": _(record["state"]),
        "value": None if value is None else f"{mark}{shown(value)} {unit}",
        "range": None if low is None or low == high else f"{shown(low)} - {shown(high)}",
        "speedup": None if speedup is None else speedup_shown,
        "seconds_left": None if left is None else f"~{duration_text(left)}",
    }
