"""Stores calibrations in the user's data folder, one file per chip, driver and version of torch."""

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
    """Measurements on `devices` devices of one chip. `rows` are measured kernels and collectives, as plain data.

    `aliases` are the aliases of the chip at that time; for a CPU they name the processor. `how` is the tool, `date` is
    ISO 8601. `others` is the share of the CPUs that other processes used meanwhile, from 0 to 1; None if unknown.
    `facts` are the figures of a chip that no plugin lists, else None.
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
        """The name of the file. A new calibration of the same chip, driver and torch replaces the file."""
        parts = (self.chip, *self.aliases[:1], f"driver {self.driver or 'none'}", f"torch {self.torch}")
        return "--".join(map(_slug, parts)) + ".json"

    def matches(self, chip: Chip) -> bool:
        """Return whether the calibration was measured on `chip`; see `same_chip`."""
        return same_chip(self.chip, self.aliases, chip)


class Calibrations:
    """The calibrations in a folder. The folder is created on the first write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of_user(cls) -> Calibrations:
        """Return the calibrations of the user, in FLAGCORE_HOME, XDG_DATA_HOME or ~/.local/share."""
        if home := os.environ.get(HOME_VARIABLE):
            return cls(Path(home) / "calibrations")
        shared = os.environ.get("XDG_DATA_HOME", "")
        data = Path(shared) if os.path.isabs(shared) else Path(os.path.expanduser("~")) / ".local" / "share"
        return cls(data / "flagcore" / "calibrations")

    def all(self) -> tuple[tuple[Path, Calibration], ...]:
        """Return the readable calibrations with their files, newest first. Raises RunError."""
        return self._read()[0]

    def skipped_files(self) -> tuple[tuple[Path, RunError], ...]:
        """Return the unreadable files with the reasons. Raises RunError."""
        return self._read()[1]

    def find(self, chip: Chip, torch: str | None = None) -> tuple[Path, Calibration] | None:
        """Return the newest calibration of `chip`, preferably with this version of torch.

        Raises RunError if a file of this chip cannot be read.
        """
        readable, unreadable = self._read()
        for path, error in unreadable:
            if _is_file_of(path, chip):
                raise error
        matching = [pair for pair in readable if pair[1].matches(chip)]
        return next((pair for pair in matching if pair[1].torch == torch), matching[0] if matching else None)

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
        """Write a calibration and return its file. Raises RunError."""
        path = self.folder / calibration.file_name
        replace_file(path, _text(calibration))
        return path

    def forget(self, chip: str) -> tuple[Path, ...]:
        """Delete the calibrations of a chip, also unreadable ones, and return their files. Raises RunError."""
        readable, unreadable = self._read()
        deleted = [path for path, calibration in readable if calibration.chip.casefold() == chip.casefold()]
        deleted += [path for path, _ in unreadable if path.stem.split("--")[0] == _slug(chip)]
        delete_files(deleted)
        return tuple(deleted)

    def _read(self) -> tuple[tuple[tuple[Path, Calibration], ...], tuple[tuple[Path, RunError], ...]]:
        try:
            files = sorted(path for path in self.folder.iterdir() if path.suffix == ".json")
        except FileNotFoundError:
            return (), ()
        except OSError as error:
            raise RunError(f"{self.folder} cannot be read: {error.strerror or error}") from None
        readable, unreadable = [], []
        for path in files:
            try:
                readable.append((path, read(path)))
            except RunError as error:
                unreadable.append((path, error))
        return tuple(sorted(readable, key=lambda pair: pair[1].date, reverse=True)), tuple(unreadable)


def same_chip(name: str, aliases: Iterable[str], chip: Chip) -> bool:
    """Return whether a measured chip is `chip`: the names are equal, and so are the aliases or at least one of them."""
    measured, known = ({alias.casefold() for alias in each} for each in (aliases, chip.aliases))
    return name.casefold() == chip.name.casefold() and (measured == known or bool(measured & known))


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
    """Write a file in the user's data folder atomically. Raises RunError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, text)
    except OSError as error:
        raise _unwritable(path, error) from None


def delete_files(paths: Iterable[Path]) -> None:
    """Delete files that may not exist. Raises RunError."""
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise RunError(f"{path} cannot be deleted: {error.strerror or error}") from None


def _unwritable(path: Path, error: OSError) -> RunError:
    fix = f"set {HOME_VARIABLE} to a folder that can be written"
    return RunError(f"{path} cannot be written: {error.strerror or error}; {fix}")


def _is_file_of(path: Path, chip: Chip) -> bool:
    """Return whether a file has the name of a calibration of `chip`. The name of a CPU includes the processor."""
    name, *parts = path.stem.split("--")
    is_other_processor = len(parts) == 3 and chip.aliases and parts[0] not in map(_slug, chip.aliases)
    return name == _slug(chip.name) and not is_other_processor


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.+]+", "-", name.casefold()).strip("-")


def _text(calibration: Calibration) -> str:
    """Return a calibration as JSON with one line per row."""
    fields = {name: value for name, value in asdict(calibration).items() if value is not None}
    head = {"schema": SCHEMA, **{name: value for name, value in fields.items() if name != "rows"}}
    if calibration.others is not None:
        head["others"] = round(calibration.others, 4)
    rows = ",\n  ".join(json.dumps(dict(row), ensure_ascii=False) for row in calibration.rows)
    start = json.dumps(head, indent=1, ensure_ascii=False).removesuffix("\n}")
    return f'{start},\n "rows": [\n  {rows}\n ]\n}}\n'
