"""The channels to the agents on hosts, and the orders that start a trial on them.

Agents stay connected between trials, so that each host connects only once. Agents also read the telemetry of the
host's devices.
"""

import base64
import binascii
import contextlib
import json
import math
import os
import resource
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from flagcore.domain.launch import Exit, Launch
from flagcore.launchers import guard, guarded, network, template
from flagcore_hosts import agent, wire

SILENCE_SECONDS = 12.0
"""The maximum time between two messages. If it is exceeded, flagcore counts the host as lost, and the agent ends its
trial."""
MAX_LINE_BYTES = 1 << 20
"""The maximum size of a message, and of all output of a login shell before the first message."""
BANNER_SECONDS = 5.0
"""A login shell that still prints lines so long after its first one may print 20 of them."""
INVALID = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, binascii.Error)
"""The exceptions that a malformed message can raise."""
ENDED_BY = (None, "timeout", "memory", "disk", "full_disk", "stopped", "request", "guard")
"""The reasons that a guard can report for the end of a trial."""
SMALLEST_FILE_BYTES = 4096
"""The size at which a smaller file counts towards the limit of a trial's files, because it uses a block on disk."""
LOGS = ("stdout.log", "stderr.log")
SENT = (guard, guarded, template, network, wire, agent)
"""The modules of the agent."""

BOOT = """
import contextlib, fcntl, glob, json, os, shutil, sys, tempfile, time
data = b""
while b"\\n" not in data:
    piece = os.read(0, 65536)
    if not piece:
        sys.exit(1)
    data += piece
line, _, rest = data.partition(b"\\n")
sources = json.loads(line)
for old in glob.glob(os.path.join(tempfile.gettempdir(), "flagcore-agent-*")):  # a killed agent holds no lock
    with contextlib.suppress(OSError):
        if time.time() - os.stat(old).st_mtime > 60:
            fcntl.flock(os.open(old, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(old)
home = tempfile.mkdtemp(prefix="flagcore-agent-")
fcntl.flock(os.open(home, os.O_RDONLY), fcntl.LOCK_EX)
for name, text in sources.items():
    path = os.path.join(home, "lib", name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
sys.path.insert(0, os.path.join(home, "lib"))
from flagcore_hosts.agent import main
main(home, rest, float(sys.argv[1]))
"""
"""Unpacks the agent into a private folder and runs it."""


@cache
def sources() -> bytes:
    """Return the source files of the agent as one line of JSON."""
    files = {f"{each.__name__.replace('.', '/')}.py": Path(each.__file__ or "").read_text("utf-8") for each in SENT}
    packages = {
        f"{folder}/__init__.py": "" for name in files for folder in map(str, Path(name).parents) if folder != "."
    }
    return json.dumps({**packages, **files}).encode() + b"\n"


def agent_command() -> str:
    """Return the shell command that starts an agent, with this Python if the host has it, otherwise `python3`."""
    script = 'p=$0; [ -x "$p" ] || p=python3; exec "$p" -I -S -c "$1" "$2"'
    return shlex.join(["exec", "sh", "-c", script, sys.executable, BOOT, str(SILENCE_SECONDS)])


def _plain(text: object) -> str:
    """Return text from a host in a form that is safe in a message: one short line without control characters."""
    return "".join(letter for letter in str(text)[:200] if letter.isprintable())


def _exit(end: Mapping[str, Any]) -> Exit:
    """Convert an agent's report on the end of its trial to an `Exit`. Raises one of INVALID for a malformed report."""
    seconds, peak, ended_by = float(end["duration_s"]), end["peak_memory_bytes"], end["ended_by"]
    if not math.isfinite(seconds) or ended_by not in ENDED_BY:
        raise ValueError(end)
    return Exit(
        code=int(end["code"]),
        ended_by=ended_by,
        duration_s=seconds,
        peak_memory_bytes=None if peak is None else int(peak),
        detail=_plain(end.get("detail", "")),
        warm=bool(end["warm"]),
    )


