"""The knobs of `lmdeploy serve api_server`, its `engine_args`, and the values that LMDeploy fills in.

Sources: lmdeploy 0.18.0 `cli/serve.py`, `cli/utils.py`, `messages.py`, `utils.py` (get_max_batch_size),
`turbomind/parallel_config.py`, `pytorch/engine/executor/base.py`, `src/turbomind/turbomind.cc` (cache budget).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from flagcore.domain.knob import Flag, Knob
from flagcore.domain.space import Columns, FloatArray, IntArray
from flagcore.domain.spec import Spec, Task
from flagcore.engines.serving.common import engine_args, knobs
from flagcore.engines.serving.common.hardware import DP, EP, INSTANCES, TP, Hardware, longest
from flagcore.engines.serving.common.weights import weight_bytes
from flagcore.engines.serving.engine import Settings

PROGRAM = ("lmdeploy", "serve", "api_server")
PACKAGE = "lmdeploy"
FLAG_FILES = ("lmdeploy/cli/serve.py", "lmdeploy/cli/utils.py")
RESERVED: Mapping[str, str] = {
    "model-path": "serve.weights sets it",
    "server-name": "servers listen on this machine only",
    "server-port": "each trial uses a free port",
    "api-keys": "the load client sends no key, and servers listen on this machine only",
    "ssl": "the load client uses plain HTTP",
    "disable-metrics": "flagcore reads /metrics",
    "log-level": "flagcore reads the log",
    "max-log-len": "prompts are not logged",
    "proxy-url": "an instance is one server",
    "nnodes": "an instance is one server on one machine",
    "node-rank": "an instance is one server on one machine",
}
"""Flags that the user cannot set, and why."""

BACKEND, CONTEXT, BATCH, CACHE, BLOCK = (
    "backend",
    "context_len",
    "max_batch_size",
    "cache_max_entry_count",
    "block_size",
)
KV, PREFIX, EAGER = "kv_cache_type", "enable_prefix_caching", "enforce_eager"
PREFILL, PER_ITERATION, ITERATIONS = "max_prefill_token_num", "num_tokens_per_iter", "max_prefill_iters"
BACKENDS = ("turbomind", "pytorch")
PYTORCH = BACKENDS.index("pytorch") + 1
KV_BYTES = {"none": 2.0, "int8": 1.0, "int4": 0.5, "fp8": 1.0, "fp8_e5m2": 1.0, "turbo_quant": 3 / 8}
"""Bytes of one cached element, without scales. turbo_quant has 4 bits for keys and 2 for values."""
CODES = {"0": "none", "4": "int4", "8": "int8", "16": "fp8", "17": "fp8_e5m2", "42": "turbo_quant", "fp8_e4m3": "fp8"}
"""LMDeploy's other spellings of the same."""
DEFAULT_CACHE, DEFAULT_BLOCK, DEFAULT_PREFILL = 0.8, 64, 8192

KNOBS = (
    Knob(
        name=BACKEND,
        help="The inference engine; TurboMind falls back to PyTorch for models that it does not support.",
        kind="word",
        words=BACKENDS,
        flags=(Flag(name="backend"),),
        auto=lambda task: BACKENDS,
        auto_help="turbomind, pytorch",
    ),
    knobs.INSTANCES_KNOB,
    knobs.with_flags(knobs.TP_KNOB, "tp"),
    knobs.SIZES_KNOB,
    replace(
        knobs.with_flags(knobs.DP_KNOB, "dp"),
        help="Attention data parallelism: groups inside one instance that each hold the attention of some sequences; "
        "TurboMind only.",
    ),
    replace(knobs.with_flags(knobs.EP_KNOB, "ep"), help="Devices that share the experts; TurboMind only."),
    knobs.with_flags(knobs.CONTEXT_KNOB, "session-len"),
    Knob(
        name=BATCH,
        help="Most sequences in one iteration.",
        flags=(Flag(name="max-batch-size"),),
        aliases=("max_num_seqs", "max_running_requests"),
        auto=lambda task: knobs.in_flight(task, last=4),
        auto_help="four powers of two up to the requests in flight",
        memory_order=1,
    ),
    Knob(
        name=CACHE,
        help="Share of the memory that weights leave free, for the cache.",
        label="cache share",
        kind="share",
        flags=(Flag(name="cache-max-entry-count"),),
        auto=lambda task: (None, "0.9"),
        auto_help="not set, 0.9",
    ),
    Knob(
        name=BLOCK,
        help="Tokens of one block of the cache.",
        flags=(Flag(name="cache-block-seq-len"),),
        aliases=("cache_block_seq_len", "page_size"),
        auto=lambda task: (64, 128),
        auto_help="64, 128",
    ),
    replace(
        knobs.with_flags(knobs.KV_KNOB, "quant-policy"),
        words=tuple(KV_BYTES),
        spellings=CODES,
        aliases=("quant_policy",),
        auto=lambda task: ("none", "int8"),
        auto_help="none, int8",
    ),
    Knob(
        name=PREFILL,
        help="Most prompt tokens in one iteration.",
        flags=(Flag(name="max-prefill-token-num"),),
        aliases=("max_num_batched_tokens", "chunked_prefill_size"),
        auto=lambda task: (4096, 8192, 16384),
        auto_help="4096, 8192, 16384",
        memory_order=1,
    ),
    Knob(
        name=PER_ITERATION,
        help="Most tokens of one forward pass; TurboMind only.",
        flags=(Flag(name="num-tokens-per-iter"),),
        auto=lambda task: (None,),
        auto_help="not set",
    ),
    Knob(
        name=ITERATIONS,
        help="Most forward passes of one prefill; TurboMind only.",
        flags=(Flag(name="max-prefill-iters"),),
        auto=lambda task: (None,),
        auto_help="not set",
    ),
    replace(
        knobs.with_flags(knobs.PREFIX_KNOB, "enable-prefix-caching"), neutral=False, auto=lambda task: (False, True)
    ),
    replace(
        knobs.with_flags(knobs.EAGER_KNOB, "eager-mode"),
        help="Eager mode: no graph capture, for a faster start and slower serving; PyTorch only.",
    ),
)
BY_NAME = {knob.name: knob for knob in KNOBS}


