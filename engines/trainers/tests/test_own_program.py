"""A real program of a user, on torch and gloo: tensor parallelism by hand, sharding by FSDP2."""

import sys
from pathlib import Path

import pytest

from flagcore import api

PROGRAM = Path(__file__).parent / "program" / "train.py"


@pytest.mark.long
def test_a_torch_program_is_tuned_without_side_effects(tmp_path: Path) -> None:
    knobs = {
        "tp": {"flag": "--tp", "values": [1, 2], "meaning": "tensor_model_parallel_size"},
        "micro": {"flag": "--micro-batch", "values": [1, 4], "meaning": "micro_batch_size"},
        "shard": {"flag": "--shard", "values": {"none": 0, "full": 3}, "meaning": "zero_stage"},
    }
    knobs["tp"]["printed"] = r"tensor parallel (\d+)"
    step = r"step (?P<step>\d+)/\d+ loss (?P<loss>\S+) took (?P<ms>[\d.]+) ms"
    spec = {
        "model": {
            "num_layers": 2,
            "hidden_size": 64,
            "ffn_hidden_size": 128,
            "num_attention_heads": 4,
            "vocab_size": 512,
        },
        "cluster": {"chip": "cpu", "devices_per_node": 2},
        "train": {
            "engine": "command",
            "seq_length": 32,
            "global_batch_size": 8,
            "precision": "fp32",
            "command": [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                "2",
                str(PROGRAM),
            ],
            "directory": str(tmp_path),
            "program": {"knobs": knobs, "log": {"step": step}},
        },
        "auto_tuner": {"control": {"train_iters": 5, "warmup_iters": 2, "max_trials": 4, "repeats": 0}},
        "envs": {"OMP_NUM_THREADS": 1},
    }
    outcome = api.tune(spec, run_dir=tmp_path / "run")
    trials = [trial for trial in outcome.plan.trials if trial.measurement is not None]
    assert len(trials) >= 3
    assert {trial.state.value for trial in outcome.plan.trials} <= {"measured", "stopped"}
    losses = [trial.measurement.losses[0] for trial in trials if trial.measurement is not None]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=0.02)  # all candidates train the same model
    assert all(trial.measurement.effective == {"tp": trial.candidate.as_dict()["tp"]} for trial in trials)
    assert not list(tmp_path.glob("checkpoint*"))
