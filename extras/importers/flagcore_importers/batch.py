"""Reads the options of batch jobs: of Slurm, PBS, Fujitsu's TCS, LSF, and ABCI's Grid Engine.

Also units of systemd, podman (Quadlet) and supervisord.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from flagcore.domain.launch import Start
from flagcore.errors import SpecError
from flagcore_importers.containers import Images, container_run
from flagcore_importers.shell import HOSTS
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
)

SLURM = ("srun", "sbatch", "salloc")
"""Slurm's commands whose options describe a job, or a step of one."""
_SHORT = {"N": "nodes", "J": "job-name", "n": "ntasks", "G": "gpus", "c": "cpus-per-task", "C": "constraint"}
_STEP = {"nodes": "NNODES", "ntasks": "NTASKS", "ntasks-per-node": "NTASKS_PER_NODE", "cpus-per-task": "CPUS_PER_TASK",
         "gpus": "GPUS", "gpus-per-node": "GPUS_PER_NODE", "gpus-per-task": "GPUS_PER_TASK"}  # fmt: skip
"""The options that srun reads from variables (srun(1), input environment variables), without `SLURM_`."""
GPUS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""The variables in which Slurm names the GPUs of a host: scripts count them (slurm.schedmd.com/gres.html)."""
_GPU = re.compile(r"(?:gres[/:])?(?!cpu)(?:[a-z]*pu|[dg]cu|mlu)\b")
"""The start of a resource of devices: gpu, and the names of other vendors' devices, such as npu, dcu and mlu."""
_HOSTS_OF_OTHERS = re.compile(
    r"(?m)^#PBS\s.*?\b(?:select|nodes)=(\d+)|^#PJM\s.*?\bnode=(\d+)|^#BSUB\s.*?-nnodes\s(\d+)|^#\$\s.*?-l\srt_\w+=(\d+)"
)
_DEVICES_OF_OTHERS = re.compile(
    r"(?m)^#PBS\s.*?\b(?:n?gpus|n_gpus)=(\d+)|^#PJM\s.*?\bgpu=(\d+)|^#BSUB\s.*?-gpu\s.*?num=(\d+)"
)
_VARIABLES = {
    "{hosts}": "SLURM_NNODES SLURM_JOB_NUM_NODES", "{count}": "SLURM_NTASKS SLURM_NPROCS",
    "0": "SLURM_NODEID SLURM_PROCID SLURM_LOCALID", "1": "SLURM_JOB_ID SLURM_JOBID",
    "localhost": "SLURM_JOB_NODELIST SLURM_NODELIST", "{devices}": "SLURM_GPUS_PER_NODE SLURM_GPUS_ON_NODE",
    "{total}": "SLURM_GPUS", "{of_task}": "SLURM_GPUS_PER_TASK", "{numbers}": " ".join(("SLURM_JOB_GPUS", *GPUS)),
    "{tasks}": "SLURM_NTASKS_PER_NODE", "{tasks}{several}": "SLURM_TASKS_PER_NODE",
    "{cpus}": "SLURM_CPUS_PER_TASK", "{all_cpus}": "SLURM_CPUS_ON_NODE",
}  # fmt: skip
"""What variables of a job contain (srun(1), output environment variables)."""
_COPIED = {"partition": "SLURM_JOB_PARTITION", "account": "SLURM_JOB_ACCOUNT",
           "cpus-per-gpu": "SLURM_CPUS_PER_GPU", "ntasks-per-gpu": "SLURM_NTASKS_PER_GPU"}  # fmt: skip
"""The variables with the value of an option."""


