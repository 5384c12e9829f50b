"""Slurm's own check accepts the batch scripts that are exported."""

import json
from pathlib import Path
from typing import Any

import pytest

from flagcore import api
from tests.hosts.bed import Bed, missing
from tests.small import SHAPE

TRAIN: dict[str, Any] = {"engine": "megatron", "seq_length": 64, "global_batch_size": 12, "precision": "fp32"}
SERVE: dict[str, Any] = {"engine": "vllm", "profile": {"input_len": 8, "output_len": 8, "concurrency": 4}}
OWN = ["torchrun", "--nproc-per-node", "2", "train.py", "{flags}"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "work"),
    [(1, {"train": TRAIN}), (3, {"train": TRAIN}), (2, {"train": {**TRAIN, "command": OWN}}), (1, {"serve": SERVE})],
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
    model = {
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 64,
        "vocab_size": 64,
    }
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(
        json.dumps({**model, "num_attention_heads": 2, "num_key_value_heads": 2})
    )
    if "serve" in work:
        spec.write_text(spec.read_text().replace(json.dumps(SHAPE), json.dumps(str(tmp_path / "m"))))
    (file,) = api.export(spec, "slurm", output=tmp_path / "out", name="job").files
    said = bed.run("h0", "sh", "-c", f"sbatch --test-only {file} 2>&1")
    assert "to start at" in said
