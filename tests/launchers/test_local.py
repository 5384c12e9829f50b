"""The local launcher with real processes. A marker in /proc/*/environ finds processes that are left."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from flagcore.domain.launch import Exit, Launch
from flagcore.errors import LaunchError
from flagcore.launchers import guard
from flagcore.launchers.local import LAUNCHER, LocalRunning
from flagcore.launchers.network import free_port
from tests.checks import TEST_MARK, ended, family, given, within
from tests.checks import marked as marked_processes

pytestmark = [pytest.mark.slow, pytest.mark.spread]

PYTHON = (sys.executable, "-I", "-S", "-c")
IGNORES_SIGTERM = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for _ in range(2):                      # a child and a grandchild, each in its own session
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
print("up", flush=True)
time.sleep(60)
"""
DAEMON = """
import os, signal, time
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        time.sleep(60)
    os._exit(0)
time.sleep(0.2)
"""
TUNER = """
import sys
from flagcore.domain.launch import Launch
from flagcore.launchers.local import LAUNCHER
print("go", flush=True)
running = LAUNCHER.start(Launch(argv=tuple(sys.argv[2:]), folder=sys.argv[1]))
print("started", flush=True)
running.wait(60)
"""


class Marked:
    """Processes with a marker of this test in their environment."""

    def __init__(self) -> None:
        self.word = uuid.uuid4().hex
        self.environment = {TEST_MARK: self.word}

    def alive(self) -> set[int]:
        return marked_processes(self.word)

    def gone_within(self, seconds: float) -> bool:
        return within(seconds, lambda: not self.alive())


@pytest.fixture
def marked() -> Iterator[Marked]:
    found = Marked()
    yield found
    for pid in found.alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def start(folder: Path, *argv: str, **how: object) -> LocalRunning:
    return LAUNCHER.start(Launch(argv=argv, folder=str(folder), **how))  # type: ignore[arg-type]


def run(folder: Path, *argv: str, **how: object) -> Exit:
    return ended(start(folder, *argv, **how), 20)


def wait_for(path: Path, text: str) -> None:
    assert within(10, lambda: path.exists() and text in path.read_text()), f"{path} lacks {text}"


def test_exit_code_logs_and_records_are_written(tmp_path: Path) -> None:
    code = "import os, sys; print(os.getcwd()); print(os.environ['X'], file=sys.stderr); sys.stdin.read(); sys.exit(7)"
    trial = start(tmp_path / "a", *PYTHON, code, environment={"X": "ä"})
    exit_record = ended(trial)
    assert (exit_record.code, exit_record.ended_by) == (7, None)
    assert 0 < exit_record.duration_s < 10
    assert (tmp_path / "a" / "stdout.log").read_text().strip() == str(tmp_path / "a")
    assert (tmp_path / "a" / "stderr.log").read_text().strip() == "ä"
    launch_record = json.loads((tmp_path / "a" / "launch.json").read_text())
    assert (launch_record["argv"][-1], launch_record["environment"]["X"]) == (code, "ä")
    assert launch_record["timeout_seconds"] == 300.0
    assert json.loads((tmp_path / "a" / "exit.json").read_text())["code"] == 7
    assert trial.wait(0) == exit_record
    assert trial.stop() == exit_record
    signalled = run(tmp_path / "b", *PYTHON, "import os; os.kill(os.getpid(), 11)")
    assert (signalled.code, signalled.ended_by) == (-11, None)


def test_the_program_starts_with_default_signals_and_only_its_own_descriptors(tmp_path: Path) -> None:
    code = "import os; print(open('/proc/self/status').read()); print(sorted(os.listdir('/proc/self/fd')))"
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run(tmp_path / "a", "/bin/cat", "/proc/self/status")
    finally:
        signal.signal(signal.SIGHUP, previous)
    run(tmp_path / "b", *PYTHON, code)
    status = (tmp_path / "a" / "stdout.log").read_text().splitlines()
    ignored_signals = next(line for line in status if line.startswith("SigIgn"))
    settable = sum(1 << (number - 1) for number in signal.valid_signals())  # two are the C library's own
    assert int(ignored_signals.split()[1], 16) & settable == 0
    assert (tmp_path / "b" / "stdout.log").read_text().splitlines()[-1] == "['0', '1', '2', '3']"  # 3: the listing


