"""Predictions of candidates, by columns and one row, and the passes of their pipelines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

from flagcore.domain.space import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One candidate's figures: seconds, bytes, flops. A figure that the model cannot give is None or absent.

    `step_time_s` is what the search makes small: where an engine serves, the seconds of the objective (of an output
    token, say). `low` and `high` bound an 80% interval of it. `figures` are the other figures of a server, by the names
    of `flagcore.domain.serving`. `time_s` splits the step into the parts named
    in the job format (`compute_s`, `tp_comm_s`, ...). `memory_bytes` is by component of the worst stage.
    """

    step_time_s: float | None
    low_s: float | None
    high_s: float | None
    time_s: Mapping[str, float]
    static_bytes: float
    activation_bytes: float
    peak_allocated_bytes: float
    reserved_bytes: float
    device_used_bytes: float
    capacity_bytes: float | None
    fits: bool | None
    worst_stage: int
    model_flops: float
    components: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)


MEMORY = ("static_bytes", "activation_bytes", "peak_allocated_bytes", "reserved_bytes", "device_used_bytes")
"""The fields of memory, from the least to the most."""
_BY_NAME = ("time_s", "figures")
"""Fields of `Predictions` that hold arrays by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """`Prediction` for many candidates: every field is an array with one element a candidate.

    `step_time_s`, `low_s`, `high_s` are NaN and `capacity_bytes` is None where the chip's facts do not
    allow an answer. The capacity is one figure if all devices are equal, else one per candidate, NaN where
    it is unknown: that of the devices of its worst stage. `model_flops` is the model flops of one step (no
    recompute), the same for all.
    """

    step_time_s: FloatArray
    low_s: FloatArray
    high_s: FloatArray
    time_s: Mapping[str, FloatArray]
    static_bytes: FloatArray
    activation_bytes: FloatArray
    peak_allocated_bytes: FloatArray
    reserved_bytes: FloatArray
    device_used_bytes: FloatArray
    worst_stage: IntArray
    capacity_bytes: FloatArray | float | None
    model_flops: float
    figures: Mapping[str, FloatArray] = field(default_factory=dict)

    @property
    def share_in_use(self) -> FloatArray:
        """Memory in use as a share of the capacity; NaN where that is not known."""
        capacity = np.nan if self.capacity_bytes is None else self.capacity_bytes
        share: FloatArray = self.device_used_bytes / capacity
        return share

    @property
    def fits(self) -> BoolArray:
        """Whether each candidate fits; True where the capacity is not known."""
        if self.capacity_bytes is None:
            return np.ones(self.device_used_bytes.shape, dtype=np.bool_)
        return (self.device_used_bytes <= self.capacity_bytes) | np.isnan(self.capacity_bytes)

    def keeps(self, limits: Mapping[str, float]) -> BoolArray:
        """Return whether each candidate is predicted to keep upper bounds of figures; one that is not known is kept."""
        kept = np.ones(self.step_time_s.shape, dtype=np.bool_)
        for name, limit in limits.items():
            if name in self.figures:
                kept &= ~(self.figures[name] > limit)
        return kept

    def row(self, row: int) -> Prediction:
        """Return one candidate's prediction."""
        known, capacity = bool(np.isfinite(self.step_time_s[row])), self._capacity(row)
        memory: dict[str, Any] = {name: float(getattr(self, name)[row]) for name in MEMORY}
        figures = {name: float(values[row]) for name, values in self.figures.items()}
        return Prediction(
            step_time_s=float(self.step_time_s[row]) if known else None,
            low_s=float(self.low_s[row]) if known else None,
            high_s=float(self.high_s[row]) if known else None,
            time_s={name: float(part[row]) for name, part in self.time_s.items()} if known else {},
            **memory,
            capacity_bytes=capacity,
            fits=None if capacity is None else bool(self.device_used_bytes[row] <= capacity),
            worst_stage=int(self.worst_stage[row]),
            model_flops=self.model_flops,
            figures={name: value for name, value in figures.items() if known and math.isfinite(value)},
        )

    def _capacity(self, row: int) -> float | None:
        if not isinstance(self.capacity_bytes, np.ndarray):
            return self.capacity_bytes
        capacity = float(self.capacity_bytes[row])
        return None if np.isnan(capacity) else capacity

    def _figures(self) -> list[str]:
        """Return the names of the fields that are arrays with one element a candidate, those of `_BY_NAME` apart."""
        return [each.name for each in fields(self) if isinstance(getattr(self, each.name), np.ndarray)]

    def take(self, rows: IntArray) -> Predictions:
        """Return the predictions of some rows."""
        figures: dict[str, Any] = {name: getattr(self, name)[rows] for name in self._figures()}
        named: dict[str, Any] = {of: {name: part[rows] for name, part in getattr(self, of).items()} for of in _BY_NAME}
        return replace(self, **figures, **named)

    @classmethod
    def join(cls, parts: Iterable[Predictions], rows: int | None = None) -> Predictions:
        """Put the predictions of consecutive chunks together.

        With `rows`, how many they have in all, chunks may be made as they are asked for: one is held at a time.
        """
        if rows is None:
            parts = list(parts)
            rows = sum(part.step_time_s.size for part in parts)
        rest = iter(parts)
        first = next(rest)
        if first.step_time_s.size == rows:
            return first
        joined, start = first._empty(rows), 0
        for part in chain((first,), rest):
            piece = slice(start, start + part.step_time_s.size)
            for name in first._figures():
                getattr(joined, name)[piece] = getattr(part, name)
            for of in _BY_NAME:
                for name, values in getattr(joined, of).items():
                    values[piece] = getattr(part, of)[name]
            start = piece.stop
        return joined

    def _empty(self, rows: int) -> Predictions:
        """Return predictions of `rows` candidates like these, not filled in yet."""
        figures: dict[str, Any] = {name: np.empty(rows, dtype=getattr(self, name).dtype) for name in self._figures()}
        named: dict[str, Any] = {of: {name: np.empty(rows) for name in getattr(self, of)} for of in _BY_NAME}
        return replace(self, **figures, **named)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPrediction:
    """One rank's own figures. `compute_time_s` is its forward and backward time of a step with no communication and no
    waiting; times are None where the chip's facts do not allow an answer.
    """

    rank: int
    static_bytes: float
    peak_allocated_bytes: float
    reserved_bytes: float
    device_used_bytes: float
    compute_time_s: float | None
    optimizer_time_s: float | None


