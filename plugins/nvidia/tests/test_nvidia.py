import pytest
from flagcore_nvidia.discover import parse
from flagcore_nvidia.hooks import flagcore_chips, flagcore_memory_model

from flagcore.domain.cluster import NodeGroup

TWO_H200 = """\
0, NVIDIA H200, 143771, 570.211.01, GPU-aaaa1111
1, NVIDIA H200, 143771, 570.211.01, GPU-bbbb2222
"""


def test_devices_of_a_csv_query_are_read() -> None:
    first, second = parse(TWO_H200)
    assert (first.index, first.chip, first.driver, first.uuid) == (0, "NVIDIA H200", "570.211.01", "GPU-aaaa1111")
    assert second.memory_bytes == 143771 * 2**20


def test_memory_that_the_driver_does_not_tell_stays_unknown() -> None:
    (device,) = parse("0, NVIDIA GB10, [N/A], 580.95, GPU-cccc3333\n")
    assert device.memory_bytes is None


def test_an_error_message_is_no_device() -> None:
    assert parse("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n") == ()


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA B300", "B300"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA GB300", "GB300"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
    ],
)
def test_a_name_of_the_driver_means_one_chip(driver: str, name: str) -> None:
    assert [chip.name for chip in flagcore_chips() if chip.answers_to(driver)] == [name]


def test_collective_buffers_are_counted_for_more_than_one_device() -> None:
    chip = flagcore_chips()[0]
    alone, together = (
        flagcore_memory_model(NodeGroup(chip=chip, nodes=1, devices_per_node=devices)) for devices in (1, 8)
    )
    assert alone is not None
    assert together is not None
    assert together.context_bytes - alone.context_bytes == pytest.approx(392e6)
