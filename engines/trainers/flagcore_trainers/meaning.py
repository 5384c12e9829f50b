"""Rules and predictions of a program whose knobs have meanings.

The formulas are those of `flagcore_training`, with plain layers of torch unless the spec says otherwise. What
is particular to a program is unknown, so the intervals are wide: trials correct the predictions.

A decoder whose layers are plain operators of torch, such as one of transformers, has no pipeline. What autograd stores
and the moments at which the most is allocated were counted in torch 2.13. Rotary embeddings store nothing but queries
and keys, as cosines and sines need no gradient.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from flagcore_models.layers import attention_counts, embedding_of, head_of, layer_counts, layer_embeddings
from flagcore_models.mixers.attention import Attention
from flagcore_training.adapters import absent_targets
from flagcore_training.frameworks import (
    has_tiled_loss,
    keeps_activations_on_host,
    moments_of,
    of_replicas,
    plain_layers,
)
from flagcore_training.layout import Layout, Options, Training
from flagcore_training.lengths import in_time
from flagcore_training.memory.activations import stored_scores
from flagcore_training.memory.modules import PEFT_STORED
from flagcore_training.memory.states import gathered_bytes, split_parameters, states_of, step_bytes, trained_parts
from flagcore_training.memory.training import InUse, Memory, in_use, memory_in_use
from flagcore_training.peft import Peft
from flagcore_training.stages import stage
from flagcore_training.time.step import step_time
from flagcore_training.weights import parts_of_model, stage_parameters

from flagcore.contracts import Costs, Plans
from flagcore.domain.prediction import ModelPart, Predictions
from flagcore.domain.space import BoolArray, Columns, FloatArray, IntArray, Rule
from flagcore.domain.spec import Spec, Task
from flagcore.domain.work import LONGEST
from flagcore.i18n import N_, Message
from flagcore_trainers.fully_shard import predict as prediction
from flagcore_trainers.fully_shard import traffic
from flagcore_trainers.fully_shard.activations import NORM_BYTES, activations, unpacked_bytes
from flagcore_trainers.fully_shard.memory import LOSS_BYTES, LOSS_FORWARD_BYTES
from flagcore_trainers.fully_shard.weights import MemoryInputs
from flagcore_trainers.program import MEANINGS, StateSection


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Bytes per rank at the moments of a step at which the most is allocated, above what stays between steps.

    `forward`: at its end. `loss`: in the backward of the loss. `head`: in that of the head. `layer`: in that of a
    layer. `end`: at the end of backward.
    """

    forward: FloatArray
    loss: FloatArray
    head: FloatArray
    layer: FloatArray
    end: FloatArray

    def highest(self) -> FloatArray:
        return np.asarray(np.max(np.stack(np.broadcast_arrays(*vars(self).values())), axis=0))

    def plus(self, **extra: FloatArray) -> "Moments":
        """Return moments with further bytes, by name."""
        return replace(self, **{name: getattr(self, name) + value for name, value in extra.items()})


MOMENTS = ("forward", "loss", "head", "layer", "end")


