"""Repeats at the end of a run, and the noise of its measurements.

Everything follows from the stored trials, so a killed run resumes where it was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from flagcore.domain.search_state import SearchState, speed
from flagcore.domain.spec import Control
from flagcore.domain.trial import Trial, TrialState

MIN_NOISE = 0.02
"""The least relative difference between two runs of one configuration, however even their steps are."""

MAX_RIVALS = 2
"""How many rivals of the best are run again, the fastest ones."""

EXTRA_ROUNDS = 2
"""Rounds beyond `control.repeats` while a rival does not differ significantly from the best."""


def noise(runs: Sequence[Trial]) -> float:
    """Return the relative noise of a candidate, from the spread of steps and of runs."""
    measured = [trial.measurement for trial in runs if trial.measurement]
    if not measured:
        return MIN_NOISE
    within = median(one.spread_s / one.step_time_s if one.step_time_s > 0 else 0.0 for one in measured)
    speeds = [speed(trial) for trial in runs]
    middle = median(speeds)
    between = (max(speeds) - min(speeds)) / 2 / middle if middle > 0 else 0.0
    return max(MIN_NOISE, within, between)


def significant(longer: float, one: Sequence[Trial], other: Sequence[Trial]) -> bool:
    """Return whether two candidates differ by more than their runs do.

    `longer` is how much longer the slower one takes, as a share: 2.0 for three times as long. It must reach the larger
    noise of both over the root of their fewer runs. Both are shares of a time: a disturbed run takes longer, and may
    take several times as long; a share of a speed would never reach a noise beyond 100%.
    """
    return longer >= max(noise(one), noise(other)) / math.sqrt(min(len(one), len(other)))


def rivals(search_state: SearchState) -> tuple[Trial, ...]:
    """Return the measured candidates that do not differ significantly from the best; the fastest first."""
    best = search_state.best
    if best is None:
        return ()
    runs, top = search_state.runs_of(best.candidate), search_state.speed_of(best.candidate)
    near = []
    for trial in search_state.trials:
        if trial.candidate == best.candidate or not search_state.keeps_limits(trial.candidate):
            continue
        own, speed_of_it = search_state.runs_of(trial.candidate), search_state.speed_of(trial.candidate)
        if speed_of_it and not significant(top / speed_of_it - 1.0, runs, own):
            near.append(trial)
    return tuple(sorted(near, key=lambda trial: -search_state.speed_of(trial.candidate)))


def contenders(search_state: SearchState) -> tuple[Trial, ...]:
    """Return what is run again, in order: baseline, best and rivals; empty if only one is left."""
    if search_state.best is None:
        return ()
    known = search_state.baseline
    baseline = (known,) if known and known.state is TrialState.MEASURED else ()
    chosen = {trial.candidate: trial for trial in (*baseline, search_state.best, *rivals(search_state)[:MAX_RIVALS])}
    return tuple(chosen.values()) if len(chosen) > 1 else ()


def next_repeat(control: Control, search_state: SearchState) -> Trial | None:
    """Return the trial to run again, None if repeats are done.

    Each contender has `control.repeats` runs again, in rotation. Then there are more rounds, `EXTRA_ROUNDS` at most,
    while a rival does not differ significantly. Best and rivals may change, so all repeats together are limited, too.
    """
    several = contenders(search_state)
    if not several or not control.repeats:
        return None
    least = min(several, key=lambda trial: len(search_state.repeats_of(trial.candidate)))
    done, most = len(search_state.repeats_of(least.candidate)), control.repeats + EXTRA_ROUNDS
    if done < control.repeats or (done < most and rivals(search_state)):
        ended = sum(repeat.state is not TrialState.INTERRUPTED for repeat in search_state.repeats)
        return least if ended < most * (2 + MAX_RIVALS) else None
    return None


def drift(search_state: SearchState) -> float | None:
    """Return the relative speedup from the first to the last run of the baseline; None if it ran once."""
    runs = search_state.runs_of(search_state.baseline.candidate) if search_state.baseline else ()
    return speed(runs[-1]) / speed(runs[0]) - 1.0 if len(runs) > 1 else None


def drifted(search_state: SearchState) -> bool:
    """Return whether the drift of the baseline is more than the noise of its runs."""
    change = drift(search_state)
    if change is None or search_state.baseline is None:
        return False
    runs = search_state.runs_of(search_state.baseline.candidate)
    return abs(change) > max(noise([run]) for run in (runs[0], runs[-1]))
