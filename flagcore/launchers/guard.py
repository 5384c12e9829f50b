"""The guard: a small process between flagcore and one trial, so that a trial leaves nothing behind.

`local.py` runs this file as a script; it needs the standard library alone and starts in about 20 ms. The
guard starts the trial in a session of its own, holds its limits, and reports how it ended. It is a child
subreaper (prctl(2)): an orphan below it becomes its child, so that no descendant can leave, whatever sessions
it opens; `waitpid` saying that there is no child left is the proof that nothing is left. It ends the trial
when the pipe from flagcore closes, which happens however flagcore dies. Linux only.
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

GRACE_SECONDS = 2.0
"""From SIGTERM to SIGKILL after a timeout or a request. None if flagcore is gone or a limit is broken."""
LINGER_SECONDS = 0.5
"""What descendants get to end by themselves after the trial's first process has ended."""
GIVE_UP_SECONDS = 10.0
"""How long SIGKILL may take (a process stuck in a driver) before the verdict is given all the same."""
FREE_DISK_FLOOR_BYTES = 64 << 20
"""A trial that leaves less free space than this in its folder is ended."""
PERIOD_SECONDS = 0.1
PAUSE_PER_COST = 400

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
NEVER = float("inf")


def write_json(path: str, record: object) -> None:
    """Write `record` so that a reader sees all of it or nothing."""
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(record, file, indent=1)
    os.replace(path + ".new", path)


def read_proc(pid: int, name: str) -> bytes:
    """Return the text of /proc/`pid`/`name`, empty if the process is gone or hidden."""
    try:
        with open(f"/proc/{pid}/{name}", "rb", buffering=0) as file:
            return file.readall()
    except OSError:
        return b""


def family(pid: int) -> tuple[int, int, int, bool] | None:
    """Return parent, process group, session and whether it is a zombie; None if it is gone (proc_pid_stat(5))."""
    fields = read_proc(pid, "stat").rpartition(b")")[2].split()
    return (int(fields[1]), int(fields[2]), int(fields[3]), fields[0] == b"Z") if fields else None


def all_processes() -> set[int]:
    """Return the ids of all processes that /proc shows."""
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def send(pid: int, number: int, *, group: bool = False) -> None:
    """Send a signal to a process or its group, if it is still there."""
    with contextlib.suppress(OSError):
        (os.killpg if group else os.kill)(pid, number)


def sum_bytes(text: bytes, *names: bytes) -> int:
    """Return the sum of the `Name:  123 kB` lines of a file of /proc."""
    starts = ((text.find(b"\n" + name + b":"), len(name) + 2) for name in names)
    return sum(int(text[at + skip :].split(None, 1)[0]) << 10 for at, skip in starts if at >= 0)


class Pace:
    """Says when a look is due: so rarely that it takes a quarter percent of a core, but every `longest` seconds."""

    def __init__(self, longest: float) -> None:
        self.longest, self.due_at = longest, 0.0

    def due(self) -> bool:
        """Return whether the next look may start."""
        return time.monotonic() >= self.due_at

    def rest(self, started: float) -> None:
        """Put off the next look. `started` was the `time.process_time()` when this one began."""
        pause = (time.process_time() - started) * PAUSE_PER_COST
        self.due_at = time.monotonic() + min(pause, self.longest)


class Tree:
    """All descendants of this guard. A stranger can never become one, so each process is placed once."""

    def __init__(self) -> None:
        self.mine: set[int] = set()
        self.settled: set[int] = set()
        self.others: set[int] = set()
        self.pace = Pace(1.0)

    def look(self) -> None:
        """Find new descendants. `settled` are those of the look before: a vfork(2) child shows its parent's memory."""
        started = time.process_time()
        present = all_processes()
        self.mine &= present
        self.others &= present
        self.settled = self.mine.copy()
        for pid in present - self.mine - self.others:
            self._place(pid)
        self.pace.rest(started)

    def end(self, number: int) -> None:
        """Send a signal to every descendant; SIGKILL also to their groups, which no fork can slip through."""
        self.mine, self.others = set(), set()
        self.look()
        for pid in self.mine:
            kin = family(pid)
            if number == signal.SIGKILL and kin and kin[1] not in (0, os.getpgrp()):
                send(kin[1], number, group=True)
            send(pid, number)

    def _place(self, pid: int) -> None:
        guard, line = os.getpid(), []
        while pid not in self.mine and pid not in self.others:
            line.append(pid)
            kin = family(pid)
            if kin is None:
                return
            pid = kin[0]
            if pid in (0, guard):
                break
        (self.mine if pid == guard or pid in self.mine else self.others).update(line)


