"""What only some engines can do: one small class for each capability, which such an engine also inherits.

`optional` gives the core a capability of any engine: without it, methods have the defaults that docstrings state.
Those without sensible defaults are abstract. `columns` are as in `Engine`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from flagcore.contracts.engine import Engine, Platform
from flagcore.contracts.plugin import Costs, PruningRule
from flagcore.domain.engine import Unmodelled
from flagcore.domain.launch import Launch, ServerGroups, Start
from flagcore.domain.model import Model
from flagcore.domain.prediction import Components, Labels, ModelPart, Passes, Predictions, RankPrediction
from flagcore.domain.space import BoolArray, Candidate, Columns, FloatArray, IntArray, KnobValue
from flagcore.domain.spec import ImportNote, SettingValue, Spec, Task
from flagcore.domain.trial import RankMeasurement, Trial
from flagcore.domain.work import Work

C = TypeVar("C")


def optional(engine: Engine, capability: type[C]) -> C:
    """Return `engine` if it has a capability, otherwise an object with the capability's defaults."""
    return engine if isinstance(engine, capability) else capability()


def probing(engine: Engine) -> Probes:
    """Return `engine`, which can probe ranks. Raises SpecError."""
    if not isinstance(engine, Probes):
        fix = "use auto_tuner.control.fidelity: run or estimate, without probes"
        raise engine.unsupported("probing", fix)
    return engine


def records_of(engine: Engine) -> JobRecords:
    """Return `engine`, which can read job records. Raises SpecError."""
    if not isinstance(engine, JobRecords):
        raise engine.unsupported("job records", "write a spec for `flag estimate`")
    return engine


def commands_of(engine: Engine) -> Commands:
    """Return `engine`, which can read commands. Raises SpecError."""
    if not isinstance(engine, Commands):
        raise engine.unsupported("the import of commands", "write a spec")
    return engine


def _rows(columns: Columns) -> int:
    return next(iter(columns.values())).size


class Programs(ABC):
    """Runs a program that the spec describes in `train.program`."""

    @abstractmethod
    def with_program(self, program: object) -> Engine:
        """Return the engine for a spec whose key `train.program` has the value `program`, or None if it is missing.

        The result may have other knobs. Raises SpecError for invalid data.
        """


class Advice:
    """Checks specs, and warns about them."""

    def check_values(self, spec: Spec) -> None:
        """Raise SpecError if the engine, or its release in `spec`, does not support some values. Default: no check."""

    def spec_warnings(self, spec: Spec) -> Sequence[str]:
        """Return a warning for each key of the spec that affects no candidate of the space. By default none."""
        return ()

    def task_warnings(self, task: Task) -> Sequence[str]:
        """Return warnings where the user's command and a task's baseline or devices differ. By default none."""
        return ()

    def unmodelled(self, task: Task) -> Sequence[Unmodelled]:
        """Return the task's settings that change time or memory and are not predicted. By default none."""
        return ()

    def command_changes(self, platform: Platform, candidate: Candidate) -> Sequence[str]:
        """Return a line for each change of the user's command by trials, besides knobs. By default none."""
        return ()


class Installation:
    """Knows how the software of this machine affects trials."""

    def as_installed(self, platform: Platform) -> Platform:
        """Return `platform` with options left open as this machine's software sets them. By default unchanged."""
        return platform

    def installation_notes(self, platform: Platform) -> Sequence[str]:
        """Return sentences for the user about how this machine's software affects trials. By default none."""
        return ()


