"""The guard: a small process between flagcore and one trial. It ensures that no process of the trial survives.

`guarded.py` runs this file as a script; `template.py` calls its `main` in a fork. It imports only the standard library
and starts in about 20 ms. The guard starts the trial in its own session, enforces its limits and reports how it ended.
It is a child subreaper (prctl(2)): orphaned descendants become its children, even from a new session. The trial has
ended when `waitpid` reports no child. The guard ends the trial when the pipe from flagcore closes, for example because
flagcore was killed. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import marshal
import os
import select
import signal
import sys
import time
from collections.abc import Callable

GRACE_SECONDS = 2.0
"""Seconds between SIGTERM and SIGKILL after a timeout or a request. In other cases, SIGKILL is sent at once."""
LINGER_SECONDS = 0.5
"""Seconds in which descendants may end by themselves after the trial's first process has ended."""
GIVE_UP_SECONDS = 10.0
"""Seconds after SIGKILL until the guard reports the trial as ended, even if a process is stuck in a driver."""
FREE_DISK_FLOOR_BYTES = 64 << 20
"""A trial is ended if less disk space than this is free."""
STOPPED_SECONDS = 30.0
"""A trial is ended if one of its processes is stopped (SIGSTOP) for longer than this, as all others wait for it."""
PERIOD_SECONDS = 0.1
PAUSE_PER_COST = 400
"""Seconds of pause before the next check, per second of CPU time that the last check took."""

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
NEVER = float("inf")

Become = Callable[[list[bytes], dict[bytes, bytes]], None]
"""A function that turns the current process into a trial, given its arguments and variables. It closes descriptors
above 2, and does not return."""


def write_json(path: str, record: object) -> None:
    """Write `record` to a JSON file atomically."""
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(record, file, indent=1)
    os.replace(path + ".new", path)


def read_proc(pid: int, name: str) -> bytes:
    """Return the content of /proc/`pid`/`name`. It is empty if the process is gone or hidden."""
    try:
        with open(f"/proc/{pid}/{name}", "rb", buffering=0) as file:
            return file.readall()
    except OSError:
        return b""


def read_ids(pid: int) -> tuple[int, int, int, bytes] | None:
    """Return a process's parent, process group, session and state (proc_pid_stat(5)): b"Z" is a zombie, b"T" stopped.

    Returns None if the process has ended.
    """
    fields = read_proc(pid, "stat").rpartition(b")")[2].split()
    return (int(fields[1]), int(fields[2]), int(fields[3]), fields[0]) if fields else None


def all_processes() -> set[int]:
    """Return the ids of all processes that /proc shows."""
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def send(pid: int, number: int, *, group: bool = False) -> None:
    """Send a signal to a process or its group. Nothing happens if it has ended."""
    with contextlib.suppress(OSError):
        (os.killpg if group else os.kill)(pid, number)


def sum_bytes(text: bytes, *names: bytes) -> int:
    """Return the sum, in bytes, of the `Name:  123 kB` lines with these names in a file of /proc."""
    starts = ((text.find(b"\n" + name + b":"), len(name) + 2) for name in names)
    return sum(int(text[at + skip :].split(None, 1)[0]) << 10 for at, skip in starts if at >= 0)


class Throttle:
    """Limits a check, its context, to a quarter percent of a core, but lets it run at least every `longest` seconds."""

    def __init__(self, longest: float) -> None:
        self.longest, self.due_at, self.started = longest, 0.0, 0.0

    def due(self) -> bool:
        """Return whether the next check may start."""
        return time.monotonic() >= self.due_at

    def __enter__(self) -> None:
        self.started = time.process_time()

    def __exit__(self, *error: object) -> None:
        """Schedule the next check."""
        pause = (time.process_time() - self.started) * PAUSE_PER_COST
        self.due_at = time.monotonic() + min(pause, self.longest)


