"""What the notes of a published run say of its settings: names with values, and phrases. The rest is ignored."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from flagcore.domain.spec import SettingValue
from flagcore.engines.megatron.settings import SETTINGS
from flagcore.engines.megatron.stages import LAYOUT
from flagcore.spec.knobs import setting_from_text

DISPATCHER, BACKEND = "moe_token_dispatcher_type", "moe_flex_dispatcher_backend"
EXPERT_OVERLAP = "overlap_moe_expert_parallel_comm"
GRAPH, SCOPE = "cuda_graph_impl", "cuda_graph_scope"
OFFLOAD, OFFLOADED = "fine_grained_activation_offloading", "offload_modules"

NAMES: Mapping[str, str] = {
    "schedule": "pipeline_schedule",
    "pp_schedule": "pipeline_schedule",
    "pp_layout": LAYOUT,
    "layout": LAYOUT,
    "moe_a2a_overlap": EXPERT_OVERLAP,
    "a2a_overlap": EXPERT_OVERLAP,
    "ep_overlap": EXPERT_OVERLAP,
    "dispatcher": DISPATCHER,
    "moe_dispatcher": DISPATCHER,
    "fsdp": "use_megatron_fsdp",
    "megatron_fsdp": "use_megatron_fsdp",
    "tp_overlap": "tp_comm_overlap",
    "ub_tp_comm_overlap": "tp_comm_overlap",
    "userbuffers": "tp_comm_overlap",
    "ce_fusion": "cross_entropy_loss_fusion",
    "cross_entropy_fusion": "cross_entropy_loss_fusion",
    "grouped_gemm": "moe_grouped_gemm",
    "shared_expert_overlap": "moe_shared_expert_overlap",
    "cp_comm": "cp_comm_type",
    "capacity_factor": "moe_expert_capacity_factor",
    "pad_to_capacity": "moe_pad_expert_input_to_capacity",
    "delayed_wgrad": "delay_wgrad_compute",
    "delay_wgrad": "delay_wgrad_compute",
    "precision_aware_optimizer": "use_precision_aware_optimizer",
    "grad_reduce_in_fp32": "accumulate_allreduce_grads_in_fp32",
    "fp32_grad_accum": "accumulate_allreduce_grads_in_fp32",
    "bf16_grad_reduce": "grad_reduce_in_bf16",
    "expert_imbalance": "moe_expert_imbalance",
}
"""Other words for settings; hyphens, spaces and underscores are the same."""

VALUES: Mapping[tuple[str, str], Mapping[str, SettingValue]] = {
    (DISPATCHER, "deepep"): {DISPATCHER: "flex", BACKEND: "deepep"},
    (DISPATCHER, "hybridep"): {DISPATCHER: "flex", BACKEND: "hybridep"},
    (DISPATCHER, "a2a"): {DISPATCHER: "alltoall"},
    (BACKEND, "deepep"): {DISPATCHER: "flex", BACKEND: "deepep"},
    (BACKEND, "hybridep"): {DISPATCHER: "flex", BACKEND: "hybridep"},
    (GRAPH, "full_iteration"): {GRAPH: "local", SCOPE: "full_iteration"},
}
"""Values that say more than their setting's own name, or that another tool spells otherwise."""

