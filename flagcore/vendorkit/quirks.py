"""Reads `quirks.yaml`: what does not work on a vendor's chips, what its stack writes when it fails, and what to know.

- `support`: what is known of an engine: `engine`, `reason`, `source`, and `chips` (all); the first that fits counts.
- `refused`: values that do not work, of a knob, of a key of the job (`precision`) or of a setting (`settings.NAME`,
  `engine_args.NAME`): `name`, `engine`, `knob`, `values` or `above` (a number), `reason`, `source`, and `chips` (all).
- `forced`: settings that must be so: `name`, `engine`, `setting`, `value`, `reason`, `source`, and `chips` (all).
- `failures`: log lines: `pattern`, `state`, `example`, `source`, and `advice`; `engines` (all).
- `notes`: what no rule can say: `engines`, `says`, `source`, and `chips` (all).

Each may say for which releases of the engine it holds: `versions: ">=0.11,<0.13"`. Where nobody knows the release that
runs, it holds, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from flagcore.domain.chip import Chip, Source
from flagcore.domain.engine import Forced, Refused
from flagcore.domain.launch import FailurePattern
from flagcore.domain.trial import TrialState
from flagcore.vendorkit.fields import Part, read_parts
from flagcore.vendorkit.versions import concerns, versions_of

FILE = "quirks.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of how an engine runs on some chips (none named: all)."""

    engine: str
    chips: tuple[str, ...]
    reason: str
    source: Source
    versions: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Knob values that an engine does not take on some chips (none named: all)."""

    engine: str
    chips: tuple[str, ...]
    refused: Refused
    source: Source
    versions: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Must:
    """A setting that an engine needs on some chips (none named: all)."""

    engine: str
    chips: tuple[str, ...]
    forced: Forced
    source: Source
    versions: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A log line that says why a trial failed, with one `example` of it."""

    engines: tuple[str, ...]
    pattern: FailurePattern
    example: str
    source: Source
    versions: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What a user of these engines on these chips should know."""

    engines: tuple[str, ...]
    chips: tuple[str, ...]
    says: str
    source: Source
    versions: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quirks:
    """All that a plugin's file says."""

    support: tuple[Known, ...]
    refusals: tuple[Refusal, ...]
    forced: tuple[Must, ...]
    failures: tuple[Failure, ...]
    notes: tuple[Note, ...]


@cache
def quirks(package: str) -> Quirks:
    """Return the quirks of a plugin. Raises SpecError for a bad file."""
    file = f"{package}/{FILE}"
    parts = read_parts(files(package).joinpath(FILE).read_text("utf-8"), file, "a file of quirks")

    def each(key: str) -> list[Part]:
        listed = parts.listed(key, dict)
        return [Part(file, parts.kind, f"{key}[{place}].", entry) for place, entry in enumerate(listed)]

    made = Quirks(
        support=tuple(_known(part) for part in each("support")),
        refusals=tuple(_refusal(part) for part in each("refused")),
        forced=tuple(_must(part) for part in each("forced")),
        failures=tuple(_failure(part) for part in each("failures")),
        notes=tuple(_note(part) for part in each("notes")),
    )
    parts.finish()
    return made


def reason(package: str, chip: Chip, engine: str, engine_version: str | None = None) -> str:
    """Return what is known of how `engine` runs on `chip`; empty if nothing is."""
    found = quirks(package).support
    return next((each.reason for each in found if _concerns((each.engine,), each, chip, engine, engine_version)), "")


def refused(package: str, chip: Chip, engine: str, engine_version: str | None = None) -> tuple[Refused, ...]:
    """Return what `engine` does not take on `chip`."""
    found = quirks(package).refusals
    return tuple(each.refused for each in found if _concerns((each.engine,), each, chip, engine, engine_version))


def forced(package: str, chip: Chip, engine: str, engine_version: str | None = None) -> tuple[Forced, ...]:
    """Return the settings that `engine` needs on `chip`."""
    found = quirks(package).forced
    return tuple(each.forced for each in found if _concerns((each.engine,), each, chip, engine, engine_version))


def notes(package: str, chip: Chip, engine: str, engine_version: str | None = None) -> tuple[str, ...]:
    """Return what a user of `engine` on `chip` should know, each with its source."""
    found = (each for each in quirks(package).notes if _concerns(each.engines, each, chip, engine, engine_version))
    return tuple(f"{each.says} ({each.source.kind}: {each.source.detail})" for each in found)


def failure_patterns(package: str, engine: str, engine_version: str | None = None) -> tuple[FailurePattern, ...]:
    """Return the patterns of what `engine` writes."""
    return tuple(
        each.pattern
        for each in quirks(package).failures
        if (not each.engines or engine in each.engines) and concerns(each.versions, engine_version)
    )


def _concerns(
    engines: tuple[str, ...], each: Known | Refusal | Must | Note, chip: Chip, engine: str, engine_version: str | None
) -> bool:
    """Return whether something is said of this engine, chip and release; of none named, it is said of all."""
    named = (not engines or engine in engines) and (not each.chips or chip.name in each.chips)
    return named and concerns(each.versions, engine_version)


def _known(part: Part) -> Known:
    made = Known(
        engine=part.required("engine", str),
        chips=tuple(part.listed("chips", str)),
        reason=part.required("reason", str),
        source=part.source("source"),
        versions=versions_of(part),
    )
    part.finish()
    return made


def _must(part: Part) -> Must:
    made = Must(
        engine=part.required("engine", str),
        chips=tuple(part.listed("chips", str)),
        forced=Forced(
            name=part.required("name", str),
            setting=part.required("setting", str),
            value=part.content.pop("value", None),
            reason=part.required("reason", str),
        ),
        source=part.source("source"),
        versions=versions_of(part),
    )
    part.finish()
    return made


def _refusal(part: Part) -> Refusal:
    if not part.content.get("values") and part.content.get("above") is None:
        raise part.wrong("values", "is missing", "say which values, or above which number")
    made = Refusal(
        engine=part.required("engine", str),
        chips=tuple(part.listed("chips", str)),
        refused=Refused(
            name=part.required("name", str),
            knob=part.required("knob", str),
            values=tuple(part.listed("values", object)),
            above=part.optional("above", int, None),
            reason=part.required("reason", str),
        ),
        source=part.source("source"),
        versions=versions_of(part),
    )
    part.finish()
    return made


def _failure(part: Part) -> Failure:
    state = part.required("state", str)
    if state not in (known := [state.value for state in TrialState if state.failed]):
        raise part.wrong("state", "is no failure", f"use one of {', '.join(known)}", state)
    made = Failure(
        engines=tuple(part.listed("engines", str)),
        pattern=FailurePattern(
            pattern=part.required("pattern", str), state=TrialState(state), advice=part.optional("advice", str, "")
        ),
        example=part.required("example", str),
        source=part.source("source"),
        versions=versions_of(part),
    )
    part.finish()
    return made


def _note(part: Part) -> Note:
    made = Note(
        engines=tuple(part.listed("engines", str)),
        chips=tuple(part.listed("chips", str)),
        says=part.required("says", str),
        source=part.source("source"),
        versions=versions_of(part),
    )
    part.finish()
    return made
