"""What Megatron refuses, and which candidates are the same to it.

Sources: megatron-core 0.16 `parallel_state.py`, `transformer_config.py`, `num_microbatches_calculator.py`,
`pipeline_parallel/schedules.py`; Megatron-LM core_v0.16 `arguments.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flagcore.domain.space import BoolArray, Columns, IntArray, Merge, Rule
from flagcore.domain.spec import Task
from flagcore.workloads.megatron.knobs import BLOCK, FULL, SELECTIVE, UNIFORM, virtual_stages

DP, TP, PP = "data_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size"
CP, EP = "context_parallel_size", "expert_model_parallel_size"
MBS, SP, DIST_OPT = "micro_batch_size", "sequence_parallel", "use_distributed_optimizer"
VIRTUAL = "num_layers_per_virtual_pipeline_stage"
RECOMPUTE, GRANULARITY = "use_recompute", "recompute_granularity"
METHOD, RECOMPUTE_LAYERS = "recompute_method", "recompute_num_layers"


def rules(task: Task) -> tuple[Rule, ...]:
    """Return the legality rules of training `task` with Megatron, each applied as soon as its knobs are known."""
    return (*_batch(task), *_width(task), *_pipeline(task), *_experts(task), *_recompute(task))


def _batch(task: Task) -> Sequence[Rule]:
    devices, batch = task.cluster.devices, task.spec.train.global_batch_size
    return (
        Rule(
            name="world_size",
            knobs=(DP, TP, PP, CP),
            says=f"{DP} x {TP} x {PP} x {CP} must be the number of devices, {devices}",
            broken=lambda c: c[DP] * c[TP] * c[PP] * c[CP] != devices,
        ),
        Rule(
            name="global_batch_size",
            knobs=(DP, MBS),
            says=f"global_batch_size = {batch} must be a multiple of {MBS} x {DP}",
            broken=lambda c: batch % (c[MBS] * c[DP]) != 0,
        ),
    )


def _width(task: Task) -> Sequence[Rule]:
    model, length = task.spec.model, task.spec.train.seq_length
    heads, groups = model.num_attention_heads, model.num_query_groups
    widths = [model.moe_shared_expert_intermediate_size or 0]
    if model.num_moe_experts is None or model.moe_first_dense_layers:
        widths.append(model.ffn_hidden_size)
    expert_width = model.moe_ffn_hidden_size or 0
    keys_values = 2 * groups * model.kv_channels
    return (
        Rule(
            name="attention_heads",
            knobs=(TP,),
            says=f"{TP} must divide num_attention_heads = {heads}",
            broken=lambda c: heads % c[TP] != 0,
        ),
        Rule(
            name="query_groups",
            knobs=(TP,),
            says=f"num_query_groups = {groups} must be a multiple or a divisor of {TP}",
            broken=lambda c: (groups % c[TP] != 0) & (c[TP] % groups != 0),
        ),
        Rule(
            name="qkv_width",
            knobs=(TP,),
            says=f"{TP} must divide the width of keys and values, {keys_values}",
            broken=lambda c: (keys_values % c[TP] != 0) & (not model.multi_latent_attention),
        ),
        Rule(
            name="ffn_width",
            knobs=(TP,),
            says=f"{TP} must divide the width of the feed-forward layers, {max(widths)}",
            broken=lambda c: np.logical_or.reduce([width % c[TP] != 0 for width in widths]),
        ),
        Rule(
            name="expert_width",
            knobs=(TP,),
            says=f"the expert tensor parallel size (default: {TP}) must divide moe_ffn_hidden_size = {expert_width}",
            broken=lambda c: expert_width % _expert_width(c) != 0,
        ),
        Rule(
            name="context_length",
            knobs=(CP,),
            says=f"seq_length = {length} must be a multiple of 2 x {CP} when {CP} > 1",
            broken=lambda c: (c[CP] > 1) & (length % (2 * c[CP]) != 0),
        ),
        Rule(
            name="sequence_length",
            knobs=(TP, CP, SP),
            says=f"seq_length = {length} must be a multiple of {TP} x {CP} with {SP}",
            broken=lambda c: (c[SP] == 1) & (length % (c[TP] * c[CP]) != 0),
        ),
        Rule(
            name="moe_sequence_parallel",
            knobs=(TP, SP),
            says=f"a mixture of experts with {TP} > 1 trains only with {SP}",
            broken=lambda c: (c[TP] > 1) & (c[SP] == 0) & (model.num_moe_experts is not None),
        ),
    )


def _pipeline(task: Task) -> Sequence[Rule]:
    layers, batch = task.spec.model.num_layers, task.spec.train.global_batch_size

    def interleaved(c: Columns) -> BoolArray:
        given = c.get("virtual_pipeline_model_parallel_size")
        return (c[VIRTUAL] > 0) if given is None else (given > 1)

    return (
        Rule(
            name="pipeline_stages",
            knobs=(PP,),
            says=f"{PP} must divide num_layers = {layers}, or what first and last stage leave of them",
            broken=lambda c: _uneven(c, layers),
        ),
        Rule(
            name="virtual_needs_pipeline",
            knobs=(PP, VIRTUAL),
            says=f"virtual pipeline stages need {PP} > 1",
            broken=lambda c: interleaved(c) & (c[PP] == 1),
        ),
        Rule(
            name="virtual_stages",
            knobs=(PP, VIRTUAL),
            says=f"{VIRTUAL} must divide num_layers / {PP}",
            broken=lambda c: _split_virtual(c, layers),
        ),
        Rule(
            name="interleaved_microbatches",
            knobs=(DP, MBS, PP, VIRTUAL),
            says=f"with virtual stages the number of micro-batches must be a multiple of {PP}",
            broken=lambda c: interleaved(c) & ((batch // np.maximum(c[MBS] * c[DP], 1)) % c[PP] != 0),
        ),
    )


def _experts(task: Task) -> Sequence[Rule]:
    experts, devices = task.spec.model.num_moe_experts, task.cluster.devices
    return (
        Rule(
            name="experts_exist",
            knobs=(EP,),
            says=f"{EP} > 1 needs a model with experts",
            broken=lambda c: (c[EP] > 1) & (experts is None),
        ),
        Rule(
            name="experts_divide",
            knobs=(EP,),
            says=f"{EP} must divide num_moe_experts = {experts}",
            broken=lambda c: (experts or 0) % c[EP] != 0,
        ),
        Rule(
            name="expert_world_size",
            knobs=(TP, PP, EP),
            says=f"{EP} x expert tensor parallel size (default: {TP}) x {PP} must divide the {devices} devices",
            broken=lambda c: (devices % (_expert_width(c) * c[EP] * c[PP]) != 0) & (experts is not None),
        ),
    )


def _recompute(task: Task) -> Sequence[Rule]:
    layers = task.spec.model.num_layers
    return (
        Rule(
            name="recompute_granularity",
            knobs=(RECOMPUTE, GRANULARITY),
            says=f"{RECOMPUTE} needs {GRANULARITY}",
            broken=lambda c: (c[RECOMPUTE] == 1) & (c[GRANULARITY] == 0),
        ),
        Rule(
            name="selective_recompute",
            knobs=(RECOMPUTE, GRANULARITY, METHOD, RECOMPUTE_LAYERS),
            says=f"selective recompute takes neither {METHOD} nor {RECOMPUTE_LAYERS}",
            broken=lambda c: _recomputes(c, SELECTIVE) & ((c[METHOD] != 0) | (c[RECOMPUTE_LAYERS] != 0)),
        ),
        Rule(
            name="recompute_method",
            knobs=(RECOMPUTE, GRANULARITY, METHOD),
            says=f"full recompute needs {METHOD}",
            broken=lambda c: _recomputes(c, FULL) & (c[METHOD] == 0),
        ),
        Rule(
            name="uniform_recompute",
            knobs=(PP, VIRTUAL, RECOMPUTE, GRANULARITY, METHOD, RECOMPUTE_LAYERS),
            says=f"uniform recompute needs a {RECOMPUTE_LAYERS} that divides the layers of a (virtual) stage",
            broken=lambda c: (
                _recomputes(c, FULL)
                & (c[METHOD] == UNIFORM)
                & (c[RECOMPUTE_LAYERS] > 0)
                & (_chunk_layers(c, layers) % np.maximum(c[RECOMPUTE_LAYERS], 1) != 0)
            ),
        ),
        Rule(
            name="recompute_num_layers",
            knobs=(PP, RECOMPUTE, GRANULARITY, RECOMPUTE_LAYERS),
            says=f"full recompute needs {RECOMPUTE_LAYERS} from 1 to num_layers / {PP}",
            broken=lambda c: (
                _recomputes(c, FULL) & ((c[RECOMPUTE_LAYERS] < 1) | (c[RECOMPUTE_LAYERS] > _stage_layers(c, layers)))
            ),
        ),
    )


def needs_layout(c: Columns, layers: int) -> bool:
    """Return whether a candidate's layers divide over its stages only if embedding or loss count as layers."""
    virtual = c.get("virtual_pipeline_model_parallel_size")
    chunks = int(c[PP][0]) * (max(1, int(virtual[0])) if virtual is not None else 1)
    _, first, last = _parts(c, layers)
    return not (first[0] or last[0] or layers % chunks == 0) and 0 in ((layers + 1) % chunks, (layers + 2) % chunks)


