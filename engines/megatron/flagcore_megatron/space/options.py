"""Converts settings, precision and implementation to the options of the memory and time formulas."""

import re
from collections.abc import Mapping, Set
from typing import Any

from flagcore_models.layers import mixer_counts, product_counts
from flagcore_models.mixers.gated_delta_net import GatedDeltaNet
from flagcore_training.commands import parse_flags
from flagcore_training.layout import GRAPH_PARTS, WHOLE_STEP, Options, Tower
from flagcore_training.schedules import SCHEDULES

from flagcore.domain.knob import in_versions
from flagcore.domain.model import Model
from flagcore.domain.spec import SettingValue, Spec, Task, TrainSpec
from flagcore.errors import NotModelled, SpecError
from flagcore.spec.plain_data import package_yaml
from flagcore_megatron.program.user_command import program_arguments, readable_command, release_of
from flagcore_megatron.space.flags import settings_of_command
from flagcore_megatron.space.knobs import BY_NAME
from flagcore_megatron.space.stages import EMBEDDING, FIRST, LAST, LAYOUT, LOSS, PATTERN, parse_layout

Settings = Mapping[str, SettingValue]

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
NARROW = {"mxfp8": 33 / 64}
"""Bytes of formats in which experts exchange tokens, with a scale per 32 elements, relative to 16 bits."""
TRIAL, COMMAND = "trial", "command"
IMAGES = "images_per_sequence"
AWARE_OPTIMIZER, SHARED_OVERLAP = "use_precision_aware_optimizer", "moe_shared_expert_overlap"
LOSS_FUSION = "cross_entropy_loss_fusion"
MTP_LAYOUTS_SINCE, EARLY_MTP_SINCE = ">=0.14", ">=0.16"
"""Releases whose layouts may contain multi-token prediction: at all, and on a stage before the loss.

Source: megatron-core's `pipeline_parallel_layer_layout.py`."""
MUON_SHARDED_SINCE = ">=0.18"
"""Releases in which the distributed optimizer shards Muon (Megatron-LM `validate_args`, core_v0.16 to 0.20)."""
FREED_MTP_LOGITS_SINCE = ">=0.17"
"""Releases that compute the losses of multi-token prediction in a function of their own, `process_mtp_loss`."""
NO_CORE_COPY_SINCE = ">=0.18"
"""Releases whose all-gather of context parallelism keeps no copy of the attention core's output.

Transformer-engine kept one until 2.14. Its release is unknown: Megatron 0.17 was built with 2.14, 0.18 with 2.16
(their `uv.lock`)."""
EXPERT_GROUPS_SINCE = ">=0.19"
"""Releases in which experts that are split otherwise than other layers have data-parallel groups of their own.

Source: `use_expert_pgs` in megatron-core's `tensor_parallel/layers.py`. Until then only expert parallelism does it."""
ONE_BY_ONE = "<0.20"
"""Releases that take the sequences of a pack one by one, in rotary embeddings without a single kernel, and before and
after the exchange of context parallelism with a2a.

Sources: megatron-core `rope_utils.py` at core_v0.16 and @61f31145 (0.19), vectorized by @e4ba3a30 in August 2026;
transformer-engine `context_parallel.py` until 2.17, a kernel since @70101184 (2.18, June 2026)."""
SHARES_SINCE = ">=0.18"
"""Releases in which a command's --use-megatron-fsdp shards without a strategy (`arguments.py`; before: no_shard). A
launch with this setting of a spec names the strategy."""
HELD_SINCE = ">=0.13"
"""Releases that hold the main parameters of a precision-aware optimizer themselves in FP8 jobs."""
SECOND_MOMENTS = {"sgd": "none", "muon": "others", "dist_muon": "others", "lion": "others"}
"""The parameters with a second moment, by optimizer. Muon and Lion update matrices, Adam all others.

SOAP also keeps two square matrices for each side of a matrix, which are not included. Sources: megatron-core
`optimizer/muon.py` of 0.16 and 0.17, `optimizer/emerging_optimizers.py` of 0.18 to 0.20; emerging-optimizers 0.3."""
DEFAULTS: Mapping[str, Settings] = {
    TRIAL: {"moe_token_dispatcher_type": "alltoall", "cp_comm_type": "all_gather"},
    COMMAND: {"moe_token_dispatcher_type": "allgather", "cp_comm_type": "p2p"},
}
"""Default settings that differ between flagcore's own trial program and Megatron-LM."""


