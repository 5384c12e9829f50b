"""The interference of trials that run in parallel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flagcore.domain.search_state import noise, speed
from flagcore.domain.trial import RUN, Role, Trial, TrialState
from flagcore.i18n import N_, Message

MAX_SLOWDOWN = 0.05
"""Trials do not run in parallel if that slows them down by a larger share, even if single runs are noisier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """A comparison of two trials of one candidate: one ran alone, the other while other trials ran.

    `slowdown` is the relative increase of the step time by other trials; None if that trial failed. `noise` is the
    relative noise of the trial that ran alone. `trials` are the numbers of both trials.
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
        """The outcome in one line."""
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
    """Return the first trial of the run that was measured alone, usually the baseline, or None."""
    trials_alone = (trial for trial in trials if trial.fidelity == RUN and not trial.source and trial.group is None)
    return next((trial for trial in trials_alone if trial.state is TrialState.MEASURED), None)


def interference(trials: Sequence[Trial]) -> Interference | None:
    """Return the last measurement of interference in a run, or None."""
    alone_times = measured_alone(trials)
    conclusive = [trial for trial in trials if trial.role is Role.INTERFERENCE and trial.is_conclusive]
    if alone_times is None or not conclusive:
        return None
    last = conclusive[-1]
    slowdown = speed(alone_times) / speed(last) - 1.0 if last.state is TrialState.MEASURED else None
    return Interference(slowdown=slowdown, noise=noise([alone_times]), trials=(alone_times.number, last.number))
