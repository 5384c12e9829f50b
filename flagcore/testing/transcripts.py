"""What a vendor's tools printed on real machines: the files of a plugin's `tests/smi`, and what is to be read there.

`sources.yaml` beside them has a line a file: where it is from or, for one that lists devices, keys:

```yaml
acme-smi-1.txt:
  source: where it was printed
  tool: acme-smi
  lists: {chip: ACME A1, devices: 8, memory_mib: 65536, driver: "1.2"}   # or a list of these; missing: no device
```
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flagcore.domain.chip import Device
from flagcore.errors import SpecError

FOLDER = Path("tests") / "smi"
SOURCES = "sources.yaml"
KEYS = {"source", "tool", "lists"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """Devices of one chip that a transcript lists. None: that is not told there."""

    chip: str
    devices: int
    memory_mib: int | None = None
    driver: str | None = None
    other: bool = False
    """The plugin has no such chip: the device is listed, and stays unknown."""

    def matches(self, device: Device) -> bool:
        """Return whether `device` may be one of these."""
        memory = None if self.memory_mib is None else self.memory_mib * 2**20
        same = device.chip == self.chip and device.memory_bytes == memory
        return same and (self.driver is None or device.driver == self.driver)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """One file. `tool` is the program that printed it, empty where that is not a tool that lists devices."""

    name: str
    text: str
    source: str
    tool: str
    lists: tuple[Listed, ...]

    @property
    def devices(self) -> int:
        """How many devices it lists."""
        return sum(listed.devices for listed in self.lists)


def read_transcripts(folder: Path) -> tuple[Transcript, ...]:
    """Return the transcripts in a plugin's source folder; none where it has no such files. Raises SpecError."""
    file = folder / FOLDER / SOURCES
    if not file.is_file():
        return ()
    try:
        entries = yaml.safe_load(file.read_text("utf-8")) or {}
    except yaml.YAMLError as error:
        raise _wrong("the file", f"is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(entries, dict):
        raise _wrong("the file", "must have a key a file")
    return tuple(_transcript(file.parent / str(name), entry) for name, entry in entries.items())


def _wrong(key: str, problem: str) -> SpecError:
    return SpecError(file=str(FOLDER / SOURCES), key=key, problem=problem)


def _transcript(path: Path, entry: object) -> Transcript:
    fields: Mapping[str, Any] = entry if isinstance(entry, dict) else {"source": entry}
    if unknown := set(fields) - KEYS:
        raise _wrong(f"{path.name}.{min(map(str, unknown))}", f"is none of {', '.join(sorted(KEYS))}")
    lists = fields.get("lists") or []
    try:
        listed = tuple(Listed(**each) for each in (lists if isinstance(lists, list) else [lists]))
    except TypeError as error:
        keys = "chip, devices, memory_mib, driver, other"
        raise _wrong(f"{path.name}.lists", f"is no mapping of {keys} (or a list of such): {error}") from error
    return Transcript(
        name=path.name,
        text=path.read_text("utf-8", "replace") if path.is_file() else "",
        source=str(fields.get("source") or ""),
        tool=str(fields.get("tool") or ""),
        lists=listed,
    )
