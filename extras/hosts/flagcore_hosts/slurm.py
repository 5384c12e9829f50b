"""The launcher `slurm`: its agents are steps of the current allocation. It also writes batch scripts."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace

from flagcore.contracts import ExportJob, Launcher
from flagcore.contracts.exchange import comments
from flagcore.domain.engine import EngineSupport, without_devices
from flagcore.domain.spec import KIND, SLOTS
from flagcore.errors import LaunchError
from flagcore.launchers.script import start_lines
from flagcore_hosts.connection import agent_command
from flagcore_hosts.job import no_checkpoints
from flagcore_hosts.launcher import HostsLauncher

REQUEUE = ("requeue", "open-mode=append")
"""Slurm's options for jobs that start again, with the output after that of the earlier start."""


def channel(host: str) -> list[str]:
    """Return the command that starts an agent on `host` as a step. Raises LaunchError outside an allocation."""
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        raise LaunchError("not inside a Slurm allocation: run `flag tune` with salloc or sbatch")
    step = ["srun", f"--jobid={job}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--input=all"]
    return [*step, "--unbuffered", "--quiet", "sh", "-c", agent_command()]


@dataclass(kw_only=True)
class SlurmLauncher(HostsLauncher):
    """A launcher for Slurm allocations, which also exports jobs as batch scripts."""

    targets = {"slurm": ("resource", "queue", "restarts")}  # noqa: RUF012
    per_server: bool = False
    most_vendors: int = 1
    fix = "start `flag tune` with salloc or sbatch"

    def find_hosts(self, nodes: int, /) -> tuple[str, ...]:
        """Return the hosts of this allocation. It is empty outside an allocation.

        Raises LaunchError if Slurm does not list them.
        """
        nodelist = os.environ.get("SLURM_JOB_NODELIST")
        if not nodelist:
            return ()
        command = ["scontrol", "show", "hostnames", nodelist]
        try:
            completed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            raise LaunchError(
                f"cannot list the hosts of the Slurm allocation: `{' '.join(command)}` failed: {error}"
            ) from error
        return tuple(completed.stdout.split())

    def has_allocation(self) -> bool:
        """Return whether flagcore runs in an allocation with several hosts."""
        nodes = os.environ.get("SLURM_JOB_NUM_NODES", "")
        return "SLURM_JOB_ID" in os.environ and nodes.isdecimal() and int(nodes) > 1

    def export(self, job: ExportJob, target: str) -> Mapping[str, str]:
        """Return a batch script with one task per node."""
        if job.options.get("restarts") and (note := no_checkpoints(job.launch)):
            job = replace(job, comments=(*job.comments, note))
        return {f"{job.name}.sbatch": _script_of_kinds(job) if job.unequal_nodes else batch_script(job)}


def batch_script(job: ExportJob) -> str:
    """Return a bash script that starts a job on all nodes of a Slurm job, with one task per node.

    Outside Slurm, it starts one node, whose rank is in NODE_RANK.
    """
    environment = without_devices(job.platform.support, job.launch.environment)  # Slurm assigns the devices
    job = replace(job, launch=replace(job.launch, environment=environment))
    options = [f"job-name={job.name}", f"nodes={job.nodes}", "ntasks-per-node=1"]
    options += REQUEUE if "restarts" in job.options else ()
    header = [f"#SBATCH --{each}" for each in (*options, of_devices(job, job.platform.support, job.devices))]
    if job.devices == max(group.devices_per_node for group in job.platform.task.cluster.groups):
        header += ["#SBATCH --exclusive", "#SBATCH --mem=0"]  # else a task has one core, and the default of memory
    lines = ["#!/bin/bash", *header, *comments(job)]
    lines.append("# Add what your site needs, such as --account and --time, to the options or to sbatch.")
    if "#SBATCH --exclusive" not in header and not job.platform.support.shared_devices:
        lines.append("# Unless your site has other defaults, the task has one core: add --cpus-per-task and --mem.")
    lines += _unsure_name(job, job.platform.support)
    if not job.platform.task.spec.work.has_steps and "127.0.0.1" in f"{job.launch.argv}{job.launch.script}":
        here = "# Port 8000 is open on its (first) node only: from elsewhere, use ssh -N -L 8000:127.0.0.1:8000 NODE."
        lines.append(here)
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
        f'  [ -n "${{SLURM_STEP_ID:-}}" ] || {slurm_step(job, "bash -c start")}',
        "fi",
    ]
    if several:
        lines.append(': "${NODE_RANK:=${SLURM_NODEID:?set NODE_RANK to the number of this node, from 0}}"')
    if address:
        lines.append(f': "${{{address}:?set it to {meaning}}}"')
    return "\n".join([*lines, "start"]) + "\n"


