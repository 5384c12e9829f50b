"""Calibrations as files: one per chip, driver and version of torch, in the user's data folder."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flagcore.domain.chip import Chip
from flagcore.errors import RunError, SpecError
from flagcore.files import read_regular, replace
from flagcore.vendorkit.fields import build

HOME_VARIABLE = "FLAGCORE_HOME"
"""Environment variable with the folder in which flagcore stores data between runs."""

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Measurements on `devices` devices of one chip: `rows` of kernels and collectives, as plain data.

    `aliases` are the chip's at that time; for a CPU they name the processor. `how` is the tool, `date` is ISO 8601.
    `others` is the share of the CPUs that other processes used meanwhile, 0 to 1; None if unknown. `facts` are those of
    a chip that is in no plugin's catalogue, else None.
    """

    chip: str
    aliases: tuple[str, ...]
    driver: str
    torch: str
    devices: int
    date: str
    how: str
    rows: tuple[Mapping[str, Any], ...]
    others: float | None = None
    facts: Mapping[str, Any] | None = None

    @property
    def file_name(self) -> str:
        """Return the name of its file, which a new calibration of the same devices replaces."""
        parts = (self.chip, *self.aliases[:1], f"driver {self.driver or 'none'}", f"torch {self.torch}")
        return "--".join(map(_slug, parts)) + ".json"

    def matches(self, chip: Chip) -> bool:
        """Return whether it was measured on `chip`; see `same_chip`."""
        return same_chip(self.chip, self.aliases, chip)


class Calibrations:
    """The calibrations in a folder, which need not exist."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of_user(cls) -> Calibrations:
        """Return the calibrations in FLAGCORE_HOME, else in XDG_DATA_HOME or ~/.local/share."""
        if home := os.environ.get(HOME_VARIABLE):
            return cls(Path(home) / "calibrations")
        shared = os.environ.get("XDG_DATA_HOME", "")
        data = Path(shared) if os.path.isabs(shared) else Path(os.path.expanduser("~")) / ".local" / "share"
        return cls(data / "flagcore" / "calibrations")

    def all(self) -> tuple[tuple[Path, Calibration], ...]:
        """Return the readable calibrations with their files, newest first. Raises RunError for the folder."""
        return self._read()[0]

    def skipped_files(self) -> tuple[tuple[Path, RunError], ...]:
        """Return the unreadable files with the reasons. Raises RunError for the folder."""
        return self._read()[1]

    def find(self, chip: Chip, torch: str | None = None) -> tuple[Path, Calibration] | None:
        """Return the newest calibration of `chip`, preferably with this version of torch.

        Raises RunError if a file named after this chip cannot be read.
        """
        good, bad = self._read()
        for path, error in bad:
            if _named_for(path, chip):
                raise error
        found = [pair for pair in good if pair[1].matches(chip)]
        return next((pair for pair in found if pair[1].torch == torch), found[0] if found else None)

    def check_writable(self) -> None:
        """Raise RunError unless a calibration can be written."""
        draft = self.folder / f"{os.getpid()}.draft"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            draft.touch()
            draft.unlink()
        except OSError as error:
            raise _unwritable(self.folder, error) from None

    def save(self, calibration: Calibration) -> Path:
        """Write a calibration atomically and return its file. Raises RunError."""
        path = self.folder / calibration.file_name
        replace_file(path, _text(calibration))
        return path

    def forget(self, chip: str) -> tuple[Path, ...]:
        """Delete the calibrations of that chip, also unreadable ones, and return their files. Raises RunError."""
        good, bad = self._read()
        deleted = [path for path, calibration in good if calibration.chip.casefold() == chip.casefold()]
        deleted += [path for path, _ in bad if path.stem.split("--")[0] == _slug(chip)]
        delete_files(deleted)
        return tuple(deleted)

    def _read(self) -> tuple[tuple[tuple[Path, Calibration], ...], tuple[tuple[Path, RunError], ...]]:
        try:
            files = sorted(path for path in self.folder.iterdir() if path.suffix == ".json")
        except FileNotFoundError:
            return (), ()
        except OSError as error:
            raise RunError(f"{self.folder} cannot be read: {error.strerror or error}") from None
        good, bad = [], []
        for path in files:
            try:
                good.append((path, read(path)))
            except RunError as error:
                bad.append((path, error))
        return tuple(sorted(good, key=lambda pair: pair[1].date, reverse=True)), tuple(bad)


def same_chip(name: str, aliases: Iterable[str], chip: Chip) -> bool:
    """Return whether a measurement is of `chip`: equal names and, unless both have no aliases, a shared alias."""
    names = {alias.casefold() for alias in aliases}, {alias.casefold() for alias in chip.aliases}
    return name.casefold() == chip.name.casefold() and (names[0] == names[1] or bool(names[0] & names[1]))


def read(path: Path) -> Calibration:
    """Return the calibration in a file. Raises RunError."""
    try:
        data = json.loads(read_regular(path))
        if data.pop("schema") != SCHEMA:
            raise ValueError(f"its schema is not {SCHEMA}")
        calibration: Calibration = build(Calibration, data, str(path))
        return calibration
    except (SpecError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        fix = "run `flag calibrate`, or delete the file"
        raise RunError(f"{path} is not a calibration that can be read ({error}); {fix}") from None


def replace_file(path: Path, text: str) -> None:
    """Write a file in the user's data folder in one step. Raises RunError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, text)
    except OSError as error:
        raise _unwritable(path, error) from None


def delete_files(paths: Iterable[Path]) -> None:
    """Delete files, which may be gone already. Raises RunError."""
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise RunError(f"{path} cannot be deleted: {error.strerror or error}") from None


def _unwritable(path: Path, error: OSError) -> RunError:
    fix = f"set {HOME_VARIABLE} to a folder that can be written"
    return RunError(f"{path} cannot be written: {error.strerror or error}; {fix}")


def _named_for(path: Path, chip: Chip) -> bool:
    """Return whether a file has the name of a calibration of `chip`: for a plain CPU, of its processor."""
    name, *rest = path.stem.split("--")
    other = len(rest) == 3 and chip.aliases and rest[0] not in map(_slug, chip.aliases)
    return name == _slug(chip.name) and not other


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.+]+", "-", name.casefold()).strip("-")


def _text(calibration: Calibration) -> str:
    """Return a calibration as JSON with one line per row."""
    present = {name: value for name, value in asdict(calibration).items() if value is not None}
    head = {"schema": SCHEMA, **{name: value for name, value in present.items() if name != "rows"}}
    if calibration.others is not None:
        head["others"] = round(calibration.others, 4)
    rows = ",\n  ".join(json.dumps(dict(row), ensure_ascii=False) for row in calibration.rows)
    start = json.dumps(head, indent=1, ensure_ascii=False).removesuffix("\n}")
    return f'{start},\n "rows": [\n  {rows}\n ]\n}}\n'
