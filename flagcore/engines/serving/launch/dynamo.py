"""Exports servers to Dynamo: a DynamoGraphDeployment with a frontend and workers.

Fields: `deploy/operator/api/v1beta1` of github.com/ai-dynamo/dynamo, as in its release 1.3.1 (2026-08). A worker takes
the arguments of the engine (`components/src/dynamo/{vllm,sglang}/args.py`); the frontend takes the requests.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from flagcore.contracts import ExportJob
from flagcore.contracts.exchange import claim_and_mount, comments, device_limits
from flagcore.domain.engine import without_devices
from flagcore.domain.secrets import is_secret
from flagcore.engines.serving.launch.export import FRONT_PORT, NETWORK_DEVICES
from flagcore.engines.serving.launch.profile import EngineProfile
from flagcore.engines.serving.launch.server import SHARED, Instance
from flagcore.engines.serving.space.knobs import TRANSFER
from flagcore.engines.serving.space.placement import Placement
from flagcore.engines.serving.space.program import Worker
from flagcore.errors import UsageError
from flagcore.i18n import _
from flagcore.spec.plain_data import dump_yaml

TARGET = "dynamo"
EXAMPLE = "REGISTRY/ai-dynamo/{engine}-runtime:1.3.1"
LEAST_REQUESTS = {"DYN_ROUTER_MODE": "least-loaded"}
PREFIX_AWARE = {"DYN_ROUTER_MODE": "kv", "DYN_ROUTER_USE_KV_EVENTS": "false"}
"""Variables of the frontend that route as trials do: to the worker with the fewest requests, or to the one that has the
prefix. Without events of the workers' caches, the frontend infers them from the requests that it sent.
"""
_RELEASE = re.compile(r":v?\d+\.\d+\.\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Component:
    """A worker: its fields except name and replicas. `left_out` are flags of the server without an equivalent."""

    kind: str
    hosts: int
    secrets: tuple[str, ...]
    fields: Mapping[str, Any]
    left_out: tuple[str, ...] = field(compare=False)

    @classmethod
    def of(
        cls, engine: EngineProfile, worker: Worker, job: ExportJob, instance: Instance, place: Placement
    ) -> _Component:
        """Return the component of an instance.

        Raises UsageError for a transfer without support, and if no plugin has the name of the device's resource.
        """
        transfer = place.values.get(TRANSFER)
        if place.kind and (any(SHARED in word for word in instance.argv) or transfer not in (None, *worker.transfers)):
            known = ", ".join(sorted(worker.transfers))
            raise UsageError(f"--to dynamo: {TRANSFER} = {transfer or 'not set'} is not supported; use {known}")
        spec, hosts = job.platform.task.spec, len(place.hosts)
        argv = instance.at_port(FRONT_PORT).argv
        if hosts > 1 and engine.on_host:
            argv = argv[: -len(engine.on_host(hosts, 0))]  # the operator adds its own
        arguments, left_out = _arguments(worker, argv[len(engine.program.start_command(spec)) :], place.kind)
        variables = {**job.platform.environment, **instance.environment, **spec.envs}
        variables = without_devices(job.platform.support, variables)
        hidden = worker.own_variables if place.kind else ()
        secrets = tuple(name for name in variables if is_secret(name))
        plain = {
            name: value
            for name, value in variables.items()
            if name not in (*hidden, *secrets) and value not in NETWORK_DEVICES
        }
        claim, mount = claim_and_mount(job.options.get("volume", ""))
        store = f"{job.name}-secrets"
        container = {
            "name": "main",
            "image": job.options["image"],
            "command": ["python3", "-m", worker.module],
            "args": [word.replace("$", "$$") for word in arguments],  # Kubernetes reads $$ as $, and $(NAME)
            "env": [
                *({"name": key, "value": value} for key, value in plain.items()),
                *({"name": k, "valueFrom": {"secretKeyRef": {"name": store, "key": k}}} for k in secrets),
            ],
            "resources": {
                "limits": {
                    name: str(count) for name, count in device_limits(job.platform, place.width // hosts).items()
                }
            },
            **({"volumeMounts": [{"name": "data", "mountPath": mount}]} if claim else {}),
        }
        volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": claim}}] if claim else []
        pod = {"containers": [container], **({"volumes": volumes} if volumes else {})}
        nodes = {"multinode": {"nodeCount": hosts}} if hosts > 1 else {}
        fields = {**nodes, "podTemplate": {"spec": pod}}
        return cls(kind=place.kind, hosts=hosts, secrets=secrets, fields=fields, left_out=left_out)


def export(
    engine: EngineProfile, job: ExportJob, instances: Sequence[Instance], places: Sequence[Placement]
) -> Mapping[str, str]:
    """Return the manifest of servers. Raises UsageError without an image, or for an engine that Dynamo does not run."""
    worker, image = engine.program.dynamo, job.options.get("image", "")
    if worker is None:
        raise UsageError(_("--to dynamo: Dynamo does not run {engine}", engine=engine.name))
    if not image:
        example = EXAMPLE.format(engine=engine.name)
        raise UsageError(_("--to dynamo needs --image, a runtime image of Dynamo, such as {image}", image=example))
    workers = [_Component.of(engine, worker, job, *pair) for pair in zip(instances, places, strict=True)]
    components, numbers = list[dict[str, Any]](), Counter[str]()
    for one, equal in groupby(workers):
        kind = one.kind or "worker"
        numbers[kind] += 1
        name = kind if numbers[kind] == 1 else f"{kind}-{numbers[kind]}"
        components.append({"name": name, "type": kind, "replicas": len(list(equal)), **one.fields})
    routing: Mapping[str, str] = {}
    if len(workers) > 1 and not any(one.kind for one in workers):
        routing = PREFIX_AWARE if job.platform.task.spec.serve.prefix_aware else LEAST_REQUESTS
    env = {"env": [{"name": name, "value": value} for name, value in routing.items()]} if routing else {}
    template = {"spec": {"containers": [{"name": "main", "image": image, **env}]}}
    frontend = {"name": "Frontend", "type": "frontend", "replicas": 1, "podTemplate": template}
    data = {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": job.name},
        "spec": {"backendFramework": engine.name, "components": [frontend, *components]},
    }
    head = [*comments(job), *(f"# {line}" for line in _notes(job, workers, routing))]
    return {f"{job.name}.yaml": "\n".join([*head, dump_yaml(data, width=1000)])}


def _arguments(worker: Worker, words: Sequence[str], kind: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the arguments of a worker for those of a server, and the flags that the worker does not have."""
    arguments, left_out, keep = list[str](), list[str](), True
    if words and not words[0].startswith("-"):
        arguments.append("--model")
    for word in words:
        if word.startswith("--"):
            name = word.lstrip("-").partition("=")[0].replace("_", "-")
            keep = name.removeprefix("no-") not in worker.frontend_flags
            left_out += [] if keep or name in ("host", "port") else [f"--{name}"]
        arguments += [word] if keep else []
    own = (worker.kind_flag, kind) if kind and worker.kind_flag else ()
    return (*arguments, *worker.flags, *own), tuple(left_out)


