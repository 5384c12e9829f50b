"""The Protocols of an engine: three required parts and optional capabilities."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from flagcore.contracts.chip import PruningRule
from flagcore.contracts.importer import ImportNote
from flagcore.contracts.platform import Costs, Platform
from flagcore.domain.candidate import Candidate, KnobValue
from flagcore.domain.knob import Knob
from flagcore.domain.launch import FailurePattern, Launch
from flagcore.domain.prediction import Components, Labels, ModelPart, Passes, Predictions, RankPrediction
from flagcore.domain.probe import RankMeasurement
from flagcore.domain.space import Axis, BoolArray, Columns, FloatArray, IntArray, Merge, Rule
from flagcore.domain.spec import SettingValue, Spec, Task
from flagcore.domain.trial import Measurement, Trial


class SearchSpace(Protocol):
    """The knobs of an engine, their legal values, and known orders of candidates."""

    knobs: tuple[Knob, ...]
    """All knobs that specs and job records may set."""

    def axes(self, task: Task) -> tuple[Axis, ...]:
        """Return the axes of the space in the order in which they are crossed."""

    def rules(self, task: Task) -> tuple[Rule, ...]:
        """Return the legality rules. Raises SpecError for settings that contradict each other."""

    def merges(self, task: Task) -> tuple[Merge, ...]:
        """Return the merges of equivalent candidates."""

    def columns(self, task: Task, values: Mapping[str, KnobValue]) -> dict[str, IntArray]:
        """Return all columns for one row from some knob values. Raises SpecError for an invalid value."""

    def pruning_rules(self, task: Task) -> tuple[PruningRule, ...]:
        """Return rules for legal candidates that are not worth a trial on any chip."""

    def needs_at_least(self, columns: Columns, candidate: Candidate) -> BoolArray:
        """Return which rows need at least as much memory as `candidate`, whatever the model."""

    def takes_at_least(self, columns: Columns, candidate: Candidate) -> BoolArray:
        """Return which rows take at least as long as `candidate`, whatever the model."""

    def usual_space(self, task: Task) -> Mapping[str, str | tuple[KnobValue, ...]]:
        """Return a small space of values from which an expert would choose without measuring."""

    def rule_of_thumb(self, columns: Columns, predictions: Predictions) -> int:
        """Return the row of the usual space that an expert would choose."""


class Predictor(Protocol):
    """Formulas for memory and time."""

    def predict(self, task: Task, columns: Columns, costs: Costs) -> Predictions:
        """Return the predicted memory and time of each row. `columns` may have knobs that only job records set."""

    def sizes(self, task: Task, columns: Columns) -> Mapping[str, FloatArray]:
        """Return the sizes that determine the speed of kernels in each row, as logarithms to base 2.

        They are features for learning the errors of predictions, so there should be few, with the same meaning in all
        tasks.
        """


class Runner(Protocol):
    """Starts trials and reads their results."""

    modules: Mapping[str, str]
    """The modules that trials import, with the pip requirement of each."""

    def ready(self, spec: Spec) -> None:
        """Raise SpecError or NoDevice if trials of `spec` cannot run on this machine, with the reason."""

    def launch(self, platform: Platform, candidate: Candidate, folder: str, *, for_real: bool = False) -> Launch:
        """Write the input files of a run to `folder` and return its launch.

        A trial runs `control.train_iters` steps. With `for_real`, the launch runs the user's complete job.
        """

    def progress(self, task: Task, folder: str) -> Callable[[], tuple[float, ...]]:
        """Return a function that returns the seconds of each finished step of a running trial, including warm-up.

        The function is called about twice a second, and reads only what was added to the log since the last call.
        """

    def read(self, task: Task, candidate: Candidate, folder: str, *, partial: bool = False) -> Measurement:
        """Return the measurement of a finished trial, or with `partial` of the finished steps of a stopped trial.

        Raises FlagError with a line about what is missing.
        """

    def failure_patterns(self) -> tuple[FailurePattern, ...]:
        """Return the failure patterns of this engine's logs."""


class Workload(SearchSpace, Predictor, Runner, Protocol):
    """An engine: the parts that every engine must implement."""

    name: str
    kind: str
    """The kind of job: train or serve."""


