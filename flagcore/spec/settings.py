"""Settings of the engine that all candidates of a task share: the keys of `train.settings`, and of job records."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, create_model

from flagcore.domain.spec import SettingValue
from flagcore.errors import SpecError
from flagcore.spec.limits import AtLeastOne, Devices, Factor, Fraction, NoLayers, Text, Word
from flagcore.spec.validate import Section

_SPELT = {
    "shared_expert": "shared_experts",
    "moe_layer": "moe",
    "layer_norm": "layernorm",
    "layernorms": "layernorm",
}


def _names(value: object) -> object:
    """Split a text at commas and spaces, and spell modules as the engine does."""
    names = value.replace(",", " ").split() if isinstance(value, str) else value
    if not isinstance(names, list):
        return names
    return [_SPELT.get(name, name) if isinstance(name, str) else name for name in names]


def _some(kind: Any) -> Any:
    return Annotated[list[kind], Field(min_length=1), BeforeValidator(_names)]


_Format = Literal["fp32", "bf16", "fp16", "fp8"]
_Recomputed = Literal["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"]
_Offloaded = Literal["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"]
_Recorded = Literal["full", "full_iteration", "attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba"]
_Stages = Annotated[list[NoLayers], Field(min_length=1)]

SETTINGS: dict[str, tuple[Any, str]] = {
    "pipeline_schedule": (Word, "Name of the pipeline schedule: 1f1b, interleaved, zb-h1, ...; null: the engine's."),
    "pipeline_model_parallel_layout": (
        Text,
        "What each (virtual) stage holds: E embedding, t layer, m multi-token prediction, L loss, and a bar between.",
    ),
    "account_for_embedding_in_pipeline_split": (bool, "Whether the embedding counts as a layer of an even split."),
    "account_for_loss_in_pipeline_split": (bool, "Whether the loss counts as a layer of an even split."),
    "num_layers_in_first_pipeline_stage": (NoLayers, "Layers of the first stage; null: an even split."),
    "num_layers_in_last_pipeline_stage": (NoLayers, "Layers of the last stage; null: an even split."),
    "expert_tensor_parallel_size": (Devices, "Devices that split each expert's matrices; null: as tensor."),
    "recompute_modules": (_some(_Recomputed), "What selective recompute computes again; null: core_attn."),
    "moe_recompute_level": (
        Literal["light", "medium", "full"],
        "What selective recompute computes again of experts: the small steps, more of their products, or all.",
    ),
    "recompute_num_layers_per_stage": (_Stages, "Layers that each pipeline stage recomputes in full, from the first."),
    "grad_reduce_in_bf16": (bool, "Whether gradients are kept and exchanged in bf16 where they would be in fp32."),
    "accumulate_allreduce_grads_in_fp32": (bool, "Whether gradients are kept and exchanged in fp32; bf16 does so."),
    "use_precision_aware_optimizer": (bool, "Whether the optimizer may keep its state in other formats than fp32."),
    "main_grads_dtype": (_Format, "Format of the gradients that the optimizer reads; null: fp32."),
    "main_params_dtype": (_Format, "Format of the optimizer's copy of the weights; null: fp32."),
    "exp_avg_dtype": (_Format, "Format of Adam's first moment; null: fp32."),
    "exp_avg_sq_dtype": (_Format, "Format of Adam's second moment; null: fp32."),
    "optimizer_cpu_offload": (bool, "Whether the optimizer works on the host."),
    "optimizer_offload_fraction": (Fraction, "Share of the optimizer that is on the host; null: all of it."),
    "fp8_param_gather": (bool, "Whether weights are kept and gathered in fp8."),
    "fine_grained_activation_offloading": (bool, "Whether activations of offload_modules wait on the host."),
    "offload_modules": (_some(_Offloaded), "Modules whose inputs wait on the host for the backward pass."),
    "offload_stages": (_Stages, "Pipeline stages, from 0, that offload activations; null: all."),
    "use_megatron_fsdp": (bool, "Whether weights, gradients and optimizer are sharded over the data-parallel devices."),
    "overlap_grad_reduce": (bool, "Whether gradients are exchanged behind the backward pass."),
    "overlap_param_gather": (bool, "Whether weights are gathered behind the forward pass."),
    "tp_comm_overlap": (bool, "Whether tensor-parallel collectives run behind matrix products."),
    "overlap_p2p_comm": (bool, "Whether an interleaved pipeline sends while it computes; null: it does."),
    "no_overlap_p2p_communication": (bool, "The opposite of overlap_p2p_comm, as the command line has it."),
    "overlap_moe_expert_parallel_comm": (bool, "Whether tokens travel to experts behind another micro-batch's work."),
    "delay_wgrad_compute": (bool, "Whether gradients of weights are computed behind the travel of tokens."),
    "moe_shared_expert_overlap": (bool, "Whether shared experts run behind the travel of tokens."),
    "moe_token_dispatcher_type": (Literal["allgather", "alltoall", "flex"], "How tokens travel to experts."),
    "moe_flex_dispatcher_backend": (Literal["deepep", "hybridep"], "Library of the flex dispatcher; null: deepep."),
    "moe_grouped_gemm": (bool, "Whether the experts of a device are one grouped matrix product."),
    "moe_expert_capacity_factor": (Factor, "Most tokens of one expert, over the mean; null: none are dropped."),
    "moe_pad_expert_input_to_capacity": (bool, "Whether each expert's tokens are filled up to its capacity."),
    "moe_expert_imbalance": (AtLeastOne, "Load of the busiest expert-parallel device over the mean; null: 1."),
    "cp_comm_type": (Literal["p2p", "all_gather", "a2a", "a2a+p2p"], "How context-parallel devices exchange."),
    "cuda_graph_impl": (Literal["none", "local", "transformer_engine"], "Who records kernels as graphs; null: none."),
    "cuda_graph_scope": (_some(_Recorded), "Parts that are recorded as graphs; null: whole layers."),
    "trainable": (Literal["all", "adapters"], "What is trained: all weights, or low-rank adapters beside them."),
    "attention_dropout": (Fraction, "Share of attention's probabilities that is dropped; null: 0."),
    "hidden_dropout": (Fraction, "Share of each block's outputs that is dropped; null: 0."),
    "cross_entropy_loss_fusion": (bool, "Whether the loss is one fused kernel."),
}
"""Every setting with its type and meaning. The names are Megatron-core's, but for those that it does not have:
`pipeline_schedule`, `moe_recompute_level`, `recompute_num_layers_per_stage`, `offload_stages`, `moe_expert_imbalance`
and `trainable`.
"""

LISTS = (
    "recompute_modules",
    "recompute_num_layers_per_stage",
    "offload_modules",
    "offload_stages",
    "cuda_graph_scope",
)
_UNORDERED = ("recompute_modules", "offload_modules", "cuda_graph_scope")
_OPPOSITE = {"no_overlap_p2p_communication": "overlap_p2p_comm"}

FIELDS: dict[str, Any] = {key: (kind | None, Field(None, description=text)) for key, (kind, text) in SETTINGS.items()}
"""The settings as optional fields of a pydantic model."""

Settings = create_model(
    "Settings",
    __base__=Section,
    __doc__="How the engine runs every candidate, besides the knobs. Absent or null: the engine's default.",
    **FIELDS,
)


def settings_of(section: Section, *, but: Collection[str] = ()) -> dict[str, SettingValue]:
    """Return the settings of a section that are not null, sorted by name. Lists become one text with commas.

    Raises SpecError where one is given beside its opposite and they contradict each other.
    """
    settings: dict[str, SettingValue] = {}
    given = section.model_dump(include=SETTINGS.keys() - set(but))
    for key, value in sorted(given.items()):
        if value is None:
            continue
        if isinstance(value, list):
            items = sorted(set(value)) if key in _UNORDERED else value
            settings[key] = ",".join(map(str, items))
        elif key in _OPPOSITE:
            if given.get(_OPPOSITE[key]) is value:
                problem = f"is the opposite of {_OPPOSITE[key]}, which is {str(value).lower()} too"
                raise SpecError(key=f"train.settings.{key}", value=value, problem=problem, fix="give one of the two")
            settings[_OPPOSITE[key]] = not value
        else:
            settings[key] = value
    return settings


def setting_from_text(key: str, text: str) -> dict[str, SettingValue]:
    """Return the setting that `text` gives `key`, as a flag or a note would; nothing if it is no value of it."""
    words: dict[str, object] = {"true": True, "false": False, "on": True, "off": False}
    for value in (words.get(text.lower()), _number(text), text):
        if value is not None:
            with suppress(ValidationError):
                return settings_of(Settings.model_validate({key: value}))
    return {}


def _number(text: str) -> int | float | None:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return None
