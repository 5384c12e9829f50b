"""What the user wrote stays apart from what flagcore completed: an opened or resumed run has the job of its spec."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flagcore import api
from flagcore.api.runs import load_snapshot
from flagcore.plugins.entry_points import ENGINES, kind_of, names

CLUSTER = {"chip": "H100-SXM", "nodes": 1, "devices_per_node": 2}
CHIPS = {"mindie": "910B2"}
PROGRAM = {"knobs": {"tp": {"flag": "--tp", "values": [1, 2]}}}
PROFILE = {"input_len": 1024, "output_len": 64, "concurrency": 16}
LENGTHS = {"mean": 512.0, "longest": 1024}
RL = {
    "algorithm": "grpo",
    "prompts": 32,
    "samples": 4,
    "prompt_len": LENGTHS,
    "answer_len": LENGTHS,
    "rollout": {"engine": "vllm"},
}
JOBS: dict[str, dict[str, Any]] = {
    "train": {"seq_length": 4096, "global_batch_size": 64, "precision": "bf16"},
    "serve": {"profile": PROFILE},
    "rl": {**RL, "rollout": {"engine": "vllm"}},
}
ON_FSDP = ("openrlhf", "trl")


def job(engine: str) -> dict[str, Any]:
    """A spec of an engine that leaves open what can be left open."""
    kind = kind_of(engine)
    work = {"engine": engine, **JOBS[kind]}
    if kind == "rl":
        work["trainer"] = {"engine": "fsdp2" if engine in ON_FSDP else "megatron"}
    if engine == "command":
        work |= {"program": PROGRAM, "command": ["python", "train.py"]}
    return {"model": "Qwen/Qwen3-0.6B", "cluster": {**CLUSTER, "chip": CHIPS.get(engine, CLUSTER["chip"])}, kind: work}


@pytest.mark.costly
@pytest.mark.parametrize("engine", names(ENGINES))
def test_a_run_has_the_job_and_the_candidates_of_its_spec(engine: str, tmp_path: Path) -> None:
    run, spec = tmp_path / "run", job(engine)
    first = api.tune(spec, run_dir=run, fidelity="estimate")
    resumed = api.tune(spec, run_dir=run, fidelity="estimate")

    of_spec, of_run = load_snapshot(spec, None, ()).problem, load_snapshot(run, None, ()).problem
    own = of_spec.task.spec

    assert own == replace(of_run.task.spec, control=own.control)
    assert of_spec.baseline == of_run.baseline
    assert of_spec.platform.environment == of_run.platform.environment
    np.testing.assert_array_equal(of_spec.space.rows, of_run.space.rows)
    if kind_of(engine) == "serve":
        for candidate in map(of_spec.space.candidate, range(0, len(of_spec.space), len(of_spec.space) // 20 or 1)):
            servers = [each.engine.instances(each.platform, candidate) for each in (of_spec, of_run)]
            assert servers[0] == servers[1]
    assert [each.candidate for each in first.plan.trials] == [each.candidate for each in resumed.plan.trials]
