"""Manifests of NVIDIA Dynamo: a frontend, which receives the requests, and workers that run an engine.

Source of the fields of DynamoGraphDeployment: `deploy/operator/api/v1beta1` of github.com/ai-dynamo/dynamo, as in
release 1.3.1 (2026-08). A worker accepts the arguments of the engine (`components/src/dynamo/{vllm,sglang}/args.py`).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flagcore.contracts import ExportJob
from flagcore.contracts.exchange import DEVICES_OF_HOST, comments
from flagcore.domain.engine import without_devices
from flagcore.domain.launch import ServerGroup
from flagcore.domain.secrets import is_secret
from flagcore.errors import UsageError
from flagcore.i18n import _
from flagcore.spec.plain_data import dump_yaml, package_yaml
from flagcore_kubernetes.pods import claim_and_mount, device_limits

TRANSFER = "kv_transfer"
"""The knob for the method by which workers that only prefill or only decode exchange caches."""
LEAST_REQUESTS = {"DYN_ROUTER_MODE": "least-loaded"}
PREFIX_AWARE = {"DYN_ROUTER_MODE": "kv", "DYN_ROUTER_USE_KV_EVENTS": "false"}
"""Environment variables with which the frontend routes as trials do: to the worker with the fewest requests, or to the
one that has the prefix. Without cache events from the workers, the frontend infers what their caches contain from the
requests that it sent."""
HOST_FLAGS = ("nnodes", "node-rank", "master-addr", "master-port", "dist-init-addr")
"""Flags for several hosts, which the operator adds."""
_RELEASE = re.compile(r":v?\d+\.\d+\.\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """How Dynamo runs an engine.

    - `program`: the engine's own command, whose arguments the worker accepts.
    - `module`: the Python module of the engine's Dynamo worker.
    - `transfers`: the methods by which workers that only prefill or only decode can exchange caches.
    - `frontend_flags`: flags of the engine's own server that the worker does not accept.
    - `flags`: flags that the worker needs in addition.
    - `kind_flag`: the flag that makes a worker only prefill or only decode; empty if it is the server's flag.
    - `own_variables`: environment variables that such workers set themselves.
    """

    program: Sequence[str]
    module: str
    transfers: Sequence[str]
    frontend_flags: Sequence[str] = ()
    flags: Sequence[str] = ()
    kind_flag: str = ""
    own_variables: Sequence[str] = ()


def export(job: ExportJob) -> Mapping[str, str]:
    """Return the manifest of the servers, by file name.

    Raises UsageError if no image is given, or if Dynamo does not run the engine or exchange its caches as in trials.
    """
    engine, image = job.platform.task.spec.work.engine, job.options.get("image", "")
    table = package_yaml(__package__, "dynamo.yaml")
    if engine not in table:
        raise UsageError(_("--to dynamo: Dynamo does not run {engine}", engine=engine))
    if not image:
        example = f"REGISTRY/ai-dynamo/{engine}-runtime:1.3.1"
        raise UsageError(_("--to dynamo needs --image, a runtime image of Dynamo, such as {image}", image=example))
    worker, transfer = Worker(**table[engine]), job.candidate.as_dict().get(TRANSFER)
    one = ServerGroup(name="server", launch=job.launch, devices=job.devices, replicas=job.replicas)
    groups = job.servers.groups if job.servers else (one,)
    is_split = len(groups) > 1
    if is_split and transfer not in (None, *worker.transfers):
        supported = ", ".join(sorted(worker.transfers))
        raise UsageError(f"--to dynamo: {TRANSFER} = {transfer} is not supported; use {supported}")
    routing: Mapping[str, str] = {}
    if not is_split and groups[0].replicas > 1:
        routing = PREFIX_AWARE if job.platform.task.spec.serve.prefix_aware else LEAST_REQUESTS
    env = {"env": [{"name": name, "value": value} for name, value in routing.items()]} if routing else {}
    template = {"spec": {"containers": [{"name": "main", "image": image, **env}]}}
    frontend = {"name": "Frontend", "type": "frontend", "replicas": 1, "podTemplate": template}
    components = [_component(worker, job, group, group.name if is_split else "") for group in groups]
    data = {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": job.name},
        "spec": {"backendFramework": engine, "components": [frontend, *components]},
    }
    head = [*comments(job), *(f"# {line}" for line in _notes(worker, job, groups, routing))]
    return {f"{job.name}.yaml": "\n".join([*head, dump_yaml(data, width=1000)])}


def _component(worker: Worker, job: ExportJob, group: ServerGroup, kind: str) -> dict[str, Any]:
    """Return the component that runs a group of servers. `kind`: prefill or decode if they do only one of both.

    Raises UsageError if no plugin names the device's Kubernetes resource.
    """
    arguments, _left_out = _arguments(worker, job, group, kind)
    hidden = worker.own_variables if kind else ()
    variables, secrets = _variables(job, group)
    of_host = [name for name, value in variables.items() if any(each in value for each in DEVICES_OF_HOST)]
    plain = {name: value for name, value in variables.items() if name not in (*hidden, *of_host)}
    store, limits = f"{job.name}-secrets", device_limits(job.platform, group.devices, job.options)
    claim, mount = claim_and_mount(job.options.get("volume", ""))
    container = {
        "name": "main",
        "image": job.options["image"],
        "command": ["python3", "-m", worker.module],
        "args": [word.replace("$", "$$") for word in arguments],  # Kubernetes reads $$ as $, and expands $(NAME)
        "env": [
            *({"name": name, "value": value} for name, value in plain.items()),
            *({"name": each, "valueFrom": {"secretKeyRef": {"name": store, "key": each}}} for each in secrets),
        ],
        "resources": {"limits": {name: str(count) for name, count in limits.items()}},
        **({"volumeMounts": [{"name": "data", "mountPath": mount}]} if claim else {}),
    }
    volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": claim}}] if claim else []
    pod = {"containers": [container], **({"volumes": volumes} if volumes else {})}
    name = kind or "worker"
    return {
        "name": name,
        "type": name,
        "replicas": group.replicas,
        **({"multinode": {"nodeCount": group.hosts}} if group.hosts > 1 else {}),
        "podTemplate": {"spec": pod},
    }


def _variables(job: ExportJob, group: ServerGroup) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the environment variables of a group's workers, and the names of its secret variables."""
    variables = without_devices(job.platform.support, group.launch.environment)
    secrets = tuple(name for name, value in variables.items() if is_secret(name, value))
    return {name: value for name, value in variables.items() if name not in secrets}, secrets


