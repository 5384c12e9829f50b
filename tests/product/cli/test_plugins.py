"""Effects of plugins and of engines in distributions of their own. A broken plugin is reported and affects no other."""

import json
import os

import pytest

from tests.plugins.conftest import Install
from tests.plugins.conftest import install as install
from tests.product.cli.conftest import Answer, Flag, Project
from tests.product.doc_pages import BLOCKS

pytestmark = pytest.mark.slow
BROKEN = "raise ImportError('libdriver.so.1: cannot open shared object file')"
NEWCOMER = """
import os
from dataclasses import replace
from flagcore.domain.chip import Chip, Device, Fact, Source, Support
from flagcore.domain.engine import EngineSupport, RefusedValues, TaskAdvice
from flagcore.hooks import hookimpl

SAID = Source(kind="datasheet", detail="brief, page 1")
CHIP = Chip(name="newcomer-1", vendor="newcomer", memory_bytes=Fact(value=64e9, source=SAID),
            memory_bandwidth_bytes_per_second=Fact(value=1e12, source=SAID),
            dense_flops_per_second={"bf16": Fact(value=200e12, source=SAID)})

@hookimpl
def flagcore_chips():
    return [CHIP]

@hookimpl
def flagcore_devices():
    return [Device(index=n, chip="newcomer-1", memory_bytes=64 << 30) for n in range(2)]

@hookimpl
def flagcore_engine_support(chip, engine):
    if chip.vendor == "newcomer":
        return EngineSupport(support=Support.YES, device_type="cpu", distributed_backend="gloo")

@hookimpl
def flagcore_environment(chip, engine):
    return {"NEWCOMER_FAST": "1"} if chip.vendor == "newcomer" else None

@hookimpl
def flagcore_check_task(task):
    if task.cluster.groups[0].chip.vendor == "newcomer":
        slow = RefusedValues(name="newcomer_no_tensor", knob="tensor_model_parallel_size", above=1, reason="slow")
        return TaskAdvice(rules=(slow,))
"""


def test_a_broken_plugin_is_reported_and_others_still_work(
    answer: Answer, flag: Flag, project: Project, install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("flagcore-broken", {"broken": "broken_plugin"}, {"broken_plugin": BROKEN})
    output = "plugin broken (flagcore-broken): ImportError: libdriver.so.1: cannot open shared object file"
    plugins = {plugin["name"]: plugin for plugin in answer("plugins", "list")}
    assert plugins["broken"]["status"] == "failed"
    assert plugins["broken"]["problem"] == output
    assert plugins["cpu"]["status"] == "loaded"
    caplog.clear()
    assert answer("estimate", project.spec())
    assert output in caplog.messages
    caplog.clear()
    assert answer("estimate", project.spec(), "--no-plugin", "broken")
    assert "broken" not in caplog.text
    caplog.clear()
    tuned = flag("tune", project.spec(control={"max_trials": 1, "repeats": 0}), "--run-dir", str(project.run_dir))
    assert (tuned.code, output in caplog.messages) == (0, True)
    assert [trial["state"] for trial in project.result()["trials"]] == ["measured"]


def test_an_added_plugin_changes_detection_planning_and_runs(
    answer: Answer, project: Project, install: Install
) -> None:
    install("flagcore-newcomer", {"newcomer": "newcomer_plugin"}, {"newcomer_plugin": NEWCOMER})
    assert {"newcomer-1"} <= {device["chip"] for device in answer("devices")}
    spec = project.spec(cluster={"chip": "auto", "memory_per_device": None}, control={"max_trials": 3, "repeats": 0})
    assert {row["candidate"]["tensor_model_parallel_size"] for row in answer("estimate", spec)} == {1}
    result = answer("tune", spec, "--run-dir", project.run_dir)
    assert result["chip"] == "newcomer-1"
    assert result["counts"]["illegal"]["newcomer_no_tensor"] > 0
    launch_record = json.loads((project.run_dir / "trials" / "0" / "launch.json").read_text())
    assert launch_record["environment"]["NEWCOMER_FAST"] == "1"


def test_without_plugins_there_is_no_device(
    flag: Flag, answer: Answer, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [plugin["name"] for plugin in answer("plugins", "list")]
    monkeypatch.setenv("FLAGCORE_DISABLE_PLUGINS", ",".join(names))
    assert answer("plugins", "list") == []
    for command, words in ((("estimate", project.spec()), "cluster.chip = 'cpu'"), (("devices",), "no device found")):
        completed = flag(*command)
        assert (completed.code, words in completed.err) == (4, True)


def test_chips_are_listed_with_their_aliases_and_dashes_for_unknown_facts(flag: Flag, answer: Answer) -> None:
    chips = {chip["chip"]: chip for chip in answer("plugins", "chips")}
    assert "NVIDIA H100 PCIe" in chips["H100-PCIe"]["aliases"]
    assert chips["C588"]["peak_tflops"] is None
    row = next(line for line in flag("plugins", "chips").out.splitlines() if line.startswith("C588"))
    assert row.endswith("MetaX C588, MXC588")
    assert " - " in row
    assert answer("devices")[0]["aliases"] == chips["cpu"]["aliases"]


(ENGINE,) = (block.text for block in BLOCKS if block.file == "acme_serving.py")
"""The engine of docs/write-an-engine.md."""


@pytest.fixture
def acme(project: Project, install: Install, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project with the distribution on its import path, and a spec."""
    install("acme-serving", {"acme": "acme_serving:ENGINE"}, {"acme_serving": ENGINE}, group="flagcore.engines")
    monkeypatch.setenv("PYTHONPATH", str(project.folder), prepend=os.pathsep)  # for trials
    spec(project)
    return project


def spec(project: Project, **space: list[object]) -> None:
    project.served(behaviour="plain", engine="acme", baseline={}, strategy="learned", space=space or {"slots": [2, 4]})


def test_it_is_tuned(flag: Flag, acme: Project) -> None:
    flag("tune", "spec.yaml", "--run-dir", str(acme.run_dir)).worked()
    result = acme.result()
    assert {trial["state"] for trial in result["trials"]} == {"measured"}
    measurement = {trial["candidate"].get("slots"): trial["measured"]["effective"] for trial in result["trials"]}
    assert [measurement[slots]["slots"] for slots in (2, 4)] == [2, 4]


def test_it_is_estimated_and_its_knobs_are_checked(flag: Flag, acme: Project) -> None:
    flag("estimate", "spec.yaml").worked()
    spec(acme, slot=[1])
    flag("estimate", "spec.yaml").refused(2, "auto_tuner.space.slot")
