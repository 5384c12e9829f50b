"""The kernel times of the plugin."""

from importlib.resources import files
from itertools import permutations, product

import numpy as np
import pytest
from flagcore_nvidia.hooks import plugin
from flagcore_vendorkit.chip_file import read_curve, read_kernels, read_provenance
from flagcore_vendorkit.kernel_table import KernelArrays, KernelSheet, with_measured

from flagcore.contracts import AttentionShape, KernelCosts
from flagcore.domain.chip import Chip
from flagcore.physics.roofline import RUNS_AS, Roofline
from tests.checks import given

COSTS = files("flagcore_nvidia").joinpath("costs").joinpath("h200")
FOLDS = 8
SLOW_RATIO = 1.15
"""Time of attention in fp32 on the H200, measured, over that of the H100, whose share of fp32 products is estimated."""

GRID = np.array(list(product((1.0, 16.0, 256.0, 2048.0, 16384.0), *[(128.0, 1024.0, 4096.0, 16384.0)] * 2))).T
"""Products m, n, k: small, large and thin."""

CORES = AttentionShape(
    batch=np.array([1.0, 4.0, 1.0, 64.0, 1.0]),
    heads=np.array([32.0, 32.0, 8.0, 32.0, 16.0]),
    groups=np.array([8.0, 8.0, 8.0, 8.0, 16.0]),
    queries=np.array([4096.0, 512.0, 32768.0, 1.0, 2048.0]),
    keys=np.array([4096.0, 512.0, 32768.0, 8192.0, 2048.0]),
    head_dim=np.array([128.0, 128.0, 128.0, 128.0, 64.0]),
)


def read(name: str) -> str:
    return COSTS.joinpath(name).read_text("utf-8")


SHEET = read_kernels(read("kernels.jsonl"), "kernels.jsonl", read_provenance(read("provenance.yaml"), "provenance"))


def chip_named(name: str) -> Chip:
    return next(chip for chip in plugin.flagcore_chips() if chip.name == name)


def costs_of(name: str) -> KernelCosts:
    return given(plugin.flagcore_kernel_costs(chip_named(name), "megatron"))


def modelled(costs: KernelCosts, kind: str, rows: KernelArrays) -> np.ndarray:
    sizes = rows.sizes.T if kind == "gemm" else (rows.attention_shape(),)
    return getattr(costs, f"{kind}_seconds")(*sizes, "bf16")


def errors(costs: KernelCosts, kind: str, rows: KernelArrays) -> np.ndarray:
    return np.abs(np.log(modelled(costs, kind, rows) / rows.seconds))


@pytest.mark.parametrize("kind", ["gemm", "attention", "attention_backward"])
def test_the_h200_table_reproduces_its_measurements_and_bounds(kind: str) -> None:
    rows, costs = SHEET.rows(kind, "bf16"), costs_of("H200")
    assert errors(costs, kind, rows.exact).mean() < 0.015
    bounds = rows.select(rows.bound)
    assert (modelled(costs, kind, bounds) < 1.12 * bounds.seconds).all()


@pytest.mark.parametrize(("kind", "mean"), [("gemm", 0.05), ("attention", 0.02), ("attention_backward", 0.025)])
def test_the_h200_table_is_close_on_unseen_kernels(kind: str, mean: float) -> None:
    roofline = Roofline(chip=chip_named("H200"), curve=read_curve(read("curve.yaml"), "curve.yaml"))
    places = np.array([place for place, kernel in enumerate(SHEET.kernels) if kernel.name == kind and not kernel.bound])
    np.random.default_rng(1).shuffle(places)
    found = []
    for fold in range(FOLDS):
        hidden = set(places[fold::FOLDS].tolist())
        seen = KernelSheet(tuple(kernel for place, kernel in enumerate(SHEET.kernels) if place not in hidden))
        unseen = KernelSheet(tuple(SHEET.kernels[place] for place in sorted(hidden)))
        found.append(errors(with_measured(roofline, seen), kind, unseen.rows(kind, "bf16")))
    assert np.concatenate(found).mean() < mean


def test_the_h100_has_a_slower_memory_than_the_h200() -> None:
    one, large = np.array([1.0]), np.array([8192.0])
    thin = [costs_of(name).gemm_seconds(one, large, large, "bf16")[0] for name in ("H100-SXM", "H200")]
    assert 1.2 < thin[0] / thin[1] < 1.5


@pytest.mark.parametrize("name", ["A100-80GB", "H100-SXM", "B200", "GB200", "B300", "GB300"])
def test_a_large_product_reaches_a_plausible_share_of_the_peak(name: str) -> None:
    large = np.array([8192.0])
    peak = chip_named(name).dense_flops_per_second["bf16"].value
    share = 2 * 8192.0**3 / costs_of(name).gemm_seconds(large, large, large, "bf16") / peak
    assert 0.4 < share[0] < 0.9


@pytest.mark.parametrize(
    ("name", "measured"),
    [
        ("A100-40GB", 19.05e12),  # FlagOpen/FlagPerf computation-FP32
        ("B200", 66.24e12),  # zzc0721/torch-performance-test-data
    ],
)
def test_large_fp32_products_are_as_fast_as_measured(name: str, measured: float) -> None:
    large = np.array([8192.0])
    assert 2 * 8192.0**3 / costs_of(name).gemm_seconds(large, large, large, "fp32")[0] == pytest.approx(measured, 0.05)


def test_a_slower_chip_is_never_predicted_clearly_faster() -> None:
    chips = plugin.flagcore_chips()
    known = {chip.name: plugin.flagcore_kernel_costs(chip, "megatron") for chip in chips}
    for old, new in permutations(chips, 2):
        for precision in ("fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4"):
            if not no_faster(old, new, precision) or (old.name, new.name) == ("GB300", "GB200"):  # measured: 1.2
                continue
            kernels = ["gemm", "memory"]
            is_wide = precision in ("fp32", "tf32")  # of fused attention there is none, and small products are rare
            if known[old.name] and known[new.name] and not is_wide:  # elsewhere the core's shares stand in
                kernels += ["attention", "attention_backward"]
            for kind in kernels:
                costs = [known[chip.name] or Roofline(chip=chip) for chip in (new, old)]
                one, other = (seconds(each, kind, precision)[-1 if is_wide else 0 :] for each in costs)
                assert (one < SLOW_RATIO * other).all(), (old.name, new.name, precision, kind, (one / other).max())


def no_faster(old: Chip, new: Chip, precision: str) -> bool:
    """Return whether, by its facts, `old` is not faster than `new`."""
    peaks = [chip.dense_flops_per_second.get(RUNS_AS.get(precision, precision)) for chip in (old, new)]
    bandwidths = [chip.memory_bandwidth_bytes_per_second for chip in (old, new)]
    return all(one and other and one.value <= other.value for one, other in (peaks, bandwidths))


def seconds(costs: KernelCosts, kind: str, precision: str) -> np.ndarray:
    if kind == "memory":
        return costs.memory_seconds(np.array([1e4, 1e6, 1e8, 1e10]))
    return getattr(costs, f"{kind}_seconds")(*(GRID if kind == "gemm" else (CORES,)), precision)


def test_a_chip_without_tables_or_curves_uses_the_core_model() -> None:
    assert plugin.flagcore_kernel_costs(Chip(name="unheard of", vendor="nvidia"), "megatron") is None
    assert plugin.flagcore_kernel_costs(Chip(name="H200", vendor="somebody else"), "megatron") is None