def test_timeout_ends_a_tree_that_ignores_sigterm_and_opened_sessions(tmp_path: Path, marked: Marked) -> None:
    trial = start(tmp_path, *PYTHON, IGNORES_SIGTERM, environment=marked.environment, timeout_seconds=1)
    wait_for(tmp_path / "stdout.log", "up")
    time.sleep(0.1)
    assert len(marked.alive()) > 4
    exit_record = ended(trial, 10)
    assert (exit_record.code, exit_record.ended_by) == (-9, "timeout")
    assert 2.5 < exit_record.duration_s < 8
    assert not marked.alive()


def test_a_program_may_clean_up_after_its_timeout(tmp_path: Path) -> None:
    exit_record = run(tmp_path, "sh", "-c", "trap 'exit 3' TERM; while :; do sleep 0.05; done", timeout_seconds=0.5)
    assert (exit_record.code, exit_record.ended_by) == (3, "timeout")
    assert exit_record.duration_s < 2.5  # not the grace period of what ignores the signal


def test_memory_over_the_limit_is_ended_as_memory(tmp_path: Path) -> None:
    code = "import time\nkept = []\nwhile True: kept.append(bytearray(b'x') * (8 << 20)); time.sleep(0.01)"
    exit_record = run(tmp_path, *PYTHON, code, memory_limit_bytes=200 << 20)
    assert (exit_record.code, exit_record.ended_by) == (-9, "memory")
    assert 200 << 20 < given(exit_record.peak_memory_bytes) < 600 << 20


def test_memory_shared_by_forks_is_counted_once_and_their_own_memory_is_added(tmp_path: Path) -> None:
    code = """
import os, sys, time
kept = bytearray(b"x") * (20 << 20)
for _ in range(3):
    if os.fork() == 0:
        break
time.sleep(0.3)
for at in range(0, len(kept) if sys.argv[1] == "write" else 0, 4096):
    kept[at] = 1
time.sleep(2)
"""
    peaks = []
    trials = [start(tmp_path / name, *PYTHON, code, name, memory_limit_bytes=1 << 30) for name in ("read", "write")]
    for exit_record in map(ended, trials):
        assert (exit_record.code, exit_record.ended_by) == (0, None)
        peaks.append((exit_record.peak_memory_bytes or 0) >> 20)
    assert 20 <= peaks[0] < 60
    assert 80 <= peaks[1] < 120


def test_a_full_folder_is_ended_as_disk(tmp_path: Path) -> None:
    exit_record = run(tmp_path, "/usr/bin/yes", disk_limit_bytes=4 << 20)
    assert (exit_record.code, exit_record.ended_by) == (-9, "disk")


def test_a_trial_is_ended_before_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = guard.DiskMeter(str(tmp_path), 1 << 30)
    assert disk.problem() is None
    monkeypatch.setattr(guard, "free_disk_bytes", lambda folder: guard.FREE_DISK_FLOOR_BYTES - 1)
    assert disk.problem() == "full_disk"
    disk.limit = -1
    assert disk.problem() == "disk"


