"""The local launcher starts a trial on this machine, through a guard process that ends it in any case."""

from __future__ import annotations

import contextlib
import json
import marshal
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import datetime, timezone
from typing import BinaryIO

from flagcore.contracts import Launcher
from flagcore.domain.launch import Exit, Launch
from flagcore.domain.secrets import redact_arguments, redact_data
from flagcore.errors import LaunchError
from flagcore.launchers import guard

MARKER = "FLAGCORE_LAUNCH"
"""Environment variable of each trial, by which its processes are found if the guard is killed."""
START_SECONDS = 60.0
LONGEST_WAIT_SECONDS = 86400.0


def free_port() -> int:
    """Return a TCP port that nothing listens on at 127.0.0.1. Raises LaunchError if there is none."""
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])
    except OSError as error:
        fix = "free some, or give MASTER_PORT in the trial's environment"
        raise LaunchError(f"no free TCP port on 127.0.0.1: {error.strerror}; {fix}") from error


class LocalRunning:
    """A trial on this machine. `pid` is its first process, the leader of its session and process group."""

    def __init__(self, process: subprocess.Popen[bytes], control: int, report: int, folder: str, marker: str) -> None:
        self.pid = 0
        self._guard, self._control, self._report = process, control, report
        self._folder, self._marker = folder, marker
        self._received = b""
        self._started_at = time.monotonic()
        self._exit: Exit | None = None

    def poll(self) -> Exit | None:
        return self.wait(0)

    def wait(self, seconds: float) -> Exit | None:
        if self._exit is None:
            with contextlib.suppress(TimeoutError):
                verdict = self._read_line(seconds)
                self._exit = Exit(**json.loads(verdict)) if verdict else self._end_without_guard()
                self.close()
        return self._exit

    def stop(self) -> Exit:
        if self._exit is None:
            with contextlib.suppress(OSError):
                os.write(self._control, b"stop")
        ended = self.wait(guard.GRACE_SECONDS + guard.GIVE_UP_SECONDS + 5)
        while ended is None:
            self._guard.kill()
            ended = self.wait(1)
        return ended

    def close(self) -> None:
        """Disconnect from the guard, which then ends the trial, and wait for its exit."""
        for descriptor in (self._control, self._report):
            os.close(descriptor)
        self._guard.wait()

    def confirm_start(self, program: str) -> None:
        """Wait until the guard reports that the program runs. Raises LaunchError if it does not."""
        try:
            message = json.loads(self._read_line(START_SECONDS) or b"{}")
        except TimeoutError:
            self._guard.kill()
            message = {"problem": f"the guard process did not answer in {START_SECONDS:.0f} s"}
        self.pid = message.get("first", 0)
        if not self.pid:
            problem = message.get("problem", f"the guard process died; see {self._folder}/stderr.log")
            raise LaunchError(f"cannot start {program!r}: {problem}")

    def _read_line(self, seconds: float) -> bytes:
        """Return the guard's next line, empty if it died without one. Raises TimeoutError."""
        deadline = time.monotonic() + min(max(seconds, 0.0), LONGEST_WAIT_SECONDS)
        poll = select.poll()
        poll.register(self._report, select.POLLIN)
        while b"\n" not in self._received:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError
            piece = os.read(self._report, 4096)
            if not piece:
                return b""
            self._received += piece
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _end_without_guard(self) -> Exit:
        """End the processes that a killed guard left: those of the trial's session, and those with the marker."""
        deadline = time.monotonic() + guard.GIVE_UP_SECONDS
        while (left := self._survivors()) and time.monotonic() < deadline:
            for pid in left:
                guard.send(pid, signal.SIGKILL)
            time.sleep(0.02)
        ended = Exit(code=-signal.SIGKILL, ended_by="guard", duration_s=time.monotonic() - self._started_at)
        with contextlib.suppress(OSError):
            guard.write_json(os.path.join(self._folder, "exit.json"), asdict(ended))
        return ended

    def _survivors(self) -> list[int]:
        marker, found = f"{MARKER}={self._marker}\0".encode(), []
        for pid in guard.all_processes():
            _, _, session, zombie = guard.family(pid) or (0, 0, 0, True)
            if not zombie and (session == self.pid or marker in guard.read_proc(pid, "environ")):
                found.append(pid)
        return found


class LocalLauncher:
    """Starts trials on this machine, several at once if asked."""

    name = "local"

    def start(self, launch: Launch) -> LocalRunning:
        """Start `launch` in its own session.

        Its environment is flagcore's with `launch.environment` on top, and MASTER_ADDR and a free MASTER_PORT unless
        given. `launch.json` records the launch without secrets, `exit.json` how it ended. Raises LaunchError if it
        cannot be started.
        """
        marker = secrets.token_hex(8)
        environment = {"MASTER_ADDR": "127.0.0.1", MARKER: marker, **launch.environment}
        if "MASTER_PORT" not in environment:
            environment["MASTER_PORT"] = str(free_port())
        folder = os.path.abspath(launch.folder)
        directory = os.path.abspath(launch.directory or folder)
        order = _encode_order(launch, environment, folder, directory)
        with contextlib.ExitStack() as logs:
            try:
                _prepare(launch, environment, folder, directory)
                stdout, stderr = (logs.enter_context(_new_log(folder, name)) for name in ("stdout.log", "stderr.log"))
            except OSError as error:
                reason = error.strerror or error
                raise LaunchError(f"cannot write into the trial's folder {folder}: {reason}") from error
            return _start(stdout, stderr, folder, marker, order, launch.argv[0])


