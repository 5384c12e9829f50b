"""Jobs for the trial program's tests, and a process that runs many of them after importing torch once.

Run as a program: reads lines of JSON, each [folder, [[name, job], ...]], and answers each with {name: exit code}.
A job {"simulated": [...]} is a list of jobs of `engines.megatron.tests.trial.meta_ranks`.

Jobs of one rank, in Megatron's words, and what megatron-core and flagcore's physics say of them."""

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
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flagcore_training.layout import Layout, Options, Training
from flagcore_training.splits import StageLayers
from flagcore_training.stages import placed

from engines.training.tests.simulation import layout as one_of
from flagcore.domain.model import Model
from tests.checks import given

NEEDS_MEGATRON = pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra megatron")
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


DP, TP, PP = (f"{name}_parallel_size" for name in ("data", "tensor_model", "pipeline_model"))
VP = f"virtual_{PP}"
EP, ETP, SP = "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel"
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
LETTERS = "pipeline_model_parallel_layout"
SHARDED, MICRO = "use_distributed_optimizer", "micro_batch_size"


def world(knobs: dict[str, Any]) -> int:
    """Return the number of ranks."""
    return int(np.prod([knobs.get(name, 1) for name in (TP, PP, DP)]))


def of_megatron(
    model: dict[str, Any], rank: int, knobs: dict[str, Any], *, steps: int = 0, **job: Any
) -> dict[str, Any]:
    """Return a job of `meta_ranks.py`; with `steps` micro-batches in a step it trains."""
    candidate = {MICRO: 1, **knobs}
    config = {name: candidate.pop(name) for name in (EMBEDDING, LOSS, LETTERS) if name in candidate}
    copies = candidate.pop(DP, 1)
    return {
        "model": model,
        "precision": "bf16",
        "seq_length": 4096,
        "rank": rank,
        "world": world(knobs),
        "candidate": candidate,
        "config": config,
        "global_batch_size": copies * candidate[MICRO] * steps,
        "train": steps > 0,
        **job,
    }


def of_physics(
    model: dict[str, Any], knobs: dict[str, Any], *, steps: int = 1, **train: Any
) -> tuple[Training, Layout]:
    """Return the same job as physics takes it."""
    shape = dict(model)
    shape.setdefault("num_query_groups", shape["num_attention_heads"])
    shape.setdefault("kv_channels", shape["hidden_size"] // shape["num_attention_heads"])
    letters = knobs.get(LETTERS)
    stages = tuple(
        StageLayers(embedding=s.count("E"), layers=s.count("t"), mtp=s.count("m"), loss=s.count("L"))
        for s in (letters.split("|") if letters else ())
    )
    options = Options(
        account_for_embedding=knobs.get(EMBEDDING, False),
        account_for_loss=knobs.get(LOSS, False),
        recompute_modules=frozenset(knobs.get("recompute_modules", ("core_attn",))),
    )
    values = {"sequence": 4096, "global_batch": 8, "precision": "bf16", "fused_activation": True, **train}
    found, split = Model(name="x", **shape), layout(knobs, steps)
    if stages:
        split, options = placed(found, split, options, stages)
    return Training(model=found, options=options, **values), split


def layout(knobs: dict[str, Any], steps: int = 1) -> Layout:
    """Return knobs as one row of columns."""
    fields = {"data": DP, "tensor": TP, "pipeline": PP, "virtual": VP, "context": "context_parallel_size", "expert": EP}
    fields |= {"micro_batch": MICRO, "sharded_optimizer": SHARDED, "sequence_parallel": SP}
    fields |= {"first_layers": FIRST, "last_layers": LAST}
    values: dict[str, Any] = {field: knobs[name] for field, name in fields.items() if knobs.get(name)}
    is_full, is_block = knobs.get("recompute_granularity") == "full", knobs.get("recompute_method") == "block"
    number = (knobs.get("recompute_num_layers") or 0) * is_full
    return one_of(
        **values,
        expert_tensor=knobs.get(ETP) or knobs.get(TP, 1),
        microbatches=steps,
        selective=knobs.get("recompute_granularity") == "selective",
        uniform=number * (not is_block),
        block=number * is_block,
    )


def run_ranks(folder: Path, jobs: list[dict[str, Any]]) -> list[Any]:
    """Build or train ranks in a fork of the tests' warm process: torch stays out of this one."""
    codes, stderr = run_jobs(folder, {"ranks": {"simulated": jobs}})
    assert codes["ranks"] == 0, stderr[-2000:]
    answers: list[Any] = json.loads((folder / "ranks").read_text())
    return answers
