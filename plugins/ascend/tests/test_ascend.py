from dataclasses import replace

import pytest
from flagcore_ascend.hooks import plugin

from flagcore.contracts import communicator_bytes
from flagcore.domain.serving import ServeSpec
from flagcore.testing.examples import group_of, task_on


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        *(("Ascend910B3", "910B3"), ("910B2C", "910B2"), ("910B4-1", "910B4-1")),
        *(("Ascend910_9391", "910C"), ("Ascend910", "910C")),
    ],
)
def test_names_of_tool_and_torch_are_the_same_chip(reported: str, name: str) -> None:
    assert [chip.name for chip in plugin.flagcore_chips() if chip.has_name(reported)] == [name]


def test_megatron_needs_mindspeed_before_megatron() -> None:
    support = plugin.flagcore_engine_support(plugin.flagcore_chips()[0], "megatron", "0.16.1", "train")
    assert support is not None
    assert (support.device_type, support.distributed_backend) == ("npu", "hccl")
    assert support.preload == ("torch_npu", "mindspeed.megatron_adaptor")


def test_fp8_is_refused() -> None:
    support = plugin.flagcore_engine_support(plugin.flagcore_chips()[0], "vllm", None, "serve")
    assert support is not None
    assert any({"fp8", "mxfp8"} <= set(each.values) for each in support.refused)


def test_serving_uses_cache_blocks_of_the_chips_kernels() -> None:
    (chip,) = (each for each in plugin.flagcore_chips() if each.name == "910B3")
    task = task_on(chip)
    serving = replace(task, spec=replace(task.spec, work=ServeSpec(engine="vllm", loads=())))
    assert plugin.flagcore_check_task(task, None) is None
    advice = plugin.flagcore_check_task(serving, None)
    assert advice is not None
    assert [(each.setting, each.value) for each in advice.preferred] == [("engine_args.block-size", 128)]
    assert advice.warmup > 0


def test_each_communicator_of_hccl_takes_its_buffers() -> None:
    model = plugin.flagcore_memory_model(group_of(plugin.flagcore_chips()[0]), "megatron")
    assert model is not None
    assert communicator_bytes(model) == 400 * 2**20
