"""Reads the measured collectives of a chip.

`costs/<chip>/collectives.yaml`, where `<chip>` is the chip's name in small letters, holds `source` as in a chip file
and `curves`: a list of `kind`, `ranks`, `payload_bytes` and `seconds`. They hold on the innermost level of the
topology, or on the one that `level` names. A chip with the links of another has `same_as` (that chip) and `source`.
"""

from __future__ import annotations

from importlib.resources import files

from flagcore.domain.chip import Chip
from flagcore.errors import SpecError
from flagcore.physics.collectives.curves import CollectiveTable, Curve, problem
from flagcore.vendorkit.fields import Part, read_parts

FILE = "collectives.yaml"


def collective_table(package: str, chip: Chip) -> CollectiveTable | None:
    """Return the curves that `package` ships for `chip`, or None. Raises SpecError for a bad file."""
    return _table(package, chip.name.casefold(), seen=())


def read_collectives(text: str, file: str) -> CollectiveTable | str:
    """Return the table that `text` describes, or the name of the chip whose table it uses.

    Raises SpecError naming `file`, key, value, rule and fix.
    """
    parts = read_parts(text, file, "a file of collectives")
    source = parts.source("source")
    same: str | None = parts.optional("same_as", str, None)
    if same is not None:
        parts.finish("a file with same_as has no curves of its own")
        return same.casefold()
    level: str = parts.optional("level", str, "")
    curves = tuple(_curve(part) for part in parts.each("curves"))
    parts.finish()
    table = CollectiveTable(level=level, curves=curves, source=f"{source.kind}: {source.detail}")
    if wrong := problem(table):
        raise parts.wrong("curves", wrong)
    return table


def _curve(part: Part) -> Curve:
    curve = Curve(
        kind=part.required("kind", str),
        ranks=part.required("ranks", int),
        payload_bytes=tuple(float(size) for size in part.listed("payload_bytes", int)),
        seconds=tuple(part.listed("seconds", float)),
    )
    part.finish()
    if wrong := problem(CollectiveTable(curves=(curve,), source="")):
        raise part.wrong("", wrong)
    return curve


def _table(package: str, name: str, seen: tuple[str, ...]) -> CollectiveTable | None:
    path, where = files(package).joinpath("costs").joinpath(name).joinpath(FILE), f"{package}/costs/{name}/{FILE}"
    if not path.is_file():
        if seen:
            raise SpecError(file=where, key="the file", problem=f"is missing; {seen[-1]} has it as same_as")
        return None
    found = read_collectives(path.read_text("utf-8"), where)
    if isinstance(found, CollectiveTable):
        return found
    if found in seen or found == name:
        raise SpecError(file=where, key="same_as", value=found, problem="is a cycle")
    return _table(package, found, (*seen, name))
