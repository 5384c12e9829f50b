"""A stage's seconds as a fast function of its number of layers, for the search for splits of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flagcore.contracts import Costs
from flagcore.domain.space import FloatArray, IntArray
from flagcore_training.kinds import layer_kinds
from flagcore_training.layout import ArrayRecord, Layout, Training
from flagcore_training.memory.states import split_parameters
from flagcore_training.stages import Stage
from flagcore_training.time.stage import (
    Blocks,
    host_of,
    launch_wait,
    recomputed_layers,
    recomputed_share,
    stage_work,
    summing_seconds,
)
from flagcore_training.time.vision import tower_time
from flagcore_training.weights import stage_parameters


@dataclass(frozen=True, slots=True)
class _Work(ArrayRecord):
    """The seconds and the kernel launches of a part's forward, and of its backward including weight gradients.

    `again` is what full recompute of its layers adds to the backward, instead of selective recompute.
    """

    forward: FloatArray
    launches: FloatArray
    backward: FloatArray
    backward_launches: FloatArray
    again: FloatArray
    again_launches: FloatArray


@dataclass(frozen=True, slots=True)
class _Parts(ArrayRecord):
    """The work of each part of a model.

    `layer` is the mean of the layers after the leading dense ones, `leading` that of these, `first` and `last` are the
    ends, and `mtp` is multi-token prediction. `once_s` is added once per stage, in seconds. `recomputed_layers` is the
    number of layers of a stage that are recomputed in full, inf for all.
    """

    layer: _Work
    leading: _Work
    first: _Work
    last: _Work
    mtp: _Work
    once_s: FloatArray
    recomputed_layers: FloatArray


@dataclass(frozen=True, slots=True)
class Pace:
    """A fast function from a stage's number of layers to its seconds per micro-batch, equal to `StageTime.busy`.

    The search for splits calls it thousands of times. It has the work of each part from `stage_work`, for stages that
    have this part alone. `host` and the `lag` of forward and backward are from `host_of`.
    """

    parts: _Parts
    host: FloatArray | float
    forward_lag: FloatArray | float
    lag: FloatArray | float

    @classmethod
    def from_blocks(cls, train: Training, layout: Layout, costs: Costs, blocks: Blocks, group: int = 0) -> Pace:
        """Return the `Pace` of each candidate on the devices of node group `group`, whose costs are `costs`.

        Offload of activations is not included.
        """
        rows, index, parts = blocks.combinations[group], blocks.index[group], blocks.parts[group]
        stages, is_trained = _stages_of_parts(train), float(train.options.adapter is None)
        dense, experts = split_parameters(stage_parameters(train, rows, stages))
        work = stage_work(replace(train, tower=None), rows, costs, parts, stages, dense + experts)
        per_layer = (dense + experts)[0]
        one_pass, two_passes = (summing_seconds(train, costs, times * per_layer) for times in (8.0, 16.0))
        sums = (two_passes - one_pass) * work.summed / (8.0 * per_layer)
        layers, ends = work.layers, work.ends
        forward, backward = layers.forward + ends.forward, layers.backward + ends.backward
        backward_s = backward.total + is_trained * (layers.weight + ends.weight + sums)
        plain = forward.total, forward.launches, backward_s, backward.launches
        again = layers.forward.total, layers.forward.launches, layers.repeated.total, layers.repeated.launches
        of_parts = []
        for values in zip(*(each[:, index] for each in (*plain, *again)), strict=True):
            forward_s, launches, backward_s, backward_launches, again_s, again_launches, *repeated = values
            if layout.selective.any():
                seconds, kernels = (each * layout.selective for each in repeated)
                backward_s, backward_launches = backward_s + seconds, backward_launches + kernels
                again_s, again_launches = again_s - seconds, again_launches - kernels
            of_parts.append(_Work(forward_s, launches, backward_s, backward_launches, again_s, again_launches))
        layer, leading, first, last, mtp = of_parts
        if train.tower is not None:
            tower = tower_time(train.tower, layout, parts.tower[0][index])
            backward_s, none = tower.backward.total + is_trained * tower.weight, np.zeros_like(layout.data)
            seconds = tower.forward.total, tower.forward.launches, backward_s, tower.backward.launches
            first = first + _Work(*seconds, none, none)
        once_s = is_trained * (2.0 * one_pass - two_passes)[index]
        found = _Parts(layer, leading, first, last, mtp, once_s, recomputed_layers(layout))
        return cls(found, *host_of(train, costs))

    def __getitem__(self, rows: IntArray) -> Pace:
        every = self.host, self.forward_lag, self.lag
        host, forward, backward = (each[rows] if isinstance(each, np.ndarray) else each for each in every)
        return replace(self, parts=self.parts[rows], host=host, forward_lag=forward, lag=backward)

    def on_stage(
        self, leading: FloatArray | int = 0, *, first: bool = False, mtp: bool = False, last: bool = False
    ) -> StagePace:
        """Return the pace of a stage with `leading` dense layers and these ends of the model."""
        parts = self.parts
        found = [parts.first] * first + [parts.last] * last + [parts.mtp] * mtp
        if np.any(leading):
            found.append((parts.leading + parts.layer * -1.0) * np.float64(leading))
        fixed = sum(found[1:], found[0]) if found else _Work(*[_NONE] * 6)
        others = parts.once_s, parts.recomputed_layers, self.host, self.forward_lag, self.lag
        return StagePace(parts.layer, fixed, *others)

    def seconds(self, layers: FloatArray, leading: FloatArray | int, **ends: bool) -> FloatArray:
        """Return the seconds of one micro-batch on a stage with `layers` layers, as `on_stage` describes it."""
        return self.on_stage(leading, **ends).seconds(layers)


def _stages_of_parts(train: Training) -> Stage:
    """Return five stages, each with one part of the model, in the order of `_Parts`: fields of shape (5, 1)."""
    layer, leading, first, last, mtp = np.eye(5)[:, :, None]
    numbers = layer_kinds(train.model).mean(layer + leading, leading)
    return Stage(
        first=first,
        last=last,
        final_norm=last,
        layers=layer + leading,
        leading=leading,
        mtp=mtp * train.model.mtp_num_layers,
        numbers=numbers,
        index=0.0 * first,
        chunk=layer + leading,
        in_flight=0.0 * first,
        deferred=0.0 * first,
        copies=np.ones_like(first),
    )


_NONE = np.zeros(1)


@dataclass(frozen=True, slots=True)
class StagePace:
    """The `Pace` of one stage of each candidate, or of several stages: (stages, candidates).

    `fixed` is the work of the ends of the model, of multi-token prediction, and of the difference of leading dense
    layers to other layers.
    """

    layer: _Work
    fixed: _Work
    once_s: FloatArray
    recomputed_layers: FloatArray
    host: FloatArray | float
    forward_lag: FloatArray | float
    lag: FloatArray | float

    @classmethod
    def of_stages(cls, stages: Sequence[StagePace]) -> StagePace:
        """Return the pace of several stages. Arrays that all stages share are not repeated."""
        return cls(*(_stacked([getattr(each, name) for each in stages]) for name in cls.__dataclass_fields__))

    def __getitem__(self, rows: IntArray) -> StagePace:
        return StagePace(*(_of_candidates(getattr(self, name), rows) for name in self.__dataclass_fields__))

    def seconds(self, layers: FloatArray) -> FloatArray:
        """Return the seconds of one micro-batch on stages with `layers` layers."""
        total, share = self.layer * layers + self.fixed, recomputed_share(self.recomputed_layers, layers)
        backward = total.backward + share * total.again + self.once_s
        launches = total.backward_launches + share * total.again_launches
        forward = total.forward + launch_wait(total.forward, total.launches, self.host, self.forward_lag)
        return forward + (backward + launch_wait(backward, launches, self.host, self.lag))


def _stacked(values: Sequence[Any]) -> Any:
    """Return the values of several stages as one: arrays of the shape (stages or 1, candidates or 1)."""
    first = values[0]
    if isinstance(first, _Work):
        return _Work(*(_stacked([getattr(each, name) for each in values]) for name in _Work.__dataclass_fields__))
    if all(each is first for each in values):
        return first
    return np.stack(np.broadcast_arrays(*map(np.atleast_1d, values)))


def _of_candidates(values: Any, rows: IntArray) -> Any:
    """Return the columns `rows` of arrays whose last axis is the candidates, unless all candidates share a value."""
    if isinstance(values, _Work):
        return _Work(*(_of_candidates(getattr(values, name), rows) for name in _Work.__dataclass_fields__))
    return values.take(rows, -1) if isinstance(values, np.ndarray) and values.ndim and values.shape[-1] > 1 else values
