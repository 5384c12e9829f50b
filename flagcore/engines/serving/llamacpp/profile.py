"""llama.cpp: the user's own llama-server, or the server of the xllamacpp wheel behind the same flags."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec

from flagcore.contracts import Workload
from flagcore.domain.candidate import KnobValue
from flagcore.domain.launch import FailurePattern
from flagcore.domain.serving import EngineArg
from flagcore.domain.spec import Spec, Task
from flagcore.domain.trial import TrialState
from flagcore.engines.serving.adapter import Serving
from flagcore.engines.serving.common import knobs, program
from flagcore.engines.serving.common.hardware import INSTANCES, PP, TP
from flagcore.engines.serving.common.knobs import count
from flagcore.engines.serving.engine import PORT, Engine, Server
from flagcore.engines.serving.llamacpp.flags import FLAGS
from flagcore.engines.serving.llamacpp.knobs import (
    AUTO_SLOTS,
    BATCH_THREADS,
    CONTEXT,
    FLASH,
    KNOBS,
    KV,
    LAYERS,
    N_BATCH,
    N_UBATCH,
    PARALLEL,
    SPLIT,
    THREADS,
    UNIFIED,
    parse_args,
    settings,
    slot_context,
    total_context,
)
from flagcore.engines.serving.llamacpp.rules import merges, rules
from flagcore.engines.serving.model.work import Overheads
from flagcore.errors import NoDevice, SpecError

PACKAGE = "xllamacpp"
RUNNER = "flagcore.engines.serving.llamacpp.server"

OVERHEADS = Overheads(iteration=0.5e-3, sequence=50e-6, request=2e-3, attention=0.0, ffn=0.0, eager_kernels=14.0)
"""Estimates: no points of llama.cpp are published in the form of the others."""


def _ready(spec: Spec) -> None:
    serve = spec.serve
    if serve.weights is None or not os.path.isfile(serve.weights):
        fix = "give the path of a GGUF file; examples/tiny_gguf.py makes a small one"
        problem = "is missing" if serve.weights is None else "is not a file"
        raise SpecError(key="serve.weights", value=serve.weights, problem=problem, fix=fix)
    parse_args(spec)
    if serve.command is not None:
        program.found(spec, serve.command)
    elif find_spec(PACKAGE) is None:
        raise NoDevice(
            f"{PACKAGE} is not installed; pip install 'flagcore[llamacpp]', or give a serve.command such as "
            "[llama-server]"
        )
    else:
        program.check_version(spec, program.package_version(sys.executable, PACKAGE))


def version(spec: Spec) -> str:
    """Return the version of the spec, or that of the wheel; a binary of the user's own has none beside it."""
    wheel = "" if spec.serve.command is not None else program.package_version(sys.executable, PACKAGE)
    return spec.serve.engine_version or wheel


def _server(task: Task, values: Mapping[str, KnobValue], cores: tuple[int, ...]) -> Server:
    spec = task.spec
    others = parse_args(spec).others
    embedded = spec.serve.command is None
    command = (sys.executable, "-m", RUNNER) if embedded else program.found(spec, spec.serve.command or ())
    argv = [*command, "--model", spec.serve.weights or "", "--host", "127.0.0.1", "--port", PORT, "--metrics"]
    argv += knobs.arguments([knob for knob in KNOBS if knob.name not in _COMPOSED], values)
    slots, context = _int(values.get(PARALLEL)), _int(values.get(CONTEXT))
    if (slots or context) and not total_context(task):
        argv += ["--ctx-size", str((slots or AUTO_SLOTS) * slot_context(task, context))]
    if values.get(KV) is not None:
        argv += ["--cache-type-k", str(values[KV]), "--cache-type-v", str(values[KV])]
    if values.get(UNIFIED) is not None:
        argv += ["--kv-unified" if values[UNIFIED] == "on" else "--no-kv-unified"]
    if values.get(SPLIT) is None and count(values, TP) > 1:
        argv += ["--split-mode", "row"]
    if values.get(THREADS) is None and cores and count(values, INSTANCES) > 1:
        argv += ["--threads", str(len(cores))]
    if not others.keys() & {"cache-ram", "cram"}:
        argv += ["--cache-ram", "0"]  # prompts of a trial are new, so keeping them in the host's memory only costs
    if embedded and not others.keys() & {"verbosity", "log-verbosity", "lv"}:
        argv += ["--verbosity", "4"]  # the level that logs batch sizes and attention
    argv += [word for name, value in others.items() for word in _flag(name, value)]
    return Server(argv=tuple(argv), environment={"OMP_WAIT_POLICY": "passive"})


_COMPOSED = (CONTEXT, KV, UNIFIED)
"""Knobs that are not a single flag."""


def _flag(name: str, value: EngineArg) -> Sequence[str]:
    """Return a flag of `engine_args` as words: true is a bare flag, false its opposite, unless it takes on and off."""
    flag = next((each for each in FLAGS if any(name == spelt.lstrip("-") for spelt in each.names)), None)
    dashes = "-" if flag is not None and f"-{name}" in flag.names else "--"
    if isinstance(value, bool):
        if flag is not None and (flag.kind == "on/off" or "on" in (flag.words or {})):
            return (dashes + name, "on" if value else "off")
        if value:
            return (dashes + name,)
        return (flag.off[-1],) if flag is not None and flag.off else (f"--no-{name}",)
    return () if value is None else (dashes + name, str(value))


def _int(value: KnobValue) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


COUNTERS: Mapping[str, str] = {
    "llamacpp:requests_deferred": "requests_waiting",
    "llamacpp:requests_processing": "requests_running",
    "llamacpp:n_busy_slots_per_decode": "sequences_per_iteration",
    "llamacpp:n_decode_total": "iterations",
    "llamacpp:prompt_tokens_total": "prompt_tokens",
    "llamacpp:prompt_tokens_cached_total": "prompt_tokens_cached",
    "llamacpp:tokens_predicted_total": "output_tokens",
}

