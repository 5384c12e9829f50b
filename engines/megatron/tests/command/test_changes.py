"""A trial of a user's command runs exactly N steps, writes nothing of the user's, and has the candidate's knobs."""

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flagcore_megatron.command.changes import limit_to_trial, set_launch_options
from flagcore_megatron.engine import ENGINE
from flagcore_megatron.program.arguments import known_releases, release_table
from flagcore_training.commands import UserCommand, parse

from engines.megatron.tests.command.scripts import LAUNCH, MODEL, spec_of
from flagcore.domain.launch import Launch
from tests.checks import given
from tests.product import tasks

PLAIN = tasks.candidate(data_parallel_size=4)
TABLE = release_table("0.16.0")


def launch(words: str, folder: Path, *, for_real: bool = False, candidate: Any = PLAIN, **spec: Any) -> Launch:
    """Start a candidate with a command, in the folder of trial 3."""
    trial = folder / "run" / "trials" / "3"
    trial.mkdir(parents=True, exist_ok=True)
    task = tasks.task()
    task = replace(task, spec=spec_of(words.split(), folder, **spec))
    return ENGINE.launch(tasks.platform(task), candidate, str(trial), for_real=for_real)


def effective(arguments: Sequence[str], release: str = "0.16.0") -> dict[str, Any]:
    """What Megatron-LM would store for a command."""
    words = list(arguments)
    start = next(place for place, word in enumerate(words) if word.endswith(".py")) + 1
    table = release_table(release)
    assert table.parse(words[start:])[1] == []
    return dict(table.effective(words[start:]))


def trial_of(arguments: str, release: str = "0.16.0") -> dict[str, Any]:
    """The arguments of a trial of five steps."""
    command = UserCommand(program=("pretrain_gpt.py",), arguments=tuple(f"{MODEL} {arguments}".split()))
    return effective(limit_to_trial(command, release_table(release), 5, "/run").command.words, release)


SAMPLES = "--train-samples 1953125000 --lr-decay-samples 1949218748 --lr-warmup-samples 3906252"


@pytest.mark.parametrize(
    "arguments",
    [
        SAMPLES,
        SAMPLES + " --rampup-batch-size 2 2 1000",
        "--train-iters 500000 --lr-warmup-iters 2000 --lr-decay-iters 320000",
        "--train-iters 500000 --lr-warmup-fraction .001 --lr-decay-iters 430000",
        "--train-iters 90 --lr-decay-style WSD --lr-wsd-decay-iters 20 --lr-warmup-iters 10",
        "--train-samples 90 --lr-decay-style WSD --lr-wsd-decay-samples 20",
        "--train-iters=7 --train-iters 9",
    ],
)
def test_trial_counts_iterations_and_its_schedule_fits(arguments: str) -> None:
    for release in known_releases():
        found = trial_of(arguments, release)
        assert (found["train_iters"], found["eval_iters"], found["log_interval"]) == (5, 0, 1)
        assert not found.keys() & {"train_samples", "lr_decay_samples", "lr_warmup_samples", "rampup_batch_size"}
        assert not found.keys() & {"lr_warmup_iters", "lr_warmup_fraction", "lr_decay_iters", "lr_wsd_decay_samples"}
        assert ("lr_wsd_decay_iters" in found) == ("WSD" in arguments)
        assert found.get("lr_wsd_decay_iters", 1) < 5


HARMFUL = (
    "--save ck --save-interval 100 --load ck --async-save --pretrained-checkpoint p --ckpt-step 3 --finetune "
    "--no-load-optim --no-save-rng --non-persistent-ckpt-type local --non-persistent-local-ckpt-dir d "
    "--non-persistent-save-interval 4 --exit-interval 3 --exit-duration-in-mins 9 --exit-signal-handler "
    "--tensorboard-dir tb --wandb-project w --wandb-exp-name e --wandb-save-dir d --one-logger-project o "
    "--profile --profile-step-start 4 --profile-step-end 6 --record-memory-history --memory-snapshot-path m "
    "--log-straggler --enable-ft-package --inprocess-restart --log-progress --full-validation --eval-iters 32 "
    "--skip-train --data-cache-path cache --log-interval 100"
)


def test_trial_drops_arguments_that_load_save_or_report() -> None:
    found = trial_of(HARMFUL)
    assert found.keys() == trial_of("").keys()
    assert found["data_cache_path"] == "/run/data-cache"
    assert found["enable_one_logger"] is False


def test_trial_is_not_profiled() -> None:
    command = given(parse(f"numactl -l nsys profile -o a {LAUNCH} --profile".split(), "."))
    changed = limit_to_trial(command, TABLE, 5, "/run")
    assert changed.command.prefix == ("numactl", "-l")
    assert ("nsys profile -o a", "") in {(change.before, change.after) for change in changed.changes}


