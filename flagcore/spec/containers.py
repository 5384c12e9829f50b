"""Reads containers: commands, Dockerfiles, compose files and manifests of Kubernetes."""

import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from flagcore.domain.files import read_regular
from flagcore.domain.launch import Start
from flagcore.errors import UsageError
from flagcore.i18n import _
from flagcore.spec.script import UNSET

IMAGE = "image "
"""The start of the first word of a `Start` whose image has an unknown entry point."""
CONTAINERS = ("docker", "podman", "nerdctl")
_SWITCHES = {
    *("detach", "interactive", "tty", "rm", "privileged", "init", "read-only", "publish-all", "quiet", "replace"),
    *("oom-kill-disable", "no-healthcheck", "sig-proxy", "tls-verify"),
}
"""Options of `docker run` and `podman run` without a value, besides short ones."""
_NO_DEVICE = re.compile("rdma|hca|roce|efa|nic|fuse|hugepages")
"""A pattern of extended resources of Kubernetes that are not accelerators."""
_COMPOSE_VARIABLE = re.compile(r"\$(?:(\$)|\{(\w+)(?::?-((?:\$\{[^{}]*\}|[^}])*))?[^}]*\}|(\w+))")

_REPEATS = re.compile(r"(\S*/)?(python[\d.]* -m |[\w.-]+ serve )")  # the program of the image
_RELEASE = re.compile(r"v?(\d+\.\d+(?:\.\d+)?(?:\.?(?:post|rc)\d+)?)(?![\d.])")


def image_start(text: str, images: Mapping[str, Sequence[str]]) -> Start:
    """Return what the image of a Dockerfile starts."""
    stages = dict[str, tuple[str, Any, Any, dict[str, str]]]()
    image, entry, command, envs, stage = "", None, None, dict[str, str](), ""
    lines = re.sub(r"\\[ \t]*\n", " ", re.sub(r"(?m)^\s*#.*\n", "", text))
    for key, value in re.findall(r"(?im)^[ \t]*(FROM|ENV|ARG|ENTRYPOINT|CMD)[ \t]+(.+)$", lines):
        rest: Any = value.strip()
        if key.upper() == "FROM":
            stages[stage] = (image, entry, command, envs)
            parts = [each for each in rest.split() if not each.startswith("--")]
            stage = parts[-1]
            known = stages.get(parts[0], (filled(parts[:1], r"\$\{?(\w+)\}?", envs)[0], None, None, {}))
            image, entry, command, envs = *known[:3], dict(known[3])
        elif key.upper() in ("ENV", "ARG"):
            pairs = split_words(rest)
            pairs = pairs if "=" in pairs[0] else [f"{pairs[0]}={' '.join(pairs[1:])}"]
            envs |= literal_variables(filled(pairs, r"\$\{?(\w+)\}?", envs))
        else:
            try:
                given = filled(map(str, json.loads(rest)), r"\$\{?(\w+)\}?", envs)
            except ValueError:
                given = ("sh", "-c", rest)
            entry, command = (given, None) if key.upper() == "ENTRYPOINT" else (entry, given)
    return container(Start(envs=envs), image, entry, command, images)


def container_run(start: Start, words: Sequence[str], images: Mapping[str, Sequence[str]]) -> Start:
    """Return what `docker run` with these words starts."""
    options, rest = list[tuple[str, str]](), list(words)
    while rest and rest[0].startswith("-"):
        name, equals, value = rest.pop(0).partition("=")
        if (is_short := not name.startswith("--")) and len(name) > 2 and name[1] in "evpuwhm":  # such as -eNAME=VALUE
            name, value, equals = name[:2], name[2:] + equals + value, "="
        is_switch = set(name[1:]) <= set("ditqP") if is_short else name[2:] in _SWITCHES
        if not equals and not is_switch and rest:
            value = rest.pop(0)
        options.append((name.lstrip("-"), value))
    if not rest:
        return replace(start, words=())
    given = dict(options)
    variables = literal_variables([value for name, value in options if name in ("e", "env")])
    gpus = given.get("gpus", "").strip("\"'")
    selected = re.search(r"device=([\w,:-]+)", gpus)
    devices = len(selected[1].split(",")) if selected else int(gpus) if gpus.isdecimal() else start.devices
    start = replace(start, envs={**start.envs, **variables}, devices=devices, script=())
    mounts = (value.split(":") for name, value in options if name in ("v", "volume") and value.count(":") in (1, 2))
    files = {each[1]: each[0] for each in mounts if os.path.isfile(each[0])}
    rest = [files.get(word, word) for word in rest]
    return container(start, rest[0], given.get("entrypoint"), rest[1:], images)


