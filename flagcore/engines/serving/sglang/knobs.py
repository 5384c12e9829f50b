"""The knobs of SGLang's server, its command line, and SGLang's defaults.

Sources: sglang 0.5.23 `srt/arg_groups/` (fields, memory_hook, parallel_hook), 0.5.6 `srt/server_args.py`. The releases
that have a flag follow from `srt/server_args.py` of 0.4.0 to 0.5.15 and `srt/arg_groups/` of 0.5.16 to 0.5.23.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from flagcore.domain.serving import EngineArg
from flagcore.domain.space import Columns, FloatArray, IntArray
from flagcore.domain.spec import Task
from flagcore.engines.serving.space import knobs
from flagcore.engines.serving.space.hardware import DP, INSTANCES, PP, TP, Hardware, longest_request, max_in_flight
from flagcore.engines.serving.space.installed import strip_dashes
from flagcore.engines.serving.space.knobs import DRAFTED, EAGER, SPECULATION, or_default
from flagcore.engines.serving.space.program import Program
from flagcore.engines.serving.space.settings import Settings
from flagcore.engines.serving.space.weights import cache_bytes_per_token

PAGE, CHUNK, PREFILL = "page_size", "chunked_prefill_size", "max_prefill_tokens"
RUNNING, MEMORY, POLICY = "max_running_requests", "mem_fraction_static", "schedule_policy"
REDUNDANT, HICACHE = "redundant_experts", "hicache_size"
NGRAM, NEED_DRAFT_MODEL = "NGRAM", ("EAGLE", "EAGLE3", "STANDALONE")
MIN_RUNNING = 2048
"""SGLang's minimum default of max_running_requests."""
DRAFTED_TOKENS, NGRAM_TOKENS = 3, 12
"""SGLang's defaults of drafted tokens, except 5 for Llama (0.5.23 `speculative_hook.py`)."""
_MIN_POOL = 4096
_MEMORY_STEPS = (
    (20, 2048, 8, 8),
    (35, 4096, 48, 160),
    (60, 4096, 32, 160),
    (90, 8192, 256, 512),
    (160, 8192, 256, 512),
    (math.inf, 16384, 512, 512),
)
"""By the GiB of a device: chunked_prefill_size, and the largest decode graph for TP < 4 and TP >= 4
(`memory_hook.py`)."""

TP_FLAGS = ("tp-size", "tensor-parallel-size", "tp")
DP_FLAGS = ("dp-size", "dp_size", "data-parallel-size", "dp")
"""SGLang's servers behind one port; with `enable-dp-attention` the attention groups of one server."""
STEPS, BREADTH, VERIFIED = "speculative-num-steps", "speculative-eagle-topk", "speculative-num-draft-tokens"
DRAFT_FLAG = "speculative-draft-model-path"


class SglangProgram(Program):
    """SGLang's server. Several of its flags together set one knob."""

    def known_args(self, args: Mapping[str, EngineArg]) -> dict[str, EngineArg]:
        """Return arguments with knobs in place of the flags that only together have a knob's meaning.

        SGLang's tp-size is the product of TP and attention DP. A chain of drafts has one draft in each step.
        """
        found = dict(args)

        def take(*names: str) -> EngineArg:
            keys = [key for key in found if key.lstrip("-") in names or strip_dashes(key) in names[:1]]
            return next((found.pop(key) for key in keys), None)

        if isinstance(servers := take(*DP_FLAGS), int):
            divides_attention = take("enable-dp-attention")
            if servers > 1:
                found["attn-dp-size" if divides_attention else INSTANCES] = servers
        elif servers is not None:
            found[DP_FLAGS[0]] = servers
        names = {strip_dashes(key): key for key in found}
        tensor_key = next((names[name] for name in TP_FLAGS if name in names), "")
        tensor = found.get(tensor_key)
        if take("enable-ep-moe") and isinstance(tensor, int):
            found["ep-size"] = tensor
        data = found.get(names.get("attn-dp-size") or names.get(strip_dashes(DP)) or "")
        if isinstance(tensor, int) and isinstance(data, int) and data > 1 and tensor % data == 0:
            found[tensor_key] = tensor // data
        if draft := take("speculative-draft-model"):
            found[DRAFT_FLAG] = draft
        return found | _chain(found)


def _chain(args: dict[str, EngineArg]) -> dict[str, EngineArg]:
    """Remove the flags of a chain of drafts, and return its number of drafted tokens; nothing for a tree of drafts."""
    names = {strip_dashes(key): key for key in args}
    method, steps, breadth, verified = (
        args.get(names.get(name, "")) for name in ("speculative-algorithm", STEPS, BREADTH, VERIFIED)
    )
    is_ngram = str(method).upper() == NGRAM
    drafted = verified if is_ngram else steps
    if not isinstance(drafted, int) or not (is_ngram or breadth == 1):
        return {}
    for name in (VERIFIED,) if is_ngram else (STEPS, BREADTH, VERIFIED):
        args.pop(names.get(name, ""), None)
    return {DRAFTED: drafted}