class ProcessTree:
    """All descendants of this guard. Each process is classified only once: others never become descendants."""

    def __init__(self) -> None:
        self.members: set[int] = set()
        self.settled: set[int] = set()
        self.outsiders: set[int] = set()
        self.pace = Throttle(1.0)

    def scan(self) -> None:
        """Find new descendants. They are not yet `settled`, because a vfork(2) child shows the memory of its parent."""
        with self.pace:
            present_pids = all_processes()
            self.members &= present_pids
            self.outsiders &= present_pids
            self.settled = self.members.copy()
            for pid in present_pids - self.members - self.outsiders:
                self._classify(pid)

    def end(self, number: int) -> None:
        """Send a signal to all descendants. SIGKILL also goes to their process groups, so that no new child escapes."""
        self.members, self.outsiders = set(), set()
        self.scan()
        for pid in self.members:
            ids = read_ids(pid)
            if number == signal.SIGKILL and ids and ids[1] not in (0, os.getpgrp()):
                send(ids[1], number, group=True)
            send(pid, number)

    def _classify(self, pid: int) -> None:
        guard, ancestors = os.getpid(), []
        while pid not in self.members and pid not in self.outsiders:
            ancestors.append(pid)
            ids = read_ids(pid)
            if ids is None:
                return
            pid = ids[0]
            if pid in (0, guard):
                break
        (self.members if pid == guard or pid in self.members else self.outsiders).update(ancestors)


class MemoryMeter:
    """The memory of the process tree in bytes: anonymous pages, shared pages and swap, without file caches.

    The sum of RssAnon + RssShmem + VmSwap (proc_pid_status(5)) takes microseconds, but includes a shared page once per
    process. The proportional sizes in smaps_rollup are exact, but take 10 ms per GB. So they are read only rarely,
    and when the sum exceeds the limit. The difference is subtracted from later sums. `relatives` are other processes
    that share pages with the tree. Their share of these pages is attributed to the tree.
    """

    def __init__(self, relatives: tuple[int, ...] = ()) -> None:
        self.peak, self.shared, self.relatives = 0, 0, relatives
        self.known: set[int] = set()
        self.pace, self.exact_pace = Throttle(1.0), Throttle(60.0)

    def over(self, limit: float, pids: set[int]) -> bool:
        """Return whether the processes `pids` use more than `limit` bytes."""
        with self.pace:
            resident_bytes = {pid: self._resident(pid) for pid in pids}
        total = sum(resident_bytes.values())
        if total <= self.peak:
            return False
        shared_bytes = self.shared if self.known <= pids else 0
        if total - shared_bytes > limit or self.exact_pace.due():
            with self.exact_pace:
                exact_total = total if len(pids) == 1 else sum(map(self._proportional, (*pids, *self.relatives)))
            self.shared, self.known = max(0, total - exact_total), pids.copy()
        known_bytes = sum(size for pid, size in resident_bytes.items() if pid in self.known)
        self.peak = max(self.peak, known_bytes - self.shared)
        return self.peak > limit

    @staticmethod
    def _resident(pid: int) -> int:
        text = read_proc(pid, "status")
        return sum_bytes(text, b"RssAnon", b"RssShmem", b"VmSwap") or sum_bytes(text, b"VmRSS")

    @classmethod
    def _proportional(cls, pid: int) -> int:
        text = read_proc(pid, "smaps_rollup")
        pages = sum_bytes(text, b"Pss_Anon", b"Pss_Shmem") or sum_bytes(text, b"Pss")
        return pages + sum_bytes(text, b"SwapPss") if pages else cls._resident(pid)


class StopMeter:
    """How long each process of a tree has been stopped by a signal. Tracing by a debugger does not count."""

    def __init__(self) -> None:
        self.stopped_at: dict[int, float] = {}
        self.pace = Throttle(5.0)

    def overdue(self, pids: set[int]) -> str:
        """Return a process that was stopped for too long, with its name, or an empty string."""
        now = time.monotonic()
        with self.pace:
            stopped_pids = [pid for pid in pids if (ids := read_ids(pid)) and ids[3] == b"T"]
        self.stopped_at = {pid: self.stopped_at.get(pid, now) for pid in stopped_pids}
        overdue_pids = (pid for pid, stopped_at in self.stopped_at.items() if now - stopped_at > STOPPED_SECONDS)
        pid = next(overdue_pids, 0)
        return f"process {pid} ({os.fsdecode(read_proc(pid, 'comm')).strip()})" if pid else ""


