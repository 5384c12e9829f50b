"""Read the configuration of another tuner."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flagcore import plugins
from flagcore.contracts import ImportedSpec


def read_tree(
    directory: Path, name: str, overrides: Sequence[str] = (), *, importer: str | None = None
) -> ImportedSpec:
    """Return the configuration `name` in `directory`, as an installed importer reads it. Raises SpecError, UsageError.

    `overrides` are a.b=c. `importer` is needed only if several are installed.
    """
    return plugins.importer(importer).read_tree(directory, name, overrides)