class Connection:
    """An agent on `host`. Its channel is the standard input and output of a process on this machine.

    - `problem`: why the agent cannot be used any more, or an empty string.
    - `ready`: the agent's answer to `prepare`.
    - `exit`: the exit record of the agent's trial.
    - `reading`: the last telemetry of the host's devices, with the time of arrival.
    """

    def __init__(self, host: str, argv: Sequence[str]) -> None:
        self.host = host
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 (kept open like the channel)
        self.process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, start_new_session=True
        )
        assert self.process.stdin
        assert self.process.stdout
        self.wire = wire.Wire(self.process.stdout.fileno(), self.process.stdin.fileno())
        self.wire.outgoing += sources()
        self.answered, self.skipped_bytes, self.first_line_at = False, 0, math.inf
        """Whether the agent has sent a message, after which it must not be silent."""
        self.reading: tuple[float, Sequence[Mapping[str, Any]]] = (-math.inf, ())
        self.problem = ""
        self.refused = False
        """Whether the problem is that the agent cannot start the program."""
        self.assign("")

    def assign(self, folder: str, most_bytes: int = 0) -> None:
        """Reset the connection for a new trial. Up to `most_bytes` of the trial's files are copied to `folder`."""
        self.folder, self.most_bytes = folder, most_bytes
        self.sizes: dict[str, int] = {}
        self.total_bytes = 0
        self.ready: Mapping[str, Any] | None = None
        self.started = False
        self.exit: Exit | None = None
        self.pieces: list[tuple[str, int, bytes]] = []
        """New content of the trial's files, in order: name, offset, bytes."""

    @property
    def open(self) -> bool:
        """Whether further messages are expected from the host."""
        return not self.problem and self.exit is None

    def beat(self) -> None:
        """Send a heartbeat if one is due. Set `problem` if the host has sent nothing for too long."""
        self.wire.beat()
        if self.open and self.answered and self.wire.is_silent(SILENCE_SECONDS):
            self.problem = f"no message for {SILENCE_SECONDS:.0f} s"

    def read(self) -> None:
        """Read the messages of the agent and act on them."""
        lines = self.wire.read_lines()
        if lines and not self.answered:
            self.first_line_at = min(self.first_line_at, time.monotonic())
            is_late = time.monotonic() - self.first_line_at > BANNER_SECONDS
            self.skipped_bytes += sum(map(len, lines)) + len(lines) * (MAX_LINE_BYTES // 20 if is_late else 1)
        if len(self.wire.received) + self.skipped_bytes > MAX_LINE_BYTES:
            self.problem = "sent too much text that is not a message of the agent"
        for line in lines:
            if self.open and (self.answered or b'"ready"' in line):  # else, a login shell has printed it
                self._handle_line(line)
        if self.wire.ended and self.open:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1)
            log = self.read_log()[-4096:].decode("utf-8", "replace").split("\n")
            last_line = next((text.strip()[:200] for text in reversed(log) if text.strip()), "")
            self.problem = last_line or f"the connection closed (exit status {self.process.poll()})"

    def _handle_line(self, line: bytes) -> None:
        """Act on one message."""
        try:
            message = json.loads(line)
            if "ready" in message:
                self._take_ready(message["ready"])
                self.answered = True
            elif "file" in message:
                self._take_piece(str(message["file"]), int(message["at"]), message["data"])
            elif "started" in message:
                self.started = True
            elif "reading" in message:
                self.reading = time.monotonic(), [dict(each) for each in message["reading"]]
            elif "exit" in message:
                self.exit = _exit(message["exit"])
                self.problem = "its disk is full" if self.exit.ended_by == "full_disk" else ""
            elif "problem" in message:
                self.problem, self.refused = _plain(message["problem"]), True
        except INVALID:
            self.problem = f"sent an invalid message: {line[:80]!r}"

    def _take_ready(self, ready: Mapping[str, Any]) -> None:
        """Store the state of the host before a trial. Set `problem` if the host cannot run a trial. Raises one of
        INVALID."""
        numbers = {name: int(ready[name]) for name in ("port", "free_disk_bytes", "left")}
        clock_s = float(ready["time"]) - time.time()
        texts = {name: _plain(ready.get(name, "")) for name in ("python", "machine", "owner")}
        self.ready = {**numbers, **texts, "clock_s": clock_s}
        if numbers["free_disk_bytes"] < guard.FREE_DISK_FLOOR_BYTES:
            self.problem = f"only {numbers['free_disk_bytes'] >> 20} MiB of disk are free"
        elif numbers["left"]:
            self.problem = "still has processes of a lost trial"
        elif texts["owner"]:
            self.problem = f"is used by another search: {texts['owner']}"

    def _take_piece(self, name: str, at: int, text: str) -> None:
        """Store new content of a file. Set `problem` if all files together exceed the limit of the trial. Raises one of
        INVALID for a malformed message."""
        if os.path.isabs(name) or ".." in Path(name).parts or not 0 <= at <= agent.MAX_FILE_BYTES:
            raise ValueError(name)
        data, old_size = base64.b64decode(text, validate=True), self.sizes.get(name, 0)
        new_size = old_size + len(data) if name in LOGS else at + len(data)  # a log that starts anew is appended
        self.sizes[name] = max(old_size, new_size, SMALLEST_FILE_BYTES)
        self.total_bytes += self.sizes[name] - old_size
        self.pieces.append((name, at, data))
        if self.total_bytes > self.most_bytes:
            self.problem = f"sent more than {self.most_bytes >> 20} MiB of files"

    def read_log(self) -> bytes:
        """Return what the process on this machine wrote to its standard error."""
        return os.pread(self.log.fileno(), MAX_LINE_BYTES, max(0, os.fstat(self.log.fileno()).st_size - MAX_LINE_BYTES))

    def disconnect(self) -> None:
        """Close the channel, so that the agent ends its trial."""
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                assert stream
                stream.close()

    def close(self, seconds: float) -> None:
        """End the process on this machine. After `seconds`, it is killed."""
        try:
            self.process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.log.close()


