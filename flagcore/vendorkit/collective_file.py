"""Reads the measured collectives of a chip.

`costs/<chip>/collectives.yaml`, where `<chip>` is the chip's name in small letters, holds `source` as in a chip file
and `curves`: a list of `kind`, `ranks`, `payload_bytes` and `seconds`. They hold on the innermost level of the
topology, or on the one that `level` names. A chip with the links of another has `same_as` (that chip) and `source`.
"""

from __future__ import annotations

from importlib.resources import files

from flagcore.domain.chip import Chip, Source
from flagcore.errors import SpecError
from flagcore.physics.collectives.curves import CollectiveTable, Curve, problem
from flagcore.vendorkit.fields import build, entries, finish, read_yaml

FILE = "collectives.yaml"


def collective_table(package: str, chip: Chip) -> CollectiveTable | None:
    """Return the curves that `package` ships for `chip`, or None. Raises SpecError for a bad file."""
    return _table(package, chip.name.casefold(), seen=())


def read_collectives(text: str, file: str) -> CollectiveTable | str:
    """Return the table that `text` describes, or the name of the chip whose table it uses.

    Raises SpecError naming `file`, key, value, rule and fix.
    """
    content = read_yaml(text, file)
    source: Source = build(Source, content.pop("source", None), file, "source")
    same: str | None = build(str | None, content.pop("same_as", None), file, "same_as")
    if same is not None:
        finish(content, file, "a file with same_as has no curves of its own")
        return same.casefold()
    level: str = build(str, content.pop("level", ""), file, "level")
    curves = []
    for path, entry in entries(content, "curves", file):
        seconds = entry.get("seconds")
        if isinstance(seconds, list) and any(isinstance(each, int) for each in seconds):
            fix = "give seconds, e.g. 1.2e-05"
            raise SpecError(file=file, key=f"{path}seconds", value=seconds, problem="has whole numbers", fix=fix)
        curves.append(build(Curve, entry, file, path))
        if wrong := problem(CollectiveTable(curves=(curves[-1],), source="")):
            raise SpecError(file=file, key=path, problem=wrong)
    finish(content, file)
    table = CollectiveTable(level=level, curves=tuple(curves), source=f"{source.kind}: {source.detail}")
    if wrong := problem(table):
        raise SpecError(file=file, key="curves", problem=wrong)
    return table


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
