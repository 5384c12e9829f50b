"""The default baseline of the reported gain."""

from dataclasses import dataclass

import numpy as np

from flagcore.contracts import PruningRule
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import BoolArray, Candidate, Columns
from flagcore.engines.megatron.adapter import WORKLOAD
from flagcore.tuner.problem import build_problem
from tests import small
from tests.tuner.stages.test_discover import loaded, plugin, spec

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"


@dataclass(frozen=True)
class Not:
    """Rules out one pair of TP and PP; without one, everything."""

    pair: tuple[object, object] | None
    name: str = "test_not_this"
    message: str = "it is slow here"

    def prunes(self, columns: Columns, predictions: Predictions) -> BoolArray:
        if self.pair is None:
            return np.ones(columns[TP].shape, dtype=np.bool_)
        tensor, stages = self.pair
        removed: BoolArray = (columns[TP] == tensor) & (columns[PP] == stages)
        return removed


def baseline(*rules: PruningRule) -> Candidate:
    found = loaded(x=plugin(small.CHIP, 8, pruning_rules=lambda task: rules))
    return build_problem(spec(), found, WORKLOAD).baseline


def test_the_rule_of_thumb_respects_a_plugins_rule() -> None:
    default = baseline().as_dict()
    other = baseline(Not((default[TP], default[PP]))).as_dict()
    assert (other[TP], other[PP]) != (default[TP], default[PP])


def test_if_plugin_rules_leave_no_candidate_the_rule_of_thumb_is_used() -> None:
    assert baseline(Not(None)) == baseline()
