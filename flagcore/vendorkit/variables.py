"""Reads `environment.yaml`: the variables that a vendor's stack knows, each with its meaning, condition and source.

`variables` is a list of `name`, `meaning`, `source` as in a chip file, and either `value`, what trials are given, or
`used`, what its source gives it where flagcore leaves it alone. `engines`, `chips` and `versions` (releases of the
engine) say for which it is given (all where they are missing), `condition` when it makes sense. Two conditions are
checked: `several_nodes: true`, and `unless`, a setting of training that must not be on. In a value, `{interface}` is
the network interface of the default route and `{adapters}` the InfiniBand adapters that are up; without them the
variable is not given.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from flagcore.domain.chip import Chip, Source
from flagcore.domain.spec import Task, TrainSpec
from flagcore.vendorkit.fields import Part, read_parts
from flagcore.vendorkit.versions import concerns, versions_of

FILE = "environment.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """One environment variable. `value` None: known, but not given to trials."""

    name: str
    value: str | None
    used: str
    meaning: str
    condition: str
    engines: tuple[str, ...]
    chips: tuple[str, ...]
    source: Source
    versions: str = ""
    several_nodes: bool = False
    unless: str = ""

    def concerns(self, chip: Chip, engine: str) -> bool:
        """Return whether it is for this chip and engine."""
        return (not self.engines or engine in self.engines) and (not self.chips or chip.name in self.chips)

    def holds(self, engine_version: str | None, task: Task | None) -> bool:
        """Return whether its conditions hold for a release of the engine and a task."""
        nodes = sum(group.nodes for group in task.cluster.groups) if task else 1
        settings = task.spec.work.settings if task and isinstance(task.spec.work, TrainSpec) else {}
        off = not (self.unless and settings.get(self.unless))
        return concerns(self.versions, engine_version) and (nodes > 1 or not self.several_nodes) and off


@cache
def variables(package: str) -> tuple[Variable, ...]:
    """Return the variables of a plugin. Raises SpecError for a bad file."""
    file = f"{package}/{FILE}"
    parts = read_parts(files(package).joinpath(FILE).read_text("utf-8"), file, "an environment file")
    found = tuple(
        _variable(Part(file, parts.kind, f"variables[{place}].", entry))
        for place, entry in enumerate(parts.listed("variables", dict))
    )
    parts.finish()
    return found


def environment(
    package: str, chip: Chip, engine: str, engine_version: str | None = None, task: Task | None = None
) -> dict[str, str]:
    """Return what trials of `task` are given; without one, what those of a single node are. The core lets a user's own
    values win, and tells of them."""
    given = {}
    for each in variables(package):
        if each.value and each.concerns(chip, engine) and each.holds(engine_version, task):
            value = filled(each.value)
            if value:
                given[each.name] = value
    return given


def filled(value: str, root: Path = Path("/")) -> str:
    """Return a value with what it says of this machine's network filled in; nothing where there is none of it."""
    for name, found in (("{interface}", interface(root)), ("{adapters}", adapters(root))):
        if name in value:
            if not found:
                return ""
            value = value.replace(name, found)
    return value


def interface(root: Path = Path("/")) -> str:
    """Return the network interface of the default route; nothing without one."""
    with suppress(OSError):
        for line in (root / "proc/net/route").read_text("utf-8").splitlines()[1:]:
            name, destination, *_ = line.split()
            if destination == "00000000":
                return name
    return ""


def adapters(root: Path = Path("/")) -> str:
    """Return the InfiniBand adapters with a port that is up, by commas, in the order of their numbers."""
    up = []
    for state in (root / "sys/class/infiniband").glob("*/ports/*/state"):
        with suppress(OSError):
            if "ACTIVE" in state.read_text("utf-8"):
                up.append(state.parts[-4])
    return ",".join(sorted(set(up), key=lambda name: (len(name), name)))


def _variable(part: Part) -> Variable:
    made = Variable(
        name=part.required("name", str),
        value=part.optional("value", str, None),
        used=part.optional("used", str, ""),
        meaning=part.required("meaning", str),
        condition=part.optional("condition", str, ""),
        engines=tuple(part.listed("engines", str)),
        chips=tuple(part.listed("chips", str)),
        source=part.source("source"),
        versions=versions_of(part),
        several_nodes=part.optional("several_nodes", bool, False),
        unless=part.optional("unless", str, ""),
    )
    if (made.value is None) == (made.used == ""):
        raise part.wrong("value", "and used exclude each other, and one of them is needed")
    part.finish()
    return made
