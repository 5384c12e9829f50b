"""The channel to an agent on one host."""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from flagcore.launchers import agent
from flagcore.launchers.guard import FREE_DISK_FLOOR_BYTES

SILENCE_SECONDS = 12.0
"""Maximum time between two messages. Afterwards, flagcore counts the host as lost, and the agent ends its trial."""
MAX_LINE_BYTES = 1 << 20
INVALID = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, binascii.Error)
"""Exceptions that a malformed message raises."""
ENDED_BY = (None, "timeout", "memory", "disk", "full_disk", "request", "guard")
"""Reasons for the end of a trial that a guard can report."""
SMALLEST_FILE_BYTES = 4096
LOGS = ("stdout.log", "stderr.log")
SENT = ("guard.py", "guarded.py", "template.py", "network.py", "agent.py")

BOOT = """
import json, os, sys, tempfile
data = b""
while b"\\n" not in data:
    piece = os.read(0, 65536)
    if not piece:
        sys.exit(1)
    data += piece
line, _, rest = data.partition(b"\\n")
sources = json.loads(line)
home = tempfile.mkdtemp(prefix="flagcore-")
for name, text in sources.items():
    path = os.path.join(home, "lib", name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
sys.path.insert(0, os.path.join(home, "lib"))
from flagcore.launchers.agent import main
main(home, rest, float(sys.argv[1]))
"""
"""Unpacks the agent into a private folder and runs it."""


@cache
def sources() -> bytes:
    """Return the agent's files as one line of JSON."""
    folder = Path(agent.__file__).parent
    files = {f"flagcore/launchers/{name}": (folder / name).read_text(encoding="utf-8") for name in SENT}
    packages = dict.fromkeys(("flagcore/__init__.py", "flagcore/launchers/__init__.py"), "")
    return json.dumps({**packages, **files}).encode() + b"\n"


def agent_command() -> str:
    """Return the shell command that starts an agent, with the path of this Python if the host has it, else with
    `python3`.
    """
    script = 'p=$0; [ -x "$p" ] || p=python3; exec "$p" -I -S -c "$1" "$2"'
    return shlex.join(["exec", "sh", "-c", script, sys.executable, BOOT, str(SILENCE_SECONDS)])


def _plain(text: object) -> str:
    """Return text from a host in the form for a message: one short line without control characters."""
    return "".join(letter for letter in str(text)[:200] if letter.isprintable())


def _exit(end: Mapping[str, Any]) -> dict[str, Any]:
    """Return the exit of a trial on a host from the report of its agent. Raises INVALID."""
    seconds, peak, ended_by = float(end["duration_s"]), end["peak_memory_bytes"], end["ended_by"]
    if not math.isfinite(seconds) or ended_by not in ENDED_BY:
        raise ValueError(end)
    return {
        "code": int(end["code"]),
        "ended_by": ended_by,
        "duration_s": seconds,
        "peak_memory_bytes": None if peak is None else int(peak),
        "warm": bool(end["warm"]),
    }


