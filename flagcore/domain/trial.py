"""Trials, their measurements, probes of single ranks of a larger job on one device, and the events of a run."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from statistics import median
from typing import Any

from flagcore.domain.chip import share_of_others
from flagcore.domain.metrics import HighestLoad
from flagcore.domain.prediction import Belief, Prediction
from flagcore.domain.records import belief_record, read_belief
from flagcore.domain.space import Candidate
from flagcore.domain.steps import MAX_STEP_S, MIN_STEP_S, is_step_time

ESTIMATE, PROBE, RUN = FIDELITIES = ("estimate", "probe", "run")
"""The fidelities of a trial, the cheapest first.

- estimate: the candidate is only predicted
- probe: compute, optimizer and memory of single ranks are measured on one device
- run: the whole job runs on all its devices
"""


class TrialState(Enum):
    """The state of a trial. Only MEASURED trials can become the best.

    PREDICTED: the candidate was predicted and not run.
    STOPPED: the trial was stopped because it was clearly slower than the best.
    INVALID: the trial ran with other values than requested, or has other answers than the baseline.
    """

    PREDICTED = "predicted"
    RUNNING = "running"
    MEASURED = "measured"
    STOPPED = "stopped"
    OUT_OF_MEMORY = "out_of_memory"
    INVALID = "invalid"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    INTERRUPTED = "interrupted"

    @property
    def failed(self) -> bool:
        """Whether the trial failed: out of memory, invalid, failed, timed out or interrupted."""
        return self not in (TrialState.PREDICTED, TrialState.RUNNING, TrialState.MEASURED, TrialState.STOPPED)


FAILED_STATES = (TrialState.FAILED, TrialState.INVALID, TrialState.TIMED_OUT)
TIMED_STATES = (TrialState.MEASURED, TrialState.STOPPED)


class Role(Enum):
    """The purpose of a trial.

    INTERFERENCE: a measured candidate runs again while other trials run. It does not count as a result of its
    candidate.
    REPEAT: a finalist runs again at the end of the search.
    IMPORTED: the trial was run by another tool. It does not count as a result of its candidate.
    """

    BASELINE = "baseline"
    INTERFERENCE = "interference"
    SEARCH = "search"
    REPEAT = "repeat"
    IMPORTED = "imported"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The `difference` of a trial's answers to the baseline's, its `limit`, the `unit` of both, and in `text` where."""

    difference: float
    limit: float
    unit: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The measurement of one run, in seconds and bytes. Figures that were not measured are None.

    Steps. For a server, a step time is the objective in seconds of one run of the load:

    - `step_times_s`: the step times in order, without warm-up.
    - `step_time_s`, `spread_s`: their median, and their interquartile range.
    - `warmup_steps`: the number of warm-up steps, if the trial ran fewer steps than planned. None means
      `control.warmup_iters`.
    - `partial`: whether the trial was stopped early.
    - `few_steps`: whether the trial had no time for more steps. It then also has `low_s` and `high_s`.

    Probes and shortened trials:

    - `modelled_s`: the seconds of the step time that were predicted instead of measured.
    - `low_s`, `high_s`: the bounds of the 80% interval of the step time.
    - `scaled_from`: the measured time of a shortened step, from which all other times are scaled to whole steps. None
      if the steps were whole.

    Servers:

    - `figures`: the figures of the load point that reports show.
    - `points`: the figures of all load points.
    - `highest`: the result of a search for the highest load.
    - `broken`: descriptions of the limits that were exceeded.
    - `notes`: what makes figures uncertain.

    Devices and values:

    - `answers`: the comparison with the baseline's answers, if there was one.
    - `effective`: the knob values that the engine reported.
    - `devices`: telemetry and speed test of each device, with its number over all nodes as `device`.
    - `slow`: descriptions of slow devices.
    """

    step_times_s: tuple[float, ...]
    step_time_s: float
    spread_s: float
    tokens_per_second_per_device: float
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    device_used_bytes: int | None = None
    losses: tuple[float | None, ...] = ()
    effective: Mapping[str, object] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    telemetry: Mapping[str, float] = field(default_factory=dict)
    partial: bool = False
    modelled_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    points: tuple[Mapping[str, float], ...] = ()
    highest: HighestLoad | None = None
    broken: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    devices: tuple[Mapping[str, float], ...] = ()
    slow: tuple[str, ...] = ()
    scaled_from: float | None = None
    warmup_steps: int | None = None
    few_steps: bool = False
    answers: Answers | None = None

    @property
    def interval(self) -> float:
        """Half the width of the 80% interval, relative to the step time. 0 if no step was shortened or left out."""
        if self.low_s is None or self.high_s is None or not (self.few_steps or self.scaled_from is not None):
            return 0.0
        return (self.high_s - self.low_s) / 2.0 / self.step_time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimit:
    """The time limit of a trial.

    `because`: where the limit comes from, in words.
    `target_s`: after this time, the trial ends as soon as its steps are enough for a measurement. None means that it
    ends only at its limit.
    """

    seconds: float
    because: str
    target_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortened:
    """How the steps of a trial are shortened: a smaller global batch, or fewer nodes.

    `global_batch_size`, `whole`: the samples of a shortened step, and of a whole step.
    `scale`: the predicted time of a whole step over the predicted time of a shortened step.
    `low`, `high`: the bounds of the 80% interval of `scale`.
    `nodes`, `of_nodes`: the number of nodes of the trial, and of the whole job. 0 if the trial uses all nodes.
    `more_bytes`: the additional memory in use of a device on fewer nodes.
    `own`: on fewer nodes, half the width of the relative interval of `scale`, without the error that all candidates
    share.
    """

    global_batch_size: int
    whole: int
    scale: float
    low: float
    high: float
    nodes: int = 0
    of_nodes: int = 0
    more_bytes: int = 0
    own: float = 0.0

    def scaled(self, measured: Measurement) -> Measurement:
        """Return a measurement of shortened steps, scaled to whole steps."""
        step = measured.step_time_s
        rate = self.whole / self.global_batch_size / self.scale * (self.nodes / self.of_nodes if self.nodes else 1.0)
        sizes = ("peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes")
        used = {name: value for name in sizes if (value := getattr(measured, name)) is not None}
        return replace(
            measured,
            **{name: max(value - self.more_bytes, 1) for name, value in used.items()},
            step_times_s=tuple(each * self.scale for each in measured.step_times_s),
            step_time_s=step * self.scale,
            spread_s=measured.spread_s * self.scale,
            tokens_per_second_per_device=measured.tokens_per_second_per_device * rate,
            modelled_s=step * (self.scale - 1.0),
            low_s=step * self.low,
            high_s=step * self.high,
            scaled_from=step,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run or probe of a candidate.

    - `predicted`: the prediction made before any trial. None for a trial that has none.
    - `reason`: why the trial failed or was stopped.
    - `log`: the path of its output, relative to the folder of the run.
    - `fidelity`: one of FIDELITIES.
    - `source`: the file from which the trial was imported. None if flagcore ran it.
    - `began_s`: the time of its start, in seconds since the start of the search.
    - `chosen_because`: why the strategy chose the candidate.
    - `believed`: the strategy's belief when it chose the candidate.
    - `search_ended`: for a repeat, the reason why the search ended before it.
    - `shortened`: how its steps were shortened. None if they were whole.
    - `group`: the number of its group of devices, if other trials ran at the same time. None if it ran alone.
    - `inconclusive`: whether other programs disturbed the trial or a host was lost, so that the candidate may be tried
      again.
    - `lost_host`: the host that was lost.
    - `warm`: whether it was forked from a process that had already imported its modules.
    - `finished_steps_s`: if the trial ended before its last step, the times of its finished steps, scaled to whole
      steps. On an accelerator, the first step is excluded, because it compiles kernels.
    - `silent_s`: if the trial hung, the seconds between its last finished step and its end.
    - `telemetry`: the mean device figures of a trial without a measurement, by name.
    """

    number: int
    candidate: Candidate
    role: Role
    state: TrialState
    predicted: Prediction | None = None
    measurement: Measurement | None = None
    reason: str | None = None
    duration_s: float = 0.0
    log: str = ""
    fidelity: str = RUN
    source: str | None = None
    began_s: float | None = None
    chosen_because: str | None = None
    believed: Belief | None = None
    search_ended: str | None = None
    time_limit: TimeLimit | None = None
    shortened: Shortened | None = None
    group: int | None = None
    inconclusive: bool = False
    lost_host: str | None = None
    warm: bool = False
    finished_steps_s: tuple[float, ...] = ()
    silent_s: float = 0.0
    telemetry: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the trial in one line. The mark `~` means that the figure is predicted."""
        found, text = self.measurement or self.predicted, self.reason or "-"
        if found and (rate := found.figures.get("output_tokens_per_s")):
            text = f"{rate:.4g} output tokens/s"
        elif found and found.step_time_s:
            text = f"{found.step_time_s:.4g} s/step"
        mark = "~" if found and found is self.predicted else ""
        return f"trial {self.number} ({self.role.value}, {self.candidate}) {self.state.value}: {mark}{text}"

    @property
    def search_fields(self) -> dict[str, object]:
        """The fields named in SEARCH_FIELDS that are not None, as plain data."""
        values = {name: getattr(self, name) for name in SEARCH_FIELDS}
        if self.believed or (self.role is Role.SEARCH and self.chosen_because is not None):
            values["believed"] = belief_record(self.believed)
        records = (TimeLimit, Shortened)
        plain = {name: asdict(value) if isinstance(value, records) else value for name, value in values.items()}
        return {name: value for name, value in plain.items() if value is not None}

    @property
    def scale(self) -> float:
        """The ratio of the predicted times of a whole step and of a step of this trial; 1.0 unless it is shortened."""
        return self.shortened.scale if self.shortened else 1.0

    @property
    def fewer_nodes(self) -> int:
        """The number of nodes on which the trial ran, if it did not run on all nodes. Otherwise 0."""
        return self.shortened.nodes if self.shortened else 0

    @property
    def predicted_step_s(self) -> float | None:
        """The time of a whole step in seconds, as predicted before any trial. None if unknown."""
        return self.predicted.step_time_s if self.predicted else None

    @property
    def expected_step_s(self) -> float | None:
        """The time of a whole step in seconds, as believed when the candidate was chosen, or else as predicted."""
        return self.believed.step_time_s if self.believed else self.predicted_step_s

    def measured_over(self, found: Prediction | Belief | None) -> float | None:
        """Return the measured over the predicted step time of `predicted` or `believed`. None if one is unknown."""
        predicted_s = found.step_time_s if found else None
        return self.measurement.step_time_s / predicted_s if self.measurement and predicted_s else None

    @property
    def is_conclusive(self) -> bool:
        """Whether the candidate needs no further trial: the trial was neither interrupted nor disturbed."""
        return self.state is not TrialState.INTERRUPTED and not self.inconclusive

    @property
    def is_final(self) -> bool:
        """Whether the trial's measurement can be reported without a repeat: no other trial ran at the same time, and
        the steps were whole or the trial used fewer nodes."""
        if self.measurement is None or self.group is not None:
            return False
        return self.measurement.scaled_from is None or bool(self.fewer_nodes)

    @property
    def interval(self) -> float:
        """Half the width of the relative 80% interval of the step time, without the error that all candidates share. 0
        if no step was shortened or left out."""
        if self.shortened and self.shortened.nodes:
            return self.shortened.own
        return self.measurement.interval if self.measurement else 0.0

    @property
    def speed(self) -> float:
        """The measured steps per second. 0 without a measurement."""
        return 1.0 / self.measurement.step_time_s if self.measurement and self.measurement.step_time_s > 0 else 0.0

    @property
    def share_of_others(self) -> float:
        """The share of the trial's cores that other programs used. 0 if unknown."""
        return share_of_others(self.measurement.telemetry) if self.measurement else 0.0

    @property
    def step_seen_s(self) -> float | None:
        """The measured step time in seconds, or else the median of the finished steps. None if no step finished."""
        if self.measurement:
            return self.measurement.step_time_s
        return median(self.finished_steps_s) if self.finished_steps_s else None

    @property
    def has_only_finished_steps(self) -> bool:
        """Whether the trial has no measurement, but has finished steps that can be compared with its prediction."""
        return self.measurement is None and bool(self.finished_steps_s) and self.predicted_step_s is not None

    def overhead_s(self, steps: int, warmup: int) -> float | None:
        """Return the seconds that the trial spent outside its steps, mostly on its start, or None if unknown.

        `steps`, `warmup`: the planned number of steps, and how many of them are warm-up. The trial may have run fewer.
        """
        measured = self.measurement
        if self.has_only_finished_steps:
            return self.duration_s - self.silent_s - math.fsum(self.finished_steps_s) / self.scale
        if self.state is not TrialState.MEASURED or measured is None:
            return None
        if measured.warmup_steps is not None:
            fewer = measured.warmup_steps + len(measured.step_times_s)
            steps = min(steps - warmup + measured.warmup_steps, fewer)
        return self.duration_s - self.silent_s - steps * (measured.scaled_from or measured.step_time_s)