def _arguments(worker: Worker, job: ExportJob, group: ServerGroup, kind: str) -> tuple[tuple[str, ...], list[str]]:
    """Return the arguments of a group's workers, and the flags of the server that they lack."""
    program = job.platform.task.spec.serve.command or worker.program
    words = group.launch.argv[len(program) :]
    arguments, left_out, keep = list[str](), list[str](), True
    if words and not words[0].startswith("-"):
        arguments.append("--model")
    for word in words:
        if word.startswith("--"):
            name = word.lstrip("-").partition("=")[0].replace("_", "-")
            keep = name not in HOST_FLAGS and name.removeprefix("no-") not in worker.frontend_flags
            left_out += [] if keep or name in ("host", "port", *HOST_FLAGS) else [f"--{name}"]
        arguments += [word] if keep else []
    kind_arguments = (worker.kind_flag, kind) if kind and worker.kind_flag else ()
    return (*arguments, *worker.flags, *kind_arguments), left_out


def _notes(worker: Worker, job: ExportJob, groups: Sequence[ServerGroup], routing: Mapping[str, str]) -> list[str]:
    """Return the manifest's comments, which explain its choices."""
    lines = [f"kubectl apply -f {job.name}.yaml: the service {job.name}-frontend takes requests at port 8000."]
    if routing:
        target = "that has its prefix" if routing is PREFIX_AWARE else "with the fewest requests"
        lines.append(
            f"DYN_ROUTER_MODE = {routing['DYN_ROUTER_MODE']}: a request goes to the worker {target}, as in trials."
        )
    if len(groups) > 1:
        lines.append("The workers of the type prefill send their caches to those of the type decode.")
    if any(each.hosts > 1 for each in groups):
        lines.append("multinode: the operator adds the flags for several hosts. It needs Grove or LeaderWorkerSet.")
    if left_out := dict.fromkeys(flag for each in groups for flag in _arguments(worker, job, each, "")[1]):
        lines.append(f"Left out, because the frontend takes the requests: {', '.join(left_out)}.")
    weights = job.platform.task.spec.serve.weights or ""
    if weights.startswith("/") and not job.options.get("volume"):
        lines.append(f"The image must have the model in {weights}; --volume CLAIM:PATH mounts a volume.")
    if names := dict.fromkeys(name for each in groups for name in _variables(job, each)[1]):
        lines.append(f"Create the secret {job.name}-secrets first, with {', '.join(names)}.")
    if not _RELEASE.search(job.options["image"]):
        lines.append("From Dynamo 1.4, set runtimeVersionOverride: the tag of the image is not a release of Dynamo.")
    return lines
