"""The agent: starts trials on a host, and copies their folders and the host's telemetry to flagcore.

It runs one trial at a time. flagcore sends this file and the guard over the channel that starts the agent (ssh, srun).
Nothing is installed on the host, and no file system is shared. Both sides write lines of JSON. When the channel closes,
or when nothing arrives for `silence` seconds, the agent ends its trial and removes its folder. It imports only the
standard library, and needs Linux and Python 3.9 or later.

Messages from flagcore: `{"prepare": MARKER, "owner": SEARCH}` before each trial (ends the processes of the lost trial
with this marker, and claims the machine, if they are not empty), `{"order": {...}}`, `{"stop": true}`, `{"fresh":
true}` (ends the template), `{"watch": {...}}` (starts a program that prints readings), and `{}` as a heartbeat.
Messages to flagcore: `{"ready": {...}}`, `{"started": PID}`, `{"file": NAME, "at": OFFSET, "data": BASE64}`, `{"exit":
{...}}`, `{"problem": TEXT}`, `{"reading": [...]}`, and `{}` as a heartbeat.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import functools
import json
import os
import platform
import re
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flagcore.launchers import guard, guarded, network
from flagcore.launchers.template import Template, Templates
from flagcore_hosts.wire import BEAT_SECONDS, Wire

MIRROR_SECONDS = 0.3
PIECE_BYTES = 48 * 1024
MAX_PENDING_BYTES = 4 << 20
"""No file is read while the queue of outgoing messages is longer than this."""
MAX_FILE_BYTES = 64 << 20
"""Larger files, such as checkpoints, stay on the host."""
MUTEX_SECONDS = 5
BROKEN_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
"""Errors after which the host counts as lost. After any other error, the trial cannot be started on any host."""


def machine() -> str:
    """Return a text that is equal in two processes only if they share a machine. It is empty if unknown.

    Containers of one host have its boot id (random(4)) but their own namespaces. Clones of a virtual machine may have
    one boot id, but have their own names.
    """
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        namespaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("net", "pid")]
        return " ".join([boot_id, *namespaces, os.uname().nodename])
    except OSError:
        return ""


def claim(owner: str) -> tuple[socket.socket, str]:
    """Claim this machine for a search. Return what holds the claim, and the name of another search, or an empty string.

    A claim is the name of an abstract socket (unix(7)): all users see it, and it ends with its processes. Another such
    name is a mutex: of two searches that start together, one gets the machine.
    """
    holder, name = socket.socket(socket.AF_UNIX), repr(owner)[1:-1].encode()[:90].decode("utf-8", "ignore")
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as mutex:
        for _ in range(MUTEX_SECONDS * 50):
            with contextlib.suppress(OSError):
                mutex.bind("\0flagcore")
                break
            time.sleep(0.02)
        names = re.findall(r"@flagcore \d+ (.*)", Path("/proc/net/unix").read_text("utf-8", "replace"))
        if other := next((each for each in names if each != name), ""):
            return holder, other
        holder.bind(f"\0flagcore {os.getpid()} {name}")
    return holder, ""


class Mirror:
    """Reads the new content of the files in a folder, and turns it into messages."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.sent: dict[str, tuple[int, int, int]] = {}
        """By file: its inode, the time of its last change, and the number of bytes that were sent."""

    def pieces(self, most: int) -> list[dict[str, Any]]:
        """Return messages with new content of the folder's files, in total at most about `most` bytes."""
        messages: list[dict[str, Any]] = []
        for folder, _, names in os.walk(self.folder):
            for name in sorted(names):
                path = os.path.join(folder, name)
                with contextlib.suppress(OSError):
                    while most > 0 and (piece := self._next(path)):
                        messages.append(piece)
                        most -= PIECE_BYTES
        return messages

    def skip(self, path: str) -> None:
        """Do not send an existing file until its content changes."""
        status = os.lstat(path)
        self.sent[path] = (status.st_ino, status.st_mtime_ns, status.st_size)

    def _next(self, path: str) -> dict[str, Any] | None:
        """Return a message with the next piece of a file that has changed, or None if nothing is to be sent."""
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_FILE_BYTES:
            return None
        inode, changed, offset = self.sent.get(path, (0, 0, 0))
        same_size = inode == status.st_ino and status.st_size == offset
        if same_size and changed == status.st_mtime_ns:
            return None
        if same_size or inode != status.st_ino or status.st_size < offset:  # the file was rewritten: send all of it
            offset = 0
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read(min(PIECE_BYTES, status.st_size - offset))  # what is written from now on is not known yet
        self.sent[path] = (status.st_ino, status.st_mtime_ns, offset + len(data))
        return {
            "file": os.path.relpath(path, self.folder),
            "at": offset,
            "data": base64.b64encode(data).decode("ascii"),
        }


