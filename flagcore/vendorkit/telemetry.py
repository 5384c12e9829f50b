"""Reads devices during a trial from one run of the management tool a second for all devices."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flagcore.vendorkit.rows import Row

FRESH_SECONDS = 0.9


class SharedTable:
    """The tool's last output. `read` runs the tool again if that is older than `fresh_seconds`."""

    def __init__(self, read: Callable[[], Sequence[Row]], fresh_seconds: float = FRESH_SECONDS) -> None:
        self._read, self._fresh = read, fresh_seconds
        self._rows: Mapping[int, Row] = {}
        self._until = float("-inf")
        self._lock = threading.Lock()

    def row(self, index: int) -> Row | None:
        """Return the row of a device, or None if the tool does not list it."""
        with self._lock:
            if time.monotonic() >= self._until:
                self._rows = {row.device.index: row for row in self._read()}
                self._until = time.monotonic() + self._fresh
            return self._rows.get(index)


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """`flagcore.contracts.Telemetry` of one device."""

    table: SharedTable
    index: int

    def sample(self) -> Mapping[str, float]:
        """Return the device's figures now. Raises LookupError if it does not list it."""
        row = self.table.row(self.index)
        if row is None:
            raise LookupError(f"device {self.index} is not in the management tool's table")
        return row.reading
