"""Shell scripts that start an exported job."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from urllib.parse import urlsplit

from flagcore.contracts import ExportJob
from flagcore.contracts.exchange import DEVICES_OF_HOST, comments, shell_quoted
from flagcore.domain.engine import EngineSupport, without_devices
from flagcore.domain.launch import PORT, PORT_VARIABLE, Launch
from flagcore.domain.secrets import is_secret
from flagcore.domain.spec import KIND
from flagcore.errors import UsageError
from flagcore.i18n import _

NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
"""Valid names of jobs. They are short, because a pod's name is longer than its job's, and must be a DNS label of at
most 63 characters."""
MASTER_PORT = 29500
NODE_VARIABLES = {
    "{node_rank}": "NODE_RANK",
    "{master_addr}": "MASTER_ADDR",
    "{master_port}": "MASTER_PORT",
    "{nnodes}": "NNODES",
    KIND: "DEVICE_TYPE",
    PORT: PORT_VARIABLE,
}
"""The environment variables of a node that replace the placeholders of a launch."""


def job_name(text: str) -> str:
    """Convert a text to a valid name of a job."""
    return re.sub(r"^[^a-z]+", "", re.sub(r"[^a-z0-9]+", "-", text.lower()))[:40].rstrip("-") or "flagcore"


def checked_name(name: str) -> str:
    """Return `name`. Raises UsageError if it is not a valid name of a job."""
    if not NAME.fullmatch(name):
        raise UsageError(_("--name = {name!r}: use at most 40 lower-case letters, digits and dashes", name=name))
    return name


def start_script(job: ExportJob) -> str:
    """Return a bash script that starts a job on one node. For several nodes, it is the script of `batch_script`."""
    if job.nodes > 1:
        return batch_script(job)
    return "\n".join(["#!/bin/bash", *comments(job), *start_lines(job)]) + "\n"


def batch_script(job: ExportJob) -> str:
    """Return a bash script that starts a job on all nodes of a Slurm job, with one task per node.

    Outside Slurm, it starts one node, whose rank is in NODE_RANK.
    """
    environment = without_devices(job.platform.support, job.launch.environment)  # Slurm assigns the devices
    job = replace(job, launch=replace(job.launch, environment=environment))
    options = [f"job-name={job.name}", f"nodes={job.nodes}", "ntasks-per-node=1"]
    header = [f"#SBATCH --{each}" for each in (*options, of_devices(job, job.platform.support, job.devices))]
    if job.devices == max(group.devices_per_node for group in job.platform.task.cluster.groups):
        header += ["#SBATCH --exclusive", "#SBATCH --mem=0"]  # else a task has one core, and the default of memory
    lines = ["#!/bin/bash", *header, *comments(job)]
    lines.append("# Add what your site needs, such as --account and --time, to the options or to sbatch.")
    several, first = job.nodes > 1, "" if job.launch.script else "=${MASTER_ADDR%%[[:space:]]*}"
    needs_names = several and (bool(first) or "${HOSTS" in job.launch.script)  # otherwise the script has them
    address = ("MASTER_ADDR" if first else "HOSTS") if needs_names else ""
    meaning = "the name of the first node" if first else "the names of all nodes, in the order of NODE_RANK"
    if several:
        names = " and ".join(filter(None, ("NODE_RANK", address)))
        lines.append(f"# Start it with sbatch, or on each of the {job.nodes} nodes with {names} set.")
    rank = ['NODE_RANK="${NODE_RANK:-$SLURM_NODEID}"'] if several else []
    lines += ["start() {", *rank, *start_lines(job, several=several), "}"]
    hostnames = '$(scontrol show hostnames "$SLURM_JOB_NODELIST") || exit 1'
    lines += [
        'if [ -n "${SLURM_JOB_NODELIST:-}" ] && [ -z "${NODE_RANK:-}" ]; then',
        *([f"  {address}={hostnames}", f"  export {address}{first}"] if address else []),
        "  export -f start",
        '  [ -n "${SLURM_STEP_ID:-}" ] || exec srun --export=ALL --kill-on-bad-exit=1 bash -c start',
        "fi",
    ]
    if several:
        lines.append(': "${NODE_RANK:=${SLURM_NODEID:?set NODE_RANK to the number of this node, from 0}}"')
    if address:
        lines.append(f': "${{{address}:?set it to {meaning}}}"')
    return "\n".join([*lines, "start"]) + "\n"


def of_devices(job: ExportJob, support: EngineSupport, devices: int) -> str:
    """Return Slurm's options for a number of devices of each node, and for the queue."""
    name = job.options.get("resource", support.slurm.name if support.slurm else "gpu")
    usual = "cpus-per-task=" if support.shared_devices else "gpus-per-node="
    queue = f" --partition={job.options['queue']}" if "queue" in job.options else ""
    return f"{usual if support.shared_devices or name == 'gpu' else f'gres={name}:'}{devices}{queue}"


