"""The knobs of FSDP2, and its rules for legal candidates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flagcore.domain.knob import Knob
from flagcore.domain.space import BoolArray, Columns, IntArray, KnobValue, Merge, Rule
from flagcore.domain.spec import Task
from flagcore.engines.megatron.space.knobs import divisors
from flagcore.errors import SpecError

REPLICATE, SHARD, TP = "data_parallel_replicate_size", "data_parallel_shard_size", "tensor_model_parallel_size"
CP, MBS, RESHARD = "context_parallel_size", "micro_batch_size", "reshard_after_forward"
AC, REDUCE, OFFLOAD, COMPILE = "activation_checkpointing", "reduce_dtype", "cpu_offload", "compile"
PP, SCHEDULE = "pipeline_model_parallel_size", "pipeline_schedule"
SCHEDULES = ("1f1b", "interleaved", "zbv", "dualpipev")
INTERLEAVED, ZBV, DUALPIPEV, SELECTIVE = 2, 3, 4, 2
"""Codes of the schedules after the first one, whose code is 1, and of selective checkpoints."""


def _devices(task: Task) -> Sequence[KnobValue]:
    return divisors(task.cluster.devices)


def _linked(task: Task) -> Sequence[KnobValue]:
    return [each for each in divisors(task.cluster.devices) if each <= task.cluster.linked_devices]


def _size(name: str, label: str, text: str, *, shows_neutral: bool = False, linked: bool = False) -> Knob:
    """Return the knob of a dimension of the device mesh. `linked`: it stays within a node or link."""
    return Knob(
        name=name,
        label=label,
        help=text,
        neutral=1,
        minimum=1,
        shows_neutral=shows_neutral,
        layout=True,
        auto=_linked if linked else _devices,
        auto_help="divisors of the devices" + ", within a node or link" * linked,
    )


KNOBS: tuple[Knob, ...] = (
    _size(REPLICATE, "HSDP", "Groups of ranks that each hold all weights; gradients are summed over them."),
    _size(SHARD, "FSDP", "Replicas that share weights, gradients and optimizer states.", shows_neutral=True),
    _size(TP, "TP", "Devices that split each layer's matrices, and the sequence between layers.", linked=True),
    _size(CP, "CP", "Devices that split each sequence. They share weights as replicas do.", linked=True),
    _size(PP, "PP", "Stages of ranks that each hold a part of the layers, gathered during a step."),
    Knob(
        name=SCHEDULE,
        label="schedule",
        help="Order of the micro-batches in a pipeline. With all but 1f1b, a rank has two parts of the layers.",
        kind="word",
        words=SCHEDULES,
        neutral="1f1b",
        auto=lambda task: SCHEDULES,
        auto_help="all",
    ),
    Knob(
        name=MBS,
        label="MBS",
        help="Sequences that a replica processes at once. Gradients of several micro-batches are accumulated.",
        neutral=1,
        minimum=1,
        shows_neutral=True,
        memory_order=1,
        auto=lambda task: divisors(task.spec.train.global_batch_size),
        auto_help="divisors of the global batch size",
    ),
    Knob(
        name=AC,
        label="AC",
        help="What backward computes again: nothing, cheap operators and every second product, or whole layers.",
        kind="word",
        words=("none", "selective", "full"),
        neutral="none",
        auto=lambda task: ("none", "selective", "full"),
        auto_help="all",
    ),
    Knob(
        name=RESHARD,
        label="reshard",
        help="Whether a layer's gathered weights are freed after its forward, and gathered again for its backward.",
        kind="flag",
        neutral=True,
        auto=lambda task: (True, False),
        auto_help="true, false",
    ),
    Knob(
        name=REDUCE,
        label="reduce",
        help="Number format in which gradients are reduced; fp32 with the precision fp32.",
        kind="word",
        words=("fp32", "bf16"),
        neutral="fp32",
        auto=lambda task: ("fp32",),
        auto_help="fp32",
    ),
    Knob(
        name=OFFLOAD,
        label="offload",
        help="Whether weights, gradients and optimizer states are in the host's memory, where the optimizer runs.",
        kind="flag",
        neutral=False,
        auto=lambda task: (False,),
        auto_help="false",
    ),
    Knob(
        name=COMPILE,
        label="compile",
        help="Whether torch.compile compiles each layer.",
        kind="flag",
        neutral=False,
        auto=lambda task: (False,),
        auto_help="false",
    ),
)


PARTS = (
    *("num_moe_experts", "multi_latent_attention", "mtp_num_layers", "vision", "windows", "linear_attention"),
    *("indexer", "attention_output_gate"),
)
"""Fields of a model whose parts the trial program and the predictions do not have."""


def check_model(task: Task) -> None:
    """Raise SpecError if the model has one of `PARTS`."""
    for name in PARTS:
        if value := getattr(task.spec.model, name):
            fix = "use engine: megatron, or your own program with engine: command"
            raise SpecError(key=f"model.{name}", value=value, problem="is not supported by engine fsdp2", fix=fix)


def rules(task: Task) -> tuple[Rule, ...]:
    """Return the legality rules. Raises SpecError for a model that the engine does not support."""
    check_model(task)
    devices, train, model = task.cluster.devices, task.spec.train, task.spec.model
    batch, length, precision = train.global_batch_size, train.seq_length, train.precision
    sizes = [model.num_attention_heads, model.num_query_groups, model.ffn_hidden_size, model.vocab_size]
    shared = np.gcd.reduce(sizes)
    return (
        Rule(
            name="world_size",
            knobs=(REPLICATE, SHARD, TP, CP, PP),
            message=f"{REPLICATE} x {SHARD} x {TP} x {CP} x {PP} must be the number of devices, {devices}",
            broken=lambda c: c[REPLICATE] * c[SHARD] * c[TP] * c[CP] * c[PP] != devices,
        ),
        Rule(
            name="global_batch_size",
            knobs=(REPLICATE, SHARD, MBS),
            message=f"global_batch_size = {batch} must be a multiple of {MBS} x {REPLICATE} x {SHARD}",
            broken=lambda c: batch % (c[MBS] * c[REPLICATE] * c[SHARD]) != 0,
        ),
        Rule(
            name="tensor_parallel",
            knobs=(TP,),
            message=f"{TP} must divide heads, query groups, ffn_hidden_size and vocab_size: a divisor of {shared}",
            broken=lambda c: shared % c[TP] != 0,
        ),
        Rule(
            name="sequence_length",
            knobs=(TP, CP),
            message=f"seq_length = {length} must be a multiple of {TP} x {CP}, and of 2 x {CP} with {CP} > 1",
            broken=lambda c: (length % (c[TP] * c[CP]) != 0) | ((c[CP] > 1) & (length % (2 * c[CP]) != 0)),
        ),
        Rule(
            name="sharded_replicas",
            knobs=(REPLICATE, SHARD, CP),
            message=f"{REPLICATE} > 1 needs several ranks that share weights: {SHARD} x {CP} > 1",
            broken=lambda c: (c[REPLICATE] > 1) & (c[SHARD] * c[CP] == 1),
        ),
        Rule(
            name="reduce_in_fp32",
            knobs=(REDUCE,),
            message=f"{REDUCE} must be fp32 with the precision fp32",
            broken=lambda c: (c[REDUCE] == 2) & (precision == "fp32"),
        ),
        *_pipeline_rules(task),
    )


def _pipeline_rules(task: Task) -> tuple[Rule, ...]:
    """Return the rules of pipelines. Source: torch 2.13 `distributed/pipelining/schedules.py`."""
    model, batch = task.spec.model, task.spec.train.global_batch_size

    def microbatches_broken(c: Columns) -> BoolArray:
        count, name = batch // np.maximum(c[MBS] * c[REPLICATE] * c[SHARD], 1), c[SCHEDULE]
        short = count < c[PP] * np.where(name == DUALPIPEV, 2, 1)
        uneven = (name == INTERLEAVED) & (count % np.maximum(count // c[PP], 1) != 0)
        return np.asarray((c[PP] > 1) & (short | uneven))

    return (
        Rule(
            name="pipeline_layers",
            knobs=(PP, SCHEDULE),
            message=f"num_layers = {model.num_layers} must be a multiple of {PP}, twice that without {SCHEDULES[0]}",
            broken=lambda c: (c[PP] > 1) & (model.num_layers % (c[PP] * parts(c)) != 0),
        ),
        Rule(
            name="pipeline_microbatches",
            knobs=(REPLICATE, SHARD, MBS, PP, SCHEDULE),
            message=f"a pipeline needs at least {PP} micro-batches, dualpipev twice as many, interleaved equal rounds",
            broken=microbatches_broken,
        ),
        Rule(
            name="pipeline_weights",
            knobs=(PP, RESHARD, OFFLOAD),
            message=f"{PP} > 1 keeps weights gathered on the device: {RESHARD} and {OFFLOAD} must be false",
            broken=lambda c: (c[PP] > 1) & ((c[RESHARD] > 0) | (c[OFFLOAD] > 0)),
        ),
        Rule(
            name="pipeline_head",
            knobs=(PP,),
            message=f"{PP} > 1 needs a model whose head is not tied to the embedding",
            broken=lambda c: (c[PP] > 1) & (not model.untie_embeddings_and_output_weights),
        ),
        Rule(
            name="split_backward",
            knobs=(PP, SCHEDULE, AC, COMPILE),
            message=f"{' and '.join(SCHEDULES[2:])} split the backward: no {COMPILE}, and {AC} not selective",
            broken=lambda c: (c[PP] > 1) & (c[SCHEDULE] >= ZBV) & ((c[COMPILE] > 0) | (c[AC] == SELECTIVE)),
        ),
    )


def parts(columns: Columns) -> IntArray:
    """Return how many parts of the model a rank has."""
    return np.where((columns[PP] > 1) & (columns[SCHEDULE] >= INTERLEAVED), 2, 1)


def merges(task: Task) -> tuple[Merge, ...]:
    """Return the merges: one rank always has all weights, and without a pipeline there is no schedule."""

    def reshard(columns: Columns) -> Columns:
        alone = (columns[SHARD] * columns[CP] == 1) & (columns[PP] == 1)
        return {RESHARD: np.where(alone, 1, columns[RESHARD])}

    return (
        Merge(name="reshard_of_one", knobs=(SHARD, CP, PP, RESHARD), canonical=reshard),
        Merge(
            name="no_pipeline",
            knobs=(PP, SCHEDULE),
            canonical=lambda columns: {SCHEDULE: np.where(columns[PP] == 1, 1, columns[SCHEDULE])},
        ),
    )
