"""Starts a trial under a guard process, which ensures that the trial ends. Imports only the standard library.

It runs inside flagcore for the local launcher. On other hosts, where flagcore is not installed, it runs inside the
agent.
"""

from __future__ import annotations

import contextlib
import json
import marshal
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple, Protocol

from flagcore.launchers import guard

MARKER = "FLAGCORE_LAUNCH"
"""The environment variable that each trial has. Processes of a trial are found by it if the guard is killed."""
START_SECONDS = 60.0
LONGEST_WAIT_SECONDS = 86400.0


class Limits(NamedTuple):
    """The limits of a trial: its time, the memory of its processes (None: no limit), and the size of its folder."""

    seconds: float
    memory_bytes: int | None
    disk_bytes: int


NO_FOLDER = "/dev/null/none"
"""A folder that cannot exist, so that the guard writes no files and applies no disk limit."""
UNLIMITED = Limits(float("inf"), None, 1 << 62)


class GuardProcess(Protocol):
    """A process that runs the guard, such as a `subprocess.Popen`."""

    def kill(self) -> object: ...
    def wait(self) -> object: ...


Spawn = Callable[[int, int], GuardProcess]
"""A function that starts a guard, given the read end of its control pipe and the write end of its report pipe. Raises
OSError."""


class Guarded:
    """A trial on this machine. `pid` is the id of its first process, which leads its session and process group.

    When it has ended, its verdict contains the fields of `flagcore.domain.launch.Exit`.
    """

    def __init__(self, process: GuardProcess, control: int, report: int, folder: str, marker: str) -> None:
        self.pid = 0
        self._guard, self._control, self._report = process, control, report
        self._folder, self._marker = folder, marker
        self._received = b""
        self._started_at = time.monotonic()
        self._verdict: dict[str, Any] | None = None

    def fileno(self) -> int:
        """Return a descriptor that is readable when the trial has ended."""
        return self._report

    def wait(self, seconds: float) -> dict[str, Any] | None:
        """Wait at most `seconds` for the trial to end. Return the guard's verdict, or None if the trial still runs."""
        if self._verdict is None:
            with contextlib.suppress(TimeoutError):
                line = self._read_line(seconds)
                self._verdict = json.loads(line) if line else self._end_without_guard()
                self.close()
        return self._verdict

    def request_stop(self) -> None:
        """Ask the guard to end the trial, without waiting."""
        if self._verdict is None:
            with contextlib.suppress(OSError):
                os.write(self._control, b"stop")

    def stop(self) -> dict[str, Any]:
        """End all processes of the trial and return the verdict."""
        self.request_stop()
        verdict = self.wait(guard.GRACE_SECONDS + guard.GIVE_UP_SECONDS + 5)
        while verdict is None:
            self._guard.kill()
            verdict = self.wait(1)
        return verdict

    def close(self) -> None:
        """Disconnect from the guard, which then ends the trial, and wait until the guard has exited."""
        for descriptor in (self._control, self._report):
            os.close(descriptor)
        self._guard.wait()

    def begin(self, order: bytes, program: str) -> None:
        """Send the guard its order, and wait until it reports that the program runs. Raises OSError if it does not."""
        try:
            with contextlib.suppress(BrokenPipeError):  # raised if the guard has died; it then reports nothing
                while order:
                    order = order[os.write(self._control, order) :]
            message = json.loads(self._read_line(START_SECONDS) or b"{}")
        except TimeoutError:
            self._guard.kill()
            message = {"problem": f"the guard process did not respond within {START_SECONDS:.0f} s"}
        self.pid = message.get("first", 0)
        if not self.pid:
            problem = message.get("problem", f"the guard process died; see {self._folder}/stderr.log")
            raise OSError(f"cannot start {program!r}: {problem}")

    def _read_line(self, seconds: float) -> bytes:
        """Return the guard's next line. It is empty if the guard died. Raises TimeoutError."""
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

    def _end_without_guard(self) -> dict[str, Any]:
        """End the processes of a killed guard that remain: in the session of the trial, or with its marker."""
        sweep(self._marker, self.pid)
        seconds = time.monotonic() - self._started_at
        verdict = {"code": -signal.SIGKILL, "ended_by": "guard", "duration_s": seconds, "peak_memory_bytes": None}
        with contextlib.suppress(OSError):
            guard.write_json(os.path.join(self._folder, "exit.json"), verdict)
        return verdict


def sweep(marker: str, session: int = 0) -> int:
    """Kill all processes with a marker, and all processes of a session. Return how many remain."""
    deadline = time.monotonic() + guard.GIVE_UP_SECONDS
    while (remaining := _find_processes(marker, session)) and time.monotonic() < deadline:
        for pid in remaining:
            guard.send(pid, signal.SIGKILL)
        time.sleep(0.02)
    return len(remaining)


def _find_processes(marker: str, session: int) -> list[int]:
    word, found = f"{MARKER}={marker}\0".encode(), []
    for pid in guard.all_processes():
        _, _, session_of_pid, state = guard.read_ids(pid) or (0, 0, 0, b"Z")
        if state != b"Z" and ((session and session_of_pid == session) or word in guard.read_proc(pid, "environ")):
            found.append(pid)
    return found


def spawn_guard(
    stdout: BinaryIO | int, stderr: BinaryIO | int, control: int, report: int, *, stdin: int = subprocess.DEVNULL
) -> GuardProcess:
    """Start a guard as a program, which inherits only its two pipe ends. The trial inherits its stdout and stderr."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", guard.__file__, str(control), str(report), str(os.getpid())],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        cwd="/",
        start_new_session=True,
        pass_fds=(control, report),
    )


def start(
    argv: Sequence[str],
    environment: Mapping[str, str],
    directory: str,
    folder: str = NO_FOLDER,
    limits: Limits = UNLIMITED,
    *,
    spawn: Spawn,
) -> Guarded:
    """Start `argv` under a guard in `directory`, and wait until it runs.

    The trial gets the environment of this process, updated with `environment`, and a new MARKER if it has none. The
    guard writes the verdict to `exit.json` in `folder`. Raises OSError if the trial cannot be started.
    """
    environment = {MARKER: secrets.token_hex(8), **environment}
    words = [os.fsencode(word) for word in argv]
    variables = {**os.environb, **{os.fsencode(name): os.fsencode(value) for name, value in environment.items()}}
    order = marshal.dumps((words, variables, os.fsencode(directory), os.fsencode(folder), *limits))
    order = len(order).to_bytes(8, "little") + order  # marshal is safe, because both ends run the same Python
    pipes: list[int] = []
    try:
        for _ in range(2):
            pipes += os.pipe()  # not inherited, because no other process may keep them open after flagcore has ended
        guard_reads, control, report, guard_writes = pipes
        process = spawn(guard_reads, guard_writes)
    except BaseException as error:
        for descriptor in pipes:
            os.close(descriptor)
        if isinstance(error, OSError):
            raise OSError(f"cannot start the guard process of a trial: {error.strerror or error}") from error
        raise
    os.close(guard_reads)
    os.close(guard_writes)
    trial = Guarded(process, control, report, folder, environment[MARKER])
    try:
        trial.begin(order, argv[0])
    except BaseException:
        trial.close()
        raise
    return trial
