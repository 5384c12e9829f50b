"""The command lines of SGLang's servers, and of the router in front of them."""

from collections.abc import Mapping
from dataclasses import replace

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
from flagcore_serving.load.routing import DECODE as DECODES
from flagcore_serving.load.routing import ENCODE as ENCODES
from flagcore_serving.load.routing import PREFILL as PREFILLS
from flagcore_serving.space import adapters, knobs
from flagcore_serving.space.hardware import DP, INSTANCES, PP, PREFILL_DECODE, TP, Hardware, count
from flagcore_serving.space.knobs import DRAFTED, SPECULATION, TRANSFER, as_words
from flagcore_serving.space.roles import language, roles

from flagcore.domain.knob import in_versions
from flagcore.domain.launch import PORT
from flagcore.domain.space import KnobValue
from flagcore.domain.spec import Task
from flagcore_sglang.space import HICACHE, KNOBS, NGRAM, PROGRAM, STORAGE, pool_tokens

RECEIVE = "scheduler-recv-interval"
ATTENTION_DP = ">=0.5.22"
"""The releases that have the flag attn-dp-size. These releases still accept the earlier spelling."""


def server(task: Task, values: Mapping[str, KnobValue], cores: tuple[int, ...]) -> Instance:
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


def _drafts(values: Mapping[str, KnobValue]) -> list[str]:
    """Return the flags for the number of drafted tokens: a chain of one draft per step, except for n-grams."""
    method, drafted = values.get(SPECULATION), count(values, DRAFTED)
    if method is None or values.get(DRAFTED) is None:
        return []
    if method == NGRAM:
        return ["--speculative-num-draft-tokens", str(drafted)]
    chain = ("--speculative-num-steps", drafted), ("--speculative-eagle-topk", 1)
    return [str(word) for pair in (*chain, ("--speculative-num-draft-tokens", drafted + 1)) for word in pair]


def on_host(hosts: int, rank: str) -> tuple[str, ...]:
    """Return the flags for one host of an instance."""
    return ("--nnodes", str(hosts), "--node-rank", rank, "--dist-init-addr", f"{HEAD}:{HEAD_PORT}")


ENCODERS_SINCE = ">=0.5.7"
"""The releases with `--encoder-only` and `--language-only`."""
OTHER_SIDE = "<0.5.10"
"""The releases in which prefill and decode instances need flags for the layout of the other kind."""
TRANSFER_FLAG = "disaggregation-transfer-backend"


def of_kind(task: Task, values: Mapping[str, KnobValue], kind: str, instance: Instance) -> Instance:
    """Return `instance` with the flags of its kind. `values`: the knob values of the whole candidate."""
    if ENCODES in (kinds := [each.kind for each in roles(str(values[PREFILL_DECODE]))]):
        instance = replace(instance, argv=(*instance.argv, *_embedding_flags(task, kind)))
    if kind == ENCODES or PREFILLS not in kinds:
        return instance
    flags = ["--disaggregation-mode", kind]
    if TRANSFER_FLAG not in PROGRAM.parse(task.spec).others:
        flags += [f"--{TRANSFER_FLAG}", str(values.get(TRANSFER) or "mooncake")]
    flags += ["--disaggregation-bootstrap-port", TRANSFER_PORT]
    if (release := PROGRAM.version(task.spec)) and in_versions(OTHER_SIDE, release):  # a new one if it is unknown
        prefill, decode = (each.layout for each in language(roles(str(values[PREFILL_DECODE]))))
        if kind == PREFILLS:
            sizes = {"decode-tp": decode[TP] * decode[DP], "decode-dp": decode[DP]}
        else:
            sizes = {"prefill-pp": prefill[PP]}
        flags += [word for name, size in sizes.items() for word in (f"--disaggregation-{name}", str(size))]
    return replace(instance, argv=(*instance.argv, *flags))


EMBEDDING_FLAG, BOOTSTRAP_SINCE = "encoder-transfer-backend", ">=0.5.21"


def _embedding_flags(task: Task, kind: str) -> list[str]:
    """Return the flags to pass embeddings of images: instances that prefill ask for them. Each has a port at which
    those that encode may register (0.5.23 `arg_groups/fields/disagg.py`)."""
    if kind == DECODES:
        return []
    version, others = PROGRAM.version(task.spec), PROGRAM.parse(task.spec).others
    flags = ["--encoder-only"] if kind == ENCODES else ["--language-only", "--encoder-urls", ENCODER_URLS]
    flags += [] if EMBEDDING_FLAG in others else [f"--{EMBEDDING_FLAG}", "zmq_to_scheduler"]
    has_port = kind != ENCODES and (not version or in_versions(BOOTSTRAP_SINCE, version))
    return [*flags, *(["--encoder-bootstrap-port", EMBEDDING_PORT] if has_port else [])]


def router(task: Task, values: Mapping[str, KnobValue]) -> Router:
    """Return SGLang's router.

    Router release 0.3.2 answers HTTP 422 to completions whose prompts are token ids, so only clients that send text can
    use it.
    """
    program = (PROGRAM.start_command(task.spec)[0], "-m", "sglang_router.launch_router")
    if (word := values.get(PREFILL_DECODE)) and len(language(roles(str(word)))) > 1:
        return Router.of_pairs(program, "--pd-disaggregation", ("--prefill", URL, TRANSFER_PORT))
    return Router.of_replicas(program, prefix_aware=task.spec.serve.prefix_aware)
