"""A serving engine as a workload of the core."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from flagcore.contracts import Costs, Platform, PruningRule
from flagcore.domain.candidate import Candidate, KnobValue
from flagcore.domain.knob import Knob
from flagcore.domain.launch import FailurePattern, Launch
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import Axis, BoolArray, Columns, FloatArray, IntArray, Merge, Rule
from flagcore.domain.spec import Spec, Task
from flagcore.domain.trial import Measurement
from flagcore.engines.serving import dominance, launching, reading
from flagcore.engines.serving.common import heterogeneous
from flagcore.engines.serving.engine import Engine
from flagcore.engines.serving.predict import predict
from flagcore.engines.serving.published import published
from flagcore.engines.serving.trial.failures import PATTERNS
from flagcore.errors import SpecError


class Serving:
    """Servers of one engine under load. `where` is where the trial program imports the engine, as module:attribute."""

    kind = "serve"

    def __init__(self, engine: Engine, where: str) -> None:
        self.engine, self._where = engine, where
        self.name, self.modules, self.untested = engine.name, engine.modules, engine.untested
        self.knobs: tuple[Knob, ...] = engine.knobs

    def axes(self, task: Task) -> tuple[Axis, ...]:
        return self.engine.axes(task)

    def rules(self, task: Task) -> tuple[Rule, ...]:
        return self.engine.rules(task)

    def merges(self, task: Task) -> tuple[Merge, ...]:
        return self.engine.merges(task)

    def predict(self, task: Task, columns: Columns, costs: Costs) -> Predictions:
        engine, kinds = self.engine, heterogeneous.instance_kinds(task, columns)
        return predict(
            task,
            engine.settings(task, kinds.columns),
            costs,
            engine.overheads_for(task, on_host=costs.synchronous),
            graph_tokens=engine.graph_tokens(task),
            untested=bool(engine.untested),
            kinds=kinds,
        )

    def sizes(self, task: Task, columns: Columns) -> Mapping[str, FloatArray]:
        """Return tokens and sequences of an iteration and the split, of the largest instance."""
        kinds = heterogeneous.instance_kinds(task, columns)
        settings, largest = self.engine.settings(task, kinds.columns), kinds.firsts
        figures = {
            "instances": settings.instances,
            "tensor_model_parallel_size": settings.tensor,
            "max_running": settings.max_running,
            "max_batched_tokens": settings.max_batched_tokens,
        }
        return {name: np.log2(np.maximum(values[largest], 1).astype(np.float64)) for name, values in figures.items()}

    def pruning_rules(self, task: Task) -> tuple[PruningRule, ...]:
        return (dominance.SloImpossible(task.spec.limits),) if task.spec.limits else ()

    def needs_at_least(self, columns: Columns, candidate: Candidate) -> BoolArray:
        return dominance.needs_at_least(self.knobs, columns, candidate)

    def takes_at_least(self, columns: Columns, candidate: Candidate) -> BoolArray:
        """Return no row: no knob of a scheduler has one order in time for every model and load."""
        return np.zeros(next(iter(columns.values())).size, dtype=np.bool_)

    def columns(self, task: Task, values: Mapping[str, KnobValue]) -> dict[str, IntArray]:
        defaults, values = self.engine.defaults(task), self.engine.parse(values)
        columns = {}
        for axis in self.axes(task):
            value = values.get(axis.knob, defaults.get(axis.knob, axis.neutral))
            try:
                columns[axis.knob] = np.array([axis.encode(value)], dtype=np.int64)
            except (ValueError, TypeError):
                raise SpecError(key=axis.knob, value=value, problem="is not a valid value") from None
        return columns

    def published(
        self, task: Task, values: Mapping[str, KnobValue], notes: str
    ) -> tuple[Task, dict[str, KnobValue], frozenset[str]]:
        return *published(task, self.engine.parse(values), self.engine.published), frozenset()

    def usual_space(self, task: Task) -> Mapping[str, str | tuple[KnobValue, ...]]:
        return {knob: (value,) for knob, value in self.engine.defaults(task).items()}

    def rule_of_thumb(self, columns: Columns, predictions: Predictions) -> int:
        return 0

    def ready(self, spec: Spec) -> None:
        launching.ready(spec, self.engine)

    def launch(self, platform: Platform, candidate: Candidate, folder: str, *, for_real: bool = False) -> Launch:
        return launching.launch(platform, self.engine, self._where, candidate, folder, for_real=for_real)

    def progress(self, task: Task, folder: str) -> Callable[[], tuple[float, ...]]:
        """Return a function that reports no steps: a load cannot be judged before its end."""
        return tuple

    def read(self, task: Task, candidate: Candidate, folder: str, *, partial: bool = False) -> Measurement:
        own = {axis.knob for axis in self.axes(task)}  # a candidate also has the knobs of plugins
        values = {knob: value for knob, value in candidate.items if knob in own}
        kinds = heterogeneous.instance_kinds(task, self.columns(task, values))
        each = np.repeat(self.engine.settings(task, kinds.columns).devices, kinds.count)
        return reading.read(task, candidate, folder, each.tolist())

    def installed_version(self, spec: Spec) -> str:
        return self.engine.version(spec)

    def failure_patterns(self) -> tuple[FailurePattern, ...]:
        """Return the patterns of the trial program, which has read the engine's own log."""
        return PATTERNS