class Production:
    """Plans jobs that cannot run on this machine as production jobs run."""

    def as_in_production(self, platform: Platform) -> Platform:
        """Return `platform` with options left open as production jobs on the chips set them. By default unchanged."""
        return platform

    def assumed(self, task: Task, candidate: Candidate) -> Mapping[str, SettingValue]:
        """Return those settings that `as_in_production` set and that are legal with `candidate`. By default none."""
        return {}

    def runs_as(self, spec: Spec) -> str:
        """Return how the engine runs a training job without a command, for plans. By default empty: plans name it."""
        return ""

    def without_command(self, spec: Spec) -> Work:
        """Return the job for records: with the settings of its command, on which predictions depend, but without it."""
        return replace(spec.work, command=None)

    def unusual(self, task: Task, columns: Columns, predictions: Predictions) -> IntArray | FloatArray:
        """Return the weight of each candidate's unusual properties, which published runs avoid.

        A plan prefers usual candidates that are about as fast. By default all elements are 0.
        """
        return np.zeros(_rows(columns), dtype=np.int64)


class RuleOfThumb(ABC):
    """Knows what an expert would choose without measuring."""

    @abstractmethod
    def usual_space(self, task: Task) -> Mapping[str, str | tuple[KnobValue, ...]]:
        """Return a small space from which an expert would choose a candidate without measuring."""

    def rule_of_thumb(self, task: Task, columns: Columns, predictions: Predictions) -> int:
        """Return the row of the candidate in the usual space that an expert would choose. By default the first."""
        return 0

    def defaults(self, task: Task) -> Mapping[str, KnobValue]:
        """Return the knob values in effect if users set none; others are the baseline's. By default empty."""
        return {}


class Bounds(ABC):
    """Has lower bounds of combinations of some knobs, with which large spaces are reduced while they are built."""

    bound_knobs: tuple[str, ...]
    """The knobs that `least_seconds` and `least_share` need at least."""

    @abstractmethod
    def least_seconds(self, task: Task, columns: Columns, costs: Costs, /) -> FloatArray:
        """Return a lower bound of the step time for any values of the knobs that are not in `columns`."""

    @abstractmethod
    def least_share(self, task: Task, columns: Columns, costs: Costs, /) -> FloatArray:
        """Return a lower bound of the share of the memory in use, like `least_seconds`."""


class Pruning:
    """Excludes legal candidates."""

    def pruning_rules(self, task: Task) -> tuple[PruningRule, ...]:
        """Return rules that remove legal candidates that are not worth a trial on any chip. By default none."""
        return ()

    def needs_at_least(self, columns: Columns, candidate: Candidate) -> BoolArray:
        """Return which of `columns` need as much memory as `candidate` or more for any model. By default none."""
        return np.zeros(_rows(columns), dtype=np.bool_)

    def takes_at_least(self, columns: Columns, candidate: Candidate) -> BoolArray:
        """Return which of `columns` certainly take as long as `candidate` or longer. By default none."""
        return np.zeros(_rows(columns), dtype=np.bool_)


class Sizes:
    """Describes candidates by sizes, from which the errors of predictions are learned."""

    def sizes(self, task: Task, columns: Columns) -> Mapping[str, FloatArray]:
        """Return the sizes that determine the speed of each candidate's kernels, as logarithms to base 2.

        There should be few, with the same meaning in all tasks. By default there are none.
        """
        return {}


class Details:
    """Predicts the parts of a model and of a pipeline."""

    labels: Labels = Labels()
    """The names that reports show for model components and measured step parts."""

    def components(self, task: Task, columns: Columns, stages: IntArray, costs: Costs) -> Components:
        """Return the parameters and bytes of each model component, with one element per candidate. By default none.

        `stages`: the index of the pipeline stage to describe, one element per candidate.
        """
        return {}

    def parts(self, task: Task) -> tuple[ModelPart, ...]:
        """Return the kinds of model components with their numbers of parameters and layers. By default none."""
        return ()

    def pipelines(self, task: Task, columns: Columns, costs: Costs) -> Sequence[Passes]:
        """Return pass times of the first row's distinct pipelines, or an empty sequence (default) if unknown."""
        return ()

    def stage_layers(self, task: Task, columns: Columns, costs: Costs) -> Sequence[Sequence[int]]:
        """Return the number of layers per pipeline stage for each candidate whose layer split the engine chooses.

        For other candidates, and by default for all, the sequence is empty.
        """
        return ()


