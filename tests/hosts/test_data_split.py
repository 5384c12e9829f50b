"""A data split over hosts of different speed: replicas with their own number of micro-batches, in real trials."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.hosts.bed import ROOT, Bed
from tests.hosts.conftest import FLAG
from tests.hosts.quotas import quotas

pytestmark = [pytest.mark.slow, pytest.mark.long]
SPEEDS = {"fast": 0.5, "slow": 0.2}
"""The share of a core that the processes of a host have."""
SPEC: dict[str, Any] = {
    "model": {
        "name": "small",
        "num_layers": 12,
        "hidden_size": 128,
        "ffn_hidden_size": 512,
        "num_attention_heads": 4,
        "vocab_size": 512,
    },
    "train": {"engine": "megatron", "seq_length": 128, "global_batch_size": 16, "precision": "fp32"},
    "envs": {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": 1},
}
SIZES = {
    "tensor_model_parallel_size": 1,
    "context_parallel_size": 1,
    "micro_batch_size": 1,
    "sequence_parallel": False,
    "use_distributed_optimizer": False,
    "num_layers_per_virtual_pipeline_stage": None,
    "use_recompute": False,
}
EVEN, UNEQUAL = "fast x8 | slow x8", "fast x12 | slow x4"


def test_an_unequal_data_split_over_a_fast_and_a_slow_host_is_faster_as_predicted(bed: Bed, tmp_path: Path) -> None:
    folder = bed.folder / "replicas"
    folder.mkdir()
    hardware = {"chip": "cpu", "memory_per_device": "3GiB", "nic_bytes_per_second": 1e9}
    groups = [{"name": name, "speed": speed, **hardware} for name, speed in SPEEDS.items()]
    hosts = dict(zip(bed.names, SPEEDS, strict=False))
    (folder / "hosts.txt").write_text("".join(f"{host} slots=1 type={name}\n" for host, name in hosts.items()))
    control = {"train_iters": 8, "warmup_iters": 2, "max_time_per_task": 240, "repeats": 0, "max_trials": 3}
    space = {**SIZES, "meshes": [EVEN, UNEQUAL, "fast"]}
    tuner = {
        "launcher": "ssh",
        "strategy": "predicted",
        "control": control,
        "space": space,
        "baseline": {"meshes": EVEN},
    }
    spec = {**SPEC, "cluster": {"hostfile": "hosts.txt", "groups": groups}, "auto_tuner": tuner}
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec))
    words = ("env", f"PYTHONPATH={ROOT}", *FLAG, "tune", "spec.yaml", "--run-dir", str(tmp_path / "run"))
    where = bed.command("h0", *words)
    where[where.index("--") - 1] = f"--wd={folder}"
    with quotas(bed, {host: SPEEDS[name] for host, name in hosts.items()}):
        completed = subprocess.run(where, capture_output=True, text=True, timeout=900)
    assert completed.returncode == 0, completed.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    found = {each["candidate"]["meshes"]: each for each in result["trials"]}
    even, unequal = found[EVEN], found[UNEQUAL]
    times = [each["measured"]["step_time_s"]["steps"] for each in (even, unequal)]
    low, high = (
        even["predicted"]["step_time_s"][one] / unequal["predicted"]["step_time_s"][other]
        for one, other in (("low", "high"), ("high", "low"))
    )
    assert max(1.0, low) < min(times[0]) / min(times[1]) < high
    assert result["best"]["candidate"]["meshes"] == UNEQUAL
    losses = [each["measured"]["losses"] for each in found.values()]
    losses = [each[: min(map(len, losses))] for each in losses]
    np.testing.assert_allclose(losses, [losses[-1]] * len(losses), rtol=1e-5)
