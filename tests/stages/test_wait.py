"""Before a trial: devices that others use, that are closed, dead, or say nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from flagcore.contracts import Platform
from flagcore.domain.chip import Device, Support
from flagcore.domain.devices import DeviceUse
from flagcore.domain.engine import EngineSupport
from flagcore.physics.device_memory import PlainMemory
from flagcore.stages import wait
from flagcore.stages.wait import wait_for_devices
from tests import small

GIB = 2**30
TASK = small.task(devices=2)
PLACES = [(host, index) for host in "abc" for index in range(3)]


class Reads:
    """Telemetry of one device; an exception is raised."""

    def __init__(self, used_gib: float | Exception | None, **use: Any) -> None:
        self.used_gib, self.held = used_gib, DeviceUse(**use)

    def sample(self) -> Mapping[str, float]:
        if isinstance(self.used_gib, Exception):
            raise self.used_gib
        return {} if self.used_gib is None else {"memory_used_bytes": self.used_gib * GIB}

    def use(self) -> DeviceUse:
        return self.held


class Says:
    """Telemetry without `use`."""

    def __init__(self, used_gib: float) -> None:
        self.used_gib = used_gib

    def sample(self) -> Mapping[str, float]:
        return {"memory_used_bytes": self.used_gib * GIB}


def node(readers: Sequence[Any], *, task: Any = TASK, **support: Any) -> Platform:
    devices = tuple(Device(index=place, chip="test-chip", memory_bytes=80 * GIB) for place in range(len(readers)))
    answer = EngineSupport(support=Support.YES, **support)
    return small.platform(task, telemetry=tuple(readers), read_devices=devices, support=answer)


def busy(readers: Sequence[Any], need: float = 0.0, **extra: Any) -> str:
    return wait_for_devices(node(readers, **extra), need, 0.0)


def test_idle_devices_are_free() -> None:
    assert busy([Reads(0.8), Says(0.5)]) == ""


def test_memory_in_use_is_named_with_device_gib_and_process() -> None:
    found = busy([Reads(0.1), Reads(20.5, processes=("4711 python (20.5 GiB)",))])
    assert "device 1" in found
    assert "20.5 of 80.0 GiB" in found
    assert "4711 python" in found
    assert "device 0" not in found
    assert "20.5" in busy([Says(20.5), Says(0.0)])


def test_a_device_is_free_if_the_budget_fits_next_to_other_processes() -> None:
    small_budget = small.task(devices=2, memory_bytes=40 * GIB)
    assert busy([Reads(30.0), Reads(0.0)], task=small_budget) == ""
    assert "device 0" in busy([Reads(50.0), Reads(0.0)], task=small_budget)


def test_a_device_with_only_the_memory_of_its_driver_in_use_is_free() -> None:
    readers = [Reads(5.0), Reads(5.5)]
    platform = node(readers)
    driver = replace(platform.costs, memory=PlainMemory(capacity=80.0 * GIB, context_bytes=5.2 * GIB))
    found = wait_for_devices(replace(platform, costs=driver), 0.0, 0.0)
    assert "device 1" in found
    assert "device 0" not in found


def test_a_device_that_the_trial_does_not_use_may_be_busy() -> None:
    assert busy([Reads(0.0), Reads(0.0), Reads(70.0)]) == ""
    chosen = replace(TASK, spec=replace(TASK.spec, envs={"X_VISIBLE_DEVICES": "2, 1"}))
    readers = [Reads(0.0), Reads(0.0), Reads(70.0)]
    assert "device 2" in busy(readers, task=chosen, visible_devices="X_VISIBLE_DEVICES")
    by_uuid = replace(TASK, spec=replace(TASK.spec, envs={"X_VISIBLE_DEVICES": "GPU-1,GPU-2"}))
    assert busy(readers, task=by_uuid, visible_devices="X_VISIBLE_DEVICES") == ""


def test_a_compute_mode_that_forbids_processes_is_the_reason() -> None:
    assert "Prohibited" in busy([Reads(0.0, blocked="is in compute mode Prohibited"), Reads(0.0)])


def test_a_device_that_no_longer_answers_is_dead_if_others_do() -> None:
    assert "device 1 does not respond" in busy([Reads(0.0), Reads(LookupError("gone"))])
    assert "device 0 reports 90.0 of 80.0 GiB" in busy([Reads(90.0), Reads(0.0)])


@pytest.mark.parametrize("problem", [LookupError("no tool"), RuntimeError("broken"), None])
def test_devices_without_telemetry_are_free(problem: Exception | None) -> None:
    assert busy([Reads(problem), Reads(problem)]) == ""
    assert busy([Reads(0.0), Reads(None if isinstance(problem, LookupError) else problem)]) == ""
    assert wait_for_devices(small.platform(TASK), 0.0, 0.0) == ""


def test_cores_of_a_cpu_need_free_memory_only() -> None:
    readers = [Reads(79.0, free_bytes=3 * GIB), Reads(79.0)]
    assert busy(readers, need=2.0 * GIB, shared_devices=True) == ""
    found = busy(readers, need=4.0 * GIB, shared_devices=True)
    assert "3.0 GiB" in found
    assert "4.0 GiB" in found
    assert busy([Reads(79.0)], need=4.0 * GIB, shared_devices=True) == ""


def test_it_waits_until_the_devices_are_free_and_reports_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait, "POLL_SECONDS", 0.01)
    leaving, waited = Reads(40.0), list[str]()
    platform = node([leaving, Reads(0.0)])

    def left(busy: str) -> None:
        waited.append(busy)
        leaving.used_gib = 0.0

    assert wait_for_devices(platform, 0.0, 60.0, left) == ""
    assert len(waited) == 1
    began = time.monotonic()
    assert "device 0" in wait_for_devices(node([Reads(40.0), Reads(0.0)]), 0.0, 0.05, waited.append)
    assert 0.05 <= time.monotonic() - began < 5.0
    assert len(waited) == 2


def test_a_busy_device_of_another_host_is_named_with_the_host() -> None:
    devices = tuple(Device(index=index, chip="test-chip", memory_bytes=80 * GIB, host=host) for host, index in PLACES)
    readers = tuple(Reads(20.0 if place in (("b", 1), ("b", 2), ("c", 0)) else 0.0) for place in PLACES)
    spec = replace(TASK.spec, cluster=replace(TASK.spec.cluster, hosts=("a", "b", "c"), nodes=2), launcher="ssh")
    platform = small.platform(replace(TASK, spec=spec), telemetry=readers, read_devices=devices)
    found = wait_for_devices(platform.on_hosts(("a", "b")), 0.0, 0.0)
    assert found.startswith("device 1 of b has 20.0")
    assert "device 2" not in found
    assert "c" not in found.split()
    shared = replace(platform, support=EngineSupport(support=Support.YES, shared_devices=True))
    little = tuple(Reads(0.0, free_bytes=(1 if host == "b" else 9) * GIB) for host, _ in PLACES)
    assert " on b" in wait_for_devices(replace(shared, telemetry=little), 4.0 * GIB, 0.0)
