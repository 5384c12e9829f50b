"""What SGLang rejects or silently changes, and what is the same to it.

Sources: sglang 0.5.23 `srt/arg_groups/` (parallel_hook, validation_hook, overrides).
"""

from __future__ import annotations

import numpy as np

from flagcore.domain.candidate import KnobValue
from flagcore.domain.space import Merge, Rule
from flagcore.domain.spec import Task
from flagcore.engines.serving.common import heterogeneous
from flagcore.engines.serving.common.hardware import DP, EP, TP, Hardware, longest
from flagcore.engines.serving.common.knobs import or_default
from flagcore.engines.serving.common.rules import context_rule, same_as_unset, split_rules
from flagcore.engines.serving.sglang import knobs as own
from flagcore.engines.serving.sglang.knobs import CHUNK, EAGER, PAGE, PREFILL, PREFILL_TOKENS, chunk_sizes


def rules(task: Task) -> tuple[Rule, ...]:
    """Return what is illegal."""
    experts = task.spec.model.num_moe_experts or 1
    need = longest(task.spec.serve.loads)
    return (
        *split_rules(task, data=True),
        Rule(
            name="expert_parallel",
            knobs=(TP, DP, EP),
            message=f"{EP} must divide {TP} x {DP} (SGLang's tp-size), and the {experts} experts",
            broken=lambda c: (c[EP] > 1) & (((c[TP] * c[DP]) % c[EP].clip(1) != 0) | (experts % c[EP].clip(1) != 0)),
        ),
        Rule(
            name="chunk_of_pages",
            knobs=(TP, DP, PAGE, CHUNK),
            message=f"{CHUNK} must be a multiple of {PAGE}",
            broken=lambda c: (c[CHUNK] != -1) & (chunk_sizes(task, c) % np.maximum(c[PAGE], 1) != 0),
        ),
        Rule(
            name="whole_prompts",
            knobs=(CHUNK, PREFILL),
            message=f"without chunks {PREFILL} (default {PREFILL_TOKENS}) must hold the longest prompt, of {need} "
            "tokens with its answer",
            broken=lambda c: (c[CHUNK] == -1) & (or_default(c[PREFILL], PREFILL_TOKENS) < need),
        ),
        context_rule(task, own.CONTEXT),
        *_pages(task),
    )


def _pages(task: Task) -> tuple[Rule, ...]:
    backend = str(own.parse_args(task.spec).others.get("attention-backend") or "").lower()
    sizes = own.FILE.block_sizes.get(backend)
    if sizes is None:
        return ()
    return (
        Rule(
            name="page_size",
            knobs=(PAGE,),
            message=f"{backend} takes a {PAGE} of {' or '.join(map(str, sizes))}; SGLang changes others",
            broken=lambda c: (c[PAGE] > 0) & ~np.isin(c[PAGE], sizes),
        ),
    )


def merges(task: Task) -> tuple[Merge, ...]:
    """Return values that are SGLang's defaults, and knobs without effect."""
    defaults: dict[str, KnobValue] = {own.KV: "auto", own.POLICY: "fcfs", PREFILL: PREFILL_TOKENS}
    backend = own.parse_args(task.spec).others.get("attention-backend")
    if backend is None and not task.spec.model.multi_latent_attention:
        defaults[PAGE] = 1
    no_graphs = Merge(name="no_graphs_on_cores", knobs=(EAGER,), canonical=lambda c: {EAGER: np.zeros_like(c[EAGER])})
    return (
        *heterogeneous.merges(),
        *same_as_unset(own.KNOBS, defaults),
        *((no_graphs,) if Hardware.of(task).on_cores else ()),
    )
