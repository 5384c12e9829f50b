"""Calibrations as files, what their measurements become, and what they tell of the machine. A chip that no plugin
catalogues is found through torch, measured for real, and planned with from then on."""

import json
import logging
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from flagcore_testing import fakes
from flagcore_vendorkit.calibration import measuring as calibration
from flagcore_vendorkit.calibration import overlay as unlisted_chips
from flagcore_vendorkit.calibration.measuring import calibrate
from flagcore_vendorkit.calibration.overlay import ExtendedPlugins, accelerator_report, busy, chip_of
from flagcore_vendorkit.calibration.store import Calibration, Calibrations, collective_table, kernel_table
from flagcore_vendorkit.choices import Choice, choices
from flagcore_vendorkit.machine import TorchReport

from flagcore import api
from flagcore.domain.chip import Chip, Device, Fact, Source
from flagcore.errors import NoDevice, RunError
from flagcore.physics.roofline import Roofline
from flagcore.plugins import load_plugins
from tests.checks import given
from tests.product.tasks import SHAPE
from tests.product.vendors.test_simulated_nodes import METAX

ROWS = (
    {"kernel": "gemm", "precision": "bf16", "m": 64, "n": 64, "k": 64, "us": 3.0, "spread": 0.1, "repeats": 9},
    {"collective": "send", "ranks": 2, "bytes": 1024, "us": 50.0, "spread": 0.1, "repeats": 9},
)
MADE = Calibration(
    chip="X1",
    aliases=("ACME X1",),
    driver="1.2",
    torch="2.10.0+acme",
    devices=8,
    date="2026-11-20T10:00:00+00:00",
    how="by hand",
    rows=ROWS,
)
RATE = Fact(value=1e12, source=Source(kind="datasheet", detail="made up"))
X1 = Chip(name="X1", vendor="acme", aliases=("acme x1", "X1 of ACME"), memory_bandwidth_bytes_per_second=RATE)


@pytest.fixture
def calibrations(tmp_path: Path) -> Calibrations:
    return Calibrations(tmp_path / "data" / "calibrations")


@pytest.mark.parametrize("others", [None, 0.625])
def test_saved_calibrations_are_loaded_unchanged(calibrations: Calibrations, others: float | None) -> None:
    made = replace(MADE, others=others)
    path = calibrations.save(made)
    assert calibrations.find(X1) == (path, made)
    assert [file.name for file in calibrations.folder.iterdir()] == [path.name]
    lines = path.read_text().splitlines()
    assert sum(line.strip().startswith('{"') for line in lines) == len(ROWS)
    assert ("others" in json.loads(path.read_text())) == bool(others)


def test_a_new_calibration_replaces_the_old_one_of_the_same_measurements(calibrations: Calibrations) -> None:
    calibrations.save(MADE)
    newer = replace(MADE, date="2026-11-21T10:00:00+00:00")
    calibrations.save(newer)
    assert [calibration for _, calibration in calibrations.all()] == [newer]


def test_the_calibration_of_the_installed_torch_is_preferred_over_a_newer_one(calibrations: Calibrations) -> None:
    newer = replace(MADE, torch="2.11.0+acme", date="2026-11-21T10:00:00+00:00")
    for each in (MADE, newer):
        calibrations.save(each)
    for torch, expected in (("2.10.0+acme", MADE), ("2.11.0+acme", newer), ("2.9.0", newer), (None, newer)):
        assert calibrations.find(X1, torch)[1] == expected


