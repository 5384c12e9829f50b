"""Parts of an engine, which few engines have, and records that engines return. Without a part, an engine has None, or
the defaults of the part.

`columns` are as in `Engine`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from flagcore.contracts.plugin import Costs
from flagcore.domain.engine import EngineSupport
from flagcore.domain.knob import Knob
from flagcore.domain.launch import Start
from flagcore.domain.model import Model
from flagcore.domain.prediction import Components, Labels, ModelPart, Passes, Predictions
from flagcore.domain.space import Axis, BoolArray, Candidate, Columns, FloatArray, IntArray, KnobValue, Rule
from flagcore.domain.spec import ImportNote, SettingValue, Spec, Task
from flagcore.domain.work import Work

P = TypeVar("P")


class Bounds(ABC):
    """Lower bounds of combinations of some knobs, with which large spaces are reduced while they are built."""

    knobs: tuple[str, ...]
    """The knobs that `seconds` and `share` need at least."""

    @abstractmethod
    def seconds(self, task: Task, columns: Columns, costs: Costs, /) -> FloatArray:
        """Return a lower bound of the step time for any values of the knobs that are not in `columns`."""

    @abstractmethod
    def share(self, task: Task, columns: Columns, costs: Costs, /) -> FloatArray:
        """Return a lower bound of the share of the memory in use, like `seconds`."""

    def rules(self, task: Task, axes: Sequence[Axis], costs: Costs, /) -> tuple[Rule, ...]:
        """Return rules of the engine's own, each for the first of `axes`, in place of those from bounds (default)."""
        return ()


class Commands(ABC):
    """Reads the commands that start the engine's program."""

    images: Mapping[str, Sequence[str]] = {}
    """The entry points of public container images that contain the engine. A key is a repository, optionally with the
    start of a tag, such as `example/server` or `example/server:cpu`."""
    keeps_scripts: bool = False
    """Whether trials can start the user's script around a command in place of the command alone."""

    @abstractmethod
    def role(self, command: Sequence[str], directory: str) -> str | None:
        """Return None if a command does not start the engine's program.

        Otherwise return `prefill` or `decode` for a server that does only that, or else an empty text. Wrapping shells
        and containers were already removed.
        """

    @abstractmethod
    def read(self, start: Start, directory: Path, model: str | None) -> tuple[dict[str, Any], Sequence[ImportNote]]:
        """Convert a launch command, or a script that runs one, to the data of a spec. Also return notes.

        The arguments of the command become the baseline. The notes name each argument that is dropped or has another
        meaning in the spec.

        `directory`: the working directory of the command.
        `model`: the path of the model. None means the model that the command names.
        `start`: the command with its environment, devices and script. Raises SpecError.
        """


