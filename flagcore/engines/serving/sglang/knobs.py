"""The knobs of SGLang's server, what `engine_args` may hold, and the values that SGLang fills in.

Sources: sglang 0.5.23 `srt/arg_groups/` (fields, memory_hook, parallel_hook), 0.5.6 `srt/server_args.py`.
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
from flagcore.engines.serving.common import engine_args, knobs
from flagcore.engines.serving.common.hardware import DP, EP, INSTANCES, PP, TP, Hardware, longest, most_in_flight
from flagcore.engines.serving.common.weights import cache_bytes_per_token
from flagcore.engines.serving.engine import Settings

PROGRAM = ("python3", "-m", "sglang.launch_server")
PACKAGE = "sglang"
_FIELDS = ("device", "disagg", "exec_", "lora", "memory", "mm", "model", "observability", "parallel", "schedule")
FLAG_FIELDS = tuple(f"sglang/srt/arg_groups/fields/{name}.py" for name in (*_FIELDS, "serving", "spec"))
FLAG_FILES = ("sglang/srt/server_args.py", *FLAG_FIELDS)
"""Up to about 0.5.9 flags are literals of one file; in 0.5.23 they are fields, with literals for other spellings."""
RESERVED: Mapping[str, str] = {
    **engine_args.RESERVED,
    "model-path": "serve.weights sets it",
    "model": "serve.weights sets it",
    "enable-metrics": "flagcore reads /metrics",
    "nnodes": "an instance is one server on one machine",
    "node-rank": "an instance is one server on one machine",
}
"""Flags that the user cannot set, and why."""

PAGE, CHUNK, PREFILL = "page_size", "chunked_prefill_size", "max_prefill_tokens"
RUNNING, CONTEXT, MEMORY, KV = "max_running_requests", "context_len", "mem_fraction_static", "kv_cache_type"
PREFIX, EAGER, POLICY, MIXED = "enable_prefix_caching", "enforce_eager", "schedule_policy", "enable_mixed_chunk"
KV_TYPES = ("auto", "bf16", "bfloat16", "fp8_e5m2", "fp8_e4m3", "mxfp8", "nvfp4", "fp4_mx_block16")
KV_BYTES = (2.0, 2.0, 2.0, 1.0, 1.0, 33 / 32, 9 / 16, 9 / 16)
POLICIES = ("fcfs", "lpm", "random", "dfs-weight", "lof", "priority", "hrrn", "shortest-prefill-first")
PREFILL_TOKENS, MIN_RUNNING = 16384, 2048
"""SGLang's default max_prefill_tokens, and the least that it takes for max_running_requests by itself."""
_LEAST_POOL = 4096
_MEMORY_STEPS = (
    (20, 2048, 8, 8),
    (35, 4096, 48, 160),
    (60, 4096, 32, 160),
    (90, 8192, 256, 512),
    (160, 8192, 256, 512),
)
"""Up to GiB of a device: chunked_prefill_size, largest decode graph below TP 4, and from TP 4 on (`memory_hook.py`)."""
_LARGEST = (16384, 512, 512)


