"""Megatron's rules for legal candidates, and merges of candidates that it treats as equal.

Rules about a setting are named after it. Sources: megatron-core 0.16 to 0.20 `parallel_state.py`,
`transformer_config.py`, `num_microbatches_calculator.py`, `pipeline_parallel/schedules.py`,
`multi_token_prediction.py`, `distrib_optimizer.py`; Megatron-LM `arguments.py` of the same releases.
"""

import math
from collections.abc import Iterator
from itertools import accumulate

import numpy as np
from flagcore_models.layers import latent_layers, other_mixers

from flagcore.domain.space import BoolArray, Columns, Rule
from flagcore.domain.spec import Task
from flagcore.i18n import N_, Message
from flagcore_megatron.program.user_command import implementation_of_command
from flagcore_megatron.space.knobs import FULL, SELECTIVE, UNIFORM
from flagcore_megatron.space.meshes import CP, DP, EP, MBS, PP, SP, TP
from flagcore_megatron.space.options import is_hybrid, takes_layouts
from flagcore_megatron.space.split import LAYERS_PER_VIRTUAL, SPLIT, Split, balanced
from flagcore_megatron.space.stages import FIRST, LAST, LAYOUT, PATTERN, VIRTUAL_STAGES

DIST_OPT = "use_distributed_optimizer"
RECOMPUTE, GRANULARITY = "use_recompute", "recompute_granularity"
DIST_OPT_SETTINGS = ("overlap_param_gather", "fp8_param_gather", "use_precision_aware_optimizer")
"""Settings that Megatron refuses without the distributed optimizer, even on one rank."""
METHOD, RECOMPUTE_LAYERS = "recompute_method", "recompute_num_layers"
EXPERT_OVERLAP = "overlap_moe_expert_parallel_comm"
UNPIPED_MTP_OVERLAP_SINCE = ">=0.18"
"""Releases that overlap the communication of experts with multi-token prediction also without a pipeline.

The time and memory of that overlap are not modelled: such a candidate is predicted without it."""


NAMES = {
    "CP": CP,
    "DIST_OPT": DIST_OPT,
    "DP": DP,
    "EP": EP,
    "EXPERT_OVERLAP": EXPERT_OVERLAP,
    "FIRST": FIRST,
    "GRANULARITY": GRANULARITY,
    "LAST": LAST,
    "LAYERS_PER_VIRTUAL": LAYERS_PER_VIRTUAL,
    "LAYOUT": LAYOUT,
    "MBS": MBS,
    "METHOD": METHOD,
    "PATTERN": PATTERN,
    "PP": PP,
    "RECOMPUTE": RECOMPUTE,
    "RECOMPUTE_LAYERS": RECOMPUTE_LAYERS,
    "SP": SP,
    "SPLIT": SPLIT,
    "TP": TP,
    "VIRTUAL_STAGES": VIRTUAL_STAGES,
}
"""The names of knobs in messages of rules, by their fields."""


def rules(task: Task) -> tuple[Rule, ...]:
    """Return the legality rules for training `task` with Megatron."""
    groups = (_batch_rules, _width_rules, _length_rules, _node_group_rules, _pipeline_rules, _expert_rules)
    return tuple(rule for group in (*groups, _recompute_rules) for rule in group(task))


def _batch_rules(task: Task) -> Iterator[Rule]:
    devices, batch = task.cluster.devices, task.spec.train.global_batch_size
    yield Rule(
        name="world_size",
        knobs=(DP, TP, PP, CP),
        message=Message("{DP} x {TP} x {PP} x {CP} must be the number of devices, {devices}", **NAMES, devices=devices),
        broken=lambda c: c[DP] * c[TP] * c[PP] * c[CP] != devices,
    )
    yield Rule(
        name="global_batch_size",
        knobs=(DP, MBS),
        message=Message("global_batch_size = {batch} must be a multiple of {MBS} x {DP}", **NAMES, batch=batch),
        broken=lambda c: batch % (c[MBS] * c[DP]) != 0,
    )


