"""LMDeploy, by its own program `lmdeploy serve api_server`: release 0.18, from its documentation and source.

Log lines: lmdeploy 0.18.0 `metrics/loggers.py`, `turbomind/turbomind.py`, `pytorch/config.py` (CacheConfig),
`pytorch/engine/executor/base.py`, `src/turbomind/turbomind.cc`, `src/turbomind/engine/engine.cc`. No server was run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from flagcore.contracts import Workload
from flagcore.domain.candidate import KnobValue
from flagcore.domain.launch import FailurePattern
from flagcore.domain.spec import Spec, Task
from flagcore.domain.trial import TrialState
from flagcore.engines.serving.adapter import Serving
from flagcore.engines.serving.common import engine_args, knobs, metrics, program
from flagcore.engines.serving.common.hardware import DP, EP, TP
from flagcore.engines.serving.common.knobs import count
from flagcore.engines.serving.common.weights import check_directory
from flagcore.engines.serving.engine import PORT, Engine, Server
from flagcore.engines.serving.lmdeploy.knobs import (
    BACKEND,
    BATCH,
    BLOCK,
    CACHE,
    CONTEXT,
    KNOBS,
    PACKAGE,
    PREFILL,
    PREFIX,
    PROGRAM,
    parse_args,
    settings,
)
from flagcore.engines.serving.lmdeploy.rules import merges, rules
from flagcore.engines.serving.load.result import GENERATE


def _ready(spec: Spec) -> None:
    check_directory(spec)
    command = program.found(spec, PROGRAM)
    program.check_version(spec, program.package_version(command[0], PACKAGE))
    parse_args(spec)


def _server(task: Task, values: Mapping[str, KnobValue], cores: tuple[int, ...]) -> Server:
    spec, data = task.spec, count(values, DP)
    if count(values, EP) == 1:  # without EP, tp counts the devices of all attention groups
        values = {**values, TP: count(values, TP) * data}
    argv = [*program.found(spec, PROGRAM), spec.serve.weights or ""]
    argv += ["--server-name", "127.0.0.1", "--server-port", PORT, "--log-level", "INFO", "--max-log-len", "0"]
    argv += knobs.arguments(KNOBS, values)
    argv += engine_args.written(parse_args(spec).others, negated=False)
    return Server(argv=tuple(argv), environment={"HF_HUB_OFFLINE": "1"})


_TURBOMIND = re.compile(r"turbomind engine config:\s+(dtype=.*)")
_PYTORCH = re.compile(r"Building CacheEngine with config:\s+(CacheConfig\(.*)")
_TURBOMIND_FIELDS = {"session_len": CONTEXT, "max_batch_size": BATCH, "tp": TP, "dp": DP, "ep": EP}
_PYTORCH_FIELDS = {
    "max_batches": BATCH,
    "block_size": BLOCK,
    "cache_max_entry_count": CACHE,
    "max_prefill_token_num": PREFILL,
    "enable_prefix_caching": PREFIX,
}

COUNTERS: Mapping[str, str] = {
    "lmdeploy:num_requests_waiting": "requests_waiting",
    "lmdeploy:num_requests_running": "requests_running",
    "lmdeploy:gpu_cache_usage_perc": "cache_usage",
    "lmdeploy:prefix_cache_hit_rate": "cache_hit_rate",
    "lmdeploy:iteration_tokens_total_count": "iterations",
    "lmdeploy:iteration_tokens_total_sum": "iteration_tokens",
    "lmdeploy:prompt_tokens_total": "prompt_tokens",
    "lmdeploy:generation_tokens_total": "output_tokens",
}


def effective(fetch: Callable[[str], str], log: str) -> dict[str, KnobValue]:
    """Return what the log reports of the engine that was chosen."""
    for backend, line, fields in (
        ("pytorch", _PYTORCH.search(log), _PYTORCH_FIELDS),
        ("turbomind", _TURBOMIND.search(log), _TURBOMIND_FIELDS),
    ):
        if line:
            values = dict(re.findall(r"\b(\w+)=([\w.]+)", line[1]))
            found = {knob: _value(values[name]) for name, knob in fields.items() if values.get(name, "None") != "None"}
            return {BACKEND: backend, **found}
    return {}


def memory(log: str) -> dict[str, float]:
    """Return the size of the cache."""
    if line := _PYTORCH.search(log):
        values = dict(re.findall(r"\b(num_gpu_blocks|block_size)=(\d+)", line[1]))
        return {"kv_cache_tokens": float(values["num_gpu_blocks"]) * float(values["block_size"])} if values else {}
    return metrics.largest(log, {"kv_cache_gib": r"Object cache budget: ([\d.]+) MB"}, 1 / 1024)


def _value(text: str) -> KnobValue:
    if text in ("True", "False"):
        return text == "True"
    return int(text) if text.isdigit() else text


FAILURES = (
    FailurePattern(
        pattern=r"torch\.OutOfMemoryError|CUDA out of memory|cudaErrorMemoryAllocation|No enough gpu memory|"
        r"cache out of memory, no request can be admitted",
        state=TrialState.OUT_OF_MEMORY,
        advice="more devices, a smaller cache_max_entry_count, max_batch_size or max_prefill_token_num leaves room",
    ),
    FailurePattern(
        pattern=r"error: (unrecognized arguments|argument |the following arguments are required)",
        state=TrialState.INVALID,
    ),
    FailurePattern(
        pattern=r"no valid parallel config|invalid (quant_policy|tp|dp|ep|cache_max_entry_count|max_prefill_token_num)|"
        r"kernel_block_size must be|block_size must be|kv cache quantization only works|Check failed:",
        state=TrialState.INVALID,
    ),
    FailurePattern(pattern=r"turbomind does not support", state=TrialState.INVALID, advice="use backend pytorch"),
    FailurePattern(pattern=r"[Aa]ddress already in use", state=TrialState.FAILED, advice="the port was in use"),
    FailurePattern(pattern=r"^([A-Za-z_][\w.]*)?(Error|Exception)\b: ", state=TrialState.FAILED),
)


ENGINE = Engine(
    name="lmdeploy",
    title="LMDeploy",
    modules={PACKAGE: "lmdeploy>=0.18,<0.19"},
    knobs=KNOBS,
    parse_args=parse_args,
    ready=_ready,
    version=lambda spec: program.version(spec, PROGRAM, PACKAGE),
    rules=rules,
    merges=merges,
    settings=settings,
    server=_server,
    effective=effective,
    memory=memory,
    counters=COUNTERS,
    failures=FAILURES,
    api=GENERATE,  # its completions take text only
    untested="written from its documentation, no trial has run; times are those of its kernels alone",
)
WORKLOAD: Workload = Serving(ENGINE, f"{__name__}:ENGINE")
