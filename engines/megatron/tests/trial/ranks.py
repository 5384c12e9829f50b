"""Jobs of one rank, in Megatron's words, and what megatron-core and flagcore's physics say of them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from flagcore_training.layout import Layout, Options, Training
from flagcore_training.splits import StageLayers
from flagcore_training.stages import placed

from engines.megatron.tests.trial.trial_jobs import run_jobs
from engines.training.tests.candidates import layout as one_of
from flagcore.domain.model import Model

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