def runs(train: TrainSpec) -> str:
    """Return which program's run of a job is predicted: `trial` (flagcore's own) or `command` (Megatron-LM)."""
    return TRIAL if train.command is None and train.implementation in (None, "local") else COMMAND


def settings_in_force(spec: Spec) -> Settings:
    """Return all settings of a job, from the defaults, assumed settings, the user's command, and the spec.

    Later sources take precedence.

    Raises SpecError if the spec contradicts a command whose arguments cannot be changed.
    """
    train, command = spec.train, settings_of_command(spec)
    for key, value in () if readable_command(spec) else command.items():
        if train.settings.get(key, value) != value:
            raise SpecError(
                key=f"train.settings.{key}",
                value=train.settings[key],
                problem=f"contradicts train.command, which sets {value}",
                fix="remove one of the two",
            )
    return {**DEFAULTS[runs(train)], **train.assumed, **command, **train.settings}


TABLES = package_yaml(__package__, "options.yaml")
SHARED = {"states": "optim", "weights": "params", "gradients": "grads"}
"""Words of the sharding strategies of Megatron-FSDP (megatron-core 0.16.1 `param_and_grad_buffer.py`)."""


def options(task: Task) -> Options:
    """Return the options of the memory and time formulas for a task.

    Raises SpecError for settings that exclude each other, NotModelled for a schedule that cannot be predicted.
    """
    train, settings = task.spec.train, settings_in_force(task.spec)
    check(task, settings)
    share, offloads = settings.get("optimizer_offload_fraction", 1.0), "fine_grained_activation_offloading"
    fp8_attention, version = settings.get("fp8_dot_product_attention"), release(task.spec)
    cp_comm, is_emerging = str(settings["cp_comm_type"]), is_emerging_optimizer(settings)
    loss = (settings.get("cross_entropy_fusion_impl") or "native") if settings.get(LOSS_FUSION) else None
    narrow_head = settings.get("fp8_output_proj") and precision(train, settings) == "mxfp8"
    fields: dict[str, Any] = {name: bool(settings.get(key)) for name, key in TABLES["switches"].items()}
    # an iteration whose experts have no fixed size is a graph only with fused ones (0.18 `transformer_config.py`)
    fields["fused_experts"] |= graphs(settings) == WHOLE_STEP and not fields["padded_experts"]
    is_bare = bool(settings.get("use_megatron_fsdp")) and "use_megatron_fsdp" not in train.settings
    usual = "no_shard" if is_bare and not in_versions(SHARES_SINCE, version) else "optim_grads_params"
    shared = str(settings.get("data_parallel_sharding_strategy") or usual).split("_")
    fields["whole"] = frozenset(name for name, word in SHARED.items() if word not in shared)
    fields["fsdp"] |= bool(settings.get("use_torch_fsdp2"))
    fields["precision_aware_optimizer"] &= _adam_has_main_params(train, settings, version)
    fields |= {name: BYTES[str(settings.get(key, "fp32"))] for name, key in TABLES["widths"].items()}
    return Options(
        **fields,
        schedule=schedule(settings.get("pipeline_schedule")),
        early_mtp=takes_early_mtp(task.spec),
        recompute_modules=recompute_modules(settings),
        grad_bytes=_grad_bytes(precision(train, settings), settings),
        second_moments=SECOND_MOMENTS.get(str(settings.get("optimizer")), "all"),
        whole_matrices=is_emerging and in_versions(MUON_SHARDED_SINCE, version),
        assumed_fp8_gather="fp8_param_gather" in train.assumed,
        optimizer_offload_fraction=float(share or 0.0) if settings.get("optimizer_cpu_offload") else 0.0,
        offload_modules=words(settings.get("offload_modules")) if settings.get(offloads) else frozenset(),
        offload_stages=numbers(settings.get("offload_stages")),
        gc_interval=int((settings.get("manual_gc") and settings.get("manual_gc_interval")) or 0),
        offload_layers=int(settings.get("cpu_offloading_num_layers") or 0),
        adapter=train.adapter,
        joint_adapters=True,
        sparse_kernels=settings.get("dsa_kernel_backend", "none") != "none",
        indexer_loss=bool(settings.get("dsa_indexer_loss_coeff")),
        gradient_fusion=bool(settings.get("gradient_accumulation_fusion", True)),
        overlap_p2p_comm=bool(settings.get("overlap_p2p_comm", True)),
        dispatcher=_dispatcher(settings),
        router_loss=settings.get("moe_router_load_balancing_type") != "none",
        dispatch_share=NARROW.get(str(settings.get("moe_dispatch_fwd_dtype")), 1.0),
        combine_gradient_share=NARROW.get(str(settings.get("moe_combine_bwd_dtype")), 1.0),
        linked_devices=float(task.cluster.linked_devices),
        expert_imbalance=_imbalance(settings),
        routing_spread=NATURAL_SPREAD * bool(is_natural(task.spec, settings)),
        cp_comm=cp_comm,
        stores_core_copy="a2a" in cp_comm or (cp_comm == "all_gather" and not in_versions(NO_CORE_COPY_SINCE, version)),
        in_place_loss=loss == "te",
        copied_loss=loss == "native",
        wide_layers=_wide_layers(settings),
        wide_modules=words(settings.get("modules_in_bf16")),
        # the output head: megatron-core 0.18 `fp8_utils.py`
        mxfp8_modules=words(settings.get("modules_in_mxfp8")) | frozenset({"head"} if narrow_head else ()),
        frees_mtp_logits=in_versions(FREED_MTP_LOGITS_SINCE, version),
        attention_kernel=precision(train, settings) if fp8_attention else str(settings.get("attention_backend") or ""),
        # hybrid models have no rotary embedding by default (megatron-core `hybrid_model.py`, position_embedding_type)
        rope_fusion=bool(settings.get("apply_rope_fusion", True)) or is_hybrid(task.spec.model),
        one_by_one=in_versions(ONE_BY_ONE, version),
        graphs=graphs(settings),
        dropout=bool(settings.get("attention_dropout") or settings.get("hidden_dropout")),
    )


