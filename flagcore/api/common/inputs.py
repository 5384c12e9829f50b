"""A spec as it is given: a file, or plain data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from flagcore.spec import spec_as_data
from flagcore.spec.plain_data import plain

SpecLike: TypeAlias = "Path | str | Mapping[str, Any]"
"""A spec: the file that holds it, or what it would say. Paths in data start at the working directory."""

UNNAMED = Path("spec")
"""What a spec without a file is called, in messages and as the name of its run's folder."""


def spec_data(spec: SpecLike, data: Mapping[str, Any] | None = None) -> tuple[Path, dict[str, Any]]:
    """Return the file of a spec, and what it says; `data` goes before the file's own words. Raises SpecError."""
    if isinstance(spec, Mapping):
        return UNNAMED, dict(plain(spec, file=str(UNNAMED)))
    file = Path(spec)
    return file, spec_as_data(file) if data is None else dict(data)
