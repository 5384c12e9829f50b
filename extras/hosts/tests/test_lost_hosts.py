"""Hosts that are lost for some time; a launcher plays the trials."""

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from flagcore_hosts.launcher import HostsLauncher

from flagcore.domain.launch import Exit, Launch
from flagcore.domain.spec import ClusterSpec
from flagcore.domain.trial import TrialState
from flagcore.errors import HostLost, Interrupted
from flagcore.tuner import trial_runner
from flagcore.tuner.parallel import MAX_CONSECUTIVE_BUSY
from tests.product import tasks
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
