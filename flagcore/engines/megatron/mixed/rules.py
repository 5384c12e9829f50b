"""Rules and merges of candidates with meshes: Megatron's rules on each mesh, and the rules between meshes.

Source of the rules between meshes: FlagScale da4935e, `flagscale/train/arguments.py` (`pre_validate_args`), and for the
experts the description of its pull request 395. Source of the rules of replicas: FlagScale v0.3 (5c75bb7),
`megatron/megatron/core/parallel_state.py`, `initialize_model_parallel_hetero_dp` has one TP and PP for all kinds, no
virtual stages, CP or EP; megatron-core 0.16 `parallel_state.py` has one TP, CP and PP, and refuses EP in the order of
ranks in which those of a replica are consecutive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from flagcore.domain.space import BoolArray, Columns, IntArray, Merge, Rule
from flagcore.domain.spec import Task
from flagcore.engines.megatron.layers.split import LAYERS_PER_VIRTUAL, Split
from flagcore.engines.megatron.mixed.meshes import MBS, MESHES, MICROBATCHES, OWN, SIZES, SP, SPLIT, Meshes
from flagcore.engines.megatron.space.rules import DIST_OPT

DP, TP, PP, CP, EP = (SIZES[name] for name in ("dp", "tp", "pp", "cp", "ep"))
WHOLE_CLUSTER = ("world_size", "stages_in_one_group", "expert_world_size", "virtual_needs_pipeline")
"""Rules of the plain sizes that do not apply to a mesh."""
OF_BATCH = "global_batch_size"
"""A rule that does not apply to replicas, which have shares of the batch."""


def with_meshes(task: Task, rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Return the rules of a task whose candidates may have meshes; `rules` are those without."""
    if len(task.cluster.groups) == 1:
        return tuple(rules)
    table = Meshes.from_task(task)
    return (
        *(_on_each_mesh(table, rule) for rule in rules),
        *_of_texts(task, table),
        *_of_batch(table),
        *_of_replicas(task, table),
    )


def _on_each_mesh(table: Meshes, rule: Rule) -> Rule:
    """Return a rule that, with meshes, applies to each of them."""

    def broken(columns: Columns) -> BoolArray:
        result, code = rule.broken(columns), columns[MESHES]
        rows = np.flatnonzero(code)
        if not rows.size:
            return result
        result = result.copy()
        result[rows] = False
        for mesh in range(table.groups.shape[1] if rule.name not in WHOLE_CLUSTER else 0):
            here = rows[table.groups[code[rows], mesh] >= 0]
            if rule.name == OF_BATCH:
                here = here[~table.splits_data[code[here]]]
            some = {name: column[here] for name, column in columns.items()}
            result[here] |= rule.broken(table.columns(some, mesh))
        return np.asarray(result)

    return replace(rule, knobs=(*rule.knobs, MESHES), broken=broken)


def _of_texts(task: Task, table: Meshes) -> Sequence[Rule]:
    """Return the rules that depend on the texts of the meshes alone."""
    model, there = task.spec.model, table.groups >= 0
    size = {knob: np.where(there, values, 1) for knob, values in table.codes.items()}
    last = np.maximum(there.sum(axis=1) - 1, 0)
    row = np.arange(last.size)
    ends = {knob: (size[knob][:, 0], size[knob][row, last]) for knob in (TP, DP)}
    stage = size[TP] * size[CP] * size[DP]
    used = np.stack([np.where(table.groups == g, stage * size[PP], 0).sum(axis=1) for g in range(len(_devices(task)))])
    expert_ranks = size[EP] * (Split.from_task(task).expert_tensor or size[TP])
    several, multiple = last > 0, (ends[DP][0] % ends[DP][1] == 0) | (ends[DP][1] % ends[DP][0] == 0)
    checks = {
        "mesh_devices": (
            f"the TP x CP x DP x PP of a chip's meshes must be its number of devices, {task.cluster.chips}",
            ((used != 0) & (used != _devices(task)[:, None])).any(axis=0),
        ),
        "mesh_stages": (
            f"the sum of the PP of all meshes must be at most num_layers = {model.num_layers}",
            table.lengths > model.num_layers,
        ),
        "mesh_context_parallel": (
            "all meshes need the same CP",
            np.where(there, size[CP], size[CP][:, :1]).max(axis=1) != size[CP][:, 0],
        ),
        "mesh_experts": (
            "the EP of the meshes must be 1 on all of them, or on none",
            several & ((size[EP] == 1) & there).any(axis=1) & (size[EP] > 1).any(axis=1),
        ),
        "mesh_expert_world_size": (
            "EP x expert tensor parallel size (default: TP) must divide TP x CP x DP of a mesh",
            ((stage % expert_ranks != 0) & there).any(axis=1) & (model.num_moe_experts is not None),
        ),
        "mesh_embedding": (
            "tied embeddings and multi-token prediction need the same TP on the first and the last mesh, and a DP of "
            "one that is a multiple of the other's",
            several & ~table.splits_data & tied(task) & ((ends[TP][0] != ends[TP][1]) | ~multiple),
        ),
    }
    return [
        Rule(name=name, knobs=(MESHES,), message=message, broken=_looked_up(broken))
        for name, (message, broken) in checks.items()
    ]


def tied(task: Task) -> bool:
    """Return whether the first and the last stage share weights."""
    return task.spec.model.mtp_num_layers > 0 or not task.spec.model.untie_embeddings_and_output_weights


def _looked_up(broken: BoolArray) -> Callable[[Columns], BoolArray]:
    def looked_up(columns: Columns) -> BoolArray:
        result: BoolArray = broken[columns[MESHES]] & (columns[MESHES] > 0)
        return result

    return looked_up