PERIOD_SECONDS = 0.5
CLOSE_SECONDS = 2.0
"""Seconds in which a channel may close. Afterwards, its process on this machine is killed."""


class Agents:
    """The connections to agents without a trial, at most one per host. A thread keeps the agents alive."""

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
        """Return an agent on a host: the idle one if there is any, else a new one."""
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
        """Store an agent whose trial has ended for the next trial. Return whether it could be stored."""
        with self._lock:
            if self._closed.is_set() or connection.host in self._idle:
                return False
            connection.assign("")
            self._idle[connection.host] = self.of_hosts[connection.host] = connection
            return True

    def watch_devices(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a program on each host that prints readings of its devices as lines of JSON."""
        with self._lock:
            self.watch = {"argv": list(argv), "environment": dict(environment)}
            for connection in self._idle.values():
                connection.wire.send(watch=self.watch)

    def reading(self, host: str) -> tuple[float, Sequence[Mapping[str, Any]]]:
        """Return the last reading of each device of a host, and the time when it arrived."""
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
        """Exchange messages with an idle agent. Return whether it can be used; otherwise, close its connection."""
        connection.read()
        connection.beat()
        if not connection.open:
            connection.disconnect()
            connection.close(0.0)
        return connection.open


FILES_PER_HOST, OTHER_FILES = 3, 64
"""The number of open files per connection, and of further files that flagcore may open."""
SHARED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "OMP_NUM_THREADS")
"""Variables of this shell that are copied to every host, because no login shell sets them there."""


def shared_variables() -> dict[str, str]:
    """Return the variables of this shell that are copied to every host."""
    return {name: os.environ[name] for name in SHARED if name in os.environ}


def with_variables(launch: Launch) -> Launch:
    """Return a launch with the variables that all its hosts need.

    These are the shared variables of this shell, the variables of a launch on several nodes, and a new marker. The
    launch's own variables override them.
    """
    places = {"MASTER_ADDR": "{master_addr}", "MASTER_PORT": "{master_port}", "NODE_RANK": "{node_rank}"}
    shared = {**shared_variables(), **places, "NNODES": "{nnodes}", guarded.MARKER: secrets.token_hex(8)}
    on_host = {host: replace(each, environment={**shared, **each.environment}) for host, each in launch.on_host.items()}
    return replace(launch, environment={**shared, **launch.environment}, on_host=on_host)


def allow_files(more: int) -> None:
    """Raise the limit of open files if it is too low for `more` files, as far as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed_files = len(os.listdir("/proc/self/fd")) + more + OTHER_FILES
    if resource.RLIM_INFINITY != soft < needed_files:
        new_limit = needed_files if hard == resource.RLIM_INFINITY else min(needed_files, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (new_limit, hard))


def trial_files(folder: str) -> dict[str, str]:
    """Return the content of the files that the engine wrote to a trial's folder."""
    names = [name for name in os.listdir(folder) if name not in (*LOGS, "launch.json", "exit.json")]
    paths = [path for name in names if (path := Path(folder, name)).is_file()]
    return {path.name: path.read_text(encoding="utf-8") for path in paths}


def order_for_host(launch: Launch, host: str, values: Mapping[str, str], files: Mapping[str, str]) -> dict[str, object]:
    """Return the message that makes the agent on `host` start a trial, in which `values` replace placeholders."""
    host_launch, filled = launch.on_host.get(host, launch), partial(network.replaced, values=values)
    return {
        "argv": [filled(word) for word in host_launch.argv],
        "environment": {name: filled(value) for name, value in host_launch.environment.items()},
        "directory": launch.directory or launch.folder,
        "folder": launch.folder,
        "files": files,
        "warm": launch.warm,
        "limits": [launch.timeout_seconds, launch.memory_limit_bytes, launch.disk_limit_bytes],
        "peer": next((each for each in launch.hosts if each != host), host),
    }
