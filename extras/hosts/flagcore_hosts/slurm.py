"""The launcher `slurm`: its agents are steps of the current allocation. It also writes batch scripts."""

import os
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from flagcore.contracts import ExportJob, Launcher
from flagcore.errors import LaunchError
from flagcore.launchers.script import batch_script
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

    targets: Collection[str] = ("slurm",)
    per_server: bool = False
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
        return {f"{job.name}.sbatch": batch_script(job)}


LAUNCHER: Launcher = SlurmLauncher(name="slurm", channel=channel)