class Connection:
    """An agent on `host`, connected to the standard input and output of a process on this machine.

    `problem` is the reason why it cannot be used any more, or empty. `ready` is the answer to `prepare`, `exit` the
    exit record of its trial. `reading` is the last telemetry of its devices, with the time of arrival.
    """

    def __init__(self, host: str, argv: Sequence[str]) -> None:
        self.host = host
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 (kept open like the channel)
        self.process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, start_new_session=True
        )
        assert self.process.stdin
        assert self.process.stdout
        self.input, self.output = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self.input, False)
        os.set_blocking(self.output, False)
        self.outgoing, self.received = bytearray(sources()), b""
        self.opened_at = self.last_input = self.last_beat = time.monotonic()
        self.hello: Mapping[str, Any] | None = None
        self.reading: tuple[float, Sequence[Mapping[str, Any]]] = (-math.inf, ())
        self.problem = ""
        self.refused = False
        """Whether the problem is that the agent cannot start the program."""
        self.assign("")

    def assign(self, folder: str, most_bytes: int = 0) -> None:
        """Use the connection for another trial. Files of the trial, up to `most_bytes`, are copied to `folder`."""
        self.folder, self.most_bytes = folder, most_bytes
        self.total_bytes = 0
        self.sizes: dict[str, int] = {}
        self.ready: Mapping[str, int] | None = None
        self.started = False
        self.exit: Mapping[str, Any] | None = None
        self.news: list[tuple[str, int, bytes]] = []
        """New content of the trial's files, in order: name, offset, bytes."""

    @property
    def open(self) -> bool:
        """Whether further messages are expected from the host."""
        return not self.problem and self.exit is None

    def send(self, **message: object) -> None:
        """Queue a message to the agent."""
        self.outgoing += json.dumps(message).encode() + b"\n"
        self.flush()

    def send_heartbeat(self) -> None:
        """Send a heartbeat if one is due, and set `problem` if the host has sent nothing for too long."""
        now = time.monotonic()
        if now - self.last_beat > agent.BEAT_SECONDS:
            self.last_beat = now
            self.send()
        if self.open and self.hello is not None and now - self.last_input > SILENCE_SECONDS:
            self.problem = f"no message for {SILENCE_SECONDS:.0f} s"

    def flush(self) -> None:
        """Write queued data, as much as the channel accepts."""
        try:
            while self.outgoing:
                del self.outgoing[: os.write(self.input, self.outgoing[: 1 << 16])]
        except BlockingIOError:
            pass
        except OSError:
            self.outgoing.clear()  # its output states the reason

    def read(self) -> None:
        """Read and execute messages of the agent."""
        try:
            data = os.read(self.output, 1 << 18)
        except BlockingIOError:
            return
        if not data:
            self._closed()
            return
        self.last_input = time.monotonic()
        *lines, self.received = (self.received + data).split(b"\n")
        if len(self.received) > MAX_LINE_BYTES:
            self.problem = "sent a line above the maximum length"
        for line in lines:
            if self.open:
                self._handle_line(line)

    def _handle_line(self, line: bytes) -> None:
        """Execute a message. Output of a login shell before the first message is skipped."""
        try:
            message = json.loads(line)
            if self.hello is None:
                self._take_hello(message["hello"])
            elif "file" in message:
                name, offset = str(message["file"]), int(message["at"])
                if os.path.isabs(name) or ".." in Path(name).parts or not 0 <= offset <= agent.MAX_FILE_BYTES:
                    raise ValueError(name)
                self._take_piece(name, offset, base64.b64decode(message["data"], validate=True))
            elif "started" in message:
                self.started = True
            elif "ready" in message:
                self._take_ready(message["ready"])
            elif "reading" in message:
                self.reading = time.monotonic(), [dict(each) for each in message["reading"]]
            elif "exit" in message:
                self.exit = _exit(message["exit"])
                if self.exit["ended_by"] == "full_disk":
                    self.problem = "its disk is full"
            elif "problem" in message:
                self.problem, self.refused = _plain(message["problem"]), True
        except INVALID:
            if self.hello is not None or b'"hello"' in line:
                self.problem = f"sent an invalid message: {line[:80]!r}"

    def _take_piece(self, name: str, at: int, data: bytes) -> None:
        """Store new content of a file, unless the files exceed the limit of the trial."""
        known = self.sizes.get(name, 0)
        grown = known + len(data) if name in LOGS else at + len(data)  # a restarted log is appended
        self.sizes[name] = max(known, grown, SMALLEST_FILE_BYTES)
        self.total_bytes += self.sizes[name] - known
        self.news.append((name, at, data))
        if self.total_bytes > self.most_bytes:
            self.problem = f"sent more than {self.most_bytes >> 20} MiB of files"

    def _take_hello(self, hello: Mapping[str, Any]) -> None:
        """Store what the agent reports about its host, and why the host cannot be used. Raises INVALID."""
        if hello["wire"] != agent.WIRE:
            self.problem = f"has an agent of version {_plain(hello['wire'])}, not {agent.WIRE}"
            return
        self.hello = {"time": float(hello["time"]), "python": _plain(hello["python"])}

    def _take_ready(self, ready: Mapping[str, Any]) -> None:
        """Store the state of the host before a trial, and why it cannot run one. Raises INVALID."""
        self.ready = {name: int(ready[name]) for name in ("port", "free_disk_bytes", "left")}
        if self.ready["free_disk_bytes"] < FREE_DISK_FLOOR_BYTES:
            self.problem = f"only {self.ready['free_disk_bytes'] >> 20} MiB of disk are free"
        elif self.ready["left"]:
            self.problem = "still has processes of a lost trial"

    def _closed(self) -> None:
        if self.open:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1)
            self.problem = self._last_log_line() or f"the connection closed (exit status {self.process.poll()})"

    def _last_log_line(self) -> str:
        lines = self.read_log()[-4096:].decode("utf-8", "replace").split("\n")
        return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "")

    def read_log(self) -> bytes:
        """Return what the process on this machine wrote to its standard error."""
        return os.pread(self.log.fileno(), MAX_LINE_BYTES, max(0, os.fstat(self.log.fileno()).st_size - MAX_LINE_BYTES))

    def disconnect(self) -> None:
        """Close the channel. The agent then ends its trial."""
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                assert stream
                stream.close()

    def close(self, seconds: float) -> None:
        """End the process on this machine, by force after some seconds."""
        try:
            self.process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.log.close()
