"""Strategies from Optuna's samplers, for engines without a performance model.

The study is rebuilt from the trials at each call, so that a resumed run makes the same choices.
"""

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
from flagcore.domain.trial import TrialState as State
from flagcore.errors import UsageError

OUT_OF_MEMORY_FACTOR = 2.0
"""The assumed step time of a trial that ran out of memory, relative to the slowest measured trial. Chosen by hand."""


@dataclass(slots=True)
class Sampled:
    """A strategy that tries the open row nearest to the suggestion of a sampler.

    The parameters of the study are the indices of knob values. Its objective is the step time.
    """

    name: str
    sampler: Callable[..., BaseSampler]

    def next(self, context: SearchContext) -> Choice:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        space = context.space
        indices = decode(
            space.rows, [np.arange(codes.size) for codes in space.codes], [axis.knob for axis in space.axes]
        )
        axes = _varying_axes(space, indices)
        codes_of = {axis.knob: _used_codes(space, axis, indices[axis.knob]) for axis in axes}
        distributions = {axis.knob: _distribution(axis, codes_of[axis.knob].size) for axis in axes}
        try:
            study = optuna.create_study(sampler=self.sampler(seed=len(context.trials) + len(context.pending)))
            study.add_trials(_frozen_trials(context, codes_of, distributions))
            suggestion = study.ask(distributions).params
        except ImportError as error:
            raise UsageError(f"the strategy {self.name} needs a package that is not installed: {error}") from None
        distance = np.zeros(context.open_rows.size)
        for axis in axes:
            codes = codes_of[axis.knob]
            steps = np.abs(np.searchsorted(codes, space.codes[space.axes.index(axis)]) - suggestion[axis.knob])
            axis_distance = steps > 0 if _is_word(axis) else steps / (codes.size - 1)
            distance += axis_distance.take(indices[axis.knob][context.open_rows])
        nearest = int(np.argmin(distance))
        method = "suggested it" if distance[nearest] == 0.0 else "suggested a similar candidate that is not open"
        return Choice(row=int(context.open_rows[nearest]), because=f"{self.name} {method}")


def _varying_axes(space: Space, indices: Columns) -> list[Axis]:
    """Return a set of axes that is enough to identify each row.

    Axes that depend on the others are left out, to avoid illegal suggestions. `indices`: for each axis, the index of
    each row's value.
    """
    axes, keys, stride = list(space.axes), space.rows, 1
    for axis, codes in zip(space.axes, space.codes, strict=True):
        index, axis_stride = indices[axis.knob], stride
        stride *= codes.size
        if np.ptp(index) == 0:
            axes.remove(axis)
            continue
        keys_without = keys - index * axis_stride
        if np.diff(np.sort(keys_without)).all():
            axes.remove(axis)
            keys = keys_without
    return axes


def _used_codes(space: Space, axis: Axis, indices: IntArray) -> IntArray:
    """Return the sorted codes of an axis that occur in the space."""
    codes = space.codes[space.axes.index(axis)]
    used: IntArray = np.sort(codes[np.bincount(indices, minlength=codes.size) > 0])
    return used


def _distribution(axis: Axis, count: int) -> BaseDistribution:
    """Return the distribution of the index of a knob value. Numbers are ordered; words are categories."""
    return CategoricalDistribution(tuple(range(count))) if _is_word(axis) else IntDistribution(0, count - 1)


def _is_word(axis: Axis) -> bool:
    return bool(axis.words) or axis.is_flag


def _frozen_trials(
    context: SearchContext, codes_of: dict[str, IntArray], distributions: dict[str, BaseDistribution]
) -> list[FrozenTrial]:
    axes = {axis.knob: axis for axis in context.space.axes}
    times = [_seconds(trial) for trial in context.trials]
    slowest = max((seconds for seconds in times if seconds is not None), default=None)
    frozen = []
    for trial, seconds in zip(context.trials, times, strict=True):
        values = trial.candidate.as_dict()
        params = {}
        for knob, codes in codes_of.items():
            (index,) = np.flatnonzero(codes == axes[knob].encode(values.get(knob, axes[knob].neutral)))
            params[knob] = int(index)
        value = OUT_OF_MEMORY_FACTOR * slowest if slowest and trial.state is State.OUT_OF_MEMORY else seconds
        state = TrialState.FAIL if value is None else TrialState.COMPLETE
        frozen.append(create_trial(state=state, params=params, distributions=distributions, value=value))
    return frozen


def _seconds(trial: Trial) -> float | None:
    is_timed = trial.state in (State.MEASURED, State.STOPPED)
    return trial.measurement.step_time_s if is_timed and trial.measurement else None


TPE: Strategy = Sampled("tpe", TPESampler)
GP: Strategy = Sampled("gp", GPSampler)
