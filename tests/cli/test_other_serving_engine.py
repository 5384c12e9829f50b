"""A serving engine in a distribution of its own is found, checked and tuned without a change of flagcore."""

import os
from collections.abc import Callable

import pytest

from tests.cli.conftest import Project, Ran
from tests.plugins.conftest import Install
from tests.plugins.conftest import install as install

Flag = Callable[..., Ran]
pytestmark = pytest.mark.slow

ENGINE = '''\
"""The engine Acme: an example of the smallest profile."""

import json

import numpy as np

from flagcore.engines.serving.engine import Engine
from flagcore.engines.serving.launch.server import PORT, Instance
from flagcore.engines.serving.space import knobs
from flagcore.engines.serving.space.hardware import Hardware
from flagcore.engines.serving.space.program import Program
from flagcore.engines.serving.space.settings import Settings
from flagcore.engines.serving.launch.reports import ServerReports

SLOTS = {"help": "Most sequences at once.", "flags": ["parallel"], "aliases": ["max_num_seqs"], "auto": [1, 2, 4]}
KNOBS = knobs.read({"instances": None, "slots": {**SLOTS, "memory_order": 1}})


class AcmeProgram(Program):
    """Acme's server, which loads no Hugging Face directory."""

    def ready(self, spec):
        self.parse(spec)


PROGRAM = AcmeProgram(title="Acme", program=("acme-server",), knobs=KNOBS)


def settings(task, columns):
    get = PROGRAM.columns(task, columns)
    ones = np.ones_like(get["instances"])
    return Settings.of(
        task,
        get,
        devices=Hardware.of(task).share(get["instances"]),
        max_running=knobs.or_default(get["slots"], 4),
        max_batched_tokens=ones * 2048,
        cache_bytes=ones * 1e6,
        cache_element_bytes=ones * 2.0,
    )


def server(task, values, cores):
    command = PROGRAM.command(task.spec)
    return Instance(argv=(*command, "--port", PORT, *knobs.arguments(KNOBS, values)), environment={})


REPORTS = ServerReports(effective=lambda fetch, log: {"slots": json.loads(fetch("/props"))["total_slots"]})
WORKLOAD = Engine(
    name="acme",
    where=f"{__name__}:REPORTS",
    reports=REPORTS,
    program=PROGRAM,
    modules={},
    rules=lambda task: (),
    settings=settings,
    server=server,
    split_by="instances",
    untested="an example",
)
'''


@pytest.fixture
def acme(project: Project, install: Install, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project with the distribution on its import path, and a spec."""
    install("acme-serving", {"acme": "acme_serving:WORKLOAD"}, {"acme_serving": ENGINE}, group="flagcore.engines")
    monkeypatch.setenv("PYTHONPATH", str(project.folder), prepend=os.pathsep)  # for trials
    spec(project)
    return project


def spec(project: Project, **space: list[object]) -> None:
    project.served(behaviour="plain", engine="acme", baseline={}, strategy="learned", space=space or {"slots": [2, 4]})


def test_it_is_tuned(flag: Flag, acme: Project) -> None:
    completed = flag("tune", "spec.yaml", "--run-dir", str(acme.run_dir))
    assert completed.code == 0, completed.err
    result = acme.result()
    assert {trial["state"] for trial in result["trials"]} == {"measured"}
    measurement = {trial["candidate"].get("slots"): trial["measured"]["effective"] for trial in result["trials"]}
    assert [measurement[slots]["slots"] for slots in (2, 4)] == [2, 4]


def test_it_is_estimated_and_its_knobs_are_checked(flag: Flag, acme: Project) -> None:
    completed = flag("estimate", "spec.yaml")
    assert completed.code == 0, completed.err
    spec(acme, slot=[1])
    completed = flag("estimate", "spec.yaml")
    assert completed.code == 2
    assert "auto_tuner.space.slot" in completed.err
