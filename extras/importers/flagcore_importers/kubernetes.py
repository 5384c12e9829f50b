"""Reads manifests of Kubernetes and of its operators: LeaderWorkerSet, Kubeflow, Volcano, KServe."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from flagcore.domain.launch import Start
from flagcore.errors import UsageError
from flagcore.i18n import N_, _
from flagcore_importers import values
from flagcore_importers.containers import Images, container
from flagcore_importers.shell import inlined, is_shell_script

KSERVE = "serving.kserve.io"
UNREAD_KIND = N_("the kind {kind} of {group} is not read: give the command that its pods run")
SCALERS = "(Horizontal|Vertical)?PodAutoscaler|ScaledObject|AutoscalingRunner"
MOUNTED = "mountedFiles"
"""The key, in a container, of the text of the files that it mounts, by path. It is none of Kubernetes."""
HALVES = ("prefill", "decode")
_HALF = re.compile(r"(?:^|[-_.])(prefill|decode)(?:er|r)?(?=$|[-_.])")
"""The name, or a label, of the pods of a half of a pair, such as `llm-d.ai/role: prefill` or `app: model-decode`."""


def pods_of(node: Any, images: Images, pod: Start = Start()) -> Iterator[Start]:  # noqa: B008 (it is frozen)
    """Yield the containers of a manifest, without sections of Helm values that are off.

    `pod`: the number of hosts and copies, and the role, of those in `node`.
    """
    if isinstance(node, list):
        for each in node:
            yield from pods_of(each, images, pod)
    elif isinstance(node, Mapping) and all(node.get(key) is not False for key in ("create", "enabled")):
        half = _half(node)
        yield from _pods_in(node, images, replace(pod, role=half) if half else pod)


def all_pods(document: Any, images: Images) -> Iterator[Start]:
    """Yield the containers of a document, each with what is left out around the pods if it is a manifest."""
    around = _around_pods(document) if isinstance(document, Mapping) and "kind" in document else {}
    for start in pods_of(document, images):
        yield replace(start, left_out={**around, **start.left_out})


def _around_pods(node: Any) -> dict[str, str]:
    if isinstance(node, list):
        return {key: text for each in node for key, text in _around_pods(each).items()}
    found, known = dict[str, str](), values.KEYS.manifest
    for key, each in node.items() if isinstance(node, Mapping) and "containers" not in node else ():
        found |= _around_pods(each) if "'containers': " in str(each) else values.left_out(known, {key: each})
    return found


def _pods_in(node: Mapping[str, Any], images: Images, pod: Start) -> Iterator[Start]:
    if "containers" in node:
        yield from _containers(node, images, pod)
    elif isinstance(group := node.get("leaderWorkerTemplate"), Mapping):
        template = group.get("leaderTemplate") or group.get("workerTemplate")
        size = values.count_of(group.get("size"))
        pod = replace(pod, hosts=size, instances=pod.instances * values.count_of(node.get("replicas")))
        for start in pods_of(template, images, pod):
            job = {"LWS_GROUP_SIZE": str(size), "LWS_WORKER_INDEX": "0", "LWS_LEADER_ADDRESS": "localhost"}
            yield replace(start, job=job)
    elif replicas := next((each for key, each in node.items() if str(key).endswith("ReplicaSpecs")), None):
        yield from _replicas([*replicas.values()], images)
    elif (tasks := _tasks(node)) and not {*HALVES} & {str(each.get("name")) for each in tasks}:
        yield from _replicas(tasks, images, is_any=True)
    else:
        hosts, copies, slices = (values.count_of(node.get(name)) for name in ("parallelism", "replicas", "slices"))
        pod = replace(pod, hosts=pod.hosts * hosts, instances=pod.instances * copies * slices)
        for key, each in node.items():
            yield from pods_of(each, images, replace(pod, role=key) if key in HALVES else pod)


def _section(node: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the mapping at a key, or an empty one."""
    return node[key] if isinstance(node.get(key), Mapping) else {}


def _half(node: Mapping[str, Any]) -> str:
    """Return which half of a pair the pods in a part of a manifest are, by its labels or its name, or an empty text."""
    metadata = _section(node, "metadata")
    labels, own = _section(metadata, "labels").values(), [] if "image" in node else [node.get("name")]
    for names in (labels, [metadata.get("name")], own):
        if halves := {half for each in names for half in _HALF.findall(str(each))}:
            return halves.pop() if len(halves) == 1 else ""
    return ""


