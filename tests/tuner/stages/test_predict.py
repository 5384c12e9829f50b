"""A space predicted in pieces, and what limits a candidate."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from flagcore_testing.toy import ENGINE, Toy

from flagcore.contracts import Costs
from flagcore.domain.chip import Chip, Fact
from flagcore.domain.cluster import Cluster, NodeGroup
from flagcore.domain.prediction import PART_NAMES
from flagcore.domain.records import prediction_record, read_prediction
from flagcore.domain.space import Columns
from flagcore.domain.spec import Task
from flagcore.errors import NoDevice
from flagcore.tuner.stages import predict as predict_module
from flagcore.tuner.stages.build import build
from flagcore.tuner.stages.predict import limit, predict, predict_columns, with_figures
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
    if not sent:
        monkeypatch.setattr("multiprocessing.connection.Connection.send", None)
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
