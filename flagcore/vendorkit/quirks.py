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

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Generic, TypeVar

from flagcore.domain.chip import Chip, Source
from flagcore.domain.engine import Forced, Refused
from flagcore.domain.launch import FailurePattern
from flagcore.domain.trial import TrialState
from flagcore.vendorkit.fields import Part, read_file
from flagcore.vendorkit.scope import Scope, read_scope

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

    reason: str
    works: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A log line that says why a trial failed, with one `example` of it."""

    pattern: FailurePattern
    example: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Quirks:
    """The entries of a plugin's file."""

    support: tuple[Quirk[Report], ...] = ()
    refused: tuple[Quirk[Refused], ...] = ()
    forced: tuple[Quirk[Forced], ...] = ()
    failures: tuple[Quirk[Failure], ...] = ()
    notes: tuple[Quirk[str], ...] = ()


def applying(
    quirks: tuple[Quirk[T], ...], chip: Chip, engine: str, engine_version: str | None = None, kind: str = ""
) -> tuple[Quirk[T], ...]:
    """Return the entries that apply to an engine on a chip."""
    return tuple(quirk for quirk in quirks if quirk.scope.includes(chip, engine, engine_version, kind))


@cache
def read_quirks(package: str) -> Quirks:
    """Return the quirks of a plugin; none without a file. Raises SpecError for a bad file."""
    parts = read_file(package, FILE, "a file of quirks")
    if parts is None:
        return Quirks()

    def entries(key: str, read: Callable[[Part], T]) -> tuple[Quirk[T], ...]:
        return tuple(_quirk(part, read) for part in parts.each(key))

    quirks = Quirks(
        support=entries("support", _report),
        refused=entries("refused", _refused),
        forced=entries("forced", _forced),
        failures=entries("failures", _failure),
        notes=entries("notes", lambda part: str(part.required("note", str))),
    )
    parts.finish()
    return quirks


def _quirk(part: Part, read: Callable[[Part], T]) -> Quirk[T]:
    quirk = Quirk(value=read(part), scope=read_scope(part), source=part.source("source"))
    part.finish()
    return quirk


def _report(part: Part) -> Report:
    return Report(reason=part.optional("reason", str, ""), works=part.optional("works", bool, None))


def _refused(part: Part) -> Refused:
    if not part.content.get("values") and part.content.get("above") is None:
        raise part.wrong("values", "is missing", "give `values`, or `above` with a number")
    return Refused(
        name=part.required("name", str),
        knob=part.required("knob", str),
        values=tuple(part.listed("values", object)),
        above=part.optional("above", int, None),
        reason=part.required("reason", str),
    )


def _forced(part: Part) -> Forced:
    return Forced(
        name=part.required("name", str),
        setting=part.required("setting", str),
        value=part.content.pop("value", None),
        reason=part.required("reason", str),
    )


def _failure(part: Part) -> Failure:
    state = part.choice("state", [state.value for state in TrialState if state.failed])
    advice = part.optional("advice", str, "")
    pattern = FailurePattern(pattern=part.required("pattern", str), state=TrialState(state), advice=advice)
    return Failure(pattern=pattern, example=part.required("example", str))
