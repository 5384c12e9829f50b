"""Meshes: the stages of a pipeline on one kind of chip, with their own parallel sizes and recompute.

The knob `meshes` lists the meshes of a candidate in the order of the pipeline, such as `CHIP tp2 dp16 + OTHER tp4 dp8
full`. Each mesh consists of the name of a node group, sizes (1 if they are missing), and optionally its recompute. The
other knobs of sizes and recompute are then neutral. All meshes process the same samples at once: `micro_batch_size`
applies to the first mesh.

With ` | ` between the meshes, the data is split instead of the layers: each mesh has whole replicas, such as `CHIP tp2
dp16 x6 | OTHER tp2 dp8 mbs1 x4`. `mbs` is the micro-batch size of a mesh (by default `micro_batch_size`), `x` the
number of micro-batches of each replica (by default the same for all replicas). The replicas of each group process their
micro-batches independently of the others, and all replicas reduce their gradients together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from flagcore_training.layout import pick

from flagcore.contracts import Costs
from flagcore.domain.cluster import Cluster
from flagcore.domain.knob import Knob
from flagcore.domain.prediction import MEMORY, Predictions
from flagcore.domain.space import BoolArray, Columns, IntArray
from flagcore.domain.spec import Task
from flagcore.errors import SpecError
from flagcore.i18n import N_

MESHES = "meshes"
KNOB = Knob(
    name=MESHES,
    help="Meshes of a cluster with several groups: for each chip its parallel sizes and recompute. With + they are in "
    "the order of one pipeline, with a vertical bar each has whole replicas.",
    kind="text",
    maximum=1000,
    auto=lambda task: (None,),
    answers="seeds",
)

SIZES = {
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "dp": "data_parallel_size",
    "pp": "pipeline_model_parallel_size",
}
_SIZE, _BLOCK = re.compile(r"(tp|cp|ep|dp|pp|mbs|x)([1-9]\d{0,6})"), re.compile(r"block([1-9]\d{0,4})")
PIPELINE, REPLICAS = " + ", " | "
"""Separators between meshes in a text: between the parts of a pipeline, and between groups of replicas."""
RECOMPUTE_KNOBS = ("use_recompute", "recompute_granularity", "recompute_method", "recompute_num_layers")
RECOMPUTE_CODES = {"": (0, 0, 0, 0), "selective": (1, 1, 0, 0), "full": (1, 2, 1, 1)}
"""Codes of the recompute knobs for the recompute of a mesh; `full` recomputes each layer.