class Memory:
    """The memory of the tree in bytes: anonymous and shared pages and swap, without file caches.

    Adding up RssAnon + RssShmem + VmSwap (proc_pid_status(5)) costs microseconds, but a page that processes
    share counts once for each. The proportional figures of smaps_rollup do not, but cost 10 ms a GB. So what
    is counted twice is read off now and then, and whenever the limit seems broken, and taken off the sum.
    """

    def __init__(self) -> None:
        self.peak = 0
        self.shared = 0
        self.known: set[int] = set()
        self.pace, self.exact_pace = Pace(1.0), Pace(60.0)

    def over(self, limit: float, pids: set[int]) -> bool:
        """Weigh the processes and return whether they take more than `limit` bytes."""
        started = time.process_time()
        resident = {pid: self._resident(pid) for pid in pids}
        self.pace.rest(started)
        total = sum(resident.values())
        if total <= self.peak:
            return False
        shared = self.shared if self.known <= pids else 0
        if total - shared > limit or self.exact_pace.due():
            started = time.process_time()
            exact = total if len(pids) == 1 else sum(map(self._proportional, pids))
            self.exact_pace.rest(started)
            self.shared, self.known = max(0, total - exact), pids.copy()
        known = sum(size for pid, size in resident.items() if pid in self.known)
        self.peak = max(self.peak, known - self.shared)
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


def free_disk_bytes(folder: str) -> int:
    """Return how much the user may still write into `folder`."""
    space = os.statvfs(folder)
    return space.f_bavail * space.f_frsize


