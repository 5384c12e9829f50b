"""`flag` with real engines, vendors and chips."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from flagcore import api
from tests.cli.test_flag import imported
from tests.product.cli.conftest import Flag, Project, Ran

pytestmark = pytest.mark.slow


def test_planning_does_not_import_torch(project: Project) -> None:
    spec = project.spec(train={"command": None})
    assert imported(project, ("torch", "megatron.core", "sqlalchemy"), "estimate", spec) == []
    assert imported(project, ("torch", "megatron.core"), "devices") == []


def test_the_schema_and_the_doctors_report_are_data(flag: Flag) -> None:
    assert json.loads(flag("schema").out)["$defs"]["Document_megatron"]["properties"]["train"]
    parts = {part["name"]: part for part in json.loads(flag("doctor", "--json").out)}
    assert parts["flagcore"]["ok"]
    assert "pip install" in parts["torch"]["fix"] or parts["torch"]["ok"]
    assert parts["torch"]["engine"]


def test_the_doctor_begins_with_a_verdict() -> None:
    parts = [("torch", "a", True, ""), ("x", "b", True, ""), ("b1", "b", False, "pip install b")]
    parts.append(("p", "", False, ""))
    records = [{"name": name, "engine": engine, "ok": ok, "fix": fix, "for": ""} for name, engine, ok, fix in parts]
    ready, missing, others = api.verdict(records).splitlines()
    assert (ready.endswith(" a."), "b: pip install b" in missing, "p (" in others) == (True, True, True)
    assert not api.verdict(records[1:3]).startswith("Ready")


def test_a_plan_for_a_model_on_a_machine_without_accelerators_needs_a_chip(flag: Flag) -> None:
    flag("estimate", "--model", "Qwen/Qwen3-8B").refused(2, "--chip cpu")


def test_a_failing_vendor_tool_is_reported_and_the_cpu_is_not_used_instead(
    flag: Flag, project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho driver mismatch\nexit 18\n")
    tool.chmod(0o755)
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
