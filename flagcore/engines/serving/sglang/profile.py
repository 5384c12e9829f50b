"""SGLang (`sglang.launch_server`), releases 0.4 and 0.5.

Sources: sglang 0.5.23 `srt/entrypoints/http_server.py` (reported settings), `srt/arg_groups/` (rules).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from flagcore.domain.knob import in_versions
from flagcore.domain.space import KnobValue, Merge, Rule
from flagcore.domain.spec import Task
from flagcore.engines.serving.engine import Engine
from flagcore.engines.serving.launch.server import (
    HEAD,
    HEAD_PORT,
    PORT,
    TRANSFER_PORT,
    URL,
    Instance,
    Router,
    address,
)
from flagcore.engines.serving.load.routing import BOOTSTRAP
from flagcore.engines.serving.load.routing import PREFILL as PREFILLS
from flagcore.engines.serving.sglang import REPORTS
from flagcore.engines.serving.sglang import knobs as own
from flagcore.engines.serving.sglang.knobs import CHUNK, PAGE, PREFILL, PROGRAM, chunk_sizes
from flagcore.engines.serving.space import knobs, placement, rules
from flagcore.engines.serving.space.hardware import (
    DP,
    EP,
    INSTANCES,
    PP,
    PREFILL_DECODE,
    TP,
    Hardware,
    count,
    longest_request,
)
from flagcore.engines.serving.space.knobs import BACKEND, BALANCING, DRAFTED, EAGER, SPECULATION, TRANSFER
from flagcore.engines.serving.space.program import as_words
from flagcore.engines.serving.space.settings import PublishedRuns

RECEIVE = "scheduler-recv-interval"
ATTENTION_DP = ">=0.5.22"
"""The releases with attn-dp-size; they still accept the earlier spelling."""
EXPERT_SWITCH = "<0.4.10"
"""The releases in which expert parallelism is a switch: all devices of the server share the experts."""
LONGEST_PREFIX_FIRST = "<0.4.3.post4"
"""The releases whose default order of waiting requests is `lpm`."""


def _server(task: Task, values: Mapping[str, KnobValue], cores: tuple[int, ...]) -> Instance:
    spec, hardware = task.spec, Hardware.of(task)
    other_args = PROGRAM.parse(spec).others
    data = count(values, DP)
    ranks = count(values, TP) * data
    version = PROGRAM.version(spec)
    argv = [*PROGRAM.start_command(spec), "--model-path", spec.serve.weights or ""]
    argv += ["--host", address(task), "--port", PORT, "--enable-metrics"]
    argv += knobs.arguments(own.KNOBS, {**values, TP: ranks, DP: 1}, version)
    argv += _drafts(values)
    if values.get(own.HICACHE):
        argv.append("--enable-hierarchical-cache")
    if data > 1:
        is_newer = _has(ATTENTION_DP, version)
        argv += ["--attn-dp-size", str(data)] if is_newer else ["--dp-size", str(data), "--enable-dp-attention"]
    if count(values, EP) > 1 and _has(EXPERT_SWITCH, version):
        argv.append("--enable-ep-moe")
    if hardware.on_cores and "device" not in other_args:
        argv += ["--device", "cpu"]
    if hardware.on_cores and "max-total-tokens" not in other_args:
        argv += ["--max-total-tokens", f"{own.pool_tokens(task, count(values, INSTANCES)):.0f}"]
    argv += as_words(other_args, has_negation=False)
    environment = {"HF_HUB_OFFLINE": "1"}
    if cores:
        environment["OMP_NUM_THREADS"] = str(max(1, len(cores) // ranks))
    return Instance(argv=tuple(argv), environment=environment)


def _drafts(values: Mapping[str, KnobValue]) -> list[str]:
    """Return the flags for the number of drafted tokens: one chain of steps, except for n-grams."""
    method, drafted = values.get(SPECULATION), count(values, DRAFTED)
    if method is None or values.get(DRAFTED) is None:
        return []
    if method == own.NGRAM:
        return ["--speculative-num-draft-tokens", str(drafted)]
    chain = ("--speculative-num-steps", drafted), ("--speculative-eagle-topk", 1)
    return [str(word) for pair in (*chain, ("--speculative-num-draft-tokens", drafted + 1)) for word in pair]


def _on_host(hosts: int, number: int) -> tuple[str, ...]:
    return ("--nnodes", str(hosts), "--node-rank", str(number), "--dist-init-addr", f"{HEAD}:{HEAD_PORT}")


OTHER_SIDE = ">=0.4.8,<0.5.10"
"""The releases in which each kind needs the layout of the other kind."""
TRANSFER_FLAG = "disaggregation-transfer-backend"


def _of_kind(task: Task, values: Mapping[str, KnobValue], kind: str, instance: Instance) -> Instance:
    """Return an instance with the flags of its kind. `values` are those of the candidate."""
    flags = ["--disaggregation-mode", kind]
    if TRANSFER_FLAG not in PROGRAM.parse(task.spec).others:
        flags += [f"--{TRANSFER_FLAG}", str(values.get(TRANSFER) or "mooncake")]
    flags += ["--disaggregation-bootstrap-port", TRANSFER_PORT]
    if in_versions(OTHER_SIDE, PROGRAM.version(task.spec)):
        prefill, decode = (each.layout for each in placement.roles(str(values[PREFILL_DECODE])))
        if kind == PREFILLS:
            sizes = {"decode-tp": decode[TP] * decode[DP], "decode-dp": decode[DP]}
        else:
            sizes = {"prefill-pp": prefill[PP]}
        flags += [word for name, size in sizes.items() for word in (f"--disaggregation-{name}", str(size))]
    return replace(instance, argv=(*instance.argv, *flags))


def _router(task: Task, values: Mapping[str, KnobValue]) -> Router:
    """Return SGLang's router.

    Its release 0.3.2 answers completions whose prompt is token ids with HTTP 422: only clients that send text can use
    it.
    """
    program = (PROGRAM.start_command(task.spec)[0], "-m", "sglang_router.launch_router")
    if values.get(PREFILL_DECODE):
        return Router.of_pairs(program, "--pd-disaggregation", ("--prefill", URL, TRANSFER_PORT))
    return Router.of_replicas(program, prefix_aware=task.spec.serve.prefix_aware)


def _rules(task: Task) -> tuple[Rule, ...]:
    """Return the rules of SGLang for legal candidates."""
    experts, on_cores = task.spec.model.num_moe_experts or 1, Hardware.of(task).on_cores
    needed = longest_request(task.spec.serve.loads, task.spec.model.vision)
    layouts = (
        *rules.split_rules(task, data=True, span=True),
        Rule(
            name="expert_parallel",
            knobs=(TP, DP, EP),
            message=f"{EP} must divide {TP} x {DP} (SGLang's tp-size), and the {experts} experts",
            broken=lambda c: (c[EP] > 1) & (((c[TP] * c[DP]) % c[EP].clip(1) != 0) | (experts % c[EP].clip(1) != 0)),
        ),
    )
    return (
        *layouts,
        *placement.rules(task, layouts),
        Rule(
            name="transfer_on_cores",
            knobs=(PREFILL_DECODE,),
            message=f"{PREFILL_DECODE} needs devices: SGLang's backends do not move caches between CPU cores",
            broken=lambda c: (c[PREFILL_DECODE] > 0) & on_cores,
        ),
        Rule(
            name="chunk_of_pages",
            knobs=(TP, DP, PAGE, CHUNK),
            message=f"{CHUNK} must be a multiple of {PAGE}",
            broken=lambda c: (c[CHUNK] != -1) & (chunk_sizes(task, c) % np.maximum(c[PAGE], 1) != 0),
        ),
        Rule(
            name="whole_prompts",
            knobs=(CHUNK, PREFILL),
            message=f"without chunks {PREFILL} (default {PROGRAM.defaults[PREFILL]}) must be at least {needed}, the "
            "tokens of the longest request",
            broken=lambda c: (c[CHUNK] == -1) & (PROGRAM.values(c, PREFILL) < needed),
        ),
        *_model_rules(task),
        *_release_rules(task),
        *rules.context_rules(task, knobs.CONTEXT),
        rules.block_rule(
            PROGRAM, PAGE, f"must be a size that {BACKEND} supports", lambda sizes: np.zeros_like(sizes, dtype=np.bool_)
        ),
    )


def _model_rules(task: Task) -> tuple[Rule, ...]:
    """Return the rules of knobs that only some models have."""
    return (
        Rule(
            name="load_balancing",
            knobs=(EP, BALANCING, own.REDUNDANT),
            message=f"{BALANCING} and {own.REDUNDANT} need {EP} > 1",
            broken=lambda c: ((c[BALANCING] == 1) | (c[own.REDUNDANT] > 0)) & (c[EP] <= 1),
        ),
        *rules.speculation_rules(
            task,
            PROGRAM,
            # EAGLE drafts with the model's own layers if it has them: NEXTN is its other name.
            [each for each in own.NEED_DRAFT_MODEL if each != "EAGLE" or task.spec.model.mtp_num_layers == 0],
            own.DRAFT_FLAG,
            "NEXTN",
        ),
    )


def _release_rules(task: Task) -> tuple[Rule, ...]:
    """Return the rules of the release of a task; an unknown release breaks none."""
    version = PROGRAM.version(task.spec)
    missing = {
        name: [word for releases, words in rows.items() if not in_versions(releases, version) for word in words]
        for name, rows in PROGRAM.word_releases.items()
    }
    codes = {name: [PROGRAM.code(name, word) for word in words] for name, words in missing.items()}
    listed = "; ".join(f"{name} = {', '.join(words)}" for name, words in missing.items() if words)
    return (
        Rule(
            name="value_release",
            knobs=tuple(codes),
            message=f"sglang {version} does not have {listed}",
            broken=lambda c: np.any([np.isin(c[name], missing_codes) for name, missing_codes in codes.items()], axis=0),
        ),
        Rule(
            name="expert_switch",
            knobs=(TP, DP, EP),
            message=f"sglang {version} splits experts over all of {TP} x {DP} or not at all",
            broken=lambda c: _has(EXPERT_SWITCH, version) & (c[EP] > 1) & (c[EP] != c[TP] * c[DP]),
        ),
    )


def _has(releases: str, version: str) -> bool:
    """Return whether a release is known to be one of `releases`."""
    return bool(version) and in_versions(releases, version)


def _merges(task: Task) -> tuple[Merge, ...]:
    """Return the merges of SGLang's defaults and of knobs without effect."""
    policy = "lpm" if _has(LONGEST_PREFIX_FIRST, PROGRAM.version(task.spec)) else "fcfs"
    defaults: dict[str, KnobValue] = {own.POLICY: policy}
    has_backend = BACKEND in task.spec.space or BACKEND in PROGRAM.parse(task.spec).fixed
    if not has_backend and not task.spec.model.multi_latent_attention:
        defaults[PAGE] = 1
    no_graphs = Merge(name="no_graphs_on_cores", knobs=(EAGER,), canonical=lambda c: {EAGER: np.zeros_like(c[EAGER])})
    return (
        *placement.merges(TRANSFER),
        *rules.same_as_unset(PROGRAM, defaults),
        rules.no_drafts(),
        rules.tower_merge(task),
        *((no_graphs,) if Hardware.of(task).on_cores else ()),
    )


WORKLOAD = Engine(
    name="sglang",
    where="flagcore.engines.serving.sglang:REPORTS",
    program=PROGRAM,
    modules={"sglang": "sglang>=0.5,<0.6"},
    rules=_rules,
    merges=_merges,
    settings=own.settings,
    server=_server,
    on_host=_on_host,
    of_kind=_of_kind,
    protocol=lambda task, values: BOOTSTRAP,
    router=_router,
    reports=REPORTS,
    host_times=(10e-3, 0.5e-3),  # measured on 2 cores with 50 million parameters, 4 to 16 clients
    receive_flag=RECEIVE,
    published_runs=PublishedRuns(
        cache_type="fp8_e4m3",
        memory_flag="mem-fraction-static",
        release="0.5.9",
        engine_args={RECEIVE: 30},  # InferenceMAX's recipes
    ),
)