def free_disk_bytes(folder: str) -> int:
    """Return the disk space in bytes that the user may still use in `folder`."""
    space = os.statvfs(folder)
    return space.f_bavail * space.f_frsize


class DiskMeter:
    """The size on disk of the trial's folder, including its logs."""

    def __init__(self, folder: str, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.pace = Throttle(5.0)

    def problem(self) -> str | None:
        """Return `disk` if the folder exceeds the limit, `full_disk` if too little disk space is free, else None."""
        with self.pace:
            used, full = self._used(), self.full()
        return "disk" if used > self.limit else "full_disk" if full else None

    def full(self) -> bool:
        """Return whether too little disk space is free."""
        with contextlib.suppress(OSError):
            return free_disk_bytes(self.folder) < FREE_DISK_FLOOR_BYTES
        return False

    def _used(self) -> int:
        """Return the size of the folder and its content in bytes. Links are not followed."""
        total, folders = 0, [] if os.path.islink(self.folder) else [self.folder]
        while folders:
            with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
        return total


def execute(argv: list[bytes], environment: dict[bytes, bytes]) -> None:
    """Replace this process with the program of a trial. Raises OSError."""
    os.execvpe(argv[0], argv, environment)


def start(argv: list[bytes], environment: dict[bytes, bytes], directory: bytes, become: Become) -> int:
    """Start the trial's first process in its own session and return its id. Raises OSError with the reason."""
    guard, (read_end, write_end) = os.getpid(), os.pipe()
    pid = os.fork()
    if pid:
        os.close(write_end)
        with open(read_end, "rb") as answer:
            problem = answer.read()
        if problem:
            raise OSError(os.fsdecode(problem))
        return pid
    task = b"cannot prepare the process"
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(127)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_DFL)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("500")  # if the machine runs out of memory, the kernel kills the trial before the tuner
        task = b"cannot enter the directory " + directory
        os.chdir(directory)
        task = b"cannot run " + argv[0]
        become(argv, environment)
    except BaseException as error:
        reason = error.strerror if isinstance(error, OSError) else repr(error)
        os.write(write_end, task + b": " + os.fsencode(str(reason)))
    finally:
        os._exit(127)


