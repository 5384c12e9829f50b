"""The legal parallel sizes on one node group, with the time and the memory of a layer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

import numpy as np
from flagcore_training.knobs import divisors
from flagcore_training.layout import ArrayRecord, Layout, StageLayout, Training
from flagcore_training.memory.states import split_parameters, trained_parts
from flagcore_training.memory.training import stages_in_use
from flagcore_training.stages import Stage, stage_of
from flagcore_training.time.optimizer import gradient_time, optimizer_time
from flagcore_training.time.passes import Seconds, StageTime
from flagcore_training.time.stage import Blocks, WorkTable
from flagcore_training.time.step import costs_in_run
from flagcore_training.weights import stage_parameters

from flagcore.contracts import Costs
from flagcore.domain.space import FloatArray, IntArray
from flagcore.domain.spec import AUTO, Task
from flagcore_megatron.mixed.rules import OF_BATCH, WHOLE_CLUSTER
from flagcore_megatron.predict import layout_of, training
from flagcore_megatron.space import rules as legality
from flagcore_megatron.space.knobs import BY_NAME, candidate_columns
from flagcore_megatron.space.meshes import (
    MBS,
    RECOMPUTE_CODES,
    RECOMPUTE_KNOBS,
    SIZES,
    SP,
    SPLIT,
    mesh_text,
    recompute_codes,
)
from flagcore_megatron.space.rules import DIST_OPT
from flagcore_megatron.space.split import Split

DP, TP, PP, CP, EP = (SIZES[name] for name in ("dp", "tp", "pp", "cp", "ep"))
MIN_TOKENS = 2048
"""Minimum number of tokens of a sequence that a context-parallel rank processes."""
MAX_SAMPLES = 64
"""Maximum micro-batch size."""
FEW = 3
"""Of more node groups than this, only some sets, orders and sizes are planned, whose number grows with their square."""


@dataclass(frozen=True, slots=True)
class MeshOptions(ArrayRecord):
    """The options for one node group: parallel sizes, and time and memory of a stage with `base` layers.

    All fields are arrays with one element per option. Times are in seconds. `seconds` is the time of a micro-batch,
    `layer` the time of one more layer, `first` and `last` the times of the embedding and the head, `step` the time of
    gradients and optimizer.

    Memory is relative to the capacity. `used` is the memory of the stage with one micro-batch in flight. `weights` and
    `activations` are the memory of one more layer, `last_layer` the memory of one more layer on the last stage.
    """

    tp: IntArray
    ep: IntArray
    dp: IntArray
    pp: IntArray
    recompute: IntArray
    base: FloatArray
    seconds: FloatArray
    layer: FloatArray
    first: FloatArray
    last: FloatArray
    used: FloatArray
    used_first: FloatArray
    used_last: FloatArray
    last_layer: FloatArray
    weights: FloatArray
    activations: FloatArray
    step: FloatArray
    more_step: FloatArray
    samples: IntArray
    context: IntArray

    def texts(self, name: str, words: Sequence[str]) -> list[str]:
        """Return the text of the mesh with each option on the node group `name`.

        `words` is the result of `recompute_words`.
        """
        sizes = {"tp": self.tp, "ep": self.ep, "dp": self.dp, "pp": self.pp, "cp": self.context}
        rows = [*zip(self.recompute.tolist(), *(each.tolist() for each in sizes.values()), strict=True)]
        text_of = {row: mesh_text(name, dict(zip(sizes, row[1:], strict=True)), words[row[0]]) for row in {*rows}}
        return [text_of[row] for row in rows]

    def room(self, in_flight: FloatArray, ends: FloatArray) -> FloatArray:
        """Return the maximum number of layers that fits on a stage. `ends` is the memory of embedding or head."""
        per_layer = self.weights + self.activations * in_flight
        free = 1.0 - self.used - ends - self.base * self.activations * (in_flight - 1.0)
        return np.floor(self.base + free / np.maximum(per_layer, 1e-12))

    def room_last(self) -> FloatArray:
        """Return the maximum number of layers that fits on the last stage, which has one micro-batch in flight."""
        return np.floor(self.base + (1.0 - self.used - self.used_last) / np.maximum(self.last_layer, 1e-12))

    def fits(self, seconds: FloatArray) -> FloatArray:
        """Return the maximum number of layers with which a stage takes at most `seconds` for a micro-batch."""
        return np.maximum(np.floor(self.base + (seconds - self.seconds) / self.layer + 1e-9), 0.0)


def node_sets(speed: Sequence[float]) -> list[tuple[int, ...]]:
    """Return the sets of node groups that are planned, sorted by size. `speed`: that of each node group.

    Of up to FEW groups, these are all sets. Of more, they are each group alone, the 2, 3, ... fastest groups, all but
    one, and all groups.
    """
    every = range(len(speed))
    if len(every) <= FEW:
        return [subset for size in range(1, len(every) + 1) for subset in combinations(every, size)]
    fastest = sorted(every, key=lambda group: -speed[group])
    chains = (tuple(sorted(fastest[:size])) for size in range(2, len(every) - 1))
    return [*combinations(every, 1), *chains, *combinations(every, len(every) - 1), tuple(every)]


def recompute_words(task: Task) -> list[str]:
    """Return the kinds of recompute in the space: none, selective, full, and the first 1, 2, 4, ... layers."""
    words = [*RECOMPUTE_CODES, *(f"block{2**power}" for power in range(6) if 2**power < task.spec.model.num_layers)]
    if task.spec.train.attention == "flash":
        words.remove("selective")
    pairs = {word: zip(RECOMPUTE_KNOBS, recompute_codes(word), strict=True) for word in words}
    return [word for word in words if all(_has(task, *pair) for pair in pairs[word])]


def _has(task: Task, knob: str, code: int) -> bool:
    """Return whether the space lists the value of `knob` with this code. The code 0 means that it does not apply."""
    listed = task.spec.space.get(knob, AUTO)
    if isinstance(listed, str) or (not code and knob != RECOMPUTE_KNOBS[0]):
        return True
    return code in [BY_NAME[knob].axis(()).encode(value) for value in listed]


def _largest(task: Task, switch: str) -> int:
    """Return 1 if the space lists `true` for a switch, else 0."""
    listed = task.spec.space.get(switch, AUTO)
    return int(isinstance(listed, str) or True in listed)


def _step_seconds(train: Training, layout: Layout, costs: Costs, stage: Stage, seconds: FloatArray) -> FloatArray:
    """Return the time of a stage for gradient reduction and optimizer step, in seconds. `seconds` is the stage's time
    per micro-batch. A third of it is assumed to be forward."""
    found = stage_parameters(train, layout, stage)
    params, trained = split_parameters(found), split_parameters(trained_parts(train, found))
    forward, backward = Seconds.from_compute(seconds / 3.0), Seconds.from_compute(seconds * 2.0 / 3.0)
    time = StageTime(forward, backward, np.zeros_like(seconds))
    gradients = gradient_time(train, layout, costs.collectives, params, trained, time)
    return gradients + optimizer_time(train, layout, costs, stage, trained)


def mesh_options(task: Task, costs: Costs, group: int) -> MeshOptions:
    """Return the options for one node group: all legal parallel sizes, with their times and memory."""
    train, columns = training(task), mesh_columns(task, group)
    # In a pipeline of four stages, 0, 1 and 3 are a first, a middle and a last stage.
    layout = replace(layout_of(task, columns), pipeline=np.full(columns[PP].shape, 4.0))
    run = costs_in_run(costs)
    table = WorkTable.from_blocks(train, StageLayout.of(train, layout), run, Blocks.from_layout(train, layout, run))
    middle = table.stage()
    base = np.maximum(layout.block, 1.0) + 1.0
    one, two = np.ones_like(base), np.full_like(base, 2.0)
    # (stage, layers, micro-batches in flight) of a middle stage, of the first stage, and of the last stage
    places = [(1, base, one), (1, base + 1.0, one), (1, base + 1.0, two), (0, base, one), (3, base, one)]
    stages = [
        replace(stage_of(train, layout, np.full_like(base, place), layers), in_flight=in_flight)
        for place, layers, in_flight in (*places, (3, base + 1.0, one))
    ]
    in_use = stages_in_use(train, layout, costs, stages)
    capacity = np.nan_to_num(in_use[0].capacity, nan=1e30)
    used, longer, twice, first, last, longer_last = (each.used / capacity for each in in_use)
    activations = np.maximum(twice - longer, 0.0) / (base + 1.0)
    seconds, more = middle.seconds(base), middle.seconds(base + 1.0)
    steps = [_step_seconds(train, layout, run, each, time) for each, time in zip(stages, (seconds, more), strict=False)]
    return MeshOptions(
        **{key: columns[SIZES[key]] for key in ("tp", "ep", "dp", "pp")},
        recompute=columns["word"],
        base=base,
        seconds=seconds,
        layer=np.maximum(more - seconds, 1e-12),
        first=table.stage(first=True).seconds(base) - seconds,
        last=table.stage(mtp=True, last=True).seconds(base) - seconds,
        used=used,
        used_first=first - used,
        used_last=last - used,
        last_layer=longer_last - last,
        weights=np.maximum(longer - used - activations, 0.0),
        activations=activations,
        step=steps[0],
        more_step=steps[1] - steps[0],
        samples=columns[MBS] * columns[DP],
        context=columns[CP],
    )


def share_sizes(batch: int) -> list[int]:
    """Return the micro-batch sizes to try for a part of the batch: divisors of the batch, and powers of two."""
    return sorted({*divisors(batch), *(2**power for power in range(batch.bit_length()))})


def mesh_columns(task: Task, group: int, *, has_share: bool = False) -> dict[str, IntArray]:
    """Return the columns of all legal sizes on one node group. `word` is the index of the kind of recompute.

    With `has_share`, the node group processes a share of the batch, so the samples that it processes at once need not
    divide the batch.
    """
    nodes, batch, space = task.cluster.groups[group], task.spec.train.global_batch_size, task.spec.space
    words, experts = recompute_words(task), task.spec.model.experts
    common = int(np.gcd.reduce([each.devices for each in task.cluster.groups]))
    suggested = {
        TP: divisors(nodes.devices_per_node),
        CP: [size for size in divisors(common) if size == 1 or task.spec.train.seq_length >= MIN_TOKENS * size],
        PP: [size for size in divisors(nodes.devices) if size <= task.spec.model.num_layers],
        EP: divisors(int(np.gcd(experts, nodes.devices))) if experts else [1],
        MBS: [size for size in (share_sizes(batch) if has_share else divisors(batch)) if size <= MAX_SAMPLES],
        "word": range(len(words)),
    }
    values = [own if isinstance(listed := space.get(knob, AUTO), str) else listed for knob, own in suggested.items()]
    table = np.array(list(product(*values)), dtype=np.int64).reshape(-1, len(suggested))
    columns = {**{name: np.repeat(each, len(table)) for name, each in candidate_columns({}).items()}}
    columns |= zip(suggested, table.T, strict=True)
    size = columns[TP] * columns[CP] * columns[PP]
    columns[DP] = np.maximum(nodes.devices // size, 1)
    codes = np.array([recompute_codes(word) for word in words], dtype=np.int64)
    columns |= zip(RECOMPUTE_KNOBS, codes[columns["word"]].T, strict=True)
    columns[SP] = (columns[TP] > 1) * _largest(task, SP)
    columns[DIST_OPT], columns[SPLIT] = np.full_like(size, _largest(task, DIST_OPT)), np.ones_like(size)
    expert_ranks = Split.from_task(task).expert_tensor_size(columns) * columns[EP]
    broken = (nodes.devices % size != 0) | ((columns[TP] > 1) & (columns[SP] == 0))
    broken |= (nodes.devices // columns[PP] % expert_ranks != 0) & (experts > 0)
    listed = space.get(DP, AUTO)
    if not isinstance(listed, str):
        broken |= ~np.isin(columns[DP], np.array(listed, dtype=np.int64))
    for rule in legality.rules(task):
        if rule.name not in WHOLE_CLUSTER and not (has_share and rule.name == OF_BATCH):
            broken |= rule.broken(columns)
    return {name: column[~broken] for name, column in columns.items()}
