"""Predicts the memory and the step time of candidates, which are given as knob columns."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from flagcore_models.layers import indexer_of, other_mixers
from flagcore_models.mixers.attention import Attention
from flagcore_training.layout import Layout, MeshStages, StageLayout, Training
from flagcore_training.memory.training import component_table, memory_in_use, stages_in_use
from flagcore_training.stages import StageGroups, placed, stage, stage_of, stages
from flagcore_training.start import missing_layers
from flagcore_training.time import step
from flagcore_training.time.stage import Blocks, WorkTable
from flagcore_training.time.step import costs_in_run, on_replica, rank_time, step_time
from flagcore_training.weights import model_flops, parts_of_model
from numpy.typing import NDArray

from flagcore.contracts import Costs
from flagcore.domain.chip import ASSUMED_NETWORK_RANGE
from flagcore.domain.knob import in_versions
from flagcore.domain.model import Layer
from flagcore.domain.prediction import ModelPart, Passes, Predictions, RankPrediction
from flagcore.domain.space import Columns, FloatArray, IntArray
from flagcore.domain.spec import Task
from flagcore.domain.work import PACKED
from flagcore_megatron.layers.fastest import fit_splits, split_layers
from flagcore_megatron.layers.partition import leading_layers
from flagcore_megatron.program.user_command import implementation_of_command
from flagcore_megatron.space import meshes as mixed
from flagcore_megatron.space.knobs import BLOCK, FULL, SELECTIVE, UNIFORM, candidate_columns
from flagcore_megatron.space.meshes import ALL_REPLICAS, MESHES, MICROBATCHES, PP, RECOMPUTE_KNOBS, Meshes
from flagcore_megatron.space.options import EXPERT_GROUPS_SINCE, options, precision, release, settings_in_force, tower
from flagcore_megatron.space.split import Split, balanced, stages_of

BATCH_ROWS = 1 << 14
"""Most candidates per batch: enough to amortize numpy calls, few enough that columns stay in the processor's cache."""

SEPARATE_ROWS = 1 << 9
"""Fewest candidates with similar numbers of stages for which a batch of their own is faster."""

FEW_STAGES = 4.0
"""The usual number of stages of a candidate that differ. Candidates with half, as many, twice as many and more of them
are in batches of their own."""

DENSE_INTERVAL, MOE_INTERVAL = (0.87, 1.17), (0.84, 1.20)
ESTIMATED_INTERVAL, SHARED_CPU_INTERVAL = (0.76, 1.48), (0.87, 1.60)
MIXER_INTERVAL, SPARSE_INTERVAL = (0.83, 1.40), (0.70, 3.00)
"""80% intervals of the step time, relative to the prediction.

They are the 10th and 90th percentiles of measured over predicted times of runs that were left out of the fit
(`benchmarks/fitted.json`). There are intervals for dense models, for mixtures of experts, for chips without measured
kernels (the same runs without the fitted curves), and for ranks that share a CPU (an estimate from ranks on one CPU).
With launches (`HOST_RANGE`), that of experts holds 98 of 111 fitted runs and 27 of 30 others of 2026. Those of models
with mixers and with sparse attention hold 30 of 34 published runs of 2026 and two, of which none was fitted.
The widest applies. That of chips without measured kernels adds to it, as independent errors do: without the curves, 90%
of 281 dense runs take less than 1.43 times the prediction, of 154 with experts 1.57. So do launches (`HOST_RANGE`).
"""
NATURAL_INTERVAL = (0.80, 2.40)
"""As `MIXER_INTERVAL`, of fine-tuning on packed samples, and of experts whose loads are those of real text: it holds 16
of 19 published runs of 2026 whose lengths are assumed, and 11 of 12 with such experts, none fitted."""
HOST_RANGE = 2.0
"""How much longer or shorter the launches of experts and mixers may take, on other hosts, or with other settings than a
record states. Launches of dense layers are fitted (`layer.LAUNCHES`). Of 26 runs with experts that would take
1.38 times as long with it, the interval holds 22 (Megatron-Bridge's summary and cards, ModelZoo; without it 19)."""
NETWORK_PARTS = ("cp_comm_s", "ep_comm_s", "pp_comm_s", "dp_comm_exposed_s")
"""The parts of a step that may use the network between hosts. Their times widen the interval if its rate is assumed."""


