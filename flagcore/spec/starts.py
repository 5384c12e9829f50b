"""Reads how programs are started: containers, compose files, manifests, units, batch scripts, scripts and commands."""

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import yaml

from flagcore.domain.files import read_regular
from flagcore.domain.launch import Start
from flagcore.errors import SpecError, UsageError
from flagcore.i18n import _
from flagcore.spec.declared import declared_servers
from flagcore.spec.script import ELSEWHERE, HOSTS, SHELLS, UNSET, Record, is_script, names_script, trace_script

ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
ENDS_WITH, IMAGE = "ends with ", "image "
"""The starts of the first word of a `Start`: the failure of a script, or an image with an unknown entry point."""
CONTAINERS = ("docker", "podman", "nerdctl")
_APPTAINER = ("apptainer", "singularity")
_LAUNCHERS = ("srun", "mpirun", "mpiexec", *_APPTAINER, "numactl", "taskset", "timeout", "time", "sudo")
_IMAGE_FILE = re.compile(r"^docker://|\.sif$")
_SWITCHES = {
    *("detach", "interactive", "tty", "rm", "privileged", "init", "read-only", "publish-all", "quiet", "replace"),
    *("oom-kill-disable", "no-healthcheck", "sig-proxy", "tls-verify"),
}
"""Options of `docker run` and `podman run` without a value, besides short ones."""
_NO_DEVICE = re.compile("rdma|hca|roce|efa|nic|fuse|hugepages")
"""A pattern of extended resources of Kubernetes that are not accelerators."""
_MANIFEST = re.compile(r"\s*((#.*|\.\.\.)\n\s*)*(---|\{?\s*[\w\"'./-]+\s*:(\s|$)|\{\s*[\"'])")
_COMPOSE_VARIABLE = re.compile(r"\$(?:(\$)|\{(\w+)(?::?-([^}]*))?[^}]*\}|(\w+))")
_BROKEN_LINE = re.compile(r"\\[ \t]+(#.*)?\n")
"""A pattern of a line that should continue: pages often have blanks or comments after the backslash."""
_BLOCK = re.compile(
    r"(?m)((?:^|;)[ \t]*(?:\}|\)|done|fi|esac)[ \t]*(?:<[^>\n]*)?)"
    r"(?:\d*|&)>+\|?[ \t]*(?!/dev/|[&(|>\s])(?:\"[^\"\n]*\"|[^\s;&|])+"
)
"""A pattern of a block whose output goes to a file: nothing of it is written."""
_PLACEHOLDER = re.compile(r"(?<![<\w)])<([A-Za-z][^<>|&;()$`'\"\n]*(?<![\s=-]))>")
"""A pattern of `<words>` that the user should replace, which a shell would read as redirections."""
_HERE_DOCUMENT = re.compile(
    r"kubectl .*<<-? *['\"]?(\w+)['\"]?.*\n((?:.*\n)*?)\1\b|<<-? *['\"]?(\w+)['\"]? *\| *kubectl .*\n((?:.*\n)*?)\3\b"
)
"""Manifests in a script that gives them to kubectl."""
_REPEATS = re.compile(r"(\S*/)?(python[\d.]* -m |[\w.-]+ serve )")  # the program of the image
_RELEASE = re.compile(r"v?(\d+\.\d+(?:\.\d+)?(?:\.?(?:post|rc)\d+)?)(?![\d.])")
_BATCH_LINE = re.compile(r"^#SBATCH\s+(.*)$", re.MULTILINE)
_MOST_RANKS = 16
"""The most hosts whose programs are read one by one, which takes seconds."""
_OTHER_BATCHES = (
    r"^#PBS .*?\b(?:select|nodes)=(\d+)|^#PJM .*?\bnode=(\d+)|^#BSUB .*?-nnodes (\d+)|^#\$ .*?-l rt_\w+=(\d+)",
    r"^#PBS .*?\b(?:n?gpus|n_gpus)=(\d+)|^#PJM .*?\bgpu=(\d+)|^#BSUB .*?-gpu .*?num=(\d+)",
)
"""Patterns of the hosts, and of the devices per host, of PBS, Fujitsu's TCS, LSF and ABCI's Grid Engine."""
_BATCH_SHORT = {"N": "nodes", "J": "job-name", "n": "ntasks", "G": "gpus", "c": "cpus-per-task"}


