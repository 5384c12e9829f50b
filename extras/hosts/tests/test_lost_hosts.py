"""Hosts that are lost for some time; a launcher plays the trials.

Hosts with different chips in one trial: each has the environment of its own chip's plugin. Agents are real.

`flag tune` of a mixed job through FlagScale's options, on two kinds of hosts with real agents. Both kinds are this
machine. Small programs stand for torchrun and for FlagScale's program, which logs as Megatron does."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flagcore_hosts.connection import agent_command
from flagcore_hosts.launcher import SSH, HostsLauncher

from extras.hosts.tests.test_checks import REPORTED
from extras.hosts.tests.test_checks import kept_report as kept_report
from extras.hosts.tests.test_checks import reported as reported
from flagcore import api
from flagcore.contracts import Platform
from flagcore.domain.chip import Device, Support
from flagcore.domain.engine import EngineSupport
from flagcore.domain.launch import Exit, Launch
from flagcore.domain.spec import ClusterSpec, Spec
from flagcore.domain.trial import TrialState
from flagcore.errors import HostLost, Interrupted, NoDevice
from flagcore.plugins import LoadedPlugins
from flagcore.spec.convert import parse_spec
from flagcore.tuner import trial_runner
from flagcore.tuner.devices import require_devices
from flagcore.tuner.parallel import MAX_CONSECUTIVE_BUSY
from flagcore.tuner.stages.complete import complete_by_plugins
from flagcore.tuner.stages.launch import host_lines, planned_launch, prepared_launch
from tests.checks import ended, refuses
from tests.product import tasks
from tests.product.tasks import SHAPE
from tests.tuner.benches import Bench, Ended, plugin, sizes_of, sound, write_steps


@dataclass(kw_only=True)
class Outage(HostsLauncher):
    """Plays launches. A host in `down` cannot be reached until the given number of attempts have failed."""

    down: dict[str, float] = field(default_factory=dict)
    attempts: list[tuple[str, ...]] = field(default_factory=list)
    ends: Callable[[int], Exit | None] = lambda number: None
    on_loss: Callable[[], object] = lambda: None

    def start(self, launch: Launch) -> Any:
        self.attempts.append(launch.hosts)
        for host in launch.hosts:
            if self.down.get(host, 0) > 0:
                self.down[host] -= 1
                self.failures[host] = max(self.failures[host], 1)
                self.failed_at[host] = time.monotonic()
                self.on_loss()
                raise HostLost(host, "Connection refused")
        if ended := self.ends(len(self.attempts)):
            return Ended(ended)
        tensor, micro = sizes_of(launch)
        write_steps(launch, 100.0 * tensor + micro)
        return Ended(Exit(code=0, ended_by=None, duration_s=1.0))


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(trial_runner, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(trial_runner, "LONGEST_PAUSE", 0.04)
    return Bench(tmp_path, outage())


def outage(**down: float) -> Outage:
    return Outage(name="ssh", channel=lambda host: [], down=down)


def cluster(*hosts: str, wait: float = 30.0, **numbers: Any) -> ClusterSpec:
    nodes = len(hosts) - numbers.get("spares", 0)
    return ClusterSpec(hosts=hosts, nodes=nodes, devices_per_node=2, wait_for_hosts=wait, **numbers)


def test_a_host_that_returns_costs_no_trial(bench: Bench) -> None:
    bench.launcher = outage(b=5)
    found = bench.tune(cluster=cluster("a", "b"), repeats=0, max_trials=3)
    assert found.error is None
    assert [trial.state for trial in found.plan.trials] == [TrialState.MEASURED] * 3
    waits = [event.trial.reason for event in bench.events if event.kind == "trial_waits"]
    assert len(waits) == 5
    assert all("b: Connection refused" in str(each) for each in waits)
    assert sound(found.plan)


def test_a_search_ends_with_an_error_if_a_host_does_not_return_and_is_resumed(bench: Bench) -> None:
    bench.launcher = first = outage()
    first.ends = lambda number: first.down.update(b=1e9) if number == 2 else None
    found = bench.tune(cluster=cluster("a", "b", wait=0.1), repeats=0, max_trials=4)
    assert isinstance(found.error, HostLost)
    assert (found.error.exit_code, found.error.host) == (6, "b")
    assert found.plan.counts.measured == 2
    assert found.plan.best
    assert 3 < len(first.attempts) < 12
    bench.launcher = outage()
    found = bench.tune(cluster=cluster("a", "b", wait=0.1), repeats=0, max_trials=4)
    assert found.error is None
    assert found.plan.counts.measured == 4
    assert len(bench.launcher.attempts) == 2
    assert sound(found.plan)


def test_a_spare_is_used_at_once_even_if_another_spare_is_lost_too(bench: Bench) -> None:
    bench.launcher = launcher = outage(b=1e9, c=1)
    found = bench.tune(cluster=cluster("a", "b", "c", spares=1), repeats=0, max_trials=3)
    assert found.error is None
    assert [hosts[1] for hosts in launcher.attempts] == ["b", "c", "b", "c", "c", "c"]
    assert found.plan.counts.measured == 3


def test_fewer_nodes_are_used_after_the_wait(bench: Bench) -> None:
    bench.launcher = launcher = outage(d=1e9)
    bench.plugin = plugin(tasks.CHIP)
    four = cluster(*"abcd", min_nodes=2, wait=0.1, nic_bytes_per_second=1e9)
    found = bench.tune(cluster=four, repeats=0, max_trials=2)
    assert found.error is None, found.error
    assert set(launcher.attempts[-2:]) == {("a", "b", "c")}
    assert found.plan.counts.measured == 2


def test_candidates_that_need_a_lost_host_are_tried_when_it_is_back(bench: Bench) -> None:
    bench.launcher = first = outage()
    first.ends = lambda number: first.down.update(d=1e9) if number == 1 else None
    bench.plugin = plugin(tasks.CHIP)
    four = cluster(*"abcd", min_nodes=2, wait=0.1, nic_bytes_per_second=1e9)
    found = bench.tune(cluster=four, repeats=1, max_trials=9)
    assert isinstance(found.error, HostLost)
    before = found.plan.counts.measured
    bench.launcher = outage()
    found = bench.tune(cluster=four, repeats=1, max_trials=9)
    assert found.error is None
    assert found.plan.counts.measured > before
    assert sound(found.plan)


def test_a_host_that_is_lost_in_each_trial_ends_the_search(bench: Bench) -> None:
    bench.launcher = launcher = outage()
    launcher.ends = lambda number: Exit(code=1, ended_by="host", duration_s=1.0, detail="b: gone", lost_host="b")
    assert isinstance(bench.tune(cluster=cluster("a", "b"), repeats=0, max_trials=3).error, HostLost)
    assert len(launcher.attempts) == MAX_CONSECUTIVE_BUSY


@pytest.mark.parametrize("parallel", [1, 2])
def test_an_interrupt_ends_the_wait_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch, parallel: int) -> None:
    monkeypatch.setattr(trial_runner, "FIRST_PAUSE", 60.0)
    monkeypatch.setattr(trial_runner, "LONGEST_PAUSE", 60.0)
    bench.launcher = outage(**dict.fromkeys("abcd", 1e9))
    bench.launcher.on_loss = lambda: threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    hosts, started = "abcd"[: 2 * parallel], time.monotonic()
    found = bench.tune(cluster=replace(cluster(*hosts), nodes=2), repeats=0, max_trials=3, parallel_trials=parallel)
    assert isinstance(found.error, Interrupted)
    assert time.monotonic() - started < 20


def test_max_time_ends_the_wait(bench: Bench) -> None:
    bench.launcher = outage(b=1e9)
    started = time.monotonic()
    assert isinstance(bench.tune(cluster=cluster("a", "b"), repeats=0, max_time=0.5).error, HostLost)
    assert time.monotonic() - started < 20


def test_a_killed_guard_is_not_a_failure_of_the_candidate(bench: Bench) -> None:
    bench.launcher = launcher = outage()
    killed = Exit(code=-9, ended_by="guard", duration_s=1.0)
    launcher.ends = lambda number: killed if number == 2 else None
    assert bench.tune(cluster=cluster("a", "b"), repeats=0, max_trials=3).plan.counts.measured == 3
    assert len(launcher.attempts) == 4


HOSTS = "a slots=2 type=chip-x\nb slots=1 type=chip-y\nc slots=2 type=chip-x\n"
PROGRAM = """
import json, os, sys
names = ("X_VISIBLE", "Y_VISIBLE", "X_SOCKET_IFNAME", "Y_SOCKET_IFNAME", "OF_GROUP")
print(json.dumps([sys.argv[1:4], {name: os.environ[name] for name in names if name in os.environ}]))
"""
SHELL = HostsLauncher(name="shell", channel=lambda host: ["sh", "-c", agent_command()])


def vendor_plugin(name: str) -> SimpleNamespace:
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
    loaded = LoadedPlugins.of({"x": vendor_plugin("x"), "y": vendor_plugin("y")})
    assert loaded.failures == ()
    return complete_by_plugins(given, loaded, tasks.ENGINES[given.work.engine])


@pytest.mark.spread
@pytest.mark.parametrize("kinds", [HOSTS, "a slots=2\nb slots=2\n"])
def test_variables_of_a_host_override_all_others(kinds: str, tmp_path: Path) -> None:
    chip: dict[str, Any] = {} if "type" in kinds else {"chip": "chip-x"}
    there = platform(spec(tmp_path, kinds, **chip, host_envs={"b": {"X_VISIBLE": "1", "Y_VISIBLE": "1"}}))
    on_host = prepared_launch(there, planned_launch(there, tasks.candidate(), str(tmp_path))).on_host
    assert on_host["b"].environment.items() >= {"X_VISIBLE": "1", "Y_VISIBLE": "1"}.items()
    assert on_host["a"].environment["X_VISIBLE"] == "0,1"


@pytest.mark.spread
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


@pytest.mark.spread
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


@pytest.mark.spread
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


@pytest.mark.spread
def test_the_devices_of_each_group_are_checked_on_its_first_host(tmp_path: Path) -> None:
    there = platform(spec(tmp_path))
    found = [Device(index=index, chip="chip-x", host=host) for host in "ac" for index in range(2)]
    require_devices(there, (*found, Device(index=0, chip="chip-y", host="b")))
    require_devices(there, tuple(found))  # the devices of host b are unknown
    with pytest.raises(NoDevice, match="b"):
        require_devices(there, (*found, Device(index=0, chip="chip-x", host="b")))


PROGRAM_TUNE_KINDS = """
import os, sys
words = sys.argv[1:]
def values(flag):
    rest = words[words.index(flag) + 1 :]
    return rest[: next((n for n, word in enumerate(rest) if word.startswith("--")), len(rest))]
