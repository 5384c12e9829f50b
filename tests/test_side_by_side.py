"""The loop with several trials at once, on simulated devices: a launch writes the log of a run, and lasts a while."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flagcore.contracts import Choice, Event, Launcher, SearchContext
from flagcore.domain.chip import Device, Support
from flagcore.domain.engine import EngineSupport
from flagcore.domain.launch import Exit, Launch
from flagcore.domain.spec import ClusterSpec, Control, Spec
from flagcore.domain.trial import Role, TrialState
from flagcore.engines.megatron.adapter import WORKLOAD
from flagcore.errors import Interrupted, LaunchError
from flagcore.hooks import hookimpl
from flagcore.plugins import LoadedPlugins
from flagcore.report.result import result
from flagcore.tuner.loop import Dependencies, TuneResult, tune
from flagcore.tuner.stages.limit import seconds_used
from flagcore.tuner.store.trials import OptunaStore
from flagcore.tuner.strategies import predicted
from flagcore.vendorkit.smi import visible
from tests import small
from tests.tuner.test_loop import SPACE, flagcore_chips, knobs, plain, sound

GIVE_UP_SECONDS = 30.0
"""A launch ends after so long, even if it should wait for others."""


class Run:
    """A launch that ends by itself once its node lets it, or when it is stopped."""

    def __init__(self, node: Node, number: int, devices: str, launch: Launch) -> None:
        self.node, self.number, self.devices, self.launch = node, number, devices, launch
        self.began, self.beside, self.exit = time.monotonic(), False, None

    exit: Exit | None

    def poll(self) -> Exit | None:
        return self.wait(0)

    def wait(self, seconds: float) -> Exit | None:
        if self.exit is None and not (self.node.ends(self.number) or time.monotonic() > self.began + GIVE_UP_SECONDS):
            time.sleep(min(seconds, 0.01))
            return None
        return self.exit or self._end(self.node.replies(self.number) or Exit(code=0, ended_by=None, duration_s=0.1))

    def stop(self) -> Exit:
        return self.exit or self._end(Exit(code=-15, ended_by="request", duration_s=0.1))

    def _end(self, ended: Exit) -> Exit:
        sizes = (self.launch.environment[f"FLAGCORE_{n}_SIZE"] for n in ("TENSOR_MODEL_PARALLEL", "MICRO_BATCH"))
        step = plain(*map(int, sizes)) * (self.node.slower if self.beside else 1.0)
        line = " iteration {}/ 3 | elapsed time per iteration (ms): {} | lm loss: 7.0E+00 |\n"
        Path(self.launch.folder, "stdout.log").write_text("".join(line.format(n, step) for n in (1, 2, 3)))
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
        self.replies: Callable[[int], Exit | None] = lambda number: None
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


@hookimpl
def flagcore_devices(environment: Mapping[str, str]) -> tuple[Device, ...]:
    found = tuple(Device(index=n, chip="test-chip", memory_bytes=64 << 30) for n in range(8))
    return visible(found, "ACME_VISIBLE_DEVICES", environment=environment)


@hookimpl
def flagcore_engine_support() -> EngineSupport:
    answer = EngineSupport(support=Support.YES, device_type="xpu", distributed_backend="gloo")
    return replace(answer, visible_devices=("ACME_VISIBLE_DEVICES",))


PLUGIN = SimpleNamespace(
    flagcore_chips=flagcore_chips,
    flagcore_devices=flagcore_devices,
    flagcore_engine_support=flagcore_engine_support,
)


class Watching:
    """The order of predictions; keeps what was pending at each choice."""

    name = "watching"

    def __init__(self) -> None:
        self.pending: list[int] = []

    def next(self, context: SearchContext) -> Choice:
        choice = predicted.STRATEGY.next(context)
        assert context.space.candidate(choice.row or 0) not in {trial.candidate for trial in context.pending}
        self.pending.append(len(context.pending))
        return choice


class Bench:
    """Trials on two of eight devices."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.node, self.strategy, self.events = folder, Node(), Watching(), list[Event]()

    def tune(self, parallel_trials: Any = "auto", plugin: Any = PLUGIN, envs: Any = None, **control: Any) -> TuneResult:
        several = Control(train_iters=3, parallel_trials=parallel_trials, **control)
        task = small.task(space=SPACE, control=several, command=("train",))
        spec: Spec = replace(task.spec, cluster=ClusterSpec(devices_per_node=2), envs=envs or {})
        parts = Dependencies(
            plugins=LoadedPlugins.of({"here": plugin}),
            workload=WORKLOAD,
            launcher=self.node,
            strategy=self.strategy,
            open_store=lambda problem: OptunaStore(self.folder, problem.space.choices, run="run"),
            on_event=self.events.append,
        )
        return tune(spec, parts)

    def journal(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "journal.log").read_text().splitlines()]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_trials_run_at_once_on_disjoint_devices_and_finalists_alone(bench: Bench) -> None:
    bench.node = Node(together=4)
    plan = bench.tune().plan
    assert plan.best is not None
    assert knobs(plan.best.candidate) == (2, 2)
    assert bench.node.most == 4
    assert set(bench.node.devices) == {"0,1", "2,3", "4,5", "6,7"}
    assert max(bench.strategy.pending) >= 2
    assert plan.interference is not None
    assert (plan.interference.is_negligible, plan.interference.slowdown) == (True, 0.0)
    assert [trial.group for trial in plan.repeats] == [None] * len(plan.repeats)
    assert plan.best.is_final
    assert plan.gain == pytest.approx(0.95)
    assert result(plan, "runs")["side_by_side"]["quiet"]
    assert sound(plan)


