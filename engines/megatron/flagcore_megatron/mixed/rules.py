"""Rules and merges for candidates with meshes: Megatron's rules on each mesh, and the rules between meshes.

Source of the rules between meshes: FlagScale da4935e, `flagscale/train/arguments.py` (`pre_validate_args`), and for the
experts the description of its pull request 395. Sources of the rules of replicas: in FlagScale v0.3 (5c75bb7),
`megatron/megatron/core/parallel_state.py`, `initialize_model_parallel_hetero_dp` requires one TP and PP for all kinds,
and no virtual stages, CP or EP. megatron-core 0.16 `parallel_state.py` requires one TP, CP and PP, and refuses EP if
the ranks of a replica are consecutive.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from flagcore_training.knobs import RuleTable

from flagcore.domain.space import BoolArray, Columns, Merge, Rule
from flagcore.domain.spec import Task
from flagcore_megatron.space.meshes import CP, DP, EP, MBS, MESHES, MICROBATCHES, OWN, PP, SIZES, SP, SPLIT, TP, Meshes
from flagcore_megatron.space.rules import DIST_OPT
from flagcore_megatron.space.split import LAYERS_PER_VIRTUAL, Split

WHOLE_CLUSTER = ("world_size", "stages_in_one_group", "expert_world_size", "virtual_needs_pipeline")
"""Names of the rules about sizes on the whole cluster, which do not apply to a single mesh."""
OF_BATCH = "global_batch_size"
"""The rule about the global batch size, which does not apply to replicas, because they have shares of the batch."""
rule = RuleTable(__package__, {"MESHES": MESHES, "mbs": MBS, "sp": SP, "virtual": LAYERS_PER_VIRTUAL})


def with_meshes(task: Task, rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Extend `rules`, which apply to candidates without meshes, to tasks whose candidates may have meshes."""
    if len(task.cluster.groups) == 1:
        return tuple(rules)
    table = Meshes.from_task(task)
    return *(_on_each_mesh(table, rule) for rule in rules), *_of_texts(task, table), *_of_knobs(task, table)


def _on_each_mesh(table: Meshes, rule: Rule) -> Rule:
    """Return a rule that applies to each mesh of candidates with meshes."""

    def broken(columns: Columns) -> BoolArray:
        result, code = rule.broken(columns), columns[MESHES]
        rows = np.flatnonzero(code)
        if not rows.size:
            return result
        result = result.copy()
        result[rows] = False
        for mesh in range(table.groups.shape[1] if rule.name not in WHOLE_CLUSTER else 0):
            with_mesh = rows[table.groups[code[rows], mesh] >= 0]
            if rule.name == OF_BATCH:
                with_mesh = with_mesh[~table.splits_data[code[with_mesh]]]
            subset = {name: column[with_mesh] for name, column in columns.items()}
            result[with_mesh] |= rule.broken(table.columns(subset, mesh))
        return np.asarray(result)

    return replace(rule, knobs=(*rule.knobs, MESHES), broken=broken)


def _of_texts(task: Task, table: Meshes) -> Iterator[Rule]:
    """Yield the rules that depend only on the texts of the meshes."""
    model, has_mesh, splits_data = task.spec.model, table.groups >= 0, table.splits_data
    size = {knob: np.where(has_mesh, values, 1) for knob, values in table.codes.items()}
    last = np.maximum(has_mesh.sum(axis=1) - 1, 0)
    row = np.arange(last.size)
    ends = {knob: (size[knob][:, 0], size[knob][row, last]) for knob in (TP, DP)}
    stage = size[TP] * size[CP] * size[DP]
    devices = np.array([group.devices for group in task.cluster.groups])
    used = np.stack([np.where(table.groups == g, stage * size[PP], 0).sum(axis=1) for g in range(devices.size)])
    expert_ranks = size[EP] * (Split.from_task(task).expert_tensor or size[TP])
    several, multiple = last > 0, (ends[DP][0] % ends[DP][1] == 0) | (ends[DP][1] % ends[DP][0] == 0)
    differ = {knob: (has_mesh & (size[knob] != size[knob][:, :1])).any(axis=1) for knob in (TP, PP, CP)}
    has_experts, has_microbatches = (size[EP] > 1).any(axis=1), has_mesh & (table.codes[MICROBATCHES] > 0)
    broken = {
        "mesh_devices": ((used != 0) & (used != devices[:, None])).any(axis=0),
        "mesh_stages": table.lengths > model.num_layers,
        "mesh_context_parallel": differ[CP],
        "mesh_experts": several & ((size[EP] == 1) & has_mesh).any(axis=1) & has_experts,
        "mesh_expert_world_size": ((stage % expert_ranks != 0) & has_mesh).any(axis=1) & (model.experts > 0),
        "mesh_embedding": several & ~splits_data & tied(task) & ((ends[TP][0] != ends[TP][1]) | ~multiple),
        "replicas_shape": splits_data & (differ[TP] | differ[PP]),
        "replicas_context": splits_data & (size[CP][:, 0] > 1) & (size[PP][:, 0] > 1),
        "replicas_experts": splits_data & has_experts,
        "replicas_mtp": splits_data & (model.mtp_num_layers > 0),
        "replicas_microbatches": (
            splits_data & has_microbatches.any(axis=1) & (has_mesh & ~has_microbatches).any(axis=1)
        ),
    }
    for name, rows in broken.items():
        yield rule(name, _looked_up(rows), chips=task.cluster.chips, layers=model.num_layers)


