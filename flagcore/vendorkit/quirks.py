"""Reads `quirks.yaml` and `maturity.yaml`: what does not work on a vendor's chips, and the evidence of a plugin.

`quirks.yaml` has these sections:

- `support`: reports about an engine: `reason`, `works` (`true`, `false`) if it differs from that of `engines.yaml`, and
  `install`, the origin of the vendor's build of the engine. The first entry that applies is used.
- `refused`: values that do not work, of a knob, of a key of the job (`precision`) or of a setting (`settings.NAME`,
  `engine_args.NAME`): `name`, `knob`, `values` or `above` (a number), `reason`.
- `forced`: settings that must have one value: `name`, `setting`, `value`, `reason`.
- `preferred`: settings that trials get if the user does not set them: `setting`, `value`, `reason`. If a knob has the
  same name, `auto` in a space means this value.
- `warmup`: first training steps, or first requests of a load, that are too slow to count: `count`, `reason`.
- `failures`: log lines: `pattern`, `state`, `example`, and optionally `advice` and `weak` (counts only if no other
  pattern has a line).
- `notes`: sentences for users that no rule can express: `note`.

Each entry has its `source` and may name its `engine` (or `engines`), `kinds` (`train`, `serve`), `chips` and `versions`
of the engine (`">=0.11,<0.13"`); a missing key means all. An entry also applies if the release is unknown.

`maturity.yaml` lists the parts of a plugin that ran on real devices, were checked on transcripts, or are from
documents: `run_on_hardware` has entries with `what`, `chips`, `date`, `software`; `checked_on_transcripts` with `what`,
`tool`, `chips`, `files` of the plugin's `tests/smi`; `from_documents` with `what`, `chips`; `not_checked` has
sentences.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Annotated

from annotated_types import Ge

from flagcore.domain import engine
from flagcore.domain.chip import Maturity, Source
from flagcore.domain.launch import FailurePattern
from flagcore.domain.space import KnobValue
from flagcore.vendorkit.fields import Scope, build, entries, read_as, read_file


@dataclass(frozen=True, kw_only=True)
class Quirk(Scope):
    """One entry of the file."""

    source: Source


@dataclass(frozen=True, kw_only=True)
class Report(Quirk):
    """What was reported about an engine. If `works` is None, see `engines.yaml`."""

    reason: str = ""
    works: bool | None = None
    install: str = ""


@dataclass(frozen=True, kw_only=True)
class RefusedValues(engine.RefusedValues, Quirk):
    """Values that do not work."""

    values: tuple[KnobValue, ...] = ()

    def __post_init__(self) -> None:
        if not self.values and self.above is None:
            raise ValueError("has neither `values` nor `above` with a number")


@dataclass(frozen=True, kw_only=True)
class ForcedSetting(engine.ForcedSetting, Quirk):
    """A setting that must have one value."""


@dataclass(frozen=True, kw_only=True)
class PreferredSetting(engine.PreferredSetting, Quirk):
    """A setting that trials get if the user does not set it."""


@dataclass(frozen=True, kw_only=True)
class Warmup(Quirk):
    """The number of first steps or requests that do not count."""

    count: Annotated[int, Ge(1)]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Failure(FailurePattern, Quirk):
    """A log line that explains why a trial failed, with one `example` of it."""

    example: str


@dataclass(frozen=True, kw_only=True)
class Note(Quirk):
    """A sentence for users."""

    note: str


@dataclass(frozen=True, kw_only=True)
class Quirks:
    """The entries of a plugin's file."""

    support: tuple[Report, ...] = ()
    refused: tuple[RefusedValues, ...] = ()
    forced: tuple[ForcedSetting, ...] = ()
    preferred: tuple[PreferredSetting, ...] = ()
    warmup: tuple[Warmup, ...] = ()
    failures: tuple[Failure, ...] = ()
    notes: tuple[Note, ...] = ()


@cache
def read_quirks(package: str) -> Quirks:
    """Return the quirks of a plugin; none without a file. Raises SpecError for a bad file."""
    return read_as(Quirks, package, "quirks.yaml")


EVIDENCE = {"run_on_hardware": ("software", "date"), "checked_on_transcripts": ("tool",), "from_documents": ()}
"""The sections, with the keys that each claim must have in addition to `what`, `chips` and `files`."""


@cache
def read_maturity(package: str) -> Maturity | None:
    """Return the maturity of a plugin's data; None without a file. Raises SpecError for a bad file."""
    content, file = read_file(package, "maturity.yaml"), f"{package}/maturity.yaml"
    if content is None:
        return None
    for section, keys in EVIDENCE.items():
        claims = []
        for path, entry in entries(content, section, file):
            texts = [entry.pop(key, None) for key in keys]
            for key, value in zip(keys, texts, strict=True):
                build(str, value, file, f"{path}{key}")
            claims.append({**entry, "by": ", ".join(texts)})
        content[section] = claims
    maturity: Maturity = build(Maturity, content, file)
    return maturity