assert "--enable-hetero" in words
(kind,) = values("--hetero-current-device-type")
assert kind == os.environ["KIND"], (kind, os.environ["KIND"])
steps = int(values("--train-iters")[0])
if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
    split = [int(each) for each in values("--hetero-pipeline-layer-split")]
    for step in range(1, steps + 1):
        ms = 100.0 * max(split)
        print(f" iteration {step}/ {steps} | elapsed time per iteration (ms): {ms} | lm loss: 7.0E+00 |", flush=True)
"""
TORCHRUN = """#!{python}
import os, sys
options = dict(word[2:].split("=", 1) for word in sys.argv[1:] if word.startswith("--") and "=" in word)
start = sys.argv.index("train_gpt.py")
os.environ.update(RANK=options["node-rank"], WORLD_SIZE=options["nnodes"])
assert options["nproc-per-node"] == "1"
os.execv(sys.executable, [sys.executable, *sys.argv[start:]])
"""
ARGUMENTS = ("--enable-hetero", "--num-layers", "4", "--train-iters", "9")


@REPORTED
@pytest.mark.costly
@pytest.mark.usefixtures("reported")
def test_meshes_are_tuned_on_two_kinds_of_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SSH, "channel", lambda host: ["sh", "-c", agent_command()])
    monkeypatch.setattr(SSH, "logs_in", False)  # both hosts are this machine
    monkeypatch.setattr(SSH, "owner", "")  # other tests use it, too
    (tmp_path / "hosts").write_text("localhost slots=1 type=fast\n127.0.0.1 slots=1 type=slow\n")
    (tmp_path / "train_gpt.py").write_text(PROGRAM_TUNE_KINDS)
    (tmp_path / "torchrun").write_text(TORCHRUN.format(python=sys.executable))
    (tmp_path / "torchrun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    kinds = [{"chip": "cpu", "name": kind, "envs": {"KIND": kind}} for kind in ("fast", "slow")]
    spec = {
        "model": SHAPE,
        "cluster": {"hostfile": str(tmp_path / "hosts"), "groups": kinds},
        "train": {
            "engine": "megatron",
            "seq_length": 64,
            "global_batch_size": 4,
            "precision": "fp32",
            "engine_version": "0.15.0+flagscale",
            "command": ["torchrun", "train_gpt.py", *ARGUMENTS],
            "directory": str(tmp_path),
        },
        "auto_tuner": {
            "launcher": "ssh",
            "space": {"meshes": ["fast + slow", "fast"], "micro_batch_size": [1]},
            "control": {
                "max_trials": 2,
                "repeats": 0,
                "train_iters": 3,
                "compare_hosts": False,
                "use_experience": False,
            },
        },
    }
    outcome = api.tune(spec, run_dir=tmp_path / "run")
    hosts = {}
    for file in sorted((tmp_path / "run" / "trials").glob("*/launch.json")):
        started = json.loads(file.read_text())
        words = started["on_host"][started["hosts"][0]]["argv"]
        hosts[tuple(words[words.index("--hetero-device-types") + 1 :][: len(started["hosts"])])] = started["hosts"]
    assert hosts[("fast", "slow")] == ["localhost", "127.0.0.1"]
    assert hosts[("fast",)] == ["localhost"]
    times = {str(trial["candidate"]["meshes"]): trial["measured"] for trial in outcome.data["trials"]}
    assert times["None"]["step_time_s"]["median"] == 0.2  # two layers on each kind
    assert times["fast"]["step_time_s"]["median"] == 0.4
