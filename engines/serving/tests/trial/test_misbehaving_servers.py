"""The trial program with servers that do what real ones did: the right class, a clear message, and no figures. Whose
process listens on a port, and how servers are stopped."""

import dataclasses
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from fixed_machine import PINS
from flagcore_serving.job import Load
from flagcore_serving.launch.server import Instance
from flagcore_serving.trial import loads, servers
from flagcore_serving.trial.servers import Server, free_port, is_owned_by, listeners
from flagcore_vendorkit.metrics import METRICS

from engines.serving.tests.trial import trials
from flagcore.domain.trial import Measurement, Role, TimeLimit, Trial, TrialState
from flagcore.launchers.local import LAUNCHER
from flagcore.tuner.stages.launch import launch

pytestmark = pytest.mark.spread

WRONG = {
    "dies": (TrialState.FAILED, "exit code 3; its log: RuntimeError: the engine exploded"),
    "slow": (TrialState.TIMED_OUT, ": no token arrived"),
    "garbage": (TrialState.FAILED, "broken stream"),
    "busy": (TrialState.FAILED, "HTTP 503 Service Unavailable: overloaded"),
    "refuses": (TrialState.INVALID, "exceed_context_size_error: 700 of 512"),
    "cuts": (TrialState.INVALID, "do not fit into the context"),
    "never_healthy": (TrialState.TIMED_OUT, "was not healthy after"),
    "mute": (TrialState.TIMED_OUT, "no answer (timed out) on /health"),
    "ipv6_only": (TrialState.TIMED_OUT, "only at ::1 port"),
    "exits": (TrialState.FAILED, "ended while its model was read with exit code 0"),
    "crashes": (TrialState.FAILED, "ended while it started with exit code 1; its log: ValueError: 16 is no multiple"),
    "out_of_memory": (TrialState.OUT_OF_MEMORY, "cudaMalloc failed: out of memory"),
    "out_of_memory_later": (TrialState.OUT_OF_MEMORY, "failed to allocate CUDA0 buffer"),
    "other_slots": (TrialState.INVALID, "parallel = 5 instead of 4"),
    "stale": (TrialState.FAILED, "in use by another process"),
}


def all_gone(folder: Path) -> bool:
    """Whether no process of a trial in `folder` is left, nor a listener on a port that its servers had."""
    ports = [int(file.stem.partition("-")[2]) for file in folder.rglob("environment-*.json")]
    left = [each for each in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(each.info["cmdline"] or ())]
    return not left and not any(listeners(port) for port in ports)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait less in trials in this process."""
    monkeypatch.setattr(loads, "EXIT_SECONDS", 0.3)


SHORT = ("dies", "never_healthy", "refuses", "out_of_memory", "garbage", "stale")
"""One behaviour of each state, of start-up and of load; the others are long."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "behaviour", [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in WRONG]
)
def test_a_failed_trial_has_its_class_its_reason_and_no_figures(behaviour: str, tmp_path: Path) -> None:
    state, reason = WRONG[behaviour]
    # the launcher ends processes that a server leaves behind
    run = trials.run if behaviour in ("dies", "stale") else trials.run_here
    for seconds in (4.0, 16.0, 64.0) if state is TrialState.TIMED_OUT else (100.0,):  # a slow machine needs longer
        folder = tmp_path / f"{seconds:.0f}"
        folder.mkdir()
        if run is trials.run:
            (trials.trial_folder(folder) / METRICS).write_text("{}")  # of an earlier trial
        done = run(trials.platform(folder, behaviour, seconds=seconds), folder, parallel=4)
        if reason in str(done.reason):
            break
    assert (done.state, done.measurement) == (state, None), done.reason
    assert reason in str(done.reason)
    assert not (trials.trial_folder(folder) / METRICS).exists()
    assert all_gone(tmp_path)


