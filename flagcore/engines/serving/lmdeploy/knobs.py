"""The knobs of `lmdeploy serve api_server`, its command line, and LMDeploy's defaults.

Sources: lmdeploy 0.18.0 `cli/serve.py`, `cli/utils.py`, `messages.py`, `utils.py` (get_max_batch_size),
`turbomind/parallel_config.py`, `pytorch/engine/executor/base.py`, `src/turbomind/turbomind.cc` (cache budget).
"""

from __future__ import annotations

import numpy as np

from flagcore.domain.space import Columns, FloatArray, IntArray
from flagcore.domain.spec import Task
from flagcore.engines.serving.space import knobs
from flagcore.engines.serving.space.hardware import DP, TP, Hardware
from flagcore.engines.serving.space.knobs import fixed_values, knob, or_default, variant
from flagcore.engines.serving.space.program import Program
from flagcore.engines.serving.space.settings import Settings
from flagcore.engines.serving.space.weights import weight_bytes

BACKEND, CONTEXT, BATCH, BLOCK = "backend", "context_len", "max_batch_size", "block_size"
CACHE, KV, EAGER = "cache_max_entry_count", "kv_cache_type", "enforce_eager"
PREFILL, PER_ITERATION, ITERATIONS = "max_prefill_token_num", "num_tokens_per_iter", "max_prefill_iters"
BACKENDS = ("turbomind", "pytorch")
PYTORCH = BACKENDS.index("pytorch") + 1
KV_BYTES = {"none": 2.0, "int8": 1.0, "int4": 0.5, "fp8": 1.0, "fp8_e5m2": 1.0, "turbo_quant": 3 / 8}
"""Bytes of one cached element, without scales. turbo_quant has 4 bits for keys and 2 for values."""
CODES = {"0": "none", "4": "int4", "8": "int8", "16": "fp8", "17": "fp8_e5m2", "42": "turbo_quant", "fp8_e4m3": "fp8"}
"""Other spellings of cache types in LMDeploy."""
DEFAULT_CACHE, DEFAULT_BLOCK, DEFAULT_PREFILL = 0.8, 64, 8192

KNOBS = (
    knob(
        BACKEND,
        "The inference engine; TurboMind falls back to PyTorch for models that it does not support.",
        kind="word",
        words=BACKENDS,
        auto=fixed_values(*BACKENDS),
    ),
    knobs.INSTANCES_KNOB,
    variant(knobs.TP_KNOB, "tp"),
    variant(
        knobs.DP_KNOB,
        "dp",
        help="Attention data parallelism: groups inside one instance that each hold the attention of some sequences; "
        "TurboMind only.",
    ),
    variant(knobs.EP_KNOB, "ep", help="Devices that share the experts; TurboMind only."),
    variant(knobs.CONTEXT_KNOB, "session-len"),
    knob(
        BATCH,
        "Maximum number of sequences in one iteration.",
        aliases=("max_num_seqs", "max_running_requests"),
        auto=knobs.POWERS_IN_FLIGHT,
        memory_order=1,
    ),
    knob(
        CACHE,
        "Share of the free memory after loading the weights, for the cache.",
        label="cache share",
        kind="share",
        auto=fixed_values(None, "0.9"),
    ),
    knob(
        BLOCK,
        "Tokens of one block of the cache.",
        flags=("cache-block-seq-len",),
        aliases=("cache_block_seq_len", "page_size"),
        auto=fixed_values(64, 128),
    ),
    variant(
        knobs.KV_KNOB,
        "quant-policy",
        words=tuple(KV_BYTES),
        spellings=CODES,
        aliases=("quant_policy",),
        auto=fixed_values("none", "int8"),
    ),
    knob(
        PREFILL,
        "Maximum number of prompt tokens in one iteration.",
        aliases=("max_num_batched_tokens", "chunked_prefill_size"),
        auto=fixed_values(4096, 8192, 16384),
        memory_order=1,
    ),
    knob(PER_ITERATION, "Maximum number of tokens of one forward pass; TurboMind only."),
    knob(ITERATIONS, "Maximum number of forward passes of one prefill; TurboMind only."),
    variant(knobs.PREFIX_KNOB, "enable-prefix-caching", neutral=False, auto=fixed_values(False, True)),
    variant(
        knobs.EAGER_KNOB,
        "eager-mode",
        help="Eager mode: no graph capture, for a faster start and slower serving; PyTorch only.",
    ),
)
BY_NAME = {knob.name: knob for knob in KNOBS}
PROGRAM = Program.read("flagcore.engines.serving.lmdeploy", KNOBS)


def default_batch(task: Task) -> int:
    """Return LMDeploy's default of max_batch_size.

    LMDeploy has a large value for some chips of one vendor by name, otherwise 128 (256 on other device types). All
    named chips compute in fp8 and have at least 70 GiB, which is the condition here.
    """
    hardware = Hardware.of(task)
    return 1024 if hardware.fp8 and hardware.memory_bytes >= 70 * 2**30 else 128


def settings(task: Task, columns: Columns) -> Settings:
    """Return LMDeploy's effective settings for candidates."""
    values = PROGRAM.columns(task, columns)
    pytorch = values[BACKEND] == PYTORCH
    prefill = or_default(values[PREFILL], DEFAULT_PREFILL)
    batch = or_default(values[BATCH], default_batch(task))
    return Settings.of(
        task,
        values,
        max_running=np.maximum(batch // values[DP].clip(1), 1),
        max_batched_tokens=prefill,
        pass_tokens=np.where(pytorch, prefill, np.minimum(or_default(values[PER_ITERATION], 1 << 40), prefill)),
        block_size=or_default(values[BLOCK], DEFAULT_BLOCK),
        graphs=(pytorch & (values[EAGER] == 0)).astype(np.int64),
        cache_bytes=_cache_bytes(task, values, prefill + 2 * batch),
        cache_element_bytes=np.array([KV_BYTES["none"], *KV_BYTES.values()])[values[KV]],
    )


def _cache_bytes(task: Task, get: Columns, buffer_tokens: IntArray) -> FloatArray:
    """Return the bytes of cache of one device: a share of the free memory without the PyTorch engine's logit
    buffers.
    """
    free = Hardware.of(task).memory_bytes - weight_bytes(task) / (get[TP] * get[DP])
    buffers = np.where(get[BACKEND] == PYTORCH, 2.0 * buffer_tokens * task.spec.model.vocab_size, 0.0)
    return knobs.shares(get[CACHE], DEFAULT_CACHE) * np.maximum(free - buffers, 0.0)
