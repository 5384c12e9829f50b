"""Exports the best configuration: one server, or several behind nginx or a router of the engine."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import yaml

from flagcore.domain.launch import Launch
from flagcore.domain.secrets import is_secret, secrets_in_arguments
from flagcore.engines.serving.launch.server import SHARED_FOLDER, Instance, Router

FRONT_PORT = 8000
"""The port of a single server, or of nginx or the router; the servers behind it have the following ports."""
MEETING_PORT = 8500
"""The rendezvous port of the hosts of the first instance; the other instances have the following ports."""
START, NGINX, COMPOSE = "start.sh", "nginx.conf", "compose.yaml"
SHARED_MOUNT = "/shared"
"""Where containers mount the folder that they share."""
NETWORK_DEVICES = ("{interface}", "{adapters}")
"""Values of variables for the devices between hosts, which servers on one host do not use."""
KIND_STEP = 16
"""Distance of the ports of servers that only prefill or decode: each rank may use a port for caches."""


def launch(
    instances: Sequence[Instance],
    folder: str,
    directory: str,
    health: str,
    hosts: Sequence[str] = (),
    router: Router | None = None,
) -> Launch:
    """Return how to start the best configuration; write files for several instances into `folder`. Raises OSError.

    The path `health` returns 200 when a server is ready. On several `hosts`, the user starts the script on each.
    `router` is in front of servers that only prefill or decode.
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
    if router is None:
        Path(folder, NGINX).write_text(_nginx(placed, hosts), encoding="utf-8")
    start, has_secret = Path(folder, START), any(secrets_in_arguments(each.argv) for each in placed)
    start.touch(mode=0o600)
    start.write_text(start_script(placed, folder, hosts, router), encoding="utf-8")
    start.chmod(0o700 if has_secret else 0o755)
    urls = tuple(f"http://127.0.0.1:{port}{health}" for port in (FRONT_PORT, *ports))
    numbers = ", ".join(f"NODE_RANK={number} on {host}" for number, host in enumerate(hosts))
    return Launch(
        argv=("/bin/sh", str(start)),
        folder=folder,
        directory=directory,
        ready=() if hosts else urls,
        missing=f"a start on each host, with its number: {numbers}" if hosts else "",
    )


def start_script(
    instances: Sequence[Instance], folder: str, hosts: Sequence[str] = (), router: Router | None = None
) -> str:
    """Return a shell script that runs the instances of a host, on the first one also nginx or the router, and ends them
    together.
    """
    commands: list[list[str]] = [[] for _ in hosts or ("",)]
    for each in instances:
        for part, argv in enumerate((each.argv, *each.further)):
            commands[each.host + part].append(shlex.join(_command(replace(each, argv=argv))))
    front: Sequence[str] = ("nginx", "-c", str(Path(folder, NGINX)), "-g", "daemon off;")
    if router:
        front = _front(router, instances, hosts)
    return _render("start.sh.j2", commands=commands, count=len(instances), front=front, router=router is not None)