def _tasks(node: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the tasks of a job of Volcano."""
    tasks = node["tasks"] if isinstance(node.get("tasks"), list) else []
    return [each for each in tasks if isinstance(each, Mapping) and isinstance(each.get("template"), Mapping)]


def _containers(node: Mapping[str, Any], images: Images, pod: Start) -> Iterator[Start]:
    """Yield the containers of a pod."""
    given = node["containers"]
    for each in given.values() if isinstance(given, Mapping) else given:
        resources, (absent, secrets) = each.get("resources") or {}, _from_elsewhere(each)
        start = replace(
            pod,
            envs=values.literal_variables(each.get("env")),
            devices=values.count_devices(resources.get("limits") or resources.get("requests")),
            instances=pod.instances * values.count_of(node.get("minReplicas")),  # a predictor of KServe
            left_out=values.left_out(values.KEYS.pod, node)
            | values.left_out(values.KEYS.container, each)
            | absent
            | secrets,
            absent=tuple(absent),
            files=each.get(MOUNTED) or {},
        )
        yield container(start, each.get("image") or "", each.get("command"), each.get("args"), images)


def _replicas(specs: Sequence[Mapping[str, Any]], images: Images, *, is_any: bool = False) -> Iterator[Start]:
    """Yield the containers of a job with several kinds of pods: of all kinds, or of the one that starts the others."""
    counts = [values.count_of(each.get("replicas")) for each in specs]
    pods = [[*pods_of(each.get("template"), images)] for each in specs]
    sizes = [max((each.devices or 0 for each in pod), default=0) for pod in pods]  # 0 for one that only starts
    hosts = sum([n for n, size in zip(counts, sizes, strict=True) if size] or counts)
    launcher = ([pod for pod, size in zip(pods, sizes, strict=True) if not size] or pods)[0]
    programs = {each.words: each for pod in reversed(pods) for each in pod}
    for start in programs.values() if is_any else launcher:
        yield _in_job(start, hosts, start.devices or max(sizes))


def _in_job(start: Start, hosts: int, devices: int) -> Start:
    """Return a program with the variables that Kubeflow's training-operator sets for the first pod."""
    job = {"WORLD_SIZE": str(hosts), "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "23456"}
    job |= {"PET_NNODES": str(hosts), "PET_NPROC_PER_NODE": str(devices or "auto"), "PET_NODE_RANK": "0"}
    job |= {"PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": "23456"}
    return replace(start, hosts=hosts, devices=devices or None, job=job)


def _from_elsewhere(container: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the ConfigMaps outside of a manifest that set variables of its container, and the variables that secrets
    set, without the names of these."""
    entries = [*(container.get("env") or ()), *(container.get("envFrom") or ())]
    sources = [
        (each.get("name", "envFrom"), each.get("valueFrom") or each) for each in entries if isinstance(each, Mapping)
    ]
    maps = [(name, each.get("configMapKeyRef") or each.get("configMapRef")) for name, each in sources]
    secrets = {name: "of a secret" for name, each in sources if {"secretKeyRef", "secretRef"} & each.keys()}
    return {f"ConfigMap {each.get('name')}": f"of {name}; it is not here" for name, each in maps if each}, secrets


def of_kind(documents: Iterable[Any], pattern: str) -> list[Mapping[str, Any]]:
    """Return the documents whose kind has a start that matches a pattern."""
    return [each for each in documents if isinstance(each, Mapping) and re.match(pattern, str(each.get("kind")))]


def _name_in(node: Mapping[str, Any]) -> str:
    return str((node.get("metadata") or {}).get("name"))


def with_runtimes(documents: Sequence[Any]) -> list[Any]:
    """Return documents without the serving runtimes of KServe that services among them name, but with their container.

    The arguments of the runtime precede those of the service (KServe, `MergeRuntimeContainers`). Raises UsageError for
    a service of another operator, which has other fields.
    """
    runtimes = {_name_in(each): each for each in of_kind(documents, ".*ServingRuntime")}
    for service in of_kind(documents, "InferenceService$"):
        if (group := str(service.get("apiVersion", KSERVE)).partition("/")[0]) != KSERVE:
            raise UsageError(_(UNREAD_KIND, kind=service["kind"], group=group))
        model = service["spec"]["predictor"].get("model") or {}
        if runtime := runtimes.get(str(model.get("runtime"))):
            container, name = runtime["spec"]["containers"][0], _name_in(service)
            args = [re.sub(r"\{\{ *\.Name *\}\}", name, str(each)) for each in container.get("args") or ()]
            model |= {**container, **model, "args": [*args, *(model.get("args") or ())]}
            documents = [each for each in documents if each is not runtime]
    return list(documents)


def with_maps(documents: Sequence[Any], folder: Path) -> Sequence[Any]:
    """Return documents whose containers have the variables and the scripts of the ConfigMaps in them or in `folder`."""
    of_lists = (
        each.get("items") if isinstance(each, Mapping) and each.get("kind") == "List" else [each] for each in documents
    )
    documents = [each for group in of_lists for each in group or ()]
    others = _maps_in(folder) if "configMap" in str(documents) else ()
    maps = {_name_in(each): each.get("data") or {} for each in of_kind((*others, *documents), "ConfigMap$")}
    return [_filled_in(each, maps, _scripts_of(maps.values())) for each in documents] if maps else documents


def _scripts_of(maps: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the shell scripts in ConfigMaps, by the names of their keys."""
    texts = {str(name): str(text) for data in maps for name, text in data.items()}
    return {name: text for name, text in texts.items() if is_shell_script(name, text)}


def _maps_in(folder: Path) -> Iterator[Any]:
    """Yield the documents of the YAML files with ConfigMaps in a folder."""
    for file in sorted(folder.glob("*.y*ml")):
        with suppress(yaml.YAMLError, RecursionError, ValueError):  # ValueError: an impossible date
            if re.search(r"(?m)^kind: ConfigMap", text := values.text_of(file)):
                yield from values.load_documents(text)


def _filled_in(node: Any, maps: Mapping[str, Mapping[str, Any]], scripts: Mapping[str, str]) -> Any:
    """Return a part of a document with the variables of `maps`, the data of ConfigMaps, and the `scripts` in them."""
    if isinstance(node, list):
        return [_filled_in(each, maps, scripts) for each in node]
    if not isinstance(node, Mapping):
        return node
    if isinstance(node.get("containers"), list):  # its own scripts, whatever has the same name elsewhere
        volumes = {str(each.get("name")): each for each in node.get("volumes") or () if isinstance(each, Mapping)}
        node = {**node, "containers": [_with_files(each, volumes, maps) for each in node["containers"]]}
    node = {key: _filled_in(value, maps, scripts) for key, value in node.items()}
    if isinstance(reference := node.get("configMapKeyRef"), Mapping) and reference.get("name") in maps:
        return {"value": maps[reference["name"]].get(str(reference.get("key")))}  # of `valueFrom`
    if "value" in _section(node, "valueFrom"):
        return {**node.pop("valueFrom"), **node}
    if isinstance(node.get("image"), str):
        _add_variables(node, maps)
    if found := inlined(_words_in(node), scripts):
        node |= {"command": found, "args": None}
    return node


def _words_in(container: Mapping[str, Any]) -> list[str]:
    """Return the words that a container starts, as far as it has them."""
    given = (container.get(key) for key in ("command", "args"))
    return [str(word) for words in given if isinstance(words, list) for word in words]


def _with_files(container: Any, volumes: Mapping[str, Any], maps: Mapping[str, Mapping[str, Any]]) -> Any:
    """Return a container with the files that it mounts from ConfigMaps. The text of scripts replaces their paths."""
    texts = dict[str, str]()
    for mount in container.get("volumeMounts") or () if isinstance(container, Mapping) else ():
        texts |= _files_at(mount, volumes.get(str(mount.get("name"))) or {}, maps)
    if not texts:
        return container
    found = inlined(_words_in(container), _scripts_of([texts]))
    return {**container, MOUNTED: texts, **({"command": found, "args": None} if found else {})}


def _files_at(
    mount: Mapping[str, Any], volume: Mapping[str, Any], maps: Mapping[str, Mapping[str, Any]]
) -> dict[str, str]:
    """Return the texts that a mount shows of a volume of ConfigMaps, by path."""
    texts, place, part = dict[str, str](), str(mount.get("mountPath")).rstrip("/"), mount.get("subPath")
    sources = [{"configMap": volume.get("configMap")}, *((volume.get("projected") or {}).get("sources") or ())]
    for source in (each["configMap"] for each in sources if each.get("configMap")):
        data = maps.get(str(source.get("name"))) or {}
        items = {str(each.get("path")): each.get("key") for each in source.get("items") or ()}
        names = {name: str(data[key]) for name, key in (items or {key: key for key in data}).items() if key in data}
        texts |= {place: names[part]} if part in names else {f"{place}/{name}": text for name, text in names.items()}
    return texts


def _add_variables(container: dict[str, Any], maps: Mapping[str, Mapping[str, Any]]) -> None:
    """Give a container the variables of the ConfigMaps in its `envFrom` in place of these."""
    for source in [*(container.get("envFrom") or ())]:
        if data := maps.get(str((source.get("configMapRef") or {}).get("name"))):
            container["envFrom"].remove(source)
            names = {f"{source.get('prefix') or ''}{key}": value for key, value in data.items()}
            variables = ({"name": key, "value": value} for key, value in names.items() if key.isidentifier())
            container["env"] = [*variables, *(container.get("env") or ())]


def containers_in(node: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of a document that look like a container, whatever their key, each as a pod."""
    if isinstance(node, Mapping) and isinstance(node.get("image", ""), str) and {"command", "args"} & node.keys():
        yield {"containers": [node]}
    elif isinstance(node, (Mapping, list)):
        for each in node.values() if isinstance(node, Mapping) else node:
            yield from containers_in(each)
