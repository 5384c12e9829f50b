import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flagcore_cpu import measure, rates
from flagcore_cpu.costs import MeasuredCosts, NewTensors
from flagcore_cpu.machine import this_machine
from flagcore_cpu.rates import Rates
from flagcore_vendorkit.calibration.overlay import ExtendedPlugins
from flagcore_vendorkit.calibration.store import Calibration
from flagcore_vendorkit.chip_file import load_chips

from flagcore.contracts import AttentionShape
from flagcore.domain.chip import Chip, slowness, usual_precision
from flagcore.physics.roofline import Curve, KernelCostStack
from flagcore.plugins import LoadedPlugins
from tests.checks import given

rates_here = getattr(rates.rates_here, "__wrapped__", rates.rates_here)  # other tests measure nothing
FOUND = {
    "torch": "2.13.0",
    "date": "2026-11-23T12:00:00+00:00",
    "flops": {"fp32": 36e9, "bf16": 0.75e9, "fp16": 0.7e9},
    "attention_s": {"fp32": [0.005, 0.01], "bf16": [0.005, 0.02]},
    "elementwise": [[3e6, 5e-5], [2e8, 6e-3], [4e8, 3e-2]],
    "bytes_per_second": 2e10,
    "launch_s": 2e-6,
    "reduction": [[1024, 3e-4], [2**20, 7e-4], [2**23, 6e-3]],
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLAGCORE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(rates, "version", lambda name: "2.13.0")
    monkeypatch.setattr(rates, "_found", {})
    monkeypatch.setattr(rates, "_is_crowded", lambda: False)
    return tmp_path / "home"


def printing(monkeypatch: pytest.MonkeyPatch, printed: str | None) -> list[tuple[str, ...]]:
    """Replace the program by one that prints `printed`, and return its calls."""
    calls = list[tuple[str, ...]]()

    def tool_output(*argv: str, timeout_seconds: float, environment: Mapping[str, str]) -> str | None:
        assert environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"
        calls.append(argv)
        return printed

    monkeypatch.setattr(rates, "tool_output", tool_output)
    return calls


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the results in this process, as another process does not have them."""
    monkeypatch.setattr(rates, "_found", {})


def test_rates_of_a_machine_with_a_high_load_are_not_stored(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = printing(monkeypatch, json.dumps(FOUND))
    monkeypatch.setattr(rates, "_is_crowded", lambda: True)
    measured = given(rates_here("Zen", measure=True))
    assert measured.flops["fp32"] == 36e9
    assert rates_here("Zen", measure=False) == measured
    assert [float(each[-1]) for each in calls] == [rates.CROWDED_SECONDS]
    assert not home.exists()


def test_rates_are_measured_once_and_stored(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = printing(monkeypatch, "a banner\n" + json.dumps(FOUND))
    assert rates_here("Zen", measure=False) is None
    measured = given(rates_here("Zen", measure=True))
    assert measured.flops["fp32"] == 36e9
    forget(monkeypatch)
    assert rates_here("Zen", measure=False) == measured
    assert len(calls) == 1
    assert len(list((home / "calibrations" / "rates").iterdir())) == 1


@pytest.mark.parametrize("change", ["processor", "torch", "cores", "variable"])
def test_other_kernels_are_measured_anew(home: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    calls = printing(monkeypatch, json.dumps(FOUND))
    rates_here("Zen", measure=True)
    if change == "torch":
        monkeypatch.setattr(rates, "version", lambda name: "2.14.0")
    if change == "cores":
        monkeypatch.setattr(rates.host, "cores", lambda: 77)
    if change == "variable":
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    rates_here("Zen 2" if change == "processor" else "Zen", measure=True)
    assert len(calls) == 2


@pytest.mark.parametrize("printed", [None, "", "{", "[]", json.dumps({**FOUND, "flops": {}}), '{"torch": NaN}'])
def test_a_failed_measurement_is_no_error(home: Path, monkeypatch: pytest.MonkeyPatch, printed: str | None) -> None:
    calls = printing(monkeypatch, printed)
    assert [rates_here("Zen", measure=True) for _ in range(2)] == [None, None]
    assert len(calls) == 1
    assert not home.exists()


def test_a_damaged_file_is_measured_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = printing(monkeypatch, json.dumps(FOUND))
    rates_here("Zen", measure=True)
    (file,) = (home / "calibrations" / "rates").iterdir()
    file.write_text(file.read_text()[:50])
    forget(monkeypatch)
    assert rates_here("Zen", measure=True) is not None
    assert len(calls) == 2


def test_a_home_that_cannot_be_written_is_no_error(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = printing(monkeypatch, json.dumps(FOUND))
    home.write_text("a file, so no folder can be made in it")
    assert rates_here("Zen", measure=True) is not None
    assert rates_here("Zen", measure=False) is not None  # this process remembers
    assert len(calls) == 1


def test_without_torch_nothing_runs(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = printing(monkeypatch, json.dumps(FOUND))

    def missing(name: str) -> str:
        raise rates.PackageNotFoundError(name)

    monkeypatch.setattr(rates, "version", missing)
    assert rates_here("Zen", measure=True) is None
    assert not calls


def test_a_chip_has_measured_rates_and_the_slow_precisions() -> None:
    chip = measured_chip()
    assert slowness(chip, "bf16") == pytest.approx(48)
    assert usual_precision(chip) == "fp32"
    assert "emulated" in chip.notes
    assert {fact.source.kind for fact in chip.figures.values()} == {"measured"}
    assert "torch 2.13.0" in chip.dense_flops_per_second["bf16"].source.detail
    assert given(chip.link).latency_seconds == pytest.approx(1.5e-4)


def test_only_products_are_slow_in_an_emulated_precision() -> None:
    curve = Curve(units=1.0, tile=8.0, tile_overhead=0.0, split_depth=1.0, attention_tail=0.0)
    costs = MeasuredCosts.of(measured_chip(), curve, found())
    side, ones = np.full(1, 1024.0), np.ones(1)
    products = [float(costs.gemm_seconds(side, side, side, name)[0]) for name in ("fp32", "bf16")]
    assert products[1] / products[0] == pytest.approx(48, rel=0.3)
    assert products[0] == pytest.approx(2 * 1024**3 / 36e9, rel=0.3)
    batch, heads, length, width = (float(each) * ones for each in measure.ATTENTION)
    shape = AttentionShape(batch=batch, heads=heads, groups=heads, queries=length, keys=length, head_dim=width)
    assert float(costs.attention_seconds(shape, "bf16")[0]) == pytest.approx(0.005, rel=0.05)
    assert float(costs.attention_backward_seconds(shape, "bf16")[0]) == pytest.approx(0.02, rel=0.05)
    assert float(costs.attention_backward_seconds(shape, "fp32")[0]) == pytest.approx(0.01, rel=0.05)
    moved = np.array([3e6, 1e9])
    assert costs.memory_seconds(moved) == pytest.approx(moved * [5e-5 / 3e6, 3e-2 / 4e8], rel=0.2)


@pytest.mark.costly
def test_the_program_measures_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("FLAGCORE_HOME", str(tmp_path))
    monkeypatch.setattr(rates, "_found", {})
    monkeypatch.setattr(rates, "SECONDS", 0.05)
    monkeypatch.setattr(rates.host, "cores", lambda: 2)
    monkeypatch.setattr(rates, "_is_crowded", lambda: False)
    here = given(rates_here("any", measure=True))
    assert here.flops.keys() == {"fp32", "bf16", "fp16"}
    assert len(here.reduction) == len(measure.REDUCED_BYTES)


def found() -> Rates:
    return rates.read(json.dumps(FOUND))


def measured_chip() -> Chip:
    (chip,) = load_chips("flagcore_cpu")
    return this_machine(chip, None, found())


def test_large_results_of_products_have_new_pages() -> None:
    (chip,) = load_chips("flagcore_cpu")
    found = rates.read(json.dumps(FOUND))
    costs = MeasuredCosts.of(this_machine(chip, None, found), Curve(), found)
    rows, inner = np.full(2, 64.0), np.full(2, 512.0)
    below, above = (2**23 - 1) / 64, 2**23 / 64
    reused, new = costs.gemm_seconds(rows, np.array([below, above]), inner, "fp32")
    assert new - reused == pytest.approx(2**25 * found.new_page_seconds, rel=0.01)
    assert found.new_page_seconds == pytest.approx((3e-2 - 1.2e-2) / (4e8 * 4 / 46))


def test_calibrated_products_have_new_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    chip, found = measured_chip(), rates.read(json.dumps(FOUND))
    plugins = ExtendedPlugins((), lambda text: None)
    row = {"kernel": "gemm", "precision": "fp32", "m": 64, "n": 512, "k": 512, "us": 900.0, "spread": 0.0}
    calibration = Calibration(
        chip=chip.name, aliases=(), driver="", torch="2.13.0", devices=1, date="2026-11-24", how="", rows=(row,)
    )
    stack = KernelCostStack((MeasuredCosts.of(chip, Curve(), found),))
    monkeypatch.setattr(LoadedPlugins, "kernel_costs", lambda self, chip, engine: stack)
    monkeypatch.setattr(ExtendedPlugins, "_calibration", lambda self, chip: calibration)
    costs = given(plugins.kernel_costs(chip, "vllm"))
    assert costs.gemm_seconds(*(np.array([size]) for size in (64.0, 512.0, 512.0)), "fp32") == pytest.approx(
        9e-4, rel=0.1
    )
    one, elements, table = np.ones(1), np.array([2.0**26]), costs.sources[0]
    assert isinstance(table, NewTensors)
    reused, new = (each.gemm_seconds(one, elements, one, "fp32") for each in (replace(table, page_s=0.0), costs))
    assert new - reused == pytest.approx(2**28 * found.new_page_seconds)