def moments(train: Training, layout: Layout) -> Moments:
    """Return the moments of a step, without weights and buffers that a program gathers or reduces gradients in.

    With a single micro-batch, gradients that ranks do not shard are not there before their backward.
    """
    model, u, ones = train.model, float(train.value_bytes), np.ones_like(layout.data)
    job = MemoryInputs(
        model=model,
        value_bytes=u,
        ranks=layout.expert,
        tensor=layout.tensor,
        context=ones,
        tokens=layout.tokens(train.sequence),
        microbatches=layout.microbatches,
        reshard=ones < 0,
        checkpointing=np.where(layout.uniform > 0, 2.0, 0.0),
        reduce_bytes=u * ones,
        offload=ones < 0,
        replicated=ones < 0,
        expert=layout.expert,
        pipeline=ones,
        schedule=np.zeros_like(ones, dtype=np.int64),
        fused_norm=False,
        fused_activation=train.options.fused_layers,
        plain_norm=not train.options.fused_layers,
        autocast=train.options.autocast,
        split_tokens=layout.sequence_parallel > 0,
        gradients_wait=False,
        tiled_loss=train.options.tiled_loss,
        host_activations=train.options.host_activations,
        loss_parts=train.options.loss_parts,
        adapter=train.options.adapter,
        dora_stored=PEFT_STORED,
    )
    act = activations(job)
    is_kept, is_trained = job.checkpointing == 0, train.options.adapter is None
    stored, layer, casts = act.stored, np.zeros_like(ones), np.zeros_like(ones)
    is_cast = job.is_wide or (job.autocast and job.stored_bytes[0] > u)  # weights, also frozen ones, are in fp32
    for each, number in layer_counts(model).items():
        extra, cast = np.zeros_like(ones), u * is_cast * job.units[each].weights
        if isinstance(mixer := each.mixer, Attention):
            extra = stored_scores(train, layout, mixer) - 4.0 * mixer.num_heads * job.tokens / layout.tensor
        stored, casts = stored + number * np.where(is_kept, extra, 0.0), casts + number * cast
        for moment in act.layers[each].backward:
            layer = np.maximum(layer, moment + unpacked_bytes(job, each) + np.where(is_kept, 0.0, extra + cast))
    kept = np.where(is_kept, casts, 0.0)
    layer = stored + layer + kept
    tables = embedding_of(model).products(model.hidden_size), layer_embeddings(model)[:1]
    table, own = (u / layout.tensor * sum(each.weights for each in products) for products in tables)
    logits, at_head = job.logits, stored + act.head_input + NORM_BYTES * act.hidden / u + kept + is_cast * table
    # Autocast keeps its casts of trained weights until the loss is computed.
    forward = is_cast * ((u + LOSS_FORWARD_BYTES) * logits + (casts - kept) * is_trained)
    table, own = table * is_trained, own * is_trained  # frozen weights have no gradients
    final = table * (1.0 + job.is_wide)  # the gradient that stays
    loss, gradients = (LOSS_BYTES + job.cap_bytes) * logits, u * logits + table + final * job.is_wide + act.hidden
    if job.tiled_loss or job.loss_parts > 1.0:  # gradients of hidden states and head in fp32, and their copies
        of_part, is_part = 4.0 * (act.hidden + table) / u, job.loss_parts > 1.0  # the logits of the part before stay
        loss = of_part + act.hidden * is_part + (u + (LOSS_BYTES + job.cap_bytes) * is_part) * logits
        gradients = of_part + act.hidden + table + u * logits * is_part
    states = states_of(train, layout, stage_parameters(train, layout, stage(model, layout, np.zeros_like(ones))))
    is_late = (layout.microbatches <= 1) & (not train.options.fsdp)
    late = np.where(is_late, states[0].gradients + states[1].gradients, 0.0)
    is_whole = is_late & (not train.options.shard_gradients)  # the first gradient of a weight is the one that stays
    return Moments(
        forward=at_head + forward - late,
        loss=at_head + loss - late,
        head=at_head + gradients - late,
        layer=layer - np.maximum(late - final, 0.0),
        end=act.hidden + np.maximum(final * (1.0 + head_of(model).tied - is_whole), own),
    )


TP, PP, CP, EP, DP, MBS, ACCUMULATION, ZERO, SP, RECOMPUTE, OFFLOAD = MEANINGS
ONE_BY_DEFAULT = (TP, PP, CP, EP, MBS)
Codes: TypeAlias = Mapping[str, tuple[str, IntArray]]
"""For each meaning of a knob: the name of the knob, and the number that each code of its column means. The array is
empty if codes are numbers themselves."""