def test_a_stopped_process_ends_its_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, marked: Marked) -> None:
    source = Path(guard.__file__).read_text()
    assert "STOPPED_SECONDS = 30.0" in source
    (tmp_path / "guard.py").write_text(source.replace("STOPPED_SECONDS = 30.0", "STOPPED_SECONDS = 0.5"))
    monkeypatch.setattr(guard, "__file__", str(tmp_path / "guard.py"))
    script = "sleep 60 & read -r name < /proc/$!/comm; until [ $name = sleep ]; do read -r name < /proc/$!/comm; done; "
    script += "echo $!; wait"
    trial = start(tmp_path, "/bin/sh", "-c", script, environment=marked.environment, timeout_seconds=30.0)
    wait_for(tmp_path / "stdout.log", "\n")
    pid = int((tmp_path / "stdout.log").read_text())
    os.kill(pid, signal.SIGSTOP)
    exit_record = ended(trial)
    assert (exit_record.ended_by, exit_record.detail) == ("stopped", f"process {pid} (sleep)")
    assert not marked.alive()


def test_only_a_process_that_stays_stopped_is_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    meter, limit = guard.StopMeter(), guard.STOPPED_SECONDS
    states = [
        (0, "T", False),
        (limit, "T", False),
        (limit, "S", False),
        (2 * limit, "T", False),
        (4 * limit, "T", True),
    ]
    for now, state, overdue in states:
        clock = SimpleNamespace(monotonic=lambda now=now: now, process_time=time.process_time)
        monkeypatch.setattr(guard, "time", clock)
        monkeypatch.setattr(guard, "read_ids", lambda pid, state=state: (1, 1, 1, state.encode()))
        assert bool(meter.overdue({1})) == overdue


def test_stop_ends_the_tree_by_request(tmp_path: Path, marked: Marked) -> None:
    trial = start(tmp_path, "/bin/sh", "-c", "sleep 60 & exec sleep 60", environment=marked.environment)
    assert trial.wait(0.2) is None
    exit_record = trial.stop()
    assert (exit_record.code, exit_record.ended_by) == (-15, "request")
    assert trial.stop() == exit_record
    assert not marked.alive()


def test_a_daemon_ends_with_its_trial(tmp_path: Path, marked: Marked) -> None:
    exit_record = run(tmp_path, *PYTHON, DAEMON, environment=marked.environment)
    assert (exit_record.code, exit_record.ended_by) == (0, None)
    assert exit_record.duration_s < 1.5
    assert not marked.alive()


@pytest.mark.parametrize("attempt", range(5))
def test_nothing_outlives_a_killed_tuner(tmp_path: Path, marked: Marked, attempt: int) -> None:
    delay = random.Random(attempt).uniform(0, 1.0)
    argv = [sys.executable, "-c", TUNER, str(tmp_path), *PYTHON, IGNORES_SIGTERM]
    with subprocess.Popen(argv, env={**os.environ, **marked.environment}, stdout=subprocess.PIPE) as tuner:
        given(tuner.stdout).readline()
        time.sleep(delay if attempt % 2 else delay / 10)
        tuner.kill()
    assert marked.gone_within(3)


@pytest.mark.parametrize(("number", "by"), [(signal.SIGKILL, "guard"), (signal.SIGTERM, "request")])
def test_a_guard_that_gets_a_signal_leaves_no_process_and_an_exit(
    tmp_path: Path, marked: Marked, number: int, by: str
) -> None:
    trial = start(tmp_path, *PYTHON, IGNORES_SIGTERM, environment=marked.environment)
    wait_for(tmp_path / "stdout.log", "up")
    os.kill(family(trial.pid)[0], number)
    exit_record = ended(trial)
    assert (exit_record.code, exit_record.ended_by) == (-9, by)
    assert not marked.alive()
    assert json.loads((tmp_path / "exit.json").read_text())["code"] == -9


def test_trial_and_guard_are_detached_from_the_terminal(tmp_path: Path) -> None:
    running_trial = start(tmp_path, "/bin/sleep", "60")
    trial = family(running_trial.pid)
    guard_ids = family(trial[0])
    assert len({os.getsid(0), trial[2], guard_ids[2]}) == 3
    assert len({os.getpgrp(), trial[1], guard_ids[1]}) == 3
    running_trial.stop()


def pipes_of(pid: int) -> set[str]:
    """Return the names of the pipes that a process has open."""
    names = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a process that starts opens and closes its libraries
            names.add(os.readlink(entry))
    return {name for name in names if name.startswith("pipe:")}


