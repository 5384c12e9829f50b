"""Watching a trial: how each end is called, and what is concluded from what it measured."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flagcore_testing.toy import ENGINE, Toy

from flagcore.contracts import Platform, Steps
from flagcore.domain.chip import Device, Support
from flagcore.domain.cluster import Cluster, NodeGroup
from flagcore.domain.engine import EngineSupport
from flagcore.domain.launch import Exit, FailurePattern, classify
from flagcore.domain.secrets import REDACTED
from flagcore.domain.space import Candidate
from flagcore.domain.spec import ClusterSpec, Control, Task
from flagcore.domain.trial import Measurement, Role, Shortened, TimeLimit, Trial, TrialState
from flagcore.errors import FlagError
from flagcore.tuner.stages.measure import EARLY_STOP_RATIO, measure
from tests import tasks
from tests.tasks import Readings

TASK = tasks.task(control=Control(train_iters=5, warmup_iters=1), memory_bytes=1 << 30)
TRIAL = Trial(number=1, candidate=tasks.candidate(), role=Role.SEARCH, state=TrialState.RUNNING)
MEASURED = Measurement(
    step_times_s=(1.0, 1.0), step_time_s=1.0, spread_s=0.0, tokens_per_second_per_device=10.0, losses=(2.0, 1.0)
)
BEST = replace(TRIAL, number=0, state=TrialState.MEASURED, measurement=MEASURED)
VENDOR = FailurePattern(pattern=r"xpu: E42", state=TrialState.OUT_OF_MEMORY, advice="lower the pool")


class Ran:
    """A trial that ends as configured after some polls, each of some `seconds`; `stop` ends it on request."""

    def __init__(self, ended: Exit, polls: int = 0, seconds: float = 0.5) -> None:
        self.ended, self.polls, self.seconds, self.stopped, self.now = ended, polls, seconds, False, -seconds

    def wait(self, seconds: float) -> Exit | None:
        self.polls -= 1
        self.now += self.seconds
        return self.ended if self.polls < 0 else None

    def stop(self) -> Exit:
        self.stopped = True
        return replace(self.ended, code=-15, ended_by="request")


class Engine(Toy):
    """The engine's adapter, as far as measuring asks it: a trial has the next of `steps` at each poll."""

    def __init__(self, *steps: Sequence[float], result: Measurement | str = MEASURED, limit: int | None = None) -> None:
        self.seconds, self.result, self.limit = [tuple(each) for each in steps] or [()], result, limit

    def steps(self, task: Task, folder: str) -> Steps:
        return Steps(lambda: self.seconds.pop(0) if len(self.seconds) > 1 else self.seconds[0], limit=self.limit)

    def read(self, task: Task, candidate: Candidate, folder: str, *, partial: bool = False) -> Measurement:
        if isinstance(self.result, str):
            raise FlagError(self.result)
        return self.result


def ended(code: int = 0, by: str | None = None) -> Exit:
    return Exit(code=code, ended_by=by, duration_s=12.0, peak_memory_bytes=3 << 30)


def measured(
    run: Ran,
    folder: Path,
    engine: Any = None,
    platform: Platform | None = None,
    best: Trial | None = None,
    trial: Trial = TRIAL,
) -> Trial:
    platform = replace(platform or tasks.platform(TASK), engine=engine or Engine())
    return measure(run, platform, trial, str(folder), best)


