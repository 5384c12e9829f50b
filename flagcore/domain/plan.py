"""The outcome of a tune: counts, trials, baseline, best and gain."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from flagcore.domain.interference import Interference
from flagcore.domain.knob import Knobs
from flagcore.domain.search_state import DOES_NOT_FIT, Pruned, SearchState, cold_start, drift, drifted, rivals, speed
from flagcore.domain.space import Space
from flagcore.domain.spec import Task
from flagcore.domain.trial import RUN, Trial, TrialState


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Counts of combinations by outcome.

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
    """The outcome of `flag tune`. `gains` is best over baseline minus one, first runs first, then one figure per
    repeat.

    `medians` are the median seconds of a step of candidates that ran more than once, by the number of their first
    trial. `fastest` is the fastest measured candidate, whether or not it keeps `limits`. `rivals` do not differ
    significantly from the best. `drift` is the relative speedup from the baseline's first to its last run, None without
    a repeat of it, and `drifted` is whether that is more than noise. `cold_start` is that of a candidate from its warm
    to its cold runs beyond the drift, and `cold_start_differs` is whether it is more than noise. `fidelity` is that of
    the trials; `probes` are of a lower one, before the first run. `knobs` are those of the task. `interference` is that
    of trials at once.
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
        """The lowest gain of the rounds: a disturbed machine can make one look larger than it is."""
        return min(self.gains, default=None)

    @property
    def prediction_error(self) -> PredictionError | None:
        """Errors of predicted step times, over the trials whose prediction had been corrected."""
        pairs = (
            [measured_over(trial, "predicted") for trial in self.trials],
            [measured_over(trial, "believed") for trial in self.trials],
        )
        both = [pair for pair in zip(*pairs, strict=True) if None not in pair]
        if not both:
            return None
        before, after = ([abs(math.log(each)) for each in some if each] for some in zip(*both, strict=True))
        return PredictionError(before=math.expm1(median(before)), after=math.expm1(median(after)), trials=len(both))


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionError:
    """Median relative errors of predicted step times over `trials`.

    `before` is that of the predictions before any trial, `after` that of the corrected ones before each trial.
    """

    before: float
    after: float
    trials: int


def measured_over(trial: Trial, which: str) -> float | None:
    """Return the measured over the `predicted` or `believed` step time of a trial; None if one of them is unknown."""
    record: Any = trial.believed if which == "believed" else trial.predicted
    step = record.get("step_time_s") if isinstance(record, Mapping) else None
    value = step.get("value") if isinstance(step, Mapping) else None
    measured = trial.measurement.step_time_s if trial.measurement else None
    return measured / value if measured and isinstance(value, float) and 0 < value < math.inf else None


def failed_repeats(repeats: Sequence[Trial]) -> dict[int, str]:
    """Return the state of repeats without a measurement, by number."""
    return {each.number: each.state.value for each in repeats if each.state is not TrialState.MEASURED}


def summarize(task: Task, space: Space, pruned: Pruned, search_state: SearchState, because: str, knobs: Knobs) -> Plan:
    """Return the plan of a task. Best and baseline are whole runs if there are any."""
    cold = cold_start(search_state)
    return Plan(
        chip=task.cluster.chips,
        devices=task.cluster.devices,
        objective=task.spec.objective,
        counts=count(space, pruned, search_state),
        trials=search_state.trials,
        repeats=search_state.repeats,
        baseline=search_state.shown(search_state.baseline),
        best=search_state.shown(search_state.best),
        gains=gains(search_state),
        stopped_because=because,
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
    """Count where combinations went. A candidate that ran counts by its trial, even if a rule removed it later."""
    ran = {row: trial for trial in search_state.trials if (row := space.find(trial.candidate)) is not None}
    states = Counter(trial.state for trial in ran.values())
    rule = pruned.rule.copy()
    rule[list(ran)] = -1
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
    """Return how much faster the best is than the baseline in each round, 0.25 for a quarter more tokens per second.

    The first runs are a round, each repeat of the best another one, with the baseline's run before it; a round of
    which one half has no measurement of whole steps does not count. Empty without a measured baseline.
    """
    best, baseline = search_state.best, search_state.baseline
    if best is None or baseline is None or baseline.state is not TrialState.MEASURED:
        return ()
    if best.candidate == baseline.candidate:
        return (0.0,)
    slow = (baseline, *search_state.repeats_of(baseline.candidate))
    rounds = [
        (fast, [each for each in slow if each.number < fast.number][-1:])
        for fast in (*(() if best.source else (best,)), *search_state.repeats_of(best.candidate))
    ]
    return tuple(
        speed(fast) / speed(before[0]) - 1
        for fast, before in rounds
        if before and fast.state is before[0].state is TrialState.MEASURED and fast.is_final and before[0].is_final
    )
