"""`flag plugins new` and `flag plugins check`: a new plugin passes, and faults are reported with a fix. Effects of
plugins and of engines in distributions of their own. A broken plugin is reported and affects no other. `flag` with real
engines, vendors and chips."""

import json
import os
import re
from collections.abc import Callable
from importlib.metadata import metadata
from pathlib import Path

import psutil
import pytest
import yaml

from flagcore import api
from tests.checks import given, program
from tests.cli.test_tune import imported
from tests.plugins.conftest import Install
from tests.plugins.conftest import install as install
from tests.product.block_checks import BLOCKS
from tests.product.cli.conftest import Answer, Flag, Project, Ran

pytestmark = pytest.mark.slow
Failures = Callable[[], list[dict[str, str]]]


@pytest.fixture
def acme(flag: Flag, tmp_path: Path) -> Path:
    """A new plugin, as it is written."""
    completed = flag("plugins", "new", "acme", "--vendor", "ACME", "--directory", str(tmp_path)).worked()
    assert f"pip install -e {completed.out.strip()} && flag plugins check {completed.out.strip()}" in completed.err
    return Path(completed.out.strip())


@pytest.fixture
def failures(flag: Flag, acme: Path) -> Failures:
    """Check the new plugin, in which something is wrong, and return the failures."""

    def check() -> list[dict[str, str]]:
        completed = flag("plugins", "check", str(acme), "--format", "json")
        assert completed.code == 4
        found: list[dict[str, str]] = json.loads(completed.out)["plugins"][0]["failures"]
        return found

    return check


@pytest.mark.costly
def test_a_new_plugin_with_all_options_passes_every_check_and_lists_its_placeholders(
    flag: Flag, tmp_path: Path
) -> None:
    detection = ("--tool", "ac-gmi info", "--visible", "AC_RT_VISIBLE", "--torch-device", "tpx", "--backend", "accl")
    detection += ("--preload", "torch_tpx", "--preload", "acme.adaptor")
    chips = ("--chip", "A1", "--chip", "B2")
    created = flag("plugins", "new", "acme", *chips, *detection, "--directory", str(tmp_path)).worked()
    completed = flag("plugins", "check", created.out.strip()).worked()
    assert int(given(re.match(r"acme 0\.1\.0: (\d+) passed, 0 failed", completed.out))[1]) >= 40
    assert "to fill in:" in completed.out
    assert "flagcore_acme/chips/a1.yaml:5" in completed.out


@pytest.mark.parametrize(
    ("hook", "reported"),
    [
        ("import os; os.kill(os.getpid(), 11)", "SIGSEGV"),
        ("import os; os._exit(0)", "exit status 0 ended the process"),
        ("raise ImportError('libacme.so.1')", "libacme.so.1"),
    ],
)
def test_a_plugin_that_crashes_or_does_not_load_is_a_failed_check(
    failures: Failures, acme: Path, hook: str, reported: str
) -> None:
    hooks = acme / "flagcore_acme/hooks.py"
    hooks.write_text(hooks.read_text().replace("from __future__ import annotations\n", f"{hook}\n"))
    (failure,) = failures()
    assert failure["check"] == "plugin_loads"
    assert reported in failure["message"]


@pytest.mark.parametrize(("old", "reported"), [("[project]", "is not TOML"), ("flagcore.plugins", "names no plugin")])
def test_a_broken_pyproject_is_a_failed_check(failures: Failures, acme: Path, old: str, reported: str) -> None:
    file = acme / "pyproject.toml"
    file.write_text(file.read_text().replace(old, old[:-1], 1))
    (failure,) = failures()
    assert reported in failure["message"]
    assert failure["fix"]


