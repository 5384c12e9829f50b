"""A mixed job on hosts of different speed: flagcore's own trial program with groups of one CPU chip."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.hosts.bed import ROOT, Bed, missing
from tests.hosts.conftest import FLAG

pytestmark = [pytest.mark.slow, pytest.mark.long]
CGROUP = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 20_000
SPEEDS = {1: {"fast": 0.5, "slow": 0.2}, 2: {"fast": 0.4, "slow": 0.15}}
"""The share of a core that the processes of a host have, by the number of hosts of a kind."""
SPEC: dict[str, Any] = {
    "model": {
        "name": "small",
        "num_layers": 12,
        "hidden_size": 128,
        "ffn_hidden_size": 512,
        "num_attention_heads": 4,
        "vocab_size": 512,
    },
    "train": {"engine": "megatron", "seq_length": 128, "global_batch_size": 8, "precision": "fp32"},
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
ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": 1}
"""Threads that spin while they wait use up the quota of a host."""


CANDIDATES = {
    1: {"even": (None, None), "tuned": (None, "balanced"), "slow first": ("slow + fast", None), "fast": ("fast", None)},
    2: {"even": (None, None), "tuned": (None, "balanced"), "fast": ("fast dp2", None)},
}
"""The meshes and the split of each candidate, by the number of hosts of a kind. Without meshes, hosts are stages."""


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    if reason := missing():
        pytest.skip(reason)
    mine = Bed(tmp_path_factory.mktemp("four"), 4)
    yield mine
    mine.close()


@pytest.fixture
def hosts(bed: Bed, count: int) -> Iterator[dict[str, list[str]]]:
    """The hosts of each kind, whose processes have `SPEEDS` of a core."""
    joined: dict[str, Path] = {}
    kinds = {name: list(bed.names[place * count : (place + 1) * count]) for place, name in enumerate(SPEEDS[count])}
    try:
        for name, share in SPEEDS[count].items():
            for host in kinds[name]:
                group = joined[host] = CGROUP / f"flagcore-{os.getpid()}-{host}"
                group.mkdir()
                (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (group / "cpu.cfs_quota_us").write_text(str(int(share * PERIOD_US)))
                bed.join(host, group)
        yield kinds
    except OSError as error:
        pytest.skip(f"no cgroup with a quota: {error}")
    finally:
        for host, group in joined.items():
            bed.join(host, CGROUP)
            if group.exists():
                group.rmdir()


@pytest.mark.parametrize("count", list(SPEEDS))
def test_a_tuned_split_over_fast_and_slow_hosts_is_faster_as_predicted(
    bed: Bed, hosts: dict[str, list[str]], count: int, tmp_path: Path
) -> None:
    folder = bed.folder / f"mixed-{count}"
    folder.mkdir()
    groups = []
    for name, speed in SPEEDS[count].items():
        hardware = {"chip": "cpu", "memory_per_device": "3GiB", "nic_bytes_per_second": 1e9}
        groups.append({"name": name, "speed": speed, **hardware})
    lines = [f"{host} slots=1 type={name}\n" for name, own in hosts.items() for host in own]
    (folder / "hosts.txt").write_text("".join(lines))
    control = {"train_iters": 8, "warmup_iters": 2, "max_time_per_task": 240, "repeats": 0, "max_trials": 6}
    meshes = [None, *dict.fromkeys(each for each, _ in CANDIDATES[count].values() if each)]
    stages = {"data_parallel_size": 1} if count > 1 else {}
    space = {**SIZES, **stages, "layer_split": [None, "balanced"], "meshes": meshes}
    tuner = {"launcher": "ssh", "strategy": "predicted", "control": control, "space": space}
    spec = {**SPEC, "cluster": {"hostfile": "hosts.txt", "groups": groups}, "auto_tuner": tuner, "envs": ENVIRONMENT}
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec))
    words = ("env", f"PYTHONPATH={ROOT}", *FLAG, "tune", "spec.yaml", "--run-dir", str(tmp_path / "run"))
    where = bed.command("h0", *words)
    where[where.index("--") - 1] = f"--wd={folder}"
    completed = subprocess.run(where, capture_output=True, text=True, timeout=900)
    assert completed.returncode == 0, completed.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    trials = {
        (each["candidate"]["meshes"], each["candidate"]["layer_split"]): each
        for each in result["trials"]
        if each["candidate"]["meshes"] or each["candidate"]["pipeline_model_parallel_size"] == 2 * count
    }
    found = {name: trials[key] for name, key in CANDIDATES[count].items()}
    assert {each["state"] for each in found.values()} <= {"measured", "stopped"}  # stopped: slower than the best
    even, tuned = (found[name] for name in ("even", "tuned"))
    times = [each["measured"]["step_time_s"]["steps"] for each in (even, tuned)]
    low, high = (
        even["predicted"]["step_time_s"][one] / tuned["predicted"]["step_time_s"][other]
        for one, other in (("low", "high"), ("high", "low"))
    )
    assert max(1.0, low) < min(times[0]) / min(times[1]) < high
    best = result["best"]["candidate"]
    assert best["layer_split"] or best["meshes"]
    losses = [each["measured"]["losses"] for each in found.values()]
    losses = [each[: min(map(len, losses))] for each in losses]
    np.testing.assert_allclose(losses, [losses[-1]] * len(losses), rtol=1e-5)