class Plans:
    """What plans and reports say about candidates, besides predictions."""

    labels: Labels = Labels()
    """The names that reports show for model components and measured step parts."""
    most_candidates: int = 2_000_000
    """The most candidates that `Engine.predict` answers within 20 s and 1 GiB."""
    trains_depths: bool = True
    """Whether jobs train the depths of multi-token prediction that the files of a model have."""

    # Layouts in other words than the knobs of the space

    def read_flags(self, text: str, spec: Spec) -> tuple[str, Mapping[str, SettingValue], Sequence[str]]:
        """Return the knobs in the engine's flags of a candidate, the settings in them, and the unused flags."""
        return text, {}, ()

    def in_space(self, values: Mapping[str, KnobValue], model: Model, /) -> Mapping[str, KnobValue]:
        """Return the knobs of a published run of `model`, with knobs of the space added that express other ones."""
        return values

    # How a job is planned that cannot run on this machine

    def only(self, spec: Spec) -> bool:
        """Return whether no trial can start a job, as `Engine.ready` says. By default false."""
        return False

    def runs_as(self, spec: Spec) -> str:
        """Return how the engine runs a training job without a command. By default empty: plans name the engine."""
        return ""

    def assumed(self, task: Task, candidate: Candidate) -> Mapping[str, SettingValue]:
        """Return those settings that `Engine.complete` assumes and that are legal with `candidate`. By default none."""
        return {}

    def without_command(self, spec: Spec) -> Work:
        """Return the job for records: with the settings of its command, on which predictions depend, but without it."""
        return replace(spec.work, command=None)

    def defaults(self, task: Task) -> Mapping[str, KnobValue]:
        """Return the knob values in effect if users set none; others are the baseline's. By default empty."""
        return {}

    def unusual(self, task: Task, columns: Columns, predictions: Predictions) -> IntArray | FloatArray:
        """Return the weight of each candidate's unusual properties, which published runs avoid.

        A plan prefers usual candidates that are about as fast. By default all are 0. Infinite: nothing starts it.
        """
        return np.zeros(predictions.step_time_s.shape, dtype=np.int64)

    def scheduled(self, problem: P, /) -> P:
        """Return a `Problem` with what the installed engine itself says, if its spec asks. By default unchanged."""
        return problem

    def shortage(self, figures: Mapping[str, float]) -> str:
        """Return what memory that it sets aside is too small, of a candidate with these figures. By default none."""
        return ""

    def image(self, task: Task, support: EngineSupport) -> str:
        """Return the published container image of the engine for the chips of a task. By default none."""
        return ""

    def load_seconds(self, task: Task, predictions: Predictions) -> FloatArray:
        """Return the predicted seconds of the loads of each candidate's trial. By default all are unknown (NaN)."""
        return np.full(predictions.step_time_s.shape, np.nan)

    # The parts of a model and of a pipeline

    def model(self, task: Task) -> tuple[ModelPart, ...]:
        """Return the kinds of model components with their numbers of parameters and layers. By default none."""
        return ()

    def components(self, task: Task, columns: Columns, stages: IntArray, costs: Costs) -> Components:
        """Return the parameters and bytes of each model component, with one element per candidate. By default none.

        `stages`: the index of the pipeline stage to describe, one element per candidate.
        """
        return {}

    def pipelines(self, task: Task, columns: Columns, costs: Costs) -> Sequence[Passes]:
        """Return pass times of the first row's distinct pipelines, or an empty sequence (default) if unknown."""
        return ()

    def stage_layers(self, task: Task, columns: Columns, costs: Costs) -> Sequence[Sequence[int]]:
        """Return the number of layers per pipeline stage for each candidate whose layer split the engine chooses.

        For other candidates, and by default for all, the sequence is empty.
        """
        return ()

    # Several node groups

    def space_alone(
        self, task: Task, group: int, space: Mapping[str, str | tuple[KnobValue, ...]]
    ) -> Mapping[str, str | tuple[KnobValue, ...]]:
        """Return the values to search, by knob, if the job runs only on the node group with index `group`.

        `task`: a task that `Engine.complete` returned. `space`: the values that the user lists; by default the result.

        Knobs that are not returned may have any value.
        """
        return space

    def splits(self, task: Task, columns: Columns) -> Mapping[str, BoolArray]:
        """Return which candidates divide the work over several node groups, for each way of dividing it.

        A key is the engine's name for a way. Its value is a boolean array with one element per candidate.

        Candidates on one node group are False in all arrays. By default the result is empty.
        """
        return {}


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of a running trial.

    `times`: returns the time of each finished step in seconds, including warm-up. It is called about twice a second, so
    it should read only what was added to the log since the last call.
    `limit`: the steps after which a trial is stopped and read. None if programs end themselves.
    """

    times: Callable[[], tuple[float, ...]] = tuple
    limit: int | None = None


class Published(NamedTuple):
    """The job of a record.

    `task`, `values`: the task and the knobs, with defaults filled in.
    `noted`: the settings that only the record's notes mention, or that were assumed. The legality rules named after
    them are not applied, because the job did run.
    `warnings`: a line for each key of the record that has no effect or was filled in.
    """

    task: Task
    values: dict[str, KnobValue]
    noted: frozenset[str] = frozenset()
    warnings: Sequence[str] = ()


def differs_only(knobs: Sequence[Knob], columns: Columns, candidate: Candidate, orders: Mapping[str, int]) -> BoolArray:
    """Return which of `columns` differ from `candidate` only by larger values of knobs in `orders`, smaller for -1.

    `knobs`: those that are compared, if both have them. Knobs that are not in `orders`, or with 0, must be equal.
    """
    result, values = np.ones(next(iter(columns.values())).size, dtype=np.bool_), candidate.as_dict()
    for knob in knobs:
        if knob.name in columns and knob.name in values:
            more, order = columns[knob.name] - knob.axis(()).encode(values[knob.name]), orders.get(knob.name, 0)
            result &= more * order >= 0 if order else more == 0
    return result
