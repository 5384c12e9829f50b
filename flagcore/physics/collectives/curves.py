"""Measured times of collectives, made into a grid of payloads by ranks that is read in a few array operations.

A curve holds for one kind and number of ranks. What was not measured is drawn from what was: ranks between two
curves on logarithmic axes, more ranks from the nearest curve by steps and bytes sent, sizes below the first in
proportion to the model, sizes above the last at the rate between the last two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from flagcore.domain.cluster import Level
from flagcore.domain.space import FloatArray
from flagcore.physics.collectives.model import KINDS, level_seconds, sent_share, startup_seconds

OCTAVES = 44
"""Payloads of a grid: powers of two from 1 byte to 8 TiB."""

MOST_RANKS = 4096
"""Ranks of a grid; more of them on one level take the time of so many."""

MOST_SECONDS = 10.0
"""Upper bound of the time of a collective: longer times are in the wrong unit."""

SIZES: FloatArray = np.exp2(np.arange(OCTAVES, dtype=np.float64))
LARGEST = float(np.nextafter(SIZES[-1], 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Seconds of one collective among `ranks` neighbours, by growing payload in bytes (of the whole tensor).

    Raises ValueError for an invalid curve.
    """

    kind: str
    ranks: int
    payload_bytes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        sizes, seconds = self.payload_bytes, self.seconds
        if self.kind not in KINDS:
            raise ValueError(f"curves must be of the kinds {', '.join(KINDS)}, not {self.kind}")
        if self.ranks < 2 or (self.kind == "send" and self.ranks > 2):
            raise ValueError(f"curves must have 2 ranks or more, a send 2, not {self.ranks}")
        if not sizes or len(sizes) != len(seconds):
            raise ValueError(f"curves must have as many seconds as payload_bytes, not {len(seconds)} and {len(sizes)}")
        if any(after <= before for before, after in zip((0.0, *sizes), sizes, strict=False)):
            raise ValueError("curves must have payload_bytes above 0 that grow")
        if not all(0 < time < MOST_SECONDS for time in seconds):
            raise ValueError(f"curves must have seconds above 0 and below {MOST_SECONDS:g}, e.g. 1.2e-05")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTable:
    """Curves of neighbouring devices, and their source.

    They hold on the topology's level of the name `level` with all that is inside it; empty: on the innermost.
    Raises ValueError for no curves, and for two of one kind and number of ranks.
    """

    curves: tuple[Curve, ...]
    source: str
    level: str = ""

    def __post_init__(self) -> None:
        if not self.curves:
            raise ValueError("a table of curves must hold at least one curve")
        if len({(curve.kind, curve.ranks) for curve in self.curves}) < len(self.curves):
            raise ValueError("a table of curves must not hold two curves of one kind and number of ranks")


@dataclass(frozen=True, slots=True)
class Grid:
    """Seconds by ranks (rows, from 0) and payload, linear in the payload between powers of two.

    A payload is mantissa x 2^exponent with the mantissa in [1/2, 1); row and exponent give the place of its octave in
    both arrays, and its time is `base` + mantissa x `slope` there.
    """

    most: float
    base: FloatArray
    slope: FloatArray

    @classmethod
    def of(cls, rows: FloatArray) -> Grid:
        """Return the grid of times whose columns are the payloads `SIZES`."""
        rise, nothing = np.diff(rows, axis=1), np.zeros((len(rows), 1))
        base, slope = np.hstack([nothing, rows[:, :-1] - rise]), np.hstack([nothing, 2.0 * rise])
        return cls(len(rows) - 1.0, base.ravel(), slope.ravel())

    def at(self, payload_bytes: FloatArray, ranks: FloatArray) -> FloatArray:
        """Return times. One rank takes 0, and less than a byte what a byte takes."""
        mantissa, exponent = np.frexp(np.clip(payload_bytes, 1.0, LARGEST))
        place = (np.minimum(ranks, self.most) * OCTAVES + exponent).astype(np.intp)
        base: FloatArray = self.base.take(place)
        return base + mantissa * self.slope.take(place)

    def times(self, factor: float) -> Grid:
        """Return the grid of times that are `factor` as long."""
        return Grid(self.most, self.base * factor, self.slope * factor)


