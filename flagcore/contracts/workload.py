"""The base class of engines: the members that an engine must define, and the defaults of all others."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flagcore.contracts.exchange import ImportNote, ServerGroups, Start
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
"""The default of `Workload.start_seconds`: time for imports, processes on all devices, the model, and the first step.
Chosen."""


class Workload(ABC):
    """The base class of engines.

    An engine must define `name`, `kind`, `knobs`, `predict`, `launch` and `read`. All other members have defaults,
    which their docstrings state. Arguments named `columns` map each knob's name to an array with one element per
    candidate. A row is the position of a candidate in these arrays.
    """

    name: str
    kind: str
    """The kind of job: train or serve."""
    knobs: tuple[Knob, ...]
    """All knobs that specs and job records may set."""
    modules: Mapping[str, str] = {}
    """The modules that trials import, and the pip requirement of each."""
    distribution: str = ""
    """The distribution whose version is the engine's release. Empty: the one in `modules` with the engine's name."""
    untested: str = ""
    """A warning to users, if the support for the engine was written from its documentation. Empty if it was tested."""
    images: Mapping[str, Sequence[str]] = {}
    """The entry points of public container images with the engine, by repository, or by repository and the start of a
    tag, such as `example/server` or `example/server:cpu`."""
    plans_by_default: bool = False
    """Whether plans of a model use this engine if none is named. Of several such engines, the first one is used."""
    start_seconds: float = START_SECONDS
    """The seconds that a trial may take to start. For a server, they include the seconds of the load."""

    # The search space

    def axes(self, task: Task) -> tuple[Axis, ...]:
        """Return the axes of the space in the order in which they are crossed.

        By default each searchable knob has an axis, with the values in the spec, or else the values of `Knob.auto`.
        """
        return tuple(knob.axis(task.listed_values(knob, AUTO)) for knob in self.knobs if knob.searchable)

    def rules(self, task: Task, /) -> tuple[Rule, ...]:
        """Return the legality rules. By default there are none.

        Raises SpecError for settings that contradict each other.
        """
        return ()

    def merges(self, task: Task, /) -> tuple[Merge, ...]:
        """Return the merges of equivalent candidates. By default there are none."""
        return ()

    def columns(self, task: Task, values: Mapping[str, KnobValue]) -> dict[str, IntArray]:
        """Encode one candidate as one-row columns. Raises SpecError for an invalid value.

        `values`: values of some knobs. By default all other knobs have their neutral value.
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
        """Return rules that remove legal candidates that are not worth a trial on any chip. By default none."""
        return ()

    def needs_at_least(self, columns: Columns, candidate: Candidate) -> BoolArray:
        """Return a boolean array: which candidates in `columns` certainly need at least as much memory as `candidate`,
        for any model.

        By default none.
        """
        return _no_row(columns)

    def takes_at_least(self, columns: Columns, candidate: Candidate) -> BoolArray:
        """Return a boolean array: which candidates certainly take at least as long as `candidate`. By default none."""
        return _no_row(columns)

    def usual_space(self, task: Task) -> Mapping[str, str | tuple[KnobValue, ...]]:
        """Return a small space from which an expert would choose a candidate without measuring.

        By default it contains only the neutral value of each knob.
        """
        return {knob.name: (knob.neutral,) for knob in self.knobs if knob.searchable}

    def rule_of_thumb(self, columns: Columns, predictions: Predictions) -> int:
        """Return the row of the candidate in the usual space that an expert would choose. By default the first."""
        return 0

    def defaults(self, task: Task) -> Mapping[str, KnobValue]:
        """Return the knob values that are in effect if the user sets no knob.

        Knobs that are not returned have the value of the baseline. By default the dict is empty.
        """
        return {}

    def device_counts(self, task: Task, columns: Columns) -> IntArray:
        """Return the number of devices of each candidate, as an array. By default all devices of the cluster."""
        return np.full(_rows(columns), task.cluster.devices, dtype=np.int64)

    # Completing a spec

    def check_release(self, spec: Spec) -> None:  # noqa: B027  (a default, not abstract)
        """Raise SpecError if the engine release in `spec` does not support some of its values.

        The error lists all such values. By default nothing is checked.
        """

    def installed_version(self, spec: Spec) -> str | None:
        """Return the installed release, against which flags are checked, or an empty string if none is installed.

        By default None: flags are not checked. Raises FlagError if the release cannot be determined.
        """
        return None

    def as_in_production(self, platform: Platform) -> Platform:
        """Return `platform` with options that its spec leaves open set to what production uses on its chips.

        Called for plans of jobs that cannot run on this machine. By default nothing is set.
        """
        return platform

    def assumed(self, task: Task, candidate: Candidate) -> Mapping[str, SettingValue]:
        """Return those settings that `as_in_production` set and that are legal with `candidate`. By default none."""
        return {}

    def as_installed(self, platform: Platform) -> Platform:
        """Return `platform` with options that its spec leaves open set to the defaults of this machine's software.

        By default nothing is set.
        """
        return platform

    def installation_notes(self, platform: Platform) -> Sequence[str]:
        """Return sentences for the user about how this machine's software affects trials. By default none."""
        return ()

    derived_knobs: Collection[str] = ()
    """The knobs whose values the engine derives from costs. They exist only on clusters with several node groups."""

    def with_derived_values(self, platform: Platform, *, plan: bool = True) -> Platform:
        """Return the platform with the values of `derived_knobs` in the space of its task.

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
        """Return the candidates that divide the work over several node groups, by the way in which they divide it. A
        key is the engine's name of the way. Its value is a boolean array with one element per candidate.

        Candidates on one node group are False in all arrays. By default the result is empty.
        """
        return {}

    def spec_warnings(self, spec: Spec) -> Sequence[str]:
        """Return a line for each key of a spec that has no effect on the candidates of its space. By default none."""
        return ()

    def learned(self, task: Task, trials: Sequence[Trial]) -> Task:
        """Return `task` with properties that `trials` revealed and that change predictions. By default unchanged."""
        return task

    # Predictions

    @abstractmethod
    def predict(self, task: Task, columns: Columns, costs: Costs) -> Predictions:
        """Return the predicted memory and time of each candidate.

        `columns`: may contain knobs that only job records set.
        """

    def sizes(self, task: Task, columns: Columns) -> Mapping[str, FloatArray]:
        """Return the sizes that determine the speed of each candidate's kernels, as logarithms to base 2.

        They are features for learning the errors of predictions. There should be few, with the same meaning in all
        tasks. By default there are none.
        """
        return {}

    labels: Labels = Labels()
    """The names that reports show for model components and measured step parts."""

    def components(self, task: Task, columns: Columns, stages: IntArray, costs: Costs) -> Components:
        """Return the parameters and bytes of each model component, with one element per candidate. By default none.

        `stages`: the index of the pipeline stage to describe, one element per candidate.
        """
        return {}

    def parts(self, task: Task) -> tuple[ModelPart, ...]:
        """Return the parts of the unsplit model with their numbers of parameters. By default none."""
        return ()

    def pipelines(self, task: Task, columns: Columns, costs: Costs) -> Sequence[Passes]:
        """Return the pass times of each distinct pipeline of the candidate in the first row of `columns`.

        Returns an empty sequence, the default, if they are unknown.
        """
        return ()

    def stage_layers(self, task: Task, columns: Columns, costs: Costs) -> Sequence[Sequence[int]]:
        """Return the number of layers per pipeline stage for each candidate whose split the engine derives.

        Other candidates have an empty sequence. By default no split is derived.
        """
        return ()

    def stage_ranks(self, task: Task, columns: Columns) -> tuple[int, ...]:
        """Return the first global rank of each pipeline stage of the candidate in `columns`, which have one row.

        By default stages are unknown, and the tuple is empty.
        """
        return ()

    def rank(self, task: Task, columns: Columns, rank: int, costs: Costs) -> RankPrediction:
        """Return the prediction of one global rank of the candidate in `columns`, which have one row.

        By default raise SpecError.
        """
        raise self._unsupported_probes()

    # Trials

    def ready(self, spec: Spec) -> None:  # noqa: B027  (a default, not abstract)
        """Raise SpecError or NoDevice, with the reason, if trials of `spec` cannot run on this machine.

        By default nothing is checked.
        """

    @abstractmethod
    def launch(self, platform: Platform, candidate: Candidate, folder: str, *, for_real: bool = False) -> Launch:
        """Write the input files of a run to `folder` and return its launch.

        `for_real`: whether to run the user's complete job. Otherwise the launch is a trial of `control.train_iters`
        steps.
        """

    def progress(self, task: Task, folder: str) -> Callable[[], tuple[float, ...]]:
        """Return a function that returns the seconds of each finished step of a running trial, including warm-up.

        The function is called about twice a second, so it should read only what was added to the log since the last
        call. By default it returns no steps, and trials are not stopped early.
        """
        return tuple

    @abstractmethod
    def read(self, task: Task, candidate: Candidate, folder: str, *, partial: bool = False) -> Measurement:
        """Return the measurement of a finished trial.

        `partial`: whether the trial was stopped early, so that only its finished steps are read.
        Raises FlagError with a line about what is missing.
        """

    def failure_patterns(self) -> tuple[FailurePattern, ...]:
        """Return the failure patterns of this engine's logs. By default none."""
        return ()

    def command_changes(self, platform: Platform, candidate: Candidate) -> Sequence[str]:
        """Return a line for each change that a trial makes to the user's command, except for the candidate's knobs.

        By default there are none.
        """
        return ()

    def step_limit(self, task: Task) -> int | None:
        """Return the number of steps after which a trial is stopped and read.

        Returns None, the default, if the program ends by itself.
        """
        return None

    def shorter_batch(self, task: Task, candidate: Candidate, share: float) -> int | None:
        """Return a smaller global batch size for trials with shortened steps, or None, the default, if there is none.

        `share`: the minimum size relative to the task's global batch size.

        The result is the smallest legal size with this share that still fills the pipeline, so that memory reaches its
        peak. Trials read the size from `task.spec.train`, and the core scales the measured times.
        """
        return None

    replicas: str = ""
    """The knob for the number of data-parallel replicas, if all replicas do the same work.

    Trials may then run on fewer nodes with fewer replicas and a proportionally smaller global batch. Empty means that
    trials run on all nodes.
    """

    # Probes, which run single ranks of a larger job on one device

    work_parts: Collection[str] = ()
    """The parts of a step in which a stage computes, including `compute_s`. `pp_bubble_s` is proportional to their sum.

    The predictions of an engine with probes must also have the part `optimizer_s`.
    """

    def ready_to_probe(self, spec: Spec) -> None:
        """Raise SpecError or NoDevice, with the reason, if probes of `spec` cannot run on this machine.

        By default the engine does not support probes, and the following methods are not called.
        """
        raise self._unsupported_probes()

    def probe_ranks(self, task: Task, candidate: Candidate, costs: Costs) -> tuple[int, ...]:
        """Return the global ranks to probe, in order. They determine the memory and the time of the candidate."""
        raise self._unsupported_probes()

    def probe_launch(self, platform: Platform, candidate: Candidate, rank: int, folder: str, device: int = 0) -> Launch:
        """Write the input files of a probe of one global rank to `folder`, and return its launch.

        `device`: the index of the device among this machine's devices with the same chip.
        """
        raise self._unsupported_probes()

    def read_probe(self, task: Task, folder: str) -> RankMeasurement:
        """Return the measurement of a finished probe. Raises FlagError with a line about what is missing."""
        raise self._unsupported_probes()

    # Commands, job records and exports. Engines that also implement `flagcore.contracts.Exporter` have more targets.

    def starts(self, command: Sequence[str], directory: str) -> bool:
        """Return whether a command starts the engine's program. Shells and containers around it are already removed.
        By default False.
        """
        return False

    def read_command(
        self, start: Start, directory: Path, model: str | None
    ) -> tuple[dict[str, Any], Sequence[ImportNote]]:
        """Convert a launch command, or a script that starts one, to the data of a spec. Also return notes.

        The arguments of the command become the baseline. The notes name each argument that is dropped or has another
        meaning in the spec.

        `directory`: the working directory of the command.
        `model`: the path of the model. None means the model that the command names.
        `start`: the command, and what surrounds it.
        Raises SpecError, by default always.
        """
        raise self._unsupported("the import of commands", "write a spec")

    def published(
        self, task: Task, values: Mapping[str, KnobValue], notes: str
    ) -> tuple[Task, dict[str, KnobValue], frozenset[str]]:
        """Return the task and the knobs of a job record with defaults filled in, and the settings found in `notes`.

        A job record describes a published run, and `notes` is free text from its source. Legality rules with the names
        of the settings that were found are not applied, because the job did run.

        Raises SpecError, by default always, or NotModelled if the engine cannot predict the record.
        """
        raise self._unsupported("job records", "write a spec for `flag estimate`")

    def job_warnings(
        self,
        task: Task,
        values: Mapping[str, KnobValue],
        settings: Mapping[str, SettingValue],
        noted: Collection[str],
    ) -> Sequence[str]:
        """Return a line for each key of a job record that has no effect or was filled in. By default none.

        `task`, `values`, `noted`: the results of `published`.
        `settings`: the settings in the record.
        """
        return ()

    def groups(self, platform: Platform, candidate: Candidate, name: str) -> ServerGroups | None:
        """Return the kinds of servers of a candidate, for an exported job with this `name`. Raises UsageError.

        Returns None, the default, if all servers are identical.
        """
        return None

    def replica(self, candidate: Candidate) -> tuple[Candidate, int]:
        """Return the candidate of a single server, and the number of servers.

        By default the candidate is one server. Raises UsageError if the servers differ.
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