def batch_job(text: str, directory: str, options: Mapping[str, str] | None = None) -> Start:
    """Return a batch script without its words: the variables of its system, its hosts, and its devices per host.

    `options`: of the command that submits it. They override those of the script.
    """
    lines = (re.sub(r"(^|\s)#.*", "", each) for each in re.findall(r"(?m)^#SBATCH\s+(.*)$", text))
    of_script = slurm_options([word for line in lines for word in split_words(line)], are_all=True)[0]
    if given := {**of_script, **(options or {})}:
        return _slurm_job(given, directory)
    found = (each.search(text) for each in (_HOSTS_OF_OTHERS, _DEVICES_OF_OTHERS))
    count, devices = (int(each[each.lastindex or 0]) if each else None for each in found)
    return Start(job={HOSTS: str(count)} if count else {}, hosts=count or 1, devices=devices)


def step_job(options: Mapping[str, str], job: Mapping[str, str], directory: str) -> Start:
    """Return a step that srun starts in a batch job with the variables `job`, without its words, like `batch_job`."""
    inherited = {name: job[f"SLURM_{each}"] for name, each in _STEP.items() if f"SLURM_{each}" in job}
    if {"nodes", "ntasks"} & options.keys():
        inherited.pop("ntasks", None)
    step = _slurm_job({**inherited, **options}, directory)
    of_job = {name: job[name] for name in ("SLURM_JOB_NUM_NODES", "SLURM_JOB_NAME") if name in job}
    return Start(job={**job, **step.job, **of_job}) if job else replace(step, left_out={})


def slurm_options(words: Sequence[str], *, are_all: bool = False) -> tuple[dict[str, str], list[str]]:
    """Return Slurm's options at the start of `words`, by their long names, and the words that follow them.

    `are_all`: whether each word belongs to an option, also one whose value is not known to be a word of its own.
    """
    options, rest = dict[str, str](), list(words)
    while rest and (are_all or rest[0].startswith("-")):
        name, equals, value = rest.pop(0).partition("=")
        if not name.startswith("-"):  # a placeholder for options
            continue
        if not name.startswith("--"):
            name, value = _SHORT.get(name[1:2], name[1:2]), (name[2:] + equals + value).removeprefix("=")
            equals = value
        if (
            not equals
            and rest
            and not rest[0].startswith("-")
            and not re.fullmatch(KEYS.slurm_switches, name.strip("-"))
        ):
            value = rest.pop(0)
        options[name.lstrip("-")] = value
    return options, rest


def _slurm_job(options: Mapping[str, str], directory: str) -> Start:
    sizes = _sizes(options)
    hosts, tasks, devices = (sizes[name] for name in ("hosts", "tasks", "devices"))
    fields: dict[str, object] = {name: size or "" for name, size in sizes.items()}
    fields |= {"several": f"(x{hosts})" if hosts > 1 else "", "numbers": ",".join(map(str, range(devices)))}
    job = {name: text.format(**fields) for text, names in _VARIABLES.items() for name in names.split()}
    job |= {name: options.get(option, "") for option, name in _COPIED.items()}
    job |= {"SLURM_JOB_NAME": options.get("job-name", "job"), "SLURM_SUBMIT_DIR": directory}
    return Start(
        job={name: value for name, value in job.items() if value},
        hosts=hosts,
        devices=devices or (tasks if tasks > 1 else None),
        left_out={f"#SBATCH {name}": value for name, value in left_out(KEYS.sbatch, options).items()},
    )


