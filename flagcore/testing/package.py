"""Metadata of a plugin's distribution: from its source folder if available, else from the installation."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

from flagcore.errors import UsageError
from flagcore.plugins import GROUP

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A distribution. `folder` is its source folder, None if only the installed package is available."""

    version: str
    description: str = ""
    license: str = ""
    readme: str = ""
    requires: tuple[str, ...] = ()
    points: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None


def source_of(package_folder: Path, module: str) -> Package | None:
    """Return the distribution whose source folder contains a package; None if it was installed from a wheel."""
    for folder in (package_folder.parent, package_folder.parent.parent):
        if (folder / "pyproject.toml").is_file():
            with suppress(UsageError):
                package = read_source(folder)
                if any(re.split("[.:]", value)[0] == module.partition(".")[0] for value in package.points.values()):
                    return package
    return None


def read_source(folder: Path) -> Package:
    """Return the distribution in `folder`. Raises UsageError if it contains no plugin."""
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
    readme = project.get("readme")
    readme_file = folder / readme if isinstance(readme, str) else folder / "none"
    return Package(
        version=str(project.get("version", "")),
        description=str(project.get("description", "")),
        license=str(project.get("license", "")),
        readme=readme_file.read_text("utf-8", "replace") if readme_file.is_file() else "",
        requires=tuple(map(str, project.get("dependencies", ()))),
        points={str(name): str(module) for name, module in points.items()},
        folder=folder,
    )


def read_installed(distribution: Distribution) -> Package:
    """Return the metadata of an installed distribution."""
    metadata = distribution.metadata
    readme = metadata.get_payload() if metadata.get("Description") is None else metadata["Description"]  # type: ignore[attr-defined]
    return Package(
        version=distribution.version,
        description=metadata["Summary"] or "",
        license=metadata["License-Expression"] or metadata["License"] or "",
        readme=str(readme or ""),
        requires=tuple(distribution.requires or ()),
        points={point.name: point.value for point in distribution.entry_points.select(group=GROUP)},
    )
