"""Reads `environment.yaml`: the environment variables of a vendor's software.

`variables` is a list of `name`, `meaning`, `source`, and either `value`, which is set for trials, or `used`, the value
in the source, which flagcore does not set. `engines`, `kinds`, `chips` and `versions` (releases of the engine) restrict
an entry, and `condition` describes when it applies. Two conditions are checked: `several_nodes: true`, and `unless`, a
training setting that must not be on. In a value, each host replaces `{interface}` by its network interface to the first
host and `{adapters}` by its InfiniBand adapters that are up; a host without such a device does not set the variable.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Annotated

from annotated_types import MinLen
from pydantic import Field

from flagcore.domain.chip import Chip, Source
from flagcore.domain.spec import Task, TrainSpec
from flagcore.vendorkit.fields import read_as
from flagcore.vendorkit.scope import Scope, applicable


@dataclass(frozen=True, kw_only=True)
class Variable(Scope):
    """One environment variable. `value` None: documented, but not set for trials."""

    name: Annotated[str, Field(pattern=r"^[A-Z_][A-Z0-9_]*$")]
    meaning: Annotated[str, MinLen(1)]
    source: Source
    value: str | None = None
    used: str = ""
    condition: str = ""
    several_nodes: bool = False
    unless: str = ""

    def __post_init__(self) -> None:
        if (self.value is None) == (self.used == ""):
            raise ValueError("needs `value` or `used`, and not both")

    def applies_to(self, task: Task | None) -> bool:
        """Return whether its conditions hold for a task; None means one node and no settings."""
        nodes = sum(group.nodes for group in task.cluster.groups) if task else 1
        settings = task.spec.work.settings if task and isinstance(task.spec.work, TrainSpec) else {}
        return (nodes > 1 or not self.several_nodes) and not (self.unless and settings.get(self.unless))


@dataclass(frozen=True)
class Variables:
    """The content of the file."""

    variables: tuple[Variable, ...] = ()


@cache
def read_variables(package: str) -> tuple[Variable, ...]:
    """Return the variables of a plugin; none without a file. Raises SpecError for a bad file."""
    return read_as(Variables, package, "environment.yaml").variables


def environment(
    package: str, chip: Chip, engine: str, engine_version: str | None, task: Task | None, kind: str
) -> dict[str, str]:
    """Return the variables that trials of `task` get; None: trials on one node."""
    variables = applicable(read_variables(package), chip, engine, engine_version, kind)
    return {each.name: each.value for each in variables if each.value and each.applies_to(task)}
