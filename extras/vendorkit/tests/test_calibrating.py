"""What a calibration tells of the machine and of itself."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flagcore_testing import fakes
from flagcore_vendorkit.calibration import measuring as calibration
from flagcore_vendorkit.calibration.overlay import busy

from extras.vendorkit.tests.test_calibrations import MADE
from flagcore.domain.chip import Chip, Device, Support
from flagcore.domain.engine import EngineSupport
from tests.product.vendors.test_simulated_nodes import METAX

X1 = Chip(name="X1", vendor="acme", devices_per_node=8)
RUNS = EngineSupport(support=Support.YES, device_type="acme", distributed_backend="accl")


def test_a_busy_machine_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    measured_data = {"torch": "2", "seconds": 5.0, "rows": []}
    warnings = calibration._calibration(X1, Device(index=0, chip="X1"), 2, measured_data, 0.42)
    assert "others on 42% of the processors" in warnings.how
    with caplog.at_level(logging.WARNING, logger="flagcore"):
        calibration.warn(busy(0.42))
        assert "42% of the processors" in caplog.text
    assert busy(0.05) == []
    assert warnings.others == 0.42


def test_the_spread_is_reported_in_percent() -> None:
    row = {"kernel": "gemm", "precision": "bf16", "m": 64, "n": 64, "k": 64, "us": 3.0, "repeats": 9}
    rows = tuple({**row, "spread": spread} for spread in (0.02, 0.05, 0.4))
    (record,) = calibration.summary(replace(MADE, rows=rows))
    assert record["spread_percent"] == pytest.approx(5.0)


def test_the_measurement_sees_the_devices_that_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []

    def measure(job: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
        seen.append(environment)
        return {"torch": "2", "seconds": 5.0, "rows": []}

    monkeypatch.setattr(calibration, "_run_measurement", measure)
    with fakes.machine({"mx-smi": fakes.prints(METAX)}, CUDA_VISIBLE_DEVICES="3,0,1", FLAGCORE_HOME=str(tmp_path)):
        calibration.calibrate(devices=2)
    (environment,) = seen
    assert environment["MACA_VISIBLE_DEVICES"] == environment["CUDA_VISIBLE_DEVICES"] == "3,0"


def test_a_chip_without_published_rates_is_measured_in_the_default_precisions() -> None:
    job = calibration._job(X1, RUNS, (Device(index=0, chip="X1"),), 1, 5.0)
    assert job["precisions"] == ["bf16", "fp16", "fp32"]
