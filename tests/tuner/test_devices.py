"""The devices of trials: divided into groups, selected by variables, and free before a trial starts."""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flagcore.contracts import Platform
from flagcore.domain.chip import Device, Support
from flagcore.domain.cluster import Cluster
from flagcore.domain.engine import EngineSupport
from flagcore.domain.launch import Launch
from flagcore.domain.spec import ClusterSpec, Control, Task
from flagcore.errors import NoDevice
from flagcore.physics.roofline import PlainMemory
from flagcore.tuner import devices
from flagcore.tuner.devices import (
    divide,
    on_hosts,
    require_devices,
    wait_for_devices,
    with_selected_devices,
    without_local_devices,
)
from flagcore.tuner.stages.launch import planned_launch, prepared_launch
from tests import tasks
from tests.tasks import Readings
from tests.tuner.benches import SPACE

EIGHT = tuple(Device(index=n, chip="test-chip") for n in range(8))
PARALLEL = Control(parallel_trials="auto")


def platform(devices: int = 2, *, task: Any = None, **support: Any) -> Platform:
    answer = EngineSupport(support=Support.YES, **{"visible_devices": ("ACME_VISIBLE_DEVICES",), **support})
    return tasks.platform(task or tasks.task(devices=devices, control=PARALLEL), support=answer, devices=EIGHT)


def selected(groups: tuple[Platform, ...]) -> list[str]:
    return [with_selected_devices(group).task.spec.envs["ACME_VISIBLE_DEVICES"] for group in groups]


@pytest.mark.parametrize(("devices", "count"), [(1, 8), (2, 4), (3, 2), (4, 2), (5, 1), (8, 1)])
def test_groups_are_disjoint_and_a_trial_fits_on_each(devices: int, count: int) -> None:
    groups, problem = divide(platform(devices))
    assert (len(groups), bool(problem)) == (count, count == 1)
    if count > 1:
        names = [name for text in selected(groups) for name in text.split(",")]
        assert len(names) == len(set(names)) == count * devices


@pytest.mark.parametrize(
    ("found", "count", "usable"),
    [
        (range(8), 4, [0, 1, 2, 3, 4, 5, 6, 7]),
        ([0, 1, 3, 4, 5, 6, 7], 4, [4, 5, 6, 7]),
        ([0, 1, 3, 4, 5, 6, 7], 2, [4, 5, 6, 7, 0, 1, 3]),
        ([2, 3, 4, 5], 4, []),
    ],
)
def test_a_link_may_ask_for_whole_domains(found: Sequence[int], count: int, usable: list[int]) -> None:
    group = tasks.task(devices=count).cluster.groups[0]
    assert group.chip.link
    link = replace(group.chip.link, domain_size=4, whole_domains=True)
    group = replace(group, chip=replace(group.chip, link=link))
    here = tuple(EIGHT[index] for index in found)
    assert [each.index for each in group.usable(here, count)] == usable
    task = replace(tasks.task(devices=count), cluster=Cluster(groups=(group,)))
    there = platform(task=task, device_type="acme", distributed_backend="accl")
    with nullcontext() if usable else pytest.raises(NoDevice):
        require_devices(there, here)


def test_groups_have_the_names_of_detected_devices() -> None:
    found = tuple(replace(EIGHT[index], name=name) for index, name in ((7, "GPU-7"), (6, "6"), (1, ""), (4, "")))
    assert selected(divide(replace(platform(), devices=found))[0]) == ["GPU-7,6", "1,4"]


def test_trials_on_cpu_have_separate_cores() -> None:
    several = tuple(sorted(os.sched_getaffinity(0)))
    cores = tuple(replace(each, index=place) for place, each in enumerate(EIGHT[:1] * len(several)))
    shared = {"shared_devices": True, "visible_devices": ()}
    groups, _ = divide(replace(platform(1, **shared), devices=cores))
    assert [group.cores for group in groups] == ([()] if len(several) == 1 else [(core,) for core in several])
    undivided = divide(replace(platform(len(several) + 1, **shared), devices=cores))
    assert (len(undivided[0]), bool(undivided[1])) == (1, True)


