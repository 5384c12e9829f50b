"""The settings of Megatron training: knobs that have one value for all candidates of a run."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flagcore.domain.knob import Flag, Kind, Knob, Requirement
from flagcore.domain.space import KnobValue
from flagcore.domain.spec import SettingValue, Task

LAYER_LIMITS: dict[str, Any] = {"minimum": 0, "maximum": 10_000}
SHARE_LIMITS: dict[str, Any] = {"minimum": 0, "maximum": 1}
NOT_FLAGSCALE = "!=0.15.0+flagscale"
"""Version specifier of flags that are missing in FlagScale's fork of 0.15."""
NUMBER_FORMATS = ("fp32", "bf16", "fp16", "fp8")


def _setting(
    name: str, kind: Kind, help: str, flag: str | None = None, since: str = "", compare: bool = False, **changes: Any
) -> Knob:
    """Return a setting. By default, its flag is its name with hyphens; an empty `flag` means that it has none.

    `since` is the first release with the flag, `others` are alternative flags. With `compare`, a space may list values.
    """
    spelled = name.replace("_", "-") if flag is None else flag
    default_flags = (Flag(name=spelled, versions=f">={since}" if since else ""),) if spelled else ()
    flags, scope = (*default_flags, *changes.pop("others", ())), changes.pop("scope", ("setting",))
    scope = (*scope, "space") if compare else scope
    return Knob(name=name, kind=kind, help=help, scope=scope, flags=flags, **changes)


def _switch(name: str, help: str, compare: bool = False, **changes: Any) -> Knob:
    """Return a setting that is a switch. With `compare`, a space may list its values, and it is off by default."""
    if compare:
        changes = {"neutral": False, "auto": lambda task: (False, True), **changes}
    return _setting(name, "flag", help, compare=compare, **changes)


def _expert(name: str, help: str, **changes: Any) -> Knob:
    return _switch(name, help, compare=True, experts_only=True, **changes)


def _choice(name: str, help: str, words: tuple[str, ...], compare: bool = False, **changes: Any) -> Knob:
    if compare:
        changes = {"auto": _default_or(*words), **changes}
    return _setting(name, "word", help, words=words, compare=compare, **changes)


def _default_or(*values: KnobValue) -> Callable[[Task], Sequence[KnobValue]]:
    """Return the function for the `auto` values of a setting: the engine's default, and `values`."""
    return lambda task: (None, *values)


def _format(name: str, content: str, narrow_format: str) -> Knob:
    text = f"Format of {content}; null: fp32. It changes numerics."
    return _choice(name, text, NUMBER_FORMATS, since="0.11", auto=_default_or(narrow_format), compare=True)


def _end_stage_layers(end: str) -> Knob:
    flag, scope = f"decoder-{end}-pipeline-num-layers", ("record", "setting")
    text = f"Layers of the {end} stage; null: an even split."
    return _setting(f"num_layers_in_{end}_pipeline_stage", "int", text, flag, scope=scope, **LAYER_LIMITS)


