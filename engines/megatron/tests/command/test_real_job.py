"""A job in the manner of NVIDIA's example scripts, tuned without harm by the real `pretrain_gpt.py` on a CPU."""

import hashlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from engines.megatron.tests.command.real import ARCHITECTURE, MEGATRON, needs_megatron_lm, spec_of
from flagcore import api

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(1200), needs_megatron_lm]

SCRIPT = f"""\
#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=${{CUDA_DEVICE_MAX_CONNECTIONS:-1}}
CHECKPOINTS=${{1:-"checkpoints/tiny"}}
TENSORBOARD=${{2:-"tensorboard/tiny"}}
mkdir -p "$(dirname "$CHECKPOINTS")" "$(dirname "$TENSORBOARD")"
GPUS_PER_NODE=2
NUM_NODES=1
PROGRAM="$MEGATRON/pretrain_gpt.py"
CACHE="${{PWD}}/cache"
mkdir -p "$CACHE"
DISTRIBUTED=(
  --nproc_per_node $GPUS_PER_NODE --nnodes $NUM_NODES --node_rank ${{NODE_RANK:-0}}
  --master_addr ${{MASTER_ADDR:-localhost}} --master_port ${{MASTER_PORT:-29500}}
)
MODEL=(
{ARCHITECTURE}
)
TRAINING=(
  --train-samples 1953125 --lr-decay-samples 1949218 --lr-warmup-samples 2000 --clip-grad 1.0 --weight-decay 0.1
  --bf16 --manual-gc --empty-unused-memory-level 1 --exit-duration-in-mins 235
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
PARALLEL=(--tensor-model-parallel-size 1 --context-parallel-size 1 --sequence-parallel)
DATA=("--data-cache-path ${{CACHE}}" "--split '99,1,0'" "--no-mmap-bin-files")
LOGGING=(
  --log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000 --log-throughput
  --ckpt-format torch --distributed-timeout-minutes 60
  --save "$CHECKPOINTS" --load "$CHECKPOINTS" --tensorboard-dir "$TENSORBOARD"
)
if [ ! -f "$PROGRAM" ]; then
  echo "Error: no program at $PROGRAM"
  exit 1
fi
torchrun ${{DISTRIBUTED[@]}} \\
  "$PROGRAM" \\
  ${{MODEL[@]}} \\
  ${{TRAINING[@]}} ${{PARALLEL[@]}} ${{DATA[@]}} ${{LOGGING[@]}} 2>&1 | tee "$CACHE/train.log"
"""
CONTROL = {"train_iters": 4, "max_trials": 8, "max_time_per_task": 120}
SPACE = {
    "micro_batch_size": [1, 2, 4],
    "use_distributed_optimizer": True,
    "tensor_model_parallel_size": [1, 2],
    "pipeline_model_parallel_size": [1, 2],
}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    (folder / "run.sh").write_text(SCRIPT)
    (folder / "run.sh").chmod(0o444)
    folder.chmod(0o555)
    return folder


@pytest.fixture(scope="module")
def tuned(job: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[api.Outcome, dict[str, str], dict[str, str]]:
    """The outcome, and the content of the user's folders before and after."""
    where = tmp_path_factory.mktemp("tune")
    (where / "spec.yaml").write_text(yaml.safe_dump(spec_of(job, control=CONTROL, space=SPACE)))
    before = {**content(job), **content(MEGATRON)}
    return api.tune(where / "spec.yaml", run_dir=where / "run"), before, {**content(job), **content(MEGATRON)}


def content(folder: Path) -> dict[str, str]:
    files = [file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    return {str(file): hashlib.sha1(file.read_bytes()).hexdigest() for file in files}


def test_eight_candidates_are_measured_and_the_counts_add_up(tuned: tuple[api.Outcome, Any, Any]) -> None:
    outcome = tuned[0]
    states = [(trial["state"], trial["reason"]) for trial in outcome.data["trials"]]
    assert all(state in ("measured", "stopped") for state, _ in states), states
    assert len(states) == 8
    assert outcome.plan.counts.balanced
    for trial in outcome.data["trials"]:
        if trial["state"] == "measured":
            assert len(trial["measured"]["losses"]) == 4
            effective = trial["measured"]["effective"]
            assert effective["tensor_model_parallel_size"] == trial["candidate"]["tensor_model_parallel_size"]
            assert effective["micro_batch_size"] == trial["candidate"]["micro_batch_size"]


def test_nothing_is_written_outside_the_runs_folder(
    tuned: tuple[Any, dict[str, str], dict[str, str]], job: Path
) -> None:
    assert tuned[1] == tuned[2]
    assert [file.name for file in job.iterdir()] == ["run.sh"]


def test_each_trial_has_its_changes(tuned: tuple[api.Outcome, Any, Any]) -> None:
    record = json.loads((tuned[0].run_dir / "trials" / "0" / "arguments.json").read_text())
    changed = {change["flag"] for change in record["changes"]}
    expected = {"--train-samples", "--train-iters", "--save", "--load", "--tensorboard-dir", "--eval-iters"}
    assert changed >= expected
    assert any(words.startswith("mkdir -p") for words in record["skipped"])


def test_best_trains_with_all_arguments_of_the_user(tuned: tuple[api.Outcome, Any, Any], job: Path) -> None:
    script = tuned[0].run_dir / "best.sh"
    text = script.read_text()
    assert "best bash run.sh" in text
    assert "--train-iters" not in text
    job.chmod(0o755)
    process = subprocess.Popen(
        [script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        deadline, seen = time.monotonic() + 120, ""
        while "iteration       10/" not in seen and time.monotonic() < deadline:
            line = process.stdout.readline()
            assert line, seen[-2000:]
            seen += line
    finally:
        os.killpg(process.pid, signal.SIGTERM)  # torchrun, too, which ends its ranks: each has a session of its own
        process.communicate()
    assert "244140" in seen
    assert (job / "cache" / "train.log").exists()