def serving(cards: int | None) -> Task:
    task = tasks.task(devices=8, control=PARALLEL)
    return replace(task, spec=replace(task.spec, work=tasks.Service(engine="server", cards=cards)))


def test_servers_that_use_two_cards_run_side_by_side_but_not_on_a_cpu() -> None:
    assert selected(divide(platform(task=serving(2)))[0]) == ["0,1", "2,3", "4,5", "6,7"]
    assert len(divide(platform(task=serving(None)))[0]) == 1
    assert len(divide(platform(task=serving(2), shared_devices=True))[0]) == 1  # their load needs its cores


def test_groups_of_hosts() -> None:
    task = tasks.task(devices=8, control=PARALLEL)
    cluster = ClusterSpec(nodes=2, hosts=("a", "b", "c", "d", "e"))
    task = replace(task, spec=replace(task.spec, cluster=cluster, launcher="ssh"))
    groups, _ = divide(platform(task=task))
    assert [group.task.spec.cluster.hosts for group in groups] == [("a", "b", "e"), ("c", "d")]
    spared = replace(task, spec=replace(task.spec, cluster=replace(cluster, spares=2)))
    assert len(divide(platform(task=spared))[0]) == 1


@pytest.mark.parametrize("control", [Control(), Control(parallel_trials=4, fidelity="probe")])
def test_trials_run_one_at_a_time_by_default_and_probes_always(control: Control) -> None:
    assert divide(platform(task=tasks.task(devices=2, control=control)))[1] == ""
    assert len(divide(platform(task=tasks.task(devices=2, control=control)))[0]) == 1


GIB = 2**30
TASK = tasks.task(devices=2)
PLACES = [(host, index) for host in "abc" for index in range(3)]


def in_use(gib: float, **use: Any) -> Readings:
    """A device of which some memory is in use."""
    return Readings({"memory_used_bytes": gib * GIB}, **use)


def node(readers: Sequence[Any], *, task: Any = TASK, **support: Any) -> Platform:
    devices = tuple(Device(index=place, chip="test-chip", memory_bytes=80 * GIB) for place in range(len(readers)))
    answer = EngineSupport(support=Support.YES, **support)
    return tasks.platform(task, **tasks.read(devices, readers), support=answer)


def busy(readers: Sequence[Any], need: float = 0.0, **extra: Any) -> str:
    return wait_for_devices(node(readers, **extra), need, 0.0)


SMALL_BUDGET = {"task": tasks.task(devices=2, memory_bytes=40 * GIB)}
CORES = [in_use(79.0, free_bytes=3 * GIB), in_use(79.0)]


@pytest.mark.parametrize(
    ("readers", "extra", "words"),
    [
        ([in_use(0.8), in_use(0.5)], {}, []),
        (
            [in_use(0.1), in_use(20.5, processes=("4711 python (20.5 GiB)",))],
            {},
            ["device 1", "20.5 of 80.0 GiB", "4711 python"],
        ),
        ([SimpleNamespace(sample=in_use(20.5).sample), in_use(0.0)], {}, ["20.5"]),  # without `use`
        ([in_use(30.0), in_use(0.0)], SMALL_BUDGET, []),  # the budget fits next to other processes
        ([in_use(50.0), in_use(0.0)], SMALL_BUDGET, ["device 0"]),
        ([in_use(0.0), in_use(0.0), in_use(70.0)], {}, []),  # the trial uses two devices
        ([in_use(0.0, blocked="is in compute mode Prohibited"), in_use(0.0)], {}, ["Prohibited"]),
        ([in_use(0.0), Readings(LookupError("gone"))], {}, ["device 1 does not respond"]),
        ([in_use(90.0), in_use(0.0)], {}, ["device 0 reports 90.0 of 80.0 GiB"]),
        (CORES, {"need": 2.0 * GIB, "shared_devices": True}, []),
        (CORES, {"need": 4.0 * GIB, "shared_devices": True}, ["3.0 GiB", "4.0 GiB"]),
        ([in_use(79.0)], {"need": 4.0 * GIB, "shared_devices": True}, []),
    ],
)
def test_only_a_device_that_a_trial_cannot_use_is_named_with_the_reason(
    readers: Sequence[Any], extra: dict[str, Any], words: list[str]
) -> None:
    found = busy(readers, **extra)
    assert bool(found) == bool(words)
    assert all(word in found for word in words)
    assert found.count("device ") <= 1