def container(start: Start, image: Any, entry: Any, args: Any, images: Mapping[str, Sequence[str]]) -> Start:
    """Return `start` with a container's command, and with the engine release that the tag of its image names."""
    image = f"{image.get('repository')}:{image.get('tag') or ''}" if isinstance(image, Mapping) else image
    path, _at, _digest = image.partition("@")
    repository, _colon, tag = path.rpartition(":") if ":" in path.rpartition("/")[2] else (path, "", "")
    program: Sequence[str] = _words(entry)
    release = None
    for name, entry_point in images.items():
        known, _colon, tags = name.partition(":")
        if f"/{repository}".endswith(f"/{known}") and tag.startswith(tags):
            program = entry_point if entry is None else program
            release = release or (_RELEASE.match(tag) if "/" in known else None)  # others number images of their own
    program = () if entry is None and _REPEATS.match(" ".join(_words(args))) else program
    words = filled((*program, *_words(args)), r"\$\((\w+)\)", {**start.envs, "LWS_GROUP_SIZE": str(start.hosts)})
    if image and (not words or words[0].startswith("-")):
        words = (IMAGE + image, *words)
    return replace(start, words=words, version=release[1] if release else "")


def filled(words: Iterable[str], pattern: str, values: Mapping[str, str]) -> tuple[str, ...]:
    """Return `words` with each match of `pattern` replaced by the value of the variable that its group names."""
    return tuple(re.sub(pattern, lambda each: values.get(each[1], each[0]), word) for word in words)


def services_of(document: Any, images: Mapping[str, Sequence[str]], unset: str, folder: Path) -> Iterator[Start]:
    """Yield the containers of a compose file in `folder`. `unset`: the names of its variables that are not set."""
    services = document.get("services") if isinstance(document, Mapping) else None
    for service in services.values() if isinstance(services, Mapping) else ():
        deploy = service.get("deploy") or {}
        reserved = ((deploy.get("resources") or {}).get("reservations") or {}).get("devices") or []
        counts = [len(each.get("device_ids") or []) or each.get("count") for each in reserved] or [service.get("gpus")]
        files = service.get("env_file") or ()
        named = (
            [files] if isinstance(files, str) else [each if isinstance(each, str) else each["path"] for each in files]
        )
        read = {key: value for each in named for key, value in dotenv(folder / each).items()}
        start = Start(
            envs={UNSET: unset, **read, **literal_variables(service.get("environment"))},
            devices=positive(counts[0]),
            instances=positive(deploy.get("replicas")) or positive(service.get("scale")) or 1,
        )
        start = container(start, service.get("image") or "", service.get("entrypoint"), service.get("command"), images)
        mounts = [each.split(":") for each in service.get("volumes") or () if isinstance(each, str) and ":" in each]
        here = {each[1]: str(folder / each[0]) for each in mounts if (folder / each[0]).is_file()}
        words = enumerate(start.words)
        yield replace(
            start,
            words=tuple(here.get(w, w) if n < 2 or start.words[n - 1] == "--config" else w for n, w in words),
        )


def dotenv(file: Path) -> dict[str, str]:
    """Return the variables in a file such as .env; empty if it cannot be read."""
    with suppress(OSError):
        text = read_regular(file).decode("utf-8", errors="replace")
        return dict(re.findall(r"^[ \t]*(\w+)=[\"']?(.*?)[\"']?[ \t\r]*$", text, re.MULTILINE))
    return {}


