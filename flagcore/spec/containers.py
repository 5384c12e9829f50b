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

import yaml

from flagcore.domain.files import read_regular
from flagcore.domain.launch import Start
from flagcore.errors import UsageError
from flagcore.i18n import _
from flagcore.spec.plain_data import package_yaml
from flagcore.spec.script import UNSET

IMAGE = "image "
"""The start of the first word of a `Start` whose image has an unknown entry point."""
CONFIG_MAP = "ConfigMap "
"""The start of the keys in `Start.left_out` that name ConfigMaps."""
CONTAINERS = ("docker", "podman", "nerdctl")
_TABLES = package_yaml(__package__, "forms.yaml")
SHORT = _TABLES["short options"]
FORMS = {name: re.compile(re.sub(r"\n\s*", "", pattern)) for name, pattern in _TABLES["patterns"].items()}


def image_start(text: str, images: Mapping[str, Sequence[str]], args: Any = None) -> Start:
    """Return what the image of a Dockerfile starts. `args` replace those in the file."""
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
    return container(Start(envs=envs), image, entry, args or command, images)


def container_run(start: Start, words: Sequence[str], images: Mapping[str, Sequence[str]]) -> Start:
    """Return what `docker run` with these words starts."""
    options, rest = list[tuple[str, str]](), list(words)
    while rest and rest[0].startswith("-"):
        name, equals, value = rest.pop(0).partition("=")
        if (is_short := not name.startswith("--")) and len(name) > 2 and name[1] in "evpuwhm":  # such as -eNAME=VALUE
            name, value, equals = name[:2], name[2:] + equals + value, "="
        is_switch = set(name[1:]) <= set("ditqP") if is_short else FORMS["switches"].fullmatch(name)
        if not equals and not is_switch and rest:
            value = rest.pop(0)
        options.append((name.lstrip("-"), value))
    if not rest:
        return replace(start, words=())
    given = {name: value for name, value in options if name != "env-file" or not dotenv(Path(value))}
    variables = literal_variables([value for name, value in options if name in ("e", "env")])
    read = {key: each for name, file in options if name == "env-file" for key, each in dotenv(Path(file)).items()}
    count, unread = _named([value for name, value in options if name in ("gpus", "device")])
    devices = count or positive(re.sub(r"\D*", "", given.get("gpus", ""))) or start.devices
    unread |= {f"--{name}": value for name, value in left_out("docker run", given).items()}
    is_here = all(os.path.isfile(file) for name, file in options if name == "env-file")
    unread |= {} if is_here else {"--env-file": "a file that is not here"}
    envs = {**start.envs, **read, **variables}
    start = replace(start, envs=envs, devices=devices, script=(), left_out={**start.left_out, **unread})
    mounts = (value.split(":") for name, value in options if name in ("v", "volume") and value.count(":") in (1, 2))
    here = {each[1]: each[0] for each in mounts if each[0].startswith("/") or os.path.isfile(each[0])}
    rest = [_on_host(word, here) for word in rest]
    return container(start, rest[0], given.get("entrypoint"), rest[1:], images)


def _on_host(word: str, mounts: Mapping[str, str]) -> str:
    """Return a word of a container's command with the host's path in place of one that is mounted. `mounts`: the paths
    on the host, by those in the container."""
    flag, equals, path = word.rpartition("=") if word.startswith("-") else ("", "", word)
    for place in sorted(mounts, key=len, reverse=True):
        if path == place or path.startswith(f"{place.rstrip('/')}/"):
            return f"{flag}{equals}{mounts[place]}{path[len(place) :]}"
    return word


def left_out(form: str, given: Mapping[Any, Any], path: str = "") -> dict[str, str]:
    """Return the keys, with their values, that are neither read nor without effect on speed (see `forms.yaml`)."""
    found = dict[str, str]()
    for key, value in ((f"{path}{key}", value) for key, value in given.items() if value not in (None, "", [], {})):
        if not FORMS[form].fullmatch(key):
            is_list = isinstance(value, list) and any(isinstance(each, Mapping) for each in value)  # may have secrets
            text = f"a list of {len(value)}" if is_list else str(value)
            found |= left_out(form, value, f"{key}.") if isinstance(value, Mapping) else {key: text}
    return found


def variables_of(form: str, **values: object) -> dict[str, str]:
    """Return the environment variables that a batch system sets. Those without a value are left out."""
    found = {name: text.format(**values) for name, text in _TABLES["variables"][form].items()}
    return {name: text for name, text in found.items() if text not in ("", "None")}