def merges(task: Task) -> tuple[Merge, ...]:
    """Return what Megatron treats as equal: knobs without effect, and two spellings of one schedule."""
    layers, dense = task.spec.model.num_layers, task.spec.model.num_moe_experts is None

    def virtual(c: Columns) -> dict[str, IntArray]:
        one = (c[PP] == 1) | (c[VIRTUAL] * c[PP] == layers)
        return {VIRTUAL: np.where(one, 0, c[VIRTUAL])}

    def recompute_layers(c: Columns) -> dict[str, IntArray]:
        block, number = c[METHOD] == BLOCK, c[RECOMPUTE_LAYERS]
        every = block & (number >= _chunk_layers(c, layers)) & (number <= _stage_layers(c, layers))
        return {METHOD: np.where(every, UNIFORM, c[METHOD]), RECOMPUTE_LAYERS: np.where(every, 1, number)}

    return (
        Merge(
            name="sequence_parallel_without_tensor_parallel",
            knobs=(TP, SP),
            canonical=lambda c: {SP: np.where(c[TP] == 1, 0, c[SP])},
        ),
        Merge(
            name="distributed_optimizer_of_one",
            knobs=(DP, CP, DIST_OPT),
            canonical=lambda c: {DIST_OPT: np.where(c[DP] * c[CP] == 1, 0, c[DIST_OPT])},
        ),
        Merge(
            name="experts_of_a_dense_model",
            knobs=(EP,),
            canonical=lambda c: {EP: np.ones_like(c[EP]) if dense else c[EP]},
        ),
        Merge(name="one_virtual_stage", knobs=(PP, VIRTUAL), canonical=virtual),
        Merge(
            name="granularity_without_recompute",
            knobs=(RECOMPUTE, GRANULARITY),
            canonical=lambda c: {GRANULARITY: c[GRANULARITY] * c[RECOMPUTE]},
        ),
        Merge(
            name="method_without_full_recompute",
            knobs=(RECOMPUTE, GRANULARITY, METHOD),
            canonical=lambda c: {METHOD: np.where(_recomputes(c, FULL), c[METHOD], 0)},
        ),
        Merge(
            name="number_without_full_recompute",
            knobs=(RECOMPUTE, GRANULARITY, RECOMPUTE_LAYERS),
            canonical=lambda c: {RECOMPUTE_LAYERS: np.where(_recomputes(c, FULL), c[RECOMPUTE_LAYERS], 0)},
        ),
        Merge(
            name="recompute_of_every_layer",
            knobs=(PP, VIRTUAL, METHOD, RECOMPUTE_LAYERS),
            canonical=recompute_layers,
        ),
    )