def _adam_has_main_params(train: TrainSpec, settings: Settings, version: str | None) -> bool:
    """Return whether transformer-engine's Adam holds the main parameters of a precision-aware optimizer.

    With the scales of most FP8 recipes, Megatron holds whole ones and copies 16-bit gradients to fp32, in 16-bit jobs
    that name such a recipe, too (megatron-core 0.13 to 0.20, `use_precision_aware_optimizer_no_fp8_or_ds_fp8`).
    """
    recipe = settings.get("fp8_recipe") or ("mxfp8" if train.precision == "mxfp8" else "delayed")
    is_narrow = settings.get("main_params_dtype", "fp32") != "fp32"
    others_hold = is_narrow or settings.get("optimizer_cpu_offload") or not in_versions(HELD_SINCE, version)
    return recipe == "delayed" or bool(others_hold)


def _wide_layers(settings: Settings) -> int:
    names = "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"
    counts = [settings.get(name) for name in names]
    return sum(1 if each is None else int(each) for each in counts) if settings.get("first_last_layers_bf16") else 0


def tower(model: Model, settings: Settings) -> Tower | None:
    """Return the vision tower of a job whose sequences have images."""
    images, width, height = (settings.get(name) for name in (IMAGES, "image_width", "image_height"))
    if model.vision is None or not (images and width and height):
        return None
    return Tower(
        vision=model.vision,
        images=float(images),
        tokens=model.vision.tokens(int(width), int(height)),
        frozen=bool(settings.get("freeze_vision_model")),
        frozen_mergers=bool(settings.get("freeze_vision_projection")),
    )


def is_emerging_optimizer(settings: Settings) -> bool:
    """Return whether a job's optimizer is one of those that Megatron shards by whole matrices."""
    return str(settings.get("optimizer") or "adam") not in ("adam", "sgd")


def release(spec: Spec) -> str | None:
    """Return the release of Megatron that runs a job, or None if it is unknown."""
    command = readable_command(spec)
    return release_of(spec, command) if command else spec.train.engine_version


def is_hybrid(model: Model) -> bool:
    """Return whether a model has layers with only a mixer or only a feed-forward network: those of a hybrid pattern."""
    return any(each.mixer is None or each.network is None for each in model.layers)


def takes_layouts(spec: Spec) -> bool:
    """Return whether the release that runs a job supports splits of its model: layouts, or bars in a hybrid pattern."""
    if is_hybrid(spec.model):
        return BY_NAME[PATTERN].is_available(release(spec))
    since = MTP_LAYOUTS_SINCE if spec.model.mtp_num_layers else ""
    return BY_NAME[LAYOUT].is_available(release(spec)) and in_versions(since, release(spec))


