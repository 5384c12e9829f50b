"""An engine, as the core calls it: three required parts, and capabilities that it may have."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, runtime_checkable

from flagcore.contracts.chip import PruningRule
from flagcore.contracts.platform import Costs, Platform
from flagcore.domain.candidate import Candidate, KnobValue
from flagcore.domain.knob import Knob
from flagcore.domain.launch import FailurePattern, Launch
from flagcore.domain.prediction import Components, Labels, ModelPart, Passes, Predictions, RankPrediction
from flagcore.domain.probe import RankMeasurement
from flagcore.domain.space import Axis, BoolArray, Columns, FloatArray, IntArray, Merge, Rule
from flagcore.domain.spec import SettingValue, Spec, Task
from flagcore.domain.trial import Measurement
from flagcore.errors import SpecError


class SearchSpace(Protocol):
    """The knobs of an engine, their legal values, and their order without measurements."""

    knobs: tuple[Knob, ...]
    """All options that specs and job records may set."""

    def axes(self, task: Task) -> tuple[Axis, ...]:
        """Return the knobs of the space in the order in which they are crossed."""

    def rules(self, task: Task) -> tuple[Rule, ...]:
        """Return the rules that make a candidate illegal. Raises SpecError for settings that exclude each other."""

    def merges(self, task: Task) -> tuple[Merge, ...]:
        """Return the merges that make candidates equal."""

    def columns(self, task: Task, values: Mapping[str, KnobValue]) -> dict[str, IntArray]:
        """Return columns of one row from knob values, the same columns for all. Raises SpecError for a wrong value."""

    def pruning_rules(self, task: Task) -> tuple[PruningRule, ...]:
        """Return rules for legal candidates that are never worth a trial, on any chip."""

    def needs_at_least(self, columns: Columns, candidate: Candidate) -> BoolArray:
        """Return which rows need at least as much memory as `candidate` for any model: one order per knob."""

    def takes_at_least(self, columns: Columns, candidate: Candidate) -> BoolArray:
        """Return which rows take at least as long as `candidate` for any model: one order per knob."""

    def usual_space(self, task: Task) -> Mapping[str, str | tuple[KnobValue, ...]]:
        """Return the few values among which an expert would choose without measuring."""

    def rule_of_thumb(self, columns: Columns, predictions: Predictions) -> int:
        """Return the row of the usual space that an expert would write down."""


class Predictor(Protocol):
    """Formulas for memory and time."""

    def predict(self, task: Task, columns: Columns, costs: Costs) -> Predictions:
        """Return memory and time for whole columns. Extra knobs of job records may be among them."""

    def sizes(self, task: Task, columns: Columns) -> Mapping[str, FloatArray]:
        """Return the sizes that determine the speed of kernels in each row: logarithms to base 2.

        Errors of predictions are learned over them, so they should be few and mean the same in every task.
        """


class Runner(Protocol):
    """How trials are started and read."""

    modules: Mapping[str, str]
    """What trials import, and the pip requirement that brings it."""

    def ready(self, spec: Spec) -> None:
        """Return if trials of `spec` can run here. Raises SpecError or NoDevice with what is missing."""

    def launch(self, platform: Platform, candidate: Candidate, folder: str, *, for_real: bool = False) -> Launch:
        """Write what a run needs into `folder` and return how to start it.

        A trial is cut to `control.train_iters` steps; `for_real` is the user's own job with this candidate.
        """

    def progress(self, task: Task, folder: str) -> Callable[[], tuple[float, ...]]:
        """Return a function that returns the seconds of each step that a running trial has finished, warm-up included.

        It is called about twice a second while the trial runs, and continues where it stopped reading.
        """

    def read(self, task: Task, candidate: Candidate, folder: str, *, partial: bool = False) -> Measurement:
        """Return the measurement of a finished trial; with `partial`, of the completed steps of an ended one.

        Raises flagcore.errors.FlagError with one line that names what is missing.
        """

    def failure_patterns(self) -> tuple[FailurePattern, ...]:
        """Return the patterns of this engine's log lines."""


class Workload(SearchSpace, Predictor, Runner, Protocol):
    """One engine: what every engine must implement. Knows no vendor."""

    name: str
    kind: str
    """train or serve."""


