"""Predicts memory and step times of FSDP2 candidates.

Layers are timed by the shared formulas of `flagcore_training`. What FSDP2 adds: weights are gathered for each
pass and gradients are scattered after each micro-batch, beside the kernels of other layers, and weights are copied
between buffers (torch 2.13 `_fsdp_collectives.py`). With a pipeline, both happen once per step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from flagcore_models.layers import head_of, layer_counts, mixer_counts, network_counts
from flagcore_models.mixers.attention import Attention
from flagcore_models.networks.experts import Experts
from flagcore_models.parts.tower import VisionTower
from flagcore_training.frameworks import (
    framework_of,
    has_tiled_loss,
    keeps_activations_on_host,
    moments_of,
    plain_layers,
    whole_weights,
)
from flagcore_training.layout import Layout, Options, Training
from flagcore_training.lengths import in_time
from flagcore_training.memory.training import InUse, in_use
from flagcore_training.peft import Peft
from flagcore_training.time.optimizer import HOST_ADAM_BYTES, HOST_BYTES_PER_SECOND
from flagcore_training.time.stage import ACCUMULATION_BYTES
from flagcore_training.time.step import on_replica, replica_wait, step_time
from flagcore_training.weights import model_flops, used_products

from flagcore.contracts import Costs
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import Columns, FloatArray, IntArray
from flagcore.domain.spec import Task
from flagcore_trainers import fully_shard as fs
from flagcore_trainers.fully_shard import memory, traffic, weights
from flagcore_trainers.fully_shard.traffic import BATCH_ROWS, INTERVAL, PRETRAINING_INTERVAL, TRIAL, Program

ADAM_TRAFFIC = 40.0
"""Bytes per sharded weight of an update in fp32: the gradients' norm and scale, and Adam in one kernel. Counted."""
FOLDED = "zb-v"
"""The schedule of the shared formulas for `zbv` and `dualpipev`, of which torch overlaps no passes. With the wait for
all stages, it is within 3% of a simulation of both orders of torch 2.13, for 2 to 8 ranks and even stages."""
FORWARD_SHARE = 1.0 / 3.0
"""The share of the forward pass in forward and backward without checkpoints."""


def predict(task: Task, columns: Columns, costs: Costs, program: Program = TRIAL) -> Predictions:
    """Return the predicted memory in bytes and step time in seconds of each candidate in `columns`."""

    def of_rows(kind: int, rows: IntArray) -> Predictions:
        part = {name: values[rows] for name, values in columns.items()}
        schedule = FOLDED if kind // 2 else None
        return _predict(task, part, costs, program, compiled=bool(kind % 2), schedule=schedule)

    return by_kind(2 * ((columns[fs.PP] > 1) & (columns[fs.SCHEDULE] >= fs.ZBV)) + columns[fs.COMPILE], of_rows)


def by_kind(kinds: IntArray, predict: Callable[[int, IntArray], Predictions]) -> Predictions:
    """Return the predictions of candidates of these `kinds`. `predict` returns those of rows that have one kind."""
    parts, order = [], []
    for start in range(0, kinds.size or 1, BATCH_ROWS):
        batch = kinds[start : start + BATCH_ROWS]
        for kind in np.unique(batch).tolist() or [0]:
            order.append(start + np.flatnonzero(batch == kind))
            parts.append(predict(kind, order[-1]))
    return Predictions.join(parts).take(np.argsort(np.concatenate(order)))


def predictions(
    train: Training, costs: Costs, used: InUse, time_s: dict[str, FloatArray], interval: tuple[float, float] = INTERVAL
) -> Predictions:
    """Return the predictions of candidates from the memory in use and the parts of the step time in seconds."""
    total: FloatArray = sum(time_s.values(), np.zeros(()))
    return Predictions(
        step_time_s=total,
        low_s=total * interval[0],
        high_s=total * interval[1],
        time_s=time_s,
        static_bytes=used.memory.static,
        activation_bytes=used.memory.activation,
        peak_allocated_bytes=used.memory.peak,
        reserved_bytes=used.reserved,
        device_used_bytes=used.used,
        worst_stage=used.memory.worst_stage,
        capacity_bytes=costs.memory.capacity_bytes(),
        model_flops=model_flops(train),
    )


