"""FlagScale's tuner is replayed as it behaves, with what it gets right and what it does not."""

from itertools import combinations
from typing import Any

import pytest

from benchmarks.flagscale_rules import AXES, RULES, FlagScale, grid_order

PLAIN: dict[str, Any] = {
    "data_parallel_size": 2,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "use_distributed_optimizer": False,
    "sequence_parallel": False,
    "micro_batch_size": 1,
    "num_layers_per_virtual_pipeline_stage": None,
    "use_recompute": False,
    "recompute_method": None,
    "recompute_granularity": None,
    "recompute_num_layers": None,
}


def strategy(**changes: Any) -> dict[str, Any]:
    return {**PLAIN, **changes}


def block(layers: int, **changes: Any) -> dict[str, Any]:
    full = {"use_recompute": True, "recompute_method": "block", "recompute_granularity": "full"}
    return strategy(**full, recompute_num_layers=layers, **changes)


def split(tensor: int, pipeline: int, **changes: Any) -> dict[str, Any]:
    return strategy(tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, **changes)


def verdict(old: dict[str, Any], seconds: float | None, new: dict[str, Any]) -> str | None:
    """Return which rule skips `new` after `old` took `seconds` (None: ran out of memory)."""
    tuner = FlagScale([old, new])
    tuner._order = [0, 1]
    assert tuner.next() == 0
    tuner.tell(seconds)
    assert (tuner.next() is None) == (tuner.history[1].pruned_by is not None)
    return tuner.history[1].pruned_by


def test_the_rules_are_the_31_subsets_of_five_axes() -> None:
    sets = {frozenset(chosen) for size in range(1, 6) for chosen in combinations(AXES, size)}
    assert {frozenset(rule.axes) for rule in RULES} == sets
    assert len(RULES) == 31
    assert [rule.name for rule in RULES[:3]] == ["mbs", "recompute", "sp"]


def test_grid_nests_data_parallel_outermost_and_lists_small_numbers_and_true_first() -> None:
    some = [
        strategy(data_parallel_size=dp, use_distributed_optimizer=dist, micro_batch_size=mbs)
        for mbs in (4, 1)
        for dist in (False, True)
        for dp in (4, 2)
    ]
    keys = ("data_parallel_size", "use_distributed_optimizer", "micro_batch_size")
    found = [tuple(some[at][key] for key in keys) for at in grid_order(some)]
    assert found == [(dp, dist, mbs) for dp in (2, 4) for dist in (True, False) for mbs in (1, 4)]
    found = [tuple(some[at][key] for key in keys) for at in grid_order(some, "performance")]
    assert found == [(dp, dist, mbs) for dp in (4, 2) for dist in (False, True) for mbs in (4, 1)]
    found = [tuple(some[at][key] for key in keys) for at in grid_order(some, "memory")]
    assert found == [(dp, dist, mbs) for dp in (2, 4) for dist in (True, False) for mbs in (1, 4)]


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        (strategy(), strategy(micro_batch_size=2), "mbs"),
        (block(2), strategy(), "recompute"),
        (block(2), block(1), "recompute"),
        (strategy(sequence_parallel=True), strategy(), "sp"),
        (split(4, 1), split(2, 2), "tp_pp"),
        (strategy(use_distributed_optimizer=True), strategy(), "distopt"),
        (block(2), strategy(micro_batch_size=2), "mbs_recompute"),
        (strategy(use_distributed_optimizer=True), strategy(micro_batch_size=4), "distopt_mbs"),
        (split(4, 1, use_distributed_optimizer=True), split(2, 2), "distopt_tp_pp"),
        (split(4, 1, sequence_parallel=True), split(2, 2, micro_batch_size=2), "tp_pp_mbs_sp"),
    ],
)
def test_candidates_that_need_as_much_memory_as_a_failed_one_are_skipped(
    old: dict[str, Any], new: dict[str, Any], rule: str
) -> None:
    assert verdict(old, None, new) == rule
    assert verdict(new, None, old) is None


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        (strategy(micro_batch_size=2), strategy(), "mbs"),
        (strategy(), block(2), "recompute"),
        (block(1), block(2), "recompute"),
        (strategy(sequence_parallel=True), strategy(), "sp"),
    ],
)
def test_three_rules_copy_the_result_of_another_candidate(old: dict[str, Any], new: dict[str, Any], rule: str) -> None:
    tuner = FlagScale([old, new])
    tuner._order = [0, 1]
    tuner.next()
    tuner.tell(3.5)
    assert tuner.next() is None
    assert tuner.history[1].pruned_by == rule
    assert tuner.history[1].performance == 3.5
    assert verdict(new, 3.5, old) is None
