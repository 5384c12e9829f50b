"""What is ruled out: by prediction, by plugins' rules, and by what trials proved."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from flagcore_testing.toy import ENGINE

from flagcore.contracts import PruningRule
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import (
    DOES_AS_MUCH_WORK,
    NEEDS_AS_MUCH_MEMORY,
    Axis,
    BoolArray,
    Candidate,
    Columns,
    Pruned,
    Space,
)
from flagcore.domain.trial import TIMED_STATES, Trial, TrialState
from flagcore.tuner.search_state import count
from flagcore.tuner.stages.build import build
from flagcore.tuner.stages.learn import learn
from flagcore.tuner.stages.predict import predict
from flagcore.tuner.stages.prune import prune_by_trials
from flagcore.tuner.stages.rank import untried
from tests import tasks

TASK = tasks.task(space={"recompute_granularity": ("full",)})
SPACE = build(ENGINE.axes(TASK), ENGINE.rules(TASK), ENGINE.merges(TASK))
FULL = {
    "use_recompute": True,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def predictions(capacity: float | None = 80e9) -> Predictions:
    return predict(tasks.platform(TASK, costs=tasks.costs(TASK, capacity)), SPACE)


def trial(candidate: Candidate, state: TrialState, number: int = 0) -> Trial:
    return tasks.trial(number, candidate, 1.0 if state is TrialState.MEASURED else None, state=state)


def pruned(
    trials: Sequence[Trial] = (), rules: Sequence[PruningRule] = (), of: Predictions | None = None, space: Space = SPACE
) -> Pruned:
    return prune_by_trials(tasks.problem(tasks.platform(TASK), space, of or predictions(), rules), trials)


def rows_of(found: Pruned, name: str) -> list[int]:
    return np.flatnonzero(found.rule == found.rules.index(name) + 1).tolist() if name in found.rules else []


class Rule:
    name = "no_small_batches"
    message = "slow on this chip"

    def prunes(self, columns: Columns, predictions: Predictions) -> BoolArray:
        return columns["micro_batch_size"] < 4


def test_only_candidates_that_do_not_fit_are_removed() -> None:
    needed = predictions().device_used_bytes
    middle = float(np.median(needed))
    found = pruned(of=predictions(middle))
    assert rows_of(found, "does_not_fit") == np.flatnonzero(needed > middle).tolist()
    assert 0 < found.open_rows.size < len(SPACE)
    assert pruned(of=predictions(None)).open_rows.size == len(SPACE)


def test_a_rule_is_counted_under_its_name() -> None:
    found = pruned(rules=[Rule()])
    small_batches = SPACE.columns()["micro_batch_size"] < 4
    assert rows_of(found, "no_small_batches") == np.flatnonzero(small_batches).tolist()
    assert found.reason(int(np.flatnonzero(small_batches)[0])) == "no_small_batches"


def test_a_candidate_needing_as_much_as_one_that_ran_out_of_memory_is_pruned() -> None:
    ran_out = tasks.candidate(data_parallel_size=4, micro_batch_size=1, use_distributed_optimizer=True)
    found = pruned([trial(ran_out, TrialState.OUT_OF_MEMORY, 7)])
    larger = SPACE.find(tasks.candidate(data_parallel_size=4, micro_batch_size=2, use_distributed_optimizer=True))
    plain = SPACE.find(tasks.candidate(data_parallel_size=4, micro_batch_size=1))
    smaller = SPACE.find(
        tasks.candidate(data_parallel_size=4, micro_batch_size=1, use_distributed_optimizer=True, **FULL)
    )
    assert larger is not None
    assert {larger, plain} <= set(rows_of(found, NEEDS_AS_MUCH_MEMORY))
    assert smaller in found.open_rows.tolist()
    assert found.reason(larger) == f"{NEEDS_AS_MUCH_MEMORY} (trial 7)"


def test_the_candidate_of_a_trial_is_not_pruned_by_its_own_trial() -> None:
    for state in (TrialState.OUT_OF_MEMORY, TrialState.MEASURED):
        one = tasks.candidate(data_parallel_size=4, micro_batch_size=1)
        assert SPACE.find(one) in pruned([trial(one, state)]).open_rows.tolist()


@pytest.mark.parametrize("state", TIMED_STATES)
def test_more_work_than_a_timed_candidate_is_pruned_unless_less_time_is_predicted(state: TrialState) -> None:
    one = tasks.candidate(data_parallel_size=4, micro_batch_size=1)
    recomputed = SPACE.find(tasks.candidate(data_parallel_size=4, micro_batch_size=1, **FULL))
    assert recomputed in rows_of(pruned([trial(one, state, 3)]), DOES_AS_MUCH_WORK)
    predicted = predictions()
    faster = predicted.step_time_s.copy()
    faster[recomputed] = 0.5 * faster[SPACE.find(one)]
    found = pruned([trial(one, state)], of=replace(predicted, step_time_s=faster))
    assert recomputed in found.open_rows.tolist()


@pytest.mark.parametrize("state", [TrialState.OUT_OF_MEMORY, TrialState.MEASURED])
def test_one_value_of_a_knob_without_an_order_proves_nothing_about_the_others(state: TrialState) -> None:
    axis = Axis(knob="fabric", values=(1, 2), neutral=1, is_unordered=True)
    space = build([*ENGINE.axes(TASK), axis], ENGINE.rules(TASK), ENGINE.merges(TASK))
    one = Candidate.of({**tasks.candidate(data_parallel_size=4, micro_batch_size=1).as_dict(), "fabric": 2})
    found = pruned([trial(one, state)], of=predict(tasks.platform(TASK), space), space=space)
    assert set(space.columns(np.flatnonzero(found.rule))["fabric"]) == {2}


def test_candidates_are_readmitted_or_removed_when_trials_need_less_or_more_than_predicted() -> None:
    needed = predictions().device_used_bytes
    capacity = 0.9 * float(needed.min())
    predicted = predictions(capacity)
    completed = [used(row, 0.7 * float(needed[row]), number) for number, row in enumerate((0, 1, 2))]
    assert not pruned(of=predicted).open_rows.size
    after = pruned(completed, [Rule()], of=predicted)
    assert set(rows_of(after, "does_not_fit")) >= set(np.flatnonzero(0.7 * needed > capacity).tolist())
    assert rows_of(after, "no_small_batches")
    assert after.open_rows.size
    roomy = predictions(1.01 * float(needed.max()))
    larger = [used(row, 1.4 * float(needed[row]), row) for row in (0, 1, 2)]
    assert rows_of(pruned(larger, of=roomy), "does_not_fit")


def used(row: int, memory: float, number: int) -> Trial:
    done = trial(SPACE.candidate(row), TrialState.MEASURED, number)
    assert done.measurement
    return replace(done, measurement=replace(done.measurement, device_used_bytes=int(memory)))


@pytest.mark.parametrize("state", [TrialState.FAILED, TrialState.INVALID, TrialState.TIMED_OUT, TrialState.INTERRUPTED])
def test_other_trial_states_prove_nothing(state: TrialState) -> None:
    one = tasks.candidate(data_parallel_size=4, micro_batch_size=1)
    assert pruned([trial(one, state)]).open_rows.size == len(SPACE)


def test_applying_trials_one_by_one_or_together_is_equivalent() -> None:
    trials = [
        trial(tasks.candidate(data_parallel_size=4, micro_batch_size=2), TrialState.OUT_OF_MEMORY, 0),
        trial(tasks.candidate(tensor_model_parallel_size=4, micro_batch_size=1), TrialState.MEASURED, 1),
    ]
    at_once = pruned(trials)
    before = pruned(trials[:1])
    problem = tasks.problem(tasks.platform(TASK), SPACE, predictions(), pruned=before)
    after = prune_by_trials(problem, trials)
    assert after.rule.tolist() == at_once.rule.tolist()
    assert prune_by_trials(replace(problem, pruned=after), trials) == after
    assert before.open_rows.size > after.open_rows.size


@pytest.mark.parametrize("seed", range(5))
def test_counts_add_up_after_any_trials_and_the_rest_is_untried(seed: int) -> None:
    draw = np.random.default_rng(seed)
    states = [state for state in TrialState if state not in (TrialState.RUNNING, TrialState.PREDICTED)]
    rows = draw.choice(len(SPACE), size=12, replace=False)
    trials = [
        trial(SPACE.candidate(int(row)), states[int(draw.integers(len(states)))], n) for n, row in enumerate(rows)
    ]
    found = pruned(trials, of=predictions(float(np.quantile(predictions().device_used_bytes, 0.8))))
    search_state = learn(trials)
    counts = count(SPACE, found, search_state)
    interrupted = sum(each.state is TrialState.INTERRUPTED for each in trials)
    interrupted_and_open = sum(
        each.state is TrialState.INTERRUPTED and SPACE.find(each.candidate) in found.open_rows for each in trials
    )
    assert counts.balanced
    assert (
        counts.untried
        == untried(tasks.problem(tasks.platform(TASK), SPACE, predictions(), pruned=found), search_state).size
        - interrupted_and_open
    )
    assert counts.measured + counts.stopped + counts.failed == 12
    assert counts.failed >= interrupted