def takes_early_mtp(spec: Spec) -> bool:
    """Return whether a layout may place multi-token prediction on a stage before the loss."""
    return spec.model.mtp_num_layers > 0 and not is_hybrid(spec.model) and in_versions(EARLY_MTP_SINCE, release(spec))


def precision(train: TrainSpec, settings: Settings) -> str:
    """Return the precision of matrix products: the job's, or FP8 if settings enable it in a 16-bit job."""
    if train.precision not in ("bf16", "fp16") or not settings.get("fp8_format"):
        return train.precision
    return "mxfp8" if settings.get("fp8_recipe") == "mxfp8" else "fp8"


def check(task: Task, settings: Settings) -> None:
    """Raise SpecError for a combination of settings that Megatron refuses for every candidate.

    Sources: megatron-core 0.16 to 0.20 `transformer_config.py`, `optimizer_config.py`; Megatron-LM `arguments.py`.
    """
    enabled = {key for key, value in settings.items() if value not in (False, "fp32", 0, "none")}
    required_settings = dict.fromkeys(TABLES["widths"].values(), AWARE_OPTIMIZER) | {
        "optimizer_cpu_offload": AWARE_OPTIMIZER,
        "delay_wgrad_compute": "overlap_moe_expert_parallel_comm",
        "offload_modules": "fine_grained_activation_offloading",
        "fine_grained_activation_offloading": "offload_modules",
        "moe_pad_expert_input_to_capacity": "moe_expert_capacity_factor",
        IMAGES: "image_width",
        "image_width": "image_height",
        "image_height": IMAGES,
        "freeze_language_model": IMAGES,
        "freeze_vision_model": IMAGES,
        "freeze_vision_projection": IMAGES,
    }
    for key, other in required_settings.items():
        if key in enabled and other not in enabled:
            raise _refused(key, settings, f"needs {other}")
    for key, (is_wrong, problem) in _refusals(task, settings, enabled).items():
        if is_wrong and key in enabled:
            raise _refused(key, settings, problem)
    _check_places(task, settings)


def _check_places(task: Task, settings: Settings) -> None:
    """Raise SpecError for more images than a sequence holds, and for stages that cannot have multi-token prediction."""
    model = task.spec.model
    if (seen := tower(model, settings)) and seen.images * seen.tokens > task.spec.train.seq_length:
        raise _refused(IMAGES, settings, f"have {seen.tokens} tokens each, more than seq_length in a sequence")
    if settings.get(LAYOUT) and model.mtp_num_layers:
        *_, last = parse_layout(str(settings[LAYOUT]), model.num_layers, model.mtp_num_layers)
        if not takes_layouts(task.spec) or (not last.mtp and not takes_early_mtp(task.spec)):
            since, where = (MTP_LAYOUTS_SINCE, "") if last.mtp else (EARLY_MTP_SINCE, " before the loss")
            raise _refused(LAYOUT, settings, f"has multi-token prediction{where}, which needs Megatron {since}")


