"""Choices that are measured on a vendor's device: the planted optimum of its collective and of its operator library.
The devices of a vendor that no plugin of this repository knows, as its tool lists them."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from extras.operators.tests.planted import BEST
from extras.operators.tests.test_libraries import install
from extras.operators.tests.test_libraries import spec as operators_spec
from tests.product.accelerator.machine import Machine

pytestmark = pytest.mark.slow

MODEL = {"num_layers": 2, "hidden_size": 256, "ffn_hidden_size": 512, "num_attention_heads": 4, "vocab_size": 1024}
STEP = r"step (?P<step>\d+) took (?P<ms>[\d.]+) ms"
PROGRAM = """
import time

import torch
import torch.distributed as dist
import torch_simu

dist.init_process_group("simuccl")
torch.simu.set_device(dist.get_rank())
value = torch.zeros(1 << 15, device="simu")
for step in range(1, 7):
    start = time.perf_counter()
    for _ in range(8):
        dist.all_reduce(value)
    if dist.get_rank() == 0:
        print(f"step {step} took {1e3 * (time.perf_counter() - start):.3f} ms", flush=True)
dist.destroy_process_group()
"""


def spec(folder: Path) -> dict[str, Any]:
    """Return a job of two ranks whose program exchanges gradients."""
    tensor = {"flag": "--tp", "values": [2], "meaning": "tensor_model_parallel_size"}
    train = {"engine": "command", "seq_length": 128, "global_batch_size": 4, "precision": "fp32"}
    program = {"knobs": {"tp": tensor}, "log": {"step": STEP}}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "exchange.py"]
    control = {"train_iters": 6, "warmup_iters": 1, "max_trials": 2, "repeats": 0}
    return {
        "model": MODEL,
        "cluster": {"chip": "auto", "devices_per_node": 2},
        "train": {**train, "command": command, "directory": str(folder), "program": program},
        "auto_tuner": {"control": control},
        "envs": {"OMP_NUM_THREADS": 1, "SIMUCCL_NETWORK": "slow"},
    }


def compared(machine: Machine, *options: str) -> dict[str, Any]:
    """Run the comparison, and return its rows by setting."""
    limits = ("--collectives", "exchange.yaml", "--seconds", "150", "--json")
    rows = json.loads(machine.flag("calibrate", *limits, *options).stdout)
    return {row["setting"]: row for row in rows}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_planted_optimum_is_found_and_confirmed(built: Machine) -> None:
    (built.folder / "exchange.py").write_text(PROGRAM)
    (built.folder / "exchange.yaml").write_text(yaml.safe_dump(spec(built.folder)))
    rows = compared(built)
    excluded = {name: row["excluded"] for name, row in rows.items() if row["excluded"]}
    assert excluded.keys() == {
        f"SIMUCCL_{name}" for name in ("SUMS=fp8", "PROTO=LL", "TRANSPORT=rdma", "SHM_DISABLE=1")
    }
    assert "wrong" in excluded["SIMUCCL_PROTO=LL"]
    assert "timed out" in excluded["SIMUCCL_SHM_DISABLE=1"]
    best = "SIMUCCL_CHANNELS=4 SIMUCCL_PROTO=LL128"
    assert min((row["time"], name) for name, row in rows.items() if not row["excluded"])[1] == best
    (file,) = (built.folder / "home" / "choices").glob("collectives-*.json")
    choice = json.loads(file.read_text())
    variables = {"SIMUCCL_CHANNELS": "4", "SIMUCCL_PROTO": "LL128"}
    assert choice["environment"] == variables
    assert choice["time"][0] < 0.6

    space = ("--set", "auto_tuner.space.collectives=auto")
    built.flag("tune", "exchange.yaml", "--run-dir", "exchange", *space)
    result = json.loads((built.folder / "exchange" / "result.json").read_text())
    assert [each["candidate"]["collectives"] for each in result["trials"]] == [None, "calibrated"]
    assert result["best"]["candidate"]["collectives"] == "calibrated"
    launch = json.loads((built.folder / "exchange" / "trials" / "1" / "launch.json").read_text())
    assert launch["environment"].items() >= variables.items()
    script = (built.folder / "exchange" / "best.sh").read_text()
    assert all(f"{name}={value}" in script for name, value in variables.items())
    built.flag("tune", "exchange.yaml", "--run-dir", "own", *space, status=2, SIMUCCL_CHANNELS="8")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_planted_optimum_is_found_on_the_device(built: Machine) -> None:
    site = built.folder / "operators"
    install(site)
    variables = {"PYTHONPATH": f"{site}:{built.environment['PYTHONPATH']}"}
    planted = {"PLANTED_KEY": "PrivateUse1", "PLANTED_DEVICE": "simu", "PLANTED_PRELOAD": "torch_simu"}
    job: dict[str, Any] = operators_spec(built.folder, **planted)
    (built.folder / "operators.yaml").write_text(yaml.safe_dump(job))
    limits = ("--library", "planted", "--seconds", "60", "--json")
    rows = json.loads(built.flag("operators", "operators.yaml", *limits, **variables).stdout)
    best = {**BEST, "neg": "avoided"}  # here no vendor says that it is wrong
    assert {row["operator"]: row["chosen"] for row in rows if row["chosen"] != row["default"]} == best
    space = ("--set", "auto_tuner.space.planted_operators=auto")
    built.flag("tune", "operators.yaml", "--run-dir", "planted", *space, **variables)
    result = json.loads((built.folder / "planted" / "result.json").read_text())
    assert (result["chip"], len(result["trials"])) == ("S1", 2)
    assert result["best"]["candidate"]["planted_operators"] == "calibrated"


@pytest.mark.together("training")
def test_a_variable_selects_the_devices_and_their_order(simulated: Machine) -> None:
    listed = simulated.flag("devices", "--json", "--no-plugin", "cpu", SIMU_VISIBLE_DEVICES="3,1").stdout
    assert [(each["index"], each["chip"], each["plugin"]) for each in json.loads(listed)] == [
        (3, "S1", "simu"),
        (1, "S1", "simu"),
    ]


@pytest.mark.together("training")
@pytest.mark.long
def test_the_plugin_passes_the_kit(simulated: Machine) -> None:
    report = simulated.flag("plugins", "check", "flagcore-simu").stdout
    assert re.match(r"simu 0\.1\.0: \d{2,} passed, 0 failed", report)
