"""Starts servers on free ports, checks that each owns its port, and stops all their processes.

Servers on other hosts are started by a program on each host (`host.py`). This program writes a report, which is
mirrored to this machine.
"""

import contextlib
import http.client
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from flagcore.domain.launch import FailurePattern, host_folder
from flagcore.domain.trial import TrialState
from flagcore_serving.launch.server import Instance, TrialJob, log_name, transfer_port
from flagcore_serving.trial.failures import TrialFailure, first_error, log_text, server_failure

POLL_SECONDS, REPORT_SECONDS = 0.05, 0.1
REPORT = "servers.json"
"""The file in which a host reports its `servers` by number when all are healthy, and a `failure` with state and
reason."""
ANSWER_SECONDS = 10.0
"""Timeout of a request for the state of a server."""
GRACE_SECONDS = 10.0
"""Seconds between SIGTERM and SIGKILL."""
EXIT_SECONDS = 2.0
"""Maximum seconds between lost requests and the exit of the server that lost them."""
PORT_TRIES = 4
KNOWN_CAUSES = (TrialState.OUT_OF_MEMORY, TrialState.INVALID)
"""If a server does not become healthy, its log may show one of these states as the cause. Otherwise it timed out."""
INVALID_ANSWERS = (OSError, ValueError, LookupError, TypeError, AttributeError)
"""Exceptions that reading the state of a server may raise."""
MAX_TEXT = 8 << 20


class PortTaken(Exception):
    """Another process listens on the port of a server."""


class Served(ABC):
    """An instance that answers requests. `startup_s`: the seconds until it was healthy."""

    def __init__(self, name: str, log: Path, patterns: Sequence[FailurePattern]) -> None:
        self.name, self.log, self.patterns = name, log, patterns
        self.startup_s, self.url = 0.0, ""

    @abstractmethod
    def check_alive(self, when: str) -> None:
        """Raise TrialFailure if the server has ended."""

    @abstractmethod
    def resident_bytes(self) -> int:
        """Return the sum of the peak resident memory of the server's processes in bytes (proc(5): VmHWM)."""

    def fetch(self, path: str) -> str:
        """Return the server's response to a path. Raises OSError, also for a status other than 200."""
        status, text = self._get(path)
        if status != 200:
            raise OSError(f"{path} answers {status}")
        return text

    def _get(self, path: str, timeout_s: float = ANSWER_SECONDS) -> tuple[int, str]:
        """Send GET `path` and return status and text. Raises OSError, also if nothing arrives in `timeout_s`."""
        place, limit_s = urlsplit(self.url), max(0.1, min(timeout_s, ANSWER_SECONDS))
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=limit_s)
        try:
            connection.request("GET", path, headers={"Connection": "close"})
            answer = connection.getresponse()
            return answer.status, answer.read(MAX_TEXT).decode("utf-8", errors="replace")
        except (ValueError, http.client.HTTPException) as error:
            raise OSError(f"{type(error).__name__}: {error}") from None
        finally:
            connection.close()