def tied(task: Task) -> bool:
    """Return whether the first and the last stage of a pipeline share weights."""
    return task.spec.model.mtp_num_layers > 0 or not task.spec.model.untie_embeddings_and_output_weights


def _looked_up(broken: BoolArray) -> Callable[[Columns], BoolArray]:
    return lambda columns: broken[columns[MESHES]] & (columns[MESHES] > 0)


def _of_knobs(task: Task, table: Meshes) -> Iterator[Rule]:
    """Yield the rules between meshes that also depend on other knobs."""
    batch, has_mesh, splits_data = task.spec.train.global_batch_size, table.groups >= 0, table.splits_data
    data, tensor = np.where(has_mesh, table.codes[DP], 1), np.where(has_mesh, table.codes[TP], 1)
    needs_split = (has_mesh.sum(axis=1) > 1) & ~splits_data & (tensor.max(axis=1) > 1)

    def wrong_batch(columns: Columns) -> BoolArray:
        code, counts = columns[MESHES], table.microbatches(columns, batch)
        samples = table.sizes(columns) * table.codes[DP][code] * counts
        wrong: BoolArray = (samples.sum(axis=1) != batch) | (has_mesh[code] & (counts < 1)).any(axis=1)
        return wrong & splits_data[code]

    def indivisible(columns: Columns) -> BoolArray:
        ranks, is_apart = data[columns[MESHES]], splits_data[columns[MESHES]]
        return np.asarray(((columns[MBS] * ranks[:, 0])[:, None] % ranks != 0).any(axis=1) & ~is_apart)

    yield rule("mesh_batch", indivisible)
    yield rule("mesh_sequence_parallel", lambda c: (c[SP] == 0) & needs_split[c[MESHES]])
    vendors = {group.chip.vendor for group in task.cluster.groups}
    needs_meshes = len(vendors) > 1 and task.spec.train.command is None  # only FlagScale's meshes connect vendors
    yield rule("mesh_virtual", lambda c: (c[LAYERS_PER_VIRTUAL] > 0) & ((c[MESHES] > 0) | needs_meshes))
    yield rule("replicas_batch", wrong_batch, batch=batch)


def merges_with_meshes(task: Task, merges: Sequence[Merge]) -> tuple[Merge, ...]:
    """Extend `merges` to tasks whose candidates may have meshes.

    The given merges apply only to candidates without meshes. Further merges reset the knobs that a candidate's meshes
    set or make irrelevant.
    """
    if len(task.cluster.groups) == 1:
        return tuple(merges)
    table = Meshes.from_task(task)
    neutral = {**{knob: int(knob in SIZES.values()) for knob in OWN}, SPLIT: 0}
    size = np.where(table.groups >= 0, table.codes[DP] * table.codes[CP], 1).max(axis=1)
    sets_samples = table.splits_data & ((table.codes[MBS] > 0) | (table.groups < 0)).all(axis=1)
    useless = {SP: table.codes[TP].max(axis=1) == 1, DIST_OPT: (size == 1) & ~table.splits_data}
    useless[MBS] = sets_samples

    def on_meshes(name: str, knob: str, rows: BoolArray | np.bool_, value: int) -> Merge:
        """Return a merge that sets a knob to `value` for the candidates whose meshes `rows` of the table select."""
        rows = np.broadcast_to(rows, size.shape)
        return Merge(
            name=name,
            knobs=(MESHES, knob),
            canonical=lambda c: {knob: np.where((c[MESHES] > 0) & rows[c[MESHES]], value, c[knob])},
        )

    def without(merge: Merge) -> Merge:
        def canonical(columns: Columns) -> Columns:
            changed = merge.canonical(columns)
            return {name: np.where(columns[MESHES] > 0, columns[name], value) for name, value in changed.items()}

        return replace(merge, knobs=(*merge.knobs, MESHES), canonical=canonical)

    return (
        *(on_meshes(f"{knob}_of_meshes", knob, np.True_, value) for knob, value in neutral.items()),
        *(on_meshes(f"useless_{knob}", knob, rows, int(knob == MBS)) for knob, rows in useless.items()),
        *map(without, merges),
    )
