"""SGLang (`sglang.launch_server`), releases 0.4 and 0.5.

Sources: sglang 0.5.23 `srt/entrypoints/http_server.py` (reported settings), `srt/arg_groups/` (rules).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from flagcore.domain.candidate import KnobValue
from flagcore.domain.knob import in_versions
from flagcore.domain.space import BoolArray, Columns, Merge, Rule
from flagcore.domain.spec import Task
from flagcore.engines.serving.engine import Engine
from flagcore.engines.serving.launch.profile import Worker
from flagcore.engines.serving.launch.server import HEAD, HEAD_PORT, PORT, Instance, address
from flagcore.engines.serving.load.routing import BOOTSTRAP
from flagcore.engines.serving.sglang import disaggregation, releases
from flagcore.engines.serving.sglang import knobs as own
from flagcore.engines.serving.sglang.knobs import CHUNK, EAGER, PAGE, PREFILL, PREFILL_TOKENS, chunk_sizes
from flagcore.engines.serving.sglang.reports import REPORTS
from flagcore.engines.serving.space import knobs, placement
from flagcore.engines.serving.space.hardware import DP, EP, INSTANCES, TP, Hardware, count, longest_request
from flagcore.engines.serving.space.knobs import code, or_default
from flagcore.engines.serving.space.program import as_words
from flagcore.engines.serving.space.rules import (
    context_rules,
    no_drafts,
    same_as_unset,
    speculation_rules,
    split_rules,
    tower_merge,
)
from flagcore.engines.serving.space.settings import PublishedRuns

RECEIVE = "scheduler-recv-interval"
ATTENTION_DP = ">=0.5.22"
"""The releases with attn-dp-size; they still accept the earlier spelling."""


def _server(task: Task, values: Mapping[str, KnobValue], cores: tuple[int, ...]) -> Instance:
    spec, hardware = task.spec, Hardware.of(task)
    other_args = own.PROGRAM.parse(spec).others
    data = count(values, DP)
    ranks = count(values, TP) * data
    version = own.PROGRAM.version(spec)
    argv = [*own.PROGRAM.start_command(spec), "--model-path", spec.serve.weights or ""]
    argv += ["--host", address(task), "--port", PORT, "--enable-metrics"]
    argv += knobs.arguments(own.KNOBS, {**values, TP: ranks, DP: 1}, version)
    argv += _drafts(values)
    if values.get(own.HICACHE):
        argv.append("--enable-hierarchical-cache")
    if data > 1:
        is_newer = version and in_versions(ATTENTION_DP, version)
        argv += ["--attn-dp-size", str(data)] if is_newer else ["--dp-size", str(data), "--enable-dp-attention"]
    if count(values, EP) > 1 and releases.has_expert_switch(version):
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
    method, drafted = values.get(own.SPECULATION), count(values, own.DRAFTED)
    if method is None or values.get(own.DRAFTED) is None:
        return []
    if method == own.NGRAM:
        return ["--speculative-num-draft-tokens", str(drafted)]
    chain = ("--speculative-num-steps", drafted), ("--speculative-eagle-topk", 1)
    return [str(word) for pair in (*chain, ("--speculative-num-draft-tokens", drafted + 1)) for word in pair]


def _on_host(hosts: int, number: int) -> tuple[str, ...]:
    return ("--nnodes", str(hosts), "--node-rank", str(number), "--dist-init-addr", f"{HEAD}:{HEAD_PORT}")


def rules(task: Task) -> tuple[Rule, ...]:
    """Return the rules of SGLang for legal candidates."""
    experts = task.spec.model.num_moe_experts or 1
    needed = longest_request(task.spec.serve.loads, task.spec.model.vision)
    layouts = (
        *split_rules(task, data=True, span=True),
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
        *disaggregation.rules(task),
        Rule(
            name="chunk_of_pages",
            knobs=(TP, DP, PAGE, CHUNK),
            message=f"{CHUNK} must be a multiple of {PAGE}",
            broken=lambda c: (c[CHUNK] != -1) & (chunk_sizes(task, c) % np.maximum(c[PAGE], 1) != 0),
        ),
        Rule(
            name="whole_prompts",
            knobs=(CHUNK, PREFILL),
            message=f"without chunks {PREFILL} (default {PREFILL_TOKENS}) must be at least {needed}, the tokens of the "
            "longest request",
            broken=lambda c: (c[CHUNK] == -1) & (or_default(c[PREFILL], PREFILL_TOKENS) < needed),
        ),
        *_model_rules(task),
        *releases.rules(task),
        *context_rules(task, own.CONTEXT),
        _page_rule(),
    )


def _model_rules(task: Task) -> tuple[Rule, ...]:
    """Return the rules of knobs that only some models have."""
    return (
        Rule(
            name="load_balancing",
            knobs=(EP, own.BALANCING, own.REDUNDANT),
            message=f"{own.BALANCING} and {own.REDUNDANT} need {EP} > 1",
            broken=lambda c: ((c[own.BALANCING] == 1) | (c[own.REDUNDANT] > 0)) & (c[EP] <= 1),
        ),
        *speculation_rules(
            task,
            own.BY_NAME[own.SPECULATION],
            own.PROGRAM,
            # EAGLE drafts with the model's own layers if it has them: NEXTN is its other name.
            [each for each in own.NEED_DRAFT_MODEL if each != "EAGLE" or task.spec.model.mtp_num_layers == 0],
            own.DRAFT_FLAG,
            "NEXTN",
            needs_tokens=False,
        ),
    )


def _page_rule() -> Rule:
    sizes_by_backend = {code(own.BY_NAME[own.BACKEND], name): sizes for name, sizes in own.PROGRAM.block_sizes.items()}

    def broken(c: Columns) -> BoolArray:
        is_bad = np.zeros(c[PAGE].shape, dtype=np.bool_)
        for backend, sizes in sizes_by_backend.items():
            is_bad |= (c[own.BACKEND] == backend) & (c[PAGE] > 0) & ~np.isin(c[PAGE], sizes)
        return is_bad

    return Rule(
        name="page_size",
        knobs=(PAGE, own.BACKEND),
        message=f"{PAGE} must be a size that {own.BACKEND} supports",
        broken=broken,
    )


def merges(task: Task) -> tuple[Merge, ...]:
    """Return the merges of SGLang's defaults and of knobs without effect."""
    defaults: dict[str, KnobValue] = {own.KV: "auto", own.POLICY: releases.policy(task), PREFILL: PREFILL_TOKENS}
    defaults[knobs.TOWER] = "weights"
    has_backend = own.BACKEND in task.spec.space or own.BACKEND in own.PROGRAM.parse(task.spec).fixed
    if not has_backend and not task.spec.model.multi_latent_attention:
        defaults[PAGE] = 1
    no_graphs = Merge(name="no_graphs_on_cores", knobs=(EAGER,), canonical=lambda c: {EAGER: np.zeros_like(c[EAGER])})
    return (
        *placement.merges(knobs.TRANSFER),
        *same_as_unset(own.KNOBS, defaults),
        no_drafts(),
        tower_merge(task),
        *((no_graphs,) if Hardware.of(task).on_cores else ()),
    )


WORKLOAD = Engine(
    name="sglang",
    where="flagcore.engines.serving.sglang.reports:REPORTS",
    program=own.PROGRAM,
    modules={"sglang": "sglang>=0.5,<0.6"},
    rules=rules,
    merges=merges,
    settings=own.settings,
    server=_server,
    on_host=_on_host,
    of_kind=disaggregation.of_kind,
    protocol=lambda task, values: BOOTSTRAP,
    router=disaggregation.router,
    dynamo=Worker(
        module="dynamo.sglang",
        transfers=frozenset(("mooncake", "nixl")),
        frontend_flags=frozenset(("host", "port")),
        flags=("--host", "0.0.0.0"),  # the decoding workers ask those that prefill
    ),
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
