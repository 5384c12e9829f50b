"""The knobs of `vllm serve`, its command line, and vLLM's defaults.

Sources: vllm 0.32 `engine/arg_utils.py`, `config/cache.py`, `config/scheduler.py`, `platforms/cpu.py`; for older
versions vllm-project/vllm #17073 (batch sizes depend on memory), #38284 (0.21: graphs within the memory share, 0.92).
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress

import numpy as np
from flagcore_serving.job import EngineArg
from flagcore_serving.space import knobs
from flagcore_serving.space.hardware import DP, INSTANCES, PP, TP, Hardware, longest_request, max_in_flight
from flagcore_serving.space.knobs import ASYNC, CONTEXT, DRAFTED, EAGER, SPECULATION, Auto, or_default
from flagcore_serving.space.program import Program
from flagcore_serving.space.settings import GRAPH_TOKENS, Settings
from flagcore_serving.space.weights import cache_bytes_per_token, context_limit, min_devices, weight_bytes

from flagcore.domain.space import Columns, FloatArray, IntArray
from flagcore.domain.spec import Spec, Task
from flagcore.vendorkit.programs import release, strip_dashes

NEWEST = (0, 33, 0)
"""The release that is assumed if the version is unknown."""
SEQS, TOKENS, BLOCK = "max_num_seqs", "max_num_batched_tokens", "block_size"
MEMORY, CHUNKED, GRAPHS, THREADS = "gpu_memory_utilization", "enable_chunked_prefill", "cudagraph_mode", "threads"
POLICY, IMAGES = "scheduling_policy", "limit_mm_per_prompt"
ASYNC_BY_DEFAULT = (0, 14, 0)
"""The first release with asynchronous scheduling by default, except on CPU cores (vllm-project/vllm #27614)."""
SYNCHRONOUS_SECONDS = 956e-6
"""The host's seconds per iteration with synchronous scheduling, fitted to releases from 0.12 on (`engine.yaml`)."""
NEED_DRAFT_MODEL = ("eagle", "eagle3", "draft_model")
CPU_BLOCK, GPU_BLOCK, MLA_CPU_BLOCK = 128, 16, 16

MORE_GRAPH_TOKENS, MORE_GRAPHS_SINCE = 1024, (0, 18)
"""The largest captured batch in tokens on chips that compute in 4 bits (0.33: `config/vllm.py`), and the first release
with it. The release follows from published points: 1,024 tokens took twice as long with 0.17."""
CONTEXT_STEP, CACHE_SHARE = 1024, 0.9
"""A context that fits the requests is rounded up to a multiple of `CONTEXT_STEP` tokens. `CACHE_SHARE` is the share of
the memory for weights and cache."""


def _contexts(task: Task) -> tuple[int | None, ...]:
    """Return the values of `auto` for the context.

    The only value is None (not set), which means the model's context. If the cache of one sequence of this length
    exceeds the memory, it is the longest request instead, rounded up: vLLM does not start without memory for one
    sequence of the whole context (0.32: `v1/core/kv_cache_utils.py`).
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
    cache_bytes = limit * cache_bytes_per_token(task.spec.model, 2.0, limit, computed)
    return (longest,) if cache_bytes > room else (None,)


class VllmProgram(Program):
    """`vllm serve`."""

    def release(self, spec: Spec) -> tuple[int, ...]:
        """Return the numbers of the release, or NEWEST if it is unknown."""
        return release(self.version(spec)) or NEWEST

    def known_args(self, args: Mapping[str, EngineArg]) -> dict[str, EngineArg]:
        """See `Program`. A JSON object that may set a knob becomes one flag for each value: vLLM's parser drops it if
        there are such flags, too (`utils/argparse_utils.py`)."""
        result, objects = dict[str, EngineArg](), {"limit-mm-per-prompt"}
        objects |= {flag.name.partition(".")[0] for knob in self.knobs for flag in knob.flags if "." in flag.name}
        for name, value in args.items():
            key = strip_dashes(name).replace("_", "-")
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            if key == "limit-mm-per-prompt":  # earlier releases: image=2,video=1
                text = re.sub(r"^([^{].*)$", r"{\1}", re.sub(r"([\w-]+)=(\d+)", r'"\1":\2', text))
            found: object = None
            with suppress(ValueError):
                found = json.loads(text) if key in objects else None
            result |= dict(_flat(name, found)) if isinstance(found, Mapping) else {name: value}
        return result


def _flat(name: str, values: Mapping[str, object]) -> Iterator[tuple[str, EngineArg]]:
    """Yield the values of a nested mapping by their path with dots. Lists and constants are JSON."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{name}.{key}", value)
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            yield f"{name}.{key}", int(text) if text.isdecimal() else text


CONTEXTS = Auto(_contexts, "not set; the longest request if the memory is too small for the model's context")
PROGRAM = VllmProgram.read("flagcore_vllm", {"contexts": CONTEXTS, "cache_types": knobs.if_fp8("auto", "fp8")})
KNOBS = PROGRAM.knobs


