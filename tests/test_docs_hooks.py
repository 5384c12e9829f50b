"""The pages about hooks are tested: every hook is there with its arguments, and every snippet works."""

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from flagcore import hooks
from flagcore.domain.cluster import NodeGroup
from flagcore.domain.launch import Launch
from flagcore.plugins import WORKLOADS, LoadedPlugins, names
from flagcore.testing.examples import FOREIGN_CHIP, task_on

DOCS = Path(__file__).parent.parent / "docs"
GROUPS = (hooks.ChipHooks, hooks.CostHooks, hooks.EngineHooks, hooks.TrialHooks)
SPECS = {name: spec for group in GROUPS for name, spec in vars(group).items() if name.startswith("flagcore_")}

ASK = """
import json
import numpy as np
from flagcore.domain.cluster import NodeGroup
from flagcore.plugins import load_plugins
from flagcore.testing.examples import task_on
loaded = load_plugins()
chip = loaded.find_chip("a1-64g")
(rule,) = loaded.pruning_rules(task_on(chip))
sizes = np.array([4096.0, 8192.0])
print(json.dumps({
    "failures": [str(failure) for failure in loaded.failures if "acme" in failure.name],
    "devices": [[d.index, d.memory_bytes, d.driver] for d in loaded.devices() if d.chip == "ACME A1"],
    "environment": loaded.environment(chip, "megatron"),
    "device_type": loaded.engine_support(chip, "megatron").device_type,
    "capacity": loaded.memory_model(NodeGroup(chip=chip, nodes=1, devices_per_node=8), "megatron").capacity_bytes(),
    "gemm": loaded.kernel_costs(chip, "megatron").gemm_seconds(sizes, sizes, sizes, "bf16").tolist(),
    "all_reduce": loaded.collective_costs(NodeGroup(chip=chip, nodes=1, devices_per_node=8), "megatron").seconds(
        "all_reduce", np.array([1024.0, 2.0**30]), np.array([4, 4]), np.array([1, 1])
    ).tolist(),
    "pruned": rule.prunes({"tensor_model_parallel_size": np.array([1, 4, 8])}, None).tolist(),
}))
"""


@pytest.mark.parametrize("name", SPECS)
def test_every_hook_is_documented_with_its_arguments(name: str) -> None:
    arguments = [argument for argument in inspect.signature(SPECS[name]).parameters if argument != "self"]
    assert f"## {name}({', '.join(arguments)})\n" in (DOCS / "hooks.md").read_text()


def test_no_hook_is_documented_that_does_not_exist() -> None:
    assert re.findall(r"^## (flagcore_\w+)", (DOCS / "hooks.md").read_text(), re.MULTILINE) == list(SPECS)