_CONTEXT_LINE = re.compile(r"llama_context: (n_batch|n_ubatch|flash_attn|kv_unified)\s*= (\S+)")
_THREADS_LINE = re.compile(r"system_info: n_threads = (\d+)(?: \(n_threads_batch = (\d+)\))?")
_CACHE_LINE = re.compile(r"llama_kv_cache: size = .* K \((\w+)\):.* V \((\w+)\):")
_OFFLOADED_LINE = re.compile(r"offloaded (\d+)/(\d+) layers to GPU")
_SLOTS_LINE = re.compile(r"kv_unified = '(true|false)'")


def effective(fetch: Callable[[str], str], log: str) -> dict[str, KnobValue]:
    """Return the values in /props and the log, without the later lines of a draft model."""
    props = json.loads(fetch("/props"))
    found: dict[str, KnobValue] = {PARALLEL: int(props["total_slots"])}
    lines = dict(reversed(_CONTEXT_LINE.findall(log)))
    if "n_batch" in lines:
        found |= {N_BATCH: int(lines["n_batch"]), N_UBATCH: int(lines["n_ubatch"])}
    if "flash_attn" in lines:
        found[FLASH] = {"enabled": "on", "disabled": "off"}.get(lines["flash_attn"], lines["flash_attn"])
    if cache := _CACHE_LINE.search(log):
        found[KV] = cache[1] if cache[1] == cache[2] else f"{cache[1]}/{cache[2]}"
    if threads := _THREADS_LINE.search(log):
        found |= {THREADS: int(threads[1]), BATCH_THREADS: int(threads[2] or threads[1])}
    unified = _SLOTS_LINE.search(log)
    if unified:
        found[UNIFIED] = "on" if unified[1] == "true" else "off"
    if unified is None or unified[1] == "false":
        found[CONTEXT] = int(props["default_generation_settings"]["n_ctx"])
    offloaded = _OFFLOADED_LINE.search(log)
    if offloaded and offloaded[1] != offloaded[2]:  # any larger number means all
        found[LAYERS] = int(offloaded[1])
    return found


_BUFFER_LINE = re.compile(r"\b(\w+)\s+(model|KV|compute) buffer size\s*=\s*([\d.]+) MiB")
_KINDS = {"model": "weights_gib", "KV": "kv_cache_gib", "compute": "compute_gib"}
_CELLS_LINE = re.compile(r"llama_kv_cache: size = .*\(\s*(\d+) cells,.*?(\d+)/\d+ seqs\)")


def memory(log: str) -> dict[str, float]:
    """Return the sizes of the buffers of each kind; a unified cache has its cells once for all slots."""
    buffers: dict[tuple[str, str], float] = {}
    for device, kind, size in dict.fromkeys(_BUFFER_LINE.findall(log)):
        buffers[kind, device] = buffers.get((kind, device), 0.0) + float(size) / 1024
    found = {
        _KINDS[kind]: max(size for (other, _), size in buffers.items() if other == kind) for kind, _ in sorted(buffers)
    }
    cells = [int(count) * int(streams) for count, streams in _CELLS_LINE.findall(log)]
    return found | ({"kv_cache_tokens": float(max(cells))} if cells else {})


FAILURES = (
    FailurePattern(
        pattern=r"(cudaMalloc failed|hipMalloc failed): out of memory|insufficient memory \(attempted to allocate|"
        r"failed to allocate (\w+ )?buffer|unable to allocate \w+ buffer|failed to allocate buffer for kv cache|"
        r"ErrorOutOfDeviceMemory",
        state=TrialState.OUT_OF_MEMORY,
        advice="fewer slots, a shorter context_len or a smaller kv_cache_type takes less",
    ),
    FailurePattern(
        pattern=r"quantized V cache requires flash_attn|V cache quantization requires flash_attn",
        state=TrialState.INVALID,
    ),
    FailurePattern(pattern=r"n_seq_max must be <=", state=TrialState.INVALID),
    FailurePattern(pattern=r"GGML_ASSERT\(", state=TrialState.INVALID, advice="llama.cpp does not take these values"),
    FailurePattern(
        pattern=r"error: (invalid argument|unrecognized arguments|argument )|expected value for argument",
        state=TrialState.INVALID,
    ),
    FailurePattern(
        pattern=r"unknown model architecture|failed to open GGUF file|invalid magic|missing tensor|"
        r"wrong number of tensors|tensor '.*' data is not within the file bounds",
        state=TrialState.INVALID,
        advice="llama.cpp cannot read these weights",
    ),
    FailurePattern(pattern=r"couldn't bind HTTP server socket", state=TrialState.FAILED, advice="the port was in use"),
    FailurePattern(pattern=r"\bE (llama|ggml|gguf|srv|cmn)\w*\b.*|^error: ", state=TrialState.FAILED),
)
"""The first match counts: the last lines of a log only report that the model did not load."""


ENGINE = Engine(
    name="llamacpp",
    title="llama.cpp",
    modules={PACKAGE: PACKAGE},
    knobs=KNOBS,
    parse_args=parse_args,
    ready=_ready,
    version=version,
    rules=rules,
    merges=merges,
    settings=settings,
    server=_server,
    effective=effective,
    memory=memory,
    counters=COUNTERS,
    failures=FAILURES,
    split_by=PP,
    overheads=(((0, 0), OVERHEADS),),
    host_times=(1.9e-3, 0.5e-3),  # measured on 2 cores with 50 million parameters, 4 to 16 clients
)
WORKLOAD: Workload = Serving(ENGINE, f"{__name__}:ENGINE")
