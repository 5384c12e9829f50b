"""scale_down: run trials on fewer nodes, with fewer data-parallel replicas, and scale their steps with predictions.

Only the number of replicas changes. A trial on fewer nodes does not measure the communication of all replicas or the
smaller share of the optimizer on each replica.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from flagcore.contracts import Costs, PruningRule, ScalesDown, Workload
from flagcore.domain.candidate import Candidate
from flagcore.domain.growth import PRIOR, scale_of
from flagcore.domain.prediction import Prediction, Predictions
from flagcore.domain.space import Axis, BoolArray, Columns, IntArray, Rule
from flagcore.domain.spec import Task
from flagcore.domain.trial import Shortened
from flagcore.domain.variants import engine_legality
from flagcore.errors import SpecError
from flagcore.stages.build import canonical
from flagcore.stages.predict import predict_columns


@dataclass(frozen=True, slots=True)
class SmallerTask:
    """The task of trials on `nodes` of the nodes of `whole`."""

    whole: Task
    workload: Workload
    nodes: int

    @property
    def task(self) -> Task:
        return self.whole.on_nodes(self.nodes)

    def columns(self, columns: Columns) -> Columns:
        """Return the columns of candidates as they run in trials."""
        merges = engine_legality(self.task, self.workload.rules, self.workload.merges)[1]
        return canonical(self._fewer(columns), merges)

    def candidate(self, columns: Mapping[str, IntArray], axes: tuple[Axis, ...]) -> Candidate:
        """Return the candidate of one row as it runs in trials."""
        small = self.columns(columns)
        return Candidate(tuple((axis.knob, axis.decode(int(small[axis.knob][0]))) for axis in axes))

    def rule(self) -> Rule:
        """Return the rule that a candidate can run in trials."""
        rules, replicas, share = self._rules(), self._replicas, self._share

        def broken(columns: Columns) -> BoolArray:
            small, wrong = self._fewer(columns), columns[replicas] * share.numerator % share.denominator != 0
            illegal: BoolArray = np.logical_or.reduce([wrong, *(rule.broken(small) for rule in rules)])
            return illegal

        return Rule(
            name="trial_nodes",
            knobs=tuple(dict.fromkeys([replicas, *(knob for rule in rules for knob in rule.knobs)])),
            message=f"with {share} of {replicas}, the candidate must be legal on the {self.nodes} nodes of trials",
            broken=broken,
        )

    def shortened(self, columns: Columns, costs: Costs, whole: Prediction) -> Shortened | None:
        """Return the scale from the steps of a trial of one row to `whole`; None if it runs on all nodes.

        Raises SpecError if a step has no prediction.
        """
        if self._share == 1:
            return None
        small = predict_columns(self.task, self.workload, self.columns(columns), costs)
        step, added_bytes = float(small.step_time_s[0]), float(small.device_used_bytes[0]) - whole.device_used_bytes
        if not whole.step_time_s or not math.isfinite(step):
            problem, fix = "needs predicted step times, which the chip's facts do not give", "leave it out"
            raise SpecError(key="auto_tuner.control.trial_nodes", value=self.nodes, problem=problem, fix=fix)
        of_nodes = self.whole.spec.cluster.nodes
        scale = scale_of(PRIOR, whole.step_time_s / step, self.nodes, of_nodes)
        return Shortened(
            global_batch_size=self.task.spec.train.global_batch_size,
            whole=self.whole.spec.train.global_batch_size,
            scale=scale.factor,
            low=scale.low,
            high=scale.high,
            own=scale.own,
            nodes=self.nodes,
            of_nodes=of_nodes,
            more_bytes=int(added_bytes) if math.isfinite(added_bytes) else 0,
        )

    def runs(self, columns: Columns, costs: Costs) -> BoolArray:
        """Return which candidates can run in trials whose steps can be scaled."""
        small = predict_columns(self.task, self.workload, self.columns(columns), costs)
        runs: BoolArray = ~self.rule().broken(columns) & small.fits & np.isfinite(small.step_time_s)
        return runs

    @property
    def _replicas(self) -> str:
        if not isinstance(self.workload, ScalesDown):
            problem = f"is not supported by {self.workload.name}"
            raise SpecError(key="auto_tuner.control.trial_nodes", value=self.nodes, problem=problem, fix="leave it out")
        return self.workload.replicas

    @property
    def _share(self) -> Fraction:
        return Fraction(self.nodes, self.whole.spec.cluster.nodes)

    def _rules(self) -> tuple[Rule, ...]:
        return engine_legality(self.task, self.workload.rules, self.workload.merges)[0]

    def _fewer(self, columns: Columns) -> Columns:
        share, replicas = self._share, columns[self._replicas]
        return {**columns, self._replicas: np.maximum(replicas * share.numerator // share.denominator, 1)}


class TrialMemory:
    """Candidates that are predicted to fit on all nodes, but not on those of trials."""

    name = "trial_memory"
    message = "it is predicted not to fit on the nodes of trials, where a device may have more of the optimizer"

    def __init__(self, smaller: SmallerTask, costs: Costs) -> None:
        self.smaller, self.costs = smaller, costs

    def prunes(self, columns: Columns, predictions: Predictions) -> BoolArray:
        fits = predict_columns(self.smaller.task, self.smaller.workload, self.smaller.columns(columns), self.costs).fits
        return ~fits


def rules_of_trials(task: Task, workload: Workload) -> tuple[Rule, ...]:
    """Return the rules that a candidate can run on each number of nodes of trials."""
    return tuple(each.rule() for each in _sizes(task, workload))


def pruning_of_trials(task: Task, workload: Workload, costs: Costs) -> tuple[PruningRule, ...]:
    """Return the rule that a candidate fits on the fewest nodes of trials."""
    sizes = sorted(_sizes(task, workload), key=lambda each: each.nodes)
    return tuple(TrialMemory(each, costs) for each in sizes[:1])


def _sizes(task: Task, workload: Workload) -> list[SmallerTask]:
    all_nodes = task.spec.cluster.nodes
    return [SmallerTask(task, workload, nodes) for nodes in task.spec.control.trial_nodes if nodes < all_nodes]
