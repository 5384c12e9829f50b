"""Exporters write a candidate as files that start it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from flagcore.contracts.platform import Platform
from flagcore.domain.candidate import Candidate
from flagcore.domain.launch import Launch


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportJob:
    """A candidate to export. `launch` starts it, with its whole environment.

    `comments` describe the candidate and its knobs, one line each. `launch` uses `devices` of a node; for an exporter
    with `per_server` it is one of `replicas` equal servers.
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

    def replica(self, candidate: Candidate) -> tuple[Candidate, int]:
        """Return the candidate of one server, and the number of servers. Raises UsageError if they differ."""
