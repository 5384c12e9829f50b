"""Keeps agents between trials, so that each host connects only once, and reads the telemetry of host devices."""

from __future__ import annotations

import math
import select
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flagcore.launchers.connection import Connection

PERIOD_SECONDS = 0.5
MAX_READS = 4
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
                    connection.send(watch=self.watch)
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
                connection.send(watch=self.watch)

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
        poll = select.poll()
        poll.register(connection.output, select.POLLIN)
        for _ in range(MAX_READS):
            if connection.open and poll.poll(0):
                connection.read()
        connection.send_heartbeat()
        if not connection.open:
            connection.disconnect()
            connection.close(0.0)
        return connection.open
