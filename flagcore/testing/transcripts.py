"""Output of a vendor's tools on real machines: the files of a plugin's `tests/smi`, and their expected devices.

`sources.yaml` in the same folder has a line per file: where it is from or, for one that lists devices, keys:

```yaml
acme-smi-1.txt:
  source: where it was printed
  tool: acme-smi
  lists: {chip: ACME A1, devices: 8, memory_mib: 65536, driver: "1.2"}   # or a list of these; missing: no device
  left_out: 1   # how many devices are reported as unusable; missing: none
```
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flagcore.domain.chip import Device
from flagcore.vendorkit.fields import build, read_yaml

FOLDER = Path("tests") / "smi"
SOURCES = "sources.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """Devices of one chip that a transcript lists. A field is None if the transcript does not contain it."""

    chip: str
    devices: int
    memory_mib: int | None = None
    driver: str | None = None
    other: bool = False
    """Name of a chip that the plugin does not list: the device is listed as unknown."""

    def matches(self, device: Device) -> bool:
        """Return whether `device` may be one of these."""
        memory = None if self.memory_mib is None else self.memory_mib * 2**20
        is_equal = device.chip == self.chip and device.memory_bytes == memory
        return is_equal and (self.driver is None or device.driver == self.driver)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """One file. `tool` is the program that printed it; empty if the program does not list devices."""

    name: str
    text: str
    source: str = ""
    tool: str = ""
    lists: tuple[Listed, ...] = ()
    left_out: int = 0
    """Number of warnings about devices that are left out."""

    @property
    def devices(self) -> int:
        """The number of listed devices."""
        return sum(listed.devices for listed in self.lists)


def read_transcripts(folder: Path) -> tuple[Transcript, ...]:
    """Return the transcripts in a plugin's source folder; empty without such files. Raises SpecError."""
    file = folder / FOLDER / SOURCES
    if not file.is_file():
        return ()
    location = str(FOLDER / SOURCES)
    content = read_yaml(file.read_text("utf-8"), location)
    return tuple(_transcript(file.parent / str(name), entry, location) for name, entry in content.items())


def _transcript(path: Path, entry: object, where: str) -> Transcript:
    fields = dict(entry) if isinstance(entry, Mapping) else {"source": entry}
    fields = {key: value for key, value in fields.items() if value is not None}
    lists = fields.get("lists", [])
    fields["lists"] = lists if isinstance(lists, list) else [lists]
    text = path.read_text("utf-8", "replace") if path.is_file() else ""
    made: Transcript = build(Transcript, {"name": path.name, "text": text, **fields}, where, f"{path.name}.")
    return made
