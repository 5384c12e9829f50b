"""Serving as a workload: what the core asks of an engine, the same for all engines behind `engines.contract.Engine`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from flagcore.contracts import Costs, Platform, PruningRule
from flagcore.domain.candidate import Candidate, KnobValue
from flagcore.domain.launch import FailurePattern, Launch
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import Axis, BoolArray, Columns, FloatArray, IntArray, Merge, Rule
from flagcore.domain.spec import Spec, Task
from flagcore.domain.trial import Measurement
from flagcore.engines.serving import dominance, launching, reading
from flagcore.engines.serving.predict import predict
from flagcore.engines.serving.profile import heterogeneous
from flagcore.engines.serving.profile.contract import Engine
from flagcore.engines.serving.published import published
from flagcore.engines.serving.trial.failures import PATTERNS
from flagcore.errors import SpecError


class Serving:
    """Servers of one engine, loaded as clients do. `where` leads the trial program to it, as module:attribute."""

    kind = "serve"

    def __init__(self, engine: Engine, where: str) -> None:
        self.engine, self._where = engine, where
        self.name = engine.name
        self.modules: Mapping[str, str] = engine.modules

    def axes(self, task: Task) -> tuple[Axis, ...]:
        """Return the engine's knobs."""
        return self.engine.axes(task)

    def rules(self, task: Task) -> tuple[Rule, ...]:
        """Return what the engine refuses."""
        return self.engine.rules(task)

    def merges(self, task: Task) -> tuple[Merge, ...]:
        """Return what is the same to the engine."""
        return self.engine.merges(task)

    def predict(self, task: Task, columns: Columns, costs: Costs) -> Predictions:
        """Return memory and time for whole columns."""
        kinds = heterogeneous.parts(task, columns)
        return predict(task, self.engine.settings(task, kinds.columns), costs, kinds=kinds)

    def sizes(self, task: Task, columns: Columns) -> Mapping[str, FloatArray]:
        """Return what an iteration computes, how many sequences are in it, and how they are split, as powers of 2.

        Of unequal instances the largest tells.
        """
        kinds = heterogeneous.parts(task, columns)
        settings, largest = self.engine.settings(task, kinds.columns), kinds.firsts
        figures = {
            "instances": settings.instances,
            "tensor_model_parallel_size": settings.tensor,
            "max_running": settings.max_running,
            "max_batched_tokens": settings.max_batched_tokens,
        }
        return {name: np.log2(np.maximum(values[largest], 1).astype(np.float64)) for name, values in figures.items()}

    def pruning_rules(self, task: Task) -> tuple[PruningRule, ...]:
        """Return that a candidate surely breaks the SLO."""
        return (dominance.SloImpossible(task.spec.limits),) if task.spec.limits else ()

    def needs_at_least(self, columns: Columns, candidate: Candidate) -> BoolArray:
        """Return which rows need at least as much memory as `candidate`."""
        return dominance.needs_at_least(columns, candidate)

    def takes_at_least(self, columns: Columns, candidate: Candidate) -> BoolArray:
        """Return which rows surely take at least as long as `candidate`."""
        return dominance.takes_at_least(columns, candidate)

    def columns(self, task: Task, values: Mapping[str, KnobValue]) -> dict[str, IntArray]:
        """Return columns of one row; a knob that is not given has the engine's default. Raises SpecError."""
        defaults, values = self.engine.defaults(task), self.engine.values(values)
        columns = {}
        for axis in self.axes(task):
            value = values.get(axis.knob, defaults.get(axis.knob, axis.neutral))
            try:
                columns[axis.knob] = np.array([axis.encode(value)], dtype=np.int64)
            except (ValueError, TypeError):
                raise SpecError(key=axis.knob, value=value, problem="is no value of this knob") from None
        return columns

    def published(
        self, task: Task, values: Mapping[str, KnobValue], notes: str
    ) -> tuple[Task, dict[str, KnobValue], frozenset[str]]:
        """Return a job record with what published runs have that it does not say."""
        return *published(task, self.engine.values(values)), frozenset()

    def usual_space(self, task: Task) -> Mapping[str, str | tuple[KnobValue, ...]]:
        """Return what the engine does if nobody sets a knob."""
        return {knob: (value,) for knob, value in self.engine.defaults(task).items()}

    def rule_of_thumb(self, columns: Columns, predictions: Predictions) -> int:
        """Return the engine's defaults: the usual space holds nothing else."""
        return 0

    def ready(self, spec: Spec) -> None:
        """Raise SpecError or NoDevice unless servers of `spec` can be started and loaded here."""
        launching.ready(spec, self.engine)

    def launch(self, platform: Platform, candidate: Candidate, folder: str, *, for_real: bool = False) -> Launch:
        """Return how to start a candidate."""
        return launching.launch(platform, self.engine, self._where, candidate, folder, for_real=for_real)

    def progress(self, task: Task, folder: str) -> Callable[[], tuple[float, ...]]:
        """Return a function that tells no step: a load has none, and none of it can be judged before its end."""
        return tuple

    def read(self, task: Task, candidate: Candidate, folder: str, *, partial: bool = False) -> Measurement:
        """Return what a trial measured. Raises NoMetrics with what is missing."""
        own = {axis.knob for axis in self.axes(task)}  # a plugin's knobs are in a candidate, too
        values = {knob: value for knob, value in candidate.items if knob in own}
        kinds = heterogeneous.parts(task, self.columns(task, values))
        each = np.repeat(self.engine.settings(task, kinds.columns).devices, kinds.count)
        return reading.read(task, candidate, folder, each.tolist())

    def installed_version(self, spec: Spec) -> str:
        """Return the release that would start, without starting it."""
        return self.engine.version(spec)

    def failure_patterns(self) -> tuple[FailurePattern, ...]:
        """Return what the trial program says when it fails; it has read the engine's own log."""
        return PATTERNS
