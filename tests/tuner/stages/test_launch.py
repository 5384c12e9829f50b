"""What a user's command is given when a trial starts."""

from dataclasses import replace
from pathlib import Path

import pytest

from flagcore.tuner.stages.launch import planned_launch
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