@dataclass(frozen=True, slots=True)
class ModelPart:
    """One kind of part of a model: the weights of one, and how many there are."""

    name: str
    params: float
    layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """Names that reports use for figures of an engine.

    `components` are the names of the components of a layer, in the order of reports. `measured_parts` are those of the
    parts of a step that `metrics.json` of its trials has. `memory_line` is the line with which the engine itself logs
    its memory, a format of `static_mb`, `activation_mb` and `total_mb`; empty: none.
    """

    components: Mapping[str, str] = field(default_factory=dict)
    measured_parts: Mapping[str, str] = field(default_factory=dict)
    memory_line: str = ""


Components: TypeAlias = "Mapping[str, Mapping[str, FloatArray]]"
"""For each component of the model its figures by name, one element a candidate."""


def of_row(components: Components, row: int) -> dict[str, dict[str, float]]:
    """Return one candidate's components; those that it does not have are left out."""
    table = {name: {key: float(values[row]) for key, values in figures.items()} for name, figures in components.items()}
    return {name: figures for name, figures in table.items() if any(figures.values())}


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Seconds of one micro-batch on each pipeline stage of a candidate, all virtual stages together.

    `backward_s` includes recomputation and both gradients; `weight_s` is its part for the gradients of weights, which
    some schedules run separately (empty: unknown). `paired_s` is a forward and a backward of two micro-batches that
    overlap (empty: none do). `send_s` is one message between neighbouring stages, `sender_waits` whether its sender is
    idle meanwhile. `weight_share` is the share of a micro-batch's activations that is kept until the gradients of
    weights are computed. `schedule` is a name of `flagcore.physics.schedules.catalogue`, `predicted_s` the time of
    the pipeline in a step as the engine predicts it (None: not given).
    """

    schedule: str
    microbatches: int
    virtual: int
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    weight_s: tuple[float, ...] = ()
    paired_s: tuple[float, ...] = ()
    send_s: float
    sender_waits: bool
    weight_share: float = 0.4
    predicted_s: float | None = None