class Server(Served):
    """An instance that this process starts, or the part of an instance that runs on a further host.

    `serves`: whether it answers requests, which a part on a further host does not.
    """

    def __init__(
        self, name: str, instance: Instance, log: Path, patterns: Sequence[FailurePattern], *, serves: bool = True
    ) -> None:
        super().__init__(name, log, patterns)
        self.instance, self.serves, self.port = instance, serves, 0
        self._process: subprocess.Popen[bytes] | None = None
        self._started, self._healthy_from = 0.0, 0

    def start(self, directory: str | None) -> None:
        """Start the server on a free port. Raises TrialFailure if its program cannot be started."""
        self.port, self._started, self._healthy_from = free_port(), time.monotonic(), 0
        # a server that exchanges KV caches also listens on this port
        while self.instance.kind and listeners(transfer_port(self.port)):
            self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        instance = self.instance.at_port(self.port)
        own_cores = os.sched_getaffinity(0)
        try:
            with self.log.open("wb") as log:
                if instance.cores:
                    os.sched_setaffinity(0, instance.cores)  # the new process inherits this
                self._process = subprocess.Popen(
                    instance.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **instance.environment},
                    cwd=directory,
                    start_new_session=True,  # by which `_processes` finds children that it detaches
                )
        except OSError as error:
            reason = f"{self.name} cannot be started: {instance.argv[0]}: {error.strerror or error}"
            raise TrialFailure(TrialState.INVALID, reason) from None
        finally:
            os.sched_setaffinity(0, own_cores)

    def wait_until_healthy(self, path: str, deadline: float) -> None:
        """Wait until `path` of this server returns 200.

        Raises PortTaken if another process has the port, TrialFailure if the server ends or `deadline`
        (time.monotonic()) passes.
        """
        last_status = ""
        while time.monotonic() < deadline:
            self.check_alive("while it started")
            status = None
            try:
                status = self._get(path, deadline - time.monotonic())[0]
                last_status = f"answer {status}"
            except OSError as error:
                if isinstance(error, ConnectionRefusedError):
                    time.sleep(POLL_SECONDS)
                    continue
                last_status = f"no answer ({error})"
            if status == 200 and is_owned_by(self.port, self.pids()):
                self.check_alive("while it started")
                self.startup_s = time.monotonic() - self._started
                self._healthy_from = self.log.stat().st_size
                return
            if status in (200, None) and self._is_taken():
                raise PortTaken(f"port {self.port} of {self.name} is in use by another process")
            time.sleep(POLL_SECONDS)
        waited = time.monotonic() - self._started
        last_status = f"{last_status} on {path}" if last_status else f"nothing listens at {self._addresses()}"
        state, line = first_error(log_text(self.log), self.patterns)
        quote = f"; its log: {line}" if line else f"; {self.log.name} is empty"
        reason = f"{self.name} was not healthy after {waited:.0f} s: {last_status}{quote}"
        raise TrialFailure(state if state in KNOWN_CAUSES else TrialState.TIMED_OUT, reason)

    def check_alive(self, when: str) -> None:
        """Raise TrialFailure if the server has ended, PortTaken if it could not get its port."""
        assert self._process is not None
        code = self._process.poll()
        if code is None:
            return
        if self.serves and self.startup_s == 0.0 and self._is_taken():
            raise PortTaken(f"port {self.port} of {self.name} is in use by another process")
        ending = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise server_failure(self.name, f"ended {when} with {ending}", self.log, self.patterns, self._healthy_from)

    def pids(self) -> list[int]:
        """Return the ids of this server's processes: its descendants, and all processes of its session."""
        return [each.pid for each in self._processes()]

    def cpu_seconds(self) -> float:
        total = 0.0
        for each in self._processes():
            with contextlib.suppress(psutil.Error):
                total += sum(each.cpu_times()[:4])  # user and system time of the process and its ended children
        return total

    def resident_bytes(self) -> int:
        return sum(_peak_bytes(each.pid) for each in self._processes())

    def ask_to_stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    def stop(self, grace_s: float = GRACE_SECONDS) -> None:
        """Stop the server: SIGTERM, and after `grace_s` seconds SIGKILL for the remaining processes."""
        if self._process is None:
            return
        family = self._processes()
        self.ask_to_stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        for each in {*family, *self._processes()}:  # also processes that the server started after SIGTERM
            with contextlib.suppress(psutil.Error):
                each.kill()
        self._process.wait()
        psutil.wait_procs(family, GRACE_SECONDS)
        self._process = None

    def _processes(self) -> list[psutil.Process]:
        """Return the server's processes, including those that are detached from their parent."""
        if self._process is None:
            return []
        root, processes = self._process.pid, {}
        with contextlib.suppress(psutil.Error):
            first = psutil.Process(root)
            processes = {each.pid: each for each in (first, *first.children(recursive=True))}
        for pid in psutil.pids():
            with contextlib.suppress(OSError, psutil.Error):
                if pid not in processes and os.getsid(pid) == root:
                    processes[pid] = psutil.Process(pid)
        return list(processes.values())

    def _addresses(self) -> str:
        """Return the server's address, followed by the addresses at which its processes listen instead, if any."""
        pids = self.pids()
        others = {f"{each.laddr.ip} port {each.laddr.port}" for each in _listening_sockets() if each.pid in pids}
        return f"127.0.0.1 port {self.port}" + (f", only at {', '.join(sorted(others))}" if others else "")

    def _is_taken(self) -> bool:
        """Return whether another process listens on the server's port. Checks twice, because a child process of the
        server may just be opening the port."""
        for _ in range(2):
            if not listeners(self.port) or is_owned_by(self.port, self.pids()):
                return False
            time.sleep(POLL_SECONDS)
        return True


