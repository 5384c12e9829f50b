"""Kernels from measurements."""

from dataclasses import replace

import numpy as np
import pytest
from flagcore_vendorkit.kernel_table import ATTENTION, GridAxis, Kernel, KernelSheet, learn_grid, octaves, with_measured

from flagcore.contracts import AttentionShape
from flagcore.domain.chip import Chip, Fact, Source
from flagcore.physics.roofline import Curve, Roofline

SOURCE = Source(kind="datasheet", detail="made up")
TABLED = Chip(
    name="x",
    vendor="x",
    memory_bandwidth_bytes_per_second=Fact(value=2e12, source=SOURCE),
    dense_flops_per_second={"bf16": Fact(value=4e14, source=SOURCE), "fp8": Fact(value=8e14, source=SOURCE)},
)
TRUTH = Roofline(chip=TABLED, curve=Curve(gemm_share=0.6, attention_share=0.4, memory_share=0.7, elementwise_share=0.5))
SHAPES = [(m, n, k) for m in (64, 512, 4096, 16384) for n in (1536, 4096, 11008) for k in (1024, 4096)]


def column(value: float) -> np.ndarray:
    return np.array([float(value)])


def gemm(costs: Roofline, shape: tuple[int, int, int], precision: str = "bf16") -> float:
    return float(costs.gemm_seconds(*(column(size) for size in shape), precision)[0])


def measured(*, times: float = 1.0) -> KernelSheet:
    """What a chip would give whose kernels follow TRUTH, but for the products with n = 11008: `times` as long."""
    kernels = [
        Kernel(
            name="gemm",
            precision="bf16",
            sizes=tuple(map(float, shape)),
            seconds=gemm(TRUTH, shape) * (times if shape[1] == 11008 else 1.0),
        )
        for shape in SHAPES
    ]
    for length in (512.0, 2048.0, 8192.0):
        sizes = (1.0, 32.0, 8.0, length, length, 128.0)
        shape = AttentionShape(**dict(zip(ATTENTION, map(column, sizes), strict=True)))
        for name, model in (
            ("attention", TRUTH.attention_seconds),
            ("attention_backward", TRUTH.attention_backward_seconds),
        ):
            seconds = float(model(shape, "bf16")[0])
            kernels.append(Kernel(name=name, precision="bf16", sizes=sizes, seconds=seconds))
    for size in (1e8, 1e9):
        kernels.append(Kernel(name="copy", sizes=(size,), seconds=size / 1.4e12 + 2e-6))
        kernels.append(Kernel(name="elementwise", sizes=(size,), seconds=size / 1e12 + 2e-6))
        kernels.append(Kernel(name="host_copy", sizes=(size,), seconds=size / 4e10 + 1e-5))
    return KernelSheet((*kernels, Kernel(name="launch", sizes=(), seconds=7e-6)))


TABLE = with_measured(Roofline(chip=TABLED), measured())


def test_a_table_recovers_the_efficiencies_of_the_measured_chip() -> None:
    unseen = (2048, 6144, 2048)
    assert gemm(TABLE, unseen) == pytest.approx(gemm(TRUTH, unseen), rel=0.02)
    shape = AttentionShape(**dict(zip(ATTENTION, map(column, (2, 16, 16, 4096, 4096, 128)), strict=True)))
    assert TABLE.attention_seconds(shape, "bf16") == pytest.approx(TRUTH.attention_seconds(shape, "bf16"), rel=0.02)
    assert TABLE.memory_seconds(column(3e8)) == pytest.approx(3e8 / 1e12 + 2e-6, rel=0.01)
    assert TABLE.host_copy_seconds(column(3e8)) == pytest.approx(3e8 / 4e10 + 1e-5, rel=0.01)
    assert TABLE.launch_seconds() == 7e-6


def test_library_inefficiencies_are_learned_locally() -> None:
    table = with_measured(Roofline(chip=TABLED), measured(times=1.5))
    bad, near, far = (4096, 11008, 4096), (4096, 10752, 4096), (4096, 131072, 4096)
    assert gemm(table, bad) == pytest.approx(1.5 * gemm(TRUTH, bad), rel=0.1)
    assert 1.2 < gemm(table, near) / gemm(TRUTH, near) < 1.5
    assert gemm(table, far) == pytest.approx(gemm(TRUTH, far), rel=0.1)


def test_another_precision_is_scaled_by_the_peaks() -> None:
    shape = (8192, 8192, 8192)
    assert gemm(TABLE, shape, "fp8") == pytest.approx(gemm(TRUTH, shape, "fp8"), rel=0.02)
    assert gemm(TABLE, shape, "fp16") != gemm(TABLE, shape, "fp16")  # no peak: not invented


def test_a_bound_corrects_downwards_only() -> None:
    shape = (1024, 4096, 4096)
    for seconds, expected in ((5e-4, gemm(TABLE, shape)), (2e-5, 2e-5)):
        bound = Kernel(name="gemm", precision="bf16", sizes=tuple(map(float, shape)), seconds=seconds, bound=True)
        table = with_measured(Roofline(chip=TABLED), KernelSheet((*measured().kernels, bound)))
        assert gemm(table, shape) == pytest.approx(expected, rel=0.25)


def test_unpublished_peaks_are_replaced_by_measured_ones() -> None:
    table = with_measured(Roofline(chip=Chip(name="bare", vendor="x")), measured())
    for shape in SHAPES:
        assert gemm(table, shape) == pytest.approx(gemm(TRUTH, shape), rel=0.1)
    assert "measured" in table.chip.dense_flops_per_second["bf16"].source.kind


def test_an_empty_sheet_changes_nothing() -> None:
    table, roofline = with_measured(Roofline(chip=TABLED), KernelSheet(())), Roofline(chip=TABLED)
    assert replace(table.curve, gemm_shares={}, run_slowdown=1.0) == replace(roofline.curve, gemm_shares={})
    assert gemm(table, SHAPES[0]) == gemm(roofline, SHAPES[0])


def test_columns_of_any_shape_that_broadcasts_are_answered() -> None:
    m, n = np.array([[64.0], [4096.0]]), np.array([1536.0, 4096.0, 11008.0])
    both = TABLE.gemm_seconds(m, n, column(4096), "bf16")
    assert both.shape == (2, 3)
    assert both[1, 2] == gemm(TABLE, (4096, 11008, 4096))


def test_octaves_are_exact_at_powers_of_two_and_linear_between() -> None:
    assert octaves(np.array([1.0, 2.0, 1024.0, 1536.0, 1792.0])).tolist() == [0.0, 1.0, 10.0, 10.5, 10.75]


def test_a_correction_is_constant_beyond_its_grid() -> None:
    axis = GridAxis(first=0, last=4, steps=2, reach=2.0)
    found = learn_grid((axis, axis, axis), np.array([[16.0, 16.0, 16.0]]), np.array([0.3]))
    inside, outside = (found(*(column(size),) * 3)[0] for size in (16.0, 4096.0))
    assert inside == pytest.approx(outside)
    assert 1.2 < inside < np.exp(0.3)


def test_attention_in_a_precision_of_unknown_peak_leaves_the_other_precisions_as_they_are() -> None:
    kernels = [replace(each, precision="fp16") if each.name == "attention" else each for each in measured().kernels]
    table = with_measured(Roofline(chip=TABLED), KernelSheet(tuple(kernels)))
    assert table.curve.attention_share == Curve().attention_share
