"""Which device of a job holds the others up."""

from __future__ import annotations

import pytest

from flagcore.domain.devices import slow_devices


def devices_with(name: str, *figures: float) -> list[dict[str, float]]:
    return [{"device": number, name: figure} for number, figure in enumerate(figures)]


def test_a_device_that_takes_longer_than_the_others_is_named_with_its_node_and_by_how_much() -> None:
    (line,) = slow_devices(devices_with("speed_test_s", 1.0, 1.02, 0.98, 1.0, 1.0, 1.0, 1.4, 1.01), 4)
    assert line == "device 2 of node 1 takes 1.4x the median time of the other devices in the speed test"


def test_a_device_with_a_low_clock_is_named() -> None:
    (line,) = slow_devices(devices_with("clock_hertz", 1.98e9, 1.98e9, 1.2e9, 1.95e9), 8)
    assert line.startswith("device 2 of node 0 runs at 0.61x the median clock of the other devices (1.2 GHz)")


@pytest.mark.parametrize("figures", [(1.0,), (1.0, 1.1, 0.95), (), (0.0, 5.0)])
def test_equal_devices_and_a_single_device_are_not_reported(figures: tuple[float, ...]) -> None:
    assert slow_devices(devices_with("speed_test_s", *figures), 8) == ()


def test_the_slower_of_two_is_named_and_the_faster_is_not() -> None:
    (line,) = slow_devices(devices_with("speed_test_s", 3.0, 1.0), 2)
    assert line.startswith("device 0 of node 0 takes 3x")
