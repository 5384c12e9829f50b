"""The job of a spec. Each kind of job is a subclass, which is a section of the spec."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from flagcore.domain.space import IntArray, KnobValue


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A job of any kind. The search asks the job, and not for its kind.

    A distribution adds a kind with an entry point in `flagcore.kinds`: its subclass of `Work`, by the name `kind`. It
    must define `kind`, `documents`, `records`, `default_objective` and `cheapest_objective`.

    `kind`: the name of its section in the spec and in job records.
    `documents`: the name of the module that reads specs of this kind: `document_for` returns the pydantic model for
    some engines, PARTS and DEFAULTS describe a new spec. It is imported for a spec of this kind only.
    `records`: the name of the module that reads job records: `Record` is the pydantic model, `read_record` reads one.
    `paths`: the keys of a spec whose values are paths, inside the section of the kind.
    `several_engines`: whether its section may list several engines, which are tuned one after the other.
    `default_objective`: the objective of job records.
    `cheapest_objective`: the objective that minimizes the cost per token. All devices in use are paid, so the candidate
    with the most tokens per device is the cheapest.
    `has_steps`: whether a trial runs steps of equal work, on all devices. Otherwise it is a service that runs under
    load, on some or all devices, until it is stopped.
    `reserves_memory`: whether a knob sets the share of the memory that the engine reserves.
    `takes_any_flag`: whether each flag of the engine may be a knob of the space.
    `plans_with`: parts of models' names, and the engine of their plans if the user names none. The first counts.
    `start_seconds`: the time limit in seconds for the start of a trial, in which it imports modules, starts a process
    on each device, builds the model and runs the first step. Chosen by hand. Of a service, it includes the load.
    """

    kind: ClassVar[str]
    documents: ClassVar[str]
    records: ClassVar[str]
    paths: ClassVar[tuple[tuple[str, ...], ...]] = ()
    several_engines: ClassVar[bool] = False
    default_objective: ClassVar[str]
    cheapest_objective: ClassVar[str]
    has_steps: ClassVar[bool] = True
    reserves_memory: ClassVar[bool] = False
    takes_any_flag: ClassVar[bool] = False
    plans_with: ClassVar[tuple[tuple[str, str], ...]] = ()
    start_seconds: ClassVar[float] = 300.0

    engine: str
    """Name of the engine."""
    precision: str
    """Number format of the matrix products, or only of the weights."""
    command: tuple[str, ...] | None = None
    """The user's command, which starts in `directory`. None means the engine's own program."""
    directory: str | None = None
    engine_version: str | None = None
    """The release of the engine. None means the installed one, or an unknown one in a command."""

    @property
    def settings(self) -> Mapping[str, KnobValue | float]:
        """The engine settings that are the same for all candidates, by name."""
        return {}

    @property
    def assumed(self) -> Mapping[str, KnobValue | float]:
        """The settings that a plan assumes for the candidates with which they are legal."""
        return {}

    @property
    def engine_args(self) -> Mapping[str, Any]:
        """Flags of the engine that are the same for all candidates, by name without dashes."""
        return {}

    @property
    def slo(self) -> Mapping[str, float]:
        """The upper bounds of measured metrics, by the name of the metric."""
        return {}

    @property
    def cards(self) -> int | None:
        """The maximum number of devices of a candidate. None means all devices."""
        return None

    @property
    def only_best(self) -> bool:
        """Whether a plan needs only its best candidate, without advice on devices. Figures of others may be bounds."""
        return False

    @property
    def program(self) -> Any:
        """Plain data that describes the user's program, for `Engine.with_program`. None if there is none."""
        return None

    @property
    def step_samples(self) -> int:
        """The number of samples of a step. 0 without steps."""
        return 0

    @property
    def step_tokens(self) -> int:
        """The number of tokens of a step. 0 without steps."""
        return 0

    @property
    def computes_in(self) -> str:
        """The number format of matrix products. Empty if `precision` is only the format of the weights."""
        return self.precision if self.has_steps else ""

    @property
    def starts_itself(self) -> bool:
        """Whether the user's command starts the whole job, so that flags can be added to it."""
        return self.has_steps and self.command is not None

    @property
    def is_plain_training(self) -> bool:
        """Whether it trains all weights on samples of equal length, as most published runs do."""
        return False

    @property
    def untrained_depths(self) -> int | None:
        """The depths of multi-token prediction that the job is assumed not to train. None: nothing is assumed."""
        return None

    @property
    def missing(self) -> str:
        """The key of the section without which the job can be predicted, but not run. Empty if there is none."""
        return ""

    @property
    def runs_as(self) -> str:
        """How a trial runs, in words. Empty if the engine knows."""
        return ""

    def with_samples(self, samples: int) -> Work:
        """Return the job with another number of samples of a step."""
        return self

    def with_flags(self, flags: tuple[str, ...]) -> Work:
        """Return the job with arguments that are added to the user's command."""
        return self

    def with_settings(self, settings: Mapping[str, KnobValue | float]) -> Work:
        """Return the job with these settings of the engine, which replace those of the same name."""
        return self

    def with_advice(self, section: str, name: str, value: KnobValue | float, knobs: Collection[str]) -> Work:
        """Return the job with a plugin's setting, unless the user sets it in the job or as one of `knobs`.

        `section`: the key of the job that contains the setting.
        """
        return self

    def without_args(self, names: Collection[str]) -> Work:
        """Return the job without some of `engine_args`."""
        return self

    def with_default_space(self) -> Work:
        """Return the job with the engine's space for a spec without one, for a plan that asks only for the best."""
        return self

    def at_load(self, value: float) -> Work:
        """Return the job at this load, if it searches for the highest one."""
        return self

    def with_warmup(self, requests: int) -> Work:
        """Return the job with at least this number of unmeasured requests for each load."""
        return self

    def on_other_machines(self, place: str) -> Work:
        """Return the job for another machine (`host`) or a container image (`image`), which has its own programs."""
        return self

    def record(self, versions: Mapping[str, str]) -> dict[str, Any] | None:
        """Return the section of a job record, or None if no record can describe the job.

        `versions`: the measured releases of programs.
        """
        return None

    def distance(self, other: Any) -> float:
        """Return how much another job of the same kind differs: 1 for another precision, and the length of sequences.

        The weights were chosen by hand: a run of the same model and precision at another scale is nearer than another
        model's.
        """
        return float(self.precision != other.precision)


PACKED, LONGEST = "packed", "longest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Lengths of the samples of a training job.

    `values`: lengths in tokens at even quantiles of their distribution, the shortest first.
    `batching`: whether samples are packed into sequences, padded to the longest of a micro-batch, or to the sequence.
    `balanced`: whether each step divides the samples between the replicas so that all take about as long.
    """

    values: tuple[int, ...]
    batching: str = PACKED
    balanced: bool = False

    def cut(self, sequence: int) -> IntArray:
        """Return the lengths of samples that are cut at `sequence` tokens."""
        return np.minimum(np.array(self.values, dtype=np.int64), sequence)

    def tokens(self, sequence: int) -> float:
        """Return the mean number of real tokens of a sample. Packed sequences count as full."""
        return float(sequence if self.batching == PACKED else self.cut(sequence).mean())
