"""Reads how programs are started: containers, compose files, manifests, units, batch scripts, scripts and commands."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from flagcore.domain.launch import Start
from flagcore.errors import SpecError, UsageError
from flagcore.i18n import _
from flagcore.spec import containers as read
from flagcore.spec.containers import CONTAINERS, FORMS, positive
from flagcore.spec.declared import declared_servers
from flagcore.spec.script import ELSEWHERE, HOSTS, SHELLS, Record, is_script, names_script, trace_script

ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
ENDS_WITH = "ends with "
"""The start of the first word of a `Start` that is the failure of a script."""
_APPTAINER = ("apptainer", "singularity")
_MPI = ("mpirun", "mpiexec", "orterun", "jsrun", "aprun")
_LAUNCHERS = ("srun", *_MPI, *_APPTAINER, "numactl", "taskset", "timeout", "time", "sudo")
_TERMINALS = ("tmux", "screen", "pm2")  # they start the commands in their arguments, each in one word


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
    file = Path(directory, words[-1] if words else "")
    if text is None:
        starts = [Start(words=tuple(words))]
    elif manifests := [re.sub(r"\\(?=\$)", "", each[1] or each[3]) for each in FORMS["here document"].findall(text)]:
        starts = [start for each in manifests for start in starts_of(words, each, images, directory, tables)]
    elif file.suffix not in (".yaml", ".yml") and (blocks := FORMS["markdown"].findall(text)):
        parts = [re.sub(r"(?m)^ *\$ ", "", each) for each in blocks]
        starts = [start for each in parts for start in starts_of((), each, images, directory, tables)]
    elif re.search(r"^\[(Service|Container|program:.*)\]", text, re.MULTILINE):
        starts = _unit(text, file.parent, images)
    elif re.search(r"(?m)^FROM\s", text) and re.search(r"(?m)^(CMD|ENTRYPOINT)\s", text):
        starts = [read.image_start(text, images)]
    elif FORMS["manifest"].match(text):
        try:
            text = re.sub(r"(?m)^\.\.\.$", "", text)  # parts of pages
            text = re.sub(r"(?m): \{\{ *\.?([\w.]+) *\}\}", r": '[\1]'", text)  # placeholders
            variables = {**read.dotenv(file.with_name(".env")), **os.environ}
            documents = read.with_maps(
                read.with_runtimes([*yaml.load_all(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))]), file.parent
            )
            kinds = {each["kind"]: each for each in documents if isinstance(each, Mapping) and "kind" in each}
            others = read.left_out("kinds", {str(kind): str(each.get("spec")) for kind, each in kinds.items()})
            starts = [
                replace(start, left_out={**start.left_out, **others})
                for each in documents
                for start in [*_declared(each, images, tables)]
                or (
                    *read.services_of(
                        read.interpolated(each, variables), images, read.unset_names(text, variables), file.parent
                    ),
                    *read.pods_of(each, images),
                )
            ] or [start for each in read.containers_in(documents) for start in read.pods_of(each, images)]
        except (yaml.YAMLError, ValueError) as error:  # ValueError: an impossible date
            problem = _("the file is not valid YAML: {reason}", reason=" ".join(str(error).split()))
            if re.search(r"(?m)\{\{|^\s*[$]?\{\w+\}", text):
                problem = _(
                    "the file is a template: give it after `envsubst`, `helm template` or the like has filled it"
                )
            raise UsageError(problem) from None
        except (AttributeError, LookupError, TypeError, RecursionError) as error:  # types are not checked
            problem = _("the file has another structure than a manifest or a compose file: {reason}", reason=error)
            raise UsageError(problem) from None
    else:
        joined = _readable(text.replace("\r\n", "\n"))
        script = ("bash", "-c", joined, *words[1:]) if joined != text or not words else tuple(words)
        batch = replace(_batch(text, directory), words=script)
        starts = [batch]
        if 1 < batch.hosts <= 16 and 'case "$NODE_RANK" in' in text:  # own servers; each takes time
            for rank in range(batch.hosts):
                start = replace(batch, job={**batch.job, "SLURM_NODEID": str(rank)}, hosts=1)
                yield from (
                    each for each in _inner(start, images, directory) if not each.words[0].startswith(ENDS_WITH)
                )
            return
    for start in starts:
        yield from _inner(_with_files(start, file.parent), images, directory)


def _with_files(start: Start, folder: Path) -> Start:
    """Return `start` with the path of a script of another machine or image replaced by the file here of that name."""
    words = list(start.words)
    for n, word in enumerate(words[:3]):
        if re.fullmatch(r"\S*/\S+\.(sh|bash)|\[?\S*/\S+\.sh", word) and not os.path.isfile(word):
            places = (folder, folder / "scripts", folder.parent, folder.parent / "scripts")
            words[n] = next(
                (str(each / Path(word).name) for each in places if (each / Path(word).name).is_file()), word
            )
            if words[n] != word and os.path.basename(words[max(0, n - 1)]) not in SHELLS:
                words.insert(n, "bash")
                break
    return replace(start, words=tuple(words))


def _inner(start: Start, images: Mapping[str, Sequence[str]], directory: str, depth: int = 0) -> Iterator[Start]:
    """Yield the programs that a container, a shell or a script starts. Yield any other program itself."""
    words, envs = list(start.words), dict(start.envs)
    while words and (words[0] == "env" or ASSIGNMENT.match(words[0])):
        name, equals, value = words.pop(0).partition("=")
        envs |= {name: value} if equals else {}
    if words[:2] == ["uv", "run"] and "-m" in words and not any(map(FORMS["python"].fullmatch, words)):
        words.insert(words.index("-m"), "python")
    start = replace(start, words=tuple(words), envs=envs)
    names = [os.path.basename(word) for word in words]
    shells = [n for n, name in enumerate(names) if name in SHELLS and _shell_text(words[n + 1 :])]
    inner = [n for n in range(1, len(words)) if names[0] in _LAUNCHERS and names_script(words[n:], directory)]
    is_whole = bool(words) and (len(words) > 1 or names[0] not in SHELLS) and is_script(words, directory)
    verbs = [
        n for n, name in enumerate(names) if name in ("run", "create") and {*CONTAINERS} & {*names[max(0, n - 2) : n]}
    ]
    files = [n for n, word in enumerate(words) if FORMS["image file"].search(word) and {*_APPTAINER} & {*names[:n]}]
    if verbs and not (shells and shells[0] < verbs[0]):
        yield from _inner(read.container_run(start, words[verbs[0] + 1 :], images), images, directory)
    elif files and "run" in names[: files[0]]:
        image = words[files[0]].removeprefix("docker://")
        name, _mark, tag = os.path.basename(image).removesuffix(".sif").partition("_")  # as `apptainer pull` names it
        image = next((f"{known.partition(':')[0]}:{tag}" for known in images if f"/{name}:" in f"{known}:"), image)
        yield read.container(start, image, None, words[files[0] + 1 :], images)
    elif depth < 3 and names and names[0] in _TERMINALS and (lines := [word for word in words if " " in word]):
        for line in lines:
            yield from _inner(replace(start, words=("bash", "-c", line)), images, directory, depth + 1)
    elif depth < 3 and (shells or inner or is_whole):
        script = ("bash", "-c", *_shell_text(words[shells[0] + 1 :])) if shells else start.words[(inner or [0])[0] :]
        before = start.words[: inner[0]] if inner and not shells and names[0] in _MPI else ()  # each task is a rank
        tasks = re.search(r" -{1,2}(?:np?|ntasks|nrs)[ =]?(\d+)", " ".join(before))
        job = {**start.job, **(read.variables_of("MPI", total=tasks[1]) if tasks else {}), **envs}
        try:
            records, failure = trace_script(script, directory, {**job, ELSEWHERE: "1"})
            more, _ = trace_script(script, directory, {**job, ELSEWHERE: "2"}) if failure else ((), "")
        except SpecError as error:
            raise SpecError(key="command", value=error.value, problem=error.problem, fix=error.fix) from None
        failed = [Record(words=(f"{ENDS_WITH}{failure}",), directory="", environment={})] if failure else []
        for record in (*records, *failed, *more[len(records) :]):
            new = replace(start, words=(*before, *record.words), envs={**envs, **record.environment})
            new = replace(new, script=start.script or (() if before else script))
            yield from _inner(new, images, directory, depth + 1)
    elif words:
        named = (FORMS["image of launcher"].search(word) for word in words)
        releases = [read.container(Start(), each[1], None, None, images).version for each in named if each]
        yield replace(start, version=start.version or "".join(releases[:1]))


def _shell_text(words: Sequence[str]) -> Sequence[str]:
    """Return the text of `-c` and the words that follow it, from the arguments of a shell; empty without `-c`."""
    count = next((n for n, word in enumerate(words) if not word.startswith("-")), len(words))
    is_text = any(re.fullmatch(r"-\w*c", word) for word in words[:count]) and count < len(words)
    return [_readable(words[count]), *words[count + 1 :]] if is_text else ()


def _readable(text: str) -> str:
    """Return the text of a script with `[words]` for its placeholders, whole lines in place of broken ones, and blocks
    that write no file.
    """
    text = FORMS["block"].sub(lambda m: f"{m[1]}> /dev/null", FORMS["broken line"].sub("\\\n", text))
    return FORMS["placeholder"].sub(lambda m: "[" + "_".join(m[1].split()) + "]", text)


def _declared(
    document: Any, images: Mapping[str, Sequence[str]], tables: Mapping[str, Mapping[str, Any]]
) -> Iterator[Start]:
    """Yield the servers that a document describes by keys."""
    for found in declared_servers(document, tables):
        start = Start(
            envs=read.literal_variables(found.get("envs")),
            devices=read.count_devices(found.get("devices")),
            hosts=positive(found.get("hosts")) or 1,
            instances=positive(found.get("instances")) or 1,
            role=found["role"],
            left_out=read.left_out("values", found["left_out"]),
        )
        values = {"devices": start.devices or 1, "hosts": start.hosts, "rank": 0}
        values["total"] = values["devices"] * values["hosts"]
        start = replace(start, job={name: str(values[quantity]) for name, quantity in found["job"].items()})
        command = ["bash", "-c", found["script"]] if found["script"] else found["command"]
        yield read.container(start, found["image"], command, found["args"], images)


def _unit(text: str, folder: Path, images: Mapping[str, Sequence[str]]) -> Iterator[Start]:
    """Yield the programs of a unit of systemd, podman or supervisord, which is in `folder`. Raises SpecError."""
    joined = re.sub(r"(?m)^\s*[#;\[].*", "", re.sub(r"\\\n\s*", " ", text))
    lines = [line.partition("=") for line in joined.splitlines()]
    pairs = [(key.strip(), value.strip()) for key, equals, value in lines if equals]
    envs, missing, found = dict[str, str](), "", dict(pairs)
    for key, value in sorted(pairs, key=lambda each: each[0] == "EnvironmentFile"):  # files override the unit
        if key in ("Environment", "environment"):
            envs |= read.literal_variables(read.split_words(value if key[0] == "E" else value.replace(",", " ")))
        elif key == "EnvironmentFile":
            file = Path(value.lstrip("-"))
            here = next((each for each in (file, folder / file.name) if each.is_file()), None)
            envs |= read.dotenv(here) if here else {}
            missing = missing if here else str(file)
    unread = read.left_out("unit", found) | ({"EnvironmentFile": "it is not here"} if missing else {})
    for value in [value for key, value in pairs if key in ("ExecStart", "command") and value]:
        words = read.filled(
            read.split_words(value.lstrip("-@+!:").replace("%h", str(Path.home()))), r"\$\{?(\w+)\}?", envs
        )
        names = ", ".join(re.findall(r"\$\{?(\w+)", " ".join(words)))
        if missing and names and not re.search(r"\bsh -\w*c ", " ".join(words)):
            problem, fix = f"is not on this machine, but sets {names}", "copy it beside the unit"
            raise SpecError(key="EnvironmentFile", value=missing, problem=problem, fix=fix)
        yield Start(words=words, envs=envs, left_out=unread)
    if "Image" in found:
        options = [word for key, value in pairs if key == "PodmanArgs" for word in read.split_words(value)]
        options += [word for key, value in pairs if key == "AddDevice" for word in ("--device", value)]
        options += ["--entrypoint", found["Entrypoint"]] if "Entrypoint" in found else []
        start = Start(envs=envs, left_out=unread)
        yield read.container_run(start, [*options, found["Image"], *read.split_words(found.get("Exec", ""))], images)


def _batch(text: str, directory: str) -> Start:
    """Return a batch script without its words: the variables that Slurm sets, its hosts, and its devices per host."""
    options = dict[str, str]()
    for line in FORMS["batch line"].findall(text):
        words = read.split_words(re.sub(r"(^|\s)#.*", "", line))
        for number, word in enumerate(words):
            name, equals, value = word.lstrip("-").partition("=")
            if not word.startswith("-"):
                continue
            if not word.startswith("--"):
                name, value, equals = read.SHORT.get(word[1:2], word[1:2]), word[2:].lstrip("="), word[2:]
            options[name] = value if equals else "".join(words[number + 1 : number + 2])
    unread = {f"#SBATCH {name}": value for name, value in read.left_out("sbatch", options).items()}
    if not options:
        found = [re.search(f"(?m){FORMS[name].pattern}", text) for name in ("batch hosts", "batch devices")]
        count, per_host = (int(each[each.lastindex or 0]) if each else None for each in found)
        return Start(job={HOSTS: str(count)} if count else {}, hosts=count or 1, devices=per_host)
    hosts = positive(options.get("nodes", "1").rpartition("-")[2]) or 1
    tasks = positive(options.get("ntasks-per-node")) or -(-(positive(options.get("ntasks")) or hosts) // hosts)
    per_node = options.get("gpus-per-node") or re.sub(r"^(?!gpu).*|,.*", "", options.get("gres", ""))
    total, of_task = (positive(options.get(name, "").rpartition(":")[2]) or 0 for name in ("gpus", "gpus-per-task"))
    devices = positive(per_node.rpartition(":")[2]) or total // hosts or of_task * tasks or None
    sizes = {"hosts": hosts, "tasks": tasks, "total": tasks * hosts, "devices": devices, "directory": directory}
    sizes |= {"several": f"(x{hosts})" if hosts > 1 else "", "cpus": options.get("cpus-per-task", 1)}
    job = read.variables_of("Slurm", **sizes, name=options.get("job-name", "job"))
    devices = devices or (tasks if tasks > 1 else None)
    return Start(job=job, hosts=hosts, devices=devices, left_out=unread)