@runtime_checkable
class Prober(Protocol):
    """Optional: an engine that can run single ranks of a larger job on one device.

    Its predictions have the step parts `compute_s` and `optimizer_s`.
    """

    work_parts: Collection[str]
    """The parts of a step in which a stage computes, including `compute_s`. `pp_bubble_s` is proportional to them."""

    def ready_to_probe(self, spec: Spec) -> None:
        """Raise SpecError or NoDevice if probes of `spec` cannot run on this machine, with the reason."""

    def rank(self, task: Task, columns: Columns, rank: int, costs: Costs) -> RankPrediction:
        """Return the prediction of one global rank of the candidate in `columns`, which have one row."""

    def stage_ranks(self, task: Task, columns: Columns) -> tuple[int, ...]:
        """Return the first global rank of each pipeline stage of the candidate in `columns`, which have one row."""

    def probe_ranks(self, task: Task, candidate: Candidate, costs: Costs) -> tuple[int, ...]:
        """Return the global ranks to probe in order, those that determine the memory and the time of the candidate."""

    def probe_launch(self, platform: Platform, candidate: Candidate, rank: int, folder: str, device: int = 0) -> Launch:
        """Write the input files of a probe of one rank to `folder` and return its launch.

        `device` is the index of the device among the devices of its chip on this machine.
        """

    def read_probe(self, task: Task, folder: str) -> RankMeasurement:
        """Return the measurement of a finished probe. Raises FlagError with a line about what is missing."""


@runtime_checkable
class Breakdown(Protocol):
    """Optional: weights and memory by component of the model."""

    labels: Labels
    """The names of components and of measured step parts in reports."""

    def components(self, task: Task, columns: Columns, stages: IntArray, costs: Costs) -> Components:
        """Return parameters and bytes by component for one pipeline stage of each row."""

    def parts(self, task: Task) -> tuple[ModelPart, ...]:
        """Return the parameters of the unsplit model by its parts."""


@runtime_checkable
class PipelineTimeline(Protocol):
    """Optional: the timeline of a pipeline."""

    def pipelines(self, task: Task, columns: Columns, costs: Costs) -> Sequence[Passes]:
        """Return the pass times of each different pipeline of the candidate in the first row of `columns`; empty if
        they are unknown.
        """

    def stage_layers(self, task: Task, columns: Columns, costs: Costs) -> Sequence[Sequence[int]]:
        """Return the numbers of layers per stage for each row whose split the engine derives, empty for other rows."""


@runtime_checkable
class StepLimit(Protocol):
    """Optional: an engine whose trials are stopped after a number of steps."""

    def step_limit(self, task: Task) -> int | None:
        """Return the number of steps after which a trial is stopped and read; None if its program ends by itself."""


@runtime_checkable
class CommandChanges(Protocol):
    """Optional: an engine whose trials run the user's command with other arguments."""

    def command_changes(self, platform: Platform, candidate: Candidate) -> Sequence[str]:
        """Return a line for each change that a trial makes to the user's command, except for the candidate's knobs."""


@runtime_checkable
class CommandReader(Protocol):
    """Optional: an engine whose commands can be imported as specs."""

    def read_command(
        self, command: Sequence[str], directory: Path, model: str | None
    ) -> tuple[dict[str, Any], Sequence[ImportNote]]:
        """Return the data of a spec for a command in `directory`, or for a script that starts one, with notes.

        The arguments of the command are the baseline. Notes name each argument that is dropped or has another meaning
        in the spec. `model` is the path of the model; None: that of the command. Raises SpecError.
        """


@runtime_checkable
class JobRecords(Protocol):
    """Optional: an engine that can predict job records, which describe published runs."""

    def published(
        self, task: Task, values: Mapping[str, KnobValue], notes: str
    ) -> tuple[Task, dict[str, KnobValue], frozenset[str]]:
        """Return the task and the knobs of a job record with defaults filled in, and the settings found in `notes`.

        `notes` is free text of the source. Legality rules with the names of these settings are not applied, because the
        job ran. Raises SpecError, or NotModelled if the engine cannot predict the record.
        """


@runtime_checkable
class InstalledVersion(Protocol):
    """Optional: an engine whose installed release can be queried, to check flags against it."""

    def installed_version(self, spec: Spec) -> str:
        """Return the installed release, empty if none is installed. Raises FlagError if the query fails."""


@runtime_checkable
class ReleaseCheck(Protocol):
    """Optional: an engine that checks specs against the release that they name."""

    def check_release(self, spec: Spec) -> None:
        """Raise SpecError with all values of `spec` that the named release does not support."""


@runtime_checkable
class InstalledDefaults(Protocol):
    """Optional: an engine whose defaults depend on the software of this machine."""

    def as_installed(self, platform: Platform) -> Platform:
        """Return `platform` with missing options of its spec set to the defaults of this machine."""

    def installation_notes(self, platform: Platform) -> Sequence[str]:
        """Return sentences for the user about the effects of this machine's software on trials."""


