"""The settings of Megatron training, one row each: knobs that have one value for all candidates of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flagcore.domain.knob import Flag, Kind, Knob
from flagcore.domain.spec import SettingValue

LAYERS: dict[str, Any] = {"minimum": 0, "maximum": 10_000}
SHARE: dict[str, Any] = {"minimum": 0, "maximum": 1}
FORMATS = ("fp32", "bf16", "fp16", "fp8")


def _setting(name: str, kind: Kind, help: str, flag: str | None = None, off: str = "", **changes: Any) -> Knob:
    """Return a row whose flag is its name with hyphens, unless another is given; an empty one means no flag."""
    spelled = name.replace("_", "-") if flag is None else flag
    flags = (Flag(name=spelled, off=off),) if spelled or off else ()
    return Knob(name=name, kind=kind, help=help, scope=changes.pop("scope", ("setting",)), flags=flags, **changes)


def _switch(name: str, help: str, **changes: Any) -> Knob:
    return _setting(name, "flag", help, **changes)


def _word(name: str, help: str, words: tuple[str, ...], **changes: Any) -> Knob:
    return _setting(name, "word", help, words=words, **changes)


def _end(place: str) -> Knob:
    flag, scope = f"decoder-{place}-pipeline-num-layers", ("record", "setting")
    text = f"Layers of the {place} stage; null: an even split."
    return _setting(f"num_layers_in_{place}_pipeline_stage", "int", text, flag, scope=scope, **LAYERS)


SETTINGS = (
    _setting(
        "pipeline_schedule",
        "text",
        "Name of the pipeline schedule: 1f1b, interleaved, zb-h1, ...; null: the engine's default.",
        flag="",
        maximum=200,
    ),
    _setting(
        "pipeline_model_parallel_layout",
        "text",
        "Split of the layers over stages: null even, balanced derived for each candidate. A setting is a layout, with "
        "bars between the (virtual) stages: E embedding, t layer, m multi-token prediction, L loss.",
        label="split",
        scope=("space", "setting"),
        words=("balanced",),
        auto=lambda task: ("balanced",),
        auto_help="balanced: each candidate's fastest split that its memory allows, which may be the even one",
        versions=">=0.13",
        maximum=4096,
    ),
    _switch("account_for_embedding_in_pipeline_split", "Whether the embedding counts as a layer of an even split."),
    _switch("account_for_loss_in_pipeline_split", "Whether the loss counts as a layer of an even split."),
    _end("first"),
    _end("last"),
    _setting(
        "expert_tensor_parallel_size",
        "int",
        "Devices that split each expert's matrices; null: the tensor-parallel size.",
        maximum=1_000_000,
        scope=("record", "setting"),
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
    ),
    _word(
        "moe_recompute_level",
        "Part of the experts that selective recomputation recomputes: small steps, also some products, or all.",
        ("light", "medium", "full"),
        flag="",
    ),
    _setting(
        "recompute_num_layers_per_stage",
        "ints",
        "Number of layers that each pipeline stage recomputes in full.",
        flag="",
        **LAYERS,
    ),
    _switch("grad_reduce_in_bf16", "Whether gradients are stored and reduced in bf16 instead of fp32."),
    _switch(
        "accumulate_allreduce_grads_in_fp32",
        "Whether gradients are stored and reduced in fp32; the default for bf16.",
        off="grad-reduce-in-bf16",
    ),
    _switch("use_precision_aware_optimizer", "Whether the optimizer may store its state in other formats than fp32."),
    _word("main_grads_dtype", "Format of the gradients that the optimizer reads; null: fp32.", FORMATS),
    _word("main_params_dtype", "Format of the optimizer's copy of the weights; null: fp32.", FORMATS),
    _word("exp_avg_dtype", "Format of Adam's first moment; null: fp32.", FORMATS),
    _word("exp_avg_sq_dtype", "Format of Adam's second moment; null: fp32.", FORMATS),
    _switch("optimizer_cpu_offload", "Whether the optimizer runs on the host."),
    _setting(
        "optimizer_offload_fraction", "number", "Share of the optimizer that is on the host; null: all of it.", **SHARE
    ),
    _switch("fp8_param_gather", "Whether weights are stored and gathered in fp8."),
    _switch("fine_grained_activation_offloading", "Whether offload_modules are offloaded to the host."),
    _setting(
        "offload_modules",
        "words",
        "Modules whose inputs are offloaded to the host until the backward pass.",
        words=("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"),
    ),
    _setting(
        "offload_stages", "ints", "Pipeline stages, from 0, that offload activations; null: all.", flag="", **LAYERS
    ),
    _switch(
        "use_megatron_fsdp", "Whether weights, gradients and optimizer are sharded over the data-parallel devices."
    ),
    _switch("overlap_grad_reduce", "Whether the gradient reduction overlaps with the backward pass."),
    _switch("overlap_param_gather", "Whether the weight gathering overlaps with the forward pass."),
    _switch("tp_comm_overlap", "Whether tensor-parallel collectives overlap with matrix products."),
    _switch(
        "overlap_p2p_comm",
        "Whether messages of an interleaved pipeline overlap with compute; null: true.",
        off="no-overlap-p2p-communication",
    ),
    _switch(
        "no_overlap_p2p_communication",
        "The opposite of overlap_p2p_comm, as on Megatron's command line.",
        opposite="overlap_p2p_comm",
    ),
    _switch(
        "overlap_moe_expert_parallel_comm", "Whether expert-parallel communication overlaps with another micro-batch."
    ),
    _switch("delay_wgrad_compute", "Whether weight gradients are computed during expert communication."),
    _switch("moe_shared_expert_overlap", "Whether shared experts run during expert-parallel communication."),
    _word("moe_token_dispatcher_type", "Token dispatcher of the experts.", ("allgather", "alltoall", "flex")),
    _word("moe_flex_dispatcher_backend", "Library of the flex dispatcher; null: deepep.", ("deepep", "hybridep")),
    _switch("moe_grouped_gemm", "Whether the experts of a device are one grouped matrix product."),
    _setting(
        "moe_expert_capacity_factor",
        "number",
        "Maximum number of tokens per expert, relative to the mean; null: no tokens are dropped.",
        above=0,
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
    _word("cp_comm_type", "Communication of context parallelism.", ("p2p", "all_gather", "a2a", "a2a+p2p")),
    _word("cuda_graph_impl", "Implementation of CUDA graphs; null: none.", ("none", "local", "transformer_engine")),
    _setting(
        "cuda_graph_scope",
        "words",
        "Parts that are captured as CUDA graphs; null: whole layers.",
        words=("full", "full_iteration", "attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba"),
        spellings={"moe_layer": "moe"},
    ),
    _word("trainable", "Trained parameters: all weights, or low-rank adapters only.", ("all", "adapters"), flag=""),
    _setting("attention_dropout", "number", "Dropout rate of the attention probabilities; null: 0.", **SHARE),
    _setting("hidden_dropout", "number", "Dropout rate of the outputs of each block; null: 0.", **SHARE),
    _switch("cross_entropy_loss_fusion", "Whether the loss is one fused kernel."),
)

EXPERT_LEVELS: Mapping[str, frozenset[str]] = {
    "light": frozenset({"moe_act", "router"}),
    "medium": frozenset({"moe_act", "router", "moe_fc1", "shared_experts"}),
    "full": frozenset({"moe"}),
}
"""What recompute of experts by level drops: the small steps between the products; these, the experts' first product and
the shared experts; the whole MoE layer. `router` and `moe_fc1` are no modules of Megatron-core."""


def recompute_modules(settings: Mapping[str, SettingValue]) -> frozenset[str]:
    """Return the modules that selective recompute drops: the named ones, and those of the level for experts."""
    level = str(settings.get("moe_recompute_level") or "")
    given = settings.get("recompute_modules") or ("" if level else "core_attn")
    return words(given) | EXPERT_LEVELS.get(level, frozenset())


def words(text: SettingValue) -> frozenset[str]:
    """Return the words of a list."""
    return frozenset(str(text).split(",")) if text else frozenset()