def _notes(job: ExportJob, components: Sequence[_Component], routing: Mapping[str, str]) -> list[str]:
    """Return comments on the choices of the manifest."""
    lines = [f"kubectl apply -f {job.name}.yaml: the service {job.name}-frontend takes requests at port 8000."]
    if routing:
        target = "that has its prefix" if routing is PREFIX_AWARE else "with the fewest"
        lines.append(
            f"DYN_ROUTER_MODE = {routing['DYN_ROUTER_MODE']}: a request goes to the worker {target}, as in trials."
        )
    if any(each.kind for each in components):
        lines.append("The workers of the type prefill send their caches to those of the type decode.")
    if any(each.hosts > 1 for each in components):
        lines.append("multinode: the operator adds the flags for several hosts. It needs Grove or LeaderWorkerSet.")
    if left_out := dict.fromkeys(flag for each in components for flag in each.left_out):
        lines.append(f"Left out, because the frontend takes the requests: {', '.join(left_out)}.")
    weights = job.platform.task.spec.serve.weights or ""
    if weights.startswith("/") and not job.options.get("volume"):
        lines.append(f"The image must have the model in {weights}; --volume CLAIM:PATH mounts a volume.")
    if names := dict.fromkeys(name for each in components for name in each.secrets):
        lines.append(f"Create the secret {job.name}-secrets first, with {', '.join(names)}.")
    if not _RELEASE.search(job.options["image"]):
        lines.append("From Dynamo 1.4, set runtimeVersionOverride: the tag of the image is not a release of Dynamo.")
    return lines
