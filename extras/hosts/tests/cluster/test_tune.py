"""`flag tune` over hosts, by ssh and by Slurm: faults, secrets and ports. Slurm's own check accepts exported scripts,
and best.sh of a plan starts on the nodes of a job."""

import json
import os
import re
import stat
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from extras.hosts.tests.cluster.bed import Bed
from extras.hosts.tests.cluster.conftest import SECRET, Project, Tune
from extras.hosts.tests.cluster.test_faults import HOSTS_LOST, all_clean
from flagcore import api
from flagcore.launchers import guard
from tests.checks import books_balance, check_kept_once
from tests.product.cli.conftest import BEST
from tests.product.tasks import SHAPE

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_without_a_spare_the_search_continues_on_the_hosts_that_are_left(project: Project) -> None:
    bed = project.bed
    project.write_spec(
        sleeps=0.5, trials=3, repeats=1, batch=12, min_nodes=2, wait_for_hosts=5, nic_bytes_per_second=1e9
    )
    tune = Tune(project)
    assert tune.wait_for_a_trial(1) == [*bed.names]
    bed.poweroff("h3")
    result = tune.finish()
    assert tune.resumed == 0, tune.output()
    nodes = [(trial["shortened"] or {"nodes": 3})["nodes"] for trial in result["trials"]]
    assert (nodes[0], set(nodes[1:])) == (3, {2})
    assert result["best"]["shortened"]["nodes"] == 2
    assert result["best"]["measured"]["step_time_s"]["scaled_from"]
    assert books_balance(result)
    check_kept_once(project.run_dir, result)


@pytest.mark.long
@pytest.mark.parametrize("loss", ["node", "tune"])
def test_a_tune_goes_on_in_another_allocation_of_slurm(loss: str, project: Project) -> None:
    bed = project.bed
    bed.need_slurm()
    project.write_spec(sleeps=3.0, launcher="slurm", trials=4, spares=1, wait_for_hosts=5)
    tune = Tune(project, "salloc", "--quiet", "--nodes=3", "--exclusive")
    hosts = tune.wait_for_a_trial(1)
    if loss == "node":  # Slurm ends the job, and the node registers again
        bed.run("h0", "scontrol", "update", f"nodename={hosts[1]}", "state=down", "reason=test")
        assert tune.process.wait() == HOSTS_LOST, tune.output()
    else:
        tune.kill()
    assert all_clean(bed, everything=True) == []
    tune.resume()
    result = tune.finish()
    assert tune.resumed == 1, tune.output()
    assert all_clean(bed, everything=True) == []
    assert result["best"]["candidate"].items() >= BEST.items()
    assert books_balance(result)
    check_kept_once(project.run_dir, result)


@pytest.mark.costly
def test_secrets_stay_secret_and_agents_listen_on_no_port(project: Project) -> None:
    bed = project.bed
    before = {host: bed.listening(host) for host in bed.names}
    project.write_spec(sleeps=2.0, trials=1)
    tune = Tune(project)
    hosts = tune.wait_for_a_trial(0)
    while not all((project.run_dir / "trials/0/stdout.log").exists() and programs(bed, host) for host in hosts):
        time.sleep(0.1)
    for host in ("h0", *hosts):
        assert not [pid for pid in bed.processes(host) if SECRET.encode() in guard.read_proc(pid, "cmdline")]
    for host in hosts:
        assert [*(bed.root(host) / "tmp").glob("flagcore-*")]
        assert not [file for folder in ("tmp", "run") for file in shows_secret(bed.root(host) / folder)]
        assert bed.listening(host) == before[host]
    tune.finish()
    assert not shows_secret(project.run_dir)


def programs(bed: Bed, host: str) -> list[int]:
    return [pid for pid in bed.processes(host) if b"train.py" in guard.read_proc(pid, "cmdline")]


def shows_secret(folder: Path) -> list[Path]:
    """Return the files below a folder that every user can read, and that contain the secret.

    Mounted folders are those of this machine, such as the checkout.
    """
    found = []
    for where, names, files in os.walk(folder):
        status = os.stat(where)
        if status.st_dev != os.stat(folder).st_dev or not status.st_mode & stat.S_IXOTH:
            names.clear()
            continue
        for file in (Path(where, name) for name in files):
            if file.is_file() and file.stat().st_mode & stat.S_IROTH and SECRET in file.read_text(errors="ignore"):
                found.append(file)
    return found


