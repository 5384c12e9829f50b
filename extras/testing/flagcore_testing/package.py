"""The parts of a plugin's distribution outside its package: metadata, and transcripts of the vendor's tools.

The metadata is read from the source folder if available, else from the installation. The transcripts are outputs of
tools on real machines, in `tests/smi`: one file each, or several in a file, each after a line `==> acme-smi-1.txt <==`
as `tail -n +1 acme-smi-*.txt` prints them. `sources.yaml`, a file or one of these texts, has one entry per output. An
entry is the source of the output or, if it lists devices, a mapping:

```yaml
acme-smi-1.txt:
  source: where it was printed
  tool: acme-smi
  lists: {chip: ACME A1, devices: 8, memory_mib: 65536, driver: "1.2"}   # or a list of these; missing: no device
  left_out: 1   # how many devices are reported as unusable; missing: none
  reads: {device: 0, used_mib: 120, watts: 60, limit_watts: 400, celsius: 41, percent: 7}   # as a person reads one
acme-smi-1-lost.txt:   # no output: the text of another one with edits, for a state that no transcript has
  of: acme-smi-1.txt
  edits: {"120MiB / 65536MiB": "ERR!"}
  others: {metric: acme-smi-2.txt}   # the output that the tool prints instead if its arguments contain a word
  source: what the tool prints then, with an address
  ...
acme-smi-3.txt: {source: where it was printed, tool: acme-smi, matrix: 8}   # links of eight devices
```
"""

import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

from flagcore_vendorkit.fields import build, read_yaml

from flagcore.domain.chip import Device
from flagcore.errors import SpecError, UsageError
from flagcore.plugins import GROUP

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A distribution. `folder` is its source folder, or None if only the installed package is available."""

    version: str
    name: str = ""
    description: str = ""
    license: str = ""
    readme: str = ""
    python: str = ""
    requires: tuple[str, ...] = ()
    points: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None


def source_of(package_folder: Path, module: str) -> Package | None:
    """Return the distribution whose source folder contains the package, or None if it was installed from a wheel."""
    for folder in (package_folder.parent, package_folder.parent.parent):
        if (folder / "pyproject.toml").is_file():
            with suppress(UsageError):
                package = read_source(folder)
                if any(re.split("[.:]", value)[0] == module.partition(".")[0] for value in package.points.values()):
                    return package
    return None


def read_toml(file: Path) -> dict[str, Any]:
    """Return the content of a TOML file. Raises OSError, TOMLDecodeError or UnicodeDecodeError."""
    content: dict[str, Any] = tomllib.loads(file.read_text("utf-8"))
    return content


def read_source(folder: Path) -> Package:
    """Return the distribution in `folder`. Raises UsageError if it contains no plugin."""
    file = folder / "pyproject.toml"
    try:
        content = read_toml(file)
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
    texts: Any = {key: str(project.get(key, "")) for key in ("version", "name", "description", "license")}
    return Package(
        **texts,
        readme=readme_file.read_text("utf-8", "replace") if readme_file.is_file() else "",
        python=str(project.get("requires-python", "")),
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
        name=distribution.name,
        description=metadata["Summary"] or "",
        license=metadata["License-Expression"] or metadata["License"] or "",
        readme=str(readme or ""),
        python=metadata["Requires-Python"] or "",
        requires=tuple(distribution.requires or ()),
        points={point.name: point.value for point in distribution.entry_points.select(group=GROUP)},
    )


FOLDER = Path("tests") / "smi"
SOURCES = "sources.yaml"
NAMED = re.compile(r"(?:\A|\n)==> (.+) <==\n")
"""The line before a text in a file of several."""


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
    """One transcript. `tool` is the program that printed it; it is empty if the program does not list devices."""

    name: str
    text: str
    source: str = ""
    tool: str = ""
    lists: tuple[Listed, ...] = ()
    left_out: int = 0
    """Number of devices that are left out, each with a warning."""
    reads: Mapping[str, float] = field(default_factory=dict)
    """The figures of one device as a person reads them in the text, and the index of the device."""
    of: str = ""
    """Name of the transcript whose text this is, with `edits`. It is empty for an output of its own."""
    edits: Mapping[str, str] = field(default_factory=dict)
    """What replaces the first occurrence of each text in it."""
    matrix: int = 0
    """Number of devices whose links the text shows, if the tool prints a matrix of links."""
    others: Mapping[str, str] = field(default_factory=dict)
    """What the tool prints instead of `text` if its arguments contain a word, by that word."""

    @property
    def devices(self) -> int:
        """The number of listed devices."""
        return sum(listed.devices for listed in self.lists)


def saved_outputs(folder: Path) -> dict[str, str]:
    """Return the texts of the outputs in a folder `tests/smi`, by name."""
    return {name: text for name, text in _texts(folder).items() if name != SOURCES}


def _texts(folder: Path) -> dict[str, str]:
    found = dict[str, str]()
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        text = path.read_text("utf-8", "replace")
        found.update(joined_texts(text) or {path.name: text})
    return found


def joined_texts(text: str) -> dict[str, str]:
    """Return the texts that a file joins, by the names before them."""
    _, *named = NAMED.split(text)
    return dict(zip(named[::2], named[1::2], strict=True))


def read_transcripts(folder: Path) -> tuple[Transcript, ...]:
    """Return the transcripts in a plugin's source folder, if there are any. Raises SpecError."""
    location, texts = str(FOLDER / SOURCES), _texts(folder / FOLDER)
    content = read_yaml(texts.pop(SOURCES), location) if SOURCES in texts else {}
    return tuple(_transcript(str(name), entry, texts, location) for name, entry in content.items())


def _transcript(name: str, entry: object, texts: Mapping[str, str], where: str) -> Transcript:
    fields = dict(entry) if isinstance(entry, Mapping) else {"source": entry}
    fields = {key: value for key, value in fields.items() if value is not None}
    lists = fields.get("lists", [])
    fields["lists"] = lists if isinstance(lists, list) else [lists]
    origin = str(fields.get("of") or name)
    text, edits = texts.get(origin, ""), fields.get("edits")
    for old, new in edits.items() if isinstance(edits, Mapping) else ():
        if str(old) not in text:
            raise SpecError(file=where, key=f"{name}.edits", value=old, problem=f"is not in {origin}")
        text = text.replace(str(old), str(new), 1)
    others = fields.get("others")
    if isinstance(others, Mapping):
        fields["others"] = {str(word): texts[str(other)] for word, other in others.items() if str(other) in texts}
    made: Transcript = build(Transcript, {"name": name, "text": text, **fields}, where, f"{name}.")
    return made