def memory_job(
    task: Task,
    columns: Columns,
    *,
    fused_norm: bool,
    compiled: bool = False,
    compiled_loss: bool = False,
    loss_parts: float = 1.0,
    sends_stay: bool = False,
    whole_gradients: bool = False,
    casts: bool = False,
) -> weights.MemoryInputs:
    """Return what the memory of candidates depends on. Without checkpoints, autograd keeps casts for the backward."""
    layout = layout_of(task, columns)
    size, schedule = np.broadcast_arrays(columns[fs.PP], columns[fs.SCHEDULE])
    value_bytes = 4.0 if task.spec.train.precision == "fp32" else 2.0
    has_casts = casts & (columns[fs.STATES] != 2)
    is_trainer = framework_of(task.spec.train.command or ()) not in (None, "NeMo AutoModel")
    is_fused = is_trainer and plain_layers(task.spec)[0]
    reduced = np.where((columns[fs.REDUCE] == 2) & (value_bytes == 2.0), 2.0, 4.0)
    return weights.MemoryInputs(
        model=task.spec.model,
        value_bytes=value_bytes,
        ranks=columns[fs.SHARD] * layout.context,
        tensor=layout.tensor,
        context=layout.context,
        tokens=layout.tokens(task.spec.train.seq_length),
        microbatches=layout.microbatches,
        reshard=(columns[fs.RESHARD] > 0) & ~(has_casts & (columns[fs.AC] == 1)),
        checkpointing=(columns[fs.AC] - 1).astype(np.float64),
        reduce_bytes=reduced,
        main_bytes=np.where(columns[fs.STATES] == 2, 2.0, weights.MAIN_BYTES),
        moments=moments_of(task.spec),
        tower=VisionTower(vision=vision).weights if is_trainer and (vision := task.spec.model.vision) else 0.0,
        whole=whole_weights(task.spec),
        offload=columns[fs.OFFLOAD] > 0,
        replicated=columns[fs.REPLICATE] > 1,
        expert=layout.expert,
        pipeline=size.astype(np.float64),
        schedule=schedule,
        fused_norm=fused_norm,
        plain_norm=is_trainer and not is_fused and not compiled,
        fused_activation=compiled or is_fused,
        compiled_loss=compiled_loss,
        loss_parts=loss_parts,
        tiled_loss=has_tiled_loss(task.spec),
        host_activations=keeps_activations_on_host(task.spec),
        sends_stay=sends_stay,
        whole_gradients=whole_gradients,
        casts=has_casts,
        adapter=task.spec.train.adapter,
    )


