"""Importers convert files of another tuner to a spec or to trials; exporters write a candidate as files that start it.

Importers are in the entry point group `flagcore.importers`.
"""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from flagcore.contracts.platform import Platform
from flagcore.domain.chip import Chip
from flagcore.domain.cluster import NodeGroup
from flagcore.domain.launch import Launch
from flagcore.domain.serving import ServeSpec
from flagcore.domain.space import Candidate, KnobValue
from flagcore.errors import SpecError, UsageError
from flagcore.i18n import _


@dataclass(frozen=True, slots=True)
class ImportNote:
    """A note on the conversion of a key of the other tuner. `at` is the related key of the spec; empty: none."""

    key: str
    text: str
    at: str = ""

    def __str__(self) -> str:
        return f"{self.key}: {self.text}"


class ImportedSpec(Protocol):
    """The data of a spec, with absolute paths, read from `file`."""

    @property
    def data(self) -> dict[str, Any]: ...
    @property
    def notes(self) -> Sequence[ImportNote]: ...
    @property
    def file(self) -> str: ...

    def translate_error(self, error: SpecError) -> SpecError:
        """Return an error of the spec with the key of the other tuner's file."""

    def as_yaml(self) -> str:
        """Return the spec as YAML, with the notes as comments."""


class Importer(Protocol):
    """Reads the configuration of another tuner."""

    name: str
    title: str
    """The name of the other tuner in messages."""
    has_trees: bool
    """Whether configs are hydra's trees, which `flag tune --config-path` also reads. Otherwise a config is one file, or
    the name of a recipe.
    """

    def read_tree(
        self, directory: Path, name: str, overrides: Sequence[str] = (), chips: Callable[[], Sequence[Chip]] = tuple
    ) -> ImportedSpec:
        """Return the configuration `name` in `directory` with `overrides` such as `a.b=c`. Raises SpecError.

        `chips` returns the chips of all plugins.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRow:
    """One trial of another tuner.

    `line` is its line in the file, where the heading is line 1; `index` is its number. `step_s` is the mean time of a
    training step, `figures` are the figures of a server by flagcore's names, and `error` is the reason if there are
    none. `split` is whether the first or last pipeline stage has another number of layers. `cut` is whether the tuner
    ended the trial early. `refused` is the reason why the row cannot be imported; empty if it can.
    """

    line: int
    index: int
    knobs: Mapping[str, KnobValue]
    engine: str | None
    step_s: float | None
    figures: Mapping[str, float]
    reserved_bytes: int | None
    out_of_memory: bool
    error: str | None
    elapsed_s: float
    split: bool
    cut: bool
    refused: str


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The trials of another tuner in the order in which they ran. `serves` is whether they are serving trials.

    `time_limit_s` is the other tuner's default time limit of a trial.
    """

    rows: tuple[HistoryRow, ...]
    serves: bool
    time_limit_s: float


@runtime_checkable
class HistoryReader(Protocol):
    """Optional: an importer that also reads the trials of the other tuner."""

    def read_history(self, path: Path) -> History:
        """Return the trials in a file. Raises UsageError if it is not a history."""


DEVICES_OF_HOST = {
    "{interface}": """(awk '$2 == "00000000" {print $1; exit}' /proc/net/route)""",
    "{adapters}": "(grep -ls ACTIVE /sys/class/infiniband/*/ports/*/state | cut -d/ -f5 | sort -u | paste -sd, -)",
}
"""Shell commands for the placeholders of network devices, because each host of a script has its own."""


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
    """All kinds of servers, and how the router in front of them is started.

    Server N of a group is at the host JOB-GROUP-N.JOB-GROUP.
    """

    groups: tuple[ServerGroup, ...]
    front: Launch


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


class ManifestWriter(Protocol):
    """Optional: a launcher that also writes the job in which it runs trials."""

    def manifest(
        self, platform: Platform, spec: Path, *, name: str, kind: str, image: str, volume: str
    ) -> tuple[dict[str, Any], list[str]]:
        """Return the manifest of a job that tunes the spec of `platform`, and notes for the user."""


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
