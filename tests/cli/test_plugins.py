"""Effects of plugins; a broken one is reported and affects no other."""

import json

import pytest

from tests.cli.conftest import Answer, Flag, Project
from tests.plugins.conftest import Install
from tests.plugins.conftest import install as install

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
    flag: Flag, project: Project, install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("flagcore-broken", {"broken": "broken_plugin"}, {"broken_plugin": BROKEN})
    output = "plugin broken (flagcore-broken): ImportError: libdriver.so.1: cannot open shared object file"
    listing = flag("plugins", "list", "--json")
    assert listing.code == 0
    plugins = {plugin["name"]: plugin for plugin in json.loads(listing.out)}
    assert plugins["broken"]["status"] == "failed"
    assert plugins["broken"]["problem"] == output
    assert plugins["cpu"]["status"] == "loaded"
    caplog.clear()
    completed = flag("estimate", project.spec(), "--json")
    assert completed.code == 0, completed.err
    assert json.loads(completed.out)
    assert output in caplog.messages
    assert "Traceback" not in completed.err
    caplog.clear()
    assert flag("estimate", project.spec(), "--no-plugin", "broken").code == 0
    assert "broken" not in caplog.text


def test_an_added_plugin_changes_detection_planning_and_runs(flag: Flag, project: Project, install: Install) -> None:
    install("flagcore-newcomer", {"newcomer": "newcomer_plugin"}, {"newcomer_plugin": NEWCOMER})
    devices = json.loads(flag("devices", "--json").out)
    assert {"newcomer-1"} <= {device["chip"] for device in devices}
    spec = project.spec(cluster={"chip": "auto", "memory_per_device": None}, control={"max_trials": 3, "repeats": 0})
    estimate = flag("estimate", spec, "--json")
    assert estimate.code == 0, estimate.err
    assert {row["candidate"]["tensor_model_parallel_size"] for row in json.loads(estimate.out)} == {1}
    completed = flag("tune", spec, "--json", "--run-dir", str(project.run_dir))
    assert completed.code == 0, completed.err
    result = json.loads(completed.out)
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


def test_chips_are_listed_with_their_aliases_and_dashes_for_unknown_facts(flag: Flag) -> None:
    chips = {chip["chip"]: chip for chip in json.loads(flag("plugins", "chips", "--json").out)}
    assert "NVIDIA H100 PCIe" in chips["H100-PCIe"]["aliases"]
    assert chips["C588"]["peak_tflops"] is None
    row = next(line for line in flag("plugins", "chips").out.splitlines() if line.startswith("C588"))
    assert row.endswith("MetaX C588, MXC588")
    assert " - " in row
    assert json.loads(flag("devices", "--json").out)[0]["aliases"] == chips["cpu"]["aliases"]
