"""Run the ranks of a job as forks of this process. Linux only; imports nothing but the standard library.

Before the call, this process must not have run a tensor operation, started a thread or used a device, because a fork
keeps only the thread that forks.
"""

import contextlib
import ctypes
import importlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import BinaryIO, NoReturn, TypeAlias

_PR_SET_PDEATHSIG = 1
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
OUT_OF_MEMORY = 3
"""Exit code of a trial program that ran out of memory."""
Work: TypeAlias = Callable[[int, "socket.socket | None"], int]
"""A function that runs one rank. Its arguments are the rank's number and the listener; it returns the exit code."""


@dataclass
class _Rank:
    """A forked process. `output` contains its stdout and stderr. `status` is its exit code once it has ended."""

    number: int
    pid: int
    output: BinaryIO
    status: int | None = None


class _Stopped(BaseException):
    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def import_all(*modules: str) -> float:
    """Import modules in order, and return the seconds that this took."""
    start = time.perf_counter()
    for name in modules:
        importlib.import_module(name)
    return time.perf_counter() - start


def check_uninitialized(device_type: str) -> None:
    """Raise RuntimeError if this process has initialized the device, which its forks could not use then."""
    if device_type != "cpu" and getattr(sys.modules["torch"], device_type).is_initialized():
        raise RuntimeError(f"importing its modules initializes {device_type}")


def run_on_host(processes: int, nodes: int, work: Work) -> int:
    """Run this host's `processes` ranks of a job on `nodes` hosts. Several hosts have NODE_RANK and MASTER_PORT."""
    if nodes == 1:
        return run_ranks(processes, work)
    first = int(os.environ["NODE_RANK"]) * processes
    return run_ranks(processes, work, first=first, address=("", int(os.environ["MASTER_PORT"])))


def exit_at_once(code: int) -> NoReturn:
    """End the process. At a normal exit, a failed rank would wait for collectives that never complete."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_ranks(count: int, work: Work, *, first: int = 0, address: tuple[str, int] = ("127.0.0.1", 0)) -> int:
    """Fork `count` ranks, numbered from `first`, wait for all of them and return the trial's exit code.

    Each rank exits with the result of `work(rank, listener)`. The listener is a socket that is bound to `address`, by
    default to a free port. It is opened before the ranks are forked, so that no other program can take the port. On
    hosts without rank 0 it is None.

    When a rank fails, the others are killed, and the output of the failed rank is copied to stderr. SIGTERM, SIGINT and
    SIGHUP end all ranks with the exit code 128 + signal. The ranks are also killed when this process dies. This process
    must have no other children.
    """
    kills_before = _out_of_memory_kills()
    ranks: list[_Rank] = []
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(address)) if first == 0 else None
        stack.enter_context(_signals_raise())
        try:
            for number in range(first, first + count):
                ranks.append(_start(number, work, listener))
            failed = _wait_for_failure(ranks)
        except _Stopped as stop:
            _end(ranks)
            _forward_output(ranks[:1])
            return 128 + stop.signum
        finally:
            _end(ranks)
    if failed is None:
        return 0
    _forward_output([failed])
    return _exit_code(failed, _out_of_memory_kills() > kills_before)


def ran_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception means that host or device memory ran out."""
    text, names = str(error).lower(), {kind.__name__ for kind in type(error).__mro__}
    if "OutOfMemoryError" in names or isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)


def _start(number: int, work: Work, listener: socket.socket | None) -> _Rank:
    output = tempfile.TemporaryFile()  # noqa: SIM115 (kept open until the rank has ended)
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _run_rank(number, work, listener, output, parent)
    return _Rank(number, pid, output)


def _run_rank(number: int, work: Work, listener: socket.socket | None, output: BinaryIO, parent: int) -> NoReturn:
    """Run a rank in the forked process, and exit with its exit code. Never returns."""
    code = 1
    try:
        for signum in _STOP_SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before prctl took effect
            os._exit(1)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        code = work(number, listener)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait_for_failure(ranks: list[_Rank]) -> _Rank | None:
    """Wait until a rank fails, and return it. Returns None if all ranks succeed.

    When a rank fails, its peers often fail at nearly the same time. If several ranks failed, the one whose output ended
    first is returned.
    """
    by_pid = {rank.pid: rank for rank in ranks}
    running = len(ranks)
    while running:
        pid, status = os.waitpid(-1, 0)
        while pid:
            if rank := by_pid.get(pid):
                rank.status = os.waitstatus_to_exitcode(status)
                running -= 1
            pid, status = os.waitpid(-1, os.WNOHANG) if running else (0, 0)
        failed = [rank for rank in ranks if rank.status]
        if failed:
            return min(failed, key=lambda rank: os.fstat(rank.output.fileno()).st_mtime_ns)
    return None


def _end(ranks: list[_Rank]) -> None:
    running = [rank for rank in ranks if rank.status is None]
    for rank in running:
        os.kill(rank.pid, signal.SIGKILL)
    for rank in running:
        rank.status = os.waitstatus_to_exitcode(os.waitpid(rank.pid, 0)[1])


def _forward_output(ranks: list[_Rank]) -> None:
    """Copy the output of `ranks` to stderr."""
    for rank in ranks:
        rank.output.seek(0)
        sys.stderr.flush()
        with os.fdopen(os.dup(2), "wb") as stderr:
            shutil.copyfileobj(rank.output, stderr)


def _exit_code(rank: _Rank, kernel_ran_out_of_memory: bool) -> int:
    """Return the exit code of a failed rank: OUT_OF_MEMORY if the kernel killed it for that, or 128 + signal."""
    assert rank.status is not None
    if rank.status > 0:
        return rank.status
    if rank.status == -signal.SIGKILL and kernel_ran_out_of_memory:
        print(f"out of memory: the kernel killed rank {rank.number}", file=sys.stderr)
        return OUT_OF_MEMORY
    print(f"rank {rank.number} was ended by {signal.Signals(-rank.status).name}", file=sys.stderr)
    return 128 - rank.status


def _out_of_memory_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory since boot, or 0 if it does not report it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Raise `_Stopped` in the main thread on the first stop signal, and ignore further ones."""

    def stop(signum: int, frame: FrameType | None) -> None:
        for each in handled:
            signal.signal(each, signal.SIG_IGN)
        raise _Stopped(signum)

    handled = [signum for signum in _STOP_SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]
    old_handlers = {signum: signal.signal(signum, stop) for signum in handled}
    try:
        yield
    finally:
        for signum, handler in old_handlers.items():
            signal.signal(signum, handler)
