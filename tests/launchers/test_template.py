"""Trials that are forked from a template, with real processes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flagcore.domain.launch import Exit, Launch
from flagcore.launchers import guard
from flagcore.launchers.local import LocalLauncher, LocalRunning
from tests.checks import TEST_MARK, ended, family, marked, within

pytestmark = [pytest.mark.slow, pytest.mark.spread]

PROGRAM = """
import os, sys
template = 0
def ready(arguments):
    global template
    template = os.getpid()
    {ready}
def main(arguments):
    exec(arguments[0], {**globals(), "arguments": arguments})
    return int(os.environ.get("CODE", 0))
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""
SEEN = """
import json, resource, threading
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
del os.environ["FLAGCORE_LAUNCH"], os.environ["MASTER_PORT"]
print(json.dumps({
    "status": {name: status[name] for name in ("SigBlk", "SigIgn", "SigCgt", "Threads", "Umask", "Cpus_allowed")},
    "environment": sorted(os.environ.items()), "folder": os.path.basename(os.getcwd()),
    "descriptors": sorted(os.listdir("/proc/self/fd")), "input": sys.stdin.read(), "arguments": len(arguments),
    "leads": os.getpid() == os.getsid(0) == os.getpgrp(), "adjusted": open("/proc/self/oom_score_adj").read(),
    "limits": [resource.getrlimit(each) for each in range(16)],
}))
"""
TREE = """
import signal, subprocess, time
subprocess.Popen(["setsid", "sleep", "60"])
subprocess.Popen(["sh", "-c", "(trap '' TERM HUP; setsid sleep 60) & nohup sleep 60 & (setsid sh -c 'sleep 60 & ') &"])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for _ in range(2):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
print("up", flush=True)
"""
TUNER = """
import sys
from flagcore.domain.launch import Launch
from flagcore.launchers.local import LAUNCHER
print("go", flush=True)
argv = (sys.executable, "-m", "warmed", sys.argv[2])
running = LAUNCHER.start(Launch(argv=argv, folder=sys.argv[1], warm=True))
print("started", flush=True)
running.wait(60)
print("ended", flush=True)
sys.stdin.read()
"""


class Warm:
    """A launcher, and a program that tells its template. All its processes have a mark in their environment."""

    def __init__(self, folder: Path) -> None:
        self.launcher, self.folder, self.count = LocalLauncher(), folder, 0
        self.environment = {TEST_MARK: uuid.uuid4().hex, "PYTHONPATH": str(folder)}
        self.program()

    def program(self, ready: str = "pass") -> None:
        """Write the program; `ready` is what it does when it is imported ahead."""
        (self.folder / "warmed").mkdir(exist_ok=True)
        (self.folder / "warmed" / "__main__.py").write_text(PROGRAM.replace("{ready}", ready))

    def start(self, code: str, *, warm: bool = True, limit: float = 30.0, **environment: str) -> LocalRunning:
        self.count += 1
        argv, folder_ = (sys.executable, "-m", "warmed", code), str(self.folder / str(self.count) / "trial")
        variables = {**self.environment, **environment}
        return self.launcher.start(
            Launch(argv=argv, folder=folder_, environment=variables, warm=warm, timeout_seconds=limit)
        )

    def run(self, code: str, *, warm: bool = True, limit: float = 30.0, **environment: str) -> Exit:
        return ended(self.start(code, warm=warm, limit=limit, **environment), 60)

    @property
    def printed(self) -> str:
        """What the last trial printed."""
        return (self.folder / str(self.count) / "trial" / "stdout.log").read_text()

    def template(self, **environment: str) -> int:
        """Run a trial, and return the process that it was forked from."""
        assert self.run("print(template)", **environment).code == 0
        return int(self.printed)

    def alive(self) -> set[int]:
        return marked(self.environment[TEST_MARK])


@pytest.fixture
def warm(tmp_path: Path) -> Iterator[Warm]:
    warm_runner = Warm(tmp_path)
    yield warm_runner
    warm_runner.launcher.close()
    for pid in warm_runner.alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_warm_trial_has_the_environment_of_a_cold_one(warm: Warm) -> None:
    seen: list[Any] = []
    for kind in (False, True, True):
        exit_record = warm.run(SEEN, warm=kind, X="ä")
        assert (exit_record.code, exit_record.ended_by, exit_record.warm) == (0, None, kind)
        seen.append(json.loads(warm.printed))
    assert seen[0] == seen[1] == seen[2]
    assert seen[0]["descriptors"] == ["0", "1", "2", "3"]  # 3: the listing


def test_one_template_forks_all_trials_and_sleeps_between_them(warm: Warm) -> None:
    first = warm.template()
    assert warm.template() == first
    assert warm.alive() == {first}

    def stat() -> list[bytes]:
        return guard.read_proc(first, "stat").rpartition(b")")[2].split()

    assert within(20, lambda: stat()[0] == b"S")  # it may not have reached its wait yet
    before_count = stat()[11:13]
    time.sleep(0.3)
    assert stat()[11:13] == before_count
    warm.launcher.close()
    assert warm.alive() == set()