def unset_names(text: str, variables: Mapping[str, str]) -> str:
    """Return the names of the variables of a compose file that have no value, separated by spaces."""
    found = (each for each in _COMPOSE_VARIABLE.finditer(re.sub("(?m)#.*", "", text)) if each[3] is None)
    return " ".join(dict.fromkeys(name for each in found if (name := each[2] or each[4]) and name not in variables))


def interpolated(node: Any, variables: Mapping[str, str]) -> Any:
    """Return a part of a compose file with the values of its variables. Those that are not set are empty."""
    if isinstance(node, str):
        return _COMPOSE_VARIABLE.sub(
            lambda m: m[1] or variables.get(m[2] or m[4]) or interpolated(m[3] or "", variables), node
        )
    if isinstance(node, list):
        return [interpolated(each, variables) for each in node]
    return {key: interpolated(value, variables) for key, value in node.items()} if isinstance(node, Mapping) else node


def _rendezvous(hosts: int, devices: int | None) -> dict[str, str]:
    """Return the environment variables of the first pod of a PyTorchJob (kubeflow training-operator)."""
    ranks = {"MASTER_ADDR": "localhost", "MASTER_PORT": "23456"}
    pet = {"NNODES": hosts, "NPROC_PER_NODE": devices or "auto", "NODE_RANK": 0, **ranks}
    return {"WORLD_SIZE": str(hosts), "RANK": "0", **ranks, **{f"PET_{name}": str(each) for name, each in pet.items()}}


def pods_of(
    node: Any, images: Mapping[str, Sequence[str]], *, hosts: int = 1, instances: int = 1, role: str = ""
) -> Iterator[Start]:
    """Yield the containers of a manifest, each with its pod's number of hosts, number of copies, and role."""
    if isinstance(node, list):
        for each in node:
            yield from pods_of(each, images, hosts=hosts, instances=instances, role=role)
    if not isinstance(node, Mapping):
        return
    role = str(node.get("name")) if node.get("name") in ("prefill", "decode") and "template" in node else role
    replica_specs = next((each for key, each in node.items() if str(key).endswith("ReplicaSpecs")), None)
    if "containers" in node:
        given = node["containers"]
        for each in given.values() if isinstance(given, Mapping) else given:
            resources = each.get("resources") or {}
            devices = count_devices(resources.get("limits") or resources.get("requests"))
            envs = literal_variables(each.get("env"))
            start = Start(envs=envs, devices=devices, hosts=hosts, instances=instances, role=role)
            yield container(start, each.get("image") or "", each.get("command"), each.get("args"), images)
    elif isinstance(group := node.get("leaderWorkerTemplate"), Mapping):
        template = group.get("leaderTemplate") or group.get("workerTemplate")
        copies, size = positive(node.get("replicas")) or 1, positive(group.get("size")) or 1
        found = pods_of(template, images, hosts=size, instances=copies, role=role)
        yield from (replace(each, job={"LWS_GROUP_SIZE": str(size)}) for each in found)
    elif isinstance(replica_specs, Mapping):
        total = sum(positive(each.get("replicas")) or 1 for each in replica_specs.values())
        found = pods_of(next(iter(replica_specs.values())).get("template"), images, hosts=total)
        yield from (replace(each, job=_rendezvous(total, each.devices)) for each in found)
    else:
        hosts *= positive(node.get("parallelism")) or 1
        instances *= positive(node.get("replicas")) or 1
        for each in node.values():
            yield from pods_of(each, images, hosts=hosts, instances=instances, role=role)


def with_runtimes(documents: Sequence[Any]) -> list[Any]:
    """Return documents without the serving runtimes of KServe that services among them name, but with their container.

    The arguments of the runtime precede those of the service (KServe, `MergeRuntimeContainers`).
    """
    found = [each for each in documents if isinstance(each, Mapping) and "kind" in each]
    runtimes = {
        str(each.get("metadata", {}).get("name")): each for each in found if "ServingRuntime" in str(each["kind"])
    }
    services = [each["spec"]["predictor"] for each in found if each["kind"] == "InferenceService"]
    for model in [each.get("model") or {} for each in services]:
        if runtime := runtimes.get(str(model.get("runtime"))):
            container = runtime["spec"]["containers"][0]
            model |= {**container, **model, "args": [*(container.get("args") or ()), *(model.get("args") or ())]}
            documents = [each for each in documents if each is not runtime]
    return list(documents)


