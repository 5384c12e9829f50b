from dataclasses import replace

import pytest
from flagcore_kunlunxin.discover import DETECTOR
from flagcore_kunlunxin.hooks import plugin

from flagcore.domain.chip import Device
from flagcore.domain.serving import ServeSpec
from flagcore.testing.examples import task_on
from flagcore.vendorkit.machine import TorchReport


@pytest.mark.parametrize("reported", ["P800 OAM", "Kunlunxin P800", "P800"])
def test_names_of_tool_and_torch_are_the_same_chip(reported: str) -> None:
    assert [chip.name for chip in plugin.flagcore_chips() if chip.has_name(reported)] == ["P800"]


@pytest.mark.parametrize(("name", "trusted"), [("GPU", True), ("P800 OAM", True), ("NVIDIA A100-SXM4-80GB", False)])
def test_torch_of_another_vendor_is_not_trusted(name: str, trusted: bool) -> None:
    device = Device(index=0, chip=name, memory_bytes=96 << 30)
    report = TorchReport(version="2.9.0+cu129", attributes=frozenset(), devices=(device,))
    assert DETECTOR.trusts(report) == trusted


def test_serving_uses_cache_blocks_of_the_chips_kernels() -> None:
    (chip,) = (each for each in plugin.flagcore_chips() if each.name == "P800")
    task = task_on(chip)
    serving = replace(task, spec=replace(task.spec, work=ServeSpec(engine="vllm", loads=())))
    assert plugin.flagcore_check_task(task, None) is None
    advice = plugin.flagcore_check_task(serving, None)
    assert advice is not None
    assert [(each.setting, each.value) for each in advice.preferred] == [("engine_args.block-size", 128)]