LAUNCHER: Launcher = LocalLauncher()

NO_FOLDER = "/dev/null/none"
"""A folder that cannot exist: nothing is written, and no disk limit applies."""


def start_for_users(launch: Launch, stdout: int, stderr: int) -> LocalRunning:
    """Start `launch` for users: without limits or files, its output goes to two descriptors.

    It ends with this process. Raises LaunchError if it cannot be started.
    """
    marker = secrets.token_hex(8)
    free = replace(launch, timeout_seconds=float("inf"), memory_limit_bytes=None, disk_limit_bytes=1 << 62)
    environment = {MARKER: marker, **launch.environment}
    order = _encode_order(free, environment, NO_FOLDER, os.path.abspath(launch.directory or launch.folder))
    return _start(stdout, stderr, NO_FOLDER, marker, order, launch.argv[0])


def _new_log(folder: str, name: str) -> BinaryIO:
    """Create an empty log. An existing file is removed first: opening a named pipe would block."""
    path = os.path.join(folder, name)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return open(path, "xb")


def _encode_order(launch: Launch, environment: Mapping[str, str], folder: str, directory: str) -> bytes:
    """Return the order for the guard, preceded by its length. Both ends run the same Python, so marshal is safe."""
    if not launch.argv:
        raise LaunchError("cannot start a trial without a program: argv is empty")
    argv = [_encode(text, f"argument {index}") for index, text in enumerate(launch.argv)]
    added = {}
    for key, value in environment.items():
        if not key or "=" in key:
            raise LaunchError(f"cannot start {launch.argv[0]!r}: {key!r} is not a name of an environment variable")
        added[_encode(key, f"the name {key!r}")] = _encode(value, f"the environment variable {key}")
    limits = (launch.timeout_seconds, launch.memory_limit_bytes, launch.disk_limit_bytes)
    where = (_encode(directory, "the directory"), _encode(folder, "the folder"))
    order = marshal.dumps((argv, {**os.environb, **added}, *where, *limits))
    return len(order).to_bytes(8, "little") + order


def _encode(text: str, what: str) -> bytes:
    try:
        encoded = os.fsencode(text)
    except (TypeError, UnicodeError) as error:
        raise LaunchError(f"cannot start a trial: {what} = {text!r} cannot be passed to a program ({error})") from error
    if b"\0" in encoded:
        raise LaunchError(f"cannot start a trial: {what} = {text!r} contains a NUL byte")
    return encoded


def _prepare(launch: Launch, environment: Mapping[str, str], folder: str, directory: str) -> None:
    """Create the folder with `launch.json`. Raises OSError."""
    os.makedirs(folder, exist_ok=True)
    free = guard.free_disk_bytes(folder)
    if free < guard.FREE_DISK_FLOOR_BYTES:
        raise OSError(f"only {free >> 20} MiB of disk are left, {guard.FREE_DISK_FLOOR_BYTES >> 20} MiB are needed")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, "exit.json"))
    record = {
        "argv": list(redact_arguments(launch.argv)),
        "environment": redact_data(environment),
        "directory": directory,
        "timeout_seconds": launch.timeout_seconds,
        "memory_limit_bytes": launch.memory_limit_bytes,
        "disk_limit_bytes": launch.disk_limit_bytes,
        "started_at": datetime.now(timezone.utc).isoformat(),
    }
    guard.write_json(os.path.join(folder, "launch.json"), record)


def _start(
    stdout: BinaryIO | int, stderr: BinaryIO | int, folder: str, marker: str, order: bytes, program: str
) -> LocalRunning:
    """Start a guard and wait until it runs the program. Raises LaunchError."""
    try:
        running = _start_guard(stdout, stderr, folder, marker, order)
    except OSError as error:
        raise LaunchError(f"cannot start the guard process of a trial: {error.strerror or error}") from error
    try:
        running.confirm_start(program)
    except BaseException:
        running.close()
        raise
    return running


def _start_guard(
    stdout: BinaryIO | int, stderr: BinaryIO | int, folder: str, marker: str, order: bytes
) -> LocalRunning:
    """Start a guard, whose stdout and stderr the trial inherits, and send it the order. Raises OSError.

    It inherits only its own two pipe ends, and no other process inherits flagcore's: a pipe that another trial held
    open would not close when flagcore dies.
    """
    pipes: list[int] = []
    try:
        for _ in range(2):
            pipes += os.pipe()
        control, guard_reads, report, guard_writes = pipes[1], pipes[0], pipes[2], pipes[3]
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, str(guard_reads), str(guard_writes), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            cwd="/",
            start_new_session=True,
            pass_fds=(guard_reads, guard_writes),
        )
    except BaseException:
        for descriptor in pipes:
            os.close(descriptor)
        raise
    os.close(guard_reads)
    os.close(guard_writes)
    with contextlib.suppress(BrokenPipeError):
        while order:
            order = order[os.write(control, order) :]
    return LocalRunning(process, control, report, folder, marker)