def start_lines(job: ExportJob, *, several: bool = False, names: Mapping[str, str] = {}) -> list[str]:
    """Return the lines of bash that start one node. If there are several, NODE_RANK and MASTER_ADDR must be set.

    `names`: texts in the command, such as secrets, with the names of the variables that contain them.
    """
    launch = job.launch
    lines = [f"cd {_quoted(launch.directory, names)} || exit 1"] if launch.directory else []
    if PORT in launch.argv:
        lines.append(f'{PORT_VARIABLE}="${{{PORT_VARIABLE}:-{urlsplit(launch.ready[0]).port}}}"')
    if KIND in launch.argv:
        lines.append(': "${DEVICE_TYPE:?set it to the type of this node in the host file}"')
    if launch.script:  # its line that sets MASTER_ADDR comes first: interfaces are found with it
        script = launch.script.splitlines()
        at = next((number for number, line in enumerate(script, 1) if "MASTER_ADDR=" in line), 0)
        return [*lines, *script[:at], *exports(launch, names), *script[at:]]
    if several:
        lines.append(f'export NODE_RANK MASTER_ADDR MASTER_PORT="${{MASTER_PORT:-{MASTER_PORT}}}" NNODES={job.nodes}')
        lines.append(f'export PET_NNODES={job.nodes} PET_NODE_RANK="$NODE_RANK"')
        lines.append('export PET_MASTER_ADDR="$MASTER_ADDR" PET_MASTER_PORT="$MASTER_PORT"')
    elif not (launch.ready or launch.own_script):
        lines.append(f'export MASTER_ADDR="${{MASTER_ADDR:-127.0.0.1}}" MASTER_PORT="${{MASTER_PORT:-{MASTER_PORT}}}"')
    lines += exports(launch, names)
    if not launch.sample:
        return [*lines, f"exec {multi_line(launch.argv, names=names)}"]
    sample = re.sub(r"\S*,\S*", r"'\g<0>'", multi_line(launch.sample, separator="\n"))
    lines += [f"# Replace these, which train on generated data: {launch.missing}.", f"SAMPLE=(\n  {sample}\n)"]
    return [*lines, f'exec {multi_line(launch.argv)} \\\n  "${{SAMPLE[@]}}"']


def exports(launch: Launch, names: Mapping[str, str] = {}) -> list[str]:
    """Return the lines of bash that export the variables of a launch, or that check that its secrets are set."""
    lines = list[str]()
    for name, value in launch.environment.items():
        if is_secret(name, value) and value:
            lines.append(f': "${{{name}:?set it: it is secret}}"')
        elif any(each in value for each in DEVICES_OF_HOST):
            lines += [f"{name}={_quoted(value, names)}", f"export {name}"]
        else:
            lines.append(f"export {name}={_quoted(value, names)}")
    return lines


def multi_line(words: Sequence[str], separator: str = " \\\n", names: Mapping[str, str] = {}) -> str:
    """Return a shell command with each flag and its values on a separate line."""
    lines = [""]
    for word in words:
        is_value = not word.startswith("-") and "=" not in lines[-1]
        if is_value or not lines[-1]:
            lines[-1] += f"{' ' if lines[-1] else ''}{_quoted(word, names)}"
        else:
            lines.append(_quoted(word, names))
    return f"{separator}  ".join(lines)


def _quoted(word: str, names: Mapping[str, str] = {}) -> str:
    return shell_quoted(word, {**names, **NODE_VARIABLES, **DEVICES_OF_HOST})
