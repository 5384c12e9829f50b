"""Jobs on hosts of different speed, in real trials: flagcore's own trial program with groups of one CPU chip."""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from extras.hosts.tests.cluster.bed import FAST_NETWORK, ROOT, Bed, need
from extras.hosts.tests.cluster.conftest import Project, Tune
from flagcore.api.runs import load_snapshot
from tests.product import tasks
from tests.product.cli.conftest import FLAG, TRAIN

pytestmark = [pytest.mark.slow, pytest.mark.long]
CGROUP = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 20_000
SHARES = 1 << 18
"""The weight of a host's processes, so that others on this machine do not slow them down; 1024 is that of others."""
SPEC: dict[str, Any] = {
    "model": {
        "name": "small",
        "num_layers": 12,
        "hidden_size": 128,
        "ffn_hidden_size": 512,
        "num_attention_heads": 4,
        "vocab_size": 512,
    },
    "train": {"engine": "megatron", "seq_length": 128, "precision": "fp32"},
    "envs": {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": 1},  # threads that spin use up the quota of a host
}
SIZES = {**tasks.PLAIN_SPACE, "tensor_model_parallel_size": 1, "micro_batch_size": 1}
SPEEDS = {1: {"fast": 0.5, "slow": 0.2}, 2: {"fast": 0.4, "slow": 0.15}}
"""The share of a core that the processes of a host have, by the number of hosts of a kind."""
CANDIDATES = {
    1: {"even": (None, None), "tuned": (None, "balanced"), "slow first": ("slow + fast", None), "fast": ("fast", None)},
    2: {"even": (None, None), "tuned": (None, "balanced"), "fast": ("fast dp2", None)},
}
"""The meshes and the split of each candidate, by the number of hosts of a kind. Without meshes, hosts are stages."""


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    need()
    mine = Bed(tmp_path_factory.mktemp("four"), 4)
    yield mine
    mine.close()


@contextmanager
def quotas(bed: Bed, shares: Mapping[str, float]) -> Iterator[None]:
    """Limit the processes of each host to a share of a core. Skips the test where quotas cannot be set."""
    joined: dict[str, Path] = {}
    try:
        for host, share in shares.items():
            group = joined[host] = CGROUP / f"flagcore-{os.getpid()}-{host}"
            group.mkdir()
            (group / "cpu.shares").write_text(str(SHARES))
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(int(share * PERIOD_US)))
            bed.join(host, group)
        yield
    except OSError as error:
        pytest.skip(f"no cgroup with a quota: {error}")
    finally:
        for host, group in joined.items():
            bed.join(host, CGROUP)
            if group.exists():
                group.rmdir()


def tuned(bed: Bed, run: Path, count: int, batch: int, **tuner: Any) -> Any:
    """Tune on `count` hosts of each kind, whose processes have `SPEEDS` of a core, and return the result."""
    folder = bed.folder / run.name
    folder.mkdir()
    hardware = {"chip": "cpu", "memory_per_device": "3GiB", "nic_bytes_per_second": 1e9}
    kinds = SPEEDS[count]
    hosts = dict(zip(bed.names, (name for name in kinds for _ in range(count)), strict=False))
    (folder / "hosts.txt").write_text("".join(f"{host} slots=1 type={name}\n" for host, name in hosts.items()))
    groups = [{"name": name, "speed": speed, **hardware} for name, speed in kinds.items()]
    control = {"train_iters": 8, "warmup_iters": 2, "max_time_per_task": 240, "repeats": 0, "max_trials": 6}
    spec = {
        **SPEC,
        "cluster": {"hostfile": "hosts.txt", "groups": groups},
        "train": {**SPEC["train"], "global_batch_size": batch},
        "auto_tuner": {"launcher": "ssh", "strategy": "predicted", "control": control, **tuner},
    }
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec))
    where = bed.command("h0", "env", f"PYTHONPATH={ROOT}", *FLAG, "tune", "spec.yaml", "--run-dir", str(run))
    where[where.index("--") - 1] = f"--wd={folder}"
    with quotas(bed, {host: kinds[name] for host, name in hosts.items()}):
        completed = subprocess.run(where, capture_output=True, text=True, timeout=900)
    assert completed.returncode == 0, completed.stderr
    return json.loads((run / "result.json").read_text())