def _devices(task: Task) -> IntArray:
    return np.array([group.devices for group in task.cluster.groups])


def _of_batch(table: Meshes) -> Sequence[Rule]:
    """Return the rules between meshes that depend on other knobs."""
    there = table.groups >= 0
    data, tensor = np.where(there, table.codes[DP], 1), np.where(there, table.codes[TP], 1)
    several = (there.sum(axis=1) > 1) & ~table.splits_data
    return (
        Rule(
            name="mesh_batch",
            knobs=(MESHES, MBS),
            message=f"{MBS} x DP of the first mesh must be a multiple of the DP of each mesh",
            broken=lambda c: (
                ((c[MBS] * data[c[MESHES], 0])[:, None] % data[c[MESHES]] != 0).any(axis=1)
                & ~table.splits_data[c[MESHES]]
            ),
        ),
        Rule(
            name="mesh_sequence_parallel",
            knobs=(MESHES, SP),
            message=f"a mesh with TP > 1 beside another mesh needs {SP}, because messages between meshes are split",
            broken=lambda c: (c[SP] == 0) & (several & (tensor.max(axis=1) > 1))[c[MESHES]],
        ),
        Rule(
            name="mesh_virtual",
            knobs=(MESHES, LAYERS_PER_VIRTUAL),
            message="meshes exclude virtual pipeline stages",
            broken=lambda c: (c[LAYERS_PER_VIRTUAL] > 0) & (c[MESHES] > 0),
        ),
    )


def _of_replicas(task: Task, table: Meshes) -> Sequence[Rule]:
    """Return the rules of meshes that split the data."""
    batch, there = task.spec.train.global_batch_size, table.groups >= 0
    size = {knob: np.where(there, values, values[:, :1]) for knob, values in table.codes.items()}
    shapes = np.logical_or.reduce([(size[knob] != size[knob][:, :1]).any(axis=1) for knob in (TP, PP)])
    given = table.codes[MICROBATCHES] > 0

    def wrong_batch(columns: Columns) -> BoolArray:
        code = columns[MESHES]
        counts, own = table.microbatches(columns, batch), table.codes[MBS][code]
        samples = np.where(own > 0, own, columns[MBS][:, None]) * table.codes[DP][code] * counts
        missing = there[code] & (counts < 1)
        wrong: BoolArray = (samples.sum(axis=1) != batch) | missing.any(axis=1)
        return wrong & table.splits_data[code]

    checks = {
        "replicas_shape": ("meshes that split the data need the same TP and PP, to reduce their gradients", shapes),
        "replicas_context": (
            "meshes that split the data have CP 1 or PP 1",
            (size[CP][:, 0] > 1) & (size[PP][:, 0] > 1),
        ),
        "replicas_experts": ("meshes that split the data need EP 1", (size[EP] > 1).any(axis=1)),
        "replicas_mtp": (
            "meshes that split the data exclude multi-token prediction, whose loss Megatron weights per replica",
            np.full(shapes.shape, task.spec.model.mtp_num_layers > 0),
        ),
        "replicas_microbatches": (
            "meshes that split the data have x on all of them, or on none",
            given.any(axis=1) & (there & ~given).any(axis=1),
        ),
    }
    return [
        *(
            Rule(name=name, knobs=(MESHES,), message=message, broken=_looked_up(broken & table.splits_data))
            for name, (message, broken) in checks.items()
        ),
        Rule(
            name="replicas_batch",
            knobs=(MESHES, MBS),
            message=f"the sum of DP x mbs x number of micro-batches (x) of all meshes must be the batch, {batch}",
            broken=wrong_batch,
        ),
    ]


def merges_with_meshes(task: Task, merges: Sequence[Merge]) -> tuple[Merge, ...]:
    """Return the merges of a task whose candidates may have meshes; `merges` are those without."""
    if len(task.cluster.groups) == 1:
        return tuple(merges)
    table = Meshes.from_task(task)
    neutral = {**{knob: int(knob in SIZES.values()) for knob in OWN}, SPLIT: 0}
    size = np.where(table.groups >= 0, table.codes[DP] * table.codes[CP], 1).max(axis=1)
    sets_samples = table.splits_data & ((table.codes[MBS] > 0) | (table.groups < 0)).all(axis=1)
    useless = {SP: table.codes[TP].max(axis=1) == 1, DIST_OPT: (size == 1) & ~table.splits_data}

    def set_by_meshes(knob: str, value: int) -> Merge:
        return Merge(
            name=f"{knob}_of_meshes",
            knobs=(MESHES, knob),
            canonical=lambda c: {knob: np.where(c[MESHES] > 0, value, c[knob])},
        )

    def useless_on_meshes(knob: str, rows: BoolArray, neutral: int = 0) -> Merge:
        return Merge(
            name=f"useless_{knob}",
            knobs=(MESHES, knob),
            canonical=lambda c: {knob: np.where((c[MESHES] > 0) & rows[c[MESHES]], neutral, c[knob])},
        )

    def without(merge: Merge) -> Merge:
        def canonical(columns: Columns) -> Columns:
            changed = merge.canonical(columns)
            return {name: np.where(columns[MESHES] > 0, columns[name], value) for name, value in changed.items()}

        return replace(merge, knobs=(*merge.knobs, MESHES), canonical=canonical)

    return (
        *(set_by_meshes(knob, value) for knob, value in neutral.items()),
        *(useless_on_meshes(knob, rows) for knob, rows in useless.items()),
        useless_on_meshes(MBS, sets_samples, neutral=1),
        *map(without, merges),
    )
