"""A trial of an instance that prefills and one that decodes: real processes of a server that tests play."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from flagcore_serving.job import Load
from flagcore_serving.launch.server import Instance, TrialJob
from flagcore_serving.load.routing import P2P
from flagcore_serving.trial.__main__ import run
from flagcore_serving.trial.failures import TrialFailure
from flagcore_serving.trial.servers import listeners
from flagcore_vendorkit.programs import METRICS

from engines.serving.tests.trial.trials import SERVER, requests_sent
from flagcore.domain.trial import TrialState

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
