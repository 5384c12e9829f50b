"""The user's calibrations as files, and what their measurements become."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flagcore.domain.chip import Chip
from flagcore.domain.files import HOME_FIX, data_folder, save, writable
from flagcore.errors import RunError
from flagcore.physics.collective_curves import CollectiveTable
from flagcore.physics.collective_curves import Curve as CollectiveCurve
from flagcore.physics.roofline import Roofline
from flagcore_vendorkit.chip_file import Reading, read_kernel
from flagcore_vendorkit.fields import read_record
from flagcore_vendorkit.kernel_table import KernelSheet, with_measured

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Measurements of kernels and collectives on `devices` devices of a chip.

    - `rows`: the measurements, as plain data.
    - `aliases`: other names of the chip when it was measured. For a CPU, they name the processor.
    - `driver`, `torch`: the versions of the driver and of torch.
    - `how`: the tool that measured the kernels and collectives.
    - `date`: ISO 8601.
    - `others`: share of the CPUs that other processes used meanwhile, from 0 to 1; None if unknown.
    - `facts`: the properties of the chip if no plugin lists it, otherwise None.
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
        """The file name. A new calibration of the same chip, driver and torch version replaces the file."""
        parts = (self.chip, *self.aliases[:1], f"driver {self.driver or 'none'}", f"torch {self.torch}")
        return "--".join(map(_slug, parts)) + ".json"


class Calibrations:
    """The calibrations in a folder. The folder is created on the first write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of_user(cls) -> Calibrations:
        """Return the user's calibrations, from FLAGCORE_HOME, XDG_DATA_HOME or ~/.local/share."""
        return cls(data_folder() / "calibrations")

    def all(self) -> tuple[tuple[Path, Calibration], ...]:
        """Return the readable calibrations with their paths, newest first.

        Raises RunError if the folder cannot be read.
        """
        return self._read()[0]

    def skipped_files(self) -> tuple[tuple[Path, RunError], ...]:
        """Return the paths of unreadable files, each with its error. Raises RunError if the folder cannot be read."""
        return self._read()[1]

    def find(self, chip: Chip, torch: str | None = None) -> tuple[Path, Calibration] | None:
        """Return the path and content of the newest calibration of `chip`, or None.

        A calibration with this version of torch is preferred. Raises RunError if a file of this chip cannot be read.
        """
        readable, unreadable = self._read()
        for path, error in unreadable:
            if _is_file_of(path, chip):
                raise error
        matching = [pair for pair in readable if chip.is_same(pair[1].chip, pair[1].aliases)]
        return next((pair for pair in matching if pair[1].torch == torch), matching[0] if matching else None)

    def check_writable(self) -> None:
        """Raise RunError unless files can be written to the folder."""
        draft = self.folder / f"{os.getpid()}.draft"
        with writable(self.folder, HOME_FIX):
            self.folder.mkdir(parents=True, exist_ok=True)
            draft.touch()
            draft.unlink()

    def save(self, calibration: Calibration) -> Path:
        """Write a calibration and return its path. Raises RunError if it cannot be written."""
        path = self.folder / calibration.file_name
        save(path, _text(calibration))
        return path

    def _read(self) -> tuple[tuple[tuple[Path, Calibration], ...], tuple[tuple[Path, RunError], ...]]:
        """Return the readable calibrations, newest first, and the unreadable files, each with its error."""
        try:
            files = sorted(path for path in self.folder.iterdir() if path.suffix == ".json")
        except FileNotFoundError:
            return (), ()
        except OSError as error:
            raise RunError(f"{self.folder} cannot be read: {error.strerror or error}") from None
        readable, unreadable = [], []
        for path in files:
            try:
                readable.append((path, read_record(Calibration, path, SCHEMA, "calibration", "run `flag calibrate`")))
            except RunError as error:
                unreadable.append((path, error))
        return tuple(sorted(readable, key=lambda pair: pair[1].date, reverse=True)), tuple(unreadable)


def _is_file_of(path: Path, chip: Chip) -> bool:
    """Return whether `path` is named like a calibration of `chip`. For a CPU, the file name includes the processor."""
    name, *parts = path.stem.split("--")
    is_other_processor = len(parts) == 3 and chip.aliases and parts[0] not in map(_slug, chip.aliases)
    return name == _slug(chip.name) and not is_other_processor


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.+]+", "-", name.casefold()).strip("-")


def _text(calibration: Calibration) -> str:
    """Format a calibration as JSON, with one line per measurement."""
    fields = {name: value for name, value in asdict(calibration).items() if value is not None}
    head = {"schema": SCHEMA, **{name: value for name, value in fields.items() if name != "rows"}}
    if calibration.others is not None:
        head["others"] = round(calibration.others, 4)
    rows = ",\n  ".join(json.dumps(dict(row), ensure_ascii=False) for row in calibration.rows)
    start = json.dumps(head, indent=1, ensure_ascii=False).removesuffix("\n}")
    return f'{start},\n "rows": [\n  {rows}\n ]\n}}\n'


def kernel_table(calibration: Calibration, roofline: Roofline) -> Roofline:
    """Return kernel costs: the measured times, and for all other kernels `roofline`, which is fitted to them.

    Raises RunError for an invalid calibration.
    """
    try:
        kernels = tuple(read_kernel(row, Reading()) for row in calibration.rows if "kernel" in row)
    except (ValueError, TypeError, KeyError) as error:
        raise _invalid_row(calibration, error) from None
    return with_measured(roofline, KernelSheet(kernels))


def collective_table(calibration: Calibration) -> CollectiveTable | None:
    """Return the measured times of collectives within a node, or None if none were measured. Raises RunError.

    If a small message took longer than a larger one, the measurement was disturbed, and the smaller time is used.
    """
    points: dict[tuple[str, int], dict[float, float]] = {}
    try:
        for row in calibration.rows:
            if "collective" in row:
                times = points.setdefault((str(row["collective"]), int(row["ranks"])), {})
                times[float(row["bytes"])] = float(row["us"]) * 1e-6
        curves = tuple(_curve(kind, ranks, times) for (kind, ranks), times in points.items())
        return CollectiveTable(curves=curves, source=f"flag calibrate, {calibration.date}") if curves else None
    except (ValueError, TypeError, KeyError) as error:
        raise _invalid_row(calibration, error) from None


def _curve(kind: str, ranks: int, times: Mapping[float, float]) -> CollectiveCurve:
    """Return the curve of a collective.

    `times`: seconds by payload in bytes. If a larger payload takes less time, its time is used instead.
    """
    sizes = tuple(sorted(times))
    seconds = tuple(min(times[larger] for larger in sizes if larger >= size) for size in sizes)
    return CollectiveCurve(kind=kind, ranks=ranks, payload_bytes=sizes, seconds=seconds)


def _invalid_row(calibration: Calibration, error: Exception) -> RunError:
    return RunError(f"the calibration of {calibration.chip} has an invalid row: {error!r}; run `flag calibrate`")
