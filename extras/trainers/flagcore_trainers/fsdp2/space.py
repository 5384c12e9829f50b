"""The knobs of FSDP2, and its rules for legal candidates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flagcore.domain.knob import Knob
from flagcore.domain.space import Columns, KnobValue, Merge, Rule
from flagcore.domain.spec import Task
from flagcore.engines.megatron.space.knobs import divisors
from flagcore.errors import SpecError

REPLICATE, SHARD, TP = "data_parallel_replicate_size", "data_parallel_shard_size", "tensor_model_parallel_size"
CP, MBS, RESHARD = "context_parallel_size", "micro_batch_size", "reshard_after_forward"
AC, REDUCE, OFFLOAD, COMPILE = "activation_checkpointing", "reduce_dtype", "cpu_offload", "compile"


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
            knobs=(REPLICATE, SHARD, TP, CP),
            message=f"{REPLICATE} x {SHARD} x {TP} x {CP} must be the number of devices, {devices}",
            broken=lambda c: c[REPLICATE] * c[SHARD] * c[TP] * c[CP] != devices,
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
    )


def merges(task: Task) -> tuple[Merge, ...]:
    """Return the merge of candidates on one rank, whose weights are always gathered."""

    def canonical(columns: Columns) -> Columns:
        alone = columns[SHARD] * columns[CP] == 1
        return {RESHARD: np.where(alone, 1, columns[RESHARD])}

    return (Merge(name="reshard_of_one", knobs=(SHARD, CP, RESHARD), canonical=canonical),)
