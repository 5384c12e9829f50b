"""Jobs for the trial program's tests, and a process that runs many of them after importing torch once.

Run as a program: `python trial_jobs.py JOBS.json`, a list of [name, job]. Prints {name: exit code} as JSON.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]

DENSE: dict[str, Any] = {
    "name": "dense",
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 16,
    "vocab_size": 512,
    "gated_linear_unit": True,
    "untie_embeddings_and_output_weights": True,
}
EXPERTS: dict[str, Any] = {
    **DENSE,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 48,
    "moe_shared_expert_intermediate_size": 64,
    "moe_first_dense_layers": 1,
}
LATENT: dict[str, Any] = {
    **DENSE,
    "num_query_groups": 4,
    "multi_latent_attention": True,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
    "qk_layernorm": True,
}
TRAIN: dict[str, Any] = {
    "seq_length": 32,
    "global_batch_size": 16,
    "precision": "fp32",
    "train_iters": 3,
    "seed": 1234,
}
DEVICE: dict[str, Any] = {"type": "cpu", "backend": "gloo", "preload": [], "threads_per_rank": 1}


def make_job(output: Path, model: dict[str, Any], *, train: dict[str, Any] | None = None, **knobs: Any) -> Any:
    """Return a job as its file has it; `train` changes the common training settings."""
    return copy.deepcopy(
        {
            "model": model,
            "train": {**TRAIN, **(train or {})},
            "candidate": {"micro_batch_size": 2, **knobs},
            "device": DEVICE,
            "output": str(output),
        }
    )


def environment(*packages: Path) -> dict[str, str]:
    """The environment of a process that can import flagcore, and what lies in further folders before that installed."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*packages, ROOT)))}


def run_jobs(folder: Path, jobs: dict[str, Any], *packages: Path) -> tuple[dict[str, int], str]:
    """Run jobs one after the other in one warm process; return their exit codes and its stderr."""
    path = folder / "jobs.json"
    path.write_text(json.dumps(list(jobs.items())), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, __file__, str(path)],
        env=environment(*packages),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def _main(path: str) -> None:
    from flagcore import forked_ranks as ranks
    from flagcore.engines.megatron.trial import __main__ as program
    from flagcore.engines.megatron.trial import failures
    from flagcore.engines.megatron.trial.job import JobError, parse_job

    codes = {}
    for name, data in json.loads(Path(path).read_text(encoding="utf-8")):
        print(f"--- {name}", file=sys.stderr)
        try:
            job = parse_job(data)
        except JobError as error:
            codes[name] = failures.report(error)
            continue
        program.prepare(job)
        program.clear_output(job.output)
        import_s = program.warm_up(job)
        codes[name] = ranks.run_ranks(job.processes, partial(program.run_forked_rank, job, import_s))
    print(json.dumps(codes))


if __name__ == "__main__":
    _main(sys.argv[1])