def starts_of(
    words: Sequence[str],
    text: str | None,
    images: Mapping[str, Sequence[str]],
    directory: str,
    tables: Mapping[str, Mapping[str, Any]],
) -> Iterator[Start]:
    """Yield the programs that a command, or a file with the content `text`, starts. Raises SpecError, UsageError.

    `images`: the entry points of known images, by repository, or by repository and the start of a tag. `tables`: as in
    `declared_servers`.
    """
    starts: Iterable[Start]
    if text is None:
        starts = [Start(words=tuple(words))]
    elif manifests := [re.sub(r"\\(?=\$)", "", each[1] or each[3]) for each in _HERE_DOCUMENT.findall(text)]:
        starts = [start for each in manifests for start in starts_of(words, each, images, directory, tables)]
    elif re.search(r"^\[Service\]", text, re.MULTILINE):
        starts = _unit(text)
    elif _MANIFEST.match(text):
        try:
            text = re.sub(r"(?m)^\.\.\.$", "", text)  # parts of pages
            text = re.sub(r"(?m): \{\{ *\.?([\w.]+) *\}\}", r": '[\1]'", text)  # placeholders
            variables = {**_dotenv(os.path.join(directory, os.path.dirname(words[-1] if words else ""))), **os.environ}
            documents = _with_runtimes(list(yaml.load_all(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))))
            starts = [
                start
                for each in documents
                for start in [*_declared(each, images, tables)]
                or (*_services(_interpolated(each, variables), images, _unset(text, variables)), *_pods(each, images))
            ] or [start for each in _containers(documents) for start in _pods(each, images)]
        except yaml.YAMLError as error:
            raise UsageError(_("the file is not valid YAML: {reason}", reason=" ".join(str(error).split()))) from None
        except (AttributeError, LookupError, TypeError) as error:  # nodes are read without a check of their types
            problem = _("the file has another structure than a manifest or a compose file: {reason}", reason=error)
            raise UsageError(problem) from None
    else:
        joined = _readable(text)
        script = ("bash", "-c", joined, *words[1:]) if joined != text or not words else tuple(words)
        job, hosts, devices = _batch(text, directory)
        starts = [Start(words=script, job=job, hosts=hosts, devices=devices)]
        if 1 < hosts <= _MOST_RANKS and 'case "$NODE_RANK" in' in text:  # each host starts its own servers
            for rank in range(hosts):
                start = Start(words=script, job={**job, "SLURM_NODEID": str(rank)}, devices=devices)
                yield from (
                    each for each in _inner(start, images, directory) if not each.words[0].startswith(ENDS_WITH)
                )
            return
    for start in starts:
        yield from _inner(start, images, directory)


def _inner(start: Start, images: Mapping[str, Sequence[str]], directory: str, depth: int = 0) -> Iterator[Start]:
    """Yield the programs that a container, a shell or a script starts. Yield any other program itself."""
    words, envs = list(start.words), dict(start.envs)
    while words and (words[0] == "env" or ASSIGNMENT.match(words[0])):
        name, equals, value = words.pop(0).partition("=")
        envs |= {name: value} if equals else {}
    start = replace(start, words=tuple(words), envs=envs)
    names = [os.path.basename(word) for word in words]
    shells = [n for n, name in enumerate(names) if name in SHELLS and _shell_text(words[n + 1 :])]
    inner = [n for n in range(1, len(words)) if names[0] in _LAUNCHERS and names_script(words[n:], directory)]
    is_whole = bool(words) and (len(words) > 1 or names[0] not in SHELLS) and is_script(words, directory)
    verbs = [
        n for n, name in enumerate(names) if name in ("run", "create") and {*CONTAINERS} & {*names[max(0, n - 2) : n]}
    ]
    files = [n for n, word in enumerate(words) if _IMAGE_FILE.search(word) and {*_APPTAINER} & {*names[:n]}]
    if verbs and not (shells and shells[0] < verbs[0]):
        yield from _inner(_container_run(start, words[verbs[0] + 1 :], images), images, directory)
    elif files and "run" in names[: files[0]]:
        image = words[files[0]].removeprefix("docker://")
        name, _mark, tag = os.path.basename(image).removesuffix(".sif").partition("_")  # as `apptainer pull` names it
        image = next((f"{known.partition(':')[0]}:{tag}" for known in images if f"/{name}:" in f"{known}:"), image)
        yield _container(start, image, None, words[files[0] + 1 :], images)
    elif depth < 3 and (shells or inner or is_whole):
        script = ("bash", "-c", *_shell_text(words[shells[0] + 1 :])) if shells else start.words[(inner or [0])[0] :]
        try:
            records, failure = trace_script(script, directory, {**start.job, **envs, ELSEWHERE: "1"})
            more, _ = trace_script(script, directory, {**start.job, **envs, ELSEWHERE: "2"}) if failure else ((), "")
        except SpecError as error:
            raise SpecError(key="command", value=error.value, problem=error.problem, fix=error.fix) from None
        failed = [Record(words=(f"{ENDS_WITH}{failure}",), directory="", environment={})] if failure else []
        for record in (*records, *failed, *more[len(records) :]):
            new = replace(start, words=record.words, envs={**envs, **record.environment}, script=start.script or script)
            yield from _inner(new, images, directory, depth + 1)
    elif words:
        yield start