def predict(task: Task, columns: Columns, costs: Costs) -> Predictions:
    """Return the predicted device memory in bytes and step time in seconds, for each candidate in `columns`."""
    parts, order = [], []
    for rows, meshes in mixed.by_kinds(task, columns, costs):
        results = [_predicted(task, *each) for each in meshes]
        result = results[0] if len(results) == 1 else mixed.together(results, [each[PP] for each, _ in meshes])
        capacity = np.nan if result.capacity_bytes is None else result.capacity_bytes
        parts.append(replace(result, capacity_bytes=capacity * np.ones(rows.size)) if costs.further else result)
        order.append(rows)
    return parts[0] if len(parts) == 1 else Predictions.join(parts).take(np.argsort(np.concatenate(order)))


def _predicted(task: Task, columns: Columns, costs: Costs) -> Predictions:
    """Return the predictions of candidates on the same node groups."""
    train, layout = base_inputs(task, columns)
    is_derived, run_costs = balanced(columns) & (layout.split == 0), costs_in_run(costs)
    blocks = Blocks.from_layout(train, layout, run_costs)
    train, layout = split_layers(train, layout, is_derived, run_costs, blocks)
    predictions = _predictions(train, layout, costs, blocks)
    train, layout, has_new_split = fit_splits(train, layout, is_derived, predictions.share_in_use, run_costs, blocks)
    if not has_new_split.any():
        return predictions
    rows = np.flatnonzero(has_new_split)
    predictions.put(rows, _predictions(train, layout[rows], costs, blocks[rows]))
    return predictions


WITHOUT_BOUNDS = {"pipeline_schedule", "offload_stages"}
"""Settings with which other stages than the last two may need the least memory."""


def least_seconds(task: Task, columns: Columns, costs: Costs) -> FloatArray:
    """Return a lower bound of the step time of each candidate, for any split of layers.

    On average, a stage takes the mean time, without recompute if `columns` do not have its knobs. Gradient exchange and
    optimizer are left out. Few candidates are faster, by up to 2%. The bound is 0 for other schedules than Megatron's
    own, and on several kinds of chips.
    """
    if costs.further or settings_in_force(task.spec).keys() & WITHOUT_BOUNDS:
        return np.zeros(columns[PP].shape)
    columns, run_costs = {**_with_recompute(columns, (0, 0, 0, 0)), **columns}, costs_in_run(costs)
    train, layout = base_inputs(task, columns)
    busy = _whole_model(train, layout, run_costs, Blocks.from_layout(train, layout, run_costs))(1.0) / layout.pipeline
    return busy * (layout.microbatches + (layout.pipeline - 1.0) / layout.virtual)


def _whole_model(train: Training, layout: Layout, costs: Costs, blocks: Blocks) -> Callable[[float], FloatArray]:
    """Return a function that returns the seconds of a micro-batch on all stages together, as if they were one, if the
    host takes so many times its usual time for a launch."""
    sizes = StageLayout.of(train, replace(layout, block=layout.block * layout.pipeline))
    layers = np.full_like(layout.data, float(train.model.num_layers))
    table = WorkTable.from_blocks(train, sizes, costs, blocks)
    work = table.stage(leading_layers(train), first=True, mtp=True, last=True)
    return lambda host: replace(work, host=replace(work.host, launch_s=work.host.launch_s * host)).seconds(layers)


def least_share(task: Task, columns: Columns, costs: Costs) -> FloatArray:
    """Return a lower bound of the share of the memory in use of each candidate, for any split.

    If `columns` have no knobs of recompute, all layers are recomputed one by one; chunks of several layers may need up
    to 10% less. Some stage has at least the mean number of layers; leading dense layers are not counted, and the memory
    is that of the last stage or the one before it, which store the fewest micro-batches. The bound is 0 where that of
    `least_seconds` is, and NaN if the capacity is unknown.
    """
    if costs.further or settings_in_force(task.spec).keys() & WITHOUT_BOUNDS:
        return np.zeros(columns[PP].shape)
    train, layout = base_inputs(task, {**_with_recompute(columns, (1, FULL, UNIFORM, 1)), **columns})
    last, layout = layout.pipeline - 1.0, replace(layout, split=np.ones_like(layout.pipeline))
    layers = np.ceil((train.model.num_layers - leading_layers(train)) / layout.pipeline)
    places, nowhere = (np.maximum(last - 1.0, 0.0), last), np.full_like(last, -1.0)
    ends = [stage_of(train, layout, place, layers, 0, nowhere, nowhere) for place in places]
    return np.minimum(*(each.used / each.capacity for each in stages_in_use(train, layout, costs, ends)))


