"""Exporters write a candidate as files that start it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from flagcore.contracts.platform import Platform
from flagcore.domain.candidate import Candidate
from flagcore.domain.launch import Launch


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
    with `per_server` it is one of `replicas` equal servers, or the first of `servers` of several kinds.
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
