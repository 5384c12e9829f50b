"""The knobs of llama-server, what `engine_args` may hold, and what follows from both.

Flags and defaults: llama.cpp `tools/server/README.md` (00dc8057).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from flagcore.domain.candidate import KnobValue
from flagcore.domain.knob import Flag, Knob
from flagcore.domain.space import Columns, FloatArray, IntArray
from flagcore.domain.spec import Spec, Task
from flagcore.engines.serving.common import engine_args, knobs
from flagcore.engines.serving.common.hardware import INSTANCES, PP, TP, Hardware, longest
from flagcore.engines.serving.common.weights import cache_bytes_per_token
from flagcore.engines.serving.engine import Settings
from flagcore.engines.serving.llamacpp.flags import FLAGS, KV_TYPES, SPLIT_MODES
from flagcore.errors import FlagError
from flagcore.spec import gguf

PARALLEL, CONTEXT, THREADS, BATCH_THREADS = "parallel", "context_len", "threads", "threads_batch"
N_BATCH, N_UBATCH, FLASH, KV = "batch_size", "ubatch_size", "flash_attention", "kv_cache_type"
SPLIT, LAYERS, UNIFIED, PREFIX = "split_mode", "n_gpu_layers", "kv_unified", "enable_prefix_caching"

RESERVED: Mapping[str, str] = {
    **engine_args.RESERVED,
    "model": "serve.weights sets it",
    "metrics": "flagcore reads /metrics",
    "props": "only flagcore sends requests to the server of a trial",
    "slots": "it is always on",
    "log-disable": "flagcore reads the log",
    "log-file": "the log is in the folder of the trial",
}
"""Flags that the user cannot set, and why."""
AUTO_SLOTS, MAX_SLOTS, SLOT_GRAIN = 4, 256, 256
"""Default slots, the most that llama.cpp takes, and the step to which the context of a slot is rounded up."""
BATCH, UBATCH = 2048, 512
"""llama.cpp's defaults."""
KV_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32, "q4_1": 20 / 32}
KV_BYTES |= {"q4_0": 18 / 32, "iq4_nl": 18 / 32}
"""Bytes of one cached element: blocks of 32 with their scales (ggml `ggml-common.h`)."""
PLAIN_KV = ("f32", "f16", "bf16")


def _threads(task: Task) -> tuple[KnobValue, ...]:
    return knobs.divisors(task) if Hardware.of(task).on_cores else (None,)


def _not_on_cores(task: Task) -> tuple[int, ...]:
    return (1,) if Hardware.of(task).on_cores else knobs.divisors(task)


KNOBS = (
    knobs.INSTANCES_KNOB,
    replace(
        knobs.TP_KNOB,
        help="Devices that split each layer's matrices by rows.",
        auto=_not_on_cores,
        auto_help="divisors of the devices; on cores 1",
    ),
    knobs.SIZES_KNOB,
    replace(knobs.PP_KNOB, auto=_not_on_cores, auto_help="divisors of the devices; on cores 1"),
    Knob(
        name=SPLIT,
        help="How devices split a model: whole layers, rows of matrices, or rows and the cache (tensor).",
        label="split",
        kind="word",
        words=SPLIT_MODES,
        flags=(Flag(name="split-mode"),),
        auto=knobs.by_hardware((None,), (None, "layer", "row")),
        auto_help="not set, layer, row; on cores not set",
    ),
    Knob(
        name=LAYERS,
        help="Layers on the device, counting the output head as one; `auto` is -1, `all` is 9999. With fewer than all, "
        "memory is predicted and time is not.",
        label="GPU layers",
        neutral=-1,
        minimum=-1,
        spellings={"auto": -1, "all": 9999},
        flags=(Flag(name="n-gpu-layers"), Flag(name="gpu-layers"), Flag(name="ngl")),
        auto=lambda task: (-1,) if Hardware.of(task).on_cores else (task.spec.model.num_layers + 1,),
        auto_help="all; on cores auto",
    ),
    Knob(
        name=PARALLEL,
        help="Slots: most sequences at once. If not set, 4 slots share one cache.",
        flags=(Flag(name="parallel"), Flag(name="np"), Flag(name="max-num-seqs")),
        aliases=("max_num_seqs", "max_running_requests"),
        auto=lambda task: knobs.in_flight(task, last=6, most=MAX_SLOTS),
        auto_help="six powers of two up to the requests in flight",
        memory_order=1,
    ),
    replace(
        knobs.CONTEXT_KNOB,
        help="Tokens of one sequence, prompt and answer, in one slot: `--ctx-size` is this times the slots.",
        flags=(Flag(name="max-model-len"),),
    ),
    Knob(
        name=THREADS,
        help="Threads of an instance for answers.",
        flags=(Flag(name="threads"), Flag(name="t")),
        auto=_threads,
        auto_help="on cores their divisors; else not set",
    ),
    Knob(
        name=BATCH_THREADS,
        help="Threads of an instance for prompts; if not set, as `threads`.",
        flags=(Flag(name="threads-batch"), Flag(name="tb")),
        auto=lambda task: (None, *_threads(task)),
        auto_help="as threads, and not set",
    ),
    Knob(
        name=N_BATCH,
        help="Most tokens of one iteration.",
        flags=(Flag(name="batch-size"), Flag(name="b")),
        aliases=("max_num_batched_tokens", "chunked_prefill_size"),
        auto=lambda task: (512, 2048),
        auto_help="512, 2048",
        memory_order=1,
    ),
    Knob(
        name=N_UBATCH,
        help="Most tokens of one pass through the model; an iteration may have several.",
        flags=(Flag(name="ubatch-size"), Flag(name="ub")),
        auto=lambda task: (128, 512, 2048),
        auto_help="128, 512, 2048",
        memory_order=1,
    ),
    Knob(
        name=FLASH,
        help="Fused attention.",
        label="flash attention",
        kind="word",
        words=("on", "off", "auto"),
        flags=(Flag(name="flash-attn"), Flag(name="fa")),
        auto=lambda task: ("on", "off"),
        auto_help="on, off",
    ),
    replace(knobs.KV_KNOB, words=KV_TYPES, auto=lambda task: ("f16", "q8_0"), auto_help="f16, q8_0"),
    Knob(
        name=UNIFIED,
        help="One cache that all slots share, instead of one for each.",
        label="unified KV cache",
        kind="word",
        words=("on", "off"),
        auto=lambda task: ("on", "off"),
        auto_help="on, off",
    ),
    knobs.with_flags(knobs.PREFIX_KNOB, "cache-prompt", off="no-cache-prompt"),
)
BY_NAME = {knob.name: knob for knob in KNOBS}