def _with_recompute(columns: Columns, codes: tuple[int, ...]) -> Columns:
    """Return `columns` with the same codes of the recompute knobs for all candidates."""
    recompute = {knob: np.full_like(columns[PP], code) for knob, code in zip(RECOMPUTE_KNOBS, codes, strict=True)}
    return {**columns, **recompute}


def inputs(task: Task, columns: Columns, costs: Costs) -> tuple[Training, Layout]:
    """Return the inputs to the formulas for each candidate, with the layer splits that `predict` uses.

    All candidates are on the same node groups, which have these `costs`.
    """
    train, layout = base_inputs(task, columns)
    is_derived, run_costs = balanced(columns) & (layout.split == 0), costs_in_run(costs)
    if is_derived.any():
        blocks = Blocks.from_layout(train, layout, run_costs)
        train, layout = split_layers(train, layout, is_derived, run_costs, blocks)
        memory = memory_in_use(train, layout, costs)
        train, layout, _ = fit_splits(train, layout, is_derived, memory.used / memory.capacity, run_costs, blocks)
    return train, layout


def base_inputs(task: Task, columns: Columns) -> tuple[Training, Layout]:
    """Return the inputs to the formulas for each candidate, before layer splits are derived: all splits are even."""
    train, layout = training(task), layout_of(task, columns)
    if (code := columns.get(MESHES)) is not None and code.any():
        layout = _on_meshes(task, columns)
    if stages := stages_of(task.spec.model, settings_in_force(task.spec), release(task.spec)):
        layout, options = placed(train.model, layout, train.options, stages)
        given = Split.from_task(task).given(columns)
        train, layout = replace(train, options=options), replace(layout, split=layout.split * given)
    return train, layout


def _on_meshes(task: Task, columns: Columns) -> Layout:
    """Return the layouts of candidates that all have the same number of meshes."""
    table, code = Meshes.from_task(task), columns[MESHES]
    count = int(table.number(code).max())
    first, *others = (layout_of(task, table.columns(columns, mesh)) for mesh in range(count))
    starts = np.cumsum(table.codes[PP][code], axis=1).astype(np.float64).T
    return replace(first, further=tuple(MeshStages(start, each) for start, each in zip(starts, others, strict=False)))


def stage_layers(task: Task, columns: Columns, costs: Costs) -> list[list[int]]:
    """Return the number of layers of each pipeline stage for each candidate; empty if it has no derived split."""
    if not balanced(columns).any():
        return []
    layers_by_row: dict[int, list[int]] = {}
    for rows, meshes in mixed.by_kinds(task, columns, costs):
        if len(meshes) > 1:
            continue
        train, layout = inputs(task, *meshes[0])
        stages = [np.minimum(layout.pipeline - 1.0, float(index)) for index in range(int(layout.pipeline.max()))]
        layers = np.stack([stage(train.model, layout, index, train.options).layers for index in stages], axis=1)
        lengths = np.where(balanced(meshes[0][0]), layout.pipeline, 0.0).astype(np.int64)
        for row, row_layers, length in zip(rows.tolist(), layers.astype(np.int64).tolist(), lengths, strict=True):
            layers_by_row[row] = row_layers[:length]
    return [layers_by_row.get(row, []) for row in range(columns[PP].size)]


