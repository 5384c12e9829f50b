"""Derives costs from a calibration."""

from __future__ import annotations

from collections.abc import Mapping

from flagcore.calibration.store import Calibration
from flagcore.domain.chip import Chip
from flagcore.errors import RunError
from flagcore.physics.collectives.curves import CollectiveTable
from flagcore.physics.collectives.curves import Curve as CollectiveCurve
from flagcore.physics.kernels.roofline import Curve, Roofline
from flagcore.physics.kernels.sheet import KernelSheet
from flagcore.physics.kernels.table import KernelTable
from flagcore.vendorkit.cost_file import Reading, read_kernel


def kernel_table(calibration: Calibration, chip: Chip, curve: Curve) -> KernelTable:
    """Return kernel costs for `chip` from measured kernels and, for other kernels, `curve`. Raises RunError."""
    try:
        kernels = tuple(read_kernel(row, Reading()) for row in calibration.rows if "kernel" in row)
    except (ValueError, TypeError, KeyError) as error:
        raise _invalid_row(calibration, error) from None
    return KernelTable.of(Roofline(chip=chip, curve=curve), KernelSheet(kernels))


def collective_table(calibration: Calibration) -> CollectiveTable | None:
    """Return the measured times of collectives within a node; None if none were measured. Raises RunError.

    If a small message took longer than a larger one, the measurement was disturbed, and the smaller time is used.
    """
    points: dict[tuple[str, int], dict[float, float]] = {}
    try:
        for row in calibration.rows:
            if "collective" in row:
                times = points.setdefault((str(row["collective"]), int(row["ranks"])), {})
                times[float(row["bytes"])] = float(row["us"]) * 1e-6
    except (ValueError, TypeError, KeyError) as error:
        raise _invalid_row(calibration, error) from None
    try:
        curves = tuple(_curve(kind, ranks, times) for (kind, ranks), times in points.items())
        return CollectiveTable(curves=curves, source=f"flag calibrate, {calibration.date}") if curves else None
    except ValueError as error:
        raise RunError(f"the calibration of {calibration.chip}: {error}; run `flag calibrate`") from None


def _curve(kind: str, ranks: int, times: Mapping[float, float]) -> CollectiveCurve:
    """Return a curve from seconds by payload, made non-decreasing."""
    sizes = tuple(sorted(times))
    seconds = tuple(min(times[larger] for larger in sizes if larger >= size) for size in sizes)
    return CollectiveCurve(kind=kind, ranks=ranks, payload_bytes=sizes, seconds=seconds)


def _invalid_row(calibration: Calibration, error: Exception) -> RunError:
    return RunError(f"the calibration of {calibration.chip} has an invalid row: {error!r}; run `flag calibrate`")