def parse_args(spec: Spec) -> knobs.EngineArgs:
    """Return the knobs that `engine_args` fix, and the other flags. Raises SpecError.

    Flags are checked for the embedded server only: a user's own llama-server may be of any release.
    """
    found = knobs.split_arguments(spec.serve.engine_args, KNOBS)
    known = {name.lstrip("-"): flag for flag in FLAGS for name in (*flag.names, *flag.off)}
    for name in found.others:
        spelt = known[name].names[-1].lstrip("-") if name in known else name
        engine_args.check([spelt], RESERVED, (), "llama-server")
        engine_args.check([name], RESERVED, known if spec.serve.command is None else (), "embedded llama-server")
    return found


def total_context(task: Task) -> int:
    """Return the context of all slots that `engine_args` fix; 0 where it follows from the slots."""
    others = parse_args(task.spec).others
    given = others.get("ctx-size", others.get("c"))
    return given if isinstance(given, int) and not isinstance(given, bool) else 0


def slot_context(task: Task, context: int | None) -> int:
    """Return the context of one slot: as set, else that of the longest request, rounded up."""
    return -(-(context or longest(task.spec.serve.loads)) // SLOT_GRAIN) * SLOT_GRAIN


def slot_share(columns: Columns, total: int) -> IntArray:
    """Return the context of a slot with a fixed total: a share, or all if the cache is unified."""
    slots, on = columns[PARALLEL], knobs.code(BY_NAME[UNIFIED], "on")
    whole = (columns[UNIFIED] == on) | ((columns[UNIFIED] == 0) & (slots <= 0))
    return np.where(whole, total, total // np.maximum(slots, 1))


def trained_context(spec: Spec) -> int | None:
    """Return the context that the weights were trained for, llama.cpp's default choice; None if they are missing."""
    weights = spec.serve.weights
    try:
        return None if weights is None else gguf.context_length(weights)
    except FlagError:
        return None


def settings(task: Task, columns: Columns) -> Settings:
    """Return what llama.cpp does with candidates. Slots are sequences; an iteration is a logical batch."""
    get = knobs.all_columns(columns, KNOBS, parse_args(task.spec).fixed)
    hardware, total = Hardware.of(task), total_context(task)
    slots = np.where(get[PARALLEL] > 0, get[PARALLEL], AUTO_SLOTS)
    batch = np.where(get[N_BATCH] > 0, get[N_BATCH], BATCH)
    context = np.where(get[CONTEXT] > 0, get[CONTEXT], slot_context(task, None))
    pool = np.full_like(slots, total) if total else slots * context
    if trained := trained_context(task.spec):  # shared by all slots if their number is not set
        own = (get[PARALLEL] == 0) & (get[CONTEXT] == 0) & (total == 0)
        context, pool = np.where(own, trained, context), np.where(own, trained, pool)
    element = np.array([KV_BYTES["f16"], *(KV_BYTES[name] for name in KV_TYPES)])[get[KV]]
    devices = get[TP] * get[PP]
    if hardware.on_cores:
        share = hardware.share(get[INSTANCES], columns)
        devices = np.where(get[THREADS] > 0, np.minimum(get[THREADS], share), share)
    ones = np.ones_like(devices)
    return Settings(
        instances=get[INSTANCES],
        devices=devices,
        tensor=get[TP],
        pipeline=get[PP],
        data=ones,
        expert=ones,
        max_running=slots,
        max_batched_tokens=batch,
        pass_tokens=np.minimum(np.where(get[N_UBATCH] > 0, get[N_UBATCH], UBATCH), batch),
        block_size=ones,
        context_len=slot_share(get, total) if total else context,
        chunked=ones,
        graphs=ones,
        prefix_caching=get[PREFIX],
        memory_fraction=np.full(devices.shape, np.nan),
        cache_bytes=pool * cache_bytes_per_token(task.spec.model, 1.0) * element / devices,
        cache_element_bytes=element,
        on_device=_on_device(task, get[LAYERS]),
    )


def _on_device(task: Task, layers: IntArray) -> FloatArray:
    """Return the share of the layers that devices have: the output head comes last, and -1 is as many as fit."""
    every = task.spec.model.num_layers + 1
    return np.where(layers < 0, 1.0, np.minimum(layers / every, 1.0))
