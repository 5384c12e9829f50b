"""What a user's command is given when a trial starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flagcore.engines.megatron.adapter import WORKLOAD
from flagcore.stages.launch import planned_launch
from tests import small
from tests.test_loop import SPACE


@pytest.mark.parametrize("launcher", ["local", "ssh"])
def test_a_command_can_read_the_hosts_of_its_trial(tmp_path: Path, launcher: str) -> None:
    task = small.task(space=SPACE, devices=2, command=("mpirun", "--hostfile={hostfile}", "train"))
    cluster = replace(task.spec.cluster, hosts=("a", "b", "c"), nodes=2, spares=1)
    task = replace(task, spec=replace(task.spec, cluster=cluster, launcher=launcher))
    planned = planned_launch(small.platform(task), WORKLOAD, small.candidate(), str(tmp_path))
    assert planned.argv[1] == f"--hostfile={tmp_path}/hostfile"
    assert (tmp_path / "hostfile").read_text() == "a slots=2\nb slots=2\n"
    assert planned.hosts == (() if launcher == "local" else ("a", "b"))
