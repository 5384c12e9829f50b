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

from flagcore.domain.launch import Exit
from flagcore.launchers import agent
from flagcore.launchers.guard import FREE_DISK_FLOOR_BYTES
from flagcore.launchers.wire import Wire

SILENCE_SECONDS = 12.0
"""Maximum time between two messages. Afterwards, flagcore counts the host as lost, and the agent ends its trial."""
MAX_LINE_BYTES = 1 << 20
INVALID = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, binascii.Error)
"""Exceptions that a malformed message raises."""
ENDED_BY = (None, "timeout", "memory", "disk", "full_disk", "request", "guard")
"""Reasons for the end of a trial that a guard can report."""
SMALLEST_FILE_BYTES = 4096
LOGS = ("stdout.log", "stderr.log")
SENT = ("guard.py", "guarded.py", "template.py", "network.py", "wire.py", "agent.py")

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


def _exit(end: Mapping[str, Any]) -> Exit:
    """Return the exit of a trial on a host from the report of its agent. Raises INVALID."""
    seconds, peak, ended_by = float(end["duration_s"]), end["peak_memory_bytes"], end["ended_by"]
    if not math.isfinite(seconds) or ended_by not in ENDED_BY:
        raise ValueError(end)
    return Exit(
        code=int(end["code"]),
        ended_by=ended_by,
        duration_s=seconds,
        peak_memory_bytes=None if peak is None else int(peak),
        warm=bool(end["warm"]),
    )


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
        self.wire = Wire(self.process.stdout.fileno(), self.process.stdin.fileno())
        self.wire.outgoing += sources()
        self.answered = False
        """Whether the agent has sent a message, after which it must not be silent."""
        self.reading: tuple[float, Sequence[Mapping[str, Any]]] = (-math.inf, ())
        self.problem = ""
        self.refused = False
        """Whether the problem is that the agent cannot start the program."""
        self.assign("")

    def assign(self, folder: str, most_bytes: int = 0) -> None:
        """Use the connection for another trial. Files of the trial, up to `most_bytes`, are copied to `folder`."""
        self.folder, self.most_bytes = folder, most_bytes
        self.sizes: dict[str, int] = {}
        self.total_bytes = 0
        self.ready: Mapping[str, Any] | None = None
        self.started = False
        self.exit: Exit | None = None
        self.news: list[tuple[str, int, bytes]] = []
        """New content of the trial's files, in order: name, offset, bytes."""

    @property
    def open(self) -> bool:
        """Whether further messages are expected from the host."""
        return not self.problem and self.exit is None

    def beat(self) -> None:
        """Send a heartbeat if one is due, and set `problem` if the host has sent nothing for too long."""
        self.wire.beat()
        if self.open and self.answered and self.wire.is_silent(SILENCE_SECONDS):
            self.problem = f"no message for {SILENCE_SECONDS:.0f} s"

    def read(self) -> None:
        """Read and execute messages of the agent."""
        for line in self.wire.read_lines():
            if self.open:
                self._handle_line(line)
        if len(self.wire.received) > MAX_LINE_BYTES:
            self.problem = "sent a line above the maximum length"
        if self.wire.ended and self.open:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1)
            lines = self.read_log()[-4096:].decode("utf-8", "replace").split("\n")
            said = next((line.strip()[:200] for line in reversed(lines) if line.strip()), "")
            self.problem = said or f"the connection closed (exit status {self.process.poll()})"

    def _handle_line(self, line: bytes) -> None:
        """Execute a message. Output of a login shell before the first message is skipped."""
        try:
            message = json.loads(line)
            if "ready" in message:
                self._take_ready(message["ready"])
                self.answered = True
            elif not self.answered:
                return
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
            if self.answered or b'"ready"' in line:
                self.problem = f"sent an invalid message: {line[:80]!r}"

    def _take_ready(self, ready: Mapping[str, Any]) -> None:
        """Store the state of the host before a trial, and why it cannot run one. Raises INVALID."""
        numbers = {name: int(ready[name]) for name in ("port", "free_disk_bytes", "left")}
        clock_s = float(ready["time"]) - time.time()
        self.ready = {**numbers, "clock_s": clock_s, "python": _plain(ready["python"])}
        if numbers["free_disk_bytes"] < FREE_DISK_FLOOR_BYTES:
            self.problem = f"only {numbers['free_disk_bytes'] >> 20} MiB of disk are free"
        elif numbers["left"]:
            self.problem = "still has processes of a lost trial"

    def _take_piece(self, name: str, at: int, text: str) -> None:
        """Store new content of a file, unless the files exceed the limit of the trial. Raises INVALID."""
        if os.path.isabs(name) or ".." in Path(name).parts or not 0 <= at <= agent.MAX_FILE_BYTES:
            raise ValueError(name)
        data, known = base64.b64decode(text, validate=True), self.sizes.get(name, 0)
        grown = known + len(data) if name in LOGS else at + len(data)  # a restarted log is appended
        self.sizes[name] = max(known, grown, SMALLEST_FILE_BYTES)
        self.total_bytes += self.sizes[name] - known
        self.news.append((name, at, data))
        if self.total_bytes > self.most_bytes:
            self.problem = f"sent more than {self.most_bytes >> 20} MiB of files"

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
