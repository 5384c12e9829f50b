"""The parts of a job that the trial programs of several engines share. This module does not import torch."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from flagcore.domain.model import Model

T = TypeVar("T")
J = TypeVar("J", bound="TrainingJob")


class JobError(ValueError):
    """The job cannot be run. The message has one line."""


@dataclass(frozen=True)
class Train:
    """The part of a job that all candidates share: the work of one step and the number of steps.

    `balanced_routing` assigns tokens to experts evenly at random, because an untrained router prefers a few experts.
    `implementation` is `local` for megatron-core's layers, or `transformer_engine`.
    """

    seq_length: int
    global_batch_size: int
    precision: str
    train_iters: int
    seed: int
    balanced_routing: bool = False
    implementation: str = "local"


@dataclass(frozen=True)
class Device:
    """The type of device and the backend of its collectives, as torch names them.

    `preload` are the modules that register the device. They are imported in this order after torch.
    """

    type: str = "cpu"
    backend: str = "gloo"
    preload: tuple[str, ...] = ()
    threads_per_rank: int = 1


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """What the jobs of all trial programs have.

    A trial ends `end_after_s` seconds after its start, with fewer steps; this time is `ends_at` on the clock
    `time.monotonic`. None means that there is no limit.
    """

    model: Model
    train: Train
    device: Device
    output: Path
    nodes: int = 1
    end_after_s: float | None = None
    ends_at: float | None = None

    def started(self: J) -> J:
        """Return the job with its end time, for a program that starts now."""
        return dataclasses.replace(self, ends_at=self.end_after_s and time.monotonic() + self.end_after_s)


def read_job(
    kind: type[J], candidate: type, data: dict[str, Any], further: Callable[[dict[str, Any]], dict[str, Any]] = dict
) -> J:
    """Return the job in decoded JSON, with the candidate of an engine. Raises JobError if a key is unknown or missing.

    `further` returns the fields that only this engine's jobs have.
    """
    try:
        kinds: dict[str, Any] = {"model": Model, "train": Train, "candidate": candidate, "device": Device}
        parts = {name: build(part, data[name]) for name, part in kinds.items()}
        return kind(**{**data, **further(data), **parts, "output": Path(data["output"])})
    except (LookupError, TypeError, AttributeError) as error:
        raise JobError(f"the job has a missing or unknown key: {error}") from None


def build(kind: type[T], data: dict[str, Any]) -> T:
    """Build an instance of the dataclass `kind`. null, or 0 in an optional size, means the field's default."""
    optional = {field.name for field in dataclasses.fields(kind) if field.default is None}  # type: ignore[arg-type]
    values = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in data.items()
        if value is not None and not (name in optional and value == 0 and value is not False)
    }
    return kind(**values)
