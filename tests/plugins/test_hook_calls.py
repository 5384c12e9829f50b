"""What a plugin answers is checked, joined and overridden as the hooks' docstrings say."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flagcore_testing.examples import group_of, task_on

from flagcore.domain.chip import Chip, Device, Fact, Source, Support
from flagcore.domain.cluster import Level, Topology
from flagcore.domain.engine import EngineSupport, RefusedValues, TaskAdvice
from flagcore.domain.launch import FailurePattern
from flagcore.domain.trial import TrialState
from flagcore.errors import NoDevice
from flagcore.loading.limits import TooSlow, within
from flagcore.physics.roofline import PlainMemory, Roofline
from flagcore.plugins import LoadedPlugins
from tests.checks import given
from tests.physics.test_roofline import LimitedCosts
from tests.tasks import plugin

CHIP = Chip(name="X1", vendor="x", aliases=("Example X1",))
SOURCE = Source(kind="measured", detail="by hand")


def chips_of(*chips: Chip) -> dict[str, Callable[..., object]]:
    return {"chips": lambda: list(chips)}


def raising(error: BaseException) -> Callable[[], object]:
    def hook() -> object:
        raise error

    return hook


def test_devices_of_all_plugins_are_joined_and_asked_once() -> None:
    calls = []

    def devices() -> list[Device]:
        calls.append(1)
        return [Device(index=0, chip="X1")]

    loaded = LoadedPlugins.of({"b": plugin(devices=devices), "a": plugin(devices=lambda: None)})
    assert loaded.devices() == loaded.devices() == (Device(index=0, chip="X1"),)
    assert calls == [1]


def test_chip_is_found_by_name_and_alias_in_any_case() -> None:
    loaded = LoadedPlugins.of({"x": plugin(**chips_of(CHIP))})
    assert loaded.find_chip("x1") == loaded.find_chip("EXAMPLE X1") == CHIP
    assert loaded.find_chip("X2") is None
    assert [chip.name for chip in loaded.chips()] == ["X1"]
    assert loaded.owner("example x1") == "x"


@pytest.mark.parametrize("other", [Chip(name="x1", vendor="y"), Chip(name="Y", vendor="y", aliases=("EXAMPLE X1",))])
def test_the_first_plugin_wins_a_duplicate_chip_name(other: Chip) -> None:
    loaded = LoadedPlugins.of({"b": plugin(**chips_of(other)), "a": plugin(**chips_of(CHIP))})
    assert loaded.chips() == (CHIP,)
    (failure,) = loaded.failures
    assert (failure.name, failure.hook) == ("b", "flagcore_chips")
    assert "X1 of plugin a" in failure.reason


@pytest.mark.parametrize("error", [RuntimeError("boom"), SystemExit(2), GeneratorExit(), AssertionError("no")])
def test_exception_in_a_hook_costs_only_that_answer(error: BaseException) -> None:
    loaded = LoadedPlugins.of(
        {
            "bad": plugin(devices=raising(error), **chips_of(CHIP)),
            "good": plugin(devices=lambda: [Device(index=0, chip="X1")]),
        }
    )
    assert len(loaded.devices()) == 1
    assert loaded.chips() == (CHIP,)
    (failure,) = loaded.failures
    assert (failure.name, failure.stage, failure.hook) == ("bad", "ask", "flagcore_devices")
    assert type(error).__name__ in failure.reason


def test_keyboard_interrupt_in_a_hook_is_passed_on() -> None:
    def devices() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)

    with pytest.raises(KeyboardInterrupt):
        LoadedPlugins.of({"x": plugin(devices=devices)}).devices()


def generator() -> Any:
    yield Device(index=0, chip="X1")


@pytest.mark.parametrize(
    ("hook", "answer", "words"),
    [
        ("devices", "cuda:0", "Device = 'cuda:0'"),
        ("devices", ["cuda:0"], "Device[0] = 'cuda:0': must be an instance of Device"),
        ("devices", [Device(index="0", chip="X1")], "Device[0].index = '0': must be a valid integer"),  # type: ignore[arg-type]
        ("devices", [Device(index=True, chip="X1")], "Device[0].index = True: must be a valid integer"),
        ("devices", generator(), "must be an instance of Sequence"),
        ("chips", {"X1": CHIP}, "must be an instance of Sequence"),
        ("chips", [replace(CHIP, memory_bytes=80e9)], "Chip[0].memory_bytes = 80000000000.0"),  # type: ignore[arg-type]
        ("chips", [replace(CHIP, dense_flops_per_second={"bf16": 1e15})], "_second.bf16 = 1000000000000000.0"),  # type: ignore[dict-item]
        ("chips", [replace(CHIP, memory_bytes=Fact(value=0, source=SOURCE))], "Chip[0].memory_bytes.value"),
        ("chips", [replace(CHIP, memory_bytes=Fact(value=float("nan"), source=SOURCE))], "Chip[0].memory_bytes.value"),
    ],
)
def test_wrong_type_is_reported_down_to_the_field(hook: str, answer: object, words: str) -> None:
    loaded = LoadedPlugins.of({"x": plugin(**{hook: lambda: answer})})
    assert getattr(loaded, hook)() == ()
    (failure,) = loaded.failures
    assert (failure.stage, failure.hook) == ("answer", f"flagcore_{hook}")
    assert words in failure.reason


class Wrong(LimitedCosts):
    """An object with the right methods that answer nonsense."""

    def capacity_bytes(self) -> float:
        return -1.0

    def gemm_seconds(self, m: object, n: object, k: object, precision: str) -> Any:
        return "fast"

    def seconds(self, *arguments: object) -> Any:
        return 1.0

    def compute_share(self, *arguments: object) -> Any:
        return 0.0


WRONG = Wrong(600.0, 1.0)


class Greedy(Wrong):
    """Collective costs that take more than all of the compute."""

    def seconds(self, *arguments: object) -> Any:
        return [1.0, 1.0]

    def compute_share(self, *arguments: object) -> Any:
        return [1.0, 1.5]


def failing(pattern: str, state: TrialState) -> TaskAdvice:
    return TaskAdvice(failures=(FailurePattern(pattern=pattern, state=state),))


def one_level(**changes: Any) -> Topology:
    level = {"name": "n", "devices": 8, "bytes_per_second": 1.0, "latency_seconds": 0.0, **changes}
    return Topology(levels=(Level(**level),))


@pytest.mark.parametrize(
    ("hook", "answer", "words"),
    [
        ("environment", {"A": 1}, "A = 1"),
        ("environment", {"A=B": "1"}, "'A=B'"),
        ("environment", ["A=1"], "['A=1']"),
        ("engine_support", True, "True: must be an instance of EngineSupport"),
        ("engine_support", EngineSupport(support="yes"), "EngineSupport.support = 'yes'"),  # type: ignore[arg-type]
        ("check_task", failing("(", TrialState.FAILED), "does not compile"),
        ("check_task", failing("x", TrialState.MEASURED), "not a failure"),
        ("kernel_costs", object(), "no method gemm_seconds, attention_seconds, attention_backward_seconds"),
        ("kernel_costs", Wrong, "returned the class Wrong"),
        ("kernel_costs", WRONG, "could not convert string to float"),
        ("memory_model", WRONG, "no method workspace_bytes, reserved_bytes, device_used_bytes"),
        ("collective_costs", WRONG, "must return two numbers"),
        ("collective_costs", Greedy(600.0, 1.0), "compute_share is above 1"),
        ("topology", Topology(levels=()), "must increase up to 8"),
        ("topology", one_level(devices=4), "[4]"),
        ("topology", one_level(efficiency=0.0), "efficiency"),
        ("topology", one_level(compute_share=15.0), "compute_share"),
    ],
)
def test_wrong_answer_about_a_chip_is_reported_and_counts_as_none(hook: str, answer: object, words: str) -> None:
    loaded = LoadedPlugins.of({"x": plugin(**{hook: lambda: answer})})
    if hook in ("topology", "memory_model", "collective_costs"):
        arguments: tuple[object, ...] = (group_of(CHIP), "toy")[: 1 if hook == "topology" else 2]
    else:
        arguments = (task_on(CHIP),) if hook == "check_task" else (CHIP, "toy")
    text = getattr(loaded, hook)(*arguments)
    assert not text or text == TaskAdvice() or text.support is Support.UNKNOWN
    (failure,) = loaded.failures
    assert failure.stage == "answer"
    assert words in failure.reason


def test_repeated_failures_are_listed_once() -> None:
    loaded = LoadedPlugins.of({"x": plugin(environment=lambda: {"A": 1})})
    loaded.environment(CHIP, "toy")
    loaded.environment(CHIP, "toy")
    assert len(loaded.failures) == 1


def test_add_on_overrides_the_plugin_that_catalogues_the_chip_regardless_of_their_names() -> None:
    own = chips_of(CHIP) | {
        "environment": lambda: {"SHARED": "own", "OWN": "1"},
        "engine_support": lambda: EngineSupport(support=Support.YES, device_type="own"),
    }
    add_on = {
        "environment": lambda: {"SHARED": "add-on"},
        "engine_support": lambda: EngineSupport(support=Support.YES, device_type="add-on"),
    }
    for names in (("a", "b"), ("b", "a")):
        loaded = LoadedPlugins.of(dict(zip(names, (plugin(**own), plugin(**add_on)), strict=True)))
        assert loaded.environment(CHIP, "toy") == {"SHARED": "add-on", "OWN": "1"}
        assert loaded.engine_support(CHIP, "toy").device_type == "add-on"


def test_after_a_failing_add_on_the_chips_own_plugin_answers() -> None:
    own = plugin(engine_support=lambda: EngineSupport(support=Support.YES, device_type="own"), **chips_of(CHIP))
    loaded = LoadedPlugins.of({"own": own, "add-on": plugin(engine_support=raising(ValueError("boom")))})
    assert loaded.engine_support(CHIP, "toy").device_type == "own"
    assert [failure.name for failure in loaded.failures] == ["add-on"]


def test_the_advice_of_all_plugins_is_joined() -> None:
    narrow = RefusedValues(name="v", knob="tensor_model_parallel_size", values=(8,), reason="it hangs")
    failed = {name: FailurePattern(pattern=name, state=TrialState.FAILED) for name in ("own", "add-on")}
    own = TaskAdvice(rules=(narrow,), warmup=2, failures=(failed["own"],), notes=("own",))
    add_on = TaskAdvice(rules=(narrow,), warmup=3, failures=(failed["add-on"],), impossible="too small")
    wrong = TaskAdvice(rules=(replace(narrow, name=1),))  # type: ignore[arg-type]
    plugins = {"own": (own, chips_of(CHIP)), "x": (add_on, {}), "wrong": (wrong, {})}
    loaded = LoadedPlugins.of({name: plugin(check_task=lambda a=a: a, **more) for name, (a, more) in plugins.items()})
    assert loaded.check_task(task_on(CHIP)) == TaskAdvice(
        rules=(narrow,), warmup=3, failures=(failed["add-on"], failed["own"]), notes=("own",), impossible="too small"
    )
    (failure,) = loaded.failures
    assert ".name = 1" in failure.reason


def test_the_roofline_replaces_missing_entries_of_a_kernel_table() -> None:
    peak = Fact(value=1e12, source=SOURCE)
    chip = replace(CHIP, memory_bandwidth_bytes_per_second=peak, dense_flops_per_second={"bf16": peak})
    costs = LoadedPlugins.of({"x": plugin(kernel_costs=lambda: LimitedCosts(600.0, 1.0))}).kernel_costs(chip, "toy")
    roofline, sizes = Roofline(chip=chip), np.array([512.0, 1024.0])
    assert costs is not None
    expected = roofline.gemm_seconds(sizes, sizes, sizes, "bf16")[1]
    assert costs.gemm_seconds(sizes, sizes, sizes, "bf16").tolist() == [512.0, expected]
    assert costs.launch_seconds() == roofline.launch_seconds()


class BreaksOnLargeColumns(LimitedCosts):
    """Right when it is tried, wrong when it counts."""

    def gemm_seconds(self, m: Any, n: Any, k: Any, precision: str) -> Any:
        return sys.exit(7) if len(m) > 2 else self.memory_seconds(m)


def test_an_object_that_fails_later_is_reported_with_its_plugin_and_fix() -> None:
    costs = LoadedPlugins.of(
        {"x": plugin(kernel_costs=lambda: BreaksOnLargeColumns(600.0, 1.0, launch=1e-6))}
    ).kernel_costs(CHIP, "toy")
    assert costs is not None
    small, large = np.ones(2), np.ones(3)
    assert costs.gemm_seconds(small, small, small, "bf16").tolist() == [1.0, 1.0]
    with pytest.raises(NoDevice, match=r"plugin x: gemm_seconds .* SystemExit: 7; .* --no-plugin x"):
        costs.gemm_seconds(large, large, large, "bf16")


def test_telemetry_asks_for_the_device_of_a_chip_by_alias() -> None:
    own = plugin(telemetry=lambda: SimpleNamespace(sample=lambda: {"own": 1.0}), **chips_of(CHIP))
    add_on = plugin(telemetry=lambda device: SimpleNamespace(sample=lambda: {"add-on": 1.0}))
    reading = given(LoadedPlugins.of({"a": own, "b": add_on}).telemetry(Device(index=0, chip="Example X1")))
    assert reading.sample() == {"add-on": 1.0}


def test_output_of_a_hook_does_not_reach_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    LoadedPlugins.of({"x": plugin(devices=lambda: print("loud"))}).devices()
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "loud" in captured.err


def sleeping() -> object:
    return Event().wait()


def test_a_hook_that_does_not_end_is_given_up_and_its_plugin_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flagcore.plugins.loaded.HOOK_SECONDS", 0.05)
    loaded = LoadedPlugins.of({"a": plugin(devices=sleeping, **chips_of(CHIP)), "b": plugin(**chips_of(CHIP))})
    assert loaded.devices() == ()
    assert loaded.owner("X1") == "b"
    (failure,) = loaded.failures
    assert (failure.name, failure.hook) == ("a", "flagcore_devices")
    assert "did not end within 0.05 s" in failure.reason


class Endless(list[Device]):
    def __iter__(self) -> Any:
        return sleeping()

    __repr__ = __iter__


class NoMessage(Exception):
    def __str__(self) -> Any:
        return sleeping()


class SlowMemory(PlainMemory):
    """It does not end when it is tried, or only when it counts."""

    def reserved_bytes(self, allocated: Any) -> Any:
        return sleeping() if len(allocated) >= (self.capacity or 0) else allocated


@pytest.mark.parametrize(
    ("hook", "answer", "words"),
    [
        ("devices", Endless([Device(index=0, chip="X1")]), "did not end within 0.05 s"),
        ("environment", Endless(), "did not end within 0.05 s"),
        ("devices", NoMessage(), "NoMessage: (its message cannot be shown)"),
        ("memory_model", SlowMemory(capacity=2.0), "did not end within 0.05 s"),
    ],
)
def test_an_answer_whose_check_does_not_end_is_given_up(
    monkeypatch: pytest.MonkeyPatch, hook: str, answer: object, words: str
) -> None:
    monkeypatch.setattr("flagcore.plugins.loaded.HOOK_SECONDS", 0.05)
    if isinstance(answer, BaseException):
        monkeypatch.setattr("flagcore.loading.entry_points.MESSAGE_SECONDS", 0.05)
    hooked = raising(answer) if isinstance(answer, BaseException) else lambda: answer
    loaded = LoadedPlugins.of({"a": plugin(**{hook: hooked})})
    arguments = {"memory_model": (group_of(CHIP), "toy"), "environment": (CHIP, "toy")}.get(hook, ())
    assert not getattr(loaded, hook)(*arguments)
    assert words in loaded.failures[0].reason


def test_a_method_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = LoadedPlugins.of({"a": plugin(memory_model=lambda: SlowMemory(capacity=3.0))})
    model = given(loaded.memory_model(group_of(CHIP), "toy"))
    monkeypatch.setattr("flagcore.plugins.plugin.HOOK_SECONDS", 0.05)
    with pytest.raises(NoDevice, match=r"plugin a: reserved_bytes of SlowMemory .* did not end within 0.05 s"):
        model.reserved_bytes(np.ones(3))


def leave_threads() -> None:
    Thread(target=sleeping, daemon=False).start()
    ThreadPoolExecutor(1).submit(sleeping)


def test_a_loop_that_exceeds_its_time_limit_ends() -> None:
    rounds: list[int] = []

    def loop() -> None:
        while True:
            rounds.append(1)
            time.sleep(0.001)

    with pytest.raises(TooSlow):
        within(0.05, loop)
    time.sleep(0.1)
    count = len(rounds)
    time.sleep(0.1)
    assert len(rounds) == count


DEBUGGED = """with pytest.raises(TooSlow): within(0.05, sleeping)
sys.settrace(lambda *_: None); chips_of(); os._exit(0)"""
LEFT = """from flagcore.loading import limits; from flagcore.cli import main
limits.EXIT_SECONDS = 0.1; within(9, leave_threads); sys.argv = ['flag', '--version']; main()"""


@pytest.mark.parametrize("code", [DEBUGGED, LEFT], ids=["code beyond its limit under a debugger", "threads of a hook"])
def test_what_a_hook_leaves_does_not_keep_the_process(code: str) -> None:
    words = (sys.executable, "-c", f"from tests.plugins.test_hook_calls import *\n{code}")
    assert subprocess.run(words, timeout=60, capture_output=True).returncode == 0


def test_a_reading_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flagcore.plugins.plugin.SAMPLE_SECONDS", 0.05)
    loaded = LoadedPlugins.of({"a": plugin(telemetry=lambda: SimpleNamespace(sample=sleeping))})
    reader = given(loaded.telemetry(Device(index=0, chip="X1")))
    with pytest.raises(NoDevice, match=r"plugin a: sample of .* did not end within 0.05 s"):
        reader.sample()


def test_a_hook_cannot_end_the_process() -> None:
    end = os._exit
    loaded = LoadedPlugins.of({"a": plugin(devices=lambda: os._exit(0))})
    assert loaded.devices() == ()
    assert "os._exit(0)" in loaded.failures[0].reason
    assert os._exit is end


def test_readings_of_parallel_trials_leave_the_process_as_it_was() -> None:
    end, first, second = os._exit, Event(), Event()
    threads = [Thread(target=within, args=(9.0, each.wait)) for each in (first, second)]
    for thread in threads:
        thread.start()
    for thread, event in zip(threads, (first, second), strict=True):
        event.set()
        thread.join()
    assert os._exit is end


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda column: column[:-1], r"an array of shape \(2,\) for arguments of shape \(3,\)"),
        (lambda column: column[None], r"an array of shape \(1, 3\)"),
        (lambda column: 1.0, r"an array of shape \(\)"),
        (lambda column: None, "returned None"),
        (lambda column: "many", "could not convert string to float"),
        (lambda column: [[1.0], [1.0, 2.0]], "ValueError"),
        (lambda column: {"bytes": column}, "TypeError"),
        (lambda column: column / 0 * 0, "NaN bytes"),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_column_of_the_wrong_shape_or_type_is_refused(wrong: Callable[[Any], Any], words: str) -> None:
    class Model(PlainMemory):
        def reserved_bytes(self, allocated: Any) -> Any:
            return wrong(allocated) if len(allocated) == 3 else allocated

    model = LoadedPlugins.of({"a": plugin(memory_model=lambda: Model(capacity=2.0**36))}).memory_model(
        group_of(CHIP), "toy"
    )
    assert model is not None
    with pytest.raises(NoDevice, match=f"plugin a: reserved_bytes of Model raised .*{words}"):
        model.reserved_bytes(np.ones(3))


def test_memory_that_becomes_unknown_is_refused() -> None:
    class Model(PlainMemory):
        def reserved_bytes(self, allocated: Any) -> Any:
            return np.where(allocated > 2.0**40, np.nan, allocated)

    loaded = LoadedPlugins.of({"a": plugin(memory_model=lambda: Model(capacity=2.0**36))})
    model = given(loaded.memory_model(group_of(CHIP), "toy"))
    assert model.reserved_bytes(np.array([1.0])).tolist() == [1.0]
    with pytest.raises(NoDevice, match="plugin a: reserved_bytes of Model raised returned NaN"):
        model.reserved_bytes(np.array([2.0**41]))
