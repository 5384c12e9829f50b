"""SGLang, by its own program `sglang.launch_server`: releases 0.5."""

from __future__ import annotations

from collections.abc import Mapping

from flagcore.contracts import Workload
from flagcore.domain.candidate import KnobValue
from flagcore.domain.spec import Spec, Task
from flagcore.engines.serving.adapter import Serving
from flagcore.engines.serving.common import engine_args, knobs, program
from flagcore.engines.serving.common.hardware import Hardware
from flagcore.engines.serving.common.knobs import count
from flagcore.engines.serving.common.names import DP, INSTANCES, TP
from flagcore.engines.serving.common.weights import check_directory
from flagcore.engines.serving.engine import PORT, Engine, PublishedRuns, Server
from flagcore.engines.serving.model.work import Overheads
from flagcore.engines.serving.sglang import reading
from flagcore.engines.serving.sglang.knobs import (
    KNOBS,
    PACKAGE,
    PROGRAM,
    installed_flags,
    parse_args,
    pool_tokens,
    settings,
    version_of,
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


ENGINE = Engine(
    name="sglang",
    title="SGLang",
    modules={PACKAGE: "sglang>=0.5,<0.6"},
    knobs=KNOBS,
    parse_args=parse_args,
    ready=_ready,
    version=version_of,
    rules=rules,
    merges=merges,
    settings=settings,
    server=_server,
    effective=reading.effective,
    memory=reading.memory,
    counters=reading.COUNTERS,
    failures=reading.FAILURES,
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