def _named(options: Iterable[Any]) -> tuple[int, dict[str, str]]:
    """Return the number of devices that options of a container name, and what is left out: which ones they are."""
    found = (match for each in options if (match := FORMS["named devices"].search(str(each).strip("\"'"))))
    names = [name for match in found for name in str(match[match.lastindex or 0]).split(",")]
    return len(names), {"devices": f"only the number of {', '.join(names)} is read"} if names else {}


def container(start: Start, image: Any, entry: Any, args: Any, images: Mapping[str, Sequence[str]]) -> Start:
    """Return `start` with a container's command, and with the engine release that the tag of its image names."""
    image = f"{image.get('repository')}:{image.get('tag') or ''}" if isinstance(image, Mapping) else image
    path, _at, _digest = image.partition("@")
    repository, _colon, tag = path.rpartition(":") if ":" in path.rpartition("/")[2] else (path, "", "")
    is_text = isinstance(entry, list) and len(entry) == 1 and " -" in str(entry[0])  # the command as one word
    program: Sequence[str] = _words(entry[0] if is_text else entry)
    release = None
    for name, entry_point in images.items():
        known, _colon, tags = name.partition(":")
        if f"/{repository}".endswith(f"/{known}") and tag.startswith(tags):
            program = entry_point if entry is None else program
            release = release or (FORMS["release"].match(tag) if "/" in known else None)  # others number their own
    program = () if entry is None and FORMS["program"].match(" ".join(_words(args))) else program
    given = _words(args)
    given = given[1:] if program and entry is None and given[:1] == [*program[-1:]] else given  # said twice
    words = filled((*program, *given), r"\$\((\w+)\)", {**start.envs, "LWS_GROUP_SIZE": str(start.hosts)})
    unread = {"image": image} if image and not release and FORMS["any release"].search(tag) else {}
    unread |= {"image": f"{image}: it is for CPUs, set cluster.chip"} if FORMS["cpu image"].search(path) else {}
    if (image or words) and (not words or words[0].startswith("-")):
        words = (f"{IMAGE}{image or 'built here'}", *words)
    return replace(start, words=words, version=release[1] if release else "", left_out={**start.left_out, **unread})


def filled(words: Iterable[str], pattern: str, values: Mapping[str, str]) -> tuple[str, ...]:
    """Return `words` with each match of `pattern` replaced by the value of the variable that its group names."""
    return tuple(re.sub(pattern, lambda each: values.get(each[1], each[0]), word) for word in words)


def services_of(document: Any, images: Mapping[str, Sequence[str]], unset: str, folder: Path) -> Iterator[Start]:
    """Yield the containers of a compose file in `folder`. `unset`: the names of its variables that are not set."""
    services = document.get("services") if isinstance(document, Mapping) else None
    for service in services.values() if isinstance(services, Mapping) else ():
        deploy = service.get("deploy") or {}
        reserved = ((deploy.get("resources") or {}).get("reservations") or {}).get("devices") or []
        reserved = reserved or (gpus if isinstance(gpus := service.get("gpus"), list) else [{"count": gpus}])
        ids = [f"device={name}" for each in reserved for name in each.get("device_ids") or ()]
        count, unread = _named([*ids, *(service.get("devices") or ())])
        given = service.get("env_file") or ()
        given = [given] if isinstance(given, str) else given
        paths = [each["path"] if isinstance(each, Mapping) else each for each in given]
        read = {key: value for each in paths for key, value in dotenv(folder / each).items()}
        unread |= {} if all((folder / each).is_file() for each in paths) else {"env_file": "a file that is not here"}
        start = Start(
            envs={UNSET: unset, **read, **literal_variables(service.get("environment"))},
            devices=count or positive(reserved[0].get("count")),
            left_out={**left_out("compose", service), **unread},
            instances=positive(deploy.get("replicas")) or positive(service.get("scale")) or 1,
        )
        start = container(start, service.get("image") or "", service.get("entrypoint"), service.get("command"), images)
        build = service["build"] if isinstance(service.get("build"), Mapping) else {"context": service.get("build")}
        place = folder / str(build.get("context") or "-") / str(build.get("dockerfile") or "Dockerfile")
        if start.words[:1] and start.words[0].startswith(IMAGE) and (file := _text_of(place)):
            built = image_start(file, images, service.get("command"))
            start = replace(start, words=built.words, version=built.version, envs={**built.envs, **start.envs})
        mounts = [each.split(":") for each in service.get("volumes") or () if isinstance(each, str) and ":" in each]
        here = {each[1]: str(folder / each[0]) for each in mounts if (folder / each[0]).is_file()}
        fixed = {each[1]: each[0] for each in mounts if each[0].startswith("/")}
        yield replace(
            start,
            words=tuple(
                here.get(w, w) if n < 2 or start.words[n - 1] == "--config" else _on_host(w, fixed)
                for n, w in enumerate(start.words)
            ),
        )


