"""Samplers of Optuna, for engines without a performance model.

The study is rebuilt from the trials at each call, so a resumed run makes the same choices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, GPSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from flagcore.contracts import Choice, SearchContext, Strategy
from flagcore.domain.space import Axis, Columns, IntArray, Space, decode
from flagcore.domain.trial import Trial
from flagcore.domain.trial import TrialState as Ended
from flagcore.errors import UsageError

WORSE = 2.0
"""The step time of a trial that ran out of memory, relative to the slowest measured trial."""


@dataclass(slots=True)
class Sampled:
    """Tries the open row nearest to the suggestion of a sampler.

    The sampler gets step times, and the index of each knob's value.
    """

    name: str
    sampler: Callable[..., BaseSampler]

    def next(self, context: SearchContext) -> Choice:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        space = context.space
        places = decode(
            space.rows, [np.arange(codes.size) for codes in space.codes], [axis.knob for axis in space.axes]
        )
        axes = _varying_axes(space, places)
        lists = {axis.knob: _values(space, axis, places[axis.knob]) for axis in axes}
        distributions = {axis.knob: _distribution(axis, lists[axis.knob].size) for axis in axes}
        try:
            study = optuna.create_study(sampler=self.sampler(seed=len(context.trials) + len(context.pending)))
            study.add_trials(_frozen_trials(context, lists, distributions))
            wanted = study.ask(distributions).params
        except ImportError as error:
            raise UsageError(f"the strategy {self.name} needs a package that is not installed: {error}") from None
        far = np.zeros(context.open_rows.size)
        for axis in axes:
            codes = lists[axis.knob]
            apart = np.abs(np.searchsorted(codes, space.codes[space.axes.index(axis)]) - wanted[axis.knob])
            share = apart > 0 if _is_word(axis) else apart / (codes.size - 1)
            far += share.take(places[axis.knob][context.open_rows])
        nearest = int(np.argmin(far))
        how = "suggested it" if far[nearest] == 0.0 else "suggested a similar candidate that is not open"
        return Choice(row=int(context.open_rows[nearest]), because=f"{self.name} {how}")


def _varying_axes(space: Space, places: Columns) -> list[Axis]:
    """Return axes that identify each row. An axis that depends on the others would only lead to illegal suggestions.

    `places` are the indices of the rows' values in their axes.
    """
    left, keys, stride = list(space.axes), space.rows, 1
    for axis, codes in zip(space.axes, space.codes, strict=True):
        place, times = places[axis.knob], stride
        stride *= codes.size
        if np.ptp(place) == 0:
            left.remove(axis)
            continue
        without = keys - place * times
        if np.diff(np.sort(without)).all():
            left.remove(axis)
            keys = without
    return left


def _values(space: Space, axis: Axis, places: IntArray) -> IntArray:
    """Return the sorted codes of an axis that occur in rows."""
    codes = space.codes[space.axes.index(axis)]
    there: IntArray = np.sort(codes[np.bincount(places, minlength=codes.size) > 0])
    return there


def _distribution(axis: Axis, count: int) -> BaseDistribution:
    """Return the distribution of the index of a value; the values have an order if they are numbers."""
    return CategoricalDistribution(tuple(range(count))) if _is_word(axis) else IntDistribution(0, count - 1)


def _is_word(axis: Axis) -> bool:
    return bool(axis.words) or axis.is_flag


def _frozen_trials(
    context: SearchContext, lists: dict[str, IntArray], distributions: dict[str, BaseDistribution]
) -> list[FrozenTrial]:
    axes = {axis.knob: axis for axis in context.space.axes}
    times = [_seconds(trial) for trial in context.trials]
    slowest = max((seconds for seconds in times if seconds is not None), default=None)
    kept = []
    for trial, seconds in zip(context.trials, times, strict=True):
        values = trial.candidate.as_dict()
        params = {}
        for knob, codes in lists.items():
            (place,) = np.flatnonzero(codes == axes[knob].encode(values.get(knob, axes[knob].neutral)))
            params[knob] = int(place)
        value = WORSE * slowest if slowest and trial.state is Ended.OUT_OF_MEMORY else seconds
        state = TrialState.FAIL if value is None else TrialState.COMPLETE
        kept.append(create_trial(state=state, params=params, distributions=distributions, value=value))
    return kept


def _seconds(trial: Trial) -> float | None:
    ran = trial.state in (Ended.MEASURED, Ended.STOPPED)
    return trial.measurement.step_time_s if ran and trial.measurement else None


TPE: Strategy = Sampled("tpe", TPESampler)
GP: Strategy = Sampled("gp", GPSampler)
