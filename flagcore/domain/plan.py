"""The plan that a search returns, the interference between parallel trials, and the costs of tokens and of the job.

Costs are in the currency of `cluster.price_per_device_hour`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from flagcore.domain.knob import Knobs
from flagcore.domain.search_state import DOES_NOT_FIT, Pruned, SearchState, is_disturbed, noise, speed
from flagcore.domain.space import Space
from flagcore.domain.spec import Task
from flagcore.domain.trial import RUN, Role, Trial, TrialState, step_value
from flagcore.i18n import N_, Message

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


def measured_alone(trials: Sequence[Trial]) -> Trial | None:
    """Return the first trial of the run that was measured while no other trial ran, usually the baseline, or None."""
    trials_alone = (trial for trial in trials if trial.fidelity == RUN and not trial.source and trial.group is None)
    return next((trial for trial in trials_alone if trial.state is TrialState.MEASURED), None)


def interference(trials: Sequence[Trial]) -> Interference | None:
    """Return the last comparison of a trial that ran alone with one that ran in parallel, or None if there is none."""
    alone_times = measured_alone(trials)
    conclusive = [trial for trial in trials if trial.role is Role.INTERFERENCE and trial.is_conclusive]
    if alone_times is None or not conclusive:
        return None
    last = conclusive[-1]
    slowdown = speed(alone_times) / speed(last) - 1.0 if last.state is TrialState.MEASURED else None
    return Interference(slowdown=slowdown, noise=noise([alone_times]), trials=(alone_times.number, last.number))


HOUR, DAY = 3600.0, 86400.0
COST = ("cost_per_million_tokens", "planned_days", "planned_cost")
"""The names of the figures that `cost_figures` returns."""


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

    combinations: int
    illegal: Mapping[str, int]
    merged: int
    candidates: int
    does_not_fit: int
    pruned: Mapping[str, int]
    measured: int
    stopped: int
    failed: int
    untried: int

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

    - `gains`: the relative speedups of the best over the baseline, one per round: the first runs, then each repeat.
    - `medians`: the median step times of candidates that ran more than once, by the number of their first trial.
    - `rivals`: the candidates that do not differ significantly from the best.
    - `fastest`: the fastest measured candidate, even if it exceeds `limits`.
    - `drift`: the relative speedup from the first to the last run of the baseline. None if it ran once.
    - `drifted`: whether `drift` exceeds the noise.
    - `fidelity`: the fidelity of `trials`.
    - `probes`: the probes that ran before the first trial.
    - `knobs`: the knobs of the task.
    - `interference`: the interference between parallel trials.
    """

    chip: str
    devices: int
    objective: str
    counts: Counts
    trials: tuple[Trial, ...]
    repeats: tuple[Trial, ...]
    baseline: Trial | None
    best: Trial | None
    gains: tuple[float, ...]
    stopped_because: str
    medians: Mapping[int, float] = field(default_factory=dict)
    rivals: tuple[Trial, ...] = ()
    drift: float | None = None
    drifted: bool = False
    fidelity: str = RUN
    probes: tuple[Trial, ...] = ()
    fastest: Trial | None = None
    limits: Mapping[str, float] = field(default_factory=dict)
    knobs: Knobs = field(default_factory=dict)
    interference: Interference | None = None

    @property
    def gain(self) -> float | None:
        """The lowest of `gains`, because other load on the machine can make a gain look larger than it is."""
        return min(self.gains, default=None)

    @property
    def speedup(self) -> Speedup | None:
        """The speedup of the best over the baseline, with its range. None if it is unknown."""
        is_rival = any(each.candidate == self.baseline.candidate for each in self.rivals) if self.baseline else False
        return Speedup.of(self.gains, is_significant=not is_rival)

    @property
    def prediction_error(self) -> PredictionError | None:
        """The errors of predicted step times over the trials with a corrected prediction. None without such trials."""
        pairs = [[measured_to_predicted(trial, name) for name in ("predicted", "believed")] for trial in self.trials]
        log_errors = [[abs(math.log(ratio)) for ratio in pair if ratio] for pair in pairs if None not in pair]
        if not log_errors:
            return None
        before, after = (math.expm1(median(errors)) for errors in zip(*log_errors, strict=True))
        return PredictionError(before=before, after=after, trials=len(log_errors))


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedup:
    """The relative speedup of the best over the baseline: the median, lowest and highest value of `rounds` rounds.

    `significant`: whether the speedup exceeds the noise of the runs, and the best was faster in every round.
    """

    median: float
    low: float
    high: float
    rounds: int
    significant: bool

    @classmethod
    def of(cls, gains: Sequence[float], *, is_significant: bool = True) -> Speedup | None:
        """Return the speedup from the gain of each round, or None if there are no rounds."""
        if not gains:
            return None
        low, significant = min(gains), is_significant and min(gains) > 0.0
        return cls(median=median(gains), low=low, high=max(gains), rounds=len(gains), significant=significant)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionError:
    """The median relative errors of predicted step times over `trials` trials.

    `before`: the error of the predictions made before the first trial.
    `after`: the error of the corrected predictions, each made just before its trial.
    """

    before: float
    after: float
    trials: int