def _text_of(file: Path) -> str:
    """Return the text of a file, or an empty text if it cannot be read."""
    with suppress(OSError):
        return read_regular(file).decode("utf-8", errors="replace")
    return ""


def dotenv(file: Path) -> dict[str, str]:
    """Return the variables in a file such as .env; empty if it cannot be read."""
    return dict(re.findall(r"^[ \t]*(\w+)=[\"']?(.*?)[\"']?[ \t\r]*$", _text_of(file), re.MULTILINE))


def unset_names(text: str, variables: Mapping[str, str]) -> str:
    """Return the names of the variables of a compose file that have no value, separated by spaces."""
    found = (each for each in FORMS["compose variable"].finditer(re.sub("(?m)#.*", "", text)) if each[3] is None)
    return " ".join(dict.fromkeys(name for each in found if (name := each[2] or each[4]) and name not in variables))


def interpolated(node: Any, variables: Mapping[str, str]) -> Any:
    """Return a part of a compose file with the values of its variables. Those that are not set are empty."""
    if isinstance(node, str):
        return FORMS["compose variable"].sub(
            lambda m: m[1] or variables.get(m[2] or m[4]) or interpolated(m[3] or "", variables), node
        )
    if isinstance(node, list):
        return [interpolated(each, variables) for each in node]
    return {key: interpolated(value, variables) for key, value in node.items()} if isinstance(node, Mapping) else node


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
    tasks = node.get("tasks") if isinstance(node.get("tasks"), list) else ()  # of Volcano
    tasks = [each for each in tasks or () if isinstance(each, Mapping) and isinstance(each.get("template"), Mapping)]
    is_split = {"prefill", "decode"} & {str(each.get("name")) for each in tasks}
    replica_specs = next((each for key, each in node.items() if str(key).endswith("ReplicaSpecs")), None)
    replica_specs = replica_specs or {n: each for n, each in enumerate(tasks) if not is_split}
    if "containers" in node:
        given = node["containers"]
        for each in given.values() if isinstance(given, Mapping) else given:
            resources = each.get("resources") or {}
            devices = count_devices(resources.get("limits") or resources.get("requests"))
            envs = literal_variables(each.get("env"))
            unread = left_out("pod", node) | left_out("container", each) | _from_elsewhere(each)
            copies = instances * (positive(node.get("minReplicas")) or 1)  # a predictor of KServe
            start = Start(envs=envs, devices=devices, hosts=hosts, instances=copies, role=role, left_out=unread)
            yield container(start, each.get("image") or "", each.get("command"), each.get("args"), images)
    elif isinstance(group := node.get("leaderWorkerTemplate"), Mapping):
        template = group.get("leaderTemplate") or group.get("workerTemplate")
        copies, size = positive(node.get("replicas")) or 1, positive(group.get("size")) or 1
        found = pods_of(template, images, hosts=size, instances=copies, role=role)
        yield from (replace(each, job={"LWS_GROUP_SIZE": str(size)}) for each in found)
    elif replica_specs:
        counts = [positive(each.get("replicas")) or 1 for each in replica_specs.values()]
        pods = [[*pods_of(each.get("template"), images)] for each in replica_specs.values()]
        sizes = [max((each.devices or 0 for each in pod), default=0) for pod in pods]  # 0 for one that only starts
        total = sum(n for n, size in zip(counts, sizes, strict=True) if size or not any(sizes))
        launcher = next((pod for pod, size in zip(pods, sizes, strict=True) if any(sizes) and not size), pods[0])
        programs = {each.words: each for pod in reversed(pods) for each in pod} if tasks else {}
        for start in programs.values() or launcher:
            count = start.devices or max(sizes) or None
            job = variables_of("PyTorchJob", hosts=total, devices=count or "auto")
            yield replace(start, hosts=total, devices=count, job=job)
    else:
        hosts *= positive(node.get("parallelism")) or 1
        instances *= positive(node.get("replicas")) or 1
        for each in node.values():
            yield from pods_of(each, images, hosts=hosts, instances=instances, role=role)


