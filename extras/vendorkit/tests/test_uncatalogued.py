"""A chip that no plugin catalogues is found through torch, measured for real, and planned with from then on."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from flagcore_vendorkit.calibration import overlay as unlisted_chips
from flagcore_vendorkit.calibration.measuring import calibrate
from flagcore_vendorkit.calibration.overlay import accelerator_report, chip_of
from flagcore_vendorkit.calibration.store import Calibration
from flagcore_vendorkit.machine import TorchReport

from flagcore import api
from flagcore.domain.chip import Device
from flagcore.errors import NoDevice
from flagcore.plugins import LoadedPlugins
from tests.checks import given
from tests.product.tasks import SHAPE

pytestmark = pytest.mark.slow

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


def test_extensions_add_devices_to_a_torch_for_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(unlisted_chips, "version", lambda name: "2.10.0+cpu")
    monkeypatch.setattr(unlisted_chips, "entry_points", lambda group: [])
    assert accelerator_report() is None
    monkeypatch.setattr(unlisted_chips, "entry_points", lambda group: ["weird"])
    report = given(accelerator_report())
    assert report.kind == "weird"


class Lists:
    """A plugin that lists a device of an uncatalogued chip."""

    @staticmethod
    def devices() -> list[Device]:
        return [Device(index=0, chip="Weird 9000", memory_bytes=2 << 30)]


@pytest.mark.skipif(find_spec("torch") is None, reason="measuring needs torch")
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


def test_devices_that_torch_cannot_use_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded_plugins = LoadedPlugins.of({})
    monkeypatch.setattr(loaded_plugins, "devices", Lists.devices)
    monkeypatch.setattr(unlisted_chips, "accelerator_report", lambda: None)
    with pytest.raises(NoDevice, match="Weird 9000"):
        unlisted_chips.uncatalogued(loaded_plugins)


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
