"""The agent: starts trials on a host, one after the other, and copies their folders and its telemetry to flagcore.

flagcore sends this file and the guard over the channel that starts it (ssh, srun): nothing is installed on the host,
and no file system is shared. Both sides write lines of JSON. When the channel closes, or when nothing arrives for
`silence` seconds, the agent ends its trial and removes its folder. It imports only the standard library and needs Linux
and Python 3.9 or later.

Messages from flagcore: `{"prepare": MARKER}` (ends the processes of the lost trial with this marker, if not empty),
`{"order": {...}}`, `{"stop": true}`, `{"fresh": true}` (ends the template), `{"watch": {...}}` (starts a program that
prints readings), and `{}` as a heartbeat. Messages to flagcore: `{"hello": {...}}`, `{"ready": {...}}`,
`{"started": PID}`, `{"file": NAME, "at": OFFSET, "data": BASE64}`, `{"exit": {...}}`, `{"problem": TEXT}`,
`{"reading": [...]}`, and `{}`.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import functools
import json
import os
import platform
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from flagcore.launchers import guarded, network
from flagcore.launchers.template import Template, Templates

WIRE = 2
"""The version of these messages."""
BEAT_SECONDS = 2.0
MIRROR_SECONDS = 0.3
PIECE_BYTES = 48 * 1024
MAX_PENDING_BYTES = 4 << 20
"""No file is read while the queue of messages is longer."""
MAX_FILE_BYTES = 64 << 20
"""Larger files, such as checkpoints, stay on the host."""
BROKEN_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
"""Errors after which the host counts as lost. After other errors, the trial cannot be started on any host."""


def free_port() -> int:
    """Return a TCP port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


class Mirror:
    """Sends the new content of the files of a folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.sent: dict[str, tuple[int, int, int]] = {}
        """By file: its inode, the time of its last change, and the number of bytes that were sent."""

    def pieces(self, most: int) -> list[dict[str, Any]]:
        """Return messages with at most about `most` bytes of new content."""
        found: list[dict[str, Any]] = []
        for folder, _, names in os.walk(self.folder):
            for name in sorted(names):
                path = os.path.join(folder, name)
                with contextlib.suppress(OSError):
                    while most > 0 and (piece := self._next(path)):
                        found.append(piece)
                        most -= PIECE_BYTES
        return found

    def skip(self, path: str) -> None:
        """Do not send an existing file until it changes."""
        status = os.lstat(path)
        self.sent[path] = (status.st_ino, status.st_mtime_ns, status.st_size)

    def _next(self, path: str) -> dict[str, Any] | None:
        status = os.lstat(path)
        if os.path.islink(path) or not os.path.isfile(path) or status.st_size > MAX_FILE_BYTES:
            return None
        inode, changed, offset = self.sent.get(path, (0, 0, 0))
        rewritten = (
            inode != status.st_ino
            or status.st_size < offset
            or (status.st_size == offset and changed != status.st_mtime_ns)
        )
        if rewritten:
            offset = 0
        elif status.st_size == offset:
            return None
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read(PIECE_BYTES)
        self.sent[path] = (status.st_ino, status.st_mtime_ns, offset + len(data))
        name = os.path.relpath(path, self.folder)
        return (
            {"file": name, "at": offset, "data": base64.b64encode(data).decode("ascii")} if data or rewritten else None
        )


class Watch:
    """A program that prints a reading of the host's devices per line."""

    def __init__(self, order: dict[str, Any], home: str) -> None:
        self.output, theirs = os.pipe()
        self.received = b""
        spawn = functools.partial(guarded.spawn_guard, theirs, subprocess.DEVNULL)
        environment = {**order["environment"], guarded.MARKER: secrets.token_hex(8)}
        try:
            self.program = guarded.start(order["argv"], environment, home, guarded.NO_FOLDER, guarded.UNLIMITED, spawn)
        except OSError:
            os.close(self.output)
            raise
        finally:
            os.close(theirs)

    def read(self) -> list[object] | None:
        """Return new readings; None after the end of the program."""
        data = os.read(self.output, 1 << 16)
        *lines, self.received = (self.received + data).split(b"\n")
        readings = []
        for line in lines:
            with contextlib.suppress(ValueError):
                readings.append(json.loads(line))
        return readings if data else None

    def close(self) -> None:
        """End the program."""
        self.program.stop()
        os.close(self.output)


