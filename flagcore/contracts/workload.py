"""The base class of engines: what an engine must define, and the defaults of everything else."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flagcore.contracts.exchange import ImportNote, ServerGroups
from flagcore.contracts.platform import Costs, Platform, PruningRule
from flagcore.domain.knob import Knob
from flagcore.domain.launch import FailurePattern, Launch
from flagcore.domain.prediction import (
    Components,
    Labels,
    ModelPart,
    Passes,
    Predictions,
    RankMeasurement,
    RankPrediction,
)
from flagcore.domain.space import Axis, BoolArray, Candidate, Columns, FloatArray, IntArray, KnobValue, Merge, Rule
from flagcore.domain.spec import AUTO, SettingValue, Spec, Task
from flagcore.domain.trial import Measurement, Trial
from flagcore.errors import SpecError

START_SECONDS = 300.0
"""The seconds that a trial may take to start: imports, processes on all devices, the model, and the first step.
Chosen."""


class Workload(ABC):
    """An engine.

    It must define `name`, `kind`, `knobs`, `predict`, `launch` and `read`. Every other member has a default, which its
    docstring states. Columns are arrays with one element for each candidate, by the names of knobs.
    """

    name: str
    kind: str
    """The kind of job: train or serve."""
    knobs: tuple[Knob, ...]
    """All knobs that specs and job records may set."""
    modules: Mapping[str, str] = {}
    """The modules that trials import, with the pip requirement of each."""
    distribution: str = ""
    """The distribution with the engine's version; empty: the one in `modules` with the engine's name."""
    untested: str = ""
    """A warning about what is uncertain, for an engine whose support was written from documentation; empty: none."""
    start_seconds: float = START_SECONDS
    """The seconds that a trial may take to start. For servers, they include the load."""

    # The search space

    def axes(self, task: Task) -> tuple[Axis, ...]:
        """Return the axes of the space in the order in which they are crossed.

        By default each searchable knob has the values of the spec, or else those of `Knob.auto`.
        """
        return tuple(knob.axis(task.listed_values(knob, AUTO)) for knob in self.knobs if knob.searchable)

    def rules(self, task: Task, /) -> tuple[Rule, ...]:
        """Return the legality rules. By default there are none.

        Raises SpecError for settings that contradict each other.
        """
        return ()

    def merges(self, task: Task, /) -> tuple[Merge, ...]:
        """Return the merges of equivalent candidates, by default none."""
        return ()

    def columns(self, task: Task, values: Mapping[str, KnobValue]) -> dict[str, IntArray]:
        """Return all columns for one row from some knob values. Raises SpecError for an invalid value.

        By default knobs without a value are neutral.
        """
        columns = {}
        for axis in self.axes(task):
            value = values.get(axis.knob, axis.neutral)
            try:
                columns[axis.knob] = np.array([axis.encode(value)], dtype=np.int64)
            except (ValueError, TypeError):
                raise SpecError(key=axis.knob, value=value, problem="is not a valid value") from None
        return columns

    def pruning_rules(self, task: Task) -> tuple[PruningRule, ...]:
        """Return rules for legal candidates that are not worth a trial on any chip, by default none."""
        return ()

    def needs_at_least(self, columns: Columns, candidate: Candidate) -> BoolArray:
        """Return which rows need at least as much memory as `candidate`, whatever the model.

        By default no order is known.
        """
        return _no_row(columns)

    def takes_at_least(self, columns: Columns, candidate: Candidate) -> BoolArray:
        """Return which rows take at least as long as `candidate`, whatever the model. By default no order is known."""
        return _no_row(columns)

    def usual_space(self, task: Task) -> Mapping[str, str | tuple[KnobValue, ...]]:
        """Return a small space of values from which an expert would choose without measuring. By default it has the
        neutral value of each knob.
        """
        return {knob.name: (knob.neutral,) for knob in self.knobs if knob.searchable}

    def rule_of_thumb(self, columns: Columns, predictions: Predictions) -> int:
        """Return the row of the usual space that an expert would choose, by default the first."""
        return 0

    def defaults(self, task: Task) -> Mapping[str, KnobValue]:
        """Return the values of the candidate that runs if no knob is set; knobs without a value have that of the
        baseline. By default it is the baseline.
        """
        return {}

    def device_counts(self, task: Task, columns: Columns) -> IntArray:
        """Return the number of devices that each candidate uses, by default all of the cluster."""
        return np.full(_rows(columns), task.cluster.devices, dtype=np.int64)

    # Completing a spec

    def check_release(self, spec: Spec) -> None:  # noqa: B027  (a default, not abstract)
        """Raise SpecError with all values of `spec` that the release it names does not support. By default there are
        none.
        """

    def installed_version(self, spec: Spec) -> str | None:
        """Return the installed release, by which flags are checked; empty if none is installed.

        By default None: flags are not checked. Raises FlagError if the query fails.
        """
        return None

    def as_in_production(self, platform: Platform) -> Platform:
        """Return `platform` with missing options of its spec set to the defaults of production on its chips.

        Called for plans of jobs that cannot run on this machine. By default nothing is set.
        """
        return platform

    def assumed(self, task: Task, candidate: Candidate) -> Mapping[str, SettingValue]:
        """Return the settings that `as_in_production` assumed and that are legal with `candidate`, by default none."""
        return {}

    def as_installed(self, platform: Platform) -> Platform:
        """Return `platform` with missing options of its spec set to the defaults of the software of this machine. By
        default nothing is set.
        """
        return platform

    def installation_notes(self, platform: Platform) -> Sequence[str]:
        """Return sentences for the user about the effects of this machine's software on trials, by default none."""
        return ()

    derived_knobs: Collection[str] = ()
    """The knobs whose values are derived from costs; a cluster with one node group does not have them."""

    def with_derived_values(self, platform: Platform, *, plan: bool = True) -> Platform:
        """Return the platform with the derived values in the space of its task: for a plan, or only those that trials
        can run. Values in the spec take precedence. Raises SpecError for values in the spec that cannot run. By default
        there are none.
        """
        return platform

    def values_alone(self, task: Task, group: int) -> Mapping[str, str | tuple[KnobValue, ...]]:
        """Return values of knobs with which a node group may be the fastest without the others; `task` has derived
        values. Knobs without values have all of them, by default every knob.
        """
        return {}

    def splits(self, task: Task, columns: Columns) -> Mapping[str, BoolArray]:
        """Return which candidates divide the work over the node groups in each of the engine's ways, by the name of the
        way; candidates on one group are in none. By default it is empty.
        """
        return {}

    def with_derived_split(self, task: Task, columns: Columns) -> tuple[Task, Columns] | None:
        """Return a task and its candidate with the split of layers that is derived from the times of the stages. None,
        the default, if the candidate has it.
        """
        return None

    def spec_warnings(self, spec: Spec) -> Sequence[str]:
        """Return a line for each key of a spec that has no effect on the candidates of its space, by default none."""
        return ()

    def learned(self, task: Task, trials: Sequence[Trial]) -> Task:
        """Return the task with the properties that `trials` show and that change predictions, by default the task."""
        return task

    # Predictions

    @abstractmethod
    def predict(self, task: Task, columns: Columns, costs: Costs) -> Predictions:
        """Return the predicted memory and time of each row. `columns` may have knobs that only job records set."""

    def sizes(self, task: Task, columns: Columns) -> Mapping[str, FloatArray]:
        """Return the sizes that determine the speed of kernels in each row, as logarithms to base 2, by default none.

        They are features for learning the errors of predictions, so there should be few, with the same meaning in all
        tasks.
        """
        return {}

    labels: Labels = Labels()
    """The names of components and of measured step parts in reports."""

    def components(self, task: Task, columns: Columns, stages: IntArray, costs: Costs) -> Components:
        """Return parameters and bytes by component of the model for one pipeline stage of each row, by default none."""
        return {}

    def parts(self, task: Task) -> tuple[ModelPart, ...]:
        """Return the parameters of the unsplit model by its parts, by default none."""
        return ()

    def pipelines(self, task: Task, columns: Columns, costs: Costs) -> Sequence[Passes]:
        """Return the pass times of each different pipeline of the candidate in the first row of `columns`. Empty, the
        default, if they are unknown.
        """
        return ()

    def stage_layers(self, task: Task, columns: Columns, costs: Costs) -> Sequence[Sequence[int]]:
        """Return the numbers of layers per stage for each row whose split the engine derives, empty for other rows. By
        default no split is derived.
        """
        return ()

    def stage_ranks(self, task: Task, columns: Columns) -> tuple[int, ...]:
        """Return the first global rank of each pipeline stage of the candidate in `columns`, which have one row. By
        default stages are unknown.
        """
        return ()

    def rank(self, task: Task, columns: Columns, rank: int, costs: Costs) -> RankPrediction:
        """Return the prediction of one global rank of the candidate in `columns`, which have one row. By default raise
        SpecError.
        """
        raise self._unsupported_probes()

    # Trials

    def ready(self, spec: Spec) -> None:  # noqa: B027  (a default, not abstract)
        """Raise SpecError or NoDevice if trials of `spec` cannot run on this machine, with the reason. By default they
        can.
        """

    @abstractmethod
    def launch(self, platform: Platform, candidate: Candidate, folder: str, *, for_real: bool = False) -> Launch:
        """Write the input files of a run to `folder` and return its launch.

        A trial runs `control.train_iters` steps. With `for_real`, the launch runs the user's complete job.
        """

    def progress(self, task: Task, folder: str) -> Callable[[], tuple[float, ...]]:
        """Return a function that returns the seconds of each finished step of a running trial, including warm-up.

        The function is called about twice a second, and reads only what was added to the log since the last call. By
        default it returns no steps, and trials are not stopped early.
        """
        return tuple

    @abstractmethod
    def read(self, task: Task, candidate: Candidate, folder: str, *, partial: bool = False) -> Measurement:
        """Return the measurement of a finished trial, or with `partial` of the finished steps of a stopped trial.

        Raises FlagError with a line about what is missing.
        """

    def failure_patterns(self) -> tuple[FailurePattern, ...]:
        """Return the failure patterns of this engine's logs, by default none."""
        return ()

    def command_changes(self, platform: Platform, candidate: Candidate) -> Sequence[str]:
        """Return a line for each change that a trial makes to the user's command, except for the candidate's knobs. By
        default there are none.
        """
        return ()

    def step_limit(self, task: Task) -> int | None:
        """Return the number of steps after which a trial is stopped and read. None, the default, if its program ends by
        itself.
        """
        return None

    def shorter_batch(self, task: Task, candidate: Candidate, share: float) -> int | None:
        """Return the smallest legal global batch size that is at least `share` of the task's, for trials with fewer
        micro-batches per step. None, the default, if none is smaller.

        The batch fills the pipeline, so that memory reaches its peak. Trials read it from `task.spec.train`, and the
        core scales the measured times.
        """
        return None

    replicas: str = ""
    """The knob that counts data-parallel replicas which each do the same work: trials may run on fewer nodes with fewer
    replicas, and the global batch shrinks with them. Empty: trials run on all nodes."""

    # Probes: trials of single ranks of a larger job on one device

    work_parts: Collection[str] = ()
    """The parts of a step in which a stage computes, including `compute_s`. `pp_bubble_s` is proportional to them. The
    predictions of an engine with probes also have the part `optimizer_s`."""

    def ready_to_probe(self, spec: Spec) -> None:
        """Raise SpecError or NoDevice if probes of `spec` cannot run on this machine, with the reason. By default the
        engine has no probes, and the following methods are not called.
        """
        raise self._unsupported_probes()

    def probe_ranks(self, task: Task, candidate: Candidate, costs: Costs) -> tuple[int, ...]:
        """Return the global ranks to probe in order, those that determine the memory and the time of the candidate."""
        raise self._unsupported_probes()

    def probe_launch(self, platform: Platform, candidate: Candidate, rank: int, folder: str, device: int = 0) -> Launch:
        """Write the input files of a probe of one rank to `folder` and return its launch.

        `device` is the index of the device among the devices of its chip on this machine.
        """
        raise self._unsupported_probes()

    def read_probe(self, task: Task, folder: str) -> RankMeasurement:
        """Return the measurement of a finished probe. Raises FlagError with a line about what is missing."""
        raise self._unsupported_probes()

    # Commands, job records and exports. An engine with `flagcore.contracts.Exporter` also has further targets.

    def read_command(
        self, command: Sequence[str], directory: Path, model: str | None
    ) -> tuple[dict[str, Any], Sequence[ImportNote]]:
        """Return the data of a spec for a command in `directory`, or for a script that starts one, with notes.

        The arguments of the command are the baseline. Notes name each argument that is dropped or has another meaning
        in the spec. `model` is the path of the model; None: that of the command. Raises SpecError, by default always.
        """
        raise self._unsupported("the import of commands", "write a spec")

    def published(
        self, task: Task, values: Mapping[str, KnobValue], notes: str
    ) -> tuple[Task, dict[str, KnobValue], frozenset[str]]:
        """Return the task and the knobs of a job record with defaults filled in, and the settings found in `notes`.

        A job record describes a published run, `notes` is free text of its source. Legality rules with the names of
        these settings are not applied, because the job ran. Raises SpecError, by default always, or NotModelled if the
        engine cannot predict the record.
        """
        raise self._unsupported("job records", "write a spec for `flag estimate`")

    def job_warnings(
        self,
        task: Task,
        values: Mapping[str, KnobValue],
        settings: Mapping[str, SettingValue],
        noted: Collection[str],
    ) -> Sequence[str]:
        """Return a line for each key of a job record that has no effect or was filled in, by default none.

        `task`, `values` and `noted` are the results of `published`. `settings` are the settings in the record.
        """
        return ()

    def groups(self, platform: Platform, candidate: Candidate, name: str) -> ServerGroups | None:
        """Return the kinds of servers of a candidate for the job `name`. None, the default, if all are equal. Raises
        UsageError.
        """
        return None

    def replica(self, candidate: Candidate) -> tuple[Candidate, int]:
        """Return the candidate of one server, and the number of servers, by default the candidate itself.

        Raises UsageError if the servers differ.
        """
        return candidate, 1

    def _unsupported_probes(self) -> SpecError:
        return self._unsupported("probing", "use auto_tuner.control.fidelity: run or estimate, without probes")

    def _unsupported(self, what: str, fix: str) -> SpecError:
        return SpecError(key=f"{self.kind}.engine", value=self.name, problem=f"does not support {what}", fix=fix)


def _rows(columns: Columns) -> int:
    return next(iter(columns.values())).size


def _no_row(columns: Columns) -> BoolArray:
    return np.zeros(_rows(columns), dtype=np.bool_)
