"""Exports the best configuration: one server, or several behind a least-connections balancer."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

import yaml

from flagcore.domain.launch import Launch
from flagcore.domain.secrets import is_secret, secrets_in_arguments
from flagcore.engines.serving.trial.job import Instance

FRONT_PORT = 8000
"""The port of a single server, or of the balancer; the servers behind it have the following ports."""
BALANCER = "flagcore.engines.serving.balancer"
START, NGINX, COMPOSE = "start.sh", "nginx.conf", "docker-compose.yaml"


def launch(
    instances: Sequence[Instance], folder: str, directory: str, common: Mapping[str, str], health: str
) -> Launch:
    """Return how to start the best configuration; write files for several instances into `folder`. Raises OSError.

    `common` is the environment of all launches, which containers need in full. The path `health` returns 200 when a
    server is ready.
    """
    if len(instances) == 1:
        instance = instances[0].at_port(FRONT_PORT)
        ready = (f"http://127.0.0.1:{FRONT_PORT}{health}",)
        argv, environment = instance.argv, instance.environment
        return Launch(argv=argv, environment=environment, folder=folder, directory=directory, ready=ready)
    ports = _ports(instances)
    placed = [each.at_port(port) for each, port in zip(instances, ports, strict=True)]
    Path(folder, NGINX).write_text(_render("nginx.conf.j2", ports=ports), encoding="utf-8")
    compose = compose_yaml(placed, folder, directory, common)
    start = Path(folder, START)
    has_secret = any(secrets_in_arguments(each.argv) for each in placed)
    for file, text, mode in ((start, start_script(placed, folder), 0o700), (Path(folder, COMPOSE), compose, 0o600)):
        file.touch(mode=0o600)
        file.write_text(text, encoding="utf-8")
        file.chmod(mode if has_secret else mode | 0o044 | (0o011 if mode & 0o100 else 0))
    urls = tuple(f"http://127.0.0.1:{port}{health}" for port in (FRONT_PORT, *ports))
    return Launch(argv=("/bin/sh", str(start)), folder=folder, directory=directory, ready=urls)


def start_script(instances: Sequence[Instance], folder: str) -> str:
    """Return a shell script that runs all instances and the balancer, and stops them together."""
    return _render(
        "start.sh.j2",
        commands=[shlex.join(_command(each)) for each in instances],
        conf=shlex.quote(str(Path(folder, NGINX))),
        balancer=shlex.join((sys.executable, "-m", BALANCER, str(FRONT_PORT), *map(str, _ports(instances)))),
    )


def _ports(instances: Sequence[Instance]) -> list[int]:
    return [FRONT_PORT + number for number in range(1, len(instances) + 1)]


def _render(template: str, **values: object) -> str:
    from jinja2 import Environment, StrictUndefined

    text = (files(__package__) / "templates" / template).read_text("utf-8")
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    return environment.from_string(text).render(front=FRONT_PORT, **values)


def compose_yaml(instances: Sequence[Instance], folder: str, directory: str, common: Mapping[str, str]) -> str:
    """Return a docker compose file for all instances, with the host's network and files mounted at the same paths.

    The program comes from the image; the other paths of the commands are mounted.
    """
    words = [word for instance in instances for word in instance.argv[1:]]
    paths = sorted({directory, *(path for word in words for path in _mounted_paths(word))})
    services: dict[str, object] = {
        f"instance-{number}": {
            "image": "${IMAGE:?set IMAGE to an image that has the engine}",
            "network_mode": "host",
            "ipc": "host",
            "working_dir": directory,
            "entrypoint": [_escape(word) for word in (Path(instance.argv[0]).name, *instance.argv[1:])],
            "environment": {
                name: f"${{{name}:?set {name}: it is secret}}" if is_secret(name) else _escape(value)
                for name, value in {**common, **instance.environment}.items()
            },
            **({"cpuset": ",".join(map(str, instance.cores))} if instance.cores else {}),
            "volumes": [f"{_escape(path)}:{_escape(path)}:ro" for path in paths],
            "restart": "unless-stopped",
        }
        for number, instance in enumerate(instances)
    }
    services["balancer"] = {
        "image": "nginx:stable",
        "network_mode": "host",
        "volumes": [f"{_escape(str(Path(folder, NGINX)))}:/etc/nginx/nginx.conf:ro"],
        "depends_on": list(services),
        "restart": "unless-stopped",
    }
    head = (
        "# IMAGE=... docker compose up: starts the servers and nginx, which listens at port "
        f"{FRONT_PORT}.\n# Put the device settings of the vendor's container runtime into compose.override.yaml.\n"
    )
    return head + str(yaml.safe_dump({"services": services}, sort_keys=False, width=120))


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
