"""Starts a trial on several hosts: an agent on each, the first failure ends all, a lost host ends the trial."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import secrets
import select
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from flagcore.domain.launch import HOSTS, Exit, Launch, host_folder
from flagcore.errors import LaunchError
from flagcore.launchers import guard, guarded
from flagcore.launchers.connection import Connection
from flagcore.launchers.guarded import MARKER, START_SECONDS
from flagcore.launchers.local import prepare

MAX_LOSSES = 2
LOGS = ("stdout.log", "stderr.log")
STOP_SECONDS = guard.GRACE_SECONDS + guard.GIVE_UP_SECONDS + 5
CLOSE_SECONDS = 2.0
PAUSE_SECONDS = 25e-6
"""Per host, between two looks at the messages of a running trial: thousands of heartbeats are then read together."""
OTHER_FILES = 64
SHARED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "OMP_NUM_THREADS")
"""Variables of this shell that a trial has on every host, because no login shell sets them there."""


@dataclass(kw_only=True)
class HostsLauncher:
    """Starts trials on the hosts of a launch.

    `channel` returns the command that starts an agent on a host, connected to its standard input and output.
    `find_hosts` returns the hosts that are there without being named, if `has_allocation` is true several. `hold` takes
    hosts for this process alone, if others may use them, waits until they are there, and returns their names; it raises
    FlagError if it cannot. `fix` is what to do if there are no hosts.
    """

    name: str
    channel: Callable[[str], Sequence[str]]
    find_hosts: Callable[[int], tuple[str, ...]] = lambda nodes: ()
    has_allocation: Callable[[], bool] = lambda: False
    hold: Callable[[Sequence[str]], tuple[str, ...]] = tuple
    fix: str = "name them in cluster.hostfile"
    reached: set[str] = field(default_factory=set)
    """Hosts that ran a trial: a later failure to reach them is theirs, not that of the spec."""
    lost: dict[str, str] = field(default_factory=dict)
    """The markers of trials in which hosts were lost, by host: processes may be left there."""
    failures: Counter[str] = field(default_factory=Counter)
    """How often each host was lost."""
    ended_at: float = -math.inf
    """When the last trial ended, on the monotonic clock."""

    def choose_hosts(self, hosts: Sequence[str], count: int) -> tuple[str, ...]:
        """Return `count` of `hosts`: the first ones, except that others replace those that were lost more often.

        A host that was lost MAX_LOSSES times is left out if there are others to choose from. Raises LaunchError if too
        few are left.
        """
        if len(hosts) <= count:
            return tuple(hosts)
        usable = [host for host in hosts if self.failures[host] < MAX_LOSSES]
        if len(usable) < count:
            lost = ", ".join(host for host in hosts if host not in usable)
            raise LaunchError(f"only {len(usable)} of {count} hosts are left: {lost} cannot be used")
        best = sorted(usable, key=lambda host: self.failures[host])[:count]
        others = iter([host for host in best if host not in hosts[:count]])
        return tuple(host if host in best else next(others) for host in hosts[:count])

    @property
    def no_hosts(self) -> str:
        """The message if there are no hosts."""
        return f"auto_tuner.launcher = {self.name}: no hosts; {self.fix}"

    def start(self, launch: Launch) -> HostsRunning:
        """Start a launch on each of its hosts.

        In the words and variables of the launch, `{node_rank}`, `{nnodes}`, `{master_addr}`, `{master_port}`,
        `{node_ports}` (a free port of each host) and `{interface}` are replaced for each host. The files of its folder
        are sent to every host, and what the first host writes is mirrored there, with the logs of all; `hosts/NAME` has
        those of the others. A host that answered before and no longer does ends the trial at once. Raises LaunchError
        if another cannot be reached, or if one cannot start the program.
        """
        if not launch.hosts:
            raise LaunchError(self.no_hosts)
        folder = os.path.abspath(launch.folder)
        variables = {name: os.environ[name] for name in SHARED if name in os.environ}
        places = {"MASTER_ADDR": "{master_addr}", "MASTER_PORT": "{master_port}", "NODE_RANK": "{node_rank}"}
        fixed = {**variables, **places, "NNODES": "{nnodes}", MARKER: secrets.token_hex(8)}
        launch = replace(launch, folder=folder, environment={**fixed, **launch.environment})
        try:
            prepare(launch, launch.environment, folder, launch.directory or folder)
            for name in LOGS:
                Path(folder, name).write_bytes(b"")
        except OSError as error:
            reason = error.strerror or error
            raise LaunchError(f"cannot write into the trial's folder {folder}: {reason}") from error
        running = HostsRunning(launch, self)
        try:
            running.begin()
        except HostLost as problem:
            if problem.host not in self.reached:
                running.close()
                raise
            running.end()
        except BaseException:
            running.close()
            raise
        self.reached.update(launch.hosts)
        return running


class HostLost(LaunchError):
    """A host that cannot be reached."""

    def __init__(self, host: str, problem: str) -> None:
        super().__init__(f"host {host}: {problem}")
        self.host = host


class HostsRunning:
    """A trial on several hosts."""

    def __init__(self, launch: Launch, launcher: HostsLauncher) -> None:
        self.launch, self.launcher, self.started_at = launch, launcher, time.monotonic()
        self._partial: dict[tuple[str, str], bytes] = {}
        self._exit: Exit | None = None
        self._client: guarded.Guarded | None = None
        _allow_files(2 * len(launch.hosts))
        self.connections = [
            Connection(host, launcher.channel(host), os.path.join(launch.folder, HOSTS, host)) for host in launch.hosts
        ]

    def begin(self) -> None:
        """Wait for all agents, give each its order, and wait until the program runs everywhere.

        What a lost trial left is ended first. Raises HostLost, or LaunchError if a host cannot start the program.
        """
        lost = self.launcher.lost
        self._until(lambda each: each.hello is not None, "does not answer")
        for each in self.connections:
            if each.host in lost:
                each.send(sweep=lost[each.host])
        self._until(lambda each: each.host not in lost or each.left == 0, "still has processes of a lost trial")
        for each in self.connections:
            lost.pop(each.host, None)
        first = self.connections[0]
        assert first.hello is not None
        ports = ",".join(str(each.hello["port"]) for each in self.connections if each.hello)
        values = {"master_addr": first.host, "master_port": str(first.hello["port"]), "node_ports": ports}
        files = _files(self.launch.folder)
        for rank, each in enumerate(self.connections):
            mine = {**values, "node_rank": str(rank), "nnodes": str(len(self.connections))}
            each.send(order=_order(self.launch, mine, files))
        self._until(lambda each: each.started or each.exit is not None, "does not start the program")
        if self.launch.client:
            self._client = self._start_client()

    def _start_client(self) -> guarded.Guarded:
        launch, marker = self.launch, secrets.token_hex(8)
        limits = guarded.Limits(launch.timeout_seconds, None, launch.disk_limit_bytes)
        with contextlib.ExitStack() as logs:
            out, err = (logs.enter_context(open(os.path.join(launch.folder, name), "ab")) for name in LOGS)
            spawn = partial(guarded.spawn_guard, out, err)
            try:
                return guarded.start(launch.client, {MARKER: marker}, launch.folder, launch.folder, limits, spawn)
            except OSError as error:
                raise LaunchError(str(error)) from error

    def _until(self, done: Callable[[Connection], bool], problem: str) -> None:
        """Wait until `done` of all connections. Raises HostLost for the first host with a problem."""
        deadline = time.monotonic() + START_SECONDS
        while waiting := [each for each in self.connections if not done(each)]:
            self._step(0.2)
            if time.monotonic() > deadline:
                waiting[0].problem = waiting[0].problem or f"{problem} within {START_SECONDS:.0f} s"
            for each in self.connections:
                if each.refused:
                    raise LaunchError(f"host {each.host}: {each.problem}")
                if each.problem:
                    raise HostLost(each.host, each.problem)

    def poll(self) -> Exit | None:
        return self.wait(0)

    def wait(self, seconds: float) -> Exit | None:
        deadline = time.monotonic() + seconds
        while self._exit is None:
            time.sleep(max(0.0, min(PAUSE_SECONDS * len(self.connections), deadline - time.monotonic())))
            self._step(max(0.0, min(1.0, deadline - time.monotonic())))
            if self._over():
                self.end()
            elif time.monotonic() >= deadline:
                break
        return self._exit

    def stop(self) -> Exit:
        if self._exit is None:
            self.end(asked=True)
        assert self._exit is not None
        return self._exit

    def _over(self) -> bool:
        """Whether all hosts are done, or one failed or was lost."""
        failed = any(each.problem or (each.exit and _failed(each.exit)) for each in self.connections)
        if self._client:
            return failed or self._client.wait(0) is not None
        return failed or not any(each.open for each in self.connections)

    def end(self, *, asked: bool = False) -> None:
        """End the trial on all hosts that still run it, and note how it ended.

        A host that turns out to be lost is the reason, even if the program failed on another one before.
        """
        lost = next((each for each in self.connections if each.problem), None)
        failed = next((each for each in self.connections if each.exit and _failed(each.exit)), None)
        client = self._client.stop() if self._client else None
        deadline = time.monotonic() + STOP_SECONDS
        running = [each for each in self.connections if each.open and each.started]
        for each in running:
            each.send(stop=True)
        while any(each.open for each in running) and time.monotonic() < deadline:
            self._step(0.2)
        for each in running:
            if each.open:
                each.problem = "does not end its part of the trial"
        lost = lost or next((each for each in running if each.problem), None)  # the cause of what failed elsewhere
        if lost:
            self.launcher.failures[lost.host] += 1
        if client and not lost and not (failed and _failed(client)):
            self._exit = Exit(**{**client, "peak_memory_bytes": self._peak()})
        else:
            self._exit = self._verdict(lost or failed, asked)
        self.close()
        with contextlib.suppress(OSError):
            guard.write_json(os.path.join(self.launch.folder, "exit.json"), asdict(self._exit))

    def _verdict(self, first: Connection | None, asked: bool) -> Exit:
        seconds = time.monotonic() - self.started_at
        ends, peak = [each.exit for each in self.connections if each.exit], self._peak()
        if first is not None and first.problem:
            again = self.launcher.failures[first.host] == MAX_LOSSES
            detail = f"{first.host}: {first.problem}" + ("; lost for the second time" if again else "")
            return Exit(code=1, ended_by="host", duration_s=seconds, peak_memory_bytes=peak, detail=detail)
        end = (first.exit if first else None) or (ends[0] if ends else None)
        if end is None:
            return Exit(code=1, ended_by="host", duration_s=seconds, detail="no host answered")
        seconds = max(float(each["duration_s"]) for each in ends)
        ended_by = "request" if asked and end["ended_by"] is None and end["code"] else end["ended_by"]
        detail = first.host if first else ""
        return Exit(code=int(end["code"]), ended_by=ended_by, duration_s=seconds, peak_memory_bytes=peak, detail=detail)

    def _peak(self) -> int | None:
        peaks = [each.exit.get("peak_memory_bytes") or 0 for each in self.connections if each.exit]
        return max(peaks, default=0) or None

    def _step(self, seconds: float) -> None:
        """Exchange messages for at most `seconds`, and write what arrived."""
        poll = select.poll()
        if self._client and self._client.wait(0) is None:
            poll.register(self._client, select.POLLIN)
        by_descriptor: dict[int, Connection] = {}
        for each in self.connections:
            each.beat()
            if each.open:
                by_descriptor |= {each.output: each, each.input: each}
                poll.register(each.output, select.POLLIN)
                if each.outgoing:
                    poll.register(each.input, select.POLLOUT)
        for descriptor, _ in poll.poll(seconds * 1000):
            ready = by_descriptor.get(descriptor)
            if ready and descriptor == ready.output:
                ready.read()
            elif ready:
                ready.flush()
        for rank, each in enumerate(self.connections):
            self._write(each, rank)

    def _write(self, connection: Connection, rank: int) -> None:
        """Write what a host reported about its files."""
        news, connection.news = connection.news, []
        for name, at, data in news:
            mirror = host_folder(self.launch.folder, self.launch.hosts, rank)
            path = Path(connection.folder if name in LOGS else mirror, name)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("r+b" if at else "wb") as file:
                    file.seek(at)
                    file.write(data)
                if name in LOGS:
                    self._merge(connection.host, name, data)
            except OSError as error:
                connection.problem = f"its file {name} cannot be written here: {error.strerror or error}"

    def _merge(self, host: str, name: str, data: bytes) -> None:
        """Append the complete lines of one host's log to the log of the trial."""
        whole, newline, rest = (self._partial.get((host, name), b"") + data).rpartition(b"\n")
        self._partial[host, name] = rest
        if newline:
            with open(os.path.join(self.launch.folder, name), "ab") as file:
                file.write(whole + newline)

    def close(self) -> None:
        """Close all channels, on which the agents end what still runs. Hosts that did not confirm that are noted."""
        if self._client:
            self._client.stop()
        for each in self.connections:
            if each.exit is None and each.hello is not None:
                self.launcher.lost[each.host] = self.launch.environment[MARKER]
            each.hang_up()
        deadline = time.monotonic() + CLOSE_SECONDS
        for each in self.connections:
            each.close(deadline - time.monotonic())
        self.launcher.ended_at = time.monotonic()