@pytest.fixture
def slow_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that advances by two seconds whenever it is read, so that each poll reads the devices."""
    clock = iter(range(0, 1000, 2))
    monkeypatch.setattr("flagcore.tuner.stages.measure.time.monotonic", lambda: float(next(clock)))


def test_a_completed_trial_is_measured_if_it_wrote_metrics(tmp_path: Path) -> None:
    done = measured(Ran(ended()), tmp_path)
    assert (done.state, done.duration_s, done.reason) == (TrialState.MEASURED, 12.0, None)
    assert done.measurement.step_time_s == 1.0
    done = measured(Ran(ended()), tmp_path, Engine(result="it wrote no metrics.json"))
    assert (done.state, done.reason, done.measurement) == (TrialState.FAILED, "it wrote no metrics.json", None)


def test_a_service_that_measured_and_was_slow_to_stop_is_measured(tmp_path: Path) -> None:
    spec = replace(TASK.spec, work=tasks.Service(engine="toy"), objective="output_tokens_per_s")
    platform, late = tasks.platform(replace(TASK, spec=spec)), ended(-15, "timeout")
    assert measured(Ran(late), tmp_path, platform=platform).state is TrialState.MEASURED
    lost = measured(Ran(late), tmp_path, Engine(result="it wrote no metrics.json"), platform)
    assert (lost.state, lost.measurement) == (TrialState.TIMED_OUT, None)
    assert "still running after 12 s" in (lost.reason or "")


@pytest.mark.parametrize("by", ["disk", "guard", "stopped"])
def test_a_trial_that_something_else_ended_is_inconclusive(tmp_path: Path, by: str) -> None:
    assert measured(Ran(ended(-9, by)), tmp_path).inconclusive == (by != "disk")


ENDS: dict[str, tuple[Exit, str, TrialState, str]] = {
    "by itself": (ended(3), "", TrialState.FAILED, "exit code 3"),
    "by itself, with a word": (ended(3), "one\nlast words\n\n", TrialState.FAILED, "last words"),
    "by a signal": (ended(-11), "", TrialState.FAILED, "signal 11"),
    "by the kernel": (ended(-9), "", TrialState.OUT_OF_MEMORY, "SIGKILL"),
    "by its time": (ended(-15, "timeout"), "step 3", TrialState.TIMED_OUT, "still running after 12 s (300 s to start)"),
    "by its time, with exit 0": (ended(0, "timeout"), "", TrialState.TIMED_OUT, "still running"),
    "by its memory": (ended(-9, "memory"), "", TrialState.OUT_OF_MEMORY, "3.00 GiB"),
    "by its folder": (ended(-9, "disk"), "out of memory: no", TrialState.FAILED, "disk_limit"),
    "by a full disk": (ended(-9, "full_disk"), "out of memory: no", TrialState.FAILED, "is full"),
    "by a full disk elsewhere": (
        ended(1),
        "OSError: [Errno 28] No space left on device: '/ckpt/1'\nChildFailedError",
        TrialState.FAILED,
        "No space left on device: '/ckpt/1'",
    ),
    "on request": (ended(-15, "request"), "", TrialState.INTERRUPTED, "request"),
    "out of memory": (
        ended(1),
        "[rank0]: out of memory: tried to allocate 2 GiB",
        TrialState.OUT_OF_MEMORY,
        "tried to allocate",
    ),
    "killed guard": (ended(-9, "guard"), "", TrialState.FAILED, "guard"),
    "a stopped process": (ended(-9, "stopped"), "", TrialState.FAILED, "SIGSTOP"),
    "refused by the program": (ended(1), "invalid: heads", TrialState.INVALID, "heads"),
    "memory behind another reason": (
        ended(1),
        "invalid: peer\nout of memory: rank 1\nlater",
        TrialState.OUT_OF_MEMORY,
        "rank 1",
    ),
    "a plugin's pattern": (ended(1), "xpu: E42 at 0x7", TrialState.OUT_OF_MEMORY, "xpu: E42 at 0x7 (lower the pool)"),
}


@pytest.mark.parametrize("name", ENDS)
def test_an_unsuccessful_trial_has_its_state_and_reason(name: str, tmp_path: Path) -> None:
    end, log, state, words = ENDS[name]
    (tmp_path / "stderr.log").write_text(log)
    trial = replace(TRIAL, time_limit=TimeLimit(seconds=12.0, because="300 s to start"))
    done = measured(Ran(end), tmp_path, platform=tasks.platform(TASK, failure_patterns=(VENDOR,)), trial=trial)
    assert done.state is state
    assert words in (done.reason or "")
    assert done.measurement is None
    assert done.duration_s == 12.0


@pytest.mark.parametrize("log", [bytes(range(256)) * 4000, b"ValueError: " + b"x" * 100_000], ids=["binary", "long"])
def test_unusual_logs_give_a_short_printable_reason(log: bytes, tmp_path: Path) -> None:
    (tmp_path / "stdout.log").write_bytes(log)
    done = measured(Ran(ended(1)), tmp_path)
    assert done.state.failed
    assert (done.reason or "").isprintable()
    assert len(done.reason or "") < 400


def test_a_secret_of_the_environment_is_not_in_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACME_TOKEN", "plain-words-7")
    (tmp_path / "stderr.log").write_text("login as plain-words-7 failed\n")
    reason = measured(Ran(ended(1)), tmp_path).reason or ""
    assert "plain-words-7" not in reason
    assert REDACTED in reason


def test_only_the_end_of_a_large_log_is_read(tmp_path: Path) -> None:
    with (tmp_path / "stdout.log").open("wb") as file:
        file.truncate(8 << 30)
        file.seek(0, 2)
        file.write(b"\ngone for good\n")
    assert "gone for good" in (measured(Ran(ended(1)), tmp_path).reason or "")


def test_a_loss_that_is_not_finite_is_a_failure(tmp_path: Path) -> None:
    done = measured(Ran(ended()), tmp_path, Engine(result=replace(MEASURED, losses=(2.0, None))))
    assert done.state is TrialState.FAILED
    assert "loss is not finite" in (done.reason or "")


def test_the_engine_must_run_the_requested_settings(tmp_path: Path) -> None:
    done = measured(Ran(ended()), tmp_path, Engine(result=replace(MEASURED, effective={"micro_batch_size": 2})))
    assert done.state is TrialState.INVALID
    assert "micro_batch_size = 2 instead of 1" in (done.reason or "")
    same = measured(Ran(ended()), tmp_path, Engine(result=replace(MEASURED, effective={"micro_batch_size": 1, "x": 2})))
    assert same.state is TrialState.MEASURED


@pytest.mark.parametrize(("shared", "state"), [(True, TrialState.OUT_OF_MEMORY), (False, TrialState.MEASURED)])
def test_a_rank_over_its_share_of_the_machine_is_out_of_memory(shared: bool, state: TrialState, tmp_path: Path) -> None:
    support = EngineSupport(support=Support.YES, shared_devices=shared)
    greedy = Engine(result=replace(MEASURED, device_used_bytes=(1 << 30) + 1))
    assert measured(Ran(ended()), tmp_path, greedy, tasks.platform(TASK, support=support)).state is state
    modest = Engine(result=replace(MEASURED, device_used_bytes=1 << 30))
    done = measured(Ran(ended()), tmp_path, modest, tasks.platform(TASK, support=support))
    assert done.state is TrialState.MEASURED


def test_trial_slower_than_the_best_is_stopped_and_keeps_its_steps(tmp_path: Path) -> None:
    run = Ran(ended(), polls=3)
    steps = (EARLY_STOP_RATIO + 0.1, EARLY_STOP_RATIO + 0.2)
    slow = Engine((9.0, *steps), result=replace(MEASURED, step_times_s=steps, step_time_s=1.35))
    done = measured(run, tmp_path, slow, best=BEST)
    assert run.stopped
    assert done.state is TrialState.STOPPED
    assert done.measurement.partial
    assert re.findall(r"[\d.]+", done.reason or "") == ["1.3", "1.2", "1", "0"]  # fastest step, limit, best, its trial


def test_an_interrupt_ends_the_trial_and_passes(tmp_path: Path) -> None:
    class Interrupted(Ran):
        def wait(self, seconds: float) -> Exit | None:
            raise KeyboardInterrupt

    run = Interrupted(ended())
    with pytest.raises(KeyboardInterrupt):
        measured(run, tmp_path)
    assert run.stopped


def test_devices_are_read_at_most_once_per_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Ran(ended(), polls=4, seconds=0.55)
    monkeypatch.setattr("flagcore.tuner.stages.measure.time.monotonic", lambda: run.now)
    reader = Readings(*({"power_watts": watts} for watts in (100.0, 200.0, 300.0, 400.0)))
    done = measured(run, tmp_path, platform=tasks.platform(TASK, **tasks.read(devices(0), (reader,))))
    assert done.measurement.telemetry["power_watts"] == 150.0
    assert len(reader.samples) == 2


def test_telemetry_is_averaged_and_a_failing_reader_is_skipped(tmp_path: Path, slow_clock: None) -> None:
    good = Readings({"power_watts": 100.0}, {"power_watts": 300.0, "odd": float("nan")})
    broken = Readings({"temperature_celsius": 40.0}, OSError("gone"))
    done = measured(
        Ran(ended(), polls=2), tmp_path, platform=tasks.platform(TASK, **tasks.read(devices(0, 1), (good, broken)))
    )
    assert done.measurement.telemetry == {
        "power_watts": 200.0,
        "peak_power_watts": 300.0,
        "temperature_celsius": 40.0,
        "peak_temperature_celsius": 40.0,
    }


SHARED = EngineSupport(support=Support.YES, device_type="cpu", distributed_backend="gloo", shared_devices=True)


@pytest.mark.parametrize(
    ("used", "support", "known"),
    [
        (([1e9, 60e9], [1e9, 70e9]), None, 70e9),
        (([20e9, 60e9], [1e9, 70e9]), None, None),  # somebody else's
        (([1e9, 60e9], [1e9, 70e9]), SHARED, None),  # the machine's own memory
        (([], []), None, None),
    ],
)
def test_unreported_memory_of_a_trial_comes_from_the_fullest_device(
    used: tuple[list[float], list[float]],
    support: EngineSupport | None,
    known: float | None,
    tmp_path: Path,
    slow_clock: None,
) -> None:
    readers = tuple(Readings(*({"memory_used_bytes": each} for each in device)) for device in used if device)
    platform = tasks.platform(TASK, **tasks.read(devices(*range(len(readers))), readers))
    platform = replace(platform, support=support) if support else platform
    assert measured(Ran(ended(), polls=2), tmp_path, platform=platform).measurement.device_used_bytes == known
    own = Engine(result=replace(MEASURED, device_used_bytes=5))
    reported = measured(Ran(ended()), tmp_path, own, platform=replace(platform, telemetry={}, devices=()))
    assert reported.measurement.device_used_bytes == 5


def devices(*numbers: int) -> tuple[Device, ...]:
    return tuple(Device(index=number, chip="test-chip") for number in numbers)


def test_telemetry_is_stored_per_device_and_low_clocks_are_reported(tmp_path: Path) -> None:
    readers = [
        Readings({"clock_hertz": clock, "power_watts": watts}) for clock, watts in ((2e9, 300), (2e9, 310), (1e9, 100))
    ]
    platform = tasks.platform(TASK, **tasks.read(devices(0, 1, 3), readers))
    done = measured(Ran(ended(), polls=2), tmp_path, platform=platform)
    assert [(each["device"], each["power_watts"]) for each in done.measurement.devices] == [
        (0, 300),
        (1, 310),
        (3, 100),
    ]
    assert done.measurement.telemetry["peak_power_watts"] == 310
    assert done.measurement.slow == ("device 3 of node 0 runs at 0.5x the median clock of the other devices (1 GHz)",)


def test_telemetry_comes_from_the_devices_of_the_trial(tmp_path: Path) -> None:
    readers = tuple(Readings({"power_watts": watts, "power_limit_watts": 500}) for watts in (100, 200, 300, 400))
    platform = tasks.platform(tasks.task(devices=2), **tasks.read(devices(3, 2, 1, 0), readers[::-1]))
    done = measured(Ran(ended(), polls=2), tmp_path, platform=platform).measurement
    assert [(each["device"], each["power_watts"]) for each in done.devices] == [(0, 400), (1, 300)]
    assert done.telemetry.keys() == {"power_limit_watts", "power_watts", "peak_power_watts"}  # a limit has no peak


@pytest.mark.parametrize(("steps", "stopped", "reason"), [(4, True, None), (3, False, "it ended after 3 of 4 steps")])
def test_trial_is_stopped_and_measured_once_its_steps_are_done(
    steps: int, stopped: bool, reason: str | None, tmp_path: Path
) -> None:
    run = Ran(ended(), polls=3)
    done = measured(run, tmp_path, Engine([1.0] * steps, limit=4))
    assert (done.state, done.reason, run.stopped) == (TrialState.MEASURED, reason, stopped)


@pytest.mark.parametrize(("steady", "stopped"), [(7, True), (6, False)])
def test_a_long_warm_up_ends_once_steps_are_steady(steady: int, stopped: bool, tmp_path: Path) -> None:
    platform = tasks.platform(tasks.task(control=Control(train_iters=14, warmup_iters=10)))
    run = Ran(ended(), polls=3)
    measured(run, tmp_path, Engine([9.0] + [1.0] * steady, limit=14), platform)
    assert run.stopped is stopped


@pytest.mark.parametrize(
    ("end", "steps", "counts"),
    [
        *((each, 4, True) for each in (ended(1), ended(-11), ended(-9, "disk"), ended(-15, "timeout"))),
        *((each, 4, False) for each in (ended(-9, "memory"), ended(-15, "request"))),
        (ended(1), 3, False),
    ],
)
def test_a_failure_after_the_last_step_is_a_remark(end: Exit, steps: int, counts: bool, tmp_path: Path) -> None:
    (tmp_path / "stderr.log").write_text("OSError: [Errno 28] No space left on device\n")
    done = measured(Ran(end), tmp_path, Engine([1.0] * steps, limit=4))
    assert (done.state is TrialState.MEASURED, done.measurement is not None) == (counts, counts)
    assert done.state.failed is not counts
    assert ("failed after all its steps" in (done.reason or "")) == counts


SHORT = replace(TRIAL, shortened=Shortened(global_batch_size=2, whole=8, scale=3.5, low=3.2, high=3.8))


def test_a_shortened_trial_is_measured_as_whole_steps_if_it_ran_the_smaller_batch(tmp_path: Path) -> None:
    small_batch, whole = (
        measured(Ran(ended()), tmp_path, Engine(result=replace(MEASURED, effective=effective)), trial=SHORT)
        for effective in ({"global_batch_size": 2}, {"global_batch_size": 8})
    )
    assert (small_batch.measurement.step_time_s, small_batch.measurement.scaled_from) == (3.5, 1.0)
    assert (small_batch.state, whole.state) == (TrialState.MEASURED, TrialState.INVALID)
    assert "global_batch_size = 8 instead of 2" in whole.reason


@pytest.mark.parametrize(
    ("steps", "spread", "trial", "stopped"),
    [
        *((steps, 0.0, TRIAL, False) for steps in [(9.0,), (9.0, 9.0), (9.0, 9.0, EARLY_STOP_RATIO), (0.1, 9.0), ()]),
        ((9.0, 99.0, 99.0), None, TRIAL, False),
        ((9.0, 1.3, 1.3), 0.1, TRIAL, True),
        ((9.0, 1.3, 1.3), 0.2, TRIAL, False),
        ((9.0, 0.38, 0.38), 0.0, SHORT, True),  # x 3.2 is more than 1.2 times the best
        ((9.0, 0.37, 0.37), 0.0, SHORT, False),
    ],
)
def test_a_trial_is_stopped_if_its_whole_steps_are_slower_than_the_noise_of_the_best(
    steps: tuple[float, ...], spread: float | None, trial: Trial, stopped: bool, tmp_path: Path
) -> None:
    best = None if spread is None else replace(BEST, measurement=replace(MEASURED, spread_s=spread))
    run = Ran(ended(), polls=3)
    done = measured(run, tmp_path, Engine(steps), best=best, trial=trial)
    assert (done.state, run.stopped) == (TrialState.STOPPED if stopped else TrialState.MEASURED, stopped)


def test_loss_of_a_peer_counts_only_if_nothing_else_explains_the_failure() -> None:
    peer = FailurePattern(pattern=r"closed by peer", state=TrialState.FAILED, weak=True)
    log = "[rank0]: RuntimeError: gloo: Connection closed by peer\n[rank1]: invalid: heads"
    patterns = (peer, *ENGINE.failures)
    assert classify(ended(1), log, patterns) == (TrialState.INVALID, "[rank1]: invalid: heads")
    assert classify(ended(1), log.partition("\n")[0], patterns)[0] is TrialState.FAILED


def test_devices_of_different_chips_are_not_compared(tmp_path: Path) -> None:
    groups = tuple(
        NodeGroup(chip=replace(tasks.CHIP, name=name), nodes=nodes, devices_per_node=count)
        for name, nodes, count in (("fast", 1, 2), ("slow", 2, 3))
    )
    cluster = ClusterSpec(hosts=("a", "b", "c"), nodes=3)
    task = replace(TASK, cluster=Cluster(groups=groups), spec=replace(TASK.spec, cluster=cluster, launcher="ssh"))
    counts = {"a": 2, "b": 3, "c": 3}
    found = tuple(Device(index=n, chip="x", host=host) for host, count in counts.items() for n in range(count))
    clocks = [3e9, 3e9, *[1e9] * 5, 0.4e9]
    platform = tasks.platform(task, **tasks.read(found, (Readings({"clock_hertz": each}) for each in clocks)))
    done = measured(Ran(ended(), polls=2), tmp_path, platform=platform)
    assert [each["device"] for each in done.measurement.devices] == list(range(8))
    (line,) = done.measurement.slow
    assert line.startswith("device 2 of c runs at 0.4x")


LIMITED = replace(
    TRIAL,
    time_limit=TimeLimit(seconds=100.0, because="max_time_per_task", target_s=60.0),
    predicted=tasks.prediction(compute_s=2.0),
)
ON_CPU = tasks.platform(TASK, support=EngineSupport(support=Support.YES, shared_devices=True))


class ScriptedSteps(Engine):
    """An engine that reads the finished steps of its trial as a measurement."""

    def read(self, task: Task, candidate: Candidate, folder: str, *, partial: bool = False) -> Measurement:
        timed = self.seconds[0][1:]
        return replace(
            MEASURED, step_times_s=timed, step_time_s=timed[0], losses=(), warmup_steps=1, notes=("partial",) * partial
        )


def ran(engine: Any, run: Ran, monkeypatch: pytest.MonkeyPatch, platform: Platform = ON_CPU) -> Trial:
    monkeypatch.setattr("flagcore.tuner.stages.measure.time.monotonic", lambda: run.now)
    return measure(run, replace(platform, engine=engine), LIMITED, "", None)


def test_a_trial_without_time_for_a_second_step_ends_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Ran(ended(), polls=9, seconds=58.0)
    done = ran(ScriptedSteps((58.0,)), run, monkeypatch)
    assert (done.state, done.measurement, done.finished_steps_s) == (TrialState.TIMED_OUT, None, (58.0,))
    assert run.stopped
    assert run.polls == 8
    assert re.search("1 of 5 steps: 58 s, predicted 2 s", done.reason or "")


def test_on_an_accelerator_a_long_first_step_compiles_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Ran(ended(-15, "timeout"), polls=2, seconds=40.0)
    done = ran(ScriptedSteps((90.0,)), run, monkeypatch, tasks.platform(TASK))
    assert not run.stopped
    assert (done.state, done.finished_steps_s) == (TrialState.TIMED_OUT, ())


def test_a_command_ends_after_the_steps_that_fit_in_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Ran(ended(), polls=9, seconds=55.0)
    done = ran(ScriptedSteps((10.0, 12.0), limit=5), run, monkeypatch)
    assert (done.state, run.stopped, run.polls) == (TrialState.MEASURED, True, 8)
    measured = done.measurement
    assert measured.few_steps
    assert (measured.low_s, measured.high_s) == (pytest.approx(12.0 * 0.85), pytest.approx(12.0 * 1.15))
    assert done.interval == pytest.approx(0.15)


def test_steps_before_the_time_limit_are_a_measurement_with_their_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    done = ran(ScriptedSteps((10.0, 20.0, 30.0)), Ran(ended(-15, "timeout"), polls=1), monkeypatch)
    assert (done.state, done.measurement.notes) == (TrialState.MEASURED, ("partial",))
    assert done.measurement.partial
    assert done.interval == pytest.approx((30.0 - 10.0) / 20.0 / 2.0)


def test_the_time_without_steps_is_not_the_start_of_a_trial_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    for steps in ((0.1,), (0.1, 0.2, 0.1)):
        run = Ran(ended(-15, "timeout"), polls=3, seconds=30.0)
        done = ran(ScriptedSteps(steps), run, monkeypatch)
        assert (done.silent_s, done.measurement is None) == (run.now, len(steps) == 1)
        assert "did not end" in (done.reason or "")
        done = replace(done, duration_s=run.now + 7.0)
        assert done.overhead_s(5, 1) == pytest.approx(7.0, abs=1.0)


def test_steps_of_a_failed_trial_are_stored_with_its_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = replace(ON_CPU, **tasks.read(devices(0), [Readings({"cores": 2.0})]))
    done = ran(ScriptedSteps((1.0, 2.0)), Ran(ended(3), polls=1), monkeypatch, platform)
    assert (done.state, done.finished_steps_s, done.telemetry["cores"]) == (TrialState.FAILED, (1.0, 2.0), 2.0)
