"""Reads containers: commands of docker, podman and nerdctl, Dockerfiles, and compose files."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flagcore.contracts import Commands
from flagcore.domain.launch import Start
from flagcore_importers.values import (
    BRACED,
    KEYS,
    count_of,
    dotenv,
    filled,
    left_out,
    literal_variables,
    positive,
    split_words,
    text_of,
    words_of,
)

CONTAINERS = ("docker", "podman", "nerdctl")
_INSTRUCTION = re.compile(r"(?im)^[ \t]*(FROM|ENV|ARG|ENTRYPOINT|CMD)[ \t]+(.+)$")
_COMPOSE_VARIABLE = re.compile(r"\$(?:(\$)|\{(\w+)(?::?-((?:\$\{[^{}]*\}|[^}])*))?[^}]*\}|(\w+))")
_PROGRAM = re.compile(r"(\S*/)?(python[\d.]* -m |[\w.-]+ serve )")
"""The program of an image, written out."""
_RELEASE = re.compile(r"(?:rocm\S*?_vllm_)?v?(\d+(?:\.\d+){1,3}(?:\.?(?:post|rc|dev|a|b)\d+)?)(?![\d.]|rc)")
_FOR_CPUS = re.compile(r"(?i)[-_/:]cpu\b")
_NAMED_DEVICES = re.compile(
    r"device=([\w,:-]+)|^/dev/(?!video|loop|tty)(?:dri/renderD|[a-z_]+)(\d+)\b|^[\w-]+\.[\w.-]+/[\w-]+=(?!all)([\w,:-]+)"
)
"""Devices that options of a container name: with `device=`, as files, or in CDI."""
Images = Mapping[str, Sequence[str]]
"""The entry points of known images, by repository, or by repository and the start of a tag."""


def images_of(engines: Mapping[str, Commands]) -> dict[str, Sequence[str]]:
    """Return the entry points of the images of engines."""
    return {image: entry for each in engines.values() for image, entry in each.images.items()}


def container(start: Start, image: Any, entry: Any, args: Any, images: Images) -> Start:
    """Return `start` with a container's command, and with the engine release that the tag of its image names."""
    image = f"{image.get('repository')}:{image.get('tag') or ''}" if isinstance(image, Mapping) else image
    repository, tag = [*re.split(":(?=[^/:]*$)", image.partition("@")[0]), ""][:2]
    known = {name: point for name, point in images.items() if _is_known(repository, tag, name)}
    release = _RELEASE.match(tag) if "/" in "".join(known) else None  # others number their own
    given, program = words_of(args), _program(entry)
    if entry is None and known and not _PROGRAM.match(" ".join(given)):
        program = [*known.values()][-1]
        given = given[given[:1] == [*program[-1:]] :]  # said twice
    words = filled((*program, *given), r"\$\((\w+)\)", {"LWS_GROUP_SIZE": str(start.hosts), **start.job, **start.envs})
    is_unknown = bool(image or words) and (not words or words[0].startswith("-"))
    return replace(
        start,
        words=words,
        image=(image or "built here") if is_unknown else "",
        version=release[1] if release else "",
        left_out={**start.left_out, **_unread(image, "" if release else tag)},
    )


def _unread(image: str, tag: str) -> dict[str, str]:
    """Return what is not read of the name of an image. `tag`: its tag if that is no release of an engine."""
    if _FOR_CPUS.search(image.partition("@")[0]):
        return {"image": f"{image}: it is for CPUs, set cluster.chip"}
    return {"image": image} if re.search(r"\d+\.\d", tag) else {}


def _is_known(repository: str, tag: str, name: str) -> bool:
    """Return whether an image is that of a known name, which may have the start of a tag."""
    known, _colon, start = name.partition(":")
    return f"/{repository}".endswith(f"/{known}") and tag.startswith(start)


def _program(entry: Any) -> Sequence[str]:
    """Return the words of an entry point, which may be a list with the command as one word."""
    is_text = isinstance(entry, list) and len(entry) == 1 and " -" in str(entry[0])
    return words_of(entry[0] if is_text else entry)


