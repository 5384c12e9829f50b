"""Megatron's rules for legal candidates, and merges of candidates that it treats as equal.

The knobs and the messages of rules are in `rules.yaml`. Rules about a setting are named after it; those that follow
from settings are the same for all candidates. Sources:
megatron-core 0.16 to 0.20 `parallel_state.py`, `transformer_config.py`, `num_microbatches_calculator.py`,
`pipeline_parallel/schedules.py`, `multi_token_prediction.py`, `distrib_optimizer.py`; Megatron-LM `arguments.py` of the
same releases.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
from flagcore_models.layers import indexer_of, latent_layers, network_counts, other_mixers
from flagcore_models.mixers.gated_delta_net import GatedDeltaNet
from flagcore_models.networks.dense import Dense
from flagcore_training.knobs import RuleTable
from flagcore_training.layout import WHOLE_STEP
from flagcore_training.schedules import SCHEDULES

from flagcore.domain.knob import in_versions
from flagcore.domain.space import BoolArray, Columns, IntArray, KnobValue, Merge, Rule
from flagcore.domain.spec import SettingValue, Spec, Task
from flagcore.i18n import N_, Message
from flagcore_megatron.program.user_command import implementation_of_command
from flagcore_megatron.space.knobs import BLOCK, FULL, SELECTIVE, UNIFORM
from flagcore_megatron.space.meshes import CP, DP, EP, MBS, PP, SP, TP
from flagcore_megatron.space.options import (
    AWARE_OPTIMIZER,
    MUON_SHARDED_SINCE,
    Settings,
    given_flags,
    graphs,
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
SHORT_CHUNKS_SINCE = ">=0.17"
"""Releases in which the last chunk of uniform recompute may be shorter (`transformer_block.py` of core_v0.17.0; 0.16
runs past the last layer). Chunks that only a search would try divide the layers: others need more memory for the same.
"""
UNPIPED_MTP_OVERLAP_SINCE = ">=0.18"
"""Releases that overlap the communication of experts with multi-token prediction also without a pipeline.