def _shell_text(words: Sequence[str]) -> Sequence[str]:
    """Return the text of `-c` and the words that follow it, from the arguments of a shell; empty without `-c`."""
    count = next((n for n, word in enumerate(words) if not word.startswith("-")), len(words))
    is_text = any(re.fullmatch(r"-\w*c", word) for word in words[:count]) and count < len(words)
    return [_readable(words[count]), *words[count + 1 :]] if is_text else ()


def _readable(text: str) -> str:
    """Return the text of a script with `[words]` for its placeholders, whole lines in place of broken ones, and blocks
    that write no file.
    """
    text = _BLOCK.sub(lambda m: f"{m[1]}> /dev/null", _BROKEN_LINE.sub("\\\n", text))
    return _PLACEHOLDER.sub(lambda m: "[" + "_".join(m[1].split()) + "]", text)


def _container_run(start: Start, words: Sequence[str], images: Mapping[str, Sequence[str]]) -> Start:
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
    variables = _variables([value for name, value in options if name in ("e", "env")])
    gpus = given.get("gpus", "").strip("\"'")
    selected = re.search(r"device=([\w,:-]+)", gpus)
    devices = len(selected[1].split(",")) if selected else int(gpus) if gpus.isdecimal() else start.devices
    start = replace(start, envs={**start.envs, **variables}, devices=devices, script=())
    mounts = (value.split(":") for name, value in options if name in ("v", "volume") and value.count(":") in (1, 2))
    files = {each[1]: each[0] for each in mounts if os.path.isfile(each[0])}
    rest = [files.get(word, word) for word in rest]
    return _container(start, rest[0], given.get("entrypoint"), rest[1:], images)


def _container(start: Start, image: str, entry: Any, args: Any, images: Mapping[str, Sequence[str]]) -> Start:
    """Return `start` with a container's command, and with the engine release that the tag of its image names."""
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
    words = _filled((*program, *_words(args)), r"\$\((\w+)\)", {**start.envs, "LWS_GROUP_SIZE": str(start.hosts)})
    if image and (not words or words[0].startswith("-")):
        words = (IMAGE + image, *words)
    return replace(start, words=words, version=release[1] if release else "")


def _filled(words: Iterable[str], pattern: str, values: Mapping[str, str]) -> tuple[str, ...]:
    """Return `words` with each match of `pattern` replaced by the value of the variable that its group names."""
    return tuple(re.sub(pattern, lambda each: values.get(each[1], each[0]), word) for word in words)


def _services(document: Any, images: Mapping[str, Sequence[str]], unset: str) -> Iterator[Start]:
    """Yield the containers of a compose file. `unset`: the names of its variables that are not set."""
    services = document.get("services") if isinstance(document, Mapping) else None
    for service in services.values() if isinstance(services, Mapping) else ():
        deploy = service.get("deploy") or {}
        reserved = ((deploy.get("resources") or {}).get("reservations") or {}).get("devices") or []
        counts = [len(each.get("device_ids") or []) or each.get("count") for each in reserved] or [service.get("gpus")]
        start = Start(
            envs={UNSET: unset, **_variables(service.get("environment"))},
            devices=_number(counts[0]),
            instances=_number(deploy.get("replicas")) or _number(service.get("scale")) or 1,
        )
        yield _container(start, service.get("image") or "", service.get("entrypoint"), service.get("command"), images)


