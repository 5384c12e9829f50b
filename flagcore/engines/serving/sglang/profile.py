"""SGLang, by its own program `sglang.launch_server`: releases 0.5.

Reported settings and log lines: sglang 0.5.23 `srt/entrypoints/http_server.py`, `srt/managers/scheduler.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from flagcore.contracts import Workload
from flagcore.domain.candidate import KnobValue
from flagcore.domain.launch import FailurePattern
from flagcore.domain.spec import Spec, Task
from flagcore.domain.trial import TrialState
from flagcore.engines.serving.adapter import Serving
from flagcore.engines.serving.common import engine_args, knobs, metrics, program
from flagcore.engines.serving.common.hardware import DP, EP, INSTANCES, PP, TP, Hardware
from flagcore.engines.serving.common.knobs import count
from flagcore.engines.serving.common.weights import check_directory
from flagcore.engines.serving.engine import PORT, Engine, PublishedRuns, Server
from flagcore.engines.serving.model.work import Overheads
from flagcore.engines.serving.sglang.knobs import (
    CHUNK,
    CONTEXT,
    EAGER,
    KNOBS,
    KV,
    MEMORY,
    MIXED,
    PACKAGE,
    PAGE,
    POLICY,
    PREFILL,
    PREFIX,
    PROGRAM,
    RUNNING,
    installed_flags,
    parse_args,
    pool_tokens,
    settings,
)
from flagcore.engines.serving.sglang.rules import merges, rules
from flagcore.errors import NoDevice

RECEIVE = "scheduler-recv-interval"

OVERHEADS = Overheads(
    iteration=785e-6,
    sequence=7.99e-6,
    request=40e-3,
    entry=2e-3,
    attention=16e-6,
    latent=14.1e-6,
    ffn=14.1e-6,
    experts={"bf16": 30.8e-6, "fp8": 30.8e-6, "nvfp4": 24.7e-6},
    reduce=5.71e-6,
    reduce_doubling=1.48e-6,
    grouped_share=0.96,
    grouped_work=0.54,
    spread=0.584,
    eager_kernels=48.8,
    eager_experts=17.5,
    eager_latent=24.7,
    mixes=False,
    reserve=0.5,
    activations_beside=True,
)


def _ready(spec: Spec) -> None:
    check_directory(spec)
    command = program.found(spec, PROGRAM)
    installed = program.package_version(command[0], PACKAGE)
    program.check_version(spec, installed)
    if spec.serve.command is None and not installed:
        raise NoDevice(f"SGLang is not installed for {command[0]}; install sglang there, or give a serve.command")
    parse_args(spec)


def _server(task: Task, values: Mapping[str, KnobValue], cores: tuple[int, ...]) -> Server:
    spec, hardware = task.spec, Hardware.of(task)
    others = parse_args(spec).others
    data = count(values, DP)
    ranks = count(values, TP) * data
    argv = [*program.found(spec, PROGRAM), "--model-path", spec.serve.weights or ""]
    argv += ["--host", "127.0.0.1", "--port", PORT, "--enable-metrics"]
    argv += knobs.arguments(KNOBS, {**values, TP: ranks, DP: 1})
    if data > 1:
        own = "attn-dp-size" in installed_flags(spec)
        argv += ["--attn-dp-size", str(data)] if own else ["--dp-size", str(data), "--enable-dp-attention"]
    if hardware.on_cores and "device" not in others:
        argv += ["--device", "cpu"]
    if hardware.on_cores and "max-total-tokens" not in others:
        argv += ["--max-total-tokens", str(pool_tokens(task, count(values, INSTANCES)))]
    argv += engine_args.written(others, negated=False)
    environment = {"HF_HUB_OFFLINE": "1"}
    if cores:
        environment["OMP_NUM_THREADS"] = str(max(1, len(cores) // ranks))
    return Server(argv=tuple(argv), environment=environment)


_INFO = ("/server_info", "/get_server_info")
"""The current path, and that of earlier releases."""
_POOL_LINE = re.compile(r"max_total_num_tokens=.*")
_NUMBERS = {
    "page_size": PAGE,
    "chunked_prefill_size": CHUNK,
    "max_prefill_tokens": PREFILL,
    "pp_size": PP,
    "ep_size": EP,
}
_WORDS = {"kv_cache_dtype": KV, "schedule_policy": POLICY, "enable_mixed_chunk": MIXED}

COUNTERS: Mapping[str, str] = {
    "sglang:num_queue_reqs": "requests_waiting",
    "sglang:num_running_reqs": "requests_running",
    "sglang:token_usage": "cache_usage",
    "sglang:full_token_usage": "cache_usage",
    "sglang:cache_hit_rate": "cache_hit_rate",
    "sglang:num_retracted_reqs": "preemptions",
    "sglang:num_retracted_requests_total": "preemptions",
    "sglang:prompt_tokens_total": "prompt_tokens",
    "sglang:generation_tokens_total": "output_tokens",
}


def effective(fetch: Callable[[str], str], log: str) -> dict[str, KnobValue]:
    """Return the values in the resolved arguments and the log. Raises OSError or ValueError if the server does not
    answer.

    Arguments that SGLang chose stay null; the log line of the memory pool has their values. With attention DP, chunks
    and running requests are reported for one rank and set for all.
    """
    info = _server_info(fetch)
    values: dict[str, KnobValue] = {
        knob: info[name] for name, knob in (_NUMBERS | _WORDS).items() if isinstance(info.get(name), (int, str))
    }
    data = _data(info)
    if isinstance(info.get("tp_size"), int):
        values |= {TP: info["tp_size"] // data, DP: data}
    if isinstance(info.get("chunked_prefill_size"), int):
        values[CHUNK] = info["chunked_prefill_size"] * (data if info["chunked_prefill_size"] > 0 else 1)
    for name, knob, yes in (("disable_radix_cache", PREFIX, False), ("disable_cuda_graph", EAGER, True)):
        if isinstance(info.get(name), bool):
            values[knob] = info[name] is yes
    if isinstance(info.get("mem_fraction_static"), float):
        values[MEMORY] = f"{info['mem_fraction_static']:g}"
    if pool := _POOL_LINE.search(log):
        for name, knob in (("max_running_requests", RUNNING), ("context_len", CONTEXT)):
            if number := re.search(rf"\b{name}=(\d+)", pool[0]):
                values[knob] = int(number[1]) * (data if knob == RUNNING else 1)
    return values


_SIZES = {
    "weights_gib": r"Load weight end\..*mem usage=([\d.]+) GB",
    "graphs_gib": r"[Cc]apture .*graph end\..*mem usage=([\d.]+) GB",
    "kv_cache_tokens": r"max_total_num_tokens=(\d+)",
}
_CACHE_LINE = re.compile(r"KV Cache is allocated\..*?(?:K size: ([\d.]+) GB, V size: ([\d.]+) GB|KV size: ([\d.]+) GB)")


def memory(log: str) -> dict[str, float]:
    """Return what each rank logs of its weights, pools and graphs; its GB are GiB."""
    pools = [sum(float(part) for part in line if part) for line in _CACHE_LINE.findall(log)]
    return metrics.largest(log, _SIZES) | ({"kv_cache_gib": max(pools)} if pools else {})


def _server_info(fetch: Callable[[str], str]) -> dict[str, Any]:
    for path in _INFO[:-1]:
        try:
            return dict(json.loads(fetch(path)))
        except OSError:
            continue
    return dict(json.loads(fetch(_INFO[-1])))


def _data(info: Mapping[str, Any]) -> int:
    """Return the attention DP: a size of its own, or in older releases the number of replicas with its switch."""
    own = info.get("attn_dp_size")
    if isinstance(own, int) and own > 1:
        return own
    return int(info.get("dp_size") or 1) if info.get("enable_dp_attention") else 1


FAILURES = (
    FailurePattern(
        pattern=r"torch\.OutOfMemoryError|CUDA out of memory|(Prefill|Decode) out of memory",
        state=TrialState.OUT_OF_MEMORY,
        advice="a smaller mem_fraction_static, chunked_prefill_size or max_running_requests leaves room",
    ),
    FailurePattern(
        pattern=r"Not enough memory\. Please try to increase --mem-fraction-static",
        state=TrialState.OUT_OF_MEMORY,
        advice="weights leave no room for the cache",
    ),
    FailurePattern(
        pattern=r"operator torchvision::nms does not exist",
        state=TrialState.FAILED,
        advice="this torchvision was built for another torch",
    ),
    FailurePattern(
        pattern=r"error: (unrecognized arguments|argument |the following arguments)", state=TrialState.INVALID
    ),
    FailurePattern(pattern=r"^(\[.*\] )?(AssertionError|ValueError)\b", state=TrialState.INVALID),
    FailurePattern(
        pattern=r"Model architectures .* are not supported|Unsupported architectures", state=TrialState.INVALID
    ),
    FailurePattern(pattern=r"[Aa]ddress already in use", state=TrialState.FAILED, advice="the port was in use"),
    FailurePattern(pattern=r"^(\[.*\] )?([A-Za-z_][\w.]*)?(Error|Exception)\b: ", state=TrialState.FAILED),
    FailurePattern(
        pattern=r"Scheduler hit an exception|Received sigquit from a child process",
        state=TrialState.FAILED,
        advice="the engine died; look for the first error in its log",
    ),
)
"""From specific to general."""


ENGINE = Engine(
    name="sglang",
    title="SGLang",
    modules={PACKAGE: "sglang>=0.5,<0.6"},
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
    overheads=(((0, 0), OVERHEADS),),
    host_times=(10e-3, 0.5e-3),  # measured on 2 cores with 50 million parameters, 4 to 16 clients
    receive_flag=RECEIVE,
    published=PublishedRuns(
        cache_type="fp8_e4m3",
        memory_flag="mem-fraction-static",
        release="0.5.9",
        engine_args={RECEIVE: 30},  # InferenceMAX's recipes
    ),
)
WORKLOAD: Workload = Serving(ENGINE, f"{__name__}:ENGINE")