The time and memory of that overlap are not modelled: such a candidate is predicted without it."""
NAMES = {"CP": CP, "DP": DP, "EP": EP, "MBS": MBS, "PP": PP, "SP": SP, "TP": TP, "DIST_OPT": DIST_OPT}
NAMES |= {"RECOMPUTE": RECOMPUTE, "GRANULARITY": GRANULARITY, "METHOD": METHOD, "RECOMPUTE_LAYERS": RECOMPUTE_LAYERS}
NAMES |= {"EXPERT_OVERLAP": EXPERT_OVERLAP, "LAYERS_PER_VIRTUAL": LAYERS_PER_VIRTUAL, "VIRTUAL_STAGES": VIRTUAL_STAGES}
NAMES |= {"SPLIT": SPLIT, "LAYOUT": LAYOUT, "PATTERN": PATTERN, "FIRST": FIRST, "LAST": LAST}
"""The names of knobs in `rules.yaml`, by their fields."""
rule = RuleTable(__package__, NAMES)


def rules(task: Task) -> tuple[Rule, ...]:
    """Return the legality rules for training `task` with Megatron."""
    groups = (_batch_rules, _width_rules, _length_rules, _node_group_rules, _pipeline_rules, _expert_rules)
    return tuple(rule for group in (*groups, _recompute_rules) for rule in group(task))


def _batch_rules(task: Task) -> Iterator[Rule]:
    devices, batch = task.cluster.devices, task.spec.train.global_batch_size
    yield rule("world_size", lambda c: c[DP] * c[TP] * c[PP] * c[CP] != devices, devices=devices)
    yield rule("global_batch_size", lambda c: batch % (c[MBS] * c[DP]) != 0, batch=batch)


def _width_rules(task: Task) -> Iterator[Rule]:
    model = task.spec.model
    heads, groups = model.num_attention_heads, model.num_query_groups
    widths = {
        model.moe_shared_expert_intermediate_size or 0,
        *(each.width for each in network_counts(model) if isinstance(each, Dense)),
    }
    expert_width, split = model.moe_ffn_hidden_size or 0, Split.from_task(task)
    keys_values = 2 * groups * model.kv_channels
    yield rule("attention_heads", lambda c: heads % c[TP] != 0, heads=heads)
    yield rule("query_groups", lambda c: (groups % c[TP] != 0) & (c[TP] % groups != 0), groups=groups)
    yield rule("qkv_width", lambda c: (keys_values % c[TP] != 0) & (not latent_layers(model)), keys_values=keys_values)
    yield rule("ffn_width", lambda c: np.logical_or.reduce([width % c[TP] != 0 for width in widths]), width=max(widths))
    mixer_heads = math.gcd(*(mixer.heads for mixer in other_mixers(model)))
    yield rule("mixer_heads", lambda c: mixer_heads % (c[TP] * c[CP]) != 0, mixer_heads=mixer_heads)
    yield rule("expert_width", lambda c: expert_width % split.expert_tensor_size(c) != 0, expert_width=expert_width)


def _length_rules(task: Task) -> Iterator[Rule]:
    length, experts = task.spec.train.seq_length, task.spec.model.experts
    is_local = task.spec.train.command is not None and implementation_of_command(task.spec) == "local"
    is_local &= "context-parallel-algo" not in given_flags(task.spec)  # forks with it bring attention of their own
    yield rule("context_parallel_implementation", lambda c: (c[CP] > 1) & is_local)
    version, mixers = release(task.spec), other_mixers(task.spec.model)
    is_old = bool(version) and in_versions("<0.18", version) and any(isinstance(each, GatedDeltaNet) for each in mixers)
    yield rule("context_parallel_delta_net", lambda c: (c[CP] > 1) & is_old)
    is_other = settings_in_force(task.spec)["cp_comm_type"] != "all_gather" or (
        version and in_versions("<0.19", version)
    )
    has_indexer = indexer_of(task.spec.model) is not None
    yield rule("context_parallel_indexer", lambda c: (c[CP] > 1) & (has_indexer and bool(is_other)))
    yield rule("context_length", lambda c: (c[CP] > 1) & (length % (2 * c[CP]) != 0), length=length)
    yield rule("sequence_length", lambda c: (c[SP] == 1) & (length % (c[TP] * c[CP]) != 0), length=length)
    yield rule("moe_sequence_parallel", lambda c: (c[TP] > 1) & (c[SP] == 0) & (experts > 0))


def _node_group_rules(task: Task) -> Iterator[Rule]:
    """Yield the rule that each pipeline stage is on a single node group, for clusters with several kinds of chips."""
    cluster = task.cluster
    if len(cluster.groups) == 1:
        return
    boundaries, devices = list(accumulate(group.devices for group in cluster.groups))[:-1], cluster.devices
    smallest_factor = math.lcm(*(devices // math.gcd(edge, devices) for edge in boundaries))
    yield rule(
        "stages_in_one_group",
        lambda c: c[PP] % smallest_factor != 0,
        smallest_factor=smallest_factor,
        chips=cluster.chips,
    )


def _pipeline_rules(task: Task) -> Iterator[Rule]:
    split, batch = Split.from_task(task), task.spec.train.global_batch_size

    def interleaved(c: Columns) -> BoolArray:
        return (split.virtual(c) > 1) | (c[LAYERS_PER_VIRTUAL] > 0)

    whole = is_hybrid(task.spec.model) and not takes_layouts(task.spec)
    numbers = {"stages": len(split.layout_layers), "layers": split.layers, "extra": split.counted - split.layers}
    yield rule("pipeline_stages", split.uneven, _split_message(split), **numbers)
    if split.layout_layers and "num-layer-list" in given_flags(task.spec):  # a fork's, with a number for each rank
        yield rule("listed_stages", lambda c: c[PP] != numbers["stages"], stages=numbers["stages"])
    yield rule("hybrid_stages", lambda c: whole & (c[PP] > 1) & (c[LAYERS_PER_VIRTUAL] > 0))
    yield rule("virtual_needs_pipeline", lambda c: interleaved(c) & (c[PP] == 1))
    bars = N_("{PP} x {VIRTUAL_STAGES} must be the {count} parts of {PATTERN} between its bars")
    yield rule("virtual_stages", split.ragged, bars if split.has_bars else "", count=len(split.layout_layers))
    yield rule(
        "interleaved_microbatches", lambda c: interleaved(c) & ((batch // np.maximum(c[MBS] * c[DP], 1)) % c[PP] != 0)
    )


def _expert_rules(task: Task) -> Iterator[Rule]:
    experts, devices, split = task.spec.model.experts, task.cluster.devices, Split.from_task(task)
    yield rule("experts_exist", lambda c: (c[EP] > 1) & (experts == 0))
    yield rule("experts_divide", lambda c: experts % c[EP] != 0, experts=experts)
    yield rule(
        "expert_world_size",
        lambda c: (devices % (split.expert_tensor_size(c) * c[EP] * c[PP]) != 0) & (experts > 0),
        devices=devices,
    )


def _split_message(split: Split) -> str:
    """Return the message of the rule `pipeline_stages`, or an empty text for the usual one."""
    if split.has_bars:
        return N_("{PP} must divide the {stages} parts of {PATTERN} between its bars, which {SPLIT}: balanced moves")
    if split.layout_layers:
        return N_("{PP} must divide the {stages} stages of the layout, with multi-token prediction at the end")
    if split.counted == split.layers:
        return ""
    return N_(
        "{PP} must divide num_layers = {layers} and {extra} for embedding and loss, or the layers that {FIRST} and "
        "{LAST} leave (in train.settings, where {LAYOUT} sets any split)"
    )


def _recompute_rules(task: Task) -> Iterator[Rule]:
    split, depths = Split.from_task(task), task.spec.model.mtp_num_layers
    own = [number for number in _own_values(task.spec, RECOMPUTE_LAYERS) if isinstance(number, int)]
    listed = own if in_versions(SHORT_CHUNKS_SINCE, task.spec.train.engine_version) else []
    yield rule("recompute_granularity", lambda c: (c[RECOMPUTE] == 1) & (c[GRANULARITY] == 0))
    yield rule(
        "selective_recompute", lambda c: recomputes(c, SELECTIVE) & ((c[METHOD] != 0) | (c[RECOMPUTE_LAYERS] != 0))
    )
    yield rule("recompute_method", lambda c: recomputes(c, FULL) & (c[METHOD] == 0))
    yield rule(
        "uniform_recompute",
        lambda c: (
            recomputes(c, FULL)
            & (c[METHOD] == UNIFORM)
            & (c[RECOMPUTE_LAYERS] > 0)
            & ~np.isin(c[RECOMPUTE_LAYERS], listed)
            & np.where(
                balanced(c),
                c[RECOMPUTE_LAYERS] > 1,
                np.any([each % np.maximum(c[RECOMPUTE_LAYERS], 1) != 0 for each in split.chunk_layers(c)], axis=0),
            )
        ),
    )
    yield rule(
        "multi_token_recompute",
        lambda c: recomputes(c, FULL) & (c[METHOD] == UNIFORM) & (c[RECOMPUTE_LAYERS] > 1) & (depths > 0),
    )
    yield rule(
        "recompute_num_layers",
        lambda c: recomputes(c, FULL) & ((c[RECOMPUTE_LAYERS] < 1) | (c[RECOMPUTE_LAYERS] > split.stage_layers(c))),
    )


def _own_values(spec: Spec, knob: str) -> tuple[KnobValue, ...]:
    """Return the values of a knob that a spec lists or has in its baseline."""
    listed = spec.space.get(knob, ())
    return (*(() if isinstance(listed, str) else listed), (spec.baseline or {}).get(knob))


def recomputes(c: Columns, granularity: int) -> BoolArray:
    """Return a mask of the candidates whose recompute has the `granularity` `SELECTIVE` or `FULL`."""
    result: BoolArray = (c[RECOMPUTE] == 1) & (c[GRANULARITY] == granularity)
    return result


def merges(task: Task) -> tuple[Merge, ...]:
    """Return merges of candidates that Megatron treats as equal: knobs without effect, and equivalent schedules."""
    split, is_dense, can_derive = Split.from_task(task), not task.spec.model.experts, derived(task)
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


def settings_with_rules(task: Task) -> tuple[Rule, ...]:
    """Return the rules of all enabled settings, including those that flagcore assumes for production."""
    settings, split = settings_in_force(task.spec), Split.from_task(task)
    sharded, depths = bool(settings.get("use_megatron_fsdp")), task.spec.model.mtp_num_layers
    offloaded = numbers(settings.get("offload_stages"))
    piped_depths = 0 if in_versions(UNPIPED_MTP_OVERLAP_SINCE, release(task.spec)) else depths
    is_muon = "muon" in str(settings.get("optimizer"))
    is_unsharded = is_muon and not in_versions(MUON_SHARDED_SINCE, release(task.spec))
    has_parts = bool(graphs(settings) - WHOLE_STEP)

    rules = (
        *(rule(name, lambda c: (c[DIST_OPT] == 0) & (not sharded), name=name) for name in DIST_OPT_SETTINGS),
        rule("use_torch_fsdp2", lambda c: (c[PP] > 1) | (c[EP] > 1) | (c[DIST_OPT] == 1)),
        rule("optimizer", lambda c: (c[DIST_OPT] == 1) & is_unsharded, release=MUON_SHARDED_SINCE.lstrip(">=")),
        rule("tp_comm_overlap", lambda c: c[SP] == 0),
        rule("use_transformer_engine_op_fuser", lambda c: split.expert_tensor_size(c) > 1),
        rule(
            EXPERT_OVERLAP,
            lambda c: (
                is_hybrid(task.spec.model)
                | (c[EP] == 1)
                | recomputes(c, FULL)
                | ((c[PP] > 1) & (split.virtual(c) == 1))
                | ((c[PP] == 1) & (piped_depths > 0))
                | (depths > 1)
                | (sharded & has_parts)
            ),
            release=UNPIPED_MTP_OVERLAP_SINCE.lstrip(">="),
        ),
        *(
            rule(name, lambda c: recomputes(c, FULL) & has_parts)
            for name in ("cuda_graph_impl", "cuda_graph_scope")
            if name == "cuda_graph_impl" or name in task.spec.train.assumed
        ),
        rule("offload_stages", lambda c: c[PP] <= max(offloaded, default=-1)),
        rule("cpu_offloading_num_layers", lambda c: (c[PP] > 1) | (c[RECOMPUTE] > 0)),
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
        "fp8_recipe": ("fp8_format", "fp8" in precision(task.spec.train, settings) or settings.get(AWARE_OPTIMIZER)),
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