def image_start(text: str, images: Images, args: Any = None) -> Start:
    """Return what the image of a Dockerfile starts. `args` replace those in the file."""
    stages = dict[str, tuple[str, Any, Any, dict[str, str]]]()
    image, entry, command, envs, stage = "", None, None, dict[str, str](), ""
    lines = re.sub(r"\\[ \t]*\n", " ", re.sub(r"(?m)^\s*#.*\n", "", text))
    for key, value in _INSTRUCTION.findall(lines):
        rest: Any = value.strip()
        if key.upper() == "FROM":
            stages[stage] = (image, entry, command, envs)
            parts = [each for each in rest.split() if not each.startswith("--")]
            stage = parts[-1]
            known = stages.get(parts[0], (filled(parts[:1], BRACED, envs)[0], None, None, {}))
            image, entry, command, envs = *known[:3], dict(known[3])
        elif key.upper() in ("ENV", "ARG"):
            pairs = split_words(rest)
            pairs = pairs if "=" in pairs[0] else [f"{pairs[0]}={' '.join(pairs[1:])}"]
            envs |= literal_variables(filled(pairs, BRACED, envs))
        else:
            try:
                given = filled(map(str, json.loads(rest)), BRACED, envs)
            except ValueError:
                given = ("sh", "-c", rest)
            entry, command = (given, None) if key.upper() == "ENTRYPOINT" else (entry, given)
    return container(Start(envs=envs), image, entry, args or command, images)


def container_run(start: Start, words: Sequence[str], images: Images) -> Start:
    """Return what `docker run` with these words starts."""
    options, rest = _options(words)
    if not rest:
        return replace(start, words=())

    def values(*names: str) -> list[str]:
        return [value for name, value in options if name in names]

    given = {name: value for name, value in options if name != "env-file" or not dotenv(Path(value))}
    count, unread = _named(values("gpus", "device"))
    devices = count or positive(re.sub(r"\D*", "", given.get("gpus", ""))) or start.devices
    unread |= {f"--{name}": value for name, value in left_out(KEYS.docker_run, given).items()}
    read, unread_file = _env_files(values("env-file"), Path(), "--env-file")
    unread |= unread_file
    envs = {**start.envs, **read, **literal_variables(values("e", "env"))}
    start = replace(start, envs=envs, devices=devices, script=(), left_out={**start.left_out, **unread})
    mounts = [each.split(":") for each in values("v", "volume") if each.count(":") in (1, 2)]
    here = {each[1]: each[0] for each in mounts if each[0].startswith("/") or os.path.isfile(each[0])}
    image, *args = (_on_host(word, here) for word in rest)
    return container(start, image, given.get("entrypoint"), args, images)


