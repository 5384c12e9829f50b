"""The part of an engine that describes candidates without running them: search space and predictions."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np

from flagcore.contracts.plugin import Costs, PruningRule
from flagcore.domain.knob import Knob
from flagcore.domain.model import Model
from flagcore.domain.prediction import Components, Labels, ModelPart, Passes, Predictions, RankPrediction
from flagcore.domain.space import Axis, BoolArray, Candidate, Columns, FloatArray, IntArray, KnobValue, Merge, Rule
from flagcore.domain.spec import AUTO, Task
from flagcore.domain.trial import Trial
from flagcore.errors import SpecError


class Predictor(ABC):
    """The search space and the predictions of an engine, as the base class of `Workload`.

    Arguments named `columns` map each knob's name to an array with one element per candidate. A row is the position of
    a candidate in these arrays.
    """

    name: str
    kind: str
    """The kind of job: train or serve."""
    knobs: tuple[Knob, ...]
    """All knobs that specs and job records may set."""

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

    bound_knobs: tuple[str, ...] = ()
    """The knobs that `least_seconds` and `least_share` need at least. Empty if the engine has no such bounds."""

    def least_seconds(self, task: Task, columns: Columns, costs: Costs, /) -> FloatArray:
        """Return a lower bound of the step time for any values of the knobs that are not in `columns`."""
        return np.zeros(_rows(columns))

    def least_share(self, task: Task, columns: Columns, costs: Costs, /) -> FloatArray:
        """Return a lower bound of the share of the memory in use, like `least_seconds`."""
        return np.zeros(_rows(columns))

    def in_space(self, values: Mapping[str, KnobValue], model: Model, /) -> Mapping[str, KnobValue]:
        """Return the knobs of a published run of `model`, with knobs of the space added that express other ones."""
        return values

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
        """Return, for each candidate in `columns`, whether it needs at least as much memory as `candidate` for any
        model.

        By default, all elements of the array are False.
        """
        return _no_row(columns)

    def takes_at_least(self, columns: Columns, candidate: Candidate) -> BoolArray:
        """Return, for each candidate in `columns`, whether a step certainly takes at least as long as with `candidate`.

        By default, all elements of the array are False.
        """
        return _no_row(columns)

    def usual_space(self, task: Task) -> Mapping[str, str | tuple[KnobValue, ...]]:
        """Return a small space from which an expert would choose a candidate without measuring.

        By default it contains only the neutral value of each knob.
        """
        return {knob.name: (knob.neutral,) for knob in self.knobs if knob.searchable}

    def rule_of_thumb(self, task: Task, columns: Columns, predictions: Predictions) -> int:
        """Return the row of the candidate in the usual space that an expert would choose. By default the first."""
        return 0

    def unusual(self, task: Task, columns: Columns, predictions: Predictions) -> IntArray | FloatArray:
        """Return the weight of each candidate's unusual properties, which published runs avoid.

        A plan prefers usual candidates that are about as fast. By default all elements are 0.
        """
        return np.zeros(_rows(columns), dtype=np.int64)

    def defaults(self, task: Task) -> Mapping[str, KnobValue]:
        """Return the knob values that are in effect if the user sets no knob.

        Knobs that are not returned have the value of the baseline. By default the dict is empty.
        """
        return {}

    def device_counts(self, task: Task, columns: Columns) -> IntArray:
        """Return the number of devices of each candidate, as an array. By default all devices of the cluster."""
        return np.full(_rows(columns), task.cluster.devices, dtype=np.int64)

    def splits(self, task: Task, columns: Columns) -> Mapping[str, BoolArray]:
        """Return which candidates divide the work over several node groups, for each way of dividing it.

        A key is the engine's name for a way. Its value is a boolean array with one element per candidate.

        Candidates on one node group are False in all arrays. By default the result is empty.
        """
        return {}

    def learned(self, task: Task, trials: Sequence[Trial]) -> Task:
        """Return `task` with the properties that `trials` revealed, for better predictions. By default unchanged."""
        return task

    # Predictions

    @abstractmethod
    def predict(self, task: Task, columns: Columns, costs: Costs) -> Predictions:
        """Return the predicted memory and time of each candidate.

        `columns`: may contain knobs that only job records set.
        """

    def load_seconds(self, task: Task, predictions: Predictions) -> FloatArray:
        """Return the predicted seconds of the loads of each candidate's trial. By default all are unknown (NaN)."""
        return np.full(predictions.step_time_s.shape, np.nan)

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
        """Return the kinds of model components with their numbers of parameters and layers. By default none."""
        return ()

    def pipelines(self, task: Task, columns: Columns, costs: Costs) -> Sequence[Passes]:
        """Return the pass times of each distinct pipeline of the candidate in the first row of `columns`.

        Returns an empty sequence, the default, if they are unknown.
        """
        return ()

    def stage_layers(self, task: Task, columns: Columns, costs: Costs) -> Sequence[Sequence[int]]:
        """Return the number of layers per pipeline stage for each candidate whose layer split the engine chooses.

        For other candidates, and by default for all, the sequence is empty.
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

    def _unsupported_probes(self) -> SpecError:
        return self._unsupported("probing", "use auto_tuner.control.fidelity: run or estimate, without probes")

    def _unsupported(self, what: str, fix: str) -> SpecError:
        return SpecError(key=f"{self.kind}.engine", value=self.name, problem=f"does not support {what}", fix=fix)


def _rows(columns: Columns) -> int:
    return next(iter(columns.values())).size


def _no_row(columns: Columns) -> BoolArray:
    return np.zeros(_rows(columns), dtype=np.bool_)
