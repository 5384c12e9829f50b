"""Which trainers run on which vendors' chips, as their plugins say."""

from typing import Any

import pytest

from flagcore.api.inputs import open_spec
from flagcore.domain.chip import Support
from flagcore.errors import NoDevice
from tests.product.tasks import SHAPE


def support(chip: str, engine: str) -> Any:
    train = {"engine": engine, "seq_length": 64, "global_batch_size": 8, "precision": "bf16"}
    if engine != "fsdp2":
        train["command"] = ["torchrun", "train.py"]
    spec = {"model": SHAPE, "cluster": {"chip": chip, "devices_per_node": 4}, "train": train}
    return open_spec(spec, None, (), plan=True).problem.platform.support


@pytest.mark.parametrize(
    ("chip", "backend", "preload"),
    [
        ("Ascend-910B3", "hccl", ("torch_npu",)),
        ("MTT-S5000", "mccl", ("torch_musa",)),
        ("MLU590-M9", "cncl", ("torch_mlu",)),
        ("C550", "nccl", ()),
    ],
)
def test_trials_import_the_builds_of_torch_and_not_those_of_megatron(
    chip: str, backend: str, preload: tuple[str, ...]
) -> None:
    found = support(chip, "fsdp2")
    assert (found.support, found.distributed_backend, found.preload) == (Support.UNKNOWN, backend, preload)


def test_an_engine_without_support_is_refused() -> None:
    with pytest.raises(NoDevice, match="no accelerator for MUSA"):
        support("MTT-S5000", "deepspeed")
