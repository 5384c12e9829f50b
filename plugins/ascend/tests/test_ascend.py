from flagcore_ascend.hooks import plugin
from flagcore_testing.examples import group_of

from flagcore.contracts import communicator_bytes


def test_megatron_needs_mindspeed_before_megatron() -> None:
    support = plugin.flagcore_engine_support(plugin.flagcore_chips()[0], "megatron", "0.16.1", "train")
    assert support is not None
    assert (support.device_type, support.distributed_backend) == ("npu", "hccl")
    assert support.preload == ("torch_npu", "mindspeed.megatron_adaptor")


def test_each_communicator_of_hccl_takes_its_buffers() -> None:
    model = plugin.flagcore_memory_model(group_of(plugin.flagcore_chips()[0]), "megatron")
    assert model is not None
    assert communicator_bytes(model) == 400 * 2**20
