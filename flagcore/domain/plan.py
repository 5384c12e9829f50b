"""The plan that a search returns, the interference between parallel trials, and the costs of tokens and of the job.

Costs are in the currency of `cluster.price_per_device_hour`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Annotated, Any

import numpy as np
from annotated_types import Interval

from flagcore.domain.knob import Knobs
from flagcore.domain.metrics import PER_DEVICE, PER_USER, RATES
from flagcore.domain.space import Candidate, pareto
from flagcore.domain.spec import Task
from flagcore.domain.trial import ESTIMATE, RUN, Trial, TrialState
from flagcore.i18n import N_, Message

Count = Annotated[int, Interval(ge=0, le=2**63)]
MAX_SLOWDOWN = 0.05
"""The maximum relative slowdown at which trials may run in parallel, even if the noise of single runs is larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """A comparison of two trials of one candidate: one ran alone, the other while other trials ran.

    `slowdown`: the relative increase of the step time when other trials run. None if the second trial failed.
    `noise`: the relative noise of the trial that ran alone.
    `trials`: the numbers of the two trials.
    """

    slowdown: float | None
    noise: float
    trials: tuple[int, int]

    @property
    def is_negligible(self) -> bool:
        """Whether trials may run in parallel: the slowdown is within `noise` and MAX_SLOWDOWN."""
        return self.slowdown is not None and self.slowdown <= min(self.noise, MAX_SLOWDOWN)

    @property
    def text(self) -> Message:
        """The result of the comparison in one line."""
        if self.slowdown is None:
            return Message(
                "trials run one at a time: trial {number} failed while other trials ran", number=self.trials[0]
            )
        if self.is_negligible:
            text = N_(
                "trials run side by side: other trials change the step time by {slowdown:+.1%} (noise {noise:.1%})"
            )
        else:
            text = N_(
                "trials run one at a time: other trials change the step time by {slowdown:+.1%} (noise {noise:.1%})"
            )
        return Message(text, slowdown=self.slowdown, noise=self.noise)


HOUR, DAY = 3600.0, 86400.0


def cost_figures(task: Task, step_time_s: float, tokens_per_s_per_device: float | None) -> dict[str, float]:
    """Return the cost of a million tokens, and the cost and duration of the planned steps, as far as known."""
    price, steps = price_per_device_hour(task), task.spec.control.planned_steps
    figures = dict[str, float]()
    if price is not None and tokens_per_s_per_device:
        figures["cost_per_million_tokens"] = price / HOUR * (1e6 / tokens_per_s_per_device)
    if steps is not None:
        figures["planned_days"] = steps * step_time_s / DAY
        if price is not None:
            figures["planned_cost"] = steps * step_time_s / HOUR * price * task.cluster.devices
    return figures