KNOBS = (
    knobs.INSTANCES_KNOB,
    replace(
        knobs.with_flags(knobs.TP_KNOB, "tp-size", "tensor-parallel-size", "tp"),
        help="Devices that split each layer's matrices; SGLang's default tp-size also counts attention groups.",
    ),
    knobs.SIZES_KNOB,
    knobs.with_flags(knobs.PP_KNOB, "pp-size", "pipeline-parallel-size", "pp"),
    replace(
        knobs.with_flags(knobs.DP_KNOB, "attn-dp-size"),
        help="Attention data parallelism: groups inside one instance that each hold the attention of some sequences; "
        "`--dp-size` with `--enable-dp-attention` in releases without attn-dp-size.",
    ),
    knobs.with_flags(knobs.EP_KNOB, "ep-size", "expert-parallel-size", "ep"),
    Knob(
        name=PAGE,
        help="Tokens of one page of the cache.",
        flags=(Flag(name="page-size"),),
        aliases=("block_size",),
        auto=lambda task: (1, 32, 64),
        auto_help="1, 32, 64",
    ),
    Knob(
        name=CHUNK,
        help="Most prompt tokens in one iteration; -1 (`off`): whole prompts.",
        flags=(Flag(name="chunked-prefill-size"),),
        aliases=("max_num_batched_tokens",),
        minimum=-1,
        spellings={"off": -1},
        auto=knobs.by_hardware((512, 2048), (2048, 4096, 8192, 16384)),
        auto_help="2048 to 16384; on cores 512, 2048",
        memory_order=1,
    ),
    Knob(
        name=PREFILL,
        help="Most tokens of the prompts that start in one iteration.",
        flags=(Flag(name="max-prefill-tokens"),),
        auto=lambda task: (None,),
        auto_help="not set",
        memory_order=1,
    ),
    Knob(
        name=RUNNING,
        help="Most sequences in one iteration, over all attention groups.",
        flags=(Flag(name="max-running-requests"),),
        aliases=("max_num_seqs",),
        auto=lambda task: knobs.in_flight(task, last=4),
        auto_help="four powers of two up to the requests in flight",
        memory_order=1,
    ),
    knobs.with_flags(knobs.CONTEXT_KNOB, "context-length"),
    Knob(
        name=MEMORY,
        help="Share of a device's memory for weights and cache only.",
        label="memory share",
        kind="share",
        flags=(Flag(name="mem-fraction-static"),),
        auto=knobs.by_hardware((None,), (None, "0.85", "0.9")),
        auto_help="not set, 0.85, 0.9; on cores not set",
    ),
    replace(
        knobs.with_flags(knobs.KV_KNOB, "kv-cache-dtype"),
        words=KV_TYPES,
        auto=lambda task: ("auto", "fp8_e4m3") if Hardware.of(task).fp8 else ("auto",),
        auto_help="auto, and fp8_e4m3 if the chip supports it",
    ),
    knobs.with_flags(knobs.PREFIX_KNOB, off="disable-radix-cache"),
    knobs.with_flags(knobs.EAGER_KNOB, "disable-cuda-graph"),
    Knob(
        name=POLICY,
        help="Which waiting request is next: the first, the one with the longest cached prefix, and others.",
        label="policy",
        kind="word",
        words=POLICIES,
        flags=(Flag(name="schedule-policy"),),
        auto=lambda task: ("fcfs", "lpm"),
        auto_help="fcfs, lpm",
    ),
    Knob(
        name=MIXED,
        help="Chunks of prompts and answers share iterations.",
        label="mixed chunks",
        kind="flag",
        neutral=False,
        flags=(Flag(name="enable-mixed-chunk"),),
        auto=lambda task: (False, True),
        auto_help="false, true",
    ),
)
"""`tensor_model_parallel_size` is the split of one attention group: SGLang's default tp-size is its product with
`data_parallel_size`."""
BY_NAME = {knob.name: knob for knob in KNOBS}


def installed_flags(spec: Spec) -> frozenset[str]:
    """Return the flags of the installed SGLang, by its source; none if it is not installed."""
    return engine_args.installed_flags(spec, PROGRAM, FLAG_FILES, FLAG_FIELDS)


def parse_args(spec: Spec) -> knobs.EngineArgs:
    """Return the knobs that `engine_args` fix, and the other flags. Raises SpecError.

    A tp-size given together with attention DP counts both, as in SGLang.
    """
    found = knobs.split_arguments(spec.serve.engine_args, KNOBS)
    if not found.others.keys() <= {"device", "max-total-tokens"}:
        engine_args.check(found.others, RESERVED, installed_flags(spec), "SGLang")
    tensor, data = found.fixed.get(TP), found.fixed.get(DP)
    by_flag = any(knobs.bare(key) in {flag.name for flag in BY_NAME[TP].flags} for key in spec.serve.engine_args)
    if by_flag and isinstance(tensor, int) and isinstance(data, int) and data > 1 and tensor % data == 0:
        found.fixed[TP] = tensor // data
    return found


def memory_defaults(task: Task, tensor: IntArray) -> tuple[IntArray, IntArray]:
    """Return SGLang's default chunked_prefill_size and largest decode graph for its tp-size, by the device's memory."""
    gib = Hardware.of(task).memory_bytes / 2**30
    if math.isnan(gib):
        return np.full_like(tensor, 4096), np.full_like(tensor, 160)
    chunk, small, large = next((step[1:] for step in _MEMORY_STEPS if gib < step[0]), _LARGEST)
    return np.full_like(tensor, chunk), np.where(tensor < 4, small, large)