def batch_defaults(task: Task, ranks: IntArray) -> tuple[IntArray, IntArray]:
    """Return vLLM's default max_num_batched_tokens and max_num_seqs for `ranks` = TP x PP devices.

    vLLM uses the small values for 80 GB chips without fp8, which it knows by name. Here a missing fp8 rate identifies
    them.
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
    """Return the maximum number of tokens and of sequences per iteration of each candidate, by default vLLM's."""
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
    """Return the cache size of one rank in GiB if devices are CPU cores, which share the machine's memory.

    The size is twice the cache of the requests in flight, but at most half of a rank's free memory, and at least 1 GiB.
    """
    hardware, serve = Hardware.of(task), task.spec.serve
    instances, ranks = np.maximum(instances, 1), np.maximum(ranks, 1)
    longest = longest_request(serve.loads, task.spec.model.vision)
    token = cache_bytes_per_token(task.spec.model, 2.0, longest, longest) / ranks
    requested_bytes = 2 * max_in_flight(serve.loads) / instances * longest * token
    room = (hardware.memory_bytes * hardware.cards / instances - weight_bytes(task)) / ranks / 2
    return np.maximum(np.fmin(np.ceil(requested_bytes / 2**30), np.floor(room / 2**30)), 1.0)


def graph_tokens(task: Task) -> int:
    """Return the largest batch, in tokens, that vLLM captures as a graph."""
    version = release(task.spec.serve.engine_version or "")
    is_newer = version is None or version >= MORE_GRAPHS_SINCE
    in_four_bits = "fp4" in task.cluster.groups[0].chip.dense_flops_per_second
    return MORE_GRAPH_TOKENS if is_newer and in_four_bits else GRAPH_TOKENS


def settings(task: Task, columns: Columns) -> Settings:
    """Return vLLM's effective settings for each candidate."""
    values, other_args = PROGRAM.columns(task, columns), PROGRAM.parse(task.spec).others
    hardware = Hardware.of(task)
    tokens, seqs = limits(task, values)
    ranks = values[TP] * values[PP] * values[DP]
    share = hardware.share(values[INSTANCES])
    cores = np.where(values[THREADS] > 0, np.minimum(values[THREADS] * ranks, share), share)
    devices = cores if hardware.on_cores else ranks
    block_on_cores = MLA_CPU_BLOCK if task.spec.model.multi_latent_attention else CPU_BLOCK
    cache_bytes = _cache_bytes(task, other_args, values, ranks, devices)
    default_share = 0.92 if PROGRAM.release(task.spec) >= (0, 21, 0) else 0.9
    host_s = np.array([np.nan, np.nan if is_async(task) else 0.0, SYNCHRONOUS_SECONDS])[values[ASYNC]]
    # Pipelines were scheduled synchronously before (vllm-project/vllm #19970, #32618).
    host_s = np.where((values[PP] > 1) & (host_s == 0.0), np.nan, host_s)
    return Settings.of(
        task,
        values,
        devices=devices,
        max_running=seqs,
        max_batched_tokens=tokens,
        block_size=or_default(values[BLOCK], block_on_cores if hardware.on_cores else GPU_BLOCK),
        context_len=or_default(
            values[CONTEXT], context_limit(task.spec) or longest_request(task.spec.serve.loads, task.spec.model.vision)
        ),
        chunked=values[CHUNKED],
        graph_tokens=np.where((values[EAGER] == 0) & (values[GRAPHS] != 1), graph_tokens(task), 0),
        memory_fraction=np.where(np.isnan(cache_bytes), knobs.shares(values[MEMORY], default_share), np.nan),
        cache_bytes=cache_bytes,
        cache_element_bytes=PROGRAM.element_bytes(values),
        host_s=np.full(ranks.shape, np.nan) if hardware.on_cores else host_s,
        drafted=np.where(values[SPECULATION] > 0, values[DRAFTED], 0),
        quantized=PROGRAM.converts_to_fp8(values),
        tower_shares=knobs.tower_shares(values, loaded="language-model-only" not in other_args),
        **knobs.exchange_settings(task, values, KNOBS),
    )


def is_async(task: Task) -> bool:
    """Return whether scheduling is asynchronous by default."""
    return PROGRAM.release(task.spec) >= ASYNC_BY_DEFAULT and not Hardware.of(task).on_cores


def _cache_bytes(
    task: Task, other_args: Mapping[str, EngineArg], get: Columns, ranks: IntArray, devices: IntArray
) -> FloatArray:
    """Return the cache size of a device in bytes if it is fixed, or NaN if the share of memory determines it."""
    fixed = other_args.get("kv-cache-memory-bytes")
    if isinstance(fixed, int):
        return fixed * ranks / devices
    if not Hardware.of(task).on_cores:
        return np.full(ranks.shape, np.nan)
    return cache_gib(task, get[INSTANCES], ranks) * 2.0**30 * ranks / devices
