"""A rank whose device is slow is named by a real trial, though all ranks have the same step time."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from flagcore import api
from flagcore.domain.launch import Launch
from flagcore.launchers.local import LocalLauncher, LocalRunning
from tests.engines.megatron.trial.test_tune_for_real import SPEC

pytestmark = [
    pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra megatron"),
    pytest.mark.slow,
]

SLOWED = '''
"""The trial program on a machine whose second device is slow: its products take longer."""
import runpy, sys, time

import torch
import torch.distributed as dist

product = torch.mm

def slow(*arguments, **named):
    if dist.is_initialized() and dist.get_rank() == 1:
        time.sleep(0.05)
    return product(*arguments, **named)

torch.mm = slow
sys.argv = ["trial", *sys.argv[1:]]
runpy.run_module("flagcore.engines.megatron.trial", run_name="__main__", alter_sys=True)
'''


def test_a_slow_device_is_named_in_the_report_and_in_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, start = tmp_path / "slowed.py", LocalLauncher.start
    script.write_text(SLOWED)

    def start_slowed(self: LocalLauncher, launch: Launch) -> LocalRunning:
        return start(self, replace(launch, argv=(launch.argv[0], str(script), *launch.argv[3:])))

    monkeypatch.setattr(LocalLauncher, "start", start_slowed)
    spec: dict[str, Any] = json.loads(json.dumps(SPEC))
    spec["auto_tuner"] = {
        "space": {"data_parallel_size": 2, "micro_batch_size": 4, "use_recompute": False},
        "control": {"train_iters": 3, "max_trials": 1, "repeats": 0},
    }
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    outcome = api.tune(tmp_path / "spec.yaml", run_dir=tmp_path / "run")
    measured = outcome.data["trials"][0]["measured"]
    assert [each["device"] for each in measured["devices"]] == [0, 1]
    assert measured["devices"][1]["speed_test_s"] > measured["devices"][0]["speed_test_s"]
    (line,) = measured["slow_devices"]
    assert line.startswith("device 1 of node 0 takes ")
    assert outcome.data["slow_devices"] == {"device 1 of node 0": [outcome.data["trials"][0]["number"]]}
    assert "device 1 of node 0" in (tmp_path / "run" / "report.txt").read_text()