`blockN`, which recomputes the first N layers of a stage, has codes that depend on N."""
OWN = (*SIZES.values(), *RECOMPUTE_KNOBS)
"""Knobs whose values each mesh sets for itself."""
MBS, SP, SPLIT = "micro_batch_size", "sequence_parallel", "layer_split"
MICROBATCHES, ALL_REPLICAS = "microbatches", "replicas"
"""Columns of a mesh with replicas: the micro-batches of each replica, and the number of replicas of all meshes."""
_OF_REPLICAS = {"mbs": MBS, "x": MICROBATCHES}
DP, TP, PP, CP, EP = (SIZES[name] for name in ("dp", "tp", "pp", "cp", "ep"))


class Meshes(NamedTuple):
    """The values of the knob `meshes` in a space, numbered from 1 as in its column. Each value is a text.

    `groups` are the node groups in the order of the pipeline, -1 for none: (texts + 1, meshes). `codes` are the codes
    of the knobs in `OWN`, in the same shape. `lengths` is the number of stages of each pipeline.

    `splits_data` is whether each mesh of a text has whole replicas. Then `codes` also has the micro-batch size of each
    mesh and its micro-batches per replica; they are 0 if the text does not set them.
    """

    texts: tuple[str, ...]
    groups: IntArray
    codes: Mapping[str, IntArray]
    lengths: IntArray
    splits_data: BoolArray

    @classmethod
    def from_task(cls, task: Task) -> Meshes:
        """Return the meshes that the space of a task lists. Raises SpecError for an invalid text."""
        listed, baseline = task.spec.space.get(MESHES, ()), (task.spec.baseline or {}).get(MESHES)
        values = [*(() if isinstance(listed, str) else listed), baseline]
        texts = tuple(dict.fromkeys(str(value) for value in values if value))
        return _meshes(texts, task.cluster.names)

    def number(self, code: IntArray) -> IntArray:
        """Return the number of meshes of each candidate."""
        number: IntArray = (self.groups[code] >= 0).sum(axis=1)
        return number

    def columns(self, columns: Columns, mesh: int) -> Columns:
        """Return the knob columns of the candidates' mesh with the index `mesh`, with the pipeline size of all meshes.

        Knobs without a column are omitted.
        """
        code = columns[MESHES]
        mesh_columns = {knob: values[code, mesh] for knob, values in self.codes.items()}
        splits_data = self.splits_data[code]
        if MBS in columns:
            samples = columns[MBS] * self.codes[DP][code, 0]
            in_pipeline = np.maximum(samples // np.maximum(mesh_columns[DP], 1), 1)
            mesh_columns[MBS] = np.where(
                splits_data, np.where(mesh_columns[MBS] > 0, mesh_columns[MBS], columns[MBS]), in_pipeline
            )
        if SP in columns:
            mesh_columns[SP] = columns[SP] * (mesh_columns[TP] > 1)
        mesh_columns |= {PP: self.lengths[code], SPLIT: 1 - splits_data, MESHES: np.where(splits_data, 0, code)}
        return {name: mesh_columns.get(name, column) for name, column in columns.items()}

    def of_replicas(self, columns: Columns, number: int, batch: int) -> list[Columns]:
        """Return the knob columns of each mesh, for candidates that split the data over `number` meshes."""
        counts = self.microbatches(columns, batch)
        replicas = self.codes[DP][columns[MESHES]][:, :number].sum(axis=1)
        return [
            {**self.columns(columns, place), MICROBATCHES: counts[:, place], ALL_REPLICAS: replicas}
            for place in range(number)
        ]

    def microbatches(self, columns: Columns, batch: int) -> IntArray:
        """Return the micro-batches per replica of each mesh, for candidates that split the data.

        The shape is (candidates, meshes). If the text of the meshes has no `x`, all replicas have the same number: the
        batch divided by the samples that all replicas process at once, rounded down.
        """
        code = columns[MESHES]
        has_mesh, counts = self.groups[code] >= 0, self.codes[MICROBATCHES][code]
        samples = self.sizes(columns) * self.codes[DP][code] * has_mesh
        even = batch // np.maximum(samples.sum(axis=1, keepdims=True), 1)
        return np.where(counts > 0, counts, even) * has_mesh

    def sizes(self, columns: Columns) -> IntArray:
        """Return the micro-batch size of each mesh as (candidates, meshes), for candidates that split the data."""
        mesh_sizes = self.codes[MBS][columns[MESHES]]
        return np.where(mesh_sizes > 0, mesh_sizes, columns[MBS][:, None])


def recompute_codes(word: str) -> tuple[int, ...]:
    """Return the codes of the recompute knobs that a mesh's recompute `word` stands for; empty for any other word."""
    block = _BLOCK.fullmatch(word)
    return (1, 2, 2, int(block[1])) if block else RECOMPUTE_CODES.get(word, ())


def mesh_text(name: str, sizes: Mapping[str, int], recompute: str = "", replicas: str = "") -> str:
    """Return the text of one mesh.

    The keys of `sizes` are those of `SIZES`. `replicas` is the text for the replicas' micro-batches.
    """
    size_words = (f"{key}{sizes[key]}" for key in SIZES if sizes[key] > 1)
    return " ".join([name, *size_words, *filter(None, [recompute, replicas])])


@lru_cache(maxsize=64)
def _meshes(texts: tuple[str, ...], names: tuple[str, ...]) -> Meshes:
    splits_data = np.array([False, *(REPLICAS in text for text in texts)])
    rows = [
        [_parse(part, text, names) for part in text.split(REPLICAS if REPLICAS in text else PIPELINE)] for text in texts
    ]
    for text, row in zip(texts, rows, strict=True):
        chips = [names[group] for group, _ in row] if REPLICAS in text else []
        if repeated := next((chip for chip in chips if chips.count(chip) > 1), None):
            key, problem = f"auto_tuner.space.{MESHES}", f"has {repeated} more than once"
            fix = f"give each chip one mesh of replicas; chips: {', '.join(names)}"
            raise SpecError(key=key, value=text, problem=problem, fix=fix)
    longest = max((len(row) for row in rows), default=1)
    groups = np.full((len(rows) + 1, longest), -1, dtype=np.int64)
    codes = {knob: np.ones_like(groups) * (knob in SIZES.values()) for knob in (*OWN, *_OF_REPLICAS.values())}
    for number, row in enumerate(rows, start=1):
        for place, (group, values) in enumerate(row):
            groups[number, place] = group
            for knob, value in values.items():
                codes[knob][number, place] = value
    lengths = np.where(splits_data, codes[PP][:, 0], np.where(groups >= 0, codes[PP], 0).sum(axis=1))
    return Meshes(texts, groups, codes, lengths, splits_data)


