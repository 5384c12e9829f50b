"""The base class of launchers, and what they report about hosts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from flagcore.contracts.plugin import Telemetry
from flagcore.domain.chip import Device
from flagcore.domain.launch import Exit, Launch
from flagcore.domain.spec import ClusterSpec
from flagcore.errors import UsageError
from flagcore.i18n import N_, _


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCheck:
    """What is checked on each host before the first trial.

    `files`: files and folders that must be the same on all hosts.
    `variables`: the variables of trials, which may set the port at which hosts connect to the first host. None if hosts
    do not connect.
    `speed`: the command that measures the speed of its host with torch. Empty if speeds are not compared. It gets JSON
    with the device type and the backend of torch, the rank of the host, the number of hosts, and the first host's
    address and port.
    """

    files: Sequence[str] = ()
    variables: Mapping[str, str] | None = None
    speed: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Network:
    """The network between hosts: bytes per second from one device in one direction, and seconds of a small message."""

    nic_bytes_per_second: float
    nic_latency_seconds: float

    @property
    def note(self) -> str:
        """The note that a spec can keep these values of the keys of `cluster`."""
        text = N_("the network between the hosts was measured; the spec can keep it: cluster: {{{settings}}}")
        return _(text, settings=", ".join(f"{key}: {value:.2e}" for key, value in vars(self).items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldHosts:
    """Hosts that a launcher has reserved and checked.

    `devices`: the devices of the usable hosts. Empty if unknown.
    `network`: the network of the slowest host. None if it was not measured.
    `telemetry`: returns the telemetry reader of a device.
    """

    names: tuple[str, ...]
    devices: tuple[Device, ...] = ()
    network: Network | None = None
    telemetry: Callable[[Device], Telemetry | None] = lambda device: None


class RunningLaunch(Protocol):
    """A launch that was started, and may still be running."""

    def wait(self, seconds: float) -> Exit | None:
        """Wait at most `seconds` for the launch to end. Return how it ended, or None if it is still running."""

    def stop(self) -> Exit:
        """End the whole process tree if it is still running, and return how the launch ended."""


class Launcher(ABC):
    """The base class of launchers, which start programs on this machine or on other hosts.

    A launcher must define `name` and `start`. All other methods have defaults.
    """

    name: str

    @abstractmethod
    def start(self, launch: Launch) -> RunningLaunch:
        """Start `launch` in its own process group. Raises FlagError if it cannot be started.

        If it raises HostLost, flagcore tries again, for at most `cluster.wait_for_hosts` seconds.
        """

    def close(self) -> None:  # noqa: B027  (a default, not abstract)
        """End all processes that the launcher keeps running between launches. By default there are none."""

    def has_allocation(self) -> bool:
        """Return whether flagcore runs in an allocation of several hosts. Must return at once. By default False."""
        return False

    def find_hosts(self, nodes: int, /) -> tuple[str, ...]:
        """Return the hosts for trials if the spec does not name them. By default there are none.

        `nodes`: the number of nodes in the spec.
        Raises FlagError if the hosts cannot be listed.
        """
        return ()

    def require_hosts(self, hosts: Sequence[str]) -> None:  # noqa: B027  (a default, not abstract)
        """Raise NoDevice if the launcher needs hosts and there are none. By default it needs none."""

    def hold(self, hosts: Sequence[str], users: Mapping[str, str] = {}) -> tuple[str, ...]:
        """Reserve hosts until this process ends, and return their names. By default nothing is reserved.

        `users`: the users who log in, by host. Raises FlagError if hosts cannot be reserved.
        """
        return tuple(hosts)

    def use_hosts(self, cluster: ClusterSpec, check: HostCheck) -> AbstractContextManager[HeldHosts]:
        """Reserve and check the hosts of a cluster, and stay connected to them until the end of the context.

        By default nothing is checked. Devices and versions of hosts of one kind must be the same. Up to
        `cluster.spares` unusable hosts, or with `cluster.min_nodes` all others, are skipped with a warning. Slow
        devices cause warnings, too. Raises NoDevice with a line per unusable host if more are unusable.
        """
        return nullcontext(HeldHosts(names=cluster.hosts))

    def report_hosts(
        self, kinds: Mapping[str, str], users: Mapping[str, str], check: HostCheck
    ) -> list[dict[str, Any]]:
        """Check hosts, and return one record per host: its problem, if any, its devices, versions and speed.

        `kinds`: the kind of each host, which may be empty. Hosts of one kind must be equal. `users`: as in `hold`.
        Raises UsageError if the launcher does not use hosts.
        """
        text = N_("--launcher = {launcher} starts trials only on this machine; use ssh, slurm or ray")
        raise UsageError(_(text, launcher=self.name))

    def run_job(
        self, job: Launch, users: Mapping[str, str], restarts: int, spares: Sequence[str], stall_s: float | None
    ) -> int:
        """Run a job until it ends, print its output, and return its exit status. By default, raises UsageError.

        After a failure, it starts again, at most `restarts` times, with `spares` in the places of lost hosts. A job
        without output for `stall_s` seconds has failed (None: the launcher's limit). `users`: as in `hold`. Raises
        HostLost and LaunchError.
        """
        raise UsageError(_("the launcher {launcher} cannot run a job; tune with ssh, slurm or ray", launcher=self.name))

    def usable_hosts(self, hosts: Sequence[str]) -> tuple[str, ...]:
        """Return those of `hosts` that have not failed too often. By default, return all."""
        return tuple(hosts)

    def choose_hosts(self, hosts: Sequence[str], count: int) -> tuple[str, ...]:
        """Return the hosts for the next trial: the first `count` of `hosts` that have not failed.

        By default failures are ignored. Raises FlagError if too few hosts are left.
        """
        return tuple(hosts[:count])

    def give_up(self, host: str) -> None:  # noqa: B027  (a default, not abstract)
        """Do not use a host any more, because flagcore has waited for it in vain. By default nothing is done."""

    def resume(self, lost: Iterable[str], cut_off: Iterable[str]) -> None:  # noqa: B027  (a default, not abstract)
        """Prepare to resume a run. By default nothing is done.

        `lost`: hosts that were lost. Other hosts are preferred.
        `cut_off`: folders of trials that were interrupted. Their remaining processes are ended.
        """