TRAIN: dict[str, Any] = {"engine": "megatron", "seq_length": 64, "global_batch_size": 12, "precision": "fp32"}
SERVE: dict[str, Any] = {"engine": "vllm", "profile": {"input_len": 8, "output_len": 8, "concurrency": 4}}
MIXED = {"nodes": 1, "devices_per_node": 2, "nic_bytes_per_second": 1e10}
OWN = ["torchrun", "--nproc-per-node", "2", "train.py", "{flags}"]


@pytest.mark.parametrize(
    ("nodes", "work"),
    [
        (1, {"train": TRAIN}),
        (3, {"train": TRAIN}),
        (2, {"train": {**TRAIN, "command": OWN}}),
        (1, {"serve": SERVE}),
        (1, {"cluster": {"groups": [{**MIXED, "chip": chip} for chip in ("H20", "A800-80GB")]}, "train": TRAIN}),
    ],
)
def test_sbatch_accepts_an_exported_script(bed: Bed, nodes: int, work: dict[str, Any], tmp_path: Path) -> None:
    bed.need_slurm()
    cluster = {"chip": "cpu", "nodes": nodes, "devices_per_node": 2, "memory_per_device": "8GiB"}
    space = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
    spec = tmp_path / "spec.yaml"
    spec.write_text(json.dumps({"model": SHAPE, "cluster": cluster, **work, "auto_tuner": {"space": space}}))
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = {"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 64, "vocab_size": 64, **heads}
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(model))
    if "serve" in work:
        spec.write_text(spec.read_text().replace(json.dumps(SHAPE), json.dumps(str(tmp_path / "m"))))
    (file,) = api.export(spec, "slurm", output=tmp_path / "out", name="job").files
    assert "to start at" in bed.run("h0", "sh", "-c", f"sbatch --test-only {file} 2>&1")


@pytest.mark.long
def test_an_exported_server_starts_on_all_nodes_of_a_job(bed: Bed, tmp_path: Path) -> None:
    bed.need_slurm()
    folder = bed.folder / tmp_path.name
    folder.mkdir()
    cluster, space = (
        {"chip": "H100-SXM", "nodes": 2, "devices_per_node": 4},
        {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 4},
    )
    spec = {"model": "Qwen/Qwen3-8B", "cluster": cluster, "serve": {"engine": "vllm"}, "auto_tuner": {"space": space}}
    (folder / "spec.yaml").write_text(json.dumps(spec))
    (file,) = api.export(folder / "spec.yaml", "slurm", output=folder / "out", name="job").files
    assert "to start at" in bed.run("h0", "sh", "-c", f"sbatch --test-only {file} 2>&1")
    shown = '"$NODE_RANK $VLLM_HOST_IP $GLOO_SOCKET_IFNAME $*"'
    (folder / "vllm").write_text(f"#!/bin/sh\necho {shown} > {folder}/$(hostname)\nsleep 4\n")
    (folder / "vllm").chmod(0o755)
    path = f"{folder}:{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin:/sbin"
    words = ("env", f"PATH={path}", "sbatch", "--wait", f"--output={folder}/log", str(file))
    with bed.start("h0", *words) as job:
        assert job.wait(60), (folder / "log").read_text()  # a server that ends is a failure
    for rank, host in enumerate(("h1", "h2")):
        words = tuple((folder / host).read_text().split())
        assert words[:3] == (str(rank), f"10.77.0.{11 + rank}", "eth0")
        assert {"--master-addr", "h1", "--headless"} & {*words} == {"--master-addr", "h1", *["--headless"] * rank}


TRAINING = """\
import os
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"])
"""
"""torchrun sets these variables when the nodes have found each other."""


