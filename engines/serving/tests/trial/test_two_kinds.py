"""Trials of servers on several hosts, and of an instance that prefills and one that decodes: real processes."""

import dataclasses
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from flagcore_hosts.connection import agent_command
from flagcore_hosts.launcher import HostsLauncher
from flagcore_serving.job import Load
from flagcore_serving.launch.server import Instance, TrialJob, log_name
from flagcore_serving.load.routing import P2P
from flagcore_serving.trial.__main__ import run
from flagcore_serving.trial.failures import TrialFailure
from flagcore_serving.trial.servers import listeners
from flagcore_vendorkit.metrics import METRICS

from engines.serving.tests.trial import trials
from engines.serving.tests.trial.test_misbehaving_servers import all_gone
from engines.serving.tests.trial.trials import SERVER, requests_sent
from flagcore.contracts import Platform
from flagcore.domain.spec import ClusterSpec
from flagcore.domain.trial import Role, TimeLimit, Trial, TrialState
from flagcore.tuner.stages.launch import launch
from flagcore.tuner.stages.measure import measure

pytestmark = pytest.mark.slow

LOAD = Load(input_len=16, output_len=8, num_prompts=8, concurrency=4)
ENGINE = "flagcore_llamacpp.reports:REPORTS"


def job(folder: Path, behaviour: str) -> TrialJob:
    """A job with one instance of each kind; the one that decodes has `behaviour`."""
    instances = [
        Instance(argv=(sys.executable, str(SERVER), each, "--port", "{port}", "--parallel", "4"), kind=kind)
        for kind, each in (("prefill", "good"), ("decode", behaviour))
    ]
    return TrialJob(
        engine=ENGINE,
        instances=tuple(instances),
        loads=(LOAD,),
        vocab_size=100,
        timeout_s=60.0,
        directory=str(folder),
        protocol=P2P,
    )


def test_each_request_passes_both_instances_and_all_processes_end(tmp_path: Path) -> None:
    run(job(tmp_path, "good"), tmp_path)
    (point,) = json.loads((tmp_path / METRICS).read_text())["points"]
    assert point["repeats"][0]["completed"] == LOAD.num_prompts
    ports = Counter(each["port"] for each in requests_sent(tmp_path))
    assert len(ports) == 2
    assert len(set(ports.values())) == 1
    assert all(listeners(port) == [] for port in ports)


def test_a_dead_instance_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrialFailure) as caught:
        run(job(tmp_path, "dies"), tmp_path)
    assert caught.value.state is TrialState.FAILED
    assert "instance 1" in str(caught.value)


HOSTS = ("127.0.0.1", "localhost")
"""Names at which the servers of this machine answer."""


def on_hosts(folder: Path, behaviour: str, **arguments: Any) -> Platform:
    """The platform of two hosts with two cores each."""
    cluster = ClusterSpec(hosts=HOSTS, nodes=2, devices_per_node=2)
    return trials.platform(folder, behaviour, nodes=2, cluster=cluster, launcher="shell", **arguments)


def run_on_hosts(platform: Platform, folder: Path, **values: int) -> Trial:
    """Run a candidate by agents of this machine, as the loop does."""
    launcher = HostsLauncher(name="shell", channel=lambda host: ["sh", "-c", agent_command()])
    candidate, trial_folder = trials.candidate(platform, **values), str(trials.trial_folder(folder))
    trial = Trial(number=0, candidate=candidate, role=Role.SEARCH, state=TrialState.RUNNING)
    running = launch(platform, launcher, candidate, trial_folder, TimeLimit(seconds=60.0, because="test"))
    return measure(running, platform, trial, trial_folder, None)


def test_instances_on_two_hosts_answer_one_client(tmp_path: Path) -> None:
    done = run_on_hosts(on_hosts(tmp_path, "good"), tmp_path, instances=3, parallel=4)
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
    done = run_on_hosts(on_hosts(tmp_path, behaviour, loads=loads), tmp_path, instances=2, parallel=4)
    assert (done.state, done.measurement) == (state, None)
    assert reason in (done.reason or "")
    assert all_gone(tmp_path)