class Disk:
    """What the trial's folder takes on disk, its logs included."""

    def __init__(self, folder: str, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.pace = Pace(5.0)

    def full(self) -> bool:
        """Return whether the folder takes more than the limit, or hardly any space is left."""
        started = time.process_time()
        used, free = self._used(), NEVER
        with contextlib.suppress(OSError):
            free = free_disk_bytes(self.folder)
        self.pace.rest(started)
        return used > self.limit or free < FREE_DISK_FLOOR_BYTES

    def _used(self) -> int:
        """Return the bytes of the folder, links not followed, the folder itself included."""
        total, folders = 0, [] if os.path.islink(self.folder) else [self.folder]
        while folders:
            with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
        return total


def start(argv: list[bytes], environment: dict[bytes, bytes], directory: bytes) -> int:
    """Start the trial's first process in a session of its own and return its id. Raises OSError with what and why."""
    guard, (told, tell) = os.getpid(), os.pipe()
    pid = os.fork()
    if pid:
        os.close(tell)
        with open(told, "rb") as answer:
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
            file.write("500")  # where the machine runs out of memory, the trial goes first, not the tuner
        task = b"cannot enter the directory " + directory
        os.chdir(directory)
        task = b"cannot run " + argv[0]
        os.execvpe(argv[0], argv, environment)
    except BaseException as error:
        reason = error.strerror if isinstance(error, OSError) else repr(error)
        os.write(tell, task + b": " + os.fsencode(str(reason)))
    finally:
        os._exit(127)


class Trial:
    """A started trial, and when its processes get SIGTERM and SIGKILL."""

    def __init__(self, first: int, folder: str, timeout: float, memory_limit: float, disk_limit: int) -> None:
        self.first, self.started_at = first, time.monotonic()
        self.ends_at, self.memory_limit = self.started_at + timeout, memory_limit
        self.tree, self.memory, self.disk = Tree(), Memory(), Disk(folder, disk_limit)
        self.tree.mine = {first}
        self.term_at = self.kill_at = NEVER
        self.code: int | None = None
        self.ended_by: str | None = None
        self.duration = 0.0

    def end(self, reason: str, grace: float) -> None:
        """End all processes, with SIGTERM first if there is a `grace` in seconds."""
        now = time.monotonic()
        if self.code is None and self.ended_by is None:
            self.ended_by = reason
        self.ends_at = NEVER
        if self.kill_at > now + grace:
            self.term_at, self.kill_at = (now if grace else NEVER), now + grace

    def alive(self) -> bool:
        """Reap what has ended. Return whether a process is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.first:
                now = time.monotonic()
                self.code, self.duration = os.waitstatus_to_exitcode(status), now - self.started_at
                if self.kill_at == NEVER:
                    self.term_at, self.kill_at = now + LINGER_SECONDS, now + LINGER_SECONDS + GRACE_SECONDS
                    self.ends_at = NEVER

    def act(self) -> float:
        """Do what is due now, and return the seconds until something may be due again."""
        now = time.monotonic()
        if now >= self.kill_at:
            self.tree.end(signal.SIGKILL)
            return 0.02
        if now >= self.term_at:
            self.term_at = NEVER
            self.tree.end(signal.SIGTERM)
        elif self.kill_at == NEVER:
            self._check_limits(now)
        return max(0.0, min(now + PERIOD_SECONDS, self.term_at, self.kill_at, self.ends_at) - now)

    def _check_limits(self, now: float) -> None:
        if self.tree.pace.due():
            self.tree.look()
        if now >= self.ends_at:
            self.end("timeout", GRACE_SECONDS)
        elif self.memory.pace.due() and self.memory.over(self.memory_limit, self.tree.settled):
            self.end("memory", 0)
        elif self.disk.pace.due() and self.disk.full():
            self.end("disk", 0)

    def verdict(self) -> dict[str, object]:
        """Return the fields of flagcore.domain.launch.Exit."""
        return {
            "code": -signal.SIGKILL if self.code is None else self.code,
            "ended_by": self.ended_by,
            "duration_s": self.duration or time.monotonic() - self.started_at,
            "peak_memory_bytes": self.memory.peak or None,
        }


def watch(trial: Trial, control: int, signals: int, parent: int) -> None:
    """Return when no process of the trial is left (or SIGKILL was in vain for too long)."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(signals, select.POLLIN)
    while trial.alive() and time.monotonic() < trial.kill_at + GIVE_UP_SECONDS:
        for descriptor, _ in poll.poll(trial.act() * 1000):
            arrived = os.read(descriptor, 4096)
            if descriptor == signals and set(arrived) <= {signal.SIGCHLD}:
                continue
            trial.end("request", GRACE_SECONDS if arrived else 0)
            if not arrived:
                poll.unregister(control)
        if os.getppid() != parent:
            trial.end("request", 0)


def signals_as_bytes() -> int:
    """Return a descriptor that gives a byte for each child that ended and each request to end."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    return read


def begin(control: int) -> Trial | None:
    """Read an order and start its trial; None if flagcore died before it was complete. Raises OSError."""
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1):
        raise OSError("this system has no child subreaper (prctl), without which processes could be left behind")
    order = b""
    size = int.from_bytes(os.read(control, 8), "little")
    while len(order) < size and (piece := os.read(control, size - len(order))):
        order += piece
    if not order or len(order) < size:
        return None
    argv, environment, directory, folder, timeout, memory_limit, disk_limit = marshal.loads(order)
    first = start(argv, environment, directory)
    return Trial(first, os.fsdecode(folder), timeout, memory_limit or NEVER, disk_limit)


def main(control: int, report: int, parent: int) -> None:
    """Take an order from `control`, watch its trial, write two lines to `report`: how it started and how it ended."""
    for descriptor in (control, report):
        os.set_inheritable(descriptor, False)
    signals = signals_as_bytes()
    try:
        trial = begin(control)
        word: dict[str, object] = {"first": trial.first if trial else 0}
    except OSError as error:
        trial, word = None, {"problem": str(error)}
    tell(report, word)
    if trial:
        watch(trial, control, signals, parent)
        with contextlib.suppress(OSError):
            write_json(os.path.join(trial.disk.folder, "exit.json"), trial.verdict())
        tell(report, trial.verdict())


def tell(report: int, word: dict[str, object]) -> None:
    """Write one line to flagcore, if it is still there."""
    with contextlib.suppress(BrokenPipeError):
        os.write(report, json.dumps(word).encode() + b"\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
    os._exit(0)
