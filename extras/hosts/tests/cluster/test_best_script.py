"""best.sh of a plan on several nodes starts on the nodes of a Slurm job."""

import json
import sys
from pathlib import Path

import pytest

from extras.hosts.tests.cluster.bed import SLURM, Bed, missing
from flagcore import api
from tests.product.tasks import SHAPE

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