def _predictions(train: Training, layout: Layout, costs: Costs, blocks: Blocks) -> Predictions:
    """Return the predictions of each candidate. Candidates with similar numbers of distinct stages share a batch.

    Those that differ only in whether the optimizer is distributed are predicted together.
    """
    first, index = (np.arange(layout.data.size),) * 2 if costs.further else layout.sharing()
    kinds, kind = np.unique(0.0 * layout.data if costs.further else layout.sharded_optimizer, return_inverse=True)
    distinct_counts, split = np.zeros(first.shape, dtype=np.int64), layout.split[first].astype(np.int64)
    if train.options.splits is not None:
        distinct_counts = train.options.splits.distinct_counts[split] * (split > 0)
    needed = np.minimum(layout.pipeline[first], np.where(split > 0, distinct_counts + 1.0, FEW_STAGES))
    group = np.digitize(needed, (FEW_STAGES / 2, FEW_STAGES, 2 * FEW_STAGES), right=True)
    order = np.argsort(needed, kind="stable")
    place, results = np.empty((kinds.size, first.size), dtype=np.int64), []
    edges = [0]
    for edge in (np.flatnonzero(np.diff(group[order])) + 1).tolist():
        if min(edge - edges[-1], order.size - edge) >= SEPARATE_ROWS:
            edges.append(edge)
    edges.append(max(order.size, 1))
    starts = [start for low, high in pairwise(edges) for start in range(low, high, BATCH_ROWS)]
    for start, end in pairwise([*starts, order.size]):
        batch = order[start:end]
        rows, size = first[batch], kinds.size * batch.size
        place[:, batch] = kinds.size * start + np.arange(size).reshape(kinds.size, batch.size)
        shared = layout[rows] if costs.further else replace(layout[rows], sharded_optimizer=kinds[:, None])
        results.append(_predict(train, shared, costs, blocks[rows]))
    return Predictions.join(results).take(place[kind, index])


def components(task: Task, columns: Columns, stages: IntArray, costs: Costs) -> dict[str, dict[str, FloatArray]]:
    """Return the weights and the peak bytes by component, for a rank of the given stage of each candidate."""
    found: dict[str, dict[str, FloatArray]] = {}
    for rows, row_columns, group_costs in mixed.with_stage(task, columns, stages, costs):
        train, layout = inputs(task, row_columns, group_costs)
        index, placement = stages[rows].astype(np.float64), StageGroups.from_layout(layout, group_costs)
        index = index % layout.pipeline
        tables = [
            component_table(train, each, index, device_costs.memory.workspace_bytes())
            for each, device_costs in zip(placement.layouts, group_costs.groups, strict=True)
        ]
        for name, figures in tables[0].items():
            for key in figures:
                values = placement.pick(index, [table[name][key] for table in tables])
                found.setdefault(name, {}).setdefault(key, np.zeros(stages.size))[rows] = values
    return found


def sizes(task: Task, columns: Columns) -> dict[str, FloatArray]:
    """Return the base-2 logarithms of a candidate's tokens per micro-batch, hidden size and TP size."""
    train, layout = training(task), layout_of(task, columns)
    width = np.full_like(layout.tensor, float(train.model.hidden_size))
    return {
        "tokens": np.log2(layout.tokens(train.sequence)),
        "hidden_size": np.log2(width),
        "tensor_model_parallel_size": np.log2(layout.tensor),
    }


def rank_figures(task: Task, columns: Columns, rank: int, costs: Costs, *, alone: bool = True) -> RankPrediction:
    """Return the predicted memory and busy time of one global rank of the first candidate.

    Ranks are in Megatron's order tp-cp-ep-dp-pp. `alone`: whether the others do not exist, as in probes.
    """
    row, group_costs, rank = mixed.on_rank(task, {knob: values[:1] for knob, values in columns.items()}, costs, rank)
    train, layout = inputs(task, row, group_costs)
    stage_ends, placement = np.cumsum(mixed.stage_devices(task, row)), StageGroups.from_layout(layout, group_costs)
    number = np.searchsorted(stage_ends, [rank], side="right")
    index = np.minimum(number, stage_ends.size - 1).astype(np.float64)
    rank_stage = stage(train.model, layout, index, train.options)
    (in_use,) = stages_in_use(train, layout, group_costs, [rank_stage], alone=alone)
    group = int(placement.group(index)[0])
    times = [float(time[0]) for time in rank_time(train, placement.layouts[group], group_costs.groups[group], index)]
    compute, optimizer = (time if np.isfinite(time) else None for time in times)
    return RankPrediction(
        rank=rank,
        static_bytes=float(in_use.memory.static[0]),
        peak_allocated_bytes=float(in_use.memory.peak[0]),
        reserved_bytes=float(in_use.reserved[0]),
        device_used_bytes=float(in_use.used[0]),
        compute_time_s=compute,
        optimizer_time_s=optimizer,
    )


