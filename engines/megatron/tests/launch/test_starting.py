"""How trials start: from a warm process, and with a smaller batch."""

from pathlib import Path
from typing import Any

import pytest
from flagcore_megatron.adapter import ENGINE

from flagcore.contracts import Launcher, RunningLaunch
from flagcore.domain.chip import Support
from flagcore.domain.engine import EngineSupport
from flagcore.domain.launch import Launch
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
