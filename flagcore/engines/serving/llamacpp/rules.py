"""What llama.cpp rejects, silently changes or aborts at, and what is the same to it.

Sources: the server's README, and what the server of xllamacpp 2026.10.11549 did.
"""

from __future__ import annotations

import numpy as np

from flagcore.domain.space import Columns, Merge, Rule
from flagcore.domain.spec import Task
from flagcore.engines.serving.common import heterogeneous
from flagcore.engines.serving.common.hardware import INSTANCES, PP, SIZES, TP, Hardware, longest
from flagcore.engines.serving.common.knobs import code, or_default
from flagcore.engines.serving.common.rules import context_rule, same_as_unset, split_rules
from flagcore.engines.serving.llamacpp import knobs as own
from flagcore.engines.serving.llamacpp.knobs import (
    AUTO_SLOTS,
    BATCH,
    BATCH_THREADS,
    CONTEXT,
    FLASH,
    KV,
    LAYERS,
    MAX_SLOTS,
    N_BATCH,
    N_UBATCH,
    PARALLEL,
    SLOT_GRAIN,
    SPLIT,
    THREADS,
    UBATCH,
    UNIFIED,
)


def rules(task: Task) -> tuple[Rule, ...]:
    """Return what is illegal, with the log lines of the wheel as sources."""
    hardware, total = Hardware.of(task), own.total_context(task)
    plain = [0, *(code(own.BY_NAME[KV], name) for name in own.PLAIN_KV)]
    none, layer, *by_rows = (code(own.BY_NAME[SPLIT], name) for name in ("none", "layer", "row", "tensor"))
    off = code(own.BY_NAME[FLASH], "off")
    return (
        *split_rules(task, data=False),
        Rule(
            name="cores_are_not_split",
            knobs=(TP, PP),
            message=f"{TP} and {PP} are 1 where devices are cores: threads share the work there",
            broken=lambda c: ((c[TP] > 1) | (c[PP] > 1)) & hardware.on_cores,
        ),
        Rule(
            name="one_split",
            knobs=(TP, PP),
            message=f"llama.cpp splits by rows ({TP}) or by layers ({PP}), not both",
            broken=lambda c: (c[TP] > 1) & (c[PP] > 1),
        ),
        Rule(
            name="split_mode",
            knobs=(TP, PP, SPLIT),
            message=f"split_mode row or tensor needs {TP} > 1, layer {PP} > 1, none neither",
            broken=lambda c: (
                (np.isin(c[SPLIT], by_rows) & ((c[TP] == 1) | (c[PP] > 1)))
                | ((c[SPLIT] == layer) & ((c[PP] == 1) | (c[TP] > 1)))
                | ((c[SPLIT] == none) & ((c[TP] > 1) | (c[PP] > 1)))
            ),
        ),
        Rule(
            name="sizes_by_rows",
            knobs=(SPLIT, SIZES),
            message=f"split_mode is not given beside {SIZES}: instances of several devices are split by rows",
            broken=lambda c: (c[SPLIT] > 0) & (c[SIZES] > 0),
        ),
        Rule(
            name="most_slots",
            knobs=(PARALLEL,),
            message=f"{PARALLEL} must not exceed {MAX_SLOTS}",
            broken=lambda c: c[PARALLEL] > MAX_SLOTS,
        ),
        Rule(
            name="batch_holds_slots",
            knobs=(PARALLEL, N_BATCH),
            message=f"{N_BATCH} must not be below {PARALLEL}, or llama.cpp aborts",
            broken=lambda c: (c[N_BATCH] > 0) & (c[N_BATCH] < or_default(c[PARALLEL], AUTO_SLOTS)),
        ),
        Rule(
            name="ubatch_in_batch",
            knobs=(N_BATCH, N_UBATCH),
            message=f"{N_UBATCH} must not exceed {N_BATCH} (default {BATCH}), to which llama.cpp lowers it",
            broken=lambda c: c[N_UBATCH] > or_default(c[N_BATCH], BATCH),
        ),
        Rule(
            name="quantized_cache",
            knobs=(FLASH, KV),
            message=f"a quantized {KV} needs flash_attention",
            broken=lambda c: (c[FLASH] == off) & ~np.isin(c[KV], plain),
        ),
        Rule(
            name="threads_on_cores",
            knobs=(INSTANCES, THREADS, BATCH_THREADS),
            message=f"{THREADS} (and {BATCH_THREADS}) x {INSTANCES} must not exceed the {hardware.cards} cores",
            broken=lambda c: (
                (np.maximum(c[THREADS], c[BATCH_THREADS]) * c[INSTANCES] > hardware.cards) & hardware.on_cores
            ),
        ),
        context_rule(task, CONTEXT),
        Rule(
            name="context_grain",
            knobs=(CONTEXT,),
            message=f"{CONTEXT} must be a multiple of {SLOT_GRAIN}, to which llama.cpp rounds it up",
            broken=lambda c: c[CONTEXT] % SLOT_GRAIN != 0,
        ),
        *((_slot_context(task, total),) if total else ()),
    )


def _slot_context(task: Task, total: int) -> Rule:
    need = longest(task.spec.serve.loads)
    return Rule(
        name="slot_context",
        knobs=(PARALLEL, UNIFIED),
        message=f"ctx-size = {total} over {PARALLEL} slots must hold the longest request of {need} tokens in each",
        broken=lambda c: own.slot_share(c, total) < need,
    )


def merges(task: Task) -> tuple[Merge, ...]:
    """Return knobs without effect, and values that are llama.cpp's defaults."""
    hardware = Hardware.of(task)
    whole = [code(own.BY_NAME[SPLIT], name) for name in ("none", "layer", "row")]

    def batches(c: Columns) -> Columns:
        default = np.minimum(UBATCH, or_default(c[N_BATCH], BATCH))
        return {N_UBATCH: np.where(c[N_UBATCH] == default, 0, c[N_UBATCH])}

    on_cores = Merge(
        name="nothing_to_offload", knobs=(LAYERS,), canonical=lambda c: {LAYERS: np.full_like(c[LAYERS], -1)}
    )
    return (
        *heterogeneous.merges(*((THREADS, BATCH_THREADS) if hardware.on_cores else ())),
        Merge(
            name="batch_threads_as_threads",
            knobs=(THREADS, BATCH_THREADS),
            canonical=lambda c: {BATCH_THREADS: np.where(c[BATCH_THREADS] == c[THREADS], 0, c[BATCH_THREADS])},
        ),
        *same_as_unset(own.KNOBS, {N_BATCH: BATCH, FLASH: "auto", KV: "f16"}),
        Merge(
            name="split_by_default",  # one device has nothing to split; stages have layers, tensor parallelism rows
            knobs=(SPLIT,),
            canonical=lambda c: {SPLIT: np.where(np.isin(c[SPLIT], whole), 0, c[SPLIT])},
        ),
        Merge(name="ubatch_by_default", knobs=(N_BATCH, N_UBATCH), canonical=batches),
        *((on_cores,) if hardware.on_cores else ()),
    )
