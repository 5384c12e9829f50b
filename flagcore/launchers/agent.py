"""The agent: starts one trial on a host and copies its folder to flagcore. Imports only the standard library.

flagcore sends this file and the guard over the channel that starts it (ssh, srun): nothing is installed on the host,
and no file system is shared. Both sides write lines of JSON. When the channel closes, or when nothing arrives for
`silence` seconds, the agent ends the trial and removes its folder. Linux and Python 3.9 or later.

From flagcore: `{"order": {...}}`, `{"sweep": MARKER}`, `{"stop": true}`, `{}` as a heartbeat. To flagcore: `{"hello":
{...}}`, `{"started": PID}`, `{"left": PROCESSES}`, `{"file": NAME, "at": OFFSET, "data": BASE64}`, `{"exit": {...}}`,
`{"problem": TEXT}`, `{}`.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import functools
import json
import os
import platform
import select
import shutil
import signal
import socket
import struct
import sys
import time
from typing import Any

from flagcore.launchers import guarded

WIRE = 1
"""The version of these messages."""
BEAT_SECONDS = 2.0
MIRROR_SECONDS = 0.3
PIECE_BYTES = 48 * 1024
MAX_PENDING_BYTES = 4 << 20
"""No file is read while the queue of messages is longer."""
MAX_FILE_BYTES = 64 << 20
"""Larger files, such as checkpoints, stay on the host."""
SIOCGIFADDR = 0x8915
BROKEN_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
"""Errors after which the host counts as lost. After other errors, the trial cannot be started on any host."""


def addresses() -> dict[str, str]:
    """Return the IPv4 address of each network interface that has one (netdevice(7))."""
    by_name = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", os.fsencode(name[:15]))
                by_name[name] = socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24])
    return by_name


def interface_to(host: str) -> str:
    """Return the network interface over which this host reaches another; empty if unknown. Nothing is sent."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        local_address = probe.getsockname()[0]
        if not local_address.startswith("127."):
            return next((name for name, address in addresses().items() if address == local_address), "")
        return next((name for name, address in addresses().items() if not address.startswith("127.")), "lo")
    return ""


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


class Agent:
    """One trial on this host. `home` is a private folder that is removed at the end."""

    def __init__(self, home: str, received: bytes, silence: float) -> None:
        self.home, self.received, self.silence = home, received, silence
        self.folder = os.path.join(home, "trial")
        self.trial: guarded.Guarded | None = None
        self.mirror = Mirror(self.folder)
        self.outgoing = bytearray()
        self.input_at = self.beat_at = self.mirrored_at = time.monotonic()
        self.connected = self.ended = False

    def run(self) -> None:
        """Run until the channel closes, no message arrives for too long, or all data of the ended trial is sent."""
        os.set_blocking(0, False)
        os.set_blocking(1, False)
        space = os.statvfs(self.home)
        machine = {"time": time.time(), "python": platform.python_version()}
        free_bytes = space.f_bavail * space.f_frsize
        self.send(hello={"wire": WIRE, "port": free_port(), "free_disk_bytes": free_bytes, **machine})
        self.connected = True
        self.handle_data(b"")
        try:
            while self.connected and not (self.ended and not self.outgoing):
                self.wait()
                self.work()
        finally:
            if self.trial:
                self.trial.stop()

    def wait(self) -> None:
        """Wait for input, for space in the channel, for the end of the trial, or for a short time."""
        poll = select.poll()
        poll.register(0, select.POLLIN)
        if self.outgoing:
            poll.register(1, select.POLLOUT)
        if self.trial and not self.ended:
            poll.register(self.trial.fileno(), select.POLLIN)
        for descriptor, event in poll.poll(MIRROR_SECONDS * 1000):
            if descriptor == 0:
                self.read()
            elif descriptor == 1:
                self.write(closed=bool(event & (select.POLLERR | select.POLLHUP)))

    def read(self) -> None:
        """Read data from flagcore; at the end of the stream the channel is closed."""
        try:
            data = os.read(0, 1 << 16)
        except BlockingIOError:
            return
        if data:
            self.input_at = time.monotonic()
            self.handle_data(data)
        else:
            self.connected = False

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
            if "order" in message:
                self.start(message["order"])
            elif "sweep" in message:
                self.send(left=guarded.sweep(message["sweep"]))
            elif "stop" in message and self.trial and not self.ended:
                self.trial.request_stop()

    def work(self) -> None:
        """Check for silence and the end of the trial, send a heartbeat and new content of its folder."""
        now = time.monotonic()
        if now - self.input_at > self.silence:
            self.connected = False
            return
        verdict = self.trial.wait(0) if self.trial and not self.ended else None
        room = MAX_PENDING_BYTES - len(self.outgoing)
        if room > 0 and not self.ended and (verdict is not None or now - self.mirrored_at > MIRROR_SECONDS):
            self.mirrored_at = now
            pieces = self.mirror.pieces(room)
            for piece in pieces:
                self.send(**piece)
            if verdict is not None and not pieces:
                self.send(exit=verdict)
                self.ended = True
        if now - self.beat_at > BEAT_SECONDS:
            self.beat_at = now
            self.send()

    def send(self, **message: object) -> None:
        """Queue a message."""
        self.outgoing += json.dumps(message).encode() + b"\n"

    def start(self, order: dict[str, Any]) -> None:
        """Start the trial of an order, or report why it cannot be started.

        In its arguments, `{folder}` is the trial's folder on this host, and `{interface}` the network interface to the
        first host.
        """
        replacements = {"{interface}": interface_to(order["master_addr"]), order["folder"]: self.folder}

        def local(text: str) -> str:
            for name, value in replacements.items():
                text = text.replace(name, value)
            return text

        try:
            for name, text in order["files"].items():
                path = os.path.join(self.folder, name)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "w", encoding="utf-8") as file:
                    file.write(local(text))
                self.mirror.skip(path)
            with contextlib.ExitStack() as logs:
                paths = (os.path.join(self.folder, name) for name in ("stdout.log", "stderr.log"))
                stdout, stderr = (logs.enter_context(open(path, "wb")) for path in paths)
                environment = {name: local(value) for name, value in order["environment"].items()}
                self.trial = guarded.start(
                    [local(word) for word in order["argv"]], environment, local(order["directory"]), self.folder,
                    guarded.Limits(*order["limits"]), functools.partial(guarded.spawn_guard, stdout, stderr),
                )  # fmt: skip
            self.send(started=self.trial.pid)
        except (OSError, ValueError) as error:
            if getattr(error, "errno", None) in BROKEN_DISK:
                raise
            self.send(problem=str(error))
            self.ended = True


def main(home: str, received: bytes, silence: float) -> None:
    """Run the agent in a private folder, which is removed at the end.

    A scheduler sends SIGTERM before it withdraws the host. For flagcore the host is then lost, even if the program
    handles the signal.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    agent = Agent(home, received, silence)
    os.mkdir(agent.folder)
    try:
        agent.run()
    finally:
        shutil.rmtree(home, ignore_errors=True)
    sys.stdout.flush()
