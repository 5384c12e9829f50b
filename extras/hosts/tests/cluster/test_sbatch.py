"""Slurm's own check accepts exported scripts, and best.sh of a plan starts on the nodes of a job."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from extras.hosts.tests.cluster.bed import SLURM, Bed, missing
from flagcore import api
from tests.product.tasks import SHAPE

TRAIN: dict[str, Any] = {"engine": "megatron", "seq_length": 64, "global_batch_size": 12, "precision": "fp32"}
SERVE: dict[str, Any] = {"engine": "vllm", "profile": {"input_len": 8, "output_len": 8, "concurrency": 4}}
MIXED = {"nodes": 1, "devices_per_node": 2, "nic_bytes_per_second": 1e10}
OWN = ["torchrun", "--nproc-per-node", "2", "train.py", "{flags}"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "work"),
    [
        (1, {"train": TRAIN}),
        (3, {"train": TRAIN}),
        (2, {"train": {**TRAIN, "command": OWN}}),
        (1, {"serve": SERVE}),
        (1, {"cluster": {"groups": [{**MIXED, "chip": chip} for chip in ("C550", "A800-80GB")]}, "train": TRAIN}),
    ],
)
def test_sbatch_accepts_an_exported_script(bed: Bed, nodes: int, work: dict[str, Any], tmp_path: Path) -> None:
    if reason := missing("sbatch", "slurmctld"):
        pytest.skip(reason)
    if not bed.slurm:
        bed.start_slurm()
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


@pytest.mark.slow
@pytest.mark.long
def test_an_exported_server_starts_on_all_nodes_of_a_job(bed: Bed, tmp_path: Path) -> None:
    if reason := missing("sbatch", *SLURM):
        pytest.skip(reason)
    if not bed.slurm:
        bed.start_slurm()
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [("srun", "--nodes=2"), pytest.param(("sbatch", "--wait", "--output=out"), marks=pytest.mark.long)]
)
def test_the_best_script_of_a_plan_starts_with_slurm(command: tuple[str, ...], bed: Bed, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    if reason := missing(*SLURM, "sbatch"):
        pytest.skip(reason)
    if not bed.slurm:
        bed.start_slurm()
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