@runtime_checkable
class ProductionDefaults(Protocol):
    """Optional: an engine with defaults of production, for plans of jobs that cannot run on this machine."""

    def as_in_production(self, platform: Platform) -> Platform:
        """Return `platform` with missing options of its spec set to the defaults of production on its chips."""

    def assumed(self, task: Task, candidate: Candidate) -> Mapping[str, SettingValue]:
        """Return the assumed settings of `task` that are legal with `candidate`."""


@runtime_checkable
class DerivedValues(Protocol):
    """Optional: an engine that derives values of knobs from costs."""

    derived_knobs: Collection[str]
    """The knobs with derived values; a cluster with one node group does not have them."""

    def with_derived_values(self, platform: Platform, *, plan: bool = True) -> Platform:
        """Return the platform with the derived values in the space of its task: for a plan, or only those that trials
        can run. Values in the spec take precedence. Raises SpecError for values in the spec that cannot run.
        """

    def values_alone(self, task: Task, group: int) -> Mapping[str, str | tuple[KnobValue, ...]]:
        """Return values of knobs with which a node group may be the fastest without the others; `task` has derived
        values. Knobs without values have all of them.
        """

    def splits(self, task: Task, columns: Columns) -> Mapping[str, BoolArray]:
        """Return which candidates divide the work over the node groups in each of the engine's ways, by the name of the
        way; candidates on one group are in none.
        """

    def with_derived_split(self, task: Task, columns: Columns) -> tuple[Task, Columns] | None:
        """Return a task and its candidate with the split of layers that is derived from the times of the stages; None
        if the candidate has it.
        """


@runtime_checkable
class LearnsFromTrials(Protocol):
    """Optional: an engine that learns properties of the task from trials, which change predictions."""

    def learned(self, task: Task, trials: Sequence[Trial]) -> Task:
        """Return the task with the learned properties."""


@runtime_checkable
class NamedDistribution(Protocol):
    """Optional: an engine with a distribution of another name."""

    distribution: str
    """The distribution with the engine's version; empty: the one in `Runner.modules` with the engine's name."""


@runtime_checkable
class EngineDefaults(Protocol):
    """Optional: the engine has defaults, and candidates that use fewer devices than the cluster has."""

    def defaults(self, task: Task) -> Mapping[str, KnobValue]:
        """Return the candidate that runs if no knob is set."""

    def device_counts(self, task: Task, columns: Columns) -> IntArray:
        """Return the number of devices that each candidate uses."""


@runtime_checkable
class UntestedEngine(Protocol):
    """Optional: an engine whose support was written from documentation and has not been tested."""

    untested: str
    """A warning about what is uncertain; empty: none."""


@runtime_checkable
class StepShortener(Protocol):
    """Optional: an engine whose trials can run fewer micro-batches per step. The core scales the measured times."""

    def shorter_batch(self, task: Task, candidate: Candidate, share: float) -> int | None:
        """Return the smallest legal global batch size that is at least `share` of the task's; None if none is smaller.

        The batch fills the pipeline, so that memory reaches its peak. Trials read it from `task.spec.train`.
        """


@runtime_checkable
class ScalesDown(Protocol):
    """Optional: trials may run on fewer nodes, with fewer data-parallel replicas that each do the same work."""

    replicas: str
    """The knob that counts replicas. The global batch shrinks with it."""


@runtime_checkable
class SlowStart(Protocol):
    """Optional: an engine with another time limit than START_SECONDS for the start of a trial."""

    start_seconds: float
    """The seconds that a trial may take to start. For servers, they include the load."""


START_SECONDS = 300.0
"""The seconds that a trial may take to start: imports, processes on all devices, the model, and the first step.
Chosen."""


@runtime_checkable
class KeyWarnings(Protocol):
    """Optional: warnings about keys of specs and job records that have no effect or were filled in."""

    def spec_warnings(self, spec: Spec) -> Sequence[str]:
        """Return a line for each key of a spec that has no effect on the candidates of its space."""

    def job_warnings(
        self,
        task: Task,
        values: Mapping[str, KnobValue],
        settings: Mapping[str, SettingValue],
        noted: Collection[str],
    ) -> Sequence[str]:
        """Return a line for each key of a job record that has no effect or was filled in.

        `task`, `values` and `noted` are the results of `JobRecords.published`. `settings` are the settings in the
        record.
        """
