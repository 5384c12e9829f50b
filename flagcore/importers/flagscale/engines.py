"""FlagScale's words for the engines that serve: what it calls their knobs and flags, and what it tries by itself.

Sources: `flagscale/serve/args_mapping/mapping.yaml` and `flagscale/runner/auto_tuner` of FlagScale's 16a2dd5b5c41.
"""

from __future__ import annotations

from typing import Any

ENGINES = {"vllm": "vllm", "sglang": "sglang", "llama_cpp": "llamacpp", "llamacpp": "llamacpp"}
BY_ITSELF = ("vllm", "llama_cpp")
"""The engines that FlagScale tries if none is named."""


def spelt(engine: str) -> str:
    """Return FlagScale's name of an engine that has flagcore's."""
    return next(name for name, ours in ENGINES.items() if ours == engine)


_SPLITS = {"tensor_model_parallel_size": "auto", "pipeline_model_parallel_size": "auto", "instances": "auto"}
OWN_SPACE: dict[str, dict[str, Any]] = {
    "vllm": {
        **_SPLITS,
        "block_size": [16, 32],
        "max_num_batched_tokens": [512, 1024, 2048],
        "max_num_seqs": [64, 128, 256],
    },
    "sglang": {
        **_SPLITS,
        "chunked_prefill_size": [128, 256],
        "max_prefill_tokens": [1024, 2048],
        "page_size": [32, 64, 128],
        "max_running_requests": [16, 32],
    },
    "llamacpp": {"threads": [1, 2, 4, 8], "n_gpu_layers": [0, 16, 32, 64], "split_mode": ["none", "layer", "row"]},
}
"""FlagScale's own space, but for what no engine takes (block_size 8, swap_space)."""

_ALL = (
    "instances",
    "tensor_model_parallel_size",
    "instance_sizes",
    "pipeline_model_parallel_size",
    "context_len",
    "kv_cache_type",
    "enable_prefix_caching",
)
_BOTH = (*_ALL, "data_parallel_size", "expert_model_parallel_size", "enforce_eager")
KNOBS: dict[str, tuple[str, ...]] = {
    "vllm": (
        *_BOTH,
        "block_size",
        "max_num_seqs",
        "max_num_batched_tokens",
        "gpu_memory_utilization",
        "cudagraph_mode",
        "enable_chunked_prefill",
        "threads",
    ),
    "sglang": (
        *_BOTH,
        "page_size",
        "chunked_prefill_size",
        "max_prefill_tokens",
        "max_running_requests",
        "mem_fraction_static",
        "schedule_policy",
        "enable_mixed_chunk",
    ),
    "llamacpp": (
        *_ALL,
        "split_mode",
        "n_gpu_layers",
        "parallel",
        "threads",
        "threads_batch",
        "batch_size",
        "ubatch_size",
        "flash_attention",
        "kv_unified",
    ),
}
"""The knobs that `flagcore.engines.serving.common` has; a test compares."""

SPELT = {"instance": "instances", "instace": "instances"}
"""Knobs that FlagScale's spaces call otherwise; the second one is a slip of its space of SGLang."""
COMMON: dict[str, dict[str, str]] = {
    "vllm": {},
    "sglang": {"max_model_len": "context_length", "max_num_seqs": "max_running_requests", "seed": "random_seed"},
    "llamacpp": {
        "max_num_seqs": "parallel",
        "max_model_len": "ctx_size",
        "rope_theta": "rope_freq_base",
        "kv_cache_dtype": "kv_cache_type",
    },
}
"""What FlagScale makes of the arguments that are common to all engines; vLLM's own names are those."""
AS_KNOBS = {
    "tensor_parallel_size": "tensor_model_parallel_size",
    "tp_size": "tensor_model_parallel_size",
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "pipeline_parallel_size": "pipeline_model_parallel_size",
    "pp_size": "pipeline_model_parallel_size",
    "max_model_len": "context_len",
    "context_length": "context_len",
    "kv_cache_dtype": "kv_cache_type",
}
"""Flags of the engines that are knobs of another name."""
OURS = {
    "host": "servers listen on this machine only",
    "port": "each trial has a free one of its own",
    "served_model_name": "a trial asks for the model by the engine's own name",
    "alias": "a trial asks for the model by the engine's own name",
    "api_key": "the load client has no key",
    "uvicorn_log_level": "logs of trials are read",
    "disable_log_stats": "figures of a trial are read at /metrics",
    "disable_log_requests": "the load client does not look at it",
    "disable_uvicorn_access_log": "logs of trials are read",
    "enable_metrics": "it is always on",
    "metrics": "it is always on",
    "swap_space": "vLLM has it no more since 0.18; kv_offloading_size is the nearest that there is",
    "log_file": "the log is kept in the trial's folder",
    "log_disable": "values are read back from the log",
    "uds": "the load client talks to a port",
    "ssl_keyfile": "the load client talks plain HTTP to this machine",
    "ssl_certfile": "the load client talks plain HTTP to this machine",
    "headless": "an instance is one server on one machine",
    "nnodes": "an instance is one server on one machine",
    "node_rank": "an instance is one server on one machine",
    "dist_init_addr": "an instance is one server on one machine",
    "props": "nobody but flagcore asks the server of a trial",
    "slots": "it is always on",
}
"""Flags that flagcore gives itself or nobody can, and why."""
