"""The knobs of llama-server, what `engine_args` may hold, and what follows from both.

Flags and defaults: llama.cpp `tools/server/README.md` (00dc8057).
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

import numpy as np

from flagcore.domain.candidate import KnobValue
from flagcore.domain.serving import EngineArg
from flagcore.domain.space import Columns, FloatArray, IntArray
from flagcore.domain.spec import Spec, Task
from flagcore.engines.serving.llamacpp.flags import FLAGS, KV_TYPES, SPLIT_MODES
from flagcore.engines.serving.common import knobs
from flagcore.engines.serving.common.names import INSTANCES, PP, TP
from flagcore.engines.serving.engine import Settings
from flagcore.engines.serving.common.knobs import FLAG, WORD, Knob, column, powers_of_two
from flagcore.engines.serving.common.place import Place, longest, most_in_flight
from flagcore.engines.serving.common.sizes import cache_bytes_per_token
from flagcore.errors import FlagError, SpecError
from flagcore.spec import gguf

PARALLEL, CONTEXT, THREADS, BATCH_THREADS = "parallel", "context_len", "threads", "threads_batch"
N_BATCH, N_UBATCH, FLASH, KV = "batch_size", "ubatch_size", "flash_attention", "kv_cache_type"
SPLIT, LAYERS, UNIFIED, PREFIX = "split_mode", "n_gpu_layers", "kv_unified", "enable_prefix_caching"


OURS: Mapping[str, str] = {
    "model": "serve.weights names it",
    "host": "servers listen on this machine only",
    "port": "each trial has a free one of its own",
    "metrics": "it is always on: figures of a trial are read there",
    "props": "nobody but flagcore asks the server of a trial",
    "slots": "it is always on",
    "log-disable": "values are read back from the log",
    "log-file": "the log is kept in the trial's folder",
}
"""Flags that flagcore gives itself, and why the user cannot."""
AUTO_SLOTS, MOST_SLOTS, SLOT_GRAIN = 4, 256, 256
"""Slots if nobody sets them, the most that llama.cpp takes, and what the context of a slot is rounded up to."""
BATCH, UBATCH = 2048, 512
"""llama.cpp's defaults."""
KV_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32, "q4_1": 20 / 32}
KV_BYTES |= {"q4_0": 18 / 32, "iq4_nl": 18 / 32}
"""Bytes of one cached element: blocks of 32 with their scales (ggml `ggml-common.h`)."""
PLAIN_KV = ("f32", "f16", "bf16")


def _devices(task: Task) -> tuple[int, ...]:
    place = Place.of(task)
    return (1,) if place.on_cores else knobs.divisors(place.cards)


def _slots(task: Task) -> tuple[int, ...]:
    """Return powers of two up to the requests in flight, the last six."""
    most = max(1, most_in_flight(task.spec.serve.loads))
    return powers_of_two(1, min(MOST_SLOTS, 1 << (most - 1).bit_length()))[-6:]


def _threads(task: Task) -> tuple[KnobValue, ...]:
    place = Place.of(task)
    return knobs.divisors(place.cards) if place.on_cores else (None,)


def _layers(task: Task) -> tuple[int, ...]:
    layers = task.spec.model.num_layers
    return (-1,) if Place.of(task).on_cores else (layers + 1,)


KNOBS = (
    Knob(name=INSTANCES, neutral=1, auto=knobs.instances),
    Knob(name=TP, neutral=1, auto=_devices),
    knobs.UNEQUAL,
    Knob(name=PP, neutral=1, auto=_devices),
    Knob(
        name=SPLIT,
        kind=WORD,
        words=SPLIT_MODES,
        flags=("split-mode",),
        auto=lambda task: (None,) if Place.of(task).on_cores else (None, "layer", "row"),
    ),
    Knob(
        name=LAYERS,
        neutral=-1,
        codes={"auto": -1, "all": 9999},
        flags=("n-gpu-layers", "gpu-layers", "ngl"),
        auto=_layers,
    ),
    Knob(
        name=PARALLEL,
        flags=("parallel", "np", "max-num-seqs"),
        meant=("max_num_seqs", "max_running_requests"),
        auto=_slots,
    ),
    Knob(name=CONTEXT, auto=lambda task: (None,), flags=("max-model-len",)),
    Knob(name=THREADS, flags=("threads", "t"), auto=_threads),
    Knob(name=BATCH_THREADS, flags=("threads-batch", "tb"), auto=lambda task: (None, *_threads(task))),
    Knob(
        name=N_BATCH,
        flags=("batch-size", "b"),
        meant=("max_num_batched_tokens", "chunked_prefill_size"),
        auto=lambda task: (512, 2048),
    ),
    Knob(name=N_UBATCH, flags=("ubatch-size", "ub"), auto=lambda task: (128, 512, 2048)),
    Knob(name=FLASH, kind=WORD, words=("on", "off", "auto"), flags=("flash-attn", "fa"), auto=lambda _: ("on", "off")),
    Knob(name=KV, kind=WORD, words=KV_TYPES, auto=lambda task: ("f16", "q8_0")),
    Knob(name=UNIFIED, kind=WORD, words=("on", "off"), auto=lambda task: ("on", "off")),
    Knob(
        name=PREFIX,
        kind=FLAG,
        neutral=True,
        flags=("cache-prompt",),
        off=("no-cache-prompt",),
        auto=lambda task: (True, False),
    ),
)
"""`context_len` is that of one slot, for llama.cpp counts all of them together; `kv_cache_type` is of keys and values.
"""
BY_NAME = {knob.name: knob for knob in KNOBS}


