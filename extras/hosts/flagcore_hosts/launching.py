"""Starts a trial on several hosts, with an agent on each. The trial ends when one host fails or is lost."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from flagcore.contracts import Launcher
from flagcore.domain.launch import HOSTS, Exit, Launch, host_folder
from flagcore.errors import HostLost, LaunchError, NoDevice
from flagcore.launchers import guard, guarded, template
from flagcore.launchers.guarded import MARKER, START_SECONDS
from flagcore.launchers.local import as_launch_error, prepare
from flagcore_hosts import connection as channels

MAX_LOSSES = 2
STOP_SECONDS = guard.GRACE_SECONDS + guard.GIVE_UP_SECONDS + 5
PAUSE_SECONDS = 25e-6
"""The pause per host between two reads of messages. It is long enough to read thousands of heartbeats together."""


@dataclass(kw_only=True)
class HostTrials(Launcher):
    """Starts trials on the hosts of a launch.

    - `channel`: returns the command that starts an agent on a host and connects it to its standard input and output.
    - `logs_in`: whether `channel` accepts USER@HOST. Hosts are then names chosen by the user, maybe two of one machine.
    - `owner`: how this search is named to others that want its machines; empty if it shares them.
    - `agents`: keeps the agents of successful trials for the next trial; if it is None, each trial starts new agents.
    """

    name: str
    channel: Callable[[str], Sequence[str]]
    logs_in: bool = False
    owner: str = ""
    users: Mapping[str, str] = field(default_factory=dict)
    """The users who log in to hosts, by host."""
    lost: dict[str, str] = field(default_factory=dict)
    """For each lost host, the marker of the trial whose processes may still run there."""
    failures: Counter[str] = field(default_factory=Counter)
    """How many times each host was lost during a trial. It is at least 1 for hosts that could not be reached."""
    failed_at: dict[str, float] = field(default_factory=dict)
    """The time at which each host in `failures` failed last, on the monotonic clock."""
    ended_at: float = -math.inf
    """The time of the end of the last trial, on the monotonic clock."""
    agents: channels.Agents | None = None
    starts_elsewhere = True
    """Whether trials start on other machines."""
    replaces_hosts = False
    """Whether the launcher itself finds another machine for a lost host."""
    fix = "list them in cluster.hostfile"
    """The advice in the message if there are no hosts."""

    @contextlib.contextmanager
    def keep_agents(self) -> Iterator[channels.Agents]:
        """Keep agents between trials until the end of the context."""
        self.agents = agents = channels.Agents(self.command)
        try:
            yield agents
        finally:
            self.agents = None
            agents.close()

    def command(self, host: str) -> Sequence[str]:
        """Return the command that starts an agent on a host and connects it to its standard input and output."""
        user = self.users.get(host) if self.logs_in else None
        return self.channel(f"{user}@{host}" if user else host)

    def for_checks(self) -> HostTrials:
        """Return a launcher that uses the same agents. Its trials are not trials of the search."""
        return HostTrials(name=self.name, channel=self.command, owner=self.owner, agents=self.agents)

    def hold(self, hosts: Sequence[str], users: Mapping[str, str] = {}) -> tuple[str, ...]:
        self.users = users
        return tuple(hosts)

    def usable_hosts(self, hosts: Sequence[str]) -> tuple[str, ...]:
        """Return the hosts that were lost fewer than MAX_LOSSES times."""
        return tuple(host for host in hosts if self.failures[host] < MAX_LOSSES)

    def choose_hosts(self, hosts: Sequence[str], count: int) -> tuple[str, ...]:
        """Return `count` of the `hosts`. The first ones are preferred.

        Later hosts replace those that were lost more often, or as often but later. A host that was lost MAX_LOSSES
        times is excluded unless all hosts are needed. Raises HostLost if too few hosts remain.
        """
        if len(hosts) <= count:
            return tuple(hosts)
        usable_hosts = self.usable_hosts(hosts)
        if len(usable_hosts) < count:
            lost_hosts = ", ".join(host for host in hosts if host not in usable_hosts)
            raise HostLost("", f"only {len(usable_hosts)} of {count} hosts are usable: {lost_hosts} cannot be used")
        best = sorted(usable_hosts, key=lambda host: (self.failures[host], self.failed_at.get(host, 0.0)))[:count]
        replacements = iter([host for host in best if host not in hosts[:count]])
        return tuple(host if host in best else next(replacements) for host in hosts[:count])

    def give_up(self, host: str) -> None:
        """Do not use a host any more, unless all hosts are needed."""
        self.failures[host] = MAX_LOSSES

    def resume(self, lost: Iterable[str], cut_off: Iterable[str]) -> None:
        """Prepare to continue a run: prefer hosts that are not in `lost`, and end processes of interrupted trials.

        `cut_off` contains the folders of these trials. A lost host may have been repaired, so it counts as lost only
        once.
        """
        for host in lost:
            self.failures[host] = max(self.failures[host], 1)
        for folder in cut_off:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                started = json.loads(Path(folder, "launch.json").read_text(encoding="utf-8"))
                self.lost |= dict.fromkeys(started["hosts"], started["environment"][MARKER])

    def require_hosts(self, hosts: Sequence[str]) -> None:
        if not hosts:
            raise NoDevice(f"auto_tuner.launcher = {self.name}: no hosts; {self.fix}")

    def start(self, launch: Launch, kind: type[HostsRunning] | None = None) -> HostsRunning:
        """Start a launch on each of its hosts, as a trial of the class `kind`, by default HostsRunning.

        In the arguments and variables of the launch, `{node_rank}`, `{nnodes}`, `{master_addr}`, `{master_port}`,
        `{node_ports}` (a free port of each host) and those of `network.placeholders` are replaced for each host. The
        files of the trial's folder are sent to every host. The files of the first host, and the logs of all hosts, are
        copied back to the folder. Files of the other hosts are copied to `hosts/NAME`. Raises HostLost if a host cannot
        be reached, NoDevice without hosts, and LaunchError if the program cannot be started.
        """
        self.require_hosts(launch.hosts)
        folder = os.path.abspath(launch.folder)
        launch = channels.with_variables(replace(launch, folder=folder))
        with as_launch_error(f"cannot write into the trial's folder {folder}: "):
            prepare(launch, launch.environment, folder, launch.directory or folder)
            for name in channels.LOGS:
                Path(folder, name).write_bytes(b"")
        with as_launch_error():  # such as a missing ssh, or too many open files
            trial = (kind or HostsRunning)(launch, self)
        try:
            trial.begin()
        except BaseException as problem:
            trial.close()
            if isinstance(problem, HostLost):
                self.failures[problem.host] = max(self.failures[problem.host], 1)
                self.failed_at[problem.host] = time.monotonic()
            raise
        return trial


class HostsRunning:
    """A trial that runs on several hosts."""

    def __init__(self, launch: Launch, launcher: HostTrials) -> None:
        self.launch, self.launcher, self.started_at = launch, launcher, time.monotonic()
        self._ends_at = math.inf
        self._partial: dict[tuple[str, str], bytes] = {}
        self._exit: Exit | None = None
        self._client: guarded.Guarded | None = None
        agents = launcher.agents
        channels.allow_files(channels.FILES_PER_HOST * sum(not (agents and agents.has(host)) for host in launch.hosts))
        self.connections = [self._connect(host) for host in launch.hosts]

    def _connect(self, host: str) -> channels.Connection:
        agents, folder = self.launcher.agents, os.path.join(self.launch.folder, HOSTS, host)
        os.makedirs(folder, exist_ok=True)
        connection = agents.take(host) if agents else channels.Connection(host, self.launcher.command(host))
        connection.assign(folder, 2 * self.launch.disk_limit_bytes)
        return connection

    def begin(self) -> None:
        """Wait for all agents, send an order to each of them, and wait until the program runs on all hosts.

        Processes of a lost trial are ended first. Raises HostLost, and LaunchError if a host cannot start the program.
        """
        lost_markers = self.launcher.lost
        # Of two searches that claim the same hosts at the same time, one gets the first host.
        first, *others = sorted(self.connections, key=lambda each: each.host)
        later = set(others)
        for some in ([first], others):
            for each in some:
                each.wire.send(prepare=lost_markers.get(each.host, ""), owner=self.launcher.owner)
            later.difference_update(some)
            self._until(lambda each: each.ready is not None or each in later, "does not respond")
            if first.ready and first.ready["owner"]:
                raise HostLost(first.host, first.problem)
        for each in self.connections:
            lost_markers.pop(each.host, None)
        ports = [str(each.ready["port"] if each.ready else "") for each in self.connections]
        address, count = self.connections[0].host, str(len(self.connections))
        values = {"{master_addr}": address, "{master_port}": ports[0], "{node_ports}": ",".join(ports)}
        files = channels.trial_files(self.launch.folder)
        for rank, each in enumerate(self.connections):
            if each.problem:
                continue
            host_values = {**values, "{node_rank}": str(rank), "{nnodes}": count}
            each.wire.send(order=channels.order_for_host(self.launch, each.host, host_values, files))
        seconds = START_SECONDS + (template.START_SECONDS if self.launch.warm else 0.0)
        self._until(lambda each: each.started or each.exit is not None, "does not start the program", seconds)
        self._ends_at = time.monotonic() + self.launch.timeout_seconds + START_SECONDS
        if self.launch.client:
            self._client = self._start_client()

    def _start_client(self) -> guarded.Guarded:
        launch = self.launch
        limits = guarded.Limits(launch.timeout_seconds, None, launch.disk_limit_bytes)
        with contextlib.ExitStack() as logs, as_launch_error():
            out, err = (logs.enter_context(open(os.path.join(launch.folder, name), "ab")) for name in channels.LOGS)
            spawn = partial(guarded.spawn_guard, out, err)
            return guarded.start(launch.client, {}, launch.folder, launch.folder, limits, spawn=spawn)

    def _until(self, done: Callable[[channels.Connection], bool], problem: str, seconds: float = START_SECONDS) -> None:
        """Wait until `done` is true for all connections. Raises HostLost for the first host with a problem, and
        LaunchError if no host can start the program."""
        deadline = time.monotonic() + seconds
        while waiting := [each for each in self.connections if not (done(each) or each.refused)]:
            self._exchange(0.2)
            if time.monotonic() > deadline:
                waiting[0].problem = waiting[0].problem or f"{problem} within {seconds:.0f} s"
            for each in self.connections:
                if each.problem and not each.refused:
                    raise HostLost(each.host, each.problem)
        if refused := [each for each in self.connections if each.refused]:
            lost = HostLost(refused[0].host, refused[0].problem)
            raise LaunchError(str(lost)) if len(refused) == len(self.connections) else lost

    def wait(self, seconds: float) -> Exit | None:
        deadline = time.monotonic() + seconds
        while self._exit is None:
            time.sleep(max(0.0, min(PAUSE_SECONDS * len(self.connections), deadline - time.monotonic())))
            self._exchange(max(0.0, min(1.0, deadline - time.monotonic())))
            if self._is_over():
                self.end()
            elif time.monotonic() >= deadline:
                break
        return self._exit

    def stop(self) -> Exit:
        return self._exit or self.end(asked=True)

    def _is_over(self) -> bool:
        """Whether the trial has ended on all hosts, a host has failed or was lost, or the client has ended."""
        if time.monotonic() > self._ends_at:
            for each in self.connections:
                if each.open:
                    each.problem = "has not reported the end of the trial after its time limit"
        client_ended = self._client is not None and self._client.wait(0) is not None
        failed = any(each.problem or _has_failed(each.exit) for each in self.connections)
        return failed or client_ended or not (self._client or any(each.open for each in self.connections))

    def end(self, *, asked: bool = False) -> Exit:
        """End the trial on all hosts where it still runs, and return its exit record.

        If a host was lost, the loss is the reason for the end, even if the program failed on another host earlier.
        """
        for each in self.connections:
            # No stop was requested here. Something else ended the trial, as Slurm does at the end of a step.
            if each.exit and each.exit.ended_by == "request":
                each.problem = each.problem or "another program ended the trial, for example the scheduler"
        lost = next((each for each in self.connections if each.problem), None)
        failed = next((each for each in self.connections if _has_failed(each.exit)), None)
        client = Exit(**self._client.stop()) if self._client else None
        running_hosts = self._stop_hosts()
        # A lost host also causes failures on the other hosts.
        lost = lost or next((each for each in running_hosts if each.problem), None)
        for (_, name), rest in self._partial.items():  # the last line of a host's log may have no newline
            with contextlib.suppress(OSError), open(os.path.join(self.launch.folder, name), "ab") as file:
                file.write(rest + b"\n" if rest else b"")
        peak = max((each.exit.peak_memory_bytes or 0 for each in self.connections if each.exit), default=0)
        if lost:
            ended = self._loss(lost)
        elif client and not (failed and _has_failed(client)):
            ended = client
        else:
            ended = self._exit_of_hosts(failed, asked=asked)
        self._exit = replace(ended, peak_memory_bytes=peak or None)
        self.close()
        with contextlib.suppress(OSError):
            guard.write_json(os.path.join(self.launch.folder, "exit.json"), asdict(self._exit))
        return self._exit

    def _stop_hosts(self) -> list[channels.Connection]:
        """End the trial on the hosts where it still runs, and return them. Those that do not end it have a problem."""
        deadline = time.monotonic() + STOP_SECONDS
        running_hosts = [each for each in self.connections if each.open and each.started]
        for each in running_hosts:
            each.wire.send(stop=True)
        while any(each.open for each in running_hosts) and time.monotonic() < deadline:
            self._exchange(0.2)
        for each in running_hosts:
            if each.open:
                each.problem = "does not end its processes of the trial"
        return running_hosts

    def _loss(self, lost: channels.Connection) -> Exit:
        """Count the loss of a host, and return the exit record of a trial that it ended."""
        failures, now = self.launcher.failures, time.monotonic()
        failures[lost.host] += 1
        self.launcher.failed_at[lost.host] = now
        times = "; lost for the second time" if failures[lost.host] == MAX_LOSSES else ""
        detail = f"{lost.host}: {lost.problem}{times}"
        return Exit(code=1, ended_by="host", duration_s=now - self.started_at, detail=detail, lost_host=lost.host)

    def _exit_of_hosts(self, failed: channels.Connection | None, *, asked: bool) -> Exit:
        """Return the exit record of a trial that ended on all hosts: that of the host where it `failed`, if any."""
        exits = [each.exit for each in self.connections if each.exit]
        ended = (failed and failed.exit) or exits[0]
        return replace(
            ended,
            ended_by="request" if asked and ended.ended_by is None and ended.code else ended.ended_by,
            duration_s=max(each.duration_s for each in exits),
            detail=": ".join(filter(None, (failed.host, ended.detail))) if failed else "",
            warm=all(each.warm for each in exits),
        )

    def _exchange(self, seconds: float) -> None:
        """Exchange messages for at most `seconds`, and write received files."""
        poll, actions = select.poll(), dict[int, Callable[[], None]]()
        if self._client and self._client.wait(0) is None:
            poll.register(self._client, select.POLLIN)
        for each in self.connections:
            each.beat()
            if each.open:
                poll.register(each.wire.source, select.POLLIN)
                actions |= {each.wire.source: each.read, each.wire.target: each.wire.flush}
                if each.wire.outgoing:
                    poll.register(each.wire.target, select.POLLOUT)
        for descriptor, _ in poll.poll(seconds * 1000):
            actions.get(descriptor, lambda: None)()
        for rank, each in enumerate(self.connections):
            self._write(each, rank)

    def _write(self, connection: channels.Connection, rank: int) -> None:
        """Write the new content of a host's files to the trial's folder."""
        pieces, connection.pieces = connection.pieces, []
        for name, at, data in pieces:
            mirror = host_folder(self.launch.folder, self.launch.hosts, rank)
            path = Path(connection.folder if name in channels.LOGS else mirror, name)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("r+b" if at else "wb") as file:
                    file.seek(at)
                    file.write(data)
                if name in channels.LOGS:
                    self._merge(connection.host, name, data)
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", error)
                connection.problem = f"the host's file {name!r} cannot be written on this machine: {reason}"

    def _merge(self, host: str, name: str, data: bytes) -> None:
        """Append the complete lines of one host's log to the log of the trial."""
        lines, newline, partial = (self._partial.get((host, name), b"") + data).rpartition(b"\n")
        self._partial[host, name] = partial
        if newline:
            with open(os.path.join(self.launch.folder, name), "ab") as file:
                file.write(lines + newline)

    def close(self) -> None:
        """Keep the agents that have ended the trial for the next trial, and close the channels of all other agents.

        An agent ends its trial when its channel closes. Hosts that did not confirm the end of the trial count as lost.
        """
        if self._client:
            self._client.stop()
        agents, to_close = self.launcher.agents, []
        spoils_templates = self._exit is None or (self._exit.ended_by != "request" and _has_failed(self._exit))
        for each in self.connections:
            if each.exit is None and each.ready is not None:
                self.launcher.lost[each.host] = self.launch.environment[MARKER]
            if each.problem and (log := each.read_log()):
                with contextlib.suppress(OSError):
                    Path(each.folder, "connection.log").write_bytes(log)
            if spoils_templates and each.exit:
                each.wire.send(fresh=True)
            if each.problem or each.exit is None or not agents or not agents.give_back(each):
                to_close.append(each)
                each.disconnect()
        self.connections, deadline = [], time.monotonic() + channels.CLOSE_SECONDS
        for each in to_close:
            each.close(deadline - time.monotonic())
        self.launcher.ended_at = time.monotonic()


class HostsApart(HostsRunning):
    """A program that runs on several hosts. If it fails on a host, or a host is lost, it goes on on the others."""

    def _until(self, done: Callable[[channels.Connection], bool], problem: str, seconds: float = START_SECONDS) -> None:
        """Wait until `done` is true for all connections without a problem."""
        deadline = time.monotonic() + seconds
        while waiting := [each for each in self.connections if each.open and not done(each)]:
            self._exchange(0.2)
            if time.monotonic() > deadline:
                for each in waiting:
                    each.problem = each.problem or f"{problem} within {seconds:.0f} s"

    def _is_over(self) -> bool:
        """Whether the program has ended on all hosts that are left, or its time is over."""
        return time.monotonic() > self._ends_at or not any(each.open for each in self.connections)


def _has_failed(ended: Exit | None) -> bool:
    return ended is not None and bool(ended.code or ended.ended_by)
