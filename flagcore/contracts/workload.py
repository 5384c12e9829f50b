"""An engine, as the core calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

from flagcore.contracts.chip import PruningRule
from flagcore.contracts.platform import Costs, Platform
from flagcore.domain.candidate import Candidate, KnobValue
from flagcore.domain.knob import Knob
from flagcore.domain.launch import FailurePattern, Launch
from flagcore.domain.passes import Passes
from flagcore.domain.prediction import Components, ModelPart, Predictions, RankPrediction
from flagcore.domain.probe import RankMeasurement
from flagcore.domain.space import Axis, BoolArray, Columns, FloatArray, IntArray, Merge, Rule
from flagcore.domain.spec import Spec, Task
from flagcore.domain.trial import Measurement


class Workload(Protocol):
    """One engine: its knobs, their rules, its flags, its metrics. Knows no vendor."""

    name: str
    kind: str
    """What it does: train or serve."""
    knobs: tuple[Knob, ...]
    """All options that specs and job records may set."""
    modules: Mapping[str, str]
    """What trials import, and the pip requirement that brings it."""

    def axes(self, task: Task) -> tuple[Axis, ...]:
        """Return the knobs of the space in the order in which they are crossed."""

    def rules(self, task: Task) -> tuple[Rule, ...]:
        """Return what makes a candidate illegal."""

    def merges(self, task: Task) -> tuple[Merge, ...]:
        """Return what makes two candidates the same."""

    def predict(self, task: Task, columns: Columns, costs: Costs) -> Predictions:
        """Return memory and time for whole columns. Extra knobs of job records may be among them."""

    def components(self, task: Task, columns: Columns, stages: IntArray, costs: Costs) -> Components:
        """Return parameters and bytes by component for one pipeline stage of each row."""

    def rank(self, task: Task, columns: Columns, rank: int, costs: Costs) -> RankPrediction:
        """Return the figures of one global rank of the candidate in `columns`, which have one row."""

    def sizes(self, task: Task, columns: Columns) -> Mapping[str, FloatArray]:
        """Return what the speed of kernels depends on in each row, whatever the model: logarithms to base 2.

        Errors of predictions are learned over them, so they should be few and mean the same in every task.
        """

    def parts(self, task: Task) -> tuple[ModelPart, ...]:
        """Return the weights of the model by its parts, before anything is split."""

    def pruning_rules(self, task: Task) -> tuple[PruningRule, ...]:
        """Return what is legal but never worth a trial, on any chip."""

    def needs_at_least(self, columns: Columns, candidate: Candidate) -> BoolArray:
        """Return which rows need at least as much memory as `candidate` whatever the model: one order a knob."""

    def takes_at_least(self, columns: Columns, candidate: Candidate) -> BoolArray:
        """Return which rows take at least as long as `candidate` whatever the model: one order a knob."""

    def columns(self, task: Task, values: Mapping[str, KnobValue]) -> dict[str, IntArray]:
        """Return columns of one row from knob values, the same columns for all. Raises SpecError for a wrong value."""

    def published(
        self, task: Task, values: Mapping[str, KnobValue], notes: str
    ) -> tuple[Task, dict[str, KnobValue], frozenset[str]]:
        """Return the task and the knobs of a job record, a run that somebody published, with what it leaves out.

        `notes` are its source's own words. The names are of the settings that these tell of: the rules of these names
        do not make the record illegal, for it ran. Raises SpecError, and NotModelled for what no formula covers.
        """

    def usual_space(self, task: Task) -> Mapping[str, str | tuple[KnobValue, ...]]:
        """Return the few values among which an expert would choose without measuring."""

    def rule_of_thumb(self, columns: Columns, predictions: Predictions) -> int:
        """Return the row of the usual space that an expert would write down."""

    def ready(self, spec: Spec, *, probe: bool = False) -> None:
        """Return if trials of `spec`, or probes, can run here. Raises SpecError or NoDevice with what is in the way."""

    def launch(self, platform: Platform, candidate: Candidate, folder: str, *, for_real: bool = False) -> Launch:
        """Write what a run needs into `folder` and return how to start it.

        A trial is cut to `control.train_iters` steps; `for_real` is the user's own job with this candidate.
        """

    def progress(self, task: Task, folder: str) -> Callable[[], tuple[float, ...]]:
        """Return a function that tells the seconds of the steps a running trial has finished, warm-up included.

        It is called about twice a second while the trial runs, and reads on where it was.
        """

    def read(self, task: Task, candidate: Candidate, folder: str, *, partial: bool = False) -> Measurement:
        """Return what a finished trial measured; with `partial`, what the steps so far of an ended one did.

        Raises flagcore.errors.FlagError with one line that says what is missing.
        """

    def probe_ranks(self, task: Task, candidate: Candidate, costs: Costs) -> tuple[int, ...]:
        """Return the global ranks of a candidate that tell most of it when one device plays them, in order."""

    def probe_launch(self, platform: Platform, candidate: Candidate, rank: int, folder: str, device: int = 0) -> Launch:
        """Write what a probe of one rank needs into `folder` and return how to start it.

        `device` is the place of the device that it is to use among those of its chip on this machine.
        """

    def read_probe(self, task: Task, folder: str) -> RankMeasurement:
        """Return what a finished probe measured. Raises flagcore.errors.FlagError with what is missing."""

    def failure_patterns(self) -> tuple[FailurePattern, ...]:
        """Return what this engine's own log lines mean."""


@runtime_checkable
class Pipelined(Protocol):
    """What a workload may have beside `Workload`, for the timeline of a pipeline."""

    def passes(self, task: Task, columns: Columns, costs: Costs) -> Passes | None:
        """Return the passes of the candidate in the first row of `columns`; None where they are not known."""
