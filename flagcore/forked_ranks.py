"""Run ranks as forks of this process, watch them, and leave none behind. Imports nothing but the standard library.

Linux only. The caller must not have run an operation, started a thread or touched a device: a fork keeps
only the forking thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import BinaryIO, NoReturn, TypeAlias

_PR_SET_PDEATHSIG = 1
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
OUT_OF_MEMORY = 3
"""The exit code of a program that ran out of memory."""
Work: TypeAlias = Callable[[int, "socket.socket | None"], int]


@dataclass
class _Rank:
    """One forked process; `output` holds all that it wrote to stdout and stderr."""

    number: int
    pid: int
    output: BinaryIO
    status: int | None = None


class _Stopped(BaseException):
    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def run_ranks(count: int, work: Work, *, first: int = 0, address: tuple[str, int] = ("127.0.0.1", 0)) -> int:
    """Fork `count` ranks, of which `first` is the first number, wait for all and return the trial's exit code.

    Each rank calls `work(rank, listener)` and ends with the code that it returns. The listener is a socket that listens
    at `address`, by default on a free port; it was opened before the ranks, so no other program can take the port in
    between. Only the process that runs rank 0 has one: on another host it is None. When a rank fails the others are
    ended at once, and only that rank's stderr is passed on. SIGTERM, SIGINT and SIGHUP end all ranks (exit code 128 +
    signal); the death of this process, by any signal, ends them too. This process must have no other children.
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
    """Run in the fork, never return."""
    code = 1
    try:
        for signum in _ENDING_SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        code = work(number, listener)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait_for_failure(ranks: list[_Rank]) -> _Rank | None:
    """Wait until every rank has ended well (None) or one has failed; return the one that failed first.

    Two ranks often end at nearly the same time, the second because it lost the first. The one whose last
    words are older came first.
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
    """Copy what these ranks wrote to this process's stderr."""
    for rank in ranks:
        rank.output.seek(0)
        sys.stderr.flush()
        with os.fdopen(os.dup(2), "wb") as stderr:
            shutil.copyfileobj(rank.output, stderr)


def _exit_code(rank: _Rank, kernel_ran_out_of_memory: bool) -> int:
    """The failed rank's own code, 3 if the kernel killed it for memory, or as a shell counts 128 + the signal."""
    assert rank.status is not None
    if rank.status > 0:
        return rank.status
    if rank.status == -signal.SIGKILL and kernel_ran_out_of_memory:
        print(f"out of memory: the kernel killed rank {rank.number}", file=sys.stderr)
        return OUT_OF_MEMORY
    print(f"rank {rank.number} was ended by {signal.Signals(-rank.status).name}", file=sys.stderr)
    return 128 - rank.status


def _out_of_memory_kills() -> int:
    """How many processes the kernel has killed for memory since it started; 0 where it does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Turn the first ending signal into `_Stopped` in the main thread; later ones are ignored."""

    def stop(signum: int, frame: FrameType | None) -> None:
        for each in handled:
            signal.signal(each, signal.SIG_IGN)
        raise _Stopped(signum)

    handled = [signum for signum in _ENDING_SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]
    before = {signum: signal.signal(signum, stop) for signum in handled}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
