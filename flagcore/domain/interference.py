"""How much trials that run at once disturb each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flagcore.domain.search_state import noise, speed
from flagcore.domain.trial import RUN, Role, Trial, TrialState
from flagcore.i18n import N_, Message

MAX_SLOWDOWN = 0.05
"""Trials that are slowed down by more do not run side by side, however noisy a run alone is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """One candidate that ran alone, and again beside other trials. `trials` are the numbers of both runs.

    `slowdown` is how much longer its step took beside others, as a share; None if it failed. Trials run side by side if
    that is within `noise`, the noise of the run alone, and MAX_SLOWDOWN.
    """

    slowdown: float | None
    noise: float
    trials: tuple[int, int]

    @property
    def quiet(self) -> bool:
        """Whether trials may run side by side."""
        return self.slowdown is not None and self.slowdown <= min(self.noise, MAX_SLOWDOWN)

    @property
    def text(self) -> Message:
        """The outcome in one line."""
        if self.slowdown is None:
            return Message("trials run one at a time: beside others, trial {number} failed", number=self.trials[0])
        if self.quiet:
            text = N_("trials run side by side: beside others, a step takes {slowdown:+.1%} (noise {noise:.1%})")
        else:
            text = N_("trials run one at a time: beside others, a step takes {slowdown:+.1%} (noise {noise:.1%})")
        return Message(text, slowdown=self.slowdown, noise=self.noise)


def measured_alone(trials: Sequence[Trial]) -> Trial | None:
    """Return the first trial of the run that was measured alone, usually the baseline; None without one."""
    ran = (trial for trial in trials if trial.fidelity == RUN and not trial.source and trial.group is None)
    return next((trial for trial in ran if trial.state is TrialState.MEASURED), None)


def interference(trials: Sequence[Trial]) -> Interference | None:
    """Return the interference that the trials of a run measured last, None if they did not."""
    alone = measured_alone(trials)
    beside = [trial for trial in trials if trial.role is Role.INTERFERENCE and trial.settles]
    if alone is None or not beside:
        return None
    last = beside[-1]
    slowdown = speed(alone) / speed(last) - 1.0 if last.state is TrialState.MEASURED else None
    return Interference(slowdown=slowdown, noise=noise([alone]), trials=(alone.number, last.number))