def test_two_processors_of_one_chips_name_are_distinguished(calibrations: Calibrations) -> None:
    cpu = replace(MADE, chip="cpu", aliases=("Brand 9",))
    calibrations.save(cpu)
    calibrations.save(replace(cpu, aliases=("Brand 7",)))
    assert len(calibrations.all()) == 2
    assert calibrations.find(Chip(name="CPU", vendor="cpu", aliases=("brand 9",)))[1] == cpu
    assert calibrations.find(Chip(name="cpu", vendor="cpu", aliases=("Brand 8",))) is None


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", '{"schema": 1}', json.dumps({"schema": 2, "rows": []}), '{"schema": 1, "rows": [3]}'),
        '{"schema": 1, "rows": [], "aliases": [], "devices": Infinity}',
        "[" * 100_000,
    ],
    ids=["empty", "list", "no rows", "newer", "rows of numbers", "endless devices", "deep"],
)
def test_an_invalid_file_is_reported_with_its_fix(
    calibrations: Calibrations, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrations.save(MADE).write_text(text)
    with pytest.raises(RunError, match=r"flag calibrate.*or delete the file"):
        calibrations.find(X1)
    monkeypatch.setenv("FLAGCORE_HOME", str(tmp_path))
    (tmp_path / "choices").mkdir()
    (tmp_path / "choices" / "a.json").write_text(text)
    warnings = list[str]()
    assert [*choices(warnings.append)] == []
    assert [each for each in warnings if "measure it again, or delete the file" in each] == warnings != []


def test_measured_choices_are_knobs_of_their_chip_and_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAGCORE_HOME", str(tmp_path))
    fields: dict[str, Any] = {"how": "by hand", "job": "job.yaml", "date": "2026-11-02", "time": (0.9, 0.8, 1.0)}
    choice = Choice(knob="lib", chip="X1", engine="megatron", environment={"A": "1"}, rows=(), **fields)
    file, warnings = choice.save(), list[str]()
    plugins = ExtendedPlugins([], warnings.append)
    assert [knob.name for knob in plugins.knobs(X1, "megatron")] == ["lib"]
    assert plugins.knobs(X1, "vllm") == plugins.knobs(replace(X1, name="X2", aliases=()), "megatron") == ()
    file.write_text("[]")
    plugins = ExtendedPlugins([], warnings.append)
    assert plugins.knobs(X1, "megatron") == plugins.knobs(X1, "megatron") == ()
    assert [str(file) in warning for warning in warnings] == [True]


def test_a_calibrated_chip_has_no_factor_for_kernels_that_nobody_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLAGCORE_HOME", str(tmp_path))
    plugins = [each for each in load_plugins().plugins if each.name == "nvidia"]
    before = ExtendedPlugins(plugins, str)
    card, other = (given(before.find_chip(name)) for name in ("RTX-4090", "RTX-3090"))
    assert before.engine_support(card, "vllm").overheads.get("uncalibrated")
    Calibrations.of_user().save(replace(MADE, chip=card.name, aliases=card.aliases))
    after = ExtendedPlugins(plugins, str)
    assert "uncalibrated" not in after.engine_support(card, "vllm").overheads
    assert after.engine_support(other, "vllm").overheads == before.engine_support(other, "vllm").overheads


def test_a_folder_that_cannot_be_written_is_reported_with_its_fix(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="set FLAGCORE_HOME"):
        Calibrations(tmp_path / "file").save(MADE)


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"FLAGCORE_HOME": "/a", "XDG_DATA_HOME": "/b"}, "/a/calibrations"),
        ({"FLAGCORE_HOME": "", "XDG_DATA_HOME": "/b"}, "/b/flagcore/calibrations"),
        ({"FLAGCORE_HOME": "", "XDG_DATA_HOME": "not/absolute"}, "/home/me/.local/share/flagcore/calibrations"),
        ({"FLAGCORE_HOME": "", "XDG_DATA_HOME": ""}, "/home/me/.local/share/flagcore/calibrations"),
    ],
)
def test_calibrations_are_in_the_folder_of_the_environment_variable(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], folder: str
) -> None:
    for name, value in {"HOME": "/home/me", **environment}.items():
        monkeypatch.setenv(name, value)
    assert str(Calibrations.of_user().folder) == folder


def test_kernels_are_priced_as_they_were_measured() -> None:
    side = np.array([64.0])
    table = kernel_table(MADE, Roofline(chip=X1))
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


ALL_REDUCE = {"collective": "all_reduce", "ranks": 2, "bytes": 1024, "us": 16.0}


@pytest.mark.parametrize(
    "row",
    [
        *({"kernel": "gemm"}, {"kernel": "x", "us": 1}, {"collective": "send", "ranks": "two"}),
        *(ALL_REDUCE | {"ranks": 0}, ALL_REDUCE | {"bytes": -1}, ALL_REDUCE | {"us": 0}),
        *(ALL_REDUCE | {"us": float("inf")}, ALL_REDUCE | {"collective": "shout"}),
    ],
)
def test_a_bad_row_is_reported(row: dict[str, object]) -> None:
    broken = replace(MADE, rows=(row,))
    with pytest.raises(RunError, match=MADE.chip):
        kernel_table(broken, Roofline(chip=X1)) if "kernel" in row else collective_table(broken)


ALONE = Chip(name="X1", vendor="acme", devices_per_node=8)


def test_a_busy_machine_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    measured_data = {"torch": "2", "seconds": 5.0, "rows": []}
    warnings = calibration._calibration(ALONE, Device(index=0, chip="X1"), 2, measured_data, 0.42)
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


@pytest.mark.costly
def test_the_measurement_sees_the_devices_that_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []

    def measure(name: str, job: dict[str, Any], environment: dict[str, str], timeout_seconds: float) -> dict[str, Any]:
        seen.append(environment)
        return {"torch": "2", "seconds": 5.0, "rows": []}

    monkeypatch.setattr(calibration, "run_benchmark", measure)
    with fakes.machine({"mx-smi": fakes.prints(METAX)}, CUDA_VISIBLE_DEVICES="3,0,1", FLAGCORE_HOME=str(tmp_path)):
        calibration.calibrate(devices=2)
    (environment,) = seen
    assert environment["MACA_VISIBLE_DEVICES"] == environment["CUDA_VISIBLE_DEVICES"] == "3,0"