def _parse(part: str, text: str, names: Sequence[str]) -> tuple[int, dict[str, int]]:
    """Return the node group of the mesh in `part`, and the codes of its knobs. Raises SpecError for an invalid text."""
    name, *words = part.split() or [""]
    values = dict(zip(RECOMPUTE_KNOBS, RECOMPUTE_CODES[""], strict=True))
    wrong = [] if name in names else [name]
    for word in words:
        size = _SIZE.fullmatch(word)
        if size and (size[1] in SIZES or REPLICAS in text):
            values[SIZES.get(size[1]) or _OF_REPLICAS[size[1]]] = int(size[2])
        elif codes := recompute_codes(word):
            values |= zip(RECOMPUTE_KNOBS, codes, strict=True)
        else:
            wrong.append(word)
    if wrong:
        split = f"{names[0]} tp2 dp4 pp2 full + {names[-1]} tp4 dp2 (one pipeline)"
        fix = f"write e.g. {split}, or {names[0]} dp8 x3 | {names[-1]} dp8 x1 (replicas); chips: {', '.join(names)}"
        raise SpecError(key=f"auto_tuner.space.{MESHES}", value=text, problem=f"has the unknown {wrong[0]!r}", fix=fix)
    return names.index(name), values


def encoded(task: Task, value: object) -> IntArray:
    """Encode one candidate's value of the knob `meshes` as a column. Raises SpecError if the space does not list it."""
    texts = Meshes.from_task(task).texts
    if value is not None and value not in texts:
        raise SpecError(
            key=MESHES, value=value, problem="is not in auto_tuner.space", fix=f"add it to auto_tuner.space.{MESHES}"
        )
    return np.array([0 if value is None else 1 + texts.index(str(value))], dtype=np.int64)


def by_kinds(task: Task, columns: Columns, costs: Costs) -> Iterator[tuple[IntArray, list[tuple[Columns, Costs]]]]:
    """Group candidates by the node groups of their meshes, and yield each group's rows, columns and costs.

    Candidates that split the layers have one item of columns and costs, in the order of the pipeline. Candidates that
    split the data have an item for each mesh.
    """
    code = columns.get(MESHES)
    if code is None or not code.any():
        yield np.arange(next(iter(columns.values())).size), [(columns, costs)]
        return
    table = Meshes.from_task(task)
    kinds = np.column_stack((table.splits_data[code], table.groups[code]))
    kinds, kind_index = np.unique(kinds, axis=0, return_inverse=True)
    for number, (splits_data, *groups) in enumerate(kinds.tolist()):
        rows, order = np.flatnonzero(kind_index.reshape(-1) == number), [group for group in groups if group >= 0]
        row_columns = {name: column[rows] for name, column in columns.items()}
        if splits_data:
            mesh_columns = table.of_replicas(row_columns, len(order), task.spec.train.global_batch_size)
            costs_here = (replace(costs.groups[group], further={}, between=costs.between) for group in order)
            yield rows, list(zip(mesh_columns, costs_here, strict=True))
        else:
            yield rows, [(row_columns, _ordered(task.cluster, costs, order))]


def splits(task: Task, columns: Columns) -> dict[str, BoolArray]:
    """Return two masks by name: of the candidates that split the layers over node groups, and that split the data."""
    code, table = columns.get(MESHES), Meshes.from_task(task)
    if code is None:
        return {}
    has_several_meshes = (code == 0) | (table.number(code) > 1)
    splits_data = table.splits_data[code]
    return {N_("layer split"): has_several_meshes & ~splits_data, N_("data split"): has_several_meshes & splits_data}


def groups_of_row(task: Task, columns: Columns) -> list[int]:
    """Return the indices of the first candidate's node groups, in the order of its pipeline."""
    code = columns.get(MESHES)
    if code is None or not code[0]:
        return list(range(len(task.cluster.groups)))
    return [group for group in Meshes.from_task(task).groups[code[0]].tolist() if group >= 0]