def slurm_step(job: ExportJob, start: str) -> str:
    """Return the command that runs the tasks of a Slurm job and exits, on several nodes again after failures.

    It keeps the nodes. If a node fails, Slurm ends the job and puts it into its queue again (`--requeue`).
    """
    step, restarts = f"srun --export=ALL --kill-on-bad-exit=1 {start}", job.options.get("restarts", "0")
    if job.nodes == 1 or restarts == "0":
        return f"exec {step}"
    return f"{{ for restart in {{0..{restarts}}}; do {step} && break; done; exit; }}"


def of_devices(job: ExportJob, support: EngineSupport, devices: int) -> str:
    """Return Slurm's options for a number of devices of each node, and for the queue."""
    name = job.options.get("resource", support.slurm.name if support.slurm else "gpu")
    usual = "cpus-per-task=" if support.shared_devices else "gpus-per-node="
    queue = f" --partition={job.options['queue']}" if job.options.get("queue") else ""
    return f"{usual if support.shared_devices or name == 'gpu' else f'gres={name}:'}{devices}{queue}"


def _unsure_name(job: ExportJob, support: EngineSupport) -> list[str]:
    """Return a comment if nothing public says how Slurm names the devices."""
    if support.slurm or support.shared_devices or job.options.get("resource"):
        return []
    return ["# Slurm's usual name of devices is gpu: if your site has another for these, export with --resource NAME."]


def _script_of_kinds(job: ExportJob) -> str:
    """Return a batch script of a heterogeneous job, which has a component for each kind of nodes.

    The nodes are numbered in the order of the components. A node finds its number by its name.
    """
    setups, groups = job.platform.setups, job.platform.task.cluster.groups
    header, starts, steps = [f"#SBATCH --job-name={job.name}"], list[str](), list[str]()
    header += [f"#SBATCH --{each}" for each in REQUEUE if "restarts" in job.options]
    for number, (setup, group) in enumerate(zip(setups, groups, strict=True)):
        devices = of_devices(job, setup.support, setup.devices)
        words = [f"--nodes={group.nodes}", "--ntasks-per-node=1", f"--{devices}", "--exclusive"]
        header += ["#SBATCH hetjob"] if number else []
        header += [f"# Nodes with {group.chip.name}: add --partition or --constraint.", f"#SBATCH {' '.join(words)}"]
        header += _unsure_name(job, setup.support)
        argv = tuple(word.replace(SLOTS, str(setup.devices)).replace(KIND, setup.kind) for word in job.launch.argv)
        variables = {**job.launch.environment, **setup.environment, **setup.envs}
        launch = replace(job.launch, argv=argv, environment=without_devices(setup.support, variables))
        starts += [f"start_{number}() {{", *start_lines(replace(job, launch=launch), several=True), "}"]
        steps.append(f'--het-group={number} bash -c "$rank start_{number}"')
    return (
        "\n".join(
            [
                "#!/bin/bash",
                *header,
                *comments(job),
                "# Start it with sbatch.",
                *starts,
                ': "${SLURM_JOB_NODELIST_HET_GROUP_0:?is not set: start this script with sbatch}"',
                f"for group in {' '.join(map(str, range(len(setups))))}; do",
                "  list=SLURM_JOB_NODELIST_HET_GROUP_$group",
                '  nodes="${nodes:-} "$(scontrol show hostnames "${!list}") || exit 1',
                "done",
                "read -ra nodes <<< \"${nodes//$'\\n'/ }\"",
                'export MASTER_ADDR=${nodes[0]} NODES="${nodes[*]}"',
                f"export -f {' '.join(f'start_{number}' for number in range(len(setups)))}",
                "rank='NODE_RANK=0; for node in $NODES; do"
                ' [ "$node" = "$SLURMD_NODENAME" ] && break; NODE_RANK=$((NODE_RANK + 1)); done;\'',
                slurm_step(job, " : ".join(steps)),
            ]
        )
        + "\n"
    )


LAUNCHER: Launcher = SlurmLauncher(name="slurm", channel=channel)
