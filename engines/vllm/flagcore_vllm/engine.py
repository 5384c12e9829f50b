"""vLLM as an engine of serving, with the command lines of its servers and of routers in front of them."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flagcore_serving.engine import ServingEngine
from flagcore_serving.launch.server import (
    EPD_PROXY,
    HEAD,
    HEAD_PORT,
    LOCAL_ADDRESS,
    TRANSFER_PORT,
    Instance,
    Router,
    address,
)
from flagcore_serving.load import routing
from flagcore_serving.model.work import Overheads
from flagcore_serving.space import adapters, knobs
from flagcore_serving.space.hardware import EP, INSTANCES, PREFILL_DECODE, TP, Hardware, count
from flagcore_serving.space.knobs import BACKEND, PREFIX, SPECULATION, TRANSFER, as_words
from flagcore_serving.space.roles import roles
from flagcore_serving.space.settings import PublishedRuns, Settings

from flagcore.contracts import Costs
from flagcore.domain.launch import PORT
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import Columns, KnobValue, Merge, Rule
from flagcore.domain.spec import Task
from flagcore.errors import UsageError
from flagcore_vllm import rules, space
from flagcore_vllm.cache import with_states
from flagcore_vllm.connectors import CONFIG
from flagcore_vllm.rules import EMBEDDINGS, NIXL, P2P

PROTOCOLS = {NIXL: routing.NIXL, P2P: routing.P2P}
BUFFER_BYTES = {True: "1e1", False: "8e9"}
"""Buffer sizes of the P2P connector in bytes, by whether the instance prefills. A prefill instance needs almost no
buffer, because it sends each layer as soon as it is computed."""
EMBEDDINGS_FOLDER = "/dev/shm/vllm-embeddings"
ENCODER_FLAGS = (
    "--mm-encoder-only",
    "--enforce-eager",
    "--no-enable-prefix-caching",
    "--max-num-batched-tokens",
    "114688",
)
"""Flags of an instance that encodes (vllm-project/vllm `examples/disaggregated/disaggregated_encoder`)."""


class Vllm(ServingEngine):
    """vLLM (`vllm serve`)."""

    name = "vllm"
    where = "flagcore_vllm:REPORTS"
    program = space.PROGRAM
    modules: Mapping[str, str] = {"vllm": "vllm>=0.11,<0.34"}
    host_address = "VLLM_HOST_IP"
    host_times = (2.0e-3, 0.28e-3)  # measured on 2 cores: 50 million parameters, 4 to 16 clients, 5 settings
    published_runs = PublishedRuns(
        cache_type="fp8",
        memory_flag="gpu-memory-utilization",
        release="0.17.0",
        engine_args={"gpt-oss": {"max-cudagraph-capture-size": 2048}},  # InferenceX @1b4c27d1 `gptoss_fp4_h100.sh`
    )

    def merges(self, task: Task) -> tuple[Merge, ...]:
        return rules.merges(task)

    def rules(self, task: Task) -> tuple[Rule, ...]:
        return rules.rules_of(task)

    def settings(self, task: Task, columns: Columns) -> Settings:
        return space.settings(task, columns)

    def predict(self, task: Task, columns: Columns, costs: Costs, **how: Any) -> Predictions:
        """See `ServingEngine`. States have the types that vLLM gives them."""
        model = with_states(task.spec.model)
        if model is not task.spec.model:
            task = replace(task, spec=replace(task.spec, model=model))
        return super().predict(task, columns, costs, **how)

    def overheads_for(self, task: Task, **how: Any) -> Overheads:
        """See `ServingEngine`. gpt-oss has no chat template (`entrypoints/openai/serving_chat.py`: use_harmony)."""
        overheads = super().overheads_for(task, **how)
        return replace(overheads, entry=min(overheads.entry, 2e-3)) if "gpt-oss" in task.spec.model.name else overheads

    def server(self, task: Task, values: Mapping[str, KnobValue], cores: tuple[int, ...]) -> Instance:
        """Return the server for knob values. On CPU cores, it uses `cores`."""
        command = space.PROGRAM.start_command(task.spec)
        weights = task.spec.serve.weights or ""
        model = (weights,) if command[-1] == "serve" else ("--model", weights)
        argv = [*command, *model, "--host", address(task), "--port", PORT]
        argv += knobs.arguments(space.KNOBS, values, space.PROGRAM.version(task.spec))
        if count(values, EP) > 1:
            argv.append(f"--{space.PROGRAM.expert_switch}")
        if values.get(PREFIX) is True and not space.caches_by_default(task.spec):
            argv.append("--enable-prefix-caching")
        others = space.PROGRAM.parse(task.spec).others
        if values.get(SPECULATION) is None and SPECULATION in task.spec.space:  # other candidates have a draft model
            others = {name: value for name, value in others.items() if not name.startswith(space.DRAFT_FLAGS)}
        argv += adapters.words(task.spec.serve, values, others, "lora-modules")
        argv += as_words(others, has_negation=True)
        environment = {} if task.spec.serve.elsewhere else {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        if (backend := values.get(BACKEND)) and f"--{BACKEND.replace('_', '-')}" not in argv:
            environment[space.BACKEND_VARIABLE] = str(backend)
        if Hardware.of(task).on_cores:
            environment |= _cpu_environment(task, values, cores)
        return Instance(argv=tuple(argv), environment=environment)

    def on_host(self, hosts: int, rank: str) -> tuple[str, ...]:
        """Return the flags for one host of an instance (0.32: `engine/arg_utils.py`, `entrypoints/cli/serve.py`)."""
        flags = ("--nnodes", str(hosts), "--node-rank", rank, "--master-addr", HEAD, "--master-port", HEAD_PORT)
        return flags if rank == "0" else (*flags, "--headless")

    def of_kind(self, task: Task, values: Mapping[str, KnobValue], kind: str, instance: Instance) -> Instance:
        """Return `instance` with the flags and environment variables of its kind."""
        if routing.ENCODE in (kinds := [each.kind for each in roles(str(values[PREFILL_DECODE]))]):
            instance = _with_embeddings(kind, instance)
        if kind == routing.ENCODE or routing.PREFILL not in kinds:
            return instance
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

    def protocol(self, task: Task, values: Mapping[str, KnobValue]) -> str:
        return PROTOCOLS[str(values.get(TRANSFER) or NIXL)]

    def router(self, task: Task, values: Mapping[str, KnobValue]) -> Router:
        """Return vLLM's router.

        For prefill and decode instances it supports only NIXL. Raises UsageError for other connectors. In front of
        instances that encode is a proxy of vLLM's examples.
        """
        if values.get(PREFILL_DECODE) and roles(str(values[PREFILL_DECODE]))[-1].kind == routing.ENCODE:
            kinds = (routing.ENCODE, routing.PREFILL, routing.DECODE)
            return Router(argv=(EPD_PROXY, *LOCAL_ADDRESS), lists={kind: f"--{kind}-servers-urls" for kind in kinds})
        folder = str(Path(space.PROGRAM.start_command(task.spec)[0]).parent)
        program = (shutil.which("vllm-router", path=folder) or "vllm-router",)
        if not values.get(PREFILL_DECODE):
            return Router.of_replicas(program, prefix_aware=task.spec.serve.prefix_aware)
        if (connector := values.get(TRANSFER) or NIXL) != NIXL:
            raise UsageError(f"vllm-router does not know {TRANSFER} = {connector}; use {NIXL}")
        return Router.of_pairs(program, "--vllm-pd-disaggregation")


def _cpu_environment(task: Task, values: Mapping[str, KnobValue], cores: tuple[int, ...]) -> dict[str, str]:
    """Return the environment variables of vLLM's CPU build: the size of the cache, and the cores of each rank.

    vLLM itself pins the single rank of a single instance, and leaves a core to the API server. With several ranks or
    instances, each rank needs explicit cores, because vLLM otherwise requires one NUMA node per rank and fails.
    """
    instances, ranks, threads = count(values, INSTANCES), count(values, TP), values.get(space.THREADS)
    environment = {}
    if "kv-cache-memory-bytes" not in space.PROGRAM.parse(task.spec).others:
        environment[space.CACHE_SPACE] = f"{space.cache_gib(task, instances, ranks):.0f}"
    if instances * ranks > 1 or threads is not None:
        share = max(1, len(cores) // ranks)
        parts = [cores[rank * share : (rank + 1) * share] for rank in range(ranks)]
        bound_cores = [part[: threads if isinstance(threads, int) and threads else share] for part in parts]
        environment[space.THREAD_BINDING] = "|".join(",".join(map(str, part)) for part in bound_cores)
    return environment


def _with_embeddings(kind: str, instance: Instance) -> Instance:
    """Return `instance` with the flags to pass embeddings of images, which instances that only decode do not get.

    The connector writes them to a folder that all instances share. That of Mooncake knows no separate instances that
    prefill (0.33 `distributed/ec_transfer`).
    """
    if kind == routing.DECODE:
        return instance
    is_encoder = kind == routing.ENCODE
    config: dict[str, Any] = {
        "ec_connector": "ECExampleConnector",
        "ec_role": "ec_producer" if is_encoder else "ec_consumer",
    }
    config["ec_connector_extra_config"] = {"shared_storage_path": EMBEDDINGS_FOLDER}
    flags = ENCODER_FLAGS if is_encoder else ()
    return replace(instance, argv=(*instance.argv, *flags, f"--{EMBEDDINGS}", json.dumps(config)))


ENGINE = Vllm()
