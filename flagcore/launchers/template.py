"""The template: a process that has imported a trial's program, and is forked for each trial.

A fork starts in milliseconds. The guard of a trial is a fork of the template, and the first process of the trial is a
fork of that guard. The template has its own guard, which ends it when flagcore ends, and ends the remaining processes
of a killed guard. The template sleeps while a trial runs.

A program that can be forked defines `ready(arguments)`, which imports its modules, and `main(arguments)`, which returns
the exit code. After `ready`, the process must have a single thread and no open file. This also means that it has used
no device.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import logging
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, BinaryIO, NoReturn

from flagcore.launchers import guard, guarded

LOG = logging.getLogger("flagcore")
START_SECONDS = 300.0
READY, ENDED = b"ready", b"ended"
OF_ONE_TRIAL = (guarded.MARKER, "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "NNODES")
"""Variables that differ between trials, and that no module reads when it is imported."""


class Template:
    """A process that has imported a program's modules, so that trials can be forked from it, one at a time. The object
    also represents the guard process of the last trial."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], directory: str) -> None:
        """Start a template for `python -m PACKAGE ARGUMENT...`. Raises OSError if it cannot start."""
        self.ready = self.busy = self.closed = False
        self._channel, template_socket = socket.socketpair(type=socket.SOCK_SEQPACKET)
        command = (argv[0], "-m", __name__, *argv[2:])
        spawn = functools.partial(
            guarded.spawn_guard, subprocess.DEVNULL, subprocess.DEVNULL, stdin=template_socket.fileno()
        )
        with template_socket:
            self._process = guarded.start(command, environment, directory, spawn=spawn)

    def fileno(self) -> int:
        """Return a descriptor that is readable when the template is ready."""
        return self._channel.fileno()

    def wait_until_ready(self) -> None:
        """Wait until the imports are done. Raises OSError if the template must not be forked."""
        if self.ready:
            return
        try:
            self._channel.settimeout(START_SECONDS)
            answer = self._channel.recv(4096)
            self._channel.settimeout(None)
            if answer != READY:
                raise OSError(os.fsdecode(answer) or "it ended")
            self.ready = True
        except BaseException:
            self.close()
            raise

    def fork(self, stdout: BinaryIO, stderr: BinaryIO, control: int, report: int) -> Template:
        """Fork the guard of a trial. Raises OSError if the template has ended."""
        socket.send_fds(self._channel, [READY], [control, report, stdout.fileno(), stderr.fileno()])
        self.busy = True
        return self

    def wait(self) -> None:
        """Wait until the trial's guard has ended."""
        answer = b""
        with contextlib.suppress(OSError):
            answer = self._channel.recv(len(ENDED))
        if answer != ENDED:
            self.close()
        self.busy = False

    def close(self) -> None:
        """End the template and its trial."""
        if not self.closed:
            self.closed = True
            self._channel.close()
            self._process.close()

    kill = close


class Templates:
    """Keeps one `Template`, for trials with the same program, environment, cores and control group."""

    def __init__(self) -> None:
        self.template: Template | None = None
        self._key: object = None
        """Program, environment, cores and control group of the template, or of one that must not be forked."""

    def find(self, argv: Sequence[str], environment: Mapping[str, str], directory: str) -> Template | None:
        """Return an idle template for a trial, or None if the trial must start cold.

        The template may still be starting.
        """
        if tuple(argv[:2]) != (sys.executable, "-m") or (self.template and self.template.busy):
            return None
        variables = {key: value for key, value in environment.items() if key not in OF_ONE_TRIAL}
        cores, group = os.sched_getaffinity(0), guard.read_proc(os.getpid(), "cgroup")
        key = (argv[2], {**os.environ, **variables}, cores, group)
        if key != self._key or (self.template and self.template.closed):
            self.close()
            self._key = key
            try:
                self.template = Template(argv, variables, directory)
            except OSError as problem:
                LOG.info("trials start cold: %s", problem)
        return self.template

    def start(
        self, template: Template | None, begin: Callable[..., guarded.Guarded], stdout: BinaryIO, stderr: BinaryIO
    ) -> tuple[guarded.Guarded, Template | None]:
        """Start a trial with `begin`, as a fork of `template` if possible, else as a new process. Raises OSError.

        Returns the trial, and the template if the trial is a fork of it.
        """
        if template:
            try:
                template.wait_until_ready()
                return begin(spawn=functools.partial(template.fork, stdout, stderr)), template
            except OSError as problem:
                LOG.info("the trial starts cold: %s", problem)
                if not template.ready:
                    self.template = None  # later trials of the program start cold, too
                template.close()
        return begin(spawn=functools.partial(guarded.spawn_guard, stdout, stderr)), None

    def close(self) -> None:
        """End the template, unless a trial runs."""
        if self.template and not self.template.busy:
            self.template.close()
            self.template = self._key = None


def serve(channel: socket.socket, program: ModuleType) -> None:
    """Fork the guard of a trial for each message, until flagcore closes the channel."""
    template = os.getpid()
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, len(READY), 4)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            _exit_after(_guard_trial, program, template, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(pid, 0)
        channel.send(ENDED)


def _guard_trial(program: ModuleType, template: int, control: int, report: int, stdout: int, stderr: int) -> int:
    """Run the guard in a fork of the template."""
    gc.disable()  # a garbage collection would copy all memory that is shared with the template
    os.setsid()
    for number, source in enumerate((os.open(os.devnull, os.O_RDONLY), stdout, stderr)):
        os.dup2(source, number)
        os.close(source)
    guard.main(
        control,
        report,
        template,
        become=lambda argv, environment: _exit_after(_run_program, program, argv, environment),
    )
    return 0


def _run_program(program: ModuleType, argv: list[bytes], environment: dict[bytes, bytes]) -> int:
    """Run the program in a fork of the guard, in the state that a newly started Python has."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    os.environb.clear()
    os.environb.update(environment)
    gc.enable()
    os.closerange(3, 1 + max(_descriptors()))
    return int(program.main([os.fsdecode(word) for word in argv[3:]]))


def _exit_after(work: Callable[..., int], *arguments: Any) -> NoReturn:
    """Run `work`, and exit this process with the code that it returns."""
    code = 1
    try:
        code = work(*arguments)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _descriptors() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]


def fork_problem() -> str:
    """Return why this process must not be forked, or an empty string if it may be."""
    if len(os.listdir("/proc/self/task")) > 1:
        return "the program's modules start threads"
    for number in _descriptors():
        with contextlib.suppress(FileNotFoundError):  # the descriptor that listed the folder is closed by now
            file = os.readlink(f"/proc/self/fd/{number}")
            if number > 2:
                return f"the program's modules leave {file} open"
    return ""


def main(package: str, *arguments: str) -> int:
    """Import the program of a package, and serve flagcore's requests on stdin."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # otherwise, importing numpy starts threads
    with socket.socket(fileno=0) as channel:
        try:
            program = importlib.import_module(f"{package}.__main__")
            program.ready(list(arguments))
            problem = fork_problem()
        except Exception as error:
            problem = repr(error)
        channel.send(os.fsencode(problem)[:4096] or READY)
        if not problem:
            serve(channel, program)
    return 0


if __name__ == "__main__":
    _exit_after(main, *sys.argv[1:])