class MixedClusters:
    """Divides a job over several node groups."""

    derived_knobs: Collection[str] = ()
    """The knobs whose values the engine derives from costs. They exist only on clusters with several node groups."""

    def with_derived_values(self, platform: Platform, *, plan: bool = True) -> Platform:
        """Return the platform with the derived values of `derived_knobs` added to the task's space.

        `plan`: whether no trial will run. Otherwise only values that trials can run are added.

        Values in the spec take precedence. Raises SpecError for values in the spec that cannot run. By default no
        values are derived.
        """
        return platform

    def values_alone(self, task: Task, group: int) -> Mapping[str, str | tuple[KnobValue, ...]]:
        """Return the values to search, by knob, if the job runs only on the node group with index `group`.

        `task`: a task with derived values in its space.

        Knobs that are not returned may have any value. By default none are returned.
        """
        return {}

    def splits(self, task: Task, columns: Columns) -> Mapping[str, BoolArray]:
        """Return which candidates divide the work over several node groups, for each way of dividing it.

        A key is the engine's name for a way. Its value is a boolean array with one element per candidate.

        Candidates on one node group are False in all arrays. By default the result is empty.
        """
        return {}


class Steps:
    """Reports the steps of running trials, so that trials can be stopped early."""

    def progress(self, task: Task, folder: str) -> Callable[[], tuple[float, ...]]:
        """Return a function that returns the time of each finished step of a running trial in seconds, including
        warm-up.

        The function is called about twice a second, so it should read only what was added to the log since the last
        call. By default it returns no steps, and trials are not stopped early.
        """
        return tuple

    def step_limit(self, task: Task) -> int | None:
        """Return the steps after which a trial is stopped and read, or None (default) if programs end themselves."""
        return None


class Shortening:
    """Can run a smaller job whose measurements the core scales to the whole job."""

    replicas: str = ""
    """The name of the knob for the number of data-parallel replicas, if all replicas do the same work.

    Trials may then run on fewer nodes, with fewer replicas and a proportionally smaller global batch. If it is empty,
    trials run on all nodes.
    """

    def shorter_batch(self, task: Task, candidate: Candidate, share: float) -> int | None:
        """Return a smaller global batch size for trials with shortened steps, or None, the default, if there is none.

        `share`: the minimum size relative to the task's global batch size.

        The result is the smallest legal size with this share that still fills the pipeline, so that memory reaches its
        peak. Trials read the size from `task.spec.train`, and the core scales the measured times.
        """
        return None


class Probes(ABC):
    """Runs single ranks of a larger job on one device."""

    work_parts: Collection[str]
    """The parts of a step in which a pipeline stage computes, including `compute_s`. The part `pp_bubble_s` is
    proportional to the sum of these parts.

    The predictions of an engine with probes must also have the part `optimizer_s`.
    """

    @abstractmethod
    def ready_to_probe(self, spec: Spec) -> None:
        """Raise SpecError or NoDevice, with the reason, if probes of `spec` cannot run on this machine."""

    @abstractmethod
    def rank(self, task: Task, columns: Columns, rank: int, costs: Costs) -> RankPrediction:
        """Return the prediction of one global rank of the candidate in `columns`, which have one row."""

    @abstractmethod
    def stage_ranks(self, task: Task, columns: Columns) -> tuple[int, ...]:
        """Return the first global rank of each pipeline stage of the candidate in `columns`, which have one row."""

    @abstractmethod
    def probe_ranks(self, task: Task, candidate: Candidate, costs: Costs) -> tuple[int, ...]:
        """Return the global ranks to probe, in order. They determine the memory and the time of the candidate."""

    @abstractmethod
    def probe_launch(self, platform: Platform, candidate: Candidate, rank: int, folder: str, device: int = 0) -> Launch:
        """Write the input files of a probe of one global rank to `folder`, and return its launch.

        `device`: the index of the device among this machine's devices with the same chip.
        """

    @abstractmethod
    def read_probe(self, task: Task, folder: str) -> RankMeasurement:
        """Return the measurement of a finished probe. Raises FlagError with a line about what is missing."""