def test_a_device_with_only_the_memory_of_its_driver_in_use_is_free() -> None:
    platform = node([in_use(5.0), in_use(5.5)])
    driver = replace(platform.costs, memory=PlainMemory(capacity=80.0 * GIB, context_bytes=5.2 * GIB))
    found = wait_for_devices(replace(platform, costs=driver), 0.0, 0.0)
    assert "device 1" in found
    assert "device 0" not in found


def test_the_devices_of_a_trial_are_those_of_its_platform() -> None:
    platform = node([in_use(0.0), in_use(0.0), in_use(70.0)])
    selected = replace(platform, devices=(platform.devices[2], platform.devices[1]))
    assert "device 2" in wait_for_devices(selected, 0.0, 0.0)


@pytest.mark.parametrize("problem", [LookupError("no tool"), RuntimeError("broken"), None])
def test_devices_without_telemetry_are_free(problem: Exception | None) -> None:
    silent = Readings(problem or {})
    assert busy([silent, silent]) == ""
    assert busy([in_use(0.0), Readings({}) if isinstance(problem, LookupError) else silent]) == ""
    assert wait_for_devices(tasks.platform(TASK), 0.0, 0.0) == ""


def test_it_waits_until_the_devices_are_free_and_reports_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "POLL_SECONDS", 0.01)
    leaving, waited = in_use(40.0), list[str]()
    platform = node([leaving, in_use(0.0)])

    def left(busy: str) -> None:
        waited.append(busy)
        leaving.samples = in_use(0.0).samples

    assert wait_for_devices(platform, 0.0, 60.0, left) == ""
    assert len(waited) == 1
    began = time.monotonic()
    assert "device 0" in wait_for_devices(node([in_use(40.0), in_use(0.0)]), 0.0, 0.05, waited.append)
    assert 0.05 <= time.monotonic() - began < 5.0
    assert len(waited) == 2


def test_a_busy_device_of_another_host_is_named_with_the_host() -> None:
    devices = tuple(Device(index=index, chip="test-chip", memory_bytes=80 * GIB, host=host) for host, index in PLACES)
    readers = tuple(in_use(20.0 if place in (("b", 1), ("b", 2), ("c", 0)) else 0.0) for place in PLACES)
    spec = replace(TASK.spec, cluster=replace(TASK.spec.cluster, hosts=("a", "b", "c"), nodes=2), launcher="ssh")
    platform = tasks.platform(replace(TASK, spec=spec), **tasks.read(devices, readers))
    found = wait_for_devices(on_hosts(platform, ("a", "b")), 0.0, 0.0)
    assert found.startswith("device 1 of b has 20.0")
    assert "device 2" not in found
    assert "c" not in found.split()
    shared = replace(platform, support=EngineSupport(support=Support.YES, shared_devices=True))
    little = tuple(in_use(0.0, free_bytes=(1 if host == "b" else 9) * GIB) for host, _ in PLACES)
    assert " on b" in wait_for_devices(
        replace(shared, telemetry=dict(zip(devices, little, strict=True))), 4.0 * GIB, 0.0
    )


SUPPORT = EngineSupport(support=Support.YES, visible_devices=("X_DEVICES", "Y_DEVICES"), outer_variable="Z_DEVICES")
RESTRICTED = {"X_DEVICES": "4,5", "Y_DEVICES": "4,5"}


def device(index: int, host: str = "", name: str = "", within: str = "") -> Device:
    return Device(index=index, chip="test-chip", host=host, name=name, within=within)


