"""The loop with several trials at once, on simulated devices: a launch writes the log of a run, and lasts a while."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from flagcore_vendorkit.machine import visible

from flagcore.contracts import Choice, Launcher, SearchContext
from flagcore.domain.chip import Device
from flagcore.domain.launch import Exit, Launch
from flagcore.domain.spec import ClusterSpec
from flagcore.domain.trial import Role, TrialState
from flagcore.errors import Interrupted, LaunchError
from flagcore.hooks import hookimpl
from flagcore.report.result import Result
from flagcore.tuner.loop import TuneResult
from flagcore.tuner.strategies import PREDICTED
from tests.tuner.benches import Bench, knobs, plain, plugin, sizes_of, sound, write_steps

GIVE_UP_SECONDS = 30.0
"""A launch ends after so long, even if it should wait for others."""


class Run:
    """A launch that ends by itself once its node lets it, or when it is stopped."""

    def __init__(self, node: Node, number: int, devices: str, launch: Launch) -> None:
        self.node, self.number, self.devices, self.launch = node, number, devices, launch
        self.began, self.beside, self.exit = time.monotonic(), False, None

    exit: Exit | None

    def wait(self, seconds: float) -> Exit | None:
        if self.exit is None and not (self.node.ends(self.number) or time.monotonic() > self.began + GIVE_UP_SECONDS):
            time.sleep(min(seconds, 0.01))
            return None
        return self.exit or self._end(self.node.replies(self.launch) or Exit(code=0, ended_by=None, duration_s=0.1))

    def stop(self) -> Exit:
        return self.exit or self._end(Exit(code=-15, ended_by="request", duration_s=0.1))

    def _end(self, ended: Exit) -> Exit:
        write_steps(self.launch, plain(*sizes_of(self.launch)) * (self.node.slower if self.beside else 1.0))
        with self.node.lock:
            self.node.running.remove(self)
            self.node.ended += 1
        self.exit = ended
        return ended


class Node(Launcher):
    """A launcher on devices whose steps take `slower` times as long beside other launches.

    After the first one, launches end once `together` have run at once, or as `ends` says.
    """

    name = "node"

    def __init__(self, slower: float = 1.0, together: int = 1) -> None:
        self.slower, self.together = slower, together
        self.running, self.most, self.ended = list[Run](), 0, 0
        self.devices, self.lock = Counter[str](), threading.Lock()
        self.fails: Callable[[int], BaseException | None] = lambda number: None
        self.replies: Callable[[Launch], Exit | None] = lambda launch: None
        self.ends: Callable[[int], bool] = lambda number: number == 0 or self.most >= self.together

    def start(self, launch: Launch) -> Run:
        with self.lock:
            mine, number = launch.environment.get("ACME_VISIBLE_DEVICES", "all"), self.devices.total()
            assert mine not in [run.devices for run in self.running], f"two trials run on devices {mine}"
            if failed := self.fails(number):
                raise failed
            self.running.append(Run(self, number, mine, launch))
            self.devices[mine] += 1
            self.most = max(self.most, len(self.running))
            for run in self.running:
                run.beside |= len(self.running) > 1
            return self.running[-1]


def devices(environment: Mapping[str, str]) -> tuple[Device, ...]:
    found = tuple(Device(index=n, chip="test-chip", memory_bytes=64 << 30) for n in range(8))
    return visible(found, "ACME_VISIBLE_DEVICES", environment=environment)


PLUGIN = plugin(visible_devices=("ACME_VISIBLE_DEVICES",))
PLUGIN.flagcore_devices = hookimpl(devices)


class Watching:
    """The order of predictions; keeps what was pending at each choice."""

    name = "watching"

    def __init__(self) -> None:
        self.pending: list[int] = []

    def next(self, context: SearchContext) -> Choice:
        choice = PREDICTED.next(context)
        assert context.space.candidate(choice.row or 0) not in {trial.candidate for trial in context.pending}
        self.pending.append(len(context.pending))
        return choice


class NodeBench(Bench):
    """Trials on two of eight devices."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, Node())
        self.strategy, self.plugin, self.cluster = Watching(), PLUGIN, ClusterSpec(devices_per_node=2)

    @property
    def node(self) -> Node:
        return self.launcher

    def run(self, parallel_trials: Any = "auto", **changes: Any) -> TuneResult:
        return self.tune(parallel_trials=parallel_trials, **changes)

    def journal(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "journal.log").read_text().splitlines()]


@pytest.fixture
def bench(tmp_path: Path) -> NodeBench:
    return NodeBench(tmp_path)


def test_trials_run_at_once_on_disjoint_devices_and_finalists_alone(bench: NodeBench) -> None:
    bench.launcher = Node(together=4)
    plan = bench.run().plan
    assert knobs(plan.best.candidate) == (2, 2)
    assert bench.node.most == 4
    assert set(bench.node.devices) == {"0,1", "2,3", "4,5", "6,7"}
    assert max(bench.strategy.pending) >= 2
    assert (plan.interference.is_negligible, plan.interference.slowdown) == (True, 0.0)
    assert [trial.group for trial in plan.repeats] == [None] * len(plan.repeats)
    assert plan.best.is_final
    assert plan.gain == pytest.approx(0.95)
    assert Result.write(plan, "runs")["side_by_side"]["quiet"]
    assert sound(plan)