def _refusals(task: Task, settings: Settings, enabled: Set[str]) -> dict[str, tuple[bool, str]]:
    """Return for settings whether Megatron refuses them beside the others, and why."""
    modules, model, version = recompute_modules(settings), task.spec.model, release(task.spec)
    dispatcher, optimizer = settings.get("moe_token_dispatcher_type"), str(settings.get("optimizer") or "adam")
    offloaded, inside, whole = words(settings.get("offload_modules")), {"moe_act", "expert_fc1"}, "fused_group_mlp"
    given = given_flags(task.spec)
    possible_modules = {
        "mla_up_proj": any(each.name == "queries" for each in product_counts(model)),
        "moe_act": "moe_grouped_gemm" in enabled,
        "shared_experts": SHARED_OVERLAP not in enabled,
        # `ssm/gated_delta_net` of 0.19, not of 0.18; what it saves is not predicted
        "gdn_norm_out": any(isinstance(each, GatedDeltaNet) for each in mixer_counts(model))
        and (not version or in_versions(">=0.19", version)),
    }
    return {
        "moe_pad_expert_input_to_capacity": (dispatcher == "flex", "excludes moe_token_dispatcher_type: flex"),
        SHARED_OVERLAP: (dispatcher != "alltoall", "needs moe_token_dispatcher_type: alltoall"),
        "recompute_modules": (
            not modules.isdisjoint(name for name, is_there in possible_modules.items() if not is_there),
            "need: mla_up_proj latent or compressed attention, moe_act moe_grouped_gemm, shared_experts no"
            " moe_shared_expert_overlap, gdn_norm_out Gated DeltaNet and Megatron 0.19",
        ),
        "optimizer": (
            is_emerging_optimizer(settings)
            and (task.spec.train.precision == "fp16" or bool({"use_megatron_fsdp", "use_torch_fsdp2"} & enabled)),
            "excludes fp16, use_megatron_fsdp and use_torch_fsdp2",
        ),
        AWARE_OPTIMIZER: (optimizer != "adam", "needs optimizer: adam"),
        "overlap_moe_expert_parallel_comm": (
            "moe" in modules and in_versions(">=0.17", version),
            "excludes recompute_modules: moe",
        ),
        "offload_modules": (
            ("moe" in modules and not offloaded.isdisjoint({*inside, whole}) and in_versions(">=0.19", version))
            or (whole in offloaded and ("use_transformer_engine_op_fuser" not in enabled or bool(offloaded & inside)))
            or ("attn_proj" in offloaded and "core_attn" not in offloaded)
            or ("moe-paged-stash" in given and bool(offloaded & inside)),
            "may not be inside recompute_modules: moe; attn_proj needs core_attn, fused_group_mlp needs"
            " use_transformer_engine_op_fuser and excludes expert_fc1 and moe_act, as --moe-paged-stash does",
        ),
        "cuda_graph_scope": (bool(scope_problem := _scope_problem(task, settings)), scope_problem),
        "cp_comm_type": (
            settings.get("cp_comm_type") == "a2a+p2p" and "hierarchical-context-parallel-sizes" not in given,
            "needs --hierarchical-context-parallel-sizes",
        ),
        "overlap_grad_reduce": (
            optimizer == "muon" and not in_versions(MUON_SHARDED_SINCE, version),
            f"excludes optimizer: muon before Megatron {MUON_SHARDED_SINCE.lstrip('>=')}",
        ),
        IMAGES: (model.vision is None, "needs a model directory with a known vision tower"),
        **{
            key: (is_hybrid(model), f"needs another model: bars in {PATTERN} split the layers of a hybrid one")
            for key in (EMBEDDING, LOSS)
        },
        LAYOUT: (
            is_hybrid(model) or bool({EMBEDDING, LOSS, FIRST, LAST} & enabled),
            "excludes other settings of the split of layers, and hybrid models",
        ),
        PATTERN: (
            "|" in str(settings.get(PATTERN)) and bool({FIRST, LAST} & enabled),
            f"has bars, which exclude {FIRST} and {LAST}",
        ),
    }


def _scope_problem(task: Task, settings: Settings) -> str:
    """Return why Megatron refuses the parts that CUDA graphs capture (since 0.16), or an empty text."""
    parts, impl, model = words(settings.get("cuda_graph_scope")), settings.get("cuda_graph_impl"), task.spec.model
    padded = settings.get("moe_expert_capacity_factor") and settings.get("moe_pad_expert_input_to_capacity")
    if impl == "full_iteration":
        return "excludes cuda_graph_impl: full_iteration"
    if impl in (None, "none") or not in_versions(">=0.16", release(task.spec)):
        return ""
    is_te, is_fixed = impl == "transformer_engine", bool(padded) or "moe-paged-stash" in given_flags(task.spec)
    dense = model.moe_first_dense_layers or any(each.network != model.layers[0].network for each in model.layers[1:])
    problems = {
        "with full_iteration needs cuda_graph_impl: local": is_te and "full_iteration" in parts,
        "with moe excludes moe_router": {"moe", "moe_router"} <= parts,
        "with moe_preprocess needs moe_router": is_te and "moe_preprocess" in parts and "moe_router" not in parts,
        "with moe or moe_router needs a model with experts": not model.experts and bool(parts & {"moe", "moe_router"}),
        "with mlp needs a model with dense layers": bool(model.experts) and "mlp" in parts and not dense,
        "with moe needs moe_pad_expert_input_to_capacity": "moe" in parts and not is_fixed,
        "with mlp or moe excludes overlap_moe_expert_parallel_comm": bool(parts & {"mlp", "moe"})
        and bool(settings.get("overlap_moe_expert_parallel_comm")),
    }
    return next((problem for problem, is_wrong in problems.items() if is_wrong), "")


