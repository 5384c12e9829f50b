"""Reads `environment.yaml`: the variables that a vendor's stack knows, each with its meaning, condition and source.

`variables` is a list of `name`, `meaning`, `source` as in a chip file, and either `value`, what trials are given, or
`used`, what its source gives it where flagcore leaves it alone. `engines` and `chips` say for which it is given (all
where they are missing), `condition` when it makes sense.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from flagcore.domain.chip import Chip, Source
from flagcore.vendorkit.parts import Part, read_parts

LOG = logging.getLogger(__name__)
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

    def concerns(self, chip: Chip, engine: str) -> bool:
        """Return whether it is for this chip and engine."""
        return (not self.engines or engine in self.engines) and (not self.chips or chip.name in self.chips)


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


def environment(package: str, chip: Chip, engine: str, own: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return what trials are given. A variable that the user has set already keeps its value; a conflict is told."""
    given = os.environ if own is None else own
    wanted = {each.name: each.value for each in variables(package) if each.value and each.concerns(chip, engine)}
    for name, value in wanted.items():
        if given.get(name, value) != value:
            LOG.warning("%s=%s of this shell is kept; %s on %s wants %s", name, given[name], engine, chip.name, value)
    return {name: str(given.get(name, value)) for name, value in wanted.items()}


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
    )
    if (made.value is None) == (made.used == ""):
        raise part.wrong("value", "and used exclude each other, and one of them is needed")
    part.finish()
    return made