def training(task: Task) -> Training:
    """Return the inputs to the formulas that all candidates of `task` share.

    If the spec names no implementation, flagcore's trial program uses megatron-core's local layers without fused
    activation functions and without sliding windows. A user's command, and any training of layers that the program
    does not have, is assumed to be Megatron-LM, which uses transformer-engine by default. Megatron-core has no layers
    that attend to pieces (0.19 `transformer_config.py`): theirs attend to all tokens.
    """
    train, model = task.spec.train, task.spec.model
    kind = train.implementation or (
        "trial"
        if train.command is None and not missing_layers(model)
        else implementation_of_command(task.spec) or "transformer_engine"
    )
    return Training(
        model=replace(model, layers=() if kind == "trial" else tuple(map(_without_pieces, model.layers))),
        sequence=train.seq_length,
        global_batch=train.global_batch_size,
        lengths=train.lengths,
        precision=precision(train, settings_in_force(task.spec)),
        flash=train.attention == "flash",
        fused_activation=kind != "trial",
        transformer_engine=kind == "transformer_engine",
        gathered_keys=kind == "trial",
        tower=tower(model, settings_in_force(task.spec)),
        options=options(task),
    )


def _without_pieces(layer: Layer) -> Layer:
    if not isinstance(layer.mixer, Attention) or not layer.mixer.pieces:
        return layer
    return replace(layer, mixer=replace(layer.mixer, window=None, pieces=False))


def layout_of(task: Task, columns: Columns) -> Layout:
    """Return the parallel layout of each candidate. Knobs that a job record does not set have Megatron's defaults."""

    def count(knob: str) -> FloatArray:
        return columns[knob].astype(np.float64)

    data, tensor = count("data_parallel_size"), count("tensor_model_parallel_size")
    micro_batch = count("micro_batch_size")
    granularity = columns["recompute_granularity"] * columns["use_recompute"]
    is_full, is_block = granularity == FULL, columns["recompute_method"] == BLOCK
    layers = np.maximum(count("recompute_num_layers"), 1.0)
    split = Split.from_task(task)
    first, last = split.ends(columns)
    replicas, counts = columns.get(ALL_REPLICAS), columns.get(MICROBATCHES)
    is_apart = replicas is not None and counts is not None
    is_layerwise = settings_in_force(task.spec).get("optimizer") == "dist_muon"
    expert_tensor = split.expert_tensor_size(columns).astype(np.float64)
    has_expert_groups = (expert_tensor != tensor) & in_versions(EXPERT_GROUPS_SINCE, release(task.spec))
    number = task.spec.train.global_batch_size / (micro_batch * data) if counts is None else counts.astype(np.float64)
    return Layout(
        data=data if replicas is None else replicas.astype(np.float64),
        here=(data,) if is_apart else (),
        tensor=tensor,
        pipeline=count("pipeline_model_parallel_size"),
        virtual=split.virtual(columns).astype(np.float64),
        context=count("context_parallel_size"),
        expert=count("expert_model_parallel_size"),
        expert_tensor=expert_tensor,
        expert_groups=has_expert_groups.astype(np.float64),
        micro_batch=micro_batch,
        microbatches=np.maximum(number, 1.0),
        sharded_optimizer=np.maximum(count("use_distributed_optimizer"), float(is_layerwise)),
        sequence_parallel=count("sequence_parallel"),
        selective=(granularity == SELECTIVE).astype(np.float64),
        uniform=np.where(is_full & ~is_block, layers, 0.0),
        block=np.where(is_full & is_block, layers, 0.0),
        first_layers=first.astype(np.float64),
        last_layers=last.astype(np.float64),
        split=np.zeros_like(data),
    )