def chunk_sizes(task: Task, columns: Columns) -> IntArray:
    """Return the tokens of one chunk of prompts, SGLang's default if it is not set; -1 where prompts are whole."""
    own = memory_defaults(task, columns[TP] * columns[DP])[0]
    return np.where(columns[CHUNK] != 0, columns[CHUNK], own)


def memory_share(task: Task, columns: Columns) -> FloatArray:
    """Return SGLang's default share of memory for weights and cache: all but what it sets aside, NaN where unknown."""
    tensor = columns[TP] * columns[DP]
    mib = Hardware.of(task).memory_bytes / 2**20
    graph = np.where(columns[EAGER] == 1, 0, memory_defaults(task, tensor)[1])
    chunk = chunk_sizes(task, columns)
    prefill = np.where(columns[PREFILL] > 0, columns[PREFILL], PREFILL_TOKENS)
    aside = 512 + 1.5 * np.maximum(np.where(chunk > 0, chunk, prefill), 2048) + 2.0 * graph
    aside = aside + tensor * columns[PP] / 8 * 1024 + np.where(columns[DP] > 1, 3.0 * graph * columns[DP], 0.0)
    if mib > 60 * 1024:
        aside = np.maximum(aside, 10 * 1024)
    return np.round((mib - aside) / mib, 3)


def pool_tokens(task: Task, instances: int) -> int:
    """Return the tokens of the cache of one instance where devices are cores: SGLang would take most of the memory."""
    loads = task.spec.serve.loads
    return max(_LEAST_POOL, math.ceil(2 * most_in_flight(loads) / instances) * longest(loads))


def settings(task: Task, columns: Columns) -> Settings:
    """Return what SGLang does with candidates: with attention DP it divides chunks and requests among the groups."""
    fixed, others = parse_args(task.spec)
    get = knobs.all_columns(columns, KNOBS, fixed)
    hardware = Hardware.of(task)
    chunk = chunk_sizes(task, get)
    prefill = np.where(get[PREFILL] > 0, get[PREFILL], PREFILL_TOKENS)
    tokens = np.where(chunk > 0, np.maximum(chunk // get[DP], 1), prefill)
    ranks = get[TP] * get[PP] * get[DP]
    share = hardware.share(get[INSTANCES], columns)
    devices = share if hardware.on_cores else ranks
    element = np.array([2.0, *KV_BYTES])[get[KV]]
    page = np.where(get[PAGE] > 0, get[PAGE], 1)
    return Settings(
        instances=get[INSTANCES],
        devices=devices,
        tensor=get[TP],
        pipeline=get[PP],
        data=get[DP],
        expert=get[EP],
        max_running=np.where(get[RUNNING] > 0, np.maximum(get[RUNNING] // get[DP], 1), MIN_RUNNING),
        max_batched_tokens=tokens,
        pass_tokens=tokens,
        block_size=page,
        context_len=np.where(get[CONTEXT] > 0, get[CONTEXT], longest(task.spec.serve.loads)),
        chunked=(chunk > 0).astype(np.int64),
        graphs=((get[EAGER] == 0) & (not hardware.on_cores)).astype(np.int64),
        prefix_caching=get[PREFIX],
        memory_fraction=np.full(ranks.shape, np.nan)
        if hardware.on_cores
        else knobs.shares(get[MEMORY], memory_share(task, get)),
        cache_bytes=_cache_bytes(task, others, get, devices, element),
        cache_element_bytes=element,
    )


def _cache_bytes(
    task: Task, others: Mapping[str, EngineArg], get: Columns, devices: IntArray, element: FloatArray
) -> FloatArray:
    """Return the bytes of cache of one device where its tokens are given, NaN where they follow from the memory."""
    given = others.get("max-total-tokens")
    if isinstance(given, int):
        tokens = np.full(devices.shape, float(given))
    elif Hardware.of(task).on_cores:
        known = {int(number): pool_tokens(task, max(int(number), 1)) for number in np.unique(get[INSTANCES])}
        tokens = np.array([known[int(number)] for number in get[INSTANCES].ravel()], float).reshape(devices.shape)
    else:
        return np.full(devices.shape, np.nan)
    return tokens * cache_bytes_per_token(task.spec.model, 1.0) * element / devices
