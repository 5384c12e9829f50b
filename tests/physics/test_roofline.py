"""Kernels from a chip's facts and a curve, and from measurements."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest

from flagcore.contracts import AttentionShape
from flagcore.domain.chip import Chip, Fact, Source
from flagcore.domain.space import FloatArray
from flagcore.physics.kernel_table import ATTENTION, GridAxis, Kernel, KernelSheet, learn_grid, octaves, with_measured
from flagcore.physics.roofline import Curve, KernelCostStack, Roofline, with_slowdown

DATASHEET = Source(kind="datasheet", detail="made up for this test")


def fact(value: float) -> Fact:
    return Fact(value=value, source=DATASHEET)


CHIP = Chip(
    name="test-chip",
    vendor="test",
    memory_bandwidth_bytes_per_second=fact(3e12),
    dense_flops_per_second={"fp32": fact(60e12), "bf16": fact(900e12), "fp8": fact(1800e12), "fp4": fact(3600e12)},
)
ROOFLINE = Roofline(chip=CHIP)


def one(value: float) -> np.ndarray:
    return np.array([value])


def shaped(queries: float, keys: float, **sizes: float) -> AttentionShape:
    named = {"batch": 1.0, "heads": 32.0, "groups": 8.0, "head_dim": 128.0, "queries": queries, "keys": keys, **sizes}
    return AttentionShape(**{name: one(size) for name, size in named.items()})


def attention(queries: float, keys: float, **sizes: float) -> tuple[float, float]:
    """Return the seconds of the forward and of the backward pass."""
    shape = shaped(queries, keys, **sizes)
    models = (ROOFLINE.attention_seconds, ROOFLINE.attention_backward_seconds)
    forward, backward = (float(model(shape, "bf16")[0]) for model in models)
    return forward, backward


def test_large_products_reach_more_of_the_peak_than_small_ones() -> None:
    side = np.array([64.0, 512.0, 4096.0, 16384.0])
    rate = 2 * side**3 / ROOFLINE.gemm_seconds(side, side, side, "bf16") / 900e12
    assert (np.diff(rate) > 0).all()
    assert rate[0] < 0.01
    assert 0.75 < rate[-1] < 0.85


def test_a_thin_product_is_bound_by_memory() -> None:
    time = ROOFLINE.gemm_seconds(one(1.0), one(8192.0), one(8192.0), "bf16")
    assert time[0] == pytest.approx(2 * 8192 * 8194 / (0.91 * 3e12) + 2e-6, rel=0.02)


def test_a_few_rows_fill_a_tile_unless_the_chip_has_few_flops_per_byte() -> None:
    slow, rows = replace(CHIP, dense_flops_per_second={"bf16": fact(10e12)}), np.array([1.0, 16.0, 17.0, 64.0, 65.0])
    whole, parts = (
        Roofline(chip=slow, curve=Curve(least_rows=least)).gemm_seconds(rows, one(8192.0), one(8192.0), "bf16")
        for least in (64.0, 16.0)
    )
    assert whole[0] == pytest.approx(whole[3], rel=0.01)
    assert (parts / whole)[:3] == pytest.approx([0.25, 0.25, 0.5], abs=0.02)
    assert (parts == whole)[3:].all()


def test_one_tile_more_costs_another_wave() -> None:
    curve = Curve(units=128.0)
    fits, too_many = (
        Roofline(chip=CHIP, curve=curve).gemm_seconds(one(m), one(512.0), one(8192.0), "bf16")[0]
        for m in (16.0 * 64.0, 17.0 * 64.0)
    )
    assert too_many > 1.6 * fits


def test_more_of_anything_never_takes_less_time() -> None:
    sizes = np.arange(1.0, 6000.0, 13.0)
    fixed = np.full_like(sizes, 1536.0)
    for precision in ("bf16", "fp8", "nvfp4", "fp32"):
        for shape in ((sizes, fixed, fixed), (fixed, sizes, fixed), (fixed, fixed, sizes)):
            assert (np.diff(ROOFLINE.gemm_seconds(*shape, precision)) > -1e-12).all()


def test_narrower_formats_are_faster_on_large_products_and_pay_for_their_casts_on_thin_ones() -> None:
    side = one(8192.0)
    bf16, fp8, mxfp8, nvfp4 = (
        ROOFLINE.gemm_seconds(side, side, side, precision)[0] for precision in ("bf16", "fp8", "mxfp8", "nvfp4")
    )
    assert 1.6 < bf16 / fp8 < 2.0
    assert fp8 < mxfp8 < 1.05 * fp8
    assert 1.4 < fp8 / nvfp4 < 2.0
    thin = (side, one(64.0), one(512.0))
    assert ROOFLINE.gemm_seconds(*thin, "fp8")[0] > ROOFLINE.gemm_seconds(*thin, "bf16")[0]


def test_formats_narrower_than_16_bits_compute_attention_in_bf16() -> None:
    shape = shaped(4096, 4096)
    assert ROOFLINE.attention_seconds(shape, "nvfp4") == ROOFLINE.attention_seconds(shape, "bf16")
    assert ROOFLINE.attention_seconds(shape, "fp32") > 5 * ROOFLINE.attention_seconds(shape, "bf16")


def test_an_unknown_peak_stays_unknown() -> None:
    assert np.isnan(ROOFLINE.gemm_seconds(one(64.0), one(64.0), one(64.0), "tf32")).all()
    bare = Roofline(chip=Chip(name="bare", vendor="test"))
    assert np.isnan(bare.memory_seconds(one(1e9))).all()
    assert np.isnan(bare.attention_seconds(shaped(64, 64), "bf16")).all()


def test_a_precision_may_reach_its_own_share_of_its_peak() -> None:
    side = one(16384.0)
    own = Roofline(chip=CHIP, curve=replace(Curve(), gemm_shares={"fp8": 0.405}))
    assert own.gemm_seconds(side, side, side, "fp8") == pytest.approx(
        2 * ROOFLINE.gemm_seconds(side, side, side, "fp8"), rel=0.05
    )
    assert own.gemm_seconds(side, side, side, "bf16") == ROOFLINE.gemm_seconds(side, side, side, "bf16")


def test_attention_scales_with_the_products_of_another_precision() -> None:
    double = Roofline(chip=CHIP, curve=replace(Curve(), gemm_share=0.4, gemm_shares={"fp32": 0.8}))
    half = Roofline(chip=CHIP, curve=replace(Curve(), gemm_share=0.4))
    shape = shaped(16384, 16384)
    assert half.attention_seconds(shape, "fp32") == pytest.approx(2 * double.attention_seconds(shape, "fp32"), rel=0.01)
    assert half.attention_seconds(shape, "bf16") == double.attention_seconds(shape, "bf16")


def test_attention_grows_with_the_square_of_the_sequence() -> None:
    assert 3.7 < attention(32768, 32768)[0] / attention(16384, 16384)[0] < 4.0


def test_a_kernel_of_attention_may_reach_its_own_share_of_the_peak() -> None:
    curve = Curve()
    own = Roofline(chip=CHIP, curve=replace(curve, attention_shares={"slow": curve.attention_share / 2}))
    usual, slow = shaped(8192, 8192), replace(shaped(8192, 8192), kernel="slow")
    for seconds in (own.attention_seconds, own.attention_backward_seconds):
        assert float(seconds(slow, "bf16")[0]) == pytest.approx(2 * float(seconds(usual, "bf16")[0]), rel=0.05)


def test_attention_backward_runs_five_products_for_two_in_forward() -> None:
    forward, backward = attention(8192, 8192, groups=32)
    assert 2.5 < backward / forward < 3.0


def test_fewer_groups_than_heads_cost_backward_a_sum_and_spare_forward_nothing_when_bound_by_arithmetic() -> None:
    grouped, plain = attention(4096, 4096, groups=8), attention(4096, 4096, groups=32)
    assert grouped[0] == pytest.approx(plain[0], rel=0.01)
    assert grouped[1] > plain[1]


def test_a_small_head_dimension_costs_more_than_its_share() -> None:
    assert attention(8192, 8192, head_dim=64)[0] > 0.6 * attention(8192, 8192)[0]


def test_a_single_query_is_bound_by_reading_keys_and_values() -> None:
    for groups in (8.0, 4.0):
        expected = 64 * groups * 32768 * 128 * 2 * 2 / (0.91 * 3e12)
        assert attention(1, 32768, batch=64, groups=groups)[0] == pytest.approx(expected, rel=0.1)


def test_a_cached_prefix_costs_its_scores_but_not_its_queries() -> None:
    full, first, last = attention(8192, 8192)[0], attention(4096, 4096)[0], attention(4096, 8192)[0]
    assert first + last == pytest.approx(full, rel=0.1)
    assert last > 2 * first


def test_copies_to_the_host_run_at_the_links_rate_after_a_start() -> None:
    roofline = Roofline(chip=CHIP, curve=Curve(host_bytes_per_second=50e9))
    assert roofline.host_copy_seconds(one(50e9)) == pytest.approx(1.0, rel=0.001)
    assert roofline.host_copy_seconds(one(0.0)) > 0


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


SIZE = np.array([1.0, 10.0, 100.0])


@dataclass(frozen=True)
class LimitedCosts:
    """Knows sizes up to a limit: a size takes `rate` seconds a unit."""

    limit: float
    rate: float
    launch: float = math.nan

    def gemm_seconds(self, m: FloatArray, n: FloatArray, k: FloatArray, precision: str) -> FloatArray:
        return self.memory_seconds(m)

    def attention_seconds(self, shape: AttentionShape, precision: str) -> FloatArray:
        return self.memory_seconds(shape.queries)

    def attention_backward_seconds(self, shape: AttentionShape, precision: str) -> FloatArray:
        return self.memory_seconds(shape.queries)

    def memory_seconds(self, bytes_moved: FloatArray) -> FloatArray:
        return np.where(bytes_moved <= self.limit, self.rate * bytes_moved, np.nan)

    def host_copy_seconds(self, bytes_moved: FloatArray) -> FloatArray:
        return self.memory_seconds(bytes_moved)

    def launch_seconds(self) -> float:
        return self.launch

    def run_slowdown(self) -> float:
        return 1.2


STACK = KernelCostStack((LimitedCosts(1.0, 1.0), LimitedCosts(10.0, 2.0, launch=5.0), LimitedCosts(1e9, 3.0)))


def test_each_element_comes_from_the_first_source_that_knows_it() -> None:
    assert STACK.memory_seconds(SIZE).tolist() == [1.0, 20.0, 300.0]
    assert STACK.gemm_seconds(SIZE, SIZE, SIZE, "bf16").tolist() == [1.0, 20.0, 300.0]
    assert STACK.launch_seconds() == 5.0


def test_a_slowdown_applies_only_to_kernels_of_the_device() -> None:
    slow = with_slowdown(STACK, 2.0)
    assert slow.memory_seconds(SIZE).tolist() == [2.0, 40.0, 600.0]
    assert slow.host_copy_seconds(SIZE).tolist() == STACK.host_copy_seconds(SIZE).tolist()
    assert (slow.launch_seconds(), slow.run_slowdown(), STACK.run_slowdown()) == (5.0, 1.0, 1.2)
    assert with_slowdown(LimitedCosts(1e9, 3.0), 2.0).memory_seconds(SIZE).tolist() == pytest.approx([6.0, 60.0, 600.0])
