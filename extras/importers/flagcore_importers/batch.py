"""Reads the options of batch scripts: of Slurm, PBS, Fujitsu's TCS, LSF, and ABCI's Grid Engine."""

import re

from flagcore.domain.launch import Start
from flagcore_importers.shell import HOSTS
from flagcore_importers.values import KEYS, left_out, positive, split_words

_SHORT = {"N": "nodes", "J": "job-name", "n": "ntasks", "G": "gpus", "c": "cpus-per-task", "C": "constraint"}
_HOSTS_OF_OTHERS = re.compile(
    r"(?m)^#PBS\s.*?\b(?:select|nodes)=(\d+)|^#PJM\s.*?\bnode=(\d+)|^#BSUB\s.*?-nnodes\s(\d+)|^#\$\s.*?-l\srt_\w+=(\d+)"
)
_DEVICES_OF_OTHERS = re.compile(
    r"(?m)^#PBS\s.*?\b(?:n?gpus|n_gpus)=(\d+)|^#PJM\s.*?\bgpu=(\d+)|^#BSUB\s.*?-gpu\s.*?num=(\d+)"
)


def batch_job(text: str, directory: str) -> Start:
    """Return a batch script without its words: the variables of its system, its hosts, and its devices per host."""
    if options := _options(text):
        return _slurm_job(options, directory)
    found = (each.search(text) for each in (_HOSTS_OF_OTHERS, _DEVICES_OF_OTHERS))
    count, devices = (int(each[each.lastindex or 0]) if each else None for each in found)
    return Start(job={HOSTS: str(count)} if count else {}, hosts=count or 1, devices=devices)


def _slurm_job(options: dict[str, str], directory: str) -> Start:
    hosts = positive(options.get("nodes", "1").rpartition("-")[2]) or 1
    tasks = positive(options.get("ntasks-per-node")) or -(-(positive(options.get("ntasks")) or hosts) // hosts)
    per_node = options.get("gpus-per-node") or re.sub(r"^(?!gpu).*|,.*", "", options.get("gres", ""))
    total, of_task = (positive(options.get(name, "").rpartition(":")[2]) or 0 for name in ("gpus", "gpus-per-task"))
    devices = positive(per_node.rpartition(":")[2]) or total // hosts or of_task * tasks or None
    several = f"(x{hosts})" if hosts > 1 else ""
    job: dict[str, object] = dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), hosts)
    job |= dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), tasks * hosts)
    job |= dict.fromkeys(("SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID"), 0)
    job |= dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOBID"), 1)
    job |= dict.fromkeys(("SLURM_JOB_NODELIST", "SLURM_NODELIST"), "localhost")
    job |= dict.fromkeys(("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"), devices or "")
    job |= {"SLURM_NTASKS_PER_NODE": tasks, "SLURM_TASKS_PER_NODE": f"{tasks}{several}"}
    job |= {"SLURM_JOB_NAME": options.get("job-name", "job"), "SLURM_CPUS_PER_TASK": options.get("cpus-per-task", 1)}
    job["SLURM_SUBMIT_DIR"] = directory
    return Start(
        job={name: str(value) for name, value in job.items() if value != ""},
        hosts=hosts,
        devices=devices or (tasks if tasks > 1 else None),
        left_out={f"#SBATCH {name}": value for name, value in left_out(KEYS.sbatch, options).items()},
    )


def _options(text: str) -> dict[str, str]:
    """Return the options of Slurm in a script, by their long names."""
    options = dict[str, str]()
    for line in re.findall(r"(?m)^#SBATCH\s+(.*)$", text):
        words = split_words(re.sub(r"(^|\s)#.*", "", line))
        for word, following in zip(words, [*words[1:], ""], strict=True):
            name, equals, value = word.lstrip("-").partition("=")
            if not word.startswith("--"):
                name, value, equals = _SHORT.get(word[1:2], word[1:2]), word[2:].lstrip("="), word[2:]
            if word.startswith("-"):
                options[name] = value if equals else following
    return options