def on(*devices: Device, envs: Mapping[str, str] | None = None, hosts: tuple[str, ...] = ()) -> Platform:
    task = tasks.task(devices=2)
    cluster = ClusterSpec(nodes=max(len(hosts), 1), hosts=hosts)
    spec = replace(task.spec, envs=envs or {}, cluster=cluster, launcher="ssh" if hosts else task.spec.launcher)
    return tasks.platform(replace(task, spec=spec), support=SUPPORT, devices=devices)


def selectors(platform: Platform, host: str = "") -> list[str]:
    return [each.selector for each in platform.devices_of(host)]


@pytest.mark.parametrize(
    ("found", "envs", "names"),
    [
        ((), {}, ["0", "1"]),
        ((), {"Y_DEVICES": "4, 7,2"}, ["4", "7"]),
        ((device(3),), {}, ["0", "1"]),
        ((device(3), device(1, name="GPU-1"), device(0)), {}, ["3", "GPU-1"]),
    ],
)
def test_devices_of_a_trial_are_the_first_detected_ones_or_else_numbered(
    found: tuple[Device, ...], envs: dict[str, str], names: list[str]
) -> None:
    assert selectors(on(*found, envs=envs)) == names


def test_processes_keep_the_variable_of_a_lower_layer() -> None:
    platform = on(
        device(6, name="0", within="6,7"), device(7, name="1", within="6,7"), envs={"X_DEVICES": "9", "A": "1"}
    )
    names = {"A": "1", "X_DEVICES": "0,1", "Y_DEVICES": "0,1", "Z_DEVICES": "6,7"}
    assert with_selected_devices(platform).task.spec.envs == names
    assert prepared_launch(with_selected_devices(platform), Launch(argv=("true",), folder="")).environment == names
    one = with_selected_devices(platform, platform.devices[1:]).task.spec.envs
    assert (one["X_DEVICES"], one["Z_DEVICES"]) == ("1", "6,7")
    assert without_local_devices(with_selected_devices(platform)).task.spec.envs == {"A": "1"}
    assert selectors(without_local_devices(platform)) == ["0", "1"]


def test_without_detected_devices_no_variable_is_set() -> None:
    assert with_selected_devices(on()).task == on().task


def test_only_hosts_with_other_devices_get_variables() -> None:
    found = [device(index, host) for host, indices in {"a": (0, 1, 2), "b": (4, 5, 6)}.items() for index in indices]
    platform = on(*found, hosts=("a", "b"))
    assert (selectors(platform, "a"), selectors(platform, "b")) == (["0", "1"], ["4", "5"])
    assert with_selected_devices(platform).task.spec.cluster.host_envs == {"b": RESTRICTED}
    assert [each.host for each in on_hosts(platform, ("b",)).devices] == ["b"] * 3


def test_variables_of_the_spec_name_the_devices_of_hosts() -> None:
    found = [device(index, host) for host in "ab" for index in range(4)]
    platform = on(*found, envs={"X_DEVICES": "3,1"}, hosts=("a", "b"))
    assert platform.devices_of("b") == (device(3, "b"), device(1, "b"))
    assert with_selected_devices(platform) == platform


@pytest.mark.parametrize("launcher", ["local", "ssh"])
def test_a_command_can_read_the_hosts_of_its_trial(tmp_path: Path, launcher: str) -> None:
    task = tasks.task(space=SPACE, devices=2, command=("mpirun", "--hostfile={hostfile}", "train"))
    cluster = replace(task.spec.cluster, hosts=("a", "b", "c"), nodes=2, spares=1)
    task = replace(task, spec=replace(task.spec, cluster=cluster, launcher=launcher))
    planned = planned_launch(tasks.platform(task), tasks.candidate(), str(tmp_path))
    assert planned.argv[1] == f"--hostfile={tmp_path}/hostfile"
    assert (tmp_path / "hostfile").read_text() == "a slots=2\nb slots=2\n"
    assert planned.hosts == (() if launcher == "local" else ("a", "b"))