def check_faster_as_predicted(even: Any, faster: Any, others: Sequence[Any]) -> None:
    """Check the gain over an even split, and that all candidates train the same."""
    times = [min(each["measured"]["step_time_s"]["steps"]) for each in (even, faster)]
    low, high = (
        even["predicted"]["step_time_s"][one] / faster["predicted"]["step_time_s"][other]
        for one, other in (("low", "high"), ("high", "low"))
    )
    assert max(1.0, low) < times[0] / times[1] < high
    losses = [each["measured"]["losses"] for each in (even, faster, *others)]
    losses = [each[: min(map(len, losses))] for each in losses]
    np.testing.assert_allclose(losses, [losses[-1]] * len(losses), rtol=1e-5)


@pytest.mark.parametrize("count", list(SPEEDS))
def test_a_tuned_split_over_fast_and_slow_hosts_is_faster_as_predicted(bed: Bed, count: int, tmp_path: Path) -> None:
    meshes = [None, *dict.fromkeys(each for each, _ in CANDIDATES[count].values() if each)]
    stages = {"data_parallel_size": 1} if count > 1 else {}
    space = {**SIZES, **stages, "layer_split": [None, "balanced"], "meshes": meshes}
    result = tuned(bed, tmp_path / f"mixed-{count}", count, 8, space=space)
    trials = {
        (each["candidate"]["meshes"], each["candidate"]["layer_split"]): each
        for each in result["trials"]
        if each["candidate"]["meshes"] or each["candidate"]["pipeline_model_parallel_size"] == 2 * count
    }
    even, faster, *others = (trials[key] for key in CANDIDATES[count].values())
    assert {each["state"] for each in (even, faster, *others)} <= {"measured", "stopped"}  # slower than the best
    check_faster_as_predicted(even, faster, others)
    best = result["best"]["candidate"]
    assert best["layer_split"] or best["meshes"]


def test_the_links_between_hosts_are_measured_and_used(tmp_path: Path) -> None:
    need("tc")
    (tmp_path / "bed").mkdir()
    bed = Bed(tmp_path / "bed")
    for name in bed.names:
        bed.set_rate(name, "400mbit" if name != "h2" else "80mbit")
    project = Project(bed, tmp_path)
    project.write_spec(trials=1, compare=True, batch=12, nic_latency_seconds=0.001)
    tune = Tune(project)
    tune.finish()
    bed.close()
    slow = [line for line in tune.output().splitlines() if line.startswith(("h1: ", "h2: ", "h3: "))]
    assert [line[:2] for line in slow] == ["h2"]
    network = json.loads((project.run_dir / "task.json").read_text())["fixed"]["network"]
    assert network["nic_bytes_per_second"] == pytest.approx(10e6, rel=0.3)  # of h2, with one device per host
    assert 0 < network["nic_latency_seconds"] < 0.1
    chip = load_snapshot(project.run_dir, None, ()).task.cluster.groups[0].chip
    assert chip.nic_bytes_per_second is not None
    assert chip.nic_bytes_per_second.value == network["nic_bytes_per_second"]
    assert chip.nic_latency_seconds == 0.001


def test_hosts_with_two_networks_use_the_one_of_their_names(tmp_path: Path) -> None:
    need()
    (tmp_path / "bed").mkdir()
    bed = Bed(tmp_path / "bed", 2)
    bed.add_network()
    for name in bed.names:
        bed.cut(name)
    project = Project(bed, tmp_path)
    (project.folder / "hosts.txt").write_text("f1 slots=1\nf2 slots=1\n")
    (project.folder / "train.py").write_text(f"import os\nprint(os.environ['NETWORK'])\n{TRAIN}")
    project.write_spec(trials=1, compare=True, spares=0)
    spec = yaml.safe_load((project.folder / "spec.yaml").read_text())
    spec["envs"]["NETWORK"] = "{interface} {address}"
    (project.folder / "spec.yaml").write_text(yaml.safe_dump(spec))
    tune = Tune(project)
    tune.finish()
    bed.close()
    assert "cannot be compared" not in tune.output()
    logs = {number: project.run_dir / f"trials/0/hosts/f{number}/stdout.log" for number in (1, 2)}
    networks = {number: log.read_text().split("\n", 1)[0] for number, log in logs.items()}
    assert networks == {number: f"eth1 {FAST_NETWORK}.{10 + number}" for number in (1, 2)}
