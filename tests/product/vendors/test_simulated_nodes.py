"""`flag tune` on a node that only seems to be there: its plugins, environment, launch and pruning, and trials on CPU.

A tool on the path prints what the vendor's prints. One add-on, asked before the vendor's plugin, takes its answer and
replaces the kind of device alone, so that megatron-core trains over gloo on this machine.
"""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml
from flagcore_testing import fakes

from engines.megatron.tests.trial.trial_jobs import NEEDS_MEGATRON
from tests.checks import program
from tests.product.cli.conftest import Flag, flag  # noqa: F401 (fixture)
from tests.product.tasks import PLAIN_SPACE, SHAPE

pytestmark = [NEEDS_MEGATRON, pytest.mark.slow, pytest.mark.together("training")]

ADD_ON = """
from dataclasses import replace
from importlib import import_module
from flagcore.hooks import hookimpl

@hookimpl
def flagcore_engine_support(chip, engine, engine_version, kind):
    if chip.vendor == "cpu":
        return None
    plugin = import_module(f"flagcore_{chip.vendor}.hooks").plugin
    support = plugin.flagcore_engine_support(chip, engine, engine_version, kind)
    return support and replace(support, device_type="cpu", distributed_backend="gloo", preload=())
"""
NVIDIA = "| NVIDIA-SMI 570.133.20   Driver Version: 570.133.20     CUDA Version: 12.8     |\n" + "".join(
    f"|   {n}  NVIDIA A800-SXM4-80GB          On  |   00000000:0{n}:00.0 Off |                    0 |\n"
    "| N/A   31C    P0             62W /  400W |       4MiB /  81920MiB |      0%      Default |\n"
    for n in range(4)
)
METAX = """\
=================== MetaX System Management Interface Log ===================
Attached GPUs                                     : 4
| MX-SMI 2.2.9                       Kernel Mode Driver Version: 3.4.4            |
""" + "".join(
    f"| {n}     MetaX C500 | {n}           Off | 0000:0{n}:00.0        | 0%          Disabled |\n"
    "| 57W / 350W       | 35C          P0 | 826/65536 MiB       | Available            |\n"
    for n in range(4)
)
PAIRS = """\
        GPU0    GPU1    GPU2    GPU3    Node Affinity  CPU Affinity
GPU0    X       MX      NODE    NODE    0              0-31
GPU1    MX      X       NODE    NODE    0              0-31
GPU2    NODE    NODE    X       MX      0              0-31
GPU3    NODE    NODE    MX      X       0              0-31
"""
ILUVATAR = "|  IX-ML: 4.3.0       Driver Version: 4.3.0       CUDA Version: 10.2          |\n" + "".join(
    f"| {n}    Iluvatar BI-V150         | 00000000:1{n}:00.0     | 1500MHz   1600MHz    |\n"
    "| N/A  40C   P0    N/A / N/A    | 64MiB / 32768MiB     | 0%        Default    |\n"
    for n in range(4)
)
CAMBRICON = "| CNMON v5.10.13                                               Driver v5.10.13 |\n" + "".join(
    f"| {n}     /   MLU370-X8    v1.1.6 |         0000:3{n}:00.0 | 0%                N/A |\n"
    "|  0%   32C        106 W/ 250 W |     0 MiB/ 23374 MiB | N/A           Default |\n"
    for n in range(4)
)
NODES = {
    "nvidia": ("A800-80GB", {"nvidia-smi": NVIDIA}),
    "metax": ("C500", {"mx-smi": METAX, "mx-smi topo": PAIRS, "nvidia-smi": METAX}),
    "iluvatar": ("BI-V150", {"ixsmi": ILUVATAR}),
    "cambricon": ("MLU370-X8", {"cnmon": CAMBRICON}),
}
SPEC: dict[str, Any] = {
    "model": SHAPE,
    "cluster": {"chip": "auto", "devices_per_node": "auto"},
    "train": {"engine": "megatron", "seq_length": 32, "global_batch_size": 4, "precision": "fp32"},
    "auto_tuner": {
        "baseline": {"tensor_model_parallel_size": 2, "micro_batch_size": 1},
        "space": {
            **PLAIN_SPACE,
            "tensor_model_parallel_size": [2, 4],
            "pipeline_model_parallel_size": 1,
            "micro_batch_size": 1,
        },
        "control": {"train_iters": 3, "warmup_iters": 1, "max_trials": 1, "repeats": 0},
    },
}


