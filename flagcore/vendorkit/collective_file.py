"""Reads the measured collectives of a chip.

`costs/<chip>/collectives.yaml`, where `<chip>` is the chip's name in lower case, has `source` as in a chip file and
`curves`: a list of `kind`, `ranks`, `payload_bytes` and `seconds`. They apply to the innermost level of the topology,
or to the level that `level` names. A chip with the same links as another chip has `same_as` (that chip) and `source`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

from flagcore.domain.chip import Chip, Source
from flagcore.errors import SpecError
from flagcore.physics.collectives.curves import CollectiveTable, Curve
from flagcore.vendorkit.fields import build, read_yaml

FILE = "collectives.yaml"


@dataclass(frozen=True, kw_only=True)
class CollectiveFile:
    """The content of a file."""

    source: Source
    same_as: str | None = None
    level: str = ""
    curves: tuple[Curve, ...] = ()


def collective_table(package: str, chip: Chip) -> CollectiveTable | None:
    """Return the curves that `package` ships for `chip`, or None. Raises SpecError for a bad file."""
    return _table(package, chip.name.casefold(), seen=())


def read_collectives(text: str, file: str) -> CollectiveTable | str:
    """Return the table that `text` describes, or the name of the chip whose table it uses.

    Raises SpecError naming `file`, key, value, rule and fix.
    """
    found: CollectiveFile = build(CollectiveFile, read_yaml(text, file), file)
    if found.same_as is not None:
        if found.curves:
            raise SpecError(file=file, key="curves", problem="a file with same_as cannot have curves")
        return found.same_as.casefold()
    source = f"{found.source.kind}: {found.source.detail}"
    try:
        return CollectiveTable(level=found.level, curves=found.curves, source=source)
    except ValueError as error:
        raise SpecError(file=file, key="curves", problem=str(error)) from None


def _table(package: str, name: str, seen: tuple[str, ...]) -> CollectiveTable | None:
    path, location = files(package).joinpath("costs").joinpath(name).joinpath(FILE), f"{package}/costs/{name}/{FILE}"
    if not path.is_file():
        if seen:
            raise SpecError(file=location, key="the file", problem=f"is missing; {seen[-1]} has it as same_as")
        return None
    found = read_collectives(path.read_text("utf-8"), location)
    if isinstance(found, CollectiveTable):
        return found
    if found in seen or found == name:
        raise SpecError(file=location, key="same_as", value=found, problem="is a cycle")
    return _table(package, found, (*seen, name))