def with_maps(documents: Sequence[Any]) -> Sequence[Any]:
    """Return documents whose containers have the variables, and the scripts, of the ConfigMaps among the documents."""
    found = [each for each in documents if isinstance(each, Mapping) and each.get("kind") == "ConfigMap"]
    maps = {str((each.get("metadata") or {}).get("name")): each.get("data") or {} for each in found}
    scripts = {name: text for data in maps.values() for name, text in data.items() if str(text).startswith("#!")}

    def filled_in(node: Any) -> Any:
        if isinstance(node, list):
            return [filled_in(each) for each in node]
        if not isinstance(node, Mapping):
            return node
        node = {key: filled_in(value) for key, value in node.items()}
        for source in node.get("envFrom") or () if isinstance(node.get("image"), str) else ():
            data = maps.get(str((source.get("configMapRef") or {}).get("name")), {})
            node["env"] = [
                *({"name": key, "value": value} for key, value in data.items() if key.isidentifier()),
                *(node.get("env") or ()),
            ]
        for key in ("command", "args"):
            words = node.get(key) if isinstance(node.get(key), list) else ()
            script = next(
                (scripts[name] for each in words or () if (name := os.path.basename(str(each))) in scripts), ""
            )
            node |= {"command": ["bash", "-c", script], "args": None} if script and len(words or ()) < 3 else {}
        return node

    return [filled_in(each) for each in documents] if maps else documents


def containers_in(node: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of a document that look like a container, whatever their key, each as a pod."""
    if isinstance(node, Mapping) and isinstance(node.get("image", ""), str) and {"command", "args"} & node.keys():
        yield {"containers": [node]}
    elif isinstance(node, (Mapping, list)):
        for each in node.values() if isinstance(node, Mapping) else node:
            yield from containers_in(each)


def count_devices(value: Any) -> int | None:
    """Return the number of accelerators in a number, a text such as `NAME:8` or `80GB:4..8`, or resources."""
    if isinstance(value, Mapping):
        counts = [positive(count) for key, count in value.items() if "/" in key and not _NO_DEVICE.search(key)]
        named = (
            positive(count) or count_devices(key)
            for key, count in value.items()
            if "/" not in key and key[:1].isupper()
        )
        return next(iter((*counts, *named, *([count_devices(value["count"])] if "count" in value else []))), None)
    fields = re.findall(r"(?<![^:])(\d+)(?:\.\.\d*)?(?![^:])", str(value))
    return positive(fields[-1]) if fields else None


def literal_variables(entries: Any) -> dict[str, str]:
    """Return the environment variables with literal values in a mapping, a list of NAME=VALUE, or a manifest's list."""
    if isinstance(entries, Mapping):
        pairs: Iterable[tuple[Any, Any]] = entries.items()
    else:
        rows = [dict(zip(("name", "value"), each.split("=", 1), strict=False)) if isinstance(each, str) else each
                for each in entries or ()]  # fmt: skip
        pairs = [(each.get("name"), each.get("value")) for each in rows]
    return {str(name): str(value) for name, value in pairs if value is not None}


def _words(value: Any) -> list[str]:
    """Return the words of a command, which is a string, a list, or missing."""
    return split_words(value) if isinstance(value, str) else [str(each) for each in value or ()]


def split_words(text: str) -> list[str]:
    """Return the words of a command as a shell splits them. Raises UsageError."""
    try:
        return shlex.split(text.replace("\\\n", " "))
    except ValueError as error:
        raise UsageError(_("the command cannot be split into words: {reason}", reason=error)) from None


def positive(value: Any) -> int | None:
    """Return a number or text as a positive integer, or None for other values, such as `all`."""
    return int(value) if str(value).isdecimal() and int(value) > 0 else None
