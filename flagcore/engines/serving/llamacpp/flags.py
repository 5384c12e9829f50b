"""The flags of llama-server that the embedded server takes, and where each goes.

Spellings and defaults: llama.cpp `tools/server/README.md` (00dc8057); fields: `xllamacpp.CommonParams` (2026.10).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag: its spellings, the dotted field that it sets, and how its text is read.

    `kind` is int, float, text, list (numbers with commas), switch, or the name of an enum of the wheel whose members
    `words` name. A switch sets True, and its `off` spellings set False.
    """

    names: tuple[str, ...]
    field: str
    kind: str = "int"
    words: Mapping[str, str] | None = None
    off: tuple[str, ...] = ()


KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
SPLIT_MODES = ("none", "layer", "row", "tensor")
_KV = {name: f"GGML_TYPE_{name.upper()}" for name in KV_TYPES}
_FLASH = {
    "on": "LLAMA_FLASH_ATTN_TYPE_ENABLED",
    "off": "LLAMA_FLASH_ATTN_TYPE_DISABLED",
    "auto": "LLAMA_FLASH_ATTN_TYPE_AUTO",
}
_LOAD = {
    "auto": "LLAMA_LOAD_MODE_AUTO",
    "none": "LLAMA_LOAD_MODE_NONE",
    "mmap": "LLAMA_LOAD_MODE_MMAP",
    "mlock": "LLAMA_LOAD_MODE_MLOCK",
    "mmap+mlock": "LLAMA_LOAD_MODE_MMAP_MLOCK",
    "dio": "LLAMA_LOAD_MODE_DIRECT_IO",
}
_SPECULATIVE = {
    name: f"COMMON_SPECULATIVE_TYPE_{name.upper().replace('-', '_')}"
    for name in (
        "none",
        "draft-simple",
        "draft-eagle3",
        "draft-mtp",
        "draft-dflash",
        "draft-dspark",
        "ngram-simple",
        "ngram-map-k",
        "ngram-map-k4v",
        "ngram-mod",
        "ngram-cache",
    )
}

FLAGS = (
    Flag(names=("-m", "--model"), field="model.path", kind="text"),
    Flag(names=("--host",), field="hostnames", kind="text"),
    Flag(names=("--port",), field="port"),
    Flag(names=("-a", "--alias"), field="model_alias", kind="text"),
    Flag(names=("-np", "--parallel"), field="n_parallel"),
    Flag(names=("-c", "--ctx-size"), field="n_ctx"),
    Flag(names=("--kv-unified-per-slot",), field="kv_unified_per_slot"),
    Flag(names=("-kvu", "--kv-unified"), field="kv_unified", kind="switch", off=("-no-kvu", "--no-kv-unified")),
    Flag(names=("-t", "--threads"), field="cpuparams.n_threads"),
    Flag(names=("-tb", "--threads-batch"), field="cpuparams_batch.n_threads"),
    Flag(names=("--poll",), field="cpuparams.poll"),
    Flag(names=("--poll-batch",), field="cpuparams_batch.poll"),
    Flag(names=("--threads-http",), field="n_threads_http"),
    Flag(names=("-b", "--batch-size"), field="n_batch"),
    Flag(names=("-ub", "--ubatch-size"), field="n_ubatch"),
    Flag(names=("-fa", "--flash-attn"), field="flash_attn_type", kind="llama_flash_attn_type", words=_FLASH),
    Flag(names=("-ctk", "--cache-type-k"), field="cache_type_k", kind="ggml_type", words=_KV),
    Flag(names=("-ctv", "--cache-type-v"), field="cache_type_v", kind="ggml_type", words=_KV),
    Flag(names=("-ngl", "--gpu-layers", "--n-gpu-layers"), field="n_gpu_layers"),
    Flag(
        names=("-sm", "--split-mode"),
        field="split_mode",
        kind="llama_split_mode",
        words={name: f"LLAMA_SPLIT_MODE_{name.upper()}" for name in SPLIT_MODES},
    ),
    Flag(names=("-ts", "--tensor-split"), field="tensor_split", kind="list"),
    Flag(names=("-mg", "--main-gpu"), field="main_gpu"),
    Flag(names=("-fit", "--fit"), field="fit_params", kind="on/off"),
    Flag(names=("-fitc", "--fit-ctx"), field="fit_params_min_ctx"),
    Flag(names=("-lm", "--load-mode"), field="load_mode", kind="llama_load_mode", words=_LOAD),
    Flag(names=("-nkvo", "--no-kv-offload"), field="no_kv_offload", kind="switch", off=("-kvo", "--kv-offload")),
    Flag(names=("--no-op-offload",), field="no_op_offload", kind="switch", off=("--op-offload",)),
    Flag(names=("-nr", "--no-repack"), field="no_extra_bufts", kind="switch", off=("--repack",)),
    Flag(names=("--moe-cache-mib",), field="moe_cache_size"),
    Flag(names=("-cb", "--cont-batching"), field="cont_batching", kind="switch", off=("-nocb", "--no-cont-batching")),
    Flag(names=("--cache-prompt",), field="cache_prompt", kind="switch", off=("--no-cache-prompt",)),
    Flag(names=("--cache-reuse",), field="n_cache_reuse"),
    Flag(names=("-cram", "--cache-ram"), field="cache_ram_mib"),
    Flag(names=("--cache-idle-slots",), field="cache_idle_slots", kind="switch", off=("--no-cache-idle-slots",)),
    Flag(names=("-ctxcp", "--ctx-checkpoints", "--swa-checkpoints"), field="n_ctx_checkpoints"),
    Flag(names=("--swa-full",), field="swa_full", kind="switch"),
    Flag(names=("--context-shift",), field="ctx_shift", kind="switch", off=("--no-context-shift",)),
    Flag(names=("--warmup",), field="warmup", kind="switch", off=("--no-warmup",)),
    Flag(names=("--metrics",), field="endpoint_metrics", kind="switch"),
    Flag(names=("--props",), field="endpoint_props", kind="switch"),
    Flag(names=("--slots",), field="endpoint_slots", kind="switch", off=("--no-slots",)),
    Flag(names=("-to", "--timeout"), field="timeout_read"),
    Flag(names=("-lv", "--verbosity", "--log-verbosity"), field="verbosity"),
    Flag(names=("--offline",), field="offline", kind="switch"),
    Flag(names=("--rope-freq-base",), field="rope_freq_base", kind="float"),
    Flag(names=("--rope-freq-scale",), field="rope_freq_scale", kind="float"),
    Flag(names=("--spec-type",), field="speculative.types", kind="common_speculative_type", words=_SPECULATIVE),
    Flag(names=("--spec-draft-model",), field="speculative.draft.mparams.path", kind="text"),
    Flag(names=("--spec-draft-n-max",), field="speculative.draft.n_max"),
    Flag(names=("--spec-draft-n-min",), field="speculative.draft.n_min"),
    Flag(names=("--spec-draft-p-min",), field="speculative.draft.p_min", kind="float"),
    Flag(names=("--spec-draft-ngl",), field="speculative.draft.n_gpu_layers"),
)
"""What the embedded server takes. Fields that hold several values are given one, but for `tensor_split`."""
