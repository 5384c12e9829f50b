"""What a user's command is given when a trial starts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flagcore.contracts import Launcher, RunningLaunch
from flagcore.domain.chip import Support
from flagcore.domain.engine import EngineSupport
from flagcore.domain.launch import Launch
from flagcore.domain.spec import Control
from flagcore.domain.trial import TimeLimit
from flagcore.tuner.launches import planned_launch
from flagcore.tuner.stages.launch import launch
from tests import tasks
from tests.tuner.benches import SPACE


@pytest.mark.parametrize("launcher", ["local", "ssh"])
def test_a_command_can_read_the_hosts_of_its_trial(tmp_path: Path, launcher: str) -> None:
    task = tasks.task(space=SPACE, devices=2, command=("mpirun", "--hostfile={hostfile}", "train"))
    cluster = replace(task.spec.cluster, hosts=("a", "b", "c"), nodes=2, spares=1)
    task = replace(task, spec=replace(task.spec, cluster=cluster, launcher=launcher))
    planned = planned_launch(tasks.platform(task), tasks.candidate(), str(tmp_path))
    assert planned.argv[1] == f"--hostfile={tmp_path}/hostfile"
    assert (tmp_path / "hostfile").read_text() == "a slots=2\nb slots=2\n"
    assert planned.hosts == (() if launcher == "local" else ("a", "b"))


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
    task = tasks.task(space=SPACE, devices=2, **changes)
    support = EngineSupport(support=Support.YES, device_type=device, distributed_backend="gloo")
    recorder, limit = Recorder(), TimeLimit(seconds=1.0, because="")
    with pytest.raises(InterruptedError):
        launch(tasks.platform(task, support=support), recorder, tasks.candidate(), str(tmp_path), limit, cold=cold)
    assert recorder.launched.warm is warm