def given_flags(spec: Spec) -> set[str]:
    """Return the flags of a command, and of `train.flags`."""
    return {flag for flag, _values in parse_flags((*program_arguments(spec), *spec.train.flags))}


def _refused(key: str, settings: Settings, problem: str) -> SpecError:
    return SpecError(key=f"train.settings.{key}", value=settings.get(key), problem=problem)


def schedule(name: SettingValue) -> str | None:
    """Return the name of a pipeline schedule, or None for the engine's default. Raises NotModelled for another one."""
    canonical = re.sub(r"^zb-?(?=[hv12])", "zb-", str(name or "1f1b").lower().replace("_", "-"))
    if canonical in ("1f1b", "interleaved", "1f1b-i", "interleaved-1f1b"):
        return None
    if canonical not in SCHEDULES:
        names = ", ".join(SCHEDULES)
        raise NotModelled(f"train.settings.pipeline_schedule = {name} is not modelled; use one of {names}")
    return canonical


def recompute_modules(settings: Mapping[str, SettingValue]) -> frozenset[str]:
    """Return the modules that selective recompute recomputes."""
    return words(settings.get("recompute_modules") or "core_attn")


def words(text: SettingValue) -> frozenset[str]:
    """Return the words in a comma-separated list."""
    return frozenset(str(text).split(",")) if text else frozenset()


def numbers(text: SettingValue) -> tuple[int, ...]:
    """Return the numbers in a comma-separated list."""
    return tuple(int(part) for part in str(text).split(",")) if text is not None else ()


def _grad_bytes(precision: str, settings: Settings) -> int:
    """Return the bytes of a gradient element: by default 4 with bf16, else those of a weight (`arguments.py`)."""
    if precision == "fp32" or settings.get("accumulate_allreduce_grads_in_fp32"):
        return 4
    fp32 = precision != "fp16" and settings.get("accumulate_allreduce_grads_in_fp32", True)
    return 4 if fp32 and not settings.get("grad_reduce_in_bf16") else 2


NATURAL_SPREAD = 0.33
"""The standard deviation of the loads of experts on real text, relative to their mean: Gini coefficients of five public
models from 0.11 to over 0.24 (arXiv 2605.20982), 0.19 in the mean, times the square root of pi (of a normal one)."""
READS = frozenset({"data-path", "train-data-path", "data-args-path", "per-split-data-args-path"})


def is_natural(spec: Spec, settings: Settings) -> bool | None:
    """Return whether the experts of a job have the loads of real text: in fine-tuning, or if the command reads data.
    They have not if the job states their loads, or forces equal ones. None: it says nothing, and has equal ones."""
    flags = given_flags(spec)
    stated = settings.get("moe_expert_imbalance") or settings.get("moe_expert_capacity_factor")
    if stated or "moe-router-force-load-balancing" in flags:
        return False
    return bool(spec.train.adapter or spec.train.lengths or ("mock-data" not in flags and flags & READS)) or None


def _imbalance(settings: Settings) -> float:
    """Return the busiest expert rank's tokens relative to the mean: at most the capacity, with padding just that."""
    load, capacity = float(settings.get("moe_expert_imbalance") or 1.0), settings.get("moe_expert_capacity_factor")
    if not capacity:
        return load
    return float(capacity) if settings.get("moe_pad_expert_input_to_capacity") else min(load, max(1.0, float(capacity)))


def _dispatcher(settings: Settings) -> str:
    """Return the dispatcher of tokens, as in `Options.dispatcher`."""
    name, backend = str(settings["moe_token_dispatcher_type"]), settings.get("moe_flex_dispatcher_backend")
    return "hybridep" if (name, backend) == ("flex", "hybridep") else name


def graphs(settings: Settings) -> frozenset[str]:
    """Return the parts of a step that CUDA graphs launch, as in `Options.graphs`.

    Experts whose numbers of tokens change are in none (megatron-core 0.16.1 `transformer_config.py`: drop-padding MoE).
    """
    scope, kind = words(settings.get("cuda_graph_scope")), settings.get("cuda_graph_impl", "none")
    if kind == "none":
        return frozenset()
    if kind == "full_iteration" or scope & WHOLE_STEP:
        return WHOLE_STEP
    dynamic = frozenset({"moe"} if not settings.get("moe_pad_expert_input_to_capacity") else ())
    return (GRAPH_PARTS if not scope or "full" in scope else scope) - dynamic