def stage_devices(task: Task, columns: Columns) -> list[int]:
    """Return the number of devices of each pipeline stage of the first candidate."""
    code, stages = columns.get(MESHES), int(columns[PP][0])
    if ALL_REPLICAS in columns:
        return [int(columns[SIZES["tp"]][0] * columns[SIZES["cp"]][0] * columns[ALL_REPLICAS][0])] * stages
    if code is None or not code[0]:
        return [task.cluster.devices // stages] * stages
    table = Meshes.from_task(task)
    used = table.groups[code[0]] >= 0
    tensor, context, data, stages_of = (table.codes[SIZES[name]][code[0]][used] for name in ("tp", "cp", "dp", "pp"))
    devices: list[int] = np.repeat(tensor * context * data, stages_of).tolist()
    return devices


def _ordered(cluster: Cluster, costs: Costs, groups: Sequence[int]) -> Costs:
    """Return the costs of the node groups `groups`, in this order, or of all node groups if `groups` is empty."""
    if not groups:
        return costs
    first, *others = (replace(costs.groups[group], further={}, between=None) for group in groups)
    starts = accumulate(cluster.groups[group].devices for group in groups)
    return replace(first, further=dict(zip(starts, others, strict=False)), between=costs.between if others else None)


AFTER_REPLICAS = ("dp_comm_exposed_s", "optimizer_s")
"""Parts of a step that begin when all replicas have finished their micro-batches."""


def together(parts: Sequence[Predictions], stages: Sequence[IntArray]) -> Predictions:
    """Return the predictions of candidates with replicas on several node groups, from the predictions for each group.

    All replicas wait for the slowest one, then reduce their gradients together. The stages are numbered over all
    groups; `stages` are the numbers of stages of each group.
    """
    after = {name: np.maximum.reduce([part.time_s[name] for part in parts]) for name in AFTER_REPLICAS}
    before_reduction = [part.step_time_s - sum(part.time_s[name] for name in AFTER_REPLICAS) for part in parts]
    slowest = np.argmax(np.stack(before_reduction), axis=0)
    time_s = {name: pick(slowest, [part.time_s[name] for part in parts]) for name in parts[0].time_s} | after
    total = sum(time_s.values(), np.zeros(slowest.size))
    low, high = (
        extreme.reduce([getattr(part, name) / part.step_time_s for part in parts])
        for extreme, name in ((np.minimum, "low_s"), (np.maximum, "high_s"))
    )
    capacity = [np.nan if part.capacity_bytes is None else part.capacity_bytes for part in parts]
    share = np.stack([part.device_used_bytes / size for part, size in zip(parts, capacity, strict=True)])
    fullest = np.argmax(np.where(np.isnan(share), 1.0, share), axis=0)
    before = np.cumsum([np.zeros_like(stages[0]), *stages[:-1]], axis=0)
    return replace(
        parts[0],
        step_time_s=total,
        low_s=total * low,
        high_s=total * high,
        time_s=time_s,
        **{name: pick(fullest, [getattr(part, name) for part in parts]) for name in MEMORY},
        worst_stage=pick(fullest, [part.worst_stage + first for part, first in zip(parts, before, strict=True)]),
        capacity_bytes=pick(fullest, [np.asarray(size) for size in capacity]),
    )


def with_stage(
    task: Task, columns: Columns, stages: IntArray, costs: Costs
) -> Iterator[tuple[IntArray, Columns, Costs]]:
    """Group candidates by node groups, and yield each group's rows, columns and costs.

    Candidates that split the data get the columns of the mesh that contains their stage in `stages`.
    """
    for rows, meshes in by_kinds(task, columns, costs):
        for number, (mesh_columns, group_costs) in enumerate(meshes):
            in_mesh = np.arange(rows.size)
            if len(meshes) > 1:
                in_mesh = np.flatnonzero(stages[rows] // mesh_columns[PP] == number)
            yield rows[in_mesh], {name: column[in_mesh] for name, column in mesh_columns.items()}, group_costs


def on_rank(task: Task, row: Columns, costs: Costs, rank: int) -> tuple[Columns, Costs, int]:
    """Return the columns and costs of the mesh that contains a global rank, and the first rank of its stage.

    `row` is one candidate, and the order of ranks is Megatron's. If the candidate does not split the data, return its
    own columns and costs, and `rank`. The ranks of a replica are consecutive.
    """
    ((_, meshes),) = by_kinds(task, row, costs)
    before = 0
    for mesh_columns, group_costs in meshes if len(meshes) > 1 else ():
        stage_ranks = int(mesh_columns[TP][0] * mesh_columns[SIZES["cp"]][0])
        replica_ranks = stage_ranks * int(mesh_columns[PP][0])
        if rank < before + replica_ranks * int(mesh_columns[DP][0]):
            stage = (rank - before) % replica_ranks // stage_ranks
            return mesh_columns, group_costs, stage * stage_ranks * int(mesh_columns[ALL_REPLICAS][0])
        before += replica_ranks * int(mesh_columns[DP][0])
    return *meshes[-1], rank
