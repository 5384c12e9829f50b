"""The orders of a trial to the agents of its hosts."""

from __future__ import annotations

import os
import resource
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from flagcore.domain.launch import Launch
from flagcore.errors import LaunchError
from flagcore.launchers.guarded import MARKER

LOGS = ("stdout.log", "stderr.log")
FILES_PER_HOST = 3
OTHER_FILES = 64
SHARED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "OMP_NUM_THREADS")
"""Variables of this shell that are copied to every host, because no login shell sets them there."""


def shared_variables() -> dict[str, str]:
    """Return the variables of this shell that are copied to every host."""
    return {name: os.environ[name] for name in SHARED if name in os.environ}


def with_variables(launch: Launch) -> Launch:
    """Return a launch with the variables of all its hosts, which its own variables override: those of this shell, those
    of a launch on several nodes, and a new MARKER.
    """
    places = {"MASTER_ADDR": "{master_addr}", "MASTER_PORT": "{master_port}", "NODE_RANK": "{node_rank}"}
    shared = {**shared_variables(), **places, "NNODES": "{nnodes}", MARKER: secrets.token_hex(8)}
    on_host = {host: replace(own, environment={**shared, **own.environment}) for host, own in launch.on_host.items()}
    return replace(launch, environment={**shared, **launch.environment}, on_host=on_host)


def allow_files(more: int) -> None:
    """Raise the limit of open files if it is too low for `more` files. Raises LaunchError above the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed_files = len(os.listdir("/proc/self/fd")) + more + OTHER_FILES
    if resource.RLIM_INFINITY != soft < needed_files:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed_files, hard))
        except ValueError:
            problem = f"the channels to the hosts need {needed_files} open files, and {hard} are allowed"
            raise LaunchError(f"{problem}; raise the hard limit (ulimit -Hn) or use fewer hosts") from None


def trial_files(folder: str) -> dict[str, str]:
    """Return the text of the files that the engine wrote into a trial's folder."""
    names = [name for name in os.listdir(folder) if name not in (*LOGS, "launch.json", "exit.json")]
    paths = [path for name in names if (path := Path(folder, name)).is_file()]
    return {path.name: path.read_text(encoding="utf-8") for path in paths}


def order_for_host(launch: Launch, host: str, values: Mapping[str, str], files: Mapping[str, str]) -> dict[str, object]:
    """Return the order for a host. The agent replaces the trial's folder by a folder on its host."""

    own = launch.on_host.get(host, launch)

    def filled(text: str) -> str:
        for name, value in values.items():
            text = text.replace(f"{{{name}}}", value)
        return text

    return {
        "argv": [filled(word) for word in own.argv],
        "environment": {name: filled(value) for name, value in own.environment.items()},
        "directory": launch.directory or launch.folder,
        "folder": launch.folder,
        "files": files,
        "warm": launch.warm,
        "limits": [launch.timeout_seconds, launch.memory_limit_bytes, launch.disk_limit_bytes],
        "master_addr": values["master_addr"],
    }
