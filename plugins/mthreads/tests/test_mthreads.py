from dataclasses import replace

import pytest
from flagcore_mthreads.hooks import plugin

from flagcore.domain.serving import ServeSpec
from flagcore.testing.examples import task_on


@pytest.mark.parametrize(("reported", "name"), [("MTT S5000", "MTT-S5000"), ("Moore Threads MTT S4000", "MTT-S4000")])
def test_names_of_tool_and_torch_are_the_same_chip(reported: str, name: str) -> None:
    assert [chip.name for chip in plugin.flagcore_chips() if chip.has_name(reported)] == [name]


@pytest.mark.parametrize(("name", "refused"), [("MTT-S4000", True), ("MTT-S5000", False)])
def test_fp8_is_refused_before_the_s5000(name: str, refused: bool) -> None:
    (chip,) = (chip for chip in plugin.flagcore_chips() if chip.name == name)
    support = plugin.flagcore_engine_support(chip, "megatron", None, "train")
    assert support is not None
    assert any("fp8" in each.values for each in support.refused) == refused


def test_serving_uses_cache_blocks_of_the_chips_kernels() -> None:
    (chip,) = (each for each in plugin.flagcore_chips() if each.name == "MTT-S5000")
    task = task_on(chip)
    serving = replace(task, spec=replace(task.spec, work=ServeSpec(engine="vllm", loads=())))
    assert plugin.flagcore_check_task(task, None) is None
    advice = plugin.flagcore_check_task(serving, None)
    assert advice is not None
    assert [(each.setting, each.value) for each in advice.preferred] == [("engine_args.block-size", 64)]