def test_the_examples_of_all_hooks_work_as_one_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("documented")
    monkeypatch.setitem(sys.modules, "documented", module)
    snippets = re.findall(r"```python\n(.*?)```", (DOCS / "hooks.md").read_text(), re.DOTALL)
    exec(compile("\n".join(snippets), "docs/hooks.md", "exec"), vars(module))
    loaded = LoadedPlugins.of({"acme": module})
    (plugin,) = loaded.plugins
    assert set(plugin.hooks) == set(SPECS)
    chip = loaded.find_chip("ACME A1")
    assert chip is not None
    for known in (chip, FOREIGN_CHIP):
        group, task = NodeGroup(chip=known, nodes=1, devices_per_node=8), task_on(known)
        mine = known is chip
        assert bool(loaded.topology(group)) == mine
        assert bool(loaded.memory_model(group, "megatron")) == mine
        assert bool(loaded.kernel_costs(known, "megatron")) == mine
        assert bool(loaded.collective_costs(group, "megatron")) == mine
        assert bool(loaded.environment(known, "megatron")) == mine
        assert bool(loaded.failure_patterns(known, "megatron")) == mine
        assert bool(loaded.knobs(known, "megatron")) == mine
        assert bool(loaded.pruning_rules(task)) == mine
        assert bool(loaded.prepare_launch(Launch(argv=("train",), folder="/x"), task).environment) == mine
        assert loaded.engine_support(known, "megatron").device_type == ("acme" if mine else None)
    (rule,) = loaded.pruning_rules(task_on(chip))
    assert rule.prunes({"tensor_model_parallel_size": np.array([4, 8])}, _nothing()).tolist() == [False, True]
    assert loaded.devices() == ()
    assert loaded.failures == ()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plugin of the tutorial, written from the page alone and installed into a folder of its own."""
    pytest.importorskip("hatchling", reason="building the tutorial's plugin needs hatchling")
    folder = tmp_path_factory.mktemp("tutorial")
    page = (DOCS / "write-a-plugin.md").read_text()
    for name, text in re.findall(r"\*\*`([^`]+)`\*\*\n\n```\w+\n(.*?)```", page, re.DOTALL):
        file = folder / "flagcore-acme" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (folder / "flagcore-acme" / "acme-smi").chmod(0o755)
    (folder / "flagcore-acme" / "flagcore_acme" / "py.typed").touch()
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    run([*install, "--target", str(folder / "site"), str(folder / "flagcore-acme")], folder)
    return folder


def test_the_plugin_of_the_tutorial_is_found_and_changes_every_answer(installed: Path) -> None:
    said = ask(installed)
    assert said["failures"] == []
    assert said["devices"] == [[0, 64 * 2**30, "1.2"], [1, 64 * 2**30, "1.2"]]
    assert said["environment"] == {"GEMS_VENDOR": "acme", "ACME_LAUNCH_QUEUES": "1"}
    assert said["device_type"] == "acme"
    assert said["capacity"] == 64 * 2**30
    assert said["gemm"] == pytest.approx([757e-6, 5197e-6], rel=0.03)
    assert said["all_reduce"] == pytest.approx([1.2e-5, 9.8e-3])
    assert said["pruned"] == [False, False, True]


def test_the_add_on_of_the_tutorial_overrides_the_vendors_plugin(installed: Path) -> None:
    source = (installed / "flagcore-acme" / "flagcore_site" / "hooks.py").read_text()
    site = installed / "add-on"
    (site / "flagcore_site").mkdir(parents=True)
    (site / "flagcore_site" / "hooks.py").write_text(source)
    info = site / "flagcore_site-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flagcore-site\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[flagcore.plugins]\nsite = flagcore_site.hooks\n")
    said = ask(installed, site)
    assert said["environment"] == {"GEMS_VENDOR": "acme", "ACME_LAUNCH_QUEUES": "2"}


def test_the_conformance_test_of_the_tutorial_passes(installed: Path) -> None:
    tests = installed / "flagcore-acme" / "tests"
    done = run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)], installed)
    assert " passed" in done.stdout


SPEC = """
model: {num_layers: 8, hidden_size: 1024, ffn_hidden_size: 2816, num_attention_heads: 16, vocab_size: 32000}
cluster: {chip: A1, nodes: 1, devices_per_node: 8}
train: {engine: megatron, seq_length: 1024, global_batch_size: 16, precision: bf16}
"""


def test_the_command_line_knows_the_tutorials_chip_until_the_plugin_is_switched_off(installed: Path) -> None:
    if "megatron" not in names(WORKLOADS):
        pytest.skip("flagcore itself is not installed here, so it has no engine")
    (installed / "spec.yaml").write_text(SPEC)
    flag = [sys.executable, "-c", "from flagcore.cli import main; main()"]
    devices = json.loads(run([*flag, "devices", "--format", "json"], installed).stdout)
    assert [device["chip"] for device in devices if device["plugin"] == "acme"] == ["A1", "A1"]
    best = json.loads(run([*flag, "estimate", "spec.yaml", "--format", "json"], installed).stdout)
    assert best
    without = run([*flag, "estimate", "spec.yaml", "--no-plugin", "acme"], installed, status=4)
    assert "A1" in without.stderr


def ask(installed: Path, *more: Path) -> dict[str, Any]:
    """Ask all hooks in a fresh interpreter that sees the installed plugin and its tool."""
    said: dict[str, Any] = json.loads(run([sys.executable, "-c", ASK], installed, *more).stdout)
    return said


def run(argv: list[str], installed: Path, *more: Path, status: int = 0) -> "subprocess.CompletedProcess[str]":
    path = [str(folder) for folder in (installed / "site", *more)] + [entry for entry in sys.path if entry]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "PATH": f"{installed / 'flagcore-acme'}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(
        argv, env=environment, cwd=installed, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


def _nothing() -> Any:
    """Predictions that a rule does not look at."""
    return None