def measured_to_predicted(trial: Trial, field: Literal["predicted", "believed"]) -> float | None:
    """Return the ratio of a trial's measured to its predicted step time, or None if one of them is unknown.

    `field`: which prediction to use, as in `Trial`.
    """
    predicted = step_value(trial.believed if field == "believed" else trial.predicted)
    return trial.measurement.step_time_s / predicted if trial.measurement and predicted else None


def failed_repeats(repeats: Sequence[Trial]) -> dict[int, str]:
    """Return, by trial number, the states of the repeats that were not measured."""
    return {each.number: each.state.value for each in repeats if each.state is not TrialState.MEASURED}


def summarize(
    task: Task, space: Space, pruned: Pruned, search_state: SearchState, stopped_because: str, knobs: Knobs
) -> Plan:
    """Return the plan of a search. The best and the baseline are runs with whole steps, if there are such runs."""
    return Plan(
        chip=task.cluster.chips,
        devices=task.cluster.devices,
        objective=task.spec.objective,
        counts=count(space, pruned, search_state),
        trials=search_state.trials,
        repeats=search_state.repeats,
        baseline=search_state.reported_trial(search_state.baseline),
        best=search_state.reported_trial(search_state.best),
        gains=gains(search_state),
        stopped_because=stopped_because,
        medians={
            runs[0].number: 1.0 / search_state.speed_of(trial.candidate)
            for trial in search_state.trials
            if len(runs := search_state.runs_of(trial.candidate)) > 1
        },
        rivals=search_state.rivals,
        drift=search_state.drift,
        drifted=search_state.drifted,
        fidelity=task.spec.control.fidelity,
        probes=search_state.probes,
        fastest=search_state.fastest,
        limits=task.spec.limits,
        knobs=knobs,
    )


def count(space: Space, pruned: Pruned, search_state: SearchState) -> Counts:
    """Count the combinations by outcome.

    A candidate with a trial is counted by the trial's state, even if a rule removed it later.
    """
    trial_of_row = {row: trial for trial in search_state.trials if (row := space.find(trial.candidate)) is not None}
    states = Counter(trial.state for trial in trial_of_row.values())
    rule = pruned.rule.copy()
    rule[list(trial_of_row)] = -1
    removed = {name: int((rule == place + 1).sum()) for place, name in enumerate(pruned.rules)}
    return Counts(
        combinations=space.combinations,
        illegal=dict(space.illegal),
        merged=space.merged,
        candidates=len(space),
        does_not_fit=removed.pop(DOES_NOT_FIT, 0),
        pruned={name: number for name, number in removed.items() if number},
        measured=states[TrialState.MEASURED],
        stopped=states[TrialState.STOPPED],
        failed=sum(number for state, number in states.items() if state.failed),
        untried=int((rule == 0).sum()),
    )


def gains(search_state: SearchState) -> tuple[float, ...]:
    """Return the relative speedup of the best over the baseline in each round, such as 0.25 for 25% more tokens/s.

    A round is a run of the baseline and the first run of the best after it and before the next run of the baseline.
    Rounds in which one of them has no measurement of whole steps are skipped, and those in which other programs used
    the cores of the baseline, if there are others. Empty if the baseline was not measured.
    """
    best, baseline = search_state.best, search_state.baseline
    if best is None or baseline is None or baseline.state is not TrialState.MEASURED:
        return ()
    if best.candidate == baseline.candidate:
        return (0.0,)
    baseline_runs = (baseline, *search_state.repeats_of(baseline.candidate))
    best_runs = (*(() if best.source else (best,)), *search_state.repeats_of(best.candidate))
    ends = (*(run.number for run in baseline_runs[1:]), math.inf)
    rounds = [
        (baseline_run, best_run)
        for baseline_run, end in zip(baseline_runs, ends, strict=True)
        if (best_run := next((run for run in best_runs if baseline_run.number < run.number < end), None))
        and all(run.state is TrialState.MEASURED and run.is_final for run in (best_run, baseline_run))
    ]
    quiet = [each for each in rounds if not is_disturbed(each[:1])] or rounds
    return tuple(speed(best_run) / speed(baseline_run) - 1 for baseline_run, best_run in quiet)
