"""SGLang as an engine of serving, with the command lines of its servers and of the router in front of them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flagcore_serving.engine import ServingEngine
from flagcore_serving.launch.server import (
    EMBEDDING_PORT,
    ENCODER_URLS,
    HEAD,
    HEAD_PORT,
    TRANSFER_PORT,
    URL,
    Instance,
    Router,
    address,
)
from flagcore_serving.load.routing import BOOTSTRAP, DECODE, ENCODE, PREFILL
from flagcore_serving.space import adapters, knobs
from flagcore_serving.space.hardware import DP, INSTANCES, PP, PREFILL_DECODE, TP, Hardware, count
from flagcore_serving.space.knobs import DRAFTED, SPECULATION, TRANSFER, as_words
from flagcore_serving.space.roles import language, roles
from flagcore_serving.space.settings import PublishedRuns, Settings

from flagcore.contracts import Costs
from flagcore.domain.knob import in_versions
from flagcore.domain.launch import PORT
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import Columns, KnobValue, Merge, Rule
from flagcore.domain.spec import Task
from flagcore_sglang import pools, rules, space
from flagcore_sglang.program import CHUNK, HICACHE, KNOBS, MIXED, NGRAM, PROGRAM, STORAGE
from flagcore_sglang.space import pool_tokens

RECEIVE = "scheduler-recv-interval"
ATTENTION_DP = ">=0.5.22"
"""The releases that have the flag attn-dp-size. These releases still accept the earlier spelling."""
OTHER_SIDE = "<0.5.10"
"""The releases in which prefill and decode instances need flags for the layout of the other kind."""
TRANSFER_FLAG = "disaggregation-transfer-backend"
EMBEDDING_FLAG, BOOTSTRAP_SINCE = "encoder-transfer-backend", ">=0.5.21"


class Sglang(ServingEngine):
    """SGLang (`sglang.launch_server`)."""

    name = "sglang"
    where = "flagcore_sglang:REPORTS"
    program = PROGRAM
    modules: Mapping[str, str] = {"sglang": "sglang>=0.5,<0.6"}
    host_address = "SGLANG_HOST_IP"
    host_times = (10e-3, 0.5e-3)  # measured on 2 cores, with 50 million parameters and 4 to 16 clients
    receive_flag = RECEIVE
    published_runs = PublishedRuns(
        cache_type="fp8_e4m3",
        memory_flag="mem-fraction-static",
        release="0.5.9",
        engine_args={"": {RECEIVE: 30, "max-prefill-tokens": 32768}},  # as in InferenceMAX's recipes
        # sgl-project/sgl-cookbook runs `bench_serving` without a range, so that lengths start from 1 (500 prompts of
        # up to 1,000 tokens have 249,331).
        drawn={(1000, 1000): 0.0, (1000, 8000): 0.0, (8000, 1000): 0.0},
        # ai-dynamo/aiconfigurator #258 of 2026-01-19, when it ran 0.5.6.post2: `--enable-mix-chunk` before is no flag.
        generated={MIXED: ("0.5.6", True)},
        # lmsys.org, 2025-05-05, large-scale EP (H100), and ishandhanani/srt-slurm recipes/ (GB200, GB300).
        wide_copies=32,
        wide_chunk=(CHUNK, 16384),
    )

    def merges(self, task: Task) -> tuple[Merge, ...]:
        return rules.merges(task)

    def rules(self, task: Task) -> tuple[Rule, ...]:
        return rules.rules_of(task)

    def settings(self, task: Task, columns: Columns) -> Settings:
        return space.settings(task, columns)

    def predict(self, task: Task, columns: Columns, costs: Costs, **how: Any) -> Predictions:
        """See `ServingEngine`. States have the type that a flag sets."""
        model = pools.with_states(task.spec.model, PROGRAM.parse(task.spec).others)
        return super().predict(replace(task, spec=replace(task.spec, model=model)), columns, costs, **how)

    def server(self, task: Task, values: Mapping[str, KnobValue], cores: tuple[int, ...]) -> Instance:
        """Return the server for knob values. Its tp-size is the product of TP and attention DP."""
        spec, hardware = task.spec, Hardware.of(task)
        other_args = PROGRAM.parse(spec).others
        data = count(values, DP)
        ranks = count(values, TP) * data
        version = PROGRAM.version(spec)
        argv = [*PROGRAM.start_command(spec), "--model-path", spec.serve.weights or ""]
        argv += ["--host", address(task), "--port", PORT, "--enable-metrics"]
        argv += knobs.arguments(KNOBS, {**values, TP: ranks, DP: 1}, version)
        argv += _drafts(values)
        if values.get(HICACHE) or values.get(STORAGE):
            argv.append("--enable-hierarchical-cache")
        if data > 1:
            is_newer = version and in_versions(ATTENTION_DP, version)
            argv += ["--attn-dp-size", str(data)] if is_newer else ["--dp-size", str(data), "--enable-dp-attention"]
        if hardware.on_cores and "device" not in other_args:
            argv += ["--device", "cpu"]
        if hardware.on_cores and "max-total-tokens" not in other_args:
            argv += ["--max-total-tokens", f"{pool_tokens(task, count(values, INSTANCES)):.0f}"]
        argv += adapters.words(spec.serve, values, other_args, "lora-paths")
        argv += as_words(other_args, has_negation=False)
        environment = {} if task.spec.serve.elsewhere else {"HF_HUB_OFFLINE": "1"}
        if cores:
            environment["OMP_NUM_THREADS"] = str(max(1, len(cores) // ranks))
        return Instance(argv=tuple(argv), environment=environment)

    def on_host(self, hosts: int, rank: str) -> tuple[str, ...]:
        """Return the flags for one host of an instance."""
        return ("--nnodes", str(hosts), "--node-rank", rank, "--dist-init-addr", f"{HEAD}:{HEAD_PORT}")

    def of_kind(self, task: Task, values: Mapping[str, KnobValue], kind: str, instance: Instance) -> Instance:
        """Return `instance` with the flags of its kind. `values`: the knob values of the whole candidate."""
        if ENCODE in (kinds := [each.kind for each in roles(str(values[PREFILL_DECODE]))]):
            instance = replace(instance, argv=(*instance.argv, *_embedding_flags(task, kind)))
        if kind == ENCODE or PREFILL not in kinds:
            return instance
        flags = ["--disaggregation-mode", kind]
        if TRANSFER_FLAG not in PROGRAM.parse(task.spec).others:
            flags += [f"--{TRANSFER_FLAG}", str(values.get(TRANSFER) or "mooncake")]
        flags += ["--disaggregation-bootstrap-port", TRANSFER_PORT]
        if (release := PROGRAM.version(task.spec)) and in_versions(OTHER_SIDE, release):  # a new one if it is unknown
            prefill, decode = (each.layout for each in language(roles(str(values[PREFILL_DECODE]))))
            if kind == PREFILL:
                sizes = {"decode-tp": decode[TP] * decode[DP], "decode-dp": decode[DP]}
            else:
                sizes = {"prefill-pp": prefill[PP]}
            flags += [word for name, size in sizes.items() for word in (f"--disaggregation-{name}", str(size))]
        return replace(instance, argv=(*instance.argv, *flags))

    def protocol(self, task: Task, values: Mapping[str, KnobValue]) -> str:
        return BOOTSTRAP

    def router(self, task: Task, values: Mapping[str, KnobValue]) -> Router:
        """Return SGLang's router.

        Router release 0.3.2 answers HTTP 422 to completions whose prompts are token ids, so only clients that send
        text can use it.
        """
        program = (PROGRAM.start_command(task.spec)[0], "-m", "sglang_router.launch_router")
        if (word := values.get(PREFILL_DECODE)) and len(language(roles(str(word)))) > 1:
            return Router.of_pairs(program, "--pd-disaggregation", ("--prefill", URL, TRANSFER_PORT))
        return Router.of_replicas(program, prefix_aware=task.spec.serve.prefix_aware)


def _drafts(values: Mapping[str, KnobValue]) -> list[str]:
    """Return the flags for the number of drafted tokens: a chain of one draft per step, except for n-grams."""
    method, drafted = values.get(SPECULATION), count(values, DRAFTED)
    if method is None or values.get(DRAFTED) is None:
        return []
    if method == NGRAM:
        return ["--speculative-num-draft-tokens", str(drafted)]
    chain = ("--speculative-num-steps", drafted), ("--speculative-eagle-topk", 1)
    return [str(word) for pair in (*chain, ("--speculative-num-draft-tokens", drafted + 1)) for word in pair]


def _embedding_flags(task: Task, kind: str) -> list[str]:
    """Return the flags to pass embeddings of images: instances that prefill ask for them. Each has a port at which
    those that encode may register (0.5.23 `arg_groups/fields/disagg.py`)."""
    if kind == DECODE:
        return []
    version, others = PROGRAM.version(task.spec), PROGRAM.parse(task.spec).others
    flags = ["--encoder-only"] if kind == ENCODE else ["--language-only", "--encoder-urls", ENCODER_URLS]
    flags += [] if EMBEDDING_FLAG in others else [f"--{EMBEDDING_FLAG}", "zmq_to_scheduler"]
    has_port = kind != ENCODE and (not version or in_versions(BOOTSTRAP_SINCE, version))
    return [*flags, *(["--encoder-bootstrap-port", EMBEDDING_PORT] if has_port else [])]


ENGINE = Sglang()
