"""A serving engine in a distribution of its own is found, checked and tuned without a change of flagcore."""

import os

import pytest

from tests.cli.conftest import Flag, Project
from tests.pages import BLOCKS
from tests.plugins.conftest import Install
from tests.plugins.conftest import install as install

pytestmark = pytest.mark.slow

(ENGINE,) = (block.text for block in BLOCKS if block.file == "acme_serving.py")
"""The engine of docs/write-an-engine.md."""


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