LONGER, LONGER_S = 1.1, 1.0
"""Steps may take longer than their trial by this factor and these seconds, because several clocks measure them."""
MAX_CAPACITIES, MAX_BYTES = 10.0, 1 << 50
"""The most memory in use that is believed, in capacities of a device, and in bytes if its capacity is unknown."""


def checked(trial: Trial) -> Trial:
    """Return a finished trial without readings that cannot be. If its measurement has one, the trial failed."""
    longest = LONGER * trial.duration_s + LONGER_S if trial.duration_s and not trial.source else MAX_STEP_S
    steps = tuple(each for each in trial.finished_steps_s if MIN_STEP_S <= each / trial.scale <= longest)
    trial = replace(trial, finished_steps_s=steps)
    reason = next(_wrong_readings(trial, trial.measurement, longest), None) if trial.measurement else None
    if reason and trial.state in TIMED_STATES:
        trial = replace(trial, state=TrialState.FAILED, reason=reason)
    return replace(trial, measurement=None) if reason else trial


def _wrong_readings(trial: Trial, measured: Measurement, longest_s: float) -> Iterator[str]:
    """Yield a sentence for each figure that cannot be, with its value and the rule."""
    times = (*measured.step_times_s, measured.step_time_s, measured.scaled_from or measured.step_time_s)
    for seconds in itertools.filterfalse(is_step_time, times):
        yield f"unusable step time: {seconds:.4g} s is not between {MIN_STEP_S:g} and {MAX_STEP_S:g} s"
        return
    total = sum(times[:-2]) / times[-2] * times[-1]
    is_timed = trial.fidelity == RUN and not measured.points and not trial.source and trial.duration_s > 0
    if is_timed and total > longest_s:
        problem = f"{len(times) - 2} steps take {total:.4g} s, but the trial took {trial.duration_s:.3g} s"
        yield f"unusable step time: {problem}; check the unit"
    if not 0 < (rate := measured.tokens_per_second_per_device) < math.inf:
        yield f"unusable throughput: {rate:.4g} tokens/s per device is not a finite number above 0"
    capacity = trial.predicted.capacity_bytes if trial.predicted else None
    most = MAX_CAPACITIES * capacity if capacity else MAX_BYTES
    for name in ("peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes"):
        if not 0 <= (used := getattr(measured, name) or 0) <= most:
            yield f"unusable memory: {name}: {used / 2**30:.4g} GiB is not between 0 and {most / 2**30:.4g} GiB"
    numbers = {"spread_s": measured.spread_s, **measured.figures, **measured.telemetry}
    yield from (f"unusable figure: {name} is {value}" for name, value in numbers.items() if not math.isfinite(value))