class TrialProcesses:
    """The processes of a started trial, and the times at which they get SIGTERM and SIGKILL."""

    def __init__(self, first: int, folder: str, timeout: float, memory_limit: float, disk_limit: int) -> None:
        self.first, self.started_at = first, time.monotonic()
        self.ends_at, self.memory_limit = self.started_at + timeout, memory_limit
        self.tree, self.memory, self.disk = ProcessTree(), MemoryMeter(), DiskMeter(folder, disk_limit)
        self.stops, self.detail = StopMeter(), ""
        self.tree.members = {first}
        self.term_at = self.kill_at = NEVER
        self.code: int | None = None
        self.ended_by: str | None = None
        self.duration = 0.0

    def end(self, reason: str, grace_s: float) -> None:
        """End all processes of the trial, by SIGKILL. If `grace_s` is above 0, they get SIGTERM this time earlier."""
        now, self.ends_at = time.monotonic(), NEVER
        if self.code is None and self.ended_by is None:
            self.ended_by = reason
        if self.kill_at > now + grace_s:
            self.term_at, self.kill_at = (now if grace_s else NEVER), now + grace_s

    def alive(self) -> bool:
        """Reap ended processes, and return whether any is left."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return True
                if pid == self.first:
                    now = time.monotonic()
                    self.code, self.duration = os.waitstatus_to_exitcode(status), now - self.started_at
                    if self.kill_at == NEVER:
                        self.term_at, self.kill_at = now + LINGER_SECONDS, now + LINGER_SECONDS + GRACE_SECONDS
                        self.ends_at = NEVER
        return False

    def act(self) -> float:
        """Run the checks that are due, and return the seconds until the next one."""
        now = time.monotonic()
        if now >= self.kill_at:
            self.tree.end(signal.SIGKILL)
            return 0.02
        if now >= self.term_at:
            self.term_at = NEVER
            self.tree.end(signal.SIGTERM)
        elif self.ends_at < NEVER:
            self._check_limits(now)
        return max(0.0, min(now + PERIOD_SECONDS, self.term_at, self.kill_at, self.ends_at) - now)

    def _check_limits(self, now: float) -> None:
        if self.tree.pace.due():
            self.tree.scan()
        if now >= self.ends_at:
            self.end("timeout", GRACE_SECONDS)
        elif self.memory.pace.due() and self.memory.over(self.memory_limit, self.tree.settled):
            self.end("memory", 0)
        elif self.disk.pace.due() and (problem := self.disk.problem()):
            self.end(problem, 0)
        elif self.stops.pace.due() and (process := self.stops.overdue(self.tree.members)):
            self.detail = process
            self.end("stopped", 0)

    def verdict(self) -> dict[str, object]:
        """Return how the trial ended, as the fields of `flagcore.domain.launch.Exit`."""
        failed_alone = bool(self.code) and self.ended_by is None
        return {
            "code": -signal.SIGKILL if self.code is None else self.code,
            "ended_by": "full_disk" if failed_alone and self.disk.full() else self.ended_by,
            "duration_s": self.duration or time.monotonic() - self.started_at,
            "peak_memory_bytes": self.memory.peak or None,
            "detail": self.detail,
        }


def watch(trial: TrialProcesses, control: int, signals: int, parent: int) -> None:
    """Wait until all processes of the trial have ended, or SIGKILL had no effect for too long."""
    poll = select.poll()
    for descriptor in (control, signals):
        poll.register(descriptor, select.POLLIN)
    while trial.alive() and time.monotonic() < trial.kill_at + GIVE_UP_SECONDS:
        for descriptor, _ in poll.poll(trial.act() * 1000):
            received = os.read(descriptor, 4096)
            if descriptor == signals and set(received) <= {signal.SIGCHLD}:
                continue
            trial.end("request", GRACE_SECONDS if received else 0)
            if not received:
                poll.unregister(control)
        if os.getppid() != parent:
            trial.end("request", 0)


def open_signal_pipe() -> int:
    """Return a descriptor that receives a byte for each ended child and each request to end."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    return read


def begin(control: int, become: Become) -> TrialProcesses | None:
    """Read an order and start its trial. Returns None if flagcore ended before it was complete. Raises OSError."""
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1):
        raise OSError("this system has no child subreaper (prctl), so processes of a trial could survive")
    order = b""
    size = int.from_bytes(os.read(control, 8), "little")
    while len(order) < size and (piece := os.read(control, size - len(order))):
        order += piece
    if not order or len(order) < size:
        return None
    argv, environment, directory, folder, timeout, memory_limit, disk_limit = marshal.loads(order)
    first = start(argv, environment, directory, become)
    return TrialProcesses(first, os.fsdecode(folder), timeout, memory_limit or NEVER, disk_limit)


def main(control: int, report: int, parent: int, *, become: Become = execute) -> None:
    """Read an order from `control`, watch its trial, and write a line to `report` at its start and at its end."""
    for descriptor in (control, report):
        os.set_inheritable(descriptor, False)
    signals = open_signal_pipe()
    try:
        trial = begin(control, become)
        message: dict[str, object] = {"first": trial.first if trial else 0}
    except OSError as error:
        trial, message = None, {"problem": str(error)}
    write_line(report, message)
    if trial:
        if become is not execute:
            trial.memory = MemoryMeter(relatives=(os.getpid(), parent))
        watch(trial, control, signals, parent)
        with contextlib.suppress(OSError):
            write_json(os.path.join(trial.disk.folder, "exit.json"), trial.verdict())
        write_line(report, trial.verdict())


def write_line(report: int, message: dict[str, object]) -> None:
    """Write one line to flagcore, if it still runs."""
    with contextlib.suppress(BrokenPipeError):
        os.write(report, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
    os._exit(0)