class Commands(ABC):
    """Reads the commands that start the engine's program."""

    images: Mapping[str, Sequence[str]] = {}
    """The entry points of public container images that contain the engine. A key is a repository, optionally with the
    start of a tag, such as `example/server` or `example/server:cpu`."""
    keeps_scripts: bool = False
    """Whether trials can start the user's script around a command in place of the command alone."""

    @abstractmethod
    def starts(self, command: Sequence[str], directory: str) -> bool:
        """Return whether a command starts the engine's program. Wrapping shells and containers were already removed."""

    def role(self, command: Sequence[str]) -> str:
        """Return `prefill` or `decode` if a command starts a server that does only that; by default an empty text."""
        return ""

    @abstractmethod
    def read_command(
        self, start: Start, directory: Path, model: str | None
    ) -> tuple[dict[str, Any], Sequence[ImportNote]]:
        """Convert a launch command, or a script that runs one, to the data of a spec. Also return notes.

        The arguments of the command become the baseline. The notes name each argument that is dropped or has another
        meaning in the spec.

        `directory`: the working directory of the command.
        `model`: the path of the model. None means the model that the command names.
        `start`: the command with its environment, devices and script. Raises SpecError.
        """


class JobRecords(ABC):
    """Reads job records, which describe published runs."""

    @abstractmethod
    def published(
        self, task: Task, values: Mapping[str, KnobValue], notes: str
    ) -> tuple[Task, dict[str, KnobValue], frozenset[str]]:
        """Return the task and the knobs of a job record with defaults filled in, and the settings found in `notes`.

        `notes` is free text from the record's source. The legality rules named after these settings are not applied,
        because the job did run.

        Raises SpecError, or NotModelled if the engine cannot predict the record.
        """

    def job_warnings(
        self, task: Task, values: Mapping[str, KnobValue], settings: Mapping[str, SettingValue], noted: Collection[str]
    ) -> Sequence[str]:
        """Return a warning for each key of a job record that has no effect or was filled in. By default none.

        `task`, `values`, `noted`: the results of `published`.
        `settings`: the settings in the record.
        """
        return ()


class Layouts:
    """Reads layouts that are written in other words than the knobs of the space."""

    def in_space(self, values: Mapping[str, KnobValue], model: Model, /) -> Mapping[str, KnobValue]:
        """Return the knobs of a published run of `model`, with knobs of the space added that express other ones."""
        return values

    def read_flags(self, text: str, spec: Spec) -> tuple[str, Mapping[str, SettingValue], Sequence[str]]:
        """Return the knobs in the engine's flags of a candidate, the settings in them, and the unused flags."""
        return text, {}, ()


class Servers:
    """Starts servers, and measures them under a load."""

    def device_counts(self, task: Task, columns: Columns) -> IntArray:
        """Return the number of devices of each candidate, as an array. By default all devices of the cluster."""
        return np.full(_rows(columns), task.cluster.devices, dtype=np.int64)

    def load_seconds(self, task: Task, predictions: Predictions) -> FloatArray:
        """Return the predicted seconds of the loads of each candidate's trial. By default all are unknown (NaN)."""
        return np.full(predictions.step_time_s.shape, np.nan)

    def learned(self, task: Task, trials: Sequence[Trial]) -> Task:
        """Return `task` with the properties that `trials` revealed, for better predictions. By default unchanged."""
        return task

    def groups(self, platform: Platform, candidate: Candidate, name: str) -> ServerGroups | None:
        """Return the groups of identical servers of a candidate, for an exported job called `name`. Raises UsageError.

        Returns None, the default, if all servers are identical.
        """
        return None

    def image(self, platform: Platform) -> str:
        """Return the published container image of the engine for the chips of a platform. By default none."""
        return ""

    def replica(self, candidate: Candidate) -> tuple[Candidate, int]:
        """Return the candidate of one server, and their number. By default one. Raises UsageError if they differ."""
        return candidate, 1
