"""Which ranks a probe plays, and what is read of them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from flagcore_megatron import ENGINE

from flagcore.domain.model import Model
from flagcore.domain.space import Candidate
from flagcore.vendorkit.programs import NoMetrics
from tests.product import tasks

DEEP = dataclasses.replace(tasks.DENSE, num_layers=16, hidden_size=1024, ffn_hidden_size=4096, kv_channels=256)
SPARSE = dataclasses.replace(
    DEEP, num_moe_experts=4, moe_router_topk=1, moe_ffn_hidden_size=8, moe_first_dense_layers=12, vocab_size=64
)
STEP = {"compute_s": 2.0, "optimizer_s": 0.5}
METRICS: dict[str, Any] = {
    "stage": 1,
    "steps": [{"compute_s": 9.0, "optimizer_s": 9.0}, STEP, {**STEP, "compute_s": 4.0}, STEP],
    "static_bytes": 10,
    "peak_forward_backward_bytes": 30,
    "peak_optimizer_bytes": 20,
    "peak_allocated_bytes": 30,
    "peak_reserved_bytes": None,
    "device_used_bytes": 40,
    "num_microbatches": 8,
    "microbatches_run": 4,
    "versions": {"torch": "2"},
}


def ranks(model: Model, devices: int, **knobs: int) -> tuple[int, ...]:
    task = tasks.task(model, devices=devices, global_batch_size=64)
    return ENGINE.probe_ranks(task, Candidate.of(knobs), tasks.costs(task))


def test_a_world_of_one_stage_is_probed_by_its_first_rank() -> None:
    assert ranks(DEEP, 8, data_parallel_size=8) == (0,)


def test_first_and_last_stage_are_probed_by_their_first_ranks() -> None:
    found = ranks(DEEP, 32, data_parallel_size=4, tensor_model_parallel_size=2, pipeline_model_parallel_size=4)
    assert {0, 24} <= set(found)
    assert all(rank % 8 == 0 for rank in found)


def test_stage_that_takes_longest_is_probed() -> None:
    """Here a middle one: the others have an embedding or a head, but a small vocabulary and fewer layers."""
    model = dataclasses.replace(DEEP, vocab_size=64)
    task = tasks.task(
        model,
        devices=4,
        global_batch_size=64,
        settings={"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 1},
    )
    knobs = Candidate.of({"pipeline_model_parallel_size": 4})
    assert ENGINE.probe_ranks(task, knobs, tasks.costs(task)) == (0, 1, 3)


def test_the_stage_with_experts_is_probed_if_others_are_dense() -> None:
    """Dense layers are in the first stages; the few experts are small."""
    model = dataclasses.replace(SPARSE, moe_first_dense_layers=8)
    found = ranks(model, 8, pipeline_model_parallel_size=4, data_parallel_size=2, expert_model_parallel_size=2)
    assert any(rank // 2 >= 2 for rank in found)


def test_figures_are_medians_of_the_steps_after_the_warm_up(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_text(json.dumps(METRICS))
    found = ENGINE.read_probe(tasks.task(), str(tmp_path))
    assert (found.compute_time_s, found.optimizer_time_s, found.steps) == (2.0, 0.5, 3)
    assert (found.compute_spread_s, found.optimizer_spread_s) == (1.0, 0.0)
    assert (found.stage, found.peak_allocated_bytes, found.reserved_bytes) == (1, 30, None)
    assert (found.microbatches, found.microbatches_run) == (8, 4)


@pytest.mark.parametrize("missing", ["stage", "steps", "static_bytes", "versions", "warm-up"])
def test_missing_parts_and_steps_of_the_warm_up_alone_are_reported(tmp_path: Path, missing: str) -> None:
    steps = METRICS["steps"][:1] if missing == "warm-up" else METRICS["steps"]
    found = {key: value for key, value in {**METRICS, "steps": steps}.items() if key != missing}
    (tmp_path / "metrics.json").write_text(json.dumps(found))
    with pytest.raises(NoMetrics, match=missing):
        ENGINE.read_probe(tasks.task(), str(tmp_path))