def test_other_variables_or_cores_need_another_template(warm: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
    first = warm.template(MASTER_PORT="1234")
    assert warm.template(MASTER_PORT="1235") == first
    second_hub = warm.template(OMP_NUM_THREADS="7")
    assert second_hub != first
    assert warm.alive() == {second_hub}
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        assert warm.run("print(template, len(os.sched_getaffinity(0)))", OMP_NUM_THREADS="7").code == 0
    finally:
        os.sched_setaffinity(0, cores)
    third, count = map(int, warm.printed.split())
    assert (third != second_hub, count) == (True, 1)


@pytest.mark.parametrize(
    ("code", "by", "status"),
    [
        ("raise ValueError", None, 1),
        ("os.kill(os.getpid(), 11)", None, -11),
        ("os.environ['CODE'] = '5'", None, 5),
        (TREE + "time.sleep(60)", "timeout", -9),
    ],
)
def test_a_template_is_not_used_after_a_failed_trial(warm: Warm, code: str, by: str | None, status: int) -> None:
    first = warm.template()
    exit_record = warm.run(code, limit=1.0 if by else 30.0)
    assert (exit_record.ended_by, exit_record.code) == (by, status)
    assert warm.alive() == set()
    assert warm.template() != first


def test_processes_left_by_a_trial_end_before_the_next_one(warm: Warm) -> None:
    first = warm.template()
    exit_record = warm.run(TREE.replace("signal.signal(signal.SIGTERM, signal.SIG_IGN)", ""))
    assert (exit_record.code, exit_record.ended_by) == (0, None)
    assert warm.alive() == {first}


def test_a_stopped_trial_keeps_its_template(warm: Warm) -> None:
    first = warm.template()
    trial = warm.start(TREE + "time.sleep(60)")
    assert within(20, lambda: "up" in warm.printed)
    assert trial.stop().ended_by == "request"
    assert warm.alive() == {first}
    assert warm.template() == first


@pytest.mark.parametrize("victim", ["guard", "template"])
def test_a_killed_guard_or_template_leaves_no_process(warm: Warm, victim: str) -> None:
    template = warm.template()
    trial = warm.start(TREE + "time.sleep(60)")
    assert within(20, lambda: "up" in warm.printed)
    os.kill(family(trial.pid)[0] if victim == "guard" else template, signal.SIGKILL)
    exit_record = ended(trial, 20)
    assert (exit_record.code, exit_record.ended_by) == (-9, "guard" if victim == "guard" else "request")
    assert warm.alive() == set()
    assert warm.template() != template


@pytest.mark.parametrize("moment", ["go", "started", "ended"])
def test_nothing_outlives_a_killed_tuner(warm: Warm, moment: str) -> None:
    if moment == "go":
        warm.program("import time; time.sleep(60)")
    code = "pass" if moment == "ended" else TREE + "time.sleep(60)"
    argv, pipe = [sys.executable, "-c", TUNER, str(warm.folder / "1" / "trial"), code], subprocess.PIPE
    with subprocess.Popen(argv, env={**os.environ, **warm.environment}, stdin=pipe, stdout=pipe, text=True) as tuner:
        assert tuner.stdout is not None
        while tuner.stdout.readline().strip() != moment:
            pass
        if moment == "go":
            time.sleep(0.5)
        tuner.kill()
    assert within(3, lambda: not warm.alive())


@pytest.mark.parametrize(
    "ready",
    [
        "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        "global file; file = open('/dev/zero')",
        "os._exit(1)",
    ],
)
def test_a_program_that_is_not_fit_to_be_forked_starts_cold(warm: Warm, ready: str) -> None:
    warm.program(ready)
    for _ in range(2):
        exit_record = warm.run("print(template)")
        assert (exit_record.code, exit_record.warm, warm.printed) == (0, False, "0\n")
        assert warm.alive() == set()


def test_the_template_starts_only_python_packages_and_one_trial_at_a_time(warm: Warm) -> None:
    first = warm.template()
    trial = warm.start("import time; time.sleep(60)")
    assert not warm.run("pass").warm
    assert trial.stop().warm
    launch = Launch(argv=("/bin/echo", "-m", "warmed"), folder=str(warm.folder / "echo"), warm=True)
    exit_record = ended(warm.launcher.start(launch))
    assert (exit_record.code, exit_record.warm) == (0, False)
    assert warm.template() == first


def test_a_trial_that_cannot_start_is_one_error(warm: Warm) -> None:
    warm.template()
    launch = Launch(
        argv=(sys.executable, "-m", "warmed", "pass"), folder=str(warm.folder / "a"), directory="/no", warm=True
    )
    with pytest.raises(Exception, match="cannot enter the directory /no"):
        warm.launcher.start(launch)