def layout_of(task: Task, columns: Columns) -> Layout:
    """Return the layouts of candidates."""
    count = {name: values.astype(np.float64) for name, values in columns.items()}
    zeros, ones = np.zeros_like(count[fs.TP]), np.ones_like(count[fs.TP])
    samples = count[fs.MBS] * count[fs.SHARD] * count[fs.REPLICATE]
    return Layout(
        data=count[fs.SHARD] * count[fs.REPLICATE],
        tensor=count[fs.TP],
        pipeline=count[fs.PP],
        virtual=ones + ((columns[fs.PP] > 1) & (columns[fs.SCHEDULE] == fs.INTERLEAVED)),
        context=count[fs.CP],
        expert=count[fs.EP],
        expert_tensor=ones if task.spec.model.experts else count[fs.TP],
        expert_groups=zeros,
        micro_batch=count[fs.MBS],
        microbatches=count.get(fs.COUNT, np.maximum(task.spec.train.global_batch_size // samples, 1.0)),
        sharded_optimizer=ones,
        sequence_parallel=ones * (count[fs.TP] > 1),
        selective=zeros,
        uniform=zeros,
        block=zeros,
        first_layers=zeros,
        last_layers=zeros,
        split=zeros,
    )


def training(task: Task, *, compiled: bool, compiled_loss: bool = False, schedule: str | None = None) -> Training:
    """Return the inputs to the shared formulas, of which the times of layers and of the pipeline are used."""
    train, adapter = task.spec.train, task.spec.train.adapter
    if adapter and adapter.base == "fp32":  # each rank casts its shards before they are gathered
        adapter = replace(adapter, base=None)
    return Training(
        model=replace(task.spec.model, mtp_num_layers=0),
        sequence=train.seq_length,
        global_batch=train.global_batch_size,
        lengths=train.lengths,
        precision=train.precision,
        fused_activation=compiled,
        transformer_engine=True,
        gathered_keys=True,
        options=Options(
            cp_comm="all_gather",
            cross_entropy_fusion=compiled_loss,
            tiled_loss=has_tiled_loss(task.spec),
            schedule=schedule,
            attention_kernel="flash",
            gradient_fusion=False,
            adapter=adapter,
            peft=Peft.of(task.spec.model),
            dispatcher=str(train.assumed.get(fs.DISPATCHER, "alltoall")),
            linked_devices=float(task.cluster.linked_devices),
        ),
    )


def _predict(
    task: Task, columns: Columns, costs: Costs, program: Program, *, compiled: bool, schedule: str | None
) -> Predictions:
    fused_loss = compiled and program.compiled_loss
    train = training(task, compiled=compiled, compiled_loss=fused_loss, schedule=schedule)
    layout = layout_of(task, columns)
    if program.own_attention or traffic.has_own_attention(task):
        train = replace(train, options=replace(train.options, attention_kernel=""))
    else:
        costs = traffic.with_torch_attention(task, costs)
    if program.neighbours and train.lengths is None and train.options.adapter is None:
        train = replace(train, options=replace(train.options, neighbours=True))
    fused_norm = program.fused_norm and not costs.synchronous
    # Ranks whose host computes exchange tensors by Gloo.
    job = memory_job(
        task,
        columns,
        fused_norm=fused_norm,
        compiled=compiled,
        compiled_loss=fused_loss or program.narrow_loss,
        loss_parts=program.loss_parts,
        sends_stay=costs.synchronous,
        whole_gradients=program.whole_gradients,
        casts=program.casts,
    )
    needed = memory.of_rank(job)
    needed = replace(needed, peak=needed.peak + 2.0 * costs.memory.workspace_bytes())
    time_s = _times(train, layout, costs, job, columns, program, compiled=compiled)
    is_known = train.lengths is None and train.options.adapter is None and not costs.synchronous
    interval = PRETRAINING_INTERVAL if is_known else INTERVAL
    return predictions(train, costs, in_use(costs.memory, needed, layout, train), time_s, interval)


def _times(
    train: Training,
    layout: Layout,
    costs: Costs,
    job: weights.MemoryInputs,
    columns: Columns,
    program: Program,
    *,
    compiled: bool,
) -> dict[str, FloatArray]:
    """Return the parts of the step time in seconds."""
    kernels, recomputed = costs.kernels, replace(layout, uniform=np.ones_like(layout.tensor))
    plain, full = (step_time(train, each, costs) for each in (layout, recomputed))
    repeated = full_share(train) if program.stops_early and job.adapter is None else 1.0
    again = np.select([columns[fs.AC] == 1, columns[fs.AC] == 2], [0.0, selective_share(train)], repeated)
    time_s = {name: plain[name] + again * (full[name] - plain[name]) for name in plain}
    u = float(train.value_bytes)
    gathered, share, of_layers = weights.stage_weights(job)
    gathers = 1.0 + job.reshard
    # The shared formulas assume an fp32 buffer of gradients per weight. FSDP2 copies out weights, and gradients in; a
    # pipeline adds gradients up in a buffer.
    copied = gathers * 2.0 * weights.mean_base_bytes(job)
    if job.adapter is None:
        copied = copied + u + job.reduce_bytes - ACCUMULATION_BYTES[False]
    copied = np.where(job.pipeline > 1, 0.0, copied)
    extra = kernels.memory_seconds(np.abs(copied) * gathered) * np.sign(copied)
    extra = extra + traffic.seconds(
        train,
        in_time(train, layout),
        kernels,
        program,
        checkpointing=job.checkpointing,
        again=again,
        weights=of_layers,
        compiled=compiled,
    )
    time_s["compute_s"] = time_s["compute_s"] + layout.microbatches * extra * costs.run_slowdown
    if train.options.schedule == FOLDED:  # its formula does not wait for the stages that start last
        forward = _busy(layout, time_s) * FORWARD_SHARE / (1.0 + FORWARD_SHARE * again)
        time_s["pp_bubble_s"] = time_s["pp_bubble_s"] + (layout.pipeline - 1.0) / 2.0 * forward
    wait = replica_wait(train, layout, costs, time_s, plain=plain, each_micro_batch=True)
    longest = {name: seconds * (1.0 + wait / on_replica(time_s)) for name, seconds in time_s.items()}
    time_s["dp_comm_exposed_s"] = _exchange(train, layout, costs, job, columns, again, longest) + wait
    trained = (
        share if job.adapter is None else weights.layers_of_rank(job, layer_counts(train.model), only_trained=True)[1]
    )
    time_s["optimizer_s"] = _update(costs, job, trained)
    return time_s


def full_share(train: Training) -> float:
    """Return the share of the layers' forward that full checkpoints compute again where they stop early: all but the
    last product of a dense network, whose output no backward needs. Of experts, the sum of their outputs needs it.
    PEFT's adapters are computed after it, so it runs again beside them.

    A norm after the network, as of Gemma, needs it too; models do not state it. Compiled layers leave the product out
    in torchtitan, too, which is not predicted: its published times with checkpoints are longer already.
    """
    model, (_again, total) = train.model, _selective_flops(train)
    parts = [(part, number) for part, number in network_counts(model).items() if not isinstance(part, Experts)]
    last = (each for each in used_products(model, parts) if each[0].split == "inputs")
    return 1.0 - sum(number * product.inputs * product.outputs for product, number in last) / total


def selective_share(train: Training) -> float:
    """Return the share of the layers' forward that selective checkpoints compute again."""
    again, total = _selective_flops(train)
    return again / total


def _selective_flops(train: Training) -> tuple[float, float]:
    """Return the multiplications of the layers' forward that selective checkpoints compute again, and all, for a token.

    Of the matrix products, these are the second, fourth, ... of a mixer, such as keys and the output projection, and
    the second half of a gated block. The attention core is stored. All products of routed experts run again (torchtitan
    0.3 stores none of them).
    """
    model, again, total = train.model, 0.0, 0.0
    for mixer, number in mixer_counts(model).items():
        products = [each.inputs * out.width for each in mixer.products(model.hidden_size) for out in each.layers]
        core = mixer.core_flops(float(train.sequence)) / 2.0
        again += number * (sum(products[1::2]) + core * (not isinstance(mixer, Attention)))
        total += number * (sum(products) + core)
    for product, number in used_products(model, network_counts(model).items()):
        again += number * product.inputs * sum(out.width for out in product.layers[product.copies == 1 :])
        total += number * product.inputs * product.outputs
    return again, total


def _exchange(
    train: Training,
    layout: Layout,
    costs: Costs,
    job: weights.MemoryInputs,
    columns: Columns,
    again: FloatArray,
    time_s: dict[str, FloatArray],
) -> FloatArray:
    """Return the exposed seconds per step in which weights are gathered and gradients are reduced.

    The next layer's weights are gathered, and the last layer's gradients reduced, beside a layer's kernels. The first
    gather and the last reduction of a pass are beside nothing.
    """
    model, table, own = train.model, weights.table_weights(job), weights.root_weights(job)[1]
    owners = (_integers(job.ranks / job.expert), _integers(job.expert))
    u, (base, of_experts) = float(train.value_bytes), job.base_bytes
    ring = (_integers(job.ranks), _integers(layout.tensor))
    replicas = (_integers(columns[fs.REPLICATE]), _integers(layout.tensor * job.ranks))
    seconds = costs.collectives.seconds

    def gather(weights: FloatArray, ring: tuple[IntArray, IntArray] = ring, unit: float = base) -> FloatArray:
        return seconds("all_gather", unit * weights, *ring)

    def reduce(weights: FloatArray, ring: tuple[IntArray, IntArray] = ring) -> FloatArray:
        across = seconds("all_reduce", job.reduce_bytes * weights / ring[0], *replicas)
        return seconds("reduce_scatter", job.reduce_bytes * weights, *ring) + across

    ends = 1.0 + (not head_of(model).tied) * ((job.pipeline == 1) | (job.schedule >= fs.ZBV))
    body = reduced = np.zeros(())
    for layer, count in layer_counts(model).items():
        unit, number = job.units[layer], count / job.pipeline
        body = body + gather(unit.weights) * number
        reduced = reduced + reduce(unit.trained) * number
        if unit.experts.any():
            body = body + gather(unit.experts, owners, of_experts) * number
            reduced = reduced + reduce(unit.trained_experts, owners) * number
    table_gradient = table * (job.adapter is None)
    forward = body + gather(table, unit=u) * ends
    backward, reduced = job.reshard * body, reduced + reduce(table_gradient) * ends
    if own.any():
        forward = forward + gather(own, unit=u)
        reduced = reduced + reduce(own * (job.adapter is None))
    is_staged = job.pipeline > 1
    times = np.where(is_staged, 1.0, layout.microbatches)
    reductions = np.minimum(times, 1.0) if job.whole_gradients else times
    if costs.synchronous:  # the host computes and sends
        total: FloatArray = times * (forward + backward) + reductions * reduced
        return total
    work = _busy(layout, time_s)
    window = work * FORWARD_SHARE / (1.0 + FORWARD_SHARE * again)
    share = costs.collectives.compute_share(*ring)
    exposed = np.zeros_like(work)
    # A pipeline gathers weights in its first forward, and scatters gradients when all backwards are done.
    rest = np.where(is_staged, 0.0, work - window)
    for passes, whole, alone, beside in (
        (times, forward, gather(table, unit=u), window),
        (reductions, backward + reduced, reduce(table_gradient), rest),
        (times - reductions, backward, 0.0, rest),
    ):
        hidden = np.minimum(whole - alone, beside)
        exposed = exposed + passes * (whole - hidden + share * hidden)
    return exposed


def _busy(layout: Layout, time_s: dict[str, FloatArray]) -> FloatArray:
    """Return the seconds of a rank per micro-batch."""
    parts = (time_s[name] for name in ("compute_s", "tp_comm_s", "cp_comm_s", "ep_comm_s"))
    total: FloatArray = sum(parts, np.zeros(())) / layout.microbatches
    return total


def _update(costs: Costs, job: weights.MemoryInputs, shard: FloatArray) -> FloatArray:
    """Return the seconds of the optimizer step on `shard` weights of a rank."""
    main = job.main_bytes
    on_device = costs.kernels.memory_seconds(ADAM_TRAFFIC * (main / weights.MAIN_BYTES) * shard)
    if not job.offload.any():
        return on_device
    copies = costs.kernels.host_copy_seconds(2.0 * main * shard)
    return np.where(job.offload, copies + HOST_ADAM_BYTES * shard / HOST_BYTES_PER_SECOND, on_device)


def _integers(values: FloatArray | IntArray) -> IntArray:
    return np.rint(values).astype(np.int64)
