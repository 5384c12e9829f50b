"""Runs steps with fewer micro-batches or on fewer nodes, and scales their times by predictions.

On fewer nodes, only the number of data-parallel replicas changes. Such a trial does not measure the communication of
all replicas or the smaller share of the optimizer on each replica. From n to N nodes the step time grows by the factor
1 + k g + u log2(N / n): g is the predicted growth, k the unknown factor of the real growth with the mean 1, and u the
growth per doubling that the model does not include (jitter, slow nodes) with the mean 0.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from flagcore.contracts import Platform, Problem
from flagcore.domain.prediction import Prediction, Predictions
from flagcore.domain.space import Axis, BoolArray, Candidate, Columns, IntArray, Merge, Rule, as_candidate
from flagcore.domain.spec import Task
from flagcore.domain.trial import Role, Shortened, Trial
from flagcore.errors import SpecError
from flagcore.i18n import N_, Message
from flagcore.tuner.effects import engine_candidate, engine_legality
from flagcore.tuner.stages.build import canonical
from flagcore.tuner.stages.predict import predict_columns

QUANTILE = 1.2816
"""The number of standard deviations on each side of an 80% interval."""
GROWTH_DEVIATION, UNMODELLED_DEVIATION = 0.6, 0.02
"""The standard deviations of k and u. With them, k is between 0.2 and 1.8 in 80% of cases: published predictions of
exposed communication are that far off."""
MIN_SCALE = 0.1


def scale_nodes(task: Task, nodes: int, predicted: float) -> Shortened:
    """Return the factor from step times on `nodes` nodes to step times on all nodes of `task`, with its interval.

    `predicted`: the predicted factor. Growth that the model does not include is the same for all candidates, so it does
    not change their order.
    """
    of_nodes = task.spec.cluster.nodes
    model_error = QUANTILE * GROWTH_DEVIATION * abs(predicted - 1.0)
    spread = math.hypot(model_error, QUANTILE * UNMODELLED_DEVIATION * math.log2(of_nodes / nodes))
    low, middle, high = (max(each, MIN_SCALE) for each in (predicted - spread, predicted, predicted + spread))
    return Shortened(
        global_batch_size=task.on_nodes(nodes).spec.work.step_samples,
        whole=task.spec.work.step_samples,
        scale=middle,
        low=low,
        high=high,
        own=model_error / middle,
        nodes=nodes,
        of_nodes=of_nodes,
    )


FIXED_FACTOR = 2.0
"""The uncertainty of the fixed part of a step (pipeline fill, gradient exchange, optimizer). Its time is between
1/FIXED_FACTOR and FIXED_FACTOR times the predicted time. Chosen by hand; docs/accuracy.md lists errors of parts of a
step."""

UNMODELLED_SHARE = 0.05
"""The share of a shortened step that work outside the model may take, such as data loading, logging, or the host.
Chosen by hand."""


def shorten(platform: Platform, candidate: Candidate, columns: Columns, step_s: float | None) -> Shortened | None:
    """Return how to shorten the steps of a candidate, or None if they are short enough or cannot be shortened.

    `columns`: the candidate as columns with one row. `step_s`: the expected seconds of a step.
    """
    task, max_step = platform.task, platform.task.spec.control.max_step_time
    if max_step is None or step_s is None or step_s <= max_step:
        return None
    batch = platform.engine.shorter_batch(task.for_engine(), engine_candidate(task, candidate), max_step / step_s)
    if batch is None:
        return None
    short_task = replace(platform, task=task.with_batch(batch))
    whole_s, short_s = (float(predict_columns(each, columns).step_time_s[0]) for each in (platform, short_task))
    if not math.isfinite(whole_s / short_s) or whole_s <= short_s:
        return None
    return scale_steps(batch, task.spec.work.step_samples, short_s, whole_s)


def scale_steps(batch: int, whole_batch: int, short_s: float, whole_s: float) -> Shortened:
    """Return the scale from steps of `batch` samples to whole steps, given the predicted times of both.

    A step has a fixed part F and a part V that is proportional to the batch. A short step takes t = F + V, a whole step
    takes T = F + (B/b) V. The measured t is scaled by T/t. The interval follows from the uncertainty of F. Its lower
    bound is 1/FIXED_FACTOR times the prediction. Its upper bound is FIXED_FACTOR times the prediction, or the
    prediction plus UNMODELLED_SHARE of the step if that is longer.
    """
    ratio = whole_batch / batch
    variable = (whole_s - short_s) / (ratio - 1.0)
    fixed = max(short_s - variable, 0.0)
    bounds = (max(FIXED_FACTOR * fixed, fixed + UNMODELLED_SHARE * short_s), fixed / FIXED_FACTOR)
    low, high = ((bound + ratio * variable) / (bound + variable) for bound in bounds)
    return Shortened(global_batch_size=batch, whole=whole_batch, scale=whole_s / short_s, low=low, high=high)


@dataclass(frozen=True, slots=True)
class SmallerTask:
    """The task `whole` as trials run it, on only `nodes` of its nodes.

    It is also the pruning rule for candidates that are predicted to fit on all nodes, but not on `nodes` nodes.
    """

    whole: Platform
    nodes: int
    name = "trial_memory"
    message = N_("it is predicted not to fit on the nodes of trials, where a device may hold more optimizer state")

    def prunes(self, columns: Columns, predictions: Predictions) -> BoolArray:
        return ~self.predictions(columns).fits

    @property
    def platform(self) -> Platform:
        return replace(self.whole, task=self.whole.task.on_nodes(self.nodes))

    def columns(self, columns: Columns) -> Columns:
        """Return the columns of the candidates as they run in trials, with fewer replicas."""
        return canonical(self._fewer(columns), self._rules_and_merges[1])

    def predictions(self, columns: Columns) -> Predictions:
        """Return the predictions of the candidates as they run in trials."""
        return predict_columns(self.platform, self.columns(columns))

    def candidate(self, columns: Mapping[str, IntArray], axes: tuple[Axis, ...]) -> Candidate:
        """Return the candidate as it runs in trials. `columns` has one row."""
        return as_candidate(axes, self.columns(columns))

    def rule(self) -> Rule:
        """Return the rule that removes candidates that cannot run on the nodes of trials."""
        rules, replicas, share = self._rules_and_merges[0], self._replicas, self._share

        def broken(columns: Columns) -> BoolArray:
            small, wrong = self._fewer(columns), columns[replicas] * share.numerator % share.denominator != 0
            return np.asarray(np.logical_or.reduce([wrong, *(rule.broken(small) for rule in rules)]))

        return Rule(
            name="trial_nodes",
            knobs=tuple(dict.fromkeys([replicas, *(knob for rule in rules for knob in rule.knobs)])),
            message=Message(
                "with {share} of {replicas}, the candidate must be legal on the {nodes} nodes of trials",
                share=str(share),
                replicas=replicas,
                nodes=self.nodes,
            ),
            broken=broken,
        )

    def shortened(self, columns: Columns, whole: Prediction) -> Shortened | None:
        """Return how the steps of a trial are scaled to `whole`, the prediction on all nodes.

        `columns` has one row. Returns None if the trial runs on all nodes. Raises SpecError if a step has no predicted
        time.
        """
        if self._share == 1:
            return None
        small = self.predictions(columns)
        step, added_bytes = float(small.step_time_s[0]), float(small.device_used_bytes[0]) - whole.device_used_bytes
        if not whole.step_time_s or not math.isfinite(step):
            problem, fix = "needs predicted step times, which the chip's facts do not give", "leave it out"
            raise SpecError(key="auto_tuner.control.trial_nodes", value=self.nodes, problem=problem, fix=fix)
        shortened = scale_nodes(self.whole.task, self.nodes, whole.step_time_s / step)
        return replace(shortened, more_bytes=int(added_bytes) if math.isfinite(added_bytes) else 0)

    def runs(self, columns: Columns) -> BoolArray:
        """Return a mask of the candidates that can run in trials, and whose steps can be scaled."""
        small = self.predictions(columns)
        return np.asarray(~self.rule().broken(columns) & small.fits & np.isfinite(small.step_time_s))

    @property
    def _replicas(self) -> str:
        replicas = self.whole.engine.replicas
        if not replicas:
            problem = f"is not supported by {self.whole.engine.name}"
            raise SpecError(key="auto_tuner.control.trial_nodes", value=self.nodes, problem=problem, fix="leave it out")
        return replicas

    @property
    def _share(self) -> Fraction:
        return Fraction(self.nodes, self.whole.task.spec.cluster.nodes)

    @property
    def _rules_and_merges(self) -> tuple[tuple[Rule, ...], tuple[Merge, ...]]:
        engine = self.whole.engine
        return engine_legality(self.platform.task, engine.rules, engine.merges)

    def _fewer(self, columns: Columns) -> Columns:
        share, replicas = self._share, columns[self._replicas]
        return {**columns, self._replicas: np.maximum(replicas * share.numerator // share.denominator, 1)}


def shortened_steps(problem: Problem, trial: Trial, most_nodes: int | None = None) -> Shortened | None:
    """Return how the steps of a trial are shortened, or None if they are whole.

    `most_nodes`: the maximum number of nodes if nodes were lost.
    """
    spec, columns = problem.task.spec, problem.columns_of(trial.candidate)
    nodes = min(spec.trial_nodes, most_nodes or spec.cluster.nodes)
    if spec.control.trial_nodes or nodes < spec.cluster.nodes:
        whole_prediction = problem.predictions.row(problem.row_of(trial.candidate))
        return SmallerTask(problem.platform, nodes).shortened(columns, whole_prediction)
    if trial.role is Role.REPEAT:
        return None
    return shorten(problem.platform, trial.candidate, columns, trial.expected_step_s)
