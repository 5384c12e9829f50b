"""The devices of a platform, the variables that select them, and what a user's command is given."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from flagcore.contracts import Platform
from flagcore.domain.chip import Device, Support
from flagcore.domain.engine import EngineSupport
from flagcore.domain.launch import Launch
from flagcore.domain.spec import ClusterSpec
from flagcore.tuner.devices import on_hosts, with_selected_devices, without_local_devices
from flagcore.tuner.stages.launch import planned_launch, prepared_launch
from tests import tasks
from tests.tuner.benches import SPACE

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
