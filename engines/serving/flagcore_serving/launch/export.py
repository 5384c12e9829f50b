"""Exports the best configuration: one server, or several behind nginx or a router of the engine."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from flagcore.contracts.exchange import ANY_HOST, DEVICES_OF_HOST, shell_quoted
from flagcore.domain.launch import Launch
from flagcore.domain.secrets import is_secret
from flagcore_serving.launch.server import Instance, Router

FRONT_PORT = 8000
"""The port of a single server, or of nginx or the router. The servers behind it use the next ports."""
MEETING_PORT = 8500
"""The rendezvous port of the first instance's hosts. The other instances use the next ports."""
START, NGINX, COMPOSE = "start.sh", "nginx.conf", "compose.yaml"
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
        return " ".join(shell_quoted(word, {**names, **DEVICES_OF_HOST}) for word in words)

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
    fields["first"] = shell(hosts[:1])
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
                name: f"${{{name}:?set it: it is secret}}" if is_secret(name, value) else _escape(value)
                for name, value in {**common, **each.environment}.items()
            },
            "cores": ",".join(map(str, each.cores)),
        }
        for each in instances
    ]
    front = _front(router, instances) if router else ()
    fields = {"directory": directory, "paths": [_escape(path) for path in paths], "comments": comments, "image": image}
    start = (Path(front[0]).name, *front[1:]) if front else ()
    text = _render("compose.yaml.j2", services=services, router=router, front=start, nginx=NGINX, **fields)
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
