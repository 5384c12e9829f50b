"""Exporters write a candidate as files that start it."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from flagcore.contracts.platform import Platform
from flagcore.domain.candidate import Candidate
from flagcore.domain.cluster import NodeGroup
from flagcore.domain.launch import Launch
from flagcore.domain.serving import ServeSpec
from flagcore.errors import UsageError
from flagcore.i18n import _


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerGroup:
    """Equal servers of a candidate that has several kinds of them.

    `launch` starts one of them; its environment may have the placeholder `{own_address}`. It uses `devices`.
    """

    name: str
    launch: Launch
    devices: int
    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerGroups:
    """All kinds of servers, and the Python program in front of them: its source and its arguments.

    Server N of a group is at the host JOB-GROUP-N.JOB-GROUP.
    """

    groups: tuple[ServerGroup, ...]
    program: str
    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportJob:
    """A candidate to export. `launch` starts it, with its whole environment.

    `comments` describe the candidate and its knobs, one line each. `launch` uses `devices` of a node; for an exporter
    with `per_server` it is one of `replicas` equal servers, or the first of `servers` of several kinds. For the engine
    of the candidate it is empty.
    `options` are those of the user: `image` of containers, `kind` of a Kubernetes job, and `volume` as CLAIM:PATH.
    """

    name: str
    comments: tuple[str, ...]
    platform: Platform
    candidate: Candidate
    launch: Launch
    devices: int
    replicas: int = 1
    options: Mapping[str, str] = field(default_factory=dict)
    servers: ServerGroups | None = None

    @property
    def nodes(self) -> int:
        """The number of nodes of the job."""
        return sum(group.nodes for group in self.platform.task.cluster.groups)

    @property
    def is_server(self) -> bool:
        """Whether the candidate serves; without `launch.ready`, its servers are on several hosts."""
        return isinstance(self.platform.task.spec.work, ServeSpec)

    @property
    def unequal_nodes(self) -> bool:
        """Whether the engine's own program runs on several kinds of nodes, which need different variables and flags."""
        return bool(self.launch.sample) and len({each.kind for each in self.platform.setups}) > 1


@runtime_checkable
class Exporter(Protocol):
    """Optional: an engine, launcher or importer that writes the files of further targets than its own script."""

    targets: Collection[str]
    """The names of the targets for `flag export --to`."""
    per_server: bool
    """Whether it starts several servers by itself."""

    def export(self, job: ExportJob, target: str) -> Mapping[str, str]:
        """Return the text of each file by its name. Raises UsageError for a job that the target does not support."""


@runtime_checkable
class Replicas(Protocol):
    """Optional: an engine whose candidates are several servers."""

    def groups(self, platform: Platform, candidate: Candidate, name: str) -> ServerGroups | None:
        """Return the kinds of servers of a candidate for the job `name`; None if all are equal. Raises UsageError."""

    def replica(self, candidate: Candidate) -> tuple[Candidate, int]:
        """Return the candidate of one server, and the number of servers. Raises UsageError if they differ."""


def claim_and_mount(volume: str) -> tuple[str, str]:
    """Return the claim and the mount point of `--volume`, empty for none. Raises UsageError."""
    claim, _separator, mount = volume.partition(":")
    if volume and not (claim and mount.startswith("/")):
        raise UsageError(_("--volume = {volume}: use CLAIM:PATH, such as data:/data", volume=volume))
    return claim, mount


def device_limits(platform: Platform, devices: int) -> Mapping[str, int]:
    """Return the device limits of a pod. Raises UsageError if no plugin has the name of the resource."""
    groups, support = platform.task.cluster.groups, platform.support
    if len(groups) > 1:
        raise UsageError(_("a job for several kinds of chips is not supported: all pods are equal"))
    group: NodeGroup = groups[0]
    if support.shared_devices:
        return {"cpu": devices}
    if support.kubernetes is None:
        raise UsageError(_("no installed plugin defines the Kubernetes resource of {chip}", chip=group.chip.name))
    each = group.chip.devices_per_card if support.kubernetes.counts == "cards" else 1
    return {support.kubernetes.name: -(-devices // each)}


def comments(job: ExportJob) -> list[str]:
    """Return the comments at the top of a file."""
    program = next((word for word in job.launch.argv if word.endswith(".py")), "/")
    place = [] if job.launch.directory or os.path.isabs(program) else [f"Start it in the folder of {program}."]
    return [f"# {line}" for line in (*job.comments, *place)]
