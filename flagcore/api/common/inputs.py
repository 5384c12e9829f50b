"""A spec as users pass it: a file, or plain data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from flagcore.spec import spec_as_data
from flagcore.spec.plain_data import plain

SpecLike: TypeAlias = "Path | str | Mapping[str, Any]"
"""A spec: a file, or its content. Relative paths in data start at the working directory."""

UNNAMED = Path("spec")
"""Name of a spec without a file, in messages and for the folder of its run."""


def spec_data(spec: SpecLike, data: Mapping[str, Any] | None = None) -> tuple[Path, dict[str, Any]]:
    """Return the file of a spec, and its content: `data` if there is any. Raises SpecError."""
    if isinstance(spec, Mapping):
        return UNNAMED, dict(plain(spec, file=str(UNNAMED)))
    file = Path(spec)
    return file, spec_as_data(file) if data is None else dict(data)