def _dotenv(folder: str) -> dict[str, str]:
    """Return the variables in the file .env of a compose file's folder."""
    with suppress(OSError):
        text = read_regular(os.path.join(folder, ".env")).decode("utf-8", errors="replace")
        return dict(re.findall(r"^[ \t]*(\w+)=[\"']?(.*?)[\"']?[ \t\r]*$", text, re.MULTILINE))
    return {}


def _unset(text: str, variables: Mapping[str, str]) -> str:
    """Return the names of the variables of a compose file that have no value, separated by spaces."""
    found = (each for each in _COMPOSE_VARIABLE.finditer(re.sub("(?m)#.*", "", text)) if each[3] is None)
    return " ".join(dict.fromkeys(name for each in found if (name := each[2] or each[4]) and name not in variables))


def _interpolated(node: Any, variables: Mapping[str, str]) -> Any:
    """Return a part of a compose file with the values of its variables. Those that are not set are empty."""
    if isinstance(node, str):
        return _COMPOSE_VARIABLE.sub(lambda m: m[1] or variables.get(m[2] or m[4]) or m[3] or "", node)
    if isinstance(node, list):
        return [_interpolated(each, variables) for each in node]
    return {key: _interpolated(value, variables) for key, value in node.items()} if isinstance(node, Mapping) else node


def _pods(
    node: Any, images: Mapping[str, Sequence[str]], *, hosts: int = 1, instances: int = 1, role: str = ""
) -> Iterator[Start]:
    """Yield the containers of a manifest, each with its pod's number of hosts, number of copies, and role."""
    if isinstance(node, list):
        for each in node:
            yield from _pods(each, images, hosts=hosts, instances=instances, role=role)
    if not isinstance(node, Mapping):
        return
    role = str(node.get("name")) if node.get("name") in ("prefill", "decode") and "template" in node else role
    replica_specs = next((each for key, each in node.items() if str(key).endswith("ReplicaSpecs")), None)
    if "containers" in node:
        for each in node["containers"]:
            resources = each.get("resources") or {}
            devices = _count(resources.get("limits") or resources.get("requests"))
            envs = _variables(each.get("env"))
            start = Start(envs=envs, devices=devices, hosts=hosts, instances=instances, role=role)
            yield _container(start, each.get("image") or "", each.get("command"), each.get("args"), images)
    elif isinstance(group := node.get("leaderWorkerTemplate"), Mapping):
        template = group.get("leaderTemplate") or group.get("workerTemplate")
        copies, size = _number(node.get("replicas")) or 1, _number(group.get("size")) or 1
        pods = _pods(template, images, hosts=size, instances=copies, role=role)
        yield from (replace(each, job={"LWS_GROUP_SIZE": str(size)}) for each in pods)
    elif isinstance(replica_specs, Mapping):
        total = sum(_number(each.get("replicas")) or 1 for each in replica_specs.values())
        pods = _pods(next(iter(replica_specs.values())).get("template"), images, hosts=total)
        yield from (replace(each, job=_rendezvous(total, each.devices)) for each in pods)
    else:
        hosts *= _number(node.get("parallelism")) or 1
        instances *= _number(node.get("replicas")) or 1
        for each in node.values():
            yield from _pods(each, images, hosts=hosts, instances=instances, role=role)


def _rendezvous(hosts: int, devices: int | None) -> dict[str, str]:
    """Return the environment variables of the first pod of a PyTorchJob (kubeflow training-operator)."""
    ranks = {"MASTER_ADDR": "localhost", "MASTER_PORT": "23456"}
    pet = {"NNODES": hosts, "NPROC_PER_NODE": devices or "auto", "NODE_RANK": 0, **ranks}
    return {"WORLD_SIZE": str(hosts), "RANK": "0", **ranks, **{f"PET_{name}": str(each) for name, each in pet.items()}}


def _with_runtimes(documents: Sequence[Any]) -> list[Any]:
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