PHRASES: tuple[tuple[str, Mapping[str, SettingValue]], ...] = (
    (r"\binterleaved( 1f1b)?\b", {"pipeline_schedule": "interleaved"}),
    (r"\b(zb-?(h1|h2|1p|2p|v)|v-(half|min)|dualpipev?)\b", {"pipeline_schedule": "{1}"}),
    (r"\bhybridep\b", {DISPATCHER: "flex", BACKEND: "hybridep"}),
    (r"\bdeepep\b", {DISPATCHER: "flex", BACKEND: "deepep"}),
    (r"\ball-?to-?all\b(?! overlap)", {DISPATCHER: "alltoall"}),
    (r"\b(a2a|all-?to-?all|ep|moe comm\w*) overlap\b", {EXPERT_OVERLAP: True}),
    (r"\bcapacity factor ([\d.]+)", {"moe_expert_capacity_factor": "{1}"}),
    (r"\bfull[- _]iteration (cuda[- ])?graphs?\b", {GRAPH: "local", SCOPE: "full_iteration"}),
    (r"\bcuda[- ]graphs?\b(?: +([a-z_]+(?: *[+,] *[a-z_]+)*))?", {GRAPH: "transformer_engine", SCOPE: "{1}"}),
    (r"\bactivation offload(?:ing)?(?: of)? +([a-z_0-9]+(?: *[+,] *[a-z_0-9]+)*)", {OFFLOAD: True, OFFLOADED: "{1}"}),
    (
        r"\boptimizer (cpu )?offload",
        {"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True},
    ),
    (r"\b(lora|peft)\b", {"trainable": "adapters"}),
    (r"\bexp_avg (fp32|bf16|fp16|fp8)\b", {"exp_avg_dtype": "{1}", "exp_avg_sq_dtype": "{1}"}),
    (
        r"\bno overlap\b(?![- _]*(grad|param|p2p|tp|ep))",
        {"overlap_grad_reduce": False, "overlap_param_gather": False, "tp_comm_overlap": False},
    ),
)
"""Phrases without a name and a value: a pattern, and the settings that it means; {1} is what its group found. The two
moments of Adam have one format in every published run that names one."""

IMPLIED: Mapping[str, str] = {
    "optimizer_cpu_offload": "use_precision_aware_optimizer",
    "exp_avg_dtype": "use_precision_aware_optimizer",
    OFFLOADED: OFFLOAD,
    "delay_wgrad_compute": EXPERT_OVERLAP,
}
"""What the engine demands beside a setting, so that a note of the one tells of the other."""

NAMES_OF_SETTINGS = frozenset(knob.name for knob in SETTINGS)
_PAIR = re.compile(r"(?<![\w-])-{0,2}([a-z][\w-]*)\s*=\s*(\[[^\]]*\]|[^\s;,]+(?:,\w+(?![\w-]*\s*=))*)", re.IGNORECASE)
_LAYOUT = re.compile(r"(?<![\w-])(\w*layout)\s*=\s*([^\s;]+)", re.IGNORECASE)
_NO = r"(?:no|non|not|without|disabled?)[- _]+"
_OFF = r"[- _]*(?:off|disabled)\b"


@lru_cache(maxsize=4096)
def read_notes(notes: str) -> Mapping[str, SettingValue]:
    """Return the settings that `notes` tell of. What is said first counts, names with values before phrases."""
    found: dict[str, SettingValue] = {}
    rest = notes[:10_000]
    for pattern in (_LAYOUT, _PAIR):
        for pair in pattern.finditer(rest):
            _keep(found, _pair(pair[1], pair[2]))
        rest = pattern.sub(";", rest)
    rest = rest.lower()
    for flag in _FLAGS:
        if match := flag.search(rest):
            off = bool(match["no"] or match["off"])
            _keep(found, setting_from_text(_setting(match["name"]), "false" if off else "true", SETTINGS))
            rest = rest[: match.start()] + ";" + rest[match.end() :]
    for phrase, means in PHRASES:
        if (match := re.search(phrase, rest)) and not re.search(_NO + "$", rest[: match.start()]):
            _keep(found, _filled(means, match))
    _keep(found, {other: True for key, other in IMPLIED.items() if found.get(key, False) is not False})
    return found


def _keep(found: dict[str, SettingValue], new: Mapping[str, SettingValue]) -> None:
    found.update({key: value for key, value in new.items() if key not in found})


def _pair(name: str, text: str) -> Mapping[str, SettingValue]:
    key, value = _setting(name), re.sub(r"""[\[\]'"()]""", "", text).strip()
    if key == LAYOUT:
        return {LAYOUT: text}
    if (key, value.lower()) in VALUES:
        return VALUES[key, value.lower()]
    if key not in NAMES_OF_SETTINGS:
        return {}
    if key == "use_megatron_fsdp" and value.isdecimal():
        return {key: int(value) > 1}
    return setting_from_text(key, value, SETTINGS) or setting_from_text(key, value.lower(), SETTINGS)


def _filled(means: Mapping[str, SettingValue], match: re.Match[str]) -> dict[str, SettingValue]:
    """Return the settings of a phrase, with what its first group found; one that fits no setting is left out."""
    filled: dict[str, SettingValue] = {}
    for key, value in means.items():
        if value != "{1}":
            filled[key] = value
        elif match[1]:
            filled |= setting_from_text(key, re.sub(r" *[+,] *", ",", match[1]), SETTINGS)
    return filled


def _setting(name: str) -> str:
    plain = re.sub(r"[- ]+", "_", name.strip("-").lower())
    return NAMES.get(plain, plain)


def _flag(name: str) -> re.Pattern[str]:
    spelt = re.sub("_", "[- _]", name)
    return re.compile(rf"(?<![\w-])(?:--)?(?P<no>{_NO})?(?P<name>{spelt})(?![\w=])(?P<off>{_OFF})?")


_SWITCHES = [knob.name for knob in SETTINGS if knob.kind == "flag"]
_FLAGS = [
    _flag(name)
    for name in sorted((*_SWITCHES, *(n for n, key in NAMES.items() if key in _SWITCHES)), key=len, reverse=True)
]
