"""Files of measured kernels and collectives become costs. Kernels from measurements."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flagcore_vendorkit.chip_file import (
    collective_table,
    kernel_costs,
    read_collectives,
    read_curve,
    read_kernels,
    read_provenance,
    shared_costs,
)
from flagcore_vendorkit.kernel_table import ATTENTION, GridAxis, Kernel, KernelSheet, learn_grid, octaves, with_measured

from flagcore.contracts import AttentionShape
from flagcore.domain.chip import Chip, Fact, Source
from flagcore.errors import SpecError
from flagcore.physics.roofline import Curve, Roofline
from tests.checks import given, refuses

PEAK = Fact(value=1e14, source=Source(kind="datasheet", detail="made up"))
CHIP = Chip(
    name="X1-64G",
    vendor="x",
    memory_bandwidth_bytes_per_second=Fact(value=1e12, source=PEAK.source),
    dense_flops_per_second={"bf16": PEAK},
)
CURVE = """\
curve: {gemm_share: 0.6, gemm_shares: {fp8: 0.5}, launch_seconds: 2.0e-5}
source: {kind: estimated, method: guessed for this test}
"""
PROVENANCE = """\
how: a clock
software: {torch: 2.10.0}
date: 2026-11-20
event_us: 4
host_us: {gemm: 30}
slowed: {gemm: {after_us: 1000, by: 0.5}}
"""


def gemm(m: int, us: float) -> str:
    return json.dumps({"kernel": "gemm", "precision": "bf16", "m": m, "n": 4096, "k": 4096, "us": us})


@pytest.fixture
def costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An importable package and its folder of costs for the chip."""
    folder = tmp_path / "shipped" / "costs" / "x1-64g"
    folder.mkdir(parents=True)
    (tmp_path / "shipped" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "shipped", raising=False)
    return folder


def test_a_chip_without_files_uses_the_core_model(costs: Path) -> None:
    assert kernel_costs("shipped", CHIP) is None


def test_a_curve_overrides_only_its_own_constants(costs: Path) -> None:
    (costs / "curve.yaml").write_text(CURVE)
    result = kernel_costs("shipped", CHIP)
    assert isinstance(result, Roofline)
    assert result.curve == Curve(gemm_share=0.6, gemm_shares={"fp8": 0.5}, launch_seconds=2e-5)


def test_measured_kernels_make_a_table(costs: Path) -> None:
    (costs / "provenance.yaml").write_text(PROVENANCE)
    (costs / "kernels.jsonl").write_text(gemm(2048, 1504.0))
    result = kernel_costs("shipped", CHIP)
    assert isinstance(result, Roofline)
    assert result.corrections.keys() == {("gemm", "bf16")}
    m, side = np.array([2048.0]), np.array([4096.0])
    clock = 1.0 + 0.5 / (1.0 + (1000 / 1500) ** 4)
    assert result.gemm_seconds(m, side, side, "bf16") == pytest.approx(1500e-6 / clock, rel=0.02)


def test_measured_kernels_without_their_provenance_are_refused(costs: Path) -> None:
    (costs / "kernels.jsonl").write_text(gemm(2048, 1504.0))
    with pytest.raises(SpecError, match=r"provenance\.yaml.* is missing"):
        kernel_costs("shipped", CHIP)


def test_times_that_the_host_limited_are_bounds() -> None:
    sheet = read_kernels(gemm(1, 29.0) + "\n\n" + gemm(2048, 600.0), "f", read_provenance(PROVENANCE, "p"))
    assert [kernel.bound for kernel in sheet.kernels] == [True, False]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("curve: {gemm_shore: 0.6}\nsource: {kind: measured, how: x}", "curve.gemm_shore"),
        ("curve: {gemm_share: fast}\nsource: {kind: measured, how: x}", "curve.gemm_share"),
        ("curve: {gemm_share: -1}\nsource: {kind: measured, how: x}", "curve.gemm_share"),
        ("curve: {tile: 0}\nsource: {kind: measured, how: x}", "curve.tile"),
        ("curve: {gemm_shares: {fp8: 0}}\nsource: {kind: measured, how: x}", "curve.gemm_shares.fp8"),
        ("curve: {gemm_share: 0.6}", "source"),
        ("source: {kind: measured, how: x}", "curve"),
        ("curve: {gemm_share: 0.8}\nof: dreams\nsource: {kind: published, where: a report}", "of"),
    ],
)
def test_an_invalid_curve_is_reported_with_its_key(text: str, key: str) -> None:
    with refuses(key):
        read_curve(text, "curve.yaml")


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"kernel": "gemv", "us": 1}',
        '{"kernel": "gemm", "precision": "bf16", "m": 1, "n": 1, "us": 1}',
        '{"kernel": "copy", "bytes": 1, "us": 0}',
        '{"kernel": "copy", "bytes": -1, "us": 1}',
        '{"kernel": "copy", "bytes": 1, "us": Infinity}',
    ],
)
def test_a_bad_kernel_is_reported_with_its_line(line: str) -> None:
    with pytest.raises(SpecError, match="line 2"):
        read_kernels(gemm(1, 1.0) + "\n" + line, "kernels.jsonl", read_provenance(PROVENANCE, "p"))


