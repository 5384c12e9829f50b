"""The scope of an entry in a plugin's file: engines, chips and engine releases."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar, get_args

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field

from flagcore.domain.chip import Chip
from flagcore.domain.knob import in_versions

Kind = Literal["train", "serve"]
"""The kind of an engine."""
KINDS: tuple[str, ...] = get_args(Kind)


def _several(words: object) -> object:
    return (words,) if isinstance(words, str) else tuple(words) if isinstance(words, list) else words


def _range(text: str) -> str:
    try:
        SpecifierSet(text)
    except InvalidSpecifier:
        raise ValueError('invalid range of releases; write e.g. ">=0.11,<0.13"') from None
    return text


@dataclass(frozen=True, kw_only=True)
class Scope:
    """The engines, kinds of engines, chips and engine releases of an entry. An empty field means all.

    `versions` is a range such as ">=0.11,<0.13". In a file, `engine` is also valid for `engines`.
    """

    engines: Annotated[
        tuple[str, ...], Field(validation_alias=AliasChoices("engines", "engine")), BeforeValidator(_several)
    ] = ()
    kinds: tuple[Kind, ...] = ()
    chips: tuple[str, ...] = ()
    versions: Annotated[str, AfterValidator(_range)] = ""

    def includes(self, chip: Chip, engine: str, engine_version: str | None = None, kind: str = "") -> bool:
        """Return whether the entry applies. An unknown release is included."""
        return (
            (not self.engines or engine in self.engines)
            and (not self.kinds or kind in self.kinds)
            and (not self.chips or chip.name in self.chips)
            and in_versions(self.versions, engine_version)
        )


S = TypeVar("S", bound=Scope)


def applicable(
    entries: Iterable[S], chip: Chip, engine: str, engine_version: str | None = None, kind: str = ""
) -> tuple[S, ...]:
    """Return the entries that apply to an engine on a chip."""
    return tuple(each for each in entries if each.includes(chip, engine, engine_version, kind))
