"""Exports the best configuration: one server, or several behind nginx, a router of the engine or Dynamo.

Source of the fields of Dynamo's DynamoGraphDeployment: `deploy/operator/api/v1beta1` of github.com/ai-dynamo/dynamo, as
in release 1.3.1 (2026-08). A worker accepts the arguments of the engine
(`components/src/dynamo/{vllm,sglang}/args.py`); the frontend receives the requests.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

from flagcore.contracts import ExportJob
from flagcore.contracts.exchange import ANY_HOST, claim_and_mount, comments, device_limits, shell_quoted
from flagcore.domain.engine import without_devices
from flagcore.domain.launch import Launch
from flagcore.domain.secrets import is_secret
from flagcore.engines.serving.launch.profile import EngineProfile
from flagcore.engines.serving.launch.server import Instance, Router
from flagcore.engines.serving.space.knobs import TRANSFER
from flagcore.engines.serving.space.placement import Placement
from flagcore.engines.serving.space.program import Worker
from flagcore.errors import UsageError
from flagcore.i18n import _
from flagcore.spec.plain_data import dump_yaml

FRONT_PORT = 8000
"""The port of a single server, or of nginx or the router. The servers behind it use the next ports."""
MEETING_PORT = 8500
"""The rendezvous port of the first instance's hosts. The other instances use the next ports."""
START, NGINX, COMPOSE = "start.sh", "nginx.conf", "compose.yaml"
NETWORK_DEVICES = ("{interface}", "{adapters}")
"""Placeholders for network devices in environment variables. Servers on one host do not use these variables."""
KIND_STEP = 16
"""Distance between the ports of servers that only prefill or decode: each rank may use its own port for caches."""


def launch(
    instances: Sequence[Instance],
    folder: str,
    directory: str,
    health: str,
    hosts: Sequence[str] = (),
    router: Router | None = None,
) -> Launch:
    """Return the launch of the best configuration. For several instances, it runs the script START in `folder`.

    `health`: the path that returns 200 when a server is ready. `hosts`: the names of the hosts if there are several, or
    the placeholders `ANY_HOST` for them; the user starts the script on each of them. `router`: the router in front of
    the instances; if None, nginx divides the requests.
    """
    if len(instances) == 1 and not instances[0].further:
        instance = instances[0].at_port(FRONT_PORT)
        ready = (f"http://127.0.0.1:{FRONT_PORT}{health}",)
        argv, environment = instance.argv, instance.environment
        return Launch(argv=argv, environment=environment, folder=folder, directory=directory, ready=ready)
    ports, placed = _ports(instances), list(instances)
    if hosts:
        heads = enumerate(each.host for each in instances)
        meet = [(hosts[host], str(MEETING_PORT + number)) for number, host in heads]
        placed = [each.at_head(*place) for each, place in zip(placed, meet, strict=True)]
    placed = [each.at_port(port) for each, port in zip(placed, ports, strict=True)]
    urls = tuple(f"http://127.0.0.1:{port}{health}" for port in dict.fromkeys((FRONT_PORT, *ports)))
    numbers = ", ".join(f"NODE_RANK={number} on {host}" for number, host in enumerate(hosts))
    return Launch(
        argv=("/bin/bash", str(Path(folder, START))),
        folder=folder,
        directory=directory,
        script=start_script(placed, hosts, router),
        ready=() if hosts else urls,
        missing=f"a start on each host, with its number: {numbers}" if hosts else "",
    )


def start_script(instances: Sequence[Instance], hosts: Sequence[str] = (), router: Router | None = None) -> str:
    """Return the lines of a bash script that runs the instances of a host and stops them together.

    On the first host, it also runs the router, or nginx if there are several instances.
    """
    names = {host: f"{{hosts[{number}]}}" for number, host in enumerate(hosts) if host == ANY_HOST.format(number)}

    def shell(words: Sequence[str]) -> str:
        return " ".join(shell_quoted(word, names) for word in words)

    commands: list[list[str]] = [[] for _ in hosts or ("",)]
    for each in instances:
        for host_offset, argv in enumerate((each.argv, *each.further)):
            commands[each.host + host_offset].append(shell(_command(replace(each, argv=argv))))
    program, front, conf = "nginx", "", ""
    if router:
        argv = _front(router, instances, hosts)
        program, front = argv[0], shell(argv)
    elif len(instances) > 1:
        front = f"""nginx -p "$folder" -c {NGINX} -g 'daemon off;'"""
        conf = _nginx(instances, [f"${names[host]}" if host in names else host for host in hosts])
    count, has_router = len(instances), router is not None
    fields = {"commands": commands, "count": count, "named": bool(names), "nginx": conf, "router": has_router}
    return _render("start.sh.j2", **fields, front=front, program=program)