def _containers(node: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of a document that look like a container, whatever their key, each as a pod."""
    if isinstance(node, Mapping) and isinstance(node.get("image", ""), str) and {"command", "args"} & node.keys():
        yield {"containers": [node]}
    elif isinstance(node, (Mapping, list)):
        for each in node.values() if isinstance(node, Mapping) else node:
            yield from _containers(each)


def _declared(
    document: Any, images: Mapping[str, Sequence[str]], tables: Mapping[str, Mapping[str, Any]]
) -> Iterator[Start]:
    """Yield the servers that a document describes by keys."""
    for found in declared_servers(document, tables):
        start = Start(
            envs=_variables(found.get("envs")),
            devices=_count(found.get("devices")),
            hosts=_number(found.get("hosts")) or 1,
            instances=_number(found.get("instances")) or 1,
            role=found["role"],
        )
        values = {"devices": start.devices or 1, "hosts": start.hosts, "rank": 0}
        values["total"] = values["devices"] * values["hosts"]
        start = replace(start, job={name: str(values[quantity]) for name, quantity in found["job"].items()})
        command = ["bash", "-c", found["script"]] if found["script"] else found["command"]
        yield _container(start, found["image"], command, found["args"], images)


def _count(value: Any) -> int | None:
    """Return the number of accelerators in a number, a text such as `NAME:8` or `80GB:4..8`, or resources."""
    if isinstance(value, Mapping):
        counts = [_number(count) for key, count in value.items() if "/" in key and not _NO_DEVICE.search(key)]
        named = (_number(count) or _count(key) for key, count in value.items() if "/" not in key and key[:1].isupper())
        return next(iter((*counts, *named, *([_count(value["count"])] if "count" in value else []))), None)
    fields = re.findall(r"(?<![^:])(\d+)(?:\.\.\d*)?(?![^:])", str(value))
    return _number(fields[-1]) if fields else None


def _unit(text: str) -> Iterator[Start]:
    """Yield the programs of a systemd unit."""
    envs = dict[str, str]()
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        key, _equals, value = line.partition("=")
        if key.strip() == "Environment":
            envs |= _variables(split_words(value))
        elif key.strip() == "ExecStart" and value.strip():
            words = split_words(value.strip().lstrip("-@+!:"))
            yield Start(words=_filled(words, r"\$\{?(\w+)\}?", envs), envs=dict(envs))


def _batch(text: str, directory: str) -> tuple[dict[str, str], int, int | None]:
    """Return a batch script's variables that Slurm sets, its number of hosts, and its number of devices per host."""
    options = dict[str, str]()
    for line in _BATCH_LINE.findall(text):
        words = shlex.split(line, comments=True)
        for number, word in enumerate(words):
            name, equals, value = word.lstrip("-").partition("=")
            if not word.startswith("-"):
                continue
            if not word.startswith("--"):
                name, value, equals = _BATCH_SHORT.get(word[1:2], word[1:2]), word[2:].lstrip("="), word[2:]
            options[name] = value if equals else "".join(words[number + 1 : number + 2])
    if not options:
        found = [re.search(pattern, text, re.MULTILINE) for pattern in _OTHER_BATCHES]
        count, per_host = (int(each[each.lastindex or 0]) if each else None for each in found)
        return ({HOSTS: str(count)} if count else {}), count or 1, per_host
    hosts = _number(options.get("nodes", "1").rpartition("-")[2]) or 1
    tasks = _number(options.get("ntasks-per-node")) or -(-(_number(options.get("ntasks")) or hosts) // hosts)
    per_node = options.get("gpus-per-node") or re.sub(r"^(?!gpu).*|,.*", "", options.get("gres", ""))
    total, of_task = (_number(options.get(name, "").rpartition(":")[2]) or 0 for name in ("gpus", "gpus-per-task"))
    devices = _number(per_node.rpartition(":")[2]) or total // hosts or of_task * tasks or None
    variables = {
        **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), hosts),
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), tasks * hosts),
        **dict.fromkeys(("SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID"), 0),
        **dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOBID"), 1),
        **dict.fromkeys(("SLURM_JOB_NODELIST", "SLURM_NODELIST"), "localhost"),
        **dict.fromkeys(("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE") if devices else (), devices),
        "SLURM_NTASKS_PER_NODE": tasks,
        "SLURM_TASKS_PER_NODE": f"{tasks}(x{hosts})" if hosts > 1 else tasks,
        "SLURM_JOB_NAME": options.get("job-name", "job"),
        "SLURM_CPUS_PER_TASK": options.get("cpus-per-task", 1),
        "SLURM_SUBMIT_DIR": directory,
    }
    return {name: str(value) for name, value in variables.items()}, hosts, devices or (tasks if tasks > 1 else None)


def _variables(entries: Any) -> dict[str, str]:
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


def _number(value: Any) -> int | None:
    """Return a number or text as a positive integer, or None for other values, such as `all`."""
    return int(value) if str(value).isdecimal() and int(value) > 0 else None
