"""The merges of candidates that Megatron treats as equal."""

from collections.abc import Sequence

import numpy as np

from flagcore.domain.space import Columns, IntArray, Merge
from flagcore.domain.spec import Task
from flagcore_megatron.space.knobs import BLOCK, FULL, UNIFORM
from flagcore_megatron.space.meshes import CP, DP, EP, PP, SP, TP
from flagcore_megatron.space.options import settings_in_force
from flagcore_megatron.space.rules import (
    DIST_OPT,
    DIST_OPT_SETTINGS,
    GRANULARITY,
    METHOD,
    RECOMPUTE,
    RECOMPUTE_LAYERS,
    recomputes,
)
from flagcore_megatron.space.split import LAYERS_PER_VIRTUAL, SPLIT, Split, balanced, derived


def merges(task: Task) -> tuple[Merge, ...]:
    """Return merges of candidates that Megatron treats as equal: knobs without effect, and equivalent schedules."""
    split, is_dense, can_derive = Split.from_task(task), not task.spec.model.experts, derived(task)
    settings = settings_in_force(task.spec)
    sharded = any(settings.get(name) for name in DIST_OPT_SETTINGS if name not in task.spec.train.assumed)

    def virtual(c: Columns) -> dict[str, IntArray]:
        is_derived, parts = balanced(c), split.virtual(c)
        has_one_stage = (c[PP] == 1) | np.where(is_derived, parts == 1, c[LAYERS_PER_VIRTUAL] * c[PP] == split.counted)
        per_virtual = c[LAYERS_PER_VIRTUAL]
        per_virtual = np.where(is_derived & (per_virtual > 0), -(-split.layers // (c[PP] * parts)), per_virtual)
        return {LAYERS_PER_VIRTUAL: np.where(has_one_stage, 0, per_virtual)}

    return (
        Merge(
            name="sequence_parallel_without_tensor_parallel",
            knobs=(TP, SP),
            canonical=lambda c: {SP: np.where(c[TP] == 1, 0, c[SP])},
        ),
        Merge(
            name="distributed_optimizer_of_one",
            knobs=(DP, CP, DIST_OPT),
            canonical=lambda c: {DIST_OPT: np.where((c[DP] * c[CP] == 1) & (not sharded), 0, c[DIST_OPT])},
        ),
        Merge(
            name="experts_of_a_dense_model",
            knobs=(EP,),
            canonical=lambda c: {EP: np.ones_like(c[EP]) if is_dense else c[EP]},
        ),
        Merge(
            name="nothing_to_balance",
            knobs=(PP, SPLIT),
            canonical=lambda c: {SPLIT: np.where(((c[PP] > 1) | split.has_bars) & can_derive, c[SPLIT], 0)},
        ),
        Merge(name="one_virtual_stage", knobs=(PP, SPLIT, LAYERS_PER_VIRTUAL), canonical=virtual),
        *_recompute_merges(split),
    )


def _recompute_merges(split: Split) -> Sequence[Merge]:
    def recompute_layers(c: Columns) -> dict[str, IntArray]:
        block, number = c[METHOD] == BLOCK, c[RECOMPUTE_LAYERS]
        recomputes_all = block & (number >= split.chunk_layers(c)[0]) & (number <= split.stage_layers(c))
        method, layers = np.where(recomputes_all, UNIFORM, c[METHOD]), np.where(recomputes_all, 1, number)
        return {METHOD: method, RECOMPUTE_LAYERS: layers}

    return (
        Merge(
            name="granularity_without_recompute",
            knobs=(RECOMPUTE, GRANULARITY),
            canonical=lambda c: {GRANULARITY: c[GRANULARITY] * c[RECOMPUTE]},
        ),
        Merge(
            name="method_without_full_recompute",
            knobs=(RECOMPUTE, GRANULARITY, METHOD),
            canonical=lambda c: {METHOD: np.where(recomputes(c, FULL), c[METHOD], 0)},
        ),
        Merge(
            name="number_without_full_recompute",
            knobs=(RECOMPUTE, GRANULARITY, RECOMPUTE_LAYERS),
            canonical=lambda c: {RECOMPUTE_LAYERS: np.where(recomputes(c, FULL), c[RECOMPUTE_LAYERS], 0)},
        ),
        Merge(
            name="recompute_of_every_layer",
            knobs=(PP, SPLIT, LAYERS_PER_VIRTUAL, METHOD, RECOMPUTE_LAYERS),
            canonical=recompute_layers,
        ),
    )
