"""vLLM, by its own program `vllm serve`: releases 0.11 to 0.33."""

from __future__ import annotations

from collections.abc import Mapping

from flagcore.contracts import Workload
from flagcore.domain.candidate import KnobValue
from flagcore.domain.spec import Task
from flagcore.engines.serving.adapter import Serving
from flagcore.engines.serving.common import knobs, metrics
from flagcore.engines.serving.common.command_line import written
from flagcore.engines.serving.common.hardware import EP, INSTANCES, TP, Hardware
from flagcore.engines.serving.common.knobs import count
from flagcore.engines.serving.engine import GRAPH_TOKENS, PORT, Engine, Fetch, PublishedRuns, Server
from flagcore.engines.serving.model.work import release
from flagcore.engines.serving.vllm import knobs as own
from flagcore.engines.serving.vllm.rules import merges, rules

CACHE_SPACE, THREAD_BINDING = "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND"

MORE_GRAPH_TOKENS, MORE_GRAPHS_SINCE = 1024, (0, 18)
"""The largest captured batch on chips that compute in 4 bits (0.33: `config/vllm.py`). The release follows from
published points: 1,024 tokens took twice as long with 0.17."""


def _server(task: Task, values: Mapping[str, KnobValue], cores: tuple[int, ...]) -> Server:
    command = own.COMMAND_LINE.command(task.spec)
    weights = task.spec.serve.weights or ""
    model = (weights,) if command[-1] == "serve" else ("--model", weights)
    argv = [*command, *model, "--host", "127.0.0.1", "--port", PORT, *knobs.arguments(own.KNOBS, values)]
    if count(values, EP) > 1:
        argv.append("--enable-expert-parallel")
    argv += written(own.parse_args(task.spec).others, negated=True)
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if Hardware.of(task).on_cores:
        environment |= _on_cores(task, values, cores)
    return Server(argv=tuple(argv), environment=environment)


def _on_cores(task: Task, values: Mapping[str, KnobValue], cores: tuple[int, ...]) -> dict[str, str]:
    """Return the variables of vLLM's CPU build: the size of the cache, and the cores of each rank.

    A single rank of a single instance binds itself, as vLLM does: it leaves a core to the API server. Beside others
    each rank needs cores of its own, or vLLM wants a NUMA node a rank and fails.
    """
    instances, ranks, threads = count(values, INSTANCES), count(values, TP), values.get(own.THREADS)
    environment = {}
    if "kv-cache-memory-bytes" not in own.parse_args(task.spec).others:
        environment[CACHE_SPACE] = str(own.cache_gib(task, instances, ranks))
    if instances * ranks > 1 or threads is not None:
        share = max(1, len(cores) // ranks)
        parts = [cores[rank * share : (rank + 1) * share] for rank in range(ranks)]
        used = [part[: threads if isinstance(threads, int) and threads else share] for part in parts]
        environment[THREAD_BINDING] = "|".join(",".join(map(str, part)) for part in used)
    return environment


def _graph_tokens(task: Task) -> int:
    newer = (release(task.spec.serve.engine_version) or MORE_GRAPHS_SINCE) >= MORE_GRAPHS_SINCE
    in_four_bits = "fp4" in task.cluster.groups[0].chip.dense_flops_per_second
    return MORE_GRAPH_TOKENS if newer and in_four_bits else GRAPH_TOKENS


def effective(fetch: Fetch, log: str) -> dict[str, KnobValue]:
    """Return the values in /metrics and the log. Raises OSError if /metrics does not answer.

    `max_num_seqs` is reported only if it was set; block size and memory share come from the cache itself.
    """
    found = metrics.settings(log, own.FILE.settings)
    cache = metrics.labels(fetch("/metrics"), "vllm:cache_config_info")
    if cache.get("block_size", "").isdigit():
        found[own.BLOCK] = int(cache["block_size"])
    if cache.get("enable_prefix_caching") in ("True", "False"):
        found[own.PREFIX] = cache["enable_prefix_caching"] == "True"
    if share := cache.get("gpu_memory_utilization"):
        found[own.MEMORY] = f"{float(share):g}"
    return found


ENGINE = Engine(
    name="vllm",
    title="vLLM",
    modules={"vllm": "vllm>=0.11,<0.34"},
    knobs=own.KNOBS,
    parse_args=own.parse_args,
    ready=own.COMMAND_LINE.ready,
    version=own.COMMAND_LINE.version,
    rules=rules,
    merges=merges,
    settings=own.settings,
    server=_server,
    effective=effective,
    memory=lambda log: metrics.largest(log, own.FILE.memory),
    counters=own.FILE.counters,
    failures=own.FILE.failures,
    overheads=own.FILE.overheads,
    host_times=(2.0e-3, 0.28e-3),  # measured on 2 cores with 50 million parameters, 4 to 16 clients, 5 settings
    graph_tokens=_graph_tokens,
    published=PublishedRuns(cache_type="fp8", memory_flag="gpu-memory-utilization", release="0.17.0"),
)
WORKLOAD: Workload = Serving(ENGINE, f"{__name__}:ENGINE")