def test_without_repeats_the_best_runs_alone_once(bench: NodeBench) -> None:
    plan = bench.run(repeats=0).plan
    assert plan.best.group is None
    assert len(plan.repeats) == 1


def test_trials_that_disturb_each_other_run_again_one_at_a_time(bench: NodeBench) -> None:
    bench.launcher = Node(slower=1.5, together=4)
    plan = bench.run().plan
    assert not plan.interference.is_negligible
    assert plan.interference.slowdown == pytest.approx(0.5)
    assert knobs(plan.best.candidate) == (2, 2)
    timed = [trial for trial in plan.trials if trial.state in (TrialState.MEASURED, TrialState.STOPPED)]
    assert [trial.group for trial in timed] == [None] * len(timed)
    assert plan.gain == pytest.approx(0.95)
    assert sum(event.note != "" for event in bench.events) == 1
    assert bench.run().plan == plan


@pytest.mark.parametrize(
    ("wanted", "envs", "groups"),
    [(1, {}, {"0,1"}), (3, {}, {"0,1", "2,3", "4,5"}), (9, {"ACME_VISIBLE_DEVICES": "5,4,3,2"}, {"5,4", "3,2"})],
)
def test_trials_run_in_parallel_up_to_the_setting_and_the_devices(
    bench: NodeBench, wanted: int, envs: dict[str, str], groups: set[str]
) -> None:
    bench.launcher = Node(together=len(groups))
    assert bench.run(wanted, envs=envs, repeats=0).error is None
    assert set(bench.node.devices) == groups
    assert bench.node.most == len(groups)


def test_the_reason_is_reported_if_devices_cannot_be_selected(bench: NodeBench) -> None:
    bench.plugin = plugin(count=8)
    bench.run()
    assert bench.node.most == 1
    assert [bool(event.note) for event in bench.events[:2]] == [True, False]


def test_trials_are_numbered_by_start_and_stored_at_their_end(bench: NodeBench) -> None:
    bench.node.ends = lambda number: number != 2 or bench.node.ended == 4
    bench.run(repeats=0)
    ends = [line["trial_id"] for line in bench.journal() if "result" in line.get("user_attr", {})]
    assert sorted(ends) == list(range(len(ends)))
    assert ends != sorted(ends)
    numbers = [event.trial.number for event in bench.events if event.kind == "trial_started"]
    assert numbers == sorted(numbers)


@pytest.mark.parametrize("stop_at", [0, 2, 6])
def test_an_interrupted_run_ends_all_trials_and_resumes_to_the_same_result(bench: NodeBench, stop_at: int) -> None:
    def interrupt(number: int) -> None:
        if number == stop_at:
            os.kill(os.getpid(), signal.SIGINT)

    bench.node.fails = interrupt
    first = bench.run()
    assert isinstance(first.error, Interrupted)
    assert bench.node.running == []
    assert sound(first.plan)
    bench.launcher = Node()
    plan = bench.run().plan
    assert knobs(plan.best.candidate) == (2, 2)
    assert TrialState.INTERRUPTED not in {trial.state for trial in plan.trials}
    assert sound(plan)


def test_a_failed_launch_ends_the_others_and_keeps_the_measurements(bench: NodeBench) -> None:
    bench.node.fails = lambda number: LaunchError("no free TCP port") if number == 5 else None
    ending = bench.run()
    assert isinstance(ending.error, LaunchError)
    assert bench.node.running == []
    assert ending.plan.best is not None
    assert sound(ending.plan)


def test_an_error_of_the_strategy_ends_all_trials(bench: NodeBench) -> None:
    bench.node.ends = lambda number: number == 0

    def fail(context: SearchContext) -> Choice:
        if context.pending:
            raise ZeroDivisionError
        return PREDICTED.next(context)

    bench.strategy.next = fail  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        bench.run()
    assert bench.node.running == []


def test_nothing_runs_side_by_side_before_interference_is_known(bench: NodeBench) -> None:
    lost = Exit(code=1, ended_by="host", duration_s=0.1)
    bench.node.replies = lambda launch: lost if Path(launch.folder).name == "1" else None  # threads start in any order
    plan = bench.run().plan
    roles = [event.trial.role for event in bench.events if event.kind == "trial_started"]
    assert roles.count(Role.INTERFERENCE) == 2
    assert plan.interference is not None
    assert sound(plan)


def test_interference_is_not_measured_again_after_a_restart(bench: NodeBench) -> None:
    bench.run(max_trials=4, repeats=0)
    bench.run(repeats=0)
    roles = [event.trial.role for event in bench.events if event.kind == "trial_started"]
    assert roles.count(Role.INTERFERENCE) == 1
