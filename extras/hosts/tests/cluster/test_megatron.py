"""Megatron-LM's own `pretrain_gpt.py` with torchrun on two hosts, with faults, and the best by `flag run`."""

import os
import subprocess
import time

import pytest
import yaml

from engines.megatron.tests.command.real import ARCHITECTURE, MEGATRON, needs_megatron_lm, spec_of
from extras.hosts.tests.cluster.bed import NETWORK, SLURM, missing
from extras.hosts.tests.cluster.conftest import Project, Tune
from extras.hosts.tests.cluster.test_faults import FAULTS, all_clean, kill
from tests.checks import books_balance, check_kept_once
from tests.product.cli.conftest import FLAG

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(1200), needs_megatron_lm]
TRAINING = "--train-iters 6 --lr-warmup-iters 1 --bf16 --clip-grad 1.0 --log-interval 1 --eval-iters 0"
CANDIDATES, ITERATIONS = 3, 6


@pytest.mark.parametrize(
    ("launcher", "before", "faults"),
    [
        ("ssh", (), {"killed agent": 0.0, "cut link": 10.0, "power off": 15.0}),
        ("slurm", ("salloc", "--quiet", "--nodes=2", "--exclusive", "--no-kill"), {"killed agent": 0.0}),
        ("ray", ("env",), {"killed agent": 0.0, "killed node": 0.0}),
    ],
)
def test_a_users_torchrun_trains_on_hosts(
    launcher: str, before: tuple[str, ...], faults: dict[str, float], project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    if launcher == "slurm" and (reason := missing(*SLURM)):
        pytest.skip(reason)
    bed = project.bed
    if launcher == "slurm" and not bed.slurm:
        bed.start_slurm()
    if launcher == "ray":
        pytest.importorskip("ray")
        before = ("env", f"RAY_ADDRESS={bed.start_ray()}")
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    command = ["torchrun", "--nproc-per-node", "1", str(MEGATRON / "pretrain_gpt.py")]
    space = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": [1, 2], "micro_batch_size": [1, 2]}
    control = {"train_iters": 4, "max_trials": CANDIDATES, "max_time_per_task": 200, "compare_hosts": False}
    words = [*command, *ARCHITECTURE.split(), *TRAINING.split()]
    spec = spec_of(project.folder, control=control, space=space, command=words)
    spec["cluster"] = {"chip": "cpu", "memory_per_device": "4GiB", "devices_per_node": 1, "nodes": 2}
    spec["auto_tuner"]["launcher"] = launcher
    if launcher == "ssh":
        (project.folder / "hosts.txt").write_text("h1 slots=1\nh2 slots=1\n")
        spec["cluster"] = {"chip": "cpu", "memory_per_device": "4GiB", "hostfile": "hosts.txt"}
    (project.folder / "spec.yaml").write_text(yaml.safe_dump(spec))
    tune = Tune(project, *before)
    faults_by_name = {**FAULTS, "killed node": kill(b"raylet/raylet")}
    for number, (kind, seconds) in enumerate(faults.items()):
        hosts = tune.wait_for_a_trial(2 * number)  # the trials between them succeed
        time.sleep(8.0)
        undo = faults_by_name[kind](tune, hosts[1].replace(f"{NETWORK}.1", "h"))
        time.sleep(seconds)
        undo()
    result = tune.finish()
    assert tune.resumed == 0, tune.output()
    assert all_clean(bed, everything=True) == []
    assert result["counts"]["measured"] + result["counts"]["stopped"] == CANDIDATES, tune.output()
    assert books_balance(result)
    check_kept_once(project.run_dir, result)
    assert last_iteration(project, before) == ITERATIONS
    assert all_clean(bed, everything=True) == []


def last_iteration(project: Project, before: tuple[str, ...]) -> int:
    """Run the best configuration of a run on its hosts to the end, and return its last iteration."""
    where = project.bed.command("h0", *before, *FLAG, "run", str(project.run_dir))
    where[where.index("--") - 1] = f"--wd={project.folder}"
    done = subprocess.run(where, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split("iteration")[1] for line in done.stdout.splitlines() if "] iteration" in line]
    return int(lines[-1].split("/")[0])