def _front(router: Router, instances: Sequence[Instance], hosts: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the command that starts `router` in front of `instances`."""
    places = zip(instances, _places_of(instances, hosts), strict=True)
    return router.instance([(each.kind, *place) for each, place in places]).at_port(FRONT_PORT).argv


def _places_of(instances: Sequence[Instance], hosts: Sequence[str]) -> list[tuple[str, int]]:
    """Return the host and the port of each instance."""
    names = [hosts[each.host] if hosts else "127.0.0.1" for each in instances]
    return list(zip(names, _ports(instances), strict=True))


def _ports(instances: Sequence[Instance]) -> list[int]:
    if len(instances) == 1:
        return [FRONT_PORT]
    step = KIND_STEP if any(each.kind for each in instances) else 1
    return [FRONT_PORT + 1 + number * step for number in range(len(instances))]


def _render(template: str, **values: object) -> str:
    from jinja2 import Environment, StrictUndefined

    text = (files(__package__) / "templates" / template).read_text("utf-8")
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    environment.filters |= {"quoted": shlex.quote, "json": json.dumps}
    return environment.from_string(text).render(port=FRONT_PORT, **values)


def compose_files(
    instances: Sequence[Instance],
    directory: str | None,
    common: Mapping[str, str],
    comments: Sequence[str],
    router: Router | None = None,
    image: str = "",
) -> dict[str, str]:
    """Return the files for docker compose by name: the compose file and, if nginx divides the requests, nginx.conf.

    Containers use the host's network. The program comes from the image; other paths in the commands are mounted at the
    same paths. `common`: the environment variables of all instances. `image`: empty means the variable IMAGE.
    """
    instances = [each.at_port(port) for each, port in zip(instances, _ports(instances), strict=True)]
    words = [word for instance in instances for word in instance.argv[1:]]
    paths = sorted({*([directory] if directory else []), *(path for word in words for path in _mounted_paths(word))})
    services = [
        {
            "command": [_escape(word) for word in (Path(each.argv[0]).name, *each.argv[1:])],
            "variables": {
                name: f"${{{name}:?set {name}: it is secret}}" if is_secret(name) else _escape(value)
                for name, value in {**common, **each.environment}.items()
            },
            "cores": ",".join(map(str, each.cores)),
        }
        for each in instances
    ]
    front = _front(router, instances) if router else ()
    fields: dict[str, object] = {
        "services": services,
        "directory": directory,
        "paths": [_escape(path) for path in paths],
    }
    fields |= {"router": router, "front": (Path(front[0]).name, *front[1:]) if front else (), "nginx": NGINX}
    text = _render("compose.yaml.j2", **fields, comments=comments, image=image)
    return {COMPOSE: text, **({NGINX: _nginx(instances, ())} if len(instances) > 1 and not router else {})}


def _nginx(instances: Sequence[Instance], hosts: Sequence[str]) -> str:
    return _render("nginx.conf.j2", places=[f"{name}:{port}" for name, port in _places_of(instances, hosts)])


def _command(instance: Instance) -> list[str]:
    """Return the command line that starts an instance with its environment and, if it has cores, pins it to them."""
    variables = [f"{name}={value}" for name, value in instance.environment.items()]
    pin = ["taskset", "-c", ",".join(map(str, instance.cores))] if instance.cores else []
    return [*(["env", *variables] if variables else []), *pin, *instance.argv]


def _mounted_paths(word: str) -> set[str]:
    """Return the paths to mount for a word of a command: the path in it, and the folders to which its links point."""
    path = Path(word)
    if not path.is_absolute() or not path.exists():
        return set()
    links = [each for each in path.iterdir() if each.is_symlink()] if path.is_dir() else []
    return {str(path), *(str(each.resolve().parent) for each in (*links, *([path] if path.is_symlink() else [])))}


def _escape(text: str) -> str:
    """Return `text` with dollar signs escaped for compose."""
    return text.replace("$", "$$")


DYNAMO = "dynamo"
EXAMPLE = "REGISTRY/ai-dynamo/{engine}-runtime:1.3.1"
LEAST_REQUESTS = {"DYN_ROUTER_MODE": "least-loaded"}
PREFIX_AWARE = {"DYN_ROUTER_MODE": "kv", "DYN_ROUTER_USE_KV_EVENTS": "false"}
"""Environment variables with which the frontend routes as trials do: to the worker with the fewest requests, or to the
one that has the prefix. Without cache events from the workers, the frontend infers what their caches contain from the
requests that it sent.
"""
_RELEASE = re.compile(r":v?\d+\.\d+\.\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Component:
    """The fields of a Dynamo component that runs a worker, except its name and its number of replicas.

    `left_out`: flags of the server for which the worker has no equivalent.
    """

    kind: str
    hosts: int
    secrets: tuple[str, ...]
    fields: Mapping[str, Any]
    left_out: tuple[str, ...] = field(compare=False)

    @classmethod
    def of(
        cls, engine: EngineProfile, worker: Worker, job: ExportJob, instance: Instance, place: Placement
    ) -> _Component:
        """Return the Dynamo component that runs an instance.

        Raises UsageError if Dynamo does not support the instance's method of cache transfer, or if no plugin names the
        device's Kubernetes resource.
        """
        transfer = place.values.get(TRANSFER)
        if place.kind and transfer not in (None, *worker.transfers):
            supported = ", ".join(sorted(worker.transfers))
            raise UsageError(f"--to dynamo: {TRANSFER} = {transfer} is not supported; use {supported}")
        spec, hosts = job.platform.task.spec, len(place.hosts)
        argv = instance.at_port(FRONT_PORT).argv
        if hosts > 1 and engine.on_host:
            argv = argv[: -len(engine.on_host(hosts, "0"))]  # the operator adds its own flags for hosts
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
            "args": [word.replace("$", "$$") for word in arguments],  # Kubernetes reads $$ as $, and expands $(NAME)
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


def dynamo_files(
    engine: EngineProfile, job: ExportJob, instances: Sequence[Instance], places: Sequence[Placement]
) -> Mapping[str, str]:
    """Return the Dynamo manifest of the servers, by file name.

    Raises UsageError if no image is given, or if Dynamo does not run the engine.
    """
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
    weights = job.platform.task.spec.serve.weights or ""
    head = _render(
        "dynamo.yaml.j2",
        job=job,
        comments=comments(job),
        mode=routing.get("DYN_ROUTER_MODE", ""),
        target="that has its prefix" if routing is PREFIX_AWARE else "with the fewest requests",
        several=any(each.kind for each in workers),
        hosts=max(each.hosts for each in workers),
        left_out=", ".join(dict.fromkeys(flag for each in workers for flag in each.left_out)),
        weights=weights if weights.startswith("/") and not job.options.get("volume") else "",
        secrets=", ".join(dict.fromkeys(name for each in workers for name in each.secrets)),
        release=_RELEASE.search(image),
    )
    return {f"{job.name}.yaml": head + dump_yaml(data, width=1000)}


def _arguments(worker: Worker, words: Sequence[str], kind: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Convert the arguments `words` of a server to arguments of `worker`.

    Also return the flags that the worker lacks.
    """
    arguments, left_out, keep = list[str](), list[str](), True
    if words and not words[0].startswith("-"):
        arguments.append("--model")
    for word in words:
        if word.startswith("--"):
            name = word.lstrip("-").partition("=")[0].replace("_", "-")
            keep = name.removeprefix("no-") not in worker.frontend_flags
            left_out += [] if keep or name in ("host", "port") else [f"--{name}"]
        arguments += [word] if keep else []
    kind_arguments = (worker.kind_flag, kind) if kind and worker.kind_flag else ()
    return (*arguments, *worker.flags, *kind_arguments), tuple(left_out)
