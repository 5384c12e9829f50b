"""What the model says of a candidate before it has run: by columns, and one row of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from flagcore.domain.space import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One candidate's figures: seconds, bytes, flops. A figure that the model cannot give is None or absent.

    `low` and `high` bound an 80% interval of the step time. `time_s` splits the step into the parts named
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """`Prediction` for many candidates: every field is an array with one element a candidate.

    `step_time_s`, `low_s`, `high_s` are NaN and `capacity_bytes` is None where the chip's facts do not
    allow an answer. `model_flops` is the model flops of one step (no recompute), the same for all.
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
    capacity_bytes: float | None
    model_flops: float

    @property
    def fits(self) -> BoolArray:
        """Whether each candidate fits; all True when the capacity is not known."""
        if self.capacity_bytes is None:
            return np.ones(self.device_used_bytes.shape, dtype=np.bool_)
        return self.device_used_bytes <= self.capacity_bytes

    def row(self, row: int) -> Prediction:
        """Return one candidate's prediction."""
        known = bool(np.isfinite(self.step_time_s[row]))
        return Prediction(
            step_time_s=float(self.step_time_s[row]) if known else None,
            low_s=float(self.low_s[row]) if known else None,
            high_s=float(self.high_s[row]) if known else None,
            time_s={name: float(part[row]) for name, part in self.time_s.items()} if known else {},
            static_bytes=float(self.static_bytes[row]),
            activation_bytes=float(self.activation_bytes[row]),
            peak_allocated_bytes=float(self.peak_allocated_bytes[row]),
            reserved_bytes=float(self.reserved_bytes[row]),
            device_used_bytes=float(self.device_used_bytes[row]),
            capacity_bytes=self.capacity_bytes,
            fits=None if self.capacity_bytes is None else bool(self.fits[row]),
            worst_stage=int(self.worst_stage[row]),
            model_flops=self.model_flops,
        )

    def take(self, rows: IntArray) -> Predictions:
        """Return the predictions of some rows."""
        return Predictions(
            step_time_s=self.step_time_s[rows],
            low_s=self.low_s[rows],
            high_s=self.high_s[rows],
            time_s={name: part[rows] for name, part in self.time_s.items()},
            static_bytes=self.static_bytes[rows],
            activation_bytes=self.activation_bytes[rows],
            peak_allocated_bytes=self.peak_allocated_bytes[rows],
            reserved_bytes=self.reserved_bytes[rows],
            device_used_bytes=self.device_used_bytes[rows],
            worst_stage=self.worst_stage[rows],
            capacity_bytes=self.capacity_bytes,
            model_flops=self.model_flops,
        )

    @staticmethod
    def join(parts: list[Predictions]) -> Predictions:
        """Put the predictions of consecutive chunks together."""
        first = parts[0]
        if len(parts) == 1:
            return first

        def glued(name: str) -> FloatArray:
            return np.concatenate([getattr(part, name) for part in parts])

        return Predictions(
            step_time_s=glued("step_time_s"),
            low_s=glued("low_s"),
            high_s=glued("high_s"),
            time_s={key: np.concatenate([part.time_s[key] for part in parts]) for key in first.time_s},
            static_bytes=glued("static_bytes"),
            activation_bytes=glued("activation_bytes"),
            peak_allocated_bytes=glued("peak_allocated_bytes"),
            reserved_bytes=glued("reserved_bytes"),
            device_used_bytes=glued("device_used_bytes"),
            worst_stage=np.concatenate([part.worst_stage for part in parts]),
            capacity_bytes=first.capacity_bytes,
            model_flops=first.model_flops,
        )


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


Components: TypeAlias = "Mapping[str, Mapping[str, FloatArray]]"
"""For each component of the model its figures by name, one element a candidate."""


def of_row(components: Components, row: int) -> dict[str, dict[str, float]]:
    """Return one candidate's components; those that it does not have are left out."""
    table = {name: {key: float(values[row]) for key, values in figures.items()} for name, figures in components.items()}
    return {name: figures for name, figures in table.items() if any(figures.values())}