@runtime_checkable
class Prober(Protocol):
    """Optional: one device plays single ranks of a world of any size.

    The times of its predictions have the parts `compute_s` and `optimizer_s`.
    """

    work_parts: Collection[str]
    """The parts of a step, `compute_s` among them, in which a stage works. `pp_bubble_s` grows with them."""

    def ready_to_probe(self, spec: Spec) -> None:
        """Return if probes of `spec` can run here. Raises SpecError or NoDevice with what is missing."""

    def rank(self, task: Task, columns: Columns, rank: int, costs: Costs) -> RankPrediction:
        """Return the figures of one global rank of the candidate in `columns`, which have one row."""

    def stage_ranks(self, task: Task, columns: Columns) -> tuple[int, ...]:
        """Return the first global rank of each pipeline stage of the candidate in `columns`, which have one row."""

    def probe_ranks(self, task: Task, candidate: Candidate, costs: Costs) -> tuple[int, ...]:
        """Return the global ranks to probe, in order: those that predict the candidate best."""

    def probe_launch(self, platform: Platform, candidate: Candidate, rank: int, folder: str, device: int = 0) -> Launch:
        """Write what a probe of one rank needs into `folder` and return how to start it.

        `device` is the index of the device to use, among those of its chip on this machine.
        """

    def read_probe(self, task: Task, folder: str) -> RankMeasurement:
        """Return the measurement of a finished probe. Raises flagcore.errors.FlagError with what is missing."""


@runtime_checkable
class Breakdown(Protocol):
    """Optional: weights and memory by component of the model."""

    labels: Labels
    """Names of components and of measured parts of a step in reports."""

    def components(self, task: Task, columns: Columns, stages: IntArray, costs: Costs) -> Components:
        """Return parameters and bytes by component for one pipeline stage of each row."""

    def parts(self, task: Task) -> tuple[ModelPart, ...]:
        """Return the weights of the model by its parts, before anything is split."""


@runtime_checkable
class Pipelined(Protocol):
    """Optional: the timeline of a pipeline."""

    def passes(self, task: Task, columns: Columns, costs: Costs) -> Passes | None:
        """Return the passes of the candidate in the first row of `columns`; None if unknown."""

    def stage_layers(self, task: Task, columns: Columns, costs: Costs) -> Sequence[Sequence[int]]:
        """Return the layers of each stage of each row whose split the engine derives, nothing for other rows."""


@runtime_checkable
class EndsEarly(Protocol):
    """Optional: a trial is measured once it has finished some steps, whatever its program does then."""

    def steps_wanted(self, task: Task) -> int | None:
        """Return after how many steps a trial is stopped and read; None if its program ends by itself."""


@runtime_checkable
class OwnCommand(Protocol):
    """Optional: trials run a command of the user's with some other arguments."""

    def command_changes(self, platform: Platform, candidate: Candidate) -> Sequence[str]:
        """Return what a trial changes in the command or leaves out, as lines, without the candidate's knobs."""


@runtime_checkable
class JobRecords(Protocol):
    """Optional: job records, which are published runs, can be predicted."""

    def published(
        self, task: Task, values: Mapping[str, KnobValue], notes: str
    ) -> tuple[Task, dict[str, KnobValue], frozenset[str]]:
        """Return task and knobs of a job record, completed with what it leaves out, and names of settings.

        `notes` is free text of its source. The names are settings found in it: rules of these names do not make the
        record illegal, because it ran. Raises SpecError, and NotModelled for what no formula covers.
        """


@runtime_checkable
class InstalledVersion(Protocol):
    """Optional: the release that trials would run can be queried, to check flags against it."""

    def installed_version(self, spec: Spec) -> str:
        """Return the release that is installed here, empty if none is. Raises FlagError if it cannot be queried."""


@runtime_checkable
class ReleaseCheck(Protocol):
    """Optional: knobs and settings are checked against the release of the engine that a spec names."""

    def check_release(self, spec: Spec) -> None:
        """Return if the named release has every value that `spec` sets. Raises SpecError with all that it lacks."""


@runtime_checkable
class Installed(Protocol):
    """Optional: what a spec leaves open is decided by the software of this machine."""

    def as_installed(self, platform: Platform) -> Platform:
        """Return `platform` with what its spec leaves open set to what trials here run."""

    def installation_notes(self, platform: Platform) -> Sequence[str]:
        """Return sentences for the user on what the software of this machine means for its trials."""


@runtime_checkable
class Planned(Protocol):
    """Optional: a plan of which nothing can run here is predicted as production runs it."""

    def as_in_production(self, platform: Platform) -> Platform:
        """Return `platform` with what its spec leaves open set to what production runs by default on its chips."""

    def assumed(self, task: Task, candidate: Candidate) -> Mapping[str, SettingValue]:
        """Return the assumed settings of `task` that are legal with `candidate`."""


