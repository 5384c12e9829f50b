"""Kernels from a chip's facts and a curve."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest

from flagcore.contracts import AttentionShape
from flagcore.domain.chip import Chip, Fact, Source
from flagcore.domain.space import FloatArray
from flagcore.physics.roofline import Curve, KernelCostStack, Roofline, with_slowdown


def fact(value: float) -> Fact:
    return Fact(value=value, source=Source(kind="datasheet", detail="made up for this test"))


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


@pytest.mark.filterwarnings("error")
def test_a_layer_without_an_indexer_of_its_own_has_a_product_of_no_size() -> None:
    assert np.isfinite(ROOFLINE.gemm_seconds(one(1024.0), one(4096.0), one(0.0), "bf16"))


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
    precisions = ("bf16", "fp8", "mxfp8", "nvfp4", "mxfp4")
    bf16, fp8, mxfp8, nvfp4, mxfp4 = (ROOFLINE.gemm_seconds(side, side, side, each)[0] for each in precisions)
    assert 1.6 < bf16 / fp8 < 2.0
    assert fp8 < mxfp8 < 1.05 * fp8
    assert 1.4 < fp8 / nvfp4 < fp8 / mxfp4 < 2.0
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