def _failed(ended: Mapping[str, object]) -> bool:
    return bool(ended["code"] or ended["ended_by"])


def _allow_files(more: int) -> None:
    """Raise this process's limit of open files if it is too low for `more`. Raises LaunchError if that is forbidden."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + more + OTHER_FILES
    if resource.RLIM_INFINITY != soft < needed:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        except ValueError:
            problem = f"the channels to the hosts need {needed} open files, and {hard} are allowed"
            raise LaunchError(f"{problem}; raise the hard limit (ulimit -Hn) or use fewer hosts") from None


def _files(folder: str) -> dict[str, str]:
    """Return the text of the files that the engine wrote into a trial's folder."""
    names = [name for name in os.listdir(folder) if name not in (*LOGS, "launch.json", "exit.json")]
    paths = [path for name in names if (path := Path(folder, name)).is_file()]
    return {path.name: path.read_text(encoding="utf-8") for path in paths}


def _order(launch: Launch, values: Mapping[str, str], files: Mapping[str, str]) -> dict[str, object]:
    """Return the order for one host. The agent replaces the trial's folder by its own."""

    def filled(text: str) -> str:
        for name, value in values.items():
            text = text.replace(f"{{{name}}}", value)
        return text

    return {
        "argv": [filled(word) for word in launch.argv],
        "environment": {name: filled(value) for name, value in launch.environment.items()},
        "directory": launch.directory or launch.folder,
        "folder": launch.folder,
        "files": files,
        "limits": [launch.timeout_seconds, launch.memory_limit_bytes, launch.disk_limit_bytes],
        "master_addr": values["master_addr"],
    }
