"""Costs from a calibration."""

from dataclasses import replace

import numpy as np
import pytest

from flagcore.errors import RunError
from flagcore.physics.roofline import Curve
from flagcore.tuner.calibration import collective_table, kernel_table
from tests.tuner.calibration.test_store import MADE, X1


def test_kernels_are_priced_as_they_were_measured() -> None:
    side = np.array([64.0])
    table = kernel_table(MADE, X1, Curve())
    assert table.gemm_seconds(side, side, side, "bf16") == pytest.approx(3e-6, rel=0.05)


def test_collectives_become_curves_by_kind_and_ranks() -> None:
    rows = tuple(
        {"collective": kind, "ranks": ranks, "bytes": size, "us": size / 64}
        for kind in ("all_reduce", "all_gather")
        for ranks in (2, 4)
        for size in (4096, 1024)
    )
    table = collective_table(replace(MADE, rows=rows))
    assert {(curve.kind, curve.ranks) for curve in table.curves} == {
        (kind, ranks) for kind in ("all_reduce", "all_gather") for ranks in (2, 4)
    }
    assert all(curve.payload_bytes == (1024.0, 4096.0) for curve in table.curves)
    assert table.curves[0].seconds == pytest.approx((16e-6, 64e-6))


def test_an_outlier_of_a_small_message_is_capped_by_larger_ones() -> None:
    times = {1024: 2000.0, 4096: 300.0, 16384: 400.0}
    rows = tuple({"collective": "send", "ranks": 2, "bytes": size, "us": us} for size, us in times.items())
    table = collective_table(replace(MADE, rows=rows))
    assert table.curves[0].seconds == pytest.approx((300e-6, 300e-6, 400e-6))


def test_one_device_has_no_collectives() -> None:
    assert collective_table(replace(MADE, rows=MADE.rows[:1])) is None


@pytest.mark.parametrize("row", [{"kernel": "gemm"}, {"kernel": "x", "us": 1}, {"collective": "send", "ranks": "two"}])
def test_a_bad_row_is_reported(row: dict[str, object]) -> None:
    broken = replace(MADE, rows=(row,))
    with pytest.raises(RunError, match=MADE.chip):
        kernel_table(broken, X1, Curve()) if "kernel" in row else collective_table(broken)


@pytest.mark.parametrize(
    "wrong", [{"ranks": 0}, {"bytes": -1}, {"us": 0}, {"us": float("inf")}, {"collective": "shout"}]
)
def test_an_impossible_collective_is_reported(wrong: dict[str, object]) -> None:
    row = {"collective": "all_reduce", "ranks": 2, "bytes": 1024, "us": 16.0, **wrong}
    with pytest.raises(RunError, match=MADE.chip):
        collective_table(replace(MADE, rows=(row,)))
