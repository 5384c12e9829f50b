"""A space predicted in pieces, and what limits a candidate.

What is ruled out: by prediction, by plugins' rules, and by what trials proved. What becomes of a trial after its
answers are compared with the baseline's.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flagcore_testing.toy import ENGINE, Toy

from flagcore.contracts import Costs, PruningRule
from flagcore.domain.chip import Chip, Fact
from flagcore.domain.cluster import Cluster, NodeGroup
from flagcore.domain.prediction import PART_NAMES, Predictions
from flagcore.domain.records import prediction_record, read_prediction
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
from flagcore.domain.spec import Task
from flagcore.domain.trial import TIMED_STATES, Answers, Measurement, Role, Shortened, Trial, TrialState
from flagcore.errors import FlagError, NoDevice
from flagcore.tuner.search_state import count
from flagcore.tuner.stages import predict as predict_module
from flagcore.tuner.stages.build import build
from flagcore.tuner.stages.learn import learn
from flagcore.tuner.stages.measure import compare
from flagcore.tuner.stages.predict import limit, predict, predict_columns, with_figures
from flagcore.tuner.stages.prune import prune_by_trials
from flagcore.tuner.stages.rank import untried
from tests import tasks

LIMITS = {part: name for part, name in PART_NAMES.items() if part != "compute_s"} | {"host_offload_s": "host offload"}


@pytest.mark.parametrize("part", LIMITS)
def test_the_largest_part_besides_compute_is_the_bottleneck_if_large_enough(part: str) -> None:
    others = {name: 0.01 for name in LIMITS if name != part}
    assert limit(tasks.prediction(compute_s=5.0, **others, **{part: 1.0})) == LIMITS[part]
    assert limit(tasks.prediction(compute_s=5.0, **others, **{part: 0.1})) == "compute"


def test_memory_is_the_bottleneck_on_a_nearly_full_device() -> None:
    assert limit(tasks.prediction(used=91.0, compute_s=5.0, optimizer_s=0.1)) == "memory"
    assert limit(tasks.prediction(used=91.0, compute_s=5.0, optimizer_s=1.0)) == "optimizer"
    assert limit(tasks.prediction(used=89.0, compute_s=5.0)) == "compute"
    assert limit(tasks.prediction(used=91.0, capacity=None, compute_s=5.0)) == "compute"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chunk", "fork_rows", "sent"), [(1, 99, True), (7, 99, True), (9, 1, True), (99, 1, True), (99, 1, False)]
)
def test_predictions_do_not_depend_on_the_block_size_and_on_forks(
    chunk: int, fork_rows: int, sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = tasks.task(space={"micro_batch_size": (1, 2)})
    space = build(ENGINE.axes(task), ENGINE.rules(task), ENGINE.merges(task))
    at_once = ENGINE.predict(task, space.columns(), tasks.costs(task))
    monkeypatch.setattr(predict_module, "CHUNK", chunk)
    monkeypatch.setattr(predict_module, "FORK_ROWS", fork_rows)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(3))
    with pytest.MonkeyPatch.context() as patch:  # ends here: the process of the test sends its result, too
        if not sent:
            patch.setattr("multiprocessing.connection.Connection.send", None)
        in_pieces = predict(tasks.platform(task), space)
    for field in dataclasses.fields(at_once):
        one, other = getattr(at_once, field.name), getattr(in_pieces, field.name)
        assert one.keys() == other.keys() if isinstance(one, dict) else np.array_equal(one, other), field.name
    assert all(np.array_equal(seconds, in_pieces.time_s[name]) for name, seconds in at_once.time_s.items())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"step_time_s": None}, "step_time_s of predict is None"),
        ({"device_used_bytes": np.ones((3, 2))}, r"device_used_bytes of predict is an array of float64 .*\(3, 2\)"),
        ({"reserved_bytes": np.ones(2)}, r"reserved_bytes of predict .*\(2,\)"),
        ({"low_s": np.array(["a", "b", "c"])}, "low_s of predict is an array of <U1"),
        ({"high_s": [1.0, 2.0, 3.0]}, r"high_s of predict is \[1.0, 2.0, 3.0\]"),
        ({"time_s": {"compute_s": 1.0}}, "compute_s of predict is 1.0"),
        ({"worst_stage": np.array([None] * 3)}, "worst_stage of predict is an array of object"),
        ({}, "predict returned 1 numbers for 3 candidates"),
        (None, "predict returned NoneType, not Predictions"),
    ],
)
def test_predictions_of_the_wrong_shape_or_type_name_the_engine(changes: dict[str, Any] | None, words: str) -> None:
    class Wrong(Toy):
        def predict(self, task: Task, columns: Columns, costs: Costs) -> Any:
            found = super().predict(task, columns, costs)
            return changes and dataclasses.replace(found, **changes) if changes != {} else found.take(np.array([0]))

    task = tasks.task(space={"micro_batch_size": (1, 2)})
    columns = {name: np.repeat(column, 3) for name, column in ENGINE.columns(task, {}).items()}
    with pytest.raises(NoDevice, match=f"the engine toy cannot be used: {words}"):
        predict_columns(tasks.platform(task, engine=Wrong()), columns)


def test_arrays_of_different_lengths_are_an_error() -> None:
    task = tasks.task()
    found = ENGINE.predict(task, ENGINE.columns(task, {}), tasks.costs(task))
    with pytest.raises(ValueError, match="reserved_bytes"):
        dataclasses.replace(found, reserved_bytes=np.array(1.0))
    with pytest.raises(ValueError, match="compute_s"):
        dataclasses.replace(found, time_s={"compute_s": np.ones(2)})


def test_the_peak_of_a_mixed_cluster_is_the_mean_over_its_devices() -> None:
    slow = dataclasses.replace(tasks.CHIP, dense_flops_per_second={"bf16": Fact(value=300e12, source=tasks.SOURCE)})
    bare = dataclasses.replace(tasks.CHIP, dense_flops_per_second={})

    def mfu(*chips: Chip) -> object:
        counts = (4, 12)[: len(chips)]
        groups = tuple(NodeGroup(chip=chip, nodes=1, devices_per_node=n) for chip, n in zip(chips, counts, strict=True))
        task = dataclasses.replace(tasks.task(), cluster=Cluster(groups=groups))
        figures = dataclasses.replace(tasks.prediction(compute_s=1.0), model_flops=16 * 45e12)
        return with_figures(task, figures).mfu

    assert mfu(tasks.CHIP, slow) == pytest.approx(45 / (0.25 * 900 + 0.75 * 300))
    assert mfu(tasks.CHIP) == pytest.approx(16 * 45 / 4 / 900)
    assert mfu(tasks.CHIP, bare) is None


def test_a_record_has_memory_in_gib_and_rates_with_the_inverse_bounds_of_the_time() -> None:
    task = tasks.task()
    tokens = task.spec.train.global_batch_size * task.spec.train.seq_length / task.cluster.devices
    figures = dataclasses.replace(
        tasks.prediction(used=3.0 * 2**30, capacity=4.0 * 2**30, compute_s=2.0), low_s=1.0, high_s=4.0, model_flops=8e12
    )
    data = prediction_record(with_figures(task, figures))
    memory = data["memory"]
    assert (memory["device_used_gib"], memory["capacity_gib"], memory["fits"]) == (3.0, 4.0, True)
    assert data["step_time_s"] == {"value": 2.0, "low": 1.0, "high": 4.0}
    assert data["tokens_per_second_per_device"] == {"value": tokens / 2, "low": tokens / 4, "high": tokens}
    assert data["model_tflops_per_device"] == pytest.approx(4 / task.cluster.devices)
    assert prediction_record(read_prediction(data)) == data
    figures = dataclasses.replace(figures, step_time_s=None, capacity_bytes=None, fits=None)
    unknown = prediction_record(with_figures(task, figures))
    assert "capacity_gib" not in unknown["memory"]
    assert unknown.keys() == {"memory"}


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


MEASURED = Measurement(step_times_s=(1.0,), step_time_s=1.0, spread_s=0.0, tokens_per_second_per_device=1.0)
BASE = Trial(number=0, candidate=tasks.candidate(), role=Role.BASELINE, state=TrialState.MEASURED, measurement=MEASURED)
OTHER = replace(BASE, number=1, candidate=tasks.candidate(micro_batch_size=2), role=Role.SEARCH)
FAR = Answers(difference=2.0, limit=1.0, unit="of it", text="loss 2 instead of 1")
HALF = Shortened(global_batch_size=4, whole=8, scale=2.0, low=1.9, high=2.1)


class Engine(Toy):
    """An engine whose trials have `found` as answers."""

    def __init__(self, found: Answers | str | None) -> None:
        self.found, self.change = found, ""

    def answers(self, task: Task, change: str, folder: str, baseline: str) -> Answers | None:
        self.change = change
        if isinstance(self.found, str):
            raise FlagError(self.found)
        return self.found


@pytest.mark.parametrize(
    ("found", "state", "reason"),
    [
        (None, TrialState.MEASURED, None),
        (replace(FAR, difference=1.0), TrialState.MEASURED, None),
        (replace(FAR, difference=float("nan")), TrialState.INVALID, "loss 2 instead of 1"),
        (FAR, TrialState.INVALID, "loss 2 instead of 1"),
        ("nothing to compare", TrialState.INVALID, "nothing to compare"),
    ],
)
def test_a_trial_with_other_answers_is_invalid(found: Any, state: TrialState, reason: str | None) -> None:
    engine = Engine(found)
    done = compare(replace(tasks.platform(tasks.task()), engine=engine), OTHER, BASE, ("1", "0"))
    assert (done.state, engine.change) == (state, "rounding")
    assert (reason or "") in (done.reason or "")
    if found is not None and not isinstance(found, str):
        assert done.measurement is not None
        assert done.measurement.answers is found


@pytest.mark.parametrize(
    ("trial", "base"),
    [
        (replace(BASE, number=1, role=Role.REPEAT), BASE),
        (replace(OTHER, shortened=HALF), BASE),
        (replace(OTHER, state=TrialState.STOPPED), BASE),
        (OTHER, replace(BASE, state=TrialState.OUT_OF_MEMORY, measurement=None)),
    ],
)
def test_what_cannot_be_compared_is_not(trial: Trial, base: Trial) -> None:
    engine = Engine(FAR)
    platform = replace(tasks.platform(tasks.task()), engine=engine)
    assert compare(platform, trial, base, ("1", "0")) == trial
    assert engine.change == ""