@pytest.mark.slow
def test_a_load_that_does_not_end_in_time_is_measured_in_part(tmp_path: Path) -> None:
    load = Load(input_len=16, output_len=8, num_prompts=4000, concurrency=4)  # 40 requests per second at most
    for seconds in (4.0, 16.0):  # a slow machine needs longer
        done = trials.run_here(trials.platform(tmp_path, "queues", seconds=seconds, loads=(load,)), tmp_path)
        if done.measurement is not None:
            break
    assert done.measurement is not None, done.reason
    assert 8 <= done.measurement.points[0]["answered"] < 2000
    assert any("auto_tuner.control.max_time_per_task" in note for note in done.measurement.notes)
    assert done.measurement.spread_s >= 0.1 * done.measurement.step_time_s
    assert all_gone(tmp_path)


@pytest.mark.slow
def test_a_server_that_floods_its_log_and_resets_its_counters_is_measured(tmp_path: Path) -> None:
    done = trials.run_here(trials.platform(tmp_path, "talks"), tmp_path)
    assert done.measurement is not None, done.reason
    assert "acceptance_rate" not in done.measurement.figures


@pytest.mark.slow
def test_a_server_whose_port_was_taken_is_started_on_another_one(tmp_path: Path) -> None:
    done = trials.run(trials.platform(tmp_path, "port_taken"), tmp_path)
    assert done.state is TrialState.MEASURED, done.reason
    assert len(trials.servers(tmp_path)) == 2
    assert len({each["port"] for each in trials.requests_sent(tmp_path)}) == 1


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The folders of two trials of different candidates with the same loads. The second one sets a variable."""
    points, folders = (trials.LOAD, dataclasses.replace(trials.LOAD, concurrency=2)), []
    for values, envs in (({"instances": 2, "parallel": 2}, {}), ({"parallel": 4}, {"GOMP_SPINCOUNT": "1"})):
        folder = tmp_path_factory.mktemp("trial")
        platform = trials.platform(folder, "well", loads=points, repeats=2, envs=envs)
        run = trials.run if envs else trials.run_here  # the launcher sets variables of the user
        done = run(platform, folder, **values)
        assert done.state is TrialState.MEASURED, done.reason
        folders.append(folder)
    return folders


@pytest.mark.slow
def test_prompts_are_unique_and_the_same_for_each_candidate(measured: list[Path]) -> None:
    first, second = ([tuple(each["prompt"]) for each in trials.requests_sent(folder)] for folder in measured)
    assert len(set(first)) == len(first) > 2 * 2 * 8
    assert sorted(first) == sorted(second)


@pytest.mark.slow
def test_tokens_are_counted_by_the_server_not_by_pieces(measured: list[Path]) -> None:
    points = json.loads((trials.trial_folder(measured[0]) / METRICS).read_text())["points"]
    for repeat in (repeat for point in points for repeat in point["repeats"]):  # two tokens in a piece
        rate = repeat["figures"]["output_tokens_per_s"]
        assert rate * repeat["duration_s"] == pytest.approx(trials.LOAD.output_len * 8)


@pytest.mark.slow
def test_requests_go_to_all_instances_each_on_separate_cores(measured: list[Path]) -> None:
    first, second = trials.servers(measured[0])
    if PINS:
        assert len(first["cores"]) == len(second["cores"]) == 1
        assert first["cores"] != second["cores"]
    assert len({each["port"] for each in trials.requests_sent(measured[0])}) == 2


@pytest.mark.slow
def test_user_variables_override_engine_variables(measured: list[Path]) -> None:
    counts = [{server["GOMP_SPINCOUNT"] for server in trials.servers(folder)} for folder in measured]
    assert counts == [{"10000"}, {"1"}]


@pytest.mark.slow
def test_a_server_is_stopped_with_all_its_processes(tmp_path: Path) -> None:
    done = trials.run(trials.platform(tmp_path, "has_children"), tmp_path)
    assert done.state is TrialState.MEASURED, done.reason
    assert all_gone(tmp_path)


@pytest.mark.slow
def test_a_trial_program_that_is_killed_leaves_no_process_and_no_port(tmp_path: Path) -> None:
    platform = trials.platform(tmp_path, "slow")
    candidate, folder = trials.candidate(platform, instances=2), str(trials.trial_folder(tmp_path))
    running = launch(platform, LAUNCHER, candidate, folder, TimeLimit(seconds=60.0, because="test"))
    while not (tmp_path / "requests.jsonl").exists():
        assert running.wait(0.05) is None
    os.kill(running.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    assert running.wait(30) is not None
    assert all_gone(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("key", ["request_rate", pytest.param("concurrency", marks=pytest.mark.long)])
def test_the_highest_load_that_keeps_the_slo_is_found_in_one_launch(key: str, tmp_path: Path) -> None:
    base = Load(input_len=16, output_len=8, num_prompts=24).at(key, 1000)
    given: dict[str, Any] = {"loads": (base,), "highest": key, "slo": {"ttft_s.p90": 0.35}}
    trial = trials.run_here(trials.platform(tmp_path, "queues", seconds=200.0, **given), tmp_path, parallel=4)
    assert trial.measurement is not None
    assert trial.measurement.broken == ()
    points = {point[key]: point for point in trial.measurement.points}
    within_limit = {load: point for load, point in points.items() if point["ttft_s.p90"] <= 0.35}
    assert trial.measurement.highest is not None
    assert trial.measurement.highest.met == max(within_limit)
    assert 3 < max(within_limit) < 200  # four slots of 0.1 s, on a busy machine fewer
    rates = [point["output_tokens_per_s"] for point in within_limit.values()]
    assert trial.measurement.figures["output_tokens_per_s"] == max(rates)
    assert len(trials.servers(tmp_path)) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("faster", "state"), [(10.0, TrialState.STOPPED), (0.1, TrialState.MEASURED)])
def test_a_load_that_is_much_slower_than_the_best_is_stopped(faster: float, state: TrialState, tmp_path: Path) -> None:
    load = Load(input_len=16, output_len=8, num_prompts=96, concurrency=4)
    platform = trials.platform(tmp_path, "queues", loads=(load,), repeats=2)
    step_s = 0.1 / (4 * 8) / faster  # at most four answers of eight tokens in 0.1 s
    measured = Measurement(step_times_s=(step_s,), step_time_s=step_s, spread_s=0.0, tokens_per_second_per_device=1.0)
    best = Trial(number=1, candidate=trials.candidate(platform), role=Role.SEARCH, state=state, measurement=measured)
    trial = trials.run(platform, tmp_path, best)
    assert trial.state is state
    assert trial.measurement is not None
    assert trial.measurement.partial == (state is TrialState.STOPPED)
    answered = trial.measurement.points[0]["answered"]
    assert 24 <= answered < 96 if trial.measurement.partial else answered == 96
    assert len(trial.measurement.step_times_s) == (1 if trial.measurement.partial else 2)


LISTENS = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"


def test_a_port_is_owned_by_the_process_that_listens_and_by_no_other() -> None:
    child = subprocess.Popen([sys.executable, "-c", LISTENS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    port = int(child.stdout.readline())
    assert is_owned_by(port, [child.pid])
    assert is_owned_by(port, [os.getpid(), child.pid])
    assert not is_owned_by(port, [os.getpid()])
    child.communicate("\n")
    assert not listeners(port)
    assert not is_owned_by(free_port(), [os.getpid()])


def test_a_port_with_two_listeners_is_owned_only_if_both_are_children() -> None:
    with socket.create_server(("127.0.0.1", 0)) as own, socket.socket(socket.AF_INET6) as other:
        port = own.getsockname()[1]
        other.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            other.bind(("::1", port))
        except OSError:
            pytest.skip("this machine has no IPv6 loopback")
        other.listen()
        assert len(listeners(port)) == 2
        assert is_owned_by(port, [os.getpid()])
        assert not is_owned_by(port, [os.getppid()])


@pytest.mark.slow
@pytest.mark.parametrize("end_s", [math.inf, 0.0])
def test_servers_that_ignore_sigterm_are_killed_together(
    end_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "GRACE_SECONDS", 1.0 if math.isinf(end_s) else 60.0)
    ignores = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    instance = Instance(argv=(sys.executable, "-c", ignores))
    started = [Server(f"server {number}", instance, tmp_path / f"{number}.log", ()) for number in range(8)]
    for server in started:
        server.start(None)
    while any(not server.log.read_text() for server in started):
        time.sleep(0.01)
    processes = [psutil.Process(server.pids()[0]) for server in started]
    begun = time.monotonic()
    servers.stop_all(started, time.monotonic() + end_s)
    assert time.monotonic() - begun < 6.0
    assert not any(process.is_running() for process in processes)
