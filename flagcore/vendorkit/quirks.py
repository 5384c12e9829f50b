"""Reads `quirks.yaml`: what does not work on a vendor's chips, what its software logs on failure, and what to know.

- `support`: what was reported of an engine: `reason`, and `works` (`true`, `false`) if it differs from that of
  `engines.yaml`. The first entry that applies counts.
- `refused`: values that do not work, of a knob, of a key of the job (`precision`) or of a setting (`settings.NAME`,
  `engine_args.NAME`): `name`, `knob`, `values` or `above` (a number), `reason`.
- `forced`: settings that must have one value: `name`, `setting`, `value`, `reason`.
- `failures`: log lines: `pattern`, `state`, `example`, and optionally `advice`.
- `notes`: sentences for users that no rule can express: `note`.

Each entry has its `source` and may name its `engine` (or `engines`), `kinds` (`train`, `serve`), `chips` and
`versions` of the engine (`">=0.11,<0.13"`); what is missing means all. An entry also applies if the release is unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Generic, TypeVar

from flagcore.domain.chip import Chip, Source
from flagcore.domain.engine import Forced, Refused
from flagcore.domain.launch import FailurePattern
from flagcore.errors import SpecError
from flagcore.vendorkit.fields import Content, build, finish, read_file
from flagcore.vendorkit.scope import Scope, scoped

FILE = "quirks.yaml"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quirk(Generic[T]):
    """One entry of the file."""

    value: T
    scope: Scope
    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was reported of an engine. `works` None: see `engines.yaml`."""

    reason: str = ""
    works: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure(FailurePattern):
    """A log line that says why a trial failed, with one `example` of it."""

    example: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A sentence for users."""

    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Quirks:
    """The entries of a plugin's file."""

    support: tuple[Quirk[Report], ...] = ()
    refused: tuple[Quirk[Refused], ...] = ()
    forced: tuple[Quirk[Forced], ...] = ()
    failures: tuple[Quirk[Failure], ...] = ()
    notes: tuple[Quirk[Note], ...] = ()


def applying(
    quirks: tuple[Quirk[T], ...], chip: Chip, engine: str, engine_version: str | None = None, kind: str = ""
) -> tuple[Quirk[T], ...]:
    """Return the entries that apply to an engine on a chip."""
    return tuple(quirk for quirk in quirks if quirk.scope.includes(chip, engine, engine_version, kind))


@cache
def read_quirks(package: str) -> Quirks:
    """Return the quirks of a plugin; none without a file. Raises SpecError for a bad file."""
    content, file = read_file(package, FILE) or {}, f"{package}/{FILE}"

    def quirks(section: str, kind: type[T]) -> tuple[Quirk[T], ...]:
        return tuple(_quirk(kind, entry, scope, file, path) for path, entry, scope in scoped(content, section, file))

    found = Quirks(
        support=quirks("support", Report),
        refused=quirks("refused", Refused),
        forced=quirks("forced", Forced),
        failures=quirks("failures", Failure),
        notes=quirks("notes", Note),
    )
    finish(content, file)
    return found


def _quirk(kind: type[T], entry: Content, scope: Scope, file: str, path: str) -> Quirk[T]:
    source = build(Source, entry.pop("source", None), file, f"{path}source")
    if kind is Refused and not entry.get("values") and entry.get("above") is None:
        problem, fix = "is missing", "give `values`, or `above` with a number"
        raise SpecError(file=file, key=f"{path}values", problem=problem, fix=fix)
    return Quirk(value=build(kind, entry, file, path), scope=scope, source=source)
