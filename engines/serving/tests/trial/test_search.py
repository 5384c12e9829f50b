"""The search for the highest load within one launch, with loads that tests play."""

import dataclasses
import json
import math
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flagcore_llamacpp.engine import ENGINE as LLAMACPP
from flagcore_serving.job import Load
from flagcore_serving.launch.server import Instance, TrialJob
from flagcore_serving.load.progress import RESOLUTION
from flagcore_serving.load.result import LoadResult, Progress
from flagcore_serving.trial import loads
from flagcore_serving.trial.failures import Limit, TrialFailure, fewest_answers
from flagcore_serving.trial.loads import LoadRunner
from flagcore_serving.trial.servers import Server

from flagcore.domain.trial import TrialState
from tests.checks import given

TRUE, LIMIT = 50.0, 0.5
STEADY = Load(input_len=8, output_len=8, concurrency=4, is_steady=True)


class Runner(LoadRunner):
    """Measures a latency that reaches its limit at the load TRUE, and is too high in the runs `disturbed`."""

    warm_up_rate = math.inf

    def __init__(self, start: float, disturbed: tuple[int, ...], repeats: int) -> None:
        base = Load(input_len=8, output_len=8, num_prompts=100, request_rate=1000.0)
        slo = {"ttft_s.p99": LIMIT}
        self.job = TrialJob(
            engine="", instances=(), loads=(base,), vocab_size=1, timeout_s=1.0, slo=slo, start=start, repeats=repeats
        )
        self.disturbed, self.deadline, self.completions_per_s = disturbed, math.inf, math.inf
        self.tried, self.seeds = list[float](), list[int]()

    def _warm_up(self, most: int = 1) -> float:
        return self.warm_up_rate

    def _measure(self, load: Load, name: str, seed: int, limits: Any = None) -> dict[str, Any] | None:
        assert load.request_rate is not None
        self.tried.append(load.request_rate)
        self.seeds.append(seed)
        if limits and (load.request_rate > TRUE or len(self.tried) in self.disturbed):
            return None
        return {"figures": {"ttft_s.p99": LIMIT * (load.request_rate / TRUE) ** 4}}


@pytest.mark.parametrize(("start", "rate"), [(5.0, math.inf), (45.0, 60.0), (300.0, math.inf), (900.0, 60.0)])
@pytest.mark.parametrize("disturbed", [(), (1,), (2,), (3,), (1, 3, 6)])
def test_a_disturbed_load_is_tried_again_at_once(start: float, rate: float, disturbed: tuple[int, ...]) -> None:
    runner = Runner(start, disturbed, repeats=2)
    runner.warm_up_rate = rate
    points = runner._search("request_rate")
    best = points[-1]["load"]["request_rate"]
    assert TRUE / RESOLUTION <= best <= TRUE
    assert len(points[-1]["repeats"]) == 2
    assert runner.highest is not None
    assert (runner.highest.met, runner.highest.untested) == (best, None)
    assert TRUE < given(runner.highest.exceeded) <= best * RESOLUTION * 1.001
    assert runner.tried[0] == min(start, rate)
    assert min(runner.tried) >= min(start, TRUE / 4)
    assert len(set(runner.seeds)) == len(runner.seeds)
    tries = Counter(runner.tried)
    assert all(tries[load] == 2 for load in tries if load > TRUE)


