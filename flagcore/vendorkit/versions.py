"""Ranges of engine releases: `versions: ">=0.11,<0.13"` in a plugin's files."""

from __future__ import annotations

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from flagcore.vendorkit.fields import Part


def read_versions(part: Part) -> str:
    """Return the range under `versions`, empty for all releases. Raises SpecError for an invalid range."""
    versions: str = part.optional("versions", str, "")
    try:
        SpecifierSet(versions)
    except InvalidSpecifier:
        raise part.wrong("versions", "invalid range of releases", 'write e.g. ">=0.11,<0.13"', versions) from None
    return versions


def in_range(versions: str, engine_version: str | None) -> bool:
    """Return whether `engine_version` is in `versions`; True if the release is unknown."""
    try:
        release = Version(engine_version or "")
    except InvalidVersion:
        return True
    return SpecifierSet(versions).contains(release, prereleases=True)