def is_disturbed(runs: Sequence[Trial]) -> bool:
    """Return whether other programs used the cores of all `runs`."""
    return bool(runs) and all(run.share_of_others for run in runs)


SEARCH_FIELDS: Mapping[str, Callable[[Any], Any]] = {
    "began_s": float,
    "chosen_because": str,
    "believed": read_belief,
    "search_ended": str,
    "time_limit": lambda data: TimeLimit(**data),
    "shortened": lambda data: Shortened(**data),
    "group": int,
}
"""The fields that the search sets when a trial begins, and the functions that read them from plain data.
`result.json` contains them next to the prediction."""


KINDS = ("run_started", "trial_started", "trial_finished", "run_finished")
RUN_STARTED, TRIAL_STARTED, TRIAL_FINISHED, RUN_FINISHED = KINDS
"""The kinds of events. A resumed run sends `run_started` again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """An event of a run. All fields are plain data. Known secrets are redacted.

    `kind`: one of KINDS.
    `time`: seconds since the epoch.
    `run`: the unique name of the run.
    `folder`: the absolute path of the run.
    `job`: a mapping with `engine`, `kind` (train or serve), `model`, `chip`, `devices`, `objective` and `fidelity`.
    `trial`: the trial of the event, in the format of `result.json`. None if there is none.
    `best`: the best trial so far, in the same format. None if there is none.
    `result`: the content of `result.json`, only for `run_finished`. None if there is no result.
    """

    kind: str
    time: float
    run: str
    folder: str
    job: Mapping[str, Any]
    trial: Mapping[str, Any] | None = None
    best: Mapping[str, Any] | None = None
    result: Mapping[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-serialisable data."""
        return asdict(self)