@pytest.mark.parametrize("start", [20.0, 1.4 * TRUE])
def test_after_lucky_runs_the_search_goes_on_with_lower_loads(start: float, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, measure = Runner(start, (), repeats=2), Runner._measure

    def lucky(self: Runner, load: Load, name: str, seed: int, limits: Any = None) -> dict[str, Any] | None:
        is_lucky = TRUE < (load.request_rate or 0.0) < 1.5 * TRUE and load.request_rate not in self.tried
        found = measure(self, load, name, seed, limits)
        return {"figures": {"ttft_s.p99": 0.9 * LIMIT}} if is_lucky else found

    monkeypatch.setattr(Runner, "_measure", lucky)
    runner._search("request_rate")
    assert runner.highest is not None
    assert runner.highest.met is not None
    assert runner.highest.met <= 1.03 * TRUE
    assert given(runner.highest.exceeded) <= runner.highest.met * RESOLUTION**2


def test_a_load_that_takes_longer_than_the_time_left_is_not_sent() -> None:
    runner = Runner(45.0, (), repeats=2)
    runner.deadline = time.monotonic() + 1.0
    (point,) = runner._search("request_rate")
    assert runner.tried == [point["load"]["request_rate"]]
    assert runner.highest is not None
    assert (runner.highest.met, runner.highest.exceeded) == (45.0, None)
    assert given(runner.highest.untested) > 45.0


def test_a_search_without_time_for_lower_loads_reports_what_it_tried() -> None:
    runner = Runner(20.0, tuple(range(1000)), repeats=1)  # 8 requests, the fewest with metrics, take 0.4 s
    runner.deadline = time.monotonic() + 0.2
    with pytest.raises(TrialFailure) as failure:
        runner._search("request_rate")
    assert failure.value.state is TrialState.TIMED_OUT


def test_a_load_is_tested_if_its_requests_arrive_in_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(loads, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    class Timed(Runner):
        def _measure(self, load: Load, name: str, seed: int, limits: Any = None) -> dict[str, Any] | None:
            clock[0] += 100 / given(load.request_rate)
            return super()._measure(load, name, seed, limits)

    runner = Timed(5.0, (), repeats=3)
    runner.deadline = 33.0  # 20 s for the first load; higher ones take less time
    assert runner._search("request_rate")[-1]["load"]["request_rate"] == pytest.approx(45.0)
    assert given(runner.highest).met == pytest.approx(45.0)


@pytest.mark.parametrize(
    ("start", "seconds", "lowest"), [(200.0, 0.16, 50.0), (200.0, 2.0, 4.0), (20.0, math.inf, 0.0)]
)
def test_if_no_load_is_within_the_limits_the_lowest_for_which_there_is_time_is_measured(
    start: float, seconds: float, lowest: float
) -> None:
    runner = Runner(start, tuple(range(1000)), repeats=1)
    runner.deadline = time.monotonic() + seconds
    (point,) = runner._search("request_rate")
    assert point["load"]["request_rate"] == min(runner.tried) > lowest


class Sent(LoadRunner):
    """Records the loads that are sent. Each ends with requests in flight."""

    def __init__(self) -> None:
        self.job = TrialJob(engine="", instances=(), loads=(STEADY,), vocab_size=1, timeout_s=1.0)
        self.reports, self.servers, self.answering, self.is_cut_off = LLAMACPP.reports, (), (), False
        self.names = list[str]()

    def _send(self, load: Load, name: str, *others: Any, **options: Any) -> LoadResult:
        self.names.append(name)
        return LoadResult(figures={"ttft_s.p99": 0.1}, duration_s=1.0, completed=1, failed=0, window=(0.2, 0.8))


def test_requests_in_flight_end_before_the_next_load_and_not_at_the_cost_of_the_last() -> None:
    runner = Sent()
    assert runner._measure(STEADY, "first", seed=1) is not None
    assert runner._measure(STEADY, "second", seed=2) is not None
    assert runner.names == ["first", "warm-up", "second"]


@pytest.mark.parametrize(("seconds", "repeats"), [(6.5, [3, 3]), (6.4, [3, 2]), (4.9, [2, 2]), (1.5, [1, 1])])
def test_a_repeat_that_takes_longer_than_the_time_left_is_not_sent(
    seconds: float, repeats: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(loads, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    class Timed(Runner):
        def _measure(self, load: Load, name: str, seed: int, limits: Any = None) -> dict[str, Any] | None:
            clock[0] += 1.0
            return {}

    runner = Timed(1.0, (), repeats=3)
    runner.job = dataclasses.replace(runner.job, loads=(STEADY, dataclasses.replace(STEADY, is_steady=False)))
    runner.deadline = seconds
    assert [len(point["repeats"]) for point in runner.points()] == repeats


def test_repeats_that_do_not_end_in_time_leave_those_before_them() -> None:
    class Late(Runner):
        def _measure(self, load: Load, name: str, seed: int, limits: Any = None) -> dict[str, Any] | None:
            self.seeds.append(seed)
            if len(self.seeds) > self.measured:
                raise TrialFailure(TrialState.TIMED_OUT, "too slow")
            return {"figures": {}, "notes": []}

        measured = 2

    runner = Late(1.0, (), repeats=3)
    (point,) = runner.points()
    assert len(point["repeats"]) == 2
    assert point["repeats"][-1]["notes"][0].startswith("2 of 3 repeats")
    assert not runner.may_be_cut
    runner = Late(1.0, (), repeats=3)
    runner.measured = 0
    with pytest.raises(TrialFailure, match="too slow"):
        runner.points()


class Refusing(Runner):
    """Fails at loads above TRUE."""

    failure = TrialFailure(TrialState.FAILED, "1 of 9 requests: refused: HTTP 429 Too Many Requests: slow down")
    lowest = TRUE

    def _measure(self, load: Load, name: str, seed: int, limits: Any = None) -> dict[str, Any] | None:
        assert load.request_rate is not None
        self.tried.append(load.request_rate)
        if load.request_rate > self.lowest:
            raise self.failure
        return {"figures": {"ttft_s.p99": 0.1}}


@pytest.mark.parametrize("start", [5.0, 300.0])
def test_a_load_that_the_server_refuses_is_above_the_limits(start: float) -> None:
    points = Refusing(start, (), repeats=2)._search("request_rate")
    assert TRUE / RESOLUTION <= points[-1]["load"]["request_rate"] <= TRUE


def test_a_server_that_refuses_every_load_fails() -> None:
    runner = Refusing(5.0, (), repeats=1)
    runner.lowest = 0.0
    with pytest.raises(TrialFailure, match="429"):
        runner._search("request_rate")


@pytest.mark.parametrize("state", [TrialState.TIMED_OUT, TrialState.FAILED])
def test_a_load_that_does_not_end_in_time_leaves_those_before_it(state: TrialState) -> None:
    runner = Refusing(5.0, (), repeats=2)
    runner.failure = TrialFailure(state, "timed out: not answered within 9 s")
    if state is TrialState.FAILED:  # a server that fails is no load that is too high
        with pytest.raises(TrialFailure):
            runner._search("request_rate")
    else:
        best = runner._search("request_rate")[-1]["load"]["request_rate"]
        assert best <= TRUE
        assert runner.highest is not None
        assert (runner.highest.met, runner.highest.exceeded) == (best, None)
        assert runner.highest.untested in runner.tried


def test_a_warm_up_that_is_refused_is_sent_with_fewer_requests() -> None:
    class Small(Sent):
        def _send(self, load: Load, name: str, *others: Any, **options: Any) -> LoadResult:
            super()._send(load, f"{load.concurrency}")
            if load.concurrency == STEADY.concurrency:
                raise Refusing.failure
            return LoadResult(figures={}, duration_s=1.0, completed=1, failed=0)

    runner = Small()
    runner.servers = [Server("server", Instance(argv=()), Path("log"), ())]
    runner._warm_up()
    assert runner.names == ["4", "2"]


LOAD = Load(input_len=32, output_len=64, num_prompts=32, concurrency=16)
SLOW = Progress(answered=3, requests=32, seconds=31.0, each_s=29.0, all_s=310.0, has_tokens=True)


def limit(folder: Path, because: str, seconds: float = 100.0, start_s: float = 7.0) -> Limit:
    (folder / "launch.json").write_text(json.dumps({"timeout_because": because}))
    return Limit.of(folder, seconds, start_s)


@pytest.mark.parametrize(
    ("because", "seconds", "setting"),
    [
        ("auto_tuner.control.max_time_per_task = 100 s", 100.0, "auto_tuner.control.max_time_per_task: 400"),
        ("the rest of auto_tuner.control.max_time = 210 s", 100.0, "auto_tuner.control.max_time: 510"),
        ("1200 s to start", 100.0, "auto_tuner.control.max_time_per_task: 400"),
    ],
)
def test_the_setting_for_the_time_limit_is_computed(because: str, seconds: float, setting: str, tmp_path: Path) -> None:
    text = limit(tmp_path, because, seconds).short_of_time(SLOW, "the load", [LOAD], 88.0, 2.1)
    assert f"set {setting} or serve.profile.num_prompts: 7" in text
    for part in ("3 of 32", "29 s each", "predicted 2.1 s", "~310 s of 88 s"):
        assert part in text
    assert len(text) < 250


def test_later_loads_need_time_too(tmp_path: Path) -> None:
    assert "~620 s of 88 s" in limit(tmp_path, "").short_of_time(SLOW, "load 1 of 2", [LOAD, LOAD], 88.0, None)


def test_a_start_that_took_most_of_the_time_is_named(tmp_path: Path) -> None:
    late = limit(tmp_path, "", start_s=80.0)
    assert "the start took 80 s of 100 s" in late.no_time("warm-up")
    assert "the start took 80 s of 100 s" in late.short_of_time(SLOW, "the load", [LOAD], 8.0, None)
    assert "the start" not in limit(tmp_path, "").no_time("warm-up")


def test_a_server_that_sent_nothing_gets_no_advice(tmp_path: Path) -> None:
    silent = Progress(answered=0, requests=32, seconds=88.0, each_s=None, all_s=None, has_tokens=False)
    text = limit(tmp_path, "").short_of_time(silent, "the load", [LOAD], 88.0, 2.1)
    assert "none of 32" in text
    assert "no token arrived" in text
    assert "set " not in text


def test_a_trial_without_a_launch_has_a_limit(tmp_path: Path) -> None:
    assert Limit.of(tmp_path, 60.0, 1.0).value_s == 60.0


@pytest.mark.parametrize(
    ("load", "fewest"),
    [
        (LOAD, 16),
        (Load(concurrency=2), 8),
        (Load(request_rate=4.0), 8),
        (Load(request_rate=math.inf, num_prompts=100), 100),
    ],
)
def test_every_request_in_flight_ends_once_in_a_load_that_is_cut(load: Load, fewest: int) -> None:
    assert fewest_answers(load) == fewest