def parse_args(spec: Spec) -> knobs.EngineArgs:
    """Return the knobs that `engine_args` fix, and the other flags. Raises SpecError."""
    found = knobs.split_arguments(spec.serve.engine_args, KNOBS)
    known = engine_args.installed_flags(spec, PROGRAM, FLAG_FILES) if found.others else ()
    engine_args.check(found.others, RESERVED, known, "LMDeploy")
    return found


def default_batch(task: Task) -> int:
    """Return LMDeploy's own max_batch_size.

    LMDeploy decides by the names of chips of one vendor, others have 128 (256 on other device types); here chips that
    compute in fp8 on at least 70 GiB have the largest size, as all of those names do.
    """
    hardware = Hardware.of(task)
    return 1024 if hardware.fp8 and hardware.memory_bytes >= 70 * 2**30 else 128


def settings(task: Task, columns: Columns) -> Settings:
    """Return what LMDeploy does with candidates."""
    get = knobs.all_columns(columns, KNOBS, parse_args(task.spec).fixed)
    ranks, pytorch = get[TP] * get[DP], get[BACKEND] == PYTORCH
    ones = np.ones_like(ranks)
    prefill = _or_default(get[PREFILL], DEFAULT_PREFILL)
    batch = _or_default(get[BATCH], default_batch(task))
    element = np.array([KV_BYTES["none"], *KV_BYTES.values()])[get[KV]]
    return Settings(
        instances=get[INSTANCES],
        devices=ranks,
        tensor=get[TP],
        pipeline=ones,
        data=get[DP],
        expert=get[EP],
        max_running=np.maximum(batch // get[DP].clip(1), 1),
        max_batched_tokens=prefill,
        pass_tokens=np.where(pytorch, prefill, np.minimum(_or_default(get[PER_ITERATION], 1 << 40), prefill)),
        block_size=_or_default(get[BLOCK], DEFAULT_BLOCK),
        context_len=_or_default(get[CONTEXT], longest(task.spec.serve.loads)),
        chunked=ones,
        graphs=(pytorch & (get[EAGER] == 0)).astype(np.int64),
        prefix_caching=get[PREFIX],
        memory_fraction=np.full(ranks.shape, np.nan),
        cache_bytes=_cache_bytes(task, get, ranks, prefill + 2 * batch),
        cache_element_bytes=element,
    )


def _cache_bytes(task: Task, get: Columns, ranks: IntArray, buffer_tokens: IntArray) -> FloatArray:
    """Return the bytes of cache of one device: a share of the free memory, less the PyTorch engine's logit buffers."""
    free = Hardware.of(task).memory_bytes - weight_bytes(task) / ranks
    buffers = np.where(get[BACKEND] == PYTORCH, 2.0 * buffer_tokens * task.spec.model.vocab_size, 0.0)
    return knobs.shares(get[CACHE], DEFAULT_CACHE) * np.maximum(free - buffers, 0.0)


def _or_default(codes: IntArray, default: int) -> IntArray:
    return np.where(codes > 0, codes, default)
