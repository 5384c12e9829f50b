"""Megatron's rules for legal candidates, and merges of candidates that it treats as equal.

Rules about a setting are named after it. Sources: megatron-core 0.16 to 0.20 `parallel_state.py`,
`transformer_config.py`, `num_microbatches_calculator.py`, `pipeline_parallel/schedules.py`,
`multi_token_prediction.py`, `distrib_optimizer.py`; Megatron-LM `arguments.py` of the same releases.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np

from flagcore.domain.knob import in_versions
from flagcore.domain.schedule import SCHEDULES
from flagcore.domain.space import BoolArray, Columns, IntArray, Merge, Rule
from flagcore.domain.spec import SettingValue, Task
from flagcore.i18n import N_, Message
from flagcore_megatron.program.user_command import implementation_of_command
from flagcore_megatron.space.knobs import BLOCK, FULL, SELECTIVE, UNIFORM
from flagcore_megatron.space.meshes import CP, DP, EP, MBS, PP, SP, TP
from flagcore_megatron.space.options import (
    MUON_SHARDED_SINCE,
    Settings,
    graph,
    is_hybrid,
    numbers,
    precision,
    release,
    schedule,
    settings_in_force,
    takes_layouts,
)
from flagcore_megatron.space.split import LAYERS_PER_VIRTUAL, SPLIT, Split, balanced, derived
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
    if model.num_moe_experts is None or model.moe_first_dense_layers:
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
        broken=lambda c: (keys_values % c[TP] != 0) & (not model.multi_latent_attention),
    )
    yield Rule(
        name="ffn_width",
        knobs=(TP,),
        message=Message("{TP} must divide the width of the feed-forward layers, {width}", **NAMES, width=max(widths)),
        broken=lambda c: np.logical_or.reduce([width % c[TP] != 0 for width in widths]),
    )
    mixer_heads = math.gcd(*(mixer.heads for mixer in model.other_mixers))
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
    length, experts = task.spec.train.seq_length, task.spec.model.num_moe_experts
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
        broken=lambda c: (c[TP] > 1) & (c[SP] == 0) & (experts is not None),
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
    experts, devices, split = task.spec.model.num_moe_experts, task.cluster.devices, Split.from_task(task)
    yield Rule(
        name="experts_exist",
        knobs=(EP,),
        message=Message("{EP} > 1 needs a model with experts", **NAMES),
        broken=lambda c: (c[EP] > 1) & (experts is None),
    )
    yield Rule(
        name="experts_divide",
        knobs=(EP,),
        message=Message("{EP} must divide num_moe_experts = {experts}", **NAMES, experts=experts),
        broken=lambda c: (experts or 0) % c[EP] != 0,
    )
    yield Rule(
        name="expert_world_size",
        knobs=(TP, PP, EP),
        message=Message(
            "{EP} x expert tensor parallel size (default: {TP}) x {PP} must divide the {devices} devices",
            **NAMES,
            devices=devices,
        ),
        broken=lambda c: (devices % (split.expert_tensor_size(c) * c[EP] * c[PP]) != 0) & (experts is not None),
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


def settings_with_rules(task: Task) -> tuple[Rule, ...]:
    """Return the rules of all enabled settings, including those that flagcore assumes for production."""
    settings, split = settings_in_force(task.spec), Split.from_task(task)
    sharded, depths = bool(settings.get("use_megatron_fsdp")), task.spec.model.mtp_num_layers
    offloaded = numbers(settings.get("offload_stages"))
    piped_depths = 0 if in_versions(UNPIPED_MTP_OVERLAP_SINCE, release(task.spec)) else depths
    is_muon = "muon" in str(settings.get("optimizer"))
    is_unsharded = is_muon and not in_versions(MUON_SHARDED_SINCE, release(task.spec))
    has_parts = graph(settings) == "layer"

    rules = (
        *(
            Rule(
                name=name,
                knobs=(DIST_OPT,),
                message=Message("{name} needs {DIST_OPT}", **NAMES, name=name),
                broken=lambda c: (c[DIST_OPT] == 0) & (not sharded),
            )
            for name in DIST_OPT_SETTINGS
        ),
        Rule(
            name="use_torch_fsdp2",
            knobs=(PP, EP, DIST_OPT),
            message=Message("use_torch_fsdp2 needs {PP} = 1 and {EP} = 1, and excludes {DIST_OPT}", **NAMES),
            broken=lambda c: (c[PP] > 1) | (c[EP] > 1) | (c[DIST_OPT] == 1),
        ),
        Rule(
            name="optimizer",
            knobs=(DIST_OPT,),
            message=Message(
                "optimizer: muon excludes {DIST_OPT} before Megatron {release}",
                **NAMES,
                release=MUON_SHARDED_SINCE.lstrip(">="),
            ),
            broken=lambda c: (c[DIST_OPT] == 1) & is_unsharded,
        ),
        Rule(
            name="tp_comm_overlap",
            knobs=(SP,),
            message=Message("tp_comm_overlap needs {SP}", **NAMES),
            broken=lambda c: c[SP] == 0,
        ),
        Rule(
            name=EXPERT_OVERLAP,
            knobs=(PP, SPLIT, EP, LAYERS_PER_VIRTUAL, RECOMPUTE, GRANULARITY),
            message=Message(
                "{EXPERT_OVERLAP} needs {EP} > 1, virtual stages where {PP} > 1, no full recompute, and no "
                "pattern of layers; with multi-token prediction also mtp_num_layers: 1, and {PP} > 1 before "
                "Megatron {release}",
                **NAMES,
                release=UNPIPED_MTP_OVERLAP_SINCE.lstrip(">="),
            ),
            broken=lambda c: (
                is_hybrid(task.spec.model)
                | (c[EP] == 1)
                | recomputes(c, FULL)
                | ((c[PP] > 1) & (split.virtual(c) == 1))
                | ((c[PP] == 1) & (piped_depths > 0))
                | (depths > 1)
            ),
        ),
        *(
            Rule(
                name=name,
                knobs=(RECOMPUTE, GRANULARITY),
                message=Message("graphs of parts of an iteration (cuda_graph_impl) exclude full recompute"),
                broken=lambda c: recomputes(c, FULL) & has_parts,
            )
            for name in ("cuda_graph_impl", "cuda_graph_scope")
            if name == "cuda_graph_impl" or name in task.spec.train.assumed
        ),
        Rule(
            name="offload_stages",
            knobs=(PP,),
            message=Message("offload_stages must be below {PP}", **NAMES),
            broken=lambda c: c[PP] <= max(offloaded, default=-1),
        ),
        Rule(
            name="cpu_offloading_num_layers",
            knobs=(PP, RECOMPUTE, GRANULARITY),
            message=Message("cpu_offloading_num_layers needs {PP} = 1, and no recompute", **NAMES),
            broken=lambda c: (c[PP] > 1) | (c[RECOMPUTE] > 0),
        ),
        _schedule_rule(settings.get("pipeline_schedule"), split, task.spec.train.global_batch_size),
        *_requirement_rules(task, settings),
    )
    return tuple(rule for rule in rules if settings.get(rule.name))


def _requirement_rules(task: Task, settings: Settings) -> Iterator[Rule]:
    """Yield a rule that rejects every candidate, for each setting that requires another setting that is off."""
    is_flex = settings.get("moe_token_dispatcher_type") == "flex"
    narrow: tuple[str, bool] = ("moe_token_dispatcher_type: flex", is_flex)
    if release(task.spec):  # other programs of published runs have such a dispatch, too
        is_ncclep = is_flex and settings.get("moe_flex_dispatcher_backend") == "ncclep"
        narrow = ("moe_flex_dispatcher_backend: ncclep", is_ncclep)
    requirements = {
        "overlap_param_gather": ("overlap_grad_reduce", settings.get("overlap_grad_reduce")),
        "moe_flex_dispatcher_backend": ("moe_token_dispatcher_type: flex", is_flex),
        "moe_dispatch_fwd_dtype": narrow,
        "moe_combine_bwd_dtype": narrow,
        "fp8_recipe": ("fp8_format", "fp8" in precision(task.spec.train, settings)),
        "cuda_graph_scope": ("cuda_graph_impl", settings.get("cuda_graph_impl", "none") != "none"),
    }
    for name, (requirement, is_met) in requirements.items():
        if not is_met and name in task.spec.train.settings:
            message = Message("{name} needs {requirement}", name=name, requirement=requirement)
            yield Rule(name=name, knobs=(DP,), message=message, broken=lambda c: np.ones(c[DP].shape, dtype=np.bool_))


def _schedule_rule(setting: SettingValue, split: Split, batch: int) -> Rule:
    """Return the rule about the virtual stages of a schedule.

    Interleaved schedules require virtual stages, 1F1B allows any number, and all others have a fixed number. DualPipe
    and DualPipeV need two micro-batches per stage, DualPipe even numbers of stages and of micro-batches (source: its
    repository).
    """
    name = schedule(setting)
    min_virtual = 2 if name is None and str(setting or "1f1b").lower() != "1f1b" else 1
    fixed_virtual = SCHEDULES[name].parts if name else None
    is_dual = name in ("dualpipe", "dualpipev")
    text = N_("pipeline_schedule: {setting} needs virtual stages")
    if fixed_virtual is not None:
        text = N_("pipeline_schedule: {setting} needs {virtual} virtual stages or none")
    message = Message(text, setting=str(setting), virtual=fixed_virtual)
    if name == "dualpipev":
        message = Message("{first}, and at least two micro-batches per stage", first=message)
    if name == "dualpipe":
        text = N_("{first}, even numbers of stages and of micro-batches, and at least two micro-batches per stage")
        message = Message(text, first=message)

    def broken(c: Columns) -> BoolArray:
        virtual = split.virtual(c)
        wrong = (virtual < min_virtual) if fixed_virtual is None else (virtual > 1) & (virtual != fixed_virtual)
        if is_dual:
            microbatches = batch // np.maximum(c[MBS] * c[DP], 1)
            wrong |= microbatches < 2 * c[PP]
            if name == "dualpipe":
                wrong |= (c[PP] % 2 != 0) | (microbatches % 2 != 0)
        return (c[PP] > 1) & wrong

    knobs = (PP, SPLIT, LAYERS_PER_VIRTUAL, DP, MBS) if is_dual else (PP, SPLIT, LAYERS_PER_VIRTUAL)
    return Rule(name="pipeline_schedule", knobs=knobs, message=message, broken=broken)


def merges(task: Task) -> tuple[Merge, ...]:
    """Return merges of candidates that Megatron treats as equal: knobs without effect, and equivalent schedules."""
    split, is_dense, can_derive = Split.from_task(task), task.spec.model.num_moe_experts is None, derived(task)
    settings = settings_in_force(task.spec)
    sharded = any(settings.get(name) for name in DIST_OPT_SETTINGS if name not in task.spec.train.assumed)

    def virtual(c: Columns) -> dict[str, IntArray]:
        is_derived, parts = balanced(c), split.virtual(c)
        has_one_stage = (c[PP] == 1) | np.where(is_derived, parts == 1, c[LAYERS_PER_VIRTUAL] * c[PP] == split.counted)
        per_virtual = c[LAYERS_PER_VIRTUAL]
        per_virtual = np.where(is_derived & (per_virtual > 0), -(-split.layers // (c[PP] * parts)), per_virtual)
        return {LAYERS_PER_VIRTUAL: np.where(has_one_stage, 0, per_virtual)}

    return (
        Merge(
            name="sequence_parallel_without_tensor_parallel",
            knobs=(TP, SP),
            canonical=lambda c: {SP: np.where(c[TP] == 1, 0, c[SP])},
        ),
        Merge(
            name="distributed_optimizer_of_one",
            knobs=(DP, CP, DIST_OPT),
            canonical=lambda c: {DIST_OPT: np.where((c[DP] * c[CP] == 1) & (not sharded), 0, c[DIST_OPT])},
        ),
        Merge(
            name="experts_of_a_dense_model",
            knobs=(EP,),
            canonical=lambda c: {EP: np.ones_like(c[EP]) if is_dense else c[EP]},
        ),
        Merge(
            name="nothing_to_balance",
            knobs=(PP, SPLIT),
            canonical=lambda c: {SPLIT: np.where(((c[PP] > 1) | split.has_bars) & can_derive, c[SPLIT], 0)},
        ),
        Merge(name="one_virtual_stage", knobs=(PP, SPLIT, LAYERS_PER_VIRTUAL), canonical=virtual),
        *_recompute_merges(split),
    )


def _recompute_merges(split: Split) -> Sequence[Merge]:
    def recompute_layers(c: Columns) -> dict[str, IntArray]:
        block, number = c[METHOD] == BLOCK, c[RECOMPUTE_LAYERS]
        recomputes_all = block & (number >= split.chunk_layers(c)[0]) & (number <= split.stage_layers(c))
        method, layers = np.where(recomputes_all, UNIFORM, c[METHOD]), np.where(recomputes_all, 1, number)
        return {METHOD: method, RECOMPUTE_LAYERS: layers}

    return (
        Merge(
            name="granularity_without_recompute",
            knobs=(RECOMPUTE, GRANULARITY),
            canonical=lambda c: {GRANULARITY: c[GRANULARITY] * c[RECOMPUTE]},
        ),
        Merge(
            name="method_without_full_recompute",
            knobs=(RECOMPUTE, GRANULARITY, METHOD),
            canonical=lambda c: {METHOD: np.where(recomputes(c, FULL), c[METHOD], 0)},
        ),
        Merge(
            name="number_without_full_recompute",
            knobs=(RECOMPUTE, GRANULARITY, RECOMPUTE_LAYERS),
            canonical=lambda c: {RECOMPUTE_LAYERS: np.where(recomputes(c, FULL), c[RECOMPUTE_LAYERS], 0)},
        ),
        Merge(
            name="recompute_of_every_layer",
            knobs=(PP, SPLIT, LAYERS_PER_VIRTUAL, METHOD, RECOMPUTE_LAYERS),
            canonical=recompute_layers,
        ),
    )


def recomputes(c: Columns, granularity: int) -> BoolArray:
    """Return a mask of the candidates whose recompute has the `granularity` `SELECTIVE` or `FULL`."""
    result: BoolArray = (c[RECOMPUTE] == 1) & (c[GRANULARITY] == granularity)
    return result
