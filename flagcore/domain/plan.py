"""The result of a tune: counts, trials, baseline, best and gain."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from flagcore.domain.interference import Interference
from flagcore.domain.knob import Knobs
from flagcore.domain.search_state import DOES_NOT_FIT, Pruned, SearchState, cold_start, drift, drifted, rivals, speed
from flagcore.domain.space import Space
from flagcore.domain.spec import Task
from flagcore.domain.trial import RUN, Trial, TrialState


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The numbers of combinations by outcome.

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
        """Whether every combination is accounted for."""
        settled = self.does_not_fit + sum(self.pruned.values()) + self.measured + self.stopped + self.failed
        return (
            self.combinations == sum(self.illegal.values()) + self.merged + self.candidates
            and self.candidates == settled + self.untried
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The result of `flag tune`.

    `gains` are the relative speedups of the best over the baseline: of the first runs, then of each repeat. `medians`
    are the median step times of candidates that ran more than once, by the number of their first trial. `fastest` is
    the fastest measured candidate, also if it exceeds `limits`. `rivals` do not differ significantly from the best.

    `drift` is the relative speedup from the first to the last run of the baseline, None without a repeat; `drifted` is
    whether it exceeds the noise. `cold_start` is the relative speedup from the warm to the cold runs of a candidate,
    corrected for the drift; `cold_start_differs` is whether it exceeds the noise.

    `fidelity` is the fidelity of `trials`. `probes` ran before the first of them. `knobs` are the knobs of the task,
    `interference` is the interference of parallel trials.
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
    cold_start: float | None = None
    cold_start_differs: bool = False
    fidelity: str = RUN
    probes: tuple[Trial, ...] = ()
    fastest: Trial | None = None
    limits: Mapping[str, float] = field(default_factory=dict)
    knobs: Knobs = field(default_factory=dict)
    interference: Interference | None = None

    @property
    def gain(self) -> float | None:
        """The lowest of `gains`, since other load on the machine can make a gain look larger than it is."""
        return min(self.gains, default=None)

    @property
    def speedup(self) -> Speedup | None:
        """The speedup of the best over the baseline with its range; None if it is unknown."""
        is_rival = any(each.candidate == self.baseline.candidate for each in self.rivals) if self.baseline else False
        return Speedup.of(self.gains, is_significant=not is_rival)

    @property
    def prediction_error(self) -> PredictionError | None:
        """The errors of predicted step times, over the trials whose prediction had been corrected."""
        pairs = [[measured_to_predicted(trial, name) for name in ("predicted", "believed")] for trial in self.trials]
        log_errors = [[abs(math.log(ratio)) for ratio in pair if ratio] for pair in pairs if None not in pair]
        if not log_errors:
            return None
        before, after = (math.expm1(median(errors)) for errors in zip(*log_errors, strict=True))
        return PredictionError(before=before, after=after, trials=len(log_errors))


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedup:
    """The relative speedup of the best over the baseline: the median, lowest and highest of `rounds` rounds.

    It is `significant` if it exceeds the noise of the runs, and every round is faster.
    """

    median: float
    low: float
    high: float
    rounds: int
    significant: bool

    @classmethod
    def of(cls, gains: Sequence[float], *, is_significant: bool = True) -> Speedup | None:
        """Return the speedup from the gains of rounds; None without rounds."""
        if not gains:
            return None
        low, significant = min(gains), is_significant and min(gains) > 0.0
        return cls(median=median(gains), low=low, high=max(gains), rounds=len(gains), significant=significant)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionError:
    """The median relative errors of predicted step times over `trials` trials.

    `before` is the error of the predictions before any trial, `after` the error of the corrected predictions that were
    made before each trial.
    """

    before: float
    after: float
    trials: int


def measured_to_predicted(trial: Trial, field: Literal["predicted", "believed"]) -> float | None:
    """Return the ratio of the measured to the predicted step time of a trial; None if one of them is unknown."""
    record: Any = trial.believed if field == "believed" else trial.predicted
    step = record.get("step_time_s") if isinstance(record, Mapping) else None
    value = step.get("value") if isinstance(step, Mapping) else None
    measured = trial.measurement.step_time_s if trial.measurement else None
    return measured / value if measured and isinstance(value, float) and 0 < value < math.inf else None


def failed_repeats(repeats: Sequence[Trial]) -> dict[int, str]:
    """Return the states of the repeats without a measurement, by trial number."""
    return {each.number: each.state.value for each in repeats if each.state is not TrialState.MEASURED}


def summarize(
    task: Task, space: Space, pruned: Pruned, search_state: SearchState, stopped_because: str, knobs: Knobs
) -> Plan:
    """Return the plan of a search. For the best and the baseline, runs with whole steps are preferred."""
    cold = cold_start(search_state)
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
        rivals=rivals(search_state),
        drift=drift(search_state),
        drifted=drifted(search_state),
        cold_start=cold[0] if cold else None,
        cold_start_differs=bool(cold and abs(cold[0]) > cold[1]),
        fidelity=task.spec.control.fidelity,
        probes=search_state.probes,
        fastest=search_state.fastest,
        limits=task.spec.limits,
        knobs=knobs,
    )


def count(space: Space, pruned: Pruned, search_state: SearchState) -> Counts:
    """Count combinations by outcome. A candidate with a trial counts by its trial, also if a rule removed it later."""
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
    """Return the relative speedup of the best over the baseline in each round: 0.25 for 25% more tokens per second.

    Each run of the best makes a round with the last run of the baseline before it. Rounds without measurements of whole
    steps are left out. Empty without a measured baseline.
    """
    best, baseline = search_state.best, search_state.baseline
    if best is None or baseline is None or baseline.state is not TrialState.MEASURED:
        return ()
    if best.candidate == baseline.candidate:
        return (0.0,)
    baseline_runs = (baseline, *search_state.repeats_of(baseline.candidate))
    rounds = [
        (best_run, [each for each in baseline_runs if each.number < best_run.number][-1:])
        for best_run in (*(() if best.source else (best,)), *search_state.repeats_of(best.candidate))
    ]
    return tuple(
        speed(best_run) / speed(earlier_runs[0]) - 1
        for best_run, earlier_runs in rounds
        if earlier_runs
        and best_run.state is earlier_runs[0].state is TrialState.MEASURED
        and best_run.is_final
        and earlier_runs[0].is_final
    )
