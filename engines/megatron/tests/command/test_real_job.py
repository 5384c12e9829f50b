"""A job in the manner of NVIDIA's example scripts, tuned without harm by the real `pretrain_gpt.py` on a CPU."""

import hashlib
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


ONE = {
    "micro_batch_size": 1,
    "use_distributed_optimizer": False,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "sequence_parallel": False,
}
"""A space of one candidate."""
TRAIN = "--train-iters 1000 --bf16"


def tune(folder: Path, arguments: str, options: str, precision: str) -> Any:
    """Tune the space of one candidate, and return its only trial."""
    (folder / "job").mkdir()
    program = "$MEGATRON/pretrain_gpt.py"
    text = f"ARGS=({ARCHITECTURE} {arguments})\ntorchrun --nproc_per_node 2 {options} {program} ${{ARGS[@]}}\n"
    (folder / "job" / "run.sh").write_text(text)
    control = {"train_iters": 4, "max_trials": 1, "max_time_per_task": 100}
    data = spec_of(folder / "job", control=control, space=ONE, precision=precision)
    (folder / "spec.yaml").write_text(yaml.safe_dump(data))
    (trial,) = api.tune(folder / "spec.yaml", run_dir=folder / "run").plan.trials
    return trial


MEASURED = {
    "samples": ("--train-samples 90000 --lr-decay-samples 80000 --lr-warmup-samples 20000 --bf16", ""),
    "ramp-up": ("--train-samples 90000 --rampup-batch-size 2 2 1000 --bf16", ""),
    "evaluation longer than training": (f"{TRAIN} --eval-iters 5000 --eval-interval 2", ""),
    "a full disk": (f"{TRAIN} --save /dev/full/checkpoints --save-interval 1 --tensorboard-dir /dev/full/logs", ""),
    "logs of ranks": (TRAIN, "--log-dir logs --redirects 3"),
    "prefixes": (TRAIN, "--log-dir logs --tee 3"),
    "warm-up": (f"{TRAIN} --lr-warmup-iters 2000 --lr-decay-iters 9000", ""),
    "wsd": (f"{TRAIN} --lr-decay-style WSD --lr-wsd-decay-iters 100 --lr-wsd-decay-style linear", ""),
    "fp16": ("--train-iters 1000 --fp16", ""),
}


@pytest.mark.parametrize("name", MEASURED)
def test_unusual_job_is_measured(name: str, tmp_path: Path) -> None:
    arguments, options = MEASURED[name]
    trial = tune(tmp_path, arguments, options, "fp16" if name == "fp16" else "bf16")
    assert (trial.state.value, trial.reason) == ("measured", None)
    assert len(trial.measurement.step_times_s) == 3
    assert {file.name for file in (tmp_path / "job").iterdir()} == {"run.sh"}
