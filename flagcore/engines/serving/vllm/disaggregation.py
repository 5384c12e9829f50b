"""Instances that only prefill or only decode: vLLM's KV connectors, and the router in front of them.

Sources: `distributed/kv_transfer/kv_connector/factory.py` of vllm 0.8.5 to 0.32 (the connectors of each release), 0.32
`v1/nixl/` and `v1/example_connector.py`, 0.23 `v1/p2p/p2p_nccl_engine.py`; vllm-router 0.1.17 (`--help`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from flagcore.domain.candidate import KnobValue
from flagcore.domain.knob import in_versions
from flagcore.domain.space import Rule
from flagcore.domain.spec import Task
from flagcore.engines.serving.launch.server import HEAD, SHARED, TRANSFER_PORT, Instance, Router
from flagcore.engines.serving.load.routing import FOLDER, PREFILL
from flagcore.engines.serving.load.routing import NIXL as BY_ANSWER
from flagcore.engines.serving.load.routing import P2P as BY_ID
from flagcore.engines.serving.space.hardware import PREFILL_DECODE, Hardware, longest_request
from flagcore.engines.serving.space.knobs import TRANSFER, code
from flagcore.engines.serving.space.placement import Pair, transfer_rule
from flagcore.engines.serving.vllm import knobs as own
from flagcore.errors import UsageError

NIXL, P2P, EXAMPLE = "NixlConnector", "P2pNcclConnector", "ExampleConnector"
RELEASES = {NIXL: ">=0.9", P2P: ">=0.9.2,<0.24", EXAMPLE: ">=0.8.5"}
"""The releases that have a connector. The example connector, which uses a folder, was SharedStorageConnector."""
RENAMED, OLD_EXAMPLE = "<0.13", "SharedStorageConnector"
PROTOCOLS = {NIXL: BY_ANSWER, P2P: BY_ID, EXAMPLE: FOLDER}
BUFFER_BYTES = {True: "1e1", False: "8e9"}
"""Buffers of the P2P connector by whether the instance prefills: it sends as soon as a layer is computed."""
CONFIG = "kv-transfer-config"


def transfer_of(task: Task, values: Mapping[str, KnobValue]) -> str:
    """Return the connector of a candidate, by default NIXL; on CPU cores the one that needs no further package."""
    return str(values.get(TRANSFER) or (EXAMPLE if Hardware.of(task).on_cores else NIXL))


def of_kind(task: Task, values: Mapping[str, KnobValue], kind: str, instance: Instance) -> Instance:
    """Return an instance with the flags and variables of its kind."""
    connector, prefills = transfer_of(task, values), kind == PREFILL
    version = own.PROGRAM.version(task.spec)
    environment, flags = dict(instance.environment), list[str]()
    config: dict[str, Any] = {"kv_connector": connector, "kv_role": "kv_both"}
    if connector == NIXL:
        environment |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": HEAD, "VLLM_NIXL_SIDE_CHANNEL_PORT": TRANSFER_PORT}
        config |= {"kv_buffer_device": "cpu"} if Hardware.of(task).on_cores else {}
    elif connector == P2P:
        # the connector reads both addresses from the request's id, to which newer releases add random digits
        environment |= {"VLLM_HOST_IP": HEAD, "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1"}
        config |= {"kv_role": "kv_producer" if prefills else "kv_consumer", "kv_port": TRANSFER_PORT}
        config |= {"kv_buffer_size": BUFFER_BYTES[prefills], "kv_connector_extra_config": {"send_type": "PUT_ASYNC"}}
    else:
        name = OLD_EXAMPLE if version and in_versions(RENAMED, version) else EXAMPLE
        config |= {"kv_connector": name, "kv_connector_extra_config": {"shared_storage_path": SHARED}}
        # the connector stores the first piece of a prompt only
        flags += ["--no-enable-chunked-prefill"] if prefills and values.get(own.CHUNKED) is not False else []
    return replace(instance, argv=(*instance.argv, *flags, f"--{CONFIG}", json.dumps(config)), environment=environment)


def protocol(task: Task, values: Mapping[str, KnobValue]) -> str:
    """Return how the connector of a candidate finds caches."""
    return PROTOCOLS[transfer_of(task, values)]


def router(task: Task, values: Mapping[str, KnobValue]) -> Router:
    """Return vLLM's router, of pairs for NIXL only. Raises UsageError for other connectors, which it does not know."""
    folder = str(Path(own.PROGRAM.start_command(task.spec)[0]).parent)
    program = (shutil.which("vllm-router", path=folder) or "vllm-router",)
    if not values.get(PREFILL_DECODE):
        return Router.of_replicas(program, prefix_aware=task.spec.serve.prefix_aware)
    if (connector := transfer_of(task, values)) != NIXL:
        raise UsageError(f"vllm-router does not know {TRANSFER} = {connector}; use {NIXL}")
    return Router.of_pairs(program, "--vllm-pd-disaggregation")


def rules(task: Task) -> tuple[Rule, ...]:
    """Return the rules for connectors."""
    longest = longest_request(task.spec.serve.loads, task.spec.model.vision)
    version, default = own.PROGRAM.version(task.spec), transfer_of(task, {})
    knob = own.BY_NAME[TRANSFER]
    codes = {0: default, **{code(knob, word): word for word in knob.words}}
    known = [word for word, releases in RELEASES.items() if in_versions(releases, version)]
    has_config = CONFIG in own.PROGRAM.parse(task.spec).others

    def unequal(pair: Pair) -> bool:
        return pair[0].tp != pair[1].tp

    def split(pair: Pair) -> bool:
        return max(each.devices for each in pair) > 1

    def staged(pair: Pair) -> bool:
        sizes = sorted(each.tp for each in pair)
        return max(each.pp for each in pair) > 1 or sizes[1] % sizes[0] != 0

    checks = {NIXL: staged, P2P: unequal, EXAMPLE: split}
    return (
        Rule(
            name="transfer_release",
            knobs=(PREFILL_DECODE, TRANSFER),
            message=f"vllm {version} has the connectors {' and '.join(known) or 'of no kind'} for {PREFILL_DECODE}; "
            + ", ".join(f"{word} needs vllm {releases}" for word, releases in RELEASES.items() if word not in known),
            broken=lambda c: (
                (c[PREFILL_DECODE] > 0) & ~np.isin(c[TRANSFER], [n for n, word in codes.items() if word in known])
            ),
        ),
        Rule(
            name="own_transfer_config",
            knobs=(PREFILL_DECODE,),
            message=f"{PREFILL_DECODE} sets {CONFIG}: remove it from serve.engine_args",
            broken=lambda c: (c[PREFILL_DECODE] > 0) & has_config,
        ),
        Rule(
            name="whole_prompts_in_folder",
            knobs=(PREFILL_DECODE, TRANSFER, own.TOKENS, own.CONTEXT),
            message=f"with {EXAMPLE}, which needs whole prompts, {own.TOKENS} must be at least {own.CONTEXT}",
            broken=lambda c: (
                (c[PREFILL_DECODE] > 0)
                & np.isin(c[TRANSFER], [n for n, word in codes.items() if word == EXAMPLE])
                & (c[own.TOKENS] > 0)
                & (c[own.TOKENS] < np.maximum(c[own.CONTEXT], longest))
            ),
        ),
        transfer_rule(
            task,
            TRANSFER,
            {number: checks[word] for number, word in codes.items()},
            f"{NIXL} needs pp1 and tp that divide each other, {P2P} the same tp, {EXAMPLE} one device per instance",
        ),
    )
