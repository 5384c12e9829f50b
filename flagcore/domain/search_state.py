"""The state of a search: what rules removed, and the trials so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

import numpy as np
from numpy.typing import NDArray

from flagcore.domain.candidate import Candidate
from flagcore.domain.space import BoolArray, IntArray
from flagcore.domain.trial import Trial, TrialState

DOES_NOT_FIT = "does_not_fit"
"""The rule that removes candidates with too much predicted memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """Which rule removed each row. `rule` is 0 for an open row, else a place in `rules` plus one; `trial` is the
    number of the trial behind a learned rule, -1 for none. `too_much` marks the rows that do not fit by
    corrected predictions, `seen` are the trials already applied."""

    rule: NDArray[np.int16]
    trial: IntArray
    too_much: BoolArray
    rules: tuple[str, ...] = ()
    broken_rules: tuple[str, ...] = ()
    seen: frozenset[int] = field(default_factory=frozenset)

    @property
    def open_rows(self) -> IntArray:
        """Positions of the rows that no rule has removed."""
        return np.flatnonzero(self.rule == 0)

    def reason(self, row: int) -> str | None:
        """Return what removed `row`, in words, or None."""
        code = int(self.rule[row])
        if not code:
            return None
        behind = int(self.trial[row])
        return self.rules[code - 1] + (f" (trial {behind})" if behind >= 0 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchState:
    """The trials so far: the last one of each candidate, the baseline, and the best.

    `best` is the first trial of the candidate with the best median among those that keep the limits, `fastest` that of
    all measured ones. `probes` are trials of a lower fidelity, which settle no candidate.
    """

    by_candidate: dict[Candidate, Trial]
    repeats: tuple[Trial, ...]
    baseline: Trial | None
    best: Trial | None
    fastest: Trial | None = None
    probes: tuple[Trial, ...] = ()

    @property
    def trials(self) -> tuple[Trial, ...]:
        """One trial a candidate, in the order in which they ran."""
        return tuple(sorted(self.by_candidate.values(), key=lambda trial: trial.number))

    def repeats_of(self, candidate: Candidate) -> tuple[Trial, ...]:
        """Return the repeats of a candidate that were not interrupted, in order."""
        ended = (trial for trial in self.repeats if trial.state is not TrialState.INTERRUPTED)
        return tuple(trial for trial in ended if trial.candidate == candidate)

    def runs_of(self, candidate: Candidate) -> tuple[Trial, ...]:
        """Return the measured runs of a candidate, repeats included; imported ones only without others."""
        first = self.by_candidate.get(candidate)
        runs = (*((first,) if first else ()), *self.repeats_of(candidate))
        measured = tuple(trial for trial in runs if trial.state is TrialState.MEASURED and trial.measurement)
        return tuple(trial for trial in measured if not trial.source) or measured

    def speed_of(self, candidate: Candidate) -> float:
        """Return the median speed of a candidate's runs, 0 without any."""
        return median([speed(trial) for trial in self.runs_of(candidate)] or [0.0])

    def keeps_limits(self, candidate: Candidate) -> bool:
        """Return whether more than half of a candidate's measured runs kept every limit."""
        runs = self.runs_of(candidate)
        return 2 * sum(not trial.measurement.broken for trial in runs if trial.measurement) > len(runs)

    @property
    def settled(self) -> frozenset[Candidate]:
        """Candidates that need no further trial; one that was interrupted may be tried again."""
        return frozenset(c for c, trial in self.by_candidate.items() if trial.state is not TrialState.INTERRUPTED)


def speed(trial: Trial) -> float:
    """Return the steps per second of one run, 0 for one without a measurement."""
    return 1.0 / trial.measurement.step_time_s if trial.measurement and trial.measurement.step_time_s > 0 else 0.0