def _width_rules(task: Task) -> Iterator[Rule]:
    model = task.spec.model
    heads, groups = model.num_attention_heads, model.num_query_groups
    widths = [model.moe_shared_expert_intermediate_size or 0]
    if not model.experts or model.moe_first_dense_layers:
        widths.append(model.ffn_hidden_size)
    expert_width, split = model.moe_ffn_hidden_size or 0, Split.from_task(task)
    keys_values = 2 * groups * model.kv_channels
    yield Rule(
        name="attention_heads",
        knobs=(TP,),
        message=Message("{TP} must divide num_attention_heads = {heads}", **NAMES, heads=heads),
        broken=lambda c: heads % c[TP] != 0,
    )
    yield Rule(
        name="query_groups",
        knobs=(TP,),
        message=Message("num_query_groups = {groups} must be a multiple or a divisor of {TP}", **NAMES, groups=groups),
        broken=lambda c: (groups % c[TP] != 0) & (c[TP] % groups != 0),
    )
    yield Rule(
        name="qkv_width",
        knobs=(TP,),
        message=Message(
            "{TP} must divide the width of keys and values, {keys_values}", **NAMES, keys_values=keys_values
        ),
        broken=lambda c: (keys_values % c[TP] != 0) & (not latent_layers(model)),
    )
    yield Rule(
        name="ffn_width",
        knobs=(TP,),
        message=Message("{TP} must divide the width of the feed-forward layers, {width}", **NAMES, width=max(widths)),
        broken=lambda c: np.logical_or.reduce([width % c[TP] != 0 for width in widths]),
    )
    mixer_heads = math.gcd(*(mixer.heads for mixer in other_mixers(model)))
    yield Rule(
        name="mixer_heads",
        knobs=(TP, CP),
        message=Message(
            "{TP} x {CP} must divide the heads or groups of mixers, {mixer_heads}", **NAMES, mixer_heads=mixer_heads
        ),
        broken=lambda c: mixer_heads % (c[TP] * c[CP]) != 0,
    )
    yield Rule(
        name="expert_width",
        knobs=(TP,),
        message=Message(
            "the expert tensor parallel size (default: {TP}) must divide moe_ffn_hidden_size = {expert_width}",
            **NAMES,
            expert_width=expert_width,
        ),
        broken=lambda c: expert_width % split.expert_tensor_size(c) != 0,
    )


def _length_rules(task: Task) -> Iterator[Rule]:
    length, experts = task.spec.train.seq_length, task.spec.model.experts
    is_local = task.spec.train.command is not None and implementation_of_command(task.spec) == "local"
    yield Rule(
        name="context_parallel_implementation",
        knobs=(CP,),
        message=Message(
            "{CP} > 1 needs the attention of transformer-engine; train.command sets --transformer-impl local", **NAMES
        ),
        broken=lambda c: (c[CP] > 1) & is_local,
    )
    yield Rule(
        name="context_length",
        knobs=(CP,),
        message=Message("seq_length = {length} must be a multiple of 2 x {CP} when {CP} > 1", **NAMES, length=length),
        broken=lambda c: (c[CP] > 1) & (length % (2 * c[CP]) != 0),
    )
    yield Rule(
        name="sequence_length",
        knobs=(TP, CP, SP),
        message=Message("seq_length = {length} must be a multiple of {TP} x {CP} with {SP}", **NAMES, length=length),
        broken=lambda c: (c[SP] == 1) & (length % (c[TP] * c[CP]) != 0),
    )
    yield Rule(
        name="moe_sequence_parallel",
        knobs=(TP, SP),
        message=Message("a mixture of experts with {TP} > 1 trains only with {SP}", **NAMES),
        broken=lambda c: (c[TP] > 1) & (c[SP] == 0) & (experts > 0),
    )