SETTINGS = (
    _setting(
        "pipeline_schedule",
        "text",
        "Name of the pipeline schedule: 1f1b, interleaved, zb-h1, ...; null: the engine's default.",
        flag="",
        maximum=200,
        compare=True,
    ),
    _setting(
        "pipeline_model_parallel_layout",
        "text",
        "Layout of the (virtual) stages: E embedding, t layer, m multi-token prediction, L loss, separated by bars.",
        maximum=4096,
        versions=">=0.13",
        since="0.13",
        compare=True,
    ),
    _switch(
        "account_for_embedding_in_pipeline_split",
        "Whether the embedding counts as a layer of an even split.",
        since="0.11",
    ),
    _switch("account_for_loss_in_pipeline_split", "Whether the loss counts as a layer of an even split.", since="0.11"),
    _end_stage_layers("first"),
    _end_stage_layers("last"),
    _setting(
        "expert_tensor_parallel_size",
        "int",
        "Devices that split each expert's matrices; null: the tensor-parallel size.",
        maximum=1_000_000,
        scope=("record", "setting"),
        auto=_default_or(1),
        auto_help="the tensor-parallel size, and 1",
        experts_only=True,
        compare=True,
    ),
    _setting(
        "recompute_modules",
        "words",
        "Modules that selective recomputation recomputes; null: core_attn.",
        words=("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"),
        spellings={
            "shared_expert": "shared_experts",
            "moe_layer": "moe",
            "layer_norm": "layernorm",
            "layernorms": "layernorm",
        },
        since="0.12",
        requires=(Requirement(knob="recompute_granularity", one_of=("selective",)),),
        compare=True,
    ),
    _switch(
        "grad_reduce_in_bf16",
        "Whether gradients are stored and reduced in bf16 instead of fp32. It changes numerics.",
        since="0.12",
        compare=True,
    ),
    _switch(
        "accumulate_allreduce_grads_in_fp32",
        "Whether gradients are stored and reduced in fp32; the default for bf16.",
        others=(Flag(off="grad-reduce-in-bf16", versions=">=0.12"),),
    ),
    _switch(
        "use_precision_aware_optimizer",
        "Whether the optimizer may store its state in other formats than fp32.",
        since="0.11",
        compare=True,
    ),
    _format("main_grads_dtype", "the gradients that the optimizer reads", "bf16"),
    _format("main_params_dtype", "the optimizer's copy of the weights", "fp16"),
    _format("exp_avg_dtype", "Adam's first moment", "bf16"),
    _format("exp_avg_sq_dtype", "Adam's second moment", "bf16"),
    _switch("optimizer_cpu_offload", "Whether the optimizer runs on the host.", since="0.12", compare=True),
    _setting(
        "optimizer_offload_fraction",
        "number",
        "Share of the optimizer that is on the host; null: all of it.",
        **SHARE_LIMITS,
        since="0.12",
    ),
    _choice(
        "fp8_format",
        "Format of FP8 matrix products; null: the precision of the job. It changes numerics.",
        ("e4m3", "hybrid"),
        auto=_default_or("hybrid"),
        compare=True,
    ),
    _choice(
        "fp8_recipe",
        "Scaling of FP8 matrix products; null: delayed. It changes numerics.",
        ("delayed", "tensorwise", "blockwise", "mxfp8"),
        since="0.12",
        auto=_default_or("tensorwise", "blockwise", "mxfp8"),
        compare=True,
    ),
    _switch("fp8_param_gather", "Whether weights are stored and gathered in fp8. It changes numerics.", compare=True),
    _switch("fine_grained_activation_offloading", "Whether offload_modules are offloaded to the host.", since="0.16"),
    _setting(
        "offload_modules",
        "words",
        "Modules whose inputs are offloaded to the host until the backward pass.",
        words=("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"),
        since="0.16",
    ),
    _setting("offload_stages", "ints", "Stages, from 0, that offload activations; null: all.", flag="", **LAYER_LIMITS),
    _switch(
        "use_megatron_fsdp",
        "Whether weights, gradients and optimizer are sharded over the data-parallel devices.",
        since="0.14",
        others=(Flag(name="use-custom-fsdp", versions=">=0.12,<0.14"),),
        compare=True,
    ),
    _switch("overlap_grad_reduce", "Whether the gradient reduction overlaps with the backward pass.", compare=True),
    _switch("overlap_param_gather", "Whether the weight gathering overlaps with the forward pass.", compare=True),
    _switch("tp_comm_overlap", "Whether tensor-parallel collectives overlap with matrix products.", compare=True),
    _switch(
        "overlap_p2p_comm",
        "Whether messages of an interleaved pipeline overlap with compute; null: true.",
        flag="",
        others=(Flag(off="no-overlap-p2p-communication"),),
        neutral=True,
        compare=True,
    ),
    _switch(
        "no_overlap_p2p_communication",
        "The opposite of overlap_p2p_comm, as on Megatron's command line.",
        negated_knob="overlap_p2p_comm",
    ),
    _expert(
        "overlap_moe_expert_parallel_comm",
        "Whether expert-parallel communication overlaps with another micro-batch.",
        since="0.14",
    ),
    _expert("delay_wgrad_compute", "Whether weight gradients are computed during expert communication.", since="0.13"),
    _expert("moe_shared_expert_overlap", "Whether shared experts run during expert-parallel communication."),
    _choice(
        "moe_token_dispatcher_type",
        "Token dispatcher of the experts.",
        ("allgather", "alltoall", "flex"),
        auto=_default_or("alltoall", "flex"),
        compare=True,
        experts_only=True,
    ),
    _choice(
        "moe_flex_dispatcher_backend",
        "Library of the flex dispatcher; null: deepep.",
        ("deepep", "hybridep"),
        since="0.16",
        others=(Flag(name="moe-enable-deepep", word="deepep", versions=">=0.12"),),
        auto=_default_or("hybridep"),
        compare=True,
        experts_only=True,
    ),
    _expert("moe_grouped_gemm", "Whether the experts of a device are one grouped matrix product."),
    _setting(
        "moe_expert_capacity_factor",
        "number",
        "Maximum number of tokens per expert, relative to the mean; null: no limit.",
        exclusive_minimum=0,
        maximum=1_000,
    ),
    _switch("moe_pad_expert_input_to_capacity", "Whether each expert's tokens are padded to its capacity."),
    _setting(
        "moe_expert_imbalance",
        "number",
        "Load of the busiest expert-parallel device over the mean; null: 1.",
        flag="",
        maximum=1_000,
    ),
    _choice("cp_comm_type", "Communication of context parallelism.", ("p2p", "all_gather", "a2a", "a2a+p2p")),
    _choice(
        "cuda_graph_impl",
        "Implementation of CUDA graphs; null: none.",
        ("none", "local", "transformer_engine", "full_iteration"),
        flag="",
        others=(
            Flag(name="cuda-graph-impl", versions=f">=0.15,{NOT_FLAGSCALE}"),
            Flag(name="enable-cuda-graph", word="local", versions=">=0.11"),
            Flag(name="external-cuda-graph", word="transformer_engine", versions=">=0.12"),
        ),
        auto=_default_or("local", "transformer_engine"),
        compare=True,
    ),
    _setting(
        "cuda_graph_scope",
        "words",
        "Parts that are captured as CUDA graphs; null: whole layers.",
        words=("full", "full_iteration", "attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba"),
        spellings={"moe_layer": "moe"},
        flag="",
        others=(Flag(name="cuda-graph-modules", versions=">=0.18"), Flag(name="cuda-graph-scope", versions=">=0.12")),
        compare=True,
    ),
    _choice("trainable", "Trained parameters: all weights, or low-rank adapters only.", ("all", "adapters"), flag=""),
    _setting("attention_dropout", "number", "Dropout rate of the attention probabilities; null: 0.", **SHARE_LIMITS),
    _setting("hidden_dropout", "number", "Dropout rate of the outputs of each block; null: 0.", **SHARE_LIMITS),
    _switch(
        "gradient_accumulation_fusion",
        "Whether matrix products add up weight gradients; null: true. Predictions do not depend on it.",
        flag="",
        others=(Flag(off="no-gradient-accumulation-fusion"),),
        neutral=True,
        compare=True,
    ),
    _switch("cross_entropy_loss_fusion", "Whether the loss is one fused kernel.", compare=True),
)


def recompute_modules(settings: Mapping[str, SettingValue]) -> frozenset[str]:
    """Return the modules that selective recompute recomputes."""
    return words(settings.get("recompute_modules") or "core_attn")


def words(text: SettingValue) -> frozenset[str]:
    """Return the words in a comma-separated list."""
    return frozenset(str(text).split(",")) if text else frozenset()
