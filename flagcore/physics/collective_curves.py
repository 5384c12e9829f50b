"""The time of a collective on one level: modelled, or measured and interpolated to a grid of payloads and ranks.

The model uses latency and bandwidth. Units are bytes and seconds, and all functions accept arrays. Sources: Thakur et
al. 2005 for the bytes sent in rings, NCCL 2.30 `tuning.cc` for the steps of rings and trees. Libraries change their
protocol with the size of a message, so a message of medium size takes longer than latency + bytes / rate. `smooth`
therefore adds SMOOTHING x the geometric mean of these two terms.

A curve is measured for one kind of collective and one number of ranks. For a number of ranks between two curves, times
are interpolated on logarithmic axes. For other numbers, they are extrapolated from the nearest curve by the number of
steps and the bytes sent. Payloads below the first point of a curve follow the model. Payloads above the last point have
the rate between the last two points.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from flagcore.domain.cluster import Level
from flagcore.domain.space import FloatArray

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")

SMOOTHING = 1.25
"""The weight of the term that `smooth` adds. Fitted to 324 published times of four collectives on five kinds of GPU.
Their mean error is 16%, and 26% with a weight of 0."""

TREE_STEPS = 6.0
"""The steps of a tree all-reduce within a node, per doubling of the ranks n. Source: NCCL 2.30 `tuning.cc`. A ring has
2 (n-1) steps."""

PEER_SECONDS = 1e-6
"""The time that each additional remote peer adds to an all-to-all. Source: network overhead per message, NCCL 2.30."""


def smooth(startup: FloatArray, transfer: FloatArray) -> FloatArray:
    """Return the time of a collective, given its start-up time and its transfer time, all in seconds."""
    return startup + transfer + SMOOTHING * np.sqrt(startup * transfer)


def sent_share(kind: str, ranks: FloatArray) -> FloatArray:
    """Return the bytes that each of n ranks sends, relative to the payload.

    The share is 2 (n-1)/n for an all-reduce, 1 for a send, and (n-1)/n for other collectives.
    """
    if kind == "send":
        return np.minimum(ranks - 1.0, 1.0)
    return (2.0 if kind == "all_reduce" else 1.0) * (1.0 - 1.0 / ranks)


def steps(kind: str, ranks: FloatArray) -> FloatArray:
    """Return the number of consecutive steps of a collective in the ring algorithm, or in a tree if it takes fewer."""
    if kind == "all_reduce":
        return np.minimum(2.0 * (ranks - 1.0), TREE_STEPS * np.log2(np.maximum(ranks, 2.0)))
    return np.ones_like(ranks) if kind in ("all_to_all", "send") else ranks - 1.0


def startup_seconds(level: Level, kind: str, ranks: FloatArray) -> FloatArray:
    """Return the time of a collective without payload, among `ranks` > 1 devices of `level`."""
    return level.latency_seconds + (steps(kind, ranks) - 1.0) * level.hop


def usable_share(level: Level, ranks: FloatArray) -> FloatArray | float:
    """Return the share of the peak bandwidth that each device reaches in a collective among `ranks` > 1 devices."""
    share: FloatArray | float = level.efficiency
    if level.pair_share < 1.0:
        share = share * np.minimum((ranks - 1.0) * level.pair_share, 1.0)
    return share * (2.0 / ranks) ** level.crowding if level.crowding else share


def level_seconds(level: Level, kind: str, payload_bytes: FloatArray, ranks: FloatArray) -> FloatArray:
    """Return the modelled time of a collective among `ranks` > 1 devices of `level`."""
    rate = level.bytes_per_second * usable_share(level, ranks)
    return smooth(startup_seconds(level, kind, ranks), sent_share(kind, ranks) * payload_bytes / rate)


OCTAVES = 44
"""The number of payload sizes in a grid: the powers of two from 1 byte to 8 TiB."""

MAX_RANKS = 4096
"""The maximum number of ranks in a grid. Larger groups on one level are given the same time."""

MAX_SECONDS = 10.0
"""The maximum time of a collective. Chosen: longer times are probably in a wrong unit."""

SIZES: FloatArray = np.exp2(np.arange(OCTAVES, dtype=np.float64))
MAX_PAYLOAD = float(np.nextafter(SIZES[-1], 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A measured curve: the times of one kind of collective among `ranks` neighbouring devices.

    `payload_bytes`: the sizes of the whole tensor, in increasing order.
    `seconds`: the time for each size.
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
            raise ValueError(f"curves must have at least 2 ranks, and those of a send 2, not {self.ranks}")
        if not sizes or len(sizes) != len(seconds):
            raise ValueError(f"curves must have as many seconds as payload_bytes, not {len(seconds)} and {len(sizes)}")
        if any(after <= before for before, after in zip((0.0, *sizes), sizes, strict=False)):
            raise ValueError("curves must have increasing payload_bytes above 0")
        if not all(0 < time < MAX_SECONDS for time in seconds):
            raise ValueError(f"curves must have seconds above 0 and below {MAX_SECONDS:g}, e.g. 1.2e-05")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTable:
    """Curves that were measured among neighbouring devices, and their source.

    `level`: the name of the topology's level on which they were measured, including its inner levels. Empty means the
    innermost level.
    Raises ValueError for an empty table, and for two curves of the same kind and number of ranks.
    """

    curves: tuple[Curve, ...]
    source: str
    level: str = ""

    def __post_init__(self) -> None:
        if not self.curves:
            raise ValueError("a table of curves must have at least one curve")
        if len({(curve.kind, curve.ranks) for curve in self.curves}) < len(self.curves):
            raise ValueError("a table of curves must not have two curves of the same kind and number of ranks")


class Grid(NamedTuple):
    """The times of one kind of collective, in seconds, by number of ranks and payload.

    Times are linear in the payload between powers of two. A payload is mantissa x 2^exponent with a mantissa in
    [1/2, 1). The number of ranks and the exponent give an index into both arrays, and the time is `base` + mantissa x
    `slope`.
    """

    max_ranks: float
    base: FloatArray
    slope: FloatArray

    @classmethod
    def from_rows(cls, rows: FloatArray) -> Grid:
        """Return a grid from times with one row per number of ranks, from 0, and one column per payload in SIZES."""
        rise, zeros = np.diff(rows, axis=1), np.zeros((len(rows), 1))
        base, slope = np.hstack([zeros, rows[:, :-1] - rise]), np.hstack([zeros, 2.0 * rise])
        return cls(len(rows) - 1.0, base.ravel(), slope.ravel())

    def at(self, payload_bytes: FloatArray, ranks: FloatArray) -> FloatArray:
        """Return the time of a collective in seconds for each payload and number of ranks. It is 0 for one rank.

        Payloads are clipped to the range of the grid.
        """
        mantissa, exponent = np.frexp(np.clip(payload_bytes, 1.0, MAX_PAYLOAD))
        index = (np.minimum(ranks, self.max_ranks) * OCTAVES + exponent).astype(np.intp)
        base: FloatArray = self.base.take(index)
        return base + mantissa * self.slope.take(index)

    def scaled(self, factor: float) -> Grid:
        """Return the grid with all times multiplied by `factor`."""
        return Grid(self.max_ranks, self.base * factor, self.slope * factor)


def model_grid(kind: str, level: Level) -> Grid:
    """Return the modelled times on `level`, from its latency and bandwidth, for up to as many ranks as devices."""
    ranks = np.arange(_rows(kind, level), dtype=np.float64)[:, None]
    rows = level_seconds(level, kind, SIZES[None, :], np.maximum(ranks, 2.0))
    return Grid.from_rows(np.where(ranks > 1.0, rows, 0.0))


def measured_grids(table: CollectiveTable, level: Level) -> Mapping[str, Grid]:
    """Return a grid for each measured kind of collective, for up to as many ranks as `level` has devices.

    A ring all-reduce consists of a reduce-scatter and an all-gather. If only some of these three were measured, the
    others are derived: reduce-scatter and all-gather are assumed to take equally long, and all-reduce twice as long.
    """
    grids = {kind: grid for kind in KINDS if (grid := _grid(kind, table, level)) is not None}
    half = grids.get("all_gather") or grids.get("reduce_scatter")
    if half is None and "all_reduce" in grids:
        half = grids["all_reduce"].scaled(0.5)
    if half is not None:
        derived = {"all_reduce": half.scaled(2.0), "all_gather": half, "reduce_scatter": half}
        grids = derived | grids
    return grids


def _grid(kind: str, table: CollectiveTable, level: Level) -> Grid | None:
    """Return the grid of one kind of collective from its measured curves, or None if there are none for `level`."""
    max_ranks = _rows(kind, level) - 1
    curve_by_ranks = {curve.ranks: curve for curve in table.curves if curve.kind == kind and curve.ranks <= max_ranks}
    if not curve_by_ranks or max_ranks < 2:
        return None
    rows: dict[int, FloatArray] = {}
    for ranks in sorted(curve_by_ranks):
        if rows:
            nearest_smaller = max(rows)
            base = _extrapolate(kind, level, rows[nearest_smaller], nearest_smaller, ranks)
        else:
            base = level_seconds(level, kind, SIZES, np.full(OCTAVES, float(ranks)))
        rows[ranks] = _interpolate(curve_by_ranks[ranks], base)
    measured_ranks = sorted(rows)
    for ranks in range(2, max_ranks + 1):
        if ranks in rows:
            continue
        index = int(np.searchsorted(measured_ranks, ranks))
        if 0 < index < len(measured_ranks):
            low, high = measured_ranks[index - 1], measured_ranks[index]
            weight = np.log(ranks / low) / np.log(high / low)
            rows[ranks] = rows[low] ** (1.0 - weight) * rows[high] ** weight
        else:
            nearest = measured_ranks[0] if index == 0 else measured_ranks[-1]
            rows[ranks] = _extrapolate(kind, level, rows[nearest], nearest, ranks)
    zeros = np.zeros(OCTAVES)
    return Grid.from_rows(np.stack([rows.get(ranks, zeros) for ranks in range(max_ranks + 1)]))


def _rows(kind: str, level: Level) -> int:
    return 1 + min(2 if kind == "send" else MAX_RANKS, level.devices)


def _interpolate(curve: Curve, base: FloatArray) -> FloatArray:
    """Return the times of a measured curve at all payloads in SIZES, made non-decreasing.

    `base`: the modelled or extrapolated times, for payloads below the first point.
    Between points, the square root of the time is linear in the square root of the size. This was tested with six of
    the 20 points of a published curve: at the other points, the mean error is 5% and the largest 20%. Linear
    interpolation has errors of 9% and 31%, and logarithmic axes of 18% and 61%.
    """
    sizes: FloatArray = np.array(curve.payload_bytes)
    seconds: FloatArray = np.array(curve.seconds)
    measured_times = np.interp(np.sqrt(SIZES), np.sqrt(sizes), np.sqrt(seconds)) ** 2
    low_times = base * seconds[0] / np.interp(sizes[0], SIZES, base)
    high_times = base * seconds[-1] / np.interp(sizes[-1], SIZES, base)
    if len(sizes) > 1:
        high_times = seconds[-1] + (SIZES - sizes[-1]) * (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
    return np.maximum.accumulate(
        np.where(sizes[0] > SIZES, low_times, np.where(sizes[-1] < SIZES, high_times, measured_times))
    )


def _extrapolate(kind: str, level: Level, row: FloatArray, ranks: int, new_ranks: int) -> FloatArray:
    """Return the times for `new_ranks` ranks, extrapolated from the times `row` for `ranks` ranks.

    The start-up time is scaled by the start-up of the model, the rest by the bytes sent and by the crowding.
    """
    known_ranks, target_ranks = np.array([float(ranks)]), np.array([float(new_ranks)])
    startup = startup_seconds(level, kind, target_ranks) / startup_seconds(level, kind, known_ranks)
    sent = sent_share(kind, target_ranks) / sent_share(kind, known_ranks) * (new_ranks / ranks) ** level.crowding
    times: FloatArray = row[0] * startup + (row - row[0]) * sent
    return times
