"""Measured sweeps are replayed as if a search had run on their machines."""

import contextlib
import io
import json
import logging
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.product.tasks import SHAPE

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parents[3] / "benchmarks" / "replay.py"
LAYOUTS = [(tensor, pipeline) for tensor in (1, 2, 4) for pipeline in (1, 2, 4) if tensor * pipeline <= 4]


def record(name: str, tensor: int, pipeline: int, micro_batch: int, measured: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": name,
        "source": "Made up",
        "kind": "train",
        "model": {"name": "tiny", **SHAPE},
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


def probe(seconds: float) -> dict[str, Any]:
    """Return the probe of a rank that took 20 seconds, and computes in as many as are given."""
    figures = ("static", "peak_forward_backward", "peak_optimizer", "peak_allocated", "device_used")
    times = ("compute_time", "compute_spread", "optimizer_time", "optimizer_spread")
    measured = {
        **{f"{name}_bytes": 2**20 for name in figures},
        **{f"{name}_s": 0.01 for name in times},
        "compute_time_s": seconds,
        "stage": 0,
        "reserved_bytes": None,
        "steps": 5,
        "microbatches": 4,
        "microbatches_run": 4,
    }
    return {"rank": 0, "state": "measured", "reason": None, "duration_s": 20.0, "measured": measured}


def replay(tmp_path: Path, records: list[dict[str, Any]], *options: str) -> tuple[dict[str, Any], str]:
    """Run the program in this process, and return its last line as data and all that it printed."""
    data, logger = tmp_path / "jobs.jsonl", logging.getLogger("flagcore")
    data.write_text("\n".join(map(json.dumps, records)))
    level, printed = logger.level, io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.syspath_prepend(str(PROGRAM.parent))
        patch.setenv("FLAGCORE_HOME", os.environ["FLAGCORE_HOME"])  # the program changes it
        patch.setattr(sys, "argv", [str(PROGRAM), str(data), "--seeds", "2", *options])
        try:
            runpy.run_path(str(PROGRAM), run_name="__main__")
        finally:
            logger.setLevel(level)
    return json.loads(printed.getvalue().splitlines()[-1]), printed.getvalue()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """All searches on one sweep, beside an invalid record, which is left out."""
    invalid = {**record("invalid", 1, 1, 1, {"step_time_s": 1.0}), "model": {"name": "without layers"}}
    return replay(tmp_path_factory.mktemp("plain"), [invalid, *sweep(best=(1, 4, 2))], "--strategy", "predicted")


def test_the_last_line_has_mean_trials_of_all_searches(plain: tuple[dict[str, Any], str]) -> None:
    figures, text = plain
    trials = figures["trials_to_within_1pct"]
    assert set(trials) == {"flagcore", "flagscale", "tpe", "random"}
    assert (figures["sweeps"], figures["candidates"], figures["strategy"]) == (1, 18, "predicted")
    assert trials["flagscale"] == 2  # of data parallel 1, tensor 1: micro batch 1, then 2
    assert trials["random"] == pytest.approx((18 + 1) / 2, abs=1.5)
    assert 1 <= trials["tpe"] <= 18
    assert 1 <= trials["flagcore"] <= 18
    random = figures["figures"]["random"]
    assert random["regret_at_5_trials"] == pytest.approx(1 - 5 / 18, abs=0.1)
    assert random["never_tried_of_measured"] is None
    assert "| flagscale | 2.00 |" in text


def test_never_tried_is_a_share_of_measured_candidates_legal_candidates_and_combinations(
    plain: tuple[dict[str, Any], str], tmp_path: Path
) -> None:
    figures, _ = plain
    assert (figures["mean_measured"], figures["mean_candidates"]) == (18, 18)
    assert figures["mean_combinations"] == 3**4
    by_name = figures["figures"]["flagscale_priority_performance"]  # it runs a third: one micro batch of three
    for predictions, size in (("measured", 18), ("candidates", 18), ("combinations", 81)):
        assert by_name[f"never_tried_of_{predictions}"] == pytest.approx(1 - 6 / size, abs=1e-3)
    part, _ = replay(tmp_path, sweep(best=(1, 4, 2))[1:], "--strategy", "predicted")
    assert (part["mean_measured"], part["mean_candidates"]) == (17, 18)  # unmeasured ones are legal, too
    assert part["figures"]["oracle"]["never_tried_of_candidates"] == pytest.approx(1 - 2 / 18, abs=1e-3)


def test_running_out_of_memory_costs_a_trial_and_excludes_larger_candidates(tmp_path: Path) -> None:
    figures, _ = replay(tmp_path, sweep(best=(4, 1, 1), out_of_memory=(1, 4, 1)), "--strategy", "predicted")
    flagscale = figures["figures"]["flagscale"]
    assert flagscale["never_tried_of_measured"] > 0
    assert flagscale["best_kept_within_1pct"] == 1.0
