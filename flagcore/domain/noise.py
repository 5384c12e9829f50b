"""What is run again at the end, so that what is told is not noise, and whether the machine changed meanwhile.

All of it follows from the trials that are kept, so a run that was killed goes on where it was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from flagcore.domain.search_state import SearchState, speed
from flagcore.domain.spec import Control
from flagcore.domain.trial import Trial, TrialState

RUNS_DIFFER = 0.02
"""Two runs of one configuration differ by so much, as a share, whatever a run's own steps say."""

MOST_RIVALS = 2
"""Of the candidates that may be as fast as the best as many are run again, the fastest ones."""

MORE_ROUNDS = 2
"""Rounds beyond `control.repeats` while a rival is not told apart from the best."""


def noise(runs: Sequence[Trial]) -> float:
    """Return by how much two runs of a candidate differ, as a share: from the spread of steps and between its runs."""
    measured = [trial.measurement for trial in runs if trial.measurement]
    if not measured:
        return RUNS_DIFFER
    within = median(one.spread_s / one.step_time_s if one.step_time_s > 0 else 0.0 for one in measured)
    speeds = [speed(trial) for trial in runs]
    middle = median(speeds)
    between = (max(speeds) - min(speeds)) / 2 / middle if middle > 0 else 0.0
    return max(RUNS_DIFFER, within, between)


def significant(longer: float, one: Sequence[Trial], other: Sequence[Trial]) -> bool:
    """Return whether two candidates differ by more than their runs do.

    `longer` is how much longer the slower one takes, as a share: 2.0 for three times as long. It must reach the larger
    noise of both over the root of their fewer runs. Both are shares of a time: a disturbed run takes longer, and may
    take several times as long; a share of a speed would never reach a noise beyond 100%.
    """
    return longer >= max(noise(one), noise(other)) / math.sqrt(min(len(one), len(other)))


def rivals(search_state: SearchState) -> tuple[Trial, ...]:
    """Return the measured candidates that are not told apart from the best, by their medians; the fastest first."""
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
    """Return what is run again, in order: baseline, best, and the first of its rivals; nothing if that is one only."""
    if search_state.best is None:
        return ()
    known = search_state.baseline
    baseline = (known,) if known and known.state is TrialState.MEASURED else ()
    chosen = {trial.candidate: trial for trial in (*baseline, search_state.best, *rivals(search_state)[:MOST_RIVALS])}
    return tuple(chosen.values()) if len(chosen) > 1 else ()


def next_repeat(control: Control, search_state: SearchState) -> Trial | None:
    """Return the trial to run again, None if no more is to be had of it.

    Each contender has `control.repeats` runs again, in rotation. Then there are more rounds, `MORE_ROUNDS` at most,
    while a rival is not told apart. As best and rivals may change meanwhile, there is an end to all repeats together.
    """
    several = contenders(search_state)
    if not several or not control.repeats:
        return None
    least = min(several, key=lambda trial: len(search_state.repeats_of(trial.candidate)))
    done, most = len(search_state.repeats_of(least.candidate)), control.repeats + MORE_ROUNDS
    if done < control.repeats or (done < most and rivals(search_state)):
        ended = sum(repeat.state is not TrialState.INTERRUPTED for repeat in search_state.repeats)
        return least if ended < most * (2 + MOST_RIVALS) else None
    return None


def drift(search_state: SearchState) -> float | None:
    """Return by how much the baseline's last run is faster than its first, as a share; None if it ran but once."""
    runs = search_state.runs_of(search_state.baseline.candidate) if search_state.baseline else ()
    return speed(runs[-1]) / speed(runs[0]) - 1.0 if len(runs) > 1 else None


def drifted(search_state: SearchState) -> bool:
    """Return whether the machine changed by more than what the steps of one run of the baseline differ."""
    change = drift(search_state)
    if change is None or search_state.baseline is None:
        return False
    runs = search_state.runs_of(search_state.baseline.candidate)
    return abs(change) > max(noise([run]) for run in (runs[0], runs[-1]))
