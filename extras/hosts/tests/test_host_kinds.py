"""Hosts with different chips in one trial: each has the environment of its own chip's plugin. Agents are real."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flagcore_hosts.connection import agent_command
from flagcore_hosts.launcher import HostsLauncher

from flagcore.contracts import Platform
from flagcore.domain.chip import Device, Support
from flagcore.domain.engine import EngineSupport
from flagcore.domain.spec import Spec
from flagcore.errors import NoDevice
from flagcore.plugins import LoadedPlugins
from flagcore.spec.convert import parse_spec
from flagcore.tuner.devices import require_devices
from flagcore.tuner.stages.complete import complete_by_plugins
from flagcore.tuner.stages.launch import host_lines, planned_launch, prepared_launch
from tests.checks import refuses
from tests.launchers.processes import ended
from tests.product import tasks

pytestmark = pytest.mark.spread

HOSTS = "a slots=2 type=chip-x\nb slots=1 type=chip-y\nc slots=2 type=chip-x\n"
PROGRAM = """
import json, os, sys
names = ("X_VISIBLE", "Y_VISIBLE", "X_SOCKET_IFNAME", "Y_SOCKET_IFNAME", "OF_GROUP")
print(json.dumps([sys.argv[1:4], {name: os.environ[name] for name in names if name in os.environ}]))
"""
SHELL = HostsLauncher(name="shell", channel=lambda host: ["sh", "-c", agent_command()])


def plugin(name: str) -> SimpleNamespace:
    """A plugin for one chip, with variables of its own."""
    upper = name.upper()
    support = EngineSupport(support=Support.YES, visible_devices=(f"{upper}_VISIBLE",))
    variables = {f"{upper}_VISIBLE": "0,1", f"{upper}_SOCKET_IFNAME": "{interface}"}
    return tasks.plugin(
        chips=lambda: [replace(tasks.CHIP, name=f"chip-{name}", aliases=())],
        engine_support=lambda chip: support if chip.name == f"chip-{name}" else None,
        environment=lambda chip: variables if chip.name == f"chip-{name}" else None,
    )


def spec(folder: Path, lines: str = HOSTS, **cluster: Any) -> Spec:
    (folder / "hosts").write_text(lines)
    (folder / "program.py").write_text(PROGRAM)
    data = {
        "model": tasks.SHAPE,
        "cluster": {"hostfile": "hosts", **cluster},
        "train": {
            "engine": "megatron",
            "seq_length": 128,
            "global_batch_size": 8,
            "precision": "bf16",
            "command": [sys.executable, "program.py", "{node_rank}", "{type}", "{slots}", "{hostfile}"],
        },
        "auto_tuner": {"launcher": "ssh"},
    }
    return parse_spec(data, file="spec.yaml", base=folder, engines=tasks.ENGINES)


def platform(given: Spec) -> Platform:
    loaded = LoadedPlugins.of({"x": plugin("x"), "y": plugin("y")})
    assert loaded.failures == ()
    return complete_by_plugins(given, loaded, tasks.ENGINES[given.work.engine])


@pytest.mark.parametrize("kinds", [HOSTS, "a slots=2\nb slots=2\n"])
def test_variables_of_a_host_override_all_others(kinds: str, tmp_path: Path) -> None:
    chip: dict[str, Any] = {} if "type" in kinds else {"chip": "chip-x"}
    there = platform(spec(tmp_path, kinds, **chip, host_envs={"b": {"X_VISIBLE": "1", "Y_VISIBLE": "1"}}))
    on_host = prepared_launch(there, planned_launch(there, tasks.candidate(), str(tmp_path))).on_host
    assert on_host["b"].environment.items() >= {"X_VISIBLE": "1", "Y_VISIBLE": "1"}.items()
    assert on_host["a"].environment["X_VISIBLE"] == "0,1"


@pytest.mark.slow
def test_each_host_has_the_environment_of_its_own_chip(tmp_path: Path) -> None:
    groups = [{"chip": "chip-x"}, {"chip": "chip-y", "envs": {"OF_GROUP": "ours"}}]
    there = platform(spec(tmp_path, HOSTS.replace("a ", "127.0.0.1 "), groups=groups))
    folder = tmp_path / "trial"
    folder.mkdir()
    planned = planned_launch(there, tasks.candidate(), str(folder))
    assert ended(SHELL.start(prepared_launch(there, planned))).code == 0
    order = ("127.0.0.1", "c", "b")
    said = {host: json.loads((folder / "hosts" / host / "stdout.log").read_text()) for host in order}
    assert [said[host][0] for host in order] == [["0", "chip-x", "2"], ["1", "chip-x", "2"], ["2", "chip-y", "1"]]
    interface = said["127.0.0.1"][1]["X_SOCKET_IFNAME"]
    assert interface != "{interface}"
    assert said["127.0.0.1"][1] == said["c"][1] == {"X_VISIBLE": "0,1", "X_SOCKET_IFNAME": interface}
    assert said["b"][1] == {"Y_VISIBLE": "0,1", "Y_SOCKET_IFNAME": interface, "OF_GROUP": "ours"}
    assert (folder / "hostfile").read_text() == "".join(
        f"{line}\n" for line in ("127.0.0.1 slots=2 type=chip-x", "c slots=2 type=chip-x", "b slots=1 type=chip-y")
    )
    record = json.loads((folder / "launch.json").read_text())["on_host"]
    assert record["b"]["environment"]["Y_VISIBLE"] == "0,1"
    assert "Y_VISIBLE" not in record["127.0.0.1"]["environment"]


def test_types_of_a_host_file_are_groups(tmp_path: Path) -> None:
    cluster = spec(tmp_path).cluster
    assert [(group.chip, group.nodes, group.devices_per_node) for group in cluster.groups] == [
        ("chip-x", 2, 2),
        ("chip-y", 1, 1),
    ]
    assert (cluster.hosts, cluster.nodes) == (("a", "c", "b"), 3)
    there = platform(spec(tmp_path, groups=[{"chip": "chip-y"}, {"chip": "chip-x"}]))
    assert there.task.spec.cluster.hosts == ("b", "a", "c")
    assert host_lines(there.task, ("c",)) == ["c slots=2 type=chip-x"]


@pytest.mark.parametrize(
    ("lines", "cluster", "key"),
    [
        (HOSTS, {"spares": 1}, "cluster.spares"),
        (HOSTS, {"groups": [{"chip": "chip-x"}]}, "cluster.hostfile"),
        (HOSTS, {"groups": [{"chip": "chip-x", "nodes": 3}, {"chip": "chip-y"}]}, "cluster.groups[0].nodes"),
        (HOSTS, {"groups": [{"chip": "chip-x"}, {"chip": "chip-z"}]}, "cluster.groups[1].nodes"),
        ("a slots=2\nb slots=2", {"groups": [{"chip": "chip-x"}, {"chip": "chip-y"}]}, "cluster.groups[1].nodes"),
        ("a slots=2 type=x\nb slots=1 type=x", {}, "line 2"),
        ("a slots=2 type=x\nb slots=2", {}, "line 2"),
    ],
)
def test_hosts_that_do_not_match_the_groups_are_refused(
    tmp_path: Path, lines: str, cluster: dict[str, Any], key: str
) -> None:
    with refuses(key):
        spec(tmp_path, lines, **cluster)


def test_the_devices_of_each_group_are_checked_on_its_first_host(tmp_path: Path) -> None:
    there = platform(spec(tmp_path))
    found = [Device(index=index, chip="chip-x", host=host) for host in "ac" for index in range(2)]
    require_devices(there, (*found, Device(index=0, chip="chip-y", host="b")))
    require_devices(there, tuple(found))  # the devices of host b are unknown
    with pytest.raises(NoDevice, match="b"):
        require_devices(there, (*found, Device(index=0, chip="chip-x", host="b")))