def _node_group_rules(task: Task) -> Iterator[Rule]:
    """Yield the rule that each pipeline stage is on a single node group, for clusters with several kinds of chips."""
    cluster = task.cluster
    if len(cluster.groups) == 1:
        return
    boundaries, devices = list(accumulate(group.devices for group in cluster.groups))[:-1], cluster.devices
    smallest_factor = math.lcm(*(devices // math.gcd(edge, devices) for edge in boundaries))
    yield Rule(
        name="stages_in_one_group",
        knobs=(PP,),
        message=(
            Message(
                "{PP} must be a multiple of {smallest_factor}, so that no stage has devices of two node "
                "groups, {chips}: a stage runs on one chip model",
                **NAMES,
                smallest_factor=smallest_factor,
                chips=cluster.chips,
            )
        ),
        broken=lambda c: c[PP] % smallest_factor != 0,
    )


def _pipeline_rules(task: Task) -> Iterator[Rule]:
    split, batch = Split.from_task(task), task.spec.train.global_batch_size

    def interleaved(c: Columns) -> BoolArray:
        return (split.virtual(c) > 1) | (c[LAYERS_PER_VIRTUAL] > 0)

    whole = is_hybrid(task.spec.model) and not takes_layouts(task.spec)
    yield Rule(name="pipeline_stages", knobs=(PP, SPLIT), message=_split_message(split), broken=split.uneven)
    yield Rule(
        name="hybrid_stages",
        knobs=(PP, LAYERS_PER_VIRTUAL),
        message=Message(
            "a hybrid model has {LAYERS_PER_VIRTUAL} from Megatron 0.17 on, where bars split its pattern", **NAMES
        ),
        broken=lambda c: whole & (c[PP] > 1) & (c[LAYERS_PER_VIRTUAL] > 0),
    )
    yield Rule(
        name="virtual_needs_pipeline",
        knobs=(PP, SPLIT, LAYERS_PER_VIRTUAL),
        message=Message("virtual pipeline stages need {PP} > 1", **NAMES),
        broken=lambda c: interleaved(c) & (c[PP] == 1),
    )
    yield Rule(
        name="virtual_stages",
        knobs=(PP, SPLIT, LAYERS_PER_VIRTUAL),
        message=Message(
            "{PP} x {VIRTUAL_STAGES} must be the {count} parts of {PATTERN} between its bars",
            **NAMES,
            count=len(split.layout_layers),
        )
        if split.has_bars
        else Message("{LAYERS_PER_VIRTUAL} (or {VIRTUAL_STAGES}) must divide num_layers / {PP}", **NAMES),
        broken=split.ragged,
    )
    yield Rule(
        name="interleaved_microbatches",
        knobs=(DP, MBS, PP, SPLIT, LAYERS_PER_VIRTUAL),
        message=Message("with virtual stages the number of micro-batches must be a multiple of {PP}", **NAMES),
        broken=lambda c: interleaved(c) & ((batch // np.maximum(c[MBS] * c[DP], 1)) % c[PP] != 0),
    )


def _expert_rules(task: Task) -> Iterator[Rule]:
    experts, devices, split = task.spec.model.experts, task.cluster.devices, Split.from_task(task)
    yield Rule(
        name="experts_exist",
        knobs=(EP,),
        message=Message("{EP} > 1 needs a model with experts", **NAMES),
        broken=lambda c: (c[EP] > 1) & (experts == 0),
    )
    yield Rule(
        name="experts_divide",
        knobs=(EP,),
        message=Message("{EP} must divide num_moe_experts = {experts}", **NAMES, experts=experts),
        broken=lambda c: experts % c[EP] != 0,
    )
    yield Rule(
        name="expert_world_size",
        knobs=(TP, PP, EP),
        message=Message(
            "{EP} x expert tensor parallel size (default: {TP}) x {PP} must divide the {devices} devices",
            **NAMES,
            devices=devices,
        ),
        broken=lambda c: (devices % (split.expert_tensor_size(c) * c[EP] * c[PP]) != 0) & (experts > 0),
    )


def _split_message(split: Split) -> str:
    if split.layout_layers:
        stages = len(split.layout_layers)
        if split.has_bars:
            text = N_(
                "{PP} must divide the {stages} parts of {PATTERN} between its bars, which {SPLIT}: balanced moves"
            )
            return Message(text, **NAMES, stages=stages)
        return Message(
            "{PP} must divide the {stages} stages of the layout, with multi-token prediction at the end",
            **NAMES,
            stages=stages,
        )
    text = N_(
        "{PP} must divide num_layers = {layers}, or the layers that {FIRST} and {LAST} leave "
        "(in train.settings, where {LAYOUT} sets any split)"
    )
    if split.counted > split.layers:
        text = N_(
            "{PP} must divide num_layers = {layers} and {extra} for embedding and loss, or the layers that {FIRST} and "
            "{LAST} leave (in train.settings, where {LAYOUT} sets any split)"
        )
    return Message(text, **NAMES, layers=split.layers, extra=split.counted - split.layers)


def _recompute_rules(task: Task) -> Iterator[Rule]:
    split, depths = Split.from_task(task), task.spec.model.mtp_num_layers
    yield Rule(
        name="recompute_granularity",
        knobs=(RECOMPUTE, GRANULARITY),
        message=Message("{RECOMPUTE} needs {GRANULARITY}", **NAMES),
        broken=lambda c: (c[RECOMPUTE] == 1) & (c[GRANULARITY] == 0),
    )
    yield Rule(
        name="selective_recompute",
        knobs=(RECOMPUTE, GRANULARITY, METHOD, RECOMPUTE_LAYERS),
        message=Message("selective recompute takes neither {METHOD} nor {RECOMPUTE_LAYERS}", **NAMES),
        broken=lambda c: recomputes(c, SELECTIVE) & ((c[METHOD] != 0) | (c[RECOMPUTE_LAYERS] != 0)),
    )
    yield Rule(
        name="recompute_method",
        knobs=(RECOMPUTE, GRANULARITY, METHOD),
        message=Message("full recompute needs {METHOD}", **NAMES),
        broken=lambda c: recomputes(c, FULL) & (c[METHOD] == 0),
    )
    yield Rule(
        name="uniform_recompute",
        knobs=(PP, SPLIT, LAYERS_PER_VIRTUAL, RECOMPUTE, GRANULARITY, METHOD, RECOMPUTE_LAYERS),
        message=Message(
            "uniform recompute needs a {RECOMPUTE_LAYERS} that divides the layers of a (virtual) stage", **NAMES
        ),
        broken=lambda c: (
            recomputes(c, FULL)
            & (c[METHOD] == UNIFORM)
            & (c[RECOMPUTE_LAYERS] > 0)
            & np.where(
                balanced(c),
                c[RECOMPUTE_LAYERS] > 1,
                np.any([each % np.maximum(c[RECOMPUTE_LAYERS], 1) != 0 for each in split.chunk_layers(c)], axis=0),
            )
        ),
    )
    yield Rule(
        name="multi_token_recompute",
        knobs=(RECOMPUTE, GRANULARITY, METHOD, RECOMPUTE_LAYERS),
        message=Message("uniform recompute of multi-token prediction needs {RECOMPUTE_LAYERS} = 1", **NAMES),
        broken=lambda c: recomputes(c, FULL) & (c[METHOD] == UNIFORM) & (c[RECOMPUTE_LAYERS] > 1) & (depths > 0),
    )
    yield Rule(
        name="recompute_num_layers",
        knobs=(PP, SPLIT, RECOMPUTE, GRANULARITY, RECOMPUTE_LAYERS),
        message=Message("full recompute needs {RECOMPUTE_LAYERS} from 1 to num_layers / {PP}", **NAMES),
        broken=lambda c: (
            recomputes(c, FULL) & ((c[RECOMPUTE_LAYERS] < 1) | (c[RECOMPUTE_LAYERS] > split.stage_layers(c)))
        ),
    )


def recomputes(c: Columns, granularity: int) -> BoolArray:
    """Return a mask of the candidates whose recompute has the `granularity` `SELECTIVE` or `FULL`."""
    result: BoolArray = (c[RECOMPUTE] == 1) & (c[GRANULARITY] == granularity)
    return result