class Remote(Served):
    """An instance on another host. `folder` mirrors the files of that host."""

    def __init__(self, number: int, host: str, folder: Path, patterns: Sequence[FailurePattern]) -> None:
        super().__init__(f"instance {number} on {host}", folder / log_name(number), patterns)
        self.host, self._number, self._report = host, str(number), folder / REPORT

    def wait_until_healthy(self, health: str, deadline: float) -> None:
        """Wait until the host reports the server as healthy, and connect to it. Raises TrialFailure."""
        while not (server_report := self._read("servers").get(self._number)):
            self.check_alive("while it started")
            if time.monotonic() > deadline:
                raise TrialFailure(TrialState.TIMED_OUT, f"{self.name} was not healthy in time")
            time.sleep(REPORT_SECONDS)
        self.url, self.startup_s = f"http://{self.host}:{server_report['port']}", float(server_report["startup_s"])
        try:
            self.fetch(health)
        except OSError as error:
            reason = f"{self.name} is healthy there, but {self.url} cannot be reached from here: {error}"
            raise TrialFailure(TrialState.FAILED, reason) from None

    def check_alive(self, when: str) -> None:
        """Raise TrialFailure if the host reports a failure."""
        if failure := self._read("failure"):
            raise TrialFailure(TrialState(failure["state"]), str(failure["reason"]))

    def resident_bytes(self) -> int:
        """Return the peak resident memory that the host last reported, in bytes."""
        return int(self._read("servers")[self._number]["resident_bytes"])

    def _read(self, key: str) -> dict[str, Any]:
        """Return the part `key` of the host's report, or nothing without a report. Waits while it is written."""
        while True:
            try:
                return dict(json.loads(self._report.read_text("utf-8"))[key])
            except FileNotFoundError:
                return {}
            except ValueError:
                time.sleep(REPORT_SECONDS)


def connect(
    job: TrialJob, folder: Path, patterns: Sequence[FailurePattern], health: str, deadline: float
) -> Sequence[Served]:
    """Return the servers on other hosts when all are healthy and can be reached. Raises TrialFailure."""
    servers = [
        Remote(number, job.hosts[each.host], Path(host_folder(str(folder), job.hosts, each.host)), patterns)
        for number, each in enumerate(job.instances)
    ]
    for server in servers:
        server.wait_until_healthy(health, deadline)
    return servers


def start_all(servers: Sequence[Server], directory: str | None, health: str, deadline: float) -> None:
    """Start servers and wait until all that serve requests are healthy. Raises TrialFailure."""
    for server in servers:
        server.start(directory)
    for server in servers:
        if server.serves:
            _wait(server, directory, health, deadline)
    check_all_alive(servers, "while others started")


def _wait(server: Server, directory: str | None, health: str, deadline: float) -> None:
    """Wait until a server is healthy. If another process takes its port, restart it on another port."""
    for attempt in range(1, PORT_TRIES + 1):
        try:
            return server.wait_until_healthy(health, deadline)
        except PortTaken as error:
            if attempt == PORT_TRIES:
                raise TrialFailure(TrialState.FAILED, f"{error}; this was the last of {PORT_TRIES} attempts") from None
            log(f"{error}; restarting on another one")
            server.stop()
            server.start(directory)
    return None


def stop_all(servers: Sequence[Server], end: float = math.inf) -> None:
    """End all servers. Servers that still run at `end` (time.monotonic()) or after GRACE_SECONDS are killed."""
    for server in servers:
        server.ask_to_stop()
    end = min(end, time.monotonic() + GRACE_SECONDS)
    for server in servers:
        server.stop(max(0.0, end - time.monotonic()))


def check_all_alive(servers: Sequence[Served], when: str) -> None:
    """Raise TrialFailure if one of the servers has ended."""
    for server in servers:
        server.check_alive(when)


def check_ended(servers: Sequence[Served], when: str, seconds: float = EXIT_SECONDS) -> None:
    """Raise TrialFailure if one of the servers has ended, or ends within `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        check_all_alive(servers, when)
        if time.monotonic() >= deadline:
            return
        time.sleep(0.1)


def log(line: str) -> None:
    """Print a line of progress on stderr. If the trial is killed, the last line shows what it was doing."""
    print(line, file=sys.stderr, flush=True)


def _peak_bytes(pid: int) -> int:
    """Return the peak resident memory of a process in bytes, or 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    peak = re.search(r"^VmHWM:\s*(\d+) kB", status, re.MULTILINE)
    return int(peak[1]) * 1024 if peak else 0


def free_port() -> int:
    """Return a free TCP port. Raises OSError if there is none."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def listeners(port: int) -> list[int | None]:
    """Return the process id of each socket that listens on `port`, or None if the process is another user's."""
    return [each.pid for each in _listening_sockets() if each.laddr.port == port]


def _listening_sockets() -> list[Any]:
    return [each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN and each.laddr]


def is_owned_by(port: int, pids: Iterable[int]) -> bool:
    """Return whether at least one socket listens on `port`, and all such sockets belong to `pids`."""
    owners = listeners(port)
    return bool(owners) and set(owners) <= set(pids)