PROGRAM = SglangProgram.read("flagcore.engines.serving.sglang", {"cache_types": knobs.if_fp8("auto", "fp8_e4m3")})
KNOBS = PROGRAM.knobs


def memory_defaults(task: Task, tensor: IntArray) -> tuple[IntArray, IntArray]:
    """Return SGLang's default chunked_prefill_size and largest decode graph for its tp-size, by the device's memory."""
    gib = Hardware.of(task).memory_bytes / 2**30
    unknown = (4096, 160, 160)
    chunk, small, large = next((step[1:] for step in _MEMORY_STEPS if gib < step[0]), unknown)
    return np.full_like(tensor, chunk), np.where(tensor < 4, small, large)


def chunk_sizes(task: Task, columns: Columns) -> IntArray:
    """Return the tokens of one chunk of prompts, by default SGLang's value; -1 without chunks."""
    default = memory_defaults(task, columns[TP] * columns[DP])[0]
    return np.where(columns[CHUNK] != 0, columns[CHUNK], default)


def memory_share(task: Task, columns: Columns) -> FloatArray:
    """Return SGLang's default share of memory for weights and cache, which excludes its reserve; NaN if unknown."""
    tensor = columns[TP] * columns[DP]
    mib = Hardware.of(task).memory_bytes / 2**20
    graph = np.where(columns[EAGER] == 1, 0, memory_defaults(task, tensor)[1])
    chunk = chunk_sizes(task, columns)
    prefill = PROGRAM.values(columns, PREFILL)
    reserved_mib = 512 + 1.5 * np.maximum(np.where(chunk > 0, chunk, prefill), 2048) + 2.0 * graph
    reserved_mib = (
        reserved_mib + tensor * columns[PP] / 8 * 1024 + np.where(columns[DP] > 1, 3.0 * graph * columns[DP], 0.0)
    )
    if mib > 60 * 1024:
        reserved_mib = np.maximum(reserved_mib, 10 * 1024)
    return np.round((mib - reserved_mib) / mib, 3)


def pool_tokens(task: Task, instances: IntArray | int) -> FloatArray:
    """Return the tokens of the cache of one instance on CPU cores, where SGLang would use most of the memory."""
    loads = task.spec.serve.loads
    tokens: FloatArray = np.ceil(2 * max_in_flight(loads) / np.maximum(instances, 1)) * longest_request(
        loads, task.spec.model.vision
    )
    return np.maximum(tokens, _MIN_POOL)


def settings(task: Task, columns: Columns) -> Settings:
    """Return SGLang's effective settings for candidates; attention DP groups share chunks and requests."""
    values, other_args = PROGRAM.columns(task, columns), PROGRAM.parse(task.spec).others
    hardware = Hardware.of(task)
    chunk = chunk_sizes(task, values)
    tokens = np.where(chunk > 0, np.maximum(chunk // values[DP], 1), PROGRAM.values(values, PREFILL))
    ranks = values[TP] * values[PP] * values[DP]
    devices = hardware.share(values[INSTANCES]) if hardware.on_cores else ranks
    element = PROGRAM.element_bytes(values)
    share = knobs.shares(values[MEMORY], memory_share(task, values))
    return Settings.of(
        task,
        values,
        devices=devices,
        max_running=np.where(values[RUNNING] > 0, np.maximum(values[RUNNING] // values[DP], 1), MIN_RUNNING),
        max_batched_tokens=tokens,
        block_size=or_default(values[PAGE], 1),
        chunked=(chunk > 0).astype(np.int64),
        graphs=((values[EAGER] == 0) & (not hardware.on_cores)).astype(np.int64),
        memory_fraction=np.full(ranks.shape, np.nan) if hardware.on_cores else share,
        cache_bytes=_cache_bytes(task, other_args, values, devices, element),
        cache_element_bytes=element,
        drafted=_drafted(other_args, values),
        quantized=PROGRAM.converts_to_fp8(values),
        tower_shares=knobs.tower_shares(values),
    )


def _drafted(other_args: Mapping[str, EngineArg], columns: Columns) -> IntArray:
    """Return the drafted tokens in succession; by default the steps of a tree of drafts, or SGLang's number."""
    steps = other_args.get(STEPS)
    default = np.where(columns[SPECULATION] == PROGRAM.code(SPECULATION, NGRAM), NGRAM_TOKENS, DRAFTED_TOKENS)
    if isinstance(steps, int):
        default = np.full_like(default, steps)
    return np.where(columns[SPECULATION] > 0, or_default(columns[DRAFTED], default), 0)


def _cache_bytes(
    task: Task, other_args: Mapping[str, EngineArg], get: Columns, devices: IntArray, element: FloatArray
) -> FloatArray:
    """Return the bytes of cache of one device if its tokens are fixed, NaN if the memory determines them."""
    fixed = other_args.get("max-total-tokens")
    if not isinstance(fixed, int) and not Hardware.of(task).on_cores:
        return np.full(devices.shape, np.nan)
    pools = float(fixed) if isinstance(fixed, int) else pool_tokens(task, get[INSTANCES])
    return pools * cache_bytes_per_token(task.spec.model, 1.0) * element / devices