@pytest.mark.parametrize(("arguments", "interval"), [("--full-validation", 5), ("--eval-interval 7", 7)])
def test_trial_has_an_evaluation_interval(arguments: str, interval: int) -> None:
    assert trial_of(arguments, "0.20.0")["eval_interval"] == interval


def test_fp16_starts_with_a_loss_scale_that_fits() -> None:
    assert trial_of("--fp16")["initial_loss_scale"] == 4096
    assert "initial_loss_scale" not in trial_of("--fp16 --loss-scale 1024")
    assert "initial_loss_scale" not in trial_of("--bf16")


def test_candidates_knobs_replace_knobs_of_the_command(tmp_path: Path) -> None:
    words = (
        f"{LAUNCH} --tensor-model-parallel-size 4 --sequence-parallel --use-distributed-optimizer "
        "--num-virtual-stages-per-pipeline-rank 2 --recompute-activations --seq-length 4096"
    )
    found = effective(launch(words, tmp_path).argv)
    assert found["tensor_model_parallel_size"] == 1
    assert found["seq_length"] == 128
    removed = {"sequence_parallel", "use_distributed_optimizer", "num_virtual_stages_per_pipeline_rank"}
    assert not found.keys() & (removed | {"recompute_activations"})
    sharded = tasks.candidate(data_parallel_size=4, use_distributed_optimizer=True)
    assert effective(launch(words, tmp_path, candidate=sharded).argv)["use_distributed_optimizer"] is True


def test_real_job_keeps_the_users_arguments_and_has_the_knobs(tmp_path: Path) -> None:
    words = f"{LAUNCH} {SAMPLES} {HARMFUL} --sequence-parallel --tensor-model-parallel-size 4"
    planned = launch(words, tmp_path, for_real=True)
    user = TABLE.effective((*MODEL.split(), *SAMPLES.split(), *HARMFUL.split()))
    found = effective(planned.argv)
    assert found.items() >= user.items()
    assert found["tensor_model_parallel_size"] == 1
    assert "sequence_parallel" not in found
    assert "{master_port}" not in " ".join(planned.argv)
    assert not (tmp_path / "run" / "trials" / "3" / "arguments.json").exists()


def test_real_job_on_several_hosts_is_one_job(tmp_path: Path) -> None:
    spec = spec_of(LAUNCH.split(), tmp_path)
    on_hosts = replace(spec, launcher="ssh", cluster=replace(spec.cluster, nodes=2, hosts=("a", "b")))
    planned = ENGINE.launch(
        tasks.platform(replace(tasks.task(), spec=on_hosts)), PLAIN, str(tmp_path / "best"), for_real=True
    )
    options = {"--nnodes={nnodes}", "--node-rank={node_rank}", "--master-addr={master_addr}", "--nproc_per_node"}
    assert options <= set(planned.argv)


FAKE = '#!/bin/sh\necho "$0 $*" >> "$CALLS"\n'


