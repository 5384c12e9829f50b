"""What llama.cpp's server reports while it runs, and what its log lines mean."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

from flagcore.domain.candidate import KnobValue
from flagcore.domain.launch import FailurePattern
from flagcore.domain.trial import TrialState
from flagcore.engines.serving.llamacpp.knobs import (
    BATCH_THREADS,
    CONTEXT,
    FLASH,
    KV,
    LAYERS,
    N_BATCH,
    N_UBATCH,
    PARALLEL,
    THREADS,
    UNIFIED,
)

COUNTERS: Mapping[str, str] = {
    "llamacpp:requests_deferred": "requests_waiting",
    "llamacpp:requests_processing": "requests_running",
    "llamacpp:n_busy_slots_per_decode": "sequences_per_iteration",
    "llamacpp:n_decode_total": "iterations",
    "llamacpp:prompt_tokens_total": "prompt_tokens",
    "llamacpp:prompt_tokens_cached_total": "prompt_tokens_cached",
    "llamacpp:tokens_predicted_total": "output_tokens",
}

_CONTEXT_LINE = re.compile(r"llama_context: (n_batch|n_ubatch|flash_attn|kv_unified)\s*= (\S+)")
_THREADS_LINE = re.compile(r"system_info: n_threads = (\d+)(?: \(n_threads_batch = (\d+)\))?")
_CACHE_LINE = re.compile(r"llama_kv_cache: size = .* K \((\w+)\):.* V \((\w+)\):")
_OFFLOADED_LINE = re.compile(r"offloaded (\d+)/(\d+) layers to GPU")
_SLOTS_LINE = re.compile(r"kv_unified = '(true|false)'")


def effective(fetch: Callable[[str], str], log: str) -> dict[str, KnobValue]:
    """Return what /props and the log say, without the later lines of a draft model."""
    props = json.loads(fetch("/props"))
    found: dict[str, KnobValue] = {PARALLEL: int(props["total_slots"])}
    lines = dict(reversed(_CONTEXT_LINE.findall(log)))
    if "n_batch" in lines:
        found |= {N_BATCH: int(lines["n_batch"]), N_UBATCH: int(lines["n_ubatch"])}
    if "flash_attn" in lines:
        found[FLASH] = {"enabled": "on", "disabled": "off"}.get(lines["flash_attn"], lines["flash_attn"])
    if cache := _CACHE_LINE.search(log):
        found[KV] = cache[1] if cache[1] == cache[2] else f"{cache[1]}/{cache[2]}"
    if threads := _THREADS_LINE.search(log):
        found |= {THREADS: int(threads[1]), BATCH_THREADS: int(threads[2] or threads[1])}
    unified = _SLOTS_LINE.search(log)
    if unified:
        found[UNIFIED] = "on" if unified[1] == "true" else "off"
    if unified is None or unified[1] == "false":
        found[CONTEXT] = int(props["default_generation_settings"]["n_ctx"])
    offloaded = _OFFLOADED_LINE.search(log)
    if offloaded and offloaded[1] != offloaded[2]:  # any larger number means all
        found[LAYERS] = int(offloaded[1])
    return found


_BUFFER_LINE = re.compile(r"\b(\w+)\s+(model|KV|compute) buffer size\s*=\s*([\d.]+) MiB")
_KINDS = {"model": "weights_gib", "KV": "kv_cache_gib", "compute": "compute_gib"}
_CELLS_LINE = re.compile(r"llama_kv_cache: size = .*\(\s*(\d+) cells,.*?(\d+)/\d+ seqs\)")


def memory(log: str) -> dict[str, float]:
    """Return the sizes of the buffers of each kind; a unified cache has its cells once for all slots."""
    buffers: dict[tuple[str, str], float] = {}
    for device, kind, size in dict.fromkeys(_BUFFER_LINE.findall(log)):
        buffers[kind, device] = buffers.get((kind, device), 0.0) + float(size) / 1024
    found = {
        _KINDS[kind]: max(size for (other, _), size in buffers.items() if other == kind) for kind, _ in sorted(buffers)
    }
    cells = [int(count) * int(streams) for count, streams in _CELLS_LINE.findall(log)]
    return found | ({"kv_cache_tokens": float(max(cells))} if cells else {})


FAILURES = (
    FailurePattern(
        pattern=r"(cudaMalloc failed|hipMalloc failed): out of memory|insufficient memory \(attempted to allocate|"
        r"failed to allocate (\w+ )?buffer|unable to allocate \w+ buffer|failed to allocate buffer for kv cache|"
        r"ErrorOutOfDeviceMemory",
        state=TrialState.OUT_OF_MEMORY,
        advice="fewer slots, a shorter context_len or a smaller kv_cache_type takes less",
    ),
    FailurePattern(
        pattern=r"quantized V cache requires flash_attn|V cache quantization requires flash_attn",
        state=TrialState.INVALID,
    ),
    FailurePattern(pattern=r"n_seq_max must be <=", state=TrialState.INVALID),
    FailurePattern(pattern=r"GGML_ASSERT\(", state=TrialState.INVALID, advice="llama.cpp does not take these values"),
    FailurePattern(
        pattern=r"error: (invalid argument|unrecognized arguments|argument )|expected value for argument",
        state=TrialState.INVALID,
    ),
    FailurePattern(
        pattern=r"unknown model architecture|failed to open GGUF file|invalid magic|missing tensor|"
        r"wrong number of tensors|tensor '.*' data is not within the file bounds",
        state=TrialState.INVALID,
        advice="llama.cpp cannot read these weights",
    ),
    FailurePattern(pattern=r"couldn't bind HTTP server socket", state=TrialState.FAILED, advice="the port was taken"),
    FailurePattern(
        pattern=r"\bE (llama|ggml|gguf|srv|cmn)\w*\b.*|^error: ",
        state=TrialState.FAILED,
    ),
)
"""The first match counts: the last lines of a log only say that the model did not load."""
