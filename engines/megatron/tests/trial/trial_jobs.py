"""Jobs for the trial program's tests, and a process that runs many of them after importing torch once.

Run as a program: reads lines of JSON, each [folder, [[name, job], ...]], and answers each with {name: exit code}.
A job {"simulated": [...]} is a list of jobs of `engines.megatron.tests.trial.meta_ranks`.
"""

import atexit
import copy
import functools
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.checks import given

SIZES = {"num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 96, "vocab_size": 512}
HEADS = {"num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 16}
SWITCHES = {"gated_linear_unit": True, "untie_embeddings_and_output_weights": True}
DENSE: dict[str, Any] = {"name": "dense", **SIZES, **HEADS, **SWITCHES}
ROUTED = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 48}
EXPERTS = {**DENSE, **ROUTED, "moe_shared_expert_intermediate_size": 64, "moe_first_dense_layers": 1}
WIDTHS = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 16}
LATENT = {**DENSE, **WIDTHS, "num_query_groups": 4, "multi_latent_attention": True, "qk_layernorm": True}
TRAIN: dict[str, Any] = {"seq_length": 32, "global_batch_size": 16, "precision": "fp32", "train_iters": 3, "seed": 1234}
DEVICE: dict[str, Any] = {"type": "cpu", "backend": "gloo", "preload": [], "threads_per_rank": 1}


def make_job(
    output: Path,
    model: dict[str, Any],
    *,
    train: dict[str, Any] | None = None,
    shares: Sequence[dict[str, Any]] = (),
    end_after_s: float | None = None,
    **knobs: Any,
) -> Any:
    """Return a job as its file has it; `train` changes the common training settings, `shares` split the data."""
    return copy.deepcopy(
        {
            "model": model,
            "train": {**TRAIN, **(train or {})},
            "candidate": {"micro_batch_size": 2, **knobs},
            "device": DEVICE,
            "output": str(output),
            "shares": list(shares),
            "end_after_s": end_after_s,
        }
    )


def environment(*packages: Path) -> dict[str, str]:
    """The environment of a process that imports what lies in further folders before that installed."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, packages), os.environ["PYTHONPATH"]])}


def run_jobs(folder: Path, jobs: dict[str, Any], *packages: Path) -> tuple[dict[str, int], str]:
    """Run jobs one after the other in a warm process; return their exit codes and its stderr."""
    process, log = _warm_process(packages)
    start = log.stat().st_size
    print(json.dumps([str(folder), list(jobs.items())]), file=given(process.stdin), flush=True)
    answer = given(process.stdout).readline()
    stderr = log.read_bytes()[start:].decode()
    assert answer, stderr
    return json.loads(answer), stderr


@functools.cache
def _warm_process(packages: tuple[Path, ...]) -> tuple[subprocess.Popen[str], Path]:
    """Start a process that has imported torch and megatron once for all tests; it ends with this one."""
    log = Path(tempfile.mkdtemp(prefix="flagcore-tests-")) / "stderr"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, __file__],
            env=environment(*packages),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    atexit.register(_end, process, log.parent)
    return process, log


def _end(process: subprocess.Popen[str], folder: Path) -> None:
    """End the process, which reads jobs until its input is closed."""
    process.communicate()
    shutil.rmtree(folder)


def _main() -> None:
    from flagcore_megatron.trial.__main__ import RANK
    from flagcore_megatron.trial.job import parse_job
    from flagcore_training.trial import forked_ranks as ranks
    from flagcore_training.trial import program
    from flagcore_training.trial.job import JobError

    for line in sys.stdin:
        folder, jobs = json.loads(line)
        os.chdir(folder)
        codes = {}
        for name, data in jobs:
            print(f"--- {name}", file=sys.stderr, flush=True)
            if "simulated" in data:
                os.environ["TORCHDYNAMO_DISABLE"] = "1"
                importlib.import_module("flagcore_megatron.trial.rank")
                codes[name] = ranks.run_ranks(1, partial(_simulate, data["simulated"], Path(folder, name)))
                continue
            try:
                job = parse_job(data).started()
            except JobError as error:
                codes[name] = program.report(error)
                continue
            program.prepare(job)
            program.clear_output(job.output)
            import_s = program.import_rank(job, RANK)
            codes[name] = ranks.run_ranks(job.processes, partial(program.run_forked_rank, job, import_s, rank=RANK))
        sys.stderr.flush()
        print(json.dumps(codes), flush=True)


def _simulate(jobs: list[dict[str, Any]], answers: Path, number: int, listener: Any) -> int:
    """Write what `meta_ranks` finds in its jobs to a file. It replaces functions of torch, so it runs in a fork."""
    from engines.megatron.tests.trial import meta_ranks

    answers.write_text(json.dumps(meta_ranks.run(jobs)))
    return 0


if __name__ == "__main__":
    _main()