@pytest.mark.parametrize(("of", "longer"), [("", 1.0), ("of: runs\n", 1.0), ("of: kernels\n", 1.31)])
def test_a_curve_reports_whether_it_is_of_runs_or_of_kernels_alone(of: str, longer: float) -> None:
    text = f"curve: {{gemm_share: 0.8}}\n{of}source: {{kind: published, where: a report}}\n"
    assert read_curve(text, "curve.yaml").run_slowdown == longer


GOOD = """
level: node
source: {kind: measured, how: accl-tests, software: accl 1.2}
curves:
  - {kind: all_reduce, ranks: 8, payload_bytes: [1024, 1048576], seconds: [1.2e-05, 3.0e-05]}
  - {kind: send, ranks: 2, payload_bytes: [1048576], seconds: [4.0e-05]}
"""


def test_curves_are_read_with_their_source() -> None:
    table = read_collectives(GOOD, "collectives.yaml")
    assert (table.level, table.source) == ("node", "measured: accl-tests, software accl 1.2")
    first, second = table.curves
    assert (first.kind, first.ranks, first.payload_bytes, first.seconds) == (
        "all_reduce",
        8,
        (1024.0, 1048576.0),
        (1.2e-05, 3.0e-05),
    )
    assert second.kind == "send"


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (("source: {kind: measured, how: accl-tests, software: accl 1.2}", ""), "source"),
        (("kind: all_reduce", "kind: broadcast"), "curves[0]"),
        (("ranks: 8", "ranks: 1"), "curves[0]"),
        (("kind: send, ranks: 2", "kind: send, ranks: 4"), "curves[1]"),
        (("[1024, 1048576]", "[1048576, 1024]"), "curves[0]"),
        (("[1024, 1048576]", "[1024]"), "curves[0]"),
        (("[1024, 1048576]", "[1 KiB, 1 MiB]"), "curves[0].payload_bytes[0]"),
        (("[1.2e-05, 3.0e-05]", "[12, 30]"), "curves[0]"),
        (("[1.2e-05, 3.0e-05]", "[-1.2e-05, 3.0e-05]"), "curves[0]"),
        (("kind: send, ranks: 2", "kind: all_reduce, ranks: 8"), "curves"),
        (("ranks: 8", "rank: 8"), "curves[0].ranks"),
        (("level: node", "levels: node"), "levels"),
        ((GOOD, "source: {kind: measured, how: nothing}\n"), "curves"),
    ],
)
def test_an_error_is_reported_with_its_key(change: tuple[str, str], key: str) -> None:
    with refuses(key):
        read_collectives(GOOD.replace(*change), "collectives.yaml")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package that ships costs of the A1."""
    folder = tmp_path / "costs_of_acme" / "costs" / "a1"
    folder.mkdir(parents=True)
    (folder / "collectives.yaml").write_text(GOOD)
    (folder / "curve.yaml").write_text(CURVE)
    (tmp_path / "costs_of_acme" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "costs_of_acme", raising=False)
    shared_costs.cache_clear()
    return "costs_of_acme"


def share(tmp_path: Path, file: str, same_as: str) -> None:
    text = f"{file}:\n  - {{same_as: {same_as}, chips: [A1-Lite], source: {{kind: estimated, method: a guess}}}}\n"
    (tmp_path / "costs_of_acme" / "costs" / "same_as.yaml").write_text(text)


def test_chips_share_the_files_that_same_as_names(package: str, tmp_path: Path) -> None:
    share(tmp_path, "collectives.yaml", "A1")
    own, other = (Chip(name=name, vendor="acme") for name in ("A1", "A1-Lite"))
    table = given(collective_table(package, own))
    assert collective_table(package, other) == table
    assert collective_table(package, Chip(name="A2", vendor="acme")) is None
    assert kernel_costs(package, other) is None
    share(tmp_path, "curve.yaml", "A1")
    shared_costs.cache_clear()
    costs = kernel_costs(package, other)
    assert isinstance(costs, Roofline)
    assert costs.curve.gemm_share == 0.6


@pytest.mark.parametrize(
    ("file", "chip"), [("collectives.yaml", "A9"), ("serving.yaml", "A1"), ("curve.yaml", "A1-Lite")]
)
def test_a_reference_to_a_chip_without_the_file_is_reported(package: str, tmp_path: Path, file: str, chip: str) -> None:
    share(tmp_path, file, chip)
    with refuses(f"{file}[0].same_as"):
        collective_table(package, Chip(name="A1", vendor="acme"))


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


def gemm_row(costs: Roofline, shape: tuple[int, int, int], precision: str = "bf16") -> float:
    return float(costs.gemm_seconds(*(column(size) for size in shape), precision)[0])


def measured(*, times: float = 1.0) -> KernelSheet:
    """What a chip would give whose kernels follow TRUTH, but for the products with n = 11008: `times` as long."""
    kernels = [
        Kernel(
            name="gemm",
            precision="bf16",
            sizes=tuple(map(float, shape)),
            seconds=gemm_row(TRUTH, shape) * (times if shape[1] == 11008 else 1.0),
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
    assert gemm_row(TABLE, unseen) == pytest.approx(gemm_row(TRUTH, unseen), rel=0.02)
    shape = AttentionShape(**dict(zip(ATTENTION, map(column, (2, 16, 16, 4096, 4096, 128)), strict=True)))
    assert TABLE.attention_seconds(shape, "bf16") == pytest.approx(TRUTH.attention_seconds(shape, "bf16"), rel=0.02)
    assert TABLE.memory_seconds(column(3e8)) == pytest.approx(3e8 / 1e12 + 2e-6, rel=0.01)
    assert TABLE.host_copy_seconds(column(3e8)) == pytest.approx(3e8 / 4e10 + 1e-5, rel=0.01)
    assert TABLE.launch_seconds() == 7e-6


def test_library_inefficiencies_are_learned_locally() -> None:
    table = with_measured(Roofline(chip=TABLED), measured(times=1.5))
    bad, near, far = (4096, 11008, 4096), (4096, 10752, 4096), (4096, 131072, 4096)
    assert gemm_row(table, bad) == pytest.approx(1.5 * gemm_row(TRUTH, bad), rel=0.1)
    assert 1.2 < gemm_row(table, near) / gemm_row(TRUTH, near) < 1.5
    assert gemm_row(table, far) == pytest.approx(gemm_row(TRUTH, far), rel=0.1)


def test_another_precision_is_scaled_by_the_peaks() -> None:
    shape = (8192, 8192, 8192)
    assert gemm_row(TABLE, shape, "fp8") == pytest.approx(gemm_row(TRUTH, shape, "fp8"), rel=0.02)
    assert gemm_row(TABLE, shape, "fp16") != gemm_row(TABLE, shape, "fp16")  # no peak: not invented


def test_a_bound_corrects_downwards_only() -> None:
    shape = (1024, 4096, 4096)
    for seconds, expected in ((5e-4, gemm_row(TABLE, shape)), (2e-5, 2e-5)):
        bound = Kernel(name="gemm", precision="bf16", sizes=tuple(map(float, shape)), seconds=seconds, bound=True)
        table = with_measured(Roofline(chip=TABLED), KernelSheet((*measured().kernels, bound)))
        assert gemm_row(table, shape) == pytest.approx(expected, rel=0.25)


def test_unpublished_peaks_are_replaced_by_measured_ones() -> None:
    table = with_measured(Roofline(chip=Chip(name="bare", vendor="x")), measured())
    for shape in SHAPES:
        assert gemm_row(table, shape) == pytest.approx(gemm_row(TRUTH, shape), rel=0.1)
    assert "measured" in table.chip.dense_flops_per_second["bf16"].source.kind


def test_an_empty_sheet_changes_nothing() -> None:
    table, roofline = with_measured(Roofline(chip=TABLED), KernelSheet(())), Roofline(chip=TABLED)
    assert replace(table.curve, gemm_shares={}, run_slowdown=1.0) == replace(roofline.curve, gemm_shares={})
    assert gemm_row(table, SHAPES[0]) == gemm_row(roofline, SHAPES[0])


def test_columns_of_any_shape_that_broadcasts_are_answered() -> None:
    m, n = np.array([[64.0], [4096.0]]), np.array([1536.0, 4096.0, 11008.0])
    both = TABLE.gemm_seconds(m, n, column(4096), "bf16")
    assert both.shape == (2, 3)
    assert both[1, 2] == gemm_row(TABLE, (4096, 11008, 4096))


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
