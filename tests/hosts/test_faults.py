"""Faults at random moments of a tune: no process is left, no finished trial is lost, and the best is found."""

import os
import random
import signal
import time
from collections.abc import Callable

import pytest

from flagcore.launchers import guard
from tests.books import books_balance, check_kept_once
from tests.cli.conftest import BEST
from tests.hosts.bed import Bed
from tests.hosts.conftest import Project, Tune

pytestmark = pytest.mark.slow

CLEAN_SECONDS = 15.0
"""From the return of a host to the end of the last orphaned process."""
LONGEST_FAULT_SECONDS = 20.0
FAULTS = [
    ("cut link", 4),
    ("killed agent", 3),
    ("killed flagcore", 4),
    ("power off", 4),
    ("full disk", 3),
]
Undo = Callable[[], None]


def begin(kind: str, tune: Tune, host: str, draw: random.Random) -> Undo:
    """Let something fail, and return what undoes it."""
    bed = tune.bed
    if kind == "cut link":
        bed.cut(host)
        return lambda: bed.restore(host)
    if kind == "killed agent":
        for agent in agents(bed, host):
            os.kill(agent, signal.SIGKILL)
    elif kind == "killed flagcore":
        tune.kill()
    elif kind == "power off":
        bed.poweroff(host)
        return lambda: bed.boot(host)
    elif kind == "full disk":
        bed.fill(host)
        return lambda: bed.unfill(host)
    return lambda: None


def agents(bed: Bed, host: str) -> list[int]:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if found := [pid for pid in bed.processes(host) if b"launchers.agent" in guard.read_proc(pid, "cmdline")]:
            return found
    return []


def all_clean(bed: Bed, seconds: float = CLEAN_SECONDS, *, everything: bool = False) -> list[tuple[str, bytes]]:
    """Return the orphaned processes, or all processes of trials, after at most some seconds."""
    deadline = time.monotonic() + seconds
    look = bed.processes if everything else bed.orphans
    while True:
        left = [(name, guard.read_proc(pid, "cmdline")) for name in bed.names for pid in look(name)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.2)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kind", "count"), FAULTS)
def test_faults_at_random_moments(kind: str, count: int, project: Project) -> None:
    bed, draw = project.bed, random.Random(kind)
    project.write_spec(sleeps=0.6, repeats=2)
    tune = Tune(project)
    for _ in range(count):
        hosts = tune.wait_for_a_trial()
        time.sleep(draw.uniform(0.0, 8.0))
        undo = begin(kind, tune, draw.choice(hosts), draw)
        time.sleep(draw.uniform(0.0, LONGEST_FAULT_SECONDS))
        undo()
        assert all_clean(bed) == []
    result = tune.finish()
    assert all_clean(bed, everything=True) == []
    assert result["best"]["candidate"].items() >= BEST.items(), tune.output()
    assert books_balance(result)
    check_kept_once(project.run_dir, result)