def test_two_trials_share_neither_pipes_nor_a_marker(tmp_path: Path) -> None:
    trials = [start(tmp_path / name, "/bin/sleep", "60") for name in "ab"]
    pipes = [pipes_of(family(running.pid)[0]) for running in trials]
    assert not any(pipes_of(running.pid) for running in trials)
    assert len(pipes[0]) >= 2
    assert not pipes[0] & pipes[1]
    variables = [guard.read_proc(running.pid, "environ").split(b"\0") for running in trials]
    assert len({each for of_trial in variables for each in of_trial if each.startswith(b"FLAGCORE_LAUNCH=")}) == 2
    for running in trials:
        running.stop()


def test_finished_trials_leave_no_descriptor_and_no_zombie(tmp_path: Path) -> None:
    before, kept = len(os.listdir("/proc/self/fd")), []
    for name in "abc":
        kept.append(start(tmp_path / name, "/bin/true"))
        ended(kept[-1])
        with pytest.raises(LaunchError):
            start(tmp_path / name, "/no/such/program")
    assert len(os.listdir("/proc/self/fd")) == before
    assert not any(
        (kin := guard.read_ids(pid)) and kin[0] == os.getpid() and kin[3] == b"Z" for pid in guard.all_processes()
    )


def test_what_is_not_text_arrives_unchanged(tmp_path: Path) -> None:
    code = """import os, sys
print(os.fsencode(sys.argv[1]), os.environb[b'X'], flush=True)
os.write(1, bytes(range(256)) * 3); os.write(2, b'\\xff\\x00')"""
    run(tmp_path, *PYTHON, code, os.fsdecode(b"\xff\n"), environment={"X": "\udcfe a"})
    assert (tmp_path / "stdout.log").read_bytes() == rb"b'\xff\n' b'\xfe a'" + b"\n" + bytes(range(256)) * 3
    assert (tmp_path / "stderr.log").read_bytes() == b"\xff\x00"


def test_each_trial_has_its_own_port_unless_one_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "1")
    code = "import os, sys; print(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'], *sys.argv[1:])"
    places = ("{master_addr}:{master_port}", "{node_rank}/{nnodes}")
    for name, environment in (("a", {}), ("b", {"MASTER_ADDR": "h", "MASTER_PORT": "29500"})):
        run(tmp_path / name, *PYTHON, code, *places, environment=environment)
    address, port, *words = (tmp_path / "a" / "stdout.log").read_text().split()
    assert address == "127.0.0.1"
    assert int(port) > 1023
    assert words == [f"127.0.0.1:{port}", "0/1"]
    assert (tmp_path / "b" / "stdout.log").read_text().split() == ["h", "29500", "h:29500", "0/1"]
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"argv": ("no-such-program-here",)}, ("no-such-program-here", "No such file")),
        ({"argv": ("/bin/true", "a\0b")}, ("/bin/true", "null byte")),
        ({"argv": ("/bin/true", "x" * (1 << 18))}, ("/bin/true", "Argument list too long")),
        ({"environment": {"A": "b\0"}}, ("/bin/true", "null byte")),
        ({"environment": {"A=B": "c"}}, ("/bin/true", "environment variable name")),
        ({"directory": "/no/such/place"}, ("/no/such/place", "No such file")),
        ({"folder": "/proc/nothing"}, ("/proc/nothing", "cannot write")),
    ],
)
def test_an_error_at_the_start_is_one_line_with_the_value(
    tmp_path: Path, change: dict[str, object], words: tuple[str, ...]
) -> None:
    launch = Launch(**{"argv": ("/bin/true",), "folder": str(tmp_path), **change})
    with pytest.raises(LaunchError) as caught:
        LAUNCHER.start(launch)
    assert len(str(caught.value)) < 400
    assert [word for word in ("\n", *words) if word in str(caught.value)] == list(words)