def started(text: str, folder: Path, **envs: str) -> tuple[Launch, list[str]]:
    """The best of a script, and the words of what it really starts, later and elsewhere."""
    (folder / "run.sh").write_text(text)
    for name in ("torchrun", "pretrain_gpt.py"):
        (folder / name).write_text(FAKE)
        (folder / name).chmod(0o755)
    best = tasks.candidate(data_parallel_size=2, tensor_model_parallel_size=2, micro_batch_size=2)
    planned = launch("bash run.sh", folder, for_real=True, candidate=best)
    calls = folder / "calls"
    variables = {**os.environ, **envs, "PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(calls)}
    subprocess.run(planned.argv, cwd=folder, env=variables, check=True, timeout=60)
    (line,) = calls.read_text().splitlines()
    return planned, line.split()


COMPUTES = f"""\
set -euo pipefail
ARGS=({MODEL} --sequence-parallel --tensor-model-parallel-size=4)
TORCHRUN="torchrun --node_rank ${{NODE_RANK:-0}}"
mkdir -p made
"""


@pytest.mark.parametrize("form", ["", "nohup ", "env A=1 "])
def test_best_runs_the_script_which_computes_when_it_starts(form: str, tmp_path: Path) -> None:
    text = f'{COMPUTES}{form}$TORCHRUN pretrain_gpt.py "${{ARGS[@]}}" --save "ck-$(date +%N)" 2>&1 | tee made/log'
    planned, words = started(text, tmp_path, NODE_RANK="3")
    assert planned.own_script
    assert words[1:3] == ["--node_rank", "3"]
    found = TABLE.effective(words[words.index("pretrain_gpt.py") + 1 :])
    assert (found["tensor_model_parallel_size"], found["micro_batch_size"]) == (2, 2)
    assert "sequence_parallel" not in found
    assert (tmp_path / "made" / "log").exists()


@pytest.mark.parametrize("form", ["exec torchrun", "./torchrun", "sh child.sh"])
def test_best_of_a_script_with_other_steps_is_the_command_that_it_starts(form: str, tmp_path: Path) -> None:
    (tmp_path / "child.sh").write_text('torchrun "$@"')
    planned, words = started(f"mkdir -p made\n{form} pretrain_gpt.py {MODEL}", tmp_path)
    assert not planned.own_script
    assert planned.leaves_out == ("mkdir -p made",)
    assert words[words.index("--micro-batch-size") + 1] == "2"


def test_trial_records_its_arguments_without_secrets(tmp_path: Path) -> None:
    launch(f"{LAUNCH} --save a --train-samples 8 --wandb-api-key abcdefgh12345", tmp_path)
    text = (tmp_path / "run" / "trials" / "3" / "arguments.json").read_text()
    record = json.loads(text)
    assert "--train-iters" in record["argv"]
    found = {change["flag"]: (change["before"], change["after"]) for change in record["changes"]}
    assert (found["--save"], found["--train-iters"][1]) == (("--save a", ""), "--train-iters 5")
    assert found["--train-samples"] == ("--train-samples 8", "")
    assert len(found) == len(record["changes"]) == len([change for change in record["changes"] if change["why"]])
    assert "abcdefgh12345" not in text


def test_variables_of_the_script_win_over_variables_of_the_spec(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(f"export A=script B=$B-more\n{LAUNCH} --name $FLAGCORE_MICRO_BATCH_SIZE")
    (tmp_path / "pretrain_gpt.py").touch()
    planned = launch("bash run.sh", tmp_path, envs={"A": "spec", "B": "spec"})
    assert planned.argv[:4] == ("env", "A=script", "B=spec-more", "torchrun")
    assert planned.argv[planned.argv.index("--name") + 1] == "1"


def torchrun(options: str, **how: Any) -> list[str]:
    """torchrun's options of a trial on one node of four devices."""
    command = given(parse(f"torchrun {options} pretrain_gpt.py".split(), "."))
    changed = set_launch_options(command, **{"devices": 4, "nodes": 1, "folder": "/trial", **how})
    return [word for option in changed.command.options for word in option.words]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--nproc_per_node 4 --standalone", "--nproc_per_node 4 --standalone"),
        ("--standalone", "--standalone --nproc-per-node=4"),
        ("--nproc-per-node=gpu --standalone", "--standalone --nproc-per-node=4"),
        ("--nproc_per_node 8 --master_addr h --master_port 2950", "--master_addr h --nproc-per-node=4 --master-port=P"),
        ("--nnodes 2 --node_rank 1 --nproc_per_node 4", "--nproc_per_node 4 --nnodes=1 --node-rank=0 --master-port=P"),
        (
            "--nproc_per_node 4 --rdzv-backend=c10d --rdzv_endpoint=h:1",
            "--nproc_per_node 4 --rdzv-backend=c10d --rdzv-endpoint=localhost:P",
        ),
        (
            "--nproc_per_node 4 --standalone --log-dir logs --redirects 3",
            "--nproc_per_node 4 --standalone --log-dir=/trial/ranks --tee=3",
        ),
        (
            "--nproc_per_node 4 --standalone -r 3 --local-ranks-filter 0",
            "--nproc_per_node 4 --standalone --log-dir=/trial/ranks --tee=3",
        ),
        ("--nproc_per_node 4 --standalone --max-restarts 3", "--nproc_per_node 4 --standalone --max-restarts=0"),
    ],
)
def test_options_of_torchrun_are_set_for_a_trial(options: str, expected: str) -> None:
    assert torchrun(options) == expected.replace("=P", "={master_port}").replace(":P", ":{master_port}").split()


def test_rendezvous_of_several_nodes_stays_the_users() -> None:
    options = "--nproc_per_node 4 --nnodes 2 --node_rank 1 --master_addr host --master_port 7"
    assert torchrun(options, nodes=2) == options.split()


def test_settings_of_the_spec_replace_switches_of_the_command(tmp_path: Path) -> None:
    words = f"{LAUNCH} --overlap-grad-reduce --no-overlap-p2p-communication --exp-avg-dtype fp32"
    found = effective(launch(words, tmp_path).argv)
    assert (found["overlap_grad_reduce"], found["overlap_p2p_comm"]) == (True, False)
    settings = {"overlap_grad_reduce": False, "overlap_p2p_comm": True, "exp_avg_dtype": "bf16"}
    found = effective(launch(words, tmp_path, settings=settings).argv)
    assert "overlap_grad_reduce" not in found
    assert found.get("overlap_p2p_comm", True) is True
    assert found["exp_avg_dtype"] == "bf16"
