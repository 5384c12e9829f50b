import pytest
from flagcore_ascend.hooks import plugin


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
