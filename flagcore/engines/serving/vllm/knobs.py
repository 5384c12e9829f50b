"""The knobs of `vllm serve`, its command line, and vLLM's defaults.

Sources: vllm 0.32 `engine/arg_utils.py`, `config/cache.py`, `config/scheduler.py`, `platforms/cpu.py`; for older
versions vllm-project/vllm #17073 (memory decides on batch sizes), #38284 (0.21: graphs within the memory share, 0.92).
The releases that have a flag follow from `engine/arg_utils.py` and `config/` of 0.8.5 to 0.32; for images, from the CPU
builds 0.8.5 and 0.9.1 to 0.10.2 (vllm-project/vllm #23190: mm-encoder-tp-mode).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from flagcore.domain.knob import Flag
from flagcore.domain.serving import EngineArg
from flagcore.domain.space import Columns, FloatArray, IntArray
from flagcore.domain.spec import Spec, Task
from flagcore.engines.serving.space import installed, knobs
from flagcore.engines.serving.space.hardware import DP, INSTANCES, PP, TP, Hardware, longest_request, max_in_flight
from flagcore.engines.serving.space.knobs import Auto, by_hardware, fixed_values, knob, or_default, variant
from flagcore.engines.serving.space.program import EngineArgs, Program
from flagcore.engines.serving.space.settings import Settings
from flagcore.engines.serving.space.weights import cache_bytes_per_token, context_limit, min_devices, weight_bytes
from flagcore.errors import SpecError

NEWEST = (0, 33, 0)
"""The release that is assumed if the version is unknown."""
REMOVED: Mapping[str, tuple[tuple[int, ...], str]] = {
    "swap-space": ((0, 18, 0), "kv-offloading-size is the nearest option")
}
"""Removed flags: the release that removed them, and the alternative (swap_space: vllm-project/vllm #36216)."""

SEQS, TOKENS, BLOCK, CONTEXT = "max_num_seqs", "max_num_batched_tokens", "block_size", "context_len"
MEMORY, KV, PREFIX, CHUNKED = (
    "gpu_memory_utilization",
    "kv_cache_type",
    "enable_prefix_caching",
    "enable_chunked_prefill",
)
EAGER, GRAPHS, THREADS = "enforce_eager", "cudagraph_mode", "threads"
ASYNC, BACKEND, SPECULATION, DRAFTED = knobs.ASYNC, knobs.BACKEND, knobs.SPECULATION, knobs.DRAFTED
POLICY, COMPILATION, LEVEL = "scheduling_policy", "compilation_mode", "optimization_level"
BALANCING, OFFLOADING, QUANTIZATION = knobs.BALANCING, "kv_offloading_size", knobs.QUANTIZATION
TOWER, IMAGES, PROCESSED = knobs.TOWER, "limit_mm_per_prompt", "mm_processor_cache_gb"
ASYNC_BY_DEFAULT = (0, 14, 0)
"""The release since which scheduling is asynchronous by default (#27614), but not on CPU cores."""
SYNCHRONOUS_SECONDS = 956e-6
"""The host time of an iteration with synchronous scheduling, fitted to releases from 0.12 (`engine.yaml`)."""
NEED_DRAFT_MODEL = ("eagle", "eagle3", "draft_model")
BACKENDS = (
    *("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "TREE_ATTN", "TORCH_SDPA", "CPU_ATTN"),
    *("FLASHMLA", "FLASHMLA_SPARSE", "FLASH_ATTN_MLA", "TRITON_MLA", "CUTLASS_MLA", "FLASHINFER_MLA", "CPU_MLA"),
    *("FLASHINFER_MLA_SPARSE", "TOKENSPEED_MLA", "ROCM_ATTN", "ROCM_AITER_FA", "ROCM_AITER_UNIFIED_ATTN"),
    *("ROCM_AITER_MLA", "ROCM_AITER_MLA_SPARSE", "ROCM_AITER_TRITON_MLA", "XPU_MLA_SPARSE", "HPC_ATTN"),
    *("TURBOQUANT", "B12X", "CUSTOM"),
)
MOE_BACKENDS = (
    *("auto", "triton", "batched_triton", "triton_unfused", "deep_gemm", "deep_gemm_mega_moe", "cutlass", "marlin"),
    *("flashinfer_trtllm", "flashinfer_cutlass", "flashinfer_cutedsl", "aiter", "aiter_mega_moe", "humming"),
)
QUANTIZATIONS = (
    *("fp8", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel", "int8_per_channel_weight_only", "mxfp8"),
    *("nvfp4_per_token", "experts_int8", "ptpc_fp8", "bitsandbytes", "torchao", "rtn", "inc", "awq", "awq_marlin"),
    *("gptq", "gptq_marlin", "compressed-tensors", "modelopt", "modelopt_fp4", "mxfp4", "quark", "moe_wna16", "gguf"),
    *("ascend", "auto_awq", "auto_gptq", "fbgemm_fp8", "hqq", "online", "humming"),
)
KV_BYTES = {
    "auto": 2.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "fp8": 1.0,
    "fp8_e5m2": 1.0,
    "fp8_inc": 1.0,
    "fp8_ds_mla": 1.0,
    "nvfp4": 0.5625,
}
"""Bytes of a cached element; `auto` is the format of activations, fp8 is fp8_e4m3, NVFP4 has a scale per 16."""
CPU_BLOCK, GPU_BLOCK, MLA_CPU_BLOCK = 128, 16, 16

CONTEXT_STEP, CACHE_SHARE = 1024, 0.9
"""Multiple of a context that fits the requests, and the share of the memory for weights and cache."""


def _contexts(task: Task) -> tuple[int | None, ...]:
    """Return the model's context or, if its cache exceeds the memory, the longest request, rounded up.

    vLLM does not start without memory for one sequence of the whole context (0.32: `v1/core/kv_cache_utils.py`).
    """
    hardware, limit = Hardware.of(task), context_limit(task.spec)
    devices = min_devices(task)
    if hardware.on_cores:
        room = float(cache_gib(task, 1, 1)) * 2**30
    else:
        room = CACHE_SHARE * hardware.memory_bytes * devices - weight_bytes(task)
    longest = -(-longest_request(task.spec.serve.loads, task.spec.model.vision) // CONTEXT_STEP) * CONTEXT_STEP
    if limit is None or limit <= longest:
        return (None,)
    computed = float(batch_defaults(task, np.ones(1, dtype=np.int64))[0][0])
    needed = limit * cache_bytes_per_token(task.spec.model, 2.0, limit, computed)
    return (longest,) if needed > room else (None,)


CONTEXTS = Auto(_contexts, "not set; the longest request if the memory is too small for the model's context")

KNOBS = (
    knobs.INSTANCES_KNOB,
    variant(knobs.TP_KNOB, "tensor-parallel-size", "tp"),
    replace(knobs.ROLES_KNOB, versions=">=0.8.5"),
    variant(knobs.TRANSFER_KNOB, words=("NixlConnector", "P2pNcclConnector", "ExampleConnector"), versions=">=0.8.5"),
    variant(knobs.PP_KNOB, "pipeline-parallel-size", "pp", auto=by_hardware(fixed_values(1), knobs.DIVISORS)),
    variant(knobs.DP_KNOB, "data-parallel-size", "dp"),
    variant(knobs.EP_KNOB, help="Devices that share the experts: 1, or all of an instance."),
    knob(
        BLOCK,
        "Tokens of one block of the cache.",
        aliases=("page_size",),
        auto=by_hardware(fixed_values(32, 128), fixed_values(16, 32, 64)),
    ),
    knob(
        SEQS,
        "Maximum number of sequences in one iteration.",
        aliases=("max_running_requests",),
        auto=knobs.POWERS_IN_FLIGHT,
        memory_order=1,
    ),
    knob(
        TOKENS,
        "Maximum number of tokens of prompts and answers in one iteration.",
        aliases=("chunked_prefill_size",),
        auto=by_hardware(fixed_values(256, 1024, 2048), fixed_values(2048, 4096, 8192, 16384)),
        memory_order=1,
    ),
    variant(knobs.CONTEXT_KNOB, "max-model-len", auto=CONTEXTS),
    knob(
        MEMORY,
        "Share of a device's memory for weights, activations, graphs and cache together.",
        label="memory share",
        kind="share",
        flags=("gpu-memory-utilization", "device-memory-utilization"),
        auto=by_hardware(knobs.NOT_SET, fixed_values("0.9", "0.95")),
    ),
    variant(knobs.KV_KNOB, "kv-cache-dtype", words=tuple(KV_BYTES), auto=knobs.if_fp8("auto", "fp8")),
    variant(knobs.EAGER_KNOB, "enforce-eager"),
    knob(
        GRAPHS,
        "Which iterations run as captured graphs.",
        label="graphs",
        kind="word",
        words=("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"),
        flags=("compilation-config.cudagraph_mode",),
        versions=">=0.10.1",
        auto=by_hardware(knobs.NOT_SET, fixed_values("PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")),
    ),
    variant(knobs.PREFIX_KNOB, "enable-prefix-caching", off="no-enable-prefix-caching"),
    knob(
        CHUNKED,
        "Whether long prompts are computed in chunks, together with answers.",
        label="chunked prefill",
        kind="flag",
        neutral=True,
        off="no-enable-chunked-prefill",
        auto=fixed_values(True),
    ),
    knobs.switch(
        ASYNC,
        "Whether the next iteration is scheduled while the device computes; the default since 0.14.",
        "async-scheduling",
        "no-async-scheduling",
        label="async",
        versions=">=0.10",
    ),
    knob(
        POLICY,
        "Order of waiting requests: first come first served, or by the priority of the request.",
        label="policy",
        kind="word",
        words=("fcfs", "priority"),
        aliases=("schedule_policy",),
    ),
    variant(knobs.BACKEND_KNOB, Flag(name="attention-backend", versions=">=0.13"), words=BACKENDS),
    variant(knobs.MOE_KNOB, "moe-backend", words=MOE_BACKENDS, versions=">=0.17"),
    variant(knobs.BALANCING_KNOB, "enable-eplb", versions=">=0.9.2"),
    variant(
        knobs.SPECULATION_KNOB,
        "speculative-config.method",
        words=("ngram", "ngram_gpu", "suffix", "mtp", *NEED_DRAFT_MODEL),
    ),
    variant(knobs.DRAFTED_KNOB, "speculative-config.num_speculative_tokens"),
    knob(OFFLOADING, "GiB of host memory for evicted cache, over all ranks.", label="offload", versions=">=0.14"),
    knob(
        COMPILATION,
        "How much is compiled: 0 nothing, 3 vLLM's own compilation.",
        label="compilation",
        kind="word",
        words=("0", "1", "2", "3"),
        flags=(
            Flag(name="compilation-config.mode", versions=">=0.11.1"),
            Flag(name="compilation-config.level", versions="<0.11.1"),
        ),
    ),
    knob(
        LEVEL,
        "Preset for compilation, graphs and fused kernels, from 0 (fast start) to 3.",
        label="O",
        kind="word",
        words=("0", "1", "2", "3"),
        versions=">=0.12",
    ),
    variant(knobs.QUANTIZATION_KNOB, "quantization", words=QUANTIZATIONS),
    variant(knobs.TOWER_KNOB, "mm-encoder-tp-mode", versions=">=0.10.2"),
    knob(IMAGES, "Most images of a request.", flags=("limit-mm-per-prompt.image",), label="images", versions=">=0.9.1"),
    knob(
        PROCESSED,
        "GiB of host memory for prepared images, in each front end and scheduler, for repeated ones; 0: none.",
        label="image cache",
        neutral=4,
        minimum=0,
        versions=">=0.10.1",
    ),
    knob(
        THREADS,
        "CPU cores of one rank. If not set, a single rank leaves one core to the API server.",
        flags=(),
        auto=knobs.Auto(
            lambda task: (None, *knobs.divisors(task)) if Hardware.of(task).on_cores else (None,),
            "on cores not set, and their divisors; else not set",
        ),
    ),
)
"""The neutral values mean vLLM's defaults."""
BY_NAME = {knob.name: knob for knob in KNOBS}


class VllmProgram(Program):
    """`vllm serve`, with checks for flags that depend on the release."""

    def release(self, spec: Spec) -> tuple[int, ...]:
        """Return the numbers of the release, NEWEST if it is unknown."""
        return installed.release(self.version(spec)) or NEWEST

    def parse(self, spec: Spec) -> EngineArgs:
        for name in self.split(spec).others:
            removed_in, replacement = REMOVED.get(name, (NEWEST, ""))
            if replacement and self.release(spec) >= removed_in:
                problem = f"was removed in vLLM {removed_in[0]}.{removed_in[1]}"
                raise SpecError(key=f"serve.engine_args.{name}", problem=problem, fix=replacement)
        return super().parse(spec)


PROGRAM = VllmProgram.read("flagcore.engines.serving.vllm", KNOBS)


def batch_defaults(task: Task, ranks: IntArray) -> tuple[IntArray, IntArray]:
    """Return vLLM's default max_num_batched_tokens and max_num_seqs for `ranks` = TP x PP devices.

    vLLM keeps the small values for the 80 GB chips without fp8 by their names; here a missing fp8 rate identifies them.
    """
    hardware = Hardware.of(task)
    if hardware.on_cores:
        return 2048 * ranks, 128 * ranks
    gib = hardware.memory_bytes / 2**30
    tokens, seqs = 2048, 256
    if gib >= 160 and PROGRAM.release(task.spec) >= (0, 28, 0):
        tokens, seqs = 16384, 1024
    elif gib >= 70 and hardware.fp8:
        tokens, seqs = 8192, 1024
    if PROGRAM.parse(task.spec).others.get("performance-mode") == "throughput":
        tokens, seqs = 2 * tokens, 2 * seqs
    return np.full_like(ranks, tokens), np.full_like(ranks, seqs)


def limits(task: Task, columns: Columns) -> tuple[IntArray, IntArray]:
    """Return the maximum tokens and sequences of one iteration, by default vLLM's values."""
    tokens, seqs = batch_defaults(task, columns[TP] * columns[PP])
    seqs_set, tokens_set = columns[SEQS] > 0, columns[TOKENS] > 0
    tokens = np.where(tokens_set, columns[TOKENS], tokens)
    context = columns[CONTEXT]
    follows_context = ~tokens_set & (columns[CHUNKED] == 0) & (context > 0)
    tokens = np.where(follows_context, np.maximum(tokens, context), tokens)
    seqs = np.where(seqs_set, columns[SEQS], seqs)
    tokens = np.where(~tokens_set & (context > 0), np.minimum(tokens, seqs * context), tokens)
    return tokens, np.where(seqs_set, seqs, np.minimum(seqs, tokens))


def cache_gib(task: Task, instances: IntArray | int, ranks: IntArray | int) -> FloatArray:
    """Return the GiB of cache of one rank on CPU cores, which share the machine's memory.

    It is twice the cache of the requests in flight, at least 1 and at most half of a rank's free memory.
    """
    hardware, serve = Hardware.of(task), task.spec.serve
    instances, ranks = np.maximum(instances, 1), np.maximum(ranks, 1)
    longest = longest_request(serve.loads, task.spec.model.vision)
    token = cache_bytes_per_token(task.spec.model, 2.0, longest, longest) / ranks
    wanted = 2 * max_in_flight(serve.loads) / instances * longest * token
    room = (hardware.memory_bytes * hardware.cards / instances - weight_bytes(task)) / ranks / 2
    return np.maximum(np.fmin(np.ceil(wanted / 2**30), np.floor(room / 2**30)), 1.0)


def settings(task: Task, columns: Columns) -> Settings:
    """Return vLLM's effective settings for candidates."""
    values, other_args = PROGRAM.columns(task, columns), PROGRAM.parse(task.spec).others
    hardware = Hardware.of(task)
    tokens, seqs = limits(task, values)
    ranks = values[TP] * values[PP] * values[DP]
    share = hardware.share(values[INSTANCES])
    cores = np.where(values[THREADS] > 0, np.minimum(values[THREADS] * ranks, share), share)
    devices = cores if hardware.on_cores else ranks
    default_block = GPU_BLOCK
    if hardware.on_cores:
        default_block = MLA_CPU_BLOCK if task.spec.model.multi_latent_attention else CPU_BLOCK
    cache_bytes = _cache_bytes(task, other_args, values, ranks, devices)
    default_share = 0.92 if PROGRAM.release(task.spec) >= (0, 21, 0) else 0.9
    host_s = np.array([np.nan, np.nan if is_async(task) else 0.0, SYNCHRONOUS_SECONDS])[values[ASYNC]]
    return Settings.of(
        task,
        values,
        devices=devices,
        max_running=seqs,
        max_batched_tokens=tokens,
        block_size=or_default(values[BLOCK], default_block),
        context_len=or_default(
            values[CONTEXT], context_limit(task.spec) or longest_request(task.spec.serve.loads, task.spec.model.vision)
        ),
        chunked=values[CHUNKED],
        graphs=((values[EAGER] == 0) & (values[GRAPHS] != 1)).astype(np.int64),
        memory_fraction=np.where(np.isnan(cache_bytes), knobs.shares(values[MEMORY], default_share), np.nan),
        cache_bytes=cache_bytes,
        cache_element_bytes=np.array([2.0, *KV_BYTES.values()])[values[KV]],
        host_s=np.full(ranks.shape, np.nan) if hardware.on_cores else host_s,
        drafted=np.where(values[SPECULATION] > 0, values[DRAFTED], 0),
        quantized=knobs.is_fp8(BY_NAME[QUANTIZATION], values),
        tower_shares=knobs.tower_shares(BY_NAME[TOWER], values, loaded="language-model-only" not in other_args),
    )


def is_async(task: Task) -> bool:
    """Return whether scheduling is asynchronous by default."""
    return PROGRAM.release(task.spec) >= ASYNC_BY_DEFAULT and not Hardware.of(task).on_cores


def _cache_bytes(
    task: Task, other_args: Mapping[str, EngineArg], get: Columns, ranks: IntArray, devices: IntArray
) -> FloatArray:
    """Return the bytes of cache of one device if they are fixed, NaN if the memory share determines them."""
    fixed = other_args.get("kv-cache-memory-bytes")
    if isinstance(fixed, int):
        return fixed * ranks / devices
    if not Hardware.of(task).on_cores:
        return np.full(ranks.shape, np.nan)
    return cache_gib(task, get[INSTANCES], ranks) * 2.0**30 * ranks / devices
