"""What earlier runs teach: odd records cost only themselves."""

from typing import Any

import pytest

from flagcore.api.planning.jobs import past
from flagcore.engines.megatron import WORKLOAD
from flagcore.plugins import LoadedPlugins
from flagcore.spec.shapes import Shape
from tests import small

CANDIDATE = {"data_parallel_size": 4, "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}


def record(measured: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": "run/1",
        "kind": "train",
        "model": {name: getattr(small.DENSE, name) for name in Shape.model_fields},
        "cluster": {"chip": "test-chip", "devices": 4, "devices_per_node": 4},
        "train": {"engine": "megatron", "seq_length": 128, "global_batch_size": 8, "precision": "bf16"},
        "candidate": {**CANDIDATE, "context_parallel_size": 1, "expert_model_parallel_size": 1, "micro_batch_size": 1},
        "measured": measured,
    }


def learned_count(*records: dict[str, Any]) -> int:
    return len(past(records, small.CHIP, LoadedPlugins.of({}), WORKLOAD, "tokens_per_second_per_device").time)


def test_a_measured_record_is_learned_once() -> None:
    assert learned_count(record({"step_time_s": 0.01})) == 1


@pytest.mark.parametrize("odd", [[1.0], {"a": 1}, 1e308, -1.0, None])
def test_a_record_with_an_invalid_figure_is_skipped(odd: object) -> None:
    assert learned_count(record({"step_time_s": odd})) == 0
