"""Files of measured kernels and collectives become costs."""

import json
import sys
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