def _predict(train: Training, layout: Layout, costs: Costs, blocks: Blocks) -> Predictions:
    """Return the predictions of each candidate, or those of all candidates for each `layout.sharded_optimizer`."""
    distinct_stages = stages(train.model, layout, train.options, StageGroups.from_layout(layout, costs).starts)
    memory = memory_in_use(train, layout, costs, distinct_stages)
    time_s = step_time(train, layout, costs, blocks, distinct_stages)
    total = sum(time_s.values(), np.zeros(()))
    low, high = _interval(train, layout, costs, blocks, time_s)
    network = np.zeros(())
    if any(each.assumed_network for each in costs.groups):
        network = sum((time_s[part] for part in NETWORK_PARTS if part in time_s), network)

    shape = np.broadcast_shapes(layout.data.shape, np.shape(layout.sharded_optimizer))

    def flat(values: NDArray[Any]) -> NDArray[Any]:
        return np.broadcast_to(values, shape).ravel()

    return Predictions(
        step_time_s=flat(total),
        low_s=flat((total - network * (1.0 - 1.0 / ASSUMED_NETWORK_RANGE)) * low),
        high_s=flat((total + network * (ASSUMED_NETWORK_RANGE - 1.0)) * high),
        time_s={part: flat(seconds) for part, seconds in time_s.items()},
        static_bytes=flat(memory.memory.static),
        activation_bytes=flat(memory.memory.activation),
        peak_allocated_bytes=flat(memory.memory.peak),
        reserved_bytes=flat(memory.reserved),
        device_used_bytes=flat(memory.used),
        worst_stage=flat(memory.memory.worst_stage),
        capacity_bytes=flat(memory.capacity) if costs.further else costs.memory.capacity_bytes(),
        model_flops=model_flops(train),
    )


def _interval(
    train: Training, layout: Layout, costs: Costs, blocks: Blocks, time_s: Mapping[str, FloatArray]
) -> tuple[FloatArray, FloatArray]:
    """Return the bounds of each candidate's step time, relative to `time_s`."""
    intervals = [MOE_INTERVAL if train.model.experts else DENSE_INTERVAL]
    intervals += [MIXER_INTERVAL] * bool(other_mixers(train.model)) + [SPARSE_INTERVAL] * bool(indexer_of(train.model))
    intervals += [SHARED_CPU_INTERVAL] * any(each.synchronous for each in costs.groups)
    causes = [(min(low for low, _ in intervals), max(high for _, high in intervals))]
    causes += [ESTIMATED_INTERVAL] * any(each.guessed and not each.synchronous for each in costs.groups)
    hosts: list[FloatArray] = [np.ones(())] * 2
    if (train.model.experts or other_mixers(train.model)) and not costs.synchronous:  # their launches are counted
        seconds = _whole_model(train, layout, costs_in_run(costs), blocks)
        stage_s, *others = (seconds(factor) for factor in (1.0, 1.0 / HOST_RANGE, HOST_RANGE))
        share = (on_replica(time_s) + time_s["pp_bubble_s"]) / sum(time_s.values(), np.zeros(()))
        hosts = [1.0 + share * (each / stage_s - 1.0) for each in others]
    low, high = (
        np.sqrt(np.log(host) ** 2 + sum(np.log(each) ** 2 for each in bounds))
        for host, *bounds in zip(hosts, *causes, strict=True)
    )
    is_packed = train.lengths is not None and train.lengths.batching == PACKED
    if not is_packed and not (train.options.routing_spread and train.model.experts):
        return np.exp(-low), np.exp(high)
    return np.minimum(np.exp(-low), NATURAL_INTERVAL[0]), np.maximum(np.exp(high), NATURAL_INTERVAL[1])


def model_parts(task: Task) -> tuple[ModelPart, ...]:
    """Return the parts of the model, with a padded vocabulary (see `parts_of_model`)."""
    unsplit_task = replace(task, spec=replace(task.spec, work=replace(task.spec.train, settings={})))
    return parts_of_model(training(task), layout_of(unsplit_task, candidate_columns({})))


def pipelines(task: Task, columns: Columns, costs: Costs) -> list[Passes]:
    """Return the passes of the first candidate's pipelines.

    There is one pipeline, or one for each kind of chip that has its own replicas. The list is empty if a time is
    unknown.
    """
    row = {knob: values[:1] for knob, values in columns.items()}
    order, all_passes = mixed.groups_of_row(task, row), []
    ((_, parts),) = mixed.by_kinds(task, row, costs)
    for number, (subset, group_costs) in enumerate(parts):
        if (pipeline_passes := step.passes(*inputs(task, subset, group_costs), group_costs)) is None:
            return []
        groups = order[number : number + 1] if len(parts) > 1 else order
        all_passes.append(replace(pipeline_passes, groups=tuple(groups[group] for group in pipeline_passes.groups)))
    return all_passes