def _options(words: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the options of `docker run`, each with its value or an empty text, and the words that follow them."""
    options, rest = list[tuple[str, str]](), list(words)
    while rest and rest[0].startswith("-"):
        name, equals, value = rest.pop(0).partition("=")
        if (is_short := not name.startswith("--")) and len(name) > 2 and name[1] in "evpuwhm":  # such as -eNAME=VALUE
            name, value, equals = name[:2], name[2:] + equals + value, "="
        is_switch = set(name[1:]) <= set("ditqP") if is_short else re.fullmatch(KEYS.switches, name)
        if not equals and not is_switch and rest:
            value = rest.pop(0)
        options.append((name.lstrip("-"), value))
    return options, rest


def _named(options: Iterable[Any]) -> tuple[int, dict[str, str]]:
    """Return the number of devices that options of a container name, and what is left out: which ones they are."""
    found = (match for each in options if (match := _NAMED_DEVICES.search(str(each).strip("\"'"))))
    names = [name for match in found for name in str(match[match.lastindex or 0]).split(",")]
    return len(names), {"devices": f"only the number of {', '.join(names)} is read"} if names else {}


def _on_host(word: str, mounts: Mapping[str, str]) -> str:
    """Return a word of a container's command with the host's path in place of one that is mounted. `mounts`: the paths
    on the host, by those in the container."""
    flag, equals, path = word.rpartition("=") if word.startswith("-") else ("", "", word)
    for place in sorted(mounts, key=len, reverse=True):
        if path == place or path.startswith(f"{place.rstrip('/')}/"):
            return f"{flag}{equals}{mounts[place]}{path[len(place) :]}"
    return word


def services_of(text: str, document: Any, images: Images, folder: Path) -> Iterator[Start]:
    """Yield the containers of a compose file in `folder` with this text."""
    variables = {**dotenv(folder / ".env"), **os.environ}
    document = _interpolated(document, variables)
    found = (each for each in _COMPOSE_VARIABLE.finditer(re.sub("(?m)#.*", "", text)) if each[3] is None)
    names = dict.fromkeys(each[2] or each[4] for each in found)
    unset = tuple(name for name in names if name and name not in variables)
    services = document.get("services") if isinstance(document, Mapping) else None
    for service in services.values() if isinstance(services, Mapping) else ():
        deploy, unknown = service.get("deploy") or {}, left_out(KEYS.compose_file, document)
        unknown |= left_out(KEYS.compose, service)
        devices, unread = _devices(service, deploy)
        read, unread_file = _env_files(service.get("env_file") or (), folder)
        start = Start(
            unset=unset,
            envs={**read, **literal_variables(service.get("environment"))},
            devices=devices,
            left_out={**unknown, **unread, **unread_file},
            instances=count_of(deploy.get("replicas"), count_of(service.get("scale"))),
        )
        start = container(start, service.get("image") or "", service.get("entrypoint"), service.get("command"), images)
        yield _mounted(_built(start, service, images, folder), service, folder)


def _devices(service: Mapping[str, Any], deploy: Mapping[str, Any]) -> tuple[int | None, dict[str, str]]:
    """Return the number of devices of a service of a compose file, and what is left out."""
    reserved = ((deploy.get("resources") or {}).get("reservations") or {}).get("devices") or []
    reserved = reserved or (gpus if isinstance(gpus := service.get("gpus"), list) else [{"count": gpus}])
    ids = [f"device={name}" for each in reserved for name in each.get("device_ids") or ()]
    count, unread = _named([*ids, *(service.get("devices") or ())])
    return count or positive(reserved[0].get("count")), unread


def _env_files(given: Any, folder: Path, key: str = "env_file") -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables of the files of a container in `folder`, and what is left out, as `key`."""
    paths = [folder / (each["path"] if isinstance(each, Mapping) else each)
             for each in ([given] if isinstance(given, str) else given)]  # fmt: skip
    read = {key: value for each in paths for key, value in dotenv(each).items()}
    return read, {} if all(map(Path.is_file, paths)) else {key: "a file that is not here"}


def _built(start: Start, service: Mapping[str, Any], images: Images, folder: Path) -> Start:
    """Return the start of a service with the command of its Dockerfile, if it has one, and its image is not known."""
    build = service["build"] if isinstance(service.get("build"), Mapping) else {"context": service.get("build")}
    place = folder / str(build.get("context") or "-") / str(build.get("dockerfile") or "Dockerfile")
    if not start.image or not (file := text_of(place)):
        return start
    built = image_start(file, images, service.get("command"))
    envs = {**built.envs, **start.envs}
    return replace(start, words=built.words, image=built.image, version=built.version, envs=envs)


def _mounted(start: Start, service: Mapping[str, Any], folder: Path) -> Start:
    """Return the start of a service with the paths on the host of what is mounted."""
    mounts = [each.split(":") for each in service.get("volumes") or () if isinstance(each, str) and ":" in each]
    here = {each[1]: str(folder / each[0]) for each in mounts if os.path.isfile(folder / each[0])}
    fixed = {each[1]: each[0] for each in mounts if each[0].startswith("/")}
    first = 1 if start.image else 2
    before = ("--config",) * first + start.words[first - 1 :]
    pairs = zip(start.words, before, strict=False)
    words = (here.get(word, word) if flag == "--config" else _on_host(word, fixed) for word, flag in pairs)
    return replace(start, words=tuple(words))


def _interpolated(node: Any, variables: Mapping[str, str]) -> Any:
    """Return a part of a compose file with the values of its variables. Those that are not set are empty."""
    if isinstance(node, str):
        return _COMPOSE_VARIABLE.sub(
            lambda m: m[1] or variables.get(m[2] or m[4]) or _interpolated(m[3] or "", variables), node
        )
    if isinstance(node, list):
        return [_interpolated(each, variables) for each in node]
    return {key: _interpolated(value, variables) for key, value in node.items()} if isinstance(node, Mapping) else node