def _front(router: Router, instances: Sequence[Instance], hosts: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the command of the router in front of instances."""
    places = zip(instances, _places_of(instances, hosts), strict=True)
    return router.instance([(each.kind, *place) for each, place in places]).at_port(FRONT_PORT).argv


def _places_of(instances: Sequence[Instance], hosts: Sequence[str]) -> list[tuple[str, int]]:
    """Return the host and the port of each instance."""
    names = [hosts[each.host] if hosts else "127.0.0.1" for each in instances]
    return list(zip(names, _ports(instances), strict=True))


def _ports(instances: Sequence[Instance]) -> list[int]:
    step = KIND_STEP if any(each.kind for each in instances) else 1
    return [FRONT_PORT + 1 + number * step for number in range(len(instances))]


def _render(template: str, **values: object) -> str:
    from jinja2 import Environment, StrictUndefined

    text = (files(__package__) / "templates" / template).read_text("utf-8")
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    environment.filters["quoted"] = shlex.quote
    return environment.from_string(text).render(port=FRONT_PORT, **values)


def compose_files(
    instances: Sequence[Instance],
    directory: str | None,
    common: Mapping[str, str],
    comments: Sequence[str],
    router: Router | None = None,
) -> dict[str, str]:
    """Return a docker compose file for all instances, with the host's network and files mounted at the same paths, and
    the configuration of nginx if there are several.

    The program comes from the image; the other paths of the commands are mounted. `common` is the environment of all
    instances.
    """
    several = len(instances) > 1
    ports = _ports(instances) if several else [FRONT_PORT]
    instances = [each.at_port(port) for each, port in zip(instances, ports, strict=True)]
    shares = any(SHARED_MOUNT in word for each in instances for word in each.argv)
    words = [word for instance in instances for word in instance.argv[1:]]
    paths = sorted({*([directory] if directory else []), *(path for word in words for path in _mounted_paths(word))})
    services: dict[str, object] = {
        f"instance-{number}": {
            "image": "${IMAGE:?set IMAGE to an image that has the engine}",
            "network_mode": "host",
            "ipc": "host",
            **({"working_dir": directory} if directory else {}),
            "entrypoint": [_escape(word) for word in (Path(instance.argv[0]).name, *instance.argv[1:])],
            "environment": {
                name: f"${{{name}:?set {name}: it is secret}}" if is_secret(name) else _escape(value)
                for name, value in {**common, **instance.environment}.items()
            },
            **({"cpuset": ",".join(map(str, instance.cores))} if instance.cores else {}),
            "volumes": [
                *(f"{_escape(path)}:{_escape(path)}:ro" for path in paths),
                *([f"./{SHARED_FOLDER}:{SHARED_MOUNT}"] if shares else []),
            ],
            "restart": "unless-stopped",
        }
        for number, instance in enumerate(instances)
    }
    if router:
        argv = _front(router, instances)
        services["router"] = {
            "image": f"${{ROUTER_IMAGE:?set ROUTER_IMAGE to an image that has {router.name}}}",
            "network_mode": "host",
            "entrypoint": [Path(argv[0]).name, *argv[1:]],
            "depends_on": list(services),
            "restart": "unless-stopped",
        }
    elif several:
        services["balancer"] = {
            "image": "nginx:stable",
            "network_mode": "host",
            "volumes": [f"./{NGINX}:/etc/nginx/nginx.conf:ro"],
            "depends_on": list(services),
            "restart": "unless-stopped",
        }
    head = [
        *(f"# {line}" for line in comments),
        f"# IMAGE=... docker compose up: starts the servers, which listen at port {FRONT_PORT}.",
        "# Put the device settings of the vendor's container runtime into compose.override.yaml.",
    ]
    text = "\n".join([*head, str(yaml.safe_dump({"services": services}, sort_keys=False, width=120))])
    return {COMPOSE: text, **({NGINX: _nginx(instances, ())} if several and not router else {})}


def _nginx(instances: Sequence[Instance], hosts: Sequence[str]) -> str:
    return _render("nginx.conf.j2", places=[f"{name}:{port}" for name, port in _places_of(instances, hosts)])


def _command(instance: Instance) -> list[str]:
    """Return the command line of an instance with its environment and, if it has cores, pinned to them."""
    variables = [f"{name}={value}" for name, value in instance.environment.items()]
    pin = ["taskset", "-c", ",".join(map(str, instance.cores))] if instance.cores else []
    return [*(["env", *variables] if variables else []), *pin, *instance.argv]


def _mounted_paths(word: str) -> set[str]:
    """Return the paths to mount for a word of a command: the path itself, and the targets of links in a folder."""
    path = Path(word)
    if not path.is_absolute() or not path.exists():
        return set()
    links = [each for each in path.iterdir() if each.is_symlink()] if path.is_dir() else []
    return {str(path), *(str(each.resolve().parent) for each in (*links, *([path] if path.is_symlink() else [])))}


def _escape(text: str) -> str:
    """Return `text` with dollar signs escaped for compose."""
    return text.replace("$", "$$")
