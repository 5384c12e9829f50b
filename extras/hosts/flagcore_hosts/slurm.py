"""The launcher `slurm`: its agents are steps of the current allocation. It also writes batch scripts."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace

from flagcore.contracts import ExportJob, Launcher
from flagcore.contracts.exchange import comments
from flagcore.domain.engine import without_devices
from flagcore.domain.spec import KIND, SLOTS
from flagcore.errors import LaunchError
from flagcore.launchers.script import batch_script, of_devices, start_lines
from flagcore_hosts.connection import agent_command
from flagcore_hosts.launcher import HostsLauncher


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

    targets = {"slurm": ("resource", "queue")}  # noqa: RUF012
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
        return {f"{job.name}.sbatch": _script_of_kinds(job) if job.unequal_nodes else batch_script(job)}


def _script_of_kinds(job: ExportJob) -> str:
    """Return a batch script of a heterogeneous job, which has a component for each kind of nodes.

    The nodes are numbered in the order of the components. A node finds its number by its name.
    """
    setups, groups = job.platform.setups, job.platform.task.cluster.groups
    header, starts, steps = [f"#SBATCH --job-name={job.name}"], list[str](), list[str]()
    for number, (setup, group) in enumerate(zip(setups, groups, strict=True)):
        devices = of_devices(job, setup.support, setup.devices)
        words = [f"--nodes={group.nodes}", "--ntasks-per-node=1", f"--{devices}", "--exclusive"]
        header += ["#SBATCH hetjob"] if number else []
        header += [f"# Nodes with {group.chip.name}: add --partition or --constraint.", f"#SBATCH {' '.join(words)}"]
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
                f"exec srun --export=ALL --kill-on-bad-exit=1 {' : '.join(steps)}",
            ]
        )
        + "\n"
    )


LAUNCHER: Launcher = SlurmLauncher(name="slurm", channel=channel)