class Agent:
    """Runs the trials on this host, one at a time. `home` is a private folder that is removed at the end."""

    def __init__(self, home: str, received: bytes, silence: float) -> None:
        self.home, self.received, self.silence = home, received, silence
        self.folder, self.count = "", 0
        self.trial: guarded.Guarded | None = None
        self.order: dict[str, Any] = {}
        self.templates = Templates()
        self.template: Template | None = None
        self.starting: Template | None = None
        """The template that the next trial waits for."""
        self.watch: Watch | None = None
        self.mirror = Mirror(self.folder)
        self.outgoing = bytearray()
        self.input_at = self.beat_at = self.mirrored_at = time.monotonic()
        self.connected = False

    def run(self) -> None:
        """Run until the channel closes, or no message arrives for too long."""
        os.set_blocking(0, False)
        os.set_blocking(1, False)
        self.send(hello={"wire": WIRE, "time": time.time(), "python": platform.python_version()})
        self.connected = True
        self.handle_data(b"")
        try:
            while self.connected:
                self.wait()
                self.work()
        finally:
            if self.trial:
                self.trial.stop()
            if self.starting:
                self.starting.close()
            self.templates.close()
            if self.watch:
                self.watch.close()

    def wait(self) -> None:
        """Wait for input, for space in the channel, for the end of the trial, or for a short time."""
        poll = select.poll()
        poll.register(0, select.POLLIN)
        if self.outgoing:
            poll.register(1, select.POLLOUT)
        if self.trial:
            poll.register(self.trial.fileno(), select.POLLIN)
        if self.watch:
            poll.register(self.watch.output, select.POLLIN)
        if self.starting:
            poll.register(self.starting.fileno(), select.POLLIN)
        for descriptor, event in poll.poll((MIRROR_SECONDS if self.trial else BEAT_SECONDS / 2) * 1000):
            if descriptor == 0:
                self.read()
            elif descriptor == 1:
                self.write(closed=bool(event & (select.POLLERR | select.POLLHUP)))
            elif self.watch and descriptor == self.watch.output:
                self.read_watch()
            elif self.starting and descriptor == self.starting.fileno():
                self.launch()

    def read(self) -> None:
        """Read data from flagcore, and close the channel at the end of the stream."""
        try:
            data = os.read(0, 1 << 16)
        except BlockingIOError:
            return
        if data:
            self.input_at = time.monotonic()
            self.handle_data(data)
        else:
            self.connected = False

    def read_watch(self) -> None:
        """Send readings of the devices, unless the channel is slow."""
        assert self.watch
        readings = self.watch.read()
        if readings is None:
            self.watch.close()
            self.watch = None
        for reading in readings or ():
            if len(self.outgoing) < MAX_PENDING_BYTES:
                self.send(reading=reading)

    def write(self, *, closed: bool) -> None:
        """Write queued data, as much as the channel accepts."""
        try:
            del self.outgoing[: os.write(1, self.outgoing[: 1 << 16])]
        except BlockingIOError:
            pass
        except OSError:
            closed = True
        self.connected = self.connected and not closed

    def handle_data(self, data: bytes) -> None:
        """Execute each complete line."""
        self.received += data
        *lines, self.received = self.received.split(b"\n")
        for line in lines:
            message = json.loads(line or b"{}")
            if "prepare" in message:
                self.prepare(message["prepare"])
            elif "order" in message:
                self.start(message["order"])
            elif "stop" in message and self.trial:
                self.trial.request_stop()
            elif "fresh" in message:
                self.templates.close()
            elif "watch" in message and not self.watch:
                with contextlib.suppress(OSError):
                    self.watch = Watch(message["watch"], self.home)

    def prepare(self, marker: str) -> None:
        """Make a folder for the next trial, end the processes of a lost one, and report the state of the host."""
        left = guarded.sweep(marker) if marker else 0
        if self.folder:
            threading.Thread(target=shutil.rmtree, args=(self.folder, True), daemon=True).start()
        self.count += 1
        self.folder = os.path.join(self.home, f"trial-{self.count}")
        os.mkdir(self.folder)
        self.mirror = Mirror(self.folder)
        space = os.statvfs(self.home)
        self.send(ready={"port": free_port(), "free_disk_bytes": space.f_bavail * space.f_frsize, "left": left})

    def work(self) -> None:
        """Check for silence and for the end of the trial; send a heartbeat and the new content of its folder."""
        now = time.monotonic()
        if now - self.input_at > self.silence:
            self.connected = False
            return
        verdict = self.trial.wait(0) if self.trial else None
        room = MAX_PENDING_BYTES - len(self.outgoing)
        if room > 0 and self.trial and (verdict is not None or now - self.mirrored_at > MIRROR_SECONDS):
            self.mirrored_at = now
            pieces = self.mirror.pieces(room)
            for piece in pieces:
                self.send(**piece)
            if verdict is not None and not pieces:
                self.send(exit={**verdict, "warm": self.template is not None})
                self.trial = None
        if now - self.beat_at > BEAT_SECONDS:
            self.beat_at = now
            self.send()

    def send(self, **message: object) -> None:
        """Queue a message."""
        self.outgoing += json.dumps(message).encode() + b"\n"

    def start(self, order: dict[str, Any]) -> None:
        """Write the files of an order and start its trial, after its template is ready if it uses one.

        The trial's folder and the placeholders of network devices are replaced by those of this host.
        """
        placeholders = network.placeholders(order["master_addr"])
        replacements = {**placeholders, order["folder"]: self.folder}

        def local(text: str) -> str:
            for name, value in replacements.items():
                text = text.replace(name, value)
            return text

        with self.reported():
            for name, text in order["files"].items():
                path = os.path.join(self.folder, name)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "w", encoding="utf-8") as file:
                    file.write(local(text))
                self.mirror.skip(path)
            argv, directory = [local(word) for word in order["argv"]], local(order["directory"])
            filled = network.fill(order["environment"], placeholders)
            environment = {name: local(value) for name, value in filled.items()}
            self.order = {"argv": argv, "environment": environment, "directory": directory, "limits": order["limits"]}
            if order["warm"]:
                with contextlib.suppress(OSError):  # the trial starts cold
                    self.starting = self.templates.find(argv, environment, directory)
            if not self.starting or self.starting.ready:
                self.launch()

    def launch(self) -> None:
        """Start the trial of the last order: as a fork if its template can be forked, else as a new process."""
        self.template, self.starting = self.starting, None
        with self.reported(), contextlib.ExitStack() as logs:
            paths = (os.path.join(self.folder, name) for name in ("stdout.log", "stderr.log"))
            stdout, stderr = (logs.enter_context(open(path, "wb")) for path in paths)
            if self.template:
                try:
                    self.template.wait_until_ready()
                    self.trial = self.started_by(functools.partial(self.template.fork, stdout, stderr))
                except OSError:
                    self.template.close()
                    self.templates.refuse()
                    self.template = None
            if not self.template:
                self.trial = self.started_by(functools.partial(guarded.spawn_guard, stdout, stderr))
            assert self.trial
            self.send(started=self.trial.pid)

    def started_by(self, spawn: guarded.Spawn) -> guarded.Guarded:
        """Start the trial of the last order in a guard. Raises OSError."""
        argv, environment, directory = self.order["argv"], self.order["environment"], self.order["directory"]
        limits = guarded.Limits(*self.order["limits"])
        return guarded.start(argv, environment, directory, self.folder, limits, spawn)

    @contextlib.contextmanager
    def reported(self) -> Iterator[None]:
        """Report why a trial cannot be started. A broken disk ends the agent."""
        try:
            yield
        except (OSError, ValueError) as error:
            if getattr(error, "errno", None) in BROKEN_DISK:
                raise
            self.send(problem=str(error))


def main(home: str, received: bytes, silence: float) -> None:
    """Run the agent in a private folder, which is removed at the end.

    A scheduler sends SIGTERM before it withdraws the host. flagcore then counts the host as lost, even if the
    program handles the signal.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        Agent(home, received, silence).run()
    finally:
        shutil.rmtree(home, ignore_errors=True)
    sys.stdout.flush()