def _from_elsewhere(container: Mapping[str, Any]) -> dict[str, str]:
    """Return the objects outside of a manifest that set variables of its container, without names of secrets."""
    entries = [*(container.get("env") or ()), *(container.get("envFrom") or ())]
    sources = [
        (each.get("name", "envFrom"), each.get("valueFrom") or each) for each in entries if isinstance(each, Mapping)
    ]
    maps = [(name, each.get("configMapKeyRef") or each.get("configMapRef")) for name, each in sources]
    secret = {name: "of a secret" for name, each in sources if {"secretKeyRef", "secretRef"} & each.keys()}
    return {f"{CONFIG_MAP}{each.get('name')}": f"of {name}; it is not here" for name, each in maps if each} | secret


def with_runtimes(documents: Sequence[Any]) -> list[Any]:
    """Return documents without the serving runtimes of KServe that services among them name, but with their container.

    The arguments of the runtime precede those of the service (KServe, `MergeRuntimeContainers`).
    """
    found = [each for each in documents if isinstance(each, Mapping) and "kind" in each]
    runtimes = {
        str(each.get("metadata", {}).get("name")): each for each in found if "ServingRuntime" in str(each["kind"])
    }
    for service in [each for each in found if each["kind"] == "InferenceService"]:
        model = service["spec"]["predictor"].get("model") or {}
        if runtime := runtimes.get(str(model.get("runtime"))):
            container, name = runtime["spec"]["containers"][0], str((service.get("metadata") or {}).get("name"))
            args = [re.sub(r"\{\{ *\.Name *\}\}", name, str(each)) for each in container.get("args") or ()]
            model |= {**container, **model, "args": [*args, *(model.get("args") or ())]}
            documents = [each for each in documents if each is not runtime]
    return list(documents)


def _maps_in(folder: Path) -> Iterator[Any]:
    """Yield the documents of the YAML files with ConfigMaps in a folder."""
    for file in sorted(folder.glob("*.y*ml")):
        with suppress(yaml.YAMLError, ValueError):  # ValueError: an impossible date
            if re.search(r"(?m)^kind: ConfigMap", text := _text_of(file)):
                yield from yaml.safe_load_all(text)


def with_maps(documents: Sequence[Any], folder: Path) -> Sequence[Any]:
    """Return documents whose containers have the variables and the scripts of the ConfigMaps in them or in `folder`."""
    others = _maps_in(folder) if "configMap" in str(documents) else ()
    found = [each for each in (*others, *documents) if isinstance(each, Mapping) and each.get("kind") == "ConfigMap"]
    maps = {str((each.get("metadata") or {}).get("name")): each.get("data") or {} for each in found}
    scripts = {name: text for data in maps.values() for name, text in data.items() if str(text).startswith("#!")}

    def filled_in(node: Any) -> Any:
        if isinstance(node, list):
            return [filled_in(each) for each in node]
        if not isinstance(node, Mapping):
            return node
        node = {key: filled_in(value) for key, value in node.items()}
        if isinstance(reference := node.get("configMapKeyRef"), Mapping) and reference.get("name") in maps:
            return {"value": maps[reference["name"]].get(reference.get("key"))}  # of `valueFrom`
        if isinstance((node.get("valueFrom") or {}).get("value"), str):
            return {**node.pop("valueFrom"), **node}
        for source in [*(node.get("envFrom") or ())] if isinstance(node.get("image"), str) else ():
            if data := maps.get(str((source.get("configMapRef") or {}).get("name"))):
                node["envFrom"].remove(source)
                variables = ({"name": key, "value": value} for key, value in data.items() if key.isidentifier())
                node["env"] = [*variables, *(node.get("env") or ())]
        for key in ("command", "args"):
            words = node.get(key) if isinstance(node.get(key), list) else ()
            names = [os.path.basename(str(each)) for each in words or ()]
            script = next((scripts[each] for each in names if each in scripts), "")
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
        counts = [positive(count) for key, count in value.items() if "/" in key and not FORMS["no device"].search(key)]
        names = [key for key in value if "/" not in key and key[:1].isupper()]
        named = (positive(value[key]) or count_devices(key) for key in names)
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
