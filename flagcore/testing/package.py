"""What a plugin's distribution says of itself: from its source folder if that is here, else as it is installed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

from flagcore.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

GROUP = "flagcore.plugins"


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A distribution. `folder` is its source folder, None where only the installed package is here."""

    name: str
    version: str
    description: str = ""
    license: str = ""
    readme: str = ""
    requires: tuple[str, ...] = ()
    points: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None
    paths: tuple[Path, ...] = ()
    """Folders from which its modules are imported where it is not installed."""


def source_of(package_folder: Path, module: str) -> Package | None:
    """Return the distribution whose source folder a package lies in, or None: it was installed from a wheel."""
    for folder in (package_folder.parent, package_folder.parent.parent):
        if (folder / "pyproject.toml").is_file():
            with suppress(UsageError):
                found = read_source(folder)
                package = module.partition(".")[0]
                if any(value.partition(".")[0].partition(":")[0] == package for value in found.points.values()):
                    return found
    return None


def read_source(folder: Path) -> Package:
    """Return the distribution in `folder`. Raises UsageError where it holds none that is a plugin."""
    file = folder / "pyproject.toml"
    try:
        content: dict[str, Any] = tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise UsageError(
            f"{file} cannot be read ({error.strerror}); give the folder of a plugin's pyproject"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} is not TOML: {error}") from error
    project = content.get("project")
    points = project.get("entry-points", {}).get(GROUP) if isinstance(project, dict) else None
    if not isinstance(project, dict) or not isinstance(points, dict) or not points:
        raise UsageError(f'{file} names no plugin; add [project.entry-points."{GROUP}"] with a line NAME = "MODULE"')
    metadata = project.get("license", "")
    readme = project.get("readme")
    return Package(
        name=str(project.get("name", folder.name)),
        version=str(project.get("version", "")),
        description=str(project.get("description", "")),
        license=str(metadata.get("text") or metadata.get("file") or "")
        if isinstance(metadata, dict)
        else str(metadata),
        readme=_text(folder / readme) if isinstance(readme, str) else "",
        requires=tuple(map(str, project.get("dependencies", ()))),
        points={str(name): str(module) for name, module in points.items()},
        folder=folder,
        paths=_paths(folder, content),
    )


def read_installed(distribution: Distribution) -> Package:
    """Return what an installed distribution says."""
    metadata = distribution.metadata
    readme = metadata.get_payload() if metadata.get("Description") is None else metadata["Description"]  # type: ignore[attr-defined]
    return Package(
        name=metadata["Name"],
        version=distribution.version,
        description=metadata["Summary"] or "",
        license=metadata["License-Expression"] or metadata["License"] or "",
        readme=str(readme or ""),
        requires=tuple(distribution.requires or ()),
        points={point.name: point.value for point in distribution.entry_points.select(group=GROUP)},
    )


def _paths(folder: Path, content: Mapping[str, Any]) -> tuple[Path, ...]:
    """Return where hatchling finds the packages, and the usual two places besides."""
    wheel: Any = content
    for key in ("tool", "hatch", "build", "targets", "wheel", "packages"):
        wheel = wheel.get(key, {}) if isinstance(wheel, dict) else {}
    named = [(folder / str(package)).parent for package in wheel] if isinstance(wheel, list) else []
    return tuple(dict.fromkeys([*named, folder, folder / "src"]))


def _text(path: Path) -> str:
    return path.read_text("utf-8", "replace") if path.is_file() else ""
