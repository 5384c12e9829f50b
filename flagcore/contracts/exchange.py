"""Importers and exporters.

An importer converts files of another tuner to a spec or to trials. Importers are registered in the entry point group
`flagcore.importers`. An exporter writes files that start a candidate. A page writer shows a run, and is registered in
`flagcore.pages`.
"""

import os
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from flagcore.contracts.engine import Platform
from flagcore.domain.chip import Chip
from flagcore.domain.launch import Launch, ServerGroups
from flagcore.domain.space import Axis, Candidate, KnobValue
from flagcore.domain.spec import ImportNote, Task
from flagcore.domain.trial import Trial
from flagcore.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedSpec:
    """An imported spec as plain data with absolute paths, and notes on keys that are dropped or changed.

    `file`: the file that was read. Empty if there is none.
    """

    data: dict[str, Any]
    notes: tuple[ImportNote, ...]
    file: str = ""

    def translate_error(self, error: SpecError) -> SpecError:
        """Convert an error about a key of the spec to one about the key of the imported file; by default unchanged."""
        return error


class Importer(Protocol):
    """Reads the configuration of another tuner."""

    name: str
    title: str
    """The name of the other tuner in messages."""
    has_trees: bool
    """Whether a configuration is a directory of hydra files, which `flag tune --config-path` also reads.

    Otherwise it is one file, or the name of a recipe.
    """

    def read_tree(
        self, directory: Path, name: str, overrides: Sequence[str] = (), chips: Callable[[], Sequence[Chip]] = tuple
    ) -> ImportedSpec:
        """Return the configuration `name` in `directory`. Raises SpecError.

        `overrides`: changes of its keys, such as `a.b=c`. `chips`: a function that returns the chips of all plugins.
        """


class PageWriter(Protocol):
    """Shows a run to users as one HTML page."""

    def as_html(self, run: Any) -> str:
        """Return the page of a run, which is a `flagcore.report.run.RunData`."""


FindCandidate = Callable[[Mapping[str, KnobValue]], Candidate]
"""A function that returns the candidate with the given knob values. It raises UsageError if the space does not contain
the candidate."""


@runtime_checkable
class HistoryReader(Protocol):
    """An optional interface of importers that can also read the other tuner's trials."""

    def read_history(
        self, path: Path, task: Task, axes: Sequence[Axis], find: FindCandidate
    ) -> tuple[tuple[Trial, ...], tuple[str, ...]]:
        """Return the trials in a file in the order in which they ran, and notes on skipped rows and columns.

        `task`: the job that was tuned. `axes`: the knobs of its space. `find`: returns the candidate with given values.

        The trials have no predictions, and the caller ignores their numbers. Raises UsageError if the file does not
        contain trials of the same kind of job.
        """


ADDRESS = "{address}"
_CONNECT = (  # the name of this host may be that of a loopback address
    "import socket, sys; a = [(s.connect_ex((h, 9)), s.getsockname()[0])[1] for h in sys.argv[1:] "
    'for s in [socket.socket(2, 2)]]; print(next((x for x in a if x[:4] not in ("127.", "0.0.")), a[0]))'
)
_ADDRESS = f"""(python3 -c '{_CONNECT}' "${{MASTER_ADDR:-192.0.2.1}}" 192.0.2.1)"""
_OF_ADDRESS = f"""ip -o address show to "${_ADDRESS}" 2> /dev/null | awk '$2 != "lo" {{print $2}}' | grep ."""
_OF_DEFAULT_ROUTE = """awk '$2 == "00000000" {print $1; exit}' /proc/net/route"""
DEVICES_OF_HOST = {
    ADDRESS: _ADDRESS,
    "{interface}": f"({_OF_ADDRESS} || {_OF_DEFAULT_ROUTE})",
    "{adapters}": "(grep -ls ACTIVE /sys/class/infiniband/*/ports/*/state | cut -d/ -f5 | sort -u | paste -sd, -)",
}
"""Placeholders of network devices in scripts, and the shell commands that replace them. The commands run on each host,
because the names of network devices differ between hosts."""


ANY_HOST = "{{host_{}}}"
"""A placeholder for the name of a host, with the number of the host: the target decides on which hosts a job runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportJob:
    """A candidate to export.

    `comments`: lines that describe the candidate and its knobs.
    `launch`: starts the candidate with its whole environment. For an exporter with `per_server`, it starts one of
    `replicas` identical servers, or the first of `servers`. It is empty if the candidate's engine is the exporter.
    `devices`: the number of devices per node that `launch` uses.
    `image`: the published image of a server, or empty.
    `options`: the user's options: `image` of containers; of Kubernetes also `kind` of a job, `volume` as CLAIM:PATH,
    `queue`, `rdma` and `resource` (resources), `user` and `replicas` (numbers) and `pods`, a file with fields of pods.
    `servers`: the servers, if the candidate has several kinds of them.
    """

    name: str
    comments: tuple[str, ...]
    platform: Platform
    candidate: Candidate
    launch: Launch
    devices: int
    replicas: int = 1
    image: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    servers: ServerGroups | None = None

    @property
    def nodes(self) -> int:
        """The number of nodes of the job: one for servers that run on one host."""
        return 1 if self.launch.ready else sum(group.nodes for group in self.platform.task.cluster.groups)

    @property
    def is_server(self) -> bool:
        """Whether the job is a serving job. If it is, and `launch.ready` is empty, the servers run on several hosts."""
        return not self.platform.task.spec.work.has_steps

    @property
    def unequal_nodes(self) -> bool:
        """Whether the engine's own program runs on several kinds of nodes, which need different variables and flags."""
        return bool(self.launch.sample) and len({each.kind for each in self.platform.setups}) > 1


@runtime_checkable
class Exporter(Protocol):
    """An optional interface of engines, launchers and importers that can export candidates to further targets.

    `most_vendors`: the number of vendors whose nodes of several kinds it starts, each with its own flags; default 0.
    """

    targets: Mapping[str, Collection[str]]
    """The names of the targets, for `flag export --to`, each with the options of `ExportJob` that it reads."""
    per_server: bool
    """Whether the target starts all replicas of a server itself, and needs only the launch of one."""

    def export(self, job: ExportJob, target: str) -> Mapping[str, str]:
        """Return the content of each exported file by its name. Raises UsageError if the target cannot run the job."""


def comments(job: ExportJob) -> list[str]:
    """Return the comment lines at the top of an exported file."""
    program = next((word for word in job.launch.argv if word.endswith(".py")), "/")
    place = [] if job.launch.directory or os.path.isabs(program) else [f"Start it in the folder of {program}."]
    return [f"# {line}" for line in (*job.comments, *place)]


def shell_quoted(word: str, variables: Mapping[str, str]) -> str:
    """Quote a word for a shell. Each key of `variables` in the word is replaced by a reference to its variable."""
    for value, name in variables.items():
        before, found, after = word.partition(value)
        if found:
            ends: Sequence[str] = [shell_quoted(each, variables) if each else "" for each in (before, after)]
            return f'{ends[0]}"${name}"{ends[1]}'
    return shlex.quote(word)