def _recomputes(c: Columns, granularity: int) -> BoolArray:
    does: BoolArray = (c[RECOMPUTE] == 1) & (c[GRANULARITY] == granularity)
    return does


def _chunk_layers(c: Columns, layers: int) -> IntArray:
    """Return the layers of one virtual stage, or of a stage that is not interleaved."""
    return _stage_layers(c, layers) // virtual_stages(c, layers)


def _stage_layers(c: Columns, layers: int) -> IntArray:
    """Return the layers of the largest pipeline stage."""
    middle, first, last = _parts(c, layers)
    largest: IntArray = np.maximum(np.maximum(first, last), middle)
    return largest


def _parts(c: Columns, layers: int) -> tuple[IntArray, IntArray, IntArray]:
    """Return the layers of a middle stage, and of the first and the last one where they are given (else 0)."""
    none = np.zeros_like(c[PP])
    first = c.get("num_layers_in_first_pipeline_stage", none)
    last = c.get("num_layers_in_last_pipeline_stage", none)
    stages = c[PP] - (first > 0) - (last > 0)
    return np.where(stages > 0, (layers - first - last) // np.maximum(stages, 1), 0), first, last


def _uneven(c: Columns, layers: int) -> BoolArray:
    middle, first, last = _parts(c, layers)
    stages = c[PP] - (first > 0) - (last > 0)
    complete: BoolArray = middle * stages + first + last == layers
    empty: BoolArray = (stages > 0) & (middle < 1)
    return ~complete | empty


def _split_virtual(c: Columns, layers: int) -> BoolArray:
    given = c.get("virtual_pipeline_model_parallel_size")
    if given is None:
        _, first, last = _parts(c, layers)
        uneven_stage = (layers // c[PP]) % np.maximum(c[VIRTUAL], 1) != 0
        ragged: BoolArray = (c[VIRTUAL] > 0) & (uneven_stage | (first > 0) | (last > 0))
        return ragged
    middle, first, last = (part % np.maximum(given, 1) for part in _parts(c, layers))
    uneven: BoolArray = (given > 1) & (middle + first + last > 0)
    return uneven


def _expert_width(c: Columns) -> IntArray:
    width: IntArray = np.maximum(c.get("expert_tensor_parallel_size", c[TP]), 1)
    return width