def node(folder: Path, tools: dict[str, str]) -> dict[str, str]:
    """Return the environment of a process on a node with these tools, and with the add-on installed."""
    site, programs = folder / "site", folder / "bin"
    info = site / "flagcore_on_cpu-1.0.dist-info"
    info.mkdir(parents=True)
    programs.mkdir()
    (site / "flagcore_on_cpu.py").write_text(ADD_ON)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flagcore-on-cpu\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[flagcore.plugins]\na_on_cpu = flagcore_on_cpu\n")
    for what, text in tools.items():
        (folder / what.replace(" ", "-")).write_text(text)
        name = what.split()[0]
        topo = folder / f"{name}-topo"
        script = f'[ "$1" = topo ] && {{ [ -e {topo} ] && exec cat {topo}; exit 1; }}\nexec cat {folder}/{name}'
        program(programs / name, script)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("GEMS_", "CUDA_", "MACA_", "MLU_"))
    }
    return {
        **environment,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": f"{site}:{os.environ.get('PYTHONPATH', '')}",
        "FLAGCORE_HOME": str(folder / "home"),
        "HOME": str(folder),
        "OMP_NUM_THREADS": "1",
    }


def run(environment: dict[str, str], folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from flagcore.cli import main; main()", *argv]
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=False, timeout=300
    )


FAKE_TOOL = """
import time
for n in range(1, 4):
    time.sleep(0.5)  # telemetry is read meanwhile
    print(f" iteration {n:8}/{3:8} | elapsed time per iteration (ms): 100.0 | lm loss: 7.0E+00 |")
"""


CASES = [
    pytest.param("metax", True, id="metax, played"),
    *(pytest.param(name, False, id=f"{name}, trained", marks=pytest.mark.long) for name in NODES),
]


@pytest.mark.costly
@pytest.mark.parametrize(("vendor", "played"), CASES)
def test_a_node_is_detected_launched_and_tuned(vendor: str, played: bool, tmp_path: Path) -> None:
    chip, tools = NODES[vendor]
    environment = node(tmp_path, tools)
    (tmp_path / "train.py").write_text(FAKE_TOOL)
    command = [sys.executable, "-S", "-E", str(tmp_path / "train.py")] if played else None
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump({**SPEC, "train": {**SPEC["train"], "command": command}}))
    completed = run(environment, tmp_path, "tune", "spec.yaml", "--run-dir", "run", "--json")
    assert completed.returncode == 0, completed.stderr
    result = json.loads(completed.stdout)
    assert (result["chip"], result["devices"]) == (chip, 4)
    assert result["counts"]["pruned"] == {}
    (trial,) = result["trials"]
    assert trial["state"] == "measured"
    assert played or trial["measured"]["effective"]["tensor_model_parallel_size"] == 2
    assert trial["measured"]["telemetry"]["temperature_celsius"] > 30
    launch = json.loads((tmp_path / "run" / "trials" / "0" / "launch.json").read_text())
    assert launch["environment"].items() >= {"GEMS_VENDOR": vendor, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}.items()


def test_a_busy_device_fails_the_trial_before_it_starts(flag: Flag, tmp_path: Path) -> None:  # noqa: F811
    control = {**SPEC["auto_tuner"]["control"], "device_wait": 0}
    spec = {**SPEC, "auto_tuner": {**SPEC["auto_tuner"], "control": control}}
    spec["train"] = {**SPEC["train"], "command": [sys.executable, "train.py"]}
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    table = NVIDIA.replace("4MiB /  81920MiB", "20992MiB /  81920MiB", 2)
    with fakes.machine({"nvidia-smi": fakes.prints(table)}):
        completed = flag("tune", "spec.yaml", "--run-dir", "run")
    assert completed.code == 5, completed.err
    (trial,) = json.loads((tmp_path / "run" / "result.json").read_text())["trials"]
    assert (trial["state"], trial["inconclusive"]) == ("failed", True)
    assert trial["reason"].startswith("device busy: device 0 has 20.5 of 80.0 GiB in use; device 1 has 20.5")
    assert not (tmp_path / "run" / "trials" / "0" / "launch.json").exists()


def test_with_two_vendors_tools_each_device_is_listed_once(
    flag: Flag,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(fakes, "quiet", nullcontext)
    with fakes.machine({tool: fakes.prints(METAX) for tool in ("mx-smi", "nvidia-smi")}):
        listed = flag("devices", "--json", "--no-plugin", "cpu")
    assert [(each["index"], each["chip"]) for each in json.loads(listed.out)] == [(n, "C500") for n in range(4)]
    assert "nvidia-smi" in caplog.text
