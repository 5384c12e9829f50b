"""Odd jobs, run by the real `pretrain_gpt.py` on a CPU: each ends in the right state, with one clear line."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from engines.megatron.tests.command.real import ARCHITECTURE, needs_megatron_lm, spec_of
from flagcore import api
from flagcore.errors import EveryTrialFailed

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(1200), needs_megatron_lm]

ONE = {
    "micro_batch_size": 1,
    "use_distributed_optimizer": False,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "sequence_parallel": False,
}
"""A space of one candidate."""
PROGRAM = """\
import os, runpy, sys, time
sys.argv[0] = os.environ["MEGATRON"] + "/pretrain_gpt.py"
{before}
runpy.run_path(sys.argv[0], run_name="__main__")
{after}
"""
TRAIN = "--train-iters 1000 --bf16"


def tune(folder: Path, arguments: str, options: str = "", program: str = "", **spec: Any) -> Any:
    """Tune the space of one candidate, and return its only trial."""
    (folder / "job").mkdir()
    if program:
        (folder / "job" / "pretrain_own.py").write_text(program)
    name = "pretrain_own.py" if program else "$MEGATRON/pretrain_gpt.py"
    text = f"ARGS=({ARCHITECTURE} {arguments})\ntorchrun --nproc_per_node 2 {options} {name} ${{ARGS[@]}}\n"
    (folder / "job" / "run.sh").write_text(text)
    control = {"train_iters": 4, "max_trials": 1, "max_time_per_task": 100, **spec.pop("control", {})}
    data = spec_of(folder / "job", control=control, space={**ONE, **spec.pop("space", {})}, **spec)
    (folder / "spec.yaml").write_text(yaml.safe_dump(data))
    try:
        outcome = api.tune(folder / "spec.yaml", run_dir=folder / "run")
    except EveryTrialFailed:
        outcome = api.load_run(folder / "run")
        return outcome.trials[0]
    (trial,) = outcome.plan.trials
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
    trial = tune(tmp_path, arguments, options, precision="fp16" if name == "fp16" else "bf16")
    assert (trial.state.value, trial.reason) == ("measured", None)
    assert len(trial.measurement.step_times_s) == 3
    assert {file.name for file in (tmp_path / "job").iterdir()} == {"run.sh"}


def test_crash_after_the_last_step_counts(tmp_path: Path) -> None:
    trial = tune(tmp_path, TRAIN, program=PROGRAM.format(before="", after='raise OSError("cannot save")'))
    assert trial.state.value == "measured"
    assert trial.reason is None or "cannot save" in trial.reason


def test_rank_that_dies_fails_the_trial(tmp_path: Path) -> None:
    before = 'if os.environ["RANK"] == "1":\n    os.kill(os.getpid(), 9)'
    trial = tune(tmp_path, TRAIN, program=PROGRAM.format(before=before, after=""))
    assert trial.state.value == "failed"
    assert "exitcode: -9" in trial.reason
    assert "local_rank: 1" in trial.reason


def test_hang_is_timed_out(tmp_path: Path) -> None:
    program = PROGRAM.format(before="time.sleep(1000)", after="")
    assert tune(tmp_path, TRAIN, program=program, control={"max_time_per_task": 8}).state.value == "timed_out"
