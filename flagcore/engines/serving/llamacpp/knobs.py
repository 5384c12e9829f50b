"""The knobs of llama-server, its command line, and its effective settings.

Flags and defaults: llama.cpp `tools/server/README.md` (00dc8057).
"""

from __future__ import annotations

import math
import os
import sys
from importlib.util import find_spec

import numpy as np

from flagcore.domain.space import Columns, FloatArray, IntArray
from flagcore.domain.spec import Spec, Task
from flagcore.engines.serving.llamacpp.server import AUTO_SLOTS, FLAGS_BY_NAME
from flagcore.engines.serving.space import installed, knobs
from flagcore.engines.serving.space.hardware import INSTANCES, PP, TP, Hardware, longest_request
from flagcore.engines.serving.space.knobs import CONTEXT, Auto, or_default
from flagcore.engines.serving.space.program import EngineArgs, Program
from flagcore.engines.serving.space.settings import Settings
from flagcore.engines.serving.space.weights import cache_bytes_per_token
from flagcore.errors import FlagError, NoDevice, SpecError
from flagcore.spec.models import context_length

PARALLEL, THREADS, BATCH_THREADS = "parallel", "threads", "threads_batch"
N_BATCH, N_UBATCH, FLASH = "batch_size", "ubatch_size", "flash_attention"
SPLIT, LAYERS, UNIFIED = "split_mode", "n_gpu_layers", "kv_unified"
NEED_DRAFT_MODEL = ("draft-simple", "draft-eagle3", "draft-dflash", "draft-dspark")

MAX_SLOTS, SLOT_GRAIN = 256, 256
"""The maximum number of slots, and the multiple to which the context of a slot is rounded up."""
UBATCH, HOST_CACHE_MIB = 512, 8192
"""llama.cpp's defaults."""
PLAIN_KV = ("f32", "f16", "bf16")
PACKAGE = "xllamacpp"


class LlamaProgram(Program):
    """The user's own llama-server of any release, or the embedded server of a wheel, whose flags are checked."""

    def parse(self, spec: Spec) -> EngineArgs:
        engine_args = self.split(spec)
        for name in engine_args.others:
            flag = FLAGS_BY_NAME.get(name)
            self.check([flag.names[-1].lstrip("-") if flag else name], ())
            self.check([name], FLAGS_BY_NAME if spec.serve.command is None else ())
        return engine_args

    def version(self, spec: Spec) -> str:
        wheel = "" if spec.serve.command is not None else installed.package_version(sys.executable, PACKAGE)
        return spec.serve.engine_version or wheel

    def ready(self, spec: Spec) -> None:
        serve = spec.serve
        if serve.weights is None or not os.path.isfile(serve.weights):
            fix = "set the path of a GGUF file; examples/tiny_gguf.py creates a small one"
            problem = "is missing" if serve.weights is None else "is not a file"
            raise SpecError(key="serve.weights", value=serve.weights, problem=problem, fix=fix)
        self.parse(spec)
        if serve.command is not None:
            installed.find_command(spec, serve.command)
        elif find_spec(PACKAGE) is None:
            raise NoDevice(
                f"{PACKAGE} is not installed; pip install 'flagcore[llamacpp]', or set a serve.command such as "
                "[llama-server]"
            )
        else:
            installed.check_version(spec, installed.package_version(sys.executable, PACKAGE))


SLOTS = Auto(
    lambda task: knobs.powers_in_flight(task, count=6, maximum=MAX_SLOTS),
    "six powers of two up to the requests in flight",
)
LAYERS_OF_DEVICES = Auto(
    lambda task: (-1,) if Hardware.of(task).on_cores else (task.spec.model.num_layers + 1,), "all; on cores auto"
)
PROGRAM = LlamaProgram.read("flagcore.engines.serving.llamacpp", {"slots": SLOTS, "layers": LAYERS_OF_DEVICES})
KNOBS = PROGRAM.knobs


def total_context(task: Task) -> int:
    """Return the total context of all slots that `engine_args` fix, 0 if it depends on the slots."""
    others = PROGRAM.parse(task.spec).others
    fixed = others.get("ctx-size", others.get("c"))
    return fixed if isinstance(fixed, int) and not isinstance(fixed, bool) else 0


def slot_context(task: Task, context: int | None) -> int:
    """Return the context of one slot, by default the tokens of the longest request, rounded up."""
    return -(-(context or longest_request(task.spec.serve.loads, task.spec.model.vision)) // SLOT_GRAIN) * SLOT_GRAIN


def slot_share(columns: Columns, total: int) -> IntArray:
    """Return the context of a slot if the total is fixed: an even share, or the total if the cache is unified."""
    slots, on = columns[PARALLEL], PROGRAM.code(UNIFIED, "on")
    is_unified = (columns[UNIFIED] == on) | ((columns[UNIFIED] == 0) & (slots <= 0))
    return np.where(is_unified, total, total // np.maximum(slots, 1))


def host_cache_mib(task: Task) -> float:
    """Return the MiB of evicted prompts that an instance keeps in the memory of the host.

    By default it is 0 for prompts that never repeat, because keeping them only costs time.
    """
    others = PROGRAM.parse(task.spec).others
    own = others.get("cache-ram", others.get("cram"))
    if isinstance(own, int) and not isinstance(own, bool):
        return own if own >= 0 else math.inf
    return HOST_CACHE_MIB if any(load.trace or load.turns > 1 for load in task.spec.serve.loads) else 0


def _trained_context(spec: Spec) -> int | None:
    """Return the trained context of the weights, llama.cpp's default; None if the weights are missing."""
    weights = spec.serve.weights
    try:
        return None if weights is None else context_length(weights)
    except FlagError:
        return None


def settings(task: Task, columns: Columns) -> Settings:
    """Return llama.cpp's effective settings for candidates; a slot is a sequence, a logical batch an iteration."""
    values = PROGRAM.columns(task, columns)
    hardware, total = Hardware.of(task), total_context(task)
    slots, batch = or_default(values[PARALLEL], AUTO_SLOTS), PROGRAM.values(values, N_BATCH)
    context = or_default(values[CONTEXT], slot_context(task, None))
    pool = np.full_like(slots, total) if total else slots * context
    if trained := _trained_context(task.spec):  # shared by all slots if their number is not set
        is_trained_context = (values[PARALLEL] == 0) & (values[CONTEXT] == 0) & (total == 0)
        context, pool = np.where(is_trained_context, trained, context), np.where(is_trained_context, trained, pool)
    element = PROGRAM.element_bytes(values)
    devices = values[TP] * values[PP]
    if hardware.on_cores:
        share = hardware.share(values[INSTANCES])
        devices = np.where(values[THREADS] > 0, np.minimum(values[THREADS], share), share)
    return Settings.of(
        task,
        values,
        devices=devices,
        max_running=slots,
        max_batched_tokens=batch,
        pass_tokens=np.minimum(or_default(values[N_UBATCH], UBATCH), batch),
        context_len=slot_share(values, total) if total else context,
        graphs=np.ones_like(devices),
        cache_bytes=pool * cache_bytes_per_token(task.spec.model, 1.0) * element / devices,
        cache_element_bytes=element,
        on_device=_on_device(task, values[LAYERS]),
        host_tokens=host_cache_mib(task) * 2**20 / (cache_bytes_per_token(task.spec.model, 1.0) * element),
    )


def _on_device(task: Task, layers: IntArray) -> FloatArray:
    """Return the share of the layers on devices, with the output head as the last layer; -1 counts as all."""
    total = task.spec.model.num_layers + 1
    return np.where(layers < 0, 1.0, np.minimum(layers / total, 1.0))
