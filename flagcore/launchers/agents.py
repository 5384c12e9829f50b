"""The agents of hosts and the orders of a trial to them.

Agents are kept between trials, so that each host connects only once, and read the telemetry of their devices.
"""

from __future__ import annotations

import math
import os
import resource
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flagcore.domain.launch import Launch
from flagcore.errors import LaunchError
from flagcore.launchers.connection import LOGS, Connection
from flagcore.launchers.guarded import MARKER

PERIOD_SECONDS = 0.5
CLOSE_SECONDS = 2.0
"""Time for a channel to close before its process on this machine is killed."""


class Agents:
    """The connections to agents without a trial, one per host. A thread keeps them alive."""

    def __init__(self, channel: Callable[[str], Sequence[str]]) -> None:
        self.channel = channel
        self.watch: Mapping[str, object] | None = None
        """The program that reads the devices of each host: `argv` and `environment`."""
        self.of_hosts: dict[str, Connection] = {}
        """The last connection to each host, even while it has a trial."""
        self._idle: dict[str, Connection] = {}
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._keep_alive, name="agents", daemon=True)
        self._thread.start()

    def has(self, host: str) -> bool:
        """Return whether a host has an idle agent."""
        return host in self._idle

    def take(self, host: str) -> Connection:
        """Return an agent on a host: an idle one, or a new one."""
        with self._lock:
            idle = self._idle.pop(host, None)
            if idle and self._is_alive(idle):
                return idle
            connection, other = Connection(host, self.channel(host)), self.of_hosts.get(host)
            if other is None or other.process.poll() is not None:
                self.of_hosts[host] = connection
                if self.watch:
                    connection.wire.send(watch=self.watch)
            return connection

    def give_back(self, connection: Connection) -> bool:
        """Keep an agent whose trial has ended; return whether it is kept."""
        with self._lock:
            if self._closed.is_set() or connection.host in self._idle:
                return False
            connection.assign("")
            self._idle[connection.host] = self.of_hosts[connection.host] = connection
            return True

    def watch_devices(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a program on each host that prints the readings of its devices, one line of JSON at a time."""
        with self._lock:
            self.watch = {"argv": list(argv), "environment": dict(environment)}
            for connection in self._idle.values():
                connection.wire.send(watch=self.watch)

    def reading(self, host: str) -> tuple[float, Sequence[Mapping[str, Any]]]:
        """Return the time and the last reading of each device of a host."""
        connection = self.of_hosts.get(host)
        return connection.reading if connection and not connection.problem else (-math.inf, ())

    def close(self) -> None:
        """End all idle agents."""
        self._closed.set()
        self._thread.join()
        for connection in self._idle.values():
            connection.disconnect()
        for connection in self._idle.values():
            connection.close(CLOSE_SECONDS)
        self._idle.clear()

    def _keep_alive(self) -> None:
        while not self._closed.wait(PERIOD_SECONDS):
            with self._lock:
                self._idle = {host: each for host, each in self._idle.items() if self._is_alive(each)}

    @staticmethod
    def _is_alive(connection: Connection) -> bool:
        """Exchange messages with an idle agent. Return whether it can still be used; else close the connection."""
        connection.read()
        connection.beat()
        if not connection.open:
            connection.disconnect()
            connection.close(0.0)
        return connection.open


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