@runtime_checkable
class Packaged(Protocol):
    """Optional: an engine whose name is not in that of its distribution."""

    distribution: str
    """The distribution whose version is the engine's release; empty: the one of `Runner.modules` with its name."""


@runtime_checkable
class Untested(Protocol):
    """Optional: an engine that was written from its documentation and has not run yet."""

    untested: str
    """What is uncertain, for a warning; empty: nothing."""


@runtime_checkable
class Shortens(Protocol):
    """Optional: trials may run fewer micro-batches a step; the core scales their times by the predictions."""

    def shorter_batch(self, task: Task, candidate: Candidate, share: float) -> int | None:
        """Return the smallest legal global batch of at least `share` of the task's; None if all are as large.

        It fills the pipeline, so that memory reaches its peak. Trials take it from `task.spec.train`.
        """


@runtime_checkable
class ScalesDown(Protocol):
    """Optional: trials may run on fewer nodes, with fewer data-parallel replicas that each do the same work."""

    replicas: str
    """The knob that counts replicas. The global batch shrinks with it."""


@runtime_checkable
class SlowStart(Protocol):
    """Optional: an engine whose trials take other than START_SECONDS beside their steps."""

    start_seconds: float
    """Seconds that a trial may take to start; where steps are not trained, also to run its load."""


START_SECONDS = 300.0
"""What a trial may take to start: imports, processes on all devices, the model, and its first step."""


@runtime_checkable
class KeyWarnings(Protocol):
    """Optional: warnings about keys of specs and job records that are legal, but have no effect or were filled in."""

    def spec_warnings(self, spec: Spec) -> Sequence[str]:
        """Return a line for each key of a spec that has no effect on any candidate of its space."""

    def job_warnings(
        self,
        task: Task,
        values: Mapping[str, KnobValue],
        settings: Mapping[str, SettingValue],
        noted: Collection[str],
    ) -> Sequence[str]:
        """Return a line for each key of a job record that has no effect, or that was filled in.

        `task` and `values` are what `JobRecords.published` returned, `settings` those that the record has, and `noted`
        the names of settings in its notes.
        """


def require_prober(workload: Workload) -> Prober:
    """Return `workload` as a Prober. Raises SpecError if it is none."""
    if isinstance(workload, Prober):
        return workload
    raise _unsupported(workload, "probing", "use auto_tuner.control.fidelity: run or estimate, without probes")


def require_job_records(workload: Workload) -> JobRecords:
    """Return `workload` as JobRecords. Raises SpecError if it is none."""
    if isinstance(workload, JobRecords):
        return workload
    raise _unsupported(workload, "job records", "write a spec for `flag estimate`")


def memory_components(workload: Workload, task: Task, columns: Columns, stages: IntArray, costs: Costs) -> Components:
    """Return `Breakdown.components`, nothing for an engine without."""
    return workload.components(task, columns, stages, costs) if isinstance(workload, Breakdown) else {}


def stage_layers(workload: Workload, task: Task, columns: Columns, costs: Costs) -> Sequence[Sequence[int]]:
    """Return `Pipelined.stage_layers`, nothing for an engine without."""
    return workload.stage_layers(task, columns, costs) if isinstance(workload, Pipelined) else ()


def model_parts(workload: Workload, task: Task) -> tuple[ModelPart, ...]:
    """Return `Breakdown.parts`; empty for an engine without it."""
    return workload.parts(task) if isinstance(workload, Breakdown) else ()


def labels_of(workload: Workload) -> Labels:
    """Return `Breakdown.labels`, none for an engine without."""
    return workload.labels if isinstance(workload, Breakdown) else Labels()


def steps_wanted(workload: Workload, task: Task) -> int | None:
    """Return `EndsEarly.steps_wanted`, None for an engine without."""
    return workload.steps_wanted(task) if isinstance(workload, EndsEarly) else None


def untested_reason(workload: Workload) -> str:
    """Return `Untested.untested`; empty for an engine without it."""
    return workload.untested if isinstance(workload, Untested) else ""


def start_seconds(workload: Workload) -> float:
    """Return `SlowStart.start_seconds`, START_SECONDS for an engine without."""
    return workload.start_seconds if isinstance(workload, SlowStart) else START_SECONDS


def _unsupported(workload: Workload, what: str, fix: str) -> SpecError:
    return SpecError(key=f"{workload.kind}.engine", value=workload.name, problem=f"does not support {what}", fix=fix)