class Watch:
    """A program that prints readings of the host's devices, with one reading per line."""

    def __init__(self, order: dict[str, Any], home: str) -> None:
        read_end, write_end = os.pipe()
        spawn = functools.partial(guarded.spawn_guard, write_end, subprocess.DEVNULL)
        try:
            self.program = guarded.start(order["argv"], order["environment"], home, spawn=spawn)
            self.wire = Wire(read_end, read_end)
        except OSError:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)

    def fileno(self) -> int:
        """Return a descriptor that is readable when there are new readings."""
        return self.wire.source

    def close(self) -> None:
        """End the program that prints readings."""
        self.program.stop()
        os.close(self.wire.source)


class Agent:
    """Runs the trials on this host, one at a time. `home` is a private folder that is removed at the end."""

    def __init__(self, home: str, received: bytes, silence: float) -> None:
        self.home, self.silence, self.wire = home, silence, Wire(0, 1, received)
        self.folder, self.trial_count = "", 0
        self.trial: guarded.Guarded | None = None
        self.order: dict[str, Any] = {}
        self.templates = Templates()
        self.template: Template | None = None
        self.starting: Template | None = None
        """The template that the next trial waits for."""
        self.watch: Watch | None = None
        self.claim: tuple[socket.socket, str] | None = None
        self.mirror = Mirror(self.folder)
        self.mirrored_at = time.monotonic()

    def run(self) -> None:
        """Run until the channel closes, or no message arrives for too long."""
        try:
            self.receive()
            while not (self.wire.ended or self.wire.broken or self.wire.is_silent(self.silence)):
                self.wait()
                self.report()
        finally:
            if self.trial:
                self.trial.stop()
            if self.starting:
                self.starting.close()
            self.templates.close()
            if self.watch:
                self.watch.close()

    def wait(self) -> None:
        """Wait for the next event, but only for a short time, and act on it.

        Events are input, space in the channel, and the end of the trial.
        """
        poll, actions = select.poll(), {0: self.receive, 1: self.wire.flush}
        poll.register(0, select.POLLIN)
        if self.wire.outgoing:
            poll.register(1, select.POLLOUT)
        if self.trial:
            poll.register(self.trial, select.POLLIN)
        for source, action in ((self.watch, self.read_watch), (self.starting, self.launch)):
            if source:
                poll.register(source, select.POLLIN)
                actions[source.fileno()] = action
        for descriptor, _ in poll.poll((MIRROR_SECONDS if self.trial else BEAT_SECONDS / 2) * 1000):
            actions.get(descriptor, lambda: None)()

    def receive(self) -> None:
        """Act on the messages that have arrived."""
        for line in self.wire.read_lines():
            message = json.loads(line or b"{}")
            if "prepare" in message:
                self.prepare(message["prepare"], message.get("owner", ""))
            elif "order" in message:
                self.start(message["order"])
            elif "stop" in message and self.trial:
                self.trial.request_stop()
            elif "fresh" in message:
                self.templates.close()
            elif "watch" in message and not self.watch:
                with contextlib.suppress(OSError):
                    self.watch = Watch(message["watch"], self.home)

    def read_watch(self) -> None:
        """Send the latest readings of the devices, unless the channel is slow."""
        assert self.watch
        for line in self.watch.wire.read_lines():
            if len(self.wire.outgoing) < MAX_PENDING_BYTES:
                with contextlib.suppress(ValueError):
                    self.wire.send(reading=json.loads(line))
        if self.watch.wire.ended:
            self.watch.close()
            self.watch = None

    def prepare(self, marker: str, owner: str) -> None:
        """Create a folder for the next trial, end the processes of a lost trial, and report the state of the host."""
        self.claim = self.claim or (claim(owner) if owner else None)
        remaining_processes = guarded.sweep(marker) if marker else 0
        if self.folder:
            threading.Thread(target=shutil.rmtree, args=(self.folder, True), daemon=True).start()
        self.trial_count += 1
        self.folder = os.path.join(self.home, f"trial-{self.trial_count}")
        os.mkdir(self.folder)
        self.mirror = Mirror(self.folder)
        state = {
            "port": network.free_port(),
            "free_disk_bytes": guard.free_disk_bytes(self.home),
            "left": remaining_processes,
            "machine": machine(),
            "owner": self.claim[1] if self.claim else "",
        }
        self.wire.send(ready={**state, "time": time.time(), "python": platform.python_version()})

    def report(self) -> None:
        """Send new content of the trial's folder, the end of the trial, and a heartbeat."""
        now = time.monotonic()
        verdict = self.trial.wait(0) if self.trial else None
        free_bytes = MAX_PENDING_BYTES - len(self.wire.outgoing)
        if free_bytes > 0 and self.trial and (verdict is not None or now - self.mirrored_at > MIRROR_SECONDS):
            self.mirrored_at = now
            pieces = self.mirror.pieces(free_bytes)
            for piece in pieces:
                self.wire.send(**piece)
            if verdict is not None and not pieces:
                self.wire.send(exit={**verdict, "warm": self.template is not None})
                self.trial = None
        self.wire.beat()

    def start(self, order: dict[str, Any]) -> None:
        """Write the files in `order`, flagcore's message that describes a trial, and start the trial.

        If the trial is forked from a template (`flagcore.launchers.template`), wait until the template is ready. In the
        order, the trial's folder and the placeholders of network devices are replaced by those of this host.
        """
        placeholders = network.placeholders(order["peer"])
        replacements = {**placeholders, order["folder"]: self.folder}

        local = functools.partial(network.replaced, values=replacements)
        with self.reported():
            for name, text in order["files"].items():
                path = os.path.join(self.folder, name)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "w", encoding="utf-8") as file:
                    file.write(local(text))
                self.mirror.skip(path)
            filled = network.fill(order["environment"], placeholders)
            self.order = {
                "argv": [local(word) for word in order["argv"]],
                "environment": {name: local(value) for name, value in filled.items()},
                "directory": local(order["directory"]),
                "limits": guarded.Limits(*order["limits"]),
            }
            if order["warm"]:
                program = (self.order[key] for key in ("argv", "environment", "directory"))
                self.starting = self.templates.find(*program)
            if not self.starting or self.starting.ready:
                self.launch()

    def launch(self) -> None:
        """Start the trial of the last order."""
        template, self.starting = self.starting, None
        begin = functools.partial(guarded.start, **self.order, folder=self.folder)
        with self.reported(), contextlib.ExitStack() as logs:
            paths = (os.path.join(self.folder, name) for name in ("stdout.log", "stderr.log"))
            stdout, stderr = (logs.enter_context(open(path, "wb")) for path in paths)
            self.trial, self.template = self.templates.start(template, begin, stdout, stderr)
            self.wire.send(started=self.trial.pid)

    @contextlib.contextmanager
    def reported(self) -> Iterator[None]:
        """Send an error in this context to flagcore, because a trial cannot start. A broken disk ends the agent."""
        try:
            yield
        except (OSError, ValueError) as error:
            if getattr(error, "errno", None) in BROKEN_DISK:
                raise
            self.wire.send(problem=str(error))


def main(home: str, received: bytes, silence: float) -> None:
    """Run the agent in a private folder, which is removed at the end.

    A scheduler sends SIGTERM before it withdraws the host. flagcore then counts the host as lost, even if the program
    handles the signal.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        Agent(home, received, silence).run()
    finally:
        shutil.rmtree(home, ignore_errors=True)
    sys.stdout.flush()