def test_a_chip_without_published_rates_is_measured_in_the_default_precisions() -> None:
    limits = calibration.limits_of_job(ALONE, (Device(index=0, chip="X1"),))
    assert limits["precisions"] == ["bf16", "fp16", "fp32"]


STAND_IN = """
__version__ = "2.10.0+weird"

class _Type:
    type = "weird"

class accelerator:
    is_available = staticmethod(lambda: True)
    current_accelerator = staticmethod(lambda: _Type())

class _Device:
    name, total_memory = "Weird 9000", 64 << 30

class weird:
    device_count = staticmethod(lambda: 2)
    get_device_properties = staticmethod(lambda place: _Device())

class distributed:
    get_default_backend_for_device = staticmethod(lambda kind: "wccl")

print("welcome to Weird")
"""
SPEC = {
    "model": SHAPE,
    "cluster": {"chip": "weird 9000", "devices_per_node": 1},
    "train": {"engine": "megatron", "seq_length": 128, "global_batch_size": 8, "precision": "fp32"},
}


@pytest.mark.slow
def test_torch_reports_of_an_unknown_accelerator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(unlisted_chips, "version", lambda name: "2.10.0+weird")
    message = given(accelerator_report())
    assert (message.kind, message.backend) == ("weird", "wccl")
    assert [(each.index, each.chip, each.memory_bytes) for each in message.devices] == [
        (0, "Weird 9000", 64 << 30),
        (1, "Weird 9000", 64 << 30),
    ]


@pytest.mark.slow
def test_extensions_add_devices_to_a_torch_for_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(unlisted_chips, "version", lambda name: "2.10.0+cpu")
    monkeypatch.setattr(unlisted_chips, "installed", lambda group: {})
    assert accelerator_report() is None
    monkeypatch.setattr(unlisted_chips, "installed", lambda group: {"weird": []})
    report = given(accelerator_report())
    assert report.kind == "weird"


class Lists:
    """A plugin that lists a device of an uncatalogued chip."""

    @staticmethod
    def devices() -> list[Device]:
        return [Device(index=0, chip="Weird 9000", memory_bytes=2 << 30)]


@pytest.mark.skipif(find_spec("torch") is None, reason="measuring needs torch")
@pytest.mark.costly
def test_an_uncatalogued_chip_is_calibrated_and_planned_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are measured for real, on a core that torch reports as Weird 9000."""
    monkeypatch.setenv("FLAGCORE_HOME", str(tmp_path))
    spec = tmp_path / "spec.yaml"
    spec.write_text(yaml.safe_dump(SPEC))
    with pytest.raises(NoDevice, match="is not supported by any installed plugin"):
        api.estimate(spec)
    device = Device(index=0, chip="Weird 9000", memory_bytes=2 << 30)
    words = {"version": "2.10.0", "kind": "cpu", "backend": "gloo"}
    one = TorchReport(**words, attributes=frozenset(), devices=(device,))
    monkeypatch.setattr(unlisted_chips, "accelerator_report", lambda: one)
    saved_calibration, file = calibrate(seconds=3.0)
    assert saved_calibration.chip == "Weird 9000"
    assert file.parent == tmp_path / "calibrations"
    chip = chip_of(saved_calibration)
    assert given(chip.memory_bytes).value == 2 << 30
    assert given(chip.memory_bandwidth_bytes_per_second).value > 0
    assert all(rate.value > 0 for rate in chip.dense_flops_per_second.values())
    result = api.estimate(spec)
    assert result.chip == "Weird 9000"
    assert result.untimed == 0
    assert result.candidates[0]["step_time_s"]["value"] > 0
    assert result.candidates[0]["memory"]["capacity_gib"] == 2.0
    assert {record["chip"]: record["plugin"] for record in api.chip_table()}["Weird 9000"] == "calibration"


@pytest.mark.slow
def test_devices_that_torch_cannot_use_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded_plugins = ExtendedPlugins((), print)
    monkeypatch.setattr(loaded_plugins, "devices", Lists.devices)
    monkeypatch.setattr(unlisted_chips, "accelerator_report", lambda: None)
    with pytest.raises(NoDevice, match="Weird 9000"):
        loaded_plugins.unlisted_chip()


@pytest.mark.slow
def test_rates_come_from_the_largest_kernels() -> None:
    rows = (
        {"kernel": "gemm", "precision": "bf16", "m": 4096, "n": 4096, "k": 4096, "us": 1000.0},
        {"kernel": "gemm", "precision": "bf16", "m": 64, "n": 64, "k": 64, "us": 10.0},
        {"kernel": "copy", "bytes": 1e9, "us": 1000.0},
    )
    calibration = Calibration(
        chip="X", aliases=(), driver="", torch="2", devices=1, date="2026-11-20", how="", rows=rows, facts={}
    )
    chip = chip_of(calibration)
    assert chip.dense_flops_per_second["bf16"].value == pytest.approx(1.374e14 / 0.81, rel=1e-3)
    assert given(chip.memory_bandwidth_bytes_per_second).value == pytest.approx(1e12 / 0.91)