def numbers(codes: Codes, fixed: Mapping[str, int], columns: Columns, devices: int, batch: int) -> dict[str, IntArray]:
    """Return the number of each meaning for each candidate.

    `fixed`: numbers that are the same for all candidates.
    `columns`: may lack knobs, which then have the number of a program without them.

    The number of replicas and of micro-batches follow from the other sizes, unless a knob sets them. They are rounded
    down if the sizes do not fit together.
    """
    ones = np.ones_like(next(iter(columns.values())))
    found = {name: ones * (name in ONE_BY_DEFAULT) for name in MEANINGS}
    found |= {name: ones * number for name, number in fixed.items()}
    for meaning, (knob, table) in codes.items():
        if knob in columns:
            found[meaning] = table[columns[knob]] if table.size else columns[knob]
    known = {*codes, *fixed}
    if DP not in known:
        found[DP] = np.maximum(devices // (found[TP] * found[PP] * found[CP]), 1)
    if ACCUMULATION not in known:
        found[ACCUMULATION] = np.maximum(batch // (found[MBS] * found[DP]), 1)
    return found


def rules(task: Task, codes: Codes, fixed: Mapping[str, int]) -> tuple[Rule, ...]:
    """Return the rules that every program obeys: the devices and the global batch are divided without remainder."""
    devices, batch, model = task.cluster.devices, task.spec.train.global_batch_size, task.spec.model
    heads = sorted({model.num_attention_heads, *(each.num_heads for each in attention_counts(model))})
    experts = model.experts or None
    absent_targets(model, task.spec.train.adapter)
    knobs = {meaning: knob for meaning, (knob, _table) in codes.items()}

    def rule(name: str, meanings: Sequence[str], message: str, broken: object) -> Rule:
        """Return a rule. `broken` maps the numbers of all meanings to a boolean array."""
        assert callable(broken)
        return Rule(
            name=name,
            knobs=tuple(knobs[each] for each in meanings if each in knobs),
            message=message,
            broken=lambda columns: broken(numbers(codes, fixed, columns, devices, batch)),
        )

    sizes = " x ".join(knobs[each] for each in (TP, PP, CP, DP) if each in knobs) or "the number of devices"
    samples = " x ".join(knobs[each] for each in (MBS, ACCUMULATION, DP) if each in knobs) or MBS
    found = [
        rule(
            "world_size",
            (TP, PP, CP, DP),
            Message(
                N_("{sizes} must be the number of devices, {devices}")
                if DP in knobs
                else N_("{sizes} must be a divisor of the number of devices, {devices}"),
                sizes=sizes,
                devices=devices,
            ),
            lambda n: n[TP] * n[PP] * n[CP] * n[DP] != devices,
        ),
        rule(
            "global_batch_size",
            (MBS, ACCUMULATION, DP, TP, PP, CP),
            Message(
                N_("{samples} x the replicas must make up global_batch_size = {batch}, no multiple of {devices}")
                if batch % devices
                else N_("{samples} x the replicas must make up global_batch_size = {batch}"),
                samples=samples,
                batch=batch,
                devices=devices,
            ),
            lambda n: n[MBS] * n[ACCUMULATION] * n[DP] != batch,
        ),
        rule(
            "attention_heads",
            (TP,),
            Message(
                "{tp} must divide num_attention_heads = {heads}", tp=knobs.get(TP, TP), heads=", ".join(map(str, heads))
            ),
            lambda n: math.gcd(*heads) % n[TP] != 0,
        ),
        rule(
            "pipeline_stages",
            (PP,),
            Message("{pp} must be at most num_layers = {layers}", pp=knobs.get(PP, PP), layers=model.num_layers),
            lambda n: n[PP] > model.num_layers,
        ),
        rule(
            "experts",
            (EP,),
            Message("{ep} must divide num_moe_experts = {experts}", ep=knobs.get(EP, EP), experts=experts),
            lambda n: (experts or 1) % n[EP] != 0,
        ),
    ]
    return tuple(each for each in found if each.knobs)


class WholeModel(Plans):
    """The parts of the model, which do not depend on how a program divides it."""

    trains_depths = False

    def only(self, spec: Spec) -> bool:
        return spec.train.command is None

    def model(self, task: Task) -> tuple[ModelPart, ...]:
        train, model = task.spec.train, task.spec.model
        sequence, batch = train.seq_length, train.global_batch_size
        inputs = Training(model=model, sequence=sequence, global_batch=batch, precision=train.precision)
        return parts_of_model(inputs)


def predict(
    task: Task,
    given: Mapping[str, IntArray],
    costs: Costs,
    states: StateSection,
    buffers: Mapping[str, FloatArray] | None = None,
    loss_parts: float = 1.0,
) -> Predictions:
    """Return the predictions of candidates whose meanings have the numbers `given`.

    The exchange of gradients is assumed to overlap with kernels. `buffers`: bytes of gathered weights and buffers at
    each moment of `Moments`, and `between` steps. If they are not known, ZeRO 3 gathers two layers. `loss_parts`: as in
    `Options`.
    """

    def of_rows(kind: int, rows: IntArray) -> Predictions:
        train = training(task, kind // 2, kind % 2, states)
        train = replace(train, options=replace(train.options, loss_parts=loss_parts))
        layout = layout_of({name: values[rows] for name, values in given.items()})
        extra = None if buffers is None else {name: each[rows] for name, each in buffers.items()}
        if kind < 2 and of_replicas(task.spec):  # buckets of DDP, to which all gradients are copied
            first = stage_parameters(train, layout, stage(train.model, layout, np.zeros_like(layout.data)))
            copies = sum((each.gradients for each in states_of(train, layout, first)), np.zeros(()))
            extra = dict.fromkeys((*MOMENTS, "step"), copies)
        return _predict(task, train, layout, costs, extra)

    return prediction.by_kind(2 * given[ZERO] + given[OFFLOAD], of_rows)


def training(task: Task, stage: int, offload: int, states: StateSection) -> Training:
    """Return what the candidates with one ZeRO stage, with or without offloaded optimizer states, have in common.

    Without DeepSpeed, the optimizer of a framework has the weights themselves, in fp32 or as they are loaded.
    """
    train, (is_fused, casts) = task.spec.train, plain_layers(task.spec)
    if stage == 0 and of_replicas(task.spec):
        wide = 2 * casts
        named, element = moments_of(task.spec), 4.0 if task.spec.train.precision == "fp32" else 2.0 + wide
        moments = named[0].of(element) if named else min(states.moments, 4 + 2 * wide)
        own = {"gradients": 2 + wide, "main_weights": wide, "moments": moments}
        states = states.model_copy(update={**own, "fused_adam": True})
    first = states.moments // 2
    if states.muon:  # ZeRO 1 and 2 keep a second copy (DeepSpeed 0.19.8 `_muon_staging_momentum`)
        first = (4 if train.precision == "fp32" else 2) * (1 if stage == 3 else 2)
    options = Options(
        grad_bytes=states.gradients,
        main_param_bytes=states.main_weights,
        exp_avg_bytes=first,
        exp_avg_sq_bytes=states.moments - first,
        second_moments="others" if states.muon else "all",
        fsdp=stage == 3,
        shard_gradients=stage == 2,
        optimizer_offload_fraction=float(offload),
        overlap_grad_reduce=True,
        fused_adam=states.fused_adam,
        tiled_loss=has_tiled_loss(task.spec),
        host_activations=keeps_activations_on_host(task.spec),
        fused_layers=is_fused,
        autocast=casts and stage == 0,
        precision_aware_optimizer=states.main_weights == 0,
        adapter=train.adapter,
        peft=Peft.of(task.spec.model),
        linked_devices=float(task.cluster.linked_devices),
    )
    return Training(
        model=task.spec.model,
        sequence=train.seq_length,
        global_batch=train.global_batch_size,
        lengths=train.lengths,
        precision=train.precision,
        flash=train.attention == "flash",
        fused_activation=train.implementation == "transformer_engine",
        transformer_engine=train.implementation == "transformer_engine",
        options=options,
    )


def layout_of(given: Mapping[str, IntArray]) -> Layout:
    """Return the layouts of candidates. Their layers are divided evenly over pipeline stages."""
    count = {name: values.astype(np.float64) for name, values in given.items()}
    zeros, ones = np.zeros_like(count[DP]), np.ones_like(count[DP])
    return Layout(
        data=count[DP],
        tensor=count[TP],
        pipeline=count[PP],
        virtual=ones,
        context=count[CP],
        expert=count[EP],
        expert_tensor=np.where(count[EP] > 1, ones, count[TP]),
        expert_groups=zeros,
        micro_batch=count[MBS],
        microbatches=count[ACCUMULATION],
        sharded_optimizer=np.minimum(count[ZERO], 1.0),
        sequence_parallel=count[SP],
        selective=(given[RECOMPUTE] == 1).astype(np.float64),
        uniform=(given[RECOMPUTE] == 2).astype(np.float64),
        block=zeros,
        first_layers=zeros,
        last_layers=zeros,
        split=zeros,
    )


def weights_of_rank(train: Training, layout: Layout, *, only_trained: bool = False) -> FloatArray:
    """Return the number of weights of the first stage on a tensor-parallel rank: all, or those that are trained."""
    parts = stage_parameters(train, layout, stage(train.model, layout, np.zeros_like(layout.data)))
    dense, experts = split_parameters(trained_parts(train, parts) if only_trained else parts)
    return dense + experts


def _predict(
    task: Task, train: Training, layout: Layout, costs: Costs, buffers: Mapping[str, FloatArray] | None
) -> Predictions:
    if train.transformer_engine:
        used, time_s = memory_in_use(train, layout, costs), step_time(train, layout, costs)
    else:
        used = _plain_memory(train, layout, costs, buffers)
        program = traffic.with_fused_layers(traffic.PLAIN, task.spec)
        costs = costs if traffic.has_own_attention(task) else traffic.with_torch_attention(task, costs)
        time_s = _plain_times(train, layout, costs, program)
    return prediction.predictions(train, costs, used, time_s)


def _plain_memory(train: Training, layout: Layout, costs: Costs, buffers: Mapping[str, FloatArray] | None) -> InUse:
    """Return the memory of plain layers of torch. With a pipeline, the shared formulas apply.

    What `buffers` has as `between` stays between steps; gradients that do not are negative. `step`: above the states
    in the optimizer's step. `cached`: blocks that the allocator reserves for other streams. Samples of several lengths
    leave blocks that are too small for longer ones: with lengths that double, as many bytes as the longest sample's.
    The allocator frees what it only caches before memory runs out, so this alone fits.
    """
    used = memory_in_use(train, layout, costs)
    is_alone = np.flatnonzero(layout.pipeline == 1)
    alone = layout[is_alone]
    first = stage(train.model, alone, np.zeros_like(alone.data))
    parameters = stage_parameters(train, alone, first)
    if buffers is None:
        gathered = gathered_bytes(train, alone, *states_of(train, alone, parameters))
        buffers = dict.fromkeys(MOMENTS[:4], gathered)
    else:
        buffers = {name: each[is_alone] for name, each in buffers.items()}
    zeros = np.zeros_like(alone.data)
    between, cached, apart = (buffers.pop(name, zeros) for name in ("between", "cached", "apart"))
    dense, experts = split_parameters(trained_parts(train, parameters))
    update = buffers.pop("step") if "step" in buffers else step_bytes(train, alone, dense, experts)
    states = used.memory.static[is_alone]
    above = moments(train, alone).plus(**buffers).highest()
    peak = states + np.maximum(above, update)
    stages = used.memory.worst_stage[is_alone]
    memory = Memory(static=states + between, activation=above - between, peak=peak, worst_stage=stages)
    has_lengths = train.lengths is not None and train.lengths.batching == LONGEST
    cached = np.maximum(states + update + cached - peak, apart) + moments(train, alone).highest() * has_lengths
    own_use = in_use(costs.memory, memory, alone, train, cached)
    for name in ("static", "activation", "peak"):
        getattr(used.memory, name)[is_alone] = getattr(memory, name)
    used.reserved[is_alone], used.used[is_alone] = own_use.reserved, own_use.used
    return used


def on_one_device(task: Task, layout: Layout, found: Predictions, costs: Costs, rows: BoolArray) -> Predictions:
    """Return predictions whose memory in `rows` is that of plain layers of torch, with the states of those `found`."""
    train = training(task, 0, 0, StateSection())
    above = moments(train, layout).highest()
    peak = found.static_bytes + above + 2.0 * costs.memory.workspace_bytes()
    memory = Memory(static=found.static_bytes, activation=above, peak=peak, worst_stage=found.worst_stage)
    has_lengths = train.lengths is not None and train.lengths.batching == LONGEST
    used = in_use(costs.memory, memory, layout, train, above * has_lengths)
    return replace(
        found,
        activation_bytes=np.where(rows, above, found.activation_bytes),
        peak_allocated_bytes=np.where(rows, peak, found.peak_allocated_bytes),
        reserved_bytes=np.where(rows, used.reserved, found.reserved_bytes),
        device_used_bytes=np.where(rows, used.used, found.device_used_bytes),
    )


def with_fused_kernels(train: Training) -> Training:
    """Return the inputs to the shared formulas of time, to which plain layers add what separate kernels take."""
    return replace(train, transformer_engine=True, options=replace(train.options, gradient_fusion=False))


def _plain_times(train: Training, layout: Layout, costs: Costs, program: traffic.Program) -> dict[str, FloatArray]:
    """Return the parts of the step time in seconds with plain layers of torch: fused kernels, and what others take."""
    fused, kernels = with_fused_kernels(train), costs.kernels
    time_s = step_time(fused, layout, costs)
    weights, again = weights_of_rank(train, layout), np.where(layout.uniform > 0, 1.0, 0.0)
    extra = traffic.seconds(
        fused, in_time(fused, layout), kernels, program, checkpointing=2.0 * again, again=again, weights=weights
    )
    return {**time_s, "compute_s": time_s["compute_s"] + layout.microbatches * extra * costs.run_slowdown}
