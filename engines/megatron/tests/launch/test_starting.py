"""How trials start, and which ranks a probe plays."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from flagcore_megatron.engine import ENGINE
from flagcore_vendorkit.metrics import NoMetrics

from flagcore.contracts import Launcher, RunningLaunch
from flagcore.domain.chip import Support
from flagcore.domain.engine import EngineSupport
from flagcore.domain.launch import Launch
from flagcore.domain.model import Model
from flagcore.domain.space import Candidate
from flagcore.domain.spec import Control
from flagcore.domain.trial import TimeLimit
from flagcore.tuner.stages.launch import launch
from tests.product import tasks

LONG = tasks.task(global_batch_size=512, control=Control(max_step_time=60.0))


@pytest.mark.parametrize(
    ("data", "pipeline", "micro", "share", "batch"),
    [
        (1, 1, 1, 0.001, 4),  # the fewest micro-batches
        (8, 1, 2, 0.1, 64),
        (4, 8, 1, 0.001, 64),  # two a stage
        (4, 8, 1, 0.15, 96),  # 19.2 of 128 micro-batches, a multiple of 8
        (16, 16, 1, 0.001, None),  # 32 micro-batches are what fills 16 stages
        (16, 8, 1, 0.9, None),
    ],
)
def test_the_pipeline_is_filled_and_the_batch_is_legal(
    data: int, pipeline: int, micro: int, share: float, batch: int | None
) -> None:
    candidate = tasks.candidate(data_parallel_size=data, pipeline_model_parallel_size=pipeline, micro_batch_size=micro)
    assert ENGINE.shorter_batch(LONG, candidate, share) == batch


class Recorder(Launcher):
    """Keeps the launch that it is asked to start."""

    name = "recorder"

    def start(self, launch: Launch) -> RunningLaunch:
        self.launched = launch
        raise InterruptedError


@pytest.mark.parametrize(
    ("device", "changes", "cold", "warm"),
    [
        ("cpu", {}, False, True),
        ("cpu", {}, True, False),
        ("cpu", {"control": Control(warm_start=False)}, False, False),
        ("cpu", {"command": ("python", "-m", "train")}, False, False),
        ("cuda", {}, False, True),
    ],
)
def test_only_the_trial_program_starts_warm(
    tmp_path: Path, device: str, changes: dict[str, Any], cold: bool, warm: bool
) -> None:
    task = tasks.task(devices=2, **changes)
    support = EngineSupport(support=Support.YES, device_type=device, distributed_backend="gloo")
    recorder, limit = Recorder(), TimeLimit(seconds=1.0, because="")
    with pytest.raises(InterruptedError):
        launch(tasks.platform(task, support=support), recorder, tasks.candidate(), str(tmp_path), limit, cold=cold)
    assert recorder.launched.warm is warm


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
    return ENGINE.probes.ranks(task, Candidate.of(knobs), tasks.costs(task))


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
    assert ENGINE.probes.ranks(task, knobs, tasks.costs(task)) == (0, 1, 3)


def test_the_stage_with_experts_is_probed_if_others_are_dense() -> None:
    """Dense layers are in the first stages; the few experts are small."""
    model = dataclasses.replace(SPARSE, moe_first_dense_layers=8)
    found = ranks(model, 8, pipeline_model_parallel_size=4, data_parallel_size=2, expert_model_parallel_size=2)
    assert any(rank // 2 >= 2 for rank in found)


def test_figures_are_medians_of_the_steps_after_the_warm_up(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_text(json.dumps(METRICS))
    found = ENGINE.probes.read(tasks.task(), str(tmp_path))
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
        ENGINE.probes.read(tasks.task(), str(tmp_path))
