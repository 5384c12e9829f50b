"""For which releases of an engine something is said: `versions: ">=0.11,<0.13"` in a plugin's files."""

from __future__ import annotations

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from flagcore.vendorkit.fields import Part


def versions_of(part: Part) -> str:
    """Return the releases under `versions`, nothing for all. Raises SpecError for what is no range."""
    given: str = part.optional("versions", str, "")
    try:
        SpecifierSet(given)
    except InvalidSpecifier:
        raise part.wrong("versions", "is no range of releases", 'write e.g. ">=0.11,<0.13"', given) from None
    return given


def concerns(versions: str, engine_version: str | None) -> bool:
    """Return whether `engine_version` is among `versions`. A release that is not known, or no number, may be."""
    try:
        release = Version(engine_version or "")
    except InvalidVersion:
        return True
    return SpecifierSet(versions).contains(release, prereleases=True)