@pytest.mark.parametrize(
    "command", [("srun", "--nodes=2"), pytest.param(("sbatch", "--wait", "--output=out"), marks=pytest.mark.long)]
)
def test_the_best_script_of_a_plan_starts_with_slurm(command: tuple[str, ...], bed: Bed, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    bed.need_slurm()
    nodes = {"nodes": 2, "devices_per_node": 1, "memory_per_device": "4GiB", "nic_bytes_per_second": 1e8}
    spec = {
        "model": SHAPE,
        "cluster": {"chip": "cpu", **nodes},
        "train": {"engine": "megatron", "seq_length": 64, "global_batch_size": 4, "precision": "bf16"},
    }
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    outcome = api.tune(tmp_path / "spec.json", run_dir=tmp_path / "run", fidelity="estimate")
    folder = bed.folder / command[0]
    folder.mkdir()
    (folder / "pretrain_gpt.py").write_text(TRAINING)
    (folder / "best.sh").write_text((outcome.run_dir / "best.sh").read_text())
    (folder / "best.sh").chmod(0o755)
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin:/sbin"
    words = ("sh", "-c", f'cd {folder}; export PATH={path}; exec "$@"', "sh", *command, "./best.sh")
    output = bed.run("h0", *words)
    output += (folder / "out").read_text() if (folder / "out").exists() else ""
    assert {"rank 0 of 2", "rank 1 of 2"} <= set(output.splitlines()), output


RESTARTED = """\
import os, pathlib, sys, time
rank, saved, failed = os.environ["RANK"], pathlib.Path("saved"), pathlib.Path("failed")
for step in range(int(saved.read_text() if saved.exists() else 0) + 1, 21):
    print("iteration", step, os.uname().nodename, os.environ.get("SLURM_RESTART_COUNT", "0"), flush=True)
    if rank == "0":
        saved.write_text(str(step))
    elif step >= 4 and not failed.exists():
        failed.touch()
        sys.exit(3)
    time.sleep(1.0)
"""
"""A job of two nodes, with a checkpoint after each step; one fails once."""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_an_exported_job_goes_on_after_the_failures_of_a_process_and_a_node(bed: Bed, tmp_path: Path) -> None:
    bed.need_slurm()
    folder = bed.folder / tmp_path.name
    folder.mkdir()
    (folder / "train.py").write_text(RESTARTED)
    cluster = {"chip": "cpu", "nodes": 2, "devices_per_node": 1, "memory_per_device": "1GiB"}
    space = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
    train = {**TRAIN, "command": ["torchrun", "--nproc-per-node", "1", "train.py"], "directory": str(folder)}
    spec = {"model": SHAPE, "cluster": cluster, "train": train, "auto_tuner": {"space": space}}
    (folder / "spec.json").write_text(json.dumps(spec))
    (file,) = api.export(
        folder / "spec.json", "slurm", output=folder / "out", name="job", options={"restarts": "1"}
    ).files

    def steps() -> list[tuple[int, str, int]]:
        """The steps in the log, each with its host and the number of Slurm's restart."""
        text = (folder / "log").read_text() if (folder / "log").exists() else ""
        return [(int(step), host, int(again)) for step, host, again in re.findall(r"iteration (\d+) (\S+) (\d+)", text)]

    def wait_for(last: int) -> None:
        while not [step for step, *_ in steps() if step >= last]:
            assert time.monotonic() < deadline, (folder / "log").read_text() + bed.run("h0", "squeue", "-l")
            time.sleep(0.2)

    path, deadline = f"{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin:/sbin", time.monotonic() + 600
    bed.run("h0", "env", f"PATH={path}", "sbatch", f"--output={folder}/log", str(file))
    wait_for(6)
    lost = sorted({host for _, host, _ in steps()})[1]
    bed.poweroff(lost)
    wait_for(20)
    bed.boot(lost)
    by_restart = {number: [each for each in steps() if each[2] == number] for number in (0, 1)}
    assert (folder / "failed").exists()
    assert {host for _, host, _ in by_restart[0]} == {"h1", "h2"}, "after the failure of a process, the nodes are kept"
    assert len({host for _, host, _ in by_restart[1]}) == 2
    assert lost not in {host for _, host, _ in by_restart[1]}
    assert min(by_restart[1])[0] > 4, "it goes on from its checkpoint"