def model_grid(kind: str, level: Level) -> Grid:
    """Return the grid that latency and bandwidth of `level` make, for as many ranks as it has devices."""
    ranks = np.arange(_rows(kind, level), dtype=np.float64)[:, None]
    rows = level_seconds(level, kind, SIZES[None, :], np.maximum(ranks, 2.0))
    return Grid.of(np.where(ranks > 1.0, rows, 0.0))


def measured_grids(table: CollectiveTable, level: Level) -> Mapping[str, Grid]:
    """Return a grid for each kind that was measured, for as many ranks as `level` has devices.

    A ring reduces by scattering and then gathering, so where only one of the three was measured, gathering and
    scattering take the same time and the all-reduce twice as long.
    """
    found = {kind: grid for kind in KINDS if (grid := _grid(kind, table, level)) is not None}
    half = found.get("all_gather") or found.get("reduce_scatter")
    if half is None and "all_reduce" in found:
        half = found["all_reduce"].times(0.5)
    if half is not None:
        related = {"all_reduce": half.times(2.0), "all_gather": half, "reduce_scatter": half}
        found = related | found
    return found


def _grid(kind: str, table: CollectiveTable, level: Level) -> Grid | None:
    most = _rows(kind, level) - 1
    measured = {curve.ranks: curve for curve in table.curves if curve.kind == kind and curve.ranks <= most}
    if not measured or most < 2:
        return None
    rows: dict[int, FloatArray] = {}
    for ranks in sorted(measured):
        if rows:
            below = max(rows)
            base = _scaled(kind, level, rows[below], below, ranks)
        else:
            base = level_seconds(level, kind, SIZES, np.full(OCTAVES, float(ranks)))
        rows[ranks] = _drawn(measured[ranks], base)
    known = sorted(rows)
    for ranks in range(2, most + 1):
        if ranks in rows:
            continue
        after = int(np.searchsorted(known, ranks))
        if 0 < after < len(known):
            low, high = known[after - 1], known[after]
            part = np.log(ranks / low) / np.log(high / low)
            rows[ranks] = rows[low] ** (1.0 - part) * rows[high] ** part
        else:
            nearest = known[0] if after == 0 else known[-1]
            rows[ranks] = _scaled(kind, level, rows[nearest], nearest, ranks)
    none = np.zeros(OCTAVES)
    return Grid.of(np.stack([rows.get(ranks, none) for ranks in range(most + 1)]))


def _rows(kind: str, level: Level) -> int:
    return 1 + min(2 if kind == "send" else MOST_RANKS, level.devices)


def _drawn(curve: Curve, base: FloatArray) -> FloatArray:
    """Return a measured curve over all sizes, times never falling.

    Between points the root of time is linear in the root of size. Of a published curve of 20 points, thinned to six,
    it misses the others by 5% in the mean and 20% at worst; straight lines miss by 9% and 31%, powers by 18% and 61%.
    """
    sizes: FloatArray = np.array(curve.payload_bytes)
    seconds: FloatArray = np.array(curve.seconds)
    inside = np.interp(np.sqrt(SIZES), np.sqrt(sizes), np.sqrt(seconds)) ** 2
    below = base * seconds[0] / np.interp(sizes[0], SIZES, base)
    above = base * seconds[-1] / np.interp(sizes[-1], SIZES, base)
    if len(sizes) > 1:
        above = seconds[-1] + (SIZES - sizes[-1]) * (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
    drawn: FloatArray = np.maximum.accumulate(
        np.where(sizes[0] > SIZES, below, np.where(sizes[-1] < SIZES, above, inside))
    )
    return drawn


def _scaled(kind: str, level: Level, row: FloatArray, ranks: int, wanted: int) -> FloatArray:
    """Return the row of `ranks` for `wanted` ranks: its start-up by steps, the rest by bytes sent and crowding."""
    old, new = np.array([float(ranks)]), np.array([float(wanted)])
    startup = startup_seconds(level, kind, new) / startup_seconds(level, kind, old)
    sent = sent_share(kind, new) / sent_share(kind, old) * (wanted / ranks) ** level.crowding
    scaled: FloatArray = row[0] * startup + (row - row[0]) * sent
    return scaled