def fixed_arguments(spec: Spec) -> tuple[dict[str, KnobValue], dict[str, EngineArg]]:
    """Return the knobs that `engine_args` fix, and the other flags. Raises SpecError for one that cannot be given.

    Flags are known where the wheel serves; a user's own llama-server may be of any age, so its own word counts.
    """
    fixed, others = knobs.split_arguments(spec.serve.engine_args, KNOBS)
    known = {name.lstrip("-"): flag for flag in FLAGS for name in (*flag.names, *flag.off)}
    for name in others:
        key = f"serve.engine_args.{name}"
        spelt = known[name].names[-1].lstrip("-") if name in known else name
        reason = OURS.get(name) or OURS.get(spelt) or OURS.get(name.removeprefix("no-"))
        if reason:
            raise SpecError(key=key, problem=f"is a flag that flagcore gives itself: {reason}", fix="leave it out")
        if spec.serve.command is None and name not in known:
            near = get_close_matches(name, known, n=1)
            fix = f"did you mean {near[0]}?" if near else "leave it out, or give a serve.command that knows it"
            raise SpecError(key=key, problem="is no flag of the embedded llama-server", fix=fix)
    return fixed, others


def total_context(task: Task) -> int:
    """Return the context of all slots that `engine_args` fix; 0 where it follows from the slots."""
    others = fixed_arguments(task.spec)[1]
    given = others.get("ctx-size", others.get("c"))
    return given if isinstance(given, int) and not isinstance(given, bool) else 0


def slot_context(task: Task, context: int | None) -> int:
    """Return the context of one slot: what a candidate sets, else room for the longest request, rounded up."""
    return -(-(context or longest(task.spec.serve.loads)) // SLOT_GRAIN) * SLOT_GRAIN


def slot_share(columns: Columns, total: int) -> IntArray:
    """Return what a slot has of a fixed total context: a share, or all where the cache is unified."""
    slots, on = columns[PARALLEL], BY_NAME[UNIFIED].words.index("on") + 1
    whole = (columns[UNIFIED] == on) | ((columns[UNIFIED] == 0) & (slots <= 0))
    share: IntArray = np.where(whole, total, total // np.maximum(slots, 1))
    return share


def trained_context(spec: Spec) -> int | None:
    """Return the context that the weights were trained for, llama.cpp's own choice; None where they are not at hand."""
    weights = spec.serve.weights
    try:
        return None if weights is None else gguf.context_length(weights)
    except FlagError:
        return None


def settings(task: Task, columns: Columns) -> Settings:
    """Return what llama.cpp makes of candidates. Slots are sequences; an iteration is a logical batch."""
    fixed, _ = fixed_arguments(task.spec)
    get = {knob.name: column(columns, knob, fixed) for knob in KNOBS}
    place, total = Place.of(task), total_context(task)
    slots = np.where(get[PARALLEL] > 0, get[PARALLEL], AUTO_SLOTS)
    batch = np.where(get[N_BATCH] > 0, get[N_BATCH], BATCH)
    context = np.where(get[CONTEXT] > 0, get[CONTEXT], slot_context(task, None))
    pool = np.full_like(slots, total) if total else slots * context
    if trained := trained_context(task.spec):  # what all slots share if nobody sets their number
        own = (get[PARALLEL] == 0) & (get[CONTEXT] == 0) & (total == 0)
        context, pool = np.where(own, trained, context), np.where(own, trained, pool)
    element = np.array([KV_BYTES["f16"], *(KV_BYTES[name] for name in KV_TYPES)])[get[KV]]
    devices = get[TP] * get[PP]
    if place.on_cores:
        share = place.share(get[INSTANCES], columns)
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
