"""Measured sweeps are replayed as if a search had run on their machines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
MODEL = {
    "name": "tiny",
    "num_layers": 4,
    "hidden_size": 256,
    "ffn_hidden_size": 1024,
    "num_attention_heads": 8,
    "vocab_size": 8192,
}
LAYOUTS = [(tensor, pipeline) for tensor in (1, 2, 4) for pipeline in (1, 2, 4) if tensor * pipeline <= 4]


def record(name: str, tensor: int, pipeline: int, micro_batch: int, measured: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": name,
        "source": "Made up",
        "kind": "train",
        "model": MODEL,
        "cluster": {"chip": "cpu", "devices": 4, "devices_per_node": 4},
        "train": {"seq_length": 128, "global_batch_size": 16, "precision": "bf16", "implementation": "local"},
        "candidate": {
            "tensor_model_parallel_size": tensor,
            "pipeline_model_parallel_size": pipeline,
            "data_parallel_size": 4 // (tensor * pipeline),
            "micro_batch_size": micro_batch,
        },
        "measured": measured,
    }


def sweep(best: tuple[int, int, int], out_of_memory: tuple[int, int, int] | None = None) -> list[dict[str, Any]]:
    """Return 18 records of which one is twice as fast as the others, which are all equal."""
    places = [(tensor, pipeline, micro) for tensor, pipeline in LAYOUTS for micro in (1, 2, 4)]
    return [
        record(str(at), *place, {"oom": True} if place == out_of_memory else {"step_time_s": 1.0 + (place != best)})
        for at, place in enumerate(places)
    ]


def replay(tmp_path: Path, records: list[dict[str, Any]], *options: str) -> tuple[dict[str, Any], str]:
    data = tmp_path / "jobs.jsonl"
    data.write_text("\n".join(map(json.dumps, records)))
    command = [sys.executable, str(ROOT / "benchmarks" / "replay.py"), str(data), "--seeds", "2", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stdout


def test_the_last_line_has_mean_trials_of_flagcore_flagscale_tpe_and_chance(tmp_path: Path) -> None:
    figures, text = replay(tmp_path, sweep(best=(1, 4, 2)), "--strategy", "predicted")
    trials = figures["trials_to_within_1pct"]
    assert set(trials) == {"flagcore", "flagscale", "tpe", "random"}
    assert (figures["sweeps"], figures["candidates"], figures["strategy"]) == (1, 18, "predicted")
    assert trials["flagscale"] == 2  # of data parallel 1, tensor 1: micro batch 1, then 2
    assert trials["random"] == pytest.approx((18 + 1) / 2, abs=1.5)
    assert 1 <= trials["tpe"] <= 18
    assert 1 <= trials["flagcore"] <= 18
    random = figures["figures"]["random"]
    assert random["regret_at_5_trials"] == pytest.approx(1 - 5 / 18, abs=0.1)
    assert random["never_tried_when_done"] is None
    assert "| flagscale | 2.00 |" in text


def test_a_search_that_ends_without_the_best_is_charged_the_whole_sweep(tmp_path: Path) -> None:
    figures, _ = replay(tmp_path, sweep(best=(1, 4, 2)), "--strategy", "predicted")
    lost = figures["figures"]["flagscale_priority_performance"]  # micro batch 4 ran, so 2 gets its result unrun
    assert lost["trials_to_within_1pct"] == 18
    assert lost["best_not_lost"] == 0.0
    assert lost["never_tried_when_done"] == pytest.approx(12 / 18, abs=1e-3)
    assert lost["regret_when_done"] == 1.0


def test_what_ran_out_of_memory_costs_a_trial_and_settles_larger_ones(tmp_path: Path) -> None:
    figures, _ = replay(tmp_path, sweep(best=(4, 1, 1), out_of_memory=(1, 4, 1)), "--strategy", "predicted")
    whole = figures["figures"]["flagscale"]
    assert whole["never_tried_when_done"] > 0
    assert whole["best_not_lost"] == 1.0


def test_few_records_are_no_sweep(tmp_path: Path) -> None:
    data = tmp_path / "jobs.jsonl"
    data.write_text("\n".join(map(json.dumps, sweep(best=(1, 4, 2))[:7])))
    command = [sys.executable, str(ROOT / "benchmarks" / "replay.py"), str(data)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "no sweep" in done.stderr