def test_a_hanging_check_is_aborted(failures: Failures, acme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flagcore_testing.runner.CHECK_SECONDS", 8.0)
    hooks = acme / "flagcore_acme/hooks.py"
    endless = """

from flagcore.hooks import hookimpl

class Endless(VendorPlugin):
    @hookimpl
    def flagcore_check_task(self):
        import time
        time.sleep(100)

plugin = Endless(**vars(plugin))
"""
    hooks.write_text(hooks.read_text() + endless)
    assert "it took more than 8 s" in failures()[-1]["message"]
    left = [each for each in psutil.process_iter(["cmdline"]) if str(acme) in " ".join(each.info["cmdline"] or ())]
    assert not psutil.wait_procs(left, timeout=5)[1]


@pytest.mark.costly
def test_installed_plugins_are_checked_by_name(flag: Flag) -> None:
    (plugin,) = json.loads(flag("plugins", "check", "cpu", "--format", "json").out)["plugins"]
    assert list(plugin) == ["name", "version", "passed", "failed", "skipped", "failures", "by_hand"]
    assert (plugin["name"], plugin["failed"], plugin["failures"]) == ("cpu", 0, [])
    assert plugin["by_hand"]


def test_an_unknown_plugin_is_reported_with_the_nearest(flag: Flag, tmp_path: Path) -> None:
    completed = flag("plugins", "check", "metaxx")
    assert (completed.code, "did you mean metax?" in completed.err) == (2, True)
    assert flag("plugins", "check", str(tmp_path)).code == 2
    assert flag("plugins", "check", "cpu", "--all").code == 2


def test_existing_files_are_not_overwritten(flag: Flag, acme: Path) -> None:
    readme_before = (acme / "README.md").read_text()
    completed = flag("plugins", "new", "acme", "--directory", str(acme.parent))
    assert (completed.code, "exists already" in completed.err) == (2, True)
    assert (acme / "README.md").read_text() == readme_before


@pytest.mark.parametrize(
    ("option", "word"),
    [
        *(("NAME", name) for name in ("Acme", "1acme", "ac-me", "class", "cpu", "", "../up")),
        ("--chip", "cpu"),
        ("--chip", "A 1"),
        ("--chip", "a1"),
        ("--vendor", 'A"B'),
        ("--vendor", ""),
        ("--tool", ""),
        ("--tool", "/opt/acme-smi"),
        ("--tool", "acme-smi  'info'"),
        ("--visible", "ACME VISIBLE"),
        ("--torch-device", "NPU"),
        ("--backend", ""),
        ("--preload", "torch-acme"),
    ],
)
def test_what_another_plugin_has_and_invalid_values_are_refused(
    flag: Flag, tmp_path: Path, option: str, word: str
) -> None:
    arguments = (word,) if option == "NAME" else ("acme", "--chip", "A1", option, word)
    completed = flag("plugins", "new", *arguments, "--directory", str(tmp_path))
    assert (completed.code, f"{option} {word!r}" in completed.err) == (2, True)
    assert list(tmp_path.iterdir()) == []


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
def acme_project(project: Project, install: Install, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project with the distribution on its import path, and a spec."""
    install("acme-serving", {"acme": "acme_serving:ENGINE"}, {"acme_serving": ENGINE}, group="flagcore.engines")
    monkeypatch.setenv("PYTHONPATH", str(project.folder), prepend=os.pathsep)  # for trials
    spec(project)
    return project


def spec(project: Project, **space: list[object]) -> None:
    project.served(behaviour="plain", engine="acme", baseline={}, strategy="learned", space=space or {"slots": [2, 4]})


@pytest.mark.costly
def test_it_is_tuned(flag: Flag, acme_project: Project) -> None:
    flag("tune", "spec.yaml", "--run-dir", str(acme_project.run_dir)).worked()
    result = acme_project.result()
    assert {trial["state"] for trial in result["trials"]} == {"measured"}
    measurement = {trial["candidate"].get("slots"): trial["measured"]["effective"] for trial in result["trials"]}
    assert [measurement[slots]["slots"] for slots in (2, 4)] == [2, 4]


def test_it_is_estimated_and_its_knobs_are_checked(flag: Flag, acme_project: Project) -> None:
    flag("estimate", "spec.yaml").worked()
    spec(acme_project, slot=[1])
    flag("estimate", "spec.yaml").refused(2, "auto_tuner.space.slot")


@pytest.mark.costly
def test_planning_does_not_import_torch_or_parts_that_only_programs_need(project: Project) -> None:
    parts = "bridge flagscale hosts kubernetes ray page rl importers.reader megatron.importing"
    unused = ("torch", "megatron.core", "sqlalchemy", *(f"flagcore_{each}" for each in parts.split()))
    spec = project.spec(train={"command": None})
    assert imported(project, (*unused, "flagcore_serving"), "estimate", spec) == []
    server = ("--model", "Qwen/Qwen3-0.6B", "--chip", "H20", "--devices", "1")
    assert imported(project, (*unused, "packaging.requirements", "flagcore_training"), "estimate", *server) == []
    assert imported(project, ("torch", "megatron.core"), "devices") == []


@pytest.mark.costly
def test_the_schema_and_the_doctors_report_are_data(flag: Flag) -> None:
    assert json.loads(flag("schema").out)["$defs"]["Document_megatron"]["properties"]["train"]
    parts = {part["name"]: part for part in json.loads(flag("doctor", "--json").out)}
    assert parts["flagcore"]["ok"]
    assert "pip install" in parts["torch"]["fix"] or parts["torch"]["ok"]
    assert parts["torch"]["engine"]
    advised = {extra for part in parts.values() for extra in re.findall(r"flagcore\[(.*)\]", part["fix"] or "")}
    assert advised <= {*(metadata("flagcore").get_all("Provides-Extra") or ())}
    assert parts["trl"]["ok"] or "install trl" in parts["trl"]["fix"]  # an engine needs its framework


def test_the_doctor_begins_with_a_verdict() -> None:
    parts = [("torch", "a", True, ""), ("x", "b", True, ""), ("b1", "b", False, "pip install b")]
    parts.append(("p", "", False, ""))
    records = [{"name": name, "engine": engine, "ok": ok, "fix": fix, "for": ""} for name, engine, ok, fix in parts]
    ready, missing, others = api.verdict(records).splitlines()
    assert (ready.endswith(" a."), "b: pip install b" in missing, "p (" in others) == (True, True, True)
    assert not api.verdict(records[1:3]).startswith("Ready")


def test_a_plan_for_a_model_on_a_machine_without_accelerators_needs_a_chip(flag: Flag) -> None:
    flag("estimate", "--model", "Qwen/Qwen3-8B").refused(2, "--chip cpu")
    flag("run", "nowhere", "--chip", "auto").refused(2, "nowhere does not exist")
    flag("run", ".", "--chip", "auto", "--restarts", "1").refused(2, "are for runs")


def test_a_failing_vendor_tool_is_reported_and_the_cpu_is_not_used_instead(
    flag: Flag, project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = program(tmp_path / "bin" / "nvidia-smi", "echo driver mismatch\nexit 18")
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    output = [part["fix"] for part in json.loads(flag("doctor", "--json").out) if not part["ok"]]
    assert any("nvidia-smi failed with exit status 18: driver mismatch" in line for line in output)
    flag("estimate", project.spec(cluster={"chip": "auto"})).refused(4, "driver mismatch", "cluster.chip: cpu")


def test_keys_of_a_spec_can_be_set(flag: Callable[..., Ran], project: Project) -> None:
    spec = project.spec()
    changes = ("--set", "cluster.devices_per_node=4", "--set", "auto_tuner.space.micro_batch_size=[1]")
    changes += ("--set", "cluster.memory_per_device=null")
    row, *_ = json.loads(flag("estimate", spec, *changes, "--json").out)
    assert row["candidate"]["micro_batch_size"] == 1
    folder = str(project.folder / "run")
    flag("tune", spec, *changes, "--chip", "H100-SXM", "--fidelity", "estimate", "--run-dir", folder, "--json").worked()
    saved = yaml.safe_load((project.folder / "run" / "spec.yaml").read_text())
    assert saved["cluster"] | {"chip": "H100-SXM", "devices_per_node": 4} == saved["cluster"]
    assert flag("explain", folder, *changes).code == 2
