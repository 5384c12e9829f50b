"""Servers on several hosts. Agents of this machine stand for the hosts, and a played server for the engine."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from flagcore_hosts.connection import agent_command
from flagcore_hosts.launcher import HostsLauncher
from flagcore_serving.launch.server import log_name

from engines.serving.tests.trial import trials
from engines.serving.tests.trial.test_misbehaving_servers import all_gone
from flagcore.contracts import Platform
from flagcore.domain.spec import ClusterSpec
from flagcore.domain.trial import Role, TimeLimit, Trial, TrialState
from flagcore.tuner.stages.launch import launch
from flagcore.tuner.stages.measure import measure

pytestmark = pytest.mark.slow

HOSTS = ("127.0.0.1", "localhost")
"""Names at which the servers of this machine answer."""


def on_hosts(folder: Path, behaviour: str, **arguments: Any) -> Platform:
    """The platform of two hosts with two cores each."""
    cluster = ClusterSpec(hosts=HOSTS, nodes=2, devices_per_node=2)
    return trials.platform(folder, behaviour, nodes=2, cluster=cluster, launcher="shell", **arguments)


def run(platform: Platform, folder: Path, **values: int) -> Trial:
    """Run a candidate by agents of this machine, as the loop does."""
    launcher = HostsLauncher(name="shell", channel=lambda host: ["sh", "-c", agent_command()])
    candidate, trial_folder = trials.candidate(platform, **values), str(trials.trial_folder(folder))
    trial = Trial(number=0, candidate=candidate, role=Role.SEARCH, state=TrialState.RUNNING)
    running = launch(platform, launcher, candidate, trial_folder, TimeLimit(seconds=60.0, because="test"))
    return measure(running, platform, trial, trial_folder, None)


def test_instances_on_two_hosts_answer_one_client(tmp_path: Path) -> None:
    done = run(on_hosts(tmp_path, "good"), tmp_path, instances=3, parallel=4)
    assert done.state is TrialState.MEASURED, done.reason
    assert done.measurement is not None
    assert done.measurement.figures["output_tokens_per_s_per_device"] == pytest.approx(
        done.measurement.figures["output_tokens_per_s"] / 3
    )
    assert len({each["port"] for each in trials.requests_sent(tmp_path)}) == 3
    folders = [tmp_path / "trial", tmp_path / "trial" / "hosts" / HOSTS[1]]
    assert [[(folder / log_name(number)).exists() for number in range(3)] for folder in folders] == [
        [True, True, False],
        [False, False, True],
    ]
    assert (done.measurement.device_used_bytes or 0) > 0
    assert all_gone(tmp_path)


@pytest.mark.parametrize(
    ("behaviour", "state", "reason"),
    [
        ("out_of_memory", TrialState.OUT_OF_MEMORY, "cudaMalloc failed: out of memory"),
        ("dies", TrialState.FAILED, "exit code 3; its log: RuntimeError: the engine exploded"),
    ],
)
def test_a_failure_on_a_host_has_its_class_and_its_reason(
    behaviour: str, state: TrialState, reason: str, tmp_path: Path
) -> None:
    loads = (dataclasses.replace(trials.LOAD, num_prompts=24),)
    done = run(on_hosts(tmp_path, behaviour, loads=loads), tmp_path, instances=2, parallel=4)
    assert (done.state, done.measurement) == (state, None)
    assert reason in (done.reason or "")
    assert all_gone(tmp_path)