def _sizes(options: Mapping[str, str]) -> dict[str, int]:
    """Return the sizes of a job by their fields in `_VARIABLES`: 0 if they are not known."""
    per_node = _gpus(options, "gpus-per-node", "gres", "tres-per-node")
    total, of_task = _gpus(options, "gpus"), _gpus(options, "gpus-per-task", "tres-per-task")
    names = ("ntasks", "ntasks-per-gpu", "ntasks-per-node")
    ntasks, of_gpu, of_host = (count_of(options.get(name), 0) for name in names)
    least = max(-(-ntasks // (of_host or ntasks or 1)), -(-total // (per_node or total or 1)), 1)
    hosts = count_of(options.get("nodes", "").rpartition("-")[2], least)
    count = ntasks or of_gpu * (total or per_node * hosts) or of_host * hosts or hosts
    tasks, cpus = of_host or -(-count // hosts), count_of(options.get("cpus-per-task"))
    devices = per_node or total // hosts or of_task * tasks
    sizes = {"hosts": hosts, "count": count, "tasks": tasks, "cpus": cpus, "all_cpus": cpus * tasks}
    return {**sizes, "devices": devices, "total": total or devices * hosts, "of_task": of_task}


def _gpus(options: Mapping[str, str], *names: str) -> int:
    """Return the number of GPUs in the first of the options that has one: a count, or a list of resources."""
    counts = ((_resource if "res" in name else _count)(options.get(name, "")) for name in names)  # of gres and tres
    return next(filter(None, counts), 0)


def _count(value: str) -> int:
    """Return the number of GPUs in the value of an option, such as `4`, `a100:4` or `a100:3,v100:1`; one of a type
    without a number."""
    counts = (each.partition("(")[0].rpartition(":")[2] for each in value.split(","))
    return sum(positive(each) or bool(re.fullmatch(r"[A-Za-z][\w.-]*", each)) for each in counts)


def _resource(value: str) -> int:
    """Return the number of GPUs in a list of resources, such as `gpu:a100:4,nvme:1`, `dcu:8` or `cpu=8,gres/gpu=2`."""
    found = (_GPU.sub("", each).lstrip(":=/") or "1" for each in value.split(",") if _GPU.match(each))
    return sum(_count(each.replace("=", ":")) for each in found)


UNIT = re.compile(r"(?m)^\[(Service|Container|program:.*)\]")
"""A section of a unit that starts a program."""
_FILE, _OPTIONS = "EnvironmentFile", {"AddDevice": "--device", "Entrypoint": "--entrypoint"}


def programs_of(text: str, folder: Path, images: Images) -> Iterator[Start]:
    """Yield the programs of a unit, which is in `folder`. Raises SpecError."""
    joined = re.sub(r"(?m)^\s*[#;\[].*", "", re.sub(r"\\\n\s*", " ", text))
    lines = [line.partition("=") for line in joined.splitlines()]
    pairs = [(key.strip(), value.strip()) for key, equals, value in lines if equals]
    found = dict(pairs)
    envs, missing = _environment(pairs, folder)
    start = Start(envs=envs, left_out=left_out(KEYS.unit, found) | ({_FILE: "it is not here"} if missing else {}))
    for value in [value for key, value in pairs if key in ("ExecStart", "command") and value]:
        words = filled(split_words(value.lstrip("-@+!:").replace("%h", str(Path.home()))), BRACED, envs)
        names = ", ".join(re.findall(r"\$\{?(\w+)", " ".join(words)))
        if missing and names and not re.search(r"\bsh -\w*c ", " ".join(words)):
            problem, fix = f"is not on this machine, but sets {names}", "copy it beside the unit"
            raise SpecError(key=_FILE, value=missing, problem=problem, fix=fix)
        yield replace(start, words=words)
    if "Image" in found:
        yield container_run(start, [*_podman_words(pairs), found["Image"], *split_words(found.get("Exec", ""))], images)


def _podman_words(pairs: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield the options of podman that a unit sets."""
    for key, value in pairs:
        if key == "PodmanArgs":
            yield from split_words(value)
        elif key in _OPTIONS:
            yield from (_OPTIONS[key], value)


def _environment(pairs: Sequence[tuple[str, str]], folder: Path) -> tuple[dict[str, str], str]:
    """Return the variables of a unit in `folder`, and the last of its files that are not here."""
    envs, missing = dict[str, str](), ""
    for key, value in sorted(pairs, key=lambda each: each[0] == _FILE):  # files override the unit
        if key in ("Environment", "environment"):
            envs |= literal_variables(split_words(value if key[0] == "E" else value.replace(",", " ")))
        elif key == _FILE:
            file = Path(value.lstrip("-"))
            here = next((each for each in (file, folder / file.name) if each.is_file()), None)
            envs |= dotenv(here) if here else {}
            missing = missing if here else str(file)
    return envs, missing