def price_per_device_hour(task: Task) -> float | None:
    """Return the mean price of one device for one hour, or None if the spec does not price all devices.

    It is the mean over all devices of the cluster, because every device is paid for as long as the job runs.
    """
    cluster = task.spec.cluster
    prices = [group.price_per_device_hour for group in cluster.groups or (cluster,)]
    known_prices = [price for price in prices if price is not None]
    if len(known_prices) < len(prices):
        return None
    counts = [group.devices for group in task.cluster.groups]
    return sum(price * count for price, count in zip(known_prices, counts, strict=True)) / sum(counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The numbers of knob combinations by outcome.

    combinations = sum(illegal) + merged + candidates, and
    candidates = does_not_fit + sum(pruned) + measured + stopped + failed + untried.
    """

    combinations: Count
    illegal: dict[str, Count]
    merged: Count
    candidates: Count
    does_not_fit: Count
    pruned: dict[str, Count]
    measured: Count
    stopped: Count
    failed: Count
    untried: Count

    @property
    def balanced(self) -> bool:
        """Whether the numbers add up: every combination has exactly one outcome."""
        settled = self.does_not_fit + sum(self.pruned.values()) + self.measured + self.stopped + self.failed
        return (
            self.combinations == sum(self.illegal.values()) + self.merged + self.candidates
            and self.candidates == settled + self.untried
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The result of `flag tune`.

    - `speedup`: the speedup of the best over the baseline. None if it is unknown.
    - `rivals`: the candidates that do not differ significantly from the best.
    - `fastest`: the fastest measured candidate, even if it exceeds `limits`.
    - `drift`: the relative speedup from the first to the last run of the baseline. None if it ran once.
    - `drifted`: whether `drift` exceeds the noise.
    - `fidelity`: the fidelity of `trials`.
    - `probes`: the probes that ran before the first trial.
    - `knobs`: the knobs of the task.
    - `interference`: the interference between parallel trials.
    - `runs`: the runs of each candidate, and which of them count.
    """

    chip: str
    devices: int
    objective: str
    counts: Counts
    trials: tuple[Trial, ...]
    repeats: tuple[Trial, ...]
    baseline: Trial | None
    best: Trial | None
    speedup: Speedup | None
    stopped_because: str
    rivals: tuple[Trial, ...] = ()
    drift: float | None = None
    drifted: bool = False
    fidelity: str = RUN
    probes: tuple[Trial, ...] = ()
    fastest: Trial | None = None
    limits: Mapping[str, float] = field(default_factory=dict)
    knobs: Knobs = field(default_factory=dict)
    interference: Interference | None = None
    runs: Mapping[Candidate, Runs] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        by_candidate: dict[Candidate, list[Trial]] = {}
        for each in (*self.trials, *self.repeats):
            by_candidate.setdefault(each.candidate, []).append(each)
        object.__setattr__(self, "runs", {candidate: Runs.of(runs) for candidate, runs in by_candidate.items()})

    @property
    def gain(self) -> float | None:
        """The speed of the best over that of the baseline, minus one: 0.25 is 25% faster. None if unknown."""
        return self.speedup.value if self.speedup else None

    def runs_of(self, candidate: Candidate) -> Runs:
        """Return the runs of a candidate, and which of them count."""
        return self.runs.get(candidate) or Runs.of(())

    def median_s(self, trial: Trial) -> float | None:
        """Return the median step time in seconds over the runs of a trial's candidate, or that of an estimate."""
        return trial.predicted_step_s if self.fidelity == ESTIMATE else self.runs_of(trial.candidate).median_s

    @property
    def front(self) -> list[Mapping[str, Any]]:
        """The Pareto-optimal load points of output tokens per second, per device and per user, fastest first.

        The rate of a user is the inverse of the median time per token.
        """
        points = [
            {"trial": trial.number, **point, PER_USER: 1.0 / point["tpot_s.p50"]}
            for trial in self.trials
            if trial.measurement
            for point in trial.measurement.points
            if point.get(PER_DEVICE) and point.get("tpot_s.p50")
        ]
        by_device, by_user = (np.array([point[name] for point in points]) for name in (PER_DEVICE, PER_USER))
        return [points[index] for index in pareto(by_device, by_user)]

    @property
    def slow_devices(self) -> dict[str, list[int]]:
        """The warnings about slow devices without measured values, each with the numbers of its trials."""
        trials_by_device: dict[str, list[int]] = {}
        for each in (*self.trials, *self.repeats):
            for line in each.measurement.slow if each.measurement else ():
                trials_by_device.setdefault(re.split(" (?:takes|runs) ", line)[0], []).append(each.number)
        return trials_by_device

    @property
    def prediction_error(self) -> PredictionError | None:
        """The errors of predicted step times over the trials with a corrected prediction. None without such trials."""
        pairs = [[each.measured_over(found) for found in (each.predicted, each.believed)] for each in self.trials]
        log_errors = [[abs(math.log(ratio)) for ratio in pair if ratio] for pair in pairs if None not in pair]
        if not log_errors:
            return None
        before, after = (math.expm1(median(errors)) for errors in zip(*log_errors, strict=True))
        return PredictionError(before=before, after=after, trials=len(log_errors))


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """The measured runs of one candidate that count, and why each of its other runs does not, by trial number.

    The figures of a candidate are medians over those that count. A run without a measurement has its state as reason.
    """

    counted: tuple[Trial, ...]
    left_out: Mapping[int, str]

    @classmethod
    def of(cls, runs: Iterable[Trial]) -> Runs:
        """Return which of a candidate's runs count: those without a flaw of FLAWS, or else those with the least one."""
        runs, left_out = tuple(runs), dict[int, str]()
        counted = [each for each in runs if each.state is TrialState.MEASURED and each.measurement]
        for flaw, has_flaw in FLAWS.items():
            if better := [each for each in counted if not has_flaw(each)]:
                left_out |= {each.number: flaw for each in counted if has_flaw(each)}
                counted = better
        left_out |= {
            each.number: each.state.value for each in runs if each not in counted and each.number not in left_out
        }
        return cls(counted=tuple(counted), left_out=left_out)

    @property
    def median_s(self) -> float | None:
        """The median step time in seconds, or None if no run counts."""
        times = [each.measurement.step_time_s for each in self.counted if each.measurement]
        return median(times) if times else None

    @property
    def figures(self) -> dict[str, float]:
        """The medians of a server's figures. Those of rates are over times, as those of the objective."""
        runs = [each.measurement.figures for each in self.counted if each.measurement]
        shared = [name for name in runs[0] if all(name in each for each in runs)] if runs else ()
        return {name: typical([each[name] for each in runs], is_rate=name in RATES) for name in shared}


def typical(values: Sequence[float], *, is_rate: bool) -> float:
    """Return the median of figures. That of rates is over times."""
    return 1.0 / median(1.0 / each if each else math.inf for each in values) if is_rate else median(values)


FLAWS: Mapping[str, Callable[[Trial], bool]] = {
    N_("disturbed by another trial"): lambda trial: trial.inconclusive,
    N_("imported"): lambda trial: bool(trial.source),
    N_("shortened steps, or other trials at the same time"): lambda trial: not trial.is_final,
    N_("other programs used its cores"): lambda trial: bool(trial.share_of_others),
}
"""Why a measured run does not count if the candidate has runs without this flaw, the worst flaw first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedup:
    """The speedup of the best over the baseline.

    - `value`: the ratio of their median speeds, minus one.
    - `rounds`: the same for each round, which is a run of the baseline and the next run of the best.
    - `low`, `high`: the range of these.
    - `conclusive`: whether the rounds differ by less than the speedup.
    - `significant`: whether it is also larger than the noise of the runs, and the best was faster in every round.
    """

    value: float
    low: float
    high: float
    rounds: tuple[float, ...]
    conclusive: bool
    significant: bool

    @classmethod
    def of(cls, value: float, rounds: Sequence[float], *, is_significant: bool = True) -> Speedup:
        """Return the speedup with the range of its rounds."""
        low, high = min(value, *rounds), max(value, *rounds)
        conclusive = high - low <= abs(value)
        significant = is_significant and conclusive and low > 0.0
        return cls(
            value=value, low=low, high=high, rounds=tuple(rounds), conclusive=conclusive, significant=significant
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionError:
    """The median relative errors of predicted step times over `trials` trials.

    `before`: the error of the predictions made before the first trial.
    `after`: the error of the corrected predictions, each made just before its trial.
    """

    before: float
    after: float
    trials: int


def failed_repeats(repeats: Sequence[Trial]) -> dict[int, str]:
    """Return, by trial number, the states of the repeats that were not measured."""
    return {each.number: each.state.value for each in repeats if each.state is not TrialState.MEASURED}


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTime:
    """The maximum number of trials and repeats of a search, and the time that they take.

    `measuring_s`: the predicted seconds of all their steps or loads. None if unknown.
    `starting_s`: the usual seconds of all their starts. `starts_guessed`: whether no start was measured on the chip.
    `at_most_s`: the seconds if each trial runs until its time limit.
    """

    trials: int
    repeats: int
    measuring_s: float | None
    starting_s: float
    starts_guessed: bool
    at_most_s: float
