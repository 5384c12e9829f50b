"""Predictions of candidates and ranks, pass times of pipelines, and the measurements that correct predictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flagcore.domain.space import BoolArray, FloatArray, IntArray
from flagcore.i18n import N_

MEMORY_ERROR = 0.10
"""The relative standard deviation of measured from predicted memory on a chip without measured trials."""

PART_NAMES = {
    "compute_s": N_("compute"),
    "tp_comm_s": N_("tensor parallel"),
    "cp_comm_s": N_("context parallel"),
    "ep_comm_s": N_("expert parallel"),
    "pp_bubble_s": N_("bubble"),
    "pp_comm_s": N_("pipeline point-to-point"),
    "dp_comm_exposed_s": N_("gradient exchange"),
    "optimizer_s": N_("optimizer"),
}
"""The display names of the parts of a training step. An engine may have other parts."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A predicted figure and the bounds of its 80% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The prediction of one candidate in seconds, bytes and flops. Unknown values are None or absent.

    `step_time_s`: the time that the search minimizes. For a server: the objective in seconds, such as the time per
    output token.
    `low_s` and `high_s`: the bounds of the 80% interval of `step_time_s`.
    `time_s`: the seconds of each part of the step, by the part's name in job records (`compute_s`, `tp_comm_s`, ...).
    `components`: the figures of the worst stage by model component.
    `figures`: the other metrics of a server, by the names in `flagcore.domain.metrics`.

    What follows from the task, in predictions that are shown or stored, instead of `model_flops`:

    `objective`: of a server, in the unit of the objective.
    `costs`: the result of `flagcore.domain.plan.cost_figures`.
    `limit`: the bottleneck of a training step. Empty if unknown.
    `stage_layers`: the number of layers of each pipeline stage, if the engine chose the split.
    `reason`: why the time is unknown.
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
    model_flops: float = 0.0
    components: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    objective: Interval | None = None
    tokens_per_second_per_device: Interval | None = None
    costs: Mapping[str, float] = field(default_factory=dict)
    model_tflops_per_device: float | None = None
    mfu: float | None = None
    limit: str = ""
    stage_layers: tuple[int, ...] = ()
    reason: str = ""

    @property
    def parts_s(self) -> Mapping[str, float]:
        """The seconds of each part of a step, or of a server's mean request. Empty if unknown."""
        figures = self.figures.items()
        return self.time_s or {name[5:]: seconds for name, seconds in figures if name.startswith("time.")}

    @property
    def step(self) -> Interval | None:
        """The step time in seconds. None if unknown."""
        if self.step_time_s is None or self.low_s is None or self.high_s is None:
            return None
        return Interval(self.step_time_s, self.low_s, self.high_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Belief:
    """The strategy's corrected prediction of a candidate, in seconds, and the figures on which it decided.

    `low_s` and `high_s`: the bounds of the 80% interval of `step_time_s`.
    `chance_to_fit`: the probability that the candidate fits in memory.
    `max_expected_gain`: the largest expected gain of an untried candidate, as a fraction. None if unknown.
    """

    step_time_s: float
    low_s: float
    high_s: float
    chance_to_fit: float
    max_expected_gain: float | None = None


MEMORY = ("static_bytes", "activation_bytes", "peak_allocated_bytes", "reserved_bytes", "device_used_bytes")
"""The memory fields of a prediction, ordered from the smallest to the largest."""
_BY_NAME = ("time_s", "figures")
"""The fields of `Predictions` that map names to arrays."""


class BadPredictions(ValueError):
    """The error for predictions that are not one number per candidate."""


def _kind(array: object) -> str:
    if isinstance(array, np.ndarray):
        return f"an array of {array.dtype} with the shape {array.shape}"
    return str(array)[:60]


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """The predictions of many candidates. Arrays have one element per candidate. Fields are as in `Prediction`.

    `step_time_s`, `low_s`, `high_s`: NaN if unknown.
    `capacity_bytes`: one number if all devices are equal. Otherwise the capacity of the devices of each candidate's
    worst stage, NaN if unknown. None if it is unknown for all candidates.
    `model_flops`: model flops of one step without recomputation. They are the same for all candidates.
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

    def __post_init__(self) -> None:
        """Raise BadPredictions if a field is not an array with one number per candidate."""
        arrays = {name: getattr(self, name) for name in ("step_time_s", "low_s", "high_s", *MEMORY, "worst_stage")}
        arrays |= {**self.time_s, **self.figures}
        if isinstance(self.capacity_bytes, np.ndarray):
            arrays["capacity_bytes"] = self.capacity_bytes
        for name, array in arrays.items():
            shape = array.shape if isinstance(array, np.ndarray) and array.dtype.kind in "iuf" else ()
            if len(shape) != 1 or shape != np.shape(self.step_time_s):
                raise BadPredictions(f"{name} of predict is {_kind(array)}, not one number per candidate")

    @property
    def share_in_use(self) -> FloatArray:
        """The memory in use of each candidate as a share of the capacity. NaN if the capacity is unknown."""
        return self.device_used_bytes / (np.nan if self.capacity_bytes is None else self.capacity_bytes)

    @property
    def fits(self) -> BoolArray:
        """A boolean array: whether each candidate fits into device memory. True if the capacity is unknown."""
        if self.capacity_bytes is None:
            return np.ones(self.device_used_bytes.shape, dtype=np.bool_)
        return (self.device_used_bytes <= self.capacity_bytes) | np.isnan(self.capacity_bytes)

    def keeps_limits(self, limits: Mapping[str, float]) -> BoolArray:
        """Return a boolean array: whether each candidate meets the limits. Unknown metrics are assumed to meet them.

        `limits`: upper bounds by metric.
        """
        is_met = np.ones(self.step_time_s.shape, dtype=np.bool_)
        for name, limit in limits.items():
            if name in self.figures:
                is_met &= ~(self.figures[name] > limit)
        return is_met

    def row(self, row: int) -> Prediction:
        """Return the prediction of one candidate, given its row number."""
        has_time, capacity = bool(np.isfinite(self.step_time_s[row])), self._capacity(row)
        memory: dict[str, Any] = {name: float(getattr(self, name)[row]) for name in MEMORY}
        figures = {name: float(values[row]) for name, values in self.figures.items()}
        return Prediction(
            step_time_s=float(self.step_time_s[row]) if has_time else None,
            low_s=float(self.low_s[row]) if has_time else None,
            high_s=float(self.high_s[row]) if has_time else None,
            time_s={name: float(part[row]) for name, part in self.time_s.items()} if has_time else {},
            **memory,
            capacity_bytes=capacity,
            fits=None if capacity is None else bool(self.device_used_bytes[row] <= capacity),
            worst_stage=int(self.worst_stage[row]),
            model_flops=self.model_flops,
            figures={name: value for name, value in figures.items() if has_time and math.isfinite(value)},
        )

    def _capacity(self, row: int) -> float | None:
        if not isinstance(self.capacity_bytes, np.ndarray):
            return self.capacity_bytes
        capacity = float(self.capacity_bytes[row])
        return None if np.isnan(capacity) else capacity

    def _array_fields(self) -> list[str]:
        """Return the names of the fields that are arrays, except those listed in `_BY_NAME`."""
        return [each.name for each in fields(self) if isinstance(getattr(self, each.name), np.ndarray)]

    def take(self, rows: IntArray) -> Predictions:
        """Return the predictions of the candidates in `rows`."""
        return self._changed(lambda array: array.take(rows, 0))

    def put(self, rows: slice | IntArray, others: Predictions) -> None:
        """Replace the predictions of the candidates in `rows` by `others`, in place."""
        for name in self._array_fields():
            getattr(self, name)[rows] = getattr(others, name)
        for mapping in _BY_NAME:
            for name, values in getattr(self, mapping).items():
                values[rows] = getattr(others, mapping)[name]

    def _changed(self, change: Callable[[NDArray[Any]], NDArray[Any]]) -> Predictions:
        """Return the predictions after applying the function `change` to each array."""
        fields: dict[str, Any] = {name: change(getattr(self, name)) for name in self._array_fields()}
        for mapping in _BY_NAME:
            fields[mapping] = {name: change(part) for name, part in getattr(self, mapping).items()}
        return replace(self, **fields)

    @classmethod
    def join(cls, parts: Iterable[Predictions], rows: int | None = None) -> Predictions:
        """Concatenate the predictions of consecutive chunks of candidates.

        `parts`: the predictions of each chunk. `rows`: the total number of candidates. If it is given, `parts` may be a
        generator, and only one chunk is held in memory at a time.
        """
        if rows is None:
            parts = list(parts)
            rows = sum(part.step_time_s.size for part in parts)
        remaining = iter(parts)
        first = next(remaining)
        if first.step_time_s.size == rows:
            return first
        joined, start = first._changed(lambda array: np.empty(rows, dtype=array.dtype)), 0
        for part in chain((first,), remaining):
            joined.put(slice(start, start + part.step_time_s.size), part)
            start += part.step_time_s.size
        return joined


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPrediction:
    """The prediction of one rank. Times are None if they are unknown.

    `compute_time_s`: the time of the rank's forward and backward passes in a step, without communication and waiting.
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
    """A kind of model component: its number of parameters per layer, and the number of layers that contain it."""

    name: str
    params: float
    layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """The names that reports show for an engine's model components and step parts.

    `components`: the names of model components, in the order of the report.
    `measured_parts`: the names of the step parts in a trial's `metrics.json`.
    `memory_line`: the log line in which the engine reports its memory, as a format string with the fields `static_mb`,
    `activation_mb` and `total_mb`. Empty if there is none.
    """

    components: Mapping[str, str] = field(default_factory=dict)
    measured_parts: Mapping[str, str] = field(default_factory=dict)
    memory_line: str = ""


Components: TypeAlias = Mapping[str, Mapping[str, FloatArray]]
"""Figures by model component and figure name. Each figure is an array with one element per candidate."""


def components_of_row(components: Components, row: int) -> dict[str, dict[str, float]]:
    """Return the parameters and bytes by model component of one candidate. Components with only zeros are skipped."""
    table = {name: {key: float(values[row]) for key, values in figures.items()} for name, figures in components.items()}
    return {name: figures for name, figures in table.items() if any(figures.values())}


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """The pass times of a pipeline: seconds per micro-batch on each stage, summed over virtual stages.

    `schedule`: its name.
    `microbatches`: the number of micro-batches of a step.
    `virtual`: the number of virtual stages per device.
    `backward_s`: the time of the backward pass, with recomputation and the gradients of activations and weights.
    `weight_s`: the part of `backward_s` for the gradients of weights, if the schedule runs it separately. Empty if it
    is unknown.
    `paired_s`: the time of a forward pass and a backward pass of different micro-batches that overlap. Empty if none
    overlap.
    `send_s`: the time of a message between neighbouring stages.
    `sender_waits`: whether the sender is idle during the message.
    `weight_share`: the share of a micro-batch's activations that stay in memory until the gradients of weights are
    computed.
    `groups`: the node group of each stage. Empty if unknown.
    `layers`: the number of layers of each stage. Empty if unknown.
    `predicted_s`: the predicted time of the pipeline in a step. None if unknown.
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
    groups: tuple[int, ...] = ()
    layers: tuple[int, ...] = ()
    predicted_s: float | None = None

    def idle(self, seconds: float) -> tuple[float, ...]:
        """Return the share of `seconds` in which each stage is idle, because it has no pass to run."""
        times = zip(self.forward_s, self.backward_s, strict=True)
        return tuple(max(1.0 - self.microbatches * sum(time) / seconds, 0.0) for time in times)


def longest(pipelines: Sequence[Passes]) -> float | None:
    """Return the predicted time of the slowest pipeline in seconds, or None if the time of any pipeline is unknown."""
    seconds = [each.predicted_s for each in pipelines if each.predicted_s]
    return max(seconds) if seconds and len(seconds) == len(pipelines) else None


def idle_of(pipelines: Sequence[Passes], group: int) -> float | None:
    """Return the mean idle share of a node group's stages until the slowest pipeline ends.

    Returns 1.0 if the group has no stages, or None if the time of a pipeline is unknown.
    """
    if (seconds := longest(pipelines)) is None:
        return None
    shares = [zip(each.idle(seconds), each.groups, strict=False) for each in pipelines]
    group_shares = [share for each in shares for share, number in each if number == group]
    return sum(group_shares) / len(group_shares) if group_shares else 1.0


def part_name(part: str) -> str:
    """Return the display name of a part of a step, such as `tensor parallel` for `tp_comm_s`."""
    return PART_NAMES.get(part) or part.removesuffix("_s").replace("_", " ")