def test_without_repeats_the_best_runs_alone_once(bench: Bench) -> None:
    plan = bench.tune(repeats=0).plan
    assert plan.best is not None
    assert plan.best.group is None
    assert len(plan.repeats) == 1


def test_trials_that_disturb_each_other_run_again_one_at_a_time(bench: Bench) -> None:
    bench.node = Node(slower=1.5, together=4)
    plan = bench.tune().plan
    assert plan.interference is not None
    assert not plan.interference.is_negligible
    assert plan.interference.slowdown == pytest.approx(0.5)
    assert plan.best is not None
    assert knobs(plan.best.candidate) == (2, 2)
    timed = [trial for trial in plan.trials if trial.state in (TrialState.MEASURED, TrialState.STOPPED)]
    assert [trial.group for trial in timed] == [None] * len(timed)
    assert plan.gain == pytest.approx(0.95)
    assert sum(event.note != "" for event in bench.events) == 1
    again = bench.tune()
    assert again.plan == plan


@pytest.mark.parametrize(
    ("wanted", "envs", "groups"),
    [(1, {}, {"0,1"}), (3, {}, {"0,1", "2,3", "4,5"}), (9, {"ACME_VISIBLE_DEVICES": "5,4,3,2"}, {"5,4", "3,2"})],
)
def test_trials_run_in_parallel_up_to_the_setting_and_the_devices(
    bench: Bench, wanted: int, envs: dict[str, str], groups: set[str]
) -> None:
    bench.node = Node(together=len(groups))
    assert bench.tune(wanted, envs=envs, repeats=0).error is None
    assert set(bench.node.devices) == groups
    assert bench.node.most == len(groups)


def test_the_reason_is_reported_if_devices_cannot_be_selected(bench: Bench) -> None:
    @hookimpl
    def flagcore_engine_support() -> EngineSupport:
        return EngineSupport(support=Support.YES, device_type="xpu", distributed_backend="gloo")

    bench.tune(plugin=SimpleNamespace(**{**vars(PLUGIN), "flagcore_engine_support": flagcore_engine_support}))
    assert bench.node.most == 1
    assert [bool(event.note) for event in bench.events[:2]] == [True, False]


@pytest.mark.parametrize("most", [1, 3, 5])
def test_no_more_trials_than_allowed(bench: Bench, most: int) -> None:
    plan = bench.tune(max_trials=most, repeats=0).plan
    assert len(plan.trials) == most


def test_trials_are_numbered_by_start_and_stored_at_their_end(bench: Bench) -> None:
    bench.node.ends = lambda number: number != 2 or bench.node.ended == 4
    bench.tune(repeats=0)
    ends = [line["trial_id"] for line in bench.journal() if "result" in line.get("user_attr", {})]
    assert sorted(ends) == list(range(len(ends)))
    assert ends != sorted(ends)
    numbers = [event.trial.number for event in bench.events if event.kind == "trial_started"]
    assert numbers == sorted(numbers)


@pytest.mark.parametrize("stop_at", [0, 1, 2, 4, 6, 8])
def test_an_interrupted_run_ends_all_trials_and_resumes_to_the_same_result(bench: Bench, stop_at: int) -> None:
    def interrupt(number: int) -> None:
        if number == stop_at:
            os.kill(os.getpid(), signal.SIGINT)

    bench.node.fails = interrupt
    first = bench.tune()
    assert isinstance(first.error, Interrupted)
    assert bench.node.running == []
    assert sound(first.plan)
    bench.node = Node()
    plan = bench.tune().plan
    assert plan.best is not None
    assert knobs(plan.best.candidate) == (2, 2)
    assert TrialState.INTERRUPTED not in {trial.state for trial in plan.trials}
    assert sound(plan)


def test_a_failed_launch_ends_the_others_and_keeps_the_measurements(bench: Bench) -> None:
    bench.node.fails = lambda number: LaunchError("no free TCP port") if number == 5 else None
    ending = bench.tune()
    assert isinstance(ending.error, LaunchError)
    assert bench.node.running == []
    assert ending.plan.best is not None
    assert sound(ending.plan)


def test_an_error_of_the_strategy_ends_all_trials(bench: Bench) -> None:
    bench.node.ends = lambda number: number == 0

    def fail(context: SearchContext) -> Choice:
        if context.pending:
            raise ZeroDivisionError
        return predicted.STRATEGY.next(context)

    bench.strategy.next = fail  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        bench.tune()
    assert bench.node.running == []


def test_time_of_trials_at_once_counts_once(bench: Bench) -> None:
    trials = [trial for trial in bench.tune(repeats=0).plan.trials if trial.began_s is not None]
    both = [replace(trial, began_s=10.0, duration_s=5.0, group=place) for place, trial in enumerate(trials[:3])]
    assert seconds_used(both) == 15.0


def test_nothing_runs_side_by_side_before_interference_is_known(bench: Bench) -> None:
    lost = Exit(code=1, ended_by="host", duration_s=0.1)
    bench.node.replies = lambda number: lost if number == 1 else None
    plan = bench.tune().plan
    roles = [event.trial.role for event in bench.events if event.kind == "trial_started"]
    assert roles.count(Role.INTERFERENCE) == 2
    assert plan.interference is not None
    assert sound(plan)


def test_interference_is_not_measured_without_candidates(bench: Bench) -> None:
    bench.tune(max_trials=1, repeats=0)
    assert {event.trial.role for event in bench.events} == {Role.BASELINE}


def test_interference_is_not_measured_again_after_a_restart(bench: Bench) -> None:
    bench.tune(max_trials=4, repeats=0)
    bench.tune(repeats=0)
    roles = [event.trial.role for event in bench.events if event.kind == "trial_started"]
    assert roles.count(Role.INTERFERENCE) == 1
